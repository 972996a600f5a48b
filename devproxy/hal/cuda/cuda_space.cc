#include "devproxy/hal/cuda/cuda_space.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <typeinfo>
#include <utility>

#include "devproxy/csrc/base/log.h"
#include "devproxy/hal/cuda/output.h"
#include "devproxy/hal/host_module/descriptor.h"

namespace devproxy::hal::cuda {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr size_t kLinkLogBytes = 16u << 10;
// A tie between the device's clock and ours: how long it holds (clocks drift), and how short the moment should be.
constexpr uint64_t kTieNs = 1'000'000'000, kNarrowNs = 50'000;
constexpr int kTieTries = 8;
constexpr auto kProbeEvery = std::chrono::milliseconds(1);  // asking a silent context whether it has failed

void copy_rows(const CopyArgs& a) {
  auto* dst = reinterpret_cast<uint8_t*>(a.dst);
  const auto* src = reinterpret_cast<const uint8_t*>(a.src);
  for (uint64_t row = 0; row < a.height; row++)
    std::memmove(dst + row * a.dst_pitch, src + row * a.src_pitch, a.width_bytes);
}

void fill_rows(const MemsetArgs& a) {
  for (uint64_t row = 0; row < a.rows; row++) {
    const uint64_t at = a.dst + row * a.pitch;
    if (a.width == 1) std::memset(reinterpret_cast<void*>(at), static_cast<int>(a.value & 0xff), a.count);
    if (a.width == 2) std::fill_n(reinterpret_cast<uint16_t*>(at), a.count, static_cast<uint16_t>(a.value));
    if (a.width == 4) std::fill_n(reinterpret_cast<uint32_t*>(at), a.count, a.value);
  }
}

uint64_t extent(const CopyArgs& a, uint64_t pitch) { return (a.height - 1) * pitch + a.width_bytes; }

std::vector<CUlaunchAttribute> driver_attributes(const LaunchAttribute* list, size_t n) {
  std::vector<CUlaunchAttribute> out(n);
  for (size_t i = 0; i < n; i++) {
    out[i].id = static_cast<CUlaunchAttributeID>(list[i].id);
    static_assert(sizeof out[i].value == sizeof list[i].value);
    std::memcpy(&out[i].value, list[i].value, sizeof out[i].value);
  }
  return out;
}

CUlaunchConfig launch_config(const uint32_t (&grid)[3], const uint32_t (&block)[3], uint64_t shared_bytes,
                             CUstream stream, std::vector<CUlaunchAttribute>* attributes) {
  return {grid[0],
          grid[1],
          grid[2],
          block[0],
          block[1],
          block[2],
          static_cast<unsigned>(shared_bytes),
          stream,
          attributes->data(),
          static_cast<unsigned>(attributes->size())};
}

// Both classes are final. This is asked at each launch, where a look at the type's name costs less than a cast.
bool is_executor(const ModuleRef& module) { return typeid(*module) == typeid(HostModule); }
bool is_executor(const FunctionRef& function) { return typeid(*function) == typeid(HostFunction); }

bool linear(const CopyArgs& a) {
  return a.height == 1 || (a.dst_pitch == a.width_bytes && a.src_pitch == a.width_bytes);
}

}  // namespace

// -- beginning and end ----------------------------------------------------------------------------------------------

StatusOr<std::unique_ptr<Space>> CudaSpace::open(const CudaConfig& device, std::shared_ptr<const Driver> driver,
                                                 CUdevice number, const SpaceConfig& config, SpaceOwner& owner) {
  auto context =
      config.framework ? Context::primary(std::move(driver), number) : Context::make(std::move(driver), number);
  if (!context.ok()) return std::move(context).status();
  auto space = std::make_unique<CudaSpace>(device, config, owner, *context);
  if (Status s = space->start(); !s.ok()) return s;
  return std::unique_ptr<Space>(std::move(space));
}

CudaSpace::CudaSpace(const CudaConfig& device, const SpaceConfig& config, SpaceOwner& owner,
                     std::shared_ptr<Context> context)
    : device_(device), config_(config), owner_(owner), context_(std::move(context)) {}

Status CudaSpace::start() {
  auto memory = DeviceMemory::reserve(context_, device_, config_);
  if (!memory.ok()) return std::move(memory).status();
  memory_ = std::move(*memory);
  auto host = HostMemory::make(context_, device_, config_);
  if (!host.ok()) return std::move(host).status();
  host_ = std::move(*host);
  const Driver& cu = context_->enter();
  Status s = cu.status(cu.cuStreamCreateWithPriority(&transfer_, CU_STREAM_NON_BLOCKING, 0),
                       cu.cuStreamCreateWithPriority, "making the transfer stream");
  for (int i = 0; i < 2 && s.ok(); i++) {
    io_slots_[i] = host_->take_slot();
    if (!io_slots_[i]) return {kOutOfMemory, "no page-locked host memory for dump and restore"};
    s = cu.status(cu.cuEventCreate(&io_done_[i], CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING), cu.cuEventCreate,
                  "making the transfer events");
  }
  if (!s.ok()) return s;
  watcher_ = std::thread([this] { watch(); });
  return {};
}

