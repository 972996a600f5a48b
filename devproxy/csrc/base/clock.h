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

// What the calling thread has used of a processor.
inline uint64_t thread_cpu_ns() {
  timespec used;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<uint64_t>(used.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(used.tv_nsec);
}

inline uint64_t now_us() { return now_ns() / 1000; }

}  // namespace devproxy
