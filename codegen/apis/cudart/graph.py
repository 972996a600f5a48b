# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Graph Management" and stream capture: the driver's graphs, with the runtime's parameters.

What counts edges without their data in major 12 has a _v2 there that major 13 calls by the plain name.
"""

from codegen.spec import Api

# -- stream capture
cudaStreamBeginCapture = Api(client_sa="cudart.graph", enters="context")
cudaStreamBeginCaptureToGraph = Api(client_sa="cudart.graph", enters="context")
cudaStreamEndCapture = Api(client_sa="cudart.graph", enters="context", nonnull=("pGraph",))
cudaStreamUpdateCaptureDependencies = Api(client_sa="cudart.graph", enters="context")
cudaStreamUpdateCaptureDependencies_v2 = Api(client_sa="cudart.graph", enters="context")
# -- graphs and nodes
cudaGraphCreate = Api(client_sa="cudart.graph", enters="context", nonnull=("pGraph",))
cudaGraphDestroy = Api(client_sa="cudart.graph", enters="context")
cudaGraphClone = Api(client_sa="cudart.graph", enters="context", nonnull=("pGraphClone",))
cudaGraphNodeFindInClone = Api(client_sa="cudart.graph", enters="context", nonnull=("pNode",))
cudaGraphAddKernelNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode", "pNodeParams")
)
cudaGraphAddHostNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode", "pNodeParams")
)
cudaGraphAddMemcpyNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode", "pCopyParams")
)
cudaGraphAddMemsetNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode", "pMemsetParams")
)
cudaGraphAddMemcpyNode1D = Api(client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",))
cudaGraphAddMemcpyNodeFromSymbol = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",)
)
cudaGraphAddMemcpyNodeToSymbol = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",)
)
cudaGraphAddChildGraphNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",)
)
cudaGraphAddEmptyNode = Api(client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",))
cudaGraphAddEventRecordNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",)
)
cudaGraphAddEventWaitNode = Api(client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",))
cudaGraphAddNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode", "nodeParams")
)
cudaGraphAddNode_v2 = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode", "nodeParams")
)
# -- memory nodes
cudaGraphAddMemAllocNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode", "nodeParams")
)
cudaGraphAddMemFreeNode = Api(client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",))
cudaGraphMemAllocNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("params_out",)
)
cudaGraphMemFreeNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("dptr_out",)
)
cudaDeviceGraphMemTrim = Api(client_sa="cudart.graph", enters="driver")
cudaDeviceGetGraphMemAttribute = Api(client_sa="cudart.graph", enters="driver", nonnull=("value",))
cudaDeviceSetGraphMemAttribute = Api(client_sa="cudart.graph", enters="driver", nonnull=("value",))
cudaGraphNodeSetParams = Api(client_sa="cudart.graph", enters="context", nonnull=("nodeParams",))
cudaGraphKernelNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphKernelNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphMemcpyNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphMemcpyNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphMemsetNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphMemsetNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphHostNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphHostNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphMemcpyNodeSetParams1D = Api(client_sa="cudart.graph", enters="context")
cudaGraphMemcpyNodeSetParamsFromSymbol = Api(client_sa="cudart.graph", enters="context")
cudaGraphMemcpyNodeSetParamsToSymbol = Api(client_sa="cudart.graph", enters="context")
cudaGraphKernelNodeGetAttribute = Api(
    client_sa="cudart.graph", enters="context", nonnull=("value_out",)
)
cudaGraphKernelNodeSetAttribute = Api(
    client_sa="cudart.graph", enters="context", nonnull=("value",)
)
# The headers of 12 and 13 name its two nodes in opposite order: answered in 13, refused in 12.
cudaGraphKernelNodeCopyAttributes = Api(client_sa="cudart.graph", enters="context")
cudaGraphEventRecordNodeGetEvent = Api(
    client_sa="cudart.graph", enters="context", nonnull=("event_out",)
)
cudaGraphEventRecordNodeSetEvent = Api(client_sa="cudart.graph", enters="context")
cudaGraphEventWaitNodeGetEvent = Api(
    client_sa="cudart.graph", enters="context", nonnull=("event_out",)
)
cudaGraphEventWaitNodeSetEvent = Api(client_sa="cudart.graph", enters="context")
cudaGraphChildGraphNodeGetGraph = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraph",)
)
cudaGraphNodeGetType = Api(client_sa="cudart.graph", enters="context", nonnull=("pType",))
cudaGraphGetNodes = Api(client_sa="cudart.graph", enters="context", nonnull=("numNodes",))
cudaGraphGetRootNodes = Api(client_sa="cudart.graph", enters="context", nonnull=("pNumRootNodes",))
cudaGraphGetEdges = Api(client_sa="cudart.graph", enters="context", nonnull=("numEdges",))
cudaGraphNodeGetDependencies = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNumDependencies",)
)
cudaGraphNodeGetDependentNodes = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNumDependentNodes",)
)
cudaGraphAddDependencies = Api(client_sa="cudart.graph", enters="context")
cudaGraphRemoveDependencies = Api(client_sa="cudart.graph", enters="context")
cudaGraphGetEdges_v2 = Api(client_sa="cudart.graph", enters="context", nonnull=("numEdges",))
cudaGraphNodeGetDependencies_v2 = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNumDependencies",)
)
cudaGraphNodeGetDependentNodes_v2 = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNumDependentNodes",)
)
cudaGraphAddDependencies_v2 = Api(client_sa="cudart.graph", enters="context")
cudaGraphRemoveDependencies_v2 = Api(client_sa="cudart.graph", enters="context")
cudaGraphDestroyNode = Api(client_sa="cudart.graph", enters="context")
cudaGraphDebugDotPrint = Api(client_sa="cudart.graph", enters="context", nonnull=("path",))
# -- executable graphs
cudaGraphInstantiate = Api(client_sa="cudart.graph", enters="context", nonnull=("pGraphExec",))
cudaGraphInstantiateWithFlags = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphExec",)
)
cudaGraphInstantiateWithParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphExec", "instantiateParams")
)
cudaGraphExecGetFlags = Api(client_sa="cudart.graph", enters="context", nonnull=("flags",))
cudaGraphExecDestroy = Api(client_sa="cudart.graph", enters="context")
cudaGraphLaunch = Api(client_sa="cudart.graph", enters="context")
cudaGraphUpload = Api(client_sa="cudart.graph", enters="context")
cudaGraphExecKernelNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphExecMemcpyNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphExecMemsetNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphExecHostNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",)
)
cudaGraphExecMemcpyNodeSetParams1D = Api(client_sa="cudart.graph", enters="context")
cudaGraphExecMemcpyNodeSetParamsFromSymbol = Api(client_sa="cudart.graph", enters="context")
cudaGraphExecMemcpyNodeSetParamsToSymbol = Api(client_sa="cudart.graph", enters="context")
cudaGraphExecNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("nodeParams",)
)
cudaGraphExecChildGraphNodeSetParams = Api(client_sa="cudart.graph", enters="context")
cudaGraphExecEventRecordNodeSetEvent = Api(client_sa="cudart.graph", enters="context")
cudaGraphExecEventWaitNodeSetEvent = Api(client_sa="cudart.graph", enters="context")
cudaGraphExecUpdate = Api(client_sa="cudart.graph", enters="context", nonnull=("resultInfo",))
cudaGraphNodeSetEnabled = Api(client_sa="cudart.graph", enters="context")
cudaGraphNodeGetEnabled = Api(client_sa="cudart.graph", enters="context", nonnull=("isEnabled",))
# -- user objects
cudaUserObjectCreate = Api(
    client_sa="cudart.graph", enters="context", nonnull=("object_out", "destroy")
)
cudaUserObjectRetain = Api(client_sa="cudart.graph", enters="context")
cudaUserObjectRelease = Api(client_sa="cudart.graph", enters="context")
cudaGraphRetainUserObject = Api(client_sa="cudart.graph", enters="context")
cudaGraphReleaseUserObject = Api(client_sa="cudart.graph", enters="context")
