// SPDX-License-Identifier: Apache-2.0
// Arrays, texture and surface objects. A cudaArray_t is the driver's array, an object the driver's number.
#include <string.h>

#include <algorithm>

#include "cudart_decl.gen.h"
#include "devproxy/interceptors/cudart/copies.h"
#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart::texture {

namespace {

CUarray driver(cudaArray_const_t array) { return reinterpret_cast<CUarray>(const_cast<cudaArray_t>(array)); }

// Channels lie side by side from x on and are of one size (driver_types.h).
bool format_of(const cudaChannelFormatDesc& d, CUarray_format* format, unsigned* channels) {
  const int bits[] = {d.x, d.y, d.z, d.w};
  *channels = 0;
  while (*channels < 4 && bits[*channels] != 0) ++*channels;
  for (unsigned i = 0; i < 4; ++i)
    if (bits[i] != (i < *channels ? d.x : 0)) return false;
  if (*channels == 0 || *channels == 3) return false;
  const bool is_signed = d.f == cudaChannelFormatKindSigned;
  if (is_signed || d.f == cudaChannelFormatKindUnsigned) {
    if (d.x == 8) *format = is_signed ? CU_AD_FORMAT_SIGNED_INT8 : CU_AD_FORMAT_UNSIGNED_INT8;
    if (d.x == 16) *format = is_signed ? CU_AD_FORMAT_SIGNED_INT16 : CU_AD_FORMAT_UNSIGNED_INT16;
    if (d.x == 32) *format = is_signed ? CU_AD_FORMAT_SIGNED_INT32 : CU_AD_FORMAT_UNSIGNED_INT32;
    return d.x == 8 || d.x == 16 || d.x == 32;
  }
  if (d.f != cudaChannelFormatKindFloat || (d.x != 16 && d.x != 32)) return false;
  *format = d.x == 16 ? CU_AD_FORMAT_HALF : CU_AD_FORMAT_FLOAT;
  return true;
}

// Channel kinds behind cudaChannelFormatKindNone are planar, normalised, packed or compressed.
cudaError_t take_format(const char* call, const cudaChannelFormatDesc& d, CUarray_format* format, unsigned* channels) {
  if (static_cast<unsigned>(d.f) > cudaChannelFormatKindNone)
    return refuse(call, "only channels of 8-, 16- or 32-bit integers, half or float are supported");
  return format_of(d, format, channels) ? cudaSuccess : cudaErrorInvalidChannelDescriptor;
}

cudaChannelFormatDesc channels_of(CUarray_format format, unsigned channels) {
  int bits = 32;
  cudaChannelFormatKind kind = cudaChannelFormatKindFloat;
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8: bits = 8, kind = cudaChannelFormatKindUnsigned; break;
    case CU_AD_FORMAT_UNSIGNED_INT16: bits = 16, kind = cudaChannelFormatKindUnsigned; break;
    case CU_AD_FORMAT_UNSIGNED_INT32: kind = cudaChannelFormatKindUnsigned; break;
    case CU_AD_FORMAT_SIGNED_INT8: bits = 8, kind = cudaChannelFormatKindSigned; break;
    case CU_AD_FORMAT_SIGNED_INT16: bits = 16, kind = cudaChannelFormatKindSigned; break;
    case CU_AD_FORMAT_SIGNED_INT32: kind = cudaChannelFormatKindSigned; break;
    case CU_AD_FORMAT_HALF: bits = 16; break;
    default: break;
  }
  return {bits, channels > 1 ? bits : 0, channels > 2 ? bits : 0, channels > 3 ? bits : 0, kind};
}

cudaError_t make(const char* call, cudaArray_t* array, const cudaChannelFormatDesc& desc, const cudaExtent& extent,
                 unsigned flags) {
  CUDA_ARRAY3D_DESCRIPTOR d{extent.width, extent.height, extent.depth, CU_AD_FORMAT_FLOAT, 0, flags};
  if (const cudaError_t rc = take_format(call, desc, &d.Format, &d.NumChannels); rc != cudaSuccess) return rc;
  CUarray made = nullptr;
  const CUresult rc = cuArray3DCreate(&made, &d);
  if (rc == CUDA_SUCCESS) *array = reinterpret_cast<cudaArray_t>(made);
  return result(rc);
}

