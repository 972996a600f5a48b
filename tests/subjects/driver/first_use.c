// SPDX-License-Identifier: Apache-2.0
/* What a call does where what it names is used for the first time: a kernel of a library that no context has loaded
 * yet, a thread's own default stream, memory whose contents outlived their mapping.
 *
 * Each result is checked here. What each call sends is checked by a harness: the library then notes it
 * (tests/integration/test_support.py). */
#define CUDA_API_PER_THREAD_DEFAULT_STREAM
#include "program.h"

/* A kernel of a library of its own, which only the other GPU has loaded. */
static CUlibrary library;
static CUcontext there, here;

static CUkernel fresh(void) {
  CUkernel k;
  CHECK(cuCtxSetCurrent(there));
  CHECK(cuLibraryLoadFromFile(&library, kernels_path(), NULL, NULL, 0, NULL, NULL, 0));
  CHECK(cuLibraryGetKernel(&k, library, "fill"));
  CHECK(cuCtxSetCurrent(here));
  return k;
}
static CUfunction fresh_function(void) { return (CUfunction)fresh(); }

static void kernels(CUdevice dev) {
  CUlibrary of;
  CUmodule mod;
  CUfunction f;
  const char* name;
  size_t offset, size;
  int value;
  CUfunctionLoadingState state;
  CUdeviceptr words;
  CHECK(cuMemAlloc(&words, 4096));

  CHECK(cuKernelGetLibrary(&of, fresh()));
  EXPECT(of == library);
  CHECK(cuKernelGetName(&name, fresh()));
  EXPECT(strcmp(name, "fill") == 0);
  CHECK(cuKernelGetFunction(&f, fresh()));
  CHECK(cuKernelGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, fresh(), dev));
  CHECK(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50, fresh(), dev));
  CHECK(cuKernelSetCacheConfig(fresh(), CU_FUNC_CACHE_PREFER_L1, dev));
  CHECK(cuKernelGetParamInfo(fresh(), 0, &offset, &size));
  EXPECT_EQ(size, 8);

  CHECK(cuFuncLoad(fresh_function()));
  CHECK(cuFuncIsLoaded(&state, fresh_function()));
  CHECK(cuFuncGetName(&name, fresh_function()));
  CHECK(cuFuncGetModule(&mod, fresh_function()));
  CHECK(cuFuncGetParamInfo(fresh_function(), 1, &offset, &size));
  CHECK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, fresh_function()));
  CHECK(cuFuncSetAttribute(fresh_function(), CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50));
  CHECK(cuFuncSetCacheConfig(fresh_function(), CU_FUNC_CACHE_PREFER_L1));

  int blocks, threads;
  size_t bytes;
  CHECK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fresh_function(), 32, 0));
  CHECK(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, fresh_function(), 32, 0, 0));
  CHECK(cuOccupancyMaxPotentialBlockSize(&blocks, &threads, fresh_function(), NULL, 0, 0));
  CHECK(cuOccupancyMaxPotentialBlockSizeWithFlags(&blocks, &threads, fresh_function(), NULL, 0, 0, 0));
  CHECK(cuOccupancyAvailableDynamicSMemPerBlock(&bytes, fresh_function(), 1, 32));

  fresh();
  CHECK(cuLibraryGetModule(&mod, library));
  fresh();
  CHECK(cuLibraryGetKernelCount((unsigned*)&value, library));
  EXPECT(value > 0);
  fresh();
  CUkernel all[1];
  CHECK(cuLibraryEnumerateKernels(all, 1, library));
  fresh();
  CHECK(cuLibraryUnload(library));

  uint32_t number = 7;
  uint64_t count = 16;
  void* params[] = {&words, &number, &count};
  CHECK(cuLaunchKernel(fresh_function(), 1, 1, 1, 1, 1, 1, 0, CU_STREAM_LEGACY, params, NULL));
  CUlaunchConfig config = {.gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1};
  CHECK(cuLaunchKernelEx(&config, fresh_function(), params, NULL));
  CHECK(cuCtxSynchronize());

  CUgraph graph;
  CUgraphNode node;
  CUgraphExec exec;
  CUDA_KERNEL_NODE_PARAMS p = {.func = fresh_function(),
                               .gridDimX = 1,
                               .gridDimY = 1,
                               .gridDimZ = 1,
                               .blockDimX = 1,
                               .blockDimY = 1,
                               .blockDimZ = 1,
                               .kernelParams = params};
  CHECK(cuGraphCreate(&graph, 0));
  CHECK(cuGraphAddKernelNode(&node, graph, NULL, 0, &p));
  p.func = fresh_function();
  CHECK(cuGraphKernelNodeSetParams(node, &p));
  p.func = NULL;
  p.kern = fresh();
  CHECK(cuGraphKernelNodeSetParams(node, &p));
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  CHECK(cuGraphLaunch(exec, CU_STREAM_LEGACY));
  CUgraphNodeParams any = {.type = CU_GRAPH_NODE_TYPE_KERNEL};
  any.kernel = (CUDA_KERNEL_NODE_PARAMS_v3){.func = fresh_function(),
                                            .gridDimX = 1,
                                            .gridDimY = 1,
                                            .gridDimZ = 1,
                                            .blockDimX = 1,
                                            .blockDimY = 1,
                                            .blockDimZ = 1,
                                            .kernelParams = params};
  CHECK(cuGraphNodeSetParams(node, &any));
  any.kernel.func = fresh_function();
  CHECK(cuGraphExecNodeSetParams(exec, node, &any));
  any.kernel.func = fresh_function();
  CHECK(cuGraphAddNode(&node, graph, NULL, NULL, 0, &any));

  CUstream s;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuLaunchKernel(fresh_function(), 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
  CHECK(cuStreamEndCapture(s, &graph));
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));
  CHECK(cuStreamDestroy(s));
}

