// SPDX-License-Identifier: Apache-2.0
// Graphs made node by node: fills, kernels, copies, host functions; launched several times, changed, cloned, looked at.
#include "check.cuh"

constexpr int kCount = 2048;

__global__ void add(uint32_t* words, uint32_t by) {
  for (size_t i = here(); i < kCount; i += threads()) words[i] += by;
}
__global__ void scale(uint32_t* words, uint32_t by) {
  for (size_t i = here(); i < kCount; i += threads()) words[i] *= by;
}

static void CUDART_CB count_up(void* data) { ++*static_cast<int*>(data); }

static cudaKernelNodeParams kernel_node(void* kernel, void** arguments) {
  cudaKernelNodeParams node{};
  node.func = kernel;
  node.gridDim = dim3(8);
  node.blockDim = dim3(128);
  node.kernelParams = arguments;
  return node;
}

int main() {
  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  uint32_t *words = zeroes<uint32_t>(kCount), *host, five = 5, three = 3;
  CHECK(cudaMallocHost(&host, kCount * 4));
  int called = 0;
  cudaGraph_t graph;
  CHECK(cudaGraphCreate(&graph, 0));
  cudaGraphNode_t fill, plus, times, copy, call, empty;
  cudaMemsetParams filling{};
  filling.dst = words;
  filling.value = 2;
  filling.elementSize = 4;
  filling.width = kCount;
  filling.height = 1;
  CHECK(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &filling));
  void *plus_arguments[] = {&words, &five}, *times_arguments[] = {&words, &three};
  cudaKernelNodeParams plus_node = kernel_node((void*)add, plus_arguments);
  cudaKernelNodeParams times_node = kernel_node((void*)scale, times_arguments);
  CHECK(cudaGraphAddKernelNode(&plus, graph, &fill, 1, &plus_node));
  CHECK(cudaGraphAddKernelNode(&times, graph, nullptr, 0, &times_node));
  CHECK(cudaGraphAddDependencies(graph, &plus, &times,
#if CUDART_VERSION >= 13000
                                 nullptr,
#endif
                                 1));
  five = 50, three = 30;  // a node holds the arguments that it was given
  CHECK(cudaGraphAddMemcpyNode1D(&copy, graph, &times, 1, host, words, kCount * 4, cudaMemcpyDeviceToHost));
  cudaHostNodeParams function{count_up, &called};
  CHECK(cudaGraphAddHostNode(&call, graph, &copy, 1, &function));
  CHECK(cudaGraphAddEmptyNode(&empty, graph, &call, 1));
  size_t nodes = 0, roots = 0;
  CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 6);
  CHECK(cudaGraphGetRootNodes(graph, nullptr, &roots));
  EXPECT_EQ(roots, 1);
  cudaGraphNodeType type{};
  CHECK(cudaGraphNodeGetType(times, &type));
  EXPECT_EQ(type, cudaGraphNodeTypeKernel);

  cudaGraphExec_t executable;
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  for (int k = 1; k <= 3; ++k) {
    memset(host, 0, kCount * 4);
    CHECK(cudaGraphLaunch(executable, s));
    CHECK(cudaStreamSynchronize(s));
    EXPECT_EQ(called, k);
    EXPECT_ALL(std::vector<uint32_t>(host, host + kCount), made((2u + 5) * 3, 2u));
  }
  // Other arguments for one node of the executable graph; the graph itself stays as it is.
  uint32_t hundred = 100;
  plus_arguments[1] = &hundred;
  CHECK(cudaGraphExecKernelNodeSetParams(executable, plus, &plus_node));
  CHECK(cudaGraphLaunch(executable, s));
  CHECK(cudaStreamSynchronize(s));
  EXPECT_ALL(std::vector<uint32_t>(host, host + kCount), made((2u + 100) * 3, 2u));
  cudaGraph_t copied;
  cudaGraphExec_t second;
  CHECK(cudaGraphClone(&copied, graph));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaGraphInstantiate(&second, copied, 0));
  CHECK(cudaGraphLaunch(second, s));
  CHECK(cudaGraphLaunch(executable, s));
  CHECK(cudaGraphLaunch(second, s));
  CHECK(cudaStreamSynchronize(s));
  EXPECT_EQ(called, 7);
  EXPECT_ALL(std::vector<uint32_t>(host, host + kCount), made((2u + 5) * 3, 2u));
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphExecDestroy(second));
  CHECK(cudaGraphDestroy(copied));
  CHECK(cudaFreeHost(host));
  CHECK(cudaFree(words));
  CHECK(cudaStreamDestroy(s));
  return ok("graphs");
}
