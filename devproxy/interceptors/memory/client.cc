// SPDX-License-Identifier: Apache-2.0
// Device memory and copies. The client's allocator chooses addresses and tells the server in ring order; a copy is a
// command on a stream between two places: device, pinned window, or a staging chunk for everything else.
#include "devproxy/interceptors/memory/client.h"
#include "devproxy/interceptors/memory/pool.h"

#include <string.h>

#include <algorithm>
#include <atomic>

#include "devproxy/csrc/client/variables.h"
#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/graph/hooks.h"
#include "devproxy/interceptors/hostmem/client.h"
#include "devproxy/interceptors/managed/client.h"

namespace devproxy::sa::memory {

using client::Allocation;
using client::DeviceState;
using client::Place;
using client::place_of;
using client::StreamObj;
using wire::Opcode;
using wire::Space;
using enum wire::Space;

namespace {

VHandle vhandle(const StreamObj* s) { return VHandle{s->handle.load(std::memory_order_relaxed)}; }

int32_t post_copy(DeviceState* d, StreamObj* s, uint64_t dst, Space dst_space, uint64_t src, Space src_space,
                  uint64_t bytes, uint32_t chunk_release, uint64_t* end) {
  const wire::COPY_req req{vhandle(s), dst, src, bytes, dst_space, src_space, 0, chunk_release};
  const int32_t rc = d->conn().post(Opcode::COPY, req, end);
  if (rc == kOk) s->note(*end);
  return rc;
}

}  // namespace

int32_t post_copy_2d(DeviceState* d, StreamObj* s, Region dst, Space dst_space, Region src, Space src_space,
                     uint64_t width, uint64_t height, uint32_t chunk_release, uint64_t* end) {
  const wire::COPY_2D_req req{vhandle(s), dst.addr,  src.addr,  dst.pitch, src.pitch,    width,
                              height,     dst_space, src_space, 0,         chunk_release};
  const int32_t rc = d->conn().post(Opcode::COPY_2D, req, end);
  if (rc == kOk) s->note(*end);
  return rc;
}

Space space_on(DeviceState* d, uint64_t addr) {
  const Place p = place_of(addr);
  if (p.device != d->ordinal()) return managed::is_managed(addr, p) ? kPinned : kChunk;
  return p.pinned ? kPinned : kDevice;
}

namespace {

// Pageable host -> device: through staging chunks, so the source is free when the call returns (cuda.h: "once the
// pageable buffer has been copied to the staging memory").
int32_t stage_in(DeviceState* d, StreamObj* s, uint64_t dst, Space space, const void* src, uint64_t bytes) {
  const auto* p = static_cast<const uint8_t*>(src);
  while (bytes) {
    const uint64_t n = std::min<uint64_t>(bytes, kChunkBytes);
    int32_t rc = kOk;
    const uint32_t chunk = d->conn().take_chunk(&rc);
    if (chunk == kChunks) return rc;
    memcpy(d->conn().chunk(chunk), p, n);
    uint64_t end;
    rc = post_copy(d, s, dst, space, chunk_offset(chunk), kChunk, n, chunk + 1, &end);
    if (rc != kOk) {
      d->conn().free_chunk(chunk);
      return rc;
    }
    dst += n;
    p += n;
    bytes -= n;
  }
  return kOk;
}

// Device -> pageable host: a few chunks in flight, so that the server copies the next while we empty the last.
int32_t stage_out(DeviceState* d, StreamObj* s, void* dst, uint64_t src, Space space, uint64_t bytes) {
  constexpr int kDepth = 4;
  struct Flight {
    uint32_t chunk;
    uint64_t end, bytes;
  } flights[kDepth];
  int head = 0, count = 0;
  auto* out = static_cast<uint8_t*>(dst);
  int32_t first = kOk;
  while (bytes || count) {
    while (bytes && count < kDepth && first == kOk) {
      const uint64_t n = std::min<uint64_t>(bytes, kChunkBytes);
      const uint32_t chunk = d->conn().take_chunk(&first);
      if (chunk == kChunks) break;
      Flight& f = flights[(head + count) % kDepth];
      f = {chunk, 0, n};
      first = post_copy(d, s, chunk_offset(chunk), kChunk, src, space, n, 0, &f.end);
      if (first != kOk) {
        d->conn().free_chunk(chunk);
        break;
      }
      src += n;
      bytes -= n;
      ++count;
    }
    if (count == 0) break;
    const Flight f = flights[head];
    const int32_t rc = d->conn().wait(s->index, f.end);
    if (first == kOk) first = rc;
    if (first == kOk) memcpy(out, d->conn().chunk(f.chunk), f.bytes);
    out += f.bytes;
    d->conn().free_chunk(f.chunk);
    head = (head + 1) % kDepth;
    --count;
    if (first != kOk) bytes = 0;
  }
  d->flush_output();
  if (first == kOk) first = d->conn().take_late_error();
  return first;
}

bool live(DeviceState* d, uint64_t addr, uint64_t bytes) {
  uint64_t base;
  Allocation a;
  while (d->find(addr, &base, &a)) {
    const uint64_t here = a.bytes - (addr - base);
    if (bytes <= here) return true;
    if (!a.piece) return false;
    addr += here;
    bytes -= here;
  }
  if (a.piece) return false;  // it began in pieces and ends beyond them
  if (d->find_pinned(addr, &base, &a)) return bytes <= a.bytes - (addr - base);
  client::Variable v;
  return client::find_variable(addr, &v) && bytes <= v.bytes - (addr - v.addr);
}

// An allocation, or a module's variable, around addr.
bool find_device(DeviceState* d, uint64_t addr, uint64_t* base, Allocation* out) {
  if (d->find(addr, base, out)) return true;
  client::Variable v;
  if (!client::find_variable(addr, &v)) return false;
  *base = v.addr;
  *out = Allocation{v.bytes, v.bytes, false, v.id, d->primary.load(), false, false};
  return true;
}

// A device-visible side (device memory or pinned) must be live; the driver answers INVALID_VALUE too.
bool valid_side(uint64_t addr, uint64_t bytes) {
  const Place p = place_of(addr);
  return p.device < 0 || live(client::device_state_if_attached(p.device), addr, bytes);
}

// The one copy under all the exports. `wait`: the call is synchronous towards the host.
int32_t copy(DeviceState* d, StreamObj* s, uint64_t dst, uint64_t src, uint64_t bytes, Direction direction, bool wait) {
  if (bytes == 0) return d->conn().error();
  const Place to = place_of(dst), from = place_of(src);
  if ((direction == kHtoD || direction == kDtoD) && (to.device < 0)) return kInvalidValue;
  if ((direction == kDtoH || direction == kDtoD) && (from.device < 0)) return kInvalidValue;
  if (!valid_side(dst, bytes) || !valid_side(src, bytes) || dst == 0 || src == 0) return kInvalidValue;
  const Space dst_space = space_on(d, dst), src_space = space_on(d, src);
  if (dst_space != kChunk && src_space != kChunk) {
    uint64_t end;
    if (const int32_t rc = post_copy(d, s, dst, dst_space, src, src_space, bytes, 0, &end); rc != kOk) return rc;
    return wait ? d->wait_stream(*s) : kOk;
  }
  // One side is pageable, or a pinned buffer of another GPU's; callers split copies between GPUs before.
  auto device_side = [](uint64_t addr, Space space, const Place& p) {
    return space == kDevice || (space == kPinned && managed::is_managed(addr, p));
  };
  if (device_side(dst, dst_space, to)) {
    if (const int32_t rc = stage_in(d, s, dst, dst_space, reinterpret_cast<const void*>(src), bytes); rc != kOk)
      return rc;
    // cuda.h lets a synchronous copy return once the source is staged; jobs rely on more: another stream may read.
    return wait ? d->wait_stream(*s) : kOk;
  }
  if (device_side(src, src_space, from)) return stage_out(d, s, reinterpret_cast<void*>(dst), src, src_space, bytes);
  // Host to host, in stream order.
  if (const int32_t rc = d->wait_stream(*s); rc != kOk) return rc;
  memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes);
  return kOk;
}

// Between two servers: out of one, into the other, by this thread, in the order of `s`.
int32_t copy_peer(DeviceState* dst_dev, uint64_t dst, DeviceState* src_dev, uint64_t src, uint64_t bytes, StreamObj* s,
                  DeviceState* s_dev) {
  if (bytes == 0) return kOk;
  if (!valid_side(dst, bytes) || !valid_side(src, bytes)) return kInvalidValue;
  // Everything earlier on the stream first; the other device's legacy stream carries its half.
  if (const int32_t rc = s_dev->wait_stream(*s); rc != kOk) return rc;
  StreamObj* out = s_dev == src_dev ? s : src_dev->legacy();
  StreamObj* in = s_dev == dst_dev ? s : dst_dev->legacy();
  std::vector<uint8_t> buffer(std::min<uint64_t>(bytes, 8u << 20));
  while (bytes) {
    const uint64_t n = std::min<uint64_t>(bytes, buffer.size());
    if (const int32_t rc = copy(src_dev, out, reinterpret_cast<uint64_t>(buffer.data()), src, n, kDtoH, true);
        rc != kOk)
      return rc;
    if (const int32_t rc = copy(dst_dev, in, dst, reinterpret_cast<uint64_t>(buffer.data()), n, kHtoD, true); rc != kOk)
      return rc;
    dst += n;
    src += n;
    bytes -= n;
  }
  return dst_dev->wait_stream(*in);
}

}  // namespace

