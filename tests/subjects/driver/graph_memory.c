// SPDX-License-Identifier: Apache-2.0
/* Memory that graphs allocate: made by nodes and by captures, used inside and outside of its graph, freed by whoever
 * may.
 *
 * graph_memory explicit | capture | rules | frees | lifetimes | contexts | account | devices | threads
 * graph_memory random SEED */
#include "program.h"

enum { kWords = 1024, kBytes = kWords * 4 };

static CUdevice dev;
static CUfunction fill, slow_fill, affine;
static CUcontext ctx;

static uint64_t attribute(CUgraphMem_attribute which) {
  cuuint64_t value = ~0ull;
  CHECK(cuDeviceGetGraphMemAttribute(dev, which, &value));
  return value;
}
static uint64_t used(void) {
  const uint64_t value = attribute(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT);
  EXPECT(attribute(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) >= value);
  return value;
}

static CUDA_MEM_ALLOC_NODE_PARAMS wanted(size_t bytes) {
  CUDA_MEM_ALLOC_NODE_PARAMS p = {0};
  p.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.poolProps.location.id = dev;
  p.bytesize = bytes;
  return p;
}

static CUgraphNode add_alloc(CUgraph g, const CUgraphNode* deps, size_t n, CUdeviceptr* p) {
  CUDA_MEM_ALLOC_NODE_PARAMS a = wanted(kBytes);
  CUgraphNode node;
  CHECK(cuGraphAddMemAllocNode(&node, g, deps, n, &a));
  EXPECT(a.dptr != 0);
  *p = a.dptr;
  return node;
}

static CUgraphNode add_free(CUgraph g, const CUgraphNode* deps, size_t n, CUdeviceptr p) {
  CUgraphNode node;
  CHECK(cuGraphAddMemFreeNode(&node, g, deps, n, p));
  return node;
}

static CUgraphNode add_memset(CUgraph g, const CUgraphNode* deps, size_t n, CUdeviceptr p, uint32_t value) {
  CUDA_MEMSET_NODE_PARAMS m = {.dst = p, .value = value, .elementSize = 4, .width = kWords, .height = 1};
  CUgraphNode node;
  CHECK(cuGraphAddMemsetNode(&node, g, deps, n, &m, ctx));
  return node;
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
  return node;
}

static CUgraphNode add_copy(CUgraph g, const CUgraphNode* deps, size_t n, CUdeviceptr to, CUdeviceptr from) {
  CUDA_MEMCPY3D c = {0};
  c.dstMemoryType = c.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  c.dstDevice = to, c.srcDevice = from, c.WidthInBytes = kBytes, c.Height = c.Depth = 1;
  CUgraphNode node;
  CHECK(cuGraphAddMemcpyNode(&node, g, deps, n, &c, ctx));
  return node;
}

static CUgraph new_graph(void) {
  CUgraph g;
  CHECK(cuGraphCreate(&g, 0));
  return g;
}

static CUgraphExec instantiate(CUgraph g, unsigned long long flags) {
  CUgraphExec x;
  CHECK(cuGraphInstantiateWithFlags(&x, g, flags));
  return x;
}

static void run(CUgraphExec x, CUstream s) {
  CHECK(cuGraphLaunch(x, s));
  CHECK(cuStreamSynchronize(s));
}

static void gone(CUgraphExec x, CUgraph g) {
  if (x) CHECK(cuGraphExecDestroy(x));
  if (g) CHECK(cuGraphDestroy(g));
}

static CUdeviceptr words(void) {
  CUdeviceptr p;
  CHECK(cuMemAlloc(&p, kBytes));
  CHECK(cuMemsetD32(p, 0, kWords));
  CHECK(cuStreamSynchronize(NULL));
  return p;
}

/* alloc, set to `value`; the graph leaves it allocated */
static CUgraph producer(uint32_t value, CUdeviceptr* p) {
  CUgraph g = new_graph();
  CUgraphNode a = add_alloc(g, NULL, 0, p);
  add_memset(g, &a, 1, *p, value);
  return g;
}

/* -- nodes */

