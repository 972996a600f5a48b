# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Graph Management" and stream capture. A graph is state of the client until it is instantiated.

Old versions of a function have entries of their own where their parameters differ.
"""

from codegen.apis.cuda_driver.memory import ALLOC, FREE
from codegen.apis.cuda_driver.module import USES
from codegen.spec import Api, Capture

# Copies of pageable memory go through a buffer of the graph's, which may have to grow.
UPDATES = ("GRAPH_UPDATE", "HOST_ALLOC", "HOST_FREE")

# -- stream capture: a command of a capturing stream becomes a node and is not sent
cuStreamBeginCapture = Api(client_sa="graph", capture=Capture.FREE)
cuStreamBeginCapture_v2 = Api(client_sa="graph", capture=Capture.FREE)
cuStreamBeginCaptureToGraph = Api(client_sa="graph", capture=Capture.FREE)
# A graph that goes gives back the memory that it allocates.
cuStreamEndCapture = Api(client_sa="graph", nonnull=("phGraph",), ops=FREE, capture=Capture.FREE)
cuStreamIsCapturing = Api(client_sa="graph", nonnull=("captureStatus",), capture=Capture.FREE)
cuStreamGetCaptureInfo = Api(
    client_sa="graph", nonnull=("captureStatus_out",), capture=Capture.FREE
)
cuStreamGetCaptureInfo_v2 = Api(
    client_sa="graph", nonnull=("captureStatus_out",), capture=Capture.FREE
)
cuStreamGetCaptureInfo_v3 = Api(
    client_sa="graph", nonnull=("captureStatus_out",), capture=Capture.FREE
)
cuStreamUpdateCaptureDependencies = Api(client_sa="graph", capture=Capture.FREE)
cuStreamUpdateCaptureDependencies_v2 = Api(client_sa="graph", capture=Capture.FREE)
cuThreadExchangeStreamCaptureMode = Api(client_sa="graph", nonnull=("mode",))
# -- graphs and their nodes: all in the client
cuGraphCreate = Api(client_sa="graph", nonnull=("phGraph",))
cuGraphDestroy = Api(client_sa="graph", ops=FREE, capture=Capture.FREE)
cuGraphClone = Api(client_sa="graph", nonnull=("phGraphClone",))
cuGraphAddKernelNode = Api(
    client_sa="graph", nonnull=("phGraphNode", "nodeParams"), first=USES, capture=Capture.FREE
)
cuGraphAddKernelNode_v2 = Api(
    client_sa="graph", nonnull=("phGraphNode", "nodeParams"), first=USES, capture=Capture.FREE
)
cuGraphAddMemcpyNode = Api(client_sa="graph", nonnull=("phGraphNode", "copyParams"))
cuGraphAddMemsetNode = Api(client_sa="graph", nonnull=("phGraphNode", "memsetParams"))
cuGraphAddHostNode = Api(client_sa="graph", nonnull=("phGraphNode", "nodeParams"))
cuGraphAddChildGraphNode = Api(client_sa="graph", nonnull=("phGraphNode",))
cuGraphAddEmptyNode = Api(client_sa="graph", nonnull=("phGraphNode",))
cuGraphAddEventRecordNode = Api(client_sa="graph", nonnull=("phGraphNode",), capture=Capture.FREE)
cuGraphAddEventWaitNode = Api(client_sa="graph", nonnull=("phGraphNode",), capture=Capture.FREE)
cuGraphAddNode = Api(
    client_sa="graph",
    nonnull=("phGraphNode", "nodeParams"),
    ops=ALLOC,
    first=USES,
    capture=Capture.FREE,
)
cuGraphAddNode_v2 = Api(
    client_sa="graph",
    nonnull=("phGraphNode", "nodeParams"),
    ops=ALLOC,
    first=USES,
    capture=Capture.FREE,
)
# -- memory nodes: an allocation of the client, made with its node; what a launch adds is bookkeeping
cuGraphAddMemAllocNode = Api(
    client_sa="graph",
    nonnull=("phGraphNode", "nodeParams"),
    ops=ALLOC,
    capture=Capture.FREE,
)
cuGraphAddMemFreeNode = Api(client_sa="graph", nonnull=("phGraphNode",))
cuGraphMemAllocNodeGetParams = Api(client_sa="graph", nonnull=("params_out",))
cuGraphMemFreeNodeGetParams = Api(client_sa="graph", nonnull=("dptr_out",))
cuDeviceGraphMemTrim = Api(client_sa="graph")
cuDeviceGetGraphMemAttribute = Api(client_sa="graph", nonnull=("value",))
cuDeviceSetGraphMemAttribute = Api(client_sa="graph", nonnull=("value",))
cuGraphNodeSetParams = Api(
    client_sa="graph", nonnull=("nodeParams",), first=USES, capture=Capture.FREE
)
cuGraphKernelNodeGetParams = Api(client_sa="graph", nonnull=("nodeParams",))
cuGraphKernelNodeGetParams_v2 = Api(client_sa="graph", nonnull=("nodeParams",))
cuGraphKernelNodeSetParams = Api(
    client_sa="graph", nonnull=("nodeParams",), first=USES, capture=Capture.FREE
)
cuGraphKernelNodeSetParams_v2 = Api(
    client_sa="graph", nonnull=("nodeParams",), first=USES, capture=Capture.FREE
)
cuGraphMemcpyNodeGetParams = Api(client_sa="graph", nonnull=("nodeParams",))
cuGraphMemcpyNodeSetParams = Api(client_sa="graph", nonnull=("nodeParams",))
cuGraphMemsetNodeGetParams = Api(client_sa="graph", nonnull=("nodeParams",))
cuGraphMemsetNodeSetParams = Api(client_sa="graph", nonnull=("nodeParams",))
cuGraphHostNodeGetParams = Api(client_sa="graph", nonnull=("nodeParams",))
cuGraphHostNodeSetParams = Api(client_sa="graph", nonnull=("nodeParams",))
cuGraphKernelNodeGetAttribute = Api(client_sa="graph", nonnull=("value_out",))
cuGraphKernelNodeSetAttribute = Api(client_sa="graph", nonnull=("value",))
cuGraphKernelNodeCopyAttributes = Api(client_sa="graph")
cuGraphEventRecordNodeGetEvent = Api(client_sa="graph", nonnull=("event_out",))
cuGraphEventRecordNodeSetEvent = Api(client_sa="graph", capture=Capture.FREE)
cuGraphEventWaitNodeGetEvent = Api(client_sa="graph", nonnull=("event_out",))
cuGraphEventWaitNodeSetEvent = Api(client_sa="graph", capture=Capture.FREE)
cuGraphChildGraphNodeGetGraph = Api(client_sa="graph", nonnull=("phGraph",))
cuGraphNodeFindInClone = Api(client_sa="graph", nonnull=("phNode",))
cuGraphNodeGetType = Api(client_sa="graph", nonnull=("type",))
# The lists may be null where only their length is asked for.
cuGraphGetNodes = Api(client_sa="graph", nonnull=("numNodes",))
cuGraphGetRootNodes = Api(client_sa="graph", nonnull=("numRootNodes",))
cuGraphGetEdges = Api(client_sa="graph", nonnull=("numEdges",))
cuGraphGetEdges_v2 = Api(client_sa="graph", nonnull=("numEdges",))
cuGraphNodeGetDependencies = Api(client_sa="graph", nonnull=("numDependencies",))
cuGraphNodeGetDependencies_v2 = Api(client_sa="graph", nonnull=("numDependencies",))
cuGraphNodeGetDependentNodes = Api(client_sa="graph", nonnull=("numDependentNodes",))
cuGraphNodeGetDependentNodes_v2 = Api(client_sa="graph", nonnull=("numDependentNodes",))
cuGraphAddDependencies = Api(client_sa="graph")
cuGraphAddDependencies_v2 = Api(client_sa="graph")
cuGraphRemoveDependencies = Api(client_sa="graph")
cuGraphRemoveDependencies_v2 = Api(client_sa="graph")
cuGraphDestroyNode = Api(client_sa="graph")
cuGraphDebugDotPrint = Api(client_sa="graph", nonnull=("path",))
# -- executable graphs: sent once, then a launch is one message
cuGraphInstantiate = Api(
    client_sa="graph",
    nonnull=("phGraphExec",),
    ops=("GRAPH_CREATE", "HOST_ALLOC"),
    capture=Capture.FREE,
)
cuGraphInstantiate_v2 = Api(
    client_sa="graph",
    nonnull=("phGraphExec",),
    ops=("GRAPH_CREATE", "HOST_ALLOC"),
    capture=Capture.FREE,
)
cuGraphInstantiateWithFlags = Api(
    client_sa="graph",
    nonnull=("phGraphExec",),
    ops=("GRAPH_CREATE", "HOST_ALLOC"),
    capture=Capture.FREE,
)
cuGraphInstantiateWithParams = Api(
    client_sa="graph",
    nonnull=("phGraphExec", "instantiateParams"),
    ops=("GRAPH_CREATE", "HOST_ALLOC"),
    capture=Capture.FREE,
)
cuGraphExecGetFlags = Api(client_sa="graph", nonnull=("flags",))
cuGraphExecDestroy = Api(
    client_sa="graph", ops=("GRAPH_DESTROY", "HOST_FREE", *FREE), capture=Capture.FREE
)
cuGraphLaunch = Api(
    client_sa="graph", ops=("GRAPH_LAUNCH", "HOST_FUNC_DONE", *FREE), capture=Capture.NODE
)
# The steps are on the server since the instantiation; a step of a device has nothing to upload.
cuGraphUpload = Api(client_sa="graph", capture=Capture.FREE)
cuGraphExecKernelNodeSetParams = Api(
    client_sa="graph",
    nonnull=("nodeParams",),
    ops=("GRAPH_UPDATE",),
    first=USES,
    capture=Capture.FREE,
)
cuGraphExecKernelNodeSetParams_v2 = Api(
    client_sa="graph",
    nonnull=("nodeParams",),
    ops=("GRAPH_UPDATE",),
    first=USES,
    capture=Capture.FREE,
)
cuGraphExecHostNodeSetParams = Api(client_sa="graph", nonnull=("nodeParams",), capture=Capture.FREE)
cuGraphExecNodeSetParams = Api(
    client_sa="graph",
    nonnull=("nodeParams",),
    ops=UPDATES,
    first=USES,
    capture=Capture.FREE,
)
cuGraphExecMemcpyNodeSetParams = Api(
    client_sa="graph", nonnull=("copyParams",), ops=UPDATES, capture=Capture.FREE
)
cuGraphExecMemsetNodeSetParams = Api(
    client_sa="graph", nonnull=("memsetParams",), ops=("GRAPH_UPDATE",), capture=Capture.FREE
)
cuGraphExecChildGraphNodeSetParams = Api(client_sa="graph", ops=UPDATES, capture=Capture.FREE)
cuGraphExecEventRecordNodeSetEvent = Api(
    client_sa="graph", ops=("GRAPH_UPDATE",), capture=Capture.FREE
)
cuGraphExecEventWaitNodeSetEvent = Api(
    client_sa="graph", ops=("GRAPH_UPDATE",), capture=Capture.FREE
)
cuGraphNodeSetEnabled = Api(client_sa="graph", ops=UPDATES, capture=Capture.FREE)
cuGraphNodeGetEnabled = Api(client_sa="graph", nonnull=("isEnabled",))
cuGraphExecUpdate = Api(
    client_sa="graph", nonnull=("updateResult_out",), ops=UPDATES, capture=Capture.FREE
)
cuGraphExecUpdate_v2 = Api(
    client_sa="graph", nonnull=("resultInfo",), ops=UPDATES, capture=Capture.FREE
)
# -- user objects: counted here; the destructor runs on a thread of the client
cuUserObjectCreate = Api(client_sa="graph", nonnull=("object_out", "destroy"))
cuUserObjectRetain = Api(client_sa="graph")
cuUserObjectRelease = Api(client_sa="graph")
cuGraphRetainUserObject = Api(client_sa="graph")
cuGraphReleaseUserObject = Api(client_sa="graph")