// The stream's own device where it takes part, else the one that holds the memory.
int32_t dispatch_copy(DeviceState* d, StreamObj* s, uint64_t dst, uint64_t src, uint64_t bytes, Direction direction,
                      bool wait) {
  const Place to = place_of(dst), from = place_of(src);
  const bool dst_dev = to.device >= 0 && !to.pinned, src_dev = from.device >= 0 && !from.pinned;
  if (dst_dev && src_dev && to.device != from.device)
    return copy_peer(client::device_state_if_attached(to.device), dst, client::device_state_if_attached(from.device),
                     src, bytes, s, d);
  const int holder = dst_dev ? to.device : src_dev ? from.device : d->ordinal();
  if (holder != d->ordinal()) {
    if (const int32_t rc = d->wait_stream(*s); rc != kOk) return rc;
    DeviceState* other = client::device_state_if_attached(holder);
    return copy(other, other->legacy(), dst, src, bytes, direction, true);
  }
  return copy(d, s, dst, src, bytes, direction, wait);
}

namespace {

int32_t fill(DeviceState* d, StreamObj* s, uint64_t dst, uint64_t pitch, uint32_t value, uint32_t width, uint64_t count,
             uint64_t rows, bool wait) {
  if (count == 0 || rows == 0) return d->conn().error();
  if (dst % width || (rows > 1 && (pitch % width || pitch < count * width))) return kInvalidValue;
  if (count > kDeviceBytes || rows > kDeviceBytes || (rows > 1 && pitch > kDeviceBytes / rows)) return kInvalidValue;
  const uint64_t span = (rows - 1) * pitch + count * width;
  const Place p = place_of(dst);
  if (p.device < 0 || !live(client::device_state_if_attached(p.device), dst, span)) return kInvalidValue;
  const bool managed = managed::is_managed(dst, p);
  if (p.device != d->ordinal() && !managed) {
    if (const int32_t rc = d->wait_stream(*s); rc != kOk) return rc;
    d = client::device_state_if_attached(p.device);
    s = d->legacy();
    wait = true;
  }
  const wire::MEMSET_req req{vhandle(s), dst, pitch, count, rows, value, width};
  uint64_t end;
  if (const int32_t rc = d->conn().post(Opcode::MEMSET, req, &end); rc != kOk) return rc;
  s->note(end);
  // cuda.h: memset is asynchronous towards the host for device memory, synchronous for pinned host memory.
  return wait || (p.pinned && !managed) ? d->wait_stream(*s) : kOk;
}

}  // namespace

