// SPDX-License-Identifier: Apache-2.0
// Graphs and their nodes: all of it in the client. Execution is in client_exec.cc, stream capture in client_capture.cc.
#include "devproxy/interceptors/graph/hooks.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

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

// Handles of graphs and nodes are numbers that are never used again: a stale one is an error, not a crash.
constexpr unsigned kLastAttribute = CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING;
constexpr uint64_t kGraphTag = 0xc1, kNodeTag = 0xc2;
uint64_t next_handle(uint64_t tag) {
  static std::atomic<uint64_t> serial{0};
  return tag << 56 | ++serial << 4;
}

std::unordered_map<uint64_t, Graph*>& graphs() {
  static auto* m = new std::unordered_map<uint64_t, Graph*>;  // never destroyed: threads outlive static destruction
  return *m;
}
std::unordered_map<uint64_t, Node*>& nodes() {
  static auto* m = new std::unordered_map<uint64_t, Node*>;
  return *m;
}

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

// What makes up a node besides its place in a graph.
void copy_payload(Node* to, const Node& from) {
  to->type = from.type;
  to->device = from.device;
  to->kernel = from.kernel;
  to->copy = from.copy;
  to->set = from.set;
  to->ctx = from.ctx;
  to->host = from.host;
  to->event = from.event;
  to->comm = from.comm;
  to->enabled = from.enabled;
  to->memory = from.memory;
  to->freed = from.freed;
  to->freed_addr = from.freed_addr;
}

// As the job gets it back: the arrays are the node's own.
CUDA_KERNEL_NODE_PARAMS params_of(Node* n) {
  Kernel& k = n->kernel;
  CUDA_KERNEL_NODE_PARAMS p = k.given;
  p.kernelParams = nullptr;
  p.extra = nullptr;
  if (k.given.extra) {
    k.block_bytes = k.block.size();
    void* const list[5] = {CU_LAUNCH_PARAM_BUFFER_POINTER, k.block.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &k.block_bytes,
                           CU_LAUNCH_PARAM_END};
    std::copy(std::begin(list), std::end(list), k.extra);
    p.extra = k.extra;
    return p;
  }
  k.pointers.clear();
  if (const module::FunctionObj* f = module::functions().get(k.function))
    for (const module::Param& at : f->params) k.pointers.push_back(k.block.data() + at.offset);
  if (!k.pointers.empty()) p.kernelParams = k.pointers.data();
  return p;
}

bool same(const CUgraphEdgeData& a, const CUgraphEdgeData& b) {
  return a.from_port == b.from_port && a.to_port == b.to_port && a.type == b.type;
}

void link(Node* from, Node* to, const CUgraphEdgeData& data) {
  to->dependencies.push_back({from, data});
  from->dependents.push_back(to);
}

const Edge* edge(const Node* from, const Node* to) {
  for (const Edge& e : to->dependencies)
    if (e.node == from) return &e;
  return nullptr;
}

void unlink(Node* from, Node* to) {
  std::erase_if(to->dependencies, [&](const Edge& e) { return e.node == from; });
  std::erase(from->dependents, to);
}

// cuda.h: `out` null asks for the length; entries beyond it are set to null.
template <class T>
CUresult list(const std::vector<T>& all, T* out, size_t* count) {
  if (out) {
    for (size_t i = 0; i < *count; ++i) out[i] = i < all.size() ? all[i] : T{};
    *count = std::min(*count, all.size());
  } else {
    *count = all.size();
  }
  return CUDA_SUCCESS;
}

struct Edges {
  std::vector<CUgraphNode> from, to;
  std::vector<CUgraphEdgeData> data;
  bool plain() const { return std::all_of(data.begin(), data.end(), is_default); }
};

Edges edges_of(const Graph& g) {
  Edges out;
  for (const auto& n : g.nodes)
    for (const Edge& e : n->dependencies) {
      out.from.push_back(handle_of(e.node));
      out.to.push_back(handle_of(n.get()));
      out.data.push_back(e.data);
    }
  return out;
}

