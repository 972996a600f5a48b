// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/soft_space.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <utility>

#include "cuda_number.gen.h"
#include "devproxy/csrc/base/clock.h"
#include "devproxy/csrc/base/file.h"
#include "devproxy/hal/soft/soft_pages.h"

namespace devproxy::hal::soft {

namespace {

// Freed memory is given back to the host when this much of it may hold pages, or a quarter of what is live, and it was
// not allocated again for kIdleNs to twice that. So resident memory follows the job, and a training step that frees
// its activations and allocates them again does not fault every page anew.
constexpr uint64_t kIdleFloorBytes = 256u << 20;
constexpr uint64_t kIdleNs = 2'000'000'000;
constexpr uint64_t kPage = 4096;

// As soft_device.cc says them to programs.
constexpr int32_t kSharedPerBlock = 49152, kSharedPerBlockOptin = 101376;
constexpr uint32_t kThreadsPerMultiprocessor = 2048, kSharedPerMultiprocessor = 167936;
// Those of clusters follow.
constexpr uint32_t kLastPlainAttribute = cuda_number::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;

constexpr size_t kLookThrough = 64;  // commands, for who touches a range

thread_local const char* t_running = nullptr;

struct Running {
  explicit Running(const char* what) { t_running = what; }
  ~Running() { t_running = nullptr; }
};

uint64_t new_incarnation() {
  uint64_t value = 0;
  while (value == 0 && getrandom(&value, sizeof value, 0) != sizeof value) {}
  return value;
}

uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

void copy_rows(const CopyArgs& a) {
  auto* dst = reinterpret_cast<uint8_t*>(a.dst);
  const auto* src = reinterpret_cast<const uint8_t*>(a.src);
  for (uint64_t row = 0; row < a.height; row++)
    std::memmove(dst + row * a.dst_pitch, src + row * a.src_pitch, a.width_bytes);
}

// Rows and slices one behind the other; zeroes at first, though CUDA promises nothing.
struct SoftArray final : Array {
  ArrayExtent extent;
  uint8_t* memory = nullptr;
  ~SoftArray() override { std::free(memory); }
};

uint8_t* row_of(const ArrayCopy::Side& side, uint64_t z, uint64_t y) {
  if (!side.array) return reinterpret_cast<uint8_t*>(side.addr + (z * side.slice_rows + y) * side.pitch);
  const auto& array = static_cast<const SoftArray&>(*side.array);
  return array.memory + ((side.z + z) * array.extent.rows + side.y + y) * array.extent.width_bytes + side.x_bytes;
}

void copy_box(const ArrayCopy& a) {
  for (uint64_t z = 0; z < a.slices; z++)
    for (uint64_t y = 0; y < a.rows; y++) std::memmove(row_of(a.dst, z, y), row_of(a.src, z, y), a.width_bytes);
}

void fill_rows(const MemsetArgs& a) {
  for (uint64_t row = 0; row < a.rows; row++) {
    const uint64_t at = a.dst + row * a.pitch;
    if (a.width == 1) std::memset(reinterpret_cast<void*>(at), static_cast<int>(a.value & 0xff), a.count);
    if (a.width == 2) std::fill_n(reinterpret_cast<uint16_t*>(at), a.count, static_cast<uint16_t>(a.value));
    if (a.width == 4) std::fill_n(reinterpret_cast<uint32_t*>(at), a.count, a.value);
  }
}

}  // namespace

const char* running_here() noexcept { return t_running; }

// -- memory ---------------------------------------------------------------------------------------------------------

StatusOr<std::unique_ptr<Space>> SoftSpace::open(const SoftConfig& device, const SpaceConfig& config,
                                                 SpaceOwner& owner) {
  const int fd = memfd_create("devproxy-device-memory", MFD_CLOEXEC);
  if (fd < 0) return Status::from_errno(kOutOfMemory, "making the software GPU's memory");
  if (ftruncate(fd, static_cast<off_t>(config.device_bytes)) != 0) {
    const Status why = Status::from_errno(kOutOfMemory, "sizing the software GPU's memory");
    close(fd);
    return why;
  }
  void* const want = reinterpret_cast<void*>(config.device_base);
  void* const got =
      mmap(want, config.device_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, fd, 0);
  if (got != want) {
    const Status why = Status::from_errno(kOutOfMemory, "mapping the software GPU's memory at its fixed address");
    if (got != MAP_FAILED) munmap(got, config.device_bytes);  // a kernel before 4.17 ignores NOREPLACE
    close(fd);
    return why;
  }
  madvise(want, config.device_bytes, MADV_DONTDUMP);  // a core file of the server is about the server
  return std::unique_ptr<Space>(std::make_unique<SoftSpace>(device, config, owner, fd));
}

SoftSpace::SoftSpace(const SoftConfig& device, const SpaceConfig& config, SpaceOwner& owner, int memory_fd)
    : device_(device), config_(config), owner_(owner), memory_fd_(memory_fd), incarnation_(new_incarnation()) {
  if (!device_.sharing) return;
  splicer_ = std::dynamic_pointer_cast<splice::Splicer>(device_.sharing->splicing);
  if (splicer_)
    member_ = splicer_->join(config_.device_base, config_.device_bytes,
                             static_cast<SoftPages&>(splicer_->physical()).rank(config_.device_base, memory_fd_),
                             [this](auto... question) { return may_touch(question...); });
  if (!member_) splicer_ = nullptr;
}

SoftSpace::~SoftSpace() {
  stop();
  if (splicer_) splicer_->leave(*member_);
  if (device_.links) {
    Frame gone;
    gone.kind = FrameKind::kGone;
    gone.slot = owner_.place().slot;
    gone.incarnation = incarnation_;
    device_.links->post_to_all(gone);
  }
  munmap(reinterpret_cast<void*>(config_.device_base), config_.device_bytes);
  close(memory_fd_);
}

Status SoftSpace::commit(uint64_t addr, uint64_t bytes, bool stable) {
  if (!owns(addr, bytes)) return {kInvalidValue, "the range is outside the device memory of this process"};
  idle_.erase(addr, addr + bytes);
  idle_long_.erase(addr, addr + bytes);
  live_bytes_ += bytes;
  if (splicer_) splicer_->committed(*member_, addr, bytes, submitted_, stable);
  return {};  // pages appear at first touch
}

void SoftSpace::freed(uint64_t addr, uint64_t bytes, uint64_t position) {
  if (splicer_) splicer_->freed(*member_, addr, bytes, position);
}

void SoftSpace::release(uint64_t addr, uint64_t bytes) {
  live_bytes_ -= std::min(live_bytes_, bytes);
  if (splicer_) splicer_->released(*member_, addr);
  idle_.insert(addr, addr + bytes);
  tidy();
}

void SoftSpace::reuse(uint64_t, uint64_t bytes) { live_bytes_ -= std::min(live_bytes_, bytes); }

void SoftSpace::tidy() {
  if (idle_.bytes() + idle_long_.bytes() <= std::max(kIdleFloorBytes, live_bytes_ / 4)) return;
  const uint64_t now = now_ns();
  if (now - aged_ns_ < kIdleNs) return;
  aged_ns_ = now;
  punch(idle_long_);
  idle_long_ = std::exchange(idle_, {});
}

void SoftSpace::punch(const RangeSet& ranges) {
  for (const auto& [begin, end] : ranges) {
    const uint64_t first = (begin + kPage - 1) & ~(kPage - 1), last = end & ~(kPage - 1);
    if (first < last && splicer_) splicer_->discard(*member_, first, last - first);
    if (first < last)
      fallocate(memory_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first - config_.device_base),
                static_cast<off_t>(last - first));
  }
}

