// SPDX-License-Identifier: Apache-2.0
// CudaSpace: commands, from the server's call to the driver's.
#include <algorithm>
#include <cstring>
#include <utility>

#include "devproxy/hal/cuda/space_common.h"

namespace devproxy::hal::cuda {

namespace {

void fill_rows(const MemsetArgs& a) {
  for (uint64_t row = 0; row < a.rows; row++) {
    const uint64_t at = a.dst + row * a.pitch;
    if (a.width == 1) std::memset(reinterpret_cast<void*>(at), static_cast<int>(a.value & 0xff), a.count);
    if (a.width == 2) std::fill_n(reinterpret_cast<uint16_t*>(at), a.count, static_cast<uint16_t>(a.value));
    if (a.width == 4) std::fill_n(reinterpret_cast<uint32_t*>(at), a.count, a.value);
  }
}

uint64_t extent(const CopyArgs& a, uint64_t pitch) { return (a.height - 1) * pitch + a.width_bytes; }

bool linear(const CopyArgs& a) {
  return a.height == 1 || (a.dst_pitch == a.width_bytes && a.src_pitch == a.width_bytes);
}

}  // namespace

void CudaSpace::submit(const QueueRef& ref, Command command) {
  context_->enter();
  std::unique_lock lock(mu_);
  submit_locked(std::static_pointer_cast<CudaQueue>(ref), command, lock);
}

void CudaSpace::submit_locked(const CudaQueueRef& queue, Command& command, std::unique_lock<std::mutex>& lock) {
  pending_all_.fetch_add(1, std::memory_order_relaxed);
  submitted_ = command.ticket.position;
  if (command.event && command.action == Action::kRecord) command.event->submitted++;
  Pending& pending = queue->pending.emplace_back();
  pending.sequence = ++sequence_;
  pending.ticket = command.ticket;
  pending.last = command.last;
  pending.touches = may_touch_memory(command.action);
  if (command.action == Action::kCommunicate) pending.ranges = command.group->ranges(command.ticket.position);
  if (!std::exchange(queue->busy, true)) {
    busy_.push_back(queue);
    busy_changes_.fetch_add(1, std::memory_order_relaxed);
  }
  if (asleep_) asleep_ = false, wake_.notify_one();
  const auto must_wait = [&] {
    return issuing_held_ || held_for_room_ || !may_issue(command) || (!held_.empty() && behind_held(*queue, command));
  };
  if (!faulted_.load(std::memory_order_relaxed) && must_clear(command) && !must_wait()) {
    pending.state = Pending::State::kIssuing;
    clear_group(command.group, /*on_watcher=*/false, lock);
  }
  if (faulted_.load(std::memory_order_relaxed)) {
    pending.state = Pending::State::kDropped;
  } else if (must_wait() || (command.group && !start_group(*queue, command))) {
    hold(queue, command, pending, lock);
  } else if (Status s = issue(queue, command, pending, lock); !s.ok()) {
    fault(s, lock);
  }
}

// The legacy stream's rule (cuda.h, Stream synchronization behavior) between streams that the driver does not know it of:
// a command of the legacy queue waits for what blocking queues have, and theirs for what it has.
Status CudaSpace::follow_other_side(CudaQueue& queue) {
  const Driver& cu = context_->driver();
  const auto follow = [&](const CudaQueue& other, uint64_t* until) -> Status {
    if (!other.stream || other.issued <= *until) return {};
    const char* const doing = "ordering a stream and the default stream";
    if (!order_) {
      if (Status s = cu.status(cu.cuEventCreate(&order_, CU_EVENT_DISABLE_TIMING), cu.cuEventCreate, doing); !s.ok())
        return s;
    }
    // cuda.h: a wait is for what the event says when the call is made, so one event does for all.
    Status s = cu.status(cu.cuEventRecord(order_, other.stream), cu.cuEventRecord, doing);
    if (s.ok()) s = cu.status(cu.cuStreamWaitEvent(queue.stream, order_, 0), cu.cuStreamWaitEvent, doing);
    if (s.ok()) *until = other.issued;
    return s;
  };
  if (queue.kind == QueueKind::kBlocking) {
    const auto legacy = queues_.find(0);
    return legacy == queues_.end() ? Status() : follow(*legacy->second, &queue.follows_legacy);
  }
  if (queue.kind == QueueKind::kNonBlocking) return {};
  for (const auto& [index, other] : queues_)
    if (other->kind == QueueKind::kBlocking)
      if (Status s = follow(*other, &other->legacy_follows); !s.ok()) return s;
  for (const CudaQueueRef& other : leaving_)
    if (other->kind == QueueKind::kBlocking)
      if (Status s = follow(*other, &other->legacy_follows); !s.ok()) return s;
  return {};
}

// What comes in front of a command in its stream.
Status CudaSpace::prepare(CudaQueue& queue, const Command& command) {
  const Driver& cu = context_->driver();
  if (!queue.made.ok()) return queue.made;
  if (Status s = mark_other_side(queue); !s.ok()) return s;
  if (device_.shared)
    if (Status s = follow_other_side(queue); !s.ok()) return s;
  if (command.action == Action::kHostFunction || command.action == Action::kWait ||
      command.action == Action::kCommunicate)
    if (Status s = mark(queue); !s.ok()) return s;
  if (std::exchange(queue.must_wait_before, false) && queue.before && queue.before->stream) {
    // Both write the same word: a mark of the old queue that came behind this event could overwrite a larger number,
    // and the watcher, if it did not look in between, would never see that one.
    if (Status marked = mark(*queue.before); !marked.ok()) return marked;
    CUevent event = nullptr;
    Status s =
        cu.status(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), cu.cuEventCreate, "ordering a stream's number");
    if (s.ok())
      s = cu.status(cu.cuEventRecord(event, queue.before->stream), cu.cuEventRecord, "ordering a stream's number");
    if (s.ok())
      s = cu.status(cu.cuStreamWaitEvent(queue.stream, event, 0), cu.cuStreamWaitEvent, "ordering a stream's number");
    if (event) (void)cu.cuEventDestroy(event);  // cuda.h: released when it completes
    if (!s.ok()) return s;
  }
  return {};
}