// -- copies -----------------------------------------------------------------------------------------------------------

// The side that is no array: where it lies says the kind, or the address.
bool memory_of(cudaMemcpyKind kind, bool to_array, CUmemorytype* type) {
  switch (kind) {
    case cudaMemcpyHostToDevice: *type = CU_MEMORYTYPE_HOST; return to_array;
    case cudaMemcpyDeviceToHost: *type = CU_MEMORYTYPE_HOST; return !to_array;
    case cudaMemcpyDeviceToDevice: *type = CU_MEMORYTYPE_DEVICE; return true;
    case cudaMemcpyDefault: *type = CU_MEMORYTYPE_UNIFIED; return true;
    default: return false;
  }
}

cudaError_t run(const CUDA_MEMCPY3D& c, CUstream stream, bool wait) {
  if (!wait) return result(cuMemcpy3DAsync(&c, stream));
  if (!t_thread.per_thread) return result(cuMemcpy3D(&c));
  const CUresult rc = cuMemcpy3DAsync(&c, CU_STREAM_PER_THREAD);
  return result(rc == CUDA_SUCCESS ? cuStreamSynchronize(CU_STREAM_PER_THREAD) : rc);
}

struct Rectangle {
  CUarray array;
  size_t x, y;
  const void* memory;
  size_t pitch, width, height;
};

cudaError_t copy(const Rectangle& r, bool to_array, cudaMemcpyKind kind, CUstream stream, bool wait) {
  if (r.width == 0 || r.height == 0) return cudaSuccess;
  CUmemorytype type;
  if (!memory_of(kind, to_array, &type)) return cudaErrorInvalidMemcpyDirection;
  if (r.height > 1 && r.width > r.pitch) return cudaErrorInvalidPitchValue;
  CUDA_MEMCPY3D c{};
  const auto address = reinterpret_cast<CUdeviceptr>(r.memory);
  if (to_array) {
    c.srcMemoryType = type, c.srcHost = r.memory, c.srcDevice = address, c.srcPitch = r.pitch;
    c.dstMemoryType = CU_MEMORYTYPE_ARRAY, c.dstArray = r.array, c.dstXInBytes = r.x, c.dstY = r.y;
  } else {
    c.dstMemoryType = type, c.dstHost = const_cast<void*>(r.memory), c.dstDevice = address, c.dstPitch = r.pitch;
    c.srcMemoryType = CU_MEMORYTYPE_ARRAY, c.srcArray = r.array, c.srcXInBytes = r.x, c.srcY = r.y;
  }
  c.WidthInBytes = r.width;
  c.Height = r.height;
  c.Depth = 1;
  return run(c, stream, wait);
}

// `count` bytes from a place in the array on, row behind row: the rest of a row, whole rows, the beginning of one.
cudaError_t copy_flat(cudaArray_const_t array, size_t x, size_t y, const void* memory, size_t count, bool to_array,
                      cudaMemcpyKind kind, CUstream stream, bool wait) {
  CUDA_ARRAY3D_DESCRIPTOR d;
  if (const CUresult rc = cuArray3DGetDescriptor(&d, driver(array)); rc != CUDA_SUCCESS) return result(rc);
  const size_t row = d.Width * memory::element_bytes(d), rows = std::max<size_t>(d.Height, 1);
  if (d.Depth != 0 || x > row || y >= rows || count > (rows - y) * row - x) return cudaErrorInvalidValue;
  const auto* at = static_cast<const char*>(memory);
  while (count != 0) {
    const bool whole = x == 0 && count >= row;
    const size_t width = whole ? row : std::min(count, row - x), height = whole ? count / row : 1;
    if (width != 0)
      if (const cudaError_t rc = copy({driver(array), x, y, at, width, width, height}, to_array, kind, stream, wait);
          rc != cudaSuccess)
        return rc;
    at += width * height;
    count -= width * height;
    y += height;
    x = 0;
  }
  return cudaSuccess;
}