Status SoftSpace::read(uint64_t addr, void* to, size_t bytes) {
  if (!owns(addr, bytes)) return {kInvalidValue, "the range is outside the device memory of this process"};
  if (splicer_)
    if (Status s = splicer_->before_read(addr, bytes); !s.ok()) return s;
  std::memcpy(to, reinterpret_cast<const void*>(addr), bytes);
  return {};
}

void* SoftSpace::host_view(uint64_t addr, uint64_t bytes) {
  if (!owns(addr, bytes) || (splicer_ && !splicer_->before_read(addr, bytes).ok())) return nullptr;
  return reinterpret_cast<void*>(addr);
}

Status SoftSpace::write(uint64_t addr, const void* from, size_t bytes) {
  if (!owns(addr, bytes)) return {kInvalidValue, "the range is outside the device memory of this process"};
  if (splicer_)
    if (Status s = splicer_->before_write(addr, bytes, true); !s.ok()) return s;
  std::memcpy(reinterpret_cast<void*>(addr), from, bytes);
  return {};
}

Status SoftSpace::loaded(uint64_t addr, uint64_t bytes) {
  if (!owns(addr, bytes)) return {kInvalidValue, "the range is outside the device memory of this process"};
  return splicer_ ? splicer_->loaded(*member_, addr, bytes) : Status{};
}

void SoftSpace::all_loaded() {
  if (splicer_) splicer_->all_loaded(*member_);
}

Status SoftSpace::alias(uint64_t addr, size_t bytes, Space& from, uint64_t from_addr) {
  auto& other = static_cast<SoftSpace&>(from);  // one device has one kind of space
  if (!owns(addr, bytes) || !other.owns(from_addr, bytes) || (addr | from_addr | bytes) % kPage != 0)
    return {kInvalidValue, "an alias covers whole pages inside the device memory of both processes"};
  if (mmap(reinterpret_cast<void*>(addr), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
           other.memory_fd_, static_cast<off_t>(from_addr - other.config_.device_base)) == MAP_FAILED)
    return Status::from_errno(kOutOfMemory, "mapping pages a second time");
  return {};
}

Status SoftSpace::unalias(uint64_t addr, size_t bytes) {
  if (!owns(addr, bytes) || (addr | bytes) % kPage != 0)
    return {kInvalidValue, "an alias covers whole pages inside the device memory of the process"};
  const uint64_t offset = addr - config_.device_base;
  auto* const at = reinterpret_cast<void*>(addr);
  // The contents first, into the pages that will show again.
  if (Status s = write_all(memory_fd_, at, bytes, offset); !s.ok())
    return std::move(s).with("giving an alias pages of its own");
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, memory_fd_,
           static_cast<off_t>(offset)) == MAP_FAILED)
    return Status::from_errno(kOutOfMemory, "mapping a process's own pages again");
  return {};
}

