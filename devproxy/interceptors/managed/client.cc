// SPDX-License-Identifier: Apache-2.0
// Managed memory: a part of the pinned window, which has one address in the job and in every server of the process, and
// which kernels reach where their device maps host memory. So it is coherent, and as slow as the link. Nothing
// migrates: advice and prefetches are checked, and remembered for those who ask.
#include "devproxy/interceptors/managed/client.h"

#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "devproxy/csrc/client/advice.h"
#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/graph/hooks.h"

namespace devproxy::sa::managed {

using client::Advice;
using client::AdviceMap;
using client::Allocation;
using client::DeviceState;
using client::Location;
using client::place_of;

namespace {

constexpr uint64_t kPage = 4096;  // of the host, to which cuda.h rounds ranges

struct Pages {
  std::shared_ptr<AdviceMap> advice;
  uint64_t begin = 0, end = 0;
};

// The pages of a range that lies in one managed allocation.
bool pages_of(uint64_t addr, uint64_t bytes, Pages* out) {
  uint64_t base = 0;
  Allocation a;
  if (bytes == 0 || !find(addr, place_of(addr), &base, &a) || bytes > a.bytes - (addr - base)) return false;
  *out = {a.advice, addr / kPage * kPage, (addr + bytes + kPage - 1) / kPage * kPage};
  return true;
}

CUresult check_device(int32_t ordinal) {
  if (ordinal < 0 || ordinal >= client::device_count()) return CUDA_ERROR_INVALID_DEVICE;
  int32_t error = kOk;
  DeviceState* d = client::device_state(ordinal, &error);
  if (!d) return result(error);
  return d->conn().props().attributes[CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS] ? CUDA_SUCCESS
                                                                                     : CUDA_ERROR_INVALID_DEVICE;
}

bool is_node(int32_t id) {
  char path[64];
  snprintf(path, sizeof(path), "/sys/devices/system/node/node%d", id);
  return id == 0 || (id > 0 && access(path, F_OK) == 0);
}

// What is remembered of a location that the job names.
CUresult location(const CUmemLocation& from, Location* out) {
  switch (from.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: *out = {from.type, from.id}; return check_device(from.id);
    case CU_MEM_LOCATION_TYPE_HOST: *out = {from.type, CU_DEVICE_CPU}; return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
      *out = {from.type, from.id};
      return is_node(from.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: {
      unsigned cpu = 0, node = 0;
      if (syscall(SYS_getcpu, &cpu, &node, nullptr) != 0) node = 0;
      *out = {CU_MEM_LOCATION_TYPE_HOST_NUMA, static_cast<int32_t>(node)};
      return CUDA_SUCCESS;
    }
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

CUmemLocation of_device(CUdevice device) {
  CUmemLocation location{};
  location.type = device == CU_DEVICE_CPU ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

// As the attributes that know no types answer.
int32_t as_device(const Location& l) {
  if (l.type == CU_MEM_LOCATION_TYPE_DEVICE) return l.id;
  return l.type == CU_MEM_LOCATION_TYPE_INVALID ? CU_DEVICE_INVALID : CU_DEVICE_CPU;
}
int32_t id_of(const Location& l) { return l.type == CU_MEM_LOCATION_TYPE_INVALID ? CU_DEVICE_INVALID : l.id; }

}  // namespace

// -- allocation -----------------------------------------------------------------------------------------------------

CUresult cuMemAllocManaged(CUdeviceptr* dptr, size_t bytesize, unsigned int flags) {
  if (bytesize == 0 || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)) return CUDA_ERROR_INVALID_VALUE;
  DP_CURRENT(d);
  if (!d->conn().props().attributes[CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY]) {
    client::log(client::Level::kWarn,
                "cuMemAllocManaged is refused: managed memory is host memory here, and kernels of this device do not "
                "see host memory (CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY is 0); start the job with "
                "DEVPROXY_CUDA_REGISTER_WINDOW=1, or use cuMemAlloc and copies");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  int32_t error = kOk;
  const uint64_t addr = d->allocate_managed(bytesize, &error);
  if (error == kOk) *dptr = addr;
  return result(error);
}

int32_t free(uint64_t addr) {
  uint64_t base = 0;
  Allocation a;
  const client::Place place = place_of(addr);
  if (!find(addr, place, &base, &a) || base != addr) return kInvalidValue;
  // As with device memory, and kernels of every GPU may use it.
  for (int i = 0; i < client::device_count(); ++i)
    if (DeviceState* d = client::device_state_if_attached(i))
      if (const int32_t rc = d->wait_all(); rc != kOk) return rc;
  return client::device_state_if_attached(place.device)->free_pinned(addr);
}

// -- advice ---------------------------------------------------------------------------------------------------------

CUresult cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation at) {
  Pages pages;
  if (!pages_of(devPtr, count, &pages)) return CUDA_ERROR_INVALID_VALUE;
  Location where;
  switch (advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: break;  // cuda.h: the location is ignored
    case CU_MEM_ADVISE_SET_ACCESSED_BY:
    case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
      if (at.type != CU_MEM_LOCATION_TYPE_DEVICE && at.type != CU_MEM_LOCATION_TYPE_HOST)
        return CUDA_ERROR_INVALID_VALUE;
      [[fallthrough]];
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
      if (const CUresult rc = location(at, &where); rc != CUDA_SUCCESS) return rc;
      break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  const auto by = static_cast<size_t>(where.type == CU_MEM_LOCATION_TYPE_DEVICE ? where.id : Advice::kCpuBit);
  pages.advice->change(pages.begin, pages.end, [&](Advice& a) {
    switch (advice) {
      case CU_MEM_ADVISE_SET_READ_MOSTLY: a.read_mostly = true; break;
      case CU_MEM_ADVISE_UNSET_READ_MOSTLY: a.read_mostly = false; break;
      case CU_MEM_ADVISE_SET_PREFERRED_LOCATION: a.preferred = where; break;
      case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: a.preferred = {}; break;
      case CU_MEM_ADVISE_SET_ACCESSED_BY: a.accessed_by.set(by); break;
      case CU_MEM_ADVISE_UNSET_ACCESSED_BY: a.accessed_by.reset(by); break;
    }
  });
  return CUDA_SUCCESS;
}

CUresult cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device) {
  return managed::cuMemAdvise_v2(devPtr, count, advice, of_device(device));
}

// -- prefetches: ordered, and nothing to do ---------------------------------------------------------------------------

CUresult cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation to, unsigned int flags,
                               CUstream hStream) {
  DP_STREAM(hStream, s, d);
  Pages pages;
  if (flags != 0 || !pages_of(devPtr, count, &pages)) return CUDA_ERROR_INVALID_VALUE;
  Location where;
  if (const CUresult rc = location(to, &where); rc != CUDA_SUCCESS) return rc;
  if (const int32_t rc = d->conn().error(); rc != kOk) return result(rc);
  pages.advice->change(pages.begin, pages.end, [&](Advice& a) { a.prefetched = where; });
  return CUDA_SUCCESS;
}

CUresult cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream) {
  return managed::cuMemPrefetchAsync_v2(devPtr, count, of_device(dstDevice), 0, hStream);
}

namespace {

// locations: nullptr for a batch that only discards.
CUresult batch(CUdeviceptr* dptrs, size_t* sizes, size_t count, CUmemLocation* locations, size_t* firsts,
               size_t n_locations, unsigned long long flags, CUstream hStream) {
  DP_STREAM(hStream, s, d);
  // cuda.h: hStream must not be the legacy stream.
  if (flags != 0 || count == 0 || s == d->legacy()) return CUDA_ERROR_INVALID_VALUE;
  if (locations && (n_locations == 0 || n_locations > count || firsts[0] != 0)) return CUDA_ERROR_INVALID_VALUE;
  std::vector<Pages> ranges(count);
  std::vector<Location> where(locations ? n_locations : 0);
  for (size_t i = 0; i < count; ++i)
    if (!pages_of(dptrs[i], sizes[i], &ranges[i])) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < where.size(); ++i) {
    if (firsts[i] >= count || (i > 0 && firsts[i] <= firsts[i - 1])) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult rc = location(locations[i], &where[i]); rc != CUDA_SUCCESS) return rc;
  }
  if (const int32_t rc = d->conn().error(); rc != kOk) return result(rc);
  for (size_t i = 0, at = 0; i < count && !where.empty(); ++i) {
    if (at + 1 < where.size() && firsts[at + 1] == i) ++at;
    ranges[i].advice->change(ranges[i].begin, ranges[i].end, [&](Advice& a) { a.prefetched = where[at]; });
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult cuMemPrefetchBatchAsync(CUdeviceptr* dptrs, size_t* sizes, size_t count, CUmemLocation* prefetchLocs,
                                 size_t* prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags,
                                 CUstream hStream) {
  return batch(dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags, hStream);
}

CUresult cuMemDiscardBatchAsync(CUdeviceptr* dptrs, size_t* sizes, size_t count, unsigned long long flags,
                                CUstream hStream) {
  return batch(dptrs, sizes, count, nullptr, nullptr, 0, flags, hStream);
}

CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr* dptrs, size_t* sizes, size_t count, CUmemLocation* prefetchLocs,
                                           size_t* prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags,
                                           CUstream hStream) {
  return batch(dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags, hStream);
}

// cuda.h: which stream a kernel may come from is the program's promise; nobody checks it.
CUresult cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags) {
  DP_STREAM(hStream, s, d);
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST && flags != CU_MEM_ATTACH_SINGLE)
    return CUDA_ERROR_INVALID_VALUE;
  if (flags == CU_MEM_ATTACH_SINGLE && s == d->legacy()) return CUDA_ERROR_INVALID_HANDLE;
  uint64_t base = 0;
  Allocation a;
  if (!find(dptr, place_of(dptr), &base, &a)) return CUDA_ERROR_INVALID_VALUE;
  if (dptr != base || (length != 0 && length != a.wanted)) return CUDA_ERROR_INVALID_VALUE;
  return result(d->conn().error());
}

