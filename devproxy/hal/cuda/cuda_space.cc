// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/cuda_space.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "devproxy/csrc/base/log.h"
#include "devproxy/hal/cuda/output.h"
#include "devproxy/hal/cuda/space_common.h"

namespace devproxy::hal::cuda {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

}  // namespace

// -- beginning and end ----------------------------------------------------------------------------------------------

StatusOr<std::unique_ptr<Space>> CudaSpace::open(const CudaConfig& device, std::shared_ptr<const Driver> driver,
                                                 CUdevice number, const SpaceConfig& config, SpaceOwner& owner) {
  auto context = config.framework || device.collectives ? Context::primary(std::move(driver), number)
                                                        : Context::make(std::move(driver), number);
  if (!context.ok()) return std::move(context).status();
  auto space = std::make_unique<CudaSpace>(device, config, owner, *context);
  if (Status s = space->start(); !s.ok()) return s;
  return std::unique_ptr<Space>(std::move(space));
}

CudaSpace::CudaSpace(const CudaConfig& device, const SpaceConfig& config, SpaceOwner& owner,
                     std::shared_ptr<Context> context)
    : device_(device), config_(config), owner_(owner), context_(std::move(context)) {}

Status CudaSpace::start() {
  auto memory = DeviceMemory::open(context_, device_, config_);
  if (!memory.ok()) return std::move(memory).status();
  memory_ = std::move(*memory);
  auto host = HostMemory::make(context_, device_, config_);
  if (!host.ok()) return std::move(host).status();
  host_ = std::move(*host);
  const Driver& cu = context_->enter();
  Status s = cu.status(cu.cuStreamCreateWithPriority(&transfer_, CU_STREAM_NON_BLOCKING, 0),
                       cu.cuStreamCreateWithPriority, "making the transfer stream");
  if (!s.ok()) return s;
  io_slot_ = host_->take_slot();
  if (!io_slot_) return {kOutOfMemory, "no page-locked host memory for dump and restore"};
  if (device_.shared || device_.tree_order) kernels_ = ReduceKernels::of(context_);
  join_splicing();
  watcher_ = std::thread([this] { watch(); });
  return {};
}

void CudaSpace::stop() {
  stopping_.store(true, std::memory_order_release);  // whoever waits for this space's work under the page lock sees it
  {
    std::lock_guard lock(mu_);
    held_.clear();
    wake_.notify_one();
  }
  if (splicer_) splicer_->hurry(*member_, true);
  if (!watcher_.joinable()) return;
  watcher_.join();
  end_comms();
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
  leave_splicing();
  const Driver& cu = context_->enter();
  for (const CudaQueueRef& queue : leaving_) close_queue(*queue);
  for (CUevent event : event_pool_) (void)cu.cuEventDestroy(event);
  free_lanes_.clear();
  if (tie_) (void)cu.cuEventDestroy(tie_);
  if (order_) (void)cu.cuEventDestroy(order_);
  if (transfer_) (void)cu.cuStreamDestroy(transfer_);
  host_.reset();
  if (comms_run_) {
    DP_LOG(kError, kDevice, 0, "a collective still runs: the device memory of its process stays mapped");
    (void)memory_.release();
  }
  memory_.reset();
}

// Precondition: the queue has no work, or nobody will ever look at it again.
void CudaSpace::close_queue(CudaQueue& queue) {
  const Driver& cu = context_->enter();
  for (const auto& [sequence, event] : queue.marks) event_pool_.push_back(event);
  queue.marks.clear();
  if (queue.slot) host_->give_slot(std::exchange(queue.slot, nullptr));
  if (queue.stream && queue.stream != CU_STREAM_LEGACY) (void)cu.cuStreamDestroy(queue.stream);
  queue.stream = nullptr;
}

// -- queues ---------------------------------------------------------------------------------------------------------

QueueRef CudaSpace::create_queue(QueueKind kind, int32_t priority, uint32_t index) {
  const Driver& cu = context_->enter();
  auto queue = std::make_shared<CudaQueue>();
  queue->kind = kind;
  queue->index = index;
  if (kind == QueueKind::kLegacy && !device_.shared) {
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
  context_->enter();
  std::unique_lock lock(mu_);
  const auto queue = std::static_pointer_cast<CudaQueue>(ref);
  const auto it = queues_.find(queue->index);
  if (it == queues_.end() || it->second != queue) return;
  leaving_.push_back(queue);  // the driver's stream lives until its work is done, so that marks can be made and seen
  queues_.erase(it);
  // Nobody can say any more that it is awaited.
  if (!queue->pending.empty()) {
    queue->pending.back().awaited = true;
    if (!faulted_.load(std::memory_order_relaxed))
      if (Status s = mark(*queue); !s.ok()) fault(s, lock);
  }
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

// Asked with each free, so without the lock that the watcher wants. What the watcher saw last is never too new: positions
// grow, so whatever came in since is behind it.
uint64_t CudaSpace::oldest_pending() { return idle() ? UINT64_MAX : oldest_.load(std::memory_order_acquire); }

// Precondition: mu_ is held, and what has completed was told.
void CudaSpace::note_oldest() {
  uint64_t oldest = UINT64_MAX;
  auto visit = [&](const CudaQueue& queue) {
    if (!queue.pending.empty()) oldest = std::min(oldest, queue.pending.front().ticket.position);
  };
  for (const auto& [index, queue] : queues_) visit(*queue);
  for (const CudaQueueRef& queue : leaving_) visit(*queue);
  for (const CudaQueueRef& queue : busy_) visit(*queue);  // also those that are in neither any more
  oldest_.store(oldest == UINT64_MAX ? told_ : oldest, std::memory_order_release);
}

PendingUse CudaSpace::pending_use() {
  PendingUse use;
  if (idle()) return use;
  std::lock_guard lock(mu_);
  // What the watcher has taken out of a queue and tells the owner of has completed.
  const auto visit = [&](const CudaQueue& queue) {
    for (const Pending& one : queue.pending) {
      if (one.touches) use.anything_from = std::min(use.anything_from, one.ticket.position);
      use.ranges.insert(use.ranges.end(), one.ranges.begin(), one.ranges.end());
    }
  };
  for (const CudaQueueRef& queue : busy_) visit(*queue);
  return use;
}

// -- host memory, output, limits ------------------------------------------------------------------------------------

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
  // Nor where other ranks are in the context: they may wait for this thread.
  if ((idle() && !device_.shared) || cu.cuStreamSynchronize(transfer_) != CUDA_SUCCESS) (void)cu.cuCtxSynchronize();
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

}  // namespace devproxy::hal::cuda
