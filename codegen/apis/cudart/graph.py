"""cuda_runtime_api.h "Graph Management" and stream capture: the driver's graphs, with the runtime's parameters.

What counts edges without their data in major 12 has a _v2 there that major 13 calls by the plain name.
"""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

# -- stream capture
cudaStreamBeginCapture = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaStreamBeginCaptureToGraph = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaStreamEndCapture = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraph",), checked=CHECKED
)
cudaStreamUpdateCaptureDependencies = Api(
    client_sa="cudart.graph", enters="context", checked=CHECKED
)
cudaStreamUpdateCaptureDependencies_v2 = Api(
    client_sa="cudart.graph", enters="context", checked=CHECKED
)
# -- graphs and nodes
cudaGraphCreate = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraph",), checked=CHECKED
)
cudaGraphDestroy = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphClone = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphClone",), checked=CHECKED
)
cudaGraphNodeFindInClone = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNode",), checked=CHECKED
)
cudaGraphAddKernelNode = Api(
    client_sa="cudart.graph",
    enters="context",
    nonnull=("pGraphNode", "pNodeParams"),
    checked=CHECKED,
)
cudaGraphAddHostNode = Api(
    client_sa="cudart.graph",
    enters="context",
    nonnull=("pGraphNode", "pNodeParams"),
    checked=CHECKED,
)
cudaGraphAddMemcpyNode = Api(
    client_sa="cudart.graph",
    enters="context",
    nonnull=("pGraphNode", "pCopyParams"),
    checked=CHECKED,
)
cudaGraphAddMemsetNode = Api(
    client_sa="cudart.graph",
    enters="context",
    nonnull=("pGraphNode", "pMemsetParams"),
    checked=CHECKED,
)
cudaGraphAddMemcpyNode1D = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",), checked=CHECKED
)
cudaGraphAddMemcpyNodeFromSymbol = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",), checked=CHECKED
)
cudaGraphAddMemcpyNodeToSymbol = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",), checked=CHECKED
)
cudaGraphAddChildGraphNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",), checked=CHECKED
)
cudaGraphAddEmptyNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",), checked=CHECKED
)
cudaGraphAddEventRecordNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",), checked=CHECKED
)
cudaGraphAddEventWaitNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",), checked=CHECKED
)
cudaGraphAddNode = Api(
    client_sa="cudart.graph",
    enters="context",
    nonnull=("pGraphNode", "nodeParams"),
    checked=CHECKED,
)
cudaGraphAddNode_v2 = Api(
    client_sa="cudart.graph",
    enters="context",
    nonnull=("pGraphNode", "nodeParams"),
    checked=CHECKED,
)
# -- memory nodes
cudaGraphAddMemAllocNode = Api(
    client_sa="cudart.graph",
    enters="context",
    nonnull=("pGraphNode", "nodeParams"),
    checked=CHECKED,
)
cudaGraphAddMemFreeNode = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphNode",), checked=CHECKED
)
cudaGraphMemAllocNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("params_out",), checked=CHECKED
)
cudaGraphMemFreeNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("dptr_out",), checked=CHECKED
)
cudaDeviceGraphMemTrim = Api(client_sa="cudart.graph", enters="driver", checked=CHECKED)
cudaDeviceGetGraphMemAttribute = Api(
    client_sa="cudart.graph", enters="driver", nonnull=("value",), checked=CHECKED
)
cudaDeviceSetGraphMemAttribute = Api(
    client_sa="cudart.graph", enters="driver", nonnull=("value",), checked=CHECKED
)
cudaGraphNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("nodeParams",), checked=CHECKED
)
cudaGraphKernelNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphKernelNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphMemcpyNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphMemcpyNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphMemsetNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphMemsetNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphHostNodeGetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphHostNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphMemcpyNodeSetParams1D = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphMemcpyNodeSetParamsFromSymbol = Api(
    client_sa="cudart.graph", enters="context", checked=CHECKED
)
cudaGraphMemcpyNodeSetParamsToSymbol = Api(
    client_sa="cudart.graph", enters="context", checked=CHECKED
)
cudaGraphKernelNodeGetAttribute = Api(
    client_sa="cudart.graph", enters="context", nonnull=("value_out",), checked=CHECKED
)
cudaGraphKernelNodeSetAttribute = Api(
    client_sa="cudart.graph", enters="context", nonnull=("value",), checked=CHECKED
)
# The headers of 12 and 13 name its two nodes in opposite order: answered in 13, refused in 12.
cudaGraphKernelNodeCopyAttributes = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphEventRecordNodeGetEvent = Api(
    client_sa="cudart.graph", enters="context", nonnull=("event_out",), checked=CHECKED
)
cudaGraphEventRecordNodeSetEvent = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphEventWaitNodeGetEvent = Api(
    client_sa="cudart.graph", enters="context", nonnull=("event_out",), checked=CHECKED
)
cudaGraphEventWaitNodeSetEvent = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphChildGraphNodeGetGraph = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraph",), checked=CHECKED
)
cudaGraphNodeGetType = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pType",), checked=CHECKED
)
cudaGraphGetNodes = Api(
    client_sa="cudart.graph", enters="context", nonnull=("numNodes",), checked=CHECKED
)
cudaGraphGetRootNodes = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNumRootNodes",), checked=CHECKED
)
cudaGraphGetEdges = Api(
    client_sa="cudart.graph", enters="context", nonnull=("numEdges",), checked=CHECKED
)
cudaGraphNodeGetDependencies = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNumDependencies",), checked=CHECKED
)
cudaGraphNodeGetDependentNodes = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNumDependentNodes",), checked=CHECKED
)
cudaGraphAddDependencies = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphRemoveDependencies = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphGetEdges_v2 = Api(
    client_sa="cudart.graph", enters="context", nonnull=("numEdges",), checked=CHECKED
)
cudaGraphNodeGetDependencies_v2 = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNumDependencies",), checked=CHECKED
)
cudaGraphNodeGetDependentNodes_v2 = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNumDependentNodes",), checked=CHECKED
)
cudaGraphAddDependencies_v2 = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphRemoveDependencies_v2 = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphDestroyNode = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphDebugDotPrint = Api(
    client_sa="cudart.graph", enters="context", nonnull=("path",), checked=CHECKED
)
# -- executable graphs
cudaGraphInstantiate = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphExec",), checked=CHECKED
)
cudaGraphInstantiateWithFlags = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pGraphExec",), checked=CHECKED
)
cudaGraphInstantiateWithParams = Api(
    client_sa="cudart.graph",
    enters="context",
    nonnull=("pGraphExec", "instantiateParams"),
    checked=CHECKED,
)
cudaGraphExecGetFlags = Api(
    client_sa="cudart.graph", enters="context", nonnull=("flags",), checked=CHECKED
)
cudaGraphExecDestroy = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphLaunch = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphUpload = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphExecKernelNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphExecMemcpyNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphExecMemsetNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphExecHostNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("pNodeParams",), checked=CHECKED
)
cudaGraphExecMemcpyNodeSetParams1D = Api(
    client_sa="cudart.graph", enters="context", checked=CHECKED
)
cudaGraphExecMemcpyNodeSetParamsFromSymbol = Api(
    client_sa="cudart.graph", enters="context", checked=CHECKED
)
cudaGraphExecMemcpyNodeSetParamsToSymbol = Api(
    client_sa="cudart.graph", enters="context", checked=CHECKED
)
cudaGraphExecNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", nonnull=("nodeParams",), checked=CHECKED
)
cudaGraphExecChildGraphNodeSetParams = Api(
    client_sa="cudart.graph", enters="context", checked=CHECKED
)
cudaGraphExecEventRecordNodeSetEvent = Api(
    client_sa="cudart.graph", enters="context", checked=CHECKED
)
cudaGraphExecEventWaitNodeSetEvent = Api(
    client_sa="cudart.graph", enters="context", checked=CHECKED
)
cudaGraphExecUpdate = Api(
    client_sa="cudart.graph", enters="context", nonnull=("resultInfo",), checked=CHECKED
)
cudaGraphNodeSetEnabled = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphNodeGetEnabled = Api(
    client_sa="cudart.graph", enters="context", nonnull=("isEnabled",), checked=CHECKED
)
# -- user objects
cudaUserObjectCreate = Api(
    client_sa="cudart.graph", enters="context", nonnull=("object_out", "destroy"), checked=CHECKED
)
cudaUserObjectRetain = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaUserObjectRelease = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphRetainUserObject = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
cudaGraphReleaseUserObject = Api(client_sa="cudart.graph", enters="context", checked=CHECKED)
