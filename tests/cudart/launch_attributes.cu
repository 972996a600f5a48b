// SPDX-License-Identifier: Apache-2.0
// cudaLaunchKernelEx: no attributes, programmatic serialization, a priority, a cooperative grid; dynamic shared memory
// beyond the default.
#include <cooperative_groups.h>

#include "check.cuh"

constexpr int kCount = 1 << 14;

__global__ void produce(uint32_t* words, uint32_t by) {
  for (size_t i = here(); i < kCount; i += threads()) words[i] += by;
}

__global__ void consume(uint32_t* words, uint32_t factor) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();  // the kernel before is whole from here on
#endif
  for (size_t i = here(); i < kCount; i += threads()) words[i] *= factor;
}

__global__ void reverse(uint32_t* words, int count) {
  extern __shared__ uint32_t block[];
  for (int i = threadIdx.x; i < count; i += blockDim.x) block[i] = words[i];
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) words[i] = block[count - 1 - i];
}

__global__ void after_the_whole_grid(uint32_t* words) {
  const size_t i = here();
  words[i] = uint32_t(i);
  cooperative_groups::this_grid().sync();
  words[kCount + i] = words[threads() - 1 - i];
}

int main() {
  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  uint32_t* words = zeroes<uint32_t>(2 * kCount);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(16);
  config.blockDim = dim3(256);
  config.stream = s;
  uint32_t want = 0;
  CHECK(cudaLaunchKernelEx(&config, produce, words, 3u));
  want += 3;

  cudaLaunchAttribute attribute_list[2] = {};
  attribute_list[0].id = cudaLaunchAttributePriority;
  int least = 0, greatest = 0;
  CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  attribute_list[0].val.priority = greatest;
  config.attrs = attribute_list;
  config.numAttrs = 1;
  CHECK(cudaLaunchKernelEx(&config, produce, words, 4u));
  want += 4;

  if (compute_capability() >= 90) {
    attribute_list[0] = {};
    attribute_list[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute_list[0].val.programmaticStreamSerializationAllowed = 1;
    for (uint32_t k = 1; k < 20; ++k) {
      config.numAttrs = 0;
      CHECK(cudaLaunchKernelEx(&config, produce, words, k));
      config.numAttrs = 1;
      CHECK(cudaLaunchKernelEx(&config, consume, words, 2 * k + 1));
      want = (want + k) * (2 * k + 1);
    }
  }
  CHECK(cudaStreamSynchronize(s));
  EXPECT_ALL(back(words, kCount), made(want, 0u));

  // As much shared memory as a block may have, which is more than it has unasked.
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  EXPECT(most > attribute(cudaDevAttrMaxSharedMemoryPerBlock));
  const int count = min(most / 4, kCount);
  std::vector<uint32_t> values(kCount);
  for (int i = 0; i < kCount; ++i) values[i] = i;
  CHECK(cudaMemcpy(words, values.data(), kCount * 4, cudaMemcpyHostToDevice));
  reverse<<<1, 256, most, s>>>(words, count);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidValue);
  CHECK(cudaFuncSetAttribute(reverse, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  reverse<<<1, 256, most, s>>>(words, count);
  LAUNCHED();
  CHECK(cudaStreamSynchronize(s));
  const std::vector<uint32_t> got = back(words, kCount);
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(got[i], made(i < count ? count - 1 - i : i, i));

  if (attribute(cudaDevAttrCooperativeLaunch)) {
    CHECK(cudaMemset(words, 0, 8 * kCount));
    attribute_list[0] = {};
    attribute_list[0].id = cudaLaunchAttributeCooperative;
    attribute_list[0].val.cooperative = 1;
    config.attrs = attribute_list;
    config.numAttrs = 1;
    config.gridDim = dim3(4);
    CHECK(cudaLaunchKernelEx(&config, after_the_whole_grid, words));
    CHECK(cudaStreamSynchronize(s));
    const std::vector<uint32_t> mirrored = back(words + kCount, 1024);
    for (int i = 0; i < 1024; ++i) EXPECT_EQ(mirrored[i], made(1023 - i, 0));
  }
  CHECK(cudaFree(words));
  CHECK(cudaStreamDestroy(s));
  return ok("launch_attributes");
}
