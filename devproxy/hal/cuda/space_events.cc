// SPDX-License-Identifier: Apache-2.0
// CudaSpace: events, and what ties the device's clock to ours.
#include <chrono>
#include <utility>

#include "devproxy/hal/cuda/cuda_space.h"

namespace devproxy::hal::cuda {

namespace {

using Clock = std::chrono::steady_clock;

// A tie between the device's clock and ours: how long it holds (clocks drift), and how short the moment should be.
constexpr uint64_t kTieNs = 1'000'000'000, kNarrowNs = 50'000;
constexpr int kTieTries = 8;

}  // namespace

CudaSpace::CudaEvent::~CudaEvent() {
  if (handle) (void)context->enter().cuEventDestroy(handle);  // cuda.h: also while it is pending
}

EventRef CudaSpace::create_event(bool timed) {
  const Driver& cu = context_->enter();
  auto event = std::make_shared<CudaEvent>();
  event->context = context_;
  event->timed = timed;
  event->made = cu.status(cu.cuEventCreate(&event->handle, timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING),
                          cu.cuEventCreate, "creating an event");
  return event;
}

void CudaSpace::record(const QueueRef& queue, Ticket ticket, const EventRef& event) {
  Command command;
  command.action = Action::kRecord;
  command.ticket = ticket;
  command.event = std::static_pointer_cast<CudaEvent>(event);
  {
    std::lock_guard lock(mu_);
    command.event->restored_ns = 0;
  }
  records_.fetch_add(1, std::memory_order_relaxed);
  submit(queue, std::move(command));
}

void CudaSpace::wait(const QueueRef& queue, Ticket ticket, const EventRef& ref) {
  auto event = std::static_pointer_cast<CudaEvent>(ref);
  Command command;
  command.ticket = ticket;
  bool recorded;
  {
    std::lock_guard lock(mu_);
    recorded = event->submitted != 0;
  }
  if (recorded) command.action = Action::kWait, command.event = std::move(event);
  submit(queue, std::move(command));
}

StatusOr<double> CudaSpace::elapsed_ms(const EventRef& start_ref, const EventRef& end_ref) {
  const auto& start = static_cast<const CudaEvent&>(*start_ref);
  const auto& end = static_cast<const CudaEvent&>(*end_ref);
  if (!start.timed || !end.timed) return Status(kInvalidHandle, "an event was created without timing");
  {
    std::lock_guard lock(mu_);
    if (!start.submitted || !end.submitted) return Status(kInvalidHandle, "an event was never recorded");
    if (faulted_.load(std::memory_order_relaxed)) return fault_;
    if (start.issued != start.submitted || end.issued != end.submitted)
      return Status(kNotReady, "an event has not completed");
  }
  if (start.restored_ns || end.restored_ns) {
    auto a = event_time_ns(start_ref), b = event_time_ns(end_ref);
    if (!a.ok()) return a.status();
    if (!b.ok()) return b.status();
    return static_cast<double>(static_cast<int64_t>(*b - *a)) * 1e-6;
  }
  const Driver& cu = context_->enter();
  float ms = 0;
  const CUresult r = cu.event_elapsed(&ms, start.handle, end.handle);
  if (r == CUDA_ERROR_NOT_READY) return Status(kNotReady, "an event has not completed");
  if (Status s = cu.status(r, cu.event_elapsed, "asking for the time between events"); !s.ok()) return s;
  return static_cast<double>(ms);
}

uint64_t CudaSpace::event_clock_ns() {
  return static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now().time_since_epoch()).count());
}

// The driver tells times between events only, so the host's clock is tied to an event that is recorded now. One tie for
// the events of a dump: what this thread loses between its completion and the look at the clock then shifts them all
// alike, and their distances are the driver's own. The shortest of several such moments is taken.
Status CudaSpace::tie_clock() {
  const uint64_t records = records_.load(std::memory_order_relaxed);  // it is behind all of them
  if (tie_ && records == tie_records_ && event_clock_ns() - tie_ns_ < kTieNs) return {};
  const Driver& cu = context_->enter();
  const char* const doing = "reading the device's clock";
  Status s;
  CUevent best = nullptr;
  uint64_t best_ns = 0, narrowest = UINT64_MAX;
  for (int i = 0; i < kTieTries && narrowest > kNarrowNs && s.ok(); i++) {
    CUevent now = nullptr;
    s = cu.status(cu.cuEventCreate(&now, CU_EVENT_DEFAULT), cu.cuEventCreate, doing);
    const uint64_t before = event_clock_ns();
    if (s.ok()) s = cu.status(cu.cuEventRecord(now, transfer_), cu.cuEventRecord, doing);
    if (s.ok()) s = cu.status(cu.cuEventSynchronize(now), cu.cuEventSynchronize, doing);
    const uint64_t after = event_clock_ns();
    if (s.ok() && after - before < narrowest)
      narrowest = after - before, best_ns = before + (after - before) / 2, std::swap(best, now);
    if (now) (void)cu.cuEventDestroy(now);
  }
  if (s.ok()) std::swap(best, tie_), tie_ns_ = best_ns, tie_records_ = records;
  if (best) (void)cu.cuEventDestroy(best);
  return s;
}

// Good to the driver's own resolution: cuda.h says 0.5 us, as a float of milliseconds, so 0.25 ms for an event of an
// hour ago.
StatusOr<uint64_t> CudaSpace::event_time_ns(const EventRef& ref) {
  const auto& event = static_cast<const CudaEvent&>(*ref);
  {
    std::lock_guard lock(mu_);
    if (!event.submitted) return uint64_t{0};
    if (event.restored_ns) return event.restored_ns;
    if (event.issued != event.submitted) return Status(kNotReady, "an event has not completed");
  }
  if (!event.timed) return event_clock_ns();  // nobody can ask
  std::lock_guard lock(tie_mu_);
  if (Status s = tie_clock(); !s.ok()) return s;
  const Driver& cu = context_->enter();
  float ms = 0;
  if (Status s = cu.status(cu.event_elapsed(&ms, event.handle, tie_), cu.event_elapsed, "reading an event's time");
      !s.ok())
    return s;
  return tie_ns_ - static_cast<uint64_t>(static_cast<int64_t>(static_cast<double>(ms) * 1e6));
}

// A wait for it passes at once: cuda.h, cuStreamWaitEvent of an event that was never recorded.
Status CudaSpace::restore_event(const EventRef& ref, uint64_t time_ns) {
  auto& event = static_cast<CudaEvent&>(*ref);
  std::lock_guard lock(mu_);
  event.submitted = event.issued = 1;
  event.restored_ns = time_ns;
  return {};
}

void CudaSpace::restore_fault(int32_t result) {
  std::unique_lock lock(mu_);
  fault({result, "the execution fault from before the restore"}, lock);
}

}  // namespace devproxy::hal::cuda
