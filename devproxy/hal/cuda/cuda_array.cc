// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/cuda_array.h"

#include <algorithm>

namespace devproxy::hal::cuda {

StatusOr<std::shared_ptr<CudaArray>> CudaArray::create(const std::shared_ptr<Context>& context,
                                                       const ArrayShape& shape) {
  auto array = std::make_shared<CudaArray>();
  if (!array_extent(shape, &array->extent)) return Status(kInvalidValue, "no array has that shape");
  const Driver& cu = context->enter();
  const CUDA_ARRAY3D_DESCRIPTOR d{shape.width,    shape.height, shape.depth, static_cast<CUarray_format>(shape.format),
                                  shape.channels, shape.flags};
  if (Status s = cu.status(cu.cuArray3DCreate(&array->handle, &d), cu.cuArray3DCreate,
                           "making an array of " + std::to_string(array->extent.bytes()) + " bytes");
      !s.ok()) {
    array->handle = nullptr;
    return s;
  }
  array->context = context;
  return array;
}

CudaArray::~CudaArray() {
  if (handle) (void)context->enter().cuArrayDestroy(handle);
}

namespace {

CUDA_RESOURCE_DESC resource_of(const TextureArgs& a, const ArrayRef& array) {
  CUDA_RESOURCE_DESC out{};
  switch (static_cast<TextureResource>(a.resource)) {
    case TextureResource::kArray:
      out.resType = CU_RESOURCE_TYPE_ARRAY;
      out.res.array.hArray = static_cast<const CudaArray&>(*array).handle;
      break;
    case TextureResource::kLinear:
      out.resType = CU_RESOURCE_TYPE_LINEAR;
      out.res.linear = {a.address, static_cast<CUarray_format>(a.format), a.channels, a.bytes};
      break;
    case TextureResource::kPitch2D:
      out.resType = CU_RESOURCE_TYPE_PITCH2D;
      out.res.pitch2D = {a.address, static_cast<CUarray_format>(a.format), a.channels, a.width, a.height, a.pitch};
      break;
  }
  return out;
}

CUDA_TEXTURE_DESC texture_of(const TextureArgs& a) {
  CUDA_TEXTURE_DESC out{};
  for (int i = 0; i < 3; i++) out.addressMode[i] = static_cast<CUaddress_mode>(a.address_mode[i]);
  out.filterMode = static_cast<CUfilter_mode>(a.filter_mode);
  out.flags = a.flags;
  out.maxAnisotropy = a.max_anisotropy;
  out.mipmapFilterMode = static_cast<CUfilter_mode>(a.mipmap_filter_mode);
  out.mipmapLevelBias = a.mipmap_level_bias;
  out.minMipmapLevelClamp = a.min_mipmap_level;
  out.maxMipmapLevelClamp = a.max_mipmap_level;
  std::copy_n(a.border, 4, out.borderColor);
  return out;
}

CUDA_RESOURCE_VIEW_DESC view_of(const TextureArgs& a) {
  CUDA_RESOURCE_VIEW_DESC out{};
  out.format = static_cast<CUresourceViewFormat>(a.view_format);
  out.width = a.view_width, out.height = a.view_height, out.depth = a.view_depth;
  out.firstMipmapLevel = a.first_level, out.lastMipmapLevel = a.last_level;
  out.firstLayer = a.first_layer, out.lastLayer = a.last_layer;
  return out;
}

}  // namespace

StatusOr<std::shared_ptr<CudaTexture>> CudaTexture::create(const std::shared_ptr<Context>& context,
                                                           const TextureArgs& a, const ArrayRef& array) {
  const Driver& cu = context->enter();
  auto texture = std::make_shared<CudaTexture>();
  texture->context = context;
  texture->array = array;
  texture->kind = static_cast<TextureKind>(a.kind);
  const CUDA_RESOURCE_DESC resource = resource_of(a, array);
  Status s;
  if (texture->kind == TextureKind::kSurface) {
    CUsurfObject value = 0;
    s = cu.status(cu.cuSurfObjectCreate(&value, &resource), cu.cuSurfObjectCreate, "making a surface object");
    texture->value = value;
  } else {
    const CUDA_TEXTURE_DESC how = texture_of(a);
    const CUDA_RESOURCE_VIEW_DESC view = view_of(a);
    CUtexObject value = 0;
    s = cu.status(cu.cuTexObjectCreate(&value, &resource, &how, a.has_view ? &view : nullptr), cu.cuTexObjectCreate,
                  "making a texture object");
    texture->value = value;
  }
  if (!s.ok()) return s;
  texture->made = true;
  return texture;
}

CudaTexture::~CudaTexture() {
  if (!made) return;
  const Driver& cu = context->enter();
  if (kind == TextureKind::kSurface)
    (void)cu.cuSurfObjectDestroy(value);
  else
    (void)cu.cuTexObjectDestroy(value);
}

CUDA_MEMCPY3D driver_copy(const ArrayCopy& a) {
  CUDA_MEMCPY3D c{};
  if (a.src.array) {
    c.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    c.srcArray = static_cast<const CudaArray&>(*a.src.array).handle;
    c.srcXInBytes = a.src.x_bytes, c.srcY = a.src.y, c.srcZ = a.src.z;
  } else {
    c.srcMemoryType = a.src.device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    if (a.src.device)
      c.srcDevice = a.src.addr;
    else
      c.srcHost = reinterpret_cast<const void*>(a.src.addr);
    c.srcPitch = a.src.pitch, c.srcHeight = a.src.slice_rows;
  }
  if (a.dst.array) {
    c.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    c.dstArray = static_cast<const CudaArray&>(*a.dst.array).handle;
    c.dstXInBytes = a.dst.x_bytes, c.dstY = a.dst.y, c.dstZ = a.dst.z;
  } else {
    c.dstMemoryType = a.dst.device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    if (a.dst.device)
      c.dstDevice = a.dst.addr;
    else
      c.dstHost = reinterpret_cast<void*>(a.dst.addr);
    c.dstPitch = a.dst.pitch, c.dstHeight = a.dst.slice_rows;
  }
  c.WidthInBytes = a.width_bytes;
  c.Height = a.rows;
  c.Depth = a.slices;
  return c;
}

}  // namespace devproxy::hal::cuda
