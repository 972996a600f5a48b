// SPDX-License-Identifier: Apache-2.0
// Locks: Allocator::pools_mu_ guards the pools and what waits for the end of a capture; State::mu a device's
// statistics. Neither is held over a driver call that waits, nor while the other is taken.
#include "devproxy/torch/client/allocator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "devproxy/torch/client/graph.h"
#include "devproxy/torch/client/history.h"

namespace devproxy::aten {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kRoundBytes = 512;  // torch's own rounding, so memory_allocated() says the same

size_t round_up(size_t n) { return (n + kRoundBytes - 1) & ~(kRoundBytes - 1); }

// A private pool of one device; Allocator::pools_mu_ guards it.
struct Pool {
  DeviceIndex device;
  c10::MempoolId_t id;
  int holders = 0;  // graphs, and torch.cuda.MemPool
  size_t live = 0;  // blocks of it that are in use
  // By stream, since a stream's own order is all that lets memory be used again within a capture, and by size.
  std::multimap<std::pair<int64_t, size_t>, CUdeviceptr> unused;
  bool spare = false;  // what is unused goes to others before memory runs out
};

// Allocations that torch.cuda.use_mem_pool sends to a pool.
struct Route {
  DeviceIndex device;
  c10::MempoolId_t id;
  PoolUsers users;
  std::thread::id thread;
  int64_t stream;
};

// One live allocation; the DataPtr's context.
struct Block {
  CUdeviceptr addr;
  size_t bytes;    // rounded
  size_t segment;  // of the driver's allocation: more than `bytes` where a pool had something larger
  size_t requested;
  DeviceIndex device;
  int64_t stream;              // torch's id of the stream that the memory is ordered on
  Pool* pool;                  // nullptr: memory of none
  std::vector<int64_t> users;  // record_stream: other streams that use it
  Block *before, *behind;      // in the list of all that the device's statistics count
};

std::string human(size_t bytes) {
  char text[64];
  if (bytes <= 1024) {
    snprintf(text, sizeof text, "%zu bytes", bytes);
  } else if (bytes <= 1048576) {
    snprintf(text, sizeof text, "%.2f KiB", static_cast<double>(bytes) / 1024);
  } else if (bytes <= 1073741824) {
    snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / 1048576);
  } else {
    snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / 1073741824);
  }
  return text;
}

