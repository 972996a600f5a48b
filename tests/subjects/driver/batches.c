// SPDX-License-Identifier: Apache-2.0
/* Batches of copies, and 3D copies between contexts: what arrives, in which order, and that nothing of a batch is sent
 * when one of it is wrong. */
#include "program.h"

/* cuda.h gives the plain names to version 2, which says no index. */
CUresult first_batch(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, size_t*,
                     CUstream) __asm__("cuMemcpyBatchAsync");
CUresult first_batch_3d(size_t, CUDA_MEMCPY3D_BATCH_OP*, size_t*, unsigned long long,
                        CUstream) __asm__("cuMemcpy3DBatchAsync");
CUresult batch_ptsz(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t,
                    CUstream) __asm__("cuMemcpyBatchAsync_v2_ptsz");

enum { kBytes = 1 << 20 };
#define NO_COPY ((size_t)-1)
#define ADDRESS(p) ((CUdeviceptr)(uintptr_t)(p))

static CUstream s;
static CUdeviceptr d, d2;
static uint8_t *pinned, *pageable, *back;

static CUmemcpyAttributes order(CUmemcpySrcAccessOrder o) {
  CUmemcpyAttributes a;
  memset(&a, 0, sizeof a);
  a.srcAccessOrder = o;
  return a;
}

static CUresult one(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUmemcpySrcAccessOrder o, CUstream stream) {
  CUmemcpyAttributes a = order(o);
  size_t zero = 0;
  return cuMemcpyBatchAsync(&to, &from, &bytes, 1, &a, &zero, 1, stream);
}

static void pattern(uint8_t* p, size_t bytes, unsigned seed) {
  for (size_t i = 0; i < bytes; ++i) p[i] = (uint8_t)(i * 7 + seed + (i >> 8));
}

static void runs(void) {
  /* in pieces that do not depend on each other: pageable and pinned up, on the device, down */
  CUdeviceptr to[] = {d, d + 500000, d2 + 16, ADDRESS(back), ADDRESS(back + 300000), d2 + 900000};
  CUdeviceptr from[] = {ADDRESS(pageable), ADDRESS(pinned), d + 700001, d + 800000, ADDRESS(pageable + 5), d};
  size_t sizes[] = {400001, 100000, 50000, 100000, 1000, 0};
  CUmemcpyAttributes attrs[] = {order(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM), order(CU_MEMCPY_SRC_ACCESS_ORDER_ANY),
                                order(CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL)};
  size_t firsts[] = {0, 2, 5}, where = 77;
  attrs[1].flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  pattern(pageable, kBytes, 1);
  pattern(pinned, kBytes, 2);
  CHECK(cuMemsetD8Async(d, 0x33, kBytes, s));
  CHECK(cuMemsetD8Async(d2, 0x44, kBytes, s));
  CHECK(first_batch(to, from, sizes, 6, attrs, firsts, 3, &where, s));
  EXPECT_EQ(where, 77);        /* there is nothing to say */
  memset(pageable, 0, 400001); /* it was taken; but for the last one, which ANY lets be read later */
  CHECK(cuStreamSynchronize(s));
  uint8_t* got = malloc(kBytes);
  CHECK(cuMemcpyDtoH(got, d, kBytes));
  for (size_t i = 0; i < kBytes; ++i) {
    const uint8_t up = (uint8_t)(i * 7 + 1 + (i >> 8)), of_pinned = pinned[i < 500000 ? 0 : (i - 500000) % kBytes];
    const uint8_t wanted = i < 400001 ? up : i >= 500000 && i < 600000 ? of_pinned : 0x33;
    EXPECT_EQ(got[i], wanted);
  }
  CHECK(cuMemcpyDtoH(got, d2, kBytes));
  for (size_t i = 0; i < kBytes; ++i) EXPECT_EQ(got[i], i >= 16 && i < 50016 ? 0x33 : 0x44);
  for (size_t i = 0; i < 100000; ++i) EXPECT_EQ(back[i], 0x33);
  free(got);
}

/* The batch as a whole is in the stream's order; a source that is read during the call is free when it returns, also
 * where the stream waits for something that only the caller can give. */
