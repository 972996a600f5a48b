// SPDX-License-Identifier: Apache-2.0
// What the server must know of an image besides what the driver tells.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "devproxy/csrc/base/status.h"

namespace devproxy::hal::cuda {

struct ModuleFacts {
  std::vector<std::string> variables;  // __device__ and __constant__ ones, by the names that the driver knows
  std::string managed;                 // one that is __managed__; empty where none is
  bool prints = false;                 // some kernel calls printf
  std::set<std::string> heap_kernels;  // those that call malloc
};

// major, minor: the device's, since a fat binary may hold code for several. A failure says what is not understood; the
// driver may well understand it.
StatusOr<ModuleFacts> facts_of(const uint8_t* image, size_t bytes, uint32_t major, uint32_t minor);

}  // namespace devproxy::hal::cuda