void CudaSpace::stop() {
  {
    std::lock_guard lock(mu_);
    stopping_.store(true, std::memory_order_release);
    held_.clear();
    wake_.notify_one();
  }
  if (!watcher_.joinable()) return;
  watcher_.join();
  // What the driver has cannot be taken back. A kernel that never ends would keep the whole server here, so the wait
  // has an end; what then happens is the driver's own way of destroying a context that works.
  const Driver& cu = context_->enter();
  const auto until = Clock::now() + std::chrono::milliseconds(device_.stop_wait_ms);
  for (const auto& [index, queue] : queues_) leaving_.push_back(queue);
  for (const CudaQueueRef& queue : leaving_) {
    if (!queue->stream || dead_) continue;
    while (cu.cuStreamQuery(queue->stream) == CUDA_ERROR_NOT_READY) {
      if (Clock::now() >= until) {
        DP_LOG(kError, kDevice, 0,
               "stream %u still runs %u ms after its process ended; its context is destroyed under it", queue->index,
               device_.stop_wait_ms);
        for (const CudaQueueRef& other : leaving_)
          for (Pending& pending : other->pending) (void)pending.job.release();  // the driver may still call them
        break;
      }
      std::this_thread::sleep_for(microseconds(100));
    }
  }
  // In a context that failed, streams say nothing about host functions that had begun.
  while (jobs_running_.load(std::memory_order_acquire) && Clock::now() < until)
    std::this_thread::sleep_for(microseconds(100));
}

CudaSpace::~CudaSpace() {
  stop();
  const Driver& cu = context_->enter();
  for (const CudaQueueRef& queue : leaving_) close_queue(*queue);
  for (CUevent event : event_pool_) (void)cu.cuEventDestroy(event);
  for (CUevent event : io_done_)
    if (event) (void)cu.cuEventDestroy(event);
  if (tie_) (void)cu.cuEventDestroy(tie_);
  if (transfer_) (void)cu.cuStreamDestroy(transfer_);
  host_.reset();
  memory_.reset();
}

// Precondition: the queue has no work, or nobody will ever look at it again.
void CudaSpace::close_queue(CudaQueue& queue) {
  const Driver& cu = context_->enter();
  for (const auto& [sequence, event] : queue.marks) event_pool_.push_back(event);
  queue.marks.clear();
  if (queue.slot) host_->give_slot(std::exchange(queue.slot, nullptr));
  if (queue.stream && queue.kind != QueueKind::kLegacy) (void)cu.cuStreamDestroy(queue.stream);
  queue.stream = nullptr;
}

// -- queues ---------------------------------------------------------------------------------------------------------

QueueRef CudaSpace::create_queue(QueueKind kind, int32_t priority, uint32_t index) {
  const Driver& cu = context_->enter();
  auto queue = std::make_shared<CudaQueue>();
  queue->kind = kind;
  queue->index = index;
  if (kind == QueueKind::kLegacy) {
    queue->stream = CU_STREAM_LEGACY;
  } else {
    // cuda.h: a priority outside the device's range is moved into it.
    const unsigned flags = kind == QueueKind::kNonBlocking ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT;
    queue->made = cu.status(cu.cuStreamCreateWithPriority(&queue->stream, flags, priority),
                            cu.cuStreamCreateWithPriority, "creating stream " + std::to_string(index));
  }
  std::unique_lock lock(mu_);
  queue->word = host_->word(index);
  if (queue->word) queue->word_device = host_->word_device(index);
  for (const CudaQueueRef& old : leaving_)  // the latest of several wins: it waited for those before it
    if (old->index == index && (!old->pending.empty() || old->completing))
      queue->before = old, queue->must_wait_before = true;
  queues_[index] = queue;
  if (!queue->made.ok()) fault(queue->made, lock);  // the client was told long ago that the stream exists
  return queue;
}

void CudaSpace::destroy_queue(const QueueRef& ref) {
  std::unique_lock lock(mu_);
  const auto queue = std::static_pointer_cast<CudaQueue>(ref);
  const auto it = queues_.find(queue->index);
  if (it == queues_.end() || it->second != queue) return;
  leaving_.push_back(queue);  // the driver's stream lives until its work is done, so that marks can be made and seen
  queues_.erase(it);
  reap();
}

void CudaSpace::reap() {
  std::erase_if(leaving_, [&](const CudaQueueRef& queue) {
    if (!queue->pending.empty() || queue->completing) return false;
    close_queue(*queue);
    return true;
  });
}

// cuda.h: an attribute applies to later work and not to earlier. So it is a command where the space keeps commands
// back; where it keeps none, the driver's own result is the answer.
Status CudaSpace::set_queue_attribute(const QueueRef& ref, Ticket ticket, const LaunchAttribute& attribute) {
  context_->enter();
  const auto queue = std::static_pointer_cast<CudaQueue>(ref);
  auto driver = driver_attributes(&attribute, 1);
  std::unique_lock lock(mu_);
  if (faulted_.load(std::memory_order_relaxed)) return fault_;
  if (!queue->made.ok()) return queue->made;
  if (held_.empty()) return issue_attribute(*queue, driver.front());
  Command command;
  command.action = Action::kAttribute;
  command.ticket = ticket;
  command.last = false;  // nobody waits for its ticket
  command.attributes = std::move(driver);
  submit_locked(queue, command, lock);
  return {};
}

Status CudaSpace::issue_attribute(const CudaQueue& queue, const CUlaunchAttribute& attribute) {
  const Driver& cu = context_->driver();
  return cu.status(cu.cuStreamSetAttribute(queue.stream, attribute.id, &attribute.value), cu.cuStreamSetAttribute,
                   "setting attribute " + std::to_string(attribute.id) + " of stream " + std::to_string(queue.index));
}

