// SPDX-License-Identifier: Apache-2.0
// Graphs and stream capture: the driver's, under the runtime's names. What differs is how a node's parameters are
// written down, and that a kernel is named by its host address.
#include <stddef.h>
#include <string.h>

#include "cudart_decl.gen.h"
#include "devproxy/interceptors/cudart/copies.h"
#include "devproxy/interceptors/cudart/registration.h"
#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart::graph {

namespace {

// What both headers write alike is handed on as it is.
static_assert(sizeof(cudaGraphEdgeData) == sizeof(CUgraphEdgeData));
static_assert(sizeof(cudaHostNodeParams) == sizeof(CUDA_HOST_NODE_PARAMS));
static_assert(sizeof(cudaMemsetParams) == sizeof(CUDA_MEMSET_NODE_PARAMS));
static_assert(sizeof(cudaGraphExecUpdateResultInfo) == sizeof(CUgraphExecUpdateResultInfo));
static_assert(sizeof(cudaGraphInstantiateParams) == sizeof(CUDA_GRAPH_INSTANTIATE_PARAMS));
static_assert(sizeof(cudaMemAllocNodeParams) == sizeof(CUDA_MEM_ALLOC_NODE_PARAMS));
static_assert(sizeof(cudaMemPoolProps) == sizeof(CUmemPoolProps));
static_assert(sizeof(cudaMemAccessDesc) == sizeof(CUmemAccessDesc));
static_assert(offsetof(cudaMemAllocNodeParams, dptr) == offsetof(CUDA_MEM_ALLOC_NODE_PARAMS, dptr));
static_assert(offsetof(cudaMemPoolProps, usage) == offsetof(CUmemPoolProps, usage));
static_assert(static_cast<int>(cudaGraphMemAttrReservedMemHigh) == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH);
static_assert(static_cast<int>(cudaGraphNodeTypeMemFree) == CU_GRAPH_NODE_TYPE_MEM_FREE);
static_assert(sizeof(cudaLaunchAttributeValue) == sizeof(CUlaunchAttributeValue));
static_assert(static_cast<int>(cudaGraphNodeTypeEventRecord) == CU_GRAPH_NODE_TYPE_EVENT_RECORD);
static_assert(static_cast<int>(cudaGraphExecUpdateErrorTopologyChanged) == CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
static_assert(static_cast<int>(cudaStreamCaptureModeRelaxed) == CU_STREAM_CAPTURE_MODE_RELAXED);

const CUgraphEdgeData* edges(const cudaGraphEdgeData* data) { return reinterpret_cast<const CUgraphEdgeData*>(data); }
CUgraphEdgeData* edges(cudaGraphEdgeData* data) { return reinterpret_cast<CUgraphEdgeData*>(data); }

CUcontext context() {
  CUcontext c = nullptr;
  return cuCtxGetCurrent(&c) == CUDA_SUCCESS ? c : nullptr;
}

// cudaKernelNodeParams and its V2 have the same members in another order.
template <class Params>
cudaError_t kernel(const Params& p, CUDA_KERNEL_NODE_PARAMS* out) {
  *out = {};
  CUfunction function = nullptr;
  if (const cudaError_t rc = function_of(p.func, current_device(), &function); rc != cudaSuccess) return rc;
  out->func = function;
  out->gridDimX = p.gridDim.x;
  out->gridDimY = p.gridDim.y;
  out->gridDimZ = p.gridDim.z;
  out->blockDimX = p.blockDim.x;
  out->blockDimY = p.blockDim.y;
  out->blockDimZ = p.blockDim.z;
  out->sharedMemBytes = p.sharedMemBytes;
  out->kernelParams = p.kernelParams;
  out->extra = p.extra;
  return cudaSuccess;
}

// The host address of a function; a kernel that no program registered is named by the driver's handle.
void* symbol_of(CUfunction function) {
  const void* found = function;
  g_kernels.for_each([&](const void* key, const Kernel* k) {
    const LoadedKernel* loaded = k->loaded.load(std::memory_order_acquire);
    // A kernel is also known by its driver's handle; the program's own name is its host address.
    if (loaded == nullptr || key == loaded->kernel) return;
    for (const auto& f : loaded->functions)
      if (f.load(std::memory_order_acquire) == function) found = key;
  });
  return const_cast<void*>(found);
}

cudaError_t memset_params(const cudaMemsetParams& p, CUDA_MEMSET_NODE_PARAMS* out) {
  *out = {};
  out->dst = reinterpret_cast<CUdeviceptr>(p.dst);
  out->pitch = p.pitch;
  out->value = p.value;
  out->elementSize = p.elementSize;
  out->width = p.width;
  out->height = p.height;
  return cudaSuccess;
}

// One node of any type. The unions have the same tags.
cudaError_t any(const cudaGraphNodeParams& p, CUgraphNodeParams* out) {
  memset(out, 0, sizeof *out);
  out->type = static_cast<CUgraphNodeType>(p.type);
  switch (p.type) {
    case cudaGraphNodeTypeKernel: {
      CUDA_KERNEL_NODE_PARAMS k;
      if (const cudaError_t rc = kernel(p.kernel, &k); rc != cudaSuccess) return rc;
      static_assert(sizeof k == sizeof out->kernel);
      memcpy(&out->kernel, &k, sizeof k);
      return cudaSuccess;
    }
    case cudaGraphNodeTypeMemcpy:
      if (p.memcpy.flags != 0) return cudaErrorInvalidValue;
      out->memcpy.copyCtx = context();
      return memory::describe(p.memcpy.copyParams, &out->memcpy.copyParams);
    case cudaGraphNodeTypeMemset:
      out->memset.dst = reinterpret_cast<CUdeviceptr>(p.memset.dst);
      out->memset.pitch = p.memset.pitch;
      out->memset.value = p.memset.value;
      out->memset.elementSize = p.memset.elementSize;
      out->memset.width = p.memset.width;
      out->memset.height = p.memset.height;
      out->memset.ctx = context();
      return cudaSuccess;
    case cudaGraphNodeTypeHost:
      out->host.fn = p.host.fn;
      out->host.userData = p.host.userData;
      return cudaSuccess;
    case cudaGraphNodeTypeGraph:
      out->graph.graph = p.graph.graph;
      out->graph.ownership = static_cast<CUgraphChildGraphNodeOwnership>(p.graph.ownership);
      return cudaSuccess;
    case cudaGraphNodeTypeWaitEvent: out->eventWait.event = p.eventWait.event; return cudaSuccess;
    case cudaGraphNodeTypeEventRecord: out->eventRecord.event = p.eventRecord.event; return cudaSuccess;
    case cudaGraphNodeTypeMemAlloc:
      static_assert(sizeof p.alloc == sizeof out->alloc);
      memcpy(&out->alloc, &p.alloc, sizeof out->alloc);
      return cudaSuccess;
    case cudaGraphNodeTypeMemFree: out->free.dptr = reinterpret_cast<CUdeviceptr>(p.free.dptr); return cudaSuccess;
    default: return cudaSuccess;  // the driver says why it refuses
  }
}

}  // namespace

// -- stream capture ---------------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return result(cuStreamBeginCapture(stream_of(stream), static_cast<CUstreamCaptureMode>(mode)));
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t* dependencies,
                                          const cudaGraphEdgeData* dependencyData, size_t numDependencies,
                                          cudaStreamCaptureMode mode) {
  return result(cuStreamBeginCaptureToGraph(stream_of(stream), graph, dependencies, edges(dependencyData),
                                            numDependencies, static_cast<CUstreamCaptureMode>(mode)));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* pGraph) {
  return result(cuStreamEndCapture(stream_of(stream), pGraph));
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* dependencies,
                                                const cudaGraphEdgeData* dependencyData, size_t numDependencies,
                                                unsigned int flags) {
  return result(cuStreamUpdateCaptureDependencies_v2(stream_of(stream), dependencies, edges(dependencyData),
                                                     numDependencies, flags));
}
#else
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* dependencies,
                                                size_t numDependencies, unsigned int flags) {
  return result(cuStreamUpdateCaptureDependencies_v2(stream_of(stream), dependencies, nullptr, numDependencies, flags));
}
cudaError_t cudaStreamUpdateCaptureDependencies_v2(cudaStream_t stream, cudaGraphNode_t* dependencies,
                                                   const cudaGraphEdgeData* dependencyData, size_t numDependencies,
                                                   unsigned int flags) {
  return result(cuStreamUpdateCaptureDependencies_v2(stream_of(stream), dependencies, edges(dependencyData),
                                                     numDependencies, flags));
}
#endif

