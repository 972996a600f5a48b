// SPDX-License-Identifier: Apache-2.0
// The vendor's functions about whole graphs: made, cloned, and what is in them. All of it is in the client:
// client_model.cc has the graphs, client_fill.cc and client_nodes.cc what concerns one node, client_exec.cc the
// execution, client_capture.cc stream capture.
#include <algorithm>
#include <functional>

#include "devproxy/interceptors/graph/client_graph.h"
#include "devproxy/interceptors/graph/hooks.h"

namespace devproxy::sa::graph {

namespace {

bool same(const CUgraphEdgeData& a, const CUgraphEdgeData& b) {
  return a.from_port == b.from_port && a.to_port == b.to_port && a.type == b.type;
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

CUresult neighbours(const std::vector<CUgraphNode>& all, const std::vector<CUgraphEdgeData>& data, CUgraphNode* out,
                    CUgraphEdgeData* data_out, size_t* count) {
  if (data_out && !out) return CUDA_ERROR_INVALID_VALUE;
  if (out && !data_out && !std::all_of(data.begin(), data.end(), is_default)) return CUDA_ERROR_LOSSY_QUERY;
  size_t n = *count;
  if (data_out) list(data, data_out, &n);
  return list(all, out, count);
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
  remove_node(n);
  return CUDA_SUCCESS;
}

}  // namespace devproxy::sa::graph
