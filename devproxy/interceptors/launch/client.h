// Launches as graphs need them: checked and packed, without being posted.
#pragma once

#include <cstdint>
#include <vector>

#include "devproxy/csrc/wire/launch.h"
#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/module/client.h"

namespace devproxy::sa::launch {

struct Geometry {
  unsigned grid[3], block[3], shared;
};

// Everything that can be checked without the device.
[[nodiscard]] int32_t check(const module::FunctionObj& f, const Geometry& g, const client::DeviceState& d);
// The parameters as a launch sends them, from kernelParams or extra.
[[nodiscard]] int32_t parameter_block(const module::FunctionObj& f, void* const* kernelParams, void** extra,
                                      std::vector<uint8_t>* block);
// The attributes that travel with a launch of that shape, and whether it may have them; may ask the server.
[[nodiscard]] int32_t attributes(module::FunctionObj* f, uint64_t handle, const Geometry& g,
                                 const CUlaunchAttribute* list, unsigned n, std::vector<LaunchAttribute>* out);

}  // namespace devproxy::sa::launch
