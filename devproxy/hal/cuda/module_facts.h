// What the server must know of an image before the driver has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "devproxy/csrc/base/status.h"

namespace devproxy::hal::cuda {

struct ModuleFacts {
  std::vector<std::string> variables;  // __device__ and __constant__ ones, by the names that the driver knows
  bool prints = false;                 // some kernel calls printf
};

// major, minor: the device's, since a fat binary may hold code for several. A failure says what is not understood; the
// driver may well understand it.
StatusOr<ModuleFacts> facts_of(const uint8_t* image, size_t bytes, int32_t major, int32_t minor);

}  // namespace devproxy::hal::cuda
