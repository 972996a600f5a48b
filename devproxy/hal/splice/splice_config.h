// SPDX-License-Identifier: Apache-2.0
// When equal work of ranks is squashed, and how long they wait for one another.
#pragma once

#include <cstdint>
#include <string>

#include "devproxy/csrc/base/status.h"

namespace devproxy::hal::splice {

struct SpliceConfig {
  bool on = true;
  bool guard = false;  // a launch that writes what it has not said is a fault; for tests
  uint64_t least_bytes = 64 << 10, least_ns = 100'000;  // of a launch that is worth a meeting
  bool thrifty = true;                                  // meetings that cost more than they save end
  uint64_t account_ns = 2'000'000'000;                  // windows of Account
  // For a rank that does not come, and for it while the GPU is idle.
  uint64_t patience_ns = 1'000'000'000, idle_patience_ns = 30'000'000;

  // words, with commas between them: on, off, and for tests guard, eager (also where it does not pay) and patient (it
  // waits seconds for a slow rank). kInvalidValue names another word.
  static StatusOr<SpliceConfig> parse(const std::string& words);
};

}  // namespace devproxy::hal::splice
