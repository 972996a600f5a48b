// SPDX-License-Identifier: Apache-2.0
/* Kernels of the driver-API suite as a module of the software GPU: plain C, no dependency.
 *
 * gcc -shared -fPIC -I devproxy/hal/soft/include kernels.c -o kernels.so */
#include "devproxy_soft_module.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define ILLEGAL_ADDRESS 700

static int bad_range(const devproxy_soft_launch* l, uint64_t addr, uint64_t bytes) {
  if (l->services->check_range(l->services->cookie, addr, bytes)) return 0;
  snprintf(l->error, l->error_bytes, "kernel of the test suite: 0x%llx + %llu is outside every allocation",
           (unsigned long long)addr, (unsigned long long)bytes);
  return 1;
}

/* The same for `count` 32-bit words; a count that would wrap is no count. */
static int bad_words(const devproxy_soft_launch* l, uint64_t addr, uint64_t count) {
  return bad_range(l, addr, count > UINT64_MAX / 8 ? UINT64_MAX / 2 : count * 4);
}

#define PARAMS(type)                              \
  if (l->params_bytes < sizeof(type)) return 719; \
  type p;                                         \
  memcpy(&p, l->params, sizeof p)

static void busy(uint64_t us) {
  struct timespec a, b;
  clock_gettime(CLOCK_MONOTONIC, &a);
  do clock_gettime(CLOCK_MONOTONIC, &b);
  while ((uint64_t)(b.tv_sec - a.tv_sec) * 1000000u + (uint64_t)(b.tv_nsec / 1000) < us + (uint64_t)(a.tv_nsec / 1000));
}

struct fill {
  uint64_t dst;
  uint32_t value;
  uint64_t count;
};
static int fill(const devproxy_soft_launch* l) {
  PARAMS(struct fill);
  if (bad_words(l, p.dst, p.count)) return ILLEGAL_ADDRESS;
  uint32_t* w = (uint32_t*)(uintptr_t)p.dst;
  for (uint64_t i = 0; i < p.count; ++i) w[i] = p.value;
  return 0;
}

struct slow_fill {
  uint64_t dst;
  uint32_t value;
  uint64_t count, us;
};
static int slow_fill(const devproxy_soft_launch* l) {
  PARAMS(struct slow_fill);
  if (bad_words(l, p.dst, p.count)) return ILLEGAL_ADDRESS;
  busy(p.us);
  uint32_t* w = (uint32_t*)(uintptr_t)p.dst;
  for (uint64_t i = 0; i < p.count; ++i) w[i] = p.value;
  return 0;
}

struct saxpy {
  float a;
  uint64_t x, y, count;
};
static int saxpy(const devproxy_soft_launch* l) {
  PARAMS(struct saxpy);
  if (bad_words(l, p.x, p.count) || bad_words(l, p.y, p.count)) return ILLEGAL_ADDRESS;
  const float* x = (const float*)(uintptr_t)p.x;
  float* y = (float*)(uintptr_t)p.y;
  for (uint64_t i = 0; i < p.count; ++i) y[i] = p.a * x[i] + y[i];
  return 0;
}

struct copy_words {
  uint64_t dst, src, count;
};
static int copy_words(const devproxy_soft_launch* l) {
  PARAMS(struct copy_words);
  if (bad_words(l, p.dst, p.count) || bad_words(l, p.src, p.count)) return ILLEGAL_ADDRESS;
  memmove((void*)(uintptr_t)p.dst, (const void*)(uintptr_t)p.src, p.count * 4);
  return 0;
}

struct affine {
  uint64_t words;
  uint32_t factor, add;
  uint64_t count;
};
static int affine(const devproxy_soft_launch* l) {
  PARAMS(struct affine);
  if (bad_words(l, p.words, p.count)) return ILLEGAL_ADDRESS;
  uint32_t* w = (uint32_t*)(uintptr_t)p.words;
  for (uint64_t i = 0; i < p.count; ++i) w[i] = w[i] * p.factor + p.add;
  return 0;
}