// -- graphs and nodes -------------------------------------------------------------------------------------------------

cudaError_t cudaGraphCreate(cudaGraph_t* pGraph, unsigned int flags) { return result(cuGraphCreate(pGraph, flags)); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return result(cuGraphDestroy(graph)); }
cudaError_t cudaGraphClone(cudaGraph_t* pGraphClone, cudaGraph_t originalGraph) {
  return result(cuGraphClone(pGraphClone, originalGraph));
}
cudaError_t cudaGraphNodeFindInClone(cudaGraphNode_t* pNode, cudaGraphNode_t originalNode, cudaGraph_t clonedGraph) {
  return result(cuGraphNodeFindInClone(pNode, originalNode, clonedGraph));
}

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph, const cudaGraphNode_t* pDependencies,
                                   size_t numDependencies, const cudaKernelNodeParams* pNodeParams) {
  CUDA_KERNEL_NODE_PARAMS k;
  if (const cudaError_t rc = kernel(*pNodeParams, &k); rc != cudaSuccess) return rc;
  return result(cuGraphAddKernelNode(pGraphNode, graph, pDependencies, numDependencies, &k));
}

cudaError_t cudaGraphAddMemcpyNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph, const cudaGraphNode_t* pDependencies,
                                   size_t numDependencies, const cudaMemcpy3DParms* pCopyParams) {
  CUDA_MEMCPY3D c;
  if (const cudaError_t rc = memory::describe(*pCopyParams, &c); rc != cudaSuccess) return rc;
  return result(cuGraphAddMemcpyNode(pGraphNode, graph, pDependencies, numDependencies, &c, context()));
}

