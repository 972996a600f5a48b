// SPDX-License-Identifier: Apache-2.0
// An assertion that fails in a kernel is cudaErrorAssert for the process, for good; with the argument `text` also: its
// text is on standard error. The failing one is a child: nothing can be done in it afterwards.
// run:
// run: text
#include <sys/wait.h>
#include <unistd.h>

#include <cassert>
#include <string>

#include "check.cuh"

__global__ void only_small(int limit) { assert(int(threadIdx.x) < limit); }

static int child() {
  only_small<<<1, 8>>>(8);  // holds
  LAUNCHED();
  CHECK(cudaDeviceSynchronize());
  only_small<<<1, 8>>>(5);
  LAUNCHED();
  if (!kernels_run()) return ok("assert, the child");
  EXPECT_RESULT(cudaDeviceSynchronize(), cudaErrorAssert);
  void* memory = nullptr;
  EXPECT_RESULT(cudaMalloc(&memory, 64), cudaErrorAssert);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorAssert);
  EXPECT_RESULT(cudaDeviceSynchronize(), cudaErrorAssert);  // it stays
  return 0;
}

int main(int count, char** arguments) {
  const char* what = count > 1 ? arguments[1] : "";
  if (!strcmp(what, "child")) return child();
  int pipe_ends[2];
  EXPECT(!pipe(pipe_ends));
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(pipe_ends[1], 2);
    execl("/proc/self/exe", arguments[0], "child", nullptr);
    _exit(127);
  }
  close(pipe_ends[1]);
  std::string said;
  char piece[4096];
  for (ssize_t n; (n = read(pipe_ends[0], piece, sizeof piece)) > 0;) said.append(piece, n);
  int status = 0;
  EXPECT(waitpid(pid, &status, 0) == pid);
  if (!WIFEXITED(status) || WEXITSTATUS(status)) {
    fprintf(stderr, "%s", said.c_str());
    fprintf(stderr, "%s:%d: the child ended with status 0x%x\n", __FILE__, __LINE__, status);
    return 1;
  }
  const bool told = said.find("Assertion `int(threadIdx.x) < limit` failed") != std::string::npos;
  if (!strcmp(what, "text") && kernels_run() && !told) {
    fprintf(stderr, "the assertion's text is not on standard error, only: %s\n", said.c_str());
    return 1;
  }
  printf("ok assert%s\n", kernels_run() ? "" : " (without kernels)");
  return 0;
}
