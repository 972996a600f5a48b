// SPDX-License-Identifier: Apache-2.0
// A set of disjoint address ranges, neighbours joined. Pure.
#pragma once

#include <cstdint>
#include <map>

namespace devproxy::hal::soft {

class RangeSet {
 public:
  // Precondition: begin < end.
  void insert(uint64_t begin, uint64_t end) {
    auto next = ranges_.upper_bound(begin);
    if (next != ranges_.begin()) {
      auto prev = std::prev(next);
      if (prev->second >= begin) {  // touches or overlaps: grow that one
        if (prev->second >= end) return;
        bytes_ += end - prev->second;
        prev->second = end;
        absorb_from(prev);
        return;
      }
    }
    auto it = ranges_.emplace_hint(next, begin, end);
    bytes_ += end - begin;
    absorb_from(it);
  }

  void erase(uint64_t begin, uint64_t end) {
    auto it = ranges_.upper_bound(begin);
    if (it != ranges_.begin()) --it;
    while (it != ranges_.end() && it->first < end) {
      const uint64_t b = it->first, e = it->second;
      if (e <= begin) {
        ++it;
        continue;
      }
      it = ranges_.erase(it);
      bytes_ -= e - b;
      if (b < begin) bytes_ += begin - b, ranges_.emplace(b, begin);
      if (e > end) bytes_ += e - end, it = ranges_.emplace(end, e).first;
    }
  }

  uint64_t bytes() const { return bytes_; }
  void clear() { ranges_.clear(), bytes_ = 0; }
  auto begin() const { return ranges_.begin(); }
  auto end() const { return ranges_.end(); }

 private:
  void absorb_from(std::map<uint64_t, uint64_t>::iterator it) {
    auto next = std::next(it);
    while (next != ranges_.end() && next->first <= it->second) {
      // bytes_ counted the grown range and this one: take the overlap out again.
      const uint64_t overlap_end = next->second < it->second ? next->second : it->second;
      bytes_ -= overlap_end - next->first;
      if (next->second > it->second) it->second = next->second;
      next = ranges_.erase(next);
    }
  }

  std::map<uint64_t, uint64_t> ranges_;  // begin -> end
  uint64_t bytes_ = 0;
};

}  // namespace devproxy::hal::soft
