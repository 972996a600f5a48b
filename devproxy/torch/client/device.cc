// SPDX-License-Identifier: Apache-2.0
// Locks: Device::mu guards the making of contexts and streams; nothing is called back under it.
#include "devproxy/torch/client/device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "devproxy/torch/client/allocator.h"

namespace devproxy::aten {
namespace {

constexpr int64_t kPoolIds = 1;                     // ids 1 .. 1 + kPriorities * kStreamsPerPool
constexpr int64_t kExternalIds = int64_t{1} << 32;  // then the index into Device::external

struct Device {
  std::mutex mu;
  std::atomic<CUcontext> context{nullptr};
  std::array<std::atomic<CUstream>, kPriorities * kStreamsPerPool> pool{};
  std::array<std::atomic<uint32_t>, kPriorities> next_in_pool{};
  std::vector<CUstream> external;
};

// Leaked on purpose: tensors are freed after static destructors have run.
std::array<Device, kMaxDevices>& devices() {
  static auto* const all = new std::array<Device, kMaxDevices>;
  return *all;
}

thread_local DeviceIndex t_device = 0;
thread_local DeviceIndex t_bound = -1;  // whose primary context is current in the driver, as far as we did it
thread_local std::array<int64_t, kMaxDevices> t_streams{};

std::atomic<bool> g_initialised{false};
std::atomic<bool> g_bad_fork{false};

void after_fork_in_child() {
  if (g_initialised.load()) g_bad_fork.store(true);
  t_bound = -1;
}

CUresult initialise() noexcept {
  static const CUresult result = [] {
    if (!driver_present()) return CUDA_ERROR_NO_DEVICE;
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
    return driver().cuInit(0);
  }();
  return result;
}

}  // namespace

DeviceIndex device_count() noexcept {
  static const int count = [] {
    int n = 0;
    if (initialise() != CUDA_SUCCESS || driver().cuDeviceGetCount(&n) != CUDA_SUCCESS) return 0;
    return std::min(n, kMaxDevices);
  }();
  return static_cast<DeviceIndex>(count);
}

void check_device(DeviceIndex device) {
  if (device >= 0 && device < device_count()) [[likely]]
    return;
  TORCH_CHECK(device_count() > 0, "No CUDA GPUs are available");
  throw_cuda_error(CUDA_ERROR_INVALID_DEVICE, "selecting the device");
}

DeviceIndex current_device() noexcept { return t_device; }

void set_current_device(DeviceIndex device) {
  if (device == t_device) return;
  check_device(device);
  t_device = device;
}

void set_current_device_unchecked(DeviceIndex device) noexcept { t_device = device; }

void bind_device(DeviceIndex device) {
  if (t_bound == device) [[likely]]
    return;
  TORCH_CHECK(!in_bad_fork(),
              "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
              "'spawn' start method");
  check_device(device);
  Device& d = devices()[device];
  CUcontext context = d.context.load(std::memory_order_acquire);
  if (context == nullptr) {
    std::lock_guard lock(d.mu);
    context = d.context.load();
    if (context == nullptr) {
      CUdevice handle;
      check(driver().cuDeviceGet(&handle, device), "cuDeviceGet");
      check(driver().cuDevicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain");
      // As torch's own allocators: what is freed stays the process's until empty_cache().
      CUmemoryPool pool;
      cuuint64_t all = UINT64_MAX;
      check(driver().cuDeviceGetDefaultMemPool(&pool, handle), "cuDeviceGetDefaultMemPool");
      check(driver().cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all), "cuMemPoolSetAttribute");
      d.context.store(context, std::memory_order_release);
      g_initialised.store(true);
    }
  }
  check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent");
  t_bound = device;
}

bool has_context(DeviceIndex device) noexcept {
  return device >= 0 && device < kMaxDevices && devices()[device].context.load() != nullptr;
}

bool in_bad_fork() noexcept { return g_bad_fork.load(std::memory_order_relaxed); }

int64_t current_stream_id(DeviceIndex device) noexcept { return t_streams[device]; }
void set_current_stream_id(DeviceIndex device, int64_t id) noexcept { t_streams[device] = id; }

int64_t pool_stream_id(DeviceIndex device, int priority) {
  check_device(device);
  const int level = std::min(std::max(-priority, 0), kPriorities - 1);
  const uint32_t turn = devices()[device].next_in_pool[level].fetch_add(1) % kStreamsPerPool;
  return kPoolIds + level * kStreamsPerPool + turn;
}

int64_t external_stream_id(DeviceIndex device, CUstream handle) {
  check_device(device);
  Device& d = devices()[device];
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return 0;
  for (size_t i = 0; i < d.pool.size(); ++i)
    if (d.pool[i].load() == handle) return kPoolIds + static_cast<int64_t>(i);
  std::lock_guard lock(d.mu);
  for (size_t i = 0; i < d.external.size(); ++i)
    if (d.external[i] == handle) return kExternalIds + static_cast<int64_t>(i);
  d.external.push_back(handle);
  return kExternalIds + static_cast<int64_t>(d.external.size()) - 1;
}

int stream_priority(DeviceIndex, int64_t id) {
  if (id < kPoolIds || id >= kExternalIds) return 0;
  return -static_cast<int>((id - kPoolIds) / kStreamsPerPool);
}

CUstream stream_handle(DeviceIndex device, int64_t id) {
  bind_device(device);
  if (id == 0) [[likely]]
    return nullptr;
  Device& d = devices()[device];
  if (id >= kExternalIds) {
    std::lock_guard lock(d.mu);
    const auto i = static_cast<size_t>(id - kExternalIds);
    TORCH_CHECK(i < d.external.size(), "unknown CUDA stream id ", id);
    return d.external[i];
  }
  const auto i = static_cast<size_t>(id - kPoolIds);
  TORCH_CHECK(i < d.pool.size(), "unknown CUDA stream id ", id);
  CUstream stream = d.pool[i].load(std::memory_order_acquire);
  if (stream != nullptr) [[likely]]
    return stream;
  std::lock_guard lock(d.mu);
  stream = d.pool[i].load();
  if (stream == nullptr) {
    check(driver().cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, stream_priority(device, id)),
          "cuStreamCreateWithPriority");
    d.pool[i].store(stream, std::memory_order_release);
  }
  return stream;
}

