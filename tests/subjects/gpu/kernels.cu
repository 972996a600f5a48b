// SPDX-License-Identifier: Apache-2.0
// The driver-API suite's kernels for a real GPU: the same entry points, parameters and results as
// tests/subjects/driver/kernels.c, and those that the stages of scripts/gpu_check.py need. The suite launches most of them
// with one thread; each is right with any number of them.
//
// nvcc -cubin -arch=sm_90 kernels.cu, nvcc -ptx -arch=compute_90 kernels.cu (scripts/gpu_bundle.py)
#include <stdint.h>

#define ENTRY extern "C" __global__ void
#define EACH(i, count)                                                                         \
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x, all_ = (count); i < all_; \
       i += (uint64_t)gridDim.x * blockDim.x)

extern "C" {
__device__ uint32_t table[4] = {11, 22, 33, 44};
__device__ uint32_t zeroes[1024];
__constant__ uint32_t settings[4] = {1, 2, 3, 4};
}

__device__ static uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ static void busy(uint64_t us) {
  const uint64_t begin = now_ns();
  while (now_ns() - begin < us * 1000) __nanosleep(200);
}

// -- as in tests/subjects/driver/kernels.c
// ------------------------------------------------------------------------------------

ENTRY fill(uint32_t* dst, uint32_t value, uint64_t count) { EACH(i, count) dst[i] = value; }

ENTRY slow_fill(uint32_t* dst, uint32_t value, uint64_t count, uint64_t us) {
  busy(us);
  EACH(i, count) dst[i] = value;
}

// No fused multiply-add: kernels.c rounds twice, and the results are compared bit for bit.
ENTRY saxpy(float a, const float* x, float* y, uint64_t count) {
  EACH(i, count) y[i] = __fadd_rn(__fmul_rn(a, x[i]), y[i]);
}

ENTRY copy_words(uint32_t* dst, const uint32_t* src, uint64_t count) { EACH(i, count) dst[i] = src[i]; }

ENTRY affine(uint32_t* words, uint32_t factor, uint32_t add, uint64_t count) {
  EACH(i, count) words[i] = words[i] * factor + add;
}

ENTRY slow(uint64_t us) { busy(us); }

ENTRY noop64(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {}

// A kernel cannot choose the error of its end: 710 is the device's assert, everything else a trap (719 or 716).
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
ENTRY fail(int32_t code) {
  if (code == 710) __assertfail("failed on purpose", "kernels.cu", __LINE__, "fail", 1);
  __trap();
}

ENTRY crash() { *(volatile int*)8 = 1; }

ENTRY __launch_bounds__(256) shape(uint32_t* out) {
  __shared__ volatile uint32_t kept[256];  // the 1024 bytes that module.c asks for
  kept[threadIdx.x] = 1;
  uint32_t dynamic_bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(dynamic_bytes));
  out[0] = gridDim.x, out[1] = gridDim.y, out[2] = gridDim.z;
  out[3] = blockDim.x, out[4] = blockDim.y, out[5] = blockDim.z;
  out[6] = dynamic_bytes + 0 * kept[threadIdx.x];
}

struct Big {
  uint8_t bytes[32756];  // with the pointer: CUDA's limit of 32764 bytes of parameters
};
ENTRY sum_struct(uint64_t* out, const __grid_constant__ Big big) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < sizeof big.bytes; ++i) sum += (uint64_t)big.bytes[i] * (i + 1);
  *out = sum;
}

// kernels.c has sum_extra too, of any length: no kernel of a real GPU takes that.

ENTRY mixed(uint8_t a, double* out, uint16_t b, double c, uint8_t d, uint32_t e) { *out = a + b + c + d + e; }

// -- for gpu_check
// ------------------------------------------------------------------------------------------------------

// Waits for *gate (host memory) to be not 0, at most `us` microseconds. out, where it is not null: how it ended.
ENTRY spin(const volatile uint32_t* gate, uint64_t us, uint32_t* out) {
  const uint64_t begin = now_ns();
  uint32_t seen = 0;
  while (!(seen = gate ? *gate : 0) && now_ns() - begin < us * 1000) __nanosleep(200);
  if (out) *out = seen ? 1 : 2;
}

ENTRY count_up(unsigned long long* counter, uint64_t times) {
  for (uint64_t i = 0; i < times; ++i) atomicAdd(counter, 1ull);
}

ENTRY bump_table(uint32_t by) {
  if (threadIdx.x < 4) table[threadIdx.x] += by + settings[threadIdx.x] * 0;
}

// -- a training step in three kernels: y = tanh(x W1) w2, squared error, plain gradient descent. Every sum has one
// order, so two runs are equal bit for bit.

#define HIDDEN 64
#define INPUTS 32

// h[i][j] = tanh(sum_k x[i][k] w1[k][j]); one thread for each (i, j)
ENTRY train_hidden(const float* x, const float* w1, float* h, uint32_t rows) {
  EACH(n, (uint64_t)rows * HIDDEN) {
    float sum = 0;
    for (int k = 0; k < INPUTS; ++k) sum = fmaf(x[n / HIDDEN * INPUTS + k], w1[k * HIDDEN + n % HIDDEN], sum);
    h[n] = tanhf(sum);
  }
}

// error[i] = sum_j h[i][j] w2[j] - y[i]
ENTRY train_error(const float* h, const float* w2, const float* y, float* error, uint32_t rows) {
  EACH(i, rows) {
    float sum = 0;
    for (int j = 0; j < HIDDEN; ++j) sum = fmaf(h[i * HIDDEN + j], w2[j], sum);
    error[i] = sum - y[i];
  }
}

// One thread for each hidden unit j: its column of w1 and its w2. loss: of the step before, by thread 0.
ENTRY train_update(const float* x, const float* h, const float* error, float* w1, float* w2, float* loss, uint32_t rows,
                   float rate) {
  EACH(j, HIDDEN) {
    float g2 = 0, squares = 0, g1[INPUTS] = {0};
    const float w = w2[j], scale = rate / rows;
    for (uint32_t i = 0; i < rows; ++i) {
      const float e = error[i], a = h[i * HIDDEN + j], back = e * w * (1 - a * a);
      g2 = fmaf(e, a, g2);
      if (j == 0) squares = fmaf(e, e, squares);
      for (int k = 0; k < INPUTS; ++k) g1[k] = fmaf(back, x[i * INPUTS + k], g1[k]);
    }
    w2[j] = w - scale * g2;
    for (int k = 0; k < INPUTS; ++k) w1[k * HIDDEN + j] -= scale * g1[k];
    if (j == 0) *loss = squares / rows;
  }
}
