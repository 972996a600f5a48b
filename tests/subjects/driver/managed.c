// SPDX-License-Identifier: Apache-2.0
/* Managed memory: one address for the host and the kernels, coherent. What the driver is told of it is remembered, and
 * copies, sets and graphs take it as device memory. Where the device does not map host memory: refused.
 *
 *   managed            on the suite's kernels
 *   managed two        with two GPUs: both reach it, also one that the process uses only later
 *   managed refused    the device does not map host memory
 *   managed host       a driver whose kernels are those of tests/subjects/variables.ptx */
#include <sys/wait.h>
#include "program.h"

enum { kWords = 100000, kPages = 64 };

static CUdevice dev;
static CUmodule mod;

static int has_kernels(void) {
  CUfunction f;
  return cuModuleGetFunction(&f, mod, "fill") == CUDA_SUCCESS;
}

static uint32_t* allocate(size_t bytes) {
  CUdeviceptr p = 0;
  CHECK(cuMemAllocManaged(&p, bytes, CU_MEM_ATTACH_GLOBAL));
  return (uint32_t*)(uintptr_t)p;
}
static CUdeviceptr at(const void* p) { return (CUdeviceptr)(uintptr_t)p; }

static int attribute(CUdevice_attribute which, CUdevice device) {
  int value = -1;
  CHECK(cuDeviceGetAttribute(&value, which, device));
  return value;
}

static CUmemLocation on(CUmemLocationType type, int id) {
  CUmemLocation l;
  memset(&l, 0, sizeof l);
  l.type = type;
  l.id = id;
  return l;
}

/* -- kernels and the host, in turn and at once --------------------------------------------------------------------- */

static void shared_with_kernels(void) {
  const CUfunction fill = kernel(mod, "fill"), slow_fill = kernel(mod, "slow_fill"), affine = kernel(mod, "affine"),
                   copy = kernel(mod, "copy_words");
  CUstream s;
  CUdeviceptr d;
  uint32_t* p = allocate(kWords * 4);
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&d, kWords * 4));
  for (uint32_t round = 1; round <= 5; ++round) {
    for (uint32_t i = 0; i < kWords; ++i) p[i] = round;
    launch_affine(affine, s, at(p), 3, 1, kWords); /* reads what the host wrote */
    CHECK(cuStreamSynchronize(s));
    expect_words(p, 3 * round + 1, kWords);
    launch_slow_fill(slow_fill, s, at(p), round, kWords, 3000);
    launch_copy(copy, s, d, at(p), kWords);
    CHECK(cuStreamSynchronize(s));
    expect_words(p, round, kWords);
    expect_device_words(d, round, kWords);
  }
  launch_fill(fill, NULL, at(p + 7), 99, 3); /* anywhere in it */
  CHECK(cuCtxSynchronize());
  EXPECT(p[6] == 5 && p[7] == 99 && p[9] == 99 && p[10] == 5);

  /* the host's half while a kernel writes the other: CONCURRENT_MANAGED_ACCESS */
  Gate gate;
  close_gate(&gate, s);
  launch_fill(fill, s, at(p), 1, kWords / 2);
  for (uint32_t i = kWords / 2; i < kWords; ++i) p[i] = 2;
  open_gate(&gate);
  CHECK(cuStreamSynchronize(s));
  expect_words(p, 1, kWords / 2);
  expect_words(p + kWords / 2, 2, kWords / 2);

  /* freeing waits for a kernel that uses it */
  for (uint32_t i = 0; i < 20; ++i) {
    uint32_t* q = allocate(kWords * 4);
    launch_slow_fill(slow_fill, s, at(q), i, kWords, 2000);
    launch_copy(copy, s, d, at(q), kWords);
    CHECK(cuMemFree(at(q)));
    CHECK(cuStreamQuery(s));
    expect_device_words(d, i, kWords);
  }
  CHECK(cuMemFree(d));
  CHECK(cuMemFree(at(p)));
  CHECK(cuStreamDestroy(s));
}

/* -- copies and sets: it is device memory, so asynchronous calls return ---------------------------------------------
 */

