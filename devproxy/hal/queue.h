// SPDX-License-Identifier: Apache-2.0
// A space's queues, which are the streams of a process.
#pragma once

#include <cstdint>

#include "devproxy/csrc/args/launch.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/object.h"

namespace devproxy::hal {

// CUDA's rule of the legacy stream: a command on kLegacy waits for all earlier commands of kLegacy and kBlocking queues
// of its space, and they for it. kNonBlocking is exempt.
enum class QueueKind : uint8_t { kLegacy, kBlocking, kNonBlocking };

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
  // How many commands have not completed, for a device that keeps them itself.
  virtual uint32_t pending() const = 0;

 protected:
  ~SpaceQueues() = default;
};

}  // namespace devproxy::hal