const char* type_name(CUgraphNodeType type) {
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return "KERNEL";
    case CU_GRAPH_NODE_TYPE_MEMCPY: return "MEMCPY";
    case CU_GRAPH_NODE_TYPE_MEMSET: return "MEMSET";
    case CU_GRAPH_NODE_TYPE_HOST: return "HOST";
    case CU_GRAPH_NODE_TYPE_GRAPH: return "GRAPH";
    case CU_GRAPH_NODE_TYPE_EMPTY: return "EMPTY";
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return "EVENT_WAIT";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return "EVENT_RECORD";
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return "MEM_ALLOC";
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return "MEM_FREE";
    default: return "?";
  }
}

}  // namespace

std::mutex& mu() {
  static auto* m = new std::mutex;
  return *m;
}

Graph::~Graph() {
  for (const auto& [object, count] : objects) release(object, count);
}

Graph* graph_of(CUgraph h) {
  const auto it = graphs().find(bits(h));
  return it == graphs().end() ? nullptr : it->second;
}

Node* node_of(CUgraphNode h) {
  const auto it = nodes().find(bits(h));
  return it == nodes().end() ? nullptr : it->second;
}

std::unique_ptr<Graph> new_graph() {
  auto g = std::make_unique<Graph>();
  register_graph(g.get());
  return g;
}

void register_graph(Graph* g) {
  g->handle = next_handle(kGraphTag);
  graphs()[g->handle] = g;
  for (const auto& n : g->nodes) {
    n->handle = next_handle(kNodeTag);
    nodes()[n->handle] = n.get();
    if (n->child) register_graph(n->child.get());
  }
}

void forget_graph(Graph* g) {
  graphs().erase(g->handle);
  for (const auto& n : g->nodes) {
    nodes().erase(n->handle);
    if (n->child) forget_graph(n->child.get());
  }
}

std::unique_ptr<Graph> clone(const Graph& g) {
  auto out = std::make_unique<Graph>();
  out->origin = g.handle;
  out->has_memory = g.has_memory;
  std::unordered_map<const Node*, Node*> ours;
  for (const auto& n : g.nodes) {
    auto copy = std::make_unique<Node>();
    copy_payload(copy.get(), *n);
    copy->graph = out.get();
    copy->origin = n->handle;
    if (n->child) {
      copy->child = clone(*n->child);
      copy->child->inside = copy.get();
    }
    ours[n.get()] = copy.get();
    out->nodes.push_back(std::move(copy));
  }
  for (const auto& n : g.nodes)
    for (const Edge& e : n->dependencies) link(ours[e.node], ours[n.get()], e.data);
  for (const auto& [object, count] : g.objects) {
    retain(object, count);
    out->objects[object] = count;
  }
  return out;
}

// -- filling nodes --------------------------------------------------------------------------------------------------

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

// -- adding nodes ---------------------------------------------------------------------------------------------------

bool valid_edge_data(const CUgraphEdgeData& data, const Node& from, const Node& to) {
  if (data.to_port != 0) return false;
  for (const unsigned char byte : data.reserved)
    if (byte != 0) return false;
  if (data.type == CU_GRAPH_DEPENDENCY_TYPE_DEFAULT) return data.from_port == CU_GRAPH_KERNEL_NODE_PORT_DEFAULT;
  // A programmatic dependency is kept as a full one, which is stronger.
  return data.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC && from.type == CU_GRAPH_NODE_TYPE_KERNEL &&
         to.type == CU_GRAPH_NODE_TYPE_KERNEL &&
         (data.from_port == CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC ||
          data.from_port == CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER);
}

