"""cuda.h "Graph Management" and stream capture. A graph is state of the client until it is instantiated.

Old versions of a function have entries of their own where their parameters differ.
"""

from codegen.apis.cuda_driver.memory import ALLOC, FREE
from codegen.spec import Api, Capture

CHECKED = "2026-11 toolkit 13.0"

# -- stream capture: a command of a capturing stream becomes a node and is not sent
cuStreamBeginCapture = Api(client_sa="graph", capture=Capture.FREE, checked=CHECKED)
cuStreamBeginCapture_v2 = Api(client_sa="graph", capture=Capture.FREE, checked=CHECKED)
cuStreamBeginCaptureToGraph = Api(client_sa="graph", capture=Capture.FREE, checked=CHECKED)
# A graph that goes gives back the memory that it allocates.
cuStreamEndCapture = Api(
    client_sa="graph", nonnull=("phGraph",), ops=FREE, capture=Capture.FREE, checked=CHECKED
)
cuStreamIsCapturing = Api(
    client_sa="graph", nonnull=("captureStatus",), capture=Capture.FREE, checked=CHECKED
)
cuStreamGetCaptureInfo = Api(
    client_sa="graph", nonnull=("captureStatus_out",), capture=Capture.FREE, checked=CHECKED
)
cuStreamGetCaptureInfo_v2 = Api(
    client_sa="graph", nonnull=("captureStatus_out",), capture=Capture.FREE, checked=CHECKED
)
cuStreamGetCaptureInfo_v3 = Api(
    client_sa="graph", nonnull=("captureStatus_out",), capture=Capture.FREE, checked=CHECKED
)
cuStreamUpdateCaptureDependencies = Api(client_sa="graph", capture=Capture.FREE, checked=CHECKED)
cuStreamUpdateCaptureDependencies_v2 = Api(client_sa="graph", capture=Capture.FREE, checked=CHECKED)
cuThreadExchangeStreamCaptureMode = Api(client_sa="graph", nonnull=("mode",), checked=CHECKED)
# -- graphs and their nodes: all in the client
cuGraphCreate = Api(client_sa="graph", nonnull=("phGraph",), checked=CHECKED)
cuGraphDestroy = Api(client_sa="graph", ops=FREE, capture=Capture.FREE, checked=CHECKED)
cuGraphClone = Api(client_sa="graph", nonnull=("phGraphClone",), checked=CHECKED)
cuGraphAddKernelNode = Api(
    client_sa="graph", nonnull=("phGraphNode", "nodeParams"), checked=CHECKED
)
cuGraphAddKernelNode_v2 = Api(
    client_sa="graph", nonnull=("phGraphNode", "nodeParams"), checked=CHECKED
)
cuGraphAddMemcpyNode = Api(
    client_sa="graph", nonnull=("phGraphNode", "copyParams"), checked=CHECKED
)
cuGraphAddMemsetNode = Api(
    client_sa="graph", nonnull=("phGraphNode", "memsetParams"), checked=CHECKED
)
cuGraphAddHostNode = Api(client_sa="graph", nonnull=("phGraphNode", "nodeParams"), checked=CHECKED)
cuGraphAddChildGraphNode = Api(client_sa="graph", nonnull=("phGraphNode",), checked=CHECKED)
cuGraphAddEmptyNode = Api(client_sa="graph", nonnull=("phGraphNode",), checked=CHECKED)
cuGraphAddEventRecordNode = Api(
    client_sa="graph", nonnull=("phGraphNode",), capture=Capture.FREE, checked=CHECKED
)
cuGraphAddEventWaitNode = Api(
    client_sa="graph", nonnull=("phGraphNode",), capture=Capture.FREE, checked=CHECKED
)
cuGraphAddNode = Api(
    client_sa="graph",
    nonnull=("phGraphNode", "nodeParams"),
    ops=ALLOC,
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphAddNode_v2 = Api(
    client_sa="graph",
    nonnull=("phGraphNode", "nodeParams"),
    ops=ALLOC,
    capture=Capture.FREE,
    checked=CHECKED,
)
# -- memory nodes: an allocation of the client, made with its node; what a launch adds is bookkeeping
cuGraphAddMemAllocNode = Api(
    client_sa="graph",
    nonnull=("phGraphNode", "nodeParams"),
    ops=ALLOC,
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphAddMemFreeNode = Api(client_sa="graph", nonnull=("phGraphNode",), checked=CHECKED)
cuGraphMemAllocNodeGetParams = Api(client_sa="graph", nonnull=("params_out",), checked=CHECKED)
cuGraphMemFreeNodeGetParams = Api(client_sa="graph", nonnull=("dptr_out",), checked=CHECKED)
cuDeviceGraphMemTrim = Api(client_sa="graph", checked=CHECKED)
cuDeviceGetGraphMemAttribute = Api(client_sa="graph", nonnull=("value",), checked=CHECKED)
cuDeviceSetGraphMemAttribute = Api(client_sa="graph", nonnull=("value",), checked=CHECKED)
cuGraphNodeSetParams = Api(client_sa="graph", nonnull=("nodeParams",), checked=CHECKED)
cuGraphKernelNodeGetParams = Api(client_sa="graph", nonnull=("nodeParams",), checked=CHECKED)
cuGraphKernelNodeGetParams_v2 = Api(client_sa="graph", nonnull=("nodeParams",), checked=CHECKED)
cuGraphKernelNodeSetParams = Api(client_sa="graph", nonnull=("nodeParams",), checked=CHECKED)
cuGraphKernelNodeSetParams_v2 = Api(client_sa="graph", nonnull=("nodeParams",), checked=CHECKED)
cuGraphMemcpyNodeGetParams = Api(client_sa="graph", nonnull=("nodeParams",), checked=CHECKED)
cuGraphMemcpyNodeSetParams = Api(client_sa="graph", nonnull=("nodeParams",), checked=CHECKED)
cuGraphMemsetNodeGetParams = Api(client_sa="graph", nonnull=("nodeParams",), checked=CHECKED)
cuGraphMemsetNodeSetParams = Api(client_sa="graph", nonnull=("nodeParams",), checked=CHECKED)
cuGraphHostNodeGetParams = Api(client_sa="graph", nonnull=("nodeParams",), checked=CHECKED)
cuGraphHostNodeSetParams = Api(client_sa="graph", nonnull=("nodeParams",), checked=CHECKED)
cuGraphKernelNodeGetAttribute = Api(client_sa="graph", nonnull=("value_out",), checked=CHECKED)
cuGraphKernelNodeSetAttribute = Api(client_sa="graph", nonnull=("value",), checked=CHECKED)
cuGraphKernelNodeCopyAttributes = Api(client_sa="graph", checked=CHECKED)
cuGraphEventRecordNodeGetEvent = Api(client_sa="graph", nonnull=("event_out",), checked=CHECKED)
cuGraphEventRecordNodeSetEvent = Api(client_sa="graph", capture=Capture.FREE, checked=CHECKED)
cuGraphEventWaitNodeGetEvent = Api(client_sa="graph", nonnull=("event_out",), checked=CHECKED)
cuGraphEventWaitNodeSetEvent = Api(client_sa="graph", capture=Capture.FREE, checked=CHECKED)
cuGraphChildGraphNodeGetGraph = Api(client_sa="graph", nonnull=("phGraph",), checked=CHECKED)
cuGraphNodeFindInClone = Api(client_sa="graph", nonnull=("phNode",), checked=CHECKED)
cuGraphNodeGetType = Api(client_sa="graph", nonnull=("type",), checked=CHECKED)
# The lists may be null where only their length is asked for.
cuGraphGetNodes = Api(client_sa="graph", nonnull=("numNodes",), checked=CHECKED)
cuGraphGetRootNodes = Api(client_sa="graph", nonnull=("numRootNodes",), checked=CHECKED)
cuGraphGetEdges = Api(client_sa="graph", nonnull=("numEdges",), checked=CHECKED)
cuGraphGetEdges_v2 = Api(client_sa="graph", nonnull=("numEdges",), checked=CHECKED)
cuGraphNodeGetDependencies = Api(client_sa="graph", nonnull=("numDependencies",), checked=CHECKED)
cuGraphNodeGetDependencies_v2 = Api(
    client_sa="graph", nonnull=("numDependencies",), checked=CHECKED
)
cuGraphNodeGetDependentNodes = Api(
    client_sa="graph", nonnull=("numDependentNodes",), checked=CHECKED
)
cuGraphNodeGetDependentNodes_v2 = Api(
    client_sa="graph", nonnull=("numDependentNodes",), checked=CHECKED
)
cuGraphAddDependencies = Api(client_sa="graph", checked=CHECKED)
cuGraphAddDependencies_v2 = Api(client_sa="graph", checked=CHECKED)
cuGraphRemoveDependencies = Api(client_sa="graph", checked=CHECKED)
cuGraphRemoveDependencies_v2 = Api(client_sa="graph", checked=CHECKED)
cuGraphDestroyNode = Api(client_sa="graph", checked=CHECKED)
cuGraphDebugDotPrint = Api(client_sa="graph", nonnull=("path",), checked=CHECKED)
# -- executable graphs: sent once, then a launch is one message
cuGraphInstantiate = Api(
    client_sa="graph",
    nonnull=("phGraphExec",),
    ops=("GRAPH_CREATE", "HOST_ALLOC"),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphInstantiate_v2 = Api(
    client_sa="graph",
    nonnull=("phGraphExec",),
    ops=("GRAPH_CREATE", "HOST_ALLOC"),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphInstantiateWithFlags = Api(
    client_sa="graph",
    nonnull=("phGraphExec",),
    ops=("GRAPH_CREATE", "HOST_ALLOC"),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphInstantiateWithParams = Api(
    client_sa="graph",
    nonnull=("phGraphExec", "instantiateParams"),
    ops=("GRAPH_CREATE", "HOST_ALLOC"),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphExecGetFlags = Api(client_sa="graph", nonnull=("flags",), checked=CHECKED)
cuGraphExecDestroy = Api(
    client_sa="graph",
    ops=("GRAPH_DESTROY", "HOST_FREE", *FREE),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphLaunch = Api(
    client_sa="graph", ops=("GRAPH_LAUNCH", "HOST_FUNC_DONE"), capture=Capture.NODE, checked=CHECKED
)
# The steps are on the server since the instantiation; a step of a device has nothing to upload.
cuGraphUpload = Api(client_sa="graph", capture=Capture.FREE, checked=CHECKED)
cuGraphExecKernelNodeSetParams = Api(
    client_sa="graph",
    nonnull=("nodeParams",),
    ops=("GRAPH_UPDATE",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphExecKernelNodeSetParams_v2 = Api(
    client_sa="graph",
    nonnull=("nodeParams",),
    ops=("GRAPH_UPDATE",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphExecHostNodeSetParams = Api(
    client_sa="graph",
    nonnull=("nodeParams",),
    ops=("GRAPH_UPDATE",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphExecNodeSetParams = Api(
    client_sa="graph",
    nonnull=("nodeParams",),
    ops=("GRAPH_UPDATE",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphExecMemcpyNodeSetParams = Api(
    client_sa="graph",
    nonnull=("copyParams",),
    ops=("GRAPH_UPDATE",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphExecMemsetNodeSetParams = Api(
    client_sa="graph",
    nonnull=("memsetParams",),
    ops=("GRAPH_UPDATE",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphExecChildGraphNodeSetParams = Api(
    client_sa="graph", ops=("GRAPH_UPDATE",), capture=Capture.FREE, checked=CHECKED
)
cuGraphExecEventRecordNodeSetEvent = Api(
    client_sa="graph", ops=("GRAPH_UPDATE",), capture=Capture.FREE, checked=CHECKED
)
cuGraphExecEventWaitNodeSetEvent = Api(
    client_sa="graph", ops=("GRAPH_UPDATE",), capture=Capture.FREE, checked=CHECKED
)
cuGraphNodeSetEnabled = Api(
    client_sa="graph", ops=("GRAPH_UPDATE",), capture=Capture.FREE, checked=CHECKED
)
cuGraphNodeGetEnabled = Api(client_sa="graph", nonnull=("isEnabled",), checked=CHECKED)
cuGraphExecUpdate = Api(
    client_sa="graph",
    nonnull=("updateResult_out",),
    ops=("GRAPH_UPDATE",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuGraphExecUpdate_v2 = Api(
    client_sa="graph",
    nonnull=("resultInfo",),
    ops=("GRAPH_UPDATE",),
    capture=Capture.FREE,
    checked=CHECKED,
)
# -- user objects: counted here; the destructor runs on a thread of the client
cuUserObjectCreate = Api(client_sa="graph", nonnull=("object_out", "destroy"), checked=CHECKED)
cuUserObjectRetain = Api(client_sa="graph", checked=CHECKED)
cuUserObjectRelease = Api(client_sa="graph", checked=CHECKED)
cuGraphRetainUserObject = Api(client_sa="graph", checked=CHECKED)
cuGraphReleaseUserObject = Api(client_sa="graph", checked=CHECKED)