// -- objects ----------------------------------------------------------------------------------------------------------

// CUDA 12's descriptor has no flags.
template <class Resource>
unsigned flags_of(const Resource& r) {
  if constexpr (requires { r.flags; }) return r.flags;
  return 0;
}
template <class Resource>
void set_flags(Resource* r, unsigned flags) {
  if constexpr (requires { r->flags; }) r->flags = flags;
}

cudaError_t take_resource(const char* call, const cudaResourceDesc& r, CUDA_RESOURCE_DESC* out) {
  *out = {};
  out->flags = flags_of(r);
  switch (r.resType) {
    case cudaResourceTypeArray:
      out->resType = CU_RESOURCE_TYPE_ARRAY;
      out->res.array.hArray = driver(r.res.array.array);
      return cudaSuccess;
    case cudaResourceTypeLinear: {
      out->resType = CU_RESOURCE_TYPE_LINEAR;
      auto& l = out->res.linear;
      l.devPtr = reinterpret_cast<CUdeviceptr>(r.res.linear.devPtr);
      l.sizeInBytes = r.res.linear.sizeInBytes;
      return take_format(call, r.res.linear.desc, &l.format, &l.numChannels);
    }
    case cudaResourceTypePitch2D: {
      out->resType = CU_RESOURCE_TYPE_PITCH2D;
      auto& p = out->res.pitch2D;
      p.devPtr = reinterpret_cast<CUdeviceptr>(r.res.pitch2D.devPtr);
      p.width = r.res.pitch2D.width, p.height = r.res.pitch2D.height, p.pitchInBytes = r.res.pitch2D.pitchInBytes;
      return take_format(call, r.res.pitch2D.desc, &p.format, &p.numChannels);
    }
    case cudaResourceTypeMipmappedArray: return refuse(call, "mipmapped arrays are not supported yet");
    default: return cudaErrorInvalidValue;
  }
}

void give_resource(const CUDA_RESOURCE_DESC& r, cudaResourceDesc* out) {
  *out = {};
  set_flags(out, r.flags);
  if (r.resType == CU_RESOURCE_TYPE_LINEAR) {
    const auto& l = r.res.linear;
    out->resType = cudaResourceTypeLinear;
    out->res.linear.devPtr = reinterpret_cast<void*>(l.devPtr);
    out->res.linear.desc = channels_of(l.format, l.numChannels);
    out->res.linear.sizeInBytes = l.sizeInBytes;
  } else if (r.resType == CU_RESOURCE_TYPE_PITCH2D) {
    const auto& p = r.res.pitch2D;
    out->resType = cudaResourceTypePitch2D;
    out->res.pitch2D.devPtr = reinterpret_cast<void*>(p.devPtr);
    out->res.pitch2D.desc = channels_of(p.format, p.numChannels);
    out->res.pitch2D.width = p.width, out->res.pitch2D.height = p.height;
    out->res.pitch2D.pitchInBytes = p.pitchInBytes;
  } else {
    out->resType = cudaResourceTypeArray;
    out->res.array.array = reinterpret_cast<cudaArray_t>(r.res.array.hArray);
  }
}

// Both headers number address modes, filter modes and view formats alike.
static_assert(static_cast<int>(cudaAddressModeBorder) == CU_TR_ADDRESS_MODE_BORDER &&
              static_cast<int>(cudaFilterModeLinear) == CU_TR_FILTER_MODE_LINEAR &&
              static_cast<int>(cudaResViewFormatUnsignedBlockCompressed7) == CU_RES_VIEW_FORMAT_UNSIGNED_BC7);

