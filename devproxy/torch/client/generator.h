// SPDX-License-Identifier: Apache-2.0
// The CUDA generator: (seed, offset), 16 bytes, as torch's own.
//
// Where ops run on the host, it is the client's and the numbers follow block.h's mix_seed. Where they run on CUDA, how
// far an op moves the offset depends on its launch, which only the device knows: there the generator lives in the
// executor (executor/client.h), has a number, and ops carry that number.
//
// An op that is captured into a graph cannot take the pair's values: each replay has others. It takes an address in
// device memory, where the replay writes the pair before it launches, and how far into the graph's draws it is.
#pragma once

#include <ATen/core/Generator.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "devproxy/torch/client/device.h"

namespace devproxy::aten {

const at::Generator& default_generator(DeviceIndex device);  // -1: the current device
at::Generator new_generator(DeviceIndex device);

// What one random op draws from.
struct RandomState {
  uint64_t seed = 0, offset = 0;
  CUdeviceptr addr = 0;  // not 0: the pair lies there, and `offset` is added to its offset
  bool kept = false;     // `seed` is the number of a generator in the executor
};

// What a generator is but for its identity; graph-safe copies of it share one.
struct GeneratorState {
  explicit GeneratorState(DeviceIndex device);
  ~GeneratorState();
  GeneratorState(const GeneratorState&) = delete;
  GeneratorState& operator=(const GeneratorState&) = delete;

  std::pair<uint64_t, uint64_t> get();
  void set(std::optional<uint64_t> seed, uint64_t offset);  // none: the seed that it has
  void copy(GeneratorState& from);

  const DeviceIndex device;
  uint64_t id = 0;  // in the executor, where it keeps generators
  std::mutex mu;
  uint64_t seed = 0, offset = 0;  // mu. In the executor, `offset` only counts while nobody has been told
  bool told = false;              // mu. Does the executor have it? It is told at the first use
  bool seeded = true;             // mu. Since take_seeded()
};

// Takes the state for one random op and moves the offset on; in a capture, the graph's. Throws if it is not a CUDA
// generator, or one that the graph does not know.
RandomState take_random_state(const at::Generator& generator);
// Has it been seeded since the last time? Then cuDNN's generators, which are seeded from it, are to be made anew.
bool take_seeded(const at::Generator& generator);
std::shared_ptr<GeneratorState> state_of(const at::Generator& generator);

}  // namespace devproxy::aten
