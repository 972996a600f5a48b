#include "devproxy/hal/soft/torch/client/allocator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <mutex>
#include <vector>

namespace devproxy::softtorch {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kRoundBytes = 512;              // torch's own rounding, so memory_allocated() says the same
constexpr size_t kSmallBytes = size_t{1} << 20;  // torch's border between its small and its large pool

size_t round_up(size_t n) { return (n + kRoundBytes - 1) & ~(kRoundBytes - 1); }

// One live allocation; the DataPtr's context.
struct Block {
  CUdeviceptr addr;
  size_t bytes;  // rounded
  size_t requested;
  DeviceIndex device;
  int64_t stream;              // torch's id of the stream that the memory is ordered on
  std::vector<int64_t> users;  // record_stream: other streams that use it
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
    CUdeviceptr addr = 0;
    CUresult r =
        over_fraction(device, rounded) ? CUDA_ERROR_OUT_OF_MEMORY : driver().cuMemAllocAsync(&addr, rounded, handle);
    if (r == CUDA_ERROR_OUT_OF_MEMORY) [[unlikely]] {
      // What was freed behind unfinished work comes back once that work is done.
      check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
      count_retry(device);
      r = over_fraction(device, rounded) ? CUDA_ERROR_OUT_OF_MEMORY : driver().cuMemAllocAsync(&addr, rounded, handle);
      if (r == CUDA_ERROR_OUT_OF_MEMORY) throw_out_of_memory(device, bytes);
    }
    check(r, "cuMemAllocAsync");
    auto* block = new Block{addr, rounded, bytes, device, stream, {}};
    account(*block, +1);
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
  void emptyCache(c10::MempoolId_t) override {}  // nothing is cached here

  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (ptr.get() == nullptr || ptr.get_deleter() != &free_block) return;
    auto* block = static_cast<Block*>(ptr.get_context());
    if (stream.id() == block->stream) return;
    std::lock_guard lock(state_[block->device].mu);
    for (int64_t id : block->users)
      if (id == stream.id()) return;
    block->users.push_back(stream.id());
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
  };

  static std::array<StatArray*, 8> arrays(DeviceStats& s) {
    return {&s.allocation,      &s.segment,        &s.active,       &s.inactive_split,
            &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes};
  }

  // Every allocation is its own segment, so reserved and allocated are equal.
  void account(const Block& b, int sign) {
    State& st = state_[b.device];
    std::lock_guard lock(st.mu);
    const auto pool = b.bytes <= kSmallBytes ? StatType::SMALL_POOL : StatType::LARGE_POOL;
    for (const auto type : {StatType::AGGREGATE, pool}) {
      const auto i = static_cast<size_t>(type);
      for (StatArray* a : {&st.stats.allocation, &st.stats.segment, &st.stats.active}) change((*a)[i], 1, sign);
      for (StatArray* a : {&st.stats.allocated_bytes, &st.stats.reserved_bytes, &st.stats.active_bytes})
        change((*a)[i], b.bytes, sign);
      change(st.stats.requested_bytes[i], b.requested, sign);
    }
    (sign > 0 ? st.stats.num_device_alloc : st.stats.num_device_free) += 1;
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
    size_t allocated = 0;
    {
      std::lock_guard lock(state_[device].mu);
      state_[device].stats.num_ooms += 1;
      allocated = static_cast<size_t>(state_[device].stats.allocated_bytes[0].current);
    }
    size_t free = 0, total = 0;
    (void)driver().cuMemGetInfo(&free, &total);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", human(bytes), ". GPU ",
                     static_cast<int>(device), " has a total capacity of ", human(total), " of which ", human(free),
                     " is free. Of the allocated memory ", human(allocated),
                     " is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.");
  }

  static void free_nothing(void*) {}

  // Runs in destructors, at exit, and in forked children: reports nothing, throws nothing.
  static void free_block(void* context) {
    auto* block = static_cast<Block*>(context);
    auto* self = static_cast<Allocator*>(device_allocator());
    self->account(*block, -1);
    if (!in_bad_fork()) {
      try {
        const CUstream owner = stream_handle(block->device, block->stream);
        for (int64_t user : block->users) {
          // The owning stream waits for the user's work so far, then the memory goes back in that order.
          CUevent done;
          check(driver().cuEventCreate(&done, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
          check(driver().cuEventRecord(done, stream_handle(block->device, user)), "cuEventRecord");
          check(driver().cuStreamWaitEvent(owner, done, 0), "cuStreamWaitEvent");
          check(driver().cuEventDestroy(done), "cuEventDestroy");
        }
        (void)driver().cuMemFreeAsync(block->addr, owner);  // a broken context has lost the memory anyway
      } catch (...) {}
    }
    delete block;
  }

  std::array<State, kMaxDevices> state_;
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
    check(driver().cuMemHostAlloc(ptr, bytes, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
  }
  void free_block(at::HostBlock<c10::Stream>* block) override {
    if (!in_bad_fork()) (void)driver().cuMemFreeHost(block->ptr_);
  }
  void record_stream(std::optional<std::vector<PinnedEvent>>& events, c10::Stream stream) override {
    const CUstream handle = handle_of(stream);
    PinnedEvent e{nullptr, stream.device_index()};
    check(driver().cuEventCreate(&e.event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    check(driver().cuEventRecord(e.event, handle), "cuEventRecord");
    events->push_back(e);
  }
  bool query_event(PinnedEvent& e) override {
    if (in_bad_fork()) return false;
    bind_device(e.device);
    const CUresult r = driver().cuEventQuery(e.event);
    if (r == CUDA_ERROR_NOT_READY) return false;
    check(r, "cuEventQuery");
    (void)driver().cuEventDestroy(e.event);
    return true;
  }
  c10::Stream get_current_stream() const override {
    return torch_stream(current_device(), current_stream_id(current_device()));
  }
  bool stream_is_capturing(c10::Stream) const override { return false; }
};

void free_pinned(void* context);
struct PinnedAllocator final : at::CachingHostAllocatorInterface<PinnedImpl, free_pinned> {};

PinnedAllocator* pinned_allocator() {
  static auto* const a = new PinnedAllocator;
  return a;
}
void free_pinned(void* context) { pinned_allocator()->free(context); }

const struct Register {
  Register() {
    c10::SetAllocator(c10::kCUDA, device_allocator(), 255);
    at::setHostAllocator(at::kCUDA, pinned_allocator(), 255);
  }
} g_register;

}  // namespace

DeviceAllocator* device_allocator() {
  static auto* const a = new Allocator;
  return a;
}

void grow_storage(c10::StorageImpl* storage, DeviceIndex device, size_t bytes) {
  if (storage->nbytes() >= bytes) return;
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  auto memory = device_allocator()->allocate_on(device, bytes);
  if (storage->nbytes() != 0)
    check(driver().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(memory.get()),
                                     reinterpret_cast<CUdeviceptr>(storage->data()), storage->nbytes(),
                                     current_stream(device)),
          "cuMemcpyDtoDAsync");
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
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

}  // namespace devproxy::softtorch
