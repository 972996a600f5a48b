// SPDX-License-Identifier: Apache-2.0
// The driver's linker: two pieces of PTX, one calling the other's function, become one image that is loaded and
// launched.
#include "driver.cuh"

static const char kCaller[] = R"(
.version 7.8
.target sm_75
.address_size 64
.extern .func (.param .b32 result) twist(.param .b32 x);
.visible .entry apply(.param .u64 out, .param .u32 count)
{
  .reg .pred %p;
  .reg .b32 %r<7>;
  .reg .b64 %d<4>;
  ld.param.u64 %d1, [out];
  ld.param.u32 %r1, [count];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p, %r5, %r1;
  @%p bra END;
  {
    .param .b32 x;
    .param .b32 result;
    st.param.b32 [x], %r5;
    call.uni (result), twist, (x);
    ld.param.b32 %r6, [result];
  }
  cvta.to.global.u64 %d1, %d1;
  mul.wide.u32 %d2, %r5, 4;
  add.u64 %d3, %d1, %d2;
  st.global.u32 [%d3], %r6;
END:
  ret;
}
)";

static const char kCallee[] = R"(
.version 7.8
.target sm_75
.address_size 64
.visible .func (.param .b32 result) twist(.param .b32 x)
{
  .reg .b32 %r<4>;
  ld.param.b32 %r1, [x];
  mul.lo.u32 %r2, %r1, %r1;
  xor.b32 %r3, %r2, 255;
  st.param.b32 [result], %r3;
  ret;
}
)";

int main() {
  CHECK(cudaFree(nullptr));
  DRIVER(cuLinkCreate);
  DRIVER(cuLinkAddData);
  DRIVER(cuLinkComplete);
  DRIVER(cuLinkDestroy);
  DRIVER(cuModuleLoadData);
  DRIVER(cuModuleGetFunction);
  DRIVER(cuModuleUnload);
  DRIVER(cuLaunchKernel);
  char errors[4096] = "";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {errors, reinterpret_cast<void*>(sizeof errors)};
  CUlinkState link = nullptr;
  CHECK_CU(p_cuLinkCreate(2, options, values, &link));
  char caller[sizeof kCaller], callee[sizeof kCallee];
  memcpy(caller, kCaller, sizeof caller);
  memcpy(callee, kCallee, sizeof callee);
  CHECK_CU(p_cuLinkAddData(link, CU_JIT_INPUT_PTX, caller, sizeof caller, "caller", 0, nullptr, nullptr));
  CHECK_CU(p_cuLinkAddData(link, CU_JIT_INPUT_PTX, callee, sizeof callee, "callee", 0, nullptr, nullptr));
  void* image = nullptr;
  size_t bytes = 0;
  CHECK_CU(p_cuLinkComplete(link, &image, &bytes));
  EXPECT(bytes > 64 && !memcmp(image, "\177ELF", 4));
  CUmodule module = nullptr;
  CUfunction apply = nullptr;
  CHECK_CU(p_cuModuleLoadData(&module, image));
  CHECK_CU(p_cuLinkDestroy(link));  // the image was the linker's
  CHECK_CU(p_cuModuleGetFunction(&apply, module, "apply"));
  unsigned count = 3000;
  unsigned* out = zeroes<unsigned>(count);
  void* arguments[] = {&out, &count};
  CHECK_CU(p_cuLaunchKernel(apply, 24, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr));
  const std::vector<unsigned> got = back(out, count);
  for (unsigned i = 0; i < count; ++i) EXPECT_EQ(got[i], made(i * i ^ 255, 0u));
  CHECK_CU(p_cuModuleUnload(module));
  CHECK(cudaFree(out));
  return ok("linker");
}
