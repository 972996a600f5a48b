// SPDX-License-Identifier: Apache-2.0
// Memory, copies, variables of device code, memory pools, pointer attributes. An address of the runtime is the
// driver's.
#include <string.h>

#include "cudart_decl.gen.h"
#include "devproxy/interceptors/cudart/copies.h"
#include "devproxy/interceptors/cudart/registration.h"
#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart::memory {

size_t element_bytes(const CUDA_ARRAY3D_DESCRIPTOR& d) {
  size_t channel = 4;
  if (d.Format == CU_AD_FORMAT_UNSIGNED_INT8 || d.Format == CU_AD_FORMAT_SIGNED_INT8) channel = 1;
  if (d.Format == CU_AD_FORMAT_UNSIGNED_INT16 || d.Format == CU_AD_FORMAT_SIGNED_INT16 || d.Format == CU_AD_FORMAT_HALF)
    channel = 2;
  return channel * d.NumChannels;
}

namespace {

CUdeviceptr address(const void* p) { return reinterpret_cast<CUdeviceptr>(p); }

bool is_kind(cudaMemcpyKind kind) { return static_cast<unsigned>(kind) <= cudaMemcpyDefault; }

// Within a _ptds export a synchronous call is an asynchronous one on the thread's own stream, waited for.
cudaError_t finish(CUresult rc, bool wait) {
  if (rc == CUDA_SUCCESS && wait) rc = cuStreamSynchronize(CU_STREAM_PER_THREAD);
  return result(rc);
}

// Where host and device are named, the driver is told: it checks the side that must be its own. The others go by
// address.
CUresult copy_async(void* dst, const void* src, size_t count, cudaMemcpyKind kind, CUstream stream) {
  switch (kind) {
    case cudaMemcpyHostToDevice: return cuMemcpyHtoDAsync(address(dst), src, count, stream);
    case cudaMemcpyDeviceToHost: return cuMemcpyDtoHAsync(dst, address(src), count, stream);
    case cudaMemcpyDeviceToDevice: return cuMemcpyDtoDAsync(address(dst), address(src), count, stream);
    default: return cuMemcpyAsync(address(dst), address(src), count, stream);
  }
}

cudaError_t copy(void* dst, const void* src, size_t count, cudaMemcpyKind kind) {
  if (!is_kind(kind)) return cudaErrorInvalidMemcpyDirection;
  if (t_thread.per_thread) return finish(copy_async(dst, src, count, kind, CU_STREAM_PER_THREAD), true);
  switch (kind) {
    case cudaMemcpyHostToDevice: return result(cuMemcpyHtoD(address(dst), src, count));
    case cudaMemcpyDeviceToHost: return result(cuMemcpyDtoH(dst, address(src), count));
    case cudaMemcpyDeviceToDevice: return result(cuMemcpyDtoD(address(dst), address(src), count));
    default: return result(cuMemcpy(address(dst), address(src), count));
  }
}

struct Sides {
  CUmemorytype src, dst;
};
Sides sides_of(cudaMemcpyKind kind) {
  switch (kind) {
    case cudaMemcpyHostToHost: return {CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_HOST};
    case cudaMemcpyHostToDevice: return {CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE};
    case cudaMemcpyDeviceToHost: return {CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
    case cudaMemcpyDeviceToDevice: return {CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_DEVICE};
    default: return {CU_MEMORYTYPE_UNIFIED, CU_MEMORYTYPE_UNIFIED};
  }
}

cudaError_t copy_2d(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
                    cudaMemcpyKind kind, CUstream stream, bool wait) {
  if (!is_kind(kind)) return cudaErrorInvalidMemcpyDirection;
  if (width == 0 || height == 0) return cudaSuccess;
  if (width > dpitch || width > spitch) return cudaErrorInvalidPitchValue;
  const Sides sides = sides_of(kind);
  CUDA_MEMCPY2D c{};
  c.srcMemoryType = sides.src;
  c.srcHost = src;
  c.srcDevice = address(src);
  c.srcPitch = spitch;
  c.dstMemoryType = sides.dst;
  c.dstHost = dst;
  c.dstDevice = address(dst);
  c.dstPitch = dpitch;
  c.WidthInBytes = width;
  c.Height = height;
  if (!wait) return result(cuMemcpy2DAsync(&c, stream));
  if (t_thread.per_thread) return finish(cuMemcpy2DAsync(&c, CU_STREAM_PER_THREAD), true);
  return result(cuMemcpy2DUnaligned(&c));
}

// driver_types.h: positions and extent count bytes where no array takes part.
cudaError_t describe(const cudaPitchedPtr& src, const cudaPos& from, const cudaPitchedPtr& dst, const cudaPos& to,
                     const cudaExtent& extent, const Sides& sides, CUDA_MEMCPY3D* c) {
  if (extent.width > src.pitch || extent.width > dst.pitch) return cudaErrorInvalidPitchValue;
  *c = {};
  c->srcMemoryType = sides.src;
  c->srcHost = src.ptr;
  c->srcDevice = address(src.ptr);
  c->srcPitch = src.pitch;
  c->srcHeight = src.ysize;
  c->srcXInBytes = from.x;
  c->srcY = from.y;
  c->srcZ = from.z;
  c->dstMemoryType = sides.dst;
  c->dstHost = dst.ptr;
  c->dstDevice = address(dst.ptr);
  c->dstPitch = dst.pitch;
  c->dstHeight = dst.ysize;
  c->dstXInBytes = to.x;
  c->dstY = to.y;
  c->dstZ = to.z;
  c->WidthInBytes = extent.width;
  c->Height = extent.height;
  c->Depth = extent.depth;
  return cudaSuccess;
}

// driver_types.h: where an array takes part, the extent's width counts its elements; so does the x of a position in it,
// while that of a pitched pointer counts bytes.
cudaError_t describe_with_arrays(const cudaMemcpy3DParms& p, CUDA_MEMCPY3D* c) {
  size_t element = 0;
  for (const cudaArray_t array : {p.srcArray, p.dstArray}) {
    if (array == nullptr) continue;
    CUDA_ARRAY3D_DESCRIPTOR d;
    if (const CUresult rc = cuArray3DGetDescriptor(&d, reinterpret_cast<CUarray>(array)); rc != CUDA_SUCCESS)
      return result(rc);
    const size_t mine = element_bytes(d);
    if (element != 0 && mine != element) return cudaErrorInvalidValue;
    element = mine;
  }
  cudaPitchedPtr src = p.srcPtr, dst = p.dstPtr;
  cudaPos from = p.srcPos, to = p.dstPos;
  cudaExtent extent = p.extent;
  extent.width *= element;
  Sides sides = sides_of(p.kind);
  // cuda_runtime_api.h, cudaMemcpy3D: an array is the device's, whatever the kind says of its side.
  if (p.srcArray != nullptr) sides.src = CU_MEMORYTYPE_ARRAY, from.x *= element, src = {nullptr, extent.width, 0, 0};
  if (p.dstArray != nullptr) sides.dst = CU_MEMORYTYPE_ARRAY, to.x *= element, dst = {nullptr, extent.width, 0, 0};
  const cudaError_t rc = describe(src, from, dst, to, extent, sides, c);
  c->srcArray = reinterpret_cast<CUarray>(p.srcArray);
  c->dstArray = reinterpret_cast<CUarray>(p.dstArray);
  return rc;
}

cudaError_t run_3d(const CUDA_MEMCPY3D& c, CUstream stream, bool wait) {
  if (!wait) return result(cuMemcpy3DAsync(&c, stream));
  if (t_thread.per_thread) return finish(cuMemcpy3DAsync(&c, CU_STREAM_PER_THREAD), true);
  return result(cuMemcpy3D(&c));
}

bool is_empty(const cudaExtent& extent) { return extent.width == 0 || extent.height == 0 || extent.depth == 0; }

}  // namespace

cudaError_t describe(const cudaMemcpy3DParms& p, CUDA_MEMCPY3D* c) {
  if (!is_kind(p.kind)) return cudaErrorInvalidMemcpyDirection;
  // driver_types.h: each side is an array or a pitched pointer, not both.
  if ((p.srcArray != nullptr) == (p.srcPtr.ptr != nullptr) || (p.dstArray != nullptr) == (p.dstPtr.ptr != nullptr))
    return cudaErrorInvalidValue;
  if (p.srcArray != nullptr || p.dstArray != nullptr) return describe_with_arrays(p, c);
  return describe(p.srcPtr, p.srcPos, p.dstPtr, p.dstPos, p.extent, sides_of(p.kind), c);
}

cudaError_t describe(void* dst, const void* src, size_t count, cudaMemcpyKind kind, CUDA_MEMCPY3D* c) {
  if (!is_kind(kind)) return cudaErrorInvalidMemcpyDirection;
  const cudaPitchedPtr from{const_cast<void*>(src), count, count, 1}, to{dst, count, count, 1};
  return describe(from, {}, to, {}, {count, 1, 1}, sides_of(kind), c);
}

namespace {

cudaError_t copy_3d(const cudaMemcpy3DParms& p, CUstream stream, bool wait) {
  CUDA_MEMCPY3D c;
  const cudaError_t rc = memory::describe(p, &c);
  if (is_empty(p.extent) && (rc == cudaSuccess || rc == cudaErrorInvalidPitchValue)) return cudaSuccess;
  return rc == cudaSuccess ? run_3d(c, stream, wait) : rc;
}

cudaError_t copy_3d_peer(const cudaMemcpy3DPeerParms& p, CUstream stream, bool wait) {
  if (p.srcArray != nullptr || p.dstArray != nullptr)
    return refuse("cudaMemcpy3DPeer of an array",
                  "an array of one GPU is not copied to another yet; use linear memory");
  if (p.srcPtr.ptr == nullptr || p.dstPtr.ptr == nullptr) return cudaErrorInvalidValue;
  if (is_empty(p.extent)) return cudaSuccess;
  // An address says by itself on which device it lies.
  CUDA_MEMCPY3D c;
  if (const cudaError_t rc =
          describe(p.srcPtr, p.srcPos, p.dstPtr, p.dstPos, p.extent, sides_of(cudaMemcpyDefault), &c);
      rc != cudaSuccess)
    return rc;
  return run_3d(c, stream, wait);
}

cudaError_t copy_peer(void* dst, int dstDevice, const void* src, int srcDevice, size_t count, CUstream stream,
                      bool wait) {
  CUcontext to = nullptr, from = nullptr;
  if (const cudaError_t rc = primary_context(dstDevice, &to); rc != cudaSuccess) return rc;
  if (const cudaError_t rc = primary_context(srcDevice, &from); rc != cudaSuccess) return rc;
  if (wait) return result(cuMemcpyPeer(address(dst), to, address(src), from, count));
  return result(cuMemcpyPeerAsync(address(dst), to, address(src), from, count, stream));
}

// Rows of bytes from a pitched address; the driver refuses what is not device memory.
cudaError_t set_rows(void* devPtr, size_t pitch, int value, size_t width, size_t height, CUstream stream, bool plain) {
  if (width == 0 || height == 0) return cudaSuccess;
  if (height > 1 && width > pitch) return cudaErrorInvalidPitchValue;
  const auto byte = static_cast<unsigned char>(value);
  if (plain) return result(cuMemsetD2D8(address(devPtr), pitch, byte, width, height));
  return result(cuMemsetD2D8Async(address(devPtr), pitch, byte, width, height, stream));
}

cudaError_t set_3d(const cudaPitchedPtr& p, int value, const cudaExtent& extent, CUstream stream, bool plain) {
  auto* slice = static_cast<char*>(p.ptr);
  for (size_t z = 0; z < extent.depth; ++z, slice += p.pitch * p.ysize)
    if (const cudaError_t rc = set_rows(slice, p.pitch, value, extent.width, extent.height, stream, plain);
        rc != cudaSuccess)
      return rc;
  return cudaSuccess;
}

// The plain form of a memset is the driver's plain one, unless the thread's own stream is meant.
bool is_plain() { return !t_thread.per_thread; }

cudaError_t symbol_address(const void* symbol, size_t count, size_t offset, char** out) {
  Variable* variable = g_variables.find(symbol);
  if (variable == nullptr) return cudaErrorInvalidSymbol;
  if (offset > variable->bytes || count > variable->bytes - offset) return cudaErrorInvalidValue;
  CUdeviceptr at = 0;
  if (const cudaError_t rc = load_address(variable, current_device(), &at); rc != cudaSuccess) return rc;
  *out = reinterpret_cast<char*>(at) + offset;
  return cudaSuccess;
}

bool is_kind_to_symbol(cudaMemcpyKind kind) {
  return kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice || kind == cudaMemcpyDefault;
}
bool is_kind_from_symbol(cudaMemcpyKind kind) {
  return kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice || kind == cudaMemcpyDefault;
}

}  // namespace

// -- allocation -------------------------------------------------------------------------------------------------------

// A failure leaves the caller's pointer as it was; no bytes are a null pointer.
cudaError_t cudaMalloc(void** devPtr, size_t size) {
  if (size == 0) {
    *devPtr = nullptr;
    return cudaSuccess;
  }
  CUdeviceptr at = 0;
  const CUresult rc = cuMemAlloc(&at, size);
  if (rc == CUDA_SUCCESS) *devPtr = reinterpret_cast<void*>(at);
  return result(rc);
}

cudaError_t cudaMallocPitch(void** devPtr, size_t* pitch, size_t width, size_t height) {
  if (width == 0 || height == 0) {
    *devPtr = nullptr;
    *pitch = 0;
    return cudaSuccess;
  }
  CUdeviceptr at = 0;
  // The largest element keeps every smaller one's rows aligned as well.
  const CUresult rc = cuMemAllocPitch(&at, pitch, width, height, 16);
  if (rc == CUDA_SUCCESS) *devPtr = reinterpret_cast<void*>(at);
  return result(rc);
}

cudaError_t cudaMalloc3D(cudaPitchedPtr* pitchedDevPtr, cudaExtent extent) {
  *pitchedDevPtr = {nullptr, 0, extent.width, extent.height};
  return memory::cudaMallocPitch(&pitchedDevPtr->ptr, &pitchedDevPtr->pitch, extent.width,
                                 extent.height * extent.depth);
}

cudaError_t cudaFree(void* devPtr) { return devPtr == nullptr ? cudaSuccess : result(cuMemFree(address(devPtr))); }

cudaError_t cudaHostAlloc(void** pHost, size_t size, unsigned int flags) {
  if (flags & ~static_cast<unsigned>(cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined))
    return cudaErrorInvalidValue;
  void* at = nullptr;
  const CUresult rc = size == 0 ? CUDA_SUCCESS : cuMemHostAlloc(&at, size, flags);
  if (rc == CUDA_SUCCESS) *pHost = at;
  return result(rc);
}

cudaError_t cudaMallocHost(void** ptr, size_t size) { return memory::cudaHostAlloc(ptr, size, cudaHostAllocDefault); }

cudaError_t cudaFreeHost(void* ptr) { return ptr == nullptr ? cudaSuccess : result(cuMemFreeHost(ptr)); }

cudaError_t cudaHostRegister(void* ptr, size_t size, unsigned int flags) {
  return result(cuMemHostRegister(ptr, size, flags));
}

cudaError_t cudaHostUnregister(void* ptr) { return result(cuMemHostUnregister(ptr)); }

cudaError_t cudaHostGetDevicePointer(void** pDevice, void* pHost, unsigned int flags) {
  CUdeviceptr at = 0;
  const CUresult rc = cuMemHostGetDevicePointer(&at, pHost, flags);
  if (rc == CUDA_SUCCESS) *pDevice = reinterpret_cast<void*>(at);
  return result(rc);
}

cudaError_t cudaHostGetFlags(unsigned int* pFlags, void* pHost) { return result(cuMemHostGetFlags(pFlags, pHost)); }

// -- managed memory: the flags, advice and attributes of the two libraries number the same things alike ---------------

namespace {
CUmemLocation drivers_location(const cudaMemLocation& location) {
  return {.type = static_cast<CUmemLocationType>(location.type), .id = location.id};
}
[[maybe_unused]] CUmemLocation location_of(int device) {
  if (device == cudaCpuDeviceId) return {.type = CU_MEM_LOCATION_TYPE_HOST, .id = device};
  return {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
}
cudaError_t advise(const void* devPtr, size_t count, cudaMemoryAdvise advice, const CUmemLocation& location) {
  return result(cuMemAdvise_v2(address(devPtr), count, static_cast<CUmem_advise>(advice), location));
}
cudaError_t prefetch(const void* devPtr, size_t count, const CUmemLocation& to, unsigned int flags, cudaStream_t s) {
  return result(cuMemPrefetchAsync_v2(address(devPtr), count, to, flags, stream_of(s)));
}
}  // namespace

cudaError_t cudaMallocManaged(void** devPtr, size_t size, unsigned int flags) {
  CUdeviceptr at = 0;
  const CUresult rc = cuMemAllocManaged(&at, size, flags);
  if (rc == CUDA_SUCCESS) *devPtr = reinterpret_cast<void*>(at);
  return result(rc);
}

#if CUDART_VERSION >= 13000
cudaError_t cudaMemAdvise(const void* devPtr, size_t count, cudaMemoryAdvise advice, cudaMemLocation location) {
  return advise(devPtr, count, advice, drivers_location(location));
}

cudaError_t cudaMemPrefetchAsync(const void* devPtr, size_t count, cudaMemLocation location, unsigned int flags,
                                 cudaStream_t stream) {
  return prefetch(devPtr, count, drivers_location(location), flags, stream);
}

// The driver takes the same arrays, of its own types.
static_assert(sizeof(void*) == sizeof(CUdeviceptr) && sizeof(cudaMemLocation) == sizeof(CUmemLocation) &&
              offsetof(cudaMemLocation, id) == offsetof(CUmemLocation, id));

cudaError_t cudaMemPrefetchBatchAsync(void** dptrs, size_t* sizes, size_t count, cudaMemLocation* prefetchLocs,
                                      size_t* prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags,
                                      cudaStream_t stream) {
  return result(cuMemPrefetchBatchAsync(reinterpret_cast<CUdeviceptr*>(dptrs), sizes, count,
                                        reinterpret_cast<CUmemLocation*>(prefetchLocs), prefetchLocIdxs,
                                        numPrefetchLocs, flags, stream_of(stream)));
}

cudaError_t cudaMemDiscardBatchAsync(void** dptrs, size_t* sizes, size_t count, unsigned long long flags,
                                     cudaStream_t stream) {
  return result(cuMemDiscardBatchAsync(reinterpret_cast<CUdeviceptr*>(dptrs), sizes, count, flags, stream_of(stream)));
}

cudaError_t cudaMemDiscardAndPrefetchBatchAsync(void** dptrs, size_t* sizes, size_t count,
                                                cudaMemLocation* prefetchLocs, size_t* prefetchLocIdxs,
                                                size_t numPrefetchLocs, unsigned long long flags, cudaStream_t stream) {
  return result(cuMemDiscardAndPrefetchBatchAsync(reinterpret_cast<CUdeviceptr*>(dptrs), sizes, count,
                                                  reinterpret_cast<CUmemLocation*>(prefetchLocs), prefetchLocIdxs,
                                                  numPrefetchLocs, flags, stream_of(stream)));
}
#else
cudaError_t cudaMemAdvise(const void* devPtr, size_t count, cudaMemoryAdvise advice, int device) {
  return advise(devPtr, count, advice, location_of(device));
}

cudaError_t cudaMemAdvise_v2(const void* devPtr, size_t count, cudaMemoryAdvise advice, cudaMemLocation location) {
  return advise(devPtr, count, advice, drivers_location(location));
}

cudaError_t cudaMemPrefetchAsync(const void* devPtr, size_t count, int dstDevice, cudaStream_t stream) {
  return prefetch(devPtr, count, location_of(dstDevice), 0, stream);
}

cudaError_t cudaMemPrefetchAsync_v2(const void* devPtr, size_t count, cudaMemLocation location, unsigned int flags,
                                    cudaStream_t stream) {
  return prefetch(devPtr, count, drivers_location(location), flags, stream);
}
#endif

cudaError_t cudaMemRangeGetAttribute(void* data, size_t dataSize, cudaMemRangeAttribute attribute, const void* devPtr,
                                     size_t count) {
  return result(
      cuMemRangeGetAttribute(data, dataSize, static_cast<CUmem_range_attribute>(attribute), address(devPtr), count));
}

cudaError_t cudaMemRangeGetAttributes(void** data, size_t* dataSizes, cudaMemRangeAttribute* attributes,
                                      size_t numAttributes, const void* devPtr, size_t count) {
  static_assert(sizeof(cudaMemRangeAttribute) == sizeof(CUmem_range_attribute));
  return result(cuMemRangeGetAttributes(data, dataSizes, reinterpret_cast<CUmem_range_attribute*>(attributes),
                                        numAttributes, address(devPtr), count));
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  size_t left = 0, all = 0;
  const CUresult rc = cuMemGetInfo(&left, &all);
  if (rc == CUDA_SUCCESS && free != nullptr) *free = left;
  if (rc == CUDA_SUCCESS && total != nullptr) *total = all;
  return result(rc);
}

// -- copies -----------------------------------------------------------------------------------------------------------

cudaError_t cudaMemcpy(void* dst, const void* src, size_t count, cudaMemcpyKind kind) {
  return copy(dst, src, count, kind);
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t count, cudaMemcpyKind kind, cudaStream_t stream) {
  if (!is_kind(kind)) return cudaErrorInvalidMemcpyDirection;
  return result(copy_async(dst, src, count, kind, stream_of(stream)));
}

cudaError_t cudaMemcpy2D(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
  return copy_2d(dst, dpitch, src, spitch, width, height, kind, nullptr, true);
}

cudaError_t cudaMemcpy2DAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  return copy_2d(dst, dpitch, src, spitch, width, height, kind, stream_of(stream), false);
}

cudaError_t cudaMemcpy3D(const cudaMemcpy3DParms* p) { return copy_3d(*p, nullptr, true); }
cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* p, cudaStream_t stream) {
  return copy_3d(*p, stream_of(stream), false);
}
// -- batches: the driver's structures under the runtime's names

