// SPDX-License-Identifier: Apache-2.0
/* Attributes of streams: what a stream has, what it may be given, what a copy of them is, and what does not change. */
#include "program.h"

CUresult cuStreamSetAttribute_ptsz(CUstream, CUstreamAttrID, const CUstreamAttrValue*);
CUresult cuStreamGetAttribute_ptsz(CUstream, CUstreamAttrID, CUstreamAttrValue*);
CUresult cuStreamCopyAttributes_ptsz(CUstream, CUstream);

#define WINDOW CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW
#define POLICY CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY
#define PRIORITY CU_STREAM_ATTRIBUTE_PRIORITY
#define MAP CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP
#define DOMAIN CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN

static int domains;
static CUdeviceptr memory;
enum { kBytes = 1 << 20 };

static CUstreamAttrValue get(CUstream s, CUstreamAttrID attr) {
  CUstreamAttrValue v;
  memset(&v, 0x5a, sizeof v);
  CHECK(cuStreamGetAttribute(s, attr, &v));
  return v;
}

static CUresult set_number(CUstream s, CUstreamAttrID attr, int number) {
  CUstreamAttrValue v;
  memset(&v, 0xa5, sizeof v); /* what lies beside the value is nobody's business */
  if (attr == POLICY) v.syncPolicy = (CUsynchronizationPolicy)number;
  if (attr == PRIORITY) v.priority = number;
  if (attr == DOMAIN) v.memSyncDomain = (CUlaunchMemSyncDomain)number;
  if (attr == MAP)
    v.memSyncDomainMap.default_ = (unsigned char)number, v.memSyncDomainMap.remote = (unsigned char)(number >> 8);
  return cuStreamSetAttribute(s, attr, &v);
}

static CUstreamAttrValue window(CUdeviceptr at, size_t bytes, float ratio, int hit, int miss) {
  CUstreamAttrValue v;
  memset(&v, 0xa5, sizeof v);
  v.accessPolicyWindow.base_ptr = (void*)(uintptr_t)at;
  v.accessPolicyWindow.num_bytes = bytes;
  v.accessPolicyWindow.hitRatio = ratio;
  v.accessPolicyWindow.hitProp = (CUaccessProperty)hit;
  v.accessPolicyWindow.missProp = (CUaccessProperty)miss;
  return v;
}

static void expect_window(CUstream s, CUdeviceptr at, size_t bytes, float ratio, int hit, int miss) {
  const CUaccessPolicyWindow w = get(s, WINDOW).accessPolicyWindow;
  EXPECT_EQ((uintptr_t)w.base_ptr, at);
  EXPECT_EQ(w.num_bytes, bytes);
  EXPECT(w.hitRatio == ratio);
  EXPECT_EQ(w.hitProp, hit);
  EXPECT_EQ(w.missProp, miss);
}

/* What a stream has that nobody has given anything. */
static void expect_new(CUstream s, int priority) {
  expect_window(s, 0, 0, 0, CU_ACCESS_PROPERTY_NORMAL, CU_ACCESS_PROPERTY_NORMAL);
  EXPECT_EQ(get(s, POLICY).syncPolicy, CU_SYNC_POLICY_AUTO);
  EXPECT_EQ(get(s, PRIORITY).priority, priority);
  EXPECT_EQ(get(s, DOMAIN).memSyncDomain, CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT);
  EXPECT_EQ(get(s, MAP).memSyncDomainMap.default_, 0);
  EXPECT_EQ(get(s, MAP).memSyncDomainMap.remote, domains > 1 ? 1 : 0);
}

static void give(CUstream s) {
  const CUstreamAttrValue w =
      window(memory + 4096, 8192, 0.5f, CU_ACCESS_PROPERTY_PERSISTING, CU_ACCESS_PROPERTY_STREAMING);
  CHECK(cuStreamSetAttribute(s, WINDOW, &w));
  CHECK(set_number(s, POLICY, CU_SYNC_POLICY_BLOCKING_SYNC));
  CHECK(set_number(s, PRIORITY, -3));
  CHECK(set_number(s, DOMAIN, CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE));
  CHECK(set_number(s, MAP, (domains - 1) << 8 | (domains - 1)));
}

