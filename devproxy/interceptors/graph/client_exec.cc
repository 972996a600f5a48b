// SPDX-License-Identifier: Apache-2.0
// Executable graphs. Instantiation turns the nodes into the messages that they stand for, in an order that the edges
// allow, and sends them once; a launch is one message. What only the client can do, copying from or to pageable memory,
// is a host function between the stream and a pinned buffer, so that it happens in the stream's order too.
#include <string.h>

#include <algorithm>
#include <functional>
#include <unordered_set>
#include <utility>

#include "devproxy/interceptors/graph/client_graph.h"
#include "devproxy/interceptors/graph/hooks.h"
#include "devproxy/interceptors/managed/client.h"

namespace devproxy::sa::graph {

using client::DeviceState;
using client::log;
using client::place_of;
using client::StreamObj;
using wire::Opcode;

namespace {

// Of the pinned buffer: larger copies of pageable memory go through it in pieces. The steps of a launch run one after
// the other, so one buffer serves them all.
constexpr uint64_t kStagingBytes = 4u << 20;
// A launch has its ring positions in one record (wire/graph_step.h).
constexpr size_t kMaxRecords = kMaxInlineBytes / 2 - 2;

using wire::Space;
using enum wire::Space;
constexpr Space kHost = kChunk;  // pageable: it goes through staging

struct ExecEntry {
  std::shared_ptr<Exec> exec;
};
using ExecMap = client::HandleMap<ExecEntry, HandleKind::kGraph>;
ExecMap& execs() {
  static auto* m = new ExecMap;
  return *m;
}

// -- nodes as steps -------------------------------------------------------------------------------------------------

class Steps {
 public:
  explicit Steps(Node* n) : n_(n) {
    n->steps.clear();
    n->calls.clear();
    n->records.clear();
    n->n_steps = 0;
  }
  template <class Req>
  void add(Opcode op, const Req& req, const void* bulk = nullptr, size_t bulk_bytes = 0) {
    const wire::GraphStepHead head{static_cast<uint16_t>(op), sizeof req, static_cast<uint32_t>(bulk_bytes), 0};
    append(&head, sizeof head);
    append(&req, sizeof req);
    append(bulk, bulk_bytes);
    ++n_->n_steps;
  }
  void call(sync::HostCall call) {
    add(Opcode::HOST_FUNC, wire::HOST_FUNC_req{});
    n_->calls.push_back(std::move(call));
  }
  void record(uint64_t event) {
    add(Opcode::EVENT_RECORD, wire::EVENT_RECORD_req{VHandle{event}, {}});
    n_->records.push_back(event);
  }