int32_t add_node(Graph* g, std::unique_ptr<Node>& n, const CUgraphNode* dependencies, const CUgraphEdgeData* data,
                 size_t count, CUgraphNode* out) {
  if (count && !dependencies) return kInvalidValue;
  std::vector<Edge> edges;
  for (size_t i = 0; i < count; ++i) {
    Node* from = node_of(dependencies[i]);
    const CUgraphEdgeData edge_data = data ? data[i] : CUgraphEdgeData{};
    if (!from || from->graph != g || !valid_edge_data(edge_data, *from, *n)) return kInvalidValue;
    for (const Edge& e : edges)
      if (e.node == from) return kInvalidValue;
    edges.push_back({from, edge_data});
  }
  if (const int32_t rc = admit_memory(g, *n); rc != kOk) return rc;
  n->graph = g;
  for (const Edge& e : edges) link(e.node, n.get(), e.data);
  n->handle = next_handle(kNodeTag);
  nodes()[n->handle] = n.get();
  if (n->child) register_graph(n->child.get());
  *out = handle_of(n.get());
  g->nodes.push_back(std::move(n));
  return kOk;
}

bool linear_order(const Graph& g, std::vector<Node*>* order, Node** at) {
  std::unordered_map<const Node*, std::pair<size_t, size_t>> about;        // place in the graph, dependencies left
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> ready;  // in the order in which they were added
  for (size_t i = 0; i < g.nodes.size(); ++i) {
    about[g.nodes[i].get()] = {i, g.nodes[i]->dependencies.size()};
    if (g.nodes[i]->dependencies.empty()) ready.push(i);
  }
  size_t done = 0;
  while (!ready.empty()) {
    Node* n = g.nodes[ready.top()].get();
    ready.pop();
    ++done;
    order->push_back(n);
    if (n->child && !linear_order(*n->child, order, at)) return false;
    for (const Node* next : n->dependents)
      if (auto& [place, left] = about[next]; --left == 0) ready.push(place);
  }
  if (done == g.nodes.size()) return true;
  for (const auto& n : g.nodes)
    if (about[n.get()].second != 0) *at = n.get();
  return false;
}