CUDA_TEXTURE_DESC driver(const cudaTextureDesc& t) {
  CUDA_TEXTURE_DESC out{};
  for (int i = 0; i < 3; ++i) out.addressMode[i] = static_cast<CUaddress_mode>(t.addressMode[i]);
  out.filterMode = static_cast<CUfilter_mode>(t.filterMode);
  out.flags = (t.readMode == cudaReadModeElementType ? CU_TRSF_READ_AS_INTEGER : 0) |
              (t.normalizedCoords ? CU_TRSF_NORMALIZED_COORDINATES : 0) | (t.sRGB ? CU_TRSF_SRGB : 0) |
              (t.disableTrilinearOptimization ? CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION : 0) |
              (t.seamlessCubemap ? CU_TRSF_SEAMLESS_CUBEMAP : 0);
  out.maxAnisotropy = t.maxAnisotropy;
  out.mipmapFilterMode = static_cast<CUfilter_mode>(t.mipmapFilterMode);
  out.mipmapLevelBias = t.mipmapLevelBias;
  out.minMipmapLevelClamp = t.minMipmapLevelClamp;
  out.maxMipmapLevelClamp = t.maxMipmapLevelClamp;
  std::copy_n(t.borderColor, 4, out.borderColor);
  return out;
}

cudaTextureDesc runtime(const CUDA_TEXTURE_DESC& t) {
  cudaTextureDesc out{};
  for (int i = 0; i < 3; ++i) out.addressMode[i] = static_cast<cudaTextureAddressMode>(t.addressMode[i]);
  out.filterMode = static_cast<cudaTextureFilterMode>(t.filterMode);
  out.readMode = t.flags & CU_TRSF_READ_AS_INTEGER ? cudaReadModeElementType : cudaReadModeNormalizedFloat;
  out.sRGB = (t.flags & CU_TRSF_SRGB) != 0;
  out.normalizedCoords = (t.flags & CU_TRSF_NORMALIZED_COORDINATES) != 0;
  out.disableTrilinearOptimization = (t.flags & CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION) != 0;
  out.seamlessCubemap = (t.flags & CU_TRSF_SEAMLESS_CUBEMAP) != 0;
  out.maxAnisotropy = t.maxAnisotropy;
  out.mipmapFilterMode = static_cast<cudaTextureFilterMode>(t.mipmapFilterMode);
  out.mipmapLevelBias = t.mipmapLevelBias;
  out.minMipmapLevelClamp = t.minMipmapLevelClamp;
  out.maxMipmapLevelClamp = t.maxMipmapLevelClamp;
  std::copy_n(t.borderColor, 4, out.borderColor);
  return out;
}

CUDA_RESOURCE_VIEW_DESC driver(const cudaResourceViewDesc& v) {
  CUDA_RESOURCE_VIEW_DESC out{};
  out.format = static_cast<CUresourceViewFormat>(v.format);
  out.width = v.width, out.height = v.height, out.depth = v.depth;
  out.firstMipmapLevel = v.firstMipmapLevel, out.lastMipmapLevel = v.lastMipmapLevel;
  out.firstLayer = v.firstLayer, out.lastLayer = v.lastLayer;
  return out;
}

}  // namespace

// -- arrays -----------------------------------------------------------------------------------------------------------

cudaError_t cudaMallocArray(cudaArray_t* array, const cudaChannelFormatDesc* desc, size_t width, size_t height,
                            unsigned int flags) {
  return make("cudaMallocArray", array, *desc, {width, height, 0}, flags);
}

cudaError_t cudaMalloc3DArray(cudaArray_t* array, const cudaChannelFormatDesc* desc, cudaExtent extent,
                              unsigned int flags) {
  return make("cudaMalloc3DArray", array, *desc, extent, flags);
}

cudaError_t cudaFreeArray(cudaArray_t array) {
  return array == nullptr ? cudaSuccess : result(cuArrayDestroy(driver(array)));
}

