// SPDX-License-Identifier: Apache-2.0
// PTX within a kernel: arithmetic with carry, permutation of bytes, special registers, loads with a cache hint, a
// predicate.
#include "check.cuh"

constexpr int kThreads = 128;

struct Out {
  unsigned low, high, permuted, lane, block, counted, hinted, chosen, warp_size;
  unsigned long long wide;
};

__global__ void ptx(Out* out, const unsigned* in) {
  const unsigned i = unsigned(here()), a = 0xFFFFFF00u + i, b = 0x1234u * i;
  Out& mine = out[i];
  asm("add.cc.u32 %0, %2, %3;\n\taddc.u32 %1, %4, 7;" : "=r"(mine.low), "=r"(mine.high) : "r"(a), "r"(b), "r"(i));
  asm("prmt.b32 %0, %1, %2, 0x1537;" : "=r"(mine.permuted) : "r"(a), "r"(b));
  asm("mov.u32 %0, %%laneid;" : "=r"(mine.lane));
  asm("mov.u32 %0, %%ctaid.x;" : "=r"(mine.block));
  asm("popc.b32 %0, %1;" : "=r"(mine.counted) : "r"(a ^ b));
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(mine.hinted) : "l"(in + i) : "memory");
  asm("{\n\t.reg .pred p;\n\tsetp.gt.u32 p, %1, 60;\n\tselp.u32 %0, 111, 222, p;\n\t}" : "=r"(mine.chosen) : "r"(i));
  asm("mov.u32 %0, WARP_SZ;" : "=r"(mine.warp_size));
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(mine.wide) : "r"(a), "r"(b), "l"(5ull));
}

int main() {
  std::vector<unsigned> in(2 * kThreads);
  for (unsigned i = 0; i < in.size(); ++i) in[i] = i * i + 17;
  unsigned* input = device_of(in);
  Out* out = zeroes<Out>(in.size());
  ptx<<<2, kThreads>>>(out, input);
  LAUNCHED();
  const std::vector<Out> got = back(out, in.size());
  for (unsigned i = 0; i < got.size(); ++i) {
    const Out &o = got[i], nothing{};
    if (!kernels_run()) {
      EXPECT(!memcmp(&o, &nothing, sizeof o));
      continue;
    }
    const unsigned a = 0xFFFFFF00u + i, b = 0x1234u * i;
    const unsigned long long sum = (unsigned long long)(a) + b, both = (unsigned long long)(b) << 32 | a;
    unsigned permuted = 0, counted = 0;
    for (int k = 0; k < 4; ++k) permuted |= unsigned(both >> 8 * (0x1537 >> 4 * k & 7) & 0xFF) << 8 * k;
    for (int k = 0; k < 32; ++k) counted += (a ^ b) >> k & 1;
    EXPECT_EQ(o.low, unsigned(sum));
    EXPECT_EQ(o.high, i + 7 + unsigned(sum >> 32));
    EXPECT_EQ(o.permuted, permuted);
    EXPECT_EQ(o.lane, i % 32);
    EXPECT_EQ(o.block, i / kThreads);
    EXPECT_EQ(o.counted, counted);
    EXPECT_EQ(o.hinted, in[i]);
    EXPECT_EQ(o.chosen, i > 60 ? 111 : 222);
    EXPECT_EQ(o.warp_size, 32);
    EXPECT_EQ(o.wide, (unsigned long long)(a)*b + 5);
  }
  CHECK(cudaFree(input));
  CHECK(cudaFree(out));
  return ok("inline_ptx");
}
