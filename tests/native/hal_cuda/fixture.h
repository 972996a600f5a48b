// SPDX-License-Identifier: Apache-2.0
// What the tests of hal/cuda over the fake driver share: the fake's controls, an owner, a space with its window, and how a
// program of tests runs. Each includes this once.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/hal/cuda/cuda_device.h"
#include "tests/native/hal_cuda/fake_control.h"

using namespace devproxy;
using namespace devproxy::hal;
using std::chrono::steady_clock;

namespace {

#ifdef DEVPROXY_TSAN  // its runtime maps no memory at most fixed addresses, so neither may we (wire/segment.h)
constexpr uint64_t kBase = 0x40'0000'0000, kDeviceBytes = 0x6'0000'0000, kRange = 0x8'0000'0000;
#else
constexpr uint64_t kBase = 0x2000'0000'0000, kDeviceBytes = 0x30'0000'0000, kRange = 0x40'0000'0000;
#endif
constexpr uint64_t kWindowBytes = 32u << 20, kMiB = 1u << 20;

struct Fake {
  decltype(&fake_fail) fail;
  decltype(&fake_calls) calls;
  decltype(&fake_violations) violations;
  decltype(&fake_alive) alive;
  decltype(&fake_set_memory) set_memory;
  decltype(&fake_used_memory) used_memory;
  decltype(&fake_set_attribute) set_attribute;
  decltype(&fake_set_chaos) set_chaos;
  decltype(&fake_hold_spin) hold_spin;
  decltype(&fake_late) late;
  decltype(&fake_blocked) blocked;
  decltype(&fake_last_params) last_params;
  decltype(&fake_last_attributes) last_attributes;
  decltype(&fake_stream_attribute) stream_attribute;
} fake;

template <class F>
void load(void* library, const char* name, F* to) {
  *to = reinterpret_cast<F>(dlsym(library, name));
  if (!*to) std::fprintf(stderr, "the fake lacks %s\n", name), std::exit(2);
}

cuda::CudaConfig g_config;
std::string g_failures;

#define EXPECT(condition)                                                                                   \
  do {                                                                                                      \
    if (!(condition)) g_failures += std::string(" line ") + std::to_string(__LINE__) + ": " #condition ";"; \
  } while (0)
#define EXPECT_OK(expression)                                                                  \
  do {                                                                                         \
    if (const Status s_ = (expression); !s_.ok())                                              \
      g_failures += std::string(" line ") + std::to_string(__LINE__) + ": " + s_.text() + ";"; \
  } while (0)

// What a server's connection is to a space.
class Owner final : public SpaceOwner {
 public:
  void on_thread_start() noexcept override { threads++; }
  void on_complete(uint32_t index, uint64_t position, uint32_t tag) noexcept override {
    std::lock_guard lock(mu);
    if (position <= completed[index]) backwards++;
    completed[index] = position;
    total++;
    if (tag) tags.push_back(tag);
    if (stopped) late++;
    changed.notify_all();
  }
  void on_fault(int32_t result, const char* text) noexcept override {
    {
      std::lock_guard lock(mu);
      faults++;
      fault = result;
      fault_text = text;
      total_at_fault = total;
    }
    if (at_fault) at_fault();
  }
  void on_refused(uint32_t caller, int32_t result, const char* text) noexcept override {
    std::lock_guard lock(mu);
    refused.push_back({caller, result, text});
  }
  bool range_live(uint64_t addr, uint64_t, uint64_t, bool) noexcept override { return addr != not_live; }
  bool take_memory(uint64_t bytes) noexcept override { return taken += bytes, true; }
  void give_memory(uint64_t bytes) noexcept override { taken -= bytes; }
  void host_function(uint64_t token) noexcept override {
    host_functions++;
    if (run) run(token);
  }
  std::string job_folder() override { return folder; }
  bool wait(uint32_t index, uint64_t position, int ms = 10'000) {
    std::unique_lock lock(mu);
    return changed.wait_for(lock, std::chrono::milliseconds(ms), [&] { return completed[index] >= position; });
  }
  bool done(uint32_t index, uint64_t position) {
    std::lock_guard lock(mu);
    return completed[index] >= position;
  }

