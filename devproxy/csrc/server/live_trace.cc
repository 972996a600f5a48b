// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/live_trace.h"

#include <algorithm>

namespace devproxy::server {

void LiveTrace::peak(uint64_t live) {
  falling_ = true;
  last_peak_ = high_;
  low_ = live;
}

void LiveTrace::valley(uint64_t time_us) {
  valleys_[count_++ % kValleys] = {low_, time_us};
  falling_ = false;
  high_ = low_;
  learn();
}

void LiveTrace::learn() {
  const size_t n = std::min(count_, kValleys);
  uint64_t least = UINT64_MAX;
  for (size_t i = 0; i < std::min<size_t>(n, 16); i++) least = std::min(least, ago(i).bytes);
  height_ = std::max(kFloorBytes, last_peak_ > least ? (last_peak_ - least) / 8 : 0);

  // The lowest value that came at least twice and is not overdue by a period. What is overdue belongs to an earlier
  // phase of the job (before the optimizer had its state, an evaluation): it and what lies before it are put aside.
  size_t looked = n;
  while (looked >= 2) {
    size_t lowest = 0;
    for (size_t i = 1; i < looked; i++)
      if (ago(i).bytes < ago(lowest).bytes) lowest = i;
    const uint64_t bytes = ago(lowest).bytes, like = bytes + std::max(bytes / 100, kFloorBytes);
    size_t latest = looked, before = looked;
    for (size_t i = 0; i < looked && before == looked; i++) {
      if (ago(i).bytes > like) continue;
      (latest == looked ? latest : before) = i;
    }
    if (before != looked && latest <= 2 * (before - latest)) {
      trough_ = bytes;
      period_us_ = ago(latest).time_us - ago(before).time_us;
      return;
    }
    looked = latest;  // only what came after it
  }
  trough_ = period_us_ = 0;
}

}  // namespace devproxy::server
