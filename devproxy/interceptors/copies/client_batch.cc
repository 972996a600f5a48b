// SPDX-License-Identifier: Apache-2.0
// Copies in batches. cuda.h: the copies of a batch have no order among themselves, and the batch as a whole has the
// stream's. Here they are the stream's copies, one after the other, which is one of the orders that are allowed; all
// arguments are checked before the first is sent. In a capture each becomes a node.
#include <stdint.h>

#include <vector>

#include "devproxy/interceptors/copies/client.h"
#include "devproxy/interceptors/memory/client.h"
#include "devproxy/interceptors/texture/client.h"

namespace devproxy::sa::copies {

using client::DeviceState;
using client::place_of;
using client::StreamObj;

namespace {

// cuda.h: where an error is of no copy.
constexpr size_t kNoCopy = SIZE_MAX;

CUresult fail(size_t* index_out, size_t index, CUresult rc) {
  if (index_out) *index_out = index;
  return rc;
}

bool valid_order(CUmemcpySrcAccessOrder order, unsigned flags) {
  return (order == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL ||
          order == CU_MEMCPY_SRC_ACCESS_ORDER_ANY) &&
         (flags & ~static_cast<unsigned>(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)) == 0;
}

// Sources that must have been read when the call returns (DURING_API_CALL). Pageable memory always has been; what a
// device reads by itself has been when the stream has come so far.
class Ephemeral {
 public:
  // A captured copy reads at the launch, so such a source cannot be.
  CUresult begin(const StreamObj* s, bool any) const {
    if (!any || s->capture.load(std::memory_order_relaxed) == 0) return CUDA_SUCCESS;
    client::log(client::Level::kWarn,
                "a batch of copies in a capture is refused where a source is to be read during the call: a graph reads "
                "it at its launch; use CU_MEMCPY_SRC_ACCESS_ORDER_STREAM");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  void note(uint64_t src) { wait_ = wait_ || place_of(src).device >= 0; }
  void note_array() { wait_ = true; }
  CUresult end(DeviceState* d, StreamObj* s) const { return wait_ ? result(d->wait_stream(*s)) : CUDA_SUCCESS; }

 private:
  bool wait_ = false;
};

// copy: memory::cuMemcpyAsync, or the same while some stream captures.
CUresult batch(decltype(&memory::cuMemcpyAsync) copy, const CUdeviceptr* dsts, const CUdeviceptr* srcs,
               const size_t* sizes, size_t count, const CUmemcpyAttributes* attrs, const size_t* firsts, size_t n_attrs,
               size_t* index_out, CUstream hStream) {
  StreamObj* s = nullptr;
  DeviceState* d = nullptr;
  if (const int32_t rc = client::resolve_stream(bits(hStream), &s, &d); rc != kOk)
    return fail(index_out, kNoCopy, result(rc));
  // cuda.h: the stream must not be the legacy one; the first set begins with the first copy, and no set is empty.
  if (s->index == 0 || count == 0 || n_attrs == 0 || n_attrs > count || firsts[0] != 0)
    return fail(index_out, kNoCopy, CUDA_ERROR_INVALID_VALUE);
  std::vector<bool> during(count);
  bool any_during = false;
  for (size_t k = 0; k < n_attrs; ++k) {
    const size_t end = k + 1 < n_attrs ? firsts[k + 1] : count;
    if (end <= firsts[k] || end > count) return fail(index_out, kNoCopy, CUDA_ERROR_INVALID_VALUE);
    if (!valid_order(attrs[k].srcAccessOrder, attrs[k].flags))
      return fail(index_out, firsts[k], CUDA_ERROR_INVALID_VALUE);
    if (attrs[k].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL) continue;
    any_during = true;
    for (size_t i = firsts[k]; i < end; ++i) during[i] = true;
  }
  for (size_t i = 0; i < count; ++i)
    if (sizes[i] &&
        (dsts[i] == 0 || srcs[i] == 0 || !memory::known(dsts[i], sizes[i]) || !memory::known(srcs[i], sizes[i])))
      return fail(index_out, i, CUDA_ERROR_INVALID_VALUE);
  Ephemeral ephemeral;
  if (const CUresult rc = ephemeral.begin(s, any_during); rc != CUDA_SUCCESS) return fail(index_out, kNoCopy, rc);

  for (size_t i = 0; i < count; ++i) {
    if (sizes[i] == 0) continue;
    int32_t done = kOk;
    // The host's own bytes can be taken now, whatever the stream waits for.
    if (during[i] && memory::copy_from_host_now(d, s, dsts[i], srcs[i], sizes[i], &done)) {
      if (done != kOk) return fail(index_out, i, result(done));
      continue;
    }
    if (const CUresult rc = copy(dsts[i], srcs[i], sizes[i], hStream); rc != CUDA_SUCCESS)
      return fail(index_out, i, rc);
    if (during[i]) ephemeral.note(srcs[i]);
  }
  const CUresult rc = ephemeral.end(d, s);
  return rc == CUDA_SUCCESS ? rc : fail(index_out, kNoCopy, rc);
}

// One side of a copy in bytes, as cuMemcpy3D has it. False where it is none.
struct Operand {
  CUmemorytype type = CU_MEMORYTYPE_UNIFIED;
  CUdeviceptr at = 0;
  CUarray array = nullptr;
  size_t pitch = 0, height = 0, x = 0, y = 0, z = 0;
};

bool operand(const CUmemcpy3DOperand& o, const CUextent3D& extent, size_t element, Operand* out) {
  if (o.type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
    const auto& a = o.op.array;
    out->type = CU_MEMORYTYPE_ARRAY;
    out->array = a.array;
    out->y = a.offset.y, out->z = a.offset.z;
    return !__builtin_mul_overflow(a.offset.x, element, &out->x);
  }
  const auto& p = o.op.ptr;
  // cuda.h: 0 is packed; else no row and no layer is shorter than the copy's.
  if ((p.rowLength && p.rowLength < extent.width) || (p.layerHeight && p.layerHeight < extent.height)) return false;
  out->at = p.ptr;
  out->height = p.layerHeight ? p.layerHeight : extent.height;
  return p.ptr != 0 && !__builtin_mul_overflow(p.rowLength ? p.rowLength : extent.width, element, &out->pitch);
}

// 0 where the operand names no array.
size_t element_bytes(const CUmemcpy3DOperand& o) {
  const texture::ArrayObj* a = texture::arrays().get(bits(o.op.array.array));
  return a ? array_element_bytes(a->shape.format, a->shape.channels) : 0;
}

// cuda.h, CUDA_MEMCPY3D_BATCH_OP: sizes are in elements, of the array where there is one.
bool describe(const CUDA_MEMCPY3D_BATCH_OP& op, CUDA_MEMCPY3D* out) {
  if (!valid_order(op.srcAccessOrder, op.flags)) return false;
  if (op.extent.width == 0 || op.extent.height == 0 || op.extent.depth == 0) return false;
  size_t element = 0;
  for (const CUmemcpy3DOperand* o : {&op.src, &op.dst}) {
    if (o->type == CU_MEMCPY_OPERAND_TYPE_POINTER) continue;
    if (o->type != CU_MEMCPY_OPERAND_TYPE_ARRAY) return false;
    const size_t bytes = element_bytes(*o);
    if (bytes == 0 || (element && bytes != element)) return false;
    element = bytes;
  }
  if (element == 0) element = 1;
  Operand src, dst;
  *out = {};
  if (!operand(op.src, op.extent, element, &src) || !operand(op.dst, op.extent, element, &dst) ||
      __builtin_mul_overflow(op.extent.width, element, &out->WidthInBytes))
    return false;
  out->Height = op.extent.height, out->Depth = op.extent.depth;
  out->srcMemoryType = src.type, out->srcDevice = src.at, out->srcArray = src.array, out->srcPitch = src.pitch;
  out->srcHeight = src.height, out->srcXInBytes = src.x, out->srcY = src.y, out->srcZ = src.z;
  out->dstMemoryType = dst.type, out->dstDevice = dst.at, out->dstArray = dst.array, out->dstPitch = dst.pitch;
  out->dstHeight = dst.height, out->dstXInBytes = dst.x, out->dstY = dst.y, out->dstZ = dst.z;
  return true;
}

using Copy3D = decltype(&copies::cuMemcpy3DAsync_v2);

CUresult batch_3d(Copy3D copy_3d, size_t count, const CUDA_MEMCPY3D_BATCH_OP* ops, unsigned long long flags,
                  size_t* index_out, CUstream hStream) {
  StreamObj* s = nullptr;
  DeviceState* d = nullptr;
  if (const int32_t rc = client::resolve_stream(bits(hStream), &s, &d); rc != kOk)
    return fail(index_out, kNoCopy, result(rc));
  if (s->index == 0 || count == 0 || flags != 0) return fail(index_out, kNoCopy, CUDA_ERROR_INVALID_VALUE);
  std::vector<CUDA_MEMCPY3D> copies;
  bool any_during = false;
  for (size_t i = 0; i < count; ++i) {
    CUDA_MEMCPY3D copy;
    if (!describe(ops[i], &copy)) return fail(index_out, i, CUDA_ERROR_INVALID_VALUE);
    if (const int32_t rc = check_3d(copy); rc != kOk) return fail(index_out, i, result(rc));
    any_during = any_during || ops[i].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    copies.push_back(copy);
  }
  Ephemeral ephemeral;
  if (const CUresult rc = ephemeral.begin(s, any_during); rc != CUDA_SUCCESS) return fail(index_out, kNoCopy, rc);
  for (size_t i = 0; i < count; ++i) {
    if (const CUresult rc = copy_3d(&copies[i], hStream); rc != CUDA_SUCCESS) return fail(index_out, i, rc);
    if (ops[i].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL) continue;
    if (ops[i].src.type == CU_MEMCPY_OPERAND_TYPE_ARRAY)
      ephemeral.note_array();
    else
      ephemeral.note(copies[i].srcDevice);
  }
  const CUresult rc = ephemeral.end(d, s);
  return rc == CUDA_SUCCESS ? rc : fail(index_out, kNoCopy, rc);
}

}  // namespace

CUresult cuMemcpyBatchAsync(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                            CUmemcpyAttributes* attrs, size_t* attrsIdxs, size_t numAttrs, size_t* failIdx,
                            CUstream hStream) {
  return batch(memory::cuMemcpyAsync, dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream);
}
CUresult captured::cuMemcpyBatchAsync(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                                      CUmemcpyAttributes* attrs, size_t* attrsIdxs, size_t numAttrs, size_t* failIdx,
                                      CUstream hStream) {
  return batch(memory::captured::cuMemcpyAsync, dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream);
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                               CUmemcpyAttributes* attrs, size_t* attrsIdxs, size_t numAttrs, CUstream hStream) {
  return batch(memory::cuMemcpyAsync, dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, nullptr, hStream);
}
CUresult captured::cuMemcpyBatchAsync_v2(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                                         CUmemcpyAttributes* attrs, size_t* attrsIdxs, size_t numAttrs,
                                         CUstream hStream) {
  return batch(memory::captured::cuMemcpyAsync, dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, nullptr, hStream);
}

CUresult cuMemcpy3DBatchAsync(size_t numOps, CUDA_MEMCPY3D_BATCH_OP* opList, size_t* failIdx, unsigned long long flags,
                              CUstream hStream) {
  return batch_3d(copies::cuMemcpy3DAsync_v2, numOps, opList, flags, failIdx, hStream);
}
CUresult captured::cuMemcpy3DBatchAsync(size_t numOps, CUDA_MEMCPY3D_BATCH_OP* opList, size_t* failIdx,
                                        unsigned long long flags, CUstream hStream) {
  return batch_3d(captured::cuMemcpy3DAsync_v2, numOps, opList, flags, failIdx, hStream);
}

CUresult cuMemcpy3DBatchAsync_v2(size_t numOps, CUDA_MEMCPY3D_BATCH_OP* opList, unsigned long long flags,
                                 CUstream hStream) {
  return batch_3d(copies::cuMemcpy3DAsync_v2, numOps, opList, flags, nullptr, hStream);
}
CUresult captured::cuMemcpy3DBatchAsync_v2(size_t numOps, CUDA_MEMCPY3D_BATCH_OP* opList, unsigned long long flags,
                                           CUstream hStream) {
  return batch_3d(captured::cuMemcpy3DAsync_v2, numOps, opList, flags, nullptr, hStream);
}

// -- between contexts -----------------------------------------------------------------------------------------------

namespace {
CUresult plain_copy(const CUDA_MEMCPY3D_PEER* p, CUDA_MEMCPY3D* out) {
  // cuda.h: the context of an array is its own.
  if ((p->srcMemoryType != CU_MEMORYTYPE_ARRAY && !client::contexts().get(bits(p->srcContext))) ||
      (p->dstMemoryType != CU_MEMORYTYPE_ARRAY && !client::contexts().get(bits(p->dstContext))))
    return CUDA_ERROR_INVALID_CONTEXT;
  // An address says by itself on which device it lies.
  CUDA_MEMCPY3D& c = *out = {};
  c.srcXInBytes = p->srcXInBytes, c.srcY = p->srcY, c.srcZ = p->srcZ, c.srcLOD = p->srcLOD;
  c.srcMemoryType = p->srcMemoryType, c.srcHost = p->srcHost, c.srcDevice = p->srcDevice, c.srcArray = p->srcArray;
  c.srcPitch = p->srcPitch, c.srcHeight = p->srcHeight;
  c.dstXInBytes = p->dstXInBytes, c.dstY = p->dstY, c.dstZ = p->dstZ, c.dstLOD = p->dstLOD;
  c.dstMemoryType = p->dstMemoryType, c.dstHost = p->dstHost, c.dstDevice = p->dstDevice, c.dstArray = p->dstArray;
  c.dstPitch = p->dstPitch, c.dstHeight = p->dstHeight;
  c.WidthInBytes = p->WidthInBytes, c.Height = p->Height, c.Depth = p->Depth;
  return result(check_3d(c));
}
}  // namespace

CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* pCopy) {
  CUDA_MEMCPY3D c;
  const CUresult rc = plain_copy(pCopy, &c);
  return rc == CUDA_SUCCESS ? copies::cuMemcpy3D_v2(&c) : rc;
}
CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* pCopy, CUstream hStream) {
  CUDA_MEMCPY3D c;
  const CUresult rc = plain_copy(pCopy, &c);
  return rc == CUDA_SUCCESS ? copies::cuMemcpy3DAsync_v2(&c, hStream) : rc;
}
CUresult captured::cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* pCopy, CUstream hStream) {
  CUDA_MEMCPY3D c;
  const CUresult rc = plain_copy(pCopy, &c);
  return rc == CUDA_SUCCESS ? captured::cuMemcpy3DAsync_v2(&c, hStream) : rc;
}

}  // namespace devproxy::sa::copies