static void in_order(void) {
  Gate gate;
  CHECK(cuMemsetD8Async(d, 1, 4096, s));
  CHECK(cuStreamSynchronize(s));
  memset(pinned, 5, 4096);
  close_gate(&gate, s);
  CHECK(cuMemsetD8Async(d, 2, 4096, s));
  CHECK(one(d2, d, 4096, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, s));
  CHECK(one(d2 + 8192, ADDRESS(pinned), 4096, CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL, s));
  memset(pinned, 6, 4096); /* too late to be seen */
  CHECK(one(d2 + 16384, ADDRESS(pinned), 4096, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, s));
  CHECK(cuMemsetD8Async(d, 3, 4096, s));
  EXPECT_RESULT(cuStreamQuery(s), CUDA_ERROR_NOT_READY);
  open_gate(&gate);
  CHECK(cuStreamSynchronize(s));
  expect_device_words(d2, 0x02020202, 1024);
  expect_device_words(d2 + 8192, 0x05050505, 1024);
  expect_device_words(d2 + 16384, 0x06060606, 1024);
  expect_device_words(d, 0x03030303, 1024);
  /* from device memory it has been read, because the stream has come so far */
  CHECK(one(d2, d, 4096, CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL, s));
  CHECK(cuStreamQuery(s));
  expect_device_words(d2, 0x03030303, 1024);
}

