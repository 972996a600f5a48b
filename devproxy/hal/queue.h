// SPDX-License-Identifier: Apache-2.0
// A space's queues, which are the streams of a process.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "devproxy/csrc/args/launch.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/object.h"

namespace devproxy::hal {

// CUDA's rule of the legacy stream: a command on kLegacy waits for all earlier commands of kLegacy and kBlocking queues
// of its space, and they for it. kNonBlocking is exempt.
enum class QueueKind : uint8_t { kLegacy, kBlocking, kNonBlocking };

// Of commands that have not completed: those that wait for another rank are known in detail, since they may stay.
struct PendingUse {
  struct Range {
    uint64_t position, addr, bytes;
  };
  uint64_t anything_from = UINT64_MAX;  // from this position on they may touch anything
  std::vector<Range> ranges;            // which those before that touch
  // May a command from before `position` touch the range?
  bool touches(uint64_t addr, uint64_t bytes, uint64_t position) const {
    return anything_from < position ||
           std::any_of(
               ranges.begin(), ranges.end(),
               [&](const Range& r) {
                 return r.position < position && r.addr < addr + bytes && addr < r.addr + r.bytes;
               });
  }
};

class SpaceQueues {
 public:
  // index: what on_complete says. A destroyed queue still completes what was submitted to it, and a new queue of the
  // same index starts after that.
  virtual QueueRef create_queue(QueueKind kind, int32_t priority, uint32_t index) = 0;
  virtual void destroy_queue(const QueueRef& queue) = 0;
  // Of kLaunchAccessPolicyWindow, kLaunchPriority, kLaunchMemSyncDomainMap and kLaunchMemSyncDomain: it holds for what
  // is submitted from now on. A device without such a thing does nothing. Where the device keeps commands of the queue
  // back, it is refused late (SpaceOwner::on_refused).
  virtual Status set_queue_attribute(const QueueRef& queue, Ticket ticket, const LaunchAttribute& attribute) = 0;
  // Somebody waits for what was submitted to this queue so far: its completion is told without delay. A device that tells
  // of each completion at once (Caps::wants_awaited is false) does nothing.
  virtual void awaited(const QueueRef& queue) = 0;
  // The smallest position that has not completed, or less; UINT64_MAX where there is none. idle() is the cheap form of
  // the question; any thread may ask it, and true means that everything that was written can be seen.
  virtual uint64_t oldest_pending() = 0;
  virtual bool idle() const = 0;
  // What commands that have not completed may touch of this space's device memory, or more. The submitting thread.
  virtual PendingUse pending_use() = 0;
  // How many commands have not completed, for a device that keeps them itself.
  virtual uint32_t pending() const = 0;

 protected:
  ~SpaceQueues() = default;
};

}  // namespace devproxy::hal
