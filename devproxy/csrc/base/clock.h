// SPDX-License-Identifier: Apache-2.0
// The time since the machine started. Times of two processes of one machine can be compared.
#pragma once

#include <time.h>

#include <cstdint>

namespace devproxy {

inline uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// The time of day, for two processes that may be in different time namespaces: each sees this clock alike.
inline uint64_t day_ns() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// One moment on both clocks.
struct Moment {
  uint64_t now, day;
};

// The two are read one behind the other, and the thread may lose its processor between: of some readings, the closest.
inline Moment moment() {
  Moment best{};
  for (uint64_t gap = UINT64_MAX, tries = 0; gap > 1000 && tries < 5; ++tries) {
    const uint64_t before = now_ns(), day = day_ns(), after = now_ns();
    if (after - before >= gap) continue;
    gap = after - before;
    best = {before + gap / 2, day};
  }
  return best;
}

// What the calling thread has used of a processor.
inline uint64_t thread_cpu_ns() {
  timespec used;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<uint64_t>(used.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(used.tv_nsec);
}

inline uint64_t now_us() { return now_ns() / 1000; }

}  // namespace devproxy