// -- what was said ----------------------------------------------------------------------------------------------------

namespace {

CUresult answer(const Advice& a, void* data, size_t data_bytes, CUmem_range_attribute attribute) {
  auto* out = static_cast<int32_t*>(data);
  if (attribute == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY) {
    if (data_bytes == 0 || data_bytes % sizeof(int32_t)) return CUDA_ERROR_INVALID_VALUE;
    const size_t room = data_bytes / sizeof(int32_t);
    size_t n = 0;
    for (int i = 0; i < client::kMaxDevices && n < room; ++i)
      if (a.accessed_by[static_cast<size_t>(i)]) out[n++] = i;
    if (n < room && a.accessed_by[Advice::kCpuBit]) out[n++] = CU_DEVICE_CPU;
    while (n < room) out[n++] = CU_DEVICE_INVALID;
    return CUDA_SUCCESS;
  }
  static_assert(sizeof(CUmemLocationType) == sizeof(int32_t));
  if (data_bytes != sizeof(int32_t)) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY: *out = a.read_mostly; return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: *out = as_device(a.preferred); return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE: *out = a.preferred.type; return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID: *out = id_of(a.preferred); return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: *out = as_device(a.prefetched); return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE: *out = a.prefetched.type; return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: *out = id_of(a.prefetched); return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace

CUresult cuMemRangeGetAttribute(void* data, size_t dataSize, CUmem_range_attribute attribute, CUdeviceptr devPtr,
                                size_t count) {
  Pages pages;
  if (!pages_of(devPtr, count, &pages)) return CUDA_ERROR_INVALID_VALUE;
  return answer(pages.advice->of(pages.begin, pages.end), data, dataSize, attribute);
}

CUresult cuMemRangeGetAttributes(void** data, size_t* dataSizes, CUmem_range_attribute* attributes,
                                 size_t numAttributes, CUdeviceptr devPtr, size_t count) {
  Pages pages;
  if (numAttributes == 0 || !pages_of(devPtr, count, &pages)) return CUDA_ERROR_INVALID_VALUE;
  const Advice said = pages.advice->of(pages.begin, pages.end);
  for (size_t i = 0; i < numAttributes; ++i) {
    if (!data[i]) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult rc = answer(said, data[i], dataSizes[i], attributes[i]); rc != CUDA_SUCCESS) return rc;
  }
  return CUDA_SUCCESS;
}

}  // namespace devproxy::sa::managed
