// SPDX-License-Identifier: Apache-2.0
// The arithmetic of reductions (hal/comm.h says its order and its accumulators). Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "devproxy/csrc/args/comm.h"

namespace devproxy::hal::soft {

struct Reduction {
  CommType type = CommType::kFloat32;
  CommReduction op = CommReduction::kSum;
  std::vector<const uint8_t*> inputs;   // by rank
  std::vector<const uint8_t*> scalars;  // of kPreMulSum: an element by rank
  std::vector<uint8_t*> outputs;        // all get the result; each is an input or overlaps none
};

// Elements first .. first + count of every input into every output. None needs to be aligned.
void reduce(const Reduction& reduction, uint64_t first, uint64_t count);

}  // namespace devproxy::hal::soft