static void copied_and_set(void) {
  static uint32_t host[kWords];
  CUstream s;
  CUdeviceptr d;
  uint32_t *p = allocate(kWords * 4), *q = allocate(kWords * 4), *pinned;
  Gate gate;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&d, kWords * 4));
  CHECK(cuMemAllocHost((void**)&pinned, kWords * 4));

  memset(p, 0, kWords * 4);
  close_gate(&gate, s); /* none of these waits for the stream, or the gate would never open */
  CHECK(cuMemsetD32Async(at(p), 5, kWords, s));
  CHECK(cuMemsetD8Async(at(p), 0x11, 8, s));
  CHECK(cuMemsetD16Async(at(p + 2), 0x2222, 2, s));
  CHECK(cuMemsetD2D32Async(at(p + 100), 40, 7, 2, 3, s));
  CHECK(cuMemcpyAsync(at(q), at(p), kWords * 4, s));
  CHECK(cuMemcpyDtoDAsync(d, at(q), kWords * 4, s));
  for (int i = 0; i < kWords; ++i) host[i] = 8;
  CHECK(cuMemcpyHtoDAsync(at(p), host, 4096, s)); /* pageable memory is staged before the call returns */
  memset(host, 0, sizeof host);
  CHECK(cuMemcpyDtoHAsync(pinned, at(q), kWords * 4, s));
  EXPECT_RESULT(cuStreamQuery(s), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(p[50], 0);
  open_gate(&gate);
  CHECK(cuStreamSynchronize(s));
  expect_words(p, 8, 1024);
  expect_words(p + 1024, 5, kWords - 1024);
  expect_words(q, 0x11111111, 2);
  EXPECT_EQ(q[2], 0x22222222);
  expect_words(q + 100, 7, 2);
  expect_words(q + 102, 5, 8);
  expect_words(q + 120, 7, 2);
  EXPECT(!memcmp(q, pinned, kWords * 4));
  CHECK(cuMemcpyDtoH(host, d, kWords * 4));
  EXPECT(!memcmp(q, host, kWords * 4));

  /* synchronous, every direction */
  for (int i = 0; i < kWords; ++i) host[i] = (uint32_t)i;
  CHECK(cuMemcpyHtoD(at(p), host, sizeof host));
  EXPECT(!memcmp(p, host, sizeof host));
  CHECK(cuMemcpyDtoD(at(q), at(p), sizeof host));
  CHECK(cuMemcpyDtoD(d, at(q), sizeof host));
  memset(host, 0, sizeof host);
  CHECK(cuMemcpyDtoH(host, at(q), sizeof host));
  EXPECT(!memcmp(p, host, sizeof host));
  CHECK(cuMemsetD32(at(p), 0, kWords));
  CHECK(cuMemcpy(at(p), d, sizeof host));
  EXPECT(!memcmp(p, host, sizeof host));
  CHECK(cuMemcpy(at(p), at(host + 1), sizeof host - 4));
  EXPECT(p[0] == 1 && p[kWords - 2] == kWords - 1);

  /* rectangles and boxes, by unified type and as device memory */
  CUDA_MEMCPY2D r;
  memset(&r, 0, sizeof r);
  r.srcMemoryType = r.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  r.srcDevice = at(q), r.srcPitch = 400, r.srcXInBytes = 8, r.srcY = 1;
  r.dstDevice = at(p), r.dstPitch = 40, r.WidthInBytes = 12, r.Height = 3;
  CHECK(cuMemcpy2D(&r));
  EXPECT(p[0] == 102 && p[2] == 104 && p[10] == 202 && p[22] == 304);
  r.dstMemoryType = CU_MEMORYTYPE_HOST, r.dstHost = host, r.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  CHECK(cuMemcpy2DAsync(&r, s));
  CHECK(cuStreamSynchronize(s));
  EXPECT(host[0] == 102 && host[22] == 304);
  memset(&r, 0, sizeof r);
  r.srcMemoryType = CU_MEMORYTYPE_HOST, r.srcHost = host, r.srcPitch = 40;
  r.dstMemoryType = CU_MEMORYTYPE_DEVICE, r.dstDevice = at(q), r.dstPitch = 400, r.WidthInBytes = 12, r.Height = 3;
  close_gate(&gate, s);
  CHECK(cuMemcpy2DAsync(&r, s));
  open_gate(&gate);
  CHECK(cuStreamSynchronize(s));
  EXPECT(q[0] == 102 && q[202] == 304 && q[3] == 3);
  CUDA_MEMCPY3D b;
  memset(&b, 0, sizeof b);
  b.srcMemoryType = b.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  b.srcDevice = d, b.srcPitch = 40, b.srcHeight = 10, b.srcZ = 1;
  b.dstDevice = at(p), b.dstPitch = 8, b.dstHeight = 2, b.WidthInBytes = 8, b.Height = 2, b.Depth = 2;
  CHECK(cuMemcpy3D(&b));
  EXPECT(p[0] == 100 && p[1] == 101 && p[2] == 110 && p[4] == 200 && p[7] == 211);

  /* a byte beyond */
  EXPECT_RESULT(cuMemsetD8(at(p), 0, 128 * 4096), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyHtoD(at(p), host, 128 * 4096), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(at(p)));
  CHECK(cuMemFree(at(q)));
  EXPECT_RESULT(cuMemsetD8(at(q), 0, 16), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(d));
  CHECK(cuMemFreeHost(pinned));
  CHECK(cuStreamDestroy(s));
}

