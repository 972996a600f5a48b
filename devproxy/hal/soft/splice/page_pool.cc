// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/splice/page_pool.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <iterator>

namespace devproxy::hal::soft {

StatusOr<std::unique_ptr<PagePool>> PagePool::open() {
  const int fd = memfd_create("devproxy-spliced-memory", MFD_CLOEXEC);
  if (fd < 0) return Status::from_errno(kOutOfMemory, "making the memory that ranks share");
  return std::unique_ptr<PagePool>(new PagePool(fd));
}

PagePool::~PagePool() { close(fd_); }

StatusOr<uint64_t> PagePool::take(uint64_t bytes) {
  const uint64_t pages = bytes / kPoolPage;
  for (auto it = holes_.begin(); it != holes_.end(); ++it) {
    if (it->second < pages) continue;
    const uint64_t first = it->first, left = it->second - pages;
    holes_.erase(it);
    if (left) holes_[first + pages] = left;
    return first * kPoolPage;
  }
  const uint64_t first = sharers_.size();
  if (ftruncate(fd_, static_cast<off_t>((first + pages) * kPoolPage)) != 0)
    return Status::from_errno(kOutOfMemory, "growing the memory that ranks share");
  sharers_.resize(first + pages, 0);
  return first * kPoolPage;
}

void PagePool::share(uint64_t at, uint64_t bytes, uint64_t sharer) {
  for (uint64_t page = at / kPoolPage; page < (at + bytes) / kPoolPage; page++) {
    if (sharers_[page] & sharer) continue;
    (sharers_[page] ? saved_pages_ : used_pages_)++;
    sharers_[page] |= sharer;
  }
}

void PagePool::leave(uint64_t at, uint64_t bytes, uint64_t sharer) {
  const uint64_t end = (at + bytes) / kPoolPage;
  for (uint64_t page = at / kPoolPage; page < end; page++) {
    if (!(sharers_[page] & sharer)) continue;
    sharers_[page] &= ~sharer;
    (sharers_[page] ? saved_pages_ : used_pages_)--;
  }
  for (uint64_t page = at / kPoolPage; page < end;) {
    uint64_t last = page;
    while (last < end && sharers_[last] == 0) last++;
    if (last != page) free(page, last - page);
    page = last + 1;
  }
}

uint64_t PagePool::sharers(uint64_t at, uint64_t bytes) const {
  uint64_t all = 0;
  for (uint64_t page = at / kPoolPage; page < (at + bytes) / kPoolPage; page++) all |= sharers_[page];
  return all;
}

uint64_t PagePool::common_sharers(uint64_t at, uint64_t bytes) const {
  uint64_t all = ~uint64_t{0};
  for (uint64_t page = at / kPoolPage; page < (at + bytes) / kPoolPage; page++) all &= sharers_[page];
  return all;
}

// Precondition: the run is not free yet, and nobody has it mapped.
void PagePool::free(uint64_t first, uint64_t pages) {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first * kPoolPage),
            static_cast<off_t>(pages * kPoolPage));
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

}  // namespace devproxy::hal::soft