Status CudaSpace::reset_persisting_l2() {
  const Driver& cu = context_->enter();
  return cu.status(cu.cuCtxResetPersistingL2Cache(), cu.cuCtxResetPersistingL2Cache,
                   "making persisting lines of the cache normal ones");
}

uint64_t CudaSpace::oldest_pending() {
  if (idle()) return UINT64_MAX;
  uint64_t oldest = UINT64_MAX;
  std::lock_guard lock(mu_);
  auto visit = [&](const CudaQueue& queue) {
    if (queue.completing)
      oldest = std::min(oldest, queue.completing);
    else if (!queue.pending.empty())
      oldest = std::min(oldest, queue.pending.front().ticket.position);
  };
  for (const auto& [index, queue] : queues_) visit(*queue);
  for (const CudaQueueRef& queue : leaving_) visit(*queue);
  return oldest;
}

// -- submission -----------------------------------------------------------------------------------------------------

void CudaSpace::submit(const QueueRef& ref, Command command) {
  context_->enter();
  std::unique_lock lock(mu_);
  submit_locked(std::static_pointer_cast<CudaQueue>(ref), command, lock);
}

void CudaSpace::submit_locked(const CudaQueueRef& queue, Command& command, std::unique_lock<std::mutex>& lock) {
  pending_all_.fetch_add(1, std::memory_order_relaxed);
  if (command.event && command.action == Action::kRecord) command.event->submitted++;
  Pending& pending = queue->pending.emplace_back();
  pending.sequence = ++sequence_;
  pending.ticket = command.ticket;
  pending.last = command.last;
  if (!std::exchange(queue->busy, true)) busy_.push_back(queue);
  if (asleep_) asleep_ = false, wake_.notify_one();
  if (faulted_.load(std::memory_order_relaxed)) {
    pending.state = Pending::State::kDropped;
  } else if (!held_.empty() || issuing_held_ || !may_issue(command)) {
    pending.state = Pending::State::kHeld;
    if (command.launch.params_bytes) {
      command.params.assign(command.launch.params, command.launch.params + command.launch.params_bytes);
      command.launch.params = nullptr;
    }
    held_.push_back({queue, std::move(command), &pending});
  } else if (Status s = issue(queue, command, pending, lock); !s.ok()) {
    fault(s, lock);
  }
}

bool CudaSpace::may_issue(const Command& command) const {
  return in_flight_ < device_.max_in_flight && !(command.executor && tokens_ != 0);
}

