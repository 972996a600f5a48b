// SPDX-License-Identifier: Apache-2.0
// The software GPU: memory is a sparse file at a fixed address, a kernel is a function of a loaded executor module, a
// queue is a thread. Levels 1 to 3.
#pragma once

#include <memory>
#include <string>

#include "devproxy/hal/hal.h"
#include "devproxy/hal/splice/splice_config.h"

namespace devproxy::hal {
class Links;
struct Sharing;
}  // namespace devproxy::hal

namespace devproxy::hal::soft {

struct SoftConfig {
  uint32_t ordinal = 0;       // of the machine; part of the UUID
  uint64_t memory_bytes = 0;  // what the device says that it has
  bool chaos = false;         // nothing runs on the submitting thread; seeded delays between commands
  uint64_t chaos_seed = 0;
  std::string folder = {};  // of the server's libraries, where executors are
  Links* links = nullptr;   // to other trees' servers; the device's
  // Where several of the job's GPUs are on this one: what they share, and which seat this one is.
  std::shared_ptr<Sharing> sharing = {};
  uint32_t seat = 0;
  splice::SpliceConfig splicing = {};
};

std::unique_ptr<Device> make_device(const SoftConfig& config);

}  // namespace devproxy::hal::soft
