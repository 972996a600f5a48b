// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/memory_mirror.h"

#include <algorithm>
#include <iterator>

#include "devproxy/csrc/wire/segment.h"

namespace devproxy::server {

// A freed range of which [begin, end) is taken over: what is left of it stays, at its position. The one behind.
MemoryMirror::Ranges::iterator MemoryMirror::reuse(Ranges::iterator it, uint64_t begin, uint64_t end,
                                                   uint64_t* crossed_before) {
  const auto [addr, old] = *it;
  const uint64_t old_end = addr + old.bytes;
  it = ranges_.erase(it);
  freed_count_--;
  if (addr >= begin && old_end <= end) {
    *crossed_before = std::max(*crossed_before, old.crossed_before);
    return it;
  }
  *crossed_before = std::max(*crossed_before, old.freed_at);
  const auto rest = [&](uint64_t from, uint64_t to) {
    ranges_.emplace_hint(it, from, Allocation{to - from, old.freed_at, old.flags, old.freed_at});
    freed_count_++;
  };
  if (addr < begin) rest(addr, begin);  // freed_ has it
  if (old_end > end) {
    rest(end, old_end);
    freed_.insert(std::upper_bound(freed_.begin(), freed_.end(), old.freed_at,
                                   [](uint64_t position, const Freed& f) { return position < f.position; }),
                  {old.freed_at, end});
  }
  return it;
}

MemoryMirror::Answer MemoryMirror::add(uint64_t addr, uint64_t bytes, uint32_t flags, std::vector<Range>* reused,
                                       uint64_t crossed_before) {
  if (bytes == 0 || addr < begin_ || addr >= end_ || bytes > end_ - addr) return Answer::kOutside;
  const uint64_t end = addr + bytes;
  auto it = ranges_.lower_bound(addr);
  if (it != ranges_.begin() && std::prev(it)->first + std::prev(it)->second.bytes > addr) --it;
  for (auto look = it; look != ranges_.end() && look->first < end; ++look)
    if (!look->second.freed_at) return Answer::kOverlaps;
  while (it != ranges_.end() && it->first < end) {
    const uint64_t from = std::max(addr, it->first), to = std::min(end, it->first + it->second.bytes);
    reused->push_back({from, to - from});
    it = reuse(it, addr, end, &crossed_before);
  }
  ranges_.emplace_hint(it, addr, Allocation{bytes, 0, flags, crossed_before});
  live_bytes_ += bytes;
  if (flags & kStableFlag) stable_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, live_bytes_);
  return Answer::kOk;
}

MemoryMirror::Answer MemoryMirror::remove(uint64_t addr, uint64_t position, bool keep, Range* freed) {
  const auto it = ranges_.find(addr);
  if (it == ranges_.end() || it->second.freed_at) return Answer::kUnknown;
  *freed = {addr, it->second.bytes};
  live_bytes_ -= it->second.bytes;
  if (it->second.flags & kStableFlag) stable_bytes_ -= it->second.bytes;
  if (keep) {
    it->second.freed_at = position;
    freed_count_++;
    freed_.push_back({position, addr});
  } else {
    ranges_.erase(it);
  }
  return Answer::kOk;
}

void MemoryMirror::retire(uint64_t oldest_pending, std::vector<Range>* forgotten) {
  for (; !freed_.empty() && freed_.front().position <= oldest_pending; freed_.pop_front()) {
    const auto it = ranges_.find(freed_.front().addr);
    if (it == ranges_.end() || it->second.freed_at != freed_.front().position) continue;  // reused since
    forget(it, forgotten);
  }
}

void MemoryMirror::forget(Ranges::iterator freed, std::vector<Range>* forgotten) {
  forgotten->push_back({freed->first, freed->second.bytes});
  ranges_.erase(freed);
  freed_count_--;
}

bool MemoryMirror::contains(uint64_t addr, uint64_t bytes, uint64_t position) const {
  auto it = ranges_.upper_bound(addr);
  if (it == ranges_.begin()) return false;
  --it;
  const uint64_t offset = addr - it->first;
  if (offset > it->second.bytes) return false;
  for (uint64_t left = bytes, at = addr;; ++it) {
    const Allocation& a = it->second;
    if (a.freed_at && a.freed_at <= position) return false;
    const uint64_t here = it->first + a.bytes - at;
    if (left <= here) return true;
    const auto next = std::next(it);
    if (next == ranges_.end() || next->first != it->first + a.bytes) return false;
    const Allocation& b = next->second;
    if (!(a.flags & b.flags & kPieceFlag) && position >= std::min(a.crossed_before, b.crossed_before)) return false;
    left -= here;
    at = next->first;
  }
}

uint64_t MemoryMirror::first_gap(uint64_t lo, uint64_t hi, uint64_t bytes, uint64_t align) const {
  auto up = [align](uint64_t at) { return (at + align - 1) & ~(align - 1); };
  uint64_t at = up(lo);
  auto it = ranges_.lower_bound(lo);
  if (it != ranges_.begin()) at = std::max(at, up(std::prev(it)->first + std::prev(it)->second.bytes));
  for (; it != ranges_.end() && it->first < hi; ++it) {
    if (it->first >= at && it->first - at >= bytes) break;
    at = std::max(at, up(it->first + it->second.bytes));
  }
  return at <= hi && hi - at >= bytes ? at : 0;
}

}  // namespace devproxy::server