cudaError_t cudaArrayGetInfo(cudaChannelFormatDesc* desc, cudaExtent* extent, unsigned int* flags, cudaArray_t array) {
  CUDA_ARRAY3D_DESCRIPTOR d;
  if (const CUresult rc = cuArray3DGetDescriptor(&d, driver(array)); rc != CUDA_SUCCESS) return result(rc);
  if (desc != nullptr) *desc = channels_of(d.Format, d.NumChannels);
  if (extent != nullptr) *extent = {d.Width, d.Height, d.Depth};
  if (flags != nullptr) *flags = d.Flags;
  return cudaSuccess;
}

cudaError_t cudaGetChannelDesc(cudaChannelFormatDesc* desc, cudaArray_const_t array) {
  return texture::cudaArrayGetInfo(desc, nullptr, nullptr, const_cast<cudaArray_t>(array));
}

// -- copies -----------------------------------------------------------------------------------------------------------

cudaError_t cudaMemcpy2DToArray(cudaArray_t dst, size_t wOffset, size_t hOffset, const void* src, size_t spitch,
                                size_t width, size_t height, cudaMemcpyKind kind) {
  return copy({driver(dst), wOffset, hOffset, src, spitch, width, height}, true, kind, nullptr, true);
}
cudaError_t cudaMemcpy2DFromArray(void* dst, size_t dpitch, cudaArray_const_t src, size_t wOffset, size_t hOffset,
                                  size_t width, size_t height, cudaMemcpyKind kind) {
  return copy({driver(src), wOffset, hOffset, dst, dpitch, width, height}, false, kind, nullptr, true);
}
cudaError_t cudaMemcpy2DToArrayAsync(cudaArray_t dst, size_t wOffset, size_t hOffset, const void* src, size_t spitch,
                                     size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy({driver(dst), wOffset, hOffset, src, spitch, width, height}, true, kind, stream_of(stream), false);
}
cudaError_t cudaMemcpy2DFromArrayAsync(void* dst, size_t dpitch, cudaArray_const_t src, size_t wOffset, size_t hOffset,
                                       size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy({driver(src), wOffset, hOffset, dst, dpitch, width, height}, false, kind, stream_of(stream), false);
}

