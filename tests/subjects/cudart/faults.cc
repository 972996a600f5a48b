// SPDX-License-Identifier: Apache-2.0
// A kernel's fault sticks: every later call returns it, and the last error stays whatever is asked. Needs TEST_KERNELS.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "program.h"

extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFatBinaryEnd(void**);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*);
}

int main() {
  const int fd = open(getenv("TEST_KERNELS"), O_RDONLY | O_CLOEXEC);
  struct stat st;
  EXPECT(fd >= 0 && fstat(fd, &st) == 0);
  static char fail_host;
  static struct {
    uint32_t magic, version;
    const void *image, *more;
  } wrapper{0x466243b1, 1, nullptr, nullptr};
  wrapper.image = mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  EXPECT(wrapper.image != MAP_FAILED);
  void** module = __cudaRegisterFatBinary(&wrapper);
  __cudaRegisterFunction(module, &fail_host, &fail_host, "fail", -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  __cudaRegisterFatBinaryEnd(module);

  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 64));
  int32_t code = cudaErrorIllegalAddress;
  void* args[] = {&code};
  CHECK(cudaLaunchKernel(&fail_host, dim3(1), dim3(1), args, 0, nullptr));  // asynchronous: the launch itself is fine
  EXPECT_RESULT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  EXPECT_RESULT(cudaPeekAtLastError(), cudaErrorIllegalAddress);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorIllegalAddress);  // asking does not clear it
  EXPECT_RESULT(cudaMalloc(&memory, 64), cudaErrorIllegalAddress);
  EXPECT_RESULT(cudaMemset(memory, 0, 64), cudaErrorIllegalAddress);
  EXPECT_RESULT(cudaLaunchKernel(&fail_host, dim3(1), dim3(1), args, 0, nullptr), cudaErrorIllegalAddress);
  EXPECT(strncmp(cudaGetErrorString(cudaErrorIllegalAddress), "an illegal memory access", 24) == 0);
  std::thread([] {  // it is the context's, so another thread meets it too, at its first call
    EXPECT_RESULT(cudaGetLastError(), cudaSuccess);
    EXPECT_RESULT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    EXPECT_RESULT(cudaGetLastError(), cudaErrorIllegalAddress);
  })
      .join();
  return pass("faults");
}
