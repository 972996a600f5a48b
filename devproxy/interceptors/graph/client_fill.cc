// SPDX-License-Identifier: Apache-2.0
// What a node does: its parameters, checked as the vendor checks them, and refused where devproxy has no such node.
#include <string.h>

#include "devproxy/csrc/client/thread_state.h"
#include "devproxy/interceptors/graph/client_graph.h"
#include "devproxy/interceptors/managed/client.h"
#include "devproxy/interceptors/memory/client.h"

namespace devproxy::sa::graph {

using client::DeviceState;
using client::log;
using client::Place;
using client::place_of;

namespace {

// A context made current for a look-up.
class ContextFor {
 public:
  explicit ContextFor(uint64_t ctx) {
    client::ThreadState& t = client::t_state;
    pushed_ = ctx != 0 && t.depth < client::kContextStack;
    if (pushed_) t.contexts[t.depth++] = ctx;
  }
  ~ContextFor() {
    if (pushed_) --client::t_state.depth;
  }
  ContextFor(const ContextFor&) = delete;
  ContextFor& operator=(const ContextFor&) = delete;

 private:
  bool pushed_;
};

// The device of a context, or of the current one.
int32_t device_of(CUcontext ctx, int* device) {
  const client::ContextObj* c = client::contexts().get(ctx ? bits(ctx) : client::current_context());
  if (!c) return kInvalidContext;
  *device = c->device;
  return kOk;
}

}  // namespace

int32_t fill_kernel(Node* n, const CUDA_KERNEL_NODE_PARAMS& p) {
  const ContextFor context(p.func ? 0 : bits(p.ctx));
  uint64_t function = 0;
  int32_t error = kOk;
  // What a launch may name as CUfunction: a function, or a kernel of a library.
  module::FunctionObj* f = module::function_of(p.func ? bits(p.func) : bits(p.kern), &function, &error);
  if (!f) return error;
  if (p.kernelParams && p.extra) return kInvalidValue;
  DeviceState* d = client::device_state(f->device, &error);
  if (!d) return error;
  const launch::Geometry g{
      {p.gridDimX, p.gridDimY, p.gridDimZ}, {p.blockDimX, p.blockDimY, p.blockDimZ}, p.sharedMemBytes};
  if (const int32_t rc = launch::check(*f, g, *d); rc != kOk) return rc;
  Kernel& k = n->kernel;
  if (const int32_t rc = launch::parameter_block(*f, p.kernelParams, p.extra, &k.block); rc != kOk) return rc;
  k.travelling.clear();
  if (!k.attributes.empty())
    if (const int32_t rc = launch::attributes(f, function, g, k.attributes.data(),
                                              static_cast<unsigned>(k.attributes.size()), &k.travelling);
        rc != kOk)
      return rc;
  k.given = p;
  k.function = function;
  k.geometry = g;
  n->type = CU_GRAPH_NODE_TYPE_KERNEL;
  n->device = f->device;
  return kOk;
}

bool sides(const CUDA_MEMCPY3D& p, Side* dst, Side* src) {
  auto side = [&](CUmemorytype type, const void* host, CUdeviceptr device, size_t pitch, size_t height, size_t x,
                  size_t y, size_t z, Side* out) {
    if (type == CU_MEMORYTYPE_HOST)
      out->addr = reinterpret_cast<uint64_t>(host);
    else if (type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED)
      out->addr = device;
    else
      return false;
    out->pitch = pitch ? pitch : p.WidthInBytes;
    out->slice = out->pitch * (height ? height : p.Height);
    out->addr += z * out->slice + y * out->pitch + x;
    return true;
  };
  return side(p.srcMemoryType, p.srcHost, p.srcDevice, p.srcPitch, p.srcHeight, p.srcXInBytes, p.srcY, p.srcZ, src) &&
         side(p.dstMemoryType, p.dstHost, p.dstDevice, p.dstPitch, p.dstHeight, p.dstXInBytes, p.dstY, p.dstZ, dst);
}

int32_t fill_copy(Node* n, const CUDA_MEMCPY3D& p, CUcontext ctx) {
  if (p.srcLOD || p.dstLOD || p.reserved0 || p.reserved1) return kInvalidValue;
  int device = -1;
  if (const int32_t rc = device_of(ctx, &device); rc != kOk) return rc;
  Side dst, src;
  if (!sides(p, &dst, &src)) {
    log(client::Level::kWarn, "a graph's copy from or to a CUDA array is refused: only linear memory is supported");
    return kNotSupported;
  }
  const bool empty = p.WidthInBytes == 0 || p.Height == 0 || p.Depth == 0;
  if (!empty) {
    auto wrong = [&](const Side& s, CUmemorytype type) {
      uint64_t span;
      if ((p.Height > 1 || p.Depth > 1) && s.pitch < p.WidthInBytes) return true;
      if (__builtin_mul_overflow(s.slice, p.Depth - 1, &span) ||
          __builtin_add_overflow(span, (p.Height - 1) * s.pitch + p.WidthInBytes, &span))
        return true;
      if (s.addr == 0 || (type == CU_MEMORYTYPE_DEVICE && place_of(s.addr).device < 0)) return true;
      return !memory::known(s.addr, span);
    };
    if (wrong(dst, p.dstMemoryType) || wrong(src, p.srcMemoryType)) return kInvalidValue;
    const Place to = place_of(dst.addr), from = place_of(src.addr);
    const bool to_device = to.device >= 0 && !to.pinned, from_device = from.device >= 0 && !from.pinned;
    if (to_device && from_device && to.device != from.device) {
      log(client::Level::kWarn, "a graph's copy between GPU %d and GPU %d is refused: a graph runs on one GPU",
          from.device, to.device);
      return kNotSupported;
    }
    if (to_device || from_device) device = to_device ? to.device : from.device;
  }
  n->type = CU_GRAPH_NODE_TYPE_MEMCPY;
  n->device = device;
  n->copy = p;
  n->ctx = ctx;
  return kOk;
}

int32_t fill_memset(Node* n, const CUDA_MEMSET_NODE_PARAMS& p, CUcontext ctx) {
  const uint64_t width = p.elementSize;
  if (width != 1 && width != 2 && width != 4) return kInvalidValue;
  int device = -1;
  if (const int32_t rc = device_of(ctx, &device); rc != kOk) return rc;
  if (p.width && p.height) {
    if (p.dst % width || (p.height > 1 && (p.pitch % width || p.pitch < p.width * width))) return kInvalidValue;
    if (p.width > kDeviceBytes || p.height > kDeviceBytes || (p.height > 1 && p.pitch > kDeviceBytes / p.height))
      return kInvalidValue;
    const Place place = place_of(p.dst);
    if (place.device < 0 || !memory::known(p.dst, (p.height - 1) * p.pitch + p.width * width)) return kInvalidValue;
    if (!managed::is_managed(p.dst, place)) device = place.device;
  }
  n->type = CU_GRAPH_NODE_TYPE_MEMSET;
  n->device = device;
  n->set = p;
  n->ctx = ctx;
  return kOk;
}

int32_t fill_host(Node* n, const CUDA_HOST_NODE_PARAMS& p) {
  if (!p.fn) return kInvalidValue;
  n->type = CU_GRAPH_NODE_TYPE_HOST;
  n->host = p;
  return kOk;
}

int32_t fill_event(Node* n, CUgraphNodeType type, CUevent event) {
  const client::EventObj* e = client::events().get(bits(event));
  if (!e) return kInvalidHandle;
  n->type = type;
  n->event = event;
  n->device = e->device;
  return kOk;
}

int32_t fill_child(Node* n, const Graph& child) {
  if (child.has_memory) return refuse_memory("a child graph");
  n->type = CU_GRAPH_NODE_TYPE_GRAPH;
  n->child = clone(child);
  n->child->inside = n;
  return kOk;
}

int32_t fill_any(Node* n, const CUgraphNodeParams& p) {
  switch (p.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      static_assert(sizeof(CUDA_KERNEL_NODE_PARAMS) == sizeof(p.kernel));
      CUDA_KERNEL_NODE_PARAMS k;
      memcpy(&k, &p.kernel, sizeof k);
      return fill_kernel(n, k);
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      if (p.memcpy.flags || p.memcpy.reserved) return kInvalidValue;
      return fill_copy(n, p.memcpy.copyParams, p.memcpy.copyCtx);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      const auto& m = p.memset;
      return fill_memset(n, {m.dst, m.pitch, m.value, m.elementSize, m.width, m.height}, m.ctx);
    }
    case CU_GRAPH_NODE_TYPE_HOST: return fill_host(n, {p.host.fn, p.host.userData});
    case CU_GRAPH_NODE_TYPE_EMPTY: n->type = p.type; return kOk;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return fill_event(n, p.type, p.eventWait.event);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return fill_event(n, p.type, p.eventRecord.event);
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      std::lock_guard lock(mu());
      const Graph* child = graph_of(p.graph.graph);
      if (!child) return kInvalidValue;
      if (p.graph.ownership != CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE) {
        log(client::Level::kWarn, "a child graph that moves into its node is refused: add it as a clone");
        return kNotSupported;
      }
      return fill_child(n, *child);
    }
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
      CUDA_MEM_ALLOC_NODE_PARAMS a;
      static_assert(sizeof a == sizeof p.alloc);
      memcpy(&a, &p.alloc, sizeof a);
      return fill_alloc(n, a);
    }
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return fill_free(n, p.free.dptr);
    default:
      log(client::Level::kWarn, "a graph node of type %d is refused: see docs/support.md", static_cast<int>(p.type));
      return kNotSupported;
  }
}

}  // namespace devproxy::sa::graph
