// SPDX-License-Identifier: Apache-2.0
// Whether splicing pays: its CPU time against the time of the kernels that it saves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>

namespace devproxy::hal::splice {

// Any thread may call it. Its lock is a leaf.
class Account {
 public:
  static constexpr uint64_t kSampled = 17;  // one launch in so many is measured, and counts for all of them

  // A window ends after window_ns of kernels and splicing. It takes kWindows bad ones in a row: learning costs first and pays
  // later.
  explicit Account(uint64_t window_ns) : window_ns_(window_ns) {}

  // Of one measured launch. Returns true once: when splicing has turned out not to pay.
  bool spend(uint64_t own_ns, uint64_t kernel_ns) {
    std::lock_guard lock(mu_);
    own_ns_ += own_ns * kSampled;
    kernels_ns_ += kernel_ns * kSampled;
    if (++samples_ < kLeastSamples || own_ns_ + kernels_ns_ < window_ns_) return false;
    const bool pays = own_ns_ <= saved_ns_ + kernels_ns_ / kMostOverhead;
    bad_ = pays ? 0 : bad_ + 1;
    last_ = {own_ns_, kernels_ns_, saved_ns_};
    own_ns_ = kernels_ns_ = saved_ns_ = samples_ = 0;
    return bad_ == kWindows;
  }
  // A kernel that would have taken kernel_ns did not run.
  void save(uint64_t kernel_ns) {
    std::lock_guard lock(mu_);
    saved_ns_ += kernel_ns;
  }
  void begin_anew() {
    std::lock_guard lock(mu_);
    own_ns_ = kernels_ns_ = saved_ns_ = samples_ = bad_ = 0;
  }
  struct Window {
    uint64_t own_ns = 0, kernels_ns = 0, saved_ns = 0;
  };
  Window last() const {
    std::lock_guard lock(mu_);
    return last_;
  }

 private:
  static constexpr uint64_t kMostOverhead = 20;  // one part in so many of the kernels that ran: 5 %
  static constexpr uint64_t kWindows = 3, kLeastSamples = 32;

  const uint64_t window_ns_;
  mutable std::mutex mu_;
  uint64_t own_ns_ = 0, kernels_ns_ = 0, saved_ns_ = 0, samples_ = 0, bad_ = 0;
  Window last_;
};

}  // namespace devproxy::hal::splice
