// SPDX-License-Identifier: Apache-2.0
// One message as the handlers see it: private copies, so that the client cannot change it under their hands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dispatch.gen.h"

namespace devproxy::server {

inline constexpr size_t kMaxRequestBytes = 64;

struct Message {
  const wire::OpInfo* info = nullptr;
  uint64_t end = 0;       // ring position just behind the record: what its completion is called by
  uint16_t slot = 0;      // < kReplySlots
  uint32_t seq = 0;       // 0: no answer wanted
  bool in_graph = false;  // a step of a graph that is launched
  alignas(16) uint8_t request[kMaxRequestBytes];
  const uint8_t* bulk = nullptr;  // 16-byte aligned
  size_t bulk_bytes = 0;

  template <class Request>
  const Request& as() const {
    static_assert(sizeof(Request) <= kMaxRequestBytes);
    return *reinterpret_cast<const Request*>(request);
  }
};

}  // namespace devproxy::server