/* -- graphs -------------------------------------------------------------------------------------------------------- */

static void in_graphs(void) {
  uint32_t *p = allocate(kWords * 4), *q = allocate(kWords * 4), host[1024];
  CUgraph graph;
  CUgraphNode set, copy, in;
  CUgraphExec exec;
  CUstream s;
  CUcontext ctx;
  CHECK(cuCtxGetCurrent(&ctx));
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CUDA_MEMSET_NODE_PARAMS m;
  memset(&m, 0, sizeof m);
  m.dst = at(p), m.value = 17, m.elementSize = 4, m.width = kWords, m.height = 1;
  CUDA_MEMCPY3D c;
  memset(&c, 0, sizeof c);
  c.srcMemoryType = CU_MEMORYTYPE_DEVICE, c.srcDevice = at(p);
  c.dstMemoryType = CU_MEMORYTYPE_UNIFIED, c.dstDevice = at(q);
  c.WidthInBytes = kWords * 4, c.Height = c.Depth = 1;
  CHECK(cuGraphCreate(&graph, 0));
  CHECK(cuGraphAddMemsetNode(&set, graph, NULL, 0, &m, ctx));
  CHECK(cuGraphAddMemcpyNode(&copy, graph, &set, 1, &c, ctx));
  c.srcMemoryType = CU_MEMORYTYPE_HOST, c.srcHost = host;
  c.dstMemoryType = CU_MEMORYTYPE_DEVICE, c.dstDevice = at(p), c.WidthInBytes = sizeof host;
  CHECK(cuGraphAddMemcpyNode(&in, graph, &copy, 1, &c, ctx));
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  for (uint32_t round = 0; round < 3; ++round) {
    memset(p, 0, kWords * 4);
    memset(q, 0, kWords * 4);
    for (int i = 0; i < 1024; ++i) host[i] = round;
    CHECK(cuGraphLaunch(exec, s));
    CHECK(cuStreamSynchronize(s));
    expect_words(q, 17, kWords);
    expect_words(p, round, 1024);
    expect_words(p + 1024, 17, kWords - 1024);
  }
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));

  /* captured; what no graph holds ends the capture */
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuMemsetD32Async(at(p), 23, kWords, s));
  CHECK(cuMemcpyAsync(at(q), at(p), kWords * 4, s));
  CHECK(cuStreamEndCapture(s, &graph));
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  EXPECT_EQ(q[0], 17);
  CHECK(cuGraphLaunch(exec, s));
  CHECK(cuStreamSynchronize(s));
  expect_words(q, 23, kWords);
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));
  CUdeviceptr more = 0;
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  EXPECT_RESULT(cuMemAllocManaged(&more, 4096, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_RESULT(cuStreamEndCapture(s, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
  EXPECT_RESULT(cuMemPrefetchAsync(at(p), 4096, on(CU_MEM_LOCATION_TYPE_DEVICE, dev), 0, s),
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_RESULT(cuStreamEndCapture(s, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK(cuStreamDestroy(s));
  CHECK(cuMemFree(at(p)));
  CHECK(cuMemFree(at(q)));
}

/* -- what the driver says of it ----------------------------------------------------------------------------------- */

static void described(void) {
  uint32_t* p = allocate(5000);
  CUcontext ctx, got_ctx = NULL;
  CUdeviceptr base = 0, as_device = 0;
  void* as_host = NULL;
  unsigned type = 0;
  int ordinal = -1;
  unsigned char managed = 0, mapped = 0;
  size_t size = 0;
  unsigned long long id = 0, id2 = 0;
  const CUdeviceptr inside = at(p) + 4999;
  EXPECT_EQ(attribute(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, dev), 1);
  EXPECT_EQ(attribute(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, dev), 1);
  EXPECT_EQ(at(p) % 256, 0);
  CHECK(cuCtxGetCurrent(&ctx));
  CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside));
  EXPECT_EQ(type, CU_MEMORYTYPE_DEVICE);
  CHECK(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, inside));
  CHECK(cuPointerGetAttribute(&mapped, CU_POINTER_ATTRIBUTE_MAPPED, inside));
  EXPECT(managed == 1 && mapped == 1);
  CHECK(cuPointerGetAttribute(&as_device, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, inside));
  CHECK(cuPointerGetAttribute(&as_host, CU_POINTER_ATTRIBUTE_HOST_POINTER, inside));
  EXPECT(as_device == inside && at(as_host) == inside);
  CHECK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, inside));
  EXPECT_EQ(ordinal, dev);
  CHECK(cuPointerGetAttribute(&got_ctx, CU_POINTER_ATTRIBUTE_CONTEXT, inside));
  EXPECT(got_ctx == ctx);
  CHECK(cuPointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside));
  CHECK(cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, inside));
  EXPECT(base == at(p) && size == 5000);
  CHECK(cuMemGetAddressRange(&base, &size, inside));
  EXPECT(base == at(p) && size == 5000);
  CHECK(cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, inside));
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
  void* data[] = {&managed, &type};
  managed = type = 0;
  CHECK(cuPointerGetAttributes(2, attributes, data, inside));
  EXPECT(managed == 1 && type == CU_MEMORYTYPE_DEVICE);

  /* it is neither host memory nor a stream's */
  EXPECT_RESULT(cuMemFreeHost(p), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemHostGetDevicePointer(&as_device, p, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemFreeAsync(at(p), NULL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemFree(at(p) + 512), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(at(p)));
  EXPECT_RESULT(cuMemFree(at(p)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at(p)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, at(p)), CUDA_ERROR_INVALID_VALUE);
  managed = 1;
  CHECK(cuPointerGetAttributes(2, attributes, data, at(p)));
  EXPECT(managed == 0 && type == 0);
  p = allocate(5000);
  CHECK(cuPointerGetAttribute(&id2, CU_POINTER_ATTRIBUTE_BUFFER_ID, at(p)));
  EXPECT(id != id2);
  CHECK(cuMemFree(at(p)));

  /* pinned memory is none of it, and cuMemFree is not for it */
  CHECK(cuMemAllocHost((void**)&p, 4096));
  CHECK(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, at(p)));
  EXPECT_EQ(managed, 0);
  EXPECT_RESULT(cuMemFree(at(p)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAdvise(at(p), 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, on(CU_MEM_LOCATION_TYPE_HOST, 0)),
                CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFreeHost(p));

  EXPECT_RESULT(cuMemAllocManaged(&base, 0, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAllocManaged(&base, 4096, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAllocManaged(&base, 4096, CU_MEM_ATTACH_SINGLE), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAllocManaged(&base, 4096, CU_MEM_ATTACH_GLOBAL | CU_MEM_ATTACH_HOST), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAllocManaged(NULL, 4096, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAllocManaged(&base, (size_t)1 << 45, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(cuMemAllocManaged(&base, 4096, CU_MEM_ATTACH_HOST));
  CHECK(cuMemFree(base));
}

/* -- advice and prefetches ---------------------------------------------------------------------------------------- */

static int said(CUmem_range_attribute which, const char* from, size_t bytes) {
  int value = 77;
  CHECK(cuMemRangeGetAttribute(&value, sizeof value, which, at(from), bytes));
  return value;
}

static void advised(void) {
  enum { kPage = 4096 };
  char* p = (char*)allocate(kPages * kPage);
  const CUmemLocation cpu = on(CU_MEM_LOCATION_TYPE_HOST, 5), gpu = on(CU_MEM_LOCATION_TYPE_DEVICE, dev),
                      node = on(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0);
  CUstream s;
  int list[4], one = 0;
  CHECK(cuStreamCreate(&s, 0));

  /* by page, and what does not hold everywhere does not hold */
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, p, kPages * kPage), 0);
  CHECK(cuMemAdvise(at(p), kPages * kPage, CU_MEM_ADVISE_SET_READ_MOSTLY, on(CU_MEM_LOCATION_TYPE_INVALID, 0)));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, p, kPages * kPage), 1);
  CHECK(cuMemAdvise(at(p) + 8 * kPage + 9, 1, CU_MEM_ADVISE_UNSET_READ_MOSTLY, cpu));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, p, kPages * kPage), 0);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, p, 8 * kPage), 1);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, p, 8 * kPage + 1), 0);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, p + 8 * kPage, kPage), 0);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, p + 9 * kPage, (kPages - 9) * kPage), 1);

  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, p, kPage), CU_DEVICE_INVALID);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, p, kPage), CU_MEM_LOCATION_TYPE_INVALID);
  CHECK(cuMemAdvise(at(p), 4 * kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, cpu));
  CHECK(cuMemAdvise(at(p) + 4 * kPage, 4 * kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, gpu));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, p, 4 * kPage), CU_DEVICE_CPU);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, p, 4 * kPage), CU_MEM_LOCATION_TYPE_HOST);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, p + 5 * kPage, kPage), dev);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, p + 5 * kPage, kPage), CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID, p + 5 * kPage, kPage), dev);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, p, 5 * kPage), CU_DEVICE_INVALID);
  CHECK(cuMemAdvise(at(p), kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, node));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, p, kPage), CU_MEM_LOCATION_TYPE_HOST_NUMA);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID, p, kPage), 0);
  CHECK(cuMemAdvise(at(p), kPages * kPage, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, gpu));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, p, kPages * kPage), CU_DEVICE_INVALID);

  CHECK(cuMemAdvise(at(p), 3 * kPage, CU_MEM_ADVISE_SET_ACCESSED_BY, gpu));
  CHECK(cuMemAdvise(at(p), 2 * kPage, CU_MEM_ADVISE_SET_ACCESSED_BY, cpu));
  CHECK(cuMemRangeGetAttribute(list, sizeof list, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, at(p), 2 * kPage));
  EXPECT((list[0] == dev && list[1] == CU_DEVICE_CPU) || (list[1] == dev && list[0] == CU_DEVICE_CPU));
  EXPECT(list[2] == CU_DEVICE_INVALID && list[3] == CU_DEVICE_INVALID);
  CHECK(cuMemRangeGetAttribute(list, sizeof list, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, at(p), 3 * kPage));
  EXPECT(list[0] == dev && list[1] == CU_DEVICE_INVALID);
  CHECK(cuMemRangeGetAttribute(list, 4, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, at(p), 2 * kPage));
  CHECK(cuMemAdvise(at(p), kPages * kPage, CU_MEM_ADVISE_UNSET_ACCESSED_BY, gpu));
  CHECK(cuMemRangeGetAttribute(list, 8, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, at(p), 2 * kPage));
  EXPECT(list[0] == CU_DEVICE_CPU && list[1] == CU_DEVICE_INVALID);

  /* prefetches change nothing else */
  memset(p, 0x5a, kPages * kPage);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p, kPage), CU_DEVICE_INVALID);
  CHECK(cuMemPrefetchAsync(at(p), 10 * kPage, gpu, 0, s));
  CHECK(cuMemPrefetchAsync(at(p) + 2 * kPage, kPage, cpu, 0, NULL));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p, 2 * kPage), dev);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE, p, 2 * kPage), CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID, p, 2 * kPage), dev);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p + 2 * kPage, kPage), CU_DEVICE_CPU);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p, 3 * kPage), CU_DEVICE_INVALID);
  CHECK(cuMemPrefetchAsync(at(p), kPage, on(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0), 0, s));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE, p, kPage), CU_MEM_LOCATION_TYPE_HOST_NUMA);
  CUdeviceptr starts[] = {at(p), at(p) + 8 * kPage, at(p) + 16 * kPage};
  size_t sizes[] = {kPage, kPage, kPage}, firsts[] = {0, 2};
  CUmemLocation places[] = {cpu, gpu};
  CHECK(cuMemPrefetchBatchAsync(starts, sizes, 3, places, firsts, 2, 0, s));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p, kPage), CU_DEVICE_CPU);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p + 8 * kPage, kPage), CU_DEVICE_CPU);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p + 16 * kPage, kPage), dev);
  EXPECT_RESULT(cuMemPrefetchBatchAsync(starts, sizes, 3, places, firsts, 2, 0, NULL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemPrefetchBatchAsync(starts, sizes, 3, places, firsts, 2, 1, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemPrefetchBatchAsync(starts, sizes, 2, places, firsts, 2, 0, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemPrefetchBatchAsync(starts, sizes, 3, places, firsts + 1, 1, 0, s), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemDiscardAndPrefetchBatchAsync(starts + 1, sizes, 1, places + 1, firsts, 1, 0, s));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p + 8 * kPage, kPage), dev);
  CHECK(cuMemDiscardBatchAsync(starts, sizes, 1, 0, s));
  sizes[2] = kPages * kPage;
  EXPECT_RESULT(cuMemDiscardBatchAsync(starts, sizes, 3, 0, s), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuStreamSynchronize(s));
  for (size_t i = 20 * kPage; i < kPages * kPage; ++i) EXPECT_EQ(p[i], 0x5a);

  /* several at once */
  int mostly = 7, preferred = 7;
  void* data[] = {&mostly, &preferred, list};
  size_t bytes[] = {4, 4, 8};
  CUmem_range_attribute attributes[] = {CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION,
                                        CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY};
  CHECK(cuMemRangeGetAttributes(data, bytes, attributes, 3, at(p), kPage));
  EXPECT(mostly == 1 && preferred == CU_DEVICE_INVALID && list[0] == CU_DEVICE_CPU);

  /* what is wrong by its arguments */
  EXPECT_RESULT(cuMemAdvise(at(p), kPages * kPage + 1, CU_MEM_ADVISE_SET_READ_MOSTLY, cpu), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAdvise(at(p), 0, CU_MEM_ADVISE_SET_READ_MOSTLY, cpu), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAdvise(at(&one), 4, CU_MEM_ADVISE_SET_READ_MOSTLY, cpu), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAdvise(at(p), kPage, (CUmem_advise)77, cpu), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAdvise(at(p), kPage, CU_MEM_ADVISE_SET_ACCESSED_BY, node), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAdvise(at(p), kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, on(CU_MEM_LOCATION_TYPE_DEVICE, 99)),
                CUDA_ERROR_INVALID_DEVICE);
  EXPECT_RESULT(cuMemPrefetchAsync(at(p), kPages * kPage + 1, gpu, 0, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemPrefetchAsync(at(p), kPage, on(CU_MEM_LOCATION_TYPE_DEVICE, 99), 0, s), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_RESULT(cuMemPrefetchAsync(at(p), kPage, gpu, 1, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemPrefetchAsync(at(p), kPage, gpu, 0, (CUstream)(uintptr_t)0xdeadbeef), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuMemRangeGetAttribute(&one, 8, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, at(p), kPage),
                CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemRangeGetAttribute(&one, 4, (CUmem_range_attribute)77, at(p), kPage), CUDA_ERROR_INVALID_VALUE);

  CHECK(cuStreamAttachMemAsync(s, at(p), 0, CU_MEM_ATTACH_SINGLE));
  CHECK(cuStreamAttachMemAsync(s, at(p), kPages * kPage, CU_MEM_ATTACH_HOST));
  CHECK(cuStreamAttachMemAsync(NULL, at(p), 0, CU_MEM_ATTACH_GLOBAL));
  EXPECT(cuStreamAttachMemAsync(NULL, at(p), 0, CU_MEM_ATTACH_SINGLE) != CUDA_SUCCESS);
  EXPECT_RESULT(cuStreamAttachMemAsync(s, at(p), kPage, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuStreamAttachMemAsync(s, at(&one), 0, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuStreamAttachMemAsync(s, at(p), 0, 3), CUDA_ERROR_INVALID_VALUE);

  CHECK(cuMemFree(at(p)));
  EXPECT_RESULT(cuMemAdvise(at(p), kPage, CU_MEM_ADVISE_SET_READ_MOSTLY, cpu), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemPrefetchAsync(at(p), kPage, gpu, 0, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemRangeGetAttribute(&one, 4, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, at(p), kPage),
                CUDA_ERROR_INVALID_VALUE);
  p = (char*)allocate(kPage); /* advice goes with the memory */
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p, kPage), CU_DEVICE_INVALID);
  CHECK(cuMemFree(at(p)));
  CHECK(cuStreamDestroy(s));
}

/* The entry points of before CUDA 12.2, which name a device. */
#undef cuMemAdvise
#undef cuMemPrefetchAsync
CUresult cuMemAdvise(CUdeviceptr, size_t, CUmem_advise, CUdevice);
CUresult cuMemPrefetchAsync(CUdeviceptr, size_t, CUdevice, CUstream);

static void advised_as_before(void) {
  char* p = (char*)allocate(8192);
  CHECK(cuMemAdvise(at(p), 8192, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, p, 8192), CU_DEVICE_CPU);
  CHECK(cuMemAdvise(at(p), 8192, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, dev));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, p, 8192), dev);
  EXPECT_RESULT(cuMemAdvise(at(p), 8192, CU_MEM_ADVISE_SET_ACCESSED_BY, 99), CUDA_ERROR_INVALID_DEVICE);
  CHECK(cuMemPrefetchAsync(at(p), 4096, dev, NULL));
  CHECK(cuMemPrefetchAsync(at(p + 4096), 4096, CU_DEVICE_CPU, NULL));
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p, 4096), dev);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p + 4096, 4096), CU_DEVICE_CPU);
  EXPECT_RESULT(cuMemPrefetchAsync(at(p), 4096, 99, NULL), CUDA_ERROR_INVALID_DEVICE);
  CHECK(cuMemFree(at(p)));
}

