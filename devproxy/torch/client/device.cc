// SPDX-License-Identifier: Apache-2.0
// Locks: Device::mu guards the making of contexts and streams; nothing is called back under it.
#include "devproxy/torch/client/device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <pthread.h>
#ifdef DEVPROXY_TORCH_OVERRIDE
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>

#include "devproxy/torch/client/allocator.h"

namespace devproxy::aten {
namespace {

struct Device {
  std::mutex mu;
  std::atomic<CUcontext> context{nullptr};
  std::array<std::atomic<CUstream>, kPriorities * kStreamsPerPool> pool{};
  std::array<std::atomic<uint32_t>, kPriorities> next_in_pool{};
};

// Leaked on purpose: tensors are freed after static destructors have run.
std::array<Device, kMaxDevices>& devices() {
  static auto* const all = new std::array<Device, kMaxDevices>;
  return *all;
}

thread_local DeviceIndex t_device = 0;

thread_local std::array<int64_t, kMaxDevices> t_streams{};  // the current ones

#ifdef DEVPROXY_TORCH_OVERRIDE
// Over devproxy's CUDA runtime the CUDA wheel's own library keeps this thread's current streams, and the plugin asks
// there. An extension's C++ reads the stream of `with torch.cuda.stream(s)` from it (at::cuda::getCurrentCUDAStream), and
// sets one that the ops it calls shall follow (c10::cuda::CUDAStreamGuard). Over NVIDIA's runtime, which a job on the
// software GPU has, that library works nowhere.
std::atomic<bool> g_wheel_keeps_streams{false};

// Whether the CUDA runtime of this process lies beside the driver shim.
bool over_own_runtime() {
  Dl_info driver_file, runtime_file;
  void* const count = dlsym(RTLD_DEFAULT, "cudaGetDeviceCount");
  if (count == nullptr || dladdr(count, &runtime_file) == 0 ||
      dladdr(reinterpret_cast<void*>(driver().cuInit), &driver_file) == 0)
    return false;
  const auto folder = [](const Dl_info& i) { return std::string(i.dli_fname, strrchr(i.dli_fname, '/')); };
  return strchr(runtime_file.dli_fname, '/') != nullptr && strchr(driver_file.dli_fname, '/') != nullptr &&
         folder(runtime_file) == folder(driver_file);
}

c10::cuda::CUDAStream stream_of_wheel(DeviceIndex device, int64_t id) {
  return c10::cuda::CUDAStream(c10::cuda::CUDAStream::UNCHECKED, torch_stream(device, id));
}

// Before the first context the default stream is the only one. The library's first answer asks the driver for priorities,
// under the context that is current.
void share_streams(DeviceIndex device) {
  static const bool share = over_own_runtime();
  if (!share) return;
  (void)c10::cuda::getCurrentCUDAStream(device);
  g_wheel_keeps_streams.store(true, std::memory_order_release);
}
#endif

std::atomic<bool> g_initialised{false};
std::atomic<bool> g_bad_fork{false};

void after_fork_in_child() {
  if (g_initialised.load()) g_bad_fork.store(true);
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
  set_current_device_unchecked(device);
}

// An extension's own code asks the driver (through cudaGetDevice), not the plugin.
void set_current_device_unchecked(DeviceIndex device) noexcept {
  if (device == t_device) return;
  t_device = device;
  if (has_context(device) && !in_bad_fork())
    (void)driver().cuCtxSetCurrent(devices()[device].context.load(std::memory_order_acquire));
}

void bind_device(DeviceIndex device) {
  // Not remembered: an extension or another library may have made another device current. Another context of the same
  // device stays, as under torch's own build.
  CUdevice bound;
  if (has_context(device) && driver().cuCtxGetDevice(&bound) == CUDA_SUCCESS && bound == device && !in_bad_fork())
      [[likely]]
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
#ifdef DEVPROXY_TORCH_OVERRIDE
  share_streams(device);
#endif
}

bool has_context(DeviceIndex device) noexcept {
  return device >= 0 && device < kMaxDevices && devices()[device].context.load() != nullptr;
}

bool in_bad_fork() noexcept { return g_bad_fork.load(std::memory_order_relaxed); }

int64_t current_stream_id(DeviceIndex device) noexcept {
#ifdef DEVPROXY_TORCH_OVERRIDE
  if (g_wheel_keeps_streams.load(std::memory_order_acquire)) return c10::cuda::getCurrentCUDAStream(device).id();
#endif
  return t_streams[device];
}

void set_current_stream_id(DeviceIndex device, int64_t id) noexcept {
#ifdef DEVPROXY_TORCH_OVERRIDE
  if (g_wheel_keeps_streams.load(std::memory_order_acquire))
    return c10::cuda::setCurrentCUDAStream(stream_of_wheel(device, id));
#endif
  t_streams[device] = id;
}

int64_t pool_stream_id(DeviceIndex device, int priority) {
  check_device(device);
  bind_device(device);
  const int level = std::min(std::max(-priority, 0), kPriorities - 1);
  Device& d = devices()[device];
  const uint32_t turn = d.next_in_pool[level].fetch_add(1) % kStreamsPerPool;
  std::atomic<CUstream>& place = d.pool[level * kStreamsPerPool + turn];
  CUstream stream = place.load(std::memory_order_acquire);
  if (stream == nullptr) {
    std::lock_guard lock(d.mu);
    stream = place.load();
    if (stream == nullptr) {
      check(driver().cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, -level), "cuStreamCreateWithPriority");
      place.store(stream, std::memory_order_release);
    }
  }
  return reinterpret_cast<int64_t>(stream);
}

int64_t external_stream_id(DeviceIndex device, CUstream handle) {
  check_device(device);
  return handle == CU_STREAM_LEGACY ? 0 : reinterpret_cast<int64_t>(handle);
}

int stream_priority(DeviceIndex device, int64_t id) {
  int priority = 0;
  check(driver().cuStreamGetPriority(stream_handle(device, id), &priority), "cuStreamGetPriority");
  return priority;
}

CUstream stream_handle(DeviceIndex device, int64_t id) {
  bind_device(device);
  if ((id & 1) == 0) [[likely]]
    return reinterpret_cast<CUstream>(id);
#ifdef DEVPROXY_TORCH_OVERRIDE
  return stream_of_wheel(device, id).stream();
#else
  TORCH_CHECK(false, "unknown CUDA stream id ", id);
#endif
}

void synchronize_device(DeviceIndex device) {
  bind_device(device);
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
}

void set_sync_debug(SyncDebug mode) {
#ifdef DEVPROXY_TORCH_OVERRIDE
  // For an extension's C++, which waits by the functions of the wheel's own library.
  c10::cuda::warning_state().set_sync_debug_mode(static_cast<c10::cuda::SyncDebugMode>(mode));
#endif
  g_sync_debug.store(mode, std::memory_order_relaxed);
}

// In the words of torch's CUDA build (c10/cuda/CUDAFunctions.cpp).
void warn_or_throw_of_wait() {
  TORCH_CHECK(g_sync_debug.load(std::memory_order_relaxed) != SyncDebug::kError,
              "called a synchronizing CUDA operation");
  TORCH_WARN("called a synchronizing CUDA operation");
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
    say_wait();
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