cudaError_t cudaGraphAddMemcpyNode1D(cudaGraphNode_t* pGraphNode, cudaGraph_t graph,
                                     const cudaGraphNode_t* pDependencies, size_t numDependencies, void* dst,
                                     const void* src, size_t count, cudaMemcpyKind kind) {
  CUDA_MEMCPY3D c;
  if (const cudaError_t rc = memory::describe(dst, src, count, kind, &c); rc != cudaSuccess) return rc;
  return result(cuGraphAddMemcpyNode(pGraphNode, graph, pDependencies, numDependencies, &c, context()));
}

cudaError_t cudaGraphAddMemcpyNodeToSymbol(cudaGraphNode_t* pGraphNode, cudaGraph_t graph,
                                           const cudaGraphNode_t* pDependencies, size_t numDependencies,
                                           const void* symbol, const void* src, size_t count, size_t offset,
                                           cudaMemcpyKind kind) {
  void* at = nullptr;
  if (const cudaError_t rc = memory::address_of_symbol(symbol, count, offset, true, kind, &at); rc != cudaSuccess)
    return rc;
  return graph::cudaGraphAddMemcpyNode1D(pGraphNode, graph, pDependencies, numDependencies, at, src, count, kind);
}

cudaError_t cudaGraphAddMemcpyNodeFromSymbol(cudaGraphNode_t* pGraphNode, cudaGraph_t graph,
                                             const cudaGraphNode_t* pDependencies, size_t numDependencies, void* dst,
                                             const void* symbol, size_t count, size_t offset, cudaMemcpyKind kind) {
  void* at = nullptr;
  if (const cudaError_t rc = memory::address_of_symbol(symbol, count, offset, false, kind, &at); rc != cudaSuccess)
    return rc;
  return graph::cudaGraphAddMemcpyNode1D(pGraphNode, graph, pDependencies, numDependencies, dst, at, count, kind);
}

cudaError_t cudaGraphAddMemsetNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph, const cudaGraphNode_t* pDependencies,
                                   size_t numDependencies, const cudaMemsetParams* pMemsetParams) {
  CUDA_MEMSET_NODE_PARAMS m;
  if (const cudaError_t rc = memset_params(*pMemsetParams, &m); rc != cudaSuccess) return rc;
  return result(cuGraphAddMemsetNode(pGraphNode, graph, pDependencies, numDependencies, &m, context()));
}

cudaError_t cudaGraphAddHostNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph, const cudaGraphNode_t* pDependencies,
                                 size_t numDependencies, const cudaHostNodeParams* pNodeParams) {
  const CUDA_HOST_NODE_PARAMS h{pNodeParams->fn, pNodeParams->userData};
  return result(cuGraphAddHostNode(pGraphNode, graph, pDependencies, numDependencies, &h));
}

cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph,
                                       const cudaGraphNode_t* pDependencies, size_t numDependencies,
                                       cudaGraph_t childGraph) {
  return result(cuGraphAddChildGraphNode(pGraphNode, graph, pDependencies, numDependencies, childGraph));
}

cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph, const cudaGraphNode_t* pDependencies,
                                  size_t numDependencies) {
  return result(cuGraphAddEmptyNode(pGraphNode, graph, pDependencies, numDependencies));
}

cudaError_t cudaGraphAddEventRecordNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph,
                                        const cudaGraphNode_t* pDependencies, size_t numDependencies,
                                        cudaEvent_t event) {
  return result(cuGraphAddEventRecordNode(pGraphNode, graph, pDependencies, numDependencies, event));
}

cudaError_t cudaGraphAddEventWaitNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph,
                                      const cudaGraphNode_t* pDependencies, size_t numDependencies, cudaEvent_t event) {
  return result(cuGraphAddEventWaitNode(pGraphNode, graph, pDependencies, numDependencies, event));
}

