// SPDX-License-Identifier: Apache-2.0
// LINK, as it travels behind the request: a head, n_options of LinkOption (csrc/args/link.h), then each input's head,
// name and data, every part padded to 8 bytes.
#pragma once

#include <cstdint>

namespace devproxy {

struct LinkHead {
  uint32_t n_options = 0, n_inputs = 0;
};
struct LinkInputHead {
  uint32_t type = 0, name_bytes = 0;
  uint64_t data_bytes = 0;
};
inline constexpr uint32_t kMaxLinkOptions = 64, kMaxLinkInputs = 4096;

}  // namespace devproxy
