// SPDX-License-Identifier: Apache-2.0
// Atomic operations on device memory: sums, extremes, exchanges, a lock-free counter; of blocks of one grid.
#include "check.cuh"

constexpr int kBlocks = 64, kThreads = 256, kAll = kBlocks * kThreads;

struct Result {
  unsigned long long sum;
  unsigned least, most, ors, ands, xors, wrapped;
  unsigned times[8];
  unsigned casts, taken;
  double doubles;
};

__global__ void operate(Result* r, unsigned char* tickets) {
  const unsigned i = unsigned(here());
  atomicAdd(&r->sum, (unsigned long long)(i));
  atomicMin(&r->least, i + 5);
  atomicMax(&r->most, i);
  atomicOr(&r->ors, 1u << (i % 20));
  atomicAnd(&r->ands, ~(1u << (i % 11)));
  atomicXor(&r->xors, i);
  atomicInc(&r->wrapped, 999);
  atomicAdd(&r->times[i % 8], 1u);
  atomicAdd(&r->doubles, 0.5);  // exact in any order
  unsigned old = r->casts, seen;
  while ((seen = atomicCAS(&r->casts, old, old + 3)) != old) old = seen;
  tickets[atomicAdd(&r->taken, 1u)] = 1;
}

int main() {
  Result begin{};
  begin.least = ~0u;
  begin.ands = ~0u;
  Result* memory = device<Result>(1);
  unsigned char* tickets = zeroes<unsigned char>(kAll);
  CHECK(cudaMemcpy(memory, &begin, sizeof begin, cudaMemcpyHostToDevice));
  operate<<<kBlocks, kThreads>>>(memory, tickets);
  LAUNCHED();
  const Result r = back(memory, 1)[0];
  unsigned xors = 0;
  for (unsigned i = 0; i < kAll; ++i) xors ^= i;
  EXPECT_MADE_EQ(r.sum, (unsigned long long)(kAll) * (kAll - 1) / 2);
  EXPECT_MADE_EQ(r.least, 5);
  EXPECT_MADE_EQ(r.most, kAll - 1);
  EXPECT_MADE_EQ(r.ors, (1u << 20) - 1);
  EXPECT_MADE_EQ(r.ands, ~((1u << 11) - 1));
  EXPECT_MADE_EQ(r.xors, xors);
  EXPECT_MADE_EQ(r.wrapped, kAll % 1000);
  for (unsigned one : r.times) EXPECT_MADE_EQ(one, kAll / 8);
  EXPECT_MADE(r.doubles == kAll * 0.5);
  EXPECT_MADE_EQ(r.casts, 3 * kAll);
  EXPECT_ALL(back(tickets, kAll), made(1, 0));
  if (!kernels_run()) EXPECT(!memcmp(&r, &begin, sizeof r));
  CHECK(cudaFree(memory));
  CHECK(cudaFree(tickets));
  return ok("atomics");
}
