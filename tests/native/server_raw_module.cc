// SPDX-License-Identifier: Apache-2.0
// Kernels of the raw server tests: an executor module of the software GPU.
#include <time.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "devproxy/hal/host_module/include/devproxy_soft_module.h"

namespace {

struct AddParams {
  uint64_t out, in;
  uint64_t count;
  int32_t value;
};

int add(const devproxy_soft_launch* l) {  // out[i] = in[i] + value, int32
  AddParams p;
  std::memcpy(&p, l->params, sizeof p);
  if (!l->services->check_range(l->services->cookie, p.out, p.count * 4) ||
      !l->services->check_range(l->services->cookie, p.in, p.count * 4)) {
    std::strncpy(l->error, "add: a range is not allocated", l->error_bytes - 1);
    return 700;
  }
  auto* out = reinterpret_cast<int32_t*>(p.out);
  const auto* in = reinterpret_cast<const int32_t*>(p.in);
  for (uint64_t i = 0; i < p.count; i++) out[i] = in[i] + p.value;
  return 0;
}

int nap(const devproxy_soft_launch* l) {  // sleeps for a number of microseconds
  uint64_t us;
  std::memcpy(&us, l->params, sizeof us);
  const timespec ts{static_cast<time_t>(us / 1'000'000), static_cast<long>(us % 1'000'000 * 1000)};
  if (us) nanosleep(&ts, nullptr);
  return 0;
}

int crash(const devproxy_soft_launch*) {
  *reinterpret_cast<volatile int*>(8) = 1;
  return 0;
}

int assert_fails(const devproxy_soft_launch* l) {
  std::strncpy(l->error, "x > 0", l->error_bytes - 1);
  return 710;
}

int throws(const devproxy_soft_launch*) { throw std::runtime_error("thrown on purpose"); }

int overflow(const devproxy_soft_launch* l) {  // ends on the guard page of the stack
  volatile char big[4096];
  big[0] = static_cast<char>(l->grid[0]);
  return l->grid[0] ? overflow(l) + big[0] : 0;
}

int aborts(const devproxy_soft_launch*) { std::abort(); }

const int32_t kInitial[4] = {1, 2, 3, 4};
const devproxy_soft_global kGlobals[] = {{"table", kInitial, sizeof kInitial}, {"zeroes", nullptr, 4096}};

int get_function(const char* name, devproxy_soft_function* out) {
  const struct {
    const char* name;
    devproxy_soft_kernel kernel;
  } kAll[] = {{"nap", nap},       {"crash", crash},       {"assert_fails", assert_fails},
              {"throws", throws}, {"overflow", overflow}, {"aborts", aborts}};
  *out = {};
  if (std::strcmp(name, "add") == 0) {
    out->kernel = add;
    out->n_params = 4;
    out->params[0] = {0, 8};
    out->params[1] = {8, 8};
    out->params[2] = {16, 8};
    out->params[3] = {24, 4};
    return 0;
  }
  for (const auto& f : kAll)
    if (std::strcmp(name, f.name) == 0) return out->kernel = f.kernel, 0;
  return 500;
}

}  // namespace

extern "C" DEVPROXY_SOFT_MODULE_EXPORT const devproxy_soft_module_table devproxy_soft_module = {
    DEVPROXY_SOFT_MODULE_ABI, 2, kGlobals, get_function, nullptr};
