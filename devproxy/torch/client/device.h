// SPDX-License-Identifier: Apache-2.0
// Devices, contexts and streams of this process, as torch sees them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>

#include "devproxy/torch/client/driver.h"

namespace devproxy::aten {

using c10::DeviceIndex;

inline constexpr int kMaxDevices = 64;
inline constexpr int kStreamsPerPool = 32;  // as torch's own pool: one per priority and device
inline constexpr int kPriorities = 4;       // 0 to -3, as torch's own (c10/cuda/CUDAStream.h); CUDA has more

// Number of devices, 0 if there is no usable driver. Never throws, never creates a context.
DeviceIndex device_count() noexcept;
// Kineto asks torch, on the thread that starts it, whether there is a GPU, and if so looks for CUPTI. While hidden,
// this thread's torch says no.
void hide_gpu_from_kineto(bool hidden);
// Throws "CUDA error: invalid device ordinal" for a device that does not exist.
void check_device(DeviceIndex device);

// torch's current device of this thread. Selecting it does not create a context, but makes one that exists current.
DeviceIndex current_device() noexcept;
void set_current_device(DeviceIndex device);
void set_current_device_unchecked(DeviceIndex device) noexcept;

// Makes the device's primary context current in the driver, retaining it at first use; every driver call that needs a
// context goes through here. Throws.
void bind_device(DeviceIndex device);
bool has_context(DeviceIndex device) noexcept;

// True in a child forked after this process initialised the driver.
bool in_bad_fork() noexcept;

// Streams: id 0 is the device's default stream (the legacy stream); any other is the driver's handle, which is even. So
// are the ids of torch's own CUDA library for streams that it has not made (c10/cuda/CUDAStream.cpp); an odd id is one that
// it made for an extension. `stream_handle` also binds the device.
int64_t current_stream_id(DeviceIndex device) noexcept;
void set_current_stream_id(DeviceIndex device, int64_t id) noexcept;
int64_t pool_stream_id(DeviceIndex device, int priority);
int64_t external_stream_id(DeviceIndex device, CUstream handle);
int stream_priority(DeviceIndex device, int64_t id);
CUstream stream_handle(DeviceIndex device, int64_t id);
inline CUstream current_stream(DeviceIndex device) { return stream_handle(device, current_stream_id(device)); }
inline c10::Stream torch_stream(DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id);
}
inline CUstream handle_of(const c10::Stream& s) { return stream_handle(s.device_index(), s.id()); }

void synchronize_device(DeviceIndex device);

// torch.cuda.set_sync_debug_mode, of the whole process: what happens where an operation makes the host wait for the GPU.
enum class SyncDebug : int { kNothing = 0, kWarning = 1, kError = 2 };
inline std::atomic<SyncDebug> g_sync_debug{SyncDebug::kNothing};
void set_sync_debug(SyncDebug mode);
// Called by such an operation before it begins. Those are the ones of which torch's CUDA build says it: copies between
// host and device that were not asked to be non_blocking, results that the host needs, a stream's synchronize().
void warn_or_throw_of_wait();
inline void say_wait() {
  if (g_sync_debug.load(std::memory_order_relaxed) != SyncDebug::kNothing) [[unlikely]]
    warn_or_throw_of_wait();
}

// Restores the current device at the end of a scope.
class DeviceScope {
 public:
  explicit DeviceScope(DeviceIndex device) : previous_(current_device()) {
    if (device >= 0) set_current_device(device);
  }
  ~DeviceScope() { set_current_device_unchecked(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  DeviceIndex previous_;
};

}  // namespace devproxy::aten