struct slow {
  uint64_t us;
};
static int slow(const devproxy_soft_launch* l) {
  PARAMS(struct slow);
  busy(p.us);
  return 0;
}

/* Nothing, with 64 bytes of parameters: what a launch itself costs. */
struct noop64 {
  uint64_t words[8];
};
static int noop64(const devproxy_soft_launch* l) {
  (void)l;
  return 0;
}

struct fail {
  int32_t code;
};
static int fail(const devproxy_soft_launch* l) {
  PARAMS(struct fail);
  snprintf(l->error, l->error_bytes, "kernel of the test suite failed on purpose with %d", p.code);
  return p.code;
}

static int crash(const devproxy_soft_launch* l) {
  (void)l;
  *(volatile int*)8 = 1;
  return 0;
}

/* Every thread of the grid notes the launch's shape: out[0..6] = grid, block, shared bytes. */
struct shape {
  uint64_t out;
};
static int shape(const devproxy_soft_launch* l) {
  PARAMS(struct shape);
  if (bad_range(l, p.out, 7 * 4)) return ILLEGAL_ADDRESS;
  uint32_t* w = (uint32_t*)(uintptr_t)p.out;
  memcpy(w, l->grid, 12);
  memcpy(w + 3, l->block, 12);
  w[6] = l->shared_bytes;
  return 0;
}

#define BIG_BYTES 32756 /* with the pointer: CUDA's limit of 32764 bytes of parameters */
struct sum_struct {
  uint64_t out;
  uint8_t bytes[BIG_BYTES];
};
static int sum_struct(const devproxy_soft_launch* l) {
  if (l->params_bytes < 8 + BIG_BYTES) return 719;
  uint64_t out, sum = 0;
  memcpy(&out, l->params, 8);
  if (bad_range(l, out, 8)) return ILLEGAL_ADDRESS;
  for (uint64_t i = 0; i < BIG_BYTES; ++i) sum += (uint64_t)l->params[8 + i] * (i + 1);
  memcpy((void*)(uintptr_t)out, &sum, 8);
  return 0;
}

/* Takes only an `extra` block of any length: out pointer, then bytes. out[0] = weighted sum, out[1] = length. */
static int sum_extra(const devproxy_soft_launch* l) {
  if (l->params_bytes < 8) return 719;
  uint64_t out, result[2] = {0, l->params_bytes};
  memcpy(&out, l->params, 8);
  if (bad_range(l, out, 16)) return ILLEGAL_ADDRESS;
  for (uint64_t i = 8; i < l->params_bytes; ++i) result[0] += (uint64_t)l->params[i] * (i % 251 + 1);
  memcpy((void*)(uintptr_t)out, result, 16);
  return 0;
}

/* Mixed sizes at awkward offsets, as a compiler lays them out. */
struct mixed {
  uint8_t a;
  uint64_t out;
  uint16_t b;
  double c;
  uint8_t d;
  uint32_t e;
};
static int mixed(const devproxy_soft_launch* l) {
  PARAMS(struct mixed);
  if (bad_range(l, p.out, 8)) return ILLEGAL_ADDRESS;
  const double sum = p.a + p.b + p.c + p.d + p.e;
  memcpy((void*)(uintptr_t)p.out, &sum, 8);
  return 0;
}