// -- queues ---------------------------------------------------------------------------------------------------------

QueueRef SoftSpace::create_queue(QueueKind kind, int32_t, uint32_t index) {  // all priorities are one to us
  reap(false);
  auto queue = std::make_shared<SoftQueue>();
  queue->kind = kind;
  queue->index = index;
  queue->chaos_state = device_.chaos_seed * 0x9e3779b97f4a7c15 + index;
  for (const auto& old : leaving_)  // the latest of several wins: it waited for those before it
    if (old->index == index && old->submitted > old->published.load(std::memory_order_acquire))
      queue->before = {old, old->submitted};
  std::lock_guard lock(mu_);
  queues_[index] = queue;
  return queue;
}

void SoftSpace::destroy_queue(const QueueRef& ref) {
  SoftQueue& queue = of(ref);
  const auto it = queues_.find(queue.index);
  if (it == queues_.end() || it->second.get() != &queue) return;
  {
    std::lock_guard lock(mu_);
    queue.closing = true;
    queue.wake.notify_one();
    leaving_.push_back(it->second);
    queues_.erase(it);
  }
  reap(false);
}

// Joins the workers of destroyed queues that have finished, or of all.
void SoftSpace::reap(bool all) {
  std::vector<std::shared_ptr<SoftQueue>> over;
  {
    std::lock_guard lock(mu_);
    std::erase_if(leaving_, [&](const std::shared_ptr<SoftQueue>& queue) {
      if (!all && queue->worker.joinable() && !queue->gone) return false;
      over.push_back(queue);
      return true;
    });
  }
  for (const auto& queue : over)
    if (queue->worker.joinable()) queue->worker.join();
}

void SoftSpace::stop() {
  ended_.store(true, std::memory_order_release);
  if (splicer_) splicer_->hurry(*member_, true);
  {
    std::lock_guard lock(mu_);
    stopping_ = true;
    for (auto& [index, queue] : queues_) queue->wake.notify_one();
    for (auto& queue : leaving_) queue->wake.notify_one();
    for (auto& [index, queue] : queues_) leaving_.push_back(queue);
    queues_.clear();
  }
  reap(true);
}

template <class Test>
bool SoftSpace::every_queue(Test test) const {
  return std::all_of(queues_.begin(), queues_.end(), [&](const auto& item) { return test(*item.second); }) &&
         std::all_of(leaving_.begin(), leaving_.end(), [&](const auto& queue) { return test(*queue); });
}

uint64_t SoftSpace::oldest_pending() {
  if (idle()) return UINT64_MAX;
  uint64_t oldest = UINT64_MAX;
  std::lock_guard lock(mu_);
  every_queue([&](const SoftQueue& queue) {
    if (queue.current)
      oldest = std::min(oldest, queue.current->command.ticket.position);
    else if (!queue.commands.empty())
      oldest = std::min(oldest, queue.commands.front().command.ticket.position);
    return true;
  });
  return oldest;
}

PendingUse SoftSpace::pending_use() {
  PendingUse use;
  if (idle()) return use;
  const auto add = [&](const Command& command) {
    const uint64_t position = command.ticket.position;
    switch (command.action) {
      case Action::kNop:
      case Action::kRecord:
      case Action::kHostFunction: return;
      case Action::kComm:
        for (const auto& [addr, bytes] : command.comm->buffers()) use.ranges.push_back({position, addr, bytes});
        return;
      default: use.anything_from = std::min(use.anything_from, position);
    }
  };
  std::lock_guard lock(mu_);
  every_queue([&](const SoftQueue& queue) {
    if (queue.current) add(queue.current->command);
    for (const Pending& one : queue.commands) add(one.command);
    return true;
  });
  return use;
}

// -- submission -----------------------------------------------------------------------------------------------------

void SoftSpace::submit(const QueueRef& ref, Command& command, std::shared_ptr<void> keeps, const Dependency* extra) {
  SoftQueue& queue = of(ref);
  command.queue_index = queue.index;
  submitted_ = command.ticket.position;
  const bool at_once = queue.kind == QueueKind::kLegacy && !device_.chaos && command.action != Action::kHostFunction &&
                       command.action != Action::kComm && pending_blocking_.load(std::memory_order_acquire) == 0 &&
                       (!extra || extra->queue->published.load(std::memory_order_acquire) >= extra->position);
  if (!at_once) return enqueue(ref, command, std::move(keeps), extra);
  execute(command, turn_, true);
  queue.submitted = command.ticket.position;
  owner_.on_complete(queue.index, command.ticket.position, command.ticket.tag);
  queue.published.store(command.ticket.position, std::memory_order_release);
}

void SoftSpace::enqueue(const QueueRef& ref, Command& command, std::shared_ptr<void> keeps, const Dependency* extra) {
  SoftQueue& queue = of(ref);
  Pending pending;
  auto need = [&](const std::shared_ptr<SoftQueue>& other, uint64_t position) {
    if (position > other->published.load(std::memory_order_acquire)) pending.needs.push_back({other, position});
  };
  if (extra) need(extra->queue, extra->position);
  if (queue.before.queue) need(queue.before.queue, queue.before.position), queue.before = {};
  const auto legacy = queues_.find(0);
  if (queue.kind == QueueKind::kBlocking && legacy != queues_.end()) need(legacy->second, legacy->second->submitted);
  if (queue.kind == QueueKind::kLegacy) {
    for (const auto& [index, other] : queues_)
      if (other->kind == QueueKind::kBlocking) need(other, other->submitted);
    for (const auto& other : leaving_)
      if (other->kind == QueueKind::kBlocking) need(other, other->submitted);
  }
  pending.command = command;
  pending.keeps = std::move(keeps);
  if (command.action == Action::kLaunch) pending.keep_params();
  push(ref, std::move(pending));
}

