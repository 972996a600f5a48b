// The CUDA generator: (seed, offset), 16 bytes, as torch's own. The numbers follow block.h's mix_seed.
#pragma once

#include <ATen/core/Generator.h>

#include <utility>

#include "devproxy/hal/soft/torch/client/device.h"

namespace devproxy::softtorch {

const at::Generator& default_generator(DeviceIndex device);  // -1: the current device
at::Generator new_generator(DeviceIndex device);

// Takes the (seed, offset) for one random op and moves the offset on. Throws if it is not a CUDA generator.
std::pair<uint64_t, uint64_t> take_random_state(const at::Generator& generator);

}  // namespace devproxy::softtorch
