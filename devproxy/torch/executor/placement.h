// SPDX-License-Identifier: Apache-2.0
// Output placement: while an op runs, an allocation of exactly an output's size is served from that output's device
// memory, so that most results need no copy. The op does not know; whoever calls it compares pointers afterwards.
// The device's allocator (cpu.cc, cuda.cc) asks take() before it asks torch's.
#pragma once

#include <cstddef>

namespace devproxy::aten {

namespace placement {

// Device addresses are a fixed part of the address space that neither heap nor driver ever uses.
bool is_device_address(const void* p);
// An offered buffer of that size, or nullptr. This thread's.
void* take(size_t bytes);
// A temporary that went before the op ended: the next allocation of that size may have the buffer.
void give_back(void* p);

}  // namespace placement

// Offers buffers to the allocations of this thread for the length of the scope.
class PlacementScope {
 public:
  PlacementScope();
  ~PlacementScope();
  PlacementScope(const PlacementScope&) = delete;
  PlacementScope& operator=(const PlacementScope&) = delete;

  void offer(void* p, size_t bytes);
  void close();  // no more allocations are served; what was served stays valid
};

}  // namespace devproxy::aten
