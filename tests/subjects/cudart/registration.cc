// SPDX-License-Identifier: Apache-2.0
// What nvcc's output does, by hand: wrappers of every form around an image, kernels and variables by host address,
// launches. The image is a module of the device under test (TEST_KERNELS), so the launches really run.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "program.h"

extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFatBinaryEnd(void**);
void __cudaUnregisterFatBinary(void**);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*);
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int);
char __cudaInitModule(void**);
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st*);
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*);
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*);
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t);
}

struct Wrapper {
  uint32_t magic, version;
  const void* image;
  const void* more;
};

// Host addresses that stand for kernels; what lies there is never called.
static char fill_host, affine_host, shape_host, absent_host, words_host;
static char others[20000];

static const void* map_image() {
  const char* path = getenv("TEST_KERNELS");
  EXPECT(path != nullptr);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  struct stat st;
  EXPECT(fd >= 0 && fstat(fd, &st) == 0);
  const void* image = mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  EXPECT(image != MAP_FAILED);
  close(fd);
  return image;
}

static void add(void** module, char* host, const char* name) {
  __cudaRegisterFunction(module, host, host, name, -1, nullptr, nullptr, nullptr, nullptr, nullptr);
}

static void fill(const void* kernel, void* dst, uint32_t value, uint64_t count, cudaStream_t stream = nullptr) {
  void* args[] = {&dst, &value, &count};
  CHECK(cudaLaunchKernel(kernel, dim3(1), dim3(1), args, 0, stream));
}

static void expect_words(const void* device, uint32_t value, size_t count) {
  std::vector<uint32_t> words(count);
  CHECK(cudaMemcpy(words.data(), device, count * 4, cudaMemcpyDeviceToHost));
  for (const uint32_t w : words) EXPECT(w == value);
}

// As the compiler's code does it for kernel<<<grid, block, shared, stream>>>(args).
static cudaError_t launch_as_compiled(const void* kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                                      void** args) {
  if (__cudaPushCallConfiguration(grid, block, shared, stream) != 0) return cudaErrorUnknown;
  cudaKernel_t handle = nullptr;
  static_cast<void>(__cudaGetKernel(&handle, kernel));
  dim3 g, b;
  size_t s = 0;
  cudaStream_t st = nullptr;
  CHECK(__cudaPopCallConfiguration(&g, &b, &s, &st));
  EXPECT(g.x == grid.x && g.y == grid.y && g.z == grid.z && b.x == block.x && s == shared && st == stream);
  return __cudaLaunchKernel(handle, g, b, args, s, st);
}

static void launches(void* memory) {
  fill(&fill_host, memory, 11, 1000);
  expect_words(memory, 11, 1000);
  uint32_t factor = 3, plus = 2;
  uint64_t count = 1000;
  void* affine[] = {&memory, &factor, &plus, &count};
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  CHECK(launch_as_compiled(&affine_host, dim3(4), dim3(32), 0, stream, affine));
  CHECK(cudaStreamSynchronize(stream));
  expect_words(memory, 35, 1000);
  // The shape of a launch arrives as it was given; nested configurations come back in order.
  uint32_t seen[7];
  void* shape[] = {&memory};
  EXPECT(__cudaPushCallConfiguration(dim3(9, 9, 9), dim3(1), 0, nullptr) == 0);
  CHECK(launch_as_compiled(&shape_host, dim3(3, 4, 5), dim3(8, 2, 1), 128, stream, shape));
  dim3 g, b;
  size_t s = 1;
  cudaStream_t st = stream;
  CHECK(__cudaPopCallConfiguration(&g, &b, &s, &st));
  EXPECT(g.x == 9 && g.z == 9 && s == 0 && st == nullptr);
  EXPECT_RESULT(__cudaPopCallConfiguration(&g, &b, &s, &st), cudaErrorMissingConfiguration);
  cudaGetLastError();
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaMemcpy(seen, memory, sizeof seen, cudaMemcpyDeviceToHost));
  const uint32_t want[] = {3, 4, 5, 8, 2, 1, 128};
  EXPECT(memcmp(seen, want, sizeof want) == 0);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(7, 1, 1);
  config.blockDim = dim3(6, 1, 1);
  config.stream = stream;
  CHECK(cudaLaunchKernelExC(&config, &shape_host, shape));
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaMemcpy(seen, memory, sizeof seen, cudaMemcpyDeviceToHost));
  EXPECT(seen[0] == 7 && seen[3] == 6 && seen[6] == 0);
  // A kernel's handle and its function launch as well.
  cudaKernel_t kernel = nullptr;
  cudaFunction_t function = nullptr;
  CHECK(cudaGetKernel(&kernel, &fill_host));
  CHECK(cudaGetFuncBySymbol(&function, &fill_host));
  EXPECT(kernel != nullptr && function != nullptr);
  fill(kernel, memory, 12, 10);
  expect_words(memory, 12, 10);
  CHECK(cudaStreamDestroy(stream));
}

