// SPDX-License-Identifier: Apache-2.0
/* CUDA graphs: explicit ones and captured ones, updates, launches of all kinds, and the errors of stream capture.
 *
 * graphs explicit | capture | errors | update | launches | threads | objects | random SEED | hold
 * `hold` waits for a line on stdin in the middle of a capture and between launches, so that a harness can cut, move or
 * restore the job there. */
#include "program.h"

enum { kWords = 1024, kBytes = kWords * 4 };

static CUmodule mod;
static CUfunction fill, slow_fill, copy_words, affine, slow;
static CUcontext ctx;

static CUgraphExec instantiate(CUgraph g) {
  CUgraphExec x;
  CHECK(cuGraphInstantiateWithFlags(&x, g, 0));
  return x;
}

/* Done when it returns: the streams of these tests do not wait for the legacy stream. */
static void set_words(CUdeviceptr p, uint32_t value, size_t count) {
  CHECK(cuMemsetD32(p, value, count));
  CHECK(cuStreamSynchronize(NULL));
}

static CUdeviceptr words(void) {
  CUdeviceptr p;
  CHECK(cuMemAlloc(&p, kBytes));
  set_words(p, 0, kWords);
  return p;
}

static CUgraphNode add_affine(CUgraph g, const CUgraphNode* deps, size_t n, CUdeviceptr p, uint32_t factor,
                              uint32_t add) {
  uint64_t count = kWords;
  void* params[] = {&p, &factor, &add, &count};
  CUDA_KERNEL_NODE_PARAMS k = {0};
  k.func = affine;
  k.gridDimX = k.gridDimY = k.gridDimZ = k.blockDimX = k.blockDimY = k.blockDimZ = 1;
  k.kernelParams = params;
  CUgraphNode node;
  CHECK(cuGraphAddKernelNode(&node, g, deps, n, &k));
  memset(params, 0xee, sizeof params); /* copied at the call */
  p = 0, factor = 77, add = 77, count = ~0ull;
  return node;
}

static CUDA_MEMCPY3D linear(CUmemorytype to, CUdeviceptr dst, void* dst_host, CUmemorytype from, CUdeviceptr src,
                            const void* src_host, size_t bytes) {
  CUDA_MEMCPY3D c = {0};
  c.dstMemoryType = to, c.dstDevice = dst, c.dstHost = dst_host;
  c.srcMemoryType = from, c.srcDevice = src, c.srcHost = src_host;
  c.WidthInBytes = bytes, c.Height = c.Depth = 1;
  return c;
}

static CUgraphNode add_copy(CUgraph g, const CUgraphNode* deps, size_t n, const CUDA_MEMCPY3D* c) {
  CUgraphNode node;
  CHECK(cuGraphAddMemcpyNode(&node, g, deps, n, c, ctx));
  return node;
}

static CUgraphNode add_memset(CUgraph g, const CUgraphNode* deps, size_t n, CUdeviceptr p, uint32_t value) {
  CUDA_MEMSET_NODE_PARAMS m = {.dst = p, .value = value, .elementSize = 4, .width = kWords, .height = 1};
  CUgraphNode node;
  CHECK(cuGraphAddMemsetNode(&node, g, deps, n, &m, ctx));
  return node;
}

static _Atomic int host_calls;
static void count_call(void* arg) { atomic_fetch_add(&host_calls, (int)(uintptr_t)arg); }

static CUgraphNode add_host(CUgraph g, const CUgraphNode* deps, size_t n, CUhostFn fn, void* data) {
  CUDA_HOST_NODE_PARAMS h = {fn, data};
  CUgraphNode node;
  CHECK(cuGraphAddHostNode(&node, g, deps, n, &h));
  return node;
}

static void double_words(void* arg) {
  uint32_t* w = arg;
  for (int i = 0; i < kWords; ++i) w[i] *= 2;
}

static size_t node_count(CUgraph g) {
  size_t n = 0;
  CHECK(cuGraphGetNodes(g, NULL, &n));
  return n;
}

static CUgraphNodeType type_of(CUgraphNode n) {
  CUgraphNodeType type;
  CHECK(cuGraphNodeGetType(n, &type));
  return type;
}

static void launch(CUgraphExec x, CUstream s) {
  CHECK(cuGraphLaunch(x, s));
  CHECK(cuStreamSynchronize(s));
}

/* -- explicit graphs -------------------------------------------------------------------------------------------------
 */