  std::mutex mu;
  std::condition_variable changed;
  std::map<uint32_t, uint64_t> completed;
  std::vector<uint32_t> tags;
  uint64_t total = 0, total_at_fault = 0;
  int backwards = 0, faults = 0, late = 0;
  int32_t fault = 0;
  std::string fault_text;
  struct Refusal {
    uint32_t caller;
    int32_t result;
    std::string text;
  };
  std::vector<Refusal> refused;
  bool stopped = false;
  std::atomic<int> threads{0}, host_functions{0};
  std::atomic<uint64_t> taken{0};
  uint64_t not_live = 0;
  std::string folder;  // the job's
  std::function<void(uint64_t)> run;
  std::function<void()> at_fault;
};

const char kImage[] =
    "// a module of the fake driver\n"
    "kernel fill 0:8 8:4 12:4\n"
    "kernel offset 4:4 16:40\n"
    "kernel spin\n"
    "kernel fault\n"
    "kernel claim\n"
    "global table 4096\n";

std::string executor_name(const std::string& build = "test-build", const std::string& file = "fake/executor.so") {
  return "devproxy executor 1\nbuild " + build + "\ncuda " + file + "\n";
}

struct Fixture {
  explicit Fixture(uint32_t slot = 0, cuda::CudaConfig config = g_config, Device* shared = nullptr,
                   bool framework = false) {
    base = kBase + slot * kRange;
    window_base = base + kDeviceBytes;
    window_fd = memfd_create("window", MFD_CLOEXEC);
    if (ftruncate(window_fd, kWindowBytes)) std::abort();
    window = static_cast<uint8_t*>(mmap(reinterpret_cast<void*>(window_base), kWindowBytes, PROT_READ | PROT_WRITE,
                                        MAP_SHARED | MAP_FIXED_NOREPLACE, window_fd, 0));
    if (window == MAP_FAILED) std::abort();
    if (!shared) {
      auto made = cuda::make_device(config);
      if (!made.ok()) std::fprintf(stderr, "%s\n", made.status().text().c_str()), std::exit(2);
      own = std::move(*made);
      shared = own.get();
    }
    device = shared;
    auto opened = device->open_space({base, kDeviceBytes, window_base, kWindowBytes, framework}, owner);
    if (!opened.ok()) {
      open_error = opened.status().text();
      return;
    }
    space = std::move(*opened);
    legacy = space->create_queue(QueueKind::kLegacy, 0, 0);
  }
  ~Fixture() {
    fake.hold_spin(0);
    if (space) {
      for (auto& [index, position] : last) EXPECT(owner.wait(index, position));
      {
        std::lock_guard lock(owner.mu);
        owner.stopped = true;
      }
      space->stop();
    }
    legacy.reset();
    fill_f.reset(), spin_f.reset(), fault_f.reset(), offset_f.reset(), module.reset();
    ops.clear(), executor.reset();
    space.reset();
    EXPECT(owner.backwards == 0);
    EXPECT(owner.late == 0);
    munmap(window, kWindowBytes);
    close(window_fd);
  }
  Ticket ticket(uint32_t index, uint32_t tag = 0) {
    last[index] = ++position * 64;
    return {last[index], tag};
  }
  bool sync(uint32_t index = 0) { return owner.wait(index, last[index]); }
  void load_module() {
    auto loaded = space->load_module(reinterpret_cast<const uint8_t*>(kImage), sizeof kImage - 1, nullptr);
    EXPECT_OK(loaded.status());
    if (!loaded.ok()) return;
    module = *loaded;
    FunctionInfo info;
    fill_f = *space->get_function(module, "fill", &info);
    spin_f = *space->get_function(module, "spin", &info);
    fault_f = *space->get_function(module, "fault", &info);
    offset_f = *space->get_function(module, "offset", &info);
  }
  void fill(const QueueRef& queue, uint32_t index, uint64_t to, uint32_t n, uint32_t value) {
    struct alignas(16) {
      uint64_t to;
      uint32_t n, value;
    } p{to, n, value};
    LaunchArgs args;
    args.params = reinterpret_cast<const uint8_t*>(&p);
    args.params_bytes = 16;
    space->launch(queue, ticket(index), fill_f, args);
  }
  void spin(const QueueRef& queue, uint32_t index) {
    fake.hold_spin(1);
    space->launch(queue, ticket(index), spin_f, {});
  }
  void load_executor() {
    const std::string name = executor_name();
    auto loaded = space->load_module(reinterpret_cast<const uint8_t*>(name.c_str()), name.size() + 1, nullptr);
    EXPECT_OK(loaded.status());
    if (loaded.ok()) executor = *loaded;
  }
  // One of the fake executor's functions (fake_executor.cc).
  void op(const char* name, const QueueRef& queue, uint32_t index, uint64_t a = 0, uint64_t b = 0, uint64_t c = 0) {
    FunctionInfo info;
    if (!ops[name]) ops[name] = *space->get_function(executor, name, &info);
    alignas(16) const uint64_t p[3] = {a, b, c};
    LaunchArgs args;
    args.params = reinterpret_cast<const uint8_t*>(p);
    args.params_bytes = sizeof p;
    space->launch(queue, ticket(index), ops[name], args);
  }
  std::vector<uint64_t> notes() {
    auto state = space->save_module(executor);
    EXPECT_OK(state.status());
    std::vector<uint64_t> all(state.ok() ? state->size() / 8 : 0);
    if (!all.empty()) std::memcpy(all.data(), state->data(), all.size() * 8);
    return all;
  }
  CopyArgs up(uint64_t to, const void* from, uint64_t bytes) const {
    return {to, reinterpret_cast<uint64_t>(from), 0, 0, bytes, 1, true, false};
  }
  CopyArgs down(void* to, uint64_t from, uint64_t bytes) const {
    return {reinterpret_cast<uint64_t>(to), from, 0, 0, bytes, 1, false, true};
  }
  std::vector<uint32_t> words(uint64_t addr, size_t n) {
    std::vector<uint32_t> out(n);
    EXPECT_OK(space->read(addr, out.data(), n * 4));
    return out;
  }

