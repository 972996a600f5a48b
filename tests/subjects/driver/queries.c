// SPDX-License-Identifier: Apache-2.0
/* Calls that the client answers by itself and that no other program makes: facts of devices and contexts, pools, old
 * forms of the graph functions, the driver's log, what a linker and descriptors refuse. */
#include <dlfcn.h>

#include "program.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* they are asked for as well */

/* The form of a function that cuda.h hides behind a newer one of the same name. */
#define OLD(name, ...) CUresult (*const old_##name)(__VA_ARGS__) = (CUresult (*)(__VA_ARGS__))dlsym(RTLD_DEFAULT, #name)

static void devices(CUdevice dev) {
  CUdevprop p;
  int major = 0, minor = 0, value = -1, attribute = 0;
  char place[32] = "", too_short[4];
  CUdevice found = -1;
  CUuuid a, b;
  OLD(cuDeviceGetUuid, CUuuid*, CUdevice);
  CHECK(cuDeviceGetProperties(&p, dev));
  CHECK(cuDeviceGetAttribute(&attribute, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, dev));
  EXPECT_EQ(p.maxThreadsPerBlock, attribute);
  CHECK(cuDeviceGetAttribute(&attribute, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, dev));
  EXPECT_EQ(p.maxGridSize[1], attribute);
  CHECK(cuDeviceGetAttribute(&attribute, CU_DEVICE_ATTRIBUTE_WARP_SIZE, dev));
  EXPECT_EQ(p.SIMDWidth, attribute);
  CHECK(cuDeviceComputeCapability(&major, &minor, dev));
  CHECK(cuDeviceGetAttribute(&attribute, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, dev));
  EXPECT_EQ(major, attribute);
  CHECK(cuDeviceGetPCIBusId(place, sizeof place, dev));
  EXPECT(strlen(place) >= 12);
  CHECK(cuDeviceGetByPCIBusId(&found, place));
  EXPECT_EQ(found, dev);
  EXPECT_RESULT(cuDeviceGetByPCIBusId(&found, "ffff:ff:1f.7"), CUDA_ERROR_INVALID_DEVICE);
  EXPECT(cuDeviceGetPCIBusId(too_short, 0, dev) != CUDA_SUCCESS);
  EXPECT_RESULT(cuDeviceGetP2PAttribute(&value, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, dev, dev),
                CUDA_ERROR_INVALID_DEVICE);
  CHECK(old_cuDeviceGetUuid(&a, dev));
  CHECK(cuDeviceGetUuid(&b, dev));
  EXPECT(memcmp(&a, &b, sizeof a) == 0);
  CUmoduleLoadingMode mode = (CUmoduleLoadingMode)99;
  CHECK(cuModuleGetLoadingMode(&mode));
  EXPECT(mode == CU_MODULE_LAZY_LOADING || mode == CU_MODULE_EAGER_LOADING);
}