static void structure(CUstream s) {
  CUdeviceptr p = words();
  CUgraph g, copy;
  CHECK(cuGraphCreate(&g, 0));
  EXPECT_RESULT(cuGraphCreate(&copy, 1), CUDA_ERROR_INVALID_VALUE);
  CUgraphNode a = add_memset(g, NULL, 0, p, 3), b = add_affine(g, &a, 1, p, 2, 1), c, both[2], empty;
  CHECK(cuGraphAddEmptyNode(&empty, g, &a, 1));
  both[0] = b, both[1] = empty;
  c = add_affine(g, both, 2, p, 10, 0);
  EXPECT_EQ(node_count(g), 4);

  CUgraphNode got[6], to[6];
  size_t n = 6;
  CHECK(cuGraphGetNodes(g, got, &n));
  EXPECT_EQ(n, 4);
  EXPECT(got[0] == a && got[3] == c && got[4] == NULL && got[5] == NULL);
  n = 6;
  CHECK(cuGraphGetRootNodes(g, got, &n));
  EXPECT_EQ(n, 1);
  EXPECT(got[0] == a);
  n = 0;
  CHECK(cuGraphGetEdges(g, NULL, NULL, NULL, &n));
  EXPECT_EQ(n, 4);
  n = 6;
  CUgraphEdgeData data[6];
  memset(data, 0xff, sizeof data);
  CHECK(cuGraphGetEdges(g, got, to, data, &n));
  EXPECT_EQ(n, 4);
  EXPECT(got[0] == a && to[0] == b && data[0].type == 0 && data[0].from_port == 0);
  n = 6;
  CHECK(cuGraphNodeGetDependencies(c, got, NULL, &n));
  EXPECT_EQ(n, 2);
  EXPECT(got[0] == b && got[1] == empty);
  n = 1;
  CHECK(cuGraphNodeGetDependentNodes(a, got, NULL, &n));
  EXPECT_EQ(n, 1);
  EXPECT(got[0] == b);
  EXPECT_EQ(type_of(a), CU_GRAPH_NODE_TYPE_MEMSET);
  EXPECT_EQ(type_of(b), CU_GRAPH_NODE_TYPE_KERNEL);
  EXPECT_EQ(type_of(empty), CU_GRAPH_NODE_TYPE_EMPTY);

  /* edges by themselves; an annotated one cannot be asked for without its annotation */
  EXPECT_RESULT(cuGraphAddDependencies(g, &a, &b, NULL, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuGraphRemoveDependencies(g, &b, &a, NULL, 1), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuGraphRemoveDependencies(g, &b, &c, NULL, 1));
  CUgraphEdgeData programmatic = {.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC,
                                  .type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC};
  EXPECT_RESULT(cuGraphAddDependencies(g, &a, &c, &programmatic, 1), CUDA_ERROR_INVALID_VALUE); /* a: no kernel */
  CHECK(cuGraphAddDependencies(g, &b, &c, &programmatic, 1));
  n = 6;
  EXPECT_RESULT(cuGraphGetEdges(g, got, to, NULL, &n), CUDA_ERROR_LOSSY_QUERY);
  n = 6;
  EXPECT_RESULT(cuGraphNodeGetDependencies(c, got, NULL, &n), CUDA_ERROR_LOSSY_QUERY);
  n = 6;
  CHECK(cuGraphNodeGetDependencies(c, got, data, &n));
  EXPECT_EQ(n, 2);
  EXPECT_EQ(data[0].type + data[1].type, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC);
  EXPECT_RESULT(cuGraphRemoveDependencies(g, &b, &c, NULL, 1), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuGraphRemoveDependencies(g, &b, &c, &programmatic, 1));
  CHECK(cuGraphAddDependencies(g, &b, &c, NULL, 1));

  CHECK(cuGraphClone(&copy, g));
  CUgraphNode twin;
  CHECK(cuGraphNodeFindInClone(&twin, b, copy));
  EXPECT_EQ(type_of(twin), CU_GRAPH_NODE_TYPE_KERNEL);
  EXPECT_RESULT(cuGraphNodeFindInClone(&twin, twin, copy), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuGraphDestroyNode(b));
  EXPECT_RESULT(cuGraphDestroyNode(b), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(node_count(g), 3);
  EXPECT_EQ(node_count(copy), 4);
  CHECK(cuGraphAddDependencies(g, &c, &a, NULL, 1)); /* a cycle: a -> empty -> c -> a */
  CUgraphExec x = NULL;
  CUDA_GRAPH_INSTANTIATE_PARAMS params = {0};
  EXPECT_RESULT(cuGraphInstantiateWithParams(&x, g, &params), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(params.result_out, CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE);
  EXPECT(params.hErrNode_out != NULL);
  CHECK(cuGraphRemoveDependencies(g, &c, &a, NULL, 1));
  CHECK(cuGraphInstantiateWithParams(&x, g, &params));
  EXPECT_EQ(params.result_out, CUDA_GRAPH_INSTANTIATE_SUCCESS);
  CUgraphExec y = instantiate(copy);
  CHECK(cuGraphDestroy(copy)); /* what was instantiated stays */
  launch(x, s);
  expect_device_words(p, 30, kWords);
  launch(y, s);
  expect_device_words(p, 70, kWords);
  CHECK(cuGraphDebugDotPrint(g, "/dev/null", CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE));
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphExecDestroy(y));
  EXPECT_RESULT(cuGraphLaunch(x, s), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuGraphDestroy(g));
  EXPECT_RESULT(cuGraphDestroy(g), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuGraphAddEmptyNode(&empty, g, NULL, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(p));
}

/* Memory that the device cannot see is read when the copy runs, not when the graph is launched or made. */
static void pageable(CUstream s) {
  const size_t big = 9u << 20; /* more than goes through the staging buffer at once */
  uint32_t *in = malloc(big), *out = malloc(big);
  CUdeviceptr p;
  CHECK(cuMemAlloc(&p, big));
  CUgraph g;
  CHECK(cuGraphCreate(&g, 0));
  CUDA_MEMCPY3D c = linear(CU_MEMORYTYPE_DEVICE, p, NULL, CU_MEMORYTYPE_HOST, 0, in, big);
  CUgraphNode h = add_host(g, NULL, 0, double_words, in);
  CUgraphNode down = add_copy(g, &h, 1, &c);
  CUgraphNode k = add_affine(g, &down, 1, p, 1, 5);
  c = linear(CU_MEMORYTYPE_UNIFIED, (CUdeviceptr)(uintptr_t)out, NULL, CU_MEMORYTYPE_UNIFIED, p, NULL, big);
  CUgraphNode up = add_copy(g, &k, 1, &c);
  add_host(g, &up, 1, double_words, out);
  CUgraphExec x = instantiate(g);
  for (uint32_t round = 1; round <= 3; ++round) {
    for (size_t i = 0; i < big / 4; ++i) in[i] = (uint32_t)i * round;
    memset(out, 0xff, big);
    launch(x, s);
    for (size_t i = 0; i < kWords; ++i) EXPECT_EQ(out[i], ((uint32_t)i * round * 2 + 5) * 2);
    for (size_t i = kWords; i < big / 4; ++i) EXPECT_EQ(out[i], (uint32_t)i * round);
  }
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(g));

  /* a box of rows and slices, both ways and on the device; pinned memory is seen directly */
  enum { kRows = 5, kSlices = 3, kWidth = 36, kPitch = 64, kHigh = 7 };
  uint8_t *host = malloc(kPitch * kHigh * kSlices), *pinned, *back = malloc(kPitch * kHigh * kSlices);
  CHECK(cuMemAllocHost((void**)&pinned, kPitch * kHigh * kSlices));
  for (int i = 0; i < kPitch * kHigh * kSlices; ++i) host[i] = (uint8_t)(i * 7 + 3);
  memset(back, 0, kPitch * kHigh * kSlices);
  memset(pinned, 0, kPitch * kHigh * kSlices);
  CHECK(cuGraphCreate(&g, 0));
  CUDA_MEMCPY3D box = {0};
  box.srcMemoryType = CU_MEMORYTYPE_HOST, box.srcHost = host, box.srcPitch = kPitch, box.srcHeight = kHigh;
  box.dstMemoryType = CU_MEMORYTYPE_DEVICE, box.dstDevice = p, box.dstPitch = 48, box.dstHeight = kRows;
  box.srcXInBytes = 4, box.srcY = 1;
  box.WidthInBytes = kWidth, box.Height = kRows, box.Depth = kSlices;
  CUgraphNode first = add_copy(g, NULL, 0, &box);
  box.srcMemoryType = CU_MEMORYTYPE_DEVICE, box.srcDevice = p, box.srcPitch = 48, box.srcHeight = kRows;
  box.srcXInBytes = box.srcY = 0;
  box.dstMemoryType = CU_MEMORYTYPE_HOST, box.dstHost = back, box.dstPitch = kPitch, box.dstHeight = kHigh;
  add_copy(g, &first, 1, &box);
  box.dstHost = pinned;
  add_copy(g, &first, 1, &box);
  x = instantiate(g);
  launch(x, s);
  for (int z = 0; z < kSlices; ++z)
    for (int y = 0; y < kHigh; ++y)
      for (int i = 0; i < kPitch; ++i) {
        const int at = (z * kHigh + y) * kPitch + i;
        const int wanted = y < kRows && i < kWidth ? host[(z * kHigh + y + 1) * kPitch + i + 4] : 0;
        EXPECT_EQ(back[at], wanted);
        EXPECT_EQ(pinned[at], wanted);
      }
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(g));
  CHECK(cuMemFreeHost(pinned));
  CHECK(cuMemFree(p));
  free(in), free(out), free(host), free(back);
}

static void children_and_events(CUstream s) {
  CUdeviceptr p = words();
  CUgraph inner, middle, outer, owned;
  CUgraphNode a, b, c;
  CHECK(cuGraphCreate(&inner, 0));
  a = add_affine(inner, NULL, 0, p, 3, 0);
  add_affine(inner, &a, 1, p, 1, 1);
  CHECK(cuGraphCreate(&middle, 0));
  CHECK(cuGraphAddChildGraphNode(&b, middle, NULL, 0, inner));
  CHECK(cuGraphAddChildGraphNode(&c, middle, &b, 1, inner));
  CHECK(cuGraphCreate(&outer, 0));
  a = add_memset(outer, NULL, 0, p, 1);
  CHECK(cuGraphAddChildGraphNode(&b, outer, &a, 1, middle));
  add_affine(outer, &b, 1, p, 2, 0);
  CHECK(cuGraphDestroy(inner)); /* cloned into the node */
  CHECK(cuGraphDestroy(middle));
  EXPECT_EQ(type_of(b), CU_GRAPH_NODE_TYPE_GRAPH);
  CHECK(cuGraphChildGraphNodeGetGraph(b, &owned));
  EXPECT_EQ(node_count(owned), 2);
  EXPECT_RESULT(cuGraphDestroy(owned), CUDA_ERROR_INVALID_VALUE);
  CUgraphExec x = instantiate(outer);
  launch(x, s);
  expect_device_words(p, ((1 * 3 + 1) * 3 + 1) * 2, kWords);
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(outer));

  /* Events of a graph: recorded in the middle, waited for from outside and inside. */
  CUevent mid, gate_event, end;
  CUstream other, third;
  Gate gate, second;
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&third, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&mid, 0));
  CHECK(cuEventCreate(&end, 0));
  CHECK(cuEventCreate(&gate_event, CU_EVENT_DISABLE_TIMING));
  CUgraph g;
  CUgraphNode wait, record, last;
  CHECK(cuGraphCreate(&g, 0));
  CHECK(cuGraphAddEventWaitNode(&wait, g, NULL, 0, gate_event));
  a = add_affine(g, &wait, 1, p, 0, 5);
  CHECK(cuGraphAddEventRecordNode(&record, g, &a, 1, mid));
  CUevent got;
  CHECK(cuGraphEventRecordNodeGetEvent(record, &got));
  EXPECT(got == mid);
  CHECK(cuGraphEventWaitNodeGetEvent(wait, &got));
  EXPECT(got == gate_event);
  b = add_host(g, &record, 1, gate_function, &second);
  c = add_affine(g, &b, 1, p, 1, 1);
  CHECK(cuGraphAddEventRecordNode(&last, g, &c, 1, end));
  x = instantiate(g);
  for (int round = 0; round < 3; ++round) {
    set_words(p, 0, kWords);
    close_gate(&gate, other);
    CHECK(cuEventRecord(gate_event, other));
    atomic_store(&second.open, 0);
    CHECK(cuGraphLaunch(x, s));
    usleep(3000);
    EXPECT_RESULT(cuStreamQuery(s), CUDA_ERROR_NOT_READY);
    EXPECT_RESULT(cuEventQuery(mid), CUDA_ERROR_NOT_READY);
    open_gate(&gate);
    /* complete in the middle, while the graph still runs */
    CHECK(cuEventSynchronize(mid));
    EXPECT_RESULT(cuEventQuery(end), CUDA_ERROR_NOT_READY);
    CHECK(cuStreamWaitEvent(third, mid, 0));
    uint32_t seen = 0;
    CHECK(cuMemcpyDtoHAsync(&seen, p, 4, third));
    CHECK(cuStreamSynchronize(third));
    EXPECT_EQ(seen, 5);
    open_gate(&second);
    CHECK(cuStreamSynchronize(s));
    CHECK(cuEventQuery(end));
    expect_device_words(p, 6, kWords);
    float ms = -1;
    CHECK(cuEventElapsedTime(&ms, mid, end));
    EXPECT(ms >= 0);
  }
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(g));
  CHECK(cuStreamDestroy(other));
  CHECK(cuStreamDestroy(third));
  CHECK(cuEventDestroy(mid));
  CHECK(cuEventDestroy(end));
  CHECK(cuEventDestroy(gate_event));
  CHECK(cuMemFree(p));
}

