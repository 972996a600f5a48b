// SPDX-License-Identifier: Apache-2.0
// Libraries of the runtime: an image loaded from memory while the program runs, its kernels and variables by name.
#include "check.cuh"

static const char kImage[] = R"(
.version 7.8
.target sm_75
.address_size 64
.visible .global .align 4 .u32 factor = 3;
.visible .entry stretch(.param .u64 words, .param .u32 add)
{
  .reg .b32 %r<5>;
  .reg .b64 %d<5>;
  ld.param.u64 %d1, [words];
  ld.param.u32 %r1, [add];
  mov.u32 %r2, %tid.x;
  cvta.to.global.u64 %d1, %d1;
  mul.wide.u32 %d2, %r2, 4;
  add.u64 %d3, %d1, %d2;
  ld.global.u32 %r3, [factor];
  mad.lo.u32 %r4, %r2, %r3, %r1;
  st.global.u32 [%d3], %r4;
  ret;
}
)";

int main() {
  cudaLibrary_t library = nullptr;
  cudaKernel_t kernel = nullptr;
  CHECK(cudaLibraryLoadData(&library, kImage, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CHECK(cudaLibraryGetKernel(&kernel, library, "stretch"));
  EXPECT_ERROR(cudaLibraryGetKernel(&kernel, library, "no_such_kernel"), cudaErrorSymbolNotFound);
  CHECK(cudaLibraryGetKernel(&kernel, library, "stretch"));
  void* factor = nullptr;
  size_t bytes = 0;
  CHECK(cudaLibraryGetGlobal(&factor, &bytes, library, "factor"));
  EXPECT_EQ(bytes, 4);
  uint32_t three = 0, five = 5, *words = zeroes<uint32_t>(256), hundred = 100;
  CHECK(cudaMemcpy(&three, factor, 4, cudaMemcpyDeviceToHost));
  EXPECT_EQ(three, 3);
  CHECK(cudaMemcpy(factor, &five, 4, cudaMemcpyHostToDevice));
  void* arguments[] = {&words, &hundred};
  CHECK(cudaLaunchKernel((const void*)kernel, dim3(1), dim3(256), arguments, 0, 0));
  const std::vector<uint32_t> got = back(words, 256);
  for (uint32_t i = 0; i < 256; ++i) EXPECT_EQ(got[i], made(i * 5 + 100, 0u));
  CHECK(cudaLibraryUnload(library));
  CHECK(cudaFree(words));
  return ok("library");
}
