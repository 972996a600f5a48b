// SPDX-License-Identifier: Apache-2.0
// A kernel compiled while the program runs: through libnvrtc, opened by name, as PTX and as machine code, loaded by the
// driver API. The library's prototypes are written down here: its header may not be there.
#include <dlfcn.h>

#include "driver.cuh"

using Program = void*;

static void* library() {
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"})
    if (void* found = dlopen(name, RTLD_NOW)) return found;
  not_here("libnvrtc.so.13");
}

static const char kSource[] = R"(
template <int N> __device__ int power(int x) { return x * power<N - 1>(x); }
template <> __device__ int power<0>(int) { return 1; }
extern "C" __global__ void cubes(int* out, int count, int add) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = power<3>(i) + add + EXTRA;
}
)";

int main() {
  CHECK(cudaFree(nullptr));
  void* nvrtc = library();
  const auto find = [&](const char* name) {
    void* found = dlsym(nvrtc, name);
    if (!found) fprintf(stderr, "libnvrtc has no %s\n", name), exit(1);
    return found;
  };
  auto create =
      reinterpret_cast<int (*)(Program*, const char*, const char*, int, const char* const*, const char* const*)>(
          find("nvrtcCreateProgram"));
  auto compile = reinterpret_cast<int (*)(Program, int, const char* const*)>(find("nvrtcCompileProgram"));
  auto destroy = reinterpret_cast<int (*)(Program*)>(find("nvrtcDestroyProgram"));
  using Size = int (*)(Program, size_t*);
  using Get = int (*)(Program, char*);
  DRIVER(cuModuleLoadData);
  DRIVER(cuModuleGetFunction);
  DRIVER(cuModuleUnload);
  DRIVER(cuLaunchKernel);

  const int real = compute_capability();
  const char* kinds[] = {"compute", "sm"};
  for (const char* kind : kinds) {
    char architecture[64];
    snprintf(architecture, sizeof architecture, "--gpu-architecture=%s_%d", kind, real);
    const char* options[] = {architecture, "-DEXTRA=1000", "--std=c++17"};
    Program program = nullptr;
    EXPECT_EQ(create(&program, kSource, "cubes.cu", 0, nullptr, nullptr), 0);
    EXPECT_EQ(compile(program, 3, options), 0);
    const bool ptx = !strcmp(kind, "compute");
    size_t bytes = 0;
    EXPECT_EQ(reinterpret_cast<Size>(find(ptx ? "nvrtcGetPTXSize" : "nvrtcGetCUBINSize"))(program, &bytes), 0);
    std::vector<char> image(bytes);
    EXPECT_EQ(reinterpret_cast<Get>(find(ptx ? "nvrtcGetPTX" : "nvrtcGetCUBIN"))(program, image.data()), 0);
    EXPECT_EQ(destroy(&program), 0);
    CUmodule module = nullptr;
    CUfunction cubes = nullptr;
    CHECK_CU(p_cuModuleLoadData(&module, image.data()));
    CHECK_CU(p_cuModuleGetFunction(&cubes, module, "cubes"));
    int count = 1000, add = 7;
    int* out = zeroes<int>(count);
    void* arguments[] = {&out, &count, &add};
    CHECK_CU(p_cuLaunchKernel(cubes, 8, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr));
    const std::vector<int> got = back(out, count);
    for (int i = 0; i < count; ++i) EXPECT_EQ(got[i], made(i * i * i + 1007, 0));
    CHECK_CU(p_cuModuleUnload(module));
    CHECK(cudaFree(out));
  }
  return ok("nvrtc");
}