cudaError_t cudaMemcpy2DArrayToArray(cudaArray_t dst, size_t wOffsetDst, size_t hOffsetDst, cudaArray_const_t src,
                                     size_t wOffsetSrc, size_t hOffsetSrc, size_t width, size_t height,
                                     cudaMemcpyKind kind) {
  if (kind != cudaMemcpyDeviceToDevice && kind != cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
  CUDA_MEMCPY3D c{};
  c.srcMemoryType = c.dstMemoryType = CU_MEMORYTYPE_ARRAY;
  c.srcArray = driver(src), c.srcXInBytes = wOffsetSrc, c.srcY = hOffsetSrc;
  c.dstArray = driver(dst), c.dstXInBytes = wOffsetDst, c.dstY = hOffsetDst;
  c.WidthInBytes = width;
  c.Height = height;
  c.Depth = 1;
  return run(c, nullptr, true);
}

cudaError_t cudaMemcpyToArray(cudaArray_t dst, size_t wOffset, size_t hOffset, const void* src, size_t count,
                              cudaMemcpyKind kind) {
  return copy_flat(dst, wOffset, hOffset, src, count, true, kind, nullptr, true);
}
cudaError_t cudaMemcpyFromArray(void* dst, cudaArray_const_t src, size_t wOffset, size_t hOffset, size_t count,
                                cudaMemcpyKind kind) {
  return copy_flat(src, wOffset, hOffset, dst, count, false, kind, nullptr, true);
}
cudaError_t cudaMemcpyToArrayAsync(cudaArray_t dst, size_t wOffset, size_t hOffset, const void* src, size_t count,
                                   cudaMemcpyKind kind, cudaStream_t stream) {
  return copy_flat(dst, wOffset, hOffset, src, count, true, kind, stream_of(stream), false);
}
cudaError_t cudaMemcpyFromArrayAsync(void* dst, cudaArray_const_t src, size_t wOffset, size_t hOffset, size_t count,
                                     cudaMemcpyKind kind, cudaStream_t stream) {
  return copy_flat(src, wOffset, hOffset, dst, count, false, kind, stream_of(stream), false);
}

// -- objects ----------------------------------------------------------------------------------------------------------

cudaError_t cudaCreateTextureObject(cudaTextureObject_t* pTexObject, const cudaResourceDesc* pResDesc,
                                    const cudaTextureDesc* pTexDesc, const cudaResourceViewDesc* pResViewDesc) {
  CUDA_RESOURCE_DESC resource;
  if (const cudaError_t rc = take_resource("cudaCreateTextureObject", *pResDesc, &resource); rc != cudaSuccess)
    return rc;
  const CUDA_TEXTURE_DESC how = driver(*pTexDesc);
  CUDA_RESOURCE_VIEW_DESC view{};
  if (pResViewDesc != nullptr) view = driver(*pResViewDesc);
  CUtexObject made = 0;
  const CUresult rc = cuTexObjectCreate(&made, &resource, &how, pResViewDesc != nullptr ? &view : nullptr);
  if (rc == CUDA_SUCCESS) *pTexObject = made;
  return result(rc);
}

cudaError_t cudaDestroyTextureObject(cudaTextureObject_t texObject) { return result(cuTexObjectDestroy(texObject)); }

cudaError_t cudaGetTextureObjectResourceDesc(cudaResourceDesc* pResDesc, cudaTextureObject_t texObject) {
  CUDA_RESOURCE_DESC resource;
  const CUresult rc = cuTexObjectGetResourceDesc(&resource, texObject);
  if (rc == CUDA_SUCCESS) give_resource(resource, pResDesc);
  return result(rc);
}

cudaError_t cudaGetTextureObjectTextureDesc(cudaTextureDesc* pTexDesc, cudaTextureObject_t texObject) {
  CUDA_TEXTURE_DESC how;
  const CUresult rc = cuTexObjectGetTextureDesc(&how, texObject);
  if (rc == CUDA_SUCCESS) *pTexDesc = runtime(how);
  return result(rc);
}

cudaError_t cudaGetTextureObjectResourceViewDesc(cudaResourceViewDesc* pResViewDesc, cudaTextureObject_t texObject) {
  CUDA_RESOURCE_VIEW_DESC v;
  const CUresult rc = cuTexObjectGetResourceViewDesc(&v, texObject);
  if (rc != CUDA_SUCCESS) return result(rc);
  *pResViewDesc = {};
  pResViewDesc->format = static_cast<cudaResourceViewFormat>(v.format);
  pResViewDesc->width = v.width, pResViewDesc->height = v.height, pResViewDesc->depth = v.depth;
  pResViewDesc->firstMipmapLevel = v.firstMipmapLevel, pResViewDesc->lastMipmapLevel = v.lastMipmapLevel;
  pResViewDesc->firstLayer = v.firstLayer, pResViewDesc->lastLayer = v.lastLayer;
  return cudaSuccess;
}

cudaError_t cudaCreateSurfaceObject(cudaSurfaceObject_t* pSurfObject, const cudaResourceDesc* pResDesc) {
  CUDA_RESOURCE_DESC resource;
  if (const cudaError_t rc = take_resource("cudaCreateSurfaceObject", *pResDesc, &resource); rc != cudaSuccess)
    return rc;
  CUsurfObject made = 0;
  const CUresult rc = cuSurfObjectCreate(&made, &resource);
  if (rc == CUDA_SUCCESS) *pSurfObject = made;
  return result(rc);
}

cudaError_t cudaDestroySurfaceObject(cudaSurfaceObject_t surfObject) { return result(cuSurfObjectDestroy(surfObject)); }

cudaError_t cudaGetSurfaceObjectResourceDesc(cudaResourceDesc* pResDesc, cudaSurfaceObject_t surfObject) {
  CUDA_RESOURCE_DESC resource;
  const CUresult rc = cuSurfObjectGetResourceDesc(&resource, surfObject);
  if (rc == CUDA_SUCCESS) give_resource(resource, pResDesc);
  return result(rc);
}

}  // namespace devproxy::sa::cudart::texture
