// SPDX-License-Identifier: Apache-2.0
// What a launch costs through our libcudart, beside cuLaunchKernel of the same kernel in the same run. Prints one line
// of JSON. Needs TEST_KERNELS (tests/subjects/driver/kernels.c), whose noop64 is registered as nvcc's output does it, among as
// many other kernels as a large library registers.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "tests/bench/measure.h"

extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFatBinaryEnd(void**);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*);
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st*);
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*);
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*);
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t);
}

namespace {

constexpr int kGroup = 20, kBurst = 500;
char g_hosts[30'000 * 16];  // host addresses as far apart as the stubs of kernels are

void check(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "bench_cudart: %s: %s\n", what, cudaGetErrorString(cudaPeekAtLastError()));
  exit(1);
}
#define CHECK(condition) check(condition, #condition)

const void* map_kernels() {
  const char* path = getenv("TEST_KERNELS");
  CHECK(path != nullptr);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  struct stat st;
  CHECK(fd >= 0 && fstat(fd, &st) == 0);
  const void* image = mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  CHECK(image != MAP_FAILED);
  close(fd);
  return image;
}

}  // namespace

int main() {
  struct {
    uint32_t magic, version;
    const void *image, *more;
  } wrapper{0x466243b1, 1, map_kernels(), nullptr};
  void** module = __cudaRegisterFatBinary(&wrapper);
  const uint64_t begin = bench::now_ns();
  for (size_t i = 0; i < sizeof g_hosts; i += 16)
    __cudaRegisterFunction(module, g_hosts + i, g_hosts + i, "noop64", -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  const double register_ns = static_cast<double>(bench::now_ns() - begin) / (sizeof g_hosts / 16);
  __cudaRegisterFatBinaryEnd(module);
  const void* host = g_hosts + 16 * 12345;

  uint64_t p[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  void* params[] = {&p[0], &p[1], &p[2], &p[3], &p[4], &p[5], &p[6], &p[7]};
  cudaStream_t s;
  CUfunction f = nullptr;
  cudaKernel_t kernel = nullptr;
  CHECK(cudaStreamCreate(&s) == cudaSuccess);
  CHECK(cudaGetFuncBySymbol(&f, host) == cudaSuccess);
  CHECK(__cudaGetKernel(&kernel, host) == cudaSuccess);
  auto driver = [&] { CHECK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, params, nullptr) == CUDA_SUCCESS); };
  auto runtime = [&] { CHECK(cudaLaunchKernel(host, dim3(1), dim3(1), params, 0, s) == cudaSuccess); };
  auto compiled = [&] {  // what nvcc makes of kernel<<<1, 1, 0, s>>>(...)
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    CHECK(__cudaPushCallConfiguration(dim3(1), dim3(1), 0, s) == 0);
    CHECK(__cudaPopCallConfiguration(&grid, &block, &shared, &stream) == cudaSuccess);
    CHECK(__cudaLaunchKernel(kernel, grid, block, params, shared, stream) == cudaSuccess);
  };
  std::vector<double> driver_ns, runtime_ns, compiled_ns, current_ns;
  auto burst = [&](auto& launch, std::vector<double>* out) {
    for (int i = 0; i < kBurst; i += kGroup) {
      const double each = bench::time_each_ns(kGroup, launch);
      if (out) out->push_back(each);
    }
    CHECK(cudaStreamSynchronize(s) == cudaSuccess);
    usleep(200);
  };
  auto device = [&] {
    int d = 0;
    CHECK(cudaGetDevice(&d) == cudaSuccess);
  };
  for (int round = -20; round < 150; ++round) {  // in turn, so that the machine's moods are shared
    burst(driver, round < 0 ? nullptr : &driver_ns);
    burst(runtime, round < 0 ? nullptr : &runtime_ns);
    burst(compiled, round < 0 ? nullptr : &compiled_ns);
    burst(device, round < 0 ? nullptr : &current_ns);
  }
  bench::Json json;
  json.put("driver_launch_ns", bench::quantiles(driver_ns));
  json.put("cudart_launch_ns", bench::quantiles(runtime_ns));
  json.put("cudart_compiled_launch_ns", bench::quantiles(compiled_ns));
  json.put("cudart_get_device_ns", bench::quantiles(current_ns));
  json.put("cudart_register_kernel_ns", register_ns);
  json.print();
  return 0;
}
