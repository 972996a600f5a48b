// SPDX-License-Identifier: Apache-2.0
// Pinned host memory: shared pages at one address in client and server, from the window beside the device range. What
// the job registers itself (cuMemHostRegister) stays where it is and is copied through staging.
#include <map>
#include <mutex>

#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/graph/hooks.h"
#include "devproxy/interceptors/hostmem/client.h"

namespace devproxy::sa::hostmem {

using client::Allocation;
using client::DeviceState;

namespace {
std::mutex g_registered_mu;
std::map<uint64_t, uint64_t>& registered() {
  static auto* m = new std::map<uint64_t, uint64_t>;
  return *m;
}
bool can_map(DeviceState* d) { return d->conn().props().attributes[CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY] != 0; }
}  // namespace

bool is_registered(uint64_t addr) {
  std::lock_guard lock(g_registered_mu);
  auto it = registered().upper_bound(addr);
  if (it == registered().begin()) return false;
  --it;
  return addr - it->first < it->second;
}

CUresult cuMemHostAlloc(void** pp, size_t bytesize, unsigned int Flags) {
  if (Flags & ~(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED))
    return CUDA_ERROR_INVALID_VALUE;
  if (bytesize == 0) return CUDA_ERROR_INVALID_VALUE;
  DP_CURRENT(d);
  if ((Flags & CU_MEMHOSTALLOC_DEVICEMAP) && !can_map(d)) {
    client::log(client::Level::kWarn,
                "cuMemHostAlloc refuses CU_MEMHOSTALLOC_DEVICEMAP: kernels of this device do not see host memory "
                "(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY is 0); use copies");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  int32_t error = kOk;
  const uint64_t addr = d->allocate_pinned(bytesize, &error);
  *pp = reinterpret_cast<void*>(addr);
  return result(error);
}

CUresult cuMemAllocHost_v2(void** pp, size_t bytesize) { return hostmem::cuMemHostAlloc(pp, bytesize, 0); }

CUresult cuMemFreeHost(void* p) {
  if (!p) return CUDA_SUCCESS;
  const client::Place place = client::place_of(reinterpret_cast<uint64_t>(p));
  if (!place.pinned) return CUDA_ERROR_INVALID_VALUE;
  DeviceState* d = client::device_state_if_attached(place.device);
  uint64_t base = 0;
  Allocation a;
  if (d->find_pinned(reinterpret_cast<uint64_t>(p), &base, &a) && a.advice)
    return CUDA_ERROR_INVALID_VALUE;  // cuda.h: managed memory is released with cuMemFree
  // As the driver does: nothing may still copy through it.
  if (const int32_t rc = d->wait_all(); rc != kOk) return result(rc);
  return result(d->free_pinned(reinterpret_cast<uint64_t>(p)));
}

CUresult captured::cuMemFreeHost(void* p) {
  CUresult rc = CUDA_SUCCESS;
  return p && graph::refuse_unsafe(&rc) ? rc : hostmem::cuMemFreeHost(p);  // the null pointer has nothing to wait for
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* pdptr, void* p, unsigned int Flags) {
  if (Flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto addr = reinterpret_cast<uint64_t>(p);
  const client::Place place = client::place_of(addr);
  if (place.pinned) {
    DeviceState* d = client::device_state_if_attached(place.device);
    uint64_t base = 0;
    Allocation a;
    if (!d->find_pinned(addr, &base, &a) || a.advice) return CUDA_ERROR_INVALID_VALUE;
    wire::HOST_DEVICE_ADDRESS_rep rep{};
    client::Reply reply{&rep, sizeof(rep)};
    const wire::HOST_DEVICE_ADDRESS_req req{addr, a.bytes - (addr - base)};
    const int32_t rc = d->conn().call(wire::Opcode::HOST_DEVICE_ADDRESS, req, &reply);
    if (rc == kOk) *pdptr = rep.addr;
    return result(rc);
  }
  if (is_registered(addr)) {
    client::log(client::Level::kWarn,
                "cuMemHostGetDevicePointer is refused for memory of cuMemHostRegister: it is copied through staging; "
                "allocate it with cuMemHostAlloc");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostGetFlags(unsigned int* pFlags, void* p) {
  const client::Place place = client::place_of(reinterpret_cast<uint64_t>(p));
  if (!place.pinned) return CUDA_ERROR_INVALID_VALUE;
  *pFlags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void* p, size_t bytesize, unsigned int Flags) {
  if (bytesize == 0 || (Flags & ~0xfu)) return CUDA_ERROR_INVALID_VALUE;
  DP_CURRENT(d);
  const auto addr = reinterpret_cast<uint64_t>(p);
  std::lock_guard lock(g_registered_mu);
  auto next = registered().upper_bound(addr);
  if (next != registered().end() && next->first < addr + bytesize) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  if (next != registered().begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second > addr) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  registered()[addr] = bytesize;
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* p) {
  std::lock_guard lock(g_registered_mu);
  return registered().erase(reinterpret_cast<uint64_t>(p)) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

}  // namespace devproxy::sa::hostmem