#define FIELD(type, name) {offsetof(struct type, name), sizeof(((struct type*)0)->name)}
static const struct {
  const char* name;
  devproxy_soft_function f;
} functions[] = {
    {"fill", {.kernel = fill, .n_params = 3, .params = {FIELD(fill, dst), FIELD(fill, value), FIELD(fill, count)}}},
    {"slow_fill",
     {.kernel = slow_fill,
      .n_params = 4,
      .params = {FIELD(slow_fill, dst), FIELD(slow_fill, value), FIELD(slow_fill, count), FIELD(slow_fill, us)}}},
    {"saxpy",
     {.kernel = saxpy,
      .n_params = 4,
      .params = {FIELD(saxpy, a), FIELD(saxpy, x), FIELD(saxpy, y), FIELD(saxpy, count)}}},
    {"copy_words",
     {.kernel = copy_words,
      .n_params = 3,
      .params = {FIELD(copy_words, dst), FIELD(copy_words, src), FIELD(copy_words, count)}}},
    {"affine",
     {.kernel = affine,
      .n_params = 4,
      .params = {FIELD(affine, words), FIELD(affine, factor), FIELD(affine, add), FIELD(affine, count)}}},
    {"slow", {.kernel = slow, .n_params = 1, .params = {FIELD(slow, us)}}},
    {"noop64",
     {.kernel = noop64,
      .n_params = 8,
      .params = {FIELD(noop64, words[0]), FIELD(noop64, words[1]), FIELD(noop64, words[2]), FIELD(noop64, words[3]),
                 FIELD(noop64, words[4]), FIELD(noop64, words[5]), FIELD(noop64, words[6]), FIELD(noop64, words[7])}}},
    {"fail", {.kernel = fail, .n_params = 1, .params = {FIELD(fail, code)}}},
    {"crash", {.kernel = crash}},
    {"shape",
     {.kernel = shape, .max_threads = 256, .shared_bytes = 1024, .n_params = 1, .params = {FIELD(shape, out)}}},
    {"sum_struct", {.kernel = sum_struct, .n_params = 2, .params = {FIELD(sum_struct, out), FIELD(sum_struct, bytes)}}},
    {"sum_extra", {.kernel = sum_extra}},
    {"mixed",
     {.kernel = mixed,
      .n_params = 6,
      .params = {FIELD(mixed, a), FIELD(mixed, out), FIELD(mixed, b), FIELD(mixed, c), FIELD(mixed, d),
                 FIELD(mixed, e)}}},
};

/* Their names: none with UNLISTED, another 200 in their place with MANY. */
#ifdef MANY
#define TEN(n)                                                                                                \
  MANY_NAME #n "0", MANY_NAME #n "1", MANY_NAME #n "2", MANY_NAME #n "3", MANY_NAME #n "4", MANY_NAME #n "5", \
      MANY_NAME #n "6", MANY_NAME #n "7", MANY_NAME #n "8", MANY_NAME #n "9"
#define MANY_NAME "many_kernels_whose_names_do_not_fit_into_one_answer_"
#define HUNDRED(n) \
  TEN(n##0), TEN(n##1), TEN(n##2), TEN(n##3), TEN(n##4), TEN(n##5), TEN(n##6), TEN(n##7), TEN(n##8), TEN(n##9)
DEVPROXY_SOFT_MODULE_EXPORT const char* const devproxy_soft_function_names[] = {HUNDRED(0), HUNDRED(1), NULL};
#elif !defined(UNLISTED)
DEVPROXY_SOFT_MODULE_EXPORT const char* const devproxy_soft_function_names[] = {
    "fill", "slow_fill", "saxpy", "copy_words", "affine",    "slow",  "noop64",
    "fail", "crash",     "shape", "sum_struct", "sum_extra", "mixed", NULL};
#endif

static int get_function(const char* name, devproxy_soft_function* out) {
#ifdef MANY
  if (!strncmp(name, "many_", 5)) name = "fill";
#endif
  for (size_t i = 0; i < sizeof functions / sizeof *functions; ++i)
    if (!strcmp(functions[i].name, name)) {
      *out = functions[i].f;
      return 0;
    }
  return 500;
}

static const uint32_t initial_table[4] = {11, 22, 33, 44};
static const devproxy_soft_global globals[] = {
    {"table", initial_table, sizeof initial_table},
    {"zeroes", NULL, 4096},
};

#ifdef REFUSES_TO_LOAD
static int load(uint32_t device, char* error, uint64_t error_bytes) {
  (void)device;
  snprintf(error, error_bytes, "this module refuses on purpose");
  return 1;
}
#else
#define load NULL
#endif
#ifndef TABLE_ABI
#define TABLE_ABI DEVPROXY_SOFT_MODULE_ABI
#endif

DEVPROXY_SOFT_MODULE_EXPORT const devproxy_soft_module_table devproxy_soft_module = {
    TABLE_ABI, sizeof globals / sizeof *globals, globals, get_function, load};