// Hands one command to the driver. A failure leaves it dropped.
Status CudaSpace::issue(const CudaQueueRef& ref, Command& command, Pending& pending,
                        std::unique_lock<std::mutex>& lock) {
  const Driver& cu = context_->driver();
  CudaQueue& queue = *ref;
  pending.state = Pending::State::kDropped;
  if (!queue.made.ok()) return queue.made;
  if (Status s = mark_other_side(queue); !s.ok()) return s;
  if (command.action == Action::kHostFunction || command.action == Action::kWait)
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

  Status s;
  switch (command.action) {
    case Action::kNop: break;
    case Action::kCopy: s = issue_copy(queue.stream, command.copy); break;
    case Action::kStagedCopy: s = issue_staged(queue, command.copy, pending); break;
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
  in_flight_++;
  if (command.action == Action::kRecord || ++queue.since_mark >= device_.mark_every) return mark(queue);
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
  if (device_.host_executor) {
    Job job{this, Job::Kind::kKernel};
    job.kernel = std::make_shared<HostKernel>(
        HostKernel{command.executor, args, {args.params, args.params + args.params_bytes}, command.ticket.position});
    return issue_job(queue, pending, job);
  }
  pending.state = Pending::State::kIssuing;
  lock.unlock();
  t_inside = command.executor->name.c_str();
  const RangeCheck check{&owner_, command.ticket.position, /*on_submitter=*/!issuing_held_};
  Status done =
      run_host_function(*command.executor, args, device_.ordinal, reinterpret_cast<uint64_t>(queue.stream), check);
  t_inside = nullptr;
  lock.lock();
  pending.state = Pending::State::kDropped;
  return done;
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

// -- events ---------------------------------------------------------------------------------------------------------

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

// -- marks and completion -------------------------------------------------------------------------------------------

Status CudaSpace::mark(CudaQueue& queue) {
  if (queue.marked == queue.issued) return {};
  const Driver& cu = context_->driver();
  const char* const doing = "marking how far a stream is";
  if (queue.word) {
    // cuda.h: by default the write comes behind a memory barrier, so what the commands wrote to host memory is there.
    if (Status s = cu.status(
            cu.cuStreamWriteValue64(queue.stream, queue.word_device, queue.issued, CU_STREAM_WRITE_VALUE_DEFAULT),
            cu.cuStreamWriteValue64, doing);
        !s.ok())
      return s;
  } else {
    CUevent event = nullptr;
    if (event_pool_.empty()) {
      if (Status s = cu.status(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), cu.cuEventCreate, doing); !s.ok())
        return s;
    } else {
      event = event_pool_.back();
      event_pool_.pop_back();
    }
    if (Status s = cu.status(cu.cuEventRecord(event, queue.stream), cu.cuEventRecord, doing); !s.ok()) {
      event_pool_.push_back(event);
      return s;
    }
    queue.marks.push_back({queue.issued, event});
  }
  queue.marked = queue.issued;
  queue.since_mark = 0;
  return {};
}

Status CudaSpace::mark_other_side(const CudaQueue& queue) {
  if (queue.kind == QueueKind::kNonBlocking) return {};
  const QueueKind other = queue.kind == QueueKind::kLegacy ? QueueKind::kBlocking : QueueKind::kLegacy;
  for (const CudaQueueRef& busy : busy_)
    if (busy->kind == other)
      if (Status s = mark(*busy); !s.ok()) return s;
  return {};
}

// Updates queue.reached.
Status CudaSpace::look(CudaQueue& queue) {
  if (queue.word) {
    queue.reached = std::max(queue.reached, queue.word->load(std::memory_order_acquire));
    return {};
  }
  const Driver& cu = context_->driver();
  while (!queue.marks.empty()) {
    const auto [sequence, event] = queue.marks.front();
    const CUresult r = cu.cuEventQuery(event);
    if (r == CUDA_ERROR_NOT_READY) return {};
    if (Status s = cu.status(r, cu.cuEventQuery, "work on the GPU failed"); !s.ok()) return s;
    queue.reached = sequence;
    event_pool_.push_back(event);
    queue.marks.pop_front();
  }
  return {};
}

// The first failure is told, once; nothing is executed after it. hal.h knows only execution faults, so a command that
// the driver refuses is one too: its call returned long ago, and the ones behind it count on its effect.
void CudaSpace::fault(const Status& why, std::unique_lock<std::mutex>& lock) {
  context_->enter();
  if (!alive()) dead_ = true;
  if (faulted_.exchange(true, std::memory_order_acq_rel)) return;
  fault_ = why;
  for (const Held& held : held_) held.pending->state = Pending::State::kDropped;
  held_.clear();
  lock.unlock();
  owner_.on_fault(why.code(), why.text().c_str());
  lock.lock();
  fault_told_ = true;
  wake_.notify_one();
}

void CudaSpace::issue_held(std::unique_lock<std::mutex>& lock) {
  while (!held_.empty() && may_issue(held_.front().command)) {
    Held held = std::move(held_.front());
    held_.pop_front();
    issuing_held_ = true;
    Status s = issue(held.queue, held.command, *held.pending, lock);
    issuing_held_ = false;
    if (!s.ok()) return fault(s, lock);
  }
}

// Takes what has completed out of the queues, in order.
void CudaSpace::collect(std::vector<Done>* done, std::unique_lock<std::mutex>& lock) {
  Status failed;
  for (const CudaQueueRef& queue : busy_) {
    if (queue->before) {
      if (!queue->before->pending.empty() || queue->before->completing) continue;
      queue->before.reset();
    }
    if (!dead_)
      if (Status s = look(*queue); !s.ok()) failed = std::move(s);
    while (!queue->pending.empty()) {
      Pending& front = queue->pending.front();
      const bool issued = front.state == Pending::State::kIssued;
      const bool over = issued ? front.sequence <= queue->reached || (dead_ && fault_told_)
                               : front.state == Pending::State::kDropped && fault_told_;
      if (!over) break;
      if (issued) in_flight_--;
      if (front.token) tokens_--;
      if (!queue->completing) queue->completing = front.ticket.position;
      // Behind a fault the driver may know a job that it never ran, or that it is just running.
      if (front.job && front.sequence > queue->reached) graveyard_.push_back(std::move(front.job));
      done->push_back({queue, std::move(front)});
      queue->pending.pop_front();
    }
  }
  std::erase_if(busy_, [](const CudaQueueRef& queue) {
    if (!queue->pending.empty()) return false;
    queue->busy = false;
    return true;
  });
  if (!failed.ok()) fault(failed, lock);
}

void CudaSpace::watch() {
  owner_.on_thread_start();
  prctl(PR_SET_TIMERSLACK, 1000);  // ns; the default of 50 us is as long as a whole nap
  const Driver& cu = context_->enter();
  std::vector<Done> done;
  auto moved = Clock::now(), probed = moved;
  uint32_t nap_us = 1;
  std::unique_lock lock(mu_);
  while (!stopping_.load(std::memory_order_relaxed)) {
    collect(&done, lock);
    if (!done.empty()) {
      lock.unlock();
      for (Done& d : done) {
        if (d.pending.last) owner_.on_complete(d.queue->index, d.pending.ticket.position, d.pending.ticket.tag);
        d.pending.keeps.reset();  // may unload a module
        pending_all_.fetch_sub(1, std::memory_order_release);
      }
      lock.lock();
      for (Done& d : done) d.queue->completing = 0;
      done.clear();
      issue_held(lock);
      reap();
      moved = probed = Clock::now();
      nap_us = 1;
      continue;
    }
    if (!faulted_.load(std::memory_order_relaxed)) issue_held(lock);
    Status failed;
    if (!dead_)
      for (const CudaQueueRef& queue : busy_)
        if (Status s = mark(*queue); !s.ok()) failed = std::move(s);
    if (!host_failure_.ok()) failed = std::exchange(host_failure_, {});
    const auto now = Clock::now();
    if (failed.ok() && !dead_ && !busy_.empty() && now - probed > kProbeEvery) {
      // A context that failed writes no word any more; any call tells.
      probed = now;
      if (const CUresult r = cu.cuStreamQuery(transfer_); r != CUDA_ERROR_NOT_READY)
        failed = cu.status(r, cu.cuStreamQuery, "work on the GPU failed");
    }
    if (!failed.ok()) {
      fault(failed, lock);
      continue;
    }
    if (busy_.empty() && now - moved > microseconds(device_.linger_us)) {
      asleep_ = true;
      wake_.wait(lock, [&] { return !asleep_ || stopping_.load(std::memory_order_relaxed); });
      asleep_ = false;
      moved = probed = Clock::now();
      nap_us = 1;
    } else if (now - moved < microseconds(device_.spin_us)) {
      lock.unlock();
      sched_yield();
      lock.lock();
    } else {
      wake_.wait_for(lock, microseconds(nap_us));
      nap_us = std::min(nap_us * 2, std::max(1u, device_.nap_us));
    }
  }
}

// -- modules --------------------------------------------------------------------------------------------------------

// `place` is not asked: the driver chooses where a module's variables lie, and no call moves them. See variables().
StatusOr<ModuleRef> CudaSpace::load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) {
  if (names_executor(image, image_bytes)) {
    if (!config_.framework)
      return Status(
          kNotSupported,
          "a framework's operators need the process's memory in the context of the framework's runtime, and this "
          "process began without: import the framework before the first CUDA call");
    context_->enter();
    auto executor = HostModule::load(
        image, image_bytes,
        {device_.ordinal, device_.ordinal, !device_.host_executor, device_.folder, config_, &owner_}, place);
    if (!executor.ok()) return std::move(executor).status();
    std::lock_guard lock(modules_mu_);
    executors_.push_back(*executor);
    return ModuleRef(*executor);
  }
  auto module = CudaModule::load(context_, image, image_bytes);
  if (!module.ok()) return std::move(module).status();
  std::lock_guard lock(modules_mu_);
  std::erase_if(modules_, [](const std::weak_ptr<CudaModule>& m) { return m.expired(); });
  modules_.push_back(*module);
  return ModuleRef(*module);
}