static_assert(sizeof(cudaMemcpyAttributes) == sizeof(CUmemcpyAttributes) &&
              offsetof(cudaMemcpyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(sizeof(cudaMemcpy3DBatchOp) == sizeof(CUDA_MEMCPY3D_BATCH_OP) &&
              offsetof(cudaMemcpy3DBatchOp, extent) == offsetof(CUDA_MEMCPY3D_BATCH_OP, extent) &&
              offsetof(cudaMemcpy3DBatchOp, flags) == offsetof(CUDA_MEMCPY3D_BATCH_OP, flags));

#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* dsts, const void* const* srcs, const size_t* sizes, size_t count,
                                 cudaMemcpyAttributes* attrs, size_t* attrsIdxs, size_t numAttrs, cudaStream_t stream) {
  return result(cuMemcpyBatchAsync(reinterpret_cast<CUdeviceptr*>(const_cast<void**>(dsts)),
                                   reinterpret_cast<CUdeviceptr*>(const_cast<void**>(srcs)), const_cast<size_t*>(sizes),
                                   count, reinterpret_cast<CUmemcpyAttributes*>(attrs), attrsIdxs, numAttrs,
                                   stream_of(stream)));
}

cudaError_t cudaMemcpy3DBatchAsync(size_t numOps, cudaMemcpy3DBatchOp* opList, unsigned long long flags,
                                   cudaStream_t stream) {
  return result(
      cuMemcpy3DBatchAsync(numOps, reinterpret_cast<CUDA_MEMCPY3D_BATCH_OP*>(opList), flags, stream_of(stream)));
}
#else
namespace {
// cuda.h gives their names to those of CUDA 13, which have no failIdx.
extern "C" CUresult driver_batch(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t,
                                 size_t*, CUstream) __asm__("cuMemcpyBatchAsync");
extern "C" CUresult driver_batch_3d(size_t, CUDA_MEMCPY3D_BATCH_OP*, size_t*, unsigned long long,
                                    CUstream) __asm__("cuMemcpy3DBatchAsync");
}  // namespace

cudaError_t cudaMemcpyBatchAsync(void** dsts, void** srcs, size_t* sizes, size_t count, cudaMemcpyAttributes* attrs,
                                 size_t* attrsIdxs, size_t numAttrs, size_t* failIdx, cudaStream_t stream) {
  return result(driver_batch(reinterpret_cast<CUdeviceptr*>(dsts), reinterpret_cast<CUdeviceptr*>(srcs), sizes, count,
                             reinterpret_cast<CUmemcpyAttributes*>(attrs), attrsIdxs, numAttrs, failIdx,
                             stream_of(stream)));
}

cudaError_t cudaMemcpy3DBatchAsync(size_t numOps, cudaMemcpy3DBatchOp* opList, size_t* failIdx,
                                   unsigned long long flags, cudaStream_t stream) {
  return result(
      driver_batch_3d(numOps, reinterpret_cast<CUDA_MEMCPY3D_BATCH_OP*>(opList), failIdx, flags, stream_of(stream)));
}
#endif

cudaError_t cudaMemcpy3DPeer(const cudaMemcpy3DPeerParms* p) { return copy_3d_peer(*p, nullptr, true); }
cudaError_t cudaMemcpy3DPeerAsync(const cudaMemcpy3DPeerParms* p, cudaStream_t stream) {
  return copy_3d_peer(*p, stream_of(stream), false);
}

cudaError_t cudaMemcpyPeer(void* dst, int dstDevice, const void* src, int srcDevice, size_t count) {
  return copy_peer(dst, dstDevice, src, srcDevice, count, nullptr, true);
}

cudaError_t cudaMemcpyPeerAsync(void* dst, int dstDevice, const void* src, int srcDevice, size_t count,
                                cudaStream_t stream) {
  return copy_peer(dst, dstDevice, src, srcDevice, count, stream_of(stream), false);
}

// -- memset -----------------------------------------------------------------------------------------------------------

cudaError_t cudaMemset(void* devPtr, int value, size_t count) {
  const auto byte = static_cast<unsigned char>(value);
  if (is_plain()) return result(cuMemsetD8(address(devPtr), byte, count));
  return result(cuMemsetD8Async(address(devPtr), byte, count, CU_STREAM_PER_THREAD));
}

cudaError_t cudaMemsetAsync(void* devPtr, int value, size_t count, cudaStream_t stream) {
  return result(cuMemsetD8Async(address(devPtr), static_cast<unsigned char>(value), count, stream_of(stream)));
}

cudaError_t cudaMemset2D(void* devPtr, size_t pitch, int value, size_t width, size_t height) {
  return set_rows(devPtr, pitch, value, width, height, CU_STREAM_PER_THREAD, is_plain());
}

cudaError_t cudaMemset2DAsync(void* devPtr, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
  return set_rows(devPtr, pitch, value, width, height, stream_of(stream), false);
}

cudaError_t cudaMemset3D(cudaPitchedPtr pitchedDevPtr, int value, cudaExtent extent) {
  return set_3d(pitchedDevPtr, value, extent, CU_STREAM_PER_THREAD, is_plain());
}

cudaError_t cudaMemset3DAsync(cudaPitchedPtr pitchedDevPtr, int value, cudaExtent extent, cudaStream_t stream) {
  return set_3d(pitchedDevPtr, value, extent, stream_of(stream), false);
}

cudaError_t address_of_symbol(const void* symbol, size_t count, size_t offset, bool to, cudaMemcpyKind kind,
                              void** out) {
  if (!(to ? is_kind_to_symbol(kind) : is_kind_from_symbol(kind))) return cudaErrorInvalidMemcpyDirection;
  char* at = nullptr;
  const cudaError_t rc = symbol_address(symbol, count, offset, &at);
  *out = at;
  return rc;
}

// -- variables of device code -----------------------------------------------------------------------------------------

cudaError_t cudaGetSymbolAddress(void** devPtr, const void* symbol) {
  char* at = nullptr;
  const cudaError_t rc = symbol_address(symbol, 0, 0, &at);
  if (rc == cudaSuccess) *devPtr = at;
  return rc;
}

cudaError_t cudaGetSymbolSize(size_t* size, const void* symbol) {
  const Variable* variable = g_variables.find(symbol);
  if (variable == nullptr) return cudaErrorInvalidSymbol;
  *size = variable->bytes;
  return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* src, size_t count, size_t offset, cudaMemcpyKind kind) {
  if (!is_kind_to_symbol(kind)) return cudaErrorInvalidMemcpyDirection;
  char* at = nullptr;
  if (const cudaError_t rc = symbol_address(symbol, count, offset, &at); rc != cudaSuccess) return rc;
  return copy(at, src, count, kind);
}

cudaError_t cudaMemcpyFromSymbol(void* dst, const void* symbol, size_t count, size_t offset, cudaMemcpyKind kind) {
  if (!is_kind_from_symbol(kind)) return cudaErrorInvalidMemcpyDirection;
  char* at = nullptr;
  if (const cudaError_t rc = symbol_address(symbol, count, offset, &at); rc != cudaSuccess) return rc;
  return copy(dst, at, count, kind);
}

cudaError_t cudaMemcpyToSymbolAsync(const void* symbol, const void* src, size_t count, size_t offset,
                                    cudaMemcpyKind kind, cudaStream_t stream) {
  if (!is_kind_to_symbol(kind)) return cudaErrorInvalidMemcpyDirection;
  char* at = nullptr;
  if (const cudaError_t rc = symbol_address(symbol, count, offset, &at); rc != cudaSuccess) return rc;
  return result(copy_async(at, src, count, kind, stream_of(stream)));
}

cudaError_t cudaMemcpyFromSymbolAsync(void* dst, const void* symbol, size_t count, size_t offset, cudaMemcpyKind kind,
                                      cudaStream_t stream) {
  if (!is_kind_from_symbol(kind)) return cudaErrorInvalidMemcpyDirection;
  char* at = nullptr;
  if (const cudaError_t rc = symbol_address(symbol, count, offset, &at); rc != cudaSuccess) return rc;
  return result(copy_async(dst, at, count, kind, stream_of(stream)));
}

// -- addresses --------------------------------------------------------------------------------------------------------

// driver_types.h: memory that CUDA does not know is cudaMemoryTypeUnregistered, its host pointer the pointer itself.
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* ptr) {
  unsigned type = 0;
  int ordinal = cudaInvalidDeviceId;
  bool managed = false;
  CUdeviceptr on_device = 0;
  void* on_host = nullptr;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                  CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                  CU_POINTER_ATTRIBUTE_HOST_POINTER};
  void* data[] = {&type, &ordinal, &managed, &on_device, &on_host};
  const CUresult rc = cuPointerGetAttributes(sizeof wanted / sizeof *wanted, wanted, data, address(ptr));
  if (rc != CUDA_SUCCESS) return result(rc);
  memset(attributes, 0, sizeof *attributes);
  if (type == 0) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    attributes->hostPointer = const_cast<void*>(ptr);
    return cudaSuccess;
  }
  attributes->type = managed                        ? cudaMemoryTypeManaged
                     : type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice
                                                    : cudaMemoryTypeHost;
  attributes->device = ordinal;
  attributes->devicePointer = reinterpret_cast<void*>(on_device);
  attributes->hostPointer = on_host;
  return cudaSuccess;
}