/* Each in a thread of its own, whose default stream it is the first to name. */
static CUdeviceptr managed;
static int turn, turns;

static void* on_own_stream(void* arg) {
  (void)arg;
  int number;
  unsigned flags;
  unsigned long long id;
  CUdevice dev;
  CUcontext ctx;
  CUstreamCaptureStatus status;
  CUstreamAttrValue value;
  CUgraph graph;
  const CUmemLocation gpu = {CU_MEM_LOCATION_TYPE_DEVICE, 1};
  CHECK(cuCtxSetCurrent(here));
  int at = 0;
#define FIRST(call) \
  if (at++ == turn) CHECK(call)
  FIRST(cuStreamQuery(0));
  FIRST(cuStreamGetPriority(0, &number));
  FIRST(cuStreamGetFlags(0, &flags));
  FIRST(cuStreamGetId(0, &id));
  FIRST(cuStreamGetDevice(0, &dev));
  FIRST(cuStreamGetCtx(0, &ctx));
  FIRST(cuStreamGetAttribute(0, CU_STREAM_ATTRIBUTE_PRIORITY, &value));
  FIRST(cuStreamIsCapturing(0, &status));
  FIRST(cuStreamGetCaptureInfo(0, &status, NULL, NULL, NULL, NULL, NULL));
  FIRST(cuStreamAttachMemAsync(0, managed, 0, CU_MEM_ATTACH_GLOBAL));
  FIRST(cuMemPrefetchAsync(managed, 4096, gpu, 0, 0));
  FIRST(cuStreamSynchronize(0));
  FIRST(cuStreamBeginCapture(0, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  turns = at;
  if (at == turn + 1) CHECK(cuStreamEndCapture(0, &graph));
  return NULL;
}

static void streams(void) {
  CHECK(cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
  turns = 1;
  for (turn = 0; turn < turns; ++turn) {
    pthread_t t;
    EXPECT_EQ(pthread_create(&t, NULL, on_own_stream, NULL), 0);
    EXPECT_EQ(pthread_join(t, NULL), 0);
  }
  CHECK(cuMemFree(managed));
}

/* What was mapped, unmapped and lies there still goes with its address range, or moves when it is mapped elsewhere. */
static void mappings(CUdevice dev) {
  const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {CU_MEM_LOCATION_TYPE_DEVICE, dev}};
  const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, dev}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  size_t bytes;
  CHECK(cuMemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  CUmemGenericAllocationHandle memory;
  CUdeviceptr at, other;
  CHECK(cuMemCreate(&memory, bytes, &prop, 0));
  CHECK(cuMemAddressReserve(&at, bytes, 0, 0, 0));
  CHECK(cuMemAddressReserve(&other, bytes, 0, 0, 0));
  CHECK(cuMemMap(at, bytes, 0, memory, 0));
  CHECK(cuMemSetAccess(at, bytes, &access, 1));
  CHECK(cuMemsetD32(at, 5, 4));
  CHECK(cuMemUnmap(at, bytes));
  CHECK(cuMemAddressFree(at, bytes)); /* its contents go somewhere else */
  CHECK(cuMemMap(other, bytes, 0, memory, 0));
  CHECK(cuMemSetAccess(other, bytes, &access, 1));
  uint32_t word = 0;
  CHECK(cuMemcpyDtoH(&word, other, 4));
  EXPECT_EQ(word, 5);
  CHECK(cuMemUnmap(other, bytes));
  CHECK(cuMemRelease(memory));
  CHECK(cuMemAddressFree(other, bytes));
}

int main(void) {
  CUdevice dev;
  start();
  CHECK(cuCtxGetCurrent(&there));
  CHECK(cuDeviceGet(&dev, 1));
  CHECK(cuDevicePrimaryCtxRetain(&here, dev));
  CHECK(cuCtxSetCurrent(here));
  kernels(dev);
  streams();
  mappings(dev);
  return pass("first_use");
}