namespace {

// Fills a node outside of the lock, which a look-up of a function may need, then adds it.
template <class Fill>
CUresult add(CUgraphNode* out, CUgraph hGraph, const CUgraphNode* dependencies, const CUgraphEdgeData* data,
             size_t count, Fill fill) {
  auto n = std::make_unique<Node>();
  if (const int32_t rc = fill(n.get()); rc != kOk) return result(rc);
  std::lock_guard lock(mu());
  Graph* g = graph_of(hGraph);
  if (!g) return CUDA_ERROR_INVALID_VALUE;
  return result(add_node(g, n, dependencies, data, count, out));
}

// Gives a node new parameters of its own type.
template <class Fill>
CUresult set_params(CUgraphNode hNode, CUgraphNodeType type, Fill fill) {
  Node fresh;
  {
    std::lock_guard lock(mu());
    if (const Node* n = node_of(hNode)) fresh.kernel.attributes = n->kernel.attributes;  // they stay
  }
  if (const int32_t rc = fill(&fresh); rc != kOk) return result(rc);
  std::lock_guard lock(mu());
  Node* n = node_of(hNode);
  if (!n || n->type != type || fresh.type != type) return CUDA_ERROR_INVALID_VALUE;
  copy_payload(n, fresh);
  return CUDA_SUCCESS;
}

// Does `use` with the node where it is of that type.
template <class Use>
CUresult with_node(CUgraphNode hNode, CUgraphNodeType type, Use use) {
  std::lock_guard lock(mu());
  Node* n = node_of(hNode);
  if (!n || n->type != type) return CUDA_ERROR_INVALID_VALUE;
  use(n);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult cuGraphCreate(CUgraph* phGraph, unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mu());
  *phGraph = handle_of(new_graph().release());
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph hGraph) {
  std::unique_ptr<Graph> gone;
  std::lock_guard lock(mu());
  Graph* g = graph_of(hGraph);
  if (!g || g->inside || g->capture) return CUDA_ERROR_INVALID_VALUE;
  forget_graph(g);
  gone.reset(g);
  return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph* phGraphClone, CUgraph originalGraph) {
  std::lock_guard lock(mu());
  const Graph* g = graph_of(originalGraph);
  if (!g) return CUDA_ERROR_INVALID_VALUE;
  if (g->has_memory) return result(refuse_memory("cuGraphClone"));
  Graph* copy = clone(*g).release();
  register_graph(copy);
  *phGraphClone = handle_of(copy);
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeFindInClone(CUgraphNode* phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph) {
  std::lock_guard lock(mu());
  const Graph* g = graph_of(hClonedGraph);
  if (!g || !node_of(hOriginalNode)) return CUDA_ERROR_INVALID_VALUE;
  const std::function<const Node*(const Graph&)> find = [&](const Graph& in) -> const Node* {
    for (const auto& n : in.nodes) {
      if (n->origin == bits(hOriginalNode)) return n.get();
      if (n->child)
        if (const Node* deeper = find(*n->child)) return deeper;
    }
    return nullptr;
  };
  const Node* found = find(*g);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  *phNode = handle_of(found);
  return CUDA_SUCCESS;
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                 size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS* nodeParams) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Node* n) { return fill_kernel(n, *nodeParams); });
}
CUresult cuGraphAddKernelNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                              size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  const CUDA_KERNEL_NODE_PARAMS p = newer(*nodeParams);
  return graph::cuGraphAddKernelNode_v2(phGraphNode, hGraph, dependencies, numDependencies, &p);
}
CUresult cuGraphAddMemcpyNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                              size_t numDependencies, const CUDA_MEMCPY3D* copyParams, CUcontext ctx) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Node* n) { return fill_copy(n, *copyParams, ctx); });
}
CUresult cuGraphAddMemsetNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                              size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS* memsetParams, CUcontext ctx) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Node* n) { return fill_memset(n, *memsetParams, ctx); });
}
CUresult cuGraphAddHostNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                            size_t numDependencies, const CUDA_HOST_NODE_PARAMS* nodeParams) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Node* n) { return fill_host(n, *nodeParams); });
}
CUresult cuGraphAddChildGraphNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                  size_t numDependencies, CUgraph childGraph) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies, [&](Node* n) -> int32_t {
    std::lock_guard lock(mu());
    const Graph* child = graph_of(childGraph);
    return child && childGraph != hGraph ? fill_child(n, *child) : kInvalidValue;
  });
}
CUresult cuGraphAddEmptyNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                             size_t numDependencies) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies, [](Node*) { return kOk; });
}
CUresult cuGraphAddEventRecordNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                   size_t numDependencies, CUevent event) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Node* n) { return fill_event(n, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event); });
}
CUresult cuGraphAddEventWaitNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                 size_t numDependencies, CUevent event) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Node* n) { return fill_event(n, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event); });
}
CUresult cuGraphAddNode_v2(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                           const CUgraphEdgeData* dependencyData, size_t numDependencies,
                           CUgraphNodeParams* nodeParams) {
  CUdeviceptr allocated = 0;
  const CUresult rc = add(phGraphNode, hGraph, dependencies, dependencyData, numDependencies, [&](Node* n) {
    const int32_t filled = fill_any(n, *nodeParams);
    if (n->memory) allocated = n->memory->addr;
    return filled;
  });
  if (rc == CUDA_SUCCESS && nodeParams->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) nodeParams->alloc.dptr = allocated;
  return rc;
}
CUresult cuGraphAddNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                        size_t numDependencies, CUgraphNodeParams* nodeParams) {
  return graph::cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, nullptr, numDependencies, nodeParams);
}

