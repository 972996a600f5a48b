// SPDX-License-Identifier: Apache-2.0
// What the job has said of a managed allocation. Nothing moves for it; the job may ask what it said.
#pragma once

#include <bitset>
#include <cstdint>
#include <map>
#include <mutex>

#include "devproxy/csrc/client/thread_state.h"

namespace devproxy::client {

// A CUmemLocation; type 0 is none.
struct Location {
  int32_t type = 0, id = 0;
  bool operator==(const Location&) const = default;
};

struct Advice {
  bool read_mostly = false;
  Location preferred, prefetched;
  std::bitset<kMaxDevices + 1> accessed_by;  // a bit for each device, and kCpuBit
  static constexpr int kCpuBit = kMaxDevices;
  bool operator==(const Advice&) const = default;
};

// By page, as runs of pages of which the same was said. Any thread; the lock is a leaf.
class AdviceMap {
 public:
  AdviceMap(uint64_t begin, uint64_t end) : end_(end) { runs_[begin] = {}; }

  // Precondition of both: whole pages inside of the allocation, and at least one.
  template <class Change>  // change(Advice&)
  void change(uint64_t begin, uint64_t end, Change change) {
    const std::lock_guard lock(mu_);
    cut(begin);
    cut(end);
    for (auto it = runs_.find(begin); it != runs_.end() && it->first < end; ++it) change(it->second);
    for (auto it = runs_.begin(), next = std::next(it); next != runs_.end(); next = std::next(it))
      if (it->second == next->second)
        runs_.erase(next);
      else
        it = next;
  }

  // What holds for every page: a location that differs is none.
  Advice of(uint64_t begin, uint64_t end) {
    const std::lock_guard lock(mu_);
    auto it = std::prev(runs_.upper_bound(begin));
    Advice all = it->second;
    while (++it != runs_.end() && it->first < end) {
      const Advice& a = it->second;
      all.read_mostly = all.read_mostly && a.read_mostly;
      all.accessed_by &= a.accessed_by;
      if (all.preferred != a.preferred) all.preferred = {};
      if (all.prefetched != a.prefetched) all.prefetched = {};
    }
    return all;
  }

 private:
  // A run begins at `at`.
  void cut(uint64_t at) {
    if (at < end_) runs_.emplace(at, std::prev(runs_.upper_bound(at))->second);
  }

  std::mutex mu_;
  const uint64_t end_;
  std::map<uint64_t, Advice> runs_;  // by their first page; never empty
};

}  // namespace devproxy::client
