// SPDX-License-Identifier: Apache-2.0
// Memory that graphs allocate: by nodes and in a capture; used and freed inside, outside, and by another graph; what
// such graphs cannot be.
#include "check.cuh"

constexpr int kCount = 100'000;
constexpr size_t kBytes = kCount * 4;

__global__ void affine(uint32_t* words, uint32_t factor, uint32_t add) {
  for (size_t i = here(); i < kCount; i += threads()) words[i] = words[i] * factor + add;
}

static uint64_t attribute_of(cudaGraphMemAttributeType which) {
  uint64_t value = 0;
  CHECK(cudaDeviceGetGraphMemAttribute(0, which, &value));
  return value;
}

static cudaMemAllocNodeParams wanted() {
  cudaMemAllocNodeParams p{};
  p.poolProps.allocType = cudaMemAllocationTypePinned;
  p.poolProps.location.type = cudaMemLocationTypeDevice;
  p.bytesize = kBytes;
  return p;
}

static cudaGraphNode_t add_fill(cudaGraph_t g, cudaGraphNode_t behind, void* p, uint32_t value) {
  cudaMemsetParams m{};
  m.dst = p;
  m.value = value;
  m.elementSize = 4;
  m.width = kCount;
  m.height = 1;
  cudaGraphNode_t node;
  CHECK(cudaGraphAddMemsetNode(&node, g, &behind, 1, &m));
  return node;
}

static cudaGraphNode_t add_affine(cudaGraph_t g, cudaGraphNode_t behind, uint32_t* p, uint32_t factor, uint32_t add) {
  void* arguments[] = {&p, &factor, &add};
  cudaKernelNodeParams k{};
  k.func = reinterpret_cast<void*>(affine);
  k.gridDim = dim3(8);
  k.blockDim = dim3(128);
  k.kernelParams = arguments;
  cudaGraphNode_t node;
  CHECK(cudaGraphAddKernelNode(&node, g, &behind, 1, &k));
  return node;
}