static void node_params(CUstream s) {
  CUdeviceptr p = words(), q = words();
  CUgraph g;
  CHECK(cuGraphCreate(&g, 0));
  CUgraphNode k = add_affine(g, NULL, 0, p, 2, 9);
  CUDA_KERNEL_NODE_PARAMS got;
  CHECK(cuGraphKernelNodeGetParams(k, &got));
  EXPECT(got.func == affine && got.extra == NULL && got.kernelParams != NULL);
  EXPECT_EQ(*(CUdeviceptr*)got.kernelParams[0], p);
  EXPECT_EQ(*(uint32_t*)got.kernelParams[2], 9);
  uint32_t add = 11;
  got.kernelParams[2] = &add; /* the node's own array, with one of ours */
  void* params[] = {got.kernelParams[0], got.kernelParams[1], &add, got.kernelParams[3]};
  got.kernelParams = params;
  CHECK(cuGraphKernelNodeSetParams(k, &got));
  got.blockDimX = 100000;
  EXPECT_RESULT(cuGraphKernelNodeSetParams(k, &got), CUDA_ERROR_INVALID_VALUE);
  CUgraphNode m = add_memset(g, &k, 1, q, 4);
  CUDA_MEMSET_NODE_PARAMS set;
  CHECK(cuGraphMemsetNodeGetParams(m, &set));
  EXPECT_EQ(set.value, 4);
  set.value = 6;
  CHECK(cuGraphMemsetNodeSetParams(m, &set));
  set.elementSize = 3;
  EXPECT_RESULT(cuGraphMemsetNodeSetParams(m, &set), CUDA_ERROR_INVALID_VALUE);
  uint32_t out[2] = {0, 0};
  CUDA_MEMCPY3D c = linear(CU_MEMORYTYPE_HOST, 0, &out[0], CU_MEMORYTYPE_DEVICE, p, NULL, 4);
  CUgraphNode copy = add_copy(g, &m, 1, &c);
  c.dstHost = &out[1];
  CHECK(cuGraphMemcpyNodeSetParams(copy, &c));
  CHECK(cuGraphMemcpyNodeGetParams(copy, &c));
  EXPECT(c.dstHost == &out[1]);
  CUDA_HOST_NODE_PARAMS h;
  CUgraphNode host = add_host(g, &copy, 1, count_call, (void*)1);
  CHECK(cuGraphHostNodeGetParams(host, &h));
  EXPECT(h.fn == count_call && h.userData == (void*)1);
  h.userData = (void*)100;
  CHECK(cuGraphHostNodeSetParams(host, &h));
  EXPECT_RESULT(cuGraphHostNodeSetParams(copy, &h), CUDA_ERROR_INVALID_VALUE);

  /* the one form for all, with an `extra` block */
  struct {
    uint64_t words;
    uint32_t factor, add;
    uint64_t count;
  } block = {q, 10, 1, kWords};
  size_t bytes = sizeof block;
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &block, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  CUgraphNodeParams any = {.type = CU_GRAPH_NODE_TYPE_KERNEL};
  any.kernel.func = affine;
  any.kernel.gridDimX = any.kernel.gridDimY = any.kernel.gridDimZ = 1;
  any.kernel.blockDimX = any.kernel.blockDimY = any.kernel.blockDimZ = 1;
  any.kernel.extra = extra;
  CUgraphNode generic;
  CHECK(cuGraphAddNode(&generic, g, &m, NULL, 1, &any));
  CHECK(cuGraphKernelNodeGetParams(generic, &got));
  EXPECT(got.kernelParams == NULL && got.extra != NULL);
  EXPECT_EQ(*(size_t*)got.extra[3], sizeof block);
  memset(&block, 0, sizeof block);

  CUkernelNodeAttrValue value = {.priority = -2}, back;
  CHECK(cuGraphKernelNodeSetAttribute(k, CU_KERNEL_NODE_ATTRIBUTE_PRIORITY, &value));
  CHECK(cuGraphKernelNodeCopyAttributes(generic, k));
  CHECK(cuGraphKernelNodeGetAttribute(generic, CU_KERNEL_NODE_ATTRIBUTE_PRIORITY, &back));
  EXPECT_EQ(back.priority, -2);
  CUgraphExec x = instantiate(g);
  const int before = atomic_load(&host_calls);
  launch(x, s);
  EXPECT_EQ(atomic_load(&host_calls) - before, 100);
  expect_device_words(p, 11, kWords);
  expect_device_words(q, 61, kWords);
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(out[1], 11);
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(g));
  CHECK(cuMemFree(p));
  CHECK(cuMemFree(q));
}

/* -- capture ---------------------------------------------------------------------------------------------------------
 */

static void captured(CUstream s) {
  CUstream side;
  CUevent fork, join;
  CHECK(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
  CHECK(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
  CUdeviceptr p = words(), q = words(), r = words();
  uint32_t* pinned;
  CHECK(cuMemAllocHost((void**)&pinned, kBytes));
  uint32_t pageable_in[kWords];
  CUstreamCaptureStatus status;
  cuuint64_t id = 0;
  CUgraph into = NULL, g = NULL;
  const CUgraphNode* deps = NULL;
  size_t n = 9;
  CHECK(cuStreamIsCapturing(s, &status));
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_NONE);
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuStreamIsCapturing(s, &status));
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK(cuStreamGetCaptureInfo(s, &status, &id, &into, &deps, NULL, &n));
  EXPECT(id != 0 && into != NULL);
  EXPECT_EQ(n, 0);
  launch_fill(fill, s, p, 5, kWords);
  CHECK(cuStreamGetCaptureInfo(s, &status, &id, &into, &deps, NULL, &n));
  EXPECT_EQ(n, 1);
  EXPECT_EQ(type_of(deps[0]), CU_GRAPH_NODE_TYPE_KERNEL);
  CHECK(cuMemcpyHtoDAsync(q, pageable_in, kBytes, s));
  CHECK(cuEventRecord(fork, s));
  CHECK(cuStreamWaitEvent(side, fork, 0));
  CHECK(cuStreamIsCapturing(side, &status));
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
  launch_affine(affine, side, q, 2, 0, kWords);
  CHECK(cuMemsetD32Async(r, 8, kWords, side));
  launch_affine(affine, s, p, 3, 0, kWords);
  CHECK(cuEventRecord(join, side));
  CHECK(cuStreamWaitEvent(s, join, 0));
  CHECK(cuStreamGetCaptureInfo(s, &status, &id, &into, &deps, NULL, &n));
  EXPECT_EQ(n, 2);
  CHECK(cuLaunchHostFunc(s, count_call, (void*)1));
  CHECK(cuMemcpyDtoHAsync(pinned, q, kBytes, s));
  CHECK(cuMemcpyDtoDAsync(q, r, kBytes, s));
  EXPECT_EQ(node_count(into), 8);
  CHECK(cuStreamEndCapture(s, &g));
  EXPECT(g == into);
  CHECK(cuStreamIsCapturing(side, &status));
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_NONE);
  expect_device_words(p, 0, kWords); /* nothing has run */
  const int before = atomic_load(&host_calls);
  CUgraphExec x = instantiate(g);
  for (uint32_t round = 1; round <= 4; ++round) {
    for (int i = 0; i < kWords; ++i) pageable_in[i] = round;
    launch(x, round & 1 ? s : side);
    expect_words(pinned, 2 * round, kWords);
    expect_device_words(p, 15, kWords);
    expect_device_words(q, 8, kWords);
  }
  EXPECT_EQ(atomic_load(&host_calls) - before, 4);
  /* an event of a capture that is over is free for its next record */
  CHECK(cuEventRecord(fork, s));
  CHECK(cuEventSynchronize(fork));

  /* a launch in a capture becomes a child graph */
  CUgraph outer;
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
  CHECK(cuGraphLaunch(x, s));
  launch_affine(affine, s, p, 1, 1, kWords);
  CHECK(cuStreamEndCapture(s, &outer));
  EXPECT_EQ(node_count(outer), 2);
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(g));
  x = instantiate(outer);
  launch(x, s);
  expect_device_words(p, 16, kWords);
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(outer));

  /* nodes by hand between captured ones, and a capture into a graph that is there */
  set_words(p, 1, kWords);
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  launch_affine(affine, s, p, 2, 0, kWords);
  CHECK(cuStreamGetCaptureInfo(s, &status, &id, &into, &deps, NULL, &n));
  CUgraphNode by_hand = add_affine(into, deps, n, p, 1, 3);
  CHECK(cuStreamUpdateCaptureDependencies(s, &by_hand, NULL, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
  launch_affine(affine, s, p, 10, 0, kWords);
  CHECK(cuStreamEndCapture(s, &g));
  EXPECT_EQ(node_count(g), 3);
  CUgraphNode all[4];
  n = 4;
  CHECK(cuGraphGetNodes(g, all, &n));
  CHECK(
      cuStreamBeginCaptureToGraph(s, g, &all[1], NULL, 1, CU_STREAM_CAPTURE_MODE_GLOBAL)); /* all[1]: captured last? */
  EXPECT_RESULT(cuGraphInstantiateWithFlags(&x, g, 0), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_RESULT(cuGraphDestroyNode(all[0]), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemsetD32Async(q, 77, kWords, s));
  CHECK(cuStreamEndCapture(s, &into));
  EXPECT(into == g);
  EXPECT_EQ(node_count(g), 4);
  x = instantiate(g);
  launch(x, s);
  expect_device_words(p, 50, kWords);
  expect_device_words(q, 77, kWords);
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(g));

  /* events as nodes, by the EXTERNAL flag */
  set_words(p, 0, kWords);
  EXPECT_RESULT(cuEventRecordWithFlags(join, s, CU_EVENT_RECORD_EXTERNAL), CUDA_ERROR_INVALID_VALUE);
  Gate gate;
  close_gate(&gate, side);
  CHECK(cuEventRecord(fork, side));
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuStreamWaitEvent(s, fork, CU_EVENT_WAIT_EXTERNAL));
  launch_affine(affine, s, p, 1, 1, kWords);
  CHECK(cuEventRecordWithFlags(join, s, CU_EVENT_RECORD_EXTERNAL));
  CHECK(cuStreamEndCapture(s, &g));
  EXPECT_EQ(node_count(g), 3);
  x = instantiate(g);
  CHECK(cuGraphLaunch(x, s));
  EXPECT_RESULT(cuEventQuery(join), CUDA_ERROR_NOT_READY);
  open_gate(&gate);
  CHECK(cuEventSynchronize(join));
  expect_device_words(p, 1, kWords);
  CHECK(cuStreamSynchronize(s));
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(g));
  CHECK(cuMemFreeHost(pinned));
  CHECK(cuStreamDestroy(side));
  CHECK(cuEventDestroy(fork));
  CHECK(cuEventDestroy(join));
  CHECK(cuMemFree(p));
  CHECK(cuMemFree(q));
  CHECK(cuMemFree(r));
}