// -- parameters of nodes --------------------------------------------------------------------------------------------

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS* nodeParams) {
  return with_node(hNode, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node* n) { *nodeParams = params_of(n); });
}
CUresult cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  return with_node(hNode, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node* n) {
    const CUDA_KERNEL_NODE_PARAMS p = params_of(n);
    // A kernel of a library is named as the function that it is here.
    *nodeParams = {p.func ? p.func : handle<CUfunction>(n->kernel.function),
                   p.gridDimX,
                   p.gridDimY,
                   p.gridDimZ,
                   p.blockDimX,
                   p.blockDimY,
                   p.blockDimZ,
                   p.sharedMemBytes,
                   p.kernelParams,
                   p.extra};
  });
}
CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS* nodeParams) {
  return set_params(hNode, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node* n) { return fill_kernel(n, *nodeParams); });
}
CUresult cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  const CUDA_KERNEL_NODE_PARAMS p = newer(*nodeParams);
  return graph::cuGraphKernelNodeSetParams_v2(hNode, &p);
}
CUresult cuGraphMemcpyNodeGetParams(CUgraphNode hNode, CUDA_MEMCPY3D* nodeParams) {
  return with_node(hNode, CU_GRAPH_NODE_TYPE_MEMCPY, [&](const Node* n) { *nodeParams = n->copy; });
}
CUresult cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D* nodeParams) {
  CUcontext ctx = nullptr;
  static_cast<void>(with_node(hNode, CU_GRAPH_NODE_TYPE_MEMCPY, [&](const Node* n) { ctx = n->ctx; }));
  return set_params(hNode, CU_GRAPH_NODE_TYPE_MEMCPY, [&](Node* n) { return fill_copy(n, *nodeParams, ctx); });
}
CUresult cuGraphMemsetNodeGetParams(CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS* nodeParams) {
  return with_node(hNode, CU_GRAPH_NODE_TYPE_MEMSET, [&](const Node* n) { *nodeParams = n->set; });
}
CUresult cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS* nodeParams) {
  CUcontext ctx = nullptr;
  static_cast<void>(with_node(hNode, CU_GRAPH_NODE_TYPE_MEMSET, [&](const Node* n) { ctx = n->ctx; }));
  return set_params(hNode, CU_GRAPH_NODE_TYPE_MEMSET, [&](Node* n) { return fill_memset(n, *nodeParams, ctx); });
}
CUresult cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS* nodeParams) {
  return with_node(hNode, CU_GRAPH_NODE_TYPE_HOST, [&](const Node* n) { *nodeParams = n->host; });
}
CUresult cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS* nodeParams) {
  return set_params(hNode, CU_GRAPH_NODE_TYPE_HOST, [&](Node* n) { return fill_host(n, *nodeParams); });
}
CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode hNode, CUevent* event_out) {
  return with_node(hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD, [&](const Node* n) { *event_out = n->event; });
}
CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode hNode, CUevent event) {
  return set_params(hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                    [&](Node* n) { return fill_event(n, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event); });
}
CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode hNode, CUevent* event_out) {
  return with_node(hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT, [&](const Node* n) { *event_out = n->event; });
}
CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode hNode, CUevent event) {
  return set_params(hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                    [&](Node* n) { return fill_event(n, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event); });
}
CUresult cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams* nodeParams) {
  if (nodeParams->type == CU_GRAPH_NODE_TYPE_GRAPH) return CUDA_ERROR_NOT_SUPPORTED;
  if (is_memory(nodeParams->type)) return result(refuse_memory("cuGraphNodeSetParams of such a node"));
  return set_params(hNode, nodeParams->type, [&](Node* n) { return fill_any(n, *nodeParams); });
}
CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph* phGraph) {
  return with_node(hNode, CU_GRAPH_NODE_TYPE_GRAPH, [&](const Node* n) { *phGraph = handle_of(n->child.get()); });
}

