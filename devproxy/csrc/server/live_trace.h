// SPDX-License-Identifier: Apache-2.0
// Learns when a job holds the least device memory, from the sizes after each allocation and release. Pure: the clock
// comes in with the calls. One thread: the dispatch thread.
//
// A training step is a wave: activations rise through the forward, fall through the backward while gradients appear,
// the optimizer's temporaries rise and fall, zero_grad drops the gradients. Every wave's lowest points come again in
// the next step. So: keep the last valleys (a valley ends when live bytes have risen by an eighth of the wave's
// height, so that the thousand small ups and downs of a step are none), and believe the lowest value that came twice
// and is not overdue. Only the phase decides, not the number of messages or the time of a step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace devproxy::server {

class LiveTrace {
 public:
  static constexpr size_t kValleys = 64;
  static constexpr uint64_t kFloorBytes = 64u << 10;  // smaller waves are noise

  // Live bytes after an allocation or a release. A few comparisons; clock() is asked at a valley only.
  template <class Clock>
  void changed(uint64_t live, Clock clock) {
    if (falling_) {
      if (live < low_) low_ = live;
      if (live > low_ + height_) valley(clock());
    } else if (live + height_ < high_) {
      peak(live);
    }
    if (live > high_) high_ = live;
  }

  // The least live bytes of the job's rhythm; 0: there is a wave, but nothing has come again; UINT64_MAX: there is no
  // wave, now is as good as ever.
  uint64_t trough_bytes() const { return trough_; }
  // Between the last two visits to the trough; 0: not known.
  uint64_t period_us() const { return period_us_; }
  // Is this a point of least live bytes?
  bool at_trough(uint64_t live) const {
    return trough_ == UINT64_MAX || (trough_ != 0 && live <= trough_ + trough_ / 200 + kFloorBytes);
  }

 private:
  struct Valley {
    uint64_t bytes = 0, time_us = 0;
  };
  void valley(uint64_t time_us);
  void peak(uint64_t live);
  void learn();
  const Valley& ago(size_t i) const { return valleys_[(count_ - 1 - i) % kValleys]; }  // 0: the latest

  bool falling_ = false;
  uint64_t low_ = 0, high_ = 0;  // since the last peak, valley
  uint64_t height_ = kFloorBytes;
  uint64_t last_peak_ = 0;
  std::array<Valley, kValleys> valleys_{};
  size_t count_ = 0;
  uint64_t trough_ = UINT64_MAX, period_us_ = 0;
};

}  // namespace devproxy::server
