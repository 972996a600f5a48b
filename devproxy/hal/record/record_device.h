// SPDX-License-Identifier: Apache-2.0
// The recording GPU: says what a program asks of a GPU, without one. It takes genuine NVIDIA images, checks every
// launch against them, writes down every call that reached the device, and executes no kernel. Memory, queues, events,
// copies and host functions are the software GPU's, and real; so results are whatever memory held before: meaningless.
#pragma once

#include <memory>
#include <string>

#include "devproxy/hal/hal.h"

namespace devproxy::hal::record {

struct RecordConfig {
  uint32_t ordinal = 0;
  uint64_t memory_bytes = 0;
  bool chaos = false;
  uint64_t chaos_seed = 0;
  std::string path;  // of the record; empty: none is written
};

StatusOr<std::unique_ptr<Device>> make_device(const RecordConfig& config);

}  // namespace devproxy::hal::record