static void explicit_nodes(CUstream s) {
  CUdeviceptr a, b, out = words();
  CUgraph g = new_graph();
  CUgraphNode n[8], both[2];
  n[0] = add_alloc(g, NULL, 0, &a);
  n[1] = add_alloc(g, NULL, 0, &b);
  EXPECT(a + kBytes <= b || b + kBytes <= a);
  n[2] = add_memset(g, &n[0], 1, a, 5);
  both[0] = n[1], both[1] = n[2];
  n[3] = add_copy(g, both, 2, b, a);
  n[4] = add_free(g, &n[3], 1, a);
  n[5] = add_affine(g, &n[3], 1, b, 3, 1);
  n[6] = add_copy(g, &n[5], 1, out, b);
  /* the general form, and an allocation's parameters there and back */
  CUgraphNodeParams general = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE};
  general.free.dptr = b;
  CHECK(cuGraphAddNode(&n[7], g, &n[6], NULL, 1, &general));
  CUgraphNodeType type;
  CHECK(cuGraphNodeGetType(n[0], &type));
  EXPECT_EQ(type, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
  CHECK(cuGraphNodeGetType(n[7], &type));
  EXPECT_EQ(type, CU_GRAPH_NODE_TYPE_MEM_FREE);
  CUDA_MEM_ALLOC_NODE_PARAMS got;
  memset(&got, 0xee, sizeof got);
  CHECK(cuGraphMemAllocNodeGetParams(n[1], &got));
  EXPECT(got.dptr == b && got.bytesize == kBytes && got.accessDescCount == 0 && got.accessDescs == NULL);
  EXPECT(got.poolProps.location.id == dev && got.poolProps.allocType == CU_MEM_ALLOCATION_TYPE_PINNED);
  CUdeviceptr freed = 0;
  CHECK(cuGraphMemFreeNodeGetParams(n[4], &freed));
  EXPECT(freed == a);
  EXPECT_RESULT(cuGraphMemFreeNodeGetParams(n[0], &freed), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuGraphMemAllocNodeGetParams(n[4], &got), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuGraphMemAllocNodeGetParams(n[4], NULL), CUDA_ERROR_INVALID_VALUE);

  CUgraphExec x = instantiate(g, 0);
  for (int i = 0; i < 3; ++i) {
    CHECK(cuMemsetD32(out, 0, kWords));
    CHECK(cuStreamSynchronize(NULL));
    run(x, s);
    expect_device_words(out, 16, kWords);
  }
  /* from another stream; and an executable graph outlives its graph, with the same addresses */
  CUstream other;
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemsetD32(out, 0, kWords));
  CHECK(cuStreamSynchronize(NULL));
  CHECK(cuGraphDestroy(g));
  for (int i = 0; i < 4; ++i) CHECK(cuGraphLaunch(x, i % 2 ? s : other));
  CHECK(cuCtxSynchronize());
  expect_device_words(out, 16, kWords);
  EXPECT(used() >= 2 * kBytes);
  CHECK(cuGraphExecDestroy(x));
  EXPECT_EQ(used(), 0);

  /* access for the own device; the arrays are the node's own */
  CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, dev}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUgraphNodeParams p = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
  const CUDA_MEM_ALLOC_NODE_PARAMS plain = wanted(100);
  p.alloc.poolProps = plain.poolProps, p.alloc.bytesize = 100, p.alloc.accessDescs = &access;
  p.alloc.accessDescCount = 1;
  g = new_graph();
  CHECK(cuGraphAddNode(&n[0], g, NULL, NULL, 0, &p));
  EXPECT(p.alloc.dptr != 0);
  memset(&access, 0xee, sizeof access);
  CHECK(cuGraphMemAllocNodeGetParams(n[0], &got));
  EXPECT(got.dptr == p.alloc.dptr && got.bytesize == 100 && got.accessDescCount == 1);
  EXPECT(got.accessDescs[0].location.id == dev && got.accessDescs[0].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  CHECK(cuGraphDebugDotPrint(g, "/dev/null", CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE));
  CHECK(cuGraphDestroy(g));
  EXPECT_EQ(used(), 0);

  /* what is wrong by itself */
  CUgraphNode none = NULL;
  CUDA_MEM_ALLOC_NODE_PARAMS bad;
  g = new_graph();
  bad = wanted(0);
  EXPECT_RESULT(cuGraphAddMemAllocNode(&none, g, NULL, 0, &bad), CUDA_ERROR_INVALID_VALUE);
  bad = wanted(64), bad.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_INVALID;
  EXPECT_RESULT(cuGraphAddMemAllocNode(&none, g, NULL, 0, &bad), CUDA_ERROR_INVALID_VALUE);
  bad = wanted(64), bad.poolProps.location.type = CU_MEM_LOCATION_TYPE_INVALID;
  EXPECT_RESULT(cuGraphAddMemAllocNode(&none, g, NULL, 0, &bad), CUDA_ERROR_INVALID_VALUE);
  bad = wanted(64), bad.poolProps.location.id = 99;
  EXPECT_RESULT(cuGraphAddMemAllocNode(&none, g, NULL, 0, &bad), CUDA_ERROR_INVALID_VALUE);
  bad = wanted(64), bad.poolProps.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  EXPECT_RESULT(cuGraphAddMemAllocNode(&none, g, NULL, 0, &bad), CUDA_ERROR_INVALID_VALUE);
  bad = wanted(64), bad.accessDescCount = 99;
  EXPECT_RESULT(cuGraphAddMemAllocNode(&none, g, NULL, 0, &bad), CUDA_ERROR_INVALID_VALUE);
  bad = wanted(~0ull);
  EXPECT_RESULT(cuGraphAddMemAllocNode(&none, g, NULL, 0, &bad), CUDA_ERROR_OUT_OF_MEMORY);
  bad = wanted(64);
  EXPECT_RESULT(cuGraphAddMemAllocNode(&none, g, NULL, 3, &bad), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuGraphAddMemAllocNode(&none, NULL, NULL, 0, &bad), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuGraphAddMemAllocNode(NULL, g, NULL, 0, &bad), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuGraphAddMemAllocNode(&none, g, NULL, 0, NULL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuGraphAddMemFreeNode(&none, g, NULL, 0, out), CUDA_ERROR_INVALID_VALUE); /* no graph's */
  EXPECT_RESULT(cuGraphAddMemFreeNode(&none, g, NULL, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT(none == NULL);
  size_t count = 9;
  CHECK(cuGraphGetNodes(g, NULL, &count));
  EXPECT_EQ(count, 0);
  EXPECT_EQ(used(), 0); /* and nothing of it is left allocated */
  CHECK(cuGraphDestroy(g));
  CHECK(cuMemFree(out));
  CHECK(cuStreamDestroy(other));
}

/* -- capture */

static CUgraph end(CUstream s) {
  CUgraph g;
  CHECK(cuStreamEndCapture(s, &g));
  return g;
}

static void captured(CUstream s) {
  CUdeviceptr out = words(), before, a = 0, b = 0, nothing = 1;
  CUstream side;
  CUevent fork, join;
  CUmemoryPool pool;
  CHECK(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
  CHECK(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
  CHECK(cuDeviceGetDefaultMemPool(&pool, dev));
  CHECK(cuMemAllocAsync(&before, kBytes, s));

  /* allocated here, used and freed there, all in one capture */
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuMemAllocAsync(&a, kBytes, s));
  CHECK(cuMemAllocFromPoolAsync(&b, kBytes, pool, s));
  CHECK(cuMemAllocAsync(&nothing, 0, s));
  EXPECT(a && b && nothing == 0);
  CHECK(cuMemsetD32Async(a, 7, kWords, s));
  CHECK(cuEventRecord(fork, s));
  CHECK(cuStreamWaitEvent(side, fork, 0));
  CHECK(cuMemcpyDtoDAsync(b, a, kBytes, side));
  launch_affine(affine, side, b, 2, 3, kWords);
  CHECK(cuMemcpyDtoDAsync(out, b, kBytes, side));
  CHECK(cuMemFreeAsync(b, side));
  CHECK(cuEventRecord(join, side));
  CHECK(cuStreamWaitEvent(s, join, 0));
  CHECK(cuMemFreeAsync(a, s));
  /* memory that is no graph's has no free node, and the mistake harms nothing; nor does a second free */
  EXPECT_RESULT(cuMemFreeAsync(before, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemFreeAsync(a, s), CUDA_ERROR_INVALID_VALUE);
  CUgraph g = end(s);
  CUgraphNode nodes[8];
  size_t count = 8;
  CHECK(cuGraphGetNodes(g, nodes, &count));
  EXPECT_EQ(count, 8);
  CUDA_MEM_ALLOC_NODE_PARAMS got;
  CHECK(cuGraphMemAllocNodeGetParams(nodes[1], &got));
  EXPECT(got.dptr == b && got.bytesize == kBytes && got.poolProps.location.id == dev);
  CHECK(cuMemFreeAsync(before, s));
  CUgraphExec x = instantiate(g, 0);
  for (int i = 0; i < 3; ++i) {
    CHECK(cuMemsetD32(out, 0, kWords));
    CHECK(cuStreamSynchronize(NULL));
    run(x, i % 2 ? side : s);
    expect_device_words(out, 17, kWords);
  }
  EXPECT_RESULT(cuMemFree(a), CUDA_ERROR_INVALID_VALUE); /* its own graph frees it */
  EXPECT_RESULT(cuMemFreeAsync(a, s), CUDA_ERROR_INVALID_VALUE);
  gone(x, g);
  EXPECT_EQ(used(), 0);

  /* not freed in the graph: used by another stream, behind an event, and freed there */
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
  CHECK(cuMemAllocAsync(&a, kBytes, s));
  launch_slow_fill(slow_fill, s, a, 21, kWords, 2000);
  g = end(s);
  x = instantiate(g, 0);
  for (uint32_t i = 0; i < 4; ++i) {
    CHECK(cuGraphLaunch(x, s));
    CHECK(cuEventRecord(fork, s));
    CHECK(cuStreamWaitEvent(side, fork, 0));
    launch_affine(affine, side, a, 1, i, kWords);
    CHECK(cuMemcpyDtoDAsync(out, a, kBytes, side));
    CHECK(cuMemFreeAsync(a, side));
    EXPECT_RESULT(cuMemFreeAsync(a, side), CUDA_ERROR_INVALID_VALUE); /* once */
    CHECK(cuEventRecord(join, side));
    CHECK(cuStreamWaitEvent(s, join, 0));
    CHECK(cuStreamSynchronize(side));
    expect_device_words(out, 21 + i, kWords);
  }
  gone(x, g);
  EXPECT_EQ(used(), 0);

  /* a capture that fails gives back what it has allocated */
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuMemAllocAsync(&a, kBytes, s));
  EXPECT(used() >= kBytes);
  EXPECT_RESULT(cuMemAlloc(&b, kBytes), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_RESULT(cuMemAllocAsync(&b, kBytes, s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_RESULT(cuMemFreeAsync(a, s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_RESULT(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(used(), 0);
  EXPECT_RESULT(cuMemFree(a), CUDA_ERROR_INVALID_VALUE);
  /* and so does one whose stream goes */
  CHECK(cuStreamBeginCapture(side, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuMemAllocAsync(&a, kBytes, side));
  CHECK(cuStreamDestroy(side));
  EXPECT_EQ(used(), 0);

  /* a launch of such a graph is no node of another */
  g = producer(1, &a);
  x = instantiate(g, 0);
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  EXPECT_RESULT(cuGraphLaunch(x, s), CUDA_ERROR_NOT_SUPPORTED);
  CUgraph broken;
  EXPECT_RESULT(cuStreamEndCapture(s, &broken), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  gone(x, g);
  CHECK(cuMemFree(out));
  EXPECT_EQ(used(), 0);
}

/* -- what such graphs cannot be */

static void forbidden(CUgraph g, CUgraphNode first, CUgraphNode second) {
  CUgraph copy, parent = new_graph();
  CUgraphNode node;
  CUgraphExec x = instantiate(g, 0), y = NULL;
  EXPECT_RESULT(cuGraphInstantiateWithFlags(&y, g, 0), CUDA_ERROR_NOT_SUPPORTED); /* one at a time */
  CUDA_GRAPH_INSTANTIATE_PARAMS how = {0};
  EXPECT_RESULT(cuGraphInstantiateWithParams(&y, g, &how), CUDA_ERROR_NOT_SUPPORTED);
  CHECK(cuGraphExecDestroy(x));
  x = instantiate(g, 0); /* the next one */
  EXPECT_RESULT(cuGraphClone(&copy, g), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_RESULT(cuGraphAddChildGraphNode(&node, parent, NULL, 0, g), CUDA_ERROR_NOT_SUPPORTED);
  CUgraphNodeParams child = {.type = CU_GRAPH_NODE_TYPE_GRAPH};
  child.graph.graph = g;
  child.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
  EXPECT_RESULT(cuGraphAddNode(&node, parent, NULL, NULL, 0, &child), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_RESULT(cuGraphRemoveDependencies(g, &first, &second, NULL, 1), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_RESULT(cuGraphDestroyNode(second), CUDA_ERROR_NOT_SUPPORTED);
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(parent));
}

static void rules(CUstream s) {
  CUdeviceptr p, q, out = words();
  CUgraph g = new_graph(), other = new_graph();
  CUgraphNode a = add_alloc(g, NULL, 0, &p), b = add_memset(g, &a, 1, p, 4), c, d, none;
  forbidden(g, a, b);
  c = add_free(other, NULL, 0, p);
  d = add_memset(other, &c, 1, out, 1);
  forbidden(other, c, d); /* a graph that only frees, too */

  /* no other parameters for a memory node, in a graph or in an executable one */
  CUgraphExec x = instantiate(g, 0);
  CUgraphNodeParams change = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
  const CUDA_MEM_ALLOC_NODE_PARAMS bigger = wanted(2 * kBytes);
  change.alloc.poolProps = bigger.poolProps, change.alloc.bytesize = bigger.bytesize;
  const uint64_t before = used();
  EXPECT_RESULT(cuGraphNodeSetParams(a, &change), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_RESULT(cuGraphExecNodeSetParams(x, a, &change), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(used(), before);
  /* the other nodes of such a graph may change, by themselves and by an update with the same graph ... */
  CUDA_MEMSET_NODE_PARAMS m = {.dst = p, .value = 40, .elementSize = 4, .width = kWords, .height = 1};
  CHECK(cuGraphExecMemsetNodeSetParams(x, b, &m, ctx));
  run(x, s);
  expect_device_words(p, 40, kWords);
  CHECK(cuMemFreeAsync(p, s));
  m.value = 41;
  CHECK(cuGraphMemsetNodeSetParams(b, &m));
  CUgraphExecUpdateResultInfo info;
  CHECK(cuGraphExecUpdate(x, g, &info));
  run(x, s);
  expect_device_words(p, 41, kWords);
  CHECK(cuMemFree(p));
  /* ... but another allocation does not take the place of this one */
  CUgraph twin = producer(9, &q);
  EXPECT_RESULT(cuGraphExecUpdate(x, twin, &info), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_EQ(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED);
  EXPECT(info.errorNode != NULL);
  CHECK(cuGraphDestroy(twin));
  gone(x, g);
  gone(NULL, other);

  /* who may free: the own graph or others, each once */
  g = new_graph(), other = new_graph();
  CUgraph third = new_graph();
  a = add_alloc(g, NULL, 0, &p);
  b = add_alloc(g, NULL, 0, &q);
  add_free(g, &a, 1, p);
  EXPECT_RESULT(cuGraphAddMemFreeNode(&none, g, &a, 1, p), CUDA_ERROR_INVALID_VALUE);       /* twice */
  EXPECT_RESULT(cuGraphAddMemFreeNode(&none, other, NULL, 0, p), CUDA_ERROR_INVALID_VALUE); /* its own does it */
  add_free(other, NULL, 0, q);
  EXPECT_RESULT(cuGraphAddMemFreeNode(&none, other, NULL, 0, q), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuGraphAddMemFreeNode(&none, g, &b, 1, q), CUDA_ERROR_INVALID_VALUE); /* another graph does it */
  add_free(third, NULL, 0, q);
  EXPECT_RESULT(cuGraphAddMemFreeNode(&none, third, NULL, 0, q + 512), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuGraphDestroy(third));
  CHECK(cuGraphDestroy(g));
  EXPECT_EQ(used(), 0); /* a free node keeps no memory */
  x = instantiate(other, 0);
  EXPECT_RESULT(cuGraphLaunch(x, s), CUDA_ERROR_INVALID_VALUE); /* nor is there anything to free */
  gone(x, other);

  /* a graph inside of another one gets no memory nodes */
  CUgraph inner = new_graph(), outer = new_graph(), inside;
  CHECK(cuGraphAddEmptyNode(&none, inner, NULL, 0));
  CHECK(cuGraphAddChildGraphNode(&a, outer, NULL, 0, inner));
  CHECK(cuGraphChildGraphNodeGetGraph(a, &inside));
  CUDA_MEM_ALLOC_NODE_PARAMS w = wanted(kBytes);
  EXPECT_RESULT(cuGraphAddMemAllocNode(&none, inside, NULL, 0, &w), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(used(), 0);
  CHECK(cuGraphDestroy(inner));
  CHECK(cuGraphDestroy(outer));

  /* all of it in a graph to which a capture adds */
  g = new_graph();
  a = add_alloc(g, NULL, 0, &p);
  CHECK(cuStreamBeginCaptureToGraph(s, g, &a, NULL, 1, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuMemsetD32Async(p, 12, kWords, s));
  CHECK(cuMemcpyDtoDAsync(out, p, kBytes, s));
  CHECK(cuMemFreeAsync(p, s));
  CHECK(cuStreamEndCapture(s, &g));
  x = instantiate(g, 0);
  run(x, s);
  expect_device_words(out, 12, kWords);
  gone(x, g);
  EXPECT_EQ(used(), 0);
  CHECK(cuMemFree(out));
}

/* -- who frees, and when a graph may be launched again */

static void frees(CUstream s) {
  CUdeviceptr p, q, out = words();
  CUgraph g = producer(3, &p);
  CUgraphExec x = instantiate(g, 0);
  EXPECT_RESULT(cuMemFree(p), CUDA_ERROR_INVALID_VALUE); /* no launch has allocated it */
  EXPECT_RESULT(cuMemFreeAsync(p, s), CUDA_ERROR_INVALID_VALUE);
  for (int i = 0; i < 3; ++i) {
    CHECK(cuGraphLaunch(x, s));
    EXPECT_RESULT(cuGraphLaunch(x, s), CUDA_ERROR_INVALID_VALUE); /* it is allocated already */
    CHECK(cuStreamSynchronize(s));
    expect_device_words(p, 3, kWords);
    if (i == 1)
      CHECK(cuMemFree(p));
    else
      CHECK(cuMemFreeAsync(p, s));
    EXPECT_RESULT(cuMemFree(p), CUDA_ERROR_INVALID_VALUE);
  }

  /* another graph consumes and frees: launched in turn, any number of times */
  CUgraph consumer = new_graph();
  CUgraphNode k = add_affine(consumer, NULL, 0, p, 5, 2);
  k = add_copy(consumer, &k, 1, out, p);
  add_free(consumer, &k, 1, p);
  CUgraphExec y = instantiate(consumer, 0);
  EXPECT_RESULT(cuGraphLaunch(y, s), CUDA_ERROR_INVALID_VALUE);
  CUstream other;
  CUevent e;
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  for (int i = 0; i < 4; ++i) {
    CHECK(cuMemsetD32(out, 0, kWords));
    CHECK(cuStreamSynchronize(NULL));
    CUstream to = i % 2 ? other : s;
    CHECK(cuGraphLaunch(x, s));
    CHECK(cuEventRecord(e, s));
    CHECK(cuStreamWaitEvent(to, e, 0));
    CHECK(cuGraphLaunch(y, to));
    EXPECT_RESULT(cuGraphLaunch(y, to), CUDA_ERROR_INVALID_VALUE);
    EXPECT_RESULT(cuMemFreeAsync(p, to), CUDA_ERROR_INVALID_VALUE);
    CHECK(cuStreamSynchronize(to));
    expect_device_words(out, 17, kWords);
  }
  /* the producer's graph is gone, and then its executable too: the consumer frees what is left, and once */
  CHECK(cuGraphDestroy(g));
  CHECK(cuGraphLaunch(x, s));
  CHECK(cuGraphExecDestroy(x));
  EXPECT(used() >= kBytes);
  run(y, s);
  expect_device_words(out, 17, kWords);
  EXPECT_EQ(used(), 0);
  /* its address may be another graph's now, and is none of the consumer's */
  CUgraph again = producer(8, &q);
  CUgraphExec z = instantiate(again, 0);
  run(z, s);
  EXPECT_RESULT(cuGraphLaunch(y, s), CUDA_ERROR_INVALID_VALUE);
  expect_device_words(q, 8, kWords);
  CHECK(cuMemFreeAsync(q, s));
  gone(y, consumer);
  gone(z, again);
  EXPECT_EQ(used(), 0);

  /* AUTO_FREE_ON_LAUNCH: each launch first frees what the last one left */
  g = producer(6, &p);
  x = instantiate(g, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
  cuuint64_t flags = 0;
  CHECK(cuGraphExecGetFlags(x, &flags));
  EXPECT_EQ(flags, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
  for (int i = 0; i < 3; ++i) {
    CHECK(cuGraphLaunch(x, s));
    launch_affine(affine, s, p, 2, 1, kWords);
    CHECK(cuStreamSynchronize(s));
    expect_device_words(p, 13, kWords);
    if (i == 1) CHECK(cuMemFreeAsync(p, s)); /* or somebody did already */
  }
  gone(x, g); /* which frees nothing that was left */
  EXPECT(used() >= kBytes);
  expect_device_words(p, 13, kWords);
  CHECK(cuMemFree(p));
  EXPECT_EQ(used(), 0);

  /* a free node that comes after a launch: what is allocated must go first */
  g = producer(2, &p);
  x = instantiate(g, 0);
  run(x, s);
  CHECK(cuGraphExecDestroy(x));
  size_t n = 2;
  CUgraphNode nodes[2];
  CHECK(cuGraphGetNodes(g, nodes, &n));
  add_free(g, &nodes[1], 1, p);
  x = instantiate(g, 0);
  EXPECT_RESULT(cuGraphLaunch(x, s), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(p));
  run(x, s);
  run(x, s);
  EXPECT_RESULT(cuMemFree(p), CUDA_ERROR_INVALID_VALUE);
  gone(x, g);
  EXPECT_EQ(used(), 0);
  CHECK(cuStreamDestroy(other));
  CHECK(cuEventDestroy(e));
  CHECK(cuMemFree(out));
}

/* -- lifetimes */

/* Blocks of the size of a graph's allocation, enough for one of them to have its address if that were given out. */
enum { kBlocks = 24 };

static void hold_all(CUdeviceptr* block, uint32_t value) {
  for (int i = 0; i < kBlocks; ++i) {
    CHECK(cuMemAlloc(&block[i], kBytes));
    CHECK(cuMemsetD32(block[i], value + (uint32_t)i, kWords));
  }
  CHECK(cuStreamSynchronize(NULL));
}
static void expect_all(const CUdeviceptr* block, uint32_t value) {
  for (int i = 0; i < kBlocks; ++i) expect_device_words(block[i], value + (uint32_t)i, kWords);
}
static void free_all(CUdeviceptr* block) {
  for (int i = 0; i < kBlocks; ++i) CHECK(cuMemFree(block[i]));
}

static void lifetimes(CUstream s) {
  static Gate gate;
  CUdeviceptr p, block[kBlocks];
  CUstream other;
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));

  /* graph and executable destroyed, what a launch left is still there, with its address and contents */
  CUgraph g = producer(31, &p);
  CUgraphExec x = instantiate(g, 0);
  run(x, s);
  gone(x, g);
  hold_all(block, 100);
  expect_device_words(p, 31, kWords);
  free_all(block);
  CHECK(cuMemFreeAsync(p, s));
  EXPECT_RESULT(cuMemFreeAsync(p, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(used(), 0);

  /* destroyed while it runs: nobody gets the memory before the launch is over */
  g = new_graph();
  CUgraphNode n = add_alloc(g, NULL, 0, &p);
  n = add_memset(g, &n, 1, p, 0xdead);
  add_free(g, &n, 1, p);
  x = instantiate(g, 0);
  close_gate(&gate, s);
  CHECK(cuGraphLaunch(x, s));
  CHECK(cuGraphExecDestroy(x));
  x = instantiate(g, 0); /* the one that still runs is none any more */
  gone(x, g);
  EXPECT_EQ(used(), 0);
  hold_all(block, 200);
  open_gate(&gate);
  CHECK(cuStreamSynchronize(s));
  expect_all(block, 200);
  free_all(block);

  /* left by a launch that is over, freed in another stream that still works, and its graph goes */
  g = producer(0xbeef, &p);
  x = instantiate(g, 0);
  run(x, s);
  close_gate(&gate, other);
  launch_fill(fill, other, p, 0xfeed, kWords);
  CHECK(cuMemFreeAsync(p, other));
  gone(x, g);
  EXPECT_EQ(used(), 0);
  hold_all(block, 300);
  open_gate(&gate);
  CHECK(cuStreamSynchronize(other));
  expect_all(block, 300);
  free_all(block);

  /* nothing is lost by many of them */
  size_t free0 = 0, free1 = 0, total;
  for (int i = 0; i < 300; ++i) {
    if (i == 10) CHECK(cuMemGetInfo(&free0, &total));
    g = producer(1, &p);
    x = instantiate(g, 0);
    CHECK(cuGraphLaunch(x, i % 2 ? s : other));
    if (i % 3) CHECK(cuMemFreeAsync(p, i % 2 ? s : other));
    gone(x, g);
    if (i % 3 == 0) CHECK(cuMemFree(p));
  }
  CHECK(cuCtxSynchronize());
  CHECK(cuMemGetInfo(&free1, &total));
  EXPECT_EQ(free1, free0);
  EXPECT_EQ(used(), 0);
  CHECK(cuStreamDestroy(other));
}

/* An allocation of a graph is of no context; a reset of the device frees it. */
static void contexts(void) {
  CUcontext own;
  CUdeviceptr p, q;
  CUstream s;
  CHECK(cuCtxCreate(&own, NULL, 0, dev));
  CHECK(cuCtxGetCurrent(&ctx));
  CUgraph g = producer(17, &p);
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CUgraphExec x = instantiate(g, 0);
  run(x, s);
  CHECK(cuCtxDestroy(own));
  CHECK(cuCtxGetCurrent(&ctx));
  expect_device_words(p, 17, kWords);
  CHECK(cuMemFree(p));
  gone(x, g);
  EXPECT_EQ(used(), 0);

  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  g = producer(18, &p);
  x = instantiate(g, 0);
  run(x, s);
  gone(x, g); /* left behind */
  g = producer(19, &q);
  x = instantiate(g, 0);
  run(x, s);
  EXPECT(used() >= 2 * kBytes);
  CHECK(cuDevicePrimaryCtxReset(dev));
  const uint64_t left = used();
  EXPECT(left >= kBytes && left < 2 * kBytes); /* a graph that lives has its memory */
  EXPECT_RESULT(cuMemFree(p), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemFree(q), CUDA_ERROR_INVALID_VALUE);
  gone(x, g);
  EXPECT_EQ(used(), 0);
}

/* -- accounting */

static void account(CUstream s) {
  enum { kBig = 8 << 20 };
  cuuint64_t zero = 0, one = 1, value = 0;
  size_t free0, free1, total;
  CUdeviceptr p;
  CHECK(cuDeviceGraphMemTrim(dev));
  EXPECT_EQ(used(), 0);
  CHECK(cuMemGetInfo(&free0, &total));
  CUgraph g = new_graph();
  CUDA_MEM_ALLOC_NODE_PARAMS w = wanted(kBig);
  CUgraphNode a;
  CHECK(cuGraphAddMemAllocNode(&a, g, NULL, 0, &w));
  p = w.dptr;
  CUgraphExec x = instantiate(g, 0);
  run(x, s);
  CHECK(cuMemGetInfo(&free1, &total));
  EXPECT(free0 - free1 >= kBig);
  EXPECT(used() >= kBig && used() < 2 * kBig);
  CHECK(cuDeviceGraphMemTrim(dev)); /* it is in use */
  EXPECT(used() >= kBig);
  EXPECT(attribute(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) >= kBig);
  EXPECT(attribute(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) >= kBig);
  CHECK(cuMemFree(p));
  gone(x, g);
  CHECK(cuDeviceGraphMemTrim(dev));
  EXPECT_EQ(used(), 0);
  EXPECT_EQ(attribute(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT), 0);
  CHECK(cuMemGetInfo(&free1, &total));
  EXPECT_EQ(free1, free0);
  /* high-water marks stay, and each is reset by itself */
  EXPECT(attribute(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) >= kBig);
  CHECK(cuDeviceSetGraphMemAttribute(dev, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &zero));
  EXPECT_EQ(attribute(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH), 0);
  EXPECT(attribute(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) >= kBig);
  CHECK(cuDeviceSetGraphMemAttribute(dev, CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH, &zero));
  EXPECT_EQ(attribute(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH), 0);
  EXPECT_RESULT(cuDeviceSetGraphMemAttribute(dev, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &one), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDeviceSetGraphMemAttribute(dev, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &zero), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDeviceSetGraphMemAttribute(dev, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &zero),
                CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDeviceGetGraphMemAttribute(dev, (CUgraphMem_attribute)99, &value), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDeviceGetGraphMemAttribute(dev, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, NULL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDeviceGetGraphMemAttribute(99, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &value), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_RESULT(cuDeviceSetGraphMemAttribute(-1, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &zero), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_RESULT(cuDeviceGraphMemTrim(99), CUDA_ERROR_INVALID_DEVICE);
  /* the pool's account is another one: the memory of a capture is the graph's */
  CUmemoryPool pool;
  cuuint64_t pooled = 9;
  CHECK(cuDeviceGetDefaultMemPool(&pool, dev));
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuMemAllocAsync(&p, kBytes, s));
  CHECK(cuStreamEndCapture(s, &g));
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &pooled));
  EXPECT_EQ(pooled, 0);
  EXPECT(used() >= kBytes);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  CHECK(cuMemGetAddressRange(&base, &bytes, p + 8));
  EXPECT(base == p && bytes == kBytes);
  CHECK(cuGraphDestroy(g));
  /* more than there is: said by the node, and nothing is lost */
  g = new_graph();
  w = wanted(total + (1 << 20));
  EXPECT_RESULT(cuGraphAddMemAllocNode(&a, g, NULL, 0, &w), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(cuGraphDestroy(g));
  EXPECT_EQ(used(), 0);
}

/* -- two GPUs: the memory is the node's GPU's, whichever is current, and the accounts are two */

static void devices(CUstream s) {
  CUdevice second;
  CUcontext there;
  CUstream far;
  CUdeviceptr p;
  CUgraph g = new_graph();
  CUgraphNode n;
  CHECK(cuDeviceGet(&second, 1));
  CHECK(cuDevicePrimaryCtxRetain(&there, second));
  CHECK(cuCtxPushCurrent(there));
  CHECK(cuStreamCreate(&far, CU_STREAM_NON_BLOCKING));
  CHECK(cuCtxPopCurrent(NULL));
  CUDA_MEM_ALLOC_NODE_PARAMS w = wanted(kBytes);
  CUmemAccessDesc access[2] = {{{CU_MEM_LOCATION_TYPE_DEVICE, second}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
                               {{CU_MEM_LOCATION_TYPE_DEVICE, dev}, CU_MEM_ACCESS_FLAGS_PROT_NONE}};
  w.poolProps.location.id = second, w.accessDescs = access, w.accessDescCount = 2;
  CHECK(cuGraphAddMemAllocNode(&n, g, NULL, 0, &w));
  p = w.dptr;
  add_memset(g, &n, 1, p, 55);
  EXPECT_EQ(used(), 0);
  access[1].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE; /* no GPU reads another one's memory here */
  EXPECT_RESULT(cuGraphAddMemAllocNode(&n, g, NULL, 0, &w), CUDA_ERROR_NOT_SUPPORTED);
  dev = second;
  EXPECT(used() >= kBytes && used() < 2 * kBytes);
  CUgraphExec x = instantiate(g, 0);
  run(x, far);
  expect_device_words(p, 55, kWords);
  CHECK(cuMemFreeAsync(p, s)); /* in the order of the other GPU's stream */
  EXPECT_RESULT(cuMemFreeAsync(p, s), CUDA_ERROR_INVALID_VALUE);
  run(x, far);
  CHECK(cuMemFree(p));
  gone(x, g);
  EXPECT_EQ(used(), 0);
}

/* -- many at once */

static void* worker(void* arg) {
  const uint32_t me = (uint32_t)(uintptr_t)arg;
  CHECK(cuCtxSetCurrent(ctx));
  CUstream s;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CUdeviceptr out, p, q;
  CHECK(cuMemAllocAsync(&out, kBytes, s));
  for (uint32_t i = 0; i < 40; ++i) {
    CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CHECK(cuMemAllocAsync(&p, kBytes, s));
    CHECK(cuMemAllocAsync(&q, kBytes, s));
    CHECK(cuMemsetD32Async(p, me * 1000 + i, kWords, s));
    CHECK(cuMemcpyDtoDAsync(q, p, kBytes, s));
    CHECK(cuMemFreeAsync(p, s));
    CUgraph g = end(s);
    CUgraphExec x = instantiate(g, i % 2 ? CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH : 0);
    CHECK(cuGraphLaunch(x, s));
    if (i % 2) CHECK(cuGraphLaunch(x, s));
    CHECK(cuGraphExecDestroy(x));
    CHECK(cuMemcpyDtoDAsync(out, q, kBytes, s));
    CHECK(cuMemFreeAsync(q, s));
    CHECK(cuGraphDestroy(g));
    static __thread uint32_t host[kWords];
    CHECK(cuMemcpyDtoHAsync(host, out, kBytes, s));
    CHECK(cuStreamSynchronize(s));
    expect_words(host, me * 1000 + i, kWords);
  }
  CHECK(cuMemFreeAsync(out, s));
  CHECK(cuStreamSynchronize(s));
  CHECK(cuStreamDestroy(s));
  return NULL;
}

static void threads(void) {
  pthread_t t[4];
  for (uintptr_t i = 0; i < 4; ++i) EXPECT(pthread_create(&t[i], NULL, worker, (void*)(i + 1)) == 0);
  for (int i = 0; i < 4; ++i) EXPECT(pthread_join(t[i], NULL) == 0);
  EXPECT_EQ(used(), 0);
}

/* The same work captured and plain: buffers come and go in stream order, and what they held is the same. */
static void random_work(CUstream s, CUstream plain, uint64_t seed) {
  enum { kOut = 6, kLive = 5 };
  CUdeviceptr out[2][kOut];
  uint64_t state = seed * 2862933555777941757ull + 3037000493ull;
#define NEXT(n) ((state = state * 6364136223846793005ull + 1442695040888963407ull) >> 33) % (n)
  for (int w = 0; w < 2; ++w)
    for (int i = 0; i < kOut; ++i) out[w][i] = words();
  for (int round = 0; round < 25; ++round) {
    CUdeviceptr live[2][kLive] = {{0}};
    CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    const int steps = 5 + (int)(NEXT(40));
    for (int i = 0; i < steps; ++i) {
      const uint32_t slot = (uint32_t)(NEXT(kLive)), to = (uint32_t)(NEXT(kOut)), value = (uint32_t)(NEXT(1000));
      for (int w = 0; w < 2; ++w) {
        CUstream at = w ? plain : s;
        CUdeviceptr* p = &live[w][slot];
        if (!*p) {
          CHECK(cuMemAllocAsync(p, kBytes, at));
          CHECK(cuMemsetD32Async(*p, value, kWords, at));
        } else if (value % 4 == 0) {
          CHECK(cuMemFreeAsync(*p, at));
          *p = 0;
        } else if (value % 4 == 1) {
          CHECK(cuMemcpyDtoDAsync(out[w][to], *p, kBytes, at));
        } else if (value % 4 == 2) {
          CHECK(cuMemcpyDtoDAsync(*p, out[w][to], kBytes, at));
        } else {
          launch_affine(affine, at, *p, value | 1, to, kWords);
        }
      }
    }
    CUgraph g = end(s);
    CUgraphExec x = instantiate(g, 0);
    CHECK(cuGraphLaunch(x, s));
    if (round % 2) gone(x, g);
    for (int i = 0; i < kLive; ++i) {
      if (!live[0][i]) continue; /* the last contents, outside of the graph */
      CHECK(cuMemcpyDtoDAsync(out[0][i % kOut], live[0][i], kBytes, s));
      CHECK(cuMemcpyDtoDAsync(out[1][i % kOut], live[1][i], kBytes, plain));
      CHECK(cuMemFreeAsync(live[0][i], s));
      CHECK(cuMemFreeAsync(live[1][i], plain));
    }
    if (round % 2 == 0) gone(x, g);
    CHECK(cuStreamSynchronize(s));
    CHECK(cuStreamSynchronize(plain));
    static uint32_t a[kWords], b[kWords];
    for (int i = 0; i < kOut; ++i) {
      CHECK(cuMemcpyDtoH(a, out[0][i], kBytes));
      CHECK(cuMemcpyDtoH(b, out[1][i], kBytes));
      if (memcmp(a, b, kBytes) != 0) {
        fprintf(stderr, "seed %llu, round %d: buffer %d differs\n", (unsigned long long)seed, round, i);
        exit(1);
      }
    }
    EXPECT_EQ(used(), 0);
  }
}

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "explicit";
  dev = start();
  CHECK(cuCtxGetCurrent(&ctx));
  CUmodule mod = load_kernels();
  fill = kernel(mod, "fill"), slow_fill = kernel(mod, "slow_fill"), affine = kernel(mod, "affine");
  CUstream s, plain;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&plain, CU_STREAM_NON_BLOCKING));
  if (!strcmp(what, "explicit")) {
    explicit_nodes(s);
  } else if (!strcmp(what, "capture")) {
    captured(s);
  } else if (!strcmp(what, "rules")) {
    rules(s);
  } else if (!strcmp(what, "frees")) {
    frees(s);
  } else if (!strcmp(what, "lifetimes")) {
    lifetimes(s);
  } else if (!strcmp(what, "contexts")) {
    contexts();
  } else if (!strcmp(what, "account")) {
    account(s);
  } else if (!strcmp(what, "devices")) {
    devices(s);
  } else if (!strcmp(what, "threads")) {
    threads();
  } else if (!strcmp(what, "random")) {
    random_work(s, plain, argc > 2 ? strtoull(argv[2], NULL, 10) : 1);
  } else {
    fprintf(stderr, "graph_memory: what is '%s'?\n", what);
    return 2;
  }
  return pass("graph_memory");
}