 private:
  void append(const void* from, size_t bytes) {
    if (!bytes) return;
    const auto* p = static_cast<const uint8_t*>(from);
    n_->steps.insert(n_->steps.end(), p, p + bytes);
    n_->steps.resize(wire::graph_step_round(n_->steps.size()));
  }
  Node* n_;
};

// Rows that the host-function thread copies.
struct Rows {
  uint64_t dst, dst_pitch, src, src_pitch, width, rows;
};

void copy_rows(void* data) {
  const auto& r = *static_cast<const Rows*>(data);
  for (uint64_t i = 0; i < r.rows; ++i)
    memcpy(reinterpret_cast<void*>(r.dst + i * r.dst_pitch), reinterpret_cast<const void*>(r.src + i * r.src_pitch),
           r.width);
}

sync::HostCall rows_call(const Rows& rows) {
  auto kept = std::make_shared<Rows>(rows);
  sync::HostCall call;
  call.fn = copy_rows;
  call.data = kept.get();
  call.keep = std::move(kept);
  return call;
}

// How the server of `device` sees an address.
Space space_on(int device, uint64_t addr) {
  const client::Place p = place_of(addr);
  if (p.device != device) return managed::is_managed(addr, p) ? kPinned : kHost;
  return p.pinned ? kPinned : kDevice;
}

// A copy, down to rectangles that both ends of a row have at one address.
struct Copy {
  Side dst, src;
  Space to = kHost, from = kHost;
  uint64_t width = 0, height = 0, depth = 0;
  bool empty() const { return width == 0 || height == 0 || depth == 0; }
  bool staged() const { return !empty() && (to == kHost) != (from == kHost); }
  uint64_t staging() const { return staged() ? std::min(kStagingBytes, width * height * depth) : 0; }
};

Copy copy_of(const Node& n, int device) {
  Copy c;
  if (!sides(n.copy, &c.dst, &c.src)) return {};
  c.width = n.copy.WidthInBytes, c.height = n.copy.Height, c.depth = n.copy.Depth;
  if (c.empty()) return c;
  c.to = space_on(device, c.dst.addr), c.from = space_on(device, c.src.addr);
  const bool rows = c.height == 1 || (c.dst.pitch == c.width && c.src.pitch == c.width);
  const bool slices = c.depth == 1 || (c.dst.slice == c.width * c.height && c.src.slice == c.width * c.height);
  if (rows && slices) {
    c.width *= c.height * c.depth;
    c.height = c.depth = 1;
    c.dst.pitch = c.src.pitch = c.width;
  }
  return c;
}

void add_copy(Steps* steps, const Copy& c, uint64_t staging) {
  auto between = [&](uint64_t dst, uint64_t dst_pitch, Space to, uint64_t src, uint64_t src_pitch, Space from,
                     uint64_t width, uint64_t height) {
    steps->add(Opcode::COPY_2D, wire::COPY_2D_req{{}, dst, src, dst_pitch, src_pitch, width, height, to, from, 0, 0});
  };
  for (uint64_t z = 0; z < c.depth && !c.empty(); ++z) {
    const uint64_t dst = c.dst.addr + z * c.dst.slice, src = c.src.addr + z * c.src.slice;
    if (c.to == kHost && c.from == kHost) {
      steps->call(rows_call({dst, c.dst.pitch, src, c.src.pitch, c.width, c.height}));
      continue;
    }
    if (!c.staged()) {
      between(dst, c.dst.pitch, c.to, src, c.src.pitch, c.from, c.width, c.height);
      continue;
    }
    const uint64_t columns = std::min(c.width, kStagingBytes), at_once = std::max<uint64_t>(1, kStagingBytes / columns);
    for (uint64_t y = 0; y < c.height; y += at_once) {
      const uint64_t rows = std::min(at_once, c.height - y);
      for (uint64_t x = 0; x < c.width; x += columns) {
        const uint64_t width = std::min(columns, c.width - x);
        const uint64_t to = dst + y * c.dst.pitch + x, from = src + y * c.src.pitch + x;
        if (c.from == kHost) {
          steps->call(rows_call({staging, width, from, c.src.pitch, width, rows}));
          between(to, c.dst.pitch, c.to, staging, width, kPinned, width, rows);
        } else {
          between(staging, width, kPinned, from, c.src.pitch, c.from, width, rows);
          steps->call(rows_call({to, c.dst.pitch, staging, width, width, rows}));
        }
      }
    }
  }
}

// Makes the steps of one node; those of a child graph are its nodes' own.
void compile(Node* n, int device, uint64_t staging) {
  Steps steps(n);
  if (!n->enabled) return;
  switch (n->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      const Kernel& k = n->kernel;
      const launch::Geometry& g = k.geometry;
      const size_t before = k.travelling.size() * sizeof(LaunchAttribute);
      std::vector<uint8_t> bulk(before + k.block.size());
      std::copy(k.block.begin(), k.block.end(), bulk.begin() + static_cast<std::ptrdiff_t>(before));
      const auto bytes = static_cast<uint32_t>(bulk.size());
      if (before == 0) {
        auto req = launch::request<wire::LAUNCH_req>(k.function, {}, g);
        req.bulk_bytes = bytes;
        return steps.add(Opcode::LAUNCH, req, bulk.data(), bytes);
      }
      memcpy(bulk.data(), k.travelling.data(), before);
      auto req = launch::request<wire::LAUNCH_EX_req>(k.function, {}, g, static_cast<uint32_t>(k.travelling.size()));
      req.bulk_bytes = bytes;
      return steps.add(Opcode::LAUNCH_EX, req, bulk.data(), bytes);
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY: return add_copy(&steps, copy_of(*n, device), staging);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      const CUDA_MEMSET_NODE_PARAMS& p = n->set;
      if (p.width == 0 || p.height == 0) return;
      return steps.add(Opcode::MEMSET, wire::MEMSET_req{{}, p.dst, p.pitch, p.width, p.height, p.value, p.elementSize});
    }
    case CU_GRAPH_NODE_TYPE_HOST: {
      sync::HostCall call;
      call.fn = n->host.fn;
      call.data = n->host.userData;
      return steps.call(std::move(call));
    }
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return steps.record(bits(n->event));
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return steps.add(Opcode::STREAM_WAIT_EVENT, wire::STREAM_WAIT_EVENT_req{{}, VHandle{bits(n->event)}});
    case CU_GRAPH_NODE_TYPE_EMPTY: {
      if (n->comm.empty()) return;
      wire::COMM_GROUP_req req{};
      req.bulk_bytes = static_cast<uint32_t>(n->comm.size() * sizeof(CommOp));
      return steps.add(Opcode::COMM_GROUP, req, n->comm.data(), req.bulk_bytes);
    }
    default: return;
  }
}

uint64_t staging_need(const Exec& x) {
  uint64_t most = 0;
  for (const Node* n : x.order)
    if (n->type == CU_GRAPH_NODE_TYPE_MEMCPY) most = std::max(most, copy_of(*n, x.d->ordinal()).staging());
  return most;
}

int32_t make_staging(Exec* x, uint64_t bytes) {
  if (bytes == 0) return kOk;
  auto staging = std::make_shared<Staging>();
  int32_t error = kOk;
  staging->addr = x->d->allocate_pinned(bytes, &error);
  if (!staging->addr) return error;
  staging->d = x->d;
  staging->bytes = bytes;
  x->staging = std::move(staging);
  return kOk;
}

// What a launch needs beside the message, gathered from the nodes.
void gather(Exec* x) {
  x->calls.clear();
  x->records.clear();
  for (const Node* n : x->order) {
    x->calls.insert(x->calls.end(), n->calls.begin(), n->calls.end());
    x->records.insert(x->records.end(), n->records.begin(), n->records.end());
  }
}

// The GPU of a graph's nodes; nodes that run anywhere run there too.
int32_t find_device(const std::vector<Node*>& order, int* device) {
  *device = -1;
  for (const Node* n : order) {
    if (n->device < 0 || n->device == *device) continue;
    if (*device >= 0) {
      log(client::Level::kWarn,
          "instantiating a graph with nodes on GPU %d and GPU %d is refused: a graph runs on one GPU", *device,
          n->device);
      return kNotSupported;
    }
    *device = n->device;
  }
  if (*device >= 0) return kOk;
  DeviceState* d = nullptr;
  if (const int32_t rc = client::current_device(&d); rc != kOk) return rc;
  *device = d->ordinal();
  return kOk;
}

struct Failure {
  CUgraphInstantiateResult result = CUDA_GRAPH_INSTANTIATE_ERROR;
  CUgraphNode node = nullptr;
};

int32_t instantiate(CUgraph hGraph, uint64_t flags, CUgraphExec* out, Failure* failure) {
  constexpr uint64_t kKnown = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD |
                              CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  if (flags & ~kKnown) return kInvalidValue;
  if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) {
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) return kInvalidValue;
    log(client::Level::kWarn, "instantiating a graph for launches from the device is refused: launch it from the host");
    return kNotSupported;
  }
  auto x = std::make_shared<Exec>();
  {
    std::lock_guard lock(mu());
    Graph* g = graph_of(hGraph);
    if (!g) return kInvalidValue;
    if (g->capture) return kIllegalState;  // cuda.h, cuStreamBeginCaptureToGraph: not before the capture has ended
    if (g->has_memory && g->instance.lock()) return refuse_memory("a second executable graph beside the first");
    x->image = clone(*g);
    if (g->has_memory) g->instance = x;
  }
  Node* at = nullptr;
  if (!linear_order(*x->image, &x->order, &at)) {
    *failure = {CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE, handle<CUgraphNode>(at->origin)};
    return kInvalidValue;
  }
  int device = -1;
  if (const int32_t rc = find_device(x->order, &device); rc != kOk) return rc;
  int32_t error = kOk;
  x->d = client::device_state(device, &error);
  if (!x->d) return error;
  x->flags = flags;
  if (const int32_t rc = make_staging(x.get(), staging_need(*x)); rc != kOk) return rc;
  std::vector<uint8_t> steps;
  for (Node* n : x->order) {
    x->by_origin[n->origin] = n;
    compile(n, device, x->staging ? x->staging->addr : 0);
    steps.insert(steps.end(), n->steps.begin(), n->steps.end());
  }
  gather(x.get());
  gather_memory(x.get());
  if (x->records.size() > kMaxRecords) {
    log(client::Level::kWarn, "a graph with %zu event records is refused: %zu is the limit", x->records.size(),
        kMaxRecords);
    return kNotSupported;
  }
  ExecEntry* entry = execs().add(device, &x->handle);
  if (!entry) return kOutOfMemory;
  wire::GRAPH_CREATE_req req{};
  req.graph = VHandle{x->handle};
  const int32_t rc = x->d->conn().call_bulk(Opcode::GRAPH_CREATE, req, {steps.data(), steps.size()});
  std::lock_guard lock(mu());
  if (rc == kOk) entry->exec = x;
  execs().publish(x->handle);
  if (rc != kOk) {
    execs().remove(x->handle);
    return rc;
  }
  *out = handle<CUgraphExec>(x->handle);
  failure->result = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  return kOk;
}

}  // namespace

