// SPDX-License-Identifier: Apache-2.0
// Memory pools. The allocator of a device is one, and what is free of it is free to all: a pool is a name, some
// attributes and an account. A release threshold says how much credit the process keeps for what was freed in stream
// order, so that the next allocation need not ask the server (DeviceState::free).
#include "devproxy/interceptors/memory/pool.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

#include "devproxy/interceptors/client_common.h"

namespace devproxy::sa::memory {

namespace {

struct Pool {
  int device = 0;
  int reuse[3] = {1, 1, 1};  // CU_MEMPOOL_ATTR_REUSE_*: what the client's allocator may do in any case
  uint64_t threshold = 0, used = 0, used_high = 0;
};
struct Share {
  uint64_t pool, bytes;
};

std::mutex g_pools_mu;  // guards everything below; a leaf
std::atomic<size_t> g_shares_held{0};
uint64_t g_next = client::kMaxDevices + 1;     // handles; a device's default pool is its ordinal plus one
uint64_t g_current[client::kMaxDevices] = {};  // 0: the default one
std::map<uint64_t, Pool>& pools() {
  static auto* m = [] {
    auto* all = new std::map<uint64_t, Pool>;
    for (int i = 0; i < client::kMaxDevices; ++i) (*all)[static_cast<uint64_t>(i) + 1].device = i;
    return all;
  }();
  return *m;
}
std::unordered_map<uint64_t, Share>& shares() {
  static auto* m = new std::unordered_map<uint64_t, Share>;
  return *m;
}

uint64_t default_pool(int device) { return static_cast<uint64_t>(device) + 1; }

// nullptr for a handle that is none. g_pools_mu held.
Pool* pool_of(uint64_t value) {
  const auto it = pools().find(value);
  return it == pools().end() || it->second.device >= client::device_count() ? nullptr : &it->second;
}

// What the threshold leaves beside what is allocated.
uint64_t unused_of(const Pool& p) { return p.threshold > p.used ? p.threshold - p.used : 0; }

bool is_device(CUdevice dev) { return dev >= 0 && dev < client::device_count(); }

// cuda.h: of these three, only pinned memory of a device has pools here.
CUresult device_at(const CUmemLocation* location, CUmemAllocationType type, int* device) {
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || type != CU_MEM_ALLOCATION_TYPE_PINNED)
    return CUDA_ERROR_NOT_SUPPORTED;
  if (!is_device(location->id)) return CUDA_ERROR_INVALID_DEVICE;
  *device = location->id;
  return CUDA_SUCCESS;
}

}  // namespace

uint64_t current_pool(int device) {
  const std::lock_guard lock(g_pools_mu);
  return g_current[device] != 0 ? g_current[device] : default_pool(device);
}

bool pool_device(uint64_t pool, int* device) {
  const std::lock_guard lock(g_pools_mu);
  const Pool* p = pool_of(pool);
  if (p) *device = p->device;
  return p != nullptr;
}

void pool_took(uint64_t pool, uint64_t addr, uint64_t bytes) {
  const std::lock_guard lock(g_pools_mu);
  Pool* p = pool_of(pool);
  if (!p) return;
  shares()[addr] = {pool, bytes};
  g_shares_held.store(shares().size(), std::memory_order_relaxed);
  p->used += bytes;
  p->used_high = std::max(p->used_high, p->used);
}

uint64_t pool_lost(uint64_t addr) {
  if (g_shares_held.load(std::memory_order_relaxed) == 0) return 0;
  const std::lock_guard lock(g_pools_mu);
  const auto it = shares().find(addr);
  if (it == shares().end()) return 0;
  uint64_t may_hold = 0;
  if (Pool* p = pool_of(it->second.pool)) {
    p->used -= it->second.bytes;
    may_hold = unused_of(*p);
  }
  shares().erase(it);
  g_shares_held.store(shares().size(), std::memory_order_relaxed);
  return may_hold;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool_out, CUdevice dev) {
  if (!is_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
  *pool_out = handle<CUmemoryPool>(default_pool(dev));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice dev) {
  if (!is_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
  *pool = handle<CUmemoryPool>(current_pool(dev));
  return CUDA_SUCCESS;
}

CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool) {
  if (!is_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(g_pools_mu);
  const Pool* p = pool_of(bits(pool));
  if (!p || p->device != dev) return CUDA_ERROR_INVALID_VALUE;
  g_current[dev] = bits(pool);
  return CUDA_SUCCESS;
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool* pool_out, CUmemLocation* location, CUmemAllocationType type) {
  int device = 0;
  if (const CUresult rc = device_at(location, type, &device); rc != CUDA_SUCCESS) return rc;
  return memory::cuDeviceGetDefaultMemPool(pool_out, device);
}

CUresult cuMemGetMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType type) {
  int device = 0;
  if (const CUresult rc = device_at(location, type, &device); rc != CUDA_SUCCESS) return rc;
  return memory::cuDeviceGetMemPool(pool, device);
}

CUresult cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType type, CUmemoryPool pool) {
  int device = 0;
  if (const CUresult rc = device_at(location, type, &device); rc != CUDA_SUCCESS) return rc;
  return memory::cuDeviceSetMemPool(device, pool);
}

CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* poolProps) {
  if (poolProps->handleTypes != CU_MEM_HANDLE_TYPE_NONE) {
    client::log(client::Level::kWarn, "cuMemPoolCreate refuses shareable handles: memory is not shared through them");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  int device = 0;
  if (const CUresult rc = device_at(&poolProps->location, poolProps->allocType, &device); rc != CUDA_SUCCESS) return rc;
  const std::lock_guard lock(g_pools_mu);
  pools()[g_next].device = device;
  *pool = handle<CUmemoryPool>(g_next++);
  return CUDA_SUCCESS;
}

// What is still allocated stays; cuda.h: the pool goes when the last of it is freed.
CUresult cuMemPoolDestroy(CUmemoryPool pool) {
  const std::lock_guard lock(g_pools_mu);
  const Pool* p = pool_of(bits(pool));
  if (!p || bits(pool) == default_pool(p->device)) return CUDA_ERROR_INVALID_VALUE;
  if (g_current[p->device] == bits(pool)) g_current[p->device] = 0;  // cuda.h: then the default one is current
  pools().erase(bits(pool));
  return CUDA_SUCCESS;
}

// Pools of a device hold on to memory together, so all of them are trimmed.
CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep) {
  client::DeviceState* d = nullptr;
  uint64_t keep = 0;
  {
    const std::lock_guard lock(g_pools_mu);
    const Pool* p = pool_of(bits(pool));
    if (!p) return CUDA_ERROR_INVALID_VALUE;
    d = client::device_state_if_attached(p->device);
    if (minBytesToKeep > p->used) keep = minBytesToKeep - p->used;
  }
  if (d) d->hold_at_most(keep);
  return CUDA_SUCCESS;
}

// cuda.h: a device always reads and writes its own pools; another one does so through peer access, which there is none
// of.
CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* map, size_t count) {
  const std::lock_guard lock(g_pools_mu);
  const Pool* p = pool_of(bits(pool));
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_device(map[i].location.id))
      return CUDA_ERROR_INVALID_DEVICE;
    const bool own = map[i].location.id == p->device, none = map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
    if (own && none) return CUDA_ERROR_INVALID_DEVICE;
    if (!own && !none) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool memPool, CUmemLocation* location) {
  const std::lock_guard lock(g_pools_mu);
  const Pool* p = pool_of(bits(memPool));
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || !is_device(location->id)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = location->id == p->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

namespace {
// What is allocated, and what the pool holds on to.
CUresult reserved_now(uint64_t pool, cuuint64_t* bytes) {
  std::unique_lock lock(g_pools_mu);
  const Pool* p = pool_of(pool);
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  const int device = p->device;
  const uint64_t used = p->used, unused = unused_of(*p);
  lock.unlock();
  client::DeviceState* d = client::device_state_if_attached(device);
  *bytes = used + (d ? std::min(unused, d->held()) : 0);
  return CUDA_SUCCESS;
}
}  // namespace

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value) {
  if (attr == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) return reserved_now(bits(pool), static_cast<cuuint64_t*>(value));
  const std::lock_guard lock(g_pools_mu);
  const Pool* p = pool_of(bits(pool));
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      *static_cast<int*>(value) = p->reuse[attr - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *static_cast<cuuint64_t*>(value) = p->threshold; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *static_cast<cuuint64_t*>(value) = p->used; return CUDA_SUCCESS;
    // Memory that is held was used before.
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *static_cast<cuuint64_t*>(value) = p->used_high; return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value) {
  const std::lock_guard lock(g_pools_mu);
  Pool* p = pool_of(bits(pool));
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      p->reuse[attr - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = *static_cast<int*>(value);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: p->threshold = *static_cast<cuuint64_t*>(value); return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      if (*static_cast<cuuint64_t*>(value) != 0) return CUDA_ERROR_INVALID_VALUE;  // cuda.h: it can only be reset
      p->used_high = p->used;
      return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace devproxy::sa::memory