// Attributes of kernel nodes: taken or refused as cuLaunchKernelEx would with the node's shape.
namespace {
CUresult set_attributes(CUgraphNode hNode, const std::vector<CUlaunchAttribute>& changed, bool all) {
  std::vector<CUlaunchAttribute> wanted;
  uint64_t function = 0;
  launch::Geometry g{};
  if (const CUresult rc = with_node(hNode, CU_GRAPH_NODE_TYPE_KERNEL,
                                    [&](const Node* n) {
                                      if (!all) wanted = n->kernel.attributes;
                                      function = n->kernel.function;
                                      g = n->kernel.geometry;
                                    });
      rc != CUDA_SUCCESS)
    return rc;
  for (const CUlaunchAttribute& a : changed) {
    std::erase_if(wanted, [&](const CUlaunchAttribute& old) { return old.id == a.id; });
    wanted.push_back(a);
  }
  module::FunctionObj* f = module::functions().get(function);
  if (!f) return CUDA_ERROR_INVALID_VALUE;
  std::vector<LaunchAttribute> travelling;
  if (const int32_t rc =
          launch::attributes(f, function, g, wanted.data(), static_cast<unsigned>(wanted.size()), &travelling);
      rc != kOk)
    return result(rc);
  return with_node(hNode, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node* n) {
    n->kernel.attributes = std::move(wanted);
    n->kernel.travelling = std::move(travelling);
  });
}
}  // namespace

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue* value) {
  if (static_cast<unsigned>(attr) > kLastAttribute) return CUDA_ERROR_INVALID_VALUE;
  CUlaunchAttribute a{};
  a.id = attr;
  a.value = *value;
  return set_attributes(hNode, {a}, false);
}
CUresult cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue* value_out) {
  if (static_cast<unsigned>(attr) > kLastAttribute) return CUDA_ERROR_INVALID_VALUE;
  return with_node(hNode, CU_GRAPH_NODE_TYPE_KERNEL, [&](const Node* n) {
    memset(value_out, 0, sizeof *value_out);
    for (const CUlaunchAttribute& a : n->kernel.attributes)
      if (a.id == attr) *value_out = a.value;
  });
}
CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src) {
  std::vector<CUlaunchAttribute> from;
  const CUresult rc = with_node(src, CU_GRAPH_NODE_TYPE_KERNEL, [&](const Node* n) { from = n->kernel.attributes; });
  return rc == CUDA_SUCCESS ? set_attributes(dst, from, true) : rc;
}

// -- structure ------------------------------------------------------------------------------------------------------

CUresult cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType* type) {
  std::lock_guard lock(mu());
  const Node* n = node_of(hNode);
  if (!n) return CUDA_ERROR_INVALID_VALUE;
  *type = n->type;
  return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph hGraph, CUgraphNode* nodes_out, size_t* numNodes) {
  std::lock_guard lock(mu());
  const Graph* g = graph_of(hGraph);
  if (!g) return CUDA_ERROR_INVALID_VALUE;
  std::vector<CUgraphNode> all;
  for (const auto& n : g->nodes) all.push_back(handle_of(n.get()));
  return list(all, nodes_out, numNodes);
}

CUresult cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode* rootNodes, size_t* numRootNodes) {
  std::lock_guard lock(mu());
  const Graph* g = graph_of(hGraph);
  if (!g) return CUDA_ERROR_INVALID_VALUE;
  std::vector<CUgraphNode> all;
  for (const auto& n : g->nodes)
    if (n->dependencies.empty()) all.push_back(handle_of(n.get()));
  return list(all, rootNodes, numRootNodes);
}

CUresult cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* edgeData,
                            size_t* numEdges) {
  std::lock_guard lock(mu());
  const Graph* g = graph_of(hGraph);
  if (!g || !from != !to || (edgeData && !from)) return CUDA_ERROR_INVALID_VALUE;
  const Edges edges = edges_of(*g);
  if (from && !edgeData && !edges.plain()) return CUDA_ERROR_LOSSY_QUERY;
  size_t n = *numEdges;
  list(edges.from, from, &n);
  n = *numEdges;
  if (edgeData) list(edges.data, edgeData, &n);
  return list(edges.to, to, numEdges);
}
CUresult cuGraphGetEdges(CUgraph hGraph, CUgraphNode* from, CUgraphNode* to, size_t* numEdges) {
  return graph::cuGraphGetEdges_v2(hGraph, from, to, nullptr, numEdges);
}

