// SPDX-License-Identifier: Apache-2.0
// A launch as the splicer sees it: what it reads and writes, and what else decides its result.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "devproxy/hal/host_module/include/devproxy_executor.h"

namespace devproxy::hal::splice {

using Access = devproxy_executor_access;

// A flag of an access that the splicer adds: it is written, and neither stable nor older than the last such launch.
inline constexpr uint32_t kYoung = 1u << 16;

struct SpliceLaunch {
  std::string_view name;  // of the operator
  const uint8_t* params = nullptr;
  uint64_t params_bytes = 0;
  uint64_t position = 0;         // of the command; a worker may be far behind what is allocated
  uint64_t digest = 0;           // of what decides the result and is neither in params nor in memory
  bool repeatable = false;       // the same params and contents give the same result, and there is no other effect
  std::vector<Access> accesses;  // everything that it may write is there
};

}  // namespace devproxy::hal::splice