Staging::~Staging() {
  // An error only says that the server is gone, and then its mapping is too.
  if (addr) static_cast<void>(d->free_pinned(addr));
}

std::shared_ptr<Exec> exec_of(CUgraphExec h) {
  const ExecEntry* entry = execs().get(bits(h));
  return entry ? entry->exec : nullptr;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* phGraphExec, CUgraph hGraph, unsigned long long flags) {
  if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) return CUDA_ERROR_INVALID_VALUE;  // cuda.h: only with params
  Failure failure;
  return result(instantiate(hGraph, flags, phGraphExec, &failure));
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* phGraphExec, CUgraph hGraph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams) {
  Failure failure;
  const int32_t rc = instantiate(hGraph, instantiateParams->flags, phGraphExec, &failure);
  instantiateParams->result_out = failure.result;
  instantiateParams->hErrNode_out = failure.node;
  return result(rc);
}

CUresult cuGraphInstantiate_v2(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode, char* logBuffer,
                               size_t bufferSize) {
  Failure failure;
  const int32_t rc = instantiate(hGraph, 0, phGraphExec, &failure);
  if (phErrorNode) *phErrorNode = failure.node;
  if (logBuffer && bufferSize) logBuffer[0] = 0;
  return result(rc);
}

CUresult cuGraphInstantiate(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode, char* logBuffer,
                            size_t bufferSize) {
  return graph::cuGraphInstantiate_v2(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize);
}

