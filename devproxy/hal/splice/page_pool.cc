// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/splice/page_pool.h"

#include <iterator>

namespace devproxy::hal::splice {

StatusOr<uint64_t> PagePool::take(uint64_t bytes) {
  const uint64_t pages = bytes / page_;
  for (auto it = holes_.begin(); it != holes_.end(); ++it) {
    if (it->second < pages) continue;
    const uint64_t first = it->first, left = it->second - pages;
    holes_.erase(it);
    if (left) holes_[first + pages] = left;
    return first * page_;
  }
  const uint64_t first = sharers_.size();
  if (Status s = memory_.grow_pool((first + pages) * page_); !s.ok()) return s;
  sharers_.resize(first + pages, 0);
  return first * page_;
}

void PagePool::share(uint64_t at, uint64_t bytes, uint64_t sharer) {
  for (uint64_t page = at / page_; page < (at + bytes) / page_; page++) {
    if (sharers_[page] & sharer) continue;
    (sharers_[page] ? saved_pages_ : used_pages_)++;
    sharers_[page] |= sharer;
  }
}

void PagePool::leave(uint64_t at, uint64_t bytes, uint64_t sharer) {
  const uint64_t end = (at + bytes) / page_;
  for (uint64_t page = at / page_; page < end; page++) {
    if (!(sharers_[page] & sharer)) continue;
    sharers_[page] &= ~sharer;
    (sharers_[page] ? saved_pages_ : used_pages_)--;
  }
  for (uint64_t page = at / page_; page < end;) {
    uint64_t last = page;
    while (last < end && sharers_[last] == 0) last++;
    if (last != page) free(page, last - page);
    page = last + 1;
  }
}

uint64_t PagePool::sharers(uint64_t at, uint64_t bytes) const {
  uint64_t all = 0;
  for (uint64_t page = at / page_; page < (at + bytes) / page_; page++) all |= sharers_[page];
  return all;
}

uint64_t PagePool::common_sharers(uint64_t at, uint64_t bytes) const {
  uint64_t all = ~uint64_t{0};
  for (uint64_t page = at / page_; page < (at + bytes) / page_; page++) all &= sharers_[page];
  return all;
}

// Precondition: the run is not free yet, and nobody has it mapped.
void PagePool::free(uint64_t first, uint64_t pages) {
  memory_.empty_pool(first * page_, pages * page_);
  auto next = holes_.lower_bound(first);
  if (next != holes_.end() && next->first == first + pages) {
    pages += next->second;
    next = holes_.erase(next);
  }
  if (next != holes_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == first) {
      before->second += pages;
      return;
    }
  }
  holes_[first] = pages;
}

}  // namespace devproxy::hal::splice
