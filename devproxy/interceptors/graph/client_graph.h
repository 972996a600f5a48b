// SPDX-License-Identifier: Apache-2.0
// Graphs, nodes and executable graphs as the client keeps them: plain process memory, so an open capture and every
// graph travel in the process image.
//
// Locks: mu() guards every graph and node, the captures and the tables of handles; Exec::mu, taken after it or alone,
// keeps the launches of one executable graph in the order of their messages. mu() is never held over a message, nor
// where a GraphMemory may go. A leaf of its own guards which of these are live (client_memory.cc).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "devproxy/csrc/args/comm.h"
#include "devproxy/csrc/wire/graph_step.h"
#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/launch/client.h"
#include "devproxy/interceptors/sync/client.h"

namespace devproxy::sa::graph {

struct Graph;
struct Node;

// A user object: a count, and what to call when it is 0. mu() guards it.
struct UserObject {
  uint64_t handle = 0, count = 0;
  CUhostFn destroy = nullptr;
  void* data = nullptr;
};
void retain(UserObject* o, uint64_t count);
void release(UserObject* o, uint64_t count);  // has the destructor called by the reaper at 0

// Calls `then` on the reaper's thread when the stream has completed `position`.
void when_complete(client::DeviceState* d, uint32_t stream_index, uint64_t position, std::shared_ptr<void> then);

struct Edge {
  Node* node;
  CUgraphEdgeData data;
};

struct Exec;

// What an allocation node allocates. It has its address, and its memory, from the moment when the node is made until
// there is neither a node nor an executable graph with it, and nothing that a launch allocated is left to be freed.
struct GraphMemory {
  client::DeviceState* d = nullptr;
  uint64_t addr = 0, bytes = 0;        // as the device rounds them
  CUDA_MEM_ALLOC_NODE_PARAMS given{};  // its accessDescs point to what follows
  std::vector<CUmemAccessDesc> access;
  // Guarded by the leaf:
  std::shared_ptr<GraphMemory> self;  // while it is allocated: that outlives its graph
  std::vector<client::Use> uses;      // by launches and frees

  GraphMemory() = default;
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;
  ~GraphMemory();
};

struct Kernel {
  CUDA_KERNEL_NODE_PARAMS given{};  // its kernelParams and extra point to what follows
  uint64_t function = 0;            // the function's own handle on its device
  launch::Geometry geometry{};
  std::vector<uint8_t> block;  // the parameters as a launch sends them
  std::vector<void*> pointers;
  size_t block_bytes = 0;
  void* extra[5] = {};
  std::vector<CUlaunchAttribute> attributes;
  std::vector<LaunchAttribute> travelling;  // of those, what the device gets
};

struct Node {
  uint64_t handle = 0;
  Graph* graph = nullptr;
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  uint64_t origin = 0;  // of a clone: the node that it was made from
  int device = -1;      // on which it runs; -1: any
  std::vector<Edge> dependencies;
  std::vector<Node*> dependents;

  Kernel kernel;
  CUDA_MEMCPY3D copy{};
  CUDA_MEMSET_NODE_PARAMS set{};
  CUcontext ctx = nullptr;
  CUDA_HOST_NODE_PARAMS host{};
  CUevent event = nullptr;
  std::vector<CommOp> comm;  // of an empty node: what a communicator's group does. The vendor has no type for it
  std::unique_ptr<Graph> child;
  std::shared_ptr<GraphMemory> memory;  // of an allocation node
  std::weak_ptr<GraphMemory> freed;     // of a free node: it keeps nothing
  CUdeviceptr freed_addr = 0;

  // of a node in an Exec: what it is on the server
  bool enabled = true;
  size_t n_steps = 0;
  std::vector<uint8_t> steps;
  std::vector<sync::HostCall> calls;
  std::vector<uint64_t> records;  // events, in the order of its EVENT_RECORD steps
};

struct Graph {
  uint64_t handle = 0;
  Node* inside = nullptr;                    // the node whose child it is
  uint64_t origin = 0;                       // of a clone: the graph that it was made from
  uint64_t capture = 0;                      // id of the capture that adds to it; 0: none
  bool has_memory = false;                   // it has allocation or free nodes
  std::weak_ptr<Exec> instance;              // of a graph with such nodes: the one that it may have
  std::vector<std::unique_ptr<Node>> nodes;  // in the order in which they were added
  std::map<UserObject*, uint64_t> objects;
  ~Graph();
};

// Pinned memory through which an executable graph copies from and to pageable memory.
struct Staging {
  client::DeviceState* d = nullptr;
  uint64_t addr = 0, bytes = 0;
  ~Staging();
};

struct Exec {
  uint64_t handle = 0;
  client::DeviceState* d = nullptr;
  uint64_t flags = 0;
  std::unique_ptr<Graph> image;                   // a clone of what was instantiated, brought up to date
  std::vector<Node*> order;                       // its nodes and those of its child graphs, as they run
  std::unordered_map<uint64_t, Node*> by_origin;  // the caller's node -> ours
  std::shared_ptr<Staging> staging;
  // Of a graph with memory nodes: what a launch leaves allocated, what it frees itself, what of other graphs it frees.
  std::vector<std::shared_ptr<GraphMemory>> leaves, returns;
  std::vector<std::weak_ptr<GraphMemory>> frees;