namespace {
cudaError_t add_any(cudaGraphNode_t* pGraphNode, cudaGraph_t graph, const cudaGraphNode_t* pDependencies,
                    const cudaGraphEdgeData* data, size_t numDependencies, cudaGraphNodeParams& params) {
  CUgraphNodeParams p;
  if (const cudaError_t rc = any(params, &p); rc != cudaSuccess) return rc;
  const CUresult rc = cuGraphAddNode_v2(pGraphNode, graph, pDependencies, edges(data), numDependencies, &p);
  if (rc == CUDA_SUCCESS && p.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
    params.alloc.dptr = reinterpret_cast<void*>(p.alloc.dptr);
  return result(rc);
}
}  // namespace

#if CUDART_VERSION >= 13000
cudaError_t cudaGraphAddNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph, const cudaGraphNode_t* pDependencies,
                             const cudaGraphEdgeData* dependencyData, size_t numDependencies,
                             cudaGraphNodeParams* nodeParams) {
  return add_any(pGraphNode, graph, pDependencies, dependencyData, numDependencies, *nodeParams);
}
#else
cudaError_t cudaGraphAddNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph, const cudaGraphNode_t* pDependencies,
                             size_t numDependencies, cudaGraphNodeParams* nodeParams) {
  return add_any(pGraphNode, graph, pDependencies, nullptr, numDependencies, *nodeParams);
}
cudaError_t cudaGraphAddNode_v2(cudaGraphNode_t* pGraphNode, cudaGraph_t graph, const cudaGraphNode_t* pDependencies,
                                const cudaGraphEdgeData* dependencyData, size_t numDependencies,
                                cudaGraphNodeParams* nodeParams) {
  return add_any(pGraphNode, graph, pDependencies, dependencyData, numDependencies, *nodeParams);
}
#endif

// -- memory nodes -----------------------------------------------------------------------------------------------------

cudaError_t cudaGraphAddMemAllocNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph,
                                     const cudaGraphNode_t* pDependencies, size_t numDependencies,
                                     cudaMemAllocNodeParams* nodeParams) {
  return result(cuGraphAddMemAllocNode(pGraphNode, graph, pDependencies, numDependencies,
                                       reinterpret_cast<CUDA_MEM_ALLOC_NODE_PARAMS*>(nodeParams)));
}

cudaError_t cudaGraphAddMemFreeNode(cudaGraphNode_t* pGraphNode, cudaGraph_t graph,
                                    const cudaGraphNode_t* pDependencies, size_t numDependencies, void* dptr) {
  return result(
      cuGraphAddMemFreeNode(pGraphNode, graph, pDependencies, numDependencies, reinterpret_cast<CUdeviceptr>(dptr)));
}

cudaError_t cudaGraphMemAllocNodeGetParams(cudaGraphNode_t node, cudaMemAllocNodeParams* params_out) {
  return result(cuGraphMemAllocNodeGetParams(node, reinterpret_cast<CUDA_MEM_ALLOC_NODE_PARAMS*>(params_out)));
}

cudaError_t cudaGraphMemFreeNodeGetParams(cudaGraphNode_t node, void* dptr_out) {
  return result(cuGraphMemFreeNodeGetParams(node, static_cast<CUdeviceptr*>(dptr_out)));
}

cudaError_t cudaDeviceGraphMemTrim(int device) { return result(cuDeviceGraphMemTrim(device)); }

cudaError_t cudaDeviceGetGraphMemAttribute(int device, cudaGraphMemAttributeType attr, void* value) {
  return result(cuDeviceGetGraphMemAttribute(device, static_cast<CUgraphMem_attribute>(attr), value));
}

cudaError_t cudaDeviceSetGraphMemAttribute(int device, cudaGraphMemAttributeType attr, void* value) {
  return result(cuDeviceSetGraphMemAttribute(device, static_cast<CUgraphMem_attribute>(attr), value));
}

// -- parameters -------------------------------------------------------------------------------------------------------

cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t node, cudaKernelNodeParams* pNodeParams) {
  CUDA_KERNEL_NODE_PARAMS k{};
  const CUresult rc = cuGraphKernelNodeGetParams(node, &k);
  if (rc != CUDA_SUCCESS) return result(rc);
  pNodeParams->func = symbol_of(k.func);
  pNodeParams->gridDim = dim3(k.gridDimX, k.gridDimY, k.gridDimZ);
  pNodeParams->blockDim = dim3(k.blockDimX, k.blockDimY, k.blockDimZ);
  pNodeParams->sharedMemBytes = k.sharedMemBytes;
  pNodeParams->kernelParams = k.kernelParams;
  pNodeParams->extra = k.extra;
  return cudaSuccess;
}

cudaError_t cudaGraphKernelNodeSetParams(cudaGraphNode_t node, const cudaKernelNodeParams* pNodeParams) {
  CUDA_KERNEL_NODE_PARAMS k;
  if (const cudaError_t rc = kernel(*pNodeParams, &k); rc != cudaSuccess) return rc;
  return result(cuGraphKernelNodeSetParams(node, &k));
}

