// SPDX-License-Identifier: Apache-2.0
// Batches of copies under the runtime's names; CUDA 12 says which copy was wrong.
#include "program.h"

static cudaError_t batch(void** to, void** from, size_t* sizes, size_t count, cudaMemcpyAttributes* attrs,
                         size_t* firsts, size_t n, size_t* where, cudaStream_t s) {
#if CUDART_VERSION >= 13000
  (void)where;
  return cudaMemcpyBatchAsync(to, const_cast<const void* const*>(from), sizes, count, attrs, firsts, n, s);
#else
  return cudaMemcpyBatchAsync(to, from, sizes, count, attrs, firsts, n, where, s);
#endif
}

static cudaError_t batch_3d(size_t count, cudaMemcpy3DBatchOp* ops, size_t* where, cudaStream_t s) {
#if CUDART_VERSION >= 13000
  (void)where;
  return cudaMemcpy3DBatchAsync(count, ops, 0, s);
#else
  return cudaMemcpy3DBatchAsync(count, ops, where, 0, s);
#endif
}

static void expect_where(size_t where, size_t wanted) {
  EXPECT(CUDART_VERSION >= 13000 ? where == 77 : where == wanted);
}

int main() {
  constexpr size_t kBytes = 1 << 20;
  char *a, *b, *pinned;
  cudaStream_t s;
  size_t where = 77;
  std::vector<char> up(kBytes), down(kBytes);
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&a), kBytes));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&b), kBytes));
  CHECK(cudaMallocHost(reinterpret_cast<void**>(&pinned), kBytes));
  for (size_t i = 0; i < kBytes; ++i) up[i] = static_cast<char>(i * 5 + (i >> 9)), pinned[i] = static_cast<char>(i * 3);

  cudaMemcpyAttributes attrs[2] = {};
  attrs[0].srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attrs[1].srcAccessOrder = cudaMemcpySrcAccessOrderDuringApiCall;
  attrs[1].flags = cudaMemcpyFlagPreferOverlapWithCompute;
  void* to[] = {a, b + 4096};
  void* from[] = {up.data(), pinned};
  size_t sizes[] = {kBytes, 70000}, firsts[] = {0, 1};
  Gate gate;
  gate.close(s);
  CHECK(batch(to, from, sizes, 2, attrs, firsts, 2, &where, s));
  expect_where(where, 77);
  memset(pinned, 0, 70000);  // it was read during the call
  EXPECT_RESULT(cudaStreamQuery(s), cudaErrorNotReady);
  gate.open();
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaMemcpy(down.data(), a, kBytes, cudaMemcpyDefault));
  EXPECT(down == up);
  CHECK(cudaMemcpy(down.data(), b + 4096, 70000, cudaMemcpyDefault));
  for (size_t i = 0; i < 70000; ++i) EXPECT(down[i] == static_cast<char>(i * 3));

  CHECK(cudaMemset(a, 1, kBytes));
  CHECK(cudaStreamSynchronize(nullptr));
  from[0] = b, from[1] = b + kBytes - 69999;  // the second one ends beyond its memory
  EXPECT_RESULT(batch(to, from, sizes, 2, attrs, firsts, 2, &where, s), cudaErrorInvalidValue);
  expect_where(where, 1);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidValue);
  where = 77;
  EXPECT_RESULT(batch(to, from, sizes, 1, attrs, firsts, 1, &where, nullptr), cudaErrorInvalidValue);
  expect_where(where, static_cast<size_t>(-1));
  EXPECT_RESULT(batch(nullptr, from, sizes, 1, attrs, firsts, 1, &where, s), cudaErrorInvalidValue);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(down.data(), a, 100, cudaMemcpyDefault));
  for (size_t i = 0; i < 100; ++i) EXPECT(down[i] == 1);
  from[1] = b;
  sizes[0] = 100, sizes[1] = 100;
  CHECK(batch(to, from, sizes, 2, attrs, firsts, 2, nullptr, s));

  cudaMemcpy3DBatchOp ops[2] = {};
  ops[0].src.type = ops[0].dst.type = cudaMemcpyOperandTypePointer;
  ops[0].src.op.ptr.ptr = up.data(), ops[0].src.op.ptr.rowLength = 100;
  ops[0].dst.op.ptr.ptr = a;
  ops[0].extent = {10, 3, 1};
  ops[0].srcAccessOrder = cudaMemcpySrcAccessOrderAny;
  ops[1] = ops[0];
  ops[1].dst.op.ptr.ptr = a + 30;
  where = 77;
  CHECK(batch_3d(2, ops, &where, s));
  expect_where(where, 77);
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaMemcpy(down.data(), a, 60, cudaMemcpyDefault));
  for (size_t i = 0; i < 60; ++i) EXPECT(down[i] == up[i % 30 / 10 * 100 + i % 10]);
  ops[1].extent.depth = 0;
  EXPECT_RESULT(batch_3d(2, ops, &where, s), cudaErrorInvalidValue);
  expect_where(where, 1);
  cudaGetLastError();

  CHECK(cudaStreamDestroy(s));
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
  CHECK(cudaFreeHost(pinned));
  return pass("batches");
}
