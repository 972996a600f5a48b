// SPDX-License-Identifier: Apache-2.0
/* race sync | race bug: two non-blocking streams share a buffer, with and without the events that order them.
 *
 * `sync` must always be right. `bug` is a real race: it prints how many rounds went wrong and exits 0; under chaos some
 * seed must show at least one, since a device-proxy that hid races would hide them from the job's tests too. */
#include "program.h"

enum { kRounds = 40, kWords = 1024 };

int main(int argc, char** argv) {
  const int synchronised = argc < 2 || strcmp(argv[1], "bug") != 0;
  start();
  CUmodule mod = load_kernels();
  CUfunction fill = kernel(mod, "fill"), copy = kernel(mod, "copy_words");
  CUstream writer, reader;
  CUevent written, read;
  CUdeviceptr p, q;
  uint32_t words[kWords];
  int wrong = 0;
  CHECK(cuStreamCreate(&writer, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&reader, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&written, CU_EVENT_DISABLE_TIMING));
  CHECK(cuEventCreate(&read, CU_EVENT_DISABLE_TIMING));
  CHECK(cuMemAlloc(&p, sizeof words));
  CHECK(cuMemAlloc(&q, sizeof words));
  CHECK(cuMemsetD32(p, 0, kWords));
  CHECK(cuCtxSynchronize());
  for (uint32_t i = 1; i <= kRounds; ++i) {
    launch_fill(fill, writer, p, i, kWords);
    if (synchronised) {
      CHECK(cuEventRecord(written, writer));
      CHECK(cuStreamWaitEvent(reader, written, 0));
    }
    launch_copy(copy, reader, q, p, kWords);
    CHECK(cuMemcpyDtoHAsync(words, q, sizeof words, reader));
    CHECK(cuEventRecord(read, reader));
    if (synchronised) CHECK(cuStreamWaitEvent(writer, read, 0));
    CHECK(cuEventSynchronize(read));
    for (int k = 0; k < kWords; ++k)
      if (words[k] != i) {
        ++wrong;
        break;
      }
  }
  CHECK(cuCtxSynchronize());
  printf("wrong rounds: %d of %d\n", wrong, (int)kRounds);
  if (synchronised) EXPECT_EQ(wrong, 0);
  return pass(synchronised ? "race sync" : "race bug");
}