cudaError_t cudaGraphMemcpyNodeGetParams(cudaGraphNode_t node, cudaMemcpy3DParms* pNodeParams) {
  CUDA_MEMCPY3D c{};
  const CUresult rc = cuGraphMemcpyNodeGetParams(node, &c);
  if (rc != CUDA_SUCCESS) return result(rc);
  auto pointer = [](CUmemorytype type, const void* host, CUdeviceptr device) {
    return type == CU_MEMORYTYPE_HOST ? const_cast<void*>(host) : reinterpret_cast<void*>(device);
  };
  *pNodeParams = {};
  pNodeParams->srcPtr = {pointer(c.srcMemoryType, c.srcHost, c.srcDevice), c.srcPitch, c.WidthInBytes, c.srcHeight};
  pNodeParams->dstPtr = {pointer(c.dstMemoryType, c.dstHost, c.dstDevice), c.dstPitch, c.WidthInBytes, c.dstHeight};
  pNodeParams->srcPos = {c.srcXInBytes, c.srcY, c.srcZ};
  pNodeParams->dstPos = {c.dstXInBytes, c.dstY, c.dstZ};
  pNodeParams->extent = {c.WidthInBytes, c.Height, c.Depth};
  const bool from_host = c.srcMemoryType == CU_MEMORYTYPE_HOST, to_host = c.dstMemoryType == CU_MEMORYTYPE_HOST;
  pNodeParams->kind = c.srcMemoryType == CU_MEMORYTYPE_UNIFIED ? cudaMemcpyDefault
                      : from_host ? (to_host ? cudaMemcpyHostToHost : cudaMemcpyHostToDevice)
                      : to_host   ? cudaMemcpyDeviceToHost
                                  : cudaMemcpyDeviceToDevice;
  return cudaSuccess;
}

cudaError_t cudaGraphMemcpyNodeSetParams(cudaGraphNode_t node, const cudaMemcpy3DParms* pNodeParams) {
  CUDA_MEMCPY3D c;
  if (const cudaError_t rc = memory::describe(*pNodeParams, &c); rc != cudaSuccess) return rc;
  return result(cuGraphMemcpyNodeSetParams(node, &c));
}

cudaError_t cudaGraphMemcpyNodeSetParams1D(cudaGraphNode_t node, void* dst, const void* src, size_t count,
                                           cudaMemcpyKind kind) {
  CUDA_MEMCPY3D c;
  if (const cudaError_t rc = memory::describe(dst, src, count, kind, &c); rc != cudaSuccess) return rc;
  return result(cuGraphMemcpyNodeSetParams(node, &c));
}

cudaError_t cudaGraphMemcpyNodeSetParamsToSymbol(cudaGraphNode_t node, const void* symbol, const void* src,
                                                 size_t count, size_t offset, cudaMemcpyKind kind) {
  void* at = nullptr;
  if (const cudaError_t rc = memory::address_of_symbol(symbol, count, offset, true, kind, &at); rc != cudaSuccess)
    return rc;
  return graph::cudaGraphMemcpyNodeSetParams1D(node, at, src, count, kind);
}

cudaError_t cudaGraphMemcpyNodeSetParamsFromSymbol(cudaGraphNode_t node, void* dst, const void* symbol, size_t count,
                                                   size_t offset, cudaMemcpyKind kind) {
  void* at = nullptr;
  if (const cudaError_t rc = memory::address_of_symbol(symbol, count, offset, false, kind, &at); rc != cudaSuccess)
    return rc;
  return graph::cudaGraphMemcpyNodeSetParams1D(node, dst, at, count, kind);
}

cudaError_t cudaGraphMemsetNodeGetParams(cudaGraphNode_t node, cudaMemsetParams* pNodeParams) {
  CUDA_MEMSET_NODE_PARAMS m{};
  const CUresult rc = cuGraphMemsetNodeGetParams(node, &m);
  if (rc != CUDA_SUCCESS) return result(rc);
  *pNodeParams = {};
  pNodeParams->dst = reinterpret_cast<void*>(m.dst);
  pNodeParams->pitch = m.pitch;
  pNodeParams->value = m.value;
  pNodeParams->elementSize = m.elementSize;
  pNodeParams->width = m.width;
  pNodeParams->height = m.height;
  return cudaSuccess;
}

cudaError_t cudaGraphMemsetNodeSetParams(cudaGraphNode_t node, const cudaMemsetParams* pNodeParams) {
  CUDA_MEMSET_NODE_PARAMS m;
  if (const cudaError_t rc = memset_params(*pNodeParams, &m); rc != cudaSuccess) return rc;
  return result(cuGraphMemsetNodeSetParams(node, &m));
}

cudaError_t cudaGraphHostNodeGetParams(cudaGraphNode_t node, cudaHostNodeParams* pNodeParams) {
  CUDA_HOST_NODE_PARAMS h{};
  const CUresult rc = cuGraphHostNodeGetParams(node, &h);
  if (rc == CUDA_SUCCESS) *pNodeParams = {h.fn, h.userData};
  return result(rc);
}

cudaError_t cudaGraphHostNodeSetParams(cudaGraphNode_t node, const cudaHostNodeParams* pNodeParams) {
  const CUDA_HOST_NODE_PARAMS h{pNodeParams->fn, pNodeParams->userData};
  return result(cuGraphHostNodeSetParams(node, &h));
}

cudaError_t cudaGraphNodeSetParams(cudaGraphNode_t node, cudaGraphNodeParams* nodeParams) {
  CUgraphNodeParams p;
  if (const cudaError_t rc = any(*nodeParams, &p); rc != cudaSuccess) return rc;
  return result(cuGraphNodeSetParams(node, &p));
}