namespace {
CUresult neighbours(const std::vector<CUgraphNode>& all, const std::vector<CUgraphEdgeData>& data, CUgraphNode* out,
                    CUgraphEdgeData* data_out, size_t* count) {
  if (data_out && !out) return CUDA_ERROR_INVALID_VALUE;
  if (out && !data_out && !std::all_of(data.begin(), data.end(), is_default)) return CUDA_ERROR_LOSSY_QUERY;
  size_t n = *count;
  if (data_out) list(data, data_out, &n);
  return list(all, out, count);
}
}  // namespace

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode* dependencies, CUgraphEdgeData* edgeData,
                                       size_t* numDependencies) {
  std::lock_guard lock(mu());
  const Node* n = node_of(hNode);
  if (!n) return CUDA_ERROR_INVALID_VALUE;
  std::vector<CUgraphNode> all;
  std::vector<CUgraphEdgeData> data;
  for (const Edge& e : n->dependencies) all.push_back(handle_of(e.node)), data.push_back(e.data);
  return neighbours(all, data, dependencies, edgeData, numDependencies);
}
CUresult cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode* dependencies, size_t* numDependencies) {
  return graph::cuGraphNodeGetDependencies_v2(hNode, dependencies, nullptr, numDependencies);
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode* dependentNodes, CUgraphEdgeData* edgeData,
                                         size_t* numDependentNodes) {
  std::lock_guard lock(mu());
  const Node* n = node_of(hNode);
  if (!n) return CUDA_ERROR_INVALID_VALUE;
  std::vector<CUgraphNode> all;
  std::vector<CUgraphEdgeData> data;
  for (const Node* to : n->dependents) all.push_back(handle_of(to)), data.push_back(edge(n, to)->data);
  return neighbours(all, data, dependentNodes, edgeData, numDependentNodes);
}
CUresult cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode* dependentNodes, size_t* numDependentNodes) {
  return graph::cuGraphNodeGetDependentNodes_v2(hNode, dependentNodes, nullptr, numDependentNodes);
}

CUresult cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to,
                                   const CUgraphEdgeData* edgeData, size_t numDependencies) {
  std::lock_guard lock(mu());
  const Graph* g = graph_of(hGraph);
  if (!g || (numDependencies && (!from || !to))) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < numDependencies; ++i) {  // all or nothing
    Node *a = node_of(from[i]), *b = node_of(to[i]);
    if (!a || !b || a == b || a->graph != g || b->graph != g || edge(a, b)) return CUDA_ERROR_INVALID_VALUE;
    if (edgeData && !valid_edge_data(edgeData[i], *a, *b)) return CUDA_ERROR_INVALID_VALUE;
    for (size_t k = 0; k < i; ++k)
      if (from[k] == from[i] && to[k] == to[i]) return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < numDependencies; ++i)
    link(node_of(from[i]), node_of(to[i]), edgeData ? edgeData[i] : CUgraphEdgeData{});
  return CUDA_SUCCESS;
}
CUresult cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to,
                                size_t numDependencies) {
  return graph::cuGraphAddDependencies_v2(hGraph, from, to, nullptr, numDependencies);
}

CUresult cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to,
                                      const CUgraphEdgeData* edgeData, size_t numDependencies) {
  std::lock_guard lock(mu());
  const Graph* g = graph_of(hGraph);
  if (!g || (numDependencies && (!from || !to))) return CUDA_ERROR_INVALID_VALUE;
  if (g->has_memory) return result(refuse_memory("cuGraphRemoveDependencies"));
  for (size_t i = 0; i < numDependencies; ++i) {
    const Node *a = node_of(from[i]), *b = node_of(to[i]);
    if (!a || !b || a->graph != g || b->graph != g) return CUDA_ERROR_INVALID_VALUE;
    const Edge* e = edge(a, b);
    if (!e || !same(e->data, edgeData ? edgeData[i] : CUgraphEdgeData{})) return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < numDependencies; ++i) unlink(node_of(from[i]), node_of(to[i]));
  return CUDA_SUCCESS;
}
CUresult cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to,
                                   size_t numDependencies) {
  return graph::cuGraphRemoveDependencies_v2(hGraph, from, to, nullptr, numDependencies);
}

CUresult cuGraphDestroyNode(CUgraphNode hNode) {
  std::lock_guard lock(mu());
  Node* n = node_of(hNode);
  // cuda.h, cuStreamGetCaptureInfo: no removal while a capture adds to the graph.
  if (!n || n->graph->capture) return CUDA_ERROR_INVALID_VALUE;
  if (n->graph->has_memory) return result(refuse_memory("cuGraphDestroyNode"));
  while (!n->dependencies.empty()) unlink(n->dependencies.back().node, n);
  while (!n->dependents.empty()) unlink(n, n->dependents.back());
  nodes().erase(n->handle);
  if (n->child) forget_graph(n->child.get());
  std::erase_if(n->graph->nodes, [&](const auto& other) { return other.get() == n; });
  return CUDA_SUCCESS;
}

