// SPDX-License-Identifier: Apache-2.0
// An executor for hal/cuda's tests: as the real one it submits to the launch's stream, in the context that is current,
// and may wait for that stream; what it computes with is the fake driver's. The driver is named by
// FAKE_EXECUTOR_DRIVER.
//
// Parameters: three 64-bit words.
//   fill  addr bytes value    sets device memory, in stream order
//   sync  - - -               waits for the launch's stream
//   note  - - value           remembers the value, at once: the order in which launches came
//   fails - - result          returns that result
//   slow  note - microseconds takes that long, then remembers the note
//   busy  - - microseconds    uses the processor for so long, as an operator of a framework does
#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "devproxy/hal/host_module/include/devproxy_executor.h"
#include "devproxy/hal/host_module/include/devproxy_soft_module.h"

namespace {

struct State {
  devproxy_executor_host host;
  std::mutex mu;
  std::vector<uint64_t> notes;
  uint64_t taken = 0;
};

struct Driver {
  decltype(&cuMemsetD8Async) memset;
  decltype(&cuStreamSynchronize) synchronize;
};

const Driver& driver() {
  static const Driver table = [] {
    void* lib = dlopen(std::getenv("FAKE_EXECUTOR_DRIVER"), RTLD_NOW);
    return Driver{reinterpret_cast<decltype(&cuMemsetD8Async)>(dlsym(lib, "cuMemsetD8Async")),
                  reinterpret_cast<decltype(&cuStreamSynchronize)>(dlsym(lib, "cuStreamSynchronize"))};
  }();
  return table;
}

int run(const devproxy_soft_launch* launch) {
  const std::string name = static_cast<const char*>(launch->function_cookie);
  auto& state = *static_cast<State*>(launch->state);
  uint64_t p[3];
  if (launch->params_bytes != sizeof p) return 719;
  std::memcpy(p, launch->params, sizeof p);
  const auto stream = reinterpret_cast<CUstream>(launch->stream);
  if (name == "slow") usleep(static_cast<useconds_t>(p[2]));
  if (name == "busy")
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(p[2]);
         std::chrono::steady_clock::now() < end;) {}
  if (name == "fill") {
    if (launch->services->check_range(launch->services->cookie, p[0], p[1]) != 1) {
      std::snprintf(launch->error, launch->error_bytes, "not its memory");
      return 700;
    }
    return driver().memset(p[0], static_cast<unsigned char>(p[2]), p[1], stream);
  }
  if (name == "sync") return driver().synchronize(stream);
  if (name == "note" || name == "slow") {
    std::lock_guard lock(state.mu);
    state.notes.push_back(name == "slow" ? p[0] : p[2]);
  }
  if (name == "fails") {
    std::snprintf(launch->error, launch->error_bytes, "as it was told");
    return static_cast<int>(p[2]);
  }
  return 0;
}

int get_function(const char* name, devproxy_soft_function* out) {
  for (const char* known : {"fill", "sync", "note", "fails", "slow", "busy"}) {
    if (std::strcmp(name, known) != 0) continue;
    *out = {};
    out->kernel = &run;
    out->cookie = const_cast<char*>(known);
    return 0;
  }
  return 500;
}

int attach(const devproxy_executor_host* host, void** state, char* error, uint64_t error_bytes) {
  if (host->device_bytes == 0) {
    std::snprintf(error, error_bytes, "no device memory");
    return 1;
  }
  auto* made = new State{};
  made->host = *host;
  if (host->take(host->cookie, 4096) == 1) made->taken = 4096;
  *state = made;
  return 0;
}

void trim(void* p) {
  auto& state = *static_cast<State*>(p);
  if (state.taken) state.host.give(state.host.cookie, state.taken);
  state.taken = 0;
}

void detach(void* p) {
  trim(p);
  delete static_cast<State*>(p);
}

// Notes 666 cannot be saved.
int save(void* p, void* to, uint64_t bytes, uint64_t* needed, char* error, uint64_t error_bytes) {
  auto& state = *static_cast<State*>(p);
  std::lock_guard lock(state.mu);
  if (!state.notes.empty() && state.notes.back() == 666) {
    std::snprintf(error, error_bytes, "no good note");
    return 1;
  }
  *needed = state.notes.size() * sizeof(uint64_t);
  if (*needed <= bytes && *needed) std::memcpy(to, state.notes.data(), *needed);
  return 0;
}

int load(void* p, const void* from, uint64_t bytes, char* error, uint64_t error_bytes) {
  if (bytes % sizeof(uint64_t)) {
    std::snprintf(error, error_bytes, "half a note");
    return 1;
  }
  auto& state = *static_cast<State*>(p);
  std::lock_guard lock(state.mu);
  state.notes.assign(static_cast<const uint64_t*>(from), static_cast<const uint64_t*>(from) + bytes / sizeof(uint64_t));
  return 0;
}

int footprint(void*, const char*, const uint8_t*, uint64_t, devproxy_executor_access*, uint32_t, uint32_t* needed,
              uint64_t*) {
  *needed = 0;
  return DEVPROXY_EXECUTOR_UNKNOWN;
}

}  // namespace

// The headers declare them visible.
extern "C" const devproxy_soft_module_table devproxy_soft_module = {DEVPROXY_SOFT_MODULE_ABI, 0, nullptr, get_function,
                                                                    nullptr};
extern "C" const devproxy_executor_table devproxy_executor = {
    DEVPROXY_EXECUTOR_ABI, DEVPROXY_EXECUTOR_ON_CUDA, "test-build", attach, detach, save, load, trim, footprint};