  std::mutex mu;  // guards what follows, and the order of messages about this graph
  bool gone = false;
  std::vector<sync::HostCall> calls;  // of all steps, in their order
  std::vector<uint64_t> records;
  uint32_t last_stream = 0;
  uint64_t last_end = 0;
};

std::mutex& mu();

// Look-ups; mu() held. nullptr where there is none.
Graph* graph_of(CUgraph h);
Node* node_of(CUgraphNode h);
std::shared_ptr<Exec> exec_of(CUgraphExec h);
inline CUgraph handle_of(const Graph* g) { return handle<CUgraph>(g->handle); }
inline CUgraphNode handle_of(const Node* n) { return handle<CUgraphNode>(n->handle); }

// mu() held.
std::unique_ptr<Graph> new_graph();
void register_graph(Graph* g);  // handles for it, its nodes and its child graphs
void forget_graph(Graph* g);    // and those handles are gone
std::unique_ptr<Graph> clone(const Graph& g);
void copy_payload(Node* to, const Node& from);  // what makes up a node besides its place in a graph
void link(Node* from, Node* to, const CUgraphEdgeData& data);
void unlink(Node* from, Node* to);
const Edge* edge(const Node* from, const Node* to);  // nullptr where there is none
void remove_node(Node* n);                           // it is gone, with its edges and its child graph
// Fills in a node; what can be checked is checked here. fill_kernel takes the node's attributes into account.
int32_t fill_kernel(Node* n, const CUDA_KERNEL_NODE_PARAMS& p);
int32_t fill_copy(Node* n, const CUDA_MEMCPY3D& p, CUcontext ctx);
int32_t fill_memset(Node* n, const CUDA_MEMSET_NODE_PARAMS& p, CUcontext ctx);
int32_t fill_host(Node* n, const CUDA_HOST_NODE_PARAMS& p);
int32_t fill_event(Node* n, CUgraphNodeType type, CUevent event);
int32_t fill_child(Node* n, const Graph& child);
int32_t fill_alloc(Node* n, const CUDA_MEM_ALLOC_NODE_PARAMS& p);
int32_t fill_free(Node* n, CUdeviceptr ptr);
int32_t fill_any(Node* n, const CUgraphNodeParams& p);
// Adds a filled node and takes it, else leaves it; the dependencies are nodes of the graph, each once.
int32_t add_node(Graph* g, std::unique_ptr<Node>& n, const CUgraphNode* dependencies, const CUgraphEdgeData* data,
                 size_t count, CUgraphNode* out);
// Whether a filled memory node may become one of `g`, which is then noted.
int32_t admit_memory(Graph* g, const Node& n);
// Whether `from` may take the place of `to` in an executable graph: of memory nodes only what is the same.
bool same_memory(const Node& to, const Node& from);
// Says that a graph with memory nodes cannot be what `what` asks for.
int32_t refuse_memory(const char* what);
inline bool is_memory(CUgraphNodeType type) {
  return type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || type == CU_GRAPH_NODE_TYPE_MEM_FREE;
}
bool valid_edge_data(const CUgraphEdgeData& data, const Node& from, const Node& to);
inline bool is_default(const CUgraphEdgeData& e) { return e.from_port == 0 && e.to_port == 0 && e.type == 0; }
// An order that the edges allow, with the nodes of child graphs in the place of their nodes; false where there is a
// cycle, and *at is a node on it.
bool linear_order(const Graph& g, std::vector<Node*>* order, Node** at);

// An executable graph's memory. `x` is filled by the first; the others need Exec::mu.
void gather_memory(Exec* x);
bool memory_is_free(const Exec& x);                                       // may it be launched?
void memory_launched(Exec* x, uint32_t stream_index, uint64_t position);  // the launch was posted
void forget_memory(Exec* x);                                              // it is destroyed

// A launch of the executable graph on `s`, where capturing(): true when it is over, with *rc.
[[nodiscard]] bool capture_graph(client::StreamObj* s, const std::shared_ptr<Exec>& x, CUresult* rc);

inline CUDA_KERNEL_NODE_PARAMS newer(const CUDA_KERNEL_NODE_PARAMS_v1& p) {
  return {p.func,      p.gridDimX,       p.gridDimY,     p.gridDimZ, p.blockDimX, p.blockDimY,
          p.blockDimZ, p.sharedMemBytes, p.kernelParams, p.extra,    nullptr,     nullptr};
}

// One side of a copy, down to addresses; false where it is no linear memory.
struct Side {
  uint64_t addr = 0, pitch = 0, slice = 0;
};
bool sides(const CUDA_MEMCPY3D& p, Side* dst, Side* src);

}  // namespace devproxy::sa::graph