static void attributes() {
  cudaFuncAttributes a;
  int blocks = 0;
  CHECK(cudaFuncGetAttributes(&a, &fill_host));
  EXPECT(a.maxThreadsPerBlock > 0 && a.maxDynamicSharedSizeBytes > 0);
  CHECK(cudaFuncSetAttribute(&fill_host, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000));
  CHECK(cudaFuncGetAttributes(&a, &fill_host));
  EXPECT(a.maxDynamicSharedSizeBytes == 60000);
  CHECK(cudaFuncSetCacheConfig(&fill_host, cudaFuncCachePreferShared));
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, &fill_host, 128, 0));
  EXPECT(blocks > 0);
  const char* name = nullptr;
  CHECK(cudaFuncGetName(&name, &fill_host));
  EXPECT(strcmp(name, "fill") == 0);
}

static void wrong_launches(void* memory) {
  uint32_t value = 1;
  uint64_t count = 1;
  void* args[] = {&memory, &value, &count};
  const void* f = &fill_host;
  EXPECT_RESULT(cudaLaunchKernel(f, dim3(0), dim3(1), args, 0, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_RESULT(cudaLaunchKernel(f, dim3(1), dim3(2048), args, 0, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_RESULT(cudaLaunchKernel(f, dim3(1), dim3(64, 64), args, 0, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_RESULT(cudaLaunchKernel(f, dim3(1), dim3(1, 1, 1024), args, 0, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_RESULT(cudaLaunchKernel(f, dim3(1), dim3(1), args, 200 << 10 << 10, nullptr), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaLaunchKernel(&absent_host, dim3(1), dim3(1), args, 0, nullptr), cudaErrorInvalidDeviceFunction);
  EXPECT_RESULT(cudaLaunchKernel(&value, dim3(1), dim3(1), args, 0, nullptr), cudaErrorInvalidDeviceFunction);
  EXPECT_RESULT(cudaPeekAtLastError(), cudaErrorInvalidDeviceFunction);
  EXPECT_RESULT(launch_as_compiled(&value, dim3(1), dim3(1), 0, nullptr, args), cudaErrorInvalidDeviceFunction);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidDeviceFunction);
  CHECK(cudaDeviceSynchronize());
}

static void variables() {
  void* at = nullptr;
  size_t bytes = 0;
  uint32_t in[4] = {1, 2, 3, 4}, out[4] = {};
  CHECK(cudaGetSymbolSize(&bytes, &words_host));
  EXPECT(bytes == 16);
  CHECK(cudaGetSymbolAddress(&at, &words_host));
  EXPECT(at != nullptr);
  CHECK(cudaMemcpyToSymbol(&words_host, in, 16, 0, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpyFromSymbol(out, &words_host, 8, 8, cudaMemcpyDeviceToHost));
  EXPECT(out[0] == 3 && out[1] == 4);
  CHECK(cudaMemcpyToSymbolAsync(&words_host, in + 3, 4, 4, cudaMemcpyDefault, nullptr));
  CHECK(cudaMemcpyFromSymbolAsync(out, &words_host, 16, 0, cudaMemcpyDeviceToHost, nullptr));
  CHECK(cudaDeviceSynchronize());
  EXPECT(out[0] == 1 && out[1] == 4 && out[2] == 3);
  EXPECT_RESULT(cudaMemcpyToSymbol(&words_host, in, 16, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaMemcpyToSymbol(&words_host, in, 4, 0, cudaMemcpyDeviceToHost), cudaErrorInvalidMemcpyDirection);
  EXPECT_RESULT(cudaGetSymbolAddress(&at, in), cudaErrorInvalidSymbol);
  cudaGetLastError();
}

// Somebody registers (a library is opened) while others launch.
static void registering_while_launching(const void* image, void* memory) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&, i] {
      auto* own = static_cast<uint32_t*>(memory) + 1024 * (i + 1);
      for (uint32_t n = 1; !stop; ++n) {
        fill(&fill_host, own, n, 16);
        if (n % 50 == 0) CHECK(cudaDeviceSynchronize());
      }
    });
  Wrapper w{0x466243b1, 1, image, nullptr};
  void** module = __cudaRegisterFatBinary(&w);
  for (char& host : others) add(module, &host, "fill");
  __cudaRegisterFatBinaryEnd(module);
  fill(&others[12345], memory, 77, 8);
  expect_words(memory, 77, 8);
  __cudaUnregisterFatBinary(module);
  stop = true;
  for (auto& t : threads) t.join();
  void* args[] = {nullptr};
  EXPECT_RESULT(cudaLaunchKernel(&others[1], dim3(1), dim3(1), args, 0, nullptr), cudaErrorInvalidDeviceFunction);
  cudaGetLastError();
  CHECK(cudaDeviceSynchronize());
}

int main() {
  const void* image = map_image();
  // Nothing is loaded by registering: the driver has not even been initialised.
  Wrapper one{0x466243b1, 1, image, nullptr};
  void** module = __cudaRegisterFatBinary(&one);
  EXPECT(module != nullptr);
  add(module, &fill_host, "fill");
  add(module, &shape_host, "shape");
  add(module, &absent_host, "no_such_kernel");
  __cudaRegisterVar(module, &words_host, &words_host, "table", 0, 16, 0, 0);
  __cudaRegisterFatBinaryEnd(module);
  EXPECT(__cudaInitModule(module));
  // A device-linked program: several units, one image.
  const void* parts[] = {image, nullptr};
  Wrapper linked{0x466243b1, 2, image, parts};
  void** second = __cudaRegisterFatBinary(&linked);
  add(second, &affine_host, "affine");
  __cudaRegisterFatBinaryEnd(second);

  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 1 << 16));
  launches(memory);
  attributes();
  wrong_launches(memory);
  variables();
  registering_while_launching(image, memory);
  // After a reset the modules come back by themselves.
  CHECK(cudaDeviceReset());
  CHECK(cudaMalloc(&memory, 1 << 16));
  launches(memory);
  variables();
  // An image that is none is the launch's error.
  static char bad_host;
  const char nonsense[64] = "no image of any kind";
  Wrapper bad{0x466243b1, 1, nonsense, nullptr};
  void** third = __cudaRegisterFatBinary(&bad);
  add(third, &bad_host, "fill");
  __cudaRegisterFatBinaryEnd(third);
  EXPECT(cudaLaunchKernel(&bad_host, dim3(1), dim3(1), nullptr, 0, nullptr) != cudaSuccess);
  EXPECT(cudaGetLastError() != cudaSuccess);
  __cudaUnregisterFatBinary(third);
  __cudaUnregisterFatBinary(second);
  return pass("registration");
}
