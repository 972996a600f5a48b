// SPDX-License-Identifier: Apache-2.0
// Kernels out of C++ templates: of types, numbers and function objects; each instance is a kernel with its own name.
#include "check.cuh"

struct Square {
  template <class T>
  __device__ T operator()(T x) const {
    return x * x;
  }
};
struct Shift {
  int by;
  template <class T>
  __device__ T operator()(T x) const {
    return x + T(by);
  }
};

template <class T, int kUnroll, class Function>
__global__ void map(T* values, int count, Function function) {
  const int first = int(here()) * kUnroll;
#pragma unroll
  for (int k = 0; k < kUnroll; ++k)
    if (first + k < count) values[first + k] = function(values[first + k]);
}

template <class T, int kThreads>
__global__ void block_sum(const T* values, T* sums) {
  __shared__ T part[kThreads];
  part[threadIdx.x] = values[here()];
  __syncthreads();
  for (int step = kThreads / 2; step; step /= 2) {
    if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}

template <class T, int kUnroll, class Function>
static void check_map(Function function, T (*want)(T)) {
  constexpr int kCount = 1003;
  std::vector<T> values(kCount);
  for (int i = 0; i < kCount; ++i) values[i] = T(i % 90);
  T* memory = device_of(values);
  map<T, kUnroll><<<(kCount / kUnroll + 64) / 64, 64>>>(memory, kCount, function);
  LAUNCHED();
  const std::vector<T> got = back(memory, kCount);
  for (int i = 0; i < kCount; ++i) EXPECT(got[i] == made(want(values[i]), values[i]));
  CHECK(cudaFree(memory));
}

template <class T, int kThreads>
static void check_sum() {
  std::vector<T> values(4 * kThreads);
  for (size_t i = 0; i < values.size(); ++i) values[i] = T(i % 7);
  T *memory = device_of(values), *sums = zeroes<T>(4);
  block_sum<T, kThreads><<<4, kThreads>>>(memory, sums);
  LAUNCHED();
  const std::vector<T> got = back(sums, 4);
  for (int block = 0; block < 4; ++block) {
    T want = 0;
    for (int k = 0; k < kThreads; ++k) want += values[block * kThreads + k];
    EXPECT(got[block] == made(want, T(0)));
  }
  CHECK(cudaFree(memory));
  CHECK(cudaFree(sums));
}

int main() {
  check_map<float, 1>(Square{}, +[](float x) { return x * x; });
  check_map<double, 4>(Square{}, +[](double x) { return x * x; });
  check_map<int, 3>(Shift{11}, +[](int x) { return x + 11; });
  check_map<uint8_t, 8>(Shift{3}, +[](uint8_t x) { return uint8_t(x + 3); });
  check_map<long long, 2>(Shift{-5}, +[](long long x) { return x - 5; });
  check_sum<int, 32>();
  check_sum<float, 256>();
  check_sum<double, 1024>();
  return ok("templates");
}