bool known(uint64_t addr, uint64_t bytes) { return valid_side(addr, bytes); }

bool copy_from_host_now(DeviceState* d, StreamObj* s, uint64_t dst, uint64_t src, uint64_t bytes, int32_t* done) {
  const Place from = place_of(src);
  const Space space = space_on(d, dst);
  if (from.device < 0 || !from.pinned || space == kChunk) return false;
  *done = stage_in(d, s, dst, space, reinterpret_cast<const void*>(src), bytes);
  return true;
}

// -- allocation -----------------------------------------------------------------------------------------------------

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  DP_CURRENT(d);
  uint64_t f = 0, t = 0;
  const int32_t rc = d->info(&f, &t);
  if (rc == kOk) {
    *free = f;
    *total = t;
  }
  return result(rc);
}

CUresult cuMemAlloc_v2(CUdeviceptr* dptr, size_t bytesize) {
  if (bytesize == 0) return CUDA_ERROR_INVALID_VALUE;
  DP_CURRENT(d);
  int32_t error = kOk;
  *dptr = d->allocate(bytesize, nullptr, &error);
  return result(error);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr* dptr, size_t* pPitch, size_t WidthInBytes, size_t Height,
                            unsigned int ElementSizeBytes) {
  if (WidthInBytes == 0 || Height == 0) return CUDA_ERROR_INVALID_VALUE;
  if (ElementSizeBytes != 4 && ElementSizeBytes != 8 && ElementSizeBytes != 16) return CUDA_ERROR_INVALID_VALUE;
  const size_t pitch = (WidthInBytes + 511) & ~static_cast<size_t>(511);
  if (pitch < WidthInBytes || pitch > kDeviceBytes / Height) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUresult rc = memory::cuMemAlloc_v2(dptr, pitch * Height);
  if (rc == CUDA_SUCCESS) *pPitch = pitch;
  return rc;
}