cudaError_t cudaGraphKernelNodeGetAttribute(cudaGraphNode_t hNode, cudaLaunchAttributeID attr,
                                            cudaLaunchAttributeValue* value_out) {
  return result(cuGraphKernelNodeGetAttribute(hNode, static_cast<CUlaunchAttributeID>(attr),
                                              reinterpret_cast<CUlaunchAttributeValue*>(value_out)));
}

cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t hNode, cudaLaunchAttributeID attr,
                                            const cudaLaunchAttributeValue* value) {
  return result(cuGraphKernelNodeSetAttribute(hNode, static_cast<CUlaunchAttributeID>(attr),
                                              reinterpret_cast<const CUlaunchAttributeValue*>(value)));
}

cudaError_t cudaGraphKernelNodeCopyAttributes(cudaGraphNode_t first, cudaGraphNode_t second) {
#if CUDART_VERSION >= 13000
  return result(cuGraphKernelNodeCopyAttributes(first, second));  // as the header names them: to, from
#else
  static_cast<void>(first), static_cast<void>(second);
  return refuse("cudaGraphKernelNodeCopyAttributes",
                "the headers of CUDA 12 and 13 name its two nodes in opposite order; set the attributes of each node");
#endif
}

cudaError_t cudaGraphEventRecordNodeGetEvent(cudaGraphNode_t node, cudaEvent_t* event_out) {
  return result(cuGraphEventRecordNodeGetEvent(node, event_out));
}
cudaError_t cudaGraphEventRecordNodeSetEvent(cudaGraphNode_t node, cudaEvent_t event) {
  return result(cuGraphEventRecordNodeSetEvent(node, event));
}
cudaError_t cudaGraphEventWaitNodeGetEvent(cudaGraphNode_t node, cudaEvent_t* event_out) {
  return result(cuGraphEventWaitNodeGetEvent(node, event_out));
}
cudaError_t cudaGraphEventWaitNodeSetEvent(cudaGraphNode_t node, cudaEvent_t event) {
  return result(cuGraphEventWaitNodeSetEvent(node, event));
}
cudaError_t cudaGraphChildGraphNodeGetGraph(cudaGraphNode_t node, cudaGraph_t* pGraph) {
  return result(cuGraphChildGraphNodeGetGraph(node, pGraph));
}

// -- structure --------------------------------------------------------------------------------------------------------

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* pType) {
  CUgraphNodeType type{};
  const CUresult rc = cuGraphNodeGetType(node, &type);
  if (rc == CUDA_SUCCESS) *pType = static_cast<cudaGraphNodeType>(type);
  return result(rc);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* numNodes) {
  return result(cuGraphGetNodes(graph, nodes, numNodes));
}
cudaError_t cudaGraphGetRootNodes(cudaGraph_t graph, cudaGraphNode_t* pRootNodes, size_t* pNumRootNodes) {
  return result(cuGraphGetRootNodes(graph, pRootNodes, pNumRootNodes));
}
cudaError_t cudaGraphDestroyNode(cudaGraphNode_t node) { return result(cuGraphDestroyNode(node)); }
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char* path, unsigned int flags) {
  return result(cuGraphDebugDotPrint(graph, path, flags));
}

// With an edge's data: by the plain name in major 13, by _v2 in major 12, whose plain names have none.
#if CUDART_VERSION >= 13000
#define DP_WITH_DATA(name) name
#else
#define DP_WITH_DATA(name) name##_v2
#endif

cudaError_t DP_WITH_DATA(cudaGraphGetEdges)(cudaGraph_t graph, cudaGraphNode_t* from, cudaGraphNode_t* to,
                                            cudaGraphEdgeData* edgeData, size_t* numEdges) {
  return result(cuGraphGetEdges_v2(graph, from, to, edges(edgeData), numEdges));
}
cudaError_t DP_WITH_DATA(cudaGraphNodeGetDependencies)(cudaGraphNode_t node, cudaGraphNode_t* pDependencies,
                                                       cudaGraphEdgeData* edgeData, size_t* pNumDependencies) {
  return result(cuGraphNodeGetDependencies_v2(node, pDependencies, edges(edgeData), pNumDependencies));
}
cudaError_t DP_WITH_DATA(cudaGraphNodeGetDependentNodes)(cudaGraphNode_t node, cudaGraphNode_t* pDependentNodes,
                                                         cudaGraphEdgeData* edgeData, size_t* pNumDependentNodes) {
  return result(cuGraphNodeGetDependentNodes_v2(node, pDependentNodes, edges(edgeData), pNumDependentNodes));
}
cudaError_t DP_WITH_DATA(cudaGraphAddDependencies)(cudaGraph_t graph, const cudaGraphNode_t* from,
                                                   const cudaGraphNode_t* to, const cudaGraphEdgeData* edgeData,
                                                   size_t numDependencies) {
  return result(cuGraphAddDependencies_v2(graph, from, to, edges(edgeData), numDependencies));
}
cudaError_t DP_WITH_DATA(cudaGraphRemoveDependencies)(cudaGraph_t graph, const cudaGraphNode_t* from,
                                                      const cudaGraphNode_t* to, const cudaGraphEdgeData* edgeData,
                                                      size_t numDependencies) {
  return result(cuGraphRemoveDependencies_v2(graph, from, to, edges(edgeData), numDependencies));
}

