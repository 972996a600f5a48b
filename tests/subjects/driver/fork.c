// SPDX-License-Identifier: Apache-2.0
/* Fork: a child of an uninitialised process starts for itself; a child of an initialised one cannot use the driver, and
 * its parent does not notice that it was there. */
#include <sys/wait.h>
#include "program.h"

static int wait_for(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void use_device(uint32_t value) {
  start();
  CUdeviceptr p;
  CHECK(cuMemAlloc(&p, 4096));
  CHECK(cuMemsetD32(p, value, 1024));
  expect_device_words(p, value, 1024);
  CHECK(cuMemFree(p));
}

int main(void) {
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    use_device(1);
    exit(0);
  }
  /* parent and child use the device at once, each with its own connection */
  use_device(2);
  EXPECT_EQ(wait_for(child), 0);

  CUmodule mod = load_kernels();
  CUfunction slow_fill = kernel(mod, "slow_fill"), affine = kernel(mod, "affine");
  CUstream s;
  CUdeviceptr p;
  void* pinned;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&p, 4096));
  CHECK(cuMemAllocHost(&pinned, 4096));
  launch_slow_fill(slow_fill, s, p, 10, 1024, 30000);
  for (int i = 0; i < 5; ++i) {
    fflush(stdout);
    child = fork();
    if (child == 0) {
      CUdeviceptr q;
      int n;
      CUcontext ctx;
      if (cuMemAlloc(&q, 16) != CUDA_ERROR_NOT_INITIALIZED) _exit(10);
      if (cuInit(0) != CUDA_ERROR_NOT_INITIALIZED) _exit(11);
      if (cuDeviceGetCount(&n) != CUDA_ERROR_NOT_INITIALIZED) _exit(12);
      if (cuCtxGetCurrent(&ctx) != CUDA_ERROR_NOT_INITIALIZED) _exit(13);
      if (cuStreamSynchronize(s) != CUDA_ERROR_NOT_INITIALIZED) _exit(14);
      if (cuMemFree(p) != CUDA_ERROR_NOT_INITIALIZED) _exit(15);
      if (i == 1) exit(0); /* through exit handlers and destructors */
      if (i == 2) abort(); /* dies badly */
      if (i == 3) execl("/bin/true", "true", (char*)NULL);
      _exit(0);
    }
    const int status = wait_for(child);
    EXPECT_EQ(status, i == 2 ? 128 + 6 : 0);
    launch_affine(affine, s, p, 1, 1, 1024);
  }
  CHECK(cuStreamSynchronize(s));
  expect_device_words(p, 15, 1024);
  memset(pinned, 3, 4096);
  CHECK(cuMemcpyHtoD(p, pinned, 4096));
  expect_device_words(p, 0x03030303, 1024);
  return pass("fork");
}