CUresult cuMemFree_v2(CUdeviceptr dptr) {
  if (dptr == 0) return CUDA_SUCCESS;
  const Place p = place_of(dptr);
  if (p.device < 0) return CUDA_ERROR_INVALID_VALUE;
  if (p.pinned) return result(managed::free(dptr));
  DeviceState* d = client::device_state_if_attached(p.device);
  uint64_t base;
  Allocation a;
  if (!d->find(dptr, &base, &a) || base != dptr || a.piece) return CUDA_ERROR_INVALID_VALUE;
  const auto graphs = graph::has_memory() ? graph::memory_state(dptr) : graph::MemoryState::kNone;
  if (graphs == graph::MemoryState::kIdle) return CUDA_ERROR_INVALID_VALUE;
  // As the driver does: the range may be in use by any stream until all have come this far.
  if (const int32_t rc = d->wait_all(); rc != kOk) return result(rc);
  if (graphs != graph::MemoryState::kNone) return graph::free_memory(dptr, nullptr);
  pool_lost(dptr);
  return result(d->free(dptr, nullptr));
}

CUresult captured::cuMemFree_v2(CUdeviceptr dptr) {
  CUresult rc = CUDA_SUCCESS;
  return dptr && graph::refuse_unsafe(&rc) ? rc : memory::cuMemFree_v2(dptr);  // 0 has nothing to wait for
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr) {
  const Place p = place_of(dptr);
  if (p.device < 0) return CUDA_ERROR_NOT_FOUND;
  DeviceState* d = client::device_state_if_attached(p.device);
  uint64_t base;
  Allocation a;
  if (!(p.pinned ? d->find_pinned(dptr, &base, &a) : find_device(d, dptr, &base, &a))) return CUDA_ERROR_NOT_FOUND;
  if (pbase) *pbase = base;
  if (psize) *psize = a.wanted;
  return CUDA_SUCCESS;
}

