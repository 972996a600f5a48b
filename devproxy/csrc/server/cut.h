// SPDX-License-Identifier: Apache-2.0
// One cut of a server's clients, from the request until all of them are parked or it is given up. Pure. Which client is
// how far is the clients' own (Gate::phase()).
#pragma once

#include <algorithm>
#include <cstdint>

namespace devproxy::server {

class Cut {
 public:
  // wait_us: for moments of least memory. patience_us: without progress after that.
  Cut(uint64_t now_us, uint64_t wait_us, uint64_t patience_us)
      : until_us_(now_us + wait_us), patience_us_(patience_us), moved_us_(until_us_) {}

  uint64_t until_us() const { return until_us_; }

  struct Look {
    uint64_t now_us = 0;
    bool all_parked = false;
    uint64_t progress = 0;            // moves while some client comes nearer to parking
    bool host_functions_out = false;  // of a client that is not parked
  };
  enum class Verdict : uint8_t {
    kWait,
    kParked,
    kNoProgress,  // something does not end
    kOverlap,     // host functions of which one is always out
  };
  Verdict on(const Look& look) {
    if (look.all_parked) return Verdict::kParked;
    if (look.now_us < until_us_) return Verdict::kWait;
    if (look.progress != progress_) moved_us_ = std::max(moved_us_, look.now_us);
    progress_ = look.progress;
    if (look.host_functions_out && look.now_us > until_us_ + kOverlapPatience * patience_us_) return Verdict::kOverlap;
    return look.now_us > moved_us_ + patience_us_ ? Verdict::kNoProgress : Verdict::kWait;
  }

 private:
  static constexpr uint64_t kOverlapPatience = 20;
  uint64_t until_us_, patience_us_;
  uint64_t progress_ = 0, moved_us_;
};

}  // namespace devproxy::server
