// SPDX-License-Identifier: Apache-2.0
// What test_image.py knows of these kernels, it knows from gcc (layout of the same parameters as a struct), from ptxas
// -v (registers, shared memory, stack) and from readelf (variables), not from hal/image.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct alignas(16) V16 {
  float x[4];
};
struct alignas(64) V64 {
  uint8_t b[65];
};
struct alignas(128) V128 {
  uint8_t b[5];
};
struct Odd {
  uint8_t a[3];
};
struct Nested {
  uint8_t a;
  double b;
  uint16_t c[3];
};
struct Big {
  uint8_t b[32700];
};

extern "C" {
__device__ uint32_t table[4] = {11, 22, 33, 44};
__device__ uint32_t zeroes[1024];
__constant__ uint32_t settings[4] = {1, 2, 3, 4};
__constant__ double factors[7] = {0.5, -1.25};
__device__ uint32_t* pointer = table + 1;
__device__ float matrix[2][3] = {{1.5f}, {-2.5f, 3}};
__device__ signed char bytes[5] = {-1, 2, -3, 4, -5};
__device__ long long wide = -2;

__global__ void mixed(uint8_t a, uint64_t* out, uint16_t b, double c, Odd d, uint32_t e, V16 f, uint8_t g, V64 h,
                      char i) {
  __shared__ uint32_t s[100];
  s[threadIdx.x] = a;
  __syncthreads();
  *out = b + c + d.a[1] + e + f.x[2] + g + h.b[64] + i + s[3] + table[e & 3] + zeroes[e & 1023] + settings[e & 3] +
         factors[e % 7] + *pointer + matrix[0][e % 3] + bytes[e % 5] + wide;
}
__global__ void nothing() {}
__global__ void unused(int a, long b, short c) {}
__global__ void nested(char a, Nested b, V128 c, char d, float* e) { *e = b.b + c.b[1] + d; }
__global__ void aligned_first(V128 a, char b) {}
__global__ void big(Big b, uint64_t* out) { *out = b.b[blockIdx.x]; }
__global__ void __launch_bounds__(256, 2) bounded(float* p) { p[threadIdx.x] = 1; }
__global__ void dynamic(float* p) {
  extern __shared__ float x[];
  x[threadIdx.x] = p[1];
  __syncthreads();
  p[0] = x[3];
}
__global__ void says(int x) { printf("%d\n", x); }
__global__ void takes(int** x) { *x = (int*)malloc(*(long*)x); }
__global__ void local(int* x, int n) {
  int a[100];
  for (int i = 0; i < n; i++) a[(i * 7) % 100] = x[i];
  x[n] = a[n % 100];
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTER(...) __cluster_dims__(__VA_ARGS__)
#else
#define CLUSTER(...)
#endif
__global__ void CLUSTER(2, 1, 1) cluster(int* x) { *x = 3; }
}
template <class T, int N>
__global__ void templated(T (*f)(T), T x) {}
template __global__ void templated<double, 3>(double (*)(double), double);