void SoftSpace::push(const QueueRef& ref, Pending pending) {
  SoftQueue& queue = of(ref);
  queue.submitted = pending.command.ticket.position;
  pending_all_.fetch_add(1, std::memory_order_relaxed);
  if (queue.kind != QueueKind::kNonBlocking) pending_blocking_.fetch_add(1, std::memory_order_relaxed);
  {
    std::lock_guard lock(mu_);
    queue.commands.push_back(std::move(pending));
    queue.wake.notify_one();
  }
  if (!queue.worker.joinable())
    queue.worker = std::thread([this, self = std::static_pointer_cast<SoftQueue>(ref)] { work(self); });
}

void SoftSpace::work(const std::shared_ptr<SoftQueue>& queue) {
  owner_.on_thread_start();
  std::unique_lock lock(mu_);
  for (;;) {
    if (queue->commands.empty()) yield(queue->turn);
    queue->wake.wait(lock, [&] { return stopping_ || !queue->commands.empty() || queue->closing; });
    if (stopping_ || queue->commands.empty()) break;
    // push_back never moves the front of a deque, so this reference stays good while mu_ is let go.
    for (const Dependency& need : queue->commands.front().needs) {
      if (need.queue->published.load(std::memory_order_acquire) >= need.position) continue;
      yield(queue->turn);
      queue->asleep_on = &need;
      sleepers_.push_back(queue.get());
      queue->wake.wait(
          lock, [&] { return stopping_ || need.queue->published.load(std::memory_order_acquire) >= need.position; });
      std::erase(sleepers_, queue.get());
      queue->asleep_on = nullptr;
    }
    if (!stopping_ && withheld_ && queue->commands.front().command.action == Action::kHostFunction) {
      yield(queue->turn);
      queue->withheld = true;
      sleepers_.push_back(queue.get());
      queue->wake.wait(lock, [&] { return stopping_ || !withheld_; });
      std::erase(sleepers_, queue.get());
      queue->withheld = false;
    }
    if (stopping_) break;
    Pending pending = std::move(queue->commands.front());
    queue->commands.pop_front();
    const Ticket ticket = pending.command.ticket;
    queue->current = &pending;
    lock.unlock();

    if (device_.chaos) chaos_delay(*queue);
    execute(pending.command, queue->turn, false);
    owner_.on_complete(queue->index, ticket.position, ticket.tag);
    lock.lock();
    queue->current = nullptr;
    lock.unlock();
    pending = {};  // may unload a module; not under the lock

    lock.lock();
    queue->published.store(ticket.position, std::memory_order_release);
    if (queue->kind != QueueKind::kNonBlocking) pending_blocking_.fetch_sub(1, std::memory_order_release);
    pending_all_.fetch_sub(1, std::memory_order_release);
    for (SoftQueue* other : sleepers_)
      if (other->asleep_on && other->asleep_on->queue == queue && ticket.position >= other->asleep_on->position)
        other->wake.notify_one();
  }
  yield(queue->turn);
  queue->gone = true;
}

// Legal but unkind: streams drift apart, never a stream within itself.
void SoftSpace::chaos_delay(SoftQueue& queue) {
  const uint64_t dice = next_random(queue.chaos_state);
  uint64_t delay_us = 0;
  if (dice % 64 == 0)
    delay_us = dice / 64 % 3000;
  else if (dice % 8 == 0)
    delay_us = dice / 64 % 300;
  if (delay_us) {
    const timespec nap{0, static_cast<long>(delay_us * 1000)};
    nanosleep(&nap, nullptr);
  } else {
    std::this_thread::yield();
  }
}

void SoftSpace::nop(const QueueRef& queue, Ticket ticket) {
  Command command;
  command.ticket = ticket;
  submit(queue, command, nullptr, nullptr);
}

void SoftSpace::copy(const QueueRef& queue, Ticket ticket, const CopyArgs& args) {
  Command command;
  command.action = Action::kCopy;
  command.ticket = ticket;
  command.copy = args;
  submit(queue, command, nullptr, nullptr);
}

StatusOr<ArrayRef> SoftSpace::create_array(const ArrayShape& shape) {
  auto array = std::make_shared<SoftArray>();
  if (!array_extent(shape, &array->extent)) return Status(kInvalidValue, "no array has that shape");
  array->memory = static_cast<uint8_t*>(std::calloc(array->extent.bytes(), 1));
  if (!array->memory)
    return Status(kOutOfMemory, "the host has no " + std::to_string(array->extent.bytes()) +
                                    " bytes for an array of the software GPU");
  return ArrayRef(array);
}