StatusOr<FunctionRef> CudaSpace::get_function(const ModuleRef& module, const std::string& name, FunctionInfo* info) {
  if (is_executor(module)) {
    auto function = HostFunction::get(std::static_pointer_cast<HostModule>(module), name);
    if (!function.ok()) return std::move(function).status();
    info->max_threads = 1024;
    return FunctionRef(*function);
  }
  auto function = CudaFunction::get(std::static_pointer_cast<CudaModule>(module), name, info);
  if (!function.ok()) return std::move(function).status();
  return FunctionRef(*function);
}

// facts/driver-shim.md, hazard 2: the address of a variable is the driver's choice, so another server may have it
// elsewhere. Kernels find it there; a job that was told the first address is refused by the restore.
StatusOr<Space::Global> CudaSpace::get_global(const ModuleRef& ref, const std::string& name) {
  if (is_executor(ref)) return Status(kNotFound, "an executor has no global '" + name + "'");
  const auto& module = static_cast<const CudaModule&>(*ref);
  const Driver& cu = context_->enter();
  CUdeviceptr addr = 0;
  size_t bytes = 0;
  if (Status s = cu.status(cu.cuModuleGetGlobal(&addr, &bytes, module.handle(), name.c_str()), cu.cuModuleGetGlobal,
                           "looking for global '" + name + "'");
      !s.ok())
    return s;
  return Global{addr, bytes};
}

std::vector<Space::Global> CudaSpace::globals(const ModuleRef&) { return {}; }  // nothing was placed

StatusOr<std::vector<Space::Variable>> CudaSpace::variables(const ModuleRef& ref) {
  if (is_executor(ref)) return std::vector<Variable>{};
  const auto& module = static_cast<const CudaModule&>(*ref);
  if (!module.unlisted().ok()) return Status(module.unlisted());
  return std::vector<Variable>(module.variables());
}

bool CudaSpace::portable(const ModuleRef& module) { return is_executor(module); }

// A framework's kernels print where an assertion of theirs fails, and that is all.
bool CudaSpace::prints(const ModuleRef& ref) {
  if (is_executor(ref)) return true;
  return static_cast<const CudaModule&>(*ref).prints();
}

StatusOr<std::vector<std::string>> CudaSpace::function_names(const ModuleRef& module) {
  if (is_executor(module))
    return Status(kNotSupported, "an executor's kernels are a framework's operators: ask by name");
  return static_cast<const CudaModule&>(*module).function_names();
}

StatusOr<std::vector<uint8_t>> CudaSpace::save_module(const ModuleRef& module) {
  if (!is_executor(module)) return std::vector<uint8_t>{};
  context_->enter();
  return static_cast<const HostModule&>(*module).save_state();
}

Status CudaSpace::load_module_state(const ModuleRef& module, const uint8_t* from, size_t bytes) {
  if (!is_executor(module)) return {kNotSupported, "only an executor has a state"};
  context_->enter();
  return static_cast<const HostModule&>(*module).load_state(from, bytes);
}

void CudaSpace::trim() {
  context_->enter();
  std::lock_guard lock(modules_mu_);
  for (const std::weak_ptr<HostModule>& executor : executors_)
    if (const auto living = executor.lock()) living->trim();
}

