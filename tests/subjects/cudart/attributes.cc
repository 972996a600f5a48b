// SPDX-License-Identifier: Apache-2.0
// Attributes of streams, the kernels of a library, atomics: the driver's answers under the runtime's names and codes.
#include "program.h"

extern "C" cudaError_t cudaStreamSetAttribute_ptsz(cudaStream_t, cudaStreamAttrID, const cudaStreamAttrValue*);
extern "C" cudaError_t cudaStreamGetAttribute_ptsz(cudaStream_t, cudaStreamAttrID, cudaStreamAttrValue*);
extern "C" cudaError_t cudaStreamCopyAttributes_ptsz(cudaStream_t, cudaStream_t);

static cudaStreamAttrValue get(cudaStream_t s, cudaStreamAttrID attr) {
  cudaStreamAttrValue v;
  memset(&v, 0x5a, sizeof v);
  CHECK(cudaStreamGetAttribute(s, attr, &v));
  return v;
}

static void streams() {
  cudaStream_t a, b;
  cudaStreamAttrValue v{};
  void* memory = nullptr;
  int priority = 0;
  CHECK(cudaMalloc(&memory, 1 << 20));
  CHECK(cudaStreamCreate(&a));
  CHECK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  v.accessPolicyWindow.base_ptr = memory;
  v.accessPolicyWindow.num_bytes = 8192;
  v.accessPolicyWindow.hitRatio = 0.6f;
  v.accessPolicyWindow.hitProp = cudaAccessPropertyPersisting;
  v.accessPolicyWindow.missProp = cudaAccessPropertyStreaming;
  CHECK(cudaStreamSetAttribute(a, cudaLaunchAttributeAccessPolicyWindow, &v));
  v.accessPolicyWindow.missProp = cudaAccessPropertyPersisting;
  EXPECT_RESULT(cudaStreamSetAttribute(a, cudaLaunchAttributeAccessPolicyWindow, &v), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidValue);
  v.syncPolicy = cudaSyncPolicyYield;
  CHECK(cudaStreamSetAttribute(a, cudaLaunchAttributeSynchronizationPolicy, &v));
  v.priority = -2;
  CHECK(cudaStreamSetAttribute(a, cudaLaunchAttributePriority, &v));
  v.memSyncDomain = cudaLaunchMemSyncDomainRemote;
  CHECK(cudaStreamSetAttribute(a, cudaLaunchAttributeMemSyncDomain, &v));
  CHECK(cudaStreamCopyAttributes(b, a));
  for (cudaStream_t s : {a, b}) {
    const auto w = get(s, cudaLaunchAttributeAccessPolicyWindow).accessPolicyWindow;
    EXPECT(w.base_ptr == memory && w.num_bytes == 8192 && w.hitRatio == 0.6f);
    EXPECT(w.hitProp == cudaAccessPropertyPersisting && w.missProp == cudaAccessPropertyStreaming);
    EXPECT(get(s, cudaLaunchAttributeSynchronizationPolicy).syncPolicy == cudaSyncPolicyYield);
    EXPECT(get(s, cudaLaunchAttributePriority).priority == -2);
    CHECK(cudaStreamGetPriority(s, &priority));
    EXPECT(priority == -2);
    EXPECT(get(s, cudaLaunchAttributeMemSyncDomain).memSyncDomain == cudaLaunchMemSyncDomainRemote);
    EXPECT(get(s, cudaLaunchAttributeMemSyncDomainMap).memSyncDomainMap.default_ == 0);
  }
  EXPECT_RESULT(cudaStreamGetAttribute(a, cudaLaunchAttributeCooperative, &v), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaStreamGetAttribute(a, cudaLaunchAttributePriority, nullptr), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaStreamSetAttribute(a, cudaLaunchAttributePriority, nullptr), cudaErrorInvalidValue);
  // A null stream is the legacy one, and in the other form the thread's own.
  v.syncPolicy = cudaSyncPolicySpin;
  CHECK(cudaStreamSetAttribute_ptsz(nullptr, cudaLaunchAttributeSynchronizationPolicy, &v));
  EXPECT(get(nullptr, cudaLaunchAttributeSynchronizationPolicy).syncPolicy == cudaSyncPolicyAuto);
  EXPECT(get(cudaStreamPerThread, cudaLaunchAttributeSynchronizationPolicy).syncPolicy == cudaSyncPolicySpin);
  CHECK(cudaStreamCopyAttributes_ptsz(nullptr, a));
  CHECK(cudaStreamGetAttribute_ptsz(nullptr, cudaLaunchAttributePriority, &v));
  EXPECT(v.priority == -2);
  CHECK(cudaStreamDestroy(b));
  EXPECT_RESULT(cudaStreamGetAttribute(b, cudaLaunchAttributePriority, &v), cudaErrorInvalidResourceHandle);
  EXPECT_RESULT(cudaStreamCopyAttributes(a, b), cudaErrorInvalidResourceHandle);
  CHECK(cudaMemsetAsync(memory, 1, 1 << 20, a));
  CHECK(cudaStreamSynchronize(a));
  CHECK(cudaCtxResetPersistingL2Cache());
  CHECK(cudaStreamDestroy(a));
  CHECK(cudaFree(memory));
  cudaGetLastError();
}