/* -- the errors of capture -------------------------------------------------------------------------------------------
 */

static void end_with(CUstream s, CUresult wanted) {
  CUgraph g = (CUgraph)1;
  CUstreamCaptureStatus status;
  EXPECT_RESULT(cuStreamEndCapture(s, &g), wanted);
  EXPECT((wanted == CUDA_SUCCESS) == (g != NULL));
  if (g) CHECK(cuGraphDestroy(g));
  CHECK(cuStreamIsCapturing(s, &status));
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_NONE);
}

static void begin(CUstream s) { CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL)); }

static void* end_elsewhere(void* s) {
  CUgraph g;
  CHECK(cuCtxSetCurrent(ctx));
  EXPECT_RESULT(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  return NULL;
}

static void* allocate_elsewhere(void* wanted) {
  CUdeviceptr p;
  CHECK(cuCtxSetCurrent(ctx));
  EXPECT_RESULT(cuMemAlloc(&p, 4096), (CUresult)(uintptr_t)wanted);
  if (!wanted) CHECK(cuMemFree(p));
  return NULL;
}

static void in_a_thread(void* (*fn)(void*), void* arg) {
  pthread_t t;
  pthread_create(&t, NULL, fn, arg);
  pthread_join(t, NULL);
}

static void callback(CUstream s, CUresult status, void* arg) { (void)s, (void)status, (void)arg; }

static void errors(CUstream s) {
  CUstream side, blocking, own;
  CUevent e, f;
  CUgraph g;
  CUstreamCaptureStatus status;
  CUdeviceptr p = words(), q;
  void* host;
  uint32_t word;
  CHECK(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&own, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&blocking, 0));
  CHECK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  CHECK(cuEventCreate(&f, 0));

  EXPECT_RESULT(cuStreamEndCapture(s, &g), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_RESULT(cuStreamBeginCapture(CU_STREAM_LEGACY, CU_STREAM_CAPTURE_MODE_GLOBAL),
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_RESULT(cuStreamBeginCapture(s, (CUstreamCaptureMode)3), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuStreamUpdateCaptureDependencies(s, NULL, NULL, 0, 0), CUDA_ERROR_ILLEGAL_STATE);
  begin(s);
  EXPECT_RESULT(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_ILLEGAL_STATE);
  end_with(s, CUDA_SUCCESS); /* an empty graph is one */

  /* UNSUPPORTED: what waits for, or asks for, work that does not run; it ends the capture */
  CUresult (*ask[])(CUstream) = {cuStreamSynchronize, cuStreamQuery};
  for (int i = 0; i < 2; ++i) {
    begin(s);
    EXPECT_RESULT(ask[i](s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(cuStreamIsCapturing(s, &status));
    EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    void* none[] = {&p};
    EXPECT_RESULT(launch1(slow, s, none), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EXPECT_RESULT(cuMemsetD32Async(p, 1, 4, s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
  begin(s);
  EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  begin(s);
  EXPECT_RESULT(cuStreamAddCallback(s, callback, NULL, 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

  /* a command that is wrong by its own arguments ends no capture; a call that is forbidden does, wrong or not, but for
   * a null pointer */
  begin(s);
  EXPECT_RESULT(cuMemsetD32Async((CUdeviceptr)4096, 1, 4, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAlloc(NULL, 4096), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuStreamIsCapturing(s, &status));
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
  EXPECT_RESULT(cuMemAlloc(&q, 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

  /* what is unsafe while somebody captures, by the modes of the capture and of the thread */
  begin(s);
  EXPECT_RESULT(cuMemAlloc(&q, 4096), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  begin(s);
  EXPECT_RESULT(cuMemFree(p), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  begin(s);
  EXPECT_RESULT(cuMemAllocHost(&host, 4096), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK(cuEventRecord(f, side));
  begin(s);
  EXPECT_RESULT(cuEventQuery(f), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  begin(s);
  EXPECT_RESULT(cuStreamSynchronize(side), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
  CHECK(cuMemAlloc(&q, 4096));
  CHECK(cuEventSynchronize(f));
  CHECK(cuMemFree(q));
  end_with(s, CUDA_SUCCESS);
  begin(s);
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CHECK(cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  CHECK(cuMemAlloc(&q, 4096));
  CHECK(cuMemFree(q));
  CHECK(cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
  mode = (CUstreamCaptureMode)7;
  EXPECT_RESULT(cuThreadExchangeStreamCaptureMode(&mode), CUDA_ERROR_INVALID_VALUE);
  end_with(s, CUDA_SUCCESS);
  begin(s);
  in_a_thread(allocate_elsewhere, (void*)(uintptr_t)CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  in_a_thread(allocate_elsewhere, NULL);
  end_with(s, CUDA_SUCCESS);

  /* MERGE */
  begin(s);
  begin(own);
  CHECK(cuEventRecord(e, s));
  EXPECT_RESULT(cuStreamWaitEvent(own, e, 0), CUDA_ERROR_STREAM_CAPTURE_MERGE);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  end_with(own, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

  /* UNMATCHED, UNJOINED */
  begin(s);
  launch_fill(fill, s, p, 1, 4);
  CHECK(cuEventRecord(e, s));
  CHECK(cuStreamWaitEvent(side, e, 0));
  EXPECT_RESULT(cuStreamEndCapture(side, &g), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  end_with(s, CUDA_SUCCESS); /* nothing was captured on the side */
  begin(s);
  CHECK(cuEventRecord(e, s));
  CHECK(cuStreamWaitEvent(side, e, 0));
  launch_fill(fill, side, p, 1, 4);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  CHECK(cuStreamIsCapturing(side, &status));
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_NONE);
  begin(s);
  CHECK(cuEventRecord(e, s));
  CHECK(cuStreamWaitEvent(side, e, 0));
  launch_fill(fill, side, p, 1, 4);
  CHECK(cuStreamUpdateCaptureDependencies(side, NULL, NULL, 0, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
  end_with(s, CUDA_SUCCESS); /* taken out of the set on purpose */

  /* ISOLATION: an event from outside; one that was never recorded is no dependency */
  CHECK(cuEventRecord(f, side));
  begin(s);
  EXPECT_RESULT(cuStreamWaitEvent(s, f, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CUevent never;
  CHECK(cuEventCreate(&never, 0));
  begin(s);
  CHECK(cuStreamWaitEvent(s, never, 0));
  end_with(s, CUDA_SUCCESS);
  CHECK(cuEventDestroy(never));

  /* CAPTURED_EVENT */
  begin(s);
  CHECK(cuEventRecord(f, s));
  EXPECT_RESULT(cuEventQuery(f), CUDA_ERROR_CAPTURED_EVENT);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_RESULT(cuEventSynchronize(f), CUDA_ERROR_CAPTURED_EVENT);
  EXPECT_RESULT(cuStreamWaitEvent(side, f, 0), CUDA_ERROR_CAPTURED_EVENT);
  float ms;
  EXPECT_RESULT(cuEventElapsedTime(&ms, f, f), CUDA_ERROR_CAPTURED_EVENT);
  CHECK(cuEventRecord(f, side));
  CHECK(cuEventSynchronize(f));

  /* IMPLICIT: the legacy stream beside a blocking stream that captures */
  begin(blocking);
  EXPECT_RESULT(cuStreamIsCapturing(CU_STREAM_LEGACY, &status), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  CHECK(cuStreamIsCapturing(blocking, &status));
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
  EXPECT_RESULT(cuMemsetD32Async(p, 1, 4, CU_STREAM_LEGACY), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  end_with(blocking, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  begin(blocking);
  EXPECT_RESULT(cuMemcpyDtoH(&word, p, 4), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  end_with(blocking, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  begin(s); /* a non-blocking one does not mind */
  CHECK(cuMemsetD32Async(p, 9, kWords, CU_STREAM_LEGACY));
  CHECK(cuEventRecord(e, s));
  EXPECT_RESULT(cuStreamWaitEvent(CU_STREAM_LEGACY, e, 0), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  expect_device_words(p, 9, kWords);

  /* WRONG_THREAD */
  begin(s);
  in_a_thread(end_elsewhere, s);
  end_with(s, CUDA_SUCCESS);

  /* a wrong call adds nothing and harms nothing */
  begin(s);
  EXPECT_RESULT(cuMemcpyDtoDAsync(p, 4096, 4, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuLaunchKernel(fill, 0, 1, 1, 1, 1, 1, 0, s, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
  launch_fill(fill, s, p, 2, 4);
  end_with(s, CUDA_SUCCESS);

  /* streams that go: one that took part, and the first one */
  CUstream shortly;
  CHECK(cuStreamCreate(&shortly, CU_STREAM_NON_BLOCKING));
  begin(s);
  CHECK(cuEventRecord(e, s));
  CHECK(cuStreamWaitEvent(shortly, e, 0));
  launch_fill(fill, shortly, p, 2, 4);
  CHECK(cuStreamDestroy(shortly));
  end_with(s, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  CHECK(cuStreamCreate(&shortly, CU_STREAM_NON_BLOCKING));
  begin(shortly);
  CHECK(cuEventRecord(e, shortly));
  CHECK(cuStreamWaitEvent(s, e, 0));
  CHECK(cuStreamDestroy(shortly));
  launch_fill(fill, s, p, 3, kWords); /* plain again */
  CHECK(cuStreamSynchronize(s));
  expect_device_words(p, 3, kWords);
  CHECK(cuMemFree(p));
  CHECK(cuStreamDestroy(side));
  CHECK(cuStreamDestroy(own));
  CHECK(cuStreamDestroy(blocking));
  CHECK(cuEventDestroy(e));
  CHECK(cuEventDestroy(f));
}

/* -- updates ---------------------------------------------------------------------------------------------------------
 */

static CUgraph three(CUdeviceptr p, uint32_t value, uint32_t add, uint32_t* out, CUgraphNode* nodes) {
  CUgraph g;
  CHECK(cuGraphCreate(&g, 0));
  nodes[0] = add_memset(g, NULL, 0, p, value);
  nodes[1] = add_affine(g, &nodes[0], 1, p, 1, add);
  CUDA_MEMCPY3D c = linear(CU_MEMORYTYPE_HOST, 0, out, CU_MEMORYTYPE_DEVICE, p, NULL, 4);
  nodes[2] = add_copy(g, &nodes[1], 1, &c);
  nodes[3] = add_host(g, &nodes[2], 1, count_call, (void*)1);
  return g;
}

/* Copies of pageable memory grow and shrink, and with them the number of their steps and the buffer between. */
static CUgraph copies_around_a_set(CUdeviceptr a, void* from_a, size_t bytes_a, CUdeviceptr p, CUdeviceptr b,
                                   void* from_b, size_t bytes_b, CUgraphNode* n) {
  CUgraph g;
  CHECK(cuGraphCreate(&g, 0));
  CUDA_MEMCPY3D c = linear(CU_MEMORYTYPE_DEVICE, a, NULL, CU_MEMORYTYPE_HOST, 0, from_a, bytes_a);
  n[0] = add_copy(g, NULL, 0, &c);
  n[1] = add_memset(g, &n[0], 1, p, 1);
  c = linear(CU_MEMORYTYPE_DEVICE, b, NULL, CU_MEMORYTYPE_HOST, 0, from_b, bytes_b);
  n[2] = add_copy(g, &n[1], 1, &c);
  return g;
}

static void staged_updates(CUstream s) {
  enum { kSmall = 1 << 20, kBig = 9 << 20 }; /* of one piece, of three */
  uint32_t *from_a = malloc(kBig), *from_b = malloc(kBig);
  CUdeviceptr a, b, p = words();
  CHECK(cuMemAlloc(&a, kBig));
  CHECK(cuMemAlloc(&b, kBig));
  CUgraphNode n[3], m[3];
  CUgraph g = copies_around_a_set(a, from_a, kSmall, p, b, from_b, kSmall, n);
  CUgraph g2 = copies_around_a_set(a, from_a, kSmall, p, b, from_b, kBig, m);
  CUgraphExec x = instantiate(g);
  for (uint32_t round = 1; round <= 3; round++) {
    if (round == 2) { /* the buffer grows under the other copy too */
      CUDA_MEMCPY3D c = linear(CU_MEMORYTYPE_DEVICE, a, NULL, CU_MEMORYTYPE_HOST, 0, from_a, kBig);
      CHECK(cuGraphExecMemcpyNodeSetParams(x, n[0], &c, ctx));
    }
    CUgraphExecUpdateResultInfo info;
    if (round == 3) CHECK(cuGraphExecUpdate(x, g2, &info)); /* fewer steps before the set, more behind it */
    for (int i = 0; i < kBig / 4; i++) from_a[i] = round, from_b[i] = 10 * round;
    launch(x, s);
    expect_device_words(a, round, (round == 2 ? kBig : kSmall) / 4);
    expect_device_words(b, 10 * round, (round == 3 ? kBig : kSmall) / 4);
    expect_device_words(p, 1, kWords);
    CHECK(cuMemsetD32(p, 0, kWords));
  }
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(g));
  CHECK(cuGraphDestroy(g2));
  CHECK(cuMemFree(a));
  CHECK(cuMemFree(b));
  free(from_a);
  free(from_b);
}

static void updates(CUstream s) {
  CUdeviceptr p = words(), q = words();
  uint32_t out[2] = {0, 0};
  CUgraphNode n[4], m[4];
  CUgraph g = three(p, 10, 1, &out[0], n);
  CUgraphExec x = instantiate(g);
  launch(x, s);
  EXPECT_EQ(out[0], 11);

  /* one node at a time; a launch under way keeps the old ones */
  Gate gate;
  close_gate(&gate, s);
  CHECK(cuGraphLaunch(x, s));
  CUDA_MEMSET_NODE_PARAMS set = {.dst = p, .value = 20, .elementSize = 4, .width = kWords, .height = 1};
  CHECK(cuGraphExecMemsetNodeSetParams(x, n[0], &set, ctx));
  uint32_t factor = 2, add = 2;
  uint64_t count = kWords;
  void* params[] = {&p, &factor, &add, &count};
  CUDA_KERNEL_NODE_PARAMS k;
  CHECK(cuGraphKernelNodeGetParams(n[1], &k));
  k.kernelParams = params;
  CHECK(cuGraphExecKernelNodeSetParams(x, n[1], &k));
  CUDA_MEMCPY3D c = linear(CU_MEMORYTYPE_HOST, 0, &out[1], CU_MEMORYTYPE_DEVICE, p, NULL, 4);
  CHECK(cuGraphExecMemcpyNodeSetParams(x, n[2], &c, ctx));
  CUDA_HOST_NODE_PARAMS h = {count_call, (void*)10};
  CHECK(cuGraphExecHostNodeSetParams(x, n[3], &h));
  out[0] = 0;
  int calls = atomic_load(&host_calls);
  open_gate(&gate);
  CHECK(cuStreamSynchronize(s));
  EXPECT_EQ(out[0], 11);
  EXPECT_EQ(out[1], 0);
  EXPECT_EQ(atomic_load(&host_calls), calls + 1);
  launch(x, s);
  EXPECT_EQ(out[1], 42);
  EXPECT_EQ(atomic_load(&host_calls), calls + 11);
  CHECK(cuGraphKernelNodeGetParams(n[1], &k)); /* the node itself is as it was */
  EXPECT_EQ(*(uint32_t*)k.kernelParams[2], 1);

  /* refused: another kind of memory, two dimensions, a node of another graph, another type */
  c = linear(CU_MEMORYTYPE_DEVICE, q, NULL, CU_MEMORYTYPE_DEVICE, p, NULL, 4);
  EXPECT_RESULT(cuGraphExecMemcpyNodeSetParams(x, n[2], &c, ctx), CUDA_ERROR_INVALID_VALUE);
  set.height = 2, set.width = 4, set.pitch = 16;
  EXPECT_RESULT(cuGraphExecMemsetNodeSetParams(x, n[0], &set, ctx), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuGraphExecHostNodeSetParams(x, n[2], &h), CUDA_ERROR_INVALID_VALUE);
  CUgraph g2 = three(q, 30, 3, &out[0], m);
  EXPECT_RESULT(cuGraphExecHostNodeSetParams(x, m[3], &h), CUDA_ERROR_INVALID_VALUE);

  /* off and on */
  unsigned enabled = 7;
  CHECK(cuGraphNodeGetEnabled(x, n[1], &enabled));
  EXPECT_EQ(enabled, 1);
  CHECK(cuGraphNodeSetEnabled(x, n[1], 0));
  CHECK(cuGraphNodeGetEnabled(x, n[1], &enabled));
  EXPECT_EQ(enabled, 0);
  EXPECT_RESULT(cuGraphNodeSetEnabled(x, n[3], 0), CUDA_ERROR_INVALID_VALUE);
  launch(x, s);
  EXPECT_EQ(out[1], 20);
  CHECK(cuGraphNodeSetEnabled(x, n[1], 1));
  launch(x, s);
  EXPECT_EQ(out[1], 42);

  /* the whole graph */
  CUgraphExecUpdateResultInfo info;
  out[0] = out[1] = 0;
  CHECK(cuGraphExecUpdate(x, g2, &info));
  EXPECT_EQ(info.result, CU_GRAPH_EXEC_UPDATE_SUCCESS);
  launch(x, s);
  EXPECT_EQ(out[0], 33);
  EXPECT_EQ(out[1], 0);
  expect_device_words(q, 33, kWords);
  CUgraphNode extra;
  CHECK(cuGraphAddEmptyNode(&extra, g2, NULL, 0));
  EXPECT_RESULT(cuGraphExecUpdate(x, g2, &info), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_EQ(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
  CHECK(cuGraphDestroyNode(extra));
  CHECK(cuGraphRemoveDependencies(g2, &m[1], &m[2], NULL, 1));
  CHECK(cuGraphAddDependencies(g2, &m[0], &m[2], NULL, 1));
  EXPECT_RESULT(cuGraphExecUpdate(x, g2, &info), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_EQ(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
  EXPECT(info.errorNode == m[2] && info.errorFromNode == m[0]);
  CUgraph g3;
  CHECK(cuGraphCreate(&g3, 0));
  m[0] = add_affine(g3, NULL, 0, p, 1, 1);
  for (int i = 1; i < 4; ++i) m[i] = add_affine(g3, &m[i - 1], 1, p, 1, 1);
  EXPECT_RESULT(cuGraphExecUpdate(x, g3, &info), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_EQ(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED);
  EXPECT(info.errorNode == m[0]);
  launch(x, s); /* as before */
  EXPECT_EQ(out[0], 33);

  /* a child graph, and kernels whose steps become longer: everything behind them moves */
  CUgraph parent;
  CUgraphNode before, child, after;
  CUgraph c1, c2;
  CUgraphNode in[4];
  CHECK(cuGraphCreate(&parent, 0));
  c1 = three(p, 1, 1, &out[0], in);
  before = add_memset(parent, NULL, 0, q, 5);
  CHECK(cuGraphAddChildGraphNode(&child, parent, &before, 1, c1));
  after = add_affine(parent, &child, 1, q, 2, 0);
  CUgraphExec y = instantiate(parent);
  launch(y, s);
  EXPECT_EQ(out[0], 2);
  expect_device_words(q, 10, kWords);
  c2 = three(p, 100, 1, &out[1], in);
  CHECK(cuGraphExecChildGraphNodeSetParams(y, child, c2));
  CUDA_KERNEL_NODE_PARAMS other;
  CHECK(cuGraphKernelNodeGetParams(after, &other));
  CUdeviceptr to = q, from = p;
  void* copy_params[] = {&to, &from, &count};
  other.func = copy_words;
  other.kernelParams = copy_params;
  CHECK(cuGraphExecKernelNodeSetParams(y, after, &other));
  launch(y, s);
  EXPECT_EQ(out[1], 101);
  expect_device_words(q, 101, kWords);
  EXPECT_RESULT(cuGraphExecChildGraphNodeSetParams(y, child, g3), CUDA_ERROR_INVALID_VALUE);

  /* events of an executable graph */
  CUevent e1, e2;
  CUgraphNode record;
  CUgraph ge;
  CHECK(cuEventCreate(&e1, 0));
  CHECK(cuEventCreate(&e2, 0));
  CHECK(cuGraphCreate(&ge, 0));
  CHECK(cuGraphAddEventRecordNode(&record, ge, NULL, 0, e1));
  CUgraphExec z = instantiate(ge);
  CHECK(cuGraphExecEventRecordNodeSetEvent(z, record, e2));
  launch(z, s);
  float ms;
  EXPECT_RESULT(cuEventElapsedTime(&ms, e2, e1), CUDA_ERROR_INVALID_HANDLE); /* e1 was never recorded */
  CHECK(cuEventElapsedTime(&ms, e2, e2));

  /* growing host memory: the staging buffer of the executable graph grows with it */
  uint8_t* big = malloc(1 << 20);
  CUdeviceptr wide;
  CHECK(cuMemAlloc(&wide, 1 << 20));
  CUgraph gs;
  CUgraphNode up;
  CHECK(cuGraphCreate(&gs, 0));
  memset(big, 7, 1 << 20);
  c = linear(CU_MEMORYTYPE_DEVICE, wide, NULL, CU_MEMORYTYPE_HOST, 0, big, 64);
  up = add_copy(gs, NULL, 0, &c);
  CUgraphExec w = instantiate(gs);
  launch(w, s);
  set_words(wide, 0, (1 << 20) / 4);
  c.WidthInBytes = 1 << 20;
  CHECK(cuGraphExecMemcpyNodeSetParams(w, up, &c, ctx));
  launch(w, s);
  expect_device_words(wide, 0x07070707, (1 << 20) / 4);
  free(big);
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphExecDestroy(y));
  CHECK(cuGraphExecDestroy(z));
  CHECK(cuGraphExecDestroy(w));
}

/* -- launches --------------------------------------------------------------------------------------------------------
 */

static void launches(CUstream s) {
  CUdeviceptr p = words();
  CUgraph g;
  CHECK(cuGraphCreate(&g, 0));
  CUgraphNode last = add_affine(g, NULL, 0, p, 1, 1);
  for (int i = 1; i < 20; ++i) last = add_affine(g, &last, 1, p, 1, 1);
  CUgraphExec x = instantiate(g);
  CHECK(cuGraphUpload(x, s));
  for (int i = 0; i < 1000; ++i) CHECK(cuGraphLaunch(x, s));
  CHECK(cuStreamSynchronize(s));
  expect_device_words(p, 20000, kWords);

  /* One executable graph does not overlap itself, whatever the streams: each launch reads, waits a little, and writes
   * what it read plus one. */
  CUstream many[4];
  CUdeviceptr t = words();
  set_words(p, 0, kWords);
  for (int i = 0; i < 4; ++i) CHECK(cuStreamCreate(&many[i], CU_STREAM_NON_BLOCKING));
  CUgraph rmw;
  CHECK(cuGraphCreate(&rmw, 0));
  CUDA_MEMCPY3D c = linear(CU_MEMORYTYPE_DEVICE, t, NULL, CU_MEMORYTYPE_DEVICE, p, NULL, kBytes);
  CUgraphNode n = add_copy(rmw, NULL, 0, &c);
  uint64_t us = 300;
  void* params[] = {&us};
  CUDA_KERNEL_NODE_PARAMS k = {.func = slow,
                               .gridDimX = 1,
                               .gridDimY = 1,
                               .gridDimZ = 1,
                               .blockDimX = 1,
                               .blockDimY = 1,
                               .blockDimZ = 1,
                               .kernelParams = params};
  CHECK(cuGraphAddKernelNode(&n, rmw, &n, 1, &k));
  n = add_affine(rmw, &n, 1, t, 1, 1);
  c = linear(CU_MEMORYTYPE_DEVICE, p, NULL, CU_MEMORYTYPE_DEVICE, t, NULL, kBytes);
  add_copy(rmw, &n, 1, &c);
  CUgraphExec y = instantiate(rmw);
  for (int i = 0; i < 60; ++i) CHECK(cuGraphLaunch(y, many[i % 4]));
  /* the stream of the last launch is behind all */
  CHECK(cuStreamSynchronize(many[59 % 4]));
  uint32_t seen = 0;
  CHECK(cuMemcpyDtoHAsync(&seen, p, 4, many[59 % 4]));
  EXPECT_EQ(seen, 60);
  CHECK(cuCtxSynchronize());

  /* destroyed while it runs, with host nodes and pageable memory */
  uint32_t* host = malloc(kBytes);
  for (int i = 0; i < kWords; ++i) host[i] = 6;
  CUgraph gh;
  CHECK(cuGraphCreate(&gh, 0));
  c = linear(CU_MEMORYTYPE_DEVICE, p, NULL, CU_MEMORYTYPE_HOST, 0, host, kBytes);
  n = add_copy(gh, NULL, 0, &c);
  n = add_host(gh, &n, 1, count_call, (void*)1);
  n = add_affine(gh, &n, 1, p, 7, 0);
  const int before = atomic_load(&host_calls);
  for (int i = 0; i < 20; ++i) {
    CUgraphExec z = instantiate(gh);
    Gate gate;
    close_gate(&gate, s);
    for (int k2 = 0; k2 < 3; ++k2) CHECK(cuGraphLaunch(z, s));
    CHECK(cuGraphExecDestroy(z));
    open_gate(&gate);
    CHECK(cuStreamSynchronize(s));
    expect_device_words(p, 42, kWords);
  }
  EXPECT_EQ(atomic_load(&host_calls) - before, 60);
  /* launched into the legacy stream: its order holds for blocking streams */
  CUstream blocking;
  CHECK(cuStreamCreate(&blocking, 0));
  CUgraphExec z = instantiate(gh);
  launch_slow_fill(slow_fill, blocking, p, 1, kWords, 2000);
  CHECK(cuGraphLaunch(z, NULL));
  launch_affine(affine, blocking, p, 1, 1, kWords);
  CHECK(cuStreamSynchronize(blocking));
  expect_device_words(p, 43, kWords);
  /* memory that is gone, or a handle that is: the launch is refused late, by name, and the stream goes on */
  CUgraph gone;
  CHECK(cuGraphCreate(&gone, 0));
  add_memset(gone, NULL, 0, t, 1);
  CUgraphExec w = instantiate(gone);
  CHECK(cuMemFree(t));
  CHECK(cuGraphLaunch(w, s));
  EXPECT_RESULT(cuStreamSynchronize(s), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuStreamSynchronize(s));
  /* empty graphs launch too */
  CUgraph nothing;
  CHECK(cuGraphCreate(&nothing, 0));
  CUgraphExec v = instantiate(nothing);
  launch(v, s);
  cuuint64_t flags = 9;
  CHECK(cuGraphExecGetFlags(v, &flags));
  EXPECT_EQ(flags, 0);
  EXPECT_RESULT(cuGraphInstantiateWithFlags(&v, nothing, 1u << 20), CUDA_ERROR_INVALID_VALUE);
  /* many event records in one launch: more than a small record has places for */
  CUevent events[100];
  CUgraph ge;
  CHECK(cuGraphCreate(&ge, 0));
  for (int i = 0; i < 100; ++i) {
    CHECK(cuEventCreate(&events[i], 0));
    n = add_affine(ge, i ? &n : NULL, i ? 1 : 0, p, 1, 1);
    CHECK(cuGraphAddEventRecordNode(&n, ge, &n, 1, events[i]));
  }
  CUgraphExec xe = instantiate(ge);
  CHECK(cuGraphLaunch(xe, s));
  for (int i = 0; i < 100; ++i) CHECK(cuEventSynchronize(events[i]));
  float ms = -1;
  CHECK(cuEventElapsedTime(&ms, events[0], events[99]));
  EXPECT(ms >= 0);
  CHECK(cuStreamSynchronize(s));
  free(host);
}

/* -- threads ---------------------------------------------------------------------------------------------------------
 */

static void* capture_alone(void* arg) {
  const uint32_t mine = (uint32_t)(uintptr_t)arg;
  CHECK(cuCtxSetCurrent(ctx));
  CUstream s, side;
  CUevent e, f;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  CHECK(cuEventCreate(&f, CU_EVENT_DISABLE_TIMING));
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
  CHECK(cuThreadExchangeStreamCaptureMode(&mode));
  CUdeviceptr p = words(), q = words();
  for (int round = 0; round < 30; ++round) {
    CUgraph g;
    CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    launch_fill(fill, s, p, mine, kWords);
    CHECK(cuEventRecord(e, s));
    CHECK(cuStreamWaitEvent(side, e, 0));
    launch_copy(copy_words, side, q, p, kWords);
    launch_affine(affine, side, q, 2, 0, kWords);
    CHECK(cuEventRecord(f, side));
    CHECK(cuStreamWaitEvent(s, f, 0));
    launch_affine(affine, s, q, 1, (uint32_t)round, kWords);
    CHECK(cuStreamEndCapture(s, &g));
    EXPECT_EQ(node_count(g), 4);
    CUgraphExec x = instantiate(g);
    for (int i = 0; i < 3; ++i) CHECK(cuGraphLaunch(x, i & 1 ? s : side));
    CHECK(cuStreamSynchronize(side));
    uint32_t got = 0;
    CHECK(cuMemcpyDtoHAsync(&got, q, 4, side));
    EXPECT_EQ(got, mine * 2 + (uint32_t)round);
    CHECK(cuGraphExecDestroy(x));
    CHECK(cuGraphDestroy(g));
  }
  return NULL;
}

static void threads(void) {
  pthread_t t[4];
  for (uintptr_t i = 0; i < 4; ++i) pthread_create(&t[i], NULL, capture_alone, (void*)(100 * (i + 1)));
  for (int i = 0; i < 4; ++i) pthread_join(t[i], NULL);
}

/* -- user objects ----------------------------------------------------------------------------------------------------
 */

static _Atomic int destroyed;
static void destroy_object(void* arg) { atomic_fetch_add(&destroyed, (int)(uintptr_t)arg); }
static void until_destroyed(int wanted) {
  for (int i = 0; i < 5000 && atomic_load(&destroyed) != wanted; ++i) usleep(1000);
  EXPECT_EQ(atomic_load(&destroyed), wanted);
}

static void objects(CUstream s) {
  CUuserObject a, b;
  EXPECT_RESULT(cuUserObjectCreate(&a, NULL, destroy_object, 1, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuUserObjectCreate(&a, (void*)1, destroy_object, 2, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  CHECK(cuUserObjectRetain(a, 1));
  CHECK(cuUserObjectRelease(a, 2));
  EXPECT_EQ(atomic_load(&destroyed), 0);
  CUgraph g, copy;
  CHECK(cuGraphCreate(&g, 0));
  CHECK(cuGraphRetainUserObject(g, a, 1, CU_GRAPH_USER_OBJECT_MOVE));
  EXPECT_RESULT(cuGraphReleaseUserObject(g, a, 2), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuUserObjectCreate(&b, (void*)10, destroy_object, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  CHECK(cuGraphRetainUserObject(g, b, 1, 0));
  CHECK(cuUserObjectRelease(b, 1));
  CHECK(cuGraphClone(&copy, g));
  Gate gate;
  add_host(g, NULL, 0, gate_function, &gate);
  CUgraphExec x = instantiate(g);
  CHECK(cuGraphReleaseUserObject(g, b, 1));
  CHECK(cuGraphDestroy(g));
  CHECK(cuGraphDestroy(copy));
  atomic_store(&gate.open, 0);
  CHECK(cuGraphLaunch(x, s));
  CHECK(cuGraphExecDestroy(x));
  usleep(20000);
  EXPECT_EQ(atomic_load(&destroyed), 0); /* the launch still runs */
  open_gate(&gate);
  CHECK(cuStreamSynchronize(s));
  until_destroyed(11);
}

/* -- random graphs against plain calls -------------------------------------------------------------------------------
 */

static uint64_t dice_state;
static uint32_t dice(uint32_t below) {
  dice_state = dice_state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(dice_state >> 33) % below;
}

enum { kBuffers = 12, kNodes = 60 };

/* Every node reads one buffer and writes another. Two nodes that touch one buffer, one of them writing, get an edge, so
 * every order that the edges allow gives the same memory; other edges are thrown in. */
static void random_graphs(CUstream s, uint64_t seed) {
  dice_state = seed * 77 + 1;
  CUstream plain;
  CHECK(cuStreamCreate(&plain, CU_STREAM_NON_BLOCKING));
  for (int round = 0; round < 25; ++round) {
    CUdeviceptr dev[2][kBuffers];
    uint32_t* host[2][kBuffers]; /* buffers 0..3 are also host memory: 0, 1 pageable, 2, 3 pinned */
    for (int w = 0; w < 2; ++w)
      for (int i = 0; i < kBuffers; ++i) {
        CHECK(cuMemAlloc(&dev[w][i], kBytes));
        set_words(dev[w][i], (uint32_t)i + 1, kWords);
        host[w][i] = NULL;
        if (i < 2) host[w][i] = malloc(kBytes);
        if (i >= 2 && i < 4) CHECK(cuMemAllocHost((void**)&host[w][i], kBytes));
        if (i < 4) memset(host[w][i], i + 1, kBytes);
      }
    CHECK(cuStreamSynchronize(NULL));
    CUgraph g;
    CHECK(cuGraphCreate(&g, 0));
    CUgraphNode node[kNodes];
    int reads[kNodes], writes[kNodes];
    const int n = 1 + (int)dice(kNodes);
    for (int k = 0; k < n; ++k) {
      /* places: 0..kBuffers-1 device, kBuffers..kBuffers+3 host */
      const int kind = (int)dice(5);
      int from = (int)dice(kBuffers), to = (int)dice(kBuffers);
      if (kind == 3) from = kBuffers + (int)dice(4); /* host to device */
      if (kind == 4) to = kBuffers + (int)dice(4);   /* device to host */
      if (kind == 0 || kind == 1) from = to;         /* affine and memset touch one */
      if (kind == 2 && from == to) to = (to + 1) % kBuffers;
      reads[k] = from, writes[k] = to;
      CUgraphNode deps[kNodes];
      size_t nd = 0;
      for (int j = 0; j < k; ++j)
        if (writes[j] == from || writes[j] == to || reads[j] == to || dice(12) == 0) deps[nd++] = node[j];
      const uint32_t factor = dice(5) + 1, add = dice(100), value = dice(1000);
      if (kind == 0) {
        node[k] = add_affine(g, deps, nd, dev[0][to], factor, add);
        launch_affine(affine, plain, dev[1][to], factor, add, kWords);
      } else if (kind == 1) {
        node[k] = add_memset(g, deps, nd, dev[0][to], value);
        CHECK(cuMemsetD32Async(dev[1][to], value, kWords, plain));
      } else {
        CUDA_MEMCPY3D c = linear(
            to < kBuffers ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST, to < kBuffers ? dev[0][to] : 0,
            to < kBuffers ? NULL : host[0][to - kBuffers], from < kBuffers ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST,
            from < kBuffers ? dev[0][from] : 0, from < kBuffers ? NULL : host[0][from - kBuffers], kBytes);
        node[k] = add_copy(g, deps, nd, &c);
        if (kind == 2) CHECK(cuMemcpyDtoDAsync(dev[1][to], dev[1][from], kBytes, plain));
        if (kind == 3) CHECK(cuMemcpyHtoDAsync(dev[1][to], host[1][from - kBuffers], kBytes, plain));
        if (kind == 4) CHECK(cuMemcpyDtoHAsync(host[1][to - kBuffers], dev[1][from], kBytes, plain));
        if (kind >= 3) CHECK(cuStreamSynchronize(plain)); /* the plain order of the host's memory */
      }
    }
    CUgraphExec x = instantiate(g);
    CHECK(cuGraphLaunch(x, s));
    CHECK(cuGraphExecDestroy(x));
    CHECK(cuGraphDestroy(g));
    CHECK(cuStreamSynchronize(s));
    CHECK(cuStreamSynchronize(plain));
    static uint32_t a[kWords], b[kWords];
    for (int i = 0; i < kBuffers; ++i) {
      CHECK(cuMemcpyDtoH(a, dev[0][i], kBytes));
      CHECK(cuMemcpyDtoH(b, dev[1][i], kBytes));
      if (memcmp(a, b, kBytes) != 0) {
        fprintf(stderr, "seed %llu, round %d, %d nodes: buffer %d differs\n", (unsigned long long)seed, round, n, i);
        exit(1);
      }
      if (i < 4) EXPECT(memcmp(host[0][i], host[1][i], kBytes) == 0);
      for (int w = 0; w < 2; ++w) {
        CHECK(cuMemFree(dev[w][i]));
        if (i < 2) free(host[w][i]);
        if (i >= 2 && i < 4) CHECK(cuMemFreeHost(host[w][i]));
      }
    }
  }
}

/* -- held by a harness -----------------------------------------------------------------------------------------------
 */

static void wait_for_line(const char* say) {
  char line[16];
  printf("%s\n", say);
  fflush(stdout);
  if (!fgets(line, sizeof line, stdin)) exit(3);
}

static void hold(CUstream s) {
  CUdeviceptr p = words();
  uint32_t host[kWords], out[kWords];
  CUevent e;
  CHECK(cuEventCreate(&e, 0));
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuMemcpyHtoDAsync(p, host, kBytes, s));
  launch_affine(affine, s, p, 2, 0, kWords);
  wait_for_line("ready"); /* in the middle of a capture */
  launch_affine(affine, s, p, 1, 1, kWords);
  CHECK(cuEventRecordWithFlags(e, s, CU_EVENT_RECORD_EXTERNAL));
  CHECK(cuLaunchHostFunc(s, count_call, (void*)1));
  CHECK(cuMemcpyDtoHAsync(out, p, kBytes, s));
  CUgraph g;
  CHECK(cuStreamEndCapture(s, &g));
  EXPECT_EQ(node_count(g), 6);
  CUgraphNode nodes[6];
  size_t n = 6;
  CHECK(cuGraphGetNodes(g, nodes, &n));
  CUgraphExec x = instantiate(g), y = instantiate(g);
  for (uint32_t round = 1; round <= 4; ++round) {
    for (int i = 0; i < kWords; ++i) host[i] = round;
    memset(out, 0, sizeof out);
    launch(x, s);
    expect_words(out, 2 * round + 1, kWords);
    CHECK(cuEventQuery(e));
    EXPECT_EQ(atomic_load(&host_calls), (int)(3 * round - 2));
    /* what was updated stays so over the cut; the other executable graph does not change */
    uint32_t factor = 100, add = round;
    uint64_t count = kWords;
    void* params[] = {&p, &factor, &add, &count};
    CUDA_KERNEL_NODE_PARAMS k;
    CHECK(cuGraphKernelNodeGetParams(nodes[1], &k));
    k.kernelParams = params;
    CHECK(cuGraphExecKernelNodeSetParams(y, nodes[1], &k));
    CHECK(cuGraphLaunch(y, s));
    if (round <= 2) wait_for_line("ready"); /* between launches, and perhaps while one runs */
    launch(y, s);
    expect_words(out, 100 * round + round + 1, kWords);
  }
}

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "explicit";
  start();
  CHECK(cuCtxGetCurrent(&ctx));
  mod = load_kernels();
  fill = kernel(mod, "fill"), slow_fill = kernel(mod, "slow_fill"), copy_words = kernel(mod, "copy_words");
  affine = kernel(mod, "affine"), slow = kernel(mod, "slow");
  CUstream s;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  if (!strcmp(what, "explicit")) {
    structure(s);
    pageable(s);
    children_and_events(s);
    node_params(s);
  } else if (!strcmp(what, "capture")) {
    captured(s);
  } else if (!strcmp(what, "errors")) {
    errors(s);
  } else if (!strcmp(what, "update")) {
    updates(s);
    staged_updates(s);
  } else if (!strcmp(what, "launches")) {
    launches(s);
  } else if (!strcmp(what, "threads")) {
    threads();
  } else if (!strcmp(what, "objects")) {
    objects(s);
  } else if (!strcmp(what, "random")) {
    random_graphs(s, argc > 2 ? strtoull(argv[2], NULL, 10) : 1);
  } else if (!strcmp(what, "hold")) {
    hold(s);
  } else {
    fprintf(stderr, "graphs: what is '%s'?\n", what);
    return 2;
  }
  return pass("graphs");
}