/* -- contexts, processes, GPUs ------------------------------------------------------------------------------------- */

static void contexts_and_processes(void) {
  CUcontext ctx, mine;
  uint32_t *p = allocate(4096), *q;
  unsigned type = 0;
  CHECK(cuCtxGetCurrent(&mine));
  CHECK(cuCtxCreate(&ctx, NULL, 0, dev));
  q = allocate(3 << 20);
  q[0] = 4;
  CHECK(cuMemsetD32(at(p), 6, 4)); /* of the other context */
  CHECK(cuCtxSynchronize());
  EXPECT_EQ(p[3], 6);
  CHECK(cuCtxDestroy(ctx)); /* takes its memory along */
  CHECK(cuCtxSetCurrent(mine));
  EXPECT_RESULT(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at(q)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemFree(at(q)), CUDA_ERROR_INVALID_VALUE);

  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    CUdeviceptr more;
    if (cuMemAllocManaged(&more, 4096, CU_MEM_ATTACH_GLOBAL) != CUDA_ERROR_NOT_INITIALIZED) _exit(10);
    if (cuMemFree(at(p)) != CUDA_ERROR_NOT_INITIALIZED) _exit(11);
    _exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  CHECK(cuMemsetD32(at(p), 9, 1024));
  CHECK(cuCtxSynchronize());
  expect_words(p, 9, 1024);
  CHECK(cuMemFree(at(p)));
}

