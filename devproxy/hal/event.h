// SPDX-License-Identifier: Apache-2.0
// A space's events.
#pragma once

#include <cstdint>

#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/object.h"

namespace devproxy::hal {

class SpaceEvents {
 public:
  virtual EventRef create_event(bool timed) = 0;
  virtual void record(const QueueRef& queue, Ticket ticket, const EventRef& event) = 0;
  // For the most recent record before this submission; none is no wait.
  virtual void wait(const QueueRef& queue, Ticket ticket, const EventRef& event) = 0;
  // kInvalidHandle: one was never recorded, or is not timed. kNotReady: one has not completed.
  virtual StatusOr<double> elapsed_ms(const EventRef& start, const EventRef& end) = 0;

  // Level 2. Precondition: idle(). Times are nanoseconds of event_clock_ns(), whose zero is the space's own.
  virtual uint64_t event_clock_ns() = 0;
  // When the latest record completed; 0 where there was none.
  virtual StatusOr<uint64_t> event_time_ns(const EventRef& event) = 0;
  // As after a record that completed at that time, which may lie before the space began.
  virtual Status restore_event(const EventRef& event, uint64_t time_ns) = 0;

 protected:
  ~SpaceEvents() = default;
};

}  // namespace devproxy::hal
