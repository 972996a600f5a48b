// SPDX-License-Identifier: Apache-2.0
// Copies from and to arrays: one message where the server sees both sides, else piece by piece through staging chunks.
#include <string.h>

#include <algorithm>

#include "devproxy/csrc/wire/array.h"
#include "devproxy/interceptors/copies/client.h"
#include "devproxy/interceptors/memory/client.h"
#include "devproxy/interceptors/texture/client.h"

namespace devproxy::sa::copies {

using client::DeviceState;
using client::place_of;
using client::StreamObj;
using wire::Opcode;

namespace {

using enum wire::Space;  // beside kArraySpace

// One side of the copy as the job named it.
struct BoxSide {
  const texture::ArrayObj* array = nullptr;
  ArrayCopySide at;         // space is not set yet for memory
  client::Place memory;     // of what is no array
  uint64_t span_bytes = 0;  // from its first byte to its last
};

struct Given {
  CUmemorytype type;
  const void* host;
  CUdeviceptr device;
  CUarray array;
  size_t pitch, height, x, y, z;
};

// cuda.h, cuMemcpy3D: what the members mean, and which combinations are wrong.
int32_t resolve(const Given& g, const CUDA_MEMCPY3D& p, BoxSide* out) {
  if (g.type == CU_MEMORYTYPE_ARRAY) {
    out->array = texture::arrays().get(bits(g.array));
    if (!out->array) return kInvalidValue;
    const ArrayShape& s = out->array->shape;
    const uint32_t element = array_element_bytes(s.format, s.channels);
    if (g.x % element || p.WidthInBytes % element) return kInvalidValue;
    if (!array_holds(out->array->extent, g.x, g.y, g.z, p.WidthInBytes, p.Height, p.Depth)) return kInvalidValue;
    out->at.place = bits(g.array);
    out->at.x_bytes = static_cast<uint32_t>(g.x);
    out->at.y = static_cast<uint32_t>(g.y);
    out->at.z = static_cast<uint32_t>(g.z);
    out->at.space = kArraySpace;
    return kOk;
  }
  uint64_t first = g.type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(g.host) : g.device;
  if (g.type != CU_MEMORYTYPE_HOST && g.type != CU_MEMORYTYPE_DEVICE && g.type != CU_MEMORYTYPE_UNIFIED)
    return kInvalidValue;
  const uint64_t pitch = g.pitch ? g.pitch : p.WidthInBytes + g.x, rows = g.height ? g.height : p.Height + g.y;
  uint64_t skipped, span;
  if (pitch < g.x || pitch - g.x < p.WidthInBytes || rows < g.y || rows - g.y < p.Height) return kInvalidValue;
  if (__builtin_mul_overflow(g.z, rows, &skipped) || __builtin_add_overflow(skipped, g.y, &skipped) ||
      __builtin_mul_overflow(skipped, pitch, &skipped) || __builtin_add_overflow(skipped, g.x, &skipped) ||
      __builtin_mul_overflow(p.Depth - 1, rows, &span) || __builtin_add_overflow(span, p.Height - 1, &span) ||
      __builtin_mul_overflow(span, pitch, &span) || __builtin_add_overflow(span, p.WidthInBytes, &span))
    return kInvalidValue;
  if (first == 0 || __builtin_add_overflow(first, skipped, &first)) return kInvalidValue;
  out->memory = place_of(first);
  if (g.type == CU_MEMORYTYPE_DEVICE && out->memory.device < 0) return kInvalidValue;
  if (!memory::known(first, span)) return kInvalidValue;
  out->at.place = first;
  out->at.pitch = pitch;
  out->at.slice_rows = rows;
  out->span_bytes = span;
  return kOk;
}

int32_t post(DeviceState* d, StreamObj* s, const ArrayCopyArgs& args, uint32_t chunk_release, uint64_t* end) {
  wire::ARRAY_COPY_req req{};
  req.stream = VHandle{s->handle.load(std::memory_order_relaxed)};
  req.chunk_release = chunk_release;
  const int32_t rc = d->conn().post_bulk(Opcode::ARRAY_COPY, req, {&args, sizeof(args)}, end);
  if (rc == kOk) s->note(*end);
  return rc;
}

uint8_t* row_of(const ArrayCopySide& side, uint64_t z, uint64_t y, uint64_t x) {
  return reinterpret_cast<uint8_t*>(side.place + (z * side.slice_rows + y) * side.pitch + x);
}

// As many rows of a slice as fit a chunk travel packed; of a row that is longer, as many bytes. Columns stay whole
// elements: a chunk is a multiple of the largest.
static_assert(kChunkBytes % 16 == 0);
int32_t copy_staged(DeviceState* d, StreamObj* s, const ArrayCopyArgs& all, bool in, bool wait) {
  const ArrayCopySide& host = in ? all.src : all.dst;
  const uint64_t columns = std::min<uint64_t>(all.width_bytes, kChunkBytes), rows_at_once = kChunkBytes / columns;
  for (uint64_t z = 0; z < all.slices; ++z)
    for (uint64_t y = 0; y < all.rows; y += rows_at_once)
      for (uint64_t x = 0; x < all.width_bytes; x += columns) {
        const uint64_t width = std::min(columns, all.width_bytes - x), rows = std::min(rows_at_once, all.rows - y);
        int32_t rc = kOk;
        const uint32_t chunk = d->conn().take_chunk(&rc);
        if (chunk == kChunks) return rc;
        uint8_t* const stage = d->conn().chunk(chunk);
        ArrayCopyArgs part = all;
        part.width_bytes = width, part.rows = rows, part.slices = 1;
        ArrayCopySide& array = in ? part.dst : part.src;
        array.x_bytes += static_cast<uint32_t>(x);
        array.y += static_cast<uint32_t>(y);
        array.z += static_cast<uint32_t>(z);
        ArrayCopySide& staged = in ? part.src : part.dst;
        staged = {static_cast<uint64_t>(chunk) * kChunkBytes, width, rows, 0, 0, 0, kChunk, {}};
        uint64_t end = 0;
        if (in) {
          for (uint64_t r = 0; r < rows; ++r) memcpy(stage + r * width, row_of(host, z, y + r, x), width);
          rc = post(d, s, part, chunk + 1, &end);
          if (rc != kOk) d->conn().free_chunk(chunk);
        } else {
          rc = post(d, s, part, 0, &end);
          if (rc == kOk) rc = d->conn().wait(s->index, end);
          if (rc == kOk)
            for (uint64_t r = 0; r < rows; ++r) memcpy(row_of(host, z, y + r, x), stage + r * width, width);
          d->conn().free_chunk(chunk);
        }
        if (rc != kOk) return rc;
      }
  if (in) return wait ? d->wait_stream(*s) : kOk;
  d->flush_output();
  return d->conn().take_late_error();
}

int32_t refuse_between_gpus(int from, int to) {
  client::log(client::Level::kWarn,
              "a copy between an array of GPU %d and memory of GPU %d is refused: one server per GPU", from, to);
  return kNotSupported;
}

// Both sides, and the device that has the array. What is wrong is found here, before anything is sent.
struct Plan {
  BoxSide dst, src;
  DeviceState* holder = nullptr;
};
int32_t plan(const CUDA_MEMCPY3D& p, Plan* out) {
  BoxSide &dst = out->dst, &src = out->src;
  if (const int32_t rc = resolve(
          {p.dstMemoryType, p.dstHost, p.dstDevice, p.dstArray, p.dstPitch, p.dstHeight, p.dstXInBytes, p.dstY, p.dstZ},
          p, &dst);
      rc != kOk)
    return rc;
  if (const int32_t rc = resolve(
          {p.srcMemoryType, p.srcHost, p.srcDevice, p.srcArray, p.srcPitch, p.srcHeight, p.srcXInBytes, p.srcY, p.srcZ},
          p, &src);
      rc != kOk)
    return rc;
  out->holder = dst.array ? dst.array->device : src.array->device;
  const int gpu = out->holder->ordinal();
  if (dst.array && src.array) {
    if (src.array->device != out->holder) return refuse_between_gpus(src.array->device->ordinal(), gpu);
    const ArrayShape &to = dst.array->shape, &from = src.array->shape;
    // cuda.h, cuMemcpyAtoA: another format is fine, another size of the elements is not.
    if (array_element_bytes(to.format, to.channels) != array_element_bytes(from.format, from.channels))
      return kInvalidValue;
  }
  for (const BoxSide* side : {&dst, &src})
    if (const client::Place& m = side->memory; !side->array && m.device >= 0 && !m.pinned && m.device != gpu)
      return refuse_between_gpus(gpu, m.device);
  return kOk;
}

}  // namespace

int32_t check_copy(const CUDA_MEMCPY3D& p) {
  if (p.WidthInBytes == 0 || p.Height == 0 || p.Depth == 0) return kOk;
  Plan unused;
  return plan(p, &unused);
}

int32_t copy(DeviceState* d, StreamObj* s, const CUDA_MEMCPY3D& p, bool wait) {
  if (p.WidthInBytes == 0 || p.Height == 0 || p.Depth == 0) return d->conn().error();
  Plan made;
  if (const int32_t rc = plan(p, &made); rc != kOk) return rc;
  BoxSide &dst = made.dst, &src = made.src;
  DeviceState* const holder = made.holder;
  const int gpu = holder->ordinal();
  if (holder != d) {
    if (const int32_t rc = d->wait_stream(*s); rc != kOk) return rc;
    d = holder;
    s = d->legacy();
    wait = true;
  }
  ArrayCopyArgs args{dst.at, src.at, p.WidthInBytes, p.Height, p.Depth};
  for (const auto& [side, at] : {std::pair{&dst, &args.dst}, std::pair{&src, &args.src}}) {
    if (side->array) continue;
    const client::Place& m = side->memory;
    if (m.device != gpu) return copy_staged(d, s, args, side == &src, wait);  // pageable, or another GPU's window
    at->space = m.pinned ? kPinned : kDevice;
  }
  uint64_t end = 0;
  if (const int32_t rc = post(d, s, args, 0, &end); rc != kOk) return rc;
  return wait ? d->wait_stream(*s) : kOk;
}

// -- runs of bytes of one-dimensional arrays ------------------------------------------------------------------------

namespace {

// A side is an array and an offset into it, or an address.
struct End {
  CUmemorytype type;
  CUarray array;
  uint64_t at;
};
End in_array(CUarray array, size_t offset) { return {CU_MEMORYTYPE_ARRAY, array, offset}; }
End on_device(CUdeviceptr at) { return {CU_MEMORYTYPE_DEVICE, nullptr, at}; }
End on_host(const void* at) { return {CU_MEMORYTYPE_HOST, nullptr, reinterpret_cast<uint64_t>(at)}; }

CUresult plain_copy(End dst, End src, size_t bytes, CUDA_MEMCPY3D* out) {
  for (const End* end : {&dst, &src}) {
    if (end->type != CU_MEMORYTYPE_ARRAY) continue;
    const texture::ArrayObj* a = texture::arrays().get(bits(end->array));
    if (!a || a->shape.height != 0 || a->shape.depth != 0) return CUDA_ERROR_INVALID_VALUE;
  }
  CUDA_MEMCPY3D& p = *out = {};
  p.srcMemoryType = src.type;
  p.srcArray = src.array;
  p.dstMemoryType = dst.type;
  p.dstArray = dst.array;
  if (src.array)
    p.srcXInBytes = src.at;
  else
    p.srcHost = reinterpret_cast<const void*>(src.at), p.srcDevice = src.at;
  if (dst.array)
    p.dstXInBytes = dst.at;
  else
    p.dstHost = reinterpret_cast<void*>(dst.at), p.dstDevice = dst.at;
  p.WidthInBytes = bytes;
  p.Height = p.Depth = 1;
  return CUDA_SUCCESS;
}

CUresult copy_now(End dst, End src, size_t bytes) {
  CUDA_MEMCPY3D p;
  const CUresult rc = plain_copy(dst, src, bytes, &p);
  return rc == CUDA_SUCCESS ? copies::cuMemcpy3D_v2(&p) : rc;
}

// copy_3d: copies::cuMemcpy3DAsync_v2, or the same while some stream captures.
CUresult copy_async(decltype(&copies::cuMemcpy3DAsync_v2) copy_3d, End dst, End src, size_t bytes, CUstream stream) {
  CUDA_MEMCPY3D p;
  const CUresult rc = plain_copy(dst, src, bytes, &p);
  return rc == CUDA_SUCCESS ? copy_3d(&p, stream) : rc;
}

}  // namespace

CUresult cuMemcpyHtoA_v2(CUarray dst, size_t offset, const void* src, size_t bytes) {
  return copy_now(in_array(dst, offset), on_host(src), bytes);
}
CUresult cuMemcpyAtoH_v2(void* dst, CUarray src, size_t offset, size_t bytes) {
  return copy_now(on_host(dst), in_array(src, offset), bytes);
}
CUresult cuMemcpyHtoAAsync_v2(CUarray dst, size_t offset, const void* src, size_t bytes, CUstream stream) {
  return copy_async(copies::cuMemcpy3DAsync_v2, in_array(dst, offset), on_host(src), bytes, stream);
}
CUresult cuMemcpyAtoHAsync_v2(void* dst, CUarray src, size_t offset, size_t bytes, CUstream stream) {
  return copy_async(copies::cuMemcpy3DAsync_v2, on_host(dst), in_array(src, offset), bytes, stream);
}
CUresult captured::cuMemcpyHtoAAsync_v2(CUarray dst, size_t offset, const void* src, size_t bytes, CUstream stream) {
  return copy_async(copies::captured::cuMemcpy3DAsync_v2, in_array(dst, offset), on_host(src), bytes, stream);
}
CUresult captured::cuMemcpyAtoHAsync_v2(void* dst, CUarray src, size_t offset, size_t bytes, CUstream stream) {
  return copy_async(copies::captured::cuMemcpy3DAsync_v2, on_host(dst), in_array(src, offset), bytes, stream);
}
CUresult cuMemcpyDtoA_v2(CUarray dst, size_t offset, CUdeviceptr src, size_t bytes) {
  return copy_now(in_array(dst, offset), on_device(src), bytes);
}
CUresult cuMemcpyAtoD_v2(CUdeviceptr dst, CUarray src, size_t offset, size_t bytes) {
  return copy_now(on_device(dst), in_array(src, offset), bytes);
}
CUresult cuMemcpyAtoA_v2(CUarray dst, size_t dst_offset, CUarray src, size_t src_offset, size_t bytes) {
  return copy_now(in_array(dst, dst_offset), in_array(src, src_offset), bytes);
}

}  // namespace devproxy::sa::copies
