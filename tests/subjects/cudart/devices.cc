// SPDX-License-Identifier: Apache-2.0
// Two devices: the current one is each thread's own, kernels and variables are loaded on each, copies go between them.
// Needs two GPUs and, as registration.cc, TEST_KERNELS.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "program.h"

extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFatBinaryEnd(void**);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*);
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int);
}

static char fill_host, table_host;

static void register_kernels() {
  const int fd = open(getenv("TEST_KERNELS"), O_RDONLY | O_CLOEXEC);
  struct stat st;
  EXPECT(fd >= 0 && fstat(fd, &st) == 0);
  static struct {
    uint32_t magic, version;
    const void *image, *more;
  } wrapper{0x466243b1, 1, nullptr, nullptr};
  wrapper.image = mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  EXPECT(wrapper.image != MAP_FAILED);
  void** module = __cudaRegisterFatBinary(&wrapper);
  __cudaRegisterFunction(module, &fill_host, &fill_host, "fill", -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  __cudaRegisterVar(module, &table_host, &table_host, "table", 0, 16, 0, 0);
  __cudaRegisterFatBinaryEnd(module);
}

static void fill(void* dst, uint32_t value, uint64_t count, cudaStream_t stream = nullptr) {
  void* args[] = {&dst, &value, &count};
  CHECK(cudaLaunchKernel(&fill_host, dim3(1), dim3(1), args, 0, stream));
}

static void expect_words(const void* device, uint32_t value, size_t count) {
  std::vector<uint32_t> words(count);
  CHECK(cudaMemcpy(words.data(), device, count * 4, cudaMemcpyDefault));
  for (const uint32_t w : words) EXPECT(w == value);
}

int main() {
  register_kernels();
  int count = 0, device = -1;
  CHECK(cudaGetDeviceCount(&count));
  EXPECT(count == 2);
  void* memory[2];
  cudaStream_t streams[2];
  for (int d = 0; d < 2; ++d) {
    CHECK(cudaSetDevice(d));
    CHECK(cudaGetDevice(&device));
    EXPECT(device == d);
    CHECK(cudaMalloc(&memory[d], 4096));
    CHECK(cudaStreamCreate(&streams[d]));
    CHECK(cudaStreamGetDevice(streams[d], &device));
    EXPECT(device == d);
    cudaPointerAttributes a;
    CHECK(cudaPointerGetAttributes(&a, memory[d]));
    EXPECT(a.device == d);
  }
  for (int round = 0; round < 3; ++round)
    for (int d = 0; d < 2; ++d) {
      CHECK(cudaSetDevice(d));
      fill(memory[d], static_cast<uint32_t>(10 * d + round), 1024, streams[d]);
      CHECK(cudaStreamSynchronize(streams[d]));
      expect_words(memory[d], static_cast<uint32_t>(10 * d + round), 1024);
    }
  // A stream of the other device is no stream of this one.
  CHECK(cudaSetDevice(0));
  void* args[] = {&memory[1], nullptr, nullptr};
  EXPECT_RESULT(cudaLaunchKernel(&fill_host, dim3(1), dim3(1), args, 0, streams[1]), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
  // Variables: one on each device.
  for (int d = 0; d < 2; ++d) {
    CHECK(cudaSetDevice(d));
    const uint32_t in[4] = {static_cast<uint32_t>(d), 2, 3, 4};
    CHECK(cudaMemcpyToSymbol(&table_host, in, 16, 0, cudaMemcpyHostToDevice));
  }
  void* at[2];
  for (int d = 0; d < 2; ++d) {
    CHECK(cudaSetDevice(d));
    uint32_t out[4] = {9, 9, 9, 9};
    CHECK(cudaMemcpyFromSymbol(out, &table_host, 16, 0, cudaMemcpyDeviceToHost));
    EXPECT(out[0] == static_cast<uint32_t>(d) && out[3] == 4);
    CHECK(cudaGetSymbolAddress(&at[d], &table_host));
  }
  EXPECT(at[0] != at[1]);
  // Between the two, and from a thread that has chosen the other.
  CHECK(cudaMemcpyPeer(memory[0], 0, memory[1], 1, 4096));
  CHECK(cudaSetDevice(0));
  expect_words(memory[0], 12, 1024);
  std::thread([&] {
    int own = -1;
    CHECK(cudaGetDevice(&own));
    EXPECT(own == 0);  // a new thread begins with the first device
    CHECK(cudaSetDevice(1));
    fill(memory[1], 77, 1024);
    CHECK(cudaDeviceSynchronize());
  }).join();
  CHECK(cudaGetDevice(&device));
  EXPECT(device == 0);
  CHECK(cudaMemcpyPeerAsync(memory[0], 0, memory[1], 1, 4096, streams[0]));
  CHECK(cudaStreamSynchronize(streams[0]));
  expect_words(memory[0], 77, 1024);
  int can = 1;
  CHECK(cudaDeviceCanAccessPeer(&can, 0, 1));
  if (!can) {
    EXPECT_RESULT(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessUnsupported);
    cudaGetLastError();
  }
  // One device is reset; the other does not notice.
  CHECK(cudaSetDevice(1));
  CHECK(cudaDeviceReset());
  CHECK(cudaSetDevice(0));
  fill(memory[0], 5, 16);
  expect_words(memory[0], 5, 16);
  CHECK(cudaSetDevice(1));
  CHECK(cudaMalloc(&memory[1], 64));
  fill(memory[1], 6, 16);
  expect_words(memory[1], 6, 16);
  return pass("devices");
}