void synchronize_device(DeviceIndex device) {
  bind_device(device);
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
}

namespace {

// What c10 asks of a device type: current device and stream, events.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device old = getDevice();
    set_current_device(d.index());
    return old;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device()}; }
  void setDevice(c10::Device d) const override { set_current_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { set_current_device_unchecked(d.index()); }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  static DeviceIndex index(c10::Device d) { return d.has_index() ? d.index() : current_device(); }
  c10::Stream getStream(c10::Device d) const override { return torch_stream(index(d), current_stream_id(index(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return torch_stream(index(d), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool high) const override {
    return torch_stream(index(d), pool_stream_id(index(d), high ? -1 : 0));
  }
  c10::Stream getNewStream(c10::Device d, int priority) const override {
    return torch_stream(index(d), pool_stream_id(index(d), priority));
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto old = torch_stream(s.device_index(), current_stream_id(s.device_index()));
    set_current_stream_id(s.device_index(), s.id());
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return handle_of(s); }
  bool queryStream(const c10::Stream& s) const override {
    const CUresult r = driver().cuStreamQuery(handle_of(s));
    if (r == CUDA_ERROR_NOT_READY) return false;
    check(r, "cuStreamQuery");
    return true;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    check(driver().cuStreamSynchronize(handle_of(s)), "cuStreamSynchronize");
  }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_device(device); }

  void record(void** event, const c10::Stream& s, const DeviceIndex device, const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == s.device_index(), "Event device index ", device,
                " does not match recording stream's device index ", s.device_index(), ".");
    const CUstream stream = handle_of(s);
    if (*event == nullptr) {
      CUevent made;
      const unsigned flags = flag == c10::EventFlag::BACKEND_DEFAULT ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING;
      check(driver().cuEventCreate(&made, flags), "cuEventCreate");
      *event = made;
    }
    check(driver().cuEventRecord(static_cast<CUevent>(*event), stream), "cuEventRecord");
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event == nullptr) return;
    check(driver().cuStreamWaitEvent(handle_of(s), static_cast<CUevent>(event), 0), "cuStreamWaitEvent");
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const CUresult r = driver().cuEventQuery(static_cast<CUevent>(event));
    if (r == CUDA_ERROR_NOT_READY) return false;
    check(r, "cuEventQuery");
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    check(driver().cuEventSynchronize(static_cast<CUevent>(event)), "cuEventSynchronize");
  }
  void destroyEvent(void* event, const DeviceIndex device) const noexcept override {
    if (event == nullptr || in_bad_fork()) return;
    try {
      bind_device(device);
      (void)driver().cuEventDestroy(static_cast<CUevent>(event));  // at exit the driver may be gone already
    } catch (...) {}
  }
  double elapsedTime(void* start, void* end, const DeviceIndex device) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    bind_device(device);
    float ms = 0;
    check(driver().cuEventElapsedTime(&ms, static_cast<CUevent>(start), static_cast<CUevent>(end)),
          "cuEventElapsedTime");
    return ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& s) const override {
    device_allocator()->recordStream(ptr, s);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace
}  // namespace devproxy::aten
