// SPDX-License-Identifier: Apache-2.0
// Kernel parameters of every size up to CUDA's limit of 32,764 bytes, with gaps, and structures by value.
#include "check.cuh"

template <size_t kBytes>
struct Block {
  uint8_t bytes[kBytes];
};

template <size_t kBytes>
__global__ void weigh(unsigned long long* out, const __grid_constant__ Block<kBytes> block) {
  unsigned long long sum = 0;
  for (size_t i = threadIdx.x; i < kBytes; i += blockDim.x) sum += (unsigned long long)(block.bytes[i]) * (i + 1);
  atomicAdd(out, sum);
}

struct alignas(16) Wide {
  float4 four;
  double two[2];
};

struct Inner {
  char c;
  short s;
  double d;
};

__global__ void mixed(char a, double* out, short b, Inner c, float d, Wide e, bool f, long long g, char h) {
  out[0] = a + b + c.c + c.s + c.d + d + e.four.x + e.four.w + e.two[1] + (f ? 1 : 0) + double(g) + h;
}

__global__ void many(int* out, int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l,
                     int m, int n, int o, int p, int q, int r, int s, int t) {
  const int all[] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t};
  for (int x = 0; x < 20; ++x) out[x] = all[x];
}

__global__ void none() {}

template <size_t kBytes>
static void check_size() {
  static Block<kBytes> block;
  unsigned long long want = 0, *out = zeroes<unsigned long long>(1);
  for (size_t i = 0; i < kBytes; ++i) {
    block.bytes[i] = uint8_t(i * 37 + kBytes);
    want += (unsigned long long)(block.bytes[i]) * (i + 1);
  }
  weigh<kBytes><<<1, 128>>>(out, block);
  LAUNCHED();
  memset(block.bytes, 0, kBytes);  // the launch has its own
  EXPECT_EQ(back(out, 1)[0], made(want, 0ull));
  CHECK(cudaFree(out));
}

int main() {
  check_size<1>();
  check_size<255>();
  check_size<1716>();
  check_size<4088>();  // with the pointer: the limit of older devices
  check_size<4092>();
  check_size<20'001>();
  check_size<32'756>();  // with the pointer: 32,764
  double* out = zeroes<double>(1);
  Wide wide{make_float4(8, 0, 0, 16), {0, 32}};
  mixed<<<1, 1>>>(1, out, 2, Inner{4, 100, 1000.5}, 0.25f, wide, true, 1ll << 40, 7);
  LAUNCHED();
  const double want = 1 + 2 + 4 + 100 + 1000.5 + 0.25f + 8 + 16 + 32 + 1 + double(1ll << 40) + 7;
  EXPECT(back(out, 1)[0] == made(want, 0.0));
  int* twenty = zeroes<int>(20);
  many<<<1, 1>>>(twenty, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20);
  LAUNCHED();
  const std::vector<int> got = back(twenty, 20);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(got[i], made(i + 1, 0));
  none<<<1, 1>>>();
  LAUNCHED();
  // The same by pointers to the values, as <<<>>> does it underneath.
  int value = 5;
  void* arguments[21] = {&twenty};
  for (int i = 1; i < 21; ++i) arguments[i] = &value;
  CHECK(cudaLaunchKernel((const void*)many, dim3(1), dim3(1), arguments, 0, 0));
  EXPECT_EQ(back(twenty, 1)[0], made(5, 0));
  CHECK(cudaFree(out));
  CHECK(cudaFree(twenty));
  return ok("parameters");
}