namespace {
std::shared_ptr<Exec> locked_exec_of(CUgraphExec h) {
  std::lock_guard lock(mu());
  return exec_of(h);
}
}  // namespace

CUresult cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t* flags) {
  const auto x = locked_exec_of(hGraphExec);
  if (!x) return CUDA_ERROR_INVALID_VALUE;
  *flags = x->flags & ~static_cast<uint64_t>(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD);  // cuda.h: not returned
  return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec hGraphExec) {
  std::shared_ptr<Exec> x;
  {
    std::lock_guard lock(mu());
    x = exec_of(hGraphExec);
    if (!x) return CUDA_ERROR_INVALID_VALUE;
    execs().get(bits(hGraphExec))->exec = nullptr;
    execs().remove(bits(hGraphExec));
    if (Graph* g = graph_of(handle<CUgraph>(x->image->origin)); g && g->has_memory) g->instance.reset();
  }
  std::lock_guard lock(x->mu);
  x->gone = true;
  const int32_t rc = x->d->conn().post(Opcode::GRAPH_DESTROY, wire::GRAPH_DESTROY_req{VHandle{x->handle}});
  // A launch may still run: what it uses in the client stays until then.
  if (!x->d->conn().completed(x->last_stream, x->last_end)) when_complete(x->d, x->last_stream, x->last_end, x);
  forget_memory(x.get());  // it knows its uses by itself
  return result(rc);
}

