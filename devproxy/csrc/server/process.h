// SPDX-License-Identifier: Apache-2.0
// A server process: one physical GPU of one job, and those of the job's GPUs that are on it.
//
// Each of the job's GPUs has a Server (socket, clients, control channel) with a thread of its own; what they share is
// the physical GPU: its memory (Ledger) and its turns (hal::Engine). The process ends when the last has.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/memory_turns.h"
#include "devproxy/csrc/server/server.h"
#include "devproxy/hal/sharing.h"

namespace devproxy::server {

struct ProcessConfig {
  ServerConfig server;         // of each, but for its gpu
  std::vector<uint32_t> gpus;  // the job's
  std::string ledger_path;
  int ready_fd = -1;
};

// The physical GPU as one of the job's. The second is nullptr for the only one.
using OpenDevice = std::function<StatusOr<std::unique_ptr<hal::Device>>(uint32_t gpu, std::shared_ptr<hal::Sharing>)>;

class Process {
 public:
  Process(const ProcessConfig& config, OpenDevice open_device)
      : config_(config), open_device_(std::move(open_device)) {}
  // Everything that can be refused is refused in these two, before anybody is told "ready". prepare() touches nothing
  // that another server has. ahead: a folder where predecessors have listed what to load; empty: none.
  Status prepare(const std::string& ahead);
  Status open();
  // Behind prepare(): memory of the GPU that the other jobs there leave.
  uint64_t left_bytes() const { return ledger_->left_bytes(); }
  // Until all have ended, or SIGTERM, which ends them. Precondition: SIGTERM is blocked.
  void run();

 private:
  const ProcessConfig config_;
  const OpenDevice open_device_;
  std::shared_ptr<hal::Sharing> sharing_;  // nullptr: nobody to share with
  std::unique_ptr<Ledger> ledger_;
  MemoryTurns turns_;
  std::vector<std::unique_ptr<Server>> servers_;
};

}  // namespace devproxy::server
