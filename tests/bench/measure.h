// SPDX-License-Identifier: Apache-2.0
// Timing of short things: the time-stamp counter, calibrated against the clock, less its own cost.
#pragma once

#include <time.h>
#include <x86intrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace bench {

inline uint64_t now_ns() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<uint64_t>(ts.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(ts.tv_nsec);
}

// lfence: what is measured has started after, and ended before, the counter is read.
inline uint64_t ticks() {
  _mm_lfence();
  const uint64_t t = __rdtsc();
  _mm_lfence();
  return t;
}

inline double ns_per_tick() {
  static const double value = [] {
    const uint64_t a = now_ns(), ta = __rdtsc();
    while (now_ns() - a < 50'000'000) {}
    return static_cast<double>(now_ns() - a) / static_cast<double>(__rdtsc() - ta);
  }();
  return value;
}

struct Quantiles {
  double median = 0, p99 = 0;
};

inline Quantiles quantiles(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values[values.size() * 99 / 100]};
}

inline double timer_ns() {
  static const double value = [] {
    std::vector<double> v;
    for (int i = 0; i < 20'000; ++i) {
      const uint64_t a = ticks(), b = ticks();
      v.push_back(static_cast<double>(b - a) * ns_per_tick());
    }
    return quantiles(std::move(v)).median;
  }();
  return value;
}

// Nanoseconds of one call of f, the timer's own cost taken off.
template <class F>
double time_ns(F&& f) {
  const uint64_t a = ticks();
  f();
  const uint64_t b = ticks();
  return std::max(0.0, static_cast<double>(b - a) * ns_per_tick() - timer_ns());
}

// The same per call, over n calls in a row: virtual machines' counters step by 10 ns and more, which a single call of a
// few tens of nanoseconds cannot be told from.
template <class F>
double time_each_ns(int n, F&& f) {
  return time_ns([&] {
           for (int i = 0; i < n; ++i) f();
         }) /
         n;
}

// One flat JSON object, printed at the end.
class Json {
 public:
  void put(const char* key, double value) {
    char text[128];
    snprintf(text, sizeof text, "%s\"%s\": %.6g", text_.empty() ? "" : ", ", key, value);
    text_ += text;
  }
  void put(const std::string& key, const Quantiles& q) {
    put((key + "_median").c_str(), q.median);
    put((key + "_p99").c_str(), q.p99);
  }
  void print() const { printf("{%s}\n", text_.c_str()); }

 private:
  std::string text_;
};

}  // namespace bench