// The driver writes what kernels printed when it synchronises. The whole context, where it has nothing to do, so that
// this cannot wait for somebody whom the dispatch thread would have to serve; else an idle stream of ours [open: does
// that write it too]. After a fault that one fails before it writes, and the whole context does not wait any more: it
// fails too, and writes what an assertion said. The client hears of a fault before its launch counts as done here.
void CudaSpace::take_output(std::string* out, std::string* err) {
  const Driver& cu = context_->enter();
  if (idle() || cu.cuStreamSynchronize(transfer_) != CUDA_SUCCESS) (void)cu.cuCtxSynchronize();
  Output::take(out, err);
}

void CudaSpace::host_window(uint64_t addr, uint64_t bytes) {
  std::lock_guard lock(mu_);
  host_->add_window(addr, bytes);
}

// Kernels reach what is registered, so it is registered when the client has it, whether it asks for an address or not.
void CudaSpace::host_allocated(uint64_t addr, uint64_t bytes) {
  if (!device_.register_host_window) return;
  context_->enter();
  std::lock_guard lock(mu_);
  for (uint64_t done = 0, n; done < bytes && (n = host_->direct_bytes(addr + done, bytes - done)) != 0;) done += n;
}

StatusOr<uint64_t> CudaSpace::host_device_address(uint64_t addr, uint64_t bytes) {
  if (!device_.register_host_window)
    return Status(
        kNotSupported,
        "host memory is not registered with the driver, so kernels do not see it (DEVPROXY_CUDA_REGISTER_WINDOW=1 "
        "in devproxy-run's environment registers it)");
  const Driver& cu = context_->enter();
  std::lock_guard lock(mu_);
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t n = host_->direct_bytes(addr + done, bytes - done);
    if (!n) return Status(kNotSupported, "the driver did not register the pinned window, so kernels do not see it");
    done += n;
  }
  CUdeviceptr device = 0;
  if (Status s = cu.status(cu.cuMemHostGetDevicePointer(&device, reinterpret_cast<void*>(addr), 0),
                           cu.cuMemHostGetDevicePointer, "asking by which address kernels see host memory");
      !s.ok())
    return s;
  if (device != addr)
    return Status(kNotSupported,
                  "the driver shows host memory to kernels at another address, which would not survive a "
                  "migration");
  return uint64_t{device};
}

Status CudaSpace::link(const std::vector<LinkOption>& options, const std::vector<LinkInput>& inputs, LinkOutput* out) {
  const Driver& cu = context_->enter();
  if (!cu.cuLinkCreate.function || inputs.empty())
    return cu.status(cu.cuLinkCreate.function ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED, cu.cuLinkCreate, "linking");
  // The job's own log buffers are in another process; these take their place.
  std::vector<char> info(kLinkLogBytes), error(kLinkLogBytes);
  std::vector<CUjit_option> ids = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER,
                                   CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  // cuda.h: a number is passed in the pointer itself. The driver writes the sizes back, so the list lives until the
  // end.
  std::vector<void*> values = {info.data(), reinterpret_cast<void*>(kLinkLogBytes - 1), error.data(),
                               reinterpret_cast<void*>(kLinkLogBytes - 1)};
  for (const LinkOption& option : options) {
    ids.push_back(static_cast<CUjit_option>(option.id));
    values.push_back(reinterpret_cast<void*>(option.value));
  }
  CUlinkState state = nullptr;
  Status s = cu.status(cu.cuLinkCreate(static_cast<unsigned>(ids.size()), ids.data(), values.data(), &state),
                       cu.cuLinkCreate, "beginning a link");
  if (!s.ok()) return s;
  for (const LinkInput& input : inputs) {
    // PTX is text: the driver wants its NUL counted, and the caller may not have counted it.
    std::vector<uint8_t> data(input.data, input.data + input.bytes);
    if (input.type == CU_JIT_INPUT_PTX && data.back() != 0) data.push_back(0);
    s = cu.status(cu.cuLinkAddData(state, static_cast<CUjitInputType>(input.type), data.data(), data.size(),
                                   input.name.empty() ? nullptr : input.name.c_str(), 0, nullptr, nullptr),
                  cu.cuLinkAddData, "linking '" + input.name + "'");
    if (!s.ok()) break;
  }
  void* image = nullptr;
  size_t bytes = 0;
  if (s.ok()) s = cu.status(cu.cuLinkComplete(state, &image, &bytes), cu.cuLinkComplete, "linking");
  if (s.ok()) out->image.assign(static_cast<uint8_t*>(image), static_cast<uint8_t*>(image) + bytes);
  (void)cu.cuLinkDestroy(state);
  out->info = info.data();
  out->error = error.data();
  return s;
}

