// SPDX-License-Identifier: Apache-2.0
// Launches as graphs need them: checked and packed, without being posted.
#pragma once

#include <cstdint>
#include <vector>

#include "devproxy/csrc/args/launch.h"
#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/module/client.h"

namespace devproxy::sa::launch {

struct Geometry {
  unsigned grid[3], block[3], shared;
};

// LAUNCH and LAUNCH_EX alike; `last` is what they end in: flags, or how many attributes.
template <class Request>
[[nodiscard]] inline Request request(uint64_t function, VHandle stream, const Geometry& g, uint32_t last = 0) {
  return {VHandle{function}, stream,     g.grid[0], g.grid[1], g.grid[2], g.block[0],
          g.block[1],        g.block[2], g.shared,  last,      0,         0};
}
// Everything that can be checked without the device.
[[nodiscard, gnu::always_inline]] inline int32_t check(const module::FunctionObj& f, const Geometry& g,
                                                       client::DeviceState& d) {
  const int32_t* a = d.conn().props().attributes;
  for (int i = 0; i < 3; ++i) {  // 0 is out of bounds too: it wraps
    if (g.block[i] - 1 >= static_cast<unsigned>(a[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i])) return kInvalidValue;
    if (g.grid[i] - 1 >= static_cast<unsigned>(a[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i])) return kInvalidValue;
  }
  const uint64_t threads = static_cast<uint64_t>(g.block[0]) * g.block[1] * g.block[2];
  if (threads > static_cast<unsigned>(a[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK])) return kInvalidValue;
  if (threads > f.max_threads) return kLaunchOutOfResources;
  if (g.shared > static_cast<unsigned>(f.max_dynamic_shared.load(std::memory_order_relaxed))) return kInvalidValue;
  return kOk;
}
// The parameters as a launch sends them, from kernelParams or extra.
[[nodiscard]] int32_t parameter_block(const module::FunctionObj& f, void* const* kernelParams, void** extra,
                                      std::vector<uint8_t>* block);
// The attributes that travel with a launch of that shape, and whether it may have them; may ask the server.
// Is it a window that a launch or a stream may have?
[[nodiscard]] CUresult check_window(client::DeviceState& d, const CUaccessPolicyWindow& w);
[[nodiscard]] int32_t attributes(module::FunctionObj* f, uint64_t handle, const Geometry& g,
                                 const CUlaunchAttribute* list, unsigned n, std::vector<LaunchAttribute>* out);

}  // namespace devproxy::sa::launch
