// SPDX-License-Identifier: Apache-2.0
/* What calls cost, as one line of JSON: microseconds per call (medians), GB/s of copies. Run natively and through the
 * proxy in turn by scripts/gpu_check.py; compiled against libcuda.so.1 like the programs of tests/subjects/driver.
 *
 *   cost [small]     small: without the copies of 64 MiB, for a machine that has no GPU to be measured */
#include <time.h>

#include "../driver/program.h"

enum { kRounds = 40, kBatch = 200, kMost = 512 };

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double median(double* values, int n) {
  qsort(values, (size_t)n, sizeof *values, compare);
  return values[n / 2];
}

static int figures;
static void say(const char* name, double value) { printf("%s\"%s\": %.3f", figures++ ? ", " : "{", name, value); }

/* Per call: the median over rounds of a batch without waits; what waits for the device lies between the rounds. */
#define ASYNC(name, call)                             \
  do {                                                \
    double t[kRounds];                                \
    for (int r = -2; r < kRounds; ++r) {              \
      const double begin = now_us();                  \
      for (int i = 0; i < kBatch; ++i) CHECK(call);   \
      if (r >= 0) t[r] = (now_us() - begin) / kBatch; \
      CHECK(cuStreamSynchronize(s));                  \
    }                                                 \
    say(name "_us", median(t, kRounds));              \
  } while (0)

/* Per call, each timed alone; `calls` ends with a wait where there is something to wait for. */
#define EACH(name, times, calls)           \
  do {                                     \
    double t[kMost];                       \
    for (int i = -3; i < (times); ++i) {   \
      const double begin = now_us();       \
      calls;                               \
      if (i >= 0) t[i] = now_us() - begin; \
    }                                      \
    say(name "_us", median(t, times));     \
  } while (0)

int main(int argc, char** argv) {
  const int small = argc > 1 && strcmp(argv[1], "small") == 0;
  start();
  CUmodule mod = load_kernels();
  CUfunction noop = kernel(mod, "noop64");
  CUstream s;
  CUevent e;
  CUdeviceptr d, d2, q;
  const size_t largest = small ? 1u << 20 : 64u << 20;
  uint64_t words[8] = {0};
  void* params[8];
  void *pinned, *pageable = malloc(largest);
  for (int i = 0; i < 8; ++i) params[i] = &words[i];
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  CHECK(cuMemAlloc(&d, largest));
  CHECK(cuMemAlloc(&d2, largest));
  CHECK(cuMemHostAlloc(&pinned, largest, 0));
  memset(pageable, 1, largest);
  memset(pinned, 2, largest);

  ASYNC("launch_async", launch1(noop, s, params));
  ASYNC("event_record", cuEventRecord(e, s));
  ASYNC("memset_4KiB", cuMemsetD8Async(d, 0, 4096, s));
  ASYNC("event_query_done", cuEventQuery(e));
  EACH("launch_and_synchronize", 500, CHECK(launch1(noop, s, params)); CHECK(cuStreamSynchronize(s)));
  EACH("synchronize_idle", 500, CHECK(cuStreamSynchronize(s)));
  size_t a, b;
  EACH("mem_get_info", 200, CHECK(cuMemGetInfo(&a, &b)));
  EACH("alloc_and_free_1MiB", 200, CHECK(cuMemAlloc(&q, 1 << 20)); CHECK(cuMemFree(q)));
  /* a step like a small training loop's: 40 launches, then a scalar back */
  EACH("step_40_launches", 300, {
    for (int k = 0; k < 40; ++k) CHECK(launch1(noop, s, params));
    CHECK(cuMemcpyDtoHAsync(words, d, 4, s));
    CHECK(cuStreamSynchronize(s));
  });
  const struct {
    const char* name;
    size_t bytes;
    int times;
  } sizes[] = {{"4KiB", 4096, 300}, {"1MiB", 1 << 20, 100}, {"64MiB", 64u << 20, 10}};
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes && sizes[k].bytes <= largest; ++k)
    for (int kind = 0; kind < 5; ++kind) {
      static const char* const kKinds[] = {"h2d_pageable", "d2h_pageable", "h2d_pinned", "d2h_pinned", "d2d"};
      void* host = kind < 2 ? pageable : pinned;
      const size_t n = sizes[k].bytes;
      double t[kMost];
      for (int i = -2; i < sizes[k].times; ++i) {
        const double begin = now_us();
        if (kind == 4)
          CHECK(cuMemcpyDtoDAsync(d2, d, n, s));
        else if (kind % 2)
          CHECK(cuMemcpyDtoHAsync(host, d, n, s));
        else
          CHECK(cuMemcpyHtoDAsync(d, host, n, s));
        CHECK(cuStreamSynchronize(s));
        if (i >= 0) t[i] = now_us() - begin;
      }
      const double us = median(t, sizes[k].times);
      char name[64];
      snprintf(name, sizeof name, "%s_%s_us", kKinds[kind], sizes[k].name);
      say(name, us);
      snprintf(name, sizeof name, "%s_%s_GBps", kKinds[kind], sizes[k].name);
      say(name, (double)n / us / 1e3);
    }
  printf("}\n");
  return pass("cost");
}