Status CudaSpace::tensor_map(const TensorMapArgs& a, uint8_t (&out)[kTensorMapBytes]) {
  const Driver& cu = context_->enter();
  CUtensorMap map;
  static_assert(sizeof map == sizeof out);
  std::memcpy(&map, a.map, sizeof map);
  void* const address = reinterpret_cast<void*>(a.address);
  const auto* const dim = reinterpret_cast<const cuuint64_t*>(a.dim);
  const cuuint64_t* const strides = a.has_strides ? reinterpret_cast<const cuuint64_t*>(a.strides) : nullptr;
  const auto type = static_cast<CUtensorMapDataType>(a.data_type);
  const auto interleave = static_cast<CUtensorMapInterleave>(a.interleave);
  const auto swizzle = static_cast<CUtensorMapSwizzle>(a.swizzle);
  const auto promotion = static_cast<CUtensorMapL2promotion>(a.l2_promotion);
  const auto fill = static_cast<CUtensorMapFloatOOBfill>(a.oob_fill);
  Status s;
  switch (static_cast<TensorMapKind>(a.kind)) {
    case TensorMapKind::kTiled:
      s = cu.status(cu.cuTensorMapEncodeTiled(&map, type, a.rank, address, dim, strides, a.box, a.element_strides,
                                              interleave, swizzle, promotion, fill),
                    cu.cuTensorMapEncodeTiled, "encoding a tensor map");
      break;
    case TensorMapKind::kIm2col:
      s = cu.status(cu.cuTensorMapEncodeIm2col(&map, type, a.rank, address, dim, strides, a.lower, a.upper, a.channels,
                                               a.pixels, a.element_strides, interleave, swizzle, promotion, fill),
                    cu.cuTensorMapEncodeIm2col, "encoding a tensor map");
      break;
    case TensorMapKind::kReplaceAddress:
      s = cu.status(cu.cuTensorMapReplaceAddress(&map, address), cu.cuTensorMapReplaceAddress,
                    "replacing a tensor map's address");
      break;
  }
  if (s.ok()) std::memcpy(out, &map, sizeof map);
  return s;
}

Status CudaSpace::set_limit(uint32_t limit, uint64_t value) {
  const Driver& cu = context_->enter();
  return cu.status(cu.cuCtxSetLimit(static_cast<CUlimit>(limit), value), cu.cuCtxSetLimit,
                   "setting limit " + std::to_string(limit) + " to " + std::to_string(value));
}

StatusOr<uint64_t> CudaSpace::get_limit(uint32_t limit) {
  const Driver& cu = context_->enter();
  size_t value = 0;
  if (Status s = cu.status(cu.cuCtxGetLimit(&value, static_cast<CUlimit>(limit)), cu.cuCtxGetLimit,
                           "asking for limit " + std::to_string(limit));
      !s.ok())
    return s;
  return uint64_t{value};
}

bool CudaSpace::in_variable(uint64_t addr, uint64_t bytes) {
  std::lock_guard lock(modules_mu_);
  return std::any_of(modules_.begin(), modules_.end(), [&](const std::weak_ptr<CudaModule>& m) {
    const auto module = m.lock();
    return module && module->has(addr, bytes);
  });
}

Status CudaSpace::set_attribute(const FunctionRef& ref, uint32_t attribute, int32_t value) {
  if (is_executor(ref)) return {kNotSupported, "an operator has no attributes to set"};
  const auto& function = static_cast<const CudaFunction&>(*ref);
  const Driver& cu = context_->enter();
  return cu.status(cu.cuFuncSetAttribute(function.handle, static_cast<CUfunction_attribute>(attribute), value),
                   cu.cuFuncSetAttribute,
                   "setting attribute " + std::to_string(attribute) + " of '" + function.name + "'");
}

StatusOr<int64_t> CudaSpace::occupancy(const FunctionRef& ref, const OccupancyQuery& query) {
  if (is_executor(ref)) return Status(kNotSupported, "an operator is many kernels, so it has no occupancy");
  const auto& function = static_cast<const CudaFunction&>(*ref);
  const Driver& cu = context_->enter();
  const std::string doing = "asking how much of '" + function.name + "' runs at once";
  auto attributes = driver_attributes(query.attributes, query.n_attributes);
  const CUlaunchConfig config = launch_config(query.grid, query.block, query.shared_bytes, nullptr, &attributes);
  const int threads = static_cast<int>(query.block[0]), blocks = static_cast<int>(query.grid[0]);
  int count = 0;
  size_t bytes = 0;
  Status s;
  switch (query.kind) {
    case OccupancyKind::kActiveBlocks:
      s = cu.status(cu.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&count, function.handle, threads,
                                                                            query.shared_bytes, query.flags),
                    cu.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, doing);
      break;
    case OccupancyKind::kAvailableShared:
      s = cu.status(cu.cuOccupancyAvailableDynamicSMemPerBlock(&bytes, function.handle, blocks, threads),
                    cu.cuOccupancyAvailableDynamicSMemPerBlock, doing);
      break;
    case OccupancyKind::kActiveClusters:
      s = cu.status(cu.cuOccupancyMaxActiveClusters(&count, function.handle, &config), cu.cuOccupancyMaxActiveClusters,
                    doing);
      break;
    case OccupancyKind::kMaxClusterSize:
      s = cu.status(cu.cuOccupancyMaxPotentialClusterSize(&count, function.handle, &config),
                    cu.cuOccupancyMaxPotentialClusterSize, doing);
      break;
  }
  if (!s.ok()) return s;
  return query.kind == OccupancyKind::kAvailableShared ? static_cast<int64_t>(bytes) : int64_t{count};
}

// -- level 2 and 3 --------------------------------------------------------------------------------------------------

