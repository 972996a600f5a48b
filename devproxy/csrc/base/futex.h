// SPDX-License-Identifier: Apache-2.0
// futex(2) on words in shared memory (not FUTEX_PRIVATE: two processes share them).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "devproxy/csrc/base/clock.h"

namespace devproxy {

// Sleeps while *word == expected, at most timeout_us; spurious returns are allowed, callers re-check.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, uint64_t timeout_us) {
  timespec ts{static_cast<time_t>(timeout_us / 1'000'000), static_cast<long>(timeout_us % 1'000'000 * 1000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, expected, &ts, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>* word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, count, nullptr, nullptr, 0);
}

}  // namespace devproxy
