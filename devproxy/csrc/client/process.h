// SPDX-License-Identifier: Apache-2.0
// The client's process-wide state: initialisation, devices, fork.
//
// Never destroyed: threads of the job may still call while the process exits.
// Locks: attach_mu (in process.cc) < Device::mu < everything in an allocator.
#pragma once

#include <cstdint>

#include "devproxy/csrc/client/attachment.h"

namespace devproxy::client {

// cuInit. kNoDevice where the job was not started by devproxy-run.
[[nodiscard]] int32_t init();
int device_count();

// The attachment to a device, made at first use. nullptr and *error for a bad ordinal or a failed attach.
Attachment* device(int ordinal, int32_t* error);
// The properties of a device, attached or not: asking for them attaches nothing. nullptr and *error as with device().
const DeviceProps* facts(int ordinal, int32_t* error);
// The attachment if there is one already, else nullptr.
Attachment* attached(int ordinal);

// The device whose device range, pinned window or module variable holds addr; -1 for plain host memory.
struct Place {
  int device = -1;
  bool pinned = false;
};
Place place_of(uint64_t addr);

}  // namespace devproxy::client
