// SPDX-License-Identifier: Apache-2.0
// Graphs as they lie in the process: handles, nodes, edges, clones, and the order that the edges allow.
#include <atomic>
#include <functional>
#include <queue>
#include <utility>

#include "devproxy/interceptors/graph/client_graph.h"

namespace devproxy::sa::graph {

namespace {

// Handles of graphs and nodes are numbers that are never used again: a stale one is an error, not a crash.
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

void remove_node(Node* n) {
  while (!n->dependencies.empty()) unlink(n->dependencies.back().node, n);
  while (!n->dependents.empty()) unlink(n, n->dependents.back());
  nodes().erase(n->handle);
  if (n->child) forget_graph(n->child.get());
  std::erase_if(n->graph->nodes, [&](const auto& other) { return other.get() == n; });
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

}  // namespace devproxy::sa::graph
