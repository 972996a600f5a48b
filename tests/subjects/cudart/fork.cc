// SPDX-License-Identifier: Apache-2.0
// fork: before the first call both sides work; afterwards the child is told that it cannot.
#include <sys/wait.h>

#include "program.h"

static int child(void (*body)()) {
  const pid_t pid = fork();
  if (pid == 0) {
    body();
    _exit(0);
  }
  int status = -1;
  EXPECT(waitpid(pid, &status, 0) == pid);
  return status;
}

static void use() {
  void* memory = nullptr;
  unsigned char seen = 0;
  CHECK(cudaMalloc(&memory, 4096));
  CHECK(cudaMemset(memory, 0x42, 4096));
  CHECK(cudaMemcpy(&seen, memory, 1, cudaMemcpyDeviceToHost));
  EXPECT(seen == 0x42);
  CHECK(cudaFree(memory));
}

static void refused() {
  void* memory = nullptr;
  EXPECT_RESULT(cudaMalloc(&memory, 64), cudaErrorInitializationError);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInitializationError);
  int count = 0;
  EXPECT_RESULT(cudaGetDeviceCount(&count), cudaErrorInitializationError);
  EXPECT_RESULT(cudaDeviceSynchronize(), cudaErrorInitializationError);
}

int main() {
  EXPECT_RESULT(cudaGetLastError(), cudaSuccess);
  EXPECT(child(use) == 0);
  use();
  EXPECT(child(refused) == 0);
  use();
  return pass("fork");
}
