// SPDX-License-Identifier: Apache-2.0
// Device memory and pinned host memory for torch, straight from the driver: devproxy's client already answers
// cuMemAllocAsync and cuMemFreeAsync locally, and every live buffer stays visible to the device-proxy server.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

#include <vector>

#include "devproxy/torch/client/device.h"

namespace devproxy::aten {

// One allocation of the driver, for torch.cuda.memory_snapshot(). A tensor's memory is at its beginning.
struct Segment {
  CUdeviceptr addr;
  size_t bytes, allocated, requested;  // of the driver; of it in use (rounded as torch does); of that asked for
  int64_t stream;                      // torch's id
  c10::MempoolId_t pool;               // {0, 0}: of none
};

inline constexpr size_t kSmallBytes = size_t{1} << 20;  // torch's border between its small and its large pool

// Whose allocations go to a pool.
enum class PoolUsers : uint8_t { kAll, kStream, kThread };

class DeviceAllocator : public c10::DeviceAllocator {
 public:
  // Memory of `bytes` on `device`, ordered on that device's current stream. Throws c10::OutOfMemoryError.
  virtual c10::DataPtr allocate_on(DeviceIndex device, size_t bytes) = 0;
  virtual double memory_fraction(DeviceIndex device) = 0;
  virtual void set_memory_fraction(DeviceIndex device, double fraction) = 0;
  // What is allocated on the device now, and what its pools keep, in no order.
  virtual std::vector<Segment> segments(DeviceIndex device) = 0;

  // Private pools: what a capture allocates comes from its graph's pool and stays there when it is freed, for a replay
  // writes to the same addresses; and what is allocated under torch.cuda.use_mem_pool. Graphs may share one; when the
  // last holder has let go, its free memory goes back, and what is live follows when it is freed.
  virtual void retain_pool(DeviceIndex device, c10::MempoolId_t id) = 0;
  virtual void release_pool(DeviceIndex device, c10::MempoolId_t id) = 0;
  virtual int pool_holders(DeviceIndex device, c10::MempoolId_t id) = 0;
  // What the pool keeps and does not use is given to others before memory runs out.
  virtual void spare_pool(DeviceIndex device, c10::MempoolId_t id) = 0;
  // Retains the pool; allocations outside captures come from it until end_route(), which does not release it. kThread:
  // those of the calling thread; kStream: those on the device's stream that is current now.
  virtual void begin_route(DeviceIndex device, c10::MempoolId_t id, PoolUsers users) = 0;
  virtual void end_route(DeviceIndex device, c10::MempoolId_t id) = 0;
  // Frees what was let go while a capture was open, unless one is.
  virtual void free_what_waited() = 0;
};

// Never destroyed.
DeviceAllocator* device_allocator();

// Gives the storage memory of that size, with what of its contents fits.
void resize_storage(c10::StorageImpl* storage, DeviceIndex device, size_t bytes);
// Makes the storage at least that large, keeping what it holds. Never shrinks it.
void grow_storage(c10::StorageImpl* storage, DeviceIndex device, size_t bytes);

// Whether the address lies in pinned memory of the driver.
bool is_pinned(const void* p);
// Keeps a pinned block from being handed out again before `stream` has got past this point. False if not pinned by us.
bool record_pinned_use(const void* data, void* context, DeviceIndex device, int64_t stream_id);

}  // namespace devproxy::aten