// Hands one command to the driver. A failure leaves it dropped.
Status CudaSpace::issue(const CudaQueueRef& ref, Command& command, Pending& pending,
                        std::unique_lock<std::mutex>& lock) {
  const Driver& cu = context_->driver();
  CudaQueue& queue = *ref;
  pending.state = Pending::State::kDropped;
  issues_.store(pending.sequence, std::memory_order_relaxed);
  if (Status s = prepare(queue, command); !s.ok()) return s;
  if (concerns_splicer(command))
    if (auto goes_on = tell_splicer(command, pending, lock); !goes_on.ok() || !*goes_on)
      return std::move(goes_on).status();
  if (splicer_ && command.action == Action::kCommunicate)
    if (auto goes_on = note_received(*command.group, pending, lock); !goes_on.ok() || !*goes_on)
      return std::move(goes_on).status();

  Status s;
  switch (command.action) {
    case Action::kNop: break;
    case Action::kInitComm:
    case Action::kCommunicate: pending.keeps = std::move(command.group); break;
    case Action::kCopy: s = issue_copy(queue.stream, command.copy); break;
    case Action::kStagedCopy: s = issue_staged(queue, command.copy, pending); break;
    case Action::kCellCopy: s = issue_cell(queue, command.copy, pending); break;
    case Action::kHostCopy: s = issue_job(queue, pending, {this, Job::Kind::kCopyRows, command.copy}); break;
    case Action::kArrayCopy:
    case Action::kStagedArrayCopy:
      s = command.action == Action::kArrayCopy ? issue_array_copy(queue.stream, *command.array_copy)
                                               : issue_staged_array(queue, *command.array_copy, pending);
      forgive(command, &s);
      pending.keeps = std::const_pointer_cast<ArrayCopy>(command.array_copy);
      break;
    case Action::kMemset: s = issue_memset(queue.stream, command.memset); break;
    case Action::kHostMemset: s = issue_job(queue, pending, {this, Job::Kind::kFillRows, {}, command.memset}); break;
    case Action::kHostFunction:
      s = issue_job(queue, pending, {this, Job::Kind::kToken, {}, {}, command.token});
      pending.token = s.ok();
      tokens_ += s.ok();
      break;
    case Action::kWait:
      s = cu.status(cu.cuStreamWaitEvent(queue.stream, command.event->handle, 0), cu.cuStreamWaitEvent,
                    "waiting for an event");
      break;
    case Action::kRecord:
      s = command.event->made;
      if (s.ok())
        s = cu.status(cu.cuEventRecord(command.event->handle, queue.stream), cu.cuEventRecord, "recording an event");
      if (s.ok()) command.event->issued++;
      pending.keeps = command.event;
      break;
    case Action::kAttribute:
      s = issue_attribute(queue, command.attributes.front());
      forgive(command, &s);
      break;
    case Action::kLaunch:
      s = command.executor ? issue_executor(queue, command, pending, lock) : issue_launch(queue, command);
      forgive(command, &s);
      if (command.executor)
        pending.keeps = std::move(command.executor);
      else
        pending.keeps = std::move(command.function);
      break;
  }
  if (!s.ok()) return s;
  if (faulted_.load(std::memory_order_relaxed)) return {};  // told during the call: dropped
  pending.state = Pending::State::kIssued;
  queue.issued = pending.sequence;
  queue.issued_at = Clock::now();
  in_flight_++;
  const bool for_the_host = command.copy.width_bytes && !command.copy.dst_device && command.last;
  if (command.action == Action::kRecord || pending.token || for_the_host || pending.awaited ||
      ++queue.since_mark >= device_.mark_every)
    return mark(queue);
  return {};
}