// -- launch ---------------------------------------------------------------------------------------------------------

CUresult cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream) {
  DP_STREAM(hStream, s, d);
  const auto x = locked_exec_of(hGraphExec);
  if (!x) return CUDA_ERROR_INVALID_VALUE;
  if (d != x->d) {
    log(client::Level::kWarn, "launching a graph of GPU %d on a stream of GPU %d is refused", x->d->ordinal(),
        d->ordinal());
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (const int32_t late = d->conn().take_late_error(); __builtin_expect(late != kOk, 0)) return result(late);
  std::lock_guard lock(x->mu);
  if (x->gone || !memory_is_free(*x)) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t records = x->records.size(), positions = wire::graph_positions(records);
  wire::GRAPH_LAUNCH_req req{VHandle{x->handle}, VHandle{s->handle.load(std::memory_order_relaxed)}, 0, 0, 0};
  const size_t filling = positions > sizeof req ? positions - sizeof req : 0;
  req.bulk_bytes = static_cast<uint32_t>(filling);
  uint64_t end = 0;
  auto post = [&](uint64_t token) {
    req.token = token;
    return d->conn().post_in_place(
        Opcode::GRAPH_LAUNCH, req, filling, [&](uint8_t* to) { memset(to, 0, filling); }, &end);
  };
  const int32_t rc = x->calls.empty() ? post(0) : sync::post_host_calls(d, x->calls.data(), x->calls.size(), post);
  if (rc != kOk) return result(rc);
  s->note(end);
  d->note_launch();
  for (uint64_t j = 0; j < records; ++j)
    if (client::EventObj* e = client::events().get(x->records[j]))
      sync::set_record(e, s, wire::graph_record_position(end, records, j));
  x->last_stream = s->index;
  x->last_end = end;
  memory_launched(x.get(), s->index, end);
  return CUDA_SUCCESS;
}

CUresult captured::cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream) {
  DP_STREAM(hStream, s, d);
  const auto x = locked_exec_of(hGraphExec);
  if (!x) return CUDA_ERROR_INVALID_VALUE;
  CUresult rc = CUDA_SUCCESS;
  return capture_graph(s, x, &rc) ? rc : graph::cuGraphLaunch(hGraphExec, hStream);
}

CUresult cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream) {
  DP_STREAM(hStream, s, d);
  const auto x = locked_exec_of(hGraphExec);
  if (!x) return CUDA_ERROR_INVALID_VALUE;
  return result(d->conn().error());
}

// -- updates --------------------------------------------------------------------------------------------------------

