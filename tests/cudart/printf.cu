// SPDX-License-Identifier: Apache-2.0
// What kernels print is on the program's own standard output once it has waited for them.
#include <unistd.h>

#include <string>

#include "check.cuh"

__global__ void speak(int number, const char* word) {
  printf("thread %d of block %d: number %d, half %.2f, %s\n", int(threadIdx.x), int(blockIdx.x), number, number * 0.5,
         "said once each");
}

int main() {
  fflush(stdout);
  const int terminal = dup(1);
  FILE* kept = tmpfile();
  EXPECT(kept);
  dup2(fileno(kept), 1);
  speak<<<3, 4>>>(7, nullptr);
  LAUNCHED();
  CHECK(cudaDeviceSynchronize());
  fflush(stdout);
  speak<<<1, 1>>>(8, nullptr);
  LAUNCHED();
  CHECK(cudaStreamSynchronize(0));
  fflush(stdout);
  dup2(terminal, 1);
  close(terminal);
  std::string said(1 << 16, 0);
  rewind(kept);
  said.resize(fread(said.data(), 1, said.size(), kept));
  fclose(kept);
  const auto count = [&](const char* line) {
    size_t times = 0;
    for (size_t at = 0; (at = said.find(line, at)) != std::string::npos; ++at) ++times;
    return times;
  };
  for (int block = 0; block < 3; ++block)
    for (int thread = 0; thread < 4; ++thread) {
      char line[200];
      snprintf(line, sizeof line, "thread %d of block %d: number 7, half 3.50, said once each\n", thread, block);
      if (kernels_run() && count(line) != 1) {
        fprintf(stderr, "of the kernel's output, this is there %zu times: %s; all of it: %s\n", count(line), line,
                said.c_str());
        return 1;
      }
    }
  EXPECT_MADE_EQ(count("number 8, half 4.00"), 1);
  return ok("printf");
}