static void on_two_gpus(void) {
  CUcontext ctx[2];
  CUdeviceptr d[2];
  CUstream s[2];
  uint32_t *early, *late, *other, *pinned;
  int count = 0, ordinal = -1;
  CHECK(cuDeviceGetCount(&count));
  EXPECT(count >= 2);
  CHECK(cuCtxGetCurrent(&ctx[0]));
  early = allocate(kWords * 4); /* the process has not used GPU 1 yet */
  CHECK(cuMemAllocHost((void**)&pinned, 4096));
  for (int i = 0; i < kWords; ++i) early[i] = 3;
  CHECK(cuDevicePrimaryCtxRetain(&ctx[1], 1));
  CHECK(cuCtxSetCurrent(ctx[1]));
  CUmodule mods[2] = {mod, load_kernels()};
  other = allocate(kWords * 4);
  CHECK(cuCtxSetCurrent(ctx[0]));
  late = allocate(kWords * 4);
  memset(other, 0, kWords * 4);
  for (int i = 0; i < 2; ++i) {
    CHECK(cuCtxSetCurrent(ctx[i]));
    CHECK(cuStreamCreate(&s[i], CU_STREAM_NON_BLOCKING));
    CHECK(cuMemAlloc(&d[i], kWords * 4));
  }
  CHECK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at(other)));
  EXPECT_EQ(ordinal, 1);

  /* kernels of both, in turn */
  for (uint32_t round = 0; round < 4; ++round) {
    const int g = 1 - (int)(round & 1);
    CHECK(cuCtxSetCurrent(ctx[g]));
    launch_affine(kernel(mods[g], "affine"), s[g], at(early), 2, 1, kWords);
    launch_copy(kernel(mods[g], "copy_words"), s[g], at(late), at(early), kWords);
    launch_copy(kernel(mods[g], "copy_words"), s[g], at(other), at(late), kWords);
    CHECK(cuStreamSynchronize(s[g]));
    expect_words(early, (4u << (round + 1)) - 1, kWords);
    expect_words(late, early[0], kWords);
    expect_words(other, early[0], kWords);
  }
  /* copies and sets by both, asynchronously */
  Gate gate;
  for (int g = 0; g < 2; ++g) {
    CHECK(cuCtxSetCurrent(ctx[g]));
    close_gate(&gate, s[g]);
    CHECK(cuMemsetD32Async(at(early), 40 + (uint32_t)g, kWords, s[g]));
    CHECK(cuMemsetD32Async(at(other), 50 + (uint32_t)g, kWords, s[g]));
    CHECK(cuMemcpyDtoDAsync(at(late), at(other), kWords * 4, s[g]));
    CHECK(cuMemcpyAsync(d[g], at(early), kWords * 4, s[g]));
    CHECK(cuMemcpyAsync(at(other), d[g], 4096, s[g]));
    open_gate(&gate);
    CHECK(cuStreamSynchronize(s[g]));
    expect_words(late, 50 + (uint32_t)g, kWords);
    expect_words(other, 40 + (uint32_t)g, 1024);
    expect_words(other + 1024, 50 + (uint32_t)g, kWords - 1024);
    expect_device_words(d[g], 40 + (uint32_t)g, kWords);
    CHECK(cuMemcpy(at(early), d[1 - g], kWords * 4)); /* of the other GPU */
    EXPECT_EQ(early[0], g == 0 ? early[1] : 40);
    uint32_t words[64], back[64];
    for (int i = 0; i < 64; ++i) words[i] = (uint32_t)i;
    CHECK(cuMemcpyHtoD(at(other), words, sizeof words));
    CHECK(cuMemcpyDtoH(back, at(other), sizeof back));
    EXPECT(!memcmp(words, back, sizeof words));
    /* pinned memory of GPU 0 is host memory to GPU 1 */
    CHECK(cuMemcpy(at(pinned), at(words), sizeof words));
    CHECK(cuMemcpy(at(early), at(pinned), sizeof words));
    CHECK(cuMemcpy(at(back), at(pinned), sizeof words));
    EXPECT(!memcmp(words, back, sizeof words) && !memcmp(words, early, sizeof words));
    CUgraph graph;
    CUgraphExec exec;
    CHECK(cuStreamBeginCapture(s[g], CU_STREAM_CAPTURE_MODE_GLOBAL));
    CHECK(cuMemsetD32Async(at(early), 60 + (uint32_t)g, kWords, s[g]));
    CHECK(cuMemcpyAsync(at(other), at(early), kWords * 4, s[g]));
    launch_affine(kernel(mods[g], "affine"), s[g], at(other), 1, 1, kWords);
    CHECK(cuStreamEndCapture(s[g], &graph));
    CHECK(cuGraphInstantiate(&exec, graph, 0));
    CHECK(cuGraphLaunch(exec, s[g]));
    CHECK(cuStreamSynchronize(s[g]));
    expect_words(other, 61 + (uint32_t)g, kWords);
    CHECK(cuGraphExecDestroy(exec));
    CHECK(cuGraphDestroy(graph));
  }
  /* advice names both */
  int list[3];
  for (int g = 0; g < 2; ++g)
    CHECK(cuMemAdvise_v2(at(early), 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, on(CU_MEM_LOCATION_TYPE_DEVICE, g)));
  CHECK(cuMemRangeGetAttribute(list, sizeof list, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, at(early), 4096));
  EXPECT(list[0] + list[1] == 1 && list[2] == CU_DEVICE_INVALID);

  /* freeing waits for both, whoever frees; afterwards no kernel of either reaches it */
  launch_slow_fill(kernel(mods[1], "slow_fill"), s[1], at(early), 71, kWords, 20000);
  launch_copy(kernel(mods[1], "copy_words"), s[1], d[1], at(early), kWords);
  CHECK(cuCtxSetCurrent(ctx[0]));
  CHECK(cuMemFree(at(early)));
  CHECK(cuStreamQuery(s[1]));
  expect_device_words(d[1], 71, kWords);
  early = allocate(kWords * 4); /* the same place again */
  CHECK(cuMemsetD32(at(early), 1, kWords));
  CHECK(cuMemFree(at(early)));
  CHECK(cuMemFree(at(late)));
  CHECK(cuMemFree(at(other)));
  CHECK(cuMemFreeHost(pinned));
  CHECK(cuCtxSetCurrent(ctx[1]));
  launch_fill(kernel(mods[1], "fill"), s[1], at(early), 1, 4);
  EXPECT_RESULT(cuStreamSynchronize(s[1]), CUDA_ERROR_ILLEGAL_ADDRESS);
}

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "";
  dev = start();
  mod = load_kernels();
  if (!strcmp(what, "refused")) {
    CUdeviceptr p = 0;
    EXPECT_EQ(attribute(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, dev), 0);
    EXPECT_EQ(attribute(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, dev), 0);
    EXPECT_RESULT(cuMemAllocManaged(&p, 4096, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_NOT_SUPPORTED);
    CHECK(cuMemAlloc(&p, 4096)); /* and no harm */
    CHECK(cuMemFree(p));
    return pass("managed");
  }
  if (!strcmp(what, "two")) {
    on_two_gpus();
    return pass("managed");
  }
  if (has_kernels()) {
    shared_with_kernels();
  } else { /* *p = counter, which is 5 */
    uint32_t* p = allocate(3 << 20);
    const CUdeviceptr word = at(p + 1024);
    void* params[] = {(void*)&word};
    memset(p, 0, 3 << 20);
    CHECK(launch1(kernel(mod, "peek"), NULL, params));
    CHECK(cuCtxSynchronize());
    EXPECT(p[1023] == 0 && p[1024] == 5 && p[1025] == 0);
    CHECK(cuMemFree(at(p)));
  }
  copied_and_set();
  in_graphs();
  described();
  advised();
  advised_as_before();
  contexts_and_processes();
  return pass("managed");
}
