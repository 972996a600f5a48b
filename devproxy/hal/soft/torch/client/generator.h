// The CUDA generator: (seed, offset), 16 bytes, as torch's own. The numbers follow block.h's mix_seed.
//
// An op that is captured into a graph cannot take the pair's values: each replay has others. It takes an address in
// device memory, where the replay writes the pair before it launches, and how far into the graph's draws it is.
#pragma once

#include <ATen/core/Generator.h>

#include <memory>
#include <mutex>

#include "devproxy/hal/soft/torch/client/device.h"

namespace devproxy::softtorch {

const at::Generator& default_generator(DeviceIndex device);  // -1: the current device
at::Generator new_generator(DeviceIndex device);

// What one random op draws from.
struct RandomState {
  uint64_t seed = 0, offset = 0;
  CUdeviceptr addr = 0;  // not 0: the pair lies there, and `offset` is added to its offset
};

// What a generator is but for its identity; graph-safe copies of it share one.
struct GeneratorState {
  std::mutex mu;
  uint64_t seed = 0, offset = 0;  // mu
};

// Takes the state for one random op and moves the offset on; in a capture, the graph's. Throws if it is not a CUDA
// generator, or one that the graph does not know.
RandomState take_random_state(const at::Generator& generator);
std::shared_ptr<GeneratorState> state_of(const at::Generator& generator);

}  // namespace devproxy::softtorch