// -- debugging ------------------------------------------------------------------------------------------------------

namespace {

const char* direction(const CUDA_MEMCPY3D& p) {
  Side dst, src;
  if (!sides(p, &dst, &src)) return "?";
  auto host = [](uint64_t addr) { return place_of(addr).device < 0 || place_of(addr).pinned; };
  return host(src.addr) ? (host(dst.addr) ? "HtoH" : "HtoD") : host(dst.addr) ? "DtoH" : "DtoD";
}

void print_dot(FILE* out, const Graph& g, bool verbose, int* clusters) {
  auto id = [](const Node* n) { return static_cast<unsigned long long>(n->handle); };
  fprintf(out, "subgraph cluster_%d {\nlabel=\"graph_%llu\";\n", (*clusters)++,
          static_cast<unsigned long long>(g.handle >> 4 & 0xffffffff));
  for (size_t i = 0; i < g.nodes.size(); ++i) {
    const Node* n = g.nodes[i].get();
    fprintf(out, "\"n%llx\" [shape=box label=\"%zu\\n%s", id(n), i, type_name(n->type));
    switch (n->type) {
      case CU_GRAPH_NODE_TYPE_KERNEL: {
        const module::FunctionObj* f = module::functions().get(n->kernel.function);
        fprintf(out, "\\n%s", f ? f->name.c_str() : "(unloaded)");
        const launch::Geometry& at = n->kernel.geometry;
        if (verbose)
          fprintf(out, "\\n<<<(%u,%u,%u),(%u,%u,%u),%u>>>\\n%zu bytes of parameters", at.grid[0], at.grid[1],
                  at.grid[2], at.block[0], at.block[1], at.block[2], at.shared, n->kernel.block.size());
        break;
      }
      case CU_GRAPH_NODE_TYPE_MEMCPY:
        fprintf(out, "\\n%s", direction(n->copy));
        if (verbose) fprintf(out, "\\n%zu x %zu x %zu", n->copy.WidthInBytes, n->copy.Height, n->copy.Depth);
        break;
      case CU_GRAPH_NODE_TYPE_MEMSET:
        if (verbose)
          fprintf(out, "\\n0x%llx = 0x%x\\n%zu x %zu of %u bytes", static_cast<unsigned long long>(n->set.dst),
                  n->set.value, n->set.width, n->set.height, n->set.elementSize);
        break;
      case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        if (verbose)
          fprintf(out, "\\n0x%llx\\n%zu bytes", static_cast<unsigned long long>(n->memory->addr),
                  n->memory->given.bytesize);
        break;
      case CU_GRAPH_NODE_TYPE_MEM_FREE:
        if (verbose) fprintf(out, "\\n0x%llx", static_cast<unsigned long long>(n->freed_addr));
        break;
      default: break;
    }
    fprintf(out, "\"];\n");
    if (n->child) print_dot(out, *n->child, verbose, clusters);
  }
  for (const auto& n : g.nodes)
    for (const Edge& e : n->dependencies) fprintf(out, "\"n%llx\" -> \"n%llx\";\n", id(e.node), id(n.get()));
  fprintf(out, "}\n");
}

}  // namespace

CUresult cuGraphDebugDotPrint(CUgraph hGraph, const char* path, unsigned int flags) {
  std::lock_guard lock(mu());
  const Graph* g = graph_of(hGraph);
  if (!g) return CUDA_ERROR_INVALID_VALUE;
  FILE* out = fopen(path, "we");
  if (!out) return CUDA_ERROR_OPERATING_SYSTEM;
  int clusters = 0;
  fprintf(out, "digraph dot {\n");
  print_dot(out, *g, flags != 0, &clusters);
  fprintf(out, "}\n");
  return fclose(out) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

}  // namespace devproxy::sa::graph
