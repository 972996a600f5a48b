// SPDX-License-Identifier: Apache-2.0
// Which devices this build has: the one place that knows them all.
#pragma once

#include <memory>
#include <string>

#include "devproxy/hal/hal.h"
#include "devproxy/hal/sharing.h"

namespace devproxy::hal {

struct DeviceConfig {
  std::string kind;           // soft, record or cuda
  uint32_t ordinal = 0;       // of the machine
  uint64_t memory_bytes = 0;  // what it says that it has; 0: what it has (cuda only)
  bool chaos = false;         // soft and record: legal but unkind timing, from the seed
  uint64_t chaos_seed = 0;
  uint32_t seat = 0;                      // the job's GPU: which of those that are on this one
  std::shared_ptr<Sharing> sharing = {};  // where several are
  bool collectives = false;               // cuda: the job has several GPUs
  bool together = false;                  // all of the job's GPUs are in this process
};

StatusOr<std::unique_ptr<Device>> open_device(const DeviceConfig& config);

}  // namespace devproxy::hal