static void contexts(CUdevice dev) {
  CUcontext made, current;
  CUdevice device = -1;
  unsigned version = 0, flags = 0;
  int active = 0;
  CUfunc_cache cache = (CUfunc_cache)99;
  OLD(cuCtxCreate_v2, CUcontext*, unsigned, CUdevice);
  CHECK(old_cuCtxCreate_v2(&made, CU_CTX_SCHED_YIELD, dev));
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == made);
  CHECK(cuCtxGetApiVersion(made, &version));
  EXPECT(version >= 3020);
  CHECK(cuCtxGetDevice_v2(&device, made));
  EXPECT_EQ(device, dev);
  device = -1;
  CHECK(cuCtxGetDevice_v2(&device, NULL)); /* of the one that is current */
  EXPECT_EQ(device, dev);
  CHECK(cuCtxSetCacheConfig(CU_FUNC_CACHE_PREFER_L1));
  CHECK(cuCtxGetCacheConfig(&cache));
  EXPECT((unsigned)cache <= CU_FUNC_CACHE_PREFER_EQUAL);
  EXPECT_RESULT(cuCtxEnablePeerAccess(made, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuCtxEnablePeerAccess(made, 0) != CUDA_SUCCESS); /* a context is no peer of its own device */
  EXPECT_RESULT(cuCtxDisablePeerAccess(made), CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
  CHECK(cuCtxDestroy(made));
  EXPECT_RESULT(cuCtxGetApiVersion(made, &version), CUDA_ERROR_INVALID_CONTEXT);

  CHECK(cuDevicePrimaryCtxSetFlags(dev, CU_CTX_SCHED_BLOCKING_SYNC));
  CHECK(cuDevicePrimaryCtxGetState(dev, &flags, &active));
  EXPECT_EQ(flags, CU_CTX_SCHED_BLOCKING_SYNC);
  EXPECT_EQ(active, 1);
  EXPECT_RESULT(cuDevicePrimaryCtxSetFlags(dev, CU_CTX_SCHED_SPIN | CU_CTX_SCHED_YIELD), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDevicePrimaryCtxSetFlags(dev, 0x80000000u), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuDevicePrimaryCtxGetState(dev, &flags, &active));
  EXPECT_EQ(flags, CU_CTX_SCHED_BLOCKING_SYNC);
}

static void pools(CUdevice dev) {
  CUmemoryPool first, made, got;
  CUmemPoolProps props;
  CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev};
  CUmemAccess_flags access = (CUmemAccess_flags)99;
  memset(&props, 0, sizeof props);
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location = here;
  CHECK(cuMemGetDefaultMemPool(&first, &here, CU_MEM_ALLOCATION_TYPE_PINNED));
  CHECK(cuDeviceGetMemPool(&got, dev));
  EXPECT(got == first);
  CHECK(cuMemPoolCreate(&made, &props));
  CHECK(cuMemPoolGetAccess(&access, made, &here));
  EXPECT_EQ(access, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  CUmemAccessDesc wanted = {.location = here, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CHECK(cuMemPoolSetAccess(made, &wanted, 1));
  wanted.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE; /* a device cannot lose its own pool */
  EXPECT(cuMemPoolSetAccess(made, &wanted, 1) != CUDA_SUCCESS);
  CHECK(cuDeviceSetMemPool(dev, made));
  CHECK(cuMemGetMemPool(&got, &here, CU_MEM_ALLOCATION_TYPE_PINNED));
  EXPECT(got == made);
  CHECK(cuMemSetMemPool(&here, CU_MEM_ALLOCATION_TYPE_PINNED, first));
  CHECK(cuDeviceGetMemPool(&got, dev));
  EXPECT(got == first);
  CHECK(cuDeviceSetMemPool(dev, made));
  CHECK(cuMemPoolDestroy(made)); /* cuda.h: then the default one is current again */
  CHECK(cuDeviceGetMemPool(&got, dev));
  EXPECT(got == first);
  EXPECT_RESULT(cuDeviceSetMemPool(dev, made), CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemPoolDestroy(first) != CUDA_SUCCESS);
}

/* The forms of before edges had data, and of before a node's parameters named a context. */
static void old_graphs(void) {
  OLD(cuGraphAddDependencies, CUgraph, const CUgraphNode*, const CUgraphNode*, size_t);
  OLD(cuGraphRemoveDependencies, CUgraph, const CUgraphNode*, const CUgraphNode*, size_t);
  OLD(cuGraphGetEdges, CUgraph, CUgraphNode*, CUgraphNode*, size_t*);
  OLD(cuGraphNodeGetDependencies, CUgraphNode, CUgraphNode*, size_t*);
  OLD(cuGraphNodeGetDependentNodes, CUgraphNode, CUgraphNode*, size_t*);
  OLD(cuGraphAddKernelNode, CUgraphNode*, CUgraph, const CUgraphNode*, size_t, const CUDA_KERNEL_NODE_PARAMS_v1*);
  OLD(cuGraphKernelNodeGetParams, CUgraphNode, CUDA_KERNEL_NODE_PARAMS_v1*);
  OLD(cuGraphKernelNodeSetParams, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v1*);
  CUgraph graph;
  CUgraphExec exec;
  CUgraphNode a, b, kernel_node, record, wait, from[4], to[4];
  CUevent first, second, got;
  size_t n = 4;
  CUmodule mod = load_kernels();
  CUfunction fill = kernel(mod, "fill");
  CUdeviceptr memory;
  uint32_t value = 0xabcd;
  uint64_t count = 64;
  void* params[] = {&memory, &value, &count};
  CHECK(cuMemAlloc(&memory, count * 4));
  CHECK(cuEventCreate(&first, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&second, CU_EVENT_DEFAULT));
  CHECK(cuGraphCreate(&graph, 0));
  CHECK(cuGraphAddEmptyNode(&a, graph, NULL, 0));
  CHECK(cuGraphAddEmptyNode(&b, graph, NULL, 0));
  CHECK(old_cuGraphAddDependencies(graph, &a, &b, 1));
  CHECK(old_cuGraphGetEdges(graph, from, to, &n));
  EXPECT(n == 1 && from[0] == a && to[0] == b);
  n = 4;
  CHECK(old_cuGraphNodeGetDependencies(b, from, &n));
  EXPECT(n == 1 && from[0] == a);
  n = 4;
  CHECK(old_cuGraphNodeGetDependentNodes(a, to, &n));
  EXPECT(n == 1 && to[0] == b);
  CHECK(old_cuGraphRemoveDependencies(graph, &a, &b, 1));
  CHECK(old_cuGraphGetEdges(graph, NULL, NULL, &n));
  EXPECT_EQ(n, 0);

  CUDA_KERNEL_NODE_PARAMS_v1 k, back;
  memset(&k, 0, sizeof k);
  k.func = fill;
  k.gridDimX = k.gridDimY = k.gridDimZ = k.blockDimX = k.blockDimY = k.blockDimZ = 1;
  k.kernelParams = params;
  CHECK(old_cuGraphAddKernelNode(&kernel_node, graph, &a, 1, &k));
  CHECK(old_cuGraphKernelNodeGetParams(kernel_node, &back));
  EXPECT(back.func == fill && back.gridDimX == 1 && *(uint32_t*)back.kernelParams[1] == value);
  value = 0x1234;
  CHECK(old_cuGraphKernelNodeSetParams(kernel_node, &k));
  CHECK(cuGraphAddEventRecordNode(&record, graph, &kernel_node, 1, first));
  CHECK(cuGraphAddEventWaitNode(&wait, graph, NULL, 0, first));
  CHECK(cuGraphEventRecordNodeSetEvent(record, second));
  CHECK(cuGraphEventRecordNodeGetEvent(record, &got));
  EXPECT(got == second);
  CHECK(cuGraphEventWaitNodeSetEvent(wait, second));
  CHECK(cuGraphEventWaitNodeGetEvent(wait, &got));
  EXPECT(got == second);
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  CHECK(cuGraphLaunch(exec, NULL));
  CHECK(cuStreamSynchronize(NULL));
  expect_device_words(memory, 0x1234, count);
  CHECK(cuEventSynchronize(second));
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));
  CHECK(cuEventDestroy(first));
  CHECK(cuEventDestroy(second));
  CHECK(cuMemFree(memory));
  CHECK(cuModuleUnload(mod));
}

