// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "devproxy/csrc/client/device_state.h"

namespace devproxy::sa::managed {

// The managed allocation around addr, whose place is p.
inline bool find(uint64_t addr, const client::Place& p, uint64_t* base, client::Allocation* out) {
  client::DeviceState* d = p.pinned ? client::device_state_if_attached(p.device) : nullptr;
  return d && d->find_pinned(addr, base, out) && out->advice;
}
inline bool is_managed(uint64_t addr, const client::Place& p) {
  uint64_t base = 0;
  client::Allocation a;
  return find(addr, p, &base, &a);
}

// cuMemFree of managed memory, which begins at addr.
[[nodiscard]] int32_t free(uint64_t addr);

}  // namespace devproxy::sa::managed
