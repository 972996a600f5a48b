// SPDX-License-Identifier: Apache-2.0
// Copies of rectangles and boxes: one command where the server sees both sides, rows and staging chunks elsewhere.
#include "devproxy/interceptors/copies/client.h"

#include <string.h>

#include <algorithm>

#include "devproxy/interceptors/graph/hooks.h"
#include "devproxy/interceptors/managed/client.h"
#include "devproxy/interceptors/memory/client.h"

namespace devproxy::sa::copies {

using client::DeviceState;
using client::place_of;
using client::StreamObj;
using wire::Space;
using enum wire::Space;

namespace {

struct Side {
  uint64_t addr;  // of the first byte of the region
  uint64_t pitch;
  bool host;
};

// false where there is no such memory type; arrays are client_array.cc's.
bool side(CUmemorytype type, const void* host, CUdeviceptr device, size_t pitch, size_t x, size_t y, size_t width,
          Side* out) {
  switch (type) {
    case CU_MEMORYTYPE_HOST: *out = {reinterpret_cast<uint64_t>(host), pitch, true}; break;
    case CU_MEMORYTYPE_DEVICE: *out = {device, pitch, false}; break;
    case CU_MEMORYTYPE_UNIFIED: *out = {device, pitch, place_of(device).device < 0}; break;
    default: return false;
  }
  if (out->pitch == 0) out->pitch = width;
  out->addr += y * out->pitch + x;
  return true;
}

bool valid_box(const Side& at, uint64_t z, uint64_t slice, const CUDA_MEMCPY3D& p) {
  uint64_t rows, skipped, all;
  if (at.addr == 0 || at.pitch < p.WidthInBytes || __builtin_mul_overflow(p.Height - 1, at.pitch, &rows) ||
      __builtin_add_overflow(rows, p.WidthInBytes, &rows) || __builtin_add_overflow(z, p.Depth, &all) ||
      __builtin_mul_overflow(all, slice, &all) || __builtin_add_overflow(at.addr, all, &all))
    return false;
  skipped = z * slice;
  for (size_t i = 0; i < p.Depth; ++i)
    if (!memory::known(at.addr + skipped + i * slice, rows)) return false;
  return true;
}

// Linear regions row by row where a side is pageable or foreign; one command where the server sees both.
int32_t copy_rows(DeviceState* d, StreamObj* s, Side dst, Side src, uint64_t width, uint64_t height, bool wait) {
  if (width == 0 || height == 0) return d->conn().error();
  if (dst.pitch < width || src.pitch < width) return kInvalidValue;
  const Space to = memory::space_on(d, dst.addr), from = memory::space_on(d, src.addr);
  if (to != kChunk && from != kChunk) {
    if (!memory::known(dst.addr, (height - 1) * dst.pitch + width) ||
        !memory::known(src.addr, (height - 1) * src.pitch + width))
      return kInvalidValue;
    uint64_t end;
    const int32_t rc =
        memory::post_copy_2d(d, s, {dst.addr, dst.pitch}, to, {src.addr, src.pitch}, from, width, height, 0, &end);
    return rc == kOk && wait ? d->wait_stream(*s) : rc;
  }
  if (dst.pitch == width && src.pitch == width)
    return memory::dispatch_copy(d, s, dst.addr, src.addr, width * height, memory::kAny, wait);
  // As many rows as fit a chunk travel packed: the host side is gathered or scattered here, the device side there.
  auto device_side = [](uint64_t addr, Space space) {
    return space == kDevice || (space == kPinned && managed::is_managed(addr, place_of(addr)));
  };
  const bool in = device_side(dst.addr, to) && place_of(src.addr).device < 0,
             out = device_side(src.addr, from) && place_of(dst.addr).device < 0;
  if ((in || out) && width <= kChunkBytes) {
    const uint64_t rows_per_chunk = kChunkBytes / width;
    if (!memory::known(in ? dst.addr : src.addr, (height - 1) * (in ? dst.pitch : src.pitch) + width))
      return kInvalidValue;
    for (uint64_t row = 0; row < height; row += rows_per_chunk) {
      const uint64_t rows = std::min(rows_per_chunk, height - row);
      int32_t rc = kOk;
      const uint32_t chunk = d->conn().take_chunk(&rc);
      if (chunk == kChunks) return rc;
      uint8_t* stage = d->conn().chunk(chunk);
      uint64_t end = 0;
      if (in) {
        for (uint64_t r = 0; r < rows; ++r)
          memcpy(stage + r * width, reinterpret_cast<const void*>(src.addr + (row + r) * src.pitch), width);
        rc = memory::post_copy_2d(d, s, {dst.addr + row * dst.pitch, dst.pitch}, to,
                                  {memory::chunk_offset(chunk), width}, kChunk, width, rows, chunk + 1, &end);
        if (rc != kOk) d->conn().free_chunk(chunk);
      } else {
        rc = memory::post_copy_2d(d, s, {memory::chunk_offset(chunk), width}, kChunk,
                                  {src.addr + row * src.pitch, src.pitch}, from, width, rows, 0, &end);
        if (rc == kOk) rc = d->conn().wait(s->index, end);
        if (rc == kOk)
          for (uint64_t r = 0; r < rows; ++r)
            memcpy(reinterpret_cast<void*>(dst.addr + (row + r) * dst.pitch), stage + r * width, width);
        d->conn().free_chunk(chunk);
      }
      if (rc != kOk) return rc;
    }
    return in && wait ? d->wait_stream(*s) : kOk;
  }
  for (uint64_t row = 0; row < height; ++row)
    if (const int32_t rc = memory::dispatch_copy(d, s, dst.addr + row * dst.pitch, src.addr + row * src.pitch, width,
                                                 memory::kAny, wait);
        rc != kOk)
      return rc;
  return kOk;
}

// A rectangle as a node of a graph holds it.
CUDA_MEMCPY3D as_3d(const CUDA_MEMCPY2D& p) {
  CUDA_MEMCPY3D out{};
  out.srcXInBytes = p.srcXInBytes, out.srcY = p.srcY, out.srcMemoryType = p.srcMemoryType;
  out.srcHost = p.srcHost, out.srcDevice = p.srcDevice, out.srcArray = p.srcArray, out.srcPitch = p.srcPitch;
  out.dstXInBytes = p.dstXInBytes, out.dstY = p.dstY, out.dstMemoryType = p.dstMemoryType;
  out.dstHost = p.dstHost, out.dstDevice = p.dstDevice, out.dstArray = p.dstArray, out.dstPitch = p.dstPitch;
  out.WidthInBytes = p.WidthInBytes, out.Height = p.Height, out.Depth = 1;
  return out;
}

CUresult copy_2d(const CUDA_MEMCPY2D* p, CUstream hStream, bool wait) {
  DP_STREAM(hStream, s, d);
  if (const CUDA_MEMCPY3D box = as_3d(*p); has_array(box)) return result(copy(d, s, box, wait));
  Side dst, src;
  if (!side(p->srcMemoryType, p->srcHost, p->srcDevice, p->srcPitch, p->srcXInBytes, p->srcY, p->WidthInBytes, &src) ||
      !side(p->dstMemoryType, p->dstHost, p->dstDevice, p->dstPitch, p->dstXInBytes, p->dstY, p->WidthInBytes, &dst))
    return CUDA_ERROR_INVALID_VALUE;
  return result(copy_rows(d, s, dst, src, p->WidthInBytes, p->Height, wait));
}

CUresult copy_3d(const CUDA_MEMCPY3D* p, CUstream hStream, bool wait) {
  if (p->srcLOD || p->dstLOD) return CUDA_ERROR_INVALID_VALUE;
  DP_STREAM(hStream, s, d);
  if (has_array(*p)) return result(copy(d, s, *p, wait));
  Side dst, src;
  if (!side(p->srcMemoryType, p->srcHost, p->srcDevice, p->srcPitch, p->srcXInBytes, p->srcY, p->WidthInBytes, &src) ||
      !side(p->dstMemoryType, p->dstHost, p->dstDevice, p->dstPitch, p->dstXInBytes, p->dstY, p->WidthInBytes, &dst))
    return CUDA_ERROR_INVALID_VALUE;
  const uint64_t src_slice = src.pitch * (p->srcHeight ? p->srcHeight : p->Height);
  const uint64_t dst_slice = dst.pitch * (p->dstHeight ? p->dstHeight : p->Height);
  src.addr += p->srcZ * src_slice;
  dst.addr += p->dstZ * dst_slice;
  for (size_t z = 0; z < p->Depth; ++z) {
    const bool last = z + 1 == p->Depth;
    if (const int32_t rc = copy_rows(d, s, dst, src, p->WidthInBytes, p->Height, wait && last); rc != kOk)
      return result(rc);
    src.addr += src_slice;
    dst.addr += dst_slice;
  }
  return CUDA_SUCCESS;
}

}  // namespace

int32_t check_3d(const CUDA_MEMCPY3D& p) {
  if (p.srcLOD || p.dstLOD) return kInvalidValue;
  if (has_array(p)) return check_copy(p);
  Side dst, src;
  if (!side(p.srcMemoryType, p.srcHost, p.srcDevice, p.srcPitch, p.srcXInBytes, p.srcY, p.WidthInBytes, &src) ||
      !side(p.dstMemoryType, p.dstHost, p.dstDevice, p.dstPitch, p.dstXInBytes, p.dstY, p.WidthInBytes, &dst))
    return kInvalidValue;
  if (p.WidthInBytes == 0 || p.Height == 0 || p.Depth == 0) return kOk;
  const uint64_t src_slice = src.pitch * (p.srcHeight ? p.srcHeight : p.Height),
                 dst_slice = dst.pitch * (p.dstHeight ? p.dstHeight : p.Height);
  return valid_box(src, p.srcZ, src_slice, p) && valid_box(dst, p.dstZ, dst_slice, p)
             ? kOk
             : static_cast<int32_t>(kInvalidValue);
}

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D* pCopy) { return copy_2d(pCopy, nullptr, true); }
CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* pCopy) { return copy_2d(pCopy, nullptr, true); }
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* pCopy, CUstream hStream) { return copy_2d(pCopy, hStream, false); }
CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D* pCopy) { return copy_3d(pCopy, nullptr, true); }
CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* pCopy, CUstream hStream) { return copy_3d(pCopy, hStream, false); }

CUresult captured::cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* pCopy, CUstream hStream) {
  DP_STREAM(hStream, s, d);
  CUresult rc = CUDA_SUCCESS;
  return graph::capture_copy(s, as_3d(*pCopy), &rc) ? rc : copy_2d(pCopy, hStream, false);
}
CUresult captured::cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* pCopy, CUstream hStream) {
  if (pCopy->srcLOD || pCopy->dstLOD) return CUDA_ERROR_INVALID_VALUE;
  DP_STREAM(hStream, s, d);
  CUresult rc = CUDA_SUCCESS;
  return graph::capture_copy(s, *pCopy, &rc) ? rc : copy_3d(pCopy, hStream, false);
}

}  // namespace devproxy::sa::copies