static void old_captures(void) {
  OLD(cuStreamBeginCapture, CUstream);
  OLD(cuStreamGetCaptureInfo, CUstream, CUstreamCaptureStatus*, cuuint64_t*);
  OLD(cuStreamGetCaptureInfo_v2, CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**, size_t*);
  OLD(cuStreamUpdateCaptureDependencies, CUstream, CUgraphNode*, size_t, unsigned);
  CUstream s;
  CUgraph graph, open;
  CUgraphNode node;
  const CUgraphNode* last;
  CUstreamCaptureStatus status;
  cuuint64_t id = 0, same = 0;
  size_t n = 0;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(old_cuStreamBeginCapture(s));
  CHECK(old_cuStreamGetCaptureInfo(s, &status, &id));
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK(old_cuStreamGetCaptureInfo_v2(s, &status, &same, &open, &last, &n));
  EXPECT(same == id && n == 0);
  CHECK(cuGraphAddEmptyNode(&node, open, NULL, 0));
  CHECK(old_cuStreamUpdateCaptureDependencies(s, &node, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
  CHECK(old_cuStreamGetCaptureInfo_v2(s, &status, NULL, NULL, &last, &n));
  EXPECT(n == 1 && last[0] == node);
  CHECK(cuStreamEndCapture(s, &graph));
  CHECK(cuGraphGetNodes(graph, NULL, &n));
  EXPECT_EQ(n, 1);
  CHECK(cuGraphDestroy(graph));
  CHECK(cuStreamDestroy(s));
}

static void heard(void* data, CUlogLevel level, char* message, size_t length) {
  (void)data, (void)level, (void)message, (void)length;
}

static void driver_log(void) {
  CUlogsCallbackHandle handle;
  CUlogIterator at;
  char text[64] = "x";
  size_t size = sizeof text;
  CHECK(cuLogsRegisterCallback(heard, NULL, &handle));
  CHECK(cuLogsUnregisterCallback(handle));
  EXPECT(cuLogsUnregisterCallback(handle) != CUDA_SUCCESS);
  CHECK(cuLogsCurrent(&at, 0));
  EXPECT(cuLogsCurrent(&at, 1) != CUDA_SUCCESS);
  CHECK(cuLogsDumpToMemory(NULL, text, &size, 0));
  EXPECT(size < sizeof text);
}

static void by_name(void) {
  void* found = NULL;
  OLD(cuGetProcAddress, const char*, void**, int, cuuint64_t);
  CHECK(old_cuGetProcAddress("cuMemAlloc", &found, 12000, CU_GET_PROC_ADDRESS_DEFAULT));
  EXPECT(found == dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
  EXPECT_RESULT(old_cuGetProcAddress("cuNoSuchFunction", &found, 12000, CU_GET_PROC_ADDRESS_DEFAULT),
                CUDA_ERROR_NOT_FOUND);
  const void* table = NULL;
  const CUuuid unknown = {{1, 2, 3}};
  EXPECT(cuGetExportTable(&table, &unknown) != CUDA_SUCCESS);
}

/* What names no state, no array, no object. */
static void nothing_there(void) {
  CUDA_RESOURCE_DESC resource;
  CUDA_TEXTURE_DESC texture;
  CUDA_RESOURCE_VIEW_DESC view;
  char data[] = "x";
  EXPECT(cuTexObjectGetResourceDesc(&resource, 12345) != CUDA_SUCCESS);
  EXPECT(cuTexObjectGetTextureDesc(&texture, 12345) != CUDA_SUCCESS);
  EXPECT(cuTexObjectGetResourceViewDesc(&view, 12345) != CUDA_SUCCESS);
  EXPECT(cuSurfObjectGetResourceDesc(&resource, 12345) != CUDA_SUCCESS);
  EXPECT(cuLinkAddData((CUlinkState)1, CU_JIT_INPUT_PTX, data, sizeof data, "x", 0, NULL, NULL) != CUDA_SUCCESS);
  EXPECT(cuLinkAddFile((CUlinkState)1, CU_JIT_INPUT_PTX, "/nonexistent", 0, NULL, NULL) != CUDA_SUCCESS);
  EXPECT(cuLinkDestroy((CUlinkState)1) != CUDA_SUCCESS);
}

int main(void) {
  const CUdevice dev = start();
  devices(dev);
  contexts(dev);
  CUcontext primary; /* the one that was made is gone, and with it the thread's */
  CHECK(cuDevicePrimaryCtxRetain(&primary, dev));
  CHECK(cuCtxSetCurrent(primary));
  pools(dev);
  old_graphs();
  old_captures();
  driver_log();
  by_name();
  nothing_there();
  return pass("queries");
}