namespace {

// Makes the changed nodes' steps anew and has the server take them. x->mu held.
int32_t resend(Exec* x, std::unordered_set<Node*> changed) {
  if (const uint64_t need = staging_need(*x); need > (x->staging ? x->staging->bytes : 0)) {
    const auto old = x->staging;
    if (const int32_t rc = make_staging(x, need); rc != kOk) return rc;
    if (old && !x->d->conn().completed(x->last_stream, x->last_end))
      when_complete(x->d, x->last_stream, x->last_end, old);
    for (Node* n : x->order)  // all that go through it
      if (n->type == CU_GRAPH_NODE_TYPE_MEMCPY) changed.insert(n);
  }
  // Runs of neighbours travel together.
  std::vector<Node*> run;
  size_t first = 0, old_steps = 0;
  std::vector<uint8_t> bytes;
  auto send = [&]() -> int32_t {
    if (run.empty()) return kOk;
    wire::GRAPH_UPDATE_req req{VHandle{x->handle}, static_cast<uint32_t>(first), static_cast<uint32_t>(old_steps), 0,
                               0};
    const int32_t rc = x->d->conn().post_bulk(Opcode::GRAPH_UPDATE, req, {bytes.data(), bytes.size()});
    run.clear();
    bytes.clear();
    return rc;
  };
  int32_t rc = kOk;
  size_t at = 0;  // step at which the node begins, with what was sent so far
  for (Node* n : x->order) {
    const size_t steps_before = n->n_steps;
    bool differs = false;
    if (changed.contains(n)) {
      const std::vector<uint8_t> before = std::move(n->steps);
      compile(n, x->d->ordinal(), x->staging ? x->staging->addr : 0);
      differs = n->steps != before;
    }
    if (differs) {
      if (run.empty()) first = at, old_steps = 0;
      run.push_back(n);
      old_steps += steps_before;
      bytes.insert(bytes.end(), n->steps.begin(), n->steps.end());
    } else if (const int32_t sent = send(); rc == kOk) {
      rc = sent;
    }
    at += n->n_steps;
  }
  if (const int32_t sent = send(); rc == kOk) rc = sent;
  gather(x);
  return rc;
}

bool one_dimensional(const CUDA_MEMCPY3D& p) { return p.Height == 1 && p.Depth == 1 && p.WidthInBytes != 0; }

// May `to` of an executable graph become `from`?
CUgraphExecUpdateResult may_become(const Node& to, const Node& from) {
  if (to.type != from.type) return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
  switch (to.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return to.device == from.device ? CU_GRAPH_EXEC_UPDATE_SUCCESS
                                      : CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE;
    case CU_GRAPH_NODE_TYPE_MEMCPY: {
      // cuda.h, cuGraphExecUpdate: neither the devices nor the memory types of the operands may change.
      const Copy a = copy_of(to, to.device), b = copy_of(from, to.device);
      return to.device == from.device && a.to == b.to && a.from == b.from
                 ? CU_GRAPH_EXEC_UPDATE_SUCCESS
                 : CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    }
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      const auto &a = to.set, &b = from.set;
      const bool plane = a.height != 1 || b.height != 1;
      const bool same_shape = a.height == b.height && a.width == b.width && a.elementSize == b.elementSize &&
                              (a.height == 1 || a.pitch == b.pitch);
      return to.device == from.device && (!plane || same_shape) ? CU_GRAPH_EXEC_UPDATE_SUCCESS
                                                                : CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    }
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return to.device == from.device ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return to.comm.empty() == from.comm.empty() ? CU_GRAPH_EXEC_UPDATE_SUCCESS
                                                  : CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return same_memory(to, from) ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    default: return CU_GRAPH_EXEC_UPDATE_SUCCESS;
  }
}

void become(Node* to, const Node& from) {
  to->kernel = from.kernel;
  to->copy = from.copy;
  to->set = from.set;
  to->ctx = from.ctx;
  to->host = from.host;
  to->event = from.event;
  to->comm = from.comm;
}

// Gives the node of an executable graph new parameters.
template <class Fill, class Check>
CUresult update(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeType type, Fill fill, Check check) {
  Node fresh;
  std::shared_ptr<Exec> x;
  {
    std::lock_guard lock(mu());
    x = exec_of(hGraphExec);
    const Node* n = node_of(hNode);
    if (!x || !n || n->type != type) return CUDA_ERROR_INVALID_VALUE;
    fresh.kernel.attributes = n->kernel.attributes;  // they stay
  }
  if (const int32_t rc = fill(&fresh); rc != kOk) return result(rc);
  if (fresh.type != type) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(x->mu);
  const auto ours = x->by_origin.find(bits(hNode));
  if (x->gone || ours == x->by_origin.end() || ours->second->type != type) return CUDA_ERROR_INVALID_VALUE;
  Node* n = ours->second;
  if (may_become(*n, fresh) != CU_GRAPH_EXEC_UPDATE_SUCCESS || !check(*n, fresh)) return CUDA_ERROR_INVALID_VALUE;
  become(n, fresh);
  return result(resend(x.get(), {n}));
}

template <class Fill>
CUresult update(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeType type, Fill fill) {
  return update(hGraphExec, hNode, type, fill, [](const Node&, const Node&) { return true; });
}

bool copy_may_change(const Node& to, const Node& from) {
  return one_dimensional(to.copy) && one_dimensional(from.copy);
}
bool memset_may_change(const Node& to, const Node& from) {
  return to.set.height == from.set.height && from.set.width != 0 && from.set.height != 0;
}