class Allocator final : public DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device(), bytes); }

  c10::DataPtr allocate_on(DeviceIndex device, size_t bytes) override {
    const c10::Device where(c10::kCUDA, device);
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, where};
    const int64_t stream = current_stream_id(device);
    const CUstream handle = stream_handle(device, stream);  // binds the device
    const size_t rounded = round_up(bytes);
    if (any_capture()) [[unlikely]] {
      if (const Graph* graph = capturing_graph(device, stream))
        return allocate_in_pool(device, graph->pool(), stream, rounded, bytes);
    }
    if (routes_count_.load(std::memory_order_relaxed) != 0) [[unlikely]] {
      if (const auto pool = routed(device, stream)) return allocate_in_pool(device, *pool, stream, rounded, bytes);
    }
    CUdeviceptr addr = 0;
    CUresult r =
        over_fraction(device, rounded) ? CUDA_ERROR_OUT_OF_MEMORY : driver().cuMemAllocAsync(&addr, rounded, handle);
    if (r == CUDA_ERROR_OUT_OF_MEMORY) [[unlikely]] {
      if (any_capture()) throw_out_of_memory(device, bytes);  // in a capture nobody may wait for a device
      // What was freed behind unfinished work comes back once that work is done.
      check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
      count_retry(device);
      free_spare(device);
      r = over_fraction(device, rounded) ? CUDA_ERROR_OUT_OF_MEMORY : driver().cuMemAllocAsync(&addr, rounded, handle);
      if (r == CUDA_ERROR_OUT_OF_MEMORY) throw_out_of_memory(device, bytes);
    }
    check(r, "cuMemAllocAsync");
    Block* block = made_block(addr, rounded, bytes, device, stream);
    if (history_on()) [[unlikely]]
      note_allocated(device, addr, rounded, stream, rounded);
    if (c10::memoryProfilingEnabled()) [[unlikely]]
      report(*block, +1);
    return {reinterpret_cast<void*>(addr), block, &free_block, where};
  }

  // Context and data differ, so there is no raw interface.
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* dst, const void* src, size_t bytes) const override {
    const DeviceIndex device = current_device();
    check(driver().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(dst), reinterpret_cast<CUdeviceptr>(src), bytes,
                                     current_stream(device)),
          "cuMemcpyDtoDAsync");
  }

  bool initialized() override { return device_count() > 0; }
  // No block is cached here, but the driver's pool holds on to memory (device.cc).
  void emptyCache(c10::MempoolId_t) override {
    for (DeviceIndex i = 0; i < device_count(); ++i) {
      if (!has_context(i)) continue;
      CUdevice device;
      CUmemoryPool pool;
      check(driver().cuDeviceGet(&device, i), "cuDeviceGet");
      check(driver().cuDeviceGetDefaultMemPool(&pool, device), "cuDeviceGetDefaultMemPool");
      check(driver().cuMemPoolTrimTo(pool, 0), "cuMemPoolTrimTo");
    }
  }

  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (ptr.get() == nullptr || ptr.get_deleter() != &free_block) return;
    auto* block = static_cast<Block*>(ptr.get_context());
    if (stream.id() != block->stream) add_user(block, stream.id());
  }

  DeviceStats getDeviceStats(DeviceIndex device) override {
    check_device(device);
    std::lock_guard lock(state_[device].mu);
    return state_[device].stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    check_device(device);
    std::lock_guard lock(state_[device].mu);
    DeviceStats& s = state_[device].stats;
    for (StatArray* a : arrays(s))
      for (Stat& stat : *a) stat.reset_accumulated();
    s.num_alloc_retries = s.num_ooms = s.num_sync_all_streams = s.num_device_alloc = s.num_device_free = 0;
  }
  void resetPeakStats(DeviceIndex device) override {
    check_device(device);
    std::lock_guard lock(state_[device].mu);
    for (StatArray* a : arrays(state_[device].stats))
      for (Stat& stat : *a) stat.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    bind_device(device);
    size_t free = 0, total = 0;
    check(driver().cuMemGetInfo(&free, &total), "cuMemGetInfo");
    return {free, total};
  }

  void retain_pool(DeviceIndex device, c10::MempoolId_t id) override {
    std::lock_guard lock(pools_mu_);
    auto& pool = pools_[{device, id}];
    if (pool == nullptr) pool = std::make_unique<Pool>(Pool{device, id, 0, 0, {}, false});
    pool->holders += 1;
  }

  void spare_pool(DeviceIndex device, c10::MempoolId_t id) override {
    std::lock_guard lock(pools_mu_);
    if (const auto it = pools_.find({device, id}); it != pools_.end()) it->second->spare = true;
  }

  int pool_holders(DeviceIndex device, c10::MempoolId_t id) override {
    std::lock_guard lock(pools_mu_);
    const auto it = pools_.find({device, id});
    return it != pools_.end() ? it->second->holders : 0;
  }

  void begin_route(DeviceIndex device, c10::MempoolId_t id, PoolUsers users) override {
    retain_pool(device, id);
    std::lock_guard lock(pools_mu_);
    routes_.push_back({device, id, users, std::this_thread::get_id(), current_stream_id(device)});
    routes_count_.store(routes_.size());
  }

  void end_route(DeviceIndex device, c10::MempoolId_t id) override {
    std::lock_guard lock(pools_mu_);
    const auto newest = std::find_if(routes_.rbegin(), routes_.rend(), [&](const Route& r) {
      return r.device == device && r.id == id &&
             (r.users != PoolUsers::kThread || r.thread == std::this_thread::get_id());
    });
    if (newest == routes_.rend()) return;
    routes_.erase(std::next(newest).base());
    routes_count_.store(routes_.size());
  }

  void release_pool(DeviceIndex device, c10::MempoolId_t id) override {
    std::multimap<std::pair<int64_t, size_t>, CUdeviceptr> unused;
    {
      std::lock_guard lock(pools_mu_);
      const auto it = pools_.find({device, id});
      if (it == pools_.end() || --it->second->holders != 0) return;
      unused = std::move(it->second->unused);
      it->second->unused.clear();
      if (it->second->live == 0) pools_.erase(it);
    }
    for (const auto& [key, addr] : unused) free_segment(device, addr, key.second, key.first);
  }

  void free_what_waited() override {
    std::vector<Block*> blocks;
    {
      std::lock_guard lock(pools_mu_);
      if (any_capture()) return;
      blocks.swap(waiting_);
    }
    for (Block* block : blocks) give_back(block, false);
  }

  std::vector<Segment> segments(DeviceIndex device) override {
    check_device(device);
    std::vector<Segment> found;
    {
      std::lock_guard lock(pools_mu_);
      for (const auto& [key, pool] : pools_)
        for (const auto& [about, addr] : pool->unused)
          if (key.first == device) found.push_back({addr, about.second, 0, 0, about.first, pool->id});
      for (const Block* b : waiting_)
        if (b->device == device) found.push_back({b->addr, b->segment, 0, 0, b->stream, pool_of(*b)});
    }
    State& st = state_[device];
    std::lock_guard lock(st.mu);
    for (const Block* b = st.live; b != nullptr; b = b->behind)
      found.push_back({b->addr, b->segment, b->bytes, b->requested, b->stream, pool_of(*b)});
    return found;
  }

  double memory_fraction(DeviceIndex device) override { return state_[device].fraction; }
  void set_memory_fraction(DeviceIndex device, double fraction) override {
    check_device(device);
    const size_t total = getMemoryInfo(device).second;
    std::lock_guard lock(state_[device].mu);
    state_[device].fraction = fraction;
    state_[device].limit_bytes =
        fraction >= 1.0 ? SIZE_MAX : static_cast<size_t>(fraction * static_cast<double>(total));
  }

 private:
  struct State {
    std::mutex mu;
    DeviceStats stats;
    double fraction = 1.0;
    size_t limit_bytes = SIZE_MAX;
    Block* live = nullptr;  // the first of those that the statistics count
    // Objects of blocks that are free again, for the next allocations: most ops take one and give one back.
    std::vector<Block*> spare;
  };
  static constexpr size_t kSpare = 256;  // of each device

  static std::array<StatArray*, 8> arrays(DeviceStats& s) {
    return {&s.allocation,      &s.segment,        &s.active,       &s.inactive_split,
            &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes};
  }

  static c10::MempoolId_t pool_of(const Block& b) { return b.pool != nullptr ? b.pool->id : c10::MempoolId_t{0, 0}; }

  // Every driver allocation is one segment. It is in use as a whole, so reserved and allocated are equal but for what a
  // graph's pool keeps. What the driver's pool holds on to is not counted: cuMemGetInfo says that it is free.
  void account_segment(DeviceIndex device, size_t bytes, int sign) {
    State& st = state_[device];
    std::lock_guard lock(st.mu);
    account_segment_locked(st, bytes, sign);
  }
  void account(Block& b, int sign) {
    State& st = state_[b.device];
    std::lock_guard lock(st.mu);
    account_locked(st, b, sign);
  }
  // Precondition of both: st.mu is held.
  static void account_segment_locked(State& st, size_t bytes, int sign) {
    for (const auto i : kinds(bytes)) {
      change(st.stats.segment[i], 1, sign);
      change(st.stats.reserved_bytes[i], bytes, sign);
    }
    (sign > 0 ? st.stats.num_device_alloc : st.stats.num_device_free) += 1;
  }
  static void account_locked(State& st, Block& b, int sign) {
    for (const auto i : kinds(b.segment)) {
      for (StatArray* a : {&st.stats.allocation, &st.stats.active}) change((*a)[i], 1, sign);
      for (StatArray* a : {&st.stats.allocated_bytes, &st.stats.active_bytes}) change((*a)[i], b.bytes, sign);
      change(st.stats.requested_bytes[i], b.requested, sign);
    }
    if (sign > 0) {
      b.before = nullptr;
      b.behind = st.live;
      if (st.live != nullptr) st.live->before = &b;
      st.live = &b;
    } else {
      (b.before != nullptr ? b.before->behind : st.live) = b.behind;
      if (b.behind != nullptr) b.behind->before = b.before;
    }
  }

  // Tells torch.profiler(profile_memory=True), as torch's own allocator does. A block that goes is still counted.
  void report(const Block& b, int sign) {
    State& st = state_[b.device];
    int64_t allocated, reserved;
    {
      std::lock_guard lock(st.mu);
      allocated = st.stats.allocated_bytes[0].current;
      reserved = st.stats.reserved_bytes[0].current;
    }
    if (sign < 0) {
      allocated -= static_cast<int64_t>(b.bytes);
      if (b.pool == nullptr) reserved -= static_cast<int64_t>(b.segment);
    }
    c10::reportMemoryUsageToProfiler(reinterpret_cast<void*>(b.addr), sign * static_cast<int64_t>(b.bytes),
                                     static_cast<size_t>(allocated), static_cast<size_t>(reserved),
                                     c10::Device(c10::kCUDA, b.device));
  }

  // A block of no pool, entered in the statistics: one lock for all of it.
  Block* made_block(CUdeviceptr addr, size_t rounded, size_t bytes, DeviceIndex device, int64_t stream) {
    State& st = state_[device];
    std::lock_guard lock(st.mu);
    Block* block;
    if (st.spare.empty()) {
      st.spare.reserve(kSpare);
      block = new Block{};
    } else {
      block = st.spare.back();
      st.spare.pop_back();
    }
    block->addr = addr;
    block->bytes = block->segment = rounded;
    block->requested = bytes;
    block->device = device;
    block->stream = stream;
    account_segment_locked(st, rounded, +1);
    account_locked(st, *block, +1);
    return block;
  }
  // And its end. in_use: it is still counted as allocated.
  void unmade_block(Block* block, bool in_use) {
    State& st = state_[block->device];
    std::lock_guard lock(st.mu);
    if (in_use) account_locked(st, *block, -1);
    account_segment_locked(st, block->segment, -1);
    if (st.spare.size() == st.spare.capacity()) {  // made_block() makes the room, since here nothing may be thrown
      delete block;
      return;
    }
    st.spare.push_back(block);
  }

  static std::array<size_t, 2> kinds(size_t bytes) {
    const auto pool = bytes <= kSmallBytes ? StatType::SMALL_POOL : StatType::LARGE_POOL;
    return {static_cast<size_t>(StatType::AGGREGATE), static_cast<size_t>(pool)};
  }
  static void change(Stat& s, size_t amount, int sign) { sign > 0 ? s.increase(amount) : s.decrease(amount); }

  bool over_fraction(DeviceIndex device, size_t bytes) {
    State& st = state_[device];
    if (st.limit_bytes == SIZE_MAX) [[likely]]
      return false;
    std::lock_guard lock(st.mu);
    return static_cast<size_t>(st.stats.reserved_bytes[0].current) + bytes > st.limit_bytes;
  }
  void count_retry(DeviceIndex device) {
    std::lock_guard lock(state_[device].mu);
    state_[device].stats.num_alloc_retries += 1;
  }

  [[noreturn]] void throw_out_of_memory(DeviceIndex device, size_t bytes) {
    size_t allocated = 0, reserved = 0;
    {
      std::lock_guard lock(state_[device].mu);
      state_[device].stats.num_ooms += 1;
      allocated = static_cast<size_t>(state_[device].stats.allocated_bytes[0].current);
      reserved = static_cast<size_t>(state_[device].stats.reserved_bytes[0].current);
    }
    c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(bytes), allocated, reserved, {c10::kCUDA, device});
    size_t free = 0, total = 0;
    (void)driver().cuMemGetInfo(&free, &total);
    note_out_of_memory(device, bytes, total, free);
    const std::string others = other_holders(static_cast<int>(device));
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", human(bytes), ". GPU ",
                     static_cast<int>(device), " has a total capacity of ", human(total), " of which ", human(free),
                     " is free. Of the allocated memory ", human(allocated),
                     " is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.", others);
  }

  // The pool of the newest route that an allocation takes.
  std::optional<c10::MempoolId_t> routed(DeviceIndex device, int64_t stream) {
    std::lock_guard lock(pools_mu_);
    for (auto r = routes_.rbegin(); r != routes_.rend(); ++r)
      if (r->device == device && (r->users != PoolUsers::kThread || r->thread == std::this_thread::get_id()) &&
          (r->users != PoolUsers::kStream || r->stream == stream))
        return r->id;
    return std::nullopt;
  }

  // What pools that may be robbed keep and do not use.
  void free_spare(DeviceIndex device) {
    std::multimap<std::pair<int64_t, size_t>, CUdeviceptr> unused;
    {
      std::lock_guard lock(pools_mu_);
      for (const auto& [key, pool] : pools_)
        if (key.first == device && pool->spare) unused.merge(pool->unused);
    }
    for (const auto& [key, addr] : unused) free_segment(device, addr, key.second, key.first);
  }

  // Precondition: the pool is held, by the graph whose capture the caller's stream is in or by a route.
  c10::DataPtr allocate_in_pool(DeviceIndex device, c10::MempoolId_t id, int64_t stream, size_t rounded, size_t bytes) {
    auto* block = new Block{0, rounded, rounded, bytes, device, stream, nullptr, {}, nullptr, nullptr};
    {
      std::lock_guard lock(pools_mu_);
      Pool& pool = *pools_.at({device, id});
      block->pool = &pool;
      pool.live += 1;
      // The smallest that is large enough, unless half of it would lie idle.
      const auto it = pool.unused.lower_bound({stream, rounded});
      if (it != pool.unused.end() && it->first.first == stream && it->first.second <= 2 * rounded) {
        block->addr = it->second;
        block->segment = it->first.second;
        pool.unused.erase(it);
      }
    }
    const bool made = block->addr == 0;
    if (made) {
      const RelaxedScope relaxed;
      const auto get = [&] {
        return over_fraction(device, rounded) ? CUDA_ERROR_OUT_OF_MEMORY : driver().cuMemAlloc(&block->addr, rounded);
      };
      CUresult r = get();
      if (r == CUDA_ERROR_OUT_OF_MEMORY && !any_capture()) {  // as outside of pools
        (void)driver().cuCtxSynchronize();
        count_retry(device);
        free_spare(device);
        r = get();
      }
      if (r != CUDA_SUCCESS) {
        block->addr = 0;
        forget(block);
        if (r == CUDA_ERROR_OUT_OF_MEMORY) throw_out_of_memory(device, bytes);
        check(r, "cuMemAlloc");
      }
      account_segment(device, rounded, +1);
    }
    account(*block, +1);
    if (history_on()) [[unlikely]]
      note_allocated(device, block->addr, rounded, stream, made ? rounded : 0);
    if (c10::memoryProfilingEnabled()) [[unlikely]]
      report(*block, +1);
    return {reinterpret_cast<void*>(block->addr), block, &free_block, c10::Device(c10::kCUDA, device)};
  }

  // The pool is one block poorer: keeps its memory while somebody holds the pool, and gives it back otherwise.
  void forget(Block* block) {
    Pool& pool = *block->pool;
    bool keep;
    {
      std::lock_guard lock(pools_mu_);
      keep = pool.holders != 0;
      pool.live -= 1;
      if (keep && block->addr != 0) pool.unused.insert({{block->stream, block->segment}, block->addr});
      if (!keep && pool.live == 0) pools_.erase({pool.device, pool.id});
    }
    if (!keep && block->addr != 0) free_segment(block->device, block->addr, block->segment, block->stream);
    delete block;
  }

  // Memory of a pool: waits for what is under way. stream: torch's id of the one it was ordered on.
  void free_segment(DeviceIndex device, CUdeviceptr addr, size_t bytes, int64_t stream) {
    if (history_on()) [[unlikely]]
      note_segment_freed(device, addr, bytes, stream);
    account_segment(device, bytes, -1);
    bind_device(device);
    const RelaxedScope relaxed;
    (void)driver().cuMemFree(addr);  // a broken context has lost the memory anyway
  }

  void add_user(Block* block, int64_t stream) {
    std::lock_guard lock(state_[block->device].mu);
    for (const int64_t id : block->users)
      if (id == stream) return;
    block->users.push_back(stream);
  }

  static void free_nothing(void*) {}

  // Runs in destructors, at exit, and in forked children: returns no error, throws nothing.
  static void free_block(void* context) {
    auto* block = static_cast<Block*>(context);
    auto* self = static_cast<Allocator*>(device_allocator());
    if (history_on() && !in_bad_fork()) [[unlikely]]
      note_freed(block->device, block->addr, block->bytes, block->stream, block->pool ? 0 : block->segment);
    if (c10::memoryProfilingEnabled()) [[unlikely]]
      self->report(*block, -1);
    if (block->pool == nullptr && !any_capture()) [[likely]] {
      self->add_user_here(block);
      return self->give_back(block, true);
    }
    self->account(*block, -1);
    if (any_capture()) {
      // Memory of the pool that only the block's own stream has used is free for what that stream captures next. All
      // else waits: a capture would take up the events of a free, and holds none of memory.
      if (block->pool == nullptr || !block->users.empty()) {
        std::lock_guard lock(self->pools_mu_);
        self->waiting_.push_back(block);
        return;
      }
    }
    if (block->pool == nullptr) self->add_user_here(block);
    self->give_back(block, false);
  }

  // torch's own allocator keeps freed memory, so a stream that it does not know may still read it (an optimizer's state that
  // a warm-up made on another stream). This allocator gives memory back at once, but not before this stream is done.
  void add_user_here(Block* block) {
    if (const int64_t here = current_stream_id(block->device); here != block->stream) add_user(block, here);
  }

  // in_use: the block is still counted as allocated.
  void give_back(Block* block, bool in_use) {
    if (in_bad_fork()) {
      if (in_use) account(*block, -1);
      delete block;
      return;
    }
    const DeviceIndex device = block->device;
    const int64_t stream = block->stream;
    std::vector<int64_t> users;
    users.swap(block->users);
    if (block->pool != nullptr) {
      try {
        wait_for_users(device, stream, users);
        forget(block);
      } catch (...) {}  // a broken context has lost the memory anyway
      return;
    }
    const CUdeviceptr addr = block->addr;
    unmade_block(block, in_use);
    try {
      wait_for_users(device, stream, users);
      const CUstream owner = stream_handle(device, stream);
      (void)driver().cuMemFreeAsync(addr, owner);  // a broken context has lost the memory anyway
    } catch (...) {
      // Tensors' destructors call this, so it throws nothing. If it fails, the context has lost the memory anyway.
    }
  }

  // The owning stream waits for the users' work so far, then the memory goes back in that order.
  static void wait_for_users(DeviceIndex device, int64_t stream, const std::vector<int64_t>& users) {
    for (const int64_t user : users) {
      CUevent done;
      check(driver().cuEventCreate(&done, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
      check(driver().cuEventRecord(done, stream_handle(device, user)), "cuEventRecord");
      check(driver().cuStreamWaitEvent(stream_handle(device, stream), done, 0), "cuStreamWaitEvent");
      check(driver().cuEventDestroy(done), "cuEventDestroy");
    }
  }

  std::array<State, kMaxDevices> state_;
  std::mutex pools_mu_;
  std::map<std::pair<DeviceIndex, c10::MempoolId_t>, std::unique_ptr<Pool>> pools_;
  std::vector<Block*> waiting_;  // freed while a capture was open
  std::vector<Route> routes_;    // the newest last; pools_mu_ guards them
  std::atomic<size_t> routes_count_{0};
};

// ---- pinned host memory: torch's own caching scheme (free lists, events of the streams that used a block) over ours

struct PinnedEvent {
  CUevent event = nullptr;
  DeviceIndex device = 0;
};

class PinnedImpl final : public at::CachingHostAllocatorImpl<c10::Stream, PinnedEvent> {
 private:
  void allocate_host_memory(size_t bytes, void** ptr) override {
    DeviceIndex device = current_device();
    bind_device(device);
    const RelaxedScope relaxed;
    check(driver().cuMemHostAlloc(ptr, bytes, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
  }
  void free_block(at::HostBlock<c10::Stream>* block) override {
    const RelaxedScope relaxed;
    if (!in_bad_fork()) (void)driver().cuMemFreeHost(block->ptr_);
  }
  void record_stream(std::optional<std::vector<PinnedEvent>>& events, c10::Stream stream) override {
    const CUstream handle = handle_of(stream);
    PinnedEvent e{nullptr, stream.device_index()};
    // A captured use comes with each replay, and keeping the memory until then is the user's part, as on CUDA.
    if (!stream_is_capturing(stream)) {
      check(driver().cuEventCreate(&e.event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
      check(driver().cuEventRecord(e.event, handle), "cuEventRecord");
    }
    events->push_back(e);
  }
  bool query_event(PinnedEvent& e) override {
    if (in_bad_fork()) return false;
    if (e.event == nullptr) return true;
    bind_device(e.device);
    const RelaxedScope relaxed;
    const CUresult r = driver().cuEventQuery(e.event);
    if (r == CUDA_ERROR_NOT_READY) return false;
    check(r, "cuEventQuery");
    (void)driver().cuEventDestroy(e.event);
    return true;
  }
  c10::Stream get_current_stream() const override {
    return torch_stream(current_device(), current_stream_id(current_device()));
  }
  bool stream_is_capturing(c10::Stream s) const override {
    return any_capture() && capturing_graph(s.device_index(), s.id()) != nullptr;
  }
};

void free_pinned(void* context);
struct PinnedAllocator final : at::CachingHostAllocatorInterface<PinnedImpl, free_pinned> {};

PinnedAllocator* pinned_allocator() {
  static auto* const a = new PinnedAllocator;
  return a;
}
void free_pinned(void* context) { pinned_allocator()->free(context); }

const struct RegisterAllocators {
  RegisterAllocators() {
    c10::SetAllocator(c10::kCUDA, device_allocator(), 255);
    at::setHostAllocator(at::kCUDA, pinned_allocator(), 255);
  }
} g_register_allocators;

}  // namespace

DeviceAllocator* device_allocator() {
  static auto* const a = new Allocator;
  return a;
}

void resize_storage(c10::StorageImpl* storage, DeviceIndex device, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  auto memory = device_allocator()->allocate_on(device, bytes);
  if (const size_t kept = std::min(storage->nbytes(), bytes); kept != 0)
    check(driver().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(memory.get()),
                                     reinterpret_cast<CUdeviceptr>(storage->data()), kept, current_stream(device)),
          "cuMemcpyDtoDAsync");
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

void grow_storage(c10::StorageImpl* storage, DeviceIndex device, size_t bytes) {
  if (storage->nbytes() < bytes) resize_storage(storage, device, bytes);
}

bool is_pinned(const void* p) {
  if (device_count() == 0 || in_bad_fork()) return false;
  // Without a context nothing can have been pinned yet, and asking would make one.
  bool any = false;
  for (DeviceIndex d = 0; d < device_count() && !any; ++d) any = has_context(d);
  if (!any) return false;
  CUmemorytype type{};
  const CUresult r =
      driver().cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, reinterpret_cast<CUdeviceptr>(p));
  return r == CUDA_SUCCESS && type == CU_MEMORYTYPE_HOST;
}

bool record_pinned_use(const void* data, void* context, DeviceIndex device, int64_t stream_id) {
  return pinned_allocator()->record_event(const_cast<void*>(data), context, torch_stream(device, stream_id));
}

}  // namespace devproxy::aten