void SoftSpace::copy_array(const QueueRef& queue, Ticket ticket, const ArrayCopy& args) {
  auto copy = std::make_shared<ArrayCopy>(args);
  Command command;
  command.action = Action::kArrayCopy;
  command.ticket = ticket;
  command.array_copy = copy.get();
  submit(queue, command, std::move(copy), nullptr);
}

Status SoftSpace::read_array(const ArrayRef& ref, uint64_t first_row, uint64_t rows, void* to) {
  const auto& array = static_cast<const SoftArray&>(*ref);
  const uint64_t row = array.extent.width_bytes;
  std::memcpy(to, array.memory + first_row * row, rows * row);
  return {};
}

Status SoftSpace::write_array(const ArrayRef& ref, uint64_t first_row, uint64_t rows, const void* from) {
  const auto& array = static_cast<const SoftArray&>(*ref);
  const uint64_t row = array.extent.width_bytes;
  std::memcpy(array.memory + first_row * row, from, rows * row);
  return {};
}

void SoftSpace::memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& args) {
  Command command;
  command.action = Action::kMemset;
  command.ticket = ticket;
  command.memset = args;
  submit(queue, command, nullptr, nullptr);
}

void SoftSpace::launch(const QueueRef& queue, Ticket ticket, const FunctionRef& function, const LaunchArgs& args) {
  Command command;
  command.action = Action::kLaunch;
  command.ticket = ticket;
  command.launch = args;
  command.function = static_cast<const HostFunction*>(function.get());
  submit(queue, command, function, nullptr);
}

void SoftSpace::host_function(const QueueRef& queue, Ticket ticket, uint64_t token) {
  Command command;
  command.action = Action::kHostFunction;
  command.ticket = ticket;
  command.token = token;
  submit(queue, command, nullptr, nullptr);
}

// -- communicators --------------------------------------------------------------------------------------------------

StatusOr<CommRef> SoftSpace::create_comm(const CommConfig& config) {
  return CommRef(std::make_shared<SoftComm>(config, config_, incarnation_, owner_, hold_, device_.links));
}

void SoftSpace::submit_group(const QueueRef& queue, Ticket ticket, std::vector<CommCall> calls, bool init) {
  auto group = std::make_shared<CommGroup>(std::move(calls), init);
  Command command;
  command.action = Action::kComm;
  command.ticket = ticket;
  command.comm = group.get();
  submit(queue, command, std::move(group), nullptr);
}

void SoftSpace::init_comm(const QueueRef& queue, Ticket ticket, const CommRef& comm) {
  submit_group(queue, ticket, {{comm, {}}}, true);
}

void SoftSpace::communicate(const QueueRef& queue, Ticket ticket, std::vector<CommCall> group) {
  submit_group(queue, ticket, std::move(group), false);
}

int SoftSpace::share_memory() { return fcntl(memory_fd_, F_DUPFD_CLOEXEC, 0); }

// -- pending commands -----------------------------------------------------------------------------------------------

bool SoftSpace::withhold(bool on) {
  if (splicer_) splicer_->hurry(*member_, on);
  const bool still = hold_.set(on);
  std::lock_guard lock(mu_);
  withheld_ = on;
  if (on) return still;
  for (SoftQueue* queue : sleepers_)
    if (queue->withheld) queue->wake.notify_one();
  return true;
}

bool SoftSpace::stands(const SoftQueue& queue) const {
  if (queue.current) return queue.current->command.action == Action::kComm && queue.current->command.comm->stands();
  if (queue.commands.empty() || queue.withheld) return true;
  return queue.asleep_on &&
         queue.asleep_on->queue->published.load(std::memory_order_acquire) < queue.asleep_on->position;
}

// Every pending command waits for one of its own queue or of another one: if no queue goes on, none will. Between two
// commands a worker has none and has not published the last one yet; then a command is pending that no queue has.
bool SoftSpace::stands() {
  std::lock_guard lock(mu_);
  size_t seen = 0;
  return every_queue([&](const SoftQueue& queue) {
           seen += queue.commands.size() + (queue.current ? 1 : 0);
           return stands(queue);
         }) &&
         seen == pending();
}

bool SoftSpace::in_host_function() {
  std::lock_guard lock(mu_);
  return !every_queue(
      [](const SoftQueue& queue) { return !queue.current || queue.current->command.action != Action::kHostFunction; });
}

StatusOr<std::vector<PendingCommand>> SoftSpace::pending_commands() {
  std::vector<PendingCommand> all;
  std::lock_guard lock(mu_);
  for (const auto& queue : leaving_)
    if (queue->current || !queue->commands.empty())
      return Status(kNotSupported, "a stream was destroyed that still has commands behind a collective");
  for (const auto& [index, queue] : queues_) {
    if (queue->current) all.push_back(pending_command(*queue, *queue->current));
    for (const Pending& pending : queue->commands) all.push_back(pending_command(*queue, pending));
  }
  // As they were submitted: communicators count turns. A message has one queue.
  std::stable_sort(all.begin(), all.end(), [](const PendingCommand& a, const PendingCommand& b) {
    return a.ticket.position < b.ticket.position;
  });
  return all;
}

