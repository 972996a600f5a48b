// SPDX-License-Identifier: Apache-2.0
// Stream capture: while a stream captures, its commands become nodes. All of it is state of the client, so a checkpoint
// during a capture stores it like any other memory; the server knows nothing of it.
//
// A capture sequence has an id and, for each stream that takes part, the set of nodes on which that stream's next node
// will depend. An event that is recorded there holds such a set; a stream that waits for it joins the sequence.
//
// What cuda.h leaves open is answered as its error numbers say; nobody has compared it with a driver yet
// (docs/design.md, Graphs).
#include <pthread.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "devproxy/interceptors/graph/client_graph.h"
#include "devproxy/interceptors/graph/hooks.h"

namespace devproxy::sa::graph {

using client::DeviceState;
using client::EventObj;
using client::log;
using client::StreamObj;

constinit std::atomic<uint32_t> g_captures{0};

namespace {

// What the next node of a stream depends on; two arrays, since cuStreamGetCaptureInfo gives them to the job.
struct Front {
  std::vector<CUgraphNode> nodes;
  std::vector<CUgraphEdgeData> data;

  void add(CUgraphNode node, const CUgraphEdgeData& edge) {
    if (std::find(nodes.begin(), nodes.end(), node) != nodes.end()) return;
    nodes.push_back(node);
    data.push_back(edge);
  }
  void add(const Front& other) {
    for (size_t i = 0; i < other.nodes.size(); ++i) add(other.nodes[i], other.data[i]);
  }
};

struct Capture {
  uint64_t id = 0;
  Graph* graph = nullptr;
  bool ours = false;  // the graph was made by the capture, and goes with it when it fails
  bool invalidated = false;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  pthread_t thread{};
  uint64_t origin = 0;                          // handle of the stream where it began
  std::unordered_map<uint64_t, Front> streams;  // by handle
  std::vector<Front> left;                      // of streams that were destroyed
};

struct CapturedEvent {
  uint64_t capture = 0;
  Front front;
};

// By id; mu() guards both.
std::unordered_map<uint64_t, Capture>& captures() {
  static auto* m = new std::unordered_map<uint64_t, Capture>;
  return *m;
}
std::unordered_map<uint64_t, CapturedEvent>& captured_events() {
  static auto* m = new std::unordered_map<uint64_t, CapturedEvent>;
  return *m;
}

thread_local CUstreamCaptureMode t_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

uint64_t handle_value(const StreamObj* s) { return s->handle.load(std::memory_order_relaxed); }

// The stream behind a handle that a capture holds; nullptr where it is gone.
StreamObj* stream_of(uint64_t value) {
  StreamObj* s = nullptr;
  DeviceState* d = nullptr;
  return client::resolve_stream(value, &s, &d) == kOk ? s : nullptr;
}

Capture* capture_of(const StreamObj* s) {
  const auto it = captures().find(s->capture.load(std::memory_order_relaxed));
  return it == captures().end() ? nullptr : &it->second;
}

// Does a command of the legacy stream of `device` depend on the capture (cuda.h, cuStreamIsCapturing)?
bool blocks_legacy(const Capture& c, int device) {
  return std::any_of(c.streams.begin(), c.streams.end(), [&](const auto& item) {
    const StreamObj* s = stream_of(item.first);
    return s && s->device == device && !(s->flags & CU_STREAM_NON_BLOCKING);
  });
}

bool legacy_in_capture(const StreamObj* s, bool invalidate) {
  if (s->index != 0) return false;
  bool any = false;
  for (auto& [id, c] : captures()) {
    if (!blocks_legacy(c, s->device)) continue;
    any = true;
    if (invalidate) c.invalidated = true;
  }
  return any;
}

// What a command on `s` meets. kOk and *capture: it is captured; kOk and nullptr: it is none of ours.
CUresult enter(StreamObj* s, Capture** capture) {
  *capture = capture_of(s);
  if (*capture) return (*capture)->invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
  return legacy_in_capture(s, true) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

// A node behind everything that the stream has captured.
CUresult add_captured(Capture* c, StreamObj* s, std::unique_ptr<Node>& n) {
  Front& front = c->streams[handle_value(s)];
  CUgraphNode node = nullptr;
  const int32_t rc = add_node(c->graph, n, front.nodes.data(), front.data.data(), front.nodes.size(), &node);
  if (rc != kOk) {
    // A second free of the same memory is wrong by itself, and harms nothing.
    if (n->type != CU_GRAPH_NODE_TYPE_MEM_FREE || rc != kInvalidValue) c->invalidated = true;
    return result(rc);
  }
  front = {};
  front.add(node, {});
  return CUDA_SUCCESS;
}

// The common form: `fill` makes the node, outside of the lock.
template <class Fill>
bool capture_node(StreamObj* s, Fill fill, CUresult* rc) {
  Capture* c = nullptr;
  {
    std::lock_guard lock(mu());
    *rc = enter(s, &c);
    if (*rc != CUDA_SUCCESS) return true;
    if (!c) return false;
  }
  auto n = std::make_unique<Node>();
  const int32_t filled = fill(n.get());
  std::lock_guard lock(mu());
  c = capture_of(s);  // another thread may have ended it
  if (!c) {
    *rc = CUDA_ERROR_ILLEGAL_STATE;
  } else if (filled != kOk) {
    // A call that is wrong by itself adds nothing and harms nothing; what no graph can hold ends the capture.
    if (filled == kNotSupported) c->invalidated = true;
    *rc = result(filled);
  } else {
    *rc = add_captured(c, s, n);
  }
  return true;
}

// The streams of a sequence are free again.
void dissolve(Capture& c) {
  for (const auto& [value, front] : c.streams)
    if (StreamObj* s = stream_of(value)) s->capture.store(0, std::memory_order_relaxed);
  std::erase_if(captured_events(), [&](const auto& item) { return item.second.capture == c.id; });
  c.graph->capture = 0;
  captures().erase(c.id);
  g_captures.fetch_sub(1, std::memory_order_relaxed);
}

// Is everything that the sequence captured before the end of its first stream?
bool joined(const Capture& c) {
  std::unordered_set<const Node*> before;
  std::vector<const Node*> look;
  auto visit = [&](const Node* n) {
    if (n && before.insert(n).second) look.push_back(n);
  };
  for (const CUgraphNode node : c.streams.at(c.origin).nodes) visit(node_of(node));
  while (!look.empty()) {
    const Node* n = look.back();
    look.pop_back();
    for (const Edge& e : n->dependencies) visit(e.node);
  }
  auto inside = [&](const Front& front) {
    return std::all_of(front.nodes.begin(), front.nodes.end(),
                       [&](CUgraphNode node) { return before.contains(node_of(node)); });
  };
  return std::all_of(c.streams.begin(), c.streams.end(), [&](const auto& item) { return inside(item.second); }) &&
         std::all_of(c.left.begin(), c.left.end(), inside);
}

CUresult begin(CUstream hStream, CUgraph hGraph, const CUgraphNode* dependencies, const CUgraphEdgeData* data,
               size_t count, CUstreamCaptureMode mode) {
  if (static_cast<unsigned>(mode) > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  DP_STREAM(hStream, s, d);
  if (s->index == 0) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  static std::atomic<uint64_t> serial{0};
  std::lock_guard lock(mu());
  if (capture_of(s)) return CUDA_ERROR_ILLEGAL_STATE;
  Capture c;
  if (hGraph) {
    c.graph = graph_of(hGraph);
    if (!c.graph || c.graph->capture || (count && !dependencies)) return CUDA_ERROR_INVALID_VALUE;
    Front& front = c.streams[handle_value(s)];
    for (size_t i = 0; i < count; ++i) {
      const Node* n = node_of(dependencies[i]);
      if (!n || n->graph != c.graph) return CUDA_ERROR_INVALID_VALUE;
      front.add(dependencies[i], data ? data[i] : CUgraphEdgeData{});
    }
  } else {
    c.graph = new_graph().release();
    c.ours = true;
    c.streams[handle_value(s)];
  }
  c.id = ++serial;
  c.mode = mode;
  c.thread = pthread_self();
  c.origin = handle_value(s);
  c.graph->capture = c.id;
  s->capture.store(c.id, std::memory_order_relaxed);
  captures()[c.id] = std::move(c);
  g_captures.fetch_add(1, std::memory_order_relaxed);
  return CUDA_SUCCESS;
}

}  // namespace

// -- commands -------------------------------------------------------------------------------------------------------

bool capture_kernel(StreamObj* s, CUfunction f, const launch::Geometry& g, void** kernelParams, void** extra,
                    const CUlaunchConfig* config, CUresult* rc) {
  return capture_node(
      s,
      [&](Node* n) {
        CUDA_KERNEL_NODE_PARAMS p{};
        p.func = f;
        p.gridDimX = g.grid[0], p.gridDimY = g.grid[1], p.gridDimZ = g.grid[2];
        p.blockDimX = g.block[0], p.blockDimY = g.block[1], p.blockDimZ = g.block[2];
        p.sharedMemBytes = g.shared;
        p.kernelParams = kernelParams;
        p.extra = extra;
        if (config && config->numAttrs) {
          if (!config->attrs) return static_cast<int32_t>(kInvalidValue);
          n->kernel.attributes.assign(config->attrs, config->attrs + config->numAttrs);
        }
        return fill_kernel(n, p);
      },
      rc);
}

namespace {
// The context of the stream's device; nodes without one of their own take the stream's.
CUcontext context_of(const StreamObj* s) {
  if (s->context) return handle<CUcontext>(s->context);
  DeviceState* d = client::device_state_if_attached(s->device);
  return handle<CUcontext>(d ? d->primary.load() : 0);
}
}  // namespace

bool capture_copy(StreamObj* s, const CUDA_MEMCPY3D& p, CUresult* rc) {
  return capture_node(s, [&](Node* n) { return fill_copy(n, p, context_of(s)); }, rc);
}

bool capture_memset(StreamObj* s, const CUDA_MEMSET_NODE_PARAMS& p, CUresult* rc) {
  return capture_node(s, [&](Node* n) { return fill_memset(n, p, context_of(s)); }, rc);
}

bool capture_host(StreamObj* s, CUhostFn fn, void* data, CUresult* rc) {
  return capture_node(s, [&](Node* n) { return fill_host(n, {fn, data}); }, rc);
}

bool capture_comm(StreamObj* s, const CommOp* ops, size_t count, CUresult* rc) {
  return capture_node(
      s,
      [&](Node* n) {
        n->type = CU_GRAPH_NODE_TYPE_EMPTY;
        n->device = s->device;
        n->comm.assign(ops, ops + count);
        return static_cast<int32_t>(kOk);
      },
      rc);
}

bool capture_graph(StreamObj* s, const std::shared_ptr<Exec>& x, CUresult* rc) {
  return capture_node(
      s,
      [&](Node* n) {
        std::lock_guard lock(x->mu);  // mu() is taken again only when this one is free
        return fill_child(n, *x->image);
      },
      rc);
}

bool capture_record(StreamObj* s, CUevent event, bool external, CUresult* rc) {
  if (external) {
    return capture_node(s, [&](Node* n) { return fill_event(n, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event); }, rc);
  }
  std::lock_guard lock(mu());
  Capture* c = nullptr;
  *rc = enter(s, &c);
  if (*rc != CUDA_SUCCESS) return true;
  if (!c) return false;
  EventObj* e = client::events().get(bits(event));
  if (!e) {
    *rc = CUDA_ERROR_INVALID_HANDLE;
    return true;
  }
  captured_events()[bits(event)] = {c->id, c->streams[handle_value(s)]};
  e->capture.store(c->id, std::memory_order_relaxed);
  return true;
}

bool capture_wait(StreamObj* s, CUevent event, bool external, CUresult* rc) {
  if (external) {
    return capture_node(s, [&](Node* n) { return fill_event(n, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event); }, rc);
  }
  std::lock_guard lock(mu());
  Capture* c = nullptr;
  *rc = enter(s, &c);
  if (*rc != CUDA_SUCCESS) return true;
  const EventObj* e = client::events().get(bits(event));
  if (!e) {
    *rc = CUDA_ERROR_INVALID_HANDLE;
    return true;
  }
  const uint64_t id = e->capture.load(std::memory_order_relaxed);
  const auto there = captures().find(id);
  if (id == 0 || there == captures().end()) {
    if (!c) return false;  // nothing to do with a capture, or with one that is over: the caller says so
    if (id == 0 && e->record.load(std::memory_order_relaxed) == 0) return true;  // never recorded: nothing to wait for
    c->invalidated = true;
    *rc = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    return true;
  }
  Capture& other = there->second;
  if (other.invalidated) {
    *rc = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return true;
  }
  if (c && c != &other) {
    c->invalidated = other.invalidated = true;
    *rc = CUDA_ERROR_STREAM_CAPTURE_MERGE;
    return true;
  }
  if (s->index == 0) {  // the legacy stream takes part in no capture
    other.invalidated = true;
    *rc = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    return true;
  }
  other.streams[handle_value(s)].add(captured_events()[bits(event)].front);
  s->capture.store(id, std::memory_order_relaxed);
  return true;
}

bool capture_alloc(StreamObj* s, DeviceState* d, CUdeviceptr* ptr, size_t bytes, CUresult* rc) {
  // cuda.h, cuMemAllocAsync: the memory is the graph's and not the pool's, whose properties the node has.
  CUDA_MEM_ALLOC_NODE_PARAMS p{};
  p.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.poolProps.location.id = d->ordinal();
  p.bytesize = bytes;
  CUdeviceptr allocated = 0;
  const bool over = capture_node(
      s,
      [&](Node* n) {
        const int32_t filled = fill_alloc(n, p);
        if (n->memory) allocated = n->memory->addr;
        return filled;
      },
      rc);
  if (over && *rc == CUDA_SUCCESS) *ptr = allocated;
  return over;
}

bool capture_free(StreamObj* s, CUdeviceptr ptr, CUresult* rc) {
  return capture_node(s, [&](Node* n) { return fill_free(n, ptr); }, rc);
}

// -- what may not be called -----------------------------------------------------------------------------------------

namespace {

bool unsupported(StreamObj* s, CUresult* rc) {
  std::lock_guard lock(mu());
  Capture* c = nullptr;
  *rc = enter(s, &c);
  if (*rc != CUDA_SUCCESS) return true;
  if (!c) return false;
  c->invalidated = true;
  *rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return true;
}

bool on_device(int device, CUresult* rc) {
  std::lock_guard lock(mu());
  bool any = false;
  for (auto& [id, c] : captures())
    for (const auto& [value, front] : c.streams)
      if (const StreamObj* s = stream_of(value); s && s->device == device) c.invalidated = any = true;
  if (any) *rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return any;
}

}  // namespace

bool refuse_unsafe(CUresult* rc) {
  if (t_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  std::lock_guard lock(mu());
  bool any = false;
  for (auto& [id, c] : captures()) {
    const bool own = pthread_equal(c.thread, pthread_self()) != 0;
    const bool conflicts = own ? c.mode != CU_STREAM_CAPTURE_MODE_RELAXED
                               : t_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && c.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!conflicts) continue;
    c.invalidated = any = true;
  }
  if (any) *rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return any;
}

bool refuse_unsafe(CUevent event, CUresult* rc) {
  const EventObj* e = client::events().get(bits(event));
  if (!e) return false;
  if (e->capture.load(std::memory_order_relaxed) == 0) return refuse_unsafe(rc);
  *rc = captured_event(e);
  return true;
}

bool refuse_command(CUstream stream, CUresult* rc) {
  StreamObj* s = nullptr;
  DeviceState* d = nullptr;
  return client::resolve_stream(bits(stream), &s, &d) == kOk && unsupported(s, rc);
}

bool refuse_stream(CUstream stream, CUresult* rc) {
  StreamObj* s = nullptr;
  DeviceState* d = nullptr;
  return client::resolve_stream(bits(stream), &s, &d) == kOk && (unsupported(s, rc) || refuse_unsafe(rc));
}
bool refuse_stream(CUresult* rc) { return refuse_stream(CUstream{nullptr}, rc); }

bool refuse_device(CUresult* rc) {
  DeviceState* d = nullptr;
  return client::current_device(&d) == kOk && (on_device(d->ordinal(), rc) || refuse_unsafe(rc));
}
bool refuse_device(CUcontext context, CUresult* rc) {
  if (!context) return refuse_device(rc);
  const client::ContextObj* c = client::contexts().get(bits(context));
  return c && (on_device(c->device, rc) || refuse_unsafe(rc));
}

CUresult captured_event(const EventObj* e) {
  std::lock_guard lock(mu());
  if (const auto it = captures().find(e->capture.load(std::memory_order_relaxed)); it != captures().end())
    it->second.invalidated = true;
  return CUDA_ERROR_CAPTURED_EVENT;
}

void event_destroyed(uint64_t event) {
  std::lock_guard lock(mu());
  captured_events().erase(event);
}

void stream_destroyed(StreamObj* s) {
  std::unique_ptr<Graph> gone;  // behind the lock: its memory is freed by messages
  std::lock_guard lock(mu());
  Capture* c = capture_of(s);
  if (!c) return;
  s->capture.store(0, std::memory_order_relaxed);
  c->left.push_back(std::move(c->streams[handle_value(s)]));
  c->streams.erase(handle_value(s));
  if (c->origin != handle_value(s)) return;
  // Nobody can end it any more.
  gone.reset(c->ours ? c->graph : nullptr);
  dissolve(*c);
  if (gone) forget_graph(gone.get());
}

// -- the calls ------------------------------------------------------------------------------------------------------

CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) {
  return begin(hStream, nullptr, nullptr, nullptr, 0, mode);
}
CUresult cuStreamBeginCapture(CUstream hStream) {
  return graph::cuStreamBeginCapture_v2(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}
CUresult cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode* dependencies,
                                     const CUgraphEdgeData* dependencyData, size_t numDependencies,
                                     CUstreamCaptureMode mode) {
  if (!hGraph) return CUDA_ERROR_INVALID_VALUE;
  return begin(hStream, hGraph, dependencies, dependencyData, numDependencies, mode);
}

CUresult cuStreamEndCapture(CUstream hStream, CUgraph* phGraph) {
  *phGraph = nullptr;
  DP_STREAM(hStream, s, d);
  std::unique_ptr<Graph> gone;
  std::lock_guard lock(mu());
  Capture* c = capture_of(s);
  if (!c) return CUDA_ERROR_ILLEGAL_STATE;
  if (c->origin != handle_value(s)) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(c->thread, pthread_self()))
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  Graph* graph = c->graph;
  const bool ours = c->ours;
  const CUresult rc = c->invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                      : joined(*c)   ? CUDA_SUCCESS
                                     : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  dissolve(*c);
  if (rc == CUDA_SUCCESS) {
    *phGraph = handle_of(graph);
  } else if (ours) {
    forget_graph(graph);
    gone.reset(graph);
  }
  return rc;
}

CUresult cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus* captureStatus) {
  DP_STREAM(hStream, s, d);
  *captureStatus = CU_STREAM_CAPTURE_STATUS_NONE;
  if (!capturing()) return CUDA_SUCCESS;
  std::lock_guard lock(mu());
  if (legacy_in_capture(s, false)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  if (const Capture* c = capture_of(s))
    *captureStatus = c->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out,
                                   CUgraph* graph_out, const CUgraphNode** dependencies_out,
                                   const CUgraphEdgeData** edgeData_out, size_t* numDependencies_out) {
  if (id_out) *id_out = 0;
  if (graph_out) *graph_out = nullptr;
  if (dependencies_out) *dependencies_out = nullptr;
  if (edgeData_out) *edgeData_out = nullptr;
  if (numDependencies_out) *numDependencies_out = 0;
  if (edgeData_out && !dependencies_out) return CUDA_ERROR_INVALID_VALUE;
  const CUresult rc = graph::cuStreamIsCapturing(hStream, captureStatus_out);
  if (rc != CUDA_SUCCESS || *captureStatus_out != CU_STREAM_CAPTURE_STATUS_ACTIVE) return rc;
  DP_STREAM(hStream, s, d);
  std::lock_guard lock(mu());
  Capture* c = capture_of(s);
  if (!c) return CUDA_ERROR_ILLEGAL_STATE;  // ended by another thread just now
  const Front& front = c->streams[handle_value(s)];
  if (dependencies_out && !edgeData_out && !std::all_of(front.data.begin(), front.data.end(), is_default))
    return CUDA_ERROR_LOSSY_QUERY;
  if (id_out) *id_out = c->id;
  if (graph_out) *graph_out = handle_of(c->graph);
  if (dependencies_out) *dependencies_out = front.nodes.data();
  if (edgeData_out) *edgeData_out = front.data.data();
  if (numDependencies_out) *numDependencies_out = front.nodes.size();
  return CUDA_SUCCESS;
}
CUresult cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out,
                                   CUgraph* graph_out, const CUgraphNode** dependencies_out,
                                   size_t* numDependencies_out) {
  return graph::cuStreamGetCaptureInfo_v3(hStream, captureStatus_out, id_out, graph_out, dependencies_out, nullptr,
                                          numDependencies_out);
}
CUresult cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out) {
  return graph::cuStreamGetCaptureInfo_v3(hStream, captureStatus_out, id_out, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream hStream, CUgraphNode* dependencies,
                                              const CUgraphEdgeData* dependencyData, size_t numDependencies,
                                              unsigned int flags) {
  if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES || (numDependencies && !dependencies)) return CUDA_ERROR_INVALID_VALUE;
  DP_STREAM(hStream, s, d);
  std::lock_guard lock(mu());
  Capture* c = capture_of(s);
  if (!c) return CUDA_ERROR_ILLEGAL_STATE;
  if (c->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  Front fresh;
  for (size_t i = 0; i < numDependencies; ++i) {
    const Node* n = node_of(dependencies[i]);
    if (!n || n->graph != c->graph) return CUDA_ERROR_INVALID_VALUE;
    fresh.add(dependencies[i], dependencyData ? dependencyData[i] : CUgraphEdgeData{});
  }
  Front& front = c->streams[handle_value(s)];
  if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES)
    front = std::move(fresh);
  else
    front.add(fresh);
  return CUDA_SUCCESS;
}
CUresult cuStreamUpdateCaptureDependencies(CUstream hStream, CUgraphNode* dependencies, size_t numDependencies,
                                           unsigned int flags) {
  return graph::cuStreamUpdateCaptureDependencies_v2(hStream, dependencies, nullptr, numDependencies, flags);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (static_cast<unsigned>(*mode) > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, t_mode);
  return CUDA_SUCCESS;
}

}  // namespace devproxy::sa::graph