namespace {
// pool 0: the one that is current on the stream's device. capturing: some stream of the process captures.
CUresult alloc_async(CUdeviceptr* dptr, size_t bytesize, uint64_t pool, CUstream hStream, bool capturing = false) {
  DP_STREAM(hStream, s, d);
  if (pool == 0) pool = current_pool(d->ordinal());
  int device = -1;
  if (!pool_device(pool, &device)) return CUDA_ERROR_INVALID_VALUE;
  if (device != d->ordinal()) {
    client::log(client::Level::kWarn,
                "cuMemAllocFromPoolAsync is refused for a pool of GPU %d in a stream of GPU %d: one server per GPU",
                device, d->ordinal());
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (bytesize == 0) {
    *dptr = 0;
    return CUDA_SUCCESS;
  }
  if (capturing) {
    CUresult rc = CUDA_SUCCESS;
    if (graph::capture_alloc(s, d, dptr, bytesize, &rc)) return rc;
  }
  int32_t error = kOk;
  *dptr = d->allocate(bytesize, s, &error);
  if (error == kOk) pool_took(pool, *dptr, bytesize);
  return result(error);
}
}  // namespace

CUresult cuMemAllocAsync(CUdeviceptr* dptr, size_t bytesize, CUstream hStream) {
  return alloc_async(dptr, bytesize, 0, hStream);
}
CUresult captured::cuMemAllocAsync(CUdeviceptr* dptr, size_t bytesize, CUstream hStream) {
  return alloc_async(dptr, bytesize, 0, hStream, true);
}

CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
  if (dptr == 0) return CUDA_SUCCESS;
  DP_STREAM(hStream, s, d);
  const Place p = place_of(dptr);
  if (p.device < 0 || p.pinned) return CUDA_ERROR_INVALID_VALUE;
  if (p.device != d->ordinal()) {
    if (const int32_t rc = d->wait_stream(*s); rc != kOk) return result(rc);
    return memory::cuMemFree_v2(dptr);
  }
  if (graph::has_memory() && graph::memory_state(dptr) != graph::MemoryState::kNone) return graph::free_memory(dptr, s);
  const uint64_t may_hold = pool_lost(dptr);
  return result(d->free(dptr, s, may_hold));
}

CUresult captured::cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
  if (dptr == 0) return CUDA_SUCCESS;
  DP_STREAM(hStream, s, d);
  CUresult rc = CUDA_SUCCESS;
  if (graph::capture_free(s, dptr, &rc)) return rc;
  // Memory of another device is freed as by cuMemFree.
  const Place p = place_of(dptr);
  if (p.device >= 0 && !p.pinned && p.device != d->ordinal() && graph::refuse_unsafe(&rc)) return rc;
  return memory::cuMemFreeAsync(dptr, hStream);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) {
  return alloc_async(dptr, bytesize, bits(pool), hStream);
}
CUresult captured::cuMemAllocFromPoolAsync(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) {
  return alloc_async(dptr, bytesize, bits(pool), hStream, true);
}

// -- copies ---------------------------------------------------------------------------------------------------------

namespace {
CUresult copy_now(uint64_t dst, uint64_t src, size_t bytes, Direction direction) {
  DP_STREAM(CUstream{nullptr}, s, d);
  // A synchronous copy is a legacy-stream copy: all earlier work of blocking streams comes first, which the server's
  // stream rule keeps; towards the host only D2H and pinned copies must be waited for (cuda.h, API synchronization).
  return result(dispatch_copy(d, s, dst, src, bytes, direction, true));
}
// A run of bytes as a node of a graph holds it.
CUDA_MEMCPY3D copy_1d(uint64_t dst, uint64_t src, size_t bytes, Direction direction) {
  CUDA_MEMCPY3D p{};
  p.srcMemoryType = direction == kHtoD  ? CU_MEMORYTYPE_HOST
                    : direction == kAny ? CU_MEMORYTYPE_UNIFIED
                                        : CU_MEMORYTYPE_DEVICE;
  p.dstMemoryType = direction == kDtoH  ? CU_MEMORYTYPE_HOST
                    : direction == kAny ? CU_MEMORYTYPE_UNIFIED
                                        : CU_MEMORYTYPE_DEVICE;
  if (direction == kHtoD)
    p.srcHost = reinterpret_cast<const void*>(src);
  else
    p.srcDevice = src;
  if (direction == kDtoH)
    p.dstHost = reinterpret_cast<void*>(dst);
  else
    p.dstDevice = dst;
  p.WidthInBytes = bytes;
  p.Height = p.Depth = 1;
  return p;
}
CUresult copy_async(uint64_t dst, uint64_t src, size_t bytes, Direction direction, CUstream hStream) {
  DP_STREAM(hStream, s, d);
  return result(dispatch_copy(d, s, dst, src, bytes, direction, false));
}
CUresult copy_captured(uint64_t dst, uint64_t src, size_t bytes, Direction direction, CUstream hStream) {
  DP_STREAM(hStream, s, d);
  CUresult rc = CUDA_SUCCESS;
  return graph::capture_copy(s, copy_1d(dst, src, bytes, direction), &rc)
             ? rc
             : copy_async(dst, src, bytes, direction, hStream);
}
CUresult check_contexts(CUcontext dst, CUcontext src) {
  return client::contexts().get(bits(dst)) && client::contexts().get(bits(src)) ? CUDA_SUCCESS
                                                                                : CUDA_ERROR_INVALID_CONTEXT;
}
uint64_t address(const void* p) { return reinterpret_cast<uint64_t>(p); }
}  // namespace

CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t n) { return copy_now(dst, src, n, kAny); }
CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void* src, size_t n) { return copy_now(dst, address(src), n, kHtoD); }
CUresult cuMemcpyDtoH_v2(void* dst, CUdeviceptr src, size_t n) { return copy_now(address(dst), src, n, kDtoH); }
CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t n) { return copy_now(dst, src, n, kDtoD); }
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream st) {
  return copy_async(dst, src, n, kAny, st);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t n, CUstream st) {
  return copy_async(dst, address(src), n, kHtoD, st);
}
CUresult cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t n, CUstream st) {
  return copy_async(address(dst), src, n, kDtoH, st);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream st) {
  return copy_async(dst, src, n, kDtoD, st);
}
CUresult cuMemcpyPeer(CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t n) {
  const CUresult rc = check_contexts(dstContext, srcContext);
  return rc == CUDA_SUCCESS ? copy_now(dst, src, n, kDtoD) : rc;
}
CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t n,
                           CUstream st) {
  const CUresult rc = check_contexts(dstContext, srcContext);
  return rc == CUDA_SUCCESS ? copy_async(dst, src, n, kDtoD, st) : rc;
}

CUresult captured::cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream st) {
  return copy_captured(dst, src, n, kAny, st);
}
CUresult captured::cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t n, CUstream st) {
  return copy_captured(dst, address(src), n, kHtoD, st);
}
CUresult captured::cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t n, CUstream st) {
  return copy_captured(address(dst), src, n, kDtoH, st);
}
CUresult captured::cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream st) {
  return copy_captured(dst, src, n, kDtoD, st);
}
CUresult captured::cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext,
                                     size_t n, CUstream st) {
  const CUresult rc = check_contexts(dstContext, srcContext);
  return rc == CUDA_SUCCESS ? copy_captured(dst, src, n, kDtoD, st) : rc;
}

// -- memset ---------------------------------------------------------------------------------------------------------

namespace {
// Whether anybody has set SYNC_MEMOPS of any memory. Only then must_wait() looks for the allocation, under a lock.
std::atomic<bool> some_memory_waits{false};

// cuda.h, API synchronization: a synchronous set of device memory waits only if an attribute of the memory
// (CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) or a flag of the context (CU_CTX_SYNC_MEMOPS) says so. Synchronous copies always wait.
bool must_wait(uint64_t dst) {
  client::ContextObj* c = client::contexts().get(client::current_context());
  if (c && client::context_flags(*c) & CU_CTX_SYNC_MEMOPS) return true;
  if (!some_memory_waits.load(std::memory_order_relaxed)) return false;
  const Place p = place_of(dst);
  DeviceState* d = p.device >= 0 ? client::device_state_if_attached(p.device) : nullptr;
  uint64_t base = 0;
  Allocation a;
  return d && (p.pinned ? d->find_pinned(dst, &base, &a) : d->find(dst, &base, &a)) && a.sync_memops;
}

CUresult set(CUdeviceptr dst, size_t pitch, uint32_t value, uint32_t width, size_t count, size_t rows, CUstream hStream,
             bool now = false) {
  DP_STREAM(hStream, s, d);
  return result(fill(d, s, dst, pitch, value, width, count, rows, now && must_wait(dst)));
}
CUresult set_captured(CUdeviceptr dst, size_t pitch, uint32_t value, uint32_t width, size_t count, size_t rows,
                      CUstream hStream, bool now = false) {
  DP_STREAM(hStream, s, d);
  CUresult rc = CUDA_SUCCESS;
  return graph::capture_memset(s, {dst, pitch, value, width, count, rows}, &rc)
             ? rc
             : set(dst, pitch, value, width, count, rows, hStream, now);
}
}  // namespace