PendingCommand SoftSpace::pending_command(const SoftQueue& queue, const Pending& pending) {
  const Command& command = pending.command;
  PendingCommand out;
  out.queue_index = queue.index;
  out.ticket = command.ticket;
  for (const Dependency& need : pending.needs)
    if (need.queue->published.load(std::memory_order_acquire) < need.position)
      out.needs.push_back({need.queue->index, need.position});
  using Kind = PendingCommand::Kind;
  switch (command.action) {
    case Action::kNop: out.kind = Kind::kNop; break;
    case Action::kCopy: out.kind = Kind::kCopy, out.copy = command.copy; break;
    case Action::kArrayCopy: out.kind = Kind::kCopyArray, out.array_copy = *command.array_copy; break;
    case Action::kMemset: out.kind = Kind::kMemset, out.memset = command.memset; break;
    case Action::kLaunch:
      out.kind = Kind::kLaunch;
      out.launch = command.launch;
      out.launch.attributes = nullptr;
      out.launch.n_attributes = 0;
      out.function = std::static_pointer_cast<Function>(pending.keeps);
      break;
    case Action::kRecord: out.kind = Kind::kRecord; break;
    case Action::kHostFunction: out.kind = Kind::kHostFunction, out.token = command.token; break;
    case Action::kComm:
      out.kind = command.comm->is_init() ? Kind::kInitComm : Kind::kCommunicate;
      out.calls = command.comm->take_back();
      break;
  }
  return out;
}

std::optional<CommandPlace> SoftSpace::pending_record(const EventRef& ref) {
  const auto& last = static_cast<const SoftEvent&>(*ref).last;
  if (!last || last->queue->published.load(std::memory_order_acquire) >= last->position) return std::nullopt;
  return CommandPlace{last->queue->index, last->position};
}

Status SoftSpace::submit_pending(const PendingCommand& from) {
  auto queue_at = [this](uint32_t index) {
    const auto it = queues_.find(index);
    return it == queues_.end() ? nullptr : it->second;
  };
  const std::shared_ptr<SoftQueue> queue = queue_at(from.queue_index);
  Pending pending;
  for (const CommandPlace& need : from.needs) {
    pending.needs.push_back({queue_at(need.queue_index), need.position});
    // Only what comes before a command can hold it up, so there is no circle.
    if (!pending.needs.back().queue || need.position >= from.ticket.position)
      return {kInvalidImage, "a pending command waits for what does not come"};
  }
  if (!queue || from.ticket.position < queue->submitted)
    return {kInvalidImage, "a pending command has no queue, or is out of order"};
  Command& command = pending.command;
  command.ticket = from.ticket;
  command.queue_index = from.queue_index;
  using Kind = PendingCommand::Kind;
  switch (from.kind) {
    case Kind::kNop: break;
    case Kind::kCopy: command.action = Action::kCopy, command.copy = from.copy; break;
    case Kind::kCopyArray: {
      auto copy = std::make_shared<ArrayCopy>(from.array_copy);
      command.action = Action::kArrayCopy;
      command.array_copy = copy.get();
      pending.keeps = std::move(copy);
      break;
    }
    case Kind::kMemset: command.action = Action::kMemset, command.memset = from.memset; break;
    case Kind::kLaunch:
      command.action = Action::kLaunch;
      command.launch = from.launch;
      command.function = static_cast<const HostFunction*>(from.function.get());
      pending.keeps = from.function;
      pending.keep_params();
      break;
    case Kind::kRecord: {
      auto record = std::make_shared<Record>();
      record->queue = queue;
      record->position = from.ticket.position;
      for (const EventRef& event : from.events) static_cast<SoftEvent&>(*event).last = record;
      command.action = Action::kRecord;
      command.record = record.get();
      pending.keeps = std::move(record);
      break;
    }
    case Kind::kHostFunction: command.action = Action::kHostFunction, command.token = from.token; break;
    case Kind::kInitComm:
    case Kind::kCommunicate: {
      auto group = std::make_shared<CommGroup>(from.calls, from.kind == Kind::kInitComm);
      command.action = Action::kComm;
      command.comm = group.get();
      pending.keeps = std::move(group);
      break;
    }
  }
  push(queue, std::move(pending));
  return {};
}

// -- events ---------------------------------------------------------------------------------------------------------

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

// -- execution ------------------------------------------------------------------------------------------------------

void SoftSpace::execute(Command& command, Engine::Turn& turn, bool on_submitter) {
  // A record completes after a fault too, so that whoever asks for its time gets an answer.
  if (command.action == Action::kRecord) return command.record->time_ns.store(now_ns(), std::memory_order_release);
  if (faulted_.load(std::memory_order_acquire)) return;
  if (splicer_)
    if (const Status s = before_command(command); !s.ok()) {
      faulted_.store(true, std::memory_order_release);
      return owner_.on_fault(kUnknown, s.text().c_str());
    }
  switch (command.action) {
    case Action::kCopy: {
      const Running running("memory copy");
      return copy_rows(command.copy);
    }
    case Action::kArrayCopy: {
      const Running running("array copy");
      return copy_box(*command.array_copy);
    }
    case Action::kMemset: {
      const Running running("memory set");
      return fill_rows(command.memset);
    }
    case Action::kLaunch: return run_kernel(command, turn, on_submitter);
    case Action::kHostFunction: yield(turn); return owner_.host_function(command.token);
    case Action::kComm: {
      yield(turn);
      const Running running("collective");
      command.comm->run(ended_);
      if (splicer_)
        for (const CommGroup::Result& one : command.comm->results())
          splicer_->received(*member_, one.addr, one.bytes, {one.comm.low, one.comm.high, one.operation});
      return;
    }
    case Action::kNop:
    case Action::kRecord: return;
  }
}