static void expect_given(CUstream s) {
  int priority = 0;
  expect_window(s, memory + 4096, 8192, 0.5f, CU_ACCESS_PROPERTY_PERSISTING, CU_ACCESS_PROPERTY_STREAMING);
  EXPECT_EQ(get(s, POLICY).syncPolicy, CU_SYNC_POLICY_BLOCKING_SYNC);
  EXPECT_EQ(get(s, PRIORITY).priority, -3);
  CHECK(cuStreamGetPriority(s, &priority));
  EXPECT_EQ(priority, -3);
  EXPECT_EQ(get(s, DOMAIN).memSyncDomain, CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE);
  EXPECT_EQ(get(s, MAP).memSyncDomainMap.default_, domains - 1);
  EXPECT_EQ(get(s, MAP).memSyncDomainMap.remote, domains - 1);
}

static void wrong(CUstream s) {
  CUstreamAttrValue v;
  CUdeviceptr outside = 0;
  float nan = 0.0f;
  nan /= nan;
  memset(&v, 0, sizeof v);
  const int not_of_streams[] = {0, 2, 4, 5, 6, 7, 11, 12, 13, 14, 99, -1};
  for (size_t i = 0; i < sizeof not_of_streams / sizeof *not_of_streams; ++i) {
    EXPECT_RESULT(cuStreamSetAttribute(s, (CUstreamAttrID)not_of_streams[i], &v), CUDA_ERROR_INVALID_VALUE);
    EXPECT_RESULT(cuStreamGetAttribute(s, (CUstreamAttrID)not_of_streams[i], &v), CUDA_ERROR_INVALID_VALUE);
  }
  EXPECT_RESULT(cuStreamSetAttribute(s, POLICY, NULL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuStreamGetAttribute(s, POLICY, NULL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(set_number(s, POLICY, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(set_number(s, POLICY, 5), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(set_number(s, DOMAIN, 2), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(set_number(s, DOMAIN, -1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(set_number(s, MAP, domains), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(set_number(s, MAP, domains << 8), CUDA_ERROR_INVALID_VALUE);
  const CUstreamAttrValue bad[] = {window((CUdeviceptr)(uintptr_t)&v, 8, 1, 0, 0), /* the host's memory, and none */
                                   window(8, 8, 1, 0, 0),
                                   window(memory, 4096, 1.5f, 0, 0),
                                   window(memory, 4096, -0.5f, 0, 0),
                                   window(memory, 4096, nan, 0, 0),
                                   window(memory, 4096, 1, 3, 0),
                                   window(memory, 4096, 1, 0, 2), /* a miss does not persist */
                                   window(memory, ~(size_t)0, 1, 0, 0)};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i)
    EXPECT_RESULT(cuStreamSetAttribute(s, WINDOW, &bad[i]), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemAlloc(&outside, 4096)); /* memory that is gone is none */
  CHECK(cuMemFree(outside));
  v = window(outside, 4096, 1, 0, 0);
  EXPECT_RESULT(cuStreamSetAttribute(s, WINDOW, &v), CUDA_ERROR_INVALID_VALUE);
}

int main(void) {
  CUdevice dev = start();
  CUcontext ctx, second;
  CUstream a, b, other, gone;
  CUstreamAttrValue v;
  int least, greatest;
  CHECK(cuCtxGetCurrent(&ctx));
  CHECK(cuDeviceGetAttribute(&domains, CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT, dev));
  if (domains < 1) domains = 1;
  CHECK(cuMemAlloc(&memory, kBytes));
  CHECK(cuCtxGetStreamPriorityRange(&least, &greatest));
  CHECK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreateWithPriority(&b, CU_STREAM_DEFAULT, greatest));
  expect_new(a, 0);
  expect_new(b, greatest);
  expect_new(NULL, 0);

  give(a);
  expect_given(a);
  expect_new(b, greatest);
  expect_new(NULL, 0);
  wrong(a);
  expect_given(a); /* what was refused has changed nothing */

  /* a priority is moved into the range, as when a stream is made */
  CHECK(set_number(b, PRIORITY, greatest - 7));
  EXPECT_EQ(get(b, PRIORITY).priority, greatest);
  CHECK(set_number(b, PRIORITY, least + 7));
  EXPECT_EQ(get(b, PRIORITY).priority, least);

  /* all of them are copied; a second time there is nothing to do; a stream may be copied to itself */
  for (int i = 0; i < 2; ++i) {
    CHECK(cuStreamCopyAttributes(b, a));
    expect_given(b);
  }
  CHECK(cuStreamCopyAttributes(b, b));
  expect_given(b);
  CHECK(set_number(b, DOMAIN, CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT));
  EXPECT_EQ(get(a, DOMAIN).memSyncDomain, CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE);
  CHECK(cuStreamCopyAttributes(b, NULL)); /* back to those that the legacy stream has */
  expect_new(b, 0);

  /* the legacy stream and the thread's own are two */
  CHECK(set_number(NULL, POLICY, CU_SYNC_POLICY_SPIN));
  CHECK(set_number(CU_STREAM_PER_THREAD, POLICY, CU_SYNC_POLICY_YIELD));
  EXPECT_EQ(get(CU_STREAM_LEGACY, POLICY).syncPolicy, CU_SYNC_POLICY_SPIN);
  CHECK(cuStreamGetAttribute_ptsz(NULL, POLICY, &v));
  EXPECT_EQ(v.syncPolicy, CU_SYNC_POLICY_YIELD);
  v.syncPolicy = CU_SYNC_POLICY_BLOCKING_SYNC;
  CHECK(cuStreamSetAttribute_ptsz(NULL, POLICY, &v));
  EXPECT_EQ(get(CU_STREAM_PER_THREAD, POLICY).syncPolicy, CU_SYNC_POLICY_BLOCKING_SYNC);
  EXPECT_EQ(get(NULL, POLICY).syncPolicy, CU_SYNC_POLICY_SPIN);
  CHECK(cuStreamCopyAttributes_ptsz(NULL, CU_STREAM_LEGACY));
  EXPECT_EQ(get(CU_STREAM_PER_THREAD, POLICY).syncPolicy, CU_SYNC_POLICY_SPIN);

  /* streams of two contexts have nothing to copy */
  CHECK(cuCtxCreate(&second, NULL, 0, dev));
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  EXPECT_RESULT(cuStreamCopyAttributes(other, a), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuStreamCopyAttributes(a, other), CUDA_ERROR_INVALID_VALUE);
  expect_new(other, 0);
  CHECK(cuCtxDestroy(second));
  CHECK(cuCtxSetCurrent(ctx));

  /* a place in the stream table that is used again begins anew */
  for (int i = 0; i < 40; ++i) {
    CHECK(cuStreamCreate(&gone, CU_STREAM_NON_BLOCKING));
    expect_new(gone, 0);
    give(gone);
    CHECK(cuStreamDestroy(gone));
    EXPECT_RESULT(cuStreamGetAttribute(gone, POLICY, &v), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_RESULT(set_number(gone, POLICY, CU_SYNC_POLICY_AUTO), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_RESULT(cuStreamCopyAttributes(gone, a), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_RESULT(cuStreamCopyAttributes(a, gone), CUDA_ERROR_INVALID_HANDLE);
  }

  /* the stream works on, and may be given something while it works and while it is captured */
  Gate gate;
  CUgraph graph;
  size_t nodes = 0;
  close_gate(&gate, a);
  CHECK(cuMemsetD32Async(memory, 7, 1024, a));
  CHECK(set_number(a, PRIORITY, -1));
  CHECK(set_number(a, DOMAIN, CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT));
  CHECK(cuMemsetD32Async(memory + 4096, 8, 1024, a));
  open_gate(&gate);
  CHECK(cuStreamSynchronize(a));
  expect_device_words(memory, 7, 1024);
  expect_device_words(memory + 4096, 8, 1024);
  CHECK(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuMemsetD32Async(memory, 9, 1024, a));
  CHECK(set_number(a, PRIORITY, -2));
  EXPECT_EQ(get(a, PRIORITY).priority, -2);
  CHECK(cuStreamEndCapture(a, &graph));
  CHECK(cuGraphGetNodes(graph, NULL, &nodes));
  EXPECT_EQ(nodes, 1);
  CHECK(cuGraphDestroy(graph));

  /* a window of no bytes is none; one whose memory goes is read back as it was */
  v = window(0, 0, 9, 9, 9);
  CHECK(cuStreamSetAttribute(a, WINDOW, &v));
  EXPECT_EQ(get(a, WINDOW).accessPolicyWindow.num_bytes, 0);
  give(a);
  CHECK(cuMemFree(memory));
  expect_given(a);
  EXPECT_RESULT(cuStreamCopyAttributes(b, a), CUDA_ERROR_INVALID_VALUE);

  CHECK(cuCtxResetPersistingL2Cache());
  CHECK(cuCtxSetCurrent(NULL));
  EXPECT_RESULT(cuCtxResetPersistingL2Cache(), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_RESULT(cuStreamGetAttribute(NULL, POLICY, &v), CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuCtxSetCurrent(ctx));

  /* what a primary context had goes with a reset of it */
  CHECK(set_number(NULL, PRIORITY, -4));
  CHECK(set_number(NULL, DOMAIN, CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE));
  CHECK(cuDevicePrimaryCtxReset(dev));
  expect_new(NULL, 0);
  return pass("stream_attributes");
}
