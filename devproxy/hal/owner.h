// SPDX-License-Identifier: Apache-2.0
// What a Space tells and asks.
#pragma once

#include <cstdint>
#include <string>

#include "devproxy/csrc/base/status.h"

namespace devproxy::hal {

// Where a space of the job is: its process tree, that tree's number of its GPU, and the slot of its addresses.
struct SpacePlace {
  uint32_t gpu = 0, slot = 0, tree = 0;
};
// A way to another space of the job. memory: a descriptor of its device memory (SpaceComms::share_memory). alive: a
// socket that hangs up when the space is gone, or has moved to another server. Both are the receiver's to close.
struct PeerLink {
  int memory = -1, alive = -1;
};

// Every method may be called from several device threads at once and from inside submissions, and must not block,
// host_function excepted.
class SpaceOwner {
 public:
  virtual ~SpaceOwner() = default;
  // A device thread begins (alternative signal stack, names).
  virtual void on_thread_start() noexcept = 0;
  // Commands of one queue complete in order; every submitted command completes, also after a fault.
  virtual void on_complete(uint32_t queue_index, uint64_t position, uint32_t tag) noexcept = 0;
  // An execution fault. From now on the space executes nothing, but completes everything.
  virtual void on_fault(int32_t result, const char* text) noexcept = 0;
  // The device would not take a command, which is no fault: it completes unexecuted and the space goes on. Called
  // inside a submission or on a device thread, with the device's locks held: must not call the space.
  virtual void on_refused(uint32_t caller, int32_t result, const char* text) noexcept {
    (void)caller;
    on_fault(result, text);
  }
  // Is [addr, addr + bytes) inside one allocation that was live for the command at `position`? on_submitter: the caller
  // is the dispatch thread inside a submission.
  virtual bool range_live(uint64_t addr, uint64_t bytes, uint64_t position, bool on_submitter) noexcept = 0;
  // Runs the host function `token`; returns when it has returned, or when the space is being stopped.
  virtual void host_function(uint64_t token) noexcept = 0;
  // The device takes memory of the GPU for itself (what an executor needs while it computes); false where the GPU has
  // not so much left. Given back in the same amounts or others.
  virtual bool take_memory(uint64_t bytes) noexcept {
    (void)bytes;
    return true;
  }
  virtual void give_memory(uint64_t bytes) noexcept { (void)bytes; }
  // For communicators: where this space is, the folder that all servers of the job share, and the way to another space.
  // reach_peer blocks, and is called on device threads only; kNotFound: there is no such space.
  virtual SpacePlace place() noexcept { return {}; }
  virtual std::string job_folder() { return {}; }
  virtual StatusOr<PeerLink> reach_peer(const SpacePlace& peer) {
    (void)peer;
    return Status(kNotSupported, "this owner has no peers");
  }
};

}  // namespace devproxy::hal
