// SPDX-License-Identifier: Apache-2.0
// Variables of modules whose address the job was told: device memory that no allocator of ours placed.
//
// On the software GPU they lie at the top of the device range. A real driver puts them where it likes, so that address
// may belong to something else in this process; then nobody could tell the two apart in a copy, and the variable is
// refused. An address that is free is reserved, PROT_NONE, so that it stays so and a touch of it faults.
//
// Threads: any. Locks: one leaf of its own.
#pragma once

#include <atomic>
#include <cstdint>

namespace devproxy::client {

struct Variable {
  uint64_t addr = 0, bytes = 0;
  int device = -1;
  uint64_t module = 0;
  uint64_t id = 0;  // unique in the process, as an allocation's
};

// kNotSupported, after a line that says why, where the address is this process's own. in_range: of the device range.
[[nodiscard]] int32_t add_variable(int device, uint64_t module, uint64_t addr, uint64_t bytes, bool in_range);
void drop_variables(uint64_t module);
// The variable around addr.
bool find_variable(uint64_t addr, Variable* out);

namespace detail {
extern std::atomic<uint32_t> g_variables;
}
// Cheap: for the path of every copy.
inline bool any_variables() { return detail::g_variables.load(std::memory_order_acquire) != 0; }

}  // namespace devproxy::client
