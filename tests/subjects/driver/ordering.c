// SPDX-License-Identifier: Apache-2.0
/* Order across streams: fan-out and fan-in, a ring of streams, copies and kernels mixed; events carry every edge. */
#include "program.h"

enum { kStreams = 6, kWords = 2048, kRounds = 12 };

int main(void) {
  start();
  CUmodule mod = load_kernels();
  CUfunction slow_fill = kernel(mod, "slow_fill"), affine = kernel(mod, "affine"), copy = kernel(mod, "copy_words");
  CUstream s[kStreams];
  CUevent e[kStreams];
  CUdeviceptr buf[kStreams];
  uint32_t host[kStreams][kWords];
  for (int i = 0; i < kStreams; ++i) {
    CHECK(cuStreamCreate(&s[i], CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&e[i], CU_EVENT_DISABLE_TIMING));
    CHECK(cuMemAlloc(&buf[i], sizeof host[i]));
  }

  /* a token goes round all streams: each adds its number to what the one before left */
  uint32_t want = 0;
  CHECK(cuMemsetD32Async(buf[0], 0, kWords, s[0]));
  CHECK(cuEventRecord(e[0], s[0]));
  int last = 0;
  for (int round = 0; round < kRounds; ++round)
    for (int i = 0; i < kStreams; ++i) {
      CHECK(cuStreamWaitEvent(s[i], e[last], 0));
      if (i != last) launch_copy(copy, s[i], buf[i], buf[last], kWords);
      launch_affine(affine, s[i], buf[i], 3, (uint32_t)i + 1, kWords);
      CHECK(cuEventRecord(e[i], s[i]));
      want = want * 3 + (uint32_t)i + 1;
      last = i;
    }
  CHECK(cuEventSynchronize(e[last]));
  expect_device_words(buf[last], want, kWords);

  /* fan-out and fan-in */
  for (uint32_t round = 1; round <= kRounds; ++round) {
    launch_slow_fill(slow_fill, s[0], buf[0], round, kWords, 1500);
    CHECK(cuEventRecord(e[0], s[0]));
    for (int i = 1; i < kStreams; ++i) {
      CHECK(cuStreamWaitEvent(s[i], e[0], 0));
      CHECK(cuMemcpyDtoDAsync(buf[i], buf[0], sizeof host[i], s[i]));
      launch_affine(affine, s[i], buf[i], (uint32_t)i, 7, kWords);
      CHECK(cuMemcpyDtoHAsync(host[i], buf[i], sizeof host[i], s[i]));
      CHECK(cuEventRecord(e[i], s[i]));
      CHECK(cuStreamWaitEvent(s[0], e[i], 0));
    }
    CHECK(cuStreamSynchronize(s[0]));
    for (int i = 1; i < kStreams; ++i) expect_words(host[i], round * (uint32_t)i + 7, kWords);
  }

  /* a copy on one stream, a kernel that changes its source on another, in the order that the event says */
  for (uint32_t round = 0; round < kRounds; ++round) {
    launch_slow_fill(slow_fill, s[1], buf[1], 1000 + round, kWords, 500);
    CHECK(cuMemcpyDtoDAsync(buf[2], buf[1], sizeof host[1], s[1]));
    CHECK(cuEventRecord(e[1], s[1]));
    CHECK(cuStreamWaitEvent(s[2], e[1], 0));
    CHECK(cuMemsetD32Async(buf[1], 0xffffffff, kWords, s[2]));
    CHECK(cuEventRecord(e[2], s[2]));
    CHECK(cuStreamWaitEvent(s[1], e[2], 0));
  }
  CHECK(cuCtxSynchronize());
  expect_device_words(buf[2], 1000 + kRounds - 1, kWords);
  expect_device_words(buf[1], 0xffffffff, kWords);
  return pass("ordering");
}
