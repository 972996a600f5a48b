// SPDX-License-Identifier: Apache-2.0
// The vendor's functions about one node: adding it, its parameters, the attributes of a kernel's.
#include <string.h>

#include <algorithm>
#include <utility>

#include "devproxy/interceptors/graph/client_graph.h"
#include "devproxy/interceptors/graph/hooks.h"

namespace devproxy::sa::graph {

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

}  // namespace

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

// -- attributes of kernel nodes ------------------------------------------------------------------------------------
// Taken or refused as cuLaunchKernelEx would with the node's shape.

namespace {

constexpr unsigned kLastAttribute = CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING;

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

}  // namespace devproxy::sa::graph
