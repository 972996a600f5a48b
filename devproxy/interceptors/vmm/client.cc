// SPDX-License-Identifier: Apache-2.0
// Virtual memory management on the client's own address range: a reservation is a part of the range that no allocator
// uses, a handle is credit, and a mapping that may be accessed is an announced allocation.
//
// Contents belong to the handle. They lie where it was accessible first (its home) until it is accessible elsewhere;
// then they are copied there. An unmapped handle that may be mapped again keeps its memory at its home, so a second
// handle that wants these addresses moves it away first. One handle at two addresses at once is refused by name.
#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

#include "devproxy/interceptors/client_common.h"

namespace devproxy::sa::vmm {

using client::DeviceState;

namespace {

constexpr uint64_t kGranularity = 2u << 20;  // that of every GPU so far

struct Handle {
  int device = 0;
  uint64_t bytes = 0;
  int references = 1;
  uint64_t mapped_at = 0;  // 0: nowhere
  uint64_t home = 0;       // where its memory is; 0: it was never accessible, so it has none
  CUmemAllocationProp prop{};
};

struct Mapping {
  uint64_t bytes = 0;
  uint64_t handle = 0;
  bool accessible = false;
};

struct Reservation {
  int device = 0;
  uint64_t bytes = 0;
  uint64_t taken_at = 0, taken_bytes = 0;  // with what an alignment above the granularity cost
};

struct State {
  std::mutex mu;  // guards all; taken before a device's own
  std::unordered_map<uint64_t, Handle> handles;
  std::map<uint64_t, Mapping> mappings;  // by address
  std::map<uint64_t, Reservation> reservations;
  BidirAllocator ranges[client::kMaxDevices];
  bool has_range[client::kMaxDevices] = {};
  uint64_t serial = 0;
};

State& state() {
  static auto* s = new State;  // never destroyed: threads outlive static destruction
  return *s;
}

CUresult refuse(const char* what) {
  client::log(client::Level::kWarn, "virtual memory management: %s", what);
  return CUDA_ERROR_NOT_SUPPORTED;
}

// Above the heap of cuMemAlloc and below the module globals (csrc/wire/segment.h).
BidirAllocator& range_of(State& s, DeviceState* d) {
  const int i = d->ordinal();
  if (!s.has_range[i]) {
    s.ranges[i] = BidirAllocator(d->conn().device_base() + kHeapBytes, kReservableBytes);
    s.has_range[i] = true;
  }
  return s.ranges[i];
}

Reservation* reservation_of(State& s, uint64_t addr, uint64_t bytes, uint64_t* begin) {
  auto it = s.reservations.upper_bound(addr);
  if (it == s.reservations.begin()) return nullptr;
  --it;
  const uint64_t offset = addr - it->first;
  if (offset > it->second.bytes || bytes > it->second.bytes - offset) return nullptr;
  *begin = it->first;
  return &it->second;
}

bool touches(const State& s, uint64_t addr, uint64_t bytes) {
  const auto next = s.mappings.lower_bound(addr + bytes);
  return next != s.mappings.begin() && std::prev(next)->first + std::prev(next)->second.bytes > addr;
}

// Is [addr, addr + bytes) some whole mappings, without a gap?
bool whole_mappings(const State& s, uint64_t addr, uint64_t bytes) {
  uint64_t left = bytes;
  for (auto it = s.mappings.find(addr); left != 0; ++it) {
    if (it == s.mappings.end() || it->first != addr || it->second.bytes > left) return false;
    addr += it->second.bytes;
    left -= it->second.bytes;
  }
  return bytes != 0;
}

DeviceState* device_of(const Handle& h) { return client::device_state_if_attached(h.device); }

// Moves the contents of a handle to `to`, which nothing has. Everything has come this far when it returns.
int32_t move_home(Handle& h, uint64_t to) {
  DeviceState* d = device_of(h);
  if (h.home == to) return d->show(to), kOk;
  if (!h.home) {
    const int32_t rc = d->place(to, h.bytes);
    if (rc == kOk) h.home = to;
    return rc;
  }
  int32_t rc = d->take_credit(h.bytes);  // for as long as it is there twice
  if (rc != kOk) return rc;
  rc = d->place(to, h.bytes);
  d->show(h.home);
  if (rc == kOk) rc = static_cast<int32_t>(memory::cuMemcpyDtoD_v2(to, h.home, h.bytes));
  if (rc == kOk) rc = d->wait_all();
  if (rc == kOk) rc = d->unplace(h.home);
  d->return_credit(h.bytes);
  if (rc == kOk) h.home = to;
  return rc;
}

// Nobody's home may be in [addr, addr + bytes) but that of `mine`: the others' contents move to addresses of no use.
int32_t clear_homes(State& s, uint64_t addr, uint64_t bytes, uint64_t mine) {
  for (auto& [value, h] : s.handles) {
    if (value == mine || !h.home || h.mapped_at == h.home || h.home >= addr + bytes || h.home + h.bytes <= addr)
      continue;
    const uint64_t aside = range_of(s, device_of(h)).take(h.bytes, true);
    if (!aside) return kOutOfMemory;  // never given back: 2 MiB of 95 GiB of addresses, in a case that is rare
    if (const int32_t rc = move_home(h, aside); rc != kOk) return rc;
    device_of(h)->hide(aside);
  }
  return kOk;
}

void drop_if_unused(State& s, uint64_t value) {
  const auto it = s.handles.find(value);
  if (it == s.handles.end() || it->second.references > 0 || it->second.mapped_at) return;
  DeviceState* d = device_of(it->second);
  if (it->second.home) static_cast<void>(d->unplace(it->second.home));  // an error says that the server is gone
  d->return_credit(it->second.bytes);
  s.handles.erase(it);
}

CUresult check(const CUmemAllocationProp* prop, DeviceState** d) {
  if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return refuse("memory that is not a device's is refused");
  // A handle that could be exported is a handle; exporting it is what is refused (cuMemExportToShareableHandle).
  if (prop->requestedHandleTypes & ~static_cast<unsigned>(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
    return refuse("handles for Windows or a fabric are refused");
  if (prop->allocFlags.gpuDirectRDMACapable) return refuse("memory for GPUDirect RDMA is refused");
  if (prop->allocFlags.usage) return refuse("memory for sparse arrays is refused");
  int32_t error = kOk;
  *d = client::device_state(prop->location.id, &error);
  return result(error);
}

}  // namespace

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                       CUmemAllocationGranularity_flags option) {
  DeviceState* d = nullptr;
  if (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
    return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult rc = check(prop, &d); rc != CUDA_SUCCESS) return rc;
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr, unsigned long long flags) {
  if (size == 0 || size % kGranularity || flags || (alignment & (alignment - 1))) return CUDA_ERROR_INVALID_VALUE;
  DP_CURRENT(d);
  State& s = state();
  std::lock_guard lock(s.mu);
  const uint64_t extra = alignment > kGranularity ? alignment : 0;
  if (size + extra < size) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t at = range_of(s, d).take(size + extra, false);
  if (!at) {
    client::log(
        client::Level::kWarn,
        "cuMemAddressReserve: %zu MiB do not fit what is left of this process's %llu GiB of device addresses for it",
        size >> 20, static_cast<unsigned long long>(kReservableBytes >> 30));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const uint64_t begin = extra ? (at + alignment - 1) & ~(static_cast<uint64_t>(alignment) - 1) : at;
  s.reservations[begin] = {d->ordinal(), size, at, size + extra};
  *ptr = begin;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  State& s = state();
  std::lock_guard lock(s.mu);
  const auto it = s.reservations.find(ptr);
  if (it == s.reservations.end() || it->second.bytes != size || touches(s, ptr, size)) return CUDA_ERROR_INVALID_VALUE;
  if (const int32_t rc = clear_homes(s, ptr, size, 0); rc != kOk) return result(rc);
  s.ranges[it->second.device].give(it->second.taken_at, it->second.taken_bytes);
  s.reservations.erase(it);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
  DeviceState* d = nullptr;
  if (const CUresult rc = check(prop, &d); rc != CUDA_SUCCESS) return rc;
  if (size == 0 || size % kGranularity || flags) return CUDA_ERROR_INVALID_VALUE;
  if (const int32_t rc = d->take_credit(size); rc != kOk) return result(rc);
  State& s = state();
  std::lock_guard lock(s.mu);
  const uint64_t value = 0x7dull << 56 | ++s.serial;
  s.handles[value] = {d->ordinal(), size, 1, 0, 0, *prop};
  *handle = value;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  State& s = state();
  std::lock_guard lock(s.mu);
  const auto it = s.handles.find(handle);
  if (it == s.handles.end() || it->second.references == 0) return CUDA_ERROR_INVALID_VALUE;
  --it->second.references;
  drop_if_unused(s, handle);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  State& s = state();
  std::lock_guard lock(s.mu);
  const auto it = s.handles.find(handle);
  if (it == s.handles.end() || it->second.references == 0) return CUDA_ERROR_INVALID_VALUE;
  uint64_t begin = 0;
  Handle& h = it->second;
  const Reservation* r = reservation_of(s, ptr, size, &begin);
  // cuda.h: the offset must be 0, and the size that of the handle.
  if (!r || r->device != h.device || flags || offset || size != h.bytes || ptr % kGranularity || touches(s, ptr, size))
    return CUDA_ERROR_INVALID_VALUE;
  if (h.mapped_at) return refuse("one allocation handle at two addresses at once is refused");
  h.mapped_at = ptr;
  s.mappings[ptr] = {size, handle, false};
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count) {
  State& s = state();
  std::lock_guard lock(s.mu);
  if (count == 0 || !whole_mappings(s, ptr, size)) return CUDA_ERROR_INVALID_VALUE;
  const int device = s.handles[s.mappings[ptr].handle].device;
  for (size_t i = 0; i < count; ++i) {
    if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc[i].location.id != device)
      return refuse("access by another device than the memory's is refused: each has a server of its own");
    if (desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
      return refuse("access is given for reading and writing; less is refused");
  }
  for (auto it = s.mappings.find(ptr); it != s.mappings.end() && it->first < ptr + size; ++it) {
    if (it->second.accessible) continue;
    int32_t rc = clear_homes(s, it->first, it->second.bytes, it->second.handle);
    if (rc == kOk) rc = move_home(s.handles[it->second.handle], it->first);
    if (rc != kOk) return result(rc);
    it->second.accessible = true;
  }
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
  State& s = state();
  std::lock_guard lock(s.mu);
  if (!whole_mappings(s, ptr, size)) return CUDA_ERROR_INVALID_VALUE;  // cuda.h: there may be several
  DeviceState* d = device_of(s.handles[s.mappings[ptr].handle]);
  // As with cuMemFree: the range may be in use by any stream until all have come this far.
  const int32_t rc = d->wait_all();
  for (auto it = s.mappings.find(ptr); it != s.mappings.end() && it->first < ptr + size;) {
    const uint64_t handle = it->second.handle;
    d->hide(it->first);
    s.handles[handle].mapped_at = 0;
    it = s.mappings.erase(it);
    drop_if_unused(s, handle);
  }
  return result(rc);
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr ptr) {
  State& s = state();
  std::lock_guard lock(s.mu);
  auto it = s.mappings.upper_bound(ptr);
  if (it == s.mappings.begin() || ptr - std::prev(it)->first >= std::prev(it)->second.bytes)
    return CUDA_ERROR_INVALID_VALUE;
  --it;
  const bool here =
      location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id == s.handles[it->second.handle].device;
  *flags = here && it->second.accessible ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle) {
  State& s = state();
  std::lock_guard lock(s.mu);
  const auto it = s.handles.find(handle);
  if (it == s.handles.end()) return CUDA_ERROR_INVALID_VALUE;
  *prop = it->second.prop;
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* addr) {
  State& s = state();
  std::lock_guard lock(s.mu);
  const auto ptr = reinterpret_cast<uint64_t>(addr);
  auto it = s.mappings.upper_bound(ptr);
  if (it == s.mappings.begin() || ptr - std::prev(it)->first >= std::prev(it)->second.bytes)
    return CUDA_ERROR_INVALID_VALUE;
  *handle = std::prev(it)->second.handle;
  ++s.handles[*handle].references;
  return CUDA_SUCCESS;
}

}  // namespace devproxy::sa::vmm
