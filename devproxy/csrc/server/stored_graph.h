// SPDX-License-Identifier: Apache-2.0
// An instantiated graph on the server: the messages that one launch stands for. Pure: no device but the event that
// orders its launches, no clock.
//
// A step is checked for its form when it comes (a message that is a command, of the right length), and for everything
// else when it is launched, by the handler of its message, as if the client had posted it then: handles may have gone
// meanwhile and memory may have been freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "devproxy/csrc/server/message.h"
#include "devproxy/hal/object.h"

namespace devproxy::server {

struct GraphStep {
  const wire::OpInfo* info = nullptr;
  alignas(16) uint8_t request[kMaxRequestBytes] = {};
  std::unique_ptr<uint8_t[]> bulk;  // new[] aligns to 16
  size_t bulk_bytes = 0;
};

struct StoredGraph {
  std::vector<GraphStep> steps;
  uint64_t records = 0;  // how many of them are EVENT_RECORD
  bool communicates = false;
  hal::EventRef done;   // recorded behind each launch
  VHandle last_stream;  // of the last launch; none before the first

  // Puts the steps in `bytes` in the place of steps first .. first + count. False where they are malformed.
  [[nodiscard]] bool splice(size_t first, size_t count, const uint8_t* bytes, size_t n_bytes);
  // The steps as they travel.
  std::vector<uint8_t> encoded() const;
};

}  // namespace devproxy::server