  uint64_t base, window_base;
  int window_fd;
  uint8_t* window;
  std::unique_ptr<Device> own;
  Device* device;
  Owner owner;
  std::unique_ptr<Space> space;
  std::string open_error;
  QueueRef legacy;
  ModuleRef module;
  FunctionRef fill_f, spin_f, fault_f, offset_f;
  ModuleRef executor;
  std::map<std::string, FunctionRef> ops;
  uint64_t position = 0;
  std::map<uint32_t, uint64_t> last;
};

struct Test {
  const char* name;
  void (*run)();
};

// Opens the driver of argv[1]. False: the program cannot run.
inline bool load_fake(const char* path) {
  void* const library = dlopen(path, RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), false;
  load(library, "fake_fail", &fake.fail);
  load(library, "fake_calls", &fake.calls);
  load(library, "fake_violations", &fake.violations);
  load(library, "fake_alive", &fake.alive);
  load(library, "fake_set_memory", &fake.set_memory);
  load(library, "fake_used_memory", &fake.used_memory);
  load(library, "fake_set_attribute", &fake.set_attribute);
  load(library, "fake_set_chaos", &fake.set_chaos);
  load(library, "fake_hold_spin", &fake.hold_spin);
  load(library, "fake_late", &fake.late);
  load(library, "fake_blocked", &fake.blocked);
  load(library, "fake_last_params", &fake.last_params);
  load(library, "fake_last_attributes", &fake.last_attributes);
  load(library, "fake_stream_attribute", &fake.stream_attribute);
  g_config.driver_path = path;
  // EXECUTORS/fake/executor.so is fake_executor.cc.
  if (const char* folder = std::getenv("EXECUTORS")) g_config.folder = folder;
  setenv("FAKE_EXECUTOR_DRIVER", path, 1);
  return true;
}

// The exit status.
inline int run_tests(const Test* begin, const Test* end, const std::string& only) {
  int failed = 0;
  for (const Test* test = begin; test != end; test++) {
    if (!only.empty() && only != test->name) continue;
    g_failures.clear();
    const auto began = steady_clock::now();
    test->run();
    char text[4096];
    // A communicator that was destroyed ends on a thread of its own.
    for (int i = 0; i < 200 && fake.alive(text, sizeof text); i++) usleep(5000);
    if (fake.violations(text, sizeof text)) g_failures += std::string(" the driver was misused: ") + text;
    if (fake.alive(text, sizeof text)) g_failures += std::string(" left behind: ") + text;
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(steady_clock::now() - began).count();
    if (g_failures.empty())
      std::printf("PASS %s (%lld ms)\n", test->name, static_cast<long long>(ms));
    else
      std::printf("FAIL %s:%s\n", test->name, g_failures.c_str()), failed++;
    std::fflush(stdout);
  }
  return failed != 0;
}

}  // namespace