// A launch that the driver does not take (too many resources, a cluster that does not fit), a copy of an array, or a
// stream's attribute, is an error of that one call, not of the context, as long as that lives. The command completes
// unexecuted.
void CudaSpace::forgive(const Command& command, Status* s) {
  if (s->ok() || is_execution_fault(s->code()) || !alive()) return;
  owner_.on_refused(command.ticket.caller, s->code(), s->text().c_str());
  *s = {};
}

// The client's block of parameters goes on as it is; its layout is the driver's own (CudaFunction::get).
Status CudaSpace::issue_launch(CudaQueue& queue, const Command& command) {
  const Driver& cu = context_->driver();
  const LaunchArgs& a = command.launch;
  size_t bytes = a.params_bytes;
  const void* params = command.params.empty() ? a.params : command.params.data();
  void* block[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, const_cast<void*>(params), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  void** const extra = bytes ? block : nullptr;
  const CUfunction function = command.function->handle;
  if (command.attributes.empty())
    return cu.status(cu.cuLaunchKernel(function, a.grid[0], a.grid[1], a.grid[2], a.block[0], a.block[1], a.block[2],
                                       a.shared_bytes, queue.stream, nullptr, extra),
                     cu.cuLaunchKernel, "launching '" + command.function->name + "'");
  auto attributes = command.attributes;
  const CUlaunchConfig config = launch_config(a.grid, a.block, a.shared_bytes, queue.stream, &attributes);
  return cu.status(cu.cuLaunchKernelEx(&config, function, nullptr, extra), cu.cuLaunchKernelEx,
                   "launching '" + command.function->name + "' with attributes");
}

// The framework submits to the queue's stream, in the context that it shares with this space.
Status CudaSpace::issue_executor(CudaQueue& queue, const Command& command, Pending& pending,
                                 std::unique_lock<std::mutex>& lock) {
  LaunchArgs args = command.launch;
  if (!command.params.empty()) args.params = command.params.data();
  const RangeCheck check{&owner_, command.ticket.position, /*on_submitter=*/!issuing_held_};
  const auto run = [&] {
    if (device_.host_executor) {
      Job job{this, Job::Kind::kKernel};
      job.kernel = std::make_shared<HostKernel>(
          HostKernel{command.executor, args, {args.params, args.params + args.params_bytes}, command.ticket.position});
      return issue_job(queue, pending, job);
    }
    t_inside = command.executor->name.c_str();
    Status done =
        run_host_function(*command.executor, args, device_.ordinal, reinterpret_cast<uint64_t>(queue.stream), check);
    t_inside = nullptr;
    return done;
  };
  if (device_.host_executor && !splicer_) return run();
  auto done = beside(pending, lock, [&] { return splicer_ ? spliced_launch(command, run, queue.stream) : run(); });
  return done.ok() ? Status() : std::move(done).status();
}

// Does the context still take calls?
bool CudaSpace::alive() const {
  const CUresult r = context_->driver().cuStreamQuery(transfer_);
  return r == CUDA_SUCCESS || r == CUDA_ERROR_NOT_READY;
}

Status CudaSpace::issue_copy(CUstream stream, const CopyArgs& a) {
  const Driver& cu = context_->driver();
  if (linear(a)) {
    const uint64_t bytes = a.width_bytes * a.height;
    if (a.dst_device && a.src_device)
      return cu.status(cu.cuMemcpyDtoDAsync(a.dst, a.src, bytes, stream), cu.cuMemcpyDtoDAsync,
                       "copying on the device");
    if (a.dst_device)
      return cu.status(cu.cuMemcpyHtoDAsync(a.dst, reinterpret_cast<const void*>(a.src), bytes, stream),
                       cu.cuMemcpyHtoDAsync, "copying to the device");
    return cu.status(cu.cuMemcpyDtoHAsync(reinterpret_cast<void*>(a.dst), a.src, bytes, stream), cu.cuMemcpyDtoHAsync,
                     "copying from the device");
  }
  CUDA_MEMCPY2D c{};
  c.srcMemoryType = a.src_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  c.dstMemoryType = a.dst_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  if (a.src_device)
    c.srcDevice = a.src;
  else
    c.srcHost = reinterpret_cast<const void*>(a.src);
  if (a.dst_device)
    c.dstDevice = a.dst;
  else
    c.dstHost = reinterpret_cast<void*>(a.dst);
  c.srcPitch = a.src_pitch;
  c.dstPitch = a.dst_pitch;
  c.WidthInBytes = a.width_bytes;
  c.Height = a.height;
  return cu.status(cu.cuMemcpy2DAsync(&c, stream), cu.cuMemcpy2DAsync, "copying a rectangle");
}

Status CudaSpace::issue_cell(CudaQueue& queue, const CopyArgs& a, Pending& pending) {
  uint8_t* const cell = host_->take_cell();
  if (!cell) return issue_staged(queue, a, pending);
  pending.cell = cell;
  CopyArgs device = a;
  if (a.dst_device) {
    std::memcpy(cell, reinterpret_cast<const void*>(a.src), a.width_bytes);
    device.src = reinterpret_cast<uint64_t>(cell);
    return issue_copy(queue.stream, device);
  }
  device.dst = reinterpret_cast<uint64_t>(cell);
  pending.from_cell_to = reinterpret_cast<void*>(a.dst);
  pending.from_cell_bytes = static_cast<uint32_t>(a.width_bytes);
  return issue_copy(queue.stream, device);
}

// One piece that fits the queue's slot. The stream's order protects the slot: the next piece is packed behind this one.
Status CudaSpace::issue_staged(CudaQueue& queue, const CopyArgs& a, Pending& pending) {
  if (!queue.slot) queue.slot = host_->take_slot();
  if (!queue.slot) return {kOutOfMemory, "staging a copy: the host has no page-locked memory left"};
  const auto slot = reinterpret_cast<uint64_t>(queue.slot);
  CopyArgs host = a, device = a;
  if (a.dst_device) {
    host.dst = device.src = slot;
    host.dst_pitch = device.src_pitch = a.width_bytes;
    if (Status s = issue_job(queue, pending, {this, Job::Kind::kCopyRows, host}); !s.ok()) return s;
    return issue_copy(queue.stream, device);
  }
  device.dst = host.src = slot;
  device.dst_pitch = host.src_pitch = a.width_bytes;
  if (Status s = issue_copy(queue.stream, device); !s.ok()) return s;
  return issue_job(queue, pending, {this, Job::Kind::kCopyRows, host});
}

Status CudaSpace::issue_array_copy(CUstream stream, const ArrayCopy& copy) {
  const Driver& cu = context_->driver();
  const CUDA_MEMCPY3D c = driver_copy(copy);
  return cu.status(cu.cuMemcpy3DAsync(&c, stream), cu.cuMemcpy3DAsync, "copying an array");
}

// As issue_staged(): rows of one slice, which fit the queue's slot.
Status CudaSpace::issue_staged_array(CudaQueue& queue, const ArrayCopy& a, Pending& pending) {
  if (!queue.slot) queue.slot = host_->take_slot();
  if (!queue.slot) return {kOutOfMemory, "staging a copy: the host has no page-locked memory left"};
  const auto slot = reinterpret_cast<uint64_t>(queue.slot);
  const bool in = !a.src.array;
  const ArrayCopy::Side staged{nullptr, 0, 0, 0, slot, a.width_bytes, a.rows, false};
  ArrayCopy device = a;
  (in ? device.src : device.dst) = staged;
  CopyArgs host;
  host.width_bytes = a.width_bytes, host.height = a.rows;
  host.dst = in ? slot : a.dst.addr, host.dst_pitch = in ? a.width_bytes : a.dst.pitch;
  host.src = in ? a.src.addr : slot, host.src_pitch = in ? a.src.pitch : a.width_bytes;
  const Job job{this, Job::Kind::kCopyRows, host};
  if (Status s = in ? issue_job(queue, pending, job) : issue_array_copy(queue.stream, device); !s.ok()) return s;
  return in ? issue_array_copy(queue.stream, device) : issue_job(queue, pending, job);
}

Status CudaSpace::issue_job(CudaQueue& queue, Pending& pending, const Job& job) {
  const Driver& cu = context_->driver();
  pending.job = std::make_unique<Job>(job);
  return cu.status(cu.cuLaunchHostFunc(queue.stream, &run_job, pending.job.get()), cu.cuLaunchHostFunc,
                   "queueing a host function");
}

Status CudaSpace::issue_memset(CUstream stream, const MemsetArgs& a) {
  const Driver& cu = context_->driver();
  const auto byte = static_cast<unsigned char>(a.value);
  const auto half = static_cast<unsigned short>(a.value);
  const char* const doing = "setting device memory";
  if (a.rows == 1 || a.pitch == a.count * a.width) {
    const uint64_t n = a.count * a.rows;
    if (a.width == 1) return cu.status(cu.cuMemsetD8Async(a.dst, byte, n, stream), cu.cuMemsetD8Async, doing);
    if (a.width == 2) return cu.status(cu.cuMemsetD16Async(a.dst, half, n, stream), cu.cuMemsetD16Async, doing);
    return cu.status(cu.cuMemsetD32Async(a.dst, a.value, n, stream), cu.cuMemsetD32Async, doing);
  }
  if (a.width == 1)
    return cu.status(cu.cuMemsetD2D8Async(a.dst, a.pitch, byte, a.count, a.rows, stream), cu.cuMemsetD2D8Async, doing);
  if (a.width == 2)
    return cu.status(cu.cuMemsetD2D16Async(a.dst, a.pitch, half, a.count, a.rows, stream), cu.cuMemsetD2D16Async,
                     doing);
  return cu.status(cu.cuMemsetD2D32Async(a.dst, a.pitch, a.value, a.count, a.rows, stream), cu.cuMemsetD2D32Async,
                   doing);
}

// A kernel of the host executor failed, on the driver's thread, which may not call the driver: the watcher sees it.
void CudaSpace::host_kernel_failed(const Status& why) {
  std::lock_guard lock(mu_);
  if (host_failure_.ok()) host_failure_ = why;
  wake_.notify_one();
}

// The driver's thread; may not call the driver.
void CudaSpace::run_job(void* cookie) {
  Job& job = *static_cast<Job*>(cookie);
  std::atomic<uint32_t>& running = job.space->jobs_running_;
  running.fetch_add(1, std::memory_order_acq_rel);
  thread_local const SpaceOwner* told = nullptr;
  if (std::exchange(told, &job.space->owner_) != &job.space->owner_) job.space->owner_.on_thread_start();
  switch (job.kind) {
    case Job::Kind::kCopyRows: {
      t_inside = "staged copy";
      copy_rows(job.copy);
      break;
    }
    case Job::Kind::kFillRows: {
      t_inside = "memory set in host memory";
      fill_rows(job.memset);
      break;
    }
    case Job::Kind::kKernel: {
      const HostKernel& kernel = *job.kernel;
      t_inside = kernel.function->name.c_str();
      if (job.space->faulted_.load(std::memory_order_acquire)) break;
      LaunchArgs args = kernel.args;
      args.params = kernel.params.data();
      const RangeCheck check{&job.space->owner_, kernel.position, false};
      const Status done = run_host_function(*kernel.function, args, job.space->device_.ordinal, 0, check);
      if (!done.ok()) job.space->host_kernel_failed(done);
      break;
    }
    case Job::Kind::kToken: {
      t_inside = "host function";
      if (!job.space->stopping_.load(std::memory_order_acquire) && !job.space->faulted_.load(std::memory_order_acquire))
        job.space->owner_.host_function(job.token);
      break;
    }
  }
  t_inside = nullptr;
  running.fetch_sub(1, std::memory_order_acq_rel);
}

void CudaSpace::nop(const QueueRef& queue, Ticket ticket) {
  Command command;
  command.ticket = ticket;
  submit(queue, std::move(command));
}

void CudaSpace::copy(const QueueRef& ref, Ticket ticket, const CopyArgs& args) {
  context_->enter();
  const auto queue = std::static_pointer_cast<CudaQueue>(ref);
  std::unique_lock lock(mu_);
  auto piece = [&](Action action, const CopyArgs& part, bool last) {
    Command command;
    command.action = action;
    command.ticket = ticket;
    command.last = last;
    command.copy = part;
    submit_locked(queue, command, lock);
  };
  if (faulted_.load(std::memory_order_relaxed)) return piece(Action::kCopy, args, true);  // dropped
  if (args.dst_device && args.src_device) return piece(Action::kCopy, args, true);
  if (!args.dst_device && !args.src_device) return piece(Action::kHostCopy, args, true);
  const bool down = !args.dst_device;  // to the host
  if (linear(args)) {
    const uint64_t bytes = args.width_bytes * args.height;
    if (bytes <= std::min(HostMemory::kCellBytes, device_.staging_bytes) &&
        !host_->in_window(down ? args.dst : args.src, bytes)) {
      CopyArgs small = args;
      small.width_bytes = bytes, small.height = 1;
      return piece(Action::kCellCopy, small, true);
    }
    for (uint64_t done = 0; done < bytes;) {
      CopyArgs part = args;
      part.dst += done, part.src += done, part.height = 1;
      const uint64_t direct = host_->direct_bytes(down ? part.dst : part.src, bytes - done);
      part.width_bytes = direct ? direct : std::min(bytes - done, device_.staging_bytes);
      done += part.width_bytes;
      piece(direct ? Action::kCopy : Action::kStagedCopy, part, done == bytes);
    }
    return;
  }
  const uint64_t host_bytes = extent(args, down ? args.dst_pitch : args.src_pitch);
  if (host_->direct_bytes(down ? args.dst : args.src, host_bytes) == host_bytes)
    return piece(Action::kCopy, args, true);
  const uint64_t columns = std::min(args.width_bytes, device_.staging_bytes);
  const uint64_t rows = std::max<uint64_t>(1, device_.staging_bytes / columns);
  for (uint64_t y = 0; y < args.height; y += rows) {
    for (uint64_t x = 0; x < args.width_bytes; x += columns) {
      CopyArgs part = args;
      part.dst += y * args.dst_pitch + x;
      part.src += y * args.src_pitch + x;
      part.width_bytes = std::min(columns, args.width_bytes - x);
      part.height = std::min(rows, args.height - y);
      piece(Action::kStagedCopy, part, y + rows >= args.height && x + columns >= args.width_bytes);
    }
  }
}

void CudaSpace::copy_array(const QueueRef& ref, Ticket ticket, const ArrayCopy& args) {
  context_->enter();
  const auto queue = std::static_pointer_cast<CudaQueue>(ref);
  std::unique_lock lock(mu_);
  auto piece = [&](Action action, const ArrayCopy& part, bool last) {
    Command command;
    command.action = action;
    command.ticket = ticket;
    command.last = last;
    command.array_copy = std::make_shared<const ArrayCopy>(part);
    submit_locked(queue, command, lock);
  };
  if (faulted_.load(std::memory_order_relaxed)) return piece(Action::kArrayCopy, args, true);  // dropped
  auto on_host = [](const ArrayCopy::Side& side) { return !side.array && !side.device; };
  if (!on_host(args.dst) && !on_host(args.src)) return piece(Action::kArrayCopy, args, true);
  const bool in = on_host(args.src);
  const ArrayCopy::Side& host = in ? args.src : args.dst;
  const uint64_t bytes = ((args.slices - 1) * host.slice_rows + args.rows - 1) * host.pitch + args.width_bytes;
  if (host_->direct_bytes(host.addr, bytes) == bytes) return piece(Action::kArrayCopy, args, true);
  // Whole elements, of which the largest has 16 bytes.
  const uint64_t columns = std::min<uint64_t>(args.width_bytes, device_.staging_bytes / 16 * 16);
  const uint64_t rows = std::max<uint64_t>(1, device_.staging_bytes / columns);
  for (uint64_t z = 0; z < args.slices; z++) {
    for (uint64_t y = 0; y < args.rows; y += rows) {
      for (uint64_t x = 0; x < args.width_bytes; x += columns) {
        ArrayCopy part = args;
        part.width_bytes = std::min(columns, args.width_bytes - x);
        part.rows = std::min(rows, args.rows - y);
        part.slices = 1;
        (in ? part.src : part.dst).addr += (z * host.slice_rows + y) * host.pitch + x;
        ArrayCopy::Side& array = in ? part.dst : part.src;
        array.x_bytes += x, array.y += y, array.z += z;
        piece(Action::kStagedArrayCopy, part,
              z + 1 == args.slices && y + rows >= args.rows && x + columns >= args.width_bytes);
      }
    }
  }
}

StatusOr<ArrayRef> CudaSpace::create_array(const ArrayShape& shape) {
  auto array = CudaArray::create(context_, shape);
  if (!array.ok()) return std::move(array).status();
  return ArrayRef(*array);
}

StatusOr<TextureRef> CudaSpace::create_texture(const TextureArgs& args, const ArrayRef& array) {
  auto texture = CudaTexture::create(context_, args, array);
  if (!texture.ok()) return std::move(texture).status();
  return TextureRef(*texture);
}

void CudaSpace::memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& args) {
  Command command;
  command.action = host_->in_window(args.dst, 1) ? Action::kHostMemset : Action::kMemset;
  command.ticket = ticket;
  command.memset = args;
  submit(queue, std::move(command));
}

void CudaSpace::launch(const QueueRef& queue, Ticket ticket, const FunctionRef& function, const LaunchArgs& args) {
  Command command;
  command.action = Action::kLaunch;
  command.ticket = ticket;
  command.launch = args;
  command.attributes = driver_attributes(args.attributes, args.n_attributes);
  if (is_executor(function))
    command.executor = std::static_pointer_cast<HostFunction>(function);
  else
    command.function = std::static_pointer_cast<CudaFunction>(function);
  submit(queue, std::move(command));
}

void CudaSpace::host_function(const QueueRef& queue, Ticket ticket, uint64_t token) {
  Command command;
  command.action = Action::kHostFunction;
  command.ticket = ticket;
  command.token = token;
  submit(queue, std::move(command));
}

}  // namespace devproxy::hal::cuda