// Pairs the nodes of `to` with those of `from` by the order in which they were added, child graphs too.
CUgraphExecUpdateResult pair(const Graph& to, const Graph& from, std::vector<std::pair<Node*, const Node*>>* pairs,
                             CUgraphExecUpdateResultInfo* info) {
  auto wrong = [&](CUgraphExecUpdateResult why, const Node* n, const Node* before = nullptr) {
    info->errorNode = n ? handle<CUgraphNode>(n->origin) : nullptr;
    info->errorFromNode = before ? handle<CUgraphNode>(before->origin) : nullptr;
    return why;
  };
  if (to.nodes.size() != from.nodes.size()) return wrong(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, nullptr);
  std::unordered_map<const Node*, const Node*> partner;
  for (size_t i = 0; i < to.nodes.size(); ++i) partner[from.nodes[i].get()] = to.nodes[i].get();
  for (size_t i = 0; i < to.nodes.size(); ++i) {
    Node* a = to.nodes[i].get();
    const Node* b = from.nodes[i].get();
    if (a->dependencies.size() != b->dependencies.size()) return wrong(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, b);
    for (const Edge& e : b->dependencies)
      if (std::none_of(a->dependencies.begin(), a->dependencies.end(),
                       [&](const Edge& other) { return other.node == partner[e.node]; }))
        return wrong(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, b, e.node);
    if (const auto why = may_become(*a, *b); why != CU_GRAPH_EXEC_UPDATE_SUCCESS) return wrong(why, b);
    pairs->emplace_back(a, b);
    if (a->child)
      if (const auto why = pair(*a->child, *b->child, pairs, info); why != CU_GRAPH_EXEC_UPDATE_SUCCESS) return why;
  }
  return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

int32_t take_over(Exec* x, const std::vector<std::pair<Node*, const Node*>>& pairs) {
  std::unordered_set<Node*> changed;
  for (const auto& [to, from] : pairs) {
    become(to, *from);
    changed.insert(to);
  }
  return resend(x, std::move(changed));
}

}  // namespace

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
                                           const CUDA_KERNEL_NODE_PARAMS* nodeParams) {
  return update(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node* n) { return fill_kernel(n, *nodeParams); });
}
CUresult cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                        const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  const CUDA_KERNEL_NODE_PARAMS p = newer(*nodeParams);
  return graph::cuGraphExecKernelNodeSetParams_v2(hGraphExec, hNode, &p);
}
CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D* copyParams,
                                        CUcontext ctx) {
  return update(
      hGraphExec, hNode, CU_GRAPH_NODE_TYPE_MEMCPY, [&](Node* n) { return fill_copy(n, *copyParams, ctx); },
      copy_may_change);
}
CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                        const CUDA_MEMSET_NODE_PARAMS* memsetParams, CUcontext ctx) {
  return update(
      hGraphExec, hNode, CU_GRAPH_NODE_TYPE_MEMSET, [&](Node* n) { return fill_memset(n, *memsetParams, ctx); },
      memset_may_change);
}
CUresult cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                      const CUDA_HOST_NODE_PARAMS* nodeParams) {
  return update(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_HOST, [&](Node* n) { return fill_host(n, *nodeParams); });
}
CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event) {
  return update(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                [&](Node* n) { return fill_event(n, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event); });
}
CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event) {
  return update(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                [&](Node* n) { return fill_event(n, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event); });
}

