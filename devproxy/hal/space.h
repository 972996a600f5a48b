// SPDX-License-Identifier: Apache-2.0
// A Space is one client process on a device: an address range, queues, events, modules. What it can do is said by
// subject, each in a header of its own; this one puts them together.
//
// Nothing here has a body, on purpose: a device takes what it lacks from BasicSpace (basic_space.h), and one that wraps
// another passes everything on by ForwardingSpace (forwarding_space.h). What is added to a subject does not compile
// before both know it.
//
// Threads: every method is called by one thread, the owner's dispatch thread, unless it says otherwise. No submitting
// method blocks.
#pragma once

#include <cstdint>

#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/array.h"
#include "devproxy/hal/comm.h"
#include "devproxy/hal/command.h"
#include "devproxy/hal/event.h"
#include "devproxy/hal/memory.h"
#include "devproxy/hal/module.h"
#include "devproxy/hal/pending.h"
#include "devproxy/hal/queue.h"

namespace devproxy::hal {

class Space : public SpaceMemory,
              public SpaceQueues,
              public SpaceCommands,
              public SpaceEvents,
              public SpaceModules,
              public SpaceArrays,
              public SpaceComms,
              public SpacePending {
 public:
  virtual ~Space() = default;

  // The submitter has nothing to do just now: a good moment for what can wait.
  virtual void tidy() = 0;
  // The submitter has nothing to submit just now: what it kept of a turn on a shared GPU (engine.h) is others' again.
  virtual void yield() = 0;
  // By CUlimit. The result is the vendor's.
  virtual Status set_limit(uint32_t limit, uint64_t value) = 0;
  virtual StatusOr<uint64_t> get_limit(uint32_t limit) = 0;
  // What persists in the second-level cache is as any other line of it when this returns.
  virtual Status reset_persisting_l2() = 0;
  // Ends every queue: commands that run finish, the others are dropped without completion. Nothing may be submitted
  // afterwards. Blocks until the device threads are gone.
  virtual void stop() = 0;
  // Level 2: as after an execution fault of that result; the owner may be told again. The owner's thread.
  virtual void restore_fault(int32_t result) = 0;
};

}  // namespace devproxy::hal