CUresult cuMemsetD8_v2(CUdeviceptr p, unsigned char v, size_t n) { return set(p, 0, v, 1, n, 1, nullptr, true); }
CUresult cuMemsetD16_v2(CUdeviceptr p, unsigned short v, size_t n) { return set(p, 0, v, 2, n, 1, nullptr, true); }
CUresult cuMemsetD32_v2(CUdeviceptr p, unsigned int v, size_t n) { return set(p, 0, v, 4, n, 1, nullptr, true); }
CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream s) { return set(p, 0, v, 1, n, 1, s); }
CUresult cuMemsetD16Async(CUdeviceptr p, unsigned short v, size_t n, CUstream s) { return set(p, 0, v, 2, n, 1, s); }
CUresult cuMemsetD32Async(CUdeviceptr p, unsigned int v, size_t n, CUstream s) { return set(p, 0, v, 4, n, 1, s); }
CUresult cuMemsetD2D8_v2(CUdeviceptr p, size_t pitch, unsigned char v, size_t w, size_t h) {
  return set(p, pitch, v, 1, w, h, nullptr, true);
}
CUresult cuMemsetD2D16_v2(CUdeviceptr p, size_t pitch, unsigned short v, size_t w, size_t h) {
  return set(p, pitch, v, 2, w, h, nullptr, true);
}
CUresult cuMemsetD2D32_v2(CUdeviceptr p, size_t pitch, unsigned int v, size_t w, size_t h) {
  return set(p, pitch, v, 4, w, h, nullptr, true);
}
CUresult cuMemsetD2D8Async(CUdeviceptr p, size_t pitch, unsigned char v, size_t w, size_t h, CUstream s) {
  return set(p, pitch, v, 1, w, h, s);
}
CUresult cuMemsetD2D16Async(CUdeviceptr p, size_t pitch, unsigned short v, size_t w, size_t h, CUstream s) {
  return set(p, pitch, v, 2, w, h, s);
}
CUresult cuMemsetD2D32Async(CUdeviceptr p, size_t pitch, unsigned int v, size_t w, size_t h, CUstream s) {
  return set(p, pitch, v, 4, w, h, s);
}

namespace captured {
CUresult cuMemsetD8_v2(CUdeviceptr p, unsigned char v, size_t n) { return set_captured(p, 0, v, 1, n, 1, {}, true); }
CUresult cuMemsetD16_v2(CUdeviceptr p, unsigned short v, size_t n) { return set_captured(p, 0, v, 2, n, 1, {}, true); }
CUresult cuMemsetD32_v2(CUdeviceptr p, unsigned int v, size_t n) { return set_captured(p, 0, v, 4, n, 1, {}, true); }
CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream s) {
  return set_captured(p, 0, v, 1, n, 1, s);
}
CUresult cuMemsetD16Async(CUdeviceptr p, unsigned short v, size_t n, CUstream s) {
  return set_captured(p, 0, v, 2, n, 1, s);
}
CUresult cuMemsetD32Async(CUdeviceptr p, unsigned int v, size_t n, CUstream s) {
  return set_captured(p, 0, v, 4, n, 1, s);
}
CUresult cuMemsetD2D8_v2(CUdeviceptr p, size_t pitch, unsigned char v, size_t w, size_t h) {
  return set_captured(p, pitch, v, 1, w, h, {}, true);
}
CUresult cuMemsetD2D16_v2(CUdeviceptr p, size_t pitch, unsigned short v, size_t w, size_t h) {
  return set_captured(p, pitch, v, 2, w, h, {}, true);
}
CUresult cuMemsetD2D32_v2(CUdeviceptr p, size_t pitch, unsigned int v, size_t w, size_t h) {
  return set_captured(p, pitch, v, 4, w, h, {}, true);
}
CUresult cuMemsetD2D8Async(CUdeviceptr p, size_t pitch, unsigned char v, size_t w, size_t h, CUstream s) {
  return set_captured(p, pitch, v, 1, w, h, s);
}
CUresult cuMemsetD2D16Async(CUdeviceptr p, size_t pitch, unsigned short v, size_t w, size_t h, CUstream s) {
  return set_captured(p, pitch, v, 2, w, h, s);
}
CUresult cuMemsetD2D32Async(CUdeviceptr p, size_t pitch, unsigned int v, size_t w, size_t h, CUstream s) {
  return set_captured(p, pitch, v, 4, w, h, s);
}
}  // namespace captured

// -- pointer attributes ---------------------------------------------------------------------------------------------