static void wrong(void) {
  CUdeviceptr to[] = {d, d + 4096, d + 8192}, from[] = {d2, d2 + 4096, d2 + 8192};
  size_t sizes[] = {4096, 4096, 4096}, firsts[] = {0, 1}, where;
  CUmemcpyAttributes attrs[] = {order(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM), order(CU_MEMCPY_SRC_ACCESS_ORDER_ANY)};
  CUdeviceptr keep;
  CHECK(cuMemsetD8(d, 0x11, 16384));
  CHECK(cuMemsetD8(d2, 0x22, 16384));
#define BAD(call, index)                             \
  do {                                               \
    where = 55;                                      \
    EXPECT_RESULT(call, CUDA_ERROR_INVALID_VALUE);   \
    EXPECT_EQ((long long)where, (long long)(index)); \
  } while (0)
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 2, &where, NULL), NO_COPY); /* the legacy stream */
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 2, &where, CU_STREAM_LEGACY), NO_COPY);
  BAD(first_batch(to, from, sizes, 0, attrs, firsts, 2, &where, s), NO_COPY);
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 0, &where, s), NO_COPY);
  BAD(first_batch(to, from, sizes, 1, attrs, firsts, 2, &where, s), NO_COPY); /* more sets than copies */
  firsts[0] = 1, firsts[1] = 2;
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 2, &where, s), NO_COPY);
  firsts[0] = 0, firsts[1] = 0;
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 2, &where, s), NO_COPY);
  firsts[1] = 3;
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 2, &where, s), NO_COPY);
  firsts[1] = 1;
  attrs[1].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_INVALID;
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 2, &where, s), 1);
  attrs[1].srcAccessOrder = (CUmemcpySrcAccessOrder)4;
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 2, &where, s), 1);
  attrs[1].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_ANY, attrs[1].flags = 2;
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 2, &where, s), 1);
  attrs[1].flags = 0;
  keep = to[2], to[2] = 0;
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 2, &where, s), 2);
  to[2] = keep;
  keep = from[1], from[1] = d2 + kBytes - 4095;
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 2, &where, s), 1);
  from[1] = keep;
  sizes[2] = kBytes;
  BAD(first_batch(to, from, sizes, 3, attrs, firsts, 2, &where, s), 2);
  EXPECT_RESULT(first_batch(to, from, sizes, 3, attrs, firsts, 2, NULL, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyBatchAsync(to, from, sizes, 3, attrs, firsts, 2, s), CUDA_ERROR_INVALID_VALUE);
  sizes[2] = 4096;
  EXPECT_RESULT(cuMemcpyBatchAsync(NULL, from, sizes, 3, attrs, firsts, 2, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyBatchAsync(to, NULL, sizes, 3, attrs, firsts, 2, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyBatchAsync(to, from, NULL, 3, attrs, firsts, 2, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyBatchAsync(to, from, sizes, 3, NULL, firsts, 2, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyBatchAsync(to, from, sizes, 3, attrs, NULL, 2, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyBatchAsync(to, from, sizes, 3, attrs, firsts, 2, (CUstream)d), CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuCtxSynchronize());
  expect_device_words(d, 0x11111111, 4096); /* nothing was sent, also of what was right */
  CHECK(cuMemcpyBatchAsync(to, from, sizes, 3, attrs, firsts, 2, s));
  CHECK(cuStreamSynchronize(s));
  expect_device_words(d, 0x22222222, 3072);
  expect_device_words(d + 12288, 0x11111111, 1024);
  CHECK(cuMemsetD8(d, 0x11, 16384)); /* in this form a null stream is the thread's own, which a batch may have */
  CHECK(cuStreamSynchronize(NULL));
  CHECK(batch_ptsz(to, from, sizes, 3, attrs, firsts, 2, NULL));
  CHECK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
  expect_device_words(d, 0x22222222, 3072);
}

static void captured(void) {
  CUgraph graph;
  CUgraphExec exec;
  CUdeviceptr to[] = {d, d + 4096}, from[] = {d2, ADDRESS(pinned)};
  size_t sizes[] = {4096, 4096}, zero = 0, nodes = 0;
  CUmemcpyAttributes a = order(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
  CHECK(cuMemsetD8(d, 0, 8192));
  CHECK(cuStreamSynchronize(NULL));
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuMemcpyBatchAsync(to, from, sizes, 2, &a, &zero, 1, s));
  EXPECT_RESULT(one(d, ADDRESS(pinned), 4096, CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL, s), CUDA_ERROR_NOT_SUPPORTED);
  CHECK(cuStreamEndCapture(s, &graph));
  CHECK(cuGraphGetNodes(graph, NULL, &nodes));
  EXPECT_EQ(nodes, 2);
  expect_device_words(d, 0, 2048);
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  memset(pinned, 9, 4096);
  CHECK(cuMemsetD8(d2, 8, 4096));
  CHECK(cuStreamSynchronize(NULL));
  CHECK(cuGraphLaunch(exec, s));
  CHECK(cuStreamSynchronize(s));
  expect_device_words(d, 0x08080808, 1024);
  expect_device_words(d + 4096, 0x09090909, 1024);
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));
}

static CUmemcpy3DOperand at(CUdeviceptr p, size_t row, size_t layer) {
  CUmemcpy3DOperand o;
  memset(&o, 0, sizeof o);
  o.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
  o.op.ptr.ptr = p, o.op.ptr.rowLength = row, o.op.ptr.layerHeight = layer;
  return o;
}

static CUmemcpy3DOperand in(CUarray array, size_t x, size_t y) {
  CUmemcpy3DOperand o;
  memset(&o, 0, sizeof o);
  o.type = CU_MEMCPY_OPERAND_TYPE_ARRAY;
  o.op.array.array = array, o.op.array.offset.x = x, o.op.array.offset.y = y;
  return o;
}

static CUDA_MEMCPY3D_BATCH_OP box(CUmemcpy3DOperand to, CUmemcpy3DOperand from, size_t w, size_t h, size_t depth) {
  CUDA_MEMCPY3D_BATCH_OP op;
  memset(&op, 0, sizeof op);
  op.dst = to, op.src = from;
  op.extent.width = w, op.extent.height = h, op.extent.depth = depth;
  op.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  return op;
}

static void boxes(void) {
  CUarray floats, others;
  CUDA_ARRAY_DESCRIPTOR shape = {.Width = 64, .Height = 16, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
  size_t where = 77;
  CHECK(cuArrayCreate(&floats, &shape));
  shape.Format = CU_AD_FORMAT_UNSIGNED_INT8;
  CHECK(cuArrayCreate(&others, &shape));
  pattern(pinned, kBytes, 3);
  CHECK(cuMemcpyHtoD(d2, pinned, kBytes));
  CHECK(cuMemsetD8(d, 0, kBytes));
  CHECK(cuStreamSynchronize(NULL));
  /* 10 x 4 x 3 bytes out of rows of 100 and layers of 8 rows, packed, and the same the other way round at d + 1000;
   * words into an array, in elements; the host's own memory */
  CUDA_MEMCPY3D_BATCH_OP ops[] = {
      box(at(d, 0, 0), at(d2, 100, 8), 10, 4, 3),
      box(at(d + 1000, 100, 8), at(d2 + 5000, 0, 0), 10, 4, 3),
      box(in(floats, 8, 2), at(d2 + 8192, 32, 0), 16, 4, 1),
      box(at(ADDRESS(back), 0, 0), at(d2 + 7, 50, 0), 20, 5, 1),
  };
  CHECK(first_batch_3d(4, ops, &where, 0, s));
  EXPECT_EQ(where, 77);
  /* and out of the array again, behind it: another batch */
  ops[0] = box(at(d + 20000, 0, 0), in(floats, 8, 2), 16, 4, 1);
  CHECK(cuMemcpy3DBatchAsync(1, ops, 0, s));
  CHECK(cuStreamSynchronize(s));
  uint8_t* got = malloc(65536);
  CHECK(cuMemcpyDtoH(got, d, 65536));
  for (size_t z = 0; z < 3; ++z)
    for (size_t y = 0; y < 4; ++y)
      for (size_t x = 0; x < 10; ++x) {
        EXPECT_EQ(got[(z * 4 + y) * 10 + x], pinned[(z * 8 + y) * 100 + x]);
        EXPECT_EQ(got[1000 + (z * 8 + y) * 100 + x], pinned[5000 + (z * 4 + y) * 10 + x]);
      }
  EXPECT_EQ(got[120], 0); /* and not a byte more */
  EXPECT_EQ(got[1010], 0);
  for (size_t y = 0; y < 4; ++y)
    for (size_t x = 0; x < 64; ++x) EXPECT_EQ(got[20000 + y * 64 + x], pinned[8192 + y * 128 + x]);
  for (size_t y = 0; y < 5; ++y)
    for (size_t x = 0; x < 20; ++x) EXPECT_EQ(back[y * 20 + x], pinned[7 + y * 50 + x]);

  /* wrong ones, each behind a right one that must not be sent */
  CHECK(cuMemsetD8(d, 0x11, 4096));
  CHECK(cuStreamSynchronize(NULL));
  const CUDA_MEMCPY3D_BATCH_OP good = box(at(d, 0, 0), at(d2, 0, 0), 64, 4, 1);
  CUDA_MEMCPY3D_BATCH_OP bad[] = {box(at(d, 0, 0), at(d2, 0, 0), 0, 1, 1),
                                  box(at(d, 0, 0), at(d2, 0, 0), 1, 0, 1),
                                  box(at(d, 0, 0), at(d2, 0, 0), 1, 1, 0),
                                  box(at(d, 9, 0), at(d2, 0, 0), 10, 1, 1),
                                  box(at(d, 0, 0), at(d2, 0, 3), 10, 4, 1),
                                  box(at(0, 0, 0), at(d2, 0, 0), 10, 4, 1),
                                  box(at(d, 0, 0), at(d2, 1024, 0), 10, 1025, 1),
                                  box(at(d, 0, 0), at(d2, 0, 0), kBytes, 2, 1),
                                  box(at(d, 0, 0), in(floats, 60, 0), 5, 1, 1),
                                  box(in(floats, 0, 15), at(d2, 0, 0), 4, 2, 1),
                                  box(in(others, 0, 0), in(floats, 0, 0), 4, 1, 1),
                                  box(in((CUarray)d, 0, 0), at(d2, 0, 0), 4, 1, 1),
                                  box(at(d, ~(size_t)0, 0), at(d2, 0, 0), 10, 2, 2),
                                  box(at(d, 0, ~(size_t)0), at(d2, 0, 0), 10, 2, 2),
                                  good,
                                  good,
                                  good};
  const size_t n = sizeof bad / sizeof *bad;
  bad[n - 3].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_INVALID;
  bad[n - 2].flags = 2;
  bad[n - 1].src.type = (CUmemcpy3DOperandType)3;
  for (size_t i = 0; i < n; ++i) {
    CUDA_MEMCPY3D_BATCH_OP both[] = {good, bad[i]};
    BAD(first_batch_3d(2, both, &where, 0, s), 1);
    EXPECT_RESULT(cuMemcpy3DBatchAsync(2, both, 0, s), CUDA_ERROR_INVALID_VALUE);
  }
  CUDA_MEMCPY3D_BATCH_OP alone = good;
  BAD(first_batch_3d(0, &alone, &where, 0, s), NO_COPY);
  BAD(first_batch_3d(1, &alone, &where, 1, s), NO_COPY);
  BAD(first_batch_3d(1, &alone, &where, 0, NULL), NO_COPY);
  EXPECT_RESULT(cuMemcpy3DBatchAsync(1, NULL, 0, s), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuCtxSynchronize());
  expect_device_words(d, 0x11111111, 1024);
  alone.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
  CHECK(cuMemcpy3DBatchAsync(1, &alone, 0, s));
  CHECK(cuStreamQuery(s)); /* device memory has been read when the call returns */
  CHECK(cuMemcpyDtoH(got, d, 256));
  EXPECT(!memcmp(got, pinned, 256));
  free(got);
  CHECK(cuArrayDestroy(floats));
  CHECK(cuArrayDestroy(others));
}

static void between_contexts(void) {
  CUcontext ctx;
  CUDA_MEMCPY3D_PEER p;
  uint8_t got[64];
  CHECK(cuCtxGetCurrent(&ctx));
  memset(&p, 0, sizeof p);
  p.srcMemoryType = p.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  p.srcDevice = d2, p.dstDevice = d, p.srcContext = p.dstContext = ctx;
  p.srcPitch = 100, p.srcHeight = 8, p.srcXInBytes = 3, p.srcY = 1, p.srcZ = 1;
  p.dstPitch = 4, p.dstHeight = 2;
  p.WidthInBytes = 4, p.Height = 2, p.Depth = 3;
  pattern(pinned, kBytes, 4);
  CHECK(cuMemcpyHtoD(d2, pinned, kBytes));
  for (int async = 0; async < 2; ++async) {
    CHECK(cuMemsetD8(d, 0, 4096));
    CHECK(cuStreamSynchronize(NULL));
    CHECK(async ? cuMemcpy3DPeerAsync(&p, s) : cuMemcpy3DPeer(&p));
    if (async) CHECK(cuStreamSynchronize(s));
    CHECK(cuMemcpyDtoH(got, d, sizeof got));
    for (size_t z = 0; z < 3; ++z)
      for (size_t y = 0; y < 2; ++y)
        for (size_t x = 0; x < 4; ++x) EXPECT_EQ(got[(z * 2 + y) * 4 + x], pinned[((z + 1) * 8 + y + 1) * 100 + x + 3]);
    EXPECT_EQ(got[24], 0);
  }
  EXPECT_RESULT(cuMemcpy3DPeer(NULL), CUDA_ERROR_INVALID_VALUE);
  p.srcContext = NULL;
  EXPECT_RESULT(cuMemcpy3DPeer(&p), CUDA_ERROR_INVALID_CONTEXT);
  p.srcContext = ctx, p.dstContext = (CUcontext)d;
  EXPECT_RESULT(cuMemcpy3DPeerAsync(&p, s), CUDA_ERROR_INVALID_CONTEXT);
  p.dstContext = ctx, p.srcPitch = 3;
  EXPECT_RESULT(cuMemcpy3DPeer(&p), CUDA_ERROR_INVALID_VALUE);
  p.srcPitch = 100, p.srcLOD = 1;
  EXPECT_RESULT(cuMemcpy3DPeer(&p), CUDA_ERROR_INVALID_VALUE);
  p.srcLOD = 0, p.Depth = kBytes;
  CHECK(cuMemsetD8(d, 0x11, 64));
  EXPECT_RESULT(cuMemcpy3DPeer(&p), CUDA_ERROR_INVALID_VALUE); /* its first layers are right, and are not sent */
  expect_device_words(d, 0x11111111, 16);
}

int main(void) {
  start();
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&d, kBytes));
  CHECK(cuMemAlloc(&d2, kBytes));
  CHECK(cuMemAllocHost((void**)&pinned, kBytes));
  pageable = malloc(kBytes), back = calloc(1, kBytes);
  runs();
  in_order();
  wrong();
  captured();
  boxes();
  between_contexts();
  return pass("batches");
}
