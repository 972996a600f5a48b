// SPDX-License-Identifier: Apache-2.0
// A process by number and start time, so that a reused number is not taken for the dead process.
#pragma once

#include <cstdint>

namespace devproxy::server {

struct ProcessId {
  uint32_t pid = 0;  // 0: nobody
  uint32_t pad = 0;
  uint64_t start_time = 0;  // /proc/<pid>/stat field 22, clock ticks after boot
  bool operator==(const ProcessId&) const = default;
};

ProcessId this_process();
bool is_alive(const ProcessId& id);

}  // namespace devproxy::server
