// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>

namespace devproxy::aten {

// How long somebody waits for an operation of other ranks, for a time-out. Not in it: the time in which devproxy holds the job
// (a move goes on beside the job's processes), and that in which the process did not run (a job that is suspended for a night
// must not time out in the morning).
class Waited {
 public:
  // Ask every second, or more often. held: Comm::held()
  std::chrono::steady_clock::duration so_far(bool held) {
    const auto now = std::chrono::steady_clock::now();
    if (!held) sum_ += std::min<std::chrono::steady_clock::duration>(now - last_, kLongestTurn);
    last_ = now;
    return sum_;
  }

 private:
  static constexpr std::chrono::seconds kLongestTurn{1};
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::duration sum_{};
};

}  // namespace devproxy::aten