bool SoftSpace::may_touch(const Command& command, uint64_t addr, uint64_t bytes) {
  const auto overlaps = [&](uint64_t at, uint64_t n) { return at < addr + bytes && addr < at + n; };
  switch (command.action) {
    case Action::kNop:
    case Action::kRecord:
    case Action::kHostFunction: return false;
    case Action::kArrayCopy: return true;
    case Action::kCopy: {
      const CopyArgs& a = command.copy;
      if (a.width_bytes == 0 || a.height == 0) return false;
      return overlaps(a.src, (a.height - 1) * a.src_pitch + a.width_bytes) ||
             overlaps(a.dst, (a.height - 1) * a.dst_pitch + a.width_bytes);
    }
    case Action::kMemset: {
      const MemsetArgs& a = command.memset;
      return a.rows != 0 && a.count != 0 && overlaps(a.dst, (a.rows - 1) * a.pitch + a.count * a.width);
    }
    case Action::kComm: {
      const auto& buffers = command.comm->buffers();
      return std::any_of(buffers.begin(), buffers.end(),
                         [&](const auto& one) { return overlaps(one.first, one.second); });
    }
    case Action::kLaunch: {
      const HostFunction& function = *command.function;
      std::vector<splice::Access> accesses;
      uint64_t digest = 0;
      if (function.module->footprint(function.name, command.launch.params, command.launch.params_bytes, &accesses,
                                     &digest) == DEVPROXY_EXECUTOR_UNKNOWN)
        return true;
      return std::any_of(accesses.begin(), accesses.end(), [&](const splice::Access& one) {
        return !(one.flags & DEVPROXY_EXECUTOR_NUMBER) && overlaps(one.addr, one.bytes);
      });
    }
  }
  return true;
}

// A command that is executed at once is none: the submitting thread frees nothing meanwhile.
bool SoftSpace::may_touch(uint64_t addr, uint64_t bytes, uint64_t last) {
  if (idle()) return false;
  size_t looked = 0;
  const auto touches = [&](const Command& command) {
    if (command.ticket.position > last) return false;
    return ++looked > kLookThrough || may_touch(command, addr, bytes);
  };
  std::lock_guard lock(mu_);
  return !every_queue([&](const SoftQueue& queue) {
    if (queue.current && touches(queue.current->command)) return false;
    for (const Pending& one : queue.commands) {
      if (one.command.ticket.position > last) break;
      if (touches(one.command)) return false;
    }
    return true;
  });
}

// Whatever writes spliced memory other than as a launch, or reaches it past this space's addresses.
Status SoftSpace::before_command(const Command& command) {
  switch (command.action) {
    case Action::kCopy: return splicer_->before(command.copy);
    case Action::kArrayCopy: return splicer_->before(*command.array_copy);
    case Action::kMemset: return splicer_->before(command.memset);
    case Action::kComm:
      for (const auto& [addr, bytes] : command.comm->buffers())
        if (Status s = splicer_->before_sharing(*member_, addr, bytes); !s.ok()) return s;
      return {};
    default: return {};
  }
}

Status SoftSpace::spliced_launch(const Command& command, splice::Runner& runner) {
  thread_local splice::SpliceLaunch launch;
  const HostFunction& function = *command.function;
  launch.name = function.name;
  launch.params = command.launch.params;
  launch.params_bytes = command.launch.params_bytes;
  launch.position = command.ticket.position;
  const int kind =
      function.module->footprint(function.name, launch.params, launch.params_bytes, &launch.accesses, &launch.digest);
  return splicer_->launch(*member_, launch, kind, runner);
}

void SoftSpace::run_kernel(Command& command, Engine::Turn& turn, bool on_submitter) {
  struct Here final : splice::Runner {
    SoftSpace& space;
    const Command& command;
    Engine::Turn& turn;
    const bool on_submitter;
    Here(SoftSpace& space, const Command& command, Engine::Turn& turn, bool on_submitter)
        : space(space), command(command), turn(turn), on_submitter(on_submitter) {}
    void begin() override {
      if (const auto& sharing = space.device_.sharing) sharing->engine.begin(space.device_.seat, turn);
    }
    Status run() override {
      const Running running(command.function->name.c_str());
      return run_host_function(*command.function, command.launch, space.device_.ordinal, command.queue_index,
                               {&space.owner_, command.ticket.position, on_submitter});
    }
    void end() override {
      if (const auto& sharing = space.device_.sharing) sharing->engine.end(turn);
    }
    void yield() override { space.yield(turn); }
  } here(*this, command, turn, on_submitter);
  Status done;
  if (splicer_) {
    done = spliced_launch(command, here);
  } else {
    here.begin();
    done = here.run();
    here.end();
  }
  if (done.ok()) return;
  if (!is_execution_fault(done.code()))
    return owner_.on_refused(command.ticket.caller, done.code(), done.text().c_str());
  faulted_.store(true, std::memory_order_release);
  owner_.on_fault(done.code(), done.text().c_str());
}