#if CUDART_VERSION < 13000
cudaError_t cudaGraphGetEdges(cudaGraph_t graph, cudaGraphNode_t* from, cudaGraphNode_t* to, size_t* numEdges) {
  return result(cuGraphGetEdges_v2(graph, from, to, nullptr, numEdges));
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* pDependencies,
                                         size_t* pNumDependencies) {
  return result(cuGraphNodeGetDependencies_v2(node, pDependencies, nullptr, pNumDependencies));
}
cudaError_t cudaGraphNodeGetDependentNodes(cudaGraphNode_t node, cudaGraphNode_t* pDependentNodes,
                                           size_t* pNumDependentNodes) {
  return result(cuGraphNodeGetDependentNodes_v2(node, pDependentNodes, nullptr, pNumDependentNodes));
}
cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t* from, const cudaGraphNode_t* to,
                                     size_t numDependencies) {
  return result(cuGraphAddDependencies_v2(graph, from, to, nullptr, numDependencies));
}
cudaError_t cudaGraphRemoveDependencies(cudaGraph_t graph, const cudaGraphNode_t* from, const cudaGraphNode_t* to,
                                        size_t numDependencies) {
  return result(cuGraphRemoveDependencies_v2(graph, from, to, nullptr, numDependencies));
}
#endif

// -- executable graphs ------------------------------------------------------------------------------------------------

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* pGraphExec, cudaGraph_t graph, unsigned long long flags) {
  return result(cuGraphInstantiateWithFlags(pGraphExec, graph, flags));
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* pGraphExec, cudaGraph_t graph, unsigned long long flags) {
  return graph::cudaGraphInstantiateWithFlags(pGraphExec, graph, flags);
}
cudaError_t cudaGraphInstantiateWithParams(cudaGraphExec_t* pGraphExec, cudaGraph_t graph,
                                           cudaGraphInstantiateParams* instantiateParams) {
  CUDA_GRAPH_INSTANTIATE_PARAMS p{};
  p.flags = instantiateParams->flags;
  p.hUploadStream = stream_of(instantiateParams->uploadStream);
  const CUresult rc = cuGraphInstantiateWithParams(pGraphExec, graph, &p);
  instantiateParams->errNode_out = p.hErrNode_out;
  instantiateParams->result_out = static_cast<cudaGraphInstantiateResult>(p.result_out);
  return result(rc);
}
cudaError_t cudaGraphExecGetFlags(cudaGraphExec_t graphExec, unsigned long long* flags) {
  cuuint64_t value = 0;
  const CUresult rc = cuGraphExecGetFlags(graphExec, &value);
  if (rc == CUDA_SUCCESS) *flags = value;
  return result(rc);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graphExec) { return result(cuGraphExecDestroy(graphExec)); }
cudaError_t cudaGraphLaunch(cudaGraphExec_t graphExec, cudaStream_t stream) {
  return result(cuGraphLaunch(graphExec, stream_of(stream)));
}
cudaError_t cudaGraphUpload(cudaGraphExec_t graphExec, cudaStream_t stream) {
  return result(cuGraphUpload(graphExec, stream_of(stream)));
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t hGraphExec, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* pNodeParams) {
  CUDA_KERNEL_NODE_PARAMS k;
  if (const cudaError_t rc = kernel(*pNodeParams, &k); rc != cudaSuccess) return rc;
  return result(cuGraphExecKernelNodeSetParams(hGraphExec, node, &k));
}

cudaError_t cudaGraphExecMemcpyNodeSetParams(cudaGraphExec_t hGraphExec, cudaGraphNode_t node,
                                             const cudaMemcpy3DParms* pNodeParams) {
  CUDA_MEMCPY3D c;
  if (const cudaError_t rc = memory::describe(*pNodeParams, &c); rc != cudaSuccess) return rc;
  return result(cuGraphExecMemcpyNodeSetParams(hGraphExec, node, &c, context()));
}

cudaError_t cudaGraphExecMemcpyNodeSetParams1D(cudaGraphExec_t hGraphExec, cudaGraphNode_t node, void* dst,
                                               const void* src, size_t count, cudaMemcpyKind kind) {
  CUDA_MEMCPY3D c;
  if (const cudaError_t rc = memory::describe(dst, src, count, kind, &c); rc != cudaSuccess) return rc;
  return result(cuGraphExecMemcpyNodeSetParams(hGraphExec, node, &c, context()));
}