// Two slots: while the device fills one, the host empties the other.
Status CudaSpace::move(uint64_t addr, uint8_t* host, size_t bytes, bool to_host) {
  if (!memory_->mapped(addr, bytes) && !in_variable(addr, bytes))
    return {kInvalidValue, "the range is not committed device memory of this process"};
  const Driver& cu = context_->enter();
  std::lock_guard lock(io_mu_);
  const size_t piece = device_.staging_bytes;
  auto wait = [&](size_t i) {
    return cu.status(cu.cuEventSynchronize(io_done_[i % 2]), cu.cuEventSynchronize, "moving device memory");
  };
  auto empty = [&](size_t i) {
    if (Status s = wait(i); !s.ok()) return s;
    std::memcpy(host + i * piece, io_slots_[i % 2], std::min(piece, bytes - i * piece));
    return Status();
  };
  const size_t pieces = (bytes + piece - 1) / piece;
  Status s;
  for (size_t i = 0; i < pieces && s.ok(); i++) {
    const size_t n = std::min(piece, bytes - i * piece);
    uint8_t* const slot = io_slots_[i % 2];
    if (to_host) {
      s = cu.status(cu.cuMemcpyDtoHAsync(slot, addr + i * piece, n, transfer_), cu.cuMemcpyDtoHAsync,
                    "reading device memory");
    } else {
      if (i >= 2) s = wait(i);
      if (s.ok()) {
        std::memcpy(slot, host + i * piece, n);
        s = cu.status(cu.cuMemcpyHtoDAsync(addr + i * piece, slot, n, transfer_), cu.cuMemcpyHtoDAsync,
                      "writing device memory");
      }
    }
    if (s.ok()) s = cu.status(cu.cuEventRecord(io_done_[i % 2], transfer_), cu.cuEventRecord, "moving device memory");
    if (s.ok() && to_host && i > 0) s = empty(i - 1);
  }
  if (s.ok() && to_host && pieces) s = empty(pieces - 1);
  if (s.ok() && !to_host)
    s = cu.status(cu.cuStreamSynchronize(transfer_), cu.cuStreamSynchronize, "writing device memory");
  return s;
}

Status CudaSpace::read(uint64_t addr, void* to, size_t bytes) {
  return move(addr, static_cast<uint8_t*>(to), bytes, true);
}

Status CudaSpace::write(uint64_t addr, const void* from, size_t bytes) {
  return move(addr, const_cast<uint8_t*>(static_cast<const uint8_t*>(from)), bytes, false);  // only read from
}

// Through one slot: arrays are small beside the rest.
Status CudaSpace::move_array(const ArrayRef& ref, uint64_t first_row, uint64_t rows, uint8_t* host, bool to_host) {
  const ArrayExtent& extent = static_cast<const CudaArray&>(*ref).extent;
  if (rows > extent.rows * extent.slices || first_row > extent.rows * extent.slices - rows)
    return {kInvalidValue, "the array has fewer rows"};
  const Driver& cu = context_->enter();
  std::lock_guard lock(io_mu_);
  uint8_t* const slot = io_slots_[0];
  const uint64_t columns = std::min<uint64_t>(extent.width_bytes, device_.staging_bytes / 16 * 16);
  const uint64_t rows_at_once = std::max<uint64_t>(1, device_.staging_bytes / columns);
  const char* const doing = to_host ? "reading an array" : "writing an array";
  for (uint64_t row = 0, n; row < rows; row += n) {
    const uint64_t y = (first_row + row) % extent.rows, z = (first_row + row) / extent.rows;
    n = std::min({rows_at_once, rows - row, extent.rows - y});
    for (uint64_t x = 0; x < extent.width_bytes; x += columns) {
      const uint64_t width = std::min(columns, extent.width_bytes - x);
      const auto staged = reinterpret_cast<uint64_t>(slot);
      const auto at = reinterpret_cast<uint64_t>(host) + row * extent.width_bytes + x;
      const ArrayCopy::Side in_array{ref, x, y, z, 0, 0, 0, true};
      const ArrayCopy::Side on_host{nullptr, 0, 0, 0, staged, width, n, false};
      CopyArgs packed{staged, at, width, extent.width_bytes, width, n, false, false};
      if (!to_host) copy_rows(packed);
      const CUDA_MEMCPY3D c =
          driver_copy(to_host ? ArrayCopy{on_host, in_array, width, n, 1} : ArrayCopy{in_array, on_host, width, n, 1});
      Status s = cu.status(cu.cuMemcpy3DAsync(&c, transfer_), cu.cuMemcpy3DAsync, doing);
      if (s.ok()) s = cu.status(cu.cuStreamSynchronize(transfer_), cu.cuStreamSynchronize, doing);
      if (!s.ok()) return s;
      std::swap(packed.dst, packed.src), std::swap(packed.dst_pitch, packed.src_pitch);
      if (to_host) copy_rows(packed);
    }
  }
  return {};
}

Status CudaSpace::read_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, void* to) {
  return move_array(array, first_row, rows, static_cast<uint8_t*>(to), true);
}

Status CudaSpace::write_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, const void* from) {
  return move_array(array, first_row, rows, const_cast<uint8_t*>(static_cast<const uint8_t*>(from)), false);
}

Status CudaSpace::alias(uint64_t addr, size_t bytes, Space& from, uint64_t from_addr) {
  auto& other = static_cast<CudaSpace&>(from);  // one device has one kind of space
  std::unique_lock first((this < &other ? *this : other).io_mu_);
  std::unique_lock<std::mutex> second;
  if (&other != this) second = std::unique_lock((this < &other ? other : *this).io_mu_);
  return memory_->alias(addr, bytes, *other.memory_, from_addr, transfer_, other.transfer_);
}

Status CudaSpace::unalias(uint64_t addr, size_t bytes) {
  std::lock_guard lock(io_mu_);
  return memory_->unalias(addr, bytes, transfer_);
}

}  // namespace devproxy::hal::cuda