namespace {

// What one attribute of a pointer is; INVALID_VALUE where the pointer is not ours, as the driver answers.
CUresult attribute(void* data, CUpointer_attribute attr, uint64_t ptr) {
  const Place p = place_of(ptr);
  DeviceState* d = p.device >= 0 ? client::device_state_if_attached(p.device) : nullptr;
  uint64_t base = 0;
  Allocation a;
  const bool found = d && (p.pinned ? d->find_pinned(ptr, &base, &a) : find_device(d, ptr, &base, &a));
  if (!found && !hostmem::is_registered(ptr)) return CUDA_ERROR_INVALID_VALUE;
  const bool managed = a.advice != nullptr;  // on both sides: device memory that the host may touch
  switch (attr) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(data) = handle<CUcontext>(d ? d->primary.load() : client::current_context());
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(data) = found && (!p.pinned || managed) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      if (!found || (p.pinned && !d->conn().props().attributes[CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY]))
        return CUDA_ERROR_INVALID_VALUE;
      *static_cast<CUdeviceptr*>(data) = ptr;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (found && !p.pinned) return CUDA_ERROR_INVALID_VALUE;
      *static_cast<void**>(data) = reinterpret_cast<void*>(ptr);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<bool*>(data) = managed; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = p.device >= 0 ? p.device : 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      if (!found) return CUDA_ERROR_INVALID_VALUE;
      *static_cast<CUdeviceptr*>(data) = base;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      if (!found) return CUDA_ERROR_INVALID_VALUE;
      *static_cast<size_t*>(data) = a.wanted;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED: *static_cast<bool*>(data) = found; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      if (!found) return CUDA_ERROR_INVALID_VALUE;
      *static_cast<unsigned long long*>(data) = a.id;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *static_cast<bool*>(data) = a.sync_memops; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *static_cast<bool*>(data) = false; return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

// cuda.h, cuPointerGetAttributes: attributes of an unknown pointer come back as zeroes instead of an error.
void zero_attribute(void* data, CUpointer_attribute attr) {
  switch (attr) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned*>(data) = 0; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *static_cast<bool*>(data) = false; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = -2;  // as the driver leaves it for memory it does not know
      break;
    default: *static_cast<uint64_t*>(data) = 0;
  }
}

}  // namespace

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attr, CUdeviceptr ptr) {
  return attribute(data, attr, ptr);
}

CUresult cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute* attributes, void** data,
                                CUdeviceptr ptr) {
  for (unsigned i = 0; i < numAttributes; ++i) {
    const CUresult rc = attribute(data[i], attributes[i], ptr);
    if (rc == CUDA_ERROR_NOT_SUPPORTED) return rc;
    if (rc != CUDA_SUCCESS) zero_attribute(data[i], attributes[i]);
  }
  return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute, CUdeviceptr ptr) {
  if (attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
  const Place p = place_of(ptr);
  DeviceState* d = p.device >= 0 ? client::device_state_if_attached(p.device) : nullptr;
  if (!d) return CUDA_ERROR_INVALID_VALUE;
  const bool on = *static_cast<const unsigned*>(value) != 0;
  if (on) some_memory_waits.store(true, std::memory_order_relaxed);
  if (!d->set_sync_memops(ptr, on)) return CUDA_ERROR_INVALID_VALUE;
  if (!on) return CUDA_SUCCESS;
  // cuda.h: pending synchronous operations have completed when this returns. They are in the default streams.
  if (const int32_t rc = d->wait_stream(*d->legacy()); rc != kOk) return result(rc);
  const uint64_t own = client::t_state.default_stream[d->ordinal()];
  return own ? result(d->wait_stream(*d->stream_at(static_cast<uint16_t>(own)))) : CUDA_SUCCESS;
}

// Switching it off waits for nothing.
CUresult captured::cuPointerSetAttribute(const void* value, CUpointer_attribute attribute, CUdeviceptr ptr) {
  const bool waits = attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS && *static_cast<const unsigned*>(value) != 0;
  CUresult rc = CUDA_SUCCESS;
  return waits && graph::refuse_unsafe(&rc) ? rc : memory::cuPointerSetAttribute(value, attribute, ptr);
}

}  // namespace devproxy::sa::memory
