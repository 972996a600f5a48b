// SPDX-License-Identifier: Apache-2.0
// The space's events: a record is a command of a queue, a wait a dependency on it.
#include <memory>
#include <utility>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/hal/soft/soft_space.h"

namespace devproxy::hal::soft {

EventRef SoftSpace::create_event(bool timed) {
  auto event = std::make_shared<SoftEvent>();
  event->timed = timed;
  return event;
}

void SoftSpace::record(const QueueRef& queue, Ticket ticket, const EventRef& ref) {
  auto& event = static_cast<SoftEvent&>(*ref);
  auto record = std::make_shared<Record>();
  record->queue = std::static_pointer_cast<SoftQueue>(queue);
  record->position = ticket.position;
  event.last = record;
  Command command;
  command.action = Action::kRecord;
  command.ticket = ticket;
  command.record = record.get();
  submit(queue, command, std::move(record), nullptr);
}

void SoftSpace::wait(const QueueRef& queue, Ticket ticket, const EventRef& ref) {
  const auto& event = static_cast<const SoftEvent&>(*ref);
  Command command;
  command.ticket = ticket;
  if (!event.last) return submit(queue, command, nullptr, nullptr);
  const Dependency need{event.last->queue, event.last->position};
  submit(queue, command, nullptr, &need);
}

StatusOr<double> SoftSpace::elapsed_ms(const EventRef& start_ref, const EventRef& end_ref) {
  const auto& start = static_cast<const SoftEvent&>(*start_ref);
  const auto& end = static_cast<const SoftEvent&>(*end_ref);
  if (!start.timed || !end.timed) return Status(kInvalidHandle, "an event was created without timing");
  if (!start.last || !end.last) return Status(kInvalidHandle, "an event was never recorded");
  const uint64_t a = start.last->time_ns.load(std::memory_order_acquire);
  const uint64_t b = end.last->time_ns.load(std::memory_order_acquire);
  if (!a || !b) return Status(kNotReady, "an event has not completed");
  return static_cast<double>(static_cast<int64_t>(b - a)) * 1e-6;  // exact, also where a restore has moved both
}

uint64_t SoftSpace::event_clock_ns() { return now_ns(); }

StatusOr<uint64_t> SoftSpace::event_time_ns(const EventRef& ref) {
  const auto& event = static_cast<const SoftEvent&>(*ref);
  return event.last ? event.last->time_ns.load(std::memory_order_acquire) : 0;
}

Status SoftSpace::restore_event(const EventRef& ref, uint64_t time_ns) {
  auto& event = static_cast<SoftEvent&>(*ref);
  event.last = std::make_shared<Record>();
  event.last->queue = queues_.at(0);  // any queue: position 0 has always been reached
  event.last->time_ns.store(time_ns, std::memory_order_release);
  return {};
}

}  // namespace devproxy::hal::soft
