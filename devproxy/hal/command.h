// SPDX-License-Identifier: Apache-2.0
// The commands on a queue that touch plain memory or run something.
#pragma once

#include <cstddef>
#include <cstdint>

#include "devproxy/csrc/args/launch.h"
#include "devproxy/hal/object.h"

namespace devproxy::hal {

// A rectangle of bytes; height 1 is a plain copy. An address is a device address where *_device is set, else a pointer
// into host memory of the server that stays valid until on_complete.
struct CopyArgs {
  uint64_t dst = 0, src = 0;
  uint64_t dst_pitch = 0, src_pitch = 0;
  uint64_t width_bytes = 0, height = 1;
  bool dst_device = false, src_device = false;
};

struct MemsetArgs {
  uint64_t dst = 0, pitch = 0;    // pitch in bytes, between rows
  uint64_t count = 0, rows = 1;   // elements in a row
  uint32_t value = 0, width = 1;  // bytes of one element: 1, 2 or 4
};

struct LaunchArgs {
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  uint32_t shared_bytes = 0;
  const uint8_t* params = nullptr;  // 16-byte aligned; only read during the call
  size_t params_bytes = 0;
  const LaunchAttribute* attributes = nullptr;  // only read during the call
  size_t n_attributes = 0;
};

class SpaceCommands {
 public:
  virtual void nop(const QueueRef& queue, Ticket ticket) = 0;
  virtual void copy(const QueueRef& queue, Ticket ticket, const CopyArgs& args) = 0;
  virtual void memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& args) = 0;
  virtual void launch(const QueueRef& queue, Ticket ticket, const FunctionRef& function, const LaunchArgs& args) = 0;
  virtual void host_function(const QueueRef& queue, Ticket ticket, uint64_t token) = 0;

 protected:
  ~SpaceCommands() = default;
};

}  // namespace devproxy::hal