int main() {
  if (!attribute(cudaDevAttrMemoryPoolsSupported)) not_here("memory pools");
  cudaStream_t s, side;
  cudaEvent_t done;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
  uint32_t *out = zeroes<uint32_t>(kCount), *host;
  CHECK(cudaMallocHost(&host, kBytes));
  CHECK(cudaDeviceGraphMemTrim(0));
  EXPECT_EQ(attribute_of(cudaGraphMemAttrUsedMemCurrent), 0);

  // Nodes: its own graph frees it, so every launch may follow the last one.
  cudaGraph_t graph, other;
  cudaGraphNode_t alloc, fill, kernel, copy, release, node;
  cudaMemAllocNodeParams a = wanted(), got{};
  CHECK(cudaGraphCreate(&graph, 0));
  CHECK(cudaGraphAddMemAllocNode(&alloc, graph, nullptr, 0, &a));
  auto* words = static_cast<uint32_t*>(a.dptr);
  EXPECT(words);
  fill = add_fill(graph, alloc, words, 5);
  kernel = add_affine(graph, fill, words, 3, 1);
  CHECK(cudaGraphAddMemcpyNode1D(&copy, graph, &kernel, 1, host, words, kBytes, cudaMemcpyDeviceToHost));
  CHECK(cudaGraphAddMemFreeNode(&release, graph, &copy, 1, words));
  CHECK(cudaGraphMemAllocNodeGetParams(alloc, &got));
  EXPECT(got.dptr == words && got.bytesize == kBytes);
  void* freed = nullptr;
  CHECK(cudaGraphMemFreeNodeGetParams(release, &freed));
  EXPECT(freed == words);
  EXPECT_ERROR(cudaGraphAddMemFreeNode(&node, graph, &copy, 1, words), cudaErrorInvalidValue);
  EXPECT_ERROR(cudaGraphAddMemFreeNode(&node, graph, &copy, 1, out), cudaErrorInvalidValue);
  cudaGraphExec_t executable, second;
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  EXPECT_ERROR(cudaGraphInstantiate(&second, graph, 0), cudaErrorNotSupported);
  EXPECT_ERROR(cudaGraphClone(&other, graph), cudaErrorNotSupported);
  CHECK(cudaGraphCreate(&other, 0));
  EXPECT_ERROR(cudaGraphAddChildGraphNode(&node, other, nullptr, 0, graph), cudaErrorNotSupported);
  CHECK(cudaGraphDestroy(other));
  EXPECT_ERROR(cudaGraphRemoveDependencies(graph, &copy, &release,
#if CUDART_VERSION >= 13000
                                           nullptr,
#endif
                                           1),
               cudaErrorNotSupported);
  for (int k = 0; k < 3; ++k) {
    memset(host, 0, kBytes);
    CHECK(cudaGraphLaunch(executable, k == 1 ? side : s));
    CHECK(cudaDeviceSynchronize());
    EXPECT_ALL(std::vector<uint32_t>(host, host + kCount), made(16u, 5u));
  }
  EXPECT(attribute_of(cudaGraphMemAttrUsedMemCurrent) >= kBytes);
  EXPECT(attribute_of(cudaGraphMemAttrReservedMemCurrent) >= kBytes);
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaDeviceGraphMemTrim(0));
  EXPECT_EQ(attribute_of(cudaGraphMemAttrUsedMemCurrent), 0);
  EXPECT_EQ(attribute_of(cudaGraphMemAttrReservedMemCurrent), 0);
  EXPECT(attribute_of(cudaGraphMemAttrUsedMemHigh) >= kBytes);
  uint64_t zero = 0;
  CHECK(cudaDeviceSetGraphMemAttribute(0, cudaGraphMemAttrUsedMemHigh, &zero));
  EXPECT_EQ(attribute_of(cudaGraphMemAttrUsedMemHigh), 0);

  // A capture that leaves its memory: used by another stream behind an event, freed there; not launched again before.
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  CHECK(cudaMallocAsync(&words, kBytes, s));
  CHECK(cudaMemsetAsync(words, 1, kBytes, s));
  EXPECT_ERROR(cudaFreeAsync(out, s), cudaErrorInvalidValue);  // it is no graph's
  CHECK(cudaStreamEndCapture(s, &graph));
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  for (uint32_t k = 0; k < 3; ++k) {
    CHECK(cudaGraphLaunch(executable, s));
    EXPECT_ERROR(cudaGraphLaunch(executable, s), cudaErrorInvalidValue);
    CHECK(cudaEventRecord(done, s));
    CHECK(cudaStreamWaitEvent(side, done, 0));
    affine<<<8, 128, 0, side>>>(words, 1, k);
    LAUNCHED();
    CHECK(cudaMemcpyAsync(out, words, kBytes, cudaMemcpyDeviceToDevice, side));
    CHECK(cudaFreeAsync(words, side));
    CHECK(cudaEventRecord(done, side));
    CHECK(cudaStreamWaitEvent(s, done, 0));
    CHECK(cudaStreamSynchronize(side));
    EXPECT_ALL(back(out, kCount), made(0x01010101u + k, 0x01010101u));
  }

  // Another graph takes and frees it.
  cudaGraphExec_t taker;
  CHECK(cudaGraphCreate(&other, 0));
  CHECK(cudaGraphAddMemcpyNode1D(&copy, other, nullptr, 0, host, words, kBytes, cudaMemcpyDeviceToHost));
  CHECK(cudaGraphAddMemFreeNode(&release, other, &copy, 1, words));
  CHECK(cudaGraphInstantiate(&taker, other, 0));
  EXPECT_ERROR(cudaGraphLaunch(taker, s), cudaErrorInvalidValue);
  for (int k = 0; k < 2; ++k) {
    memset(host, 0, kBytes);
    CHECK(cudaGraphLaunch(executable, s));
    CHECK(cudaGraphLaunch(taker, s));
    CHECK(cudaStreamSynchronize(s));
    EXPECT_ALL(std::vector<uint32_t>(host, host + kCount), 0x01010101u);
  }
  CHECK(cudaGraphExecDestroy(taker));
  CHECK(cudaGraphDestroy(other));
  CHECK(cudaGraphExecDestroy(executable));

  // Freed by the next launch; what the last one leaves outlives the graph.
  CHECK(cudaGraphInstantiate(&executable, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch));
  for (int k = 0; k < 3; ++k) {
    CHECK(cudaGraphLaunch(executable, s));
    affine<<<8, 128, 0, s>>>(words, 1, 1);
    LAUNCHED();
  }
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphDestroy(graph));
  EXPECT_ALL(back(words, kCount), made(0x01010102u, 0x01010101u));
  CHECK(cudaFree(words));
  EXPECT_ERROR(cudaFree(words), cudaErrorInvalidValue);
  CHECK(cudaDeviceGraphMemTrim(0));
  EXPECT_EQ(attribute_of(cudaGraphMemAttrUsedMemCurrent), 0);

  for (cudaStream_t one : {s, side}) CHECK(cudaStreamDestroy(one));
  CHECK(cudaEventDestroy(done));
  CHECK(cudaFreeHost(host));
  CHECK(cudaFree(out));
  return ok("graph_memory");
}