// -- modules --------------------------------------------------------------------------------------------------------

StatusOr<ModuleRef> SoftSpace::load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) {
  auto module =
      HostModule::load(image, image_bytes,
                       {device_.ordinal, device_.ordinal, /*on_cuda=*/false, device_.folder, config_, &owner_}, place);
  if (!module.ok()) return std::move(module).status();
  return ModuleRef(*module);
}

StatusOr<std::vector<std::string>> SoftSpace::function_names(const ModuleRef& ref) {
  const char* const* name = std::static_pointer_cast<HostModule>(ref)->function_names();
  if (!name)
    return Status(kNotSupported,
                  "the module does not list its kernels (symbol devproxy_soft_function_names): ask for "
                  "them by name");
  std::vector<std::string> names;
  for (; *name; name++) names.emplace_back(*name);
  return names;
}

StatusOr<FunctionRef> SoftSpace::get_function(const ModuleRef& ref, const std::string& name, FunctionInfo* info) {
  auto function = HostFunction::get(std::static_pointer_cast<HostModule>(ref), name);
  if (!function.ok()) return std::move(function).status();
  const devproxy_soft_function& entry = (*function)->entry;
  info->max_threads = entry.max_threads ? entry.max_threads : 1024;
  info->shared_bytes = entry.shared_bytes;
  info->regs = 32;
  info->params.clear();
  for (uint32_t i = 0; i < entry.n_params; i++) info->params.push_back({entry.params[i].offset, entry.params[i].size});
  // By CUfunction_attribute: threads, static shared, constant, local, registers, PTX and binary version, cache mode,
  // dynamic shared, carve-out (-1: the default), then those of clusters, which there are none of.
  const int32_t dynamic =
      kSharedPerBlock - static_cast<int32_t>(std::min<uint32_t>(entry.shared_bytes, kSharedPerBlock));
  info->attributes = {static_cast<int32_t>(info->max_threads),
                      static_cast<int32_t>(info->shared_bytes),
                      0,
                      0,
                      static_cast<int32_t>(info->regs),
                      80,
                      80,
                      0,
                      dynamic,
                      -1,
                      0,
                      0,
                      0,
                      0,
                      0,
                      0};
  return FunctionRef(*function);
}

StatusOr<Space::Global> SoftSpace::get_global(const ModuleRef& ref, const std::string& name) {
  for (const auto& global : static_cast<const HostModule&>(*ref).globals())
    if (global.name == name) return global.place;
  return Status(kNotFound, "the module has no global '" + name + "'");
}

std::vector<Space::Global> SoftSpace::globals(const ModuleRef& ref) {
  std::vector<Global> all;
  for (const auto& global : static_cast<const HostModule&>(*ref).globals()) all.push_back(global.place);
  return all;
}

Status SoftSpace::set_attribute(const FunctionRef&, uint32_t attribute, int32_t) {
  if (attribute > kLastPlainAttribute)
    return {kNotSupported, "the software GPU has no thread block clusters, so no attributes of them"};
  return {};  // hints; nothing to tune here
}

// Nothing here has such a limit; what is read back is what was set.
Status SoftSpace::set_limit(uint32_t limit, uint64_t value) {
  if (limit >= std::size(limits_)) return {kUnsupportedLimit, "the software GPU has no limit " + std::to_string(limit)};
  limits_[limit] = value;
  return {};
}

StatusOr<uint64_t> SoftSpace::get_limit(uint32_t limit) {
  if (limit >= std::size(limits_))
    return Status(kUnsupportedLimit, "the software GPU has no limit " + std::to_string(limit));
  return limits_[limit];
}

// A kernel here is one function call for the whole grid, so any grid runs at once, also a cooperative one. The answers
// are those of the chip that the device's attributes describe, so that a program sizes its grids as it would there.
StatusOr<int64_t> SoftSpace::occupancy(const FunctionRef& ref, const OccupancyQuery& query) {
  const devproxy_soft_function& entry = static_cast<const HostFunction&>(*ref).entry;
  const uint32_t most = entry.max_threads ? entry.max_threads : 1024;
  switch (query.kind) {
    case OccupancyKind::kActiveBlocks: {
      int64_t blocks = query.block[0] > most ? 0 : kThreadsPerMultiprocessor / query.block[0];
      if (const uint64_t wanted = query.shared_bytes + entry.shared_bytes)
        blocks = std::min(blocks, static_cast<int64_t>(kSharedPerMultiprocessor / wanted));
      return blocks;
    }
    case OccupancyKind::kAvailableShared: {
      if (query.grid[0] == 0 || query.block[0] > most ||
          uint64_t{query.block[0]} * query.grid[0] > kThreadsPerMultiprocessor)
        return Status(kInvalidValue, "so many blocks do not fit a multiprocessor");
      const int64_t each = std::min<int64_t>(kSharedPerMultiprocessor / query.grid[0], kSharedPerBlockOptin);
      return std::max<int64_t>(0, each - entry.shared_bytes);
    }
    case OccupancyKind::kActiveClusters:
    case OccupancyKind::kMaxClusterSize: break;
  }
  return Status(kNotSupported, "the software GPU has no thread block clusters");
}

}  // namespace devproxy::hal::soft