CUresult cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams* nodeParams) {
  switch (nodeParams->type) {
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return graph::cuGraphExecChildGraphNodeSetParams(hGraphExec, hNode, nodeParams->graph.graph);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      if (nodeParams->memcpy.flags || nodeParams->memcpy.reserved) return CUDA_ERROR_INVALID_VALUE;
      return graph::cuGraphExecMemcpyNodeSetParams(hGraphExec, hNode, &nodeParams->memcpy.copyParams,
                                                   nodeParams->memcpy.copyCtx);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return result(refuse_memory("cuGraphExecNodeSetParams of such a node"));
    default:
      return update(
          hGraphExec, hNode, nodeParams->type, [&](Node* n) { return fill_any(n, *nodeParams); },
          nodeParams->type == CU_GRAPH_NODE_TYPE_MEMSET ? memset_may_change
                                                        : [](const Node&, const Node&) { return true; });
  }
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph) {
  std::shared_ptr<Exec> x;
  std::unique_ptr<Graph> fresh;
  {
    std::lock_guard lock(mu());
    x = exec_of(hGraphExec);
    const Node* n = node_of(hNode);
    const Graph* g = graph_of(childGraph);
    if (!x || !n || !g || n->type != CU_GRAPH_NODE_TYPE_GRAPH) return CUDA_ERROR_INVALID_VALUE;
    fresh = clone(*g);
  }
  std::lock_guard lock(x->mu);
  const auto ours = x->by_origin.find(bits(hNode));
  if (x->gone || ours == x->by_origin.end() || !ours->second->child) return CUDA_ERROR_INVALID_VALUE;
  std::vector<std::pair<Node*, const Node*>> pairs;
  CUgraphExecUpdateResultInfo info{};
  if (pair(*ours->second->child, *fresh, &pairs, &info) != CU_GRAPH_EXEC_UPDATE_SUCCESS)
    return CUDA_ERROR_INVALID_VALUE;
  return result(take_over(x.get(), pairs));
}

CUresult cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo* resultInfo) {
  *resultInfo = {CU_GRAPH_EXEC_UPDATE_ERROR, nullptr, nullptr};
  std::shared_ptr<Exec> x;
  std::unique_ptr<Graph> fresh;
  {
    std::lock_guard lock(mu());
    x = exec_of(hGraphExec);
    const Graph* g = graph_of(hGraph);
    if (!x || !g || g->capture) return CUDA_ERROR_INVALID_VALUE;
    fresh = clone(*g);
  }
  std::lock_guard lock(x->mu);
  if (x->gone) return CUDA_ERROR_INVALID_VALUE;
  std::vector<std::pair<Node*, const Node*>> pairs;
  resultInfo->result = pair(*x->image, *fresh, &pairs, resultInfo);
  if (resultInfo->result != CU_GRAPH_EXEC_UPDATE_SUCCESS) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  const int32_t rc = take_over(x.get(), pairs);
  // The new graph's user objects are what it uses now; a launch that still runs has the old ones.
  if (rc == kOk) std::swap(x->image->objects, fresh->objects);
  if (!fresh->objects.empty())
    when_complete(x->d, x->last_stream, x->last_end, std::shared_ptr<Graph>(std::move(fresh)));
  if (rc != kOk) resultInfo->result = CU_GRAPH_EXEC_UPDATE_ERROR;
  return result(rc);
}

CUresult cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode* hErrorNode_out,
                           CUgraphExecUpdateResult* updateResult_out) {
  CUgraphExecUpdateResultInfo info{};
  const CUresult rc = graph::cuGraphExecUpdate_v2(hGraphExec, hGraph, &info);
  if (hErrorNode_out) *hErrorNode_out = info.errorNode;
  *updateResult_out = info.result;
  return rc;
}

CUresult cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled) {
  std::shared_ptr<Exec> x;
  {
    std::lock_guard lock(mu());
    x = exec_of(hGraphExec);
    const Node* n = node_of(hNode);
    // cuda.h: only kernel, memset and memcpy nodes.
    if (!x || !n || n->type > CU_GRAPH_NODE_TYPE_MEMSET) return CUDA_ERROR_INVALID_VALUE;
  }
  std::lock_guard lock(x->mu);
  const auto ours = x->by_origin.find(bits(hNode));
  if (x->gone || ours == x->by_origin.end()) return CUDA_ERROR_INVALID_VALUE;
  ours->second->enabled = isEnabled != 0;
  return result(resend(x.get(), {ours->second}));
}

CUresult cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int* isEnabled) {
  const auto x = locked_exec_of(hGraphExec);
  if (!x) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(x->mu);
  const auto ours = x->by_origin.find(bits(hNode));
  if (ours == x->by_origin.end() || ours->second->type > CU_GRAPH_NODE_TYPE_MEMSET) return CUDA_ERROR_INVALID_VALUE;
  *isEnabled = ours->second->enabled;
  return CUDA_SUCCESS;
}

}  // namespace devproxy::sa::graph
