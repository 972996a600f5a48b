// Output placement: while an op runs, an allocation of exactly an output's size is served from that output's device
// memory, so that most results need no copy. The op does not know; whoever calls it compares pointers afterwards.
#pragma once

#include <cstddef>
#include <vector>

namespace devproxy::softtorch {

// Puts the placing allocator in front of torch's CPU allocator, once per process.
void install_placement();

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

}  // namespace devproxy::softtorch