static void libraries() {
  cudaLibrary_t library;
  cudaKernel_t kernels[64] = {}, first;
  unsigned count = 0;
  void* address = nullptr;
  CHECK(cudaLibraryLoadFromFile(&library, getenv("TEST_KERNELS"), nullptr, nullptr, 0, nullptr, nullptr, 0));
  CHECK(cudaLibraryGetKernelCount(&count, library));
  EXPECT(count == 13);  // of tests/subjects/driver/kernels.c
  CHECK(cudaLibraryEnumerateKernels(kernels, 64, library));
  EXPECT(kernels[12] != nullptr && kernels[13] == nullptr);
  CHECK(cudaLibraryGetKernel(&first, library, "fill"));
  EXPECT(kernels[0] == first);
  EXPECT_RESULT(cudaLibraryGetKernelCount(nullptr, library), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaLibraryEnumerateKernels(nullptr, 1, library), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaLibraryGetUnifiedFunction(&address, library, "fill"), cudaErrorSymbolNotFound);
  EXPECT_RESULT(cudaLibraryGetUnifiedFunction(nullptr, library, "fill"), cudaErrorInvalidValue);
  CHECK(cudaLibraryUnload(library));
  EXPECT_RESULT(cudaLibraryGetKernelCount(&count, library), cudaErrorInvalidResourceHandle);
  EXPECT_RESULT(cudaLibraryEnumerateKernels(kernels, 1, library), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
}

static void refusals() {
  cudaAsyncCallbackHandle_t callback = nullptr;
  EXPECT_RESULT(cudaDeviceRegisterAsyncNotification(0, nullptr, nullptr, &callback), cudaErrorNotSupported);
  EXPECT_RESULT(cudaDeviceUnregisterAsyncNotification(0, callback), cudaErrorNotSupported);
  EXPECT_RESULT(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                                   cudaFlushGPUDirectRDMAWritesToOwner),
                cudaErrorNotSupported);
  cudaGetLastError();
}

#if CUDART_VERSION >= 13000
static void atomics() {
  const cudaAtomicOperation ask[] = {cudaAtomicOperationIntegerAdd, cudaAtomicOperationCAS};
  unsigned can[2] = {9, 9};
  CHECK(cudaDeviceGetHostAtomicCapabilities(can, ask, 2, 0));
  EXPECT(can[0] == 0 && can[1] == 0);
  EXPECT_RESULT(cudaDeviceGetHostAtomicCapabilities(can, ask, 0, 0), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaDeviceGetHostAtomicCapabilities(can, nullptr, 2, 0), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaDeviceGetHostAtomicCapabilities(can, ask, 2, 99), cudaErrorInvalidDevice);
  EXPECT_RESULT(cudaDeviceGetP2PAtomicCapabilities(can, ask, 2, 0, 0), cudaErrorInvalidDevice);
  cudaGetLastError();
}
#else
static void atomics() {}
#endif

int main() {
  streams();
  libraries();
  refusals();
  atomics();
  return pass("attributes");
}