cudaError_t cudaGraphExecMemcpyNodeSetParamsToSymbol(cudaGraphExec_t hGraphExec, cudaGraphNode_t node,
                                                     const void* symbol, const void* src, size_t count, size_t offset,
                                                     cudaMemcpyKind kind) {
  void* at = nullptr;
  if (const cudaError_t rc = memory::address_of_symbol(symbol, count, offset, true, kind, &at); rc != cudaSuccess)
    return rc;
  return graph::cudaGraphExecMemcpyNodeSetParams1D(hGraphExec, node, at, src, count, kind);
}

cudaError_t cudaGraphExecMemcpyNodeSetParamsFromSymbol(cudaGraphExec_t hGraphExec, cudaGraphNode_t node, void* dst,
                                                       const void* symbol, size_t count, size_t offset,
                                                       cudaMemcpyKind kind) {
  void* at = nullptr;
  if (const cudaError_t rc = memory::address_of_symbol(symbol, count, offset, false, kind, &at); rc != cudaSuccess)
    return rc;
  return graph::cudaGraphExecMemcpyNodeSetParams1D(hGraphExec, node, dst, at, count, kind);
}

cudaError_t cudaGraphExecMemsetNodeSetParams(cudaGraphExec_t hGraphExec, cudaGraphNode_t node,
                                             const cudaMemsetParams* pNodeParams) {
  CUDA_MEMSET_NODE_PARAMS m;
  if (const cudaError_t rc = memset_params(*pNodeParams, &m); rc != cudaSuccess) return rc;
  return result(cuGraphExecMemsetNodeSetParams(hGraphExec, node, &m, context()));
}

cudaError_t cudaGraphExecHostNodeSetParams(cudaGraphExec_t hGraphExec, cudaGraphNode_t node,
                                           const cudaHostNodeParams* pNodeParams) {
  const CUDA_HOST_NODE_PARAMS h{pNodeParams->fn, pNodeParams->userData};
  return result(cuGraphExecHostNodeSetParams(hGraphExec, node, &h));
}

cudaError_t cudaGraphExecNodeSetParams(cudaGraphExec_t graphExec, cudaGraphNode_t node,
                                       cudaGraphNodeParams* nodeParams) {
  CUgraphNodeParams p;
  if (const cudaError_t rc = any(*nodeParams, &p); rc != cudaSuccess) return rc;
  return result(cuGraphExecNodeSetParams(graphExec, node, &p));
}

cudaError_t cudaGraphExecChildGraphNodeSetParams(cudaGraphExec_t hGraphExec, cudaGraphNode_t node,
                                                 cudaGraph_t childGraph) {
  return result(cuGraphExecChildGraphNodeSetParams(hGraphExec, node, childGraph));
}
cudaError_t cudaGraphExecEventRecordNodeSetEvent(cudaGraphExec_t hGraphExec, cudaGraphNode_t hNode, cudaEvent_t event) {
  return result(cuGraphExecEventRecordNodeSetEvent(hGraphExec, hNode, event));
}
cudaError_t cudaGraphExecEventWaitNodeSetEvent(cudaGraphExec_t hGraphExec, cudaGraphNode_t hNode, cudaEvent_t event) {
  return result(cuGraphExecEventWaitNodeSetEvent(hGraphExec, hNode, event));
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t hGraphExec, cudaGraph_t hGraph,
                                cudaGraphExecUpdateResultInfo* resultInfo) {
  CUgraphExecUpdateResultInfo info{};
  const CUresult rc = cuGraphExecUpdate(hGraphExec, hGraph, &info);
  resultInfo->result = static_cast<cudaGraphExecUpdateResult>(info.result);
  resultInfo->errorNode = info.errorNode;
  resultInfo->errorFromNode = info.errorFromNode;
  return result(rc);
}

cudaError_t cudaGraphNodeSetEnabled(cudaGraphExec_t hGraphExec, cudaGraphNode_t hNode, unsigned int isEnabled) {
  return result(cuGraphNodeSetEnabled(hGraphExec, hNode, isEnabled));
}
cudaError_t cudaGraphNodeGetEnabled(cudaGraphExec_t hGraphExec, cudaGraphNode_t hNode, unsigned int* isEnabled) {
  return result(cuGraphNodeGetEnabled(hGraphExec, hNode, isEnabled));
}

// -- user objects -----------------------------------------------------------------------------------------------------

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object_out, void* ptr, cudaHostFn_t destroy,
                                 unsigned int initialRefcount, unsigned int flags) {
  return result(cuUserObjectCreate(object_out, ptr, destroy, initialRefcount, flags));
}
cudaError_t cudaUserObjectRetain(cudaUserObject_t object, unsigned int count) {
  return result(cuUserObjectRetain(object, count));
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int count) {
  return result(cuUserObjectRelease(object, count));
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count,
                                      unsigned int flags) {
  return result(cuGraphRetainUserObject(graph, object, count, flags));
}
cudaError_t cudaGraphReleaseUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count) {
  return result(cuGraphReleaseUserObject(graph, object, count));
}

}  // namespace devproxy::sa::cudart::graph