cudaChannelFormatDesc cudaCreateChannelDesc(int x, int y, int z, int w, cudaChannelFormatKind f) {
  return {x, y, z, w, f};
}

}  // namespace devproxy::sa::cudart::memory

// -- memory pools -----------------------------------------------------------------------------------------------------

namespace devproxy::sa::cudart::pool {

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* memPool, int device) {
  return result(cuDeviceGetDefaultMemPool(memPool, device));
}

cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t memPool) {
  return result(cuDeviceSetMemPool(device, memPool));
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* memPool, int device) {
  return result(cuDeviceGetMemPool(memPool, device));
}

cudaError_t cudaMallocAsync(void** devPtr, size_t size, cudaStream_t hStream) {
  CUdeviceptr at = 0;
  const CUresult rc = cuMemAllocAsync(&at, size, stream_of(hStream));
  if (rc == CUDA_SUCCESS) *devPtr = reinterpret_cast<void*>(at);
  return result(rc);
}

cudaError_t cudaMallocFromPoolAsync(void** ptr, size_t size, cudaMemPool_t memPool, cudaStream_t stream) {
  CUdeviceptr at = 0;
  const CUresult rc = cuMemAllocFromPoolAsync(&at, size, memPool, stream_of(stream));
  if (rc == CUDA_SUCCESS) *ptr = reinterpret_cast<void*>(at);
  return result(rc);
}

cudaError_t cudaFreeAsync(void* devPtr, cudaStream_t hStream) {
  return result(cuMemFreeAsync(reinterpret_cast<CUdeviceptr>(devPtr), stream_of(hStream)));
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t memPool, size_t minBytesToKeep) {
  return result(cuMemPoolTrimTo(memPool, minBytesToKeep));
}

// The two enums of pool attributes number the same things alike.
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t memPool, cudaMemPoolAttr attr, void* value) {
  return result(cuMemPoolSetAttribute(memPool, static_cast<CUmemPool_attribute>(attr), value));
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t memPool, cudaMemPoolAttr attr, void* value) {
  return result(cuMemPoolGetAttribute(memPool, static_cast<CUmemPool_attribute>(attr), value));
}

namespace {
using memory::drivers_location;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* memPool, const cudaMemPoolProps* poolProps) {
  CUmemPoolProps wanted{};
  wanted.allocType = static_cast<CUmemAllocationType>(poolProps->allocType);
  wanted.handleTypes = static_cast<CUmemAllocationHandleType>(poolProps->handleTypes);
  wanted.location = drivers_location(poolProps->location);
  wanted.maxSize = poolProps->maxSize;
  wanted.usage = poolProps->usage;
  return result(cuMemPoolCreate(memPool, &wanted));
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t memPool) { return result(cuMemPoolDestroy(memPool)); }

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t memPool, const cudaMemAccessDesc* descList, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    CUmemAccessDesc one{};
    one.location = drivers_location(descList[i].location);
    one.flags = static_cast<CUmemAccess_flags>(descList[i].flags);
    if (const CUresult rc = cuMemPoolSetAccess(memPool, &one, 1); rc != CUDA_SUCCESS) return result(rc);
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAccess(cudaMemAccessFlags* flags, cudaMemPool_t memPool, cudaMemLocation* location) {
  CUmemAccess_flags found = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  CUmemLocation where = drivers_location(*location);
  const CUresult rc = cuMemPoolGetAccess(&found, memPool, &where);
  *flags = static_cast<cudaMemAccessFlags>(found);
  return result(rc);
}

#if CUDART_VERSION >= 13000
cudaError_t cudaMemGetDefaultMemPool(cudaMemPool_t* memPool, cudaMemLocation* location, cudaMemAllocationType type) {
  CUmemLocation where = drivers_location(*location);
  return result(cuMemGetDefaultMemPool(memPool, &where, static_cast<CUmemAllocationType>(type)));
}

cudaError_t cudaMemGetMemPool(cudaMemPool_t* memPool, cudaMemLocation* location, cudaMemAllocationType type) {
  CUmemLocation where = drivers_location(*location);
  return result(cuMemGetMemPool(memPool, &where, static_cast<CUmemAllocationType>(type)));
}

cudaError_t cudaMemSetMemPool(cudaMemLocation* location, cudaMemAllocationType type, cudaMemPool_t memPool) {
  CUmemLocation where = drivers_location(*location);
  return result(cuMemSetMemPool(&where, static_cast<CUmemAllocationType>(type), memPool));
}
#endif

}  // namespace devproxy::sa::cudart::pool
