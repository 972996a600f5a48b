// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/client/process.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <array>
#include <atomic>
#include <mutex>
#include <new>
#include <vector>

#include "devproxy/csrc/base/refusal.h"
#include "devproxy/csrc/client/device_state.h"
#include "devproxy/csrc/client/log.h"
#include "devproxy/csrc/client/stub.h"
#include "devproxy/csrc/client/variables.h"

// Read by devproxy-run, to refuse a server of another build before anything starts.
extern "C" {
__attribute__((visibility("default"))) extern const std::array<uint8_t, 32> devproxy_abi_id;
const std::array<uint8_t, 32> devproxy_abi_id = std::to_array(devproxy::wire::kAbiId);
// Called by the job's import hook after each optimizer step: counts it at each GPU that the process has attached. 1 when it was counted,
// 0 where this process has no device. Attaches nothing; any time, any thread.
__attribute__((visibility("default"))) int devproxy_step(void);
// 1 when this process has commands on that device which have not completed, else 0. Attaches nothing; any time.
__attribute__((visibility("default"))) int devproxy_busy(int gpu);
// The other jobs that have memory of that GPU, and how much, as text that ends in NUL. Its length; 0: none, or not known.
__attribute__((visibility("default"))) int devproxy_memory_holders(int gpu, char* text, int bytes);
// What this process's streams do on that GPU, for a profile: the message TRACE (codegen/ops.py). rep: now_ns, total, lost.
// Bytes of the tail, at most `bytes`; -1: it failed.
__attribute__((visibility("default"))) int devproxy_trace(int gpu, unsigned what, unsigned long keep_ms,
                                                          unsigned long first, unsigned long* rep, void* tail,
                                                          int bytes);
// What the calling thread allocates is stable while the sum of its calls is above 0. Any time.
__attribute__((visibility("default"))) void devproxy_make_stable(int by);
__attribute__((visibility("default"))) void devproxy_use_framework(void);
__attribute__((visibility("default"))) void devproxy_warn(const char* line);
__attribute__((visibility("default"))) void devproxy_warm(int gpu, const char* description);
}

namespace devproxy::client {

constinit thread_local ThreadState t_state;

namespace detail {
int g_init_state = 0;
bool g_trace = false;

int32_t not_ready_error() { return kNotInitialized; }
void trace_call(const char* name) { fprintf(stderr, "devproxy: call %s\n", name); }
}  // namespace detail

namespace {

struct Process {
  std::mutex attach_mu;
  std::atomic<Attachment*> devices[kMaxDevices] = {};
  std::atomic<const DeviceProps*> facts[kMaxDevices] = {};  // of those that were asked for; kept
  int32_t attach_error[kMaxDevices] = {};
  int ordinals[kMaxDevices] = {};  // visible ordinal -> server's
  int count = 0;
  char job_dir[256] = {};
  pthread_key_t thread_end{};
  std::mutex slot_mu;
  uint16_t next_slot = 0;
  uint16_t free_slots[kReplySlots] = {};
  int n_free = 0;
};

// In static storage, never destroyed.
Process& process() {
  alignas(Process) static char storage[sizeof(Process)];
  static Process* p = new (storage) Process;
  return *p;
}

int level_from_env() {
  static const int level = [] {
    const char* e = getenv("DEVPROXY_LOG");
    if (!e) return static_cast<int>(Level::kWarn);
    const char* names[] = {"error", "warn", "info", "debug"};
    for (int i = 0; i < 4; ++i)
      if (strncmp(e, names[i], strlen(names[i])) == 0) return i;
    return static_cast<int>(Level::kWarn);
  }();
  return level;
}

void thread_ended(void* value) {
  // Runs when a thread that made a call ends. Its slot may serve another thread now.
  Process& p = process();
  std::lock_guard lock(p.slot_mu);
  p.free_slots[p.n_free++] = static_cast<uint16_t>(reinterpret_cast<uintptr_t>(value) - 1);
}

void after_fork_in_child() {
  // The segments are not inherited (MADV_DONTFORK). A child of an initialised parent gets CUDA's own answer, "not
  // initialised"; a child of a parent that never called cuInit starts afresh.
  t_state = ThreadState{};
  if (detail::g_init_state == 0) return;
  detail::g_init_state = 2;
  for (auto& d : process().devices)
    if (Attachment* c = d.load(std::memory_order_relaxed)) c->close_in_child();
}

// CUDA_VISIBLE_DEVICES: ordinals in the order wanted; the list ends at the first entry that is none.
int visible_devices(int count, int* ordinals) {
  const char* e = getenv("CUDA_VISIBLE_DEVICES");
  if (!e) {
    for (int i = 0; i < count; ++i) ordinals[i] = i;
    return count;
  }
  int n = 0;
  while (*e && n < kMaxDevices) {
    char* end;
    const long v = strtol(e, &end, 10);
    if (end == e || v < 0 || v >= count) break;
    ordinals[n++] = static_cast<int>(v);
    if (*end != ',') break;
    e = end + 1;
  }
  return n;
}

}  // namespace

bool log_on(Level level) { return static_cast<int>(level) <= level_from_env(); }

void log(Level level, const char* format, ...) {
  if (!log_on(level)) return;
  char line[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof(line), format, args);
  va_end(args);
  fprintf(stderr, "devproxy: %s\n", line);
}

AnyResult refuse(const ApiInfo& api, const char* reason) {
  static unsigned char said[4096];
  dp_refuse("libcuda.so.1", api.name, reason, "CUDA_ERROR_NOT_SUPPORTED", &said[api.id & 4095]);
  return {kNotSupported};
}

PerThreadDefault::PerThreadDefault() : before_(t_state.per_thread_default) { t_state.per_thread_default = true; }
PerThreadDefault::~PerThreadDefault() { t_state.per_thread_default = before_; }

uint16_t take_thread_slot() {
  Process& p = process();
  std::lock_guard lock(p.slot_mu);
  if (p.n_free > 0) {
    t_state.slot = p.free_slots[--p.n_free];
  } else if (p.next_slot < kSharedSlot) {
    t_state.slot = p.next_slot++;
  } else {
    return t_state.slot = kSharedSlot;  // not given back: nobody owns it alone
  }
  // The sequence numbers of a slot go on where its last owner left them: the server's answers name them.
  pthread_setspecific(p.thread_end, reinterpret_cast<void*>(static_cast<uintptr_t>(t_state.slot) + 1));
  for (int d = 0; d < kMaxDevices; ++d)
    if (Attachment* c = p.devices[d].load(std::memory_order_acquire)) t_state.seq[d] = c->last_seq(t_state.slot);
  return t_state.slot;
}

int32_t init() {
  Process& p = process();
  std::lock_guard lock(p.attach_mu);
  if (detail::g_init_state == 1) return kOk;
  if (detail::g_init_state == 2) return kNotInitialized;
  const char* dir = getenv("DEVPROXY_JOB_DIR");
  const char* gpus = getenv("DEVPROXY_GPUS");
  if (!dir || !gpus || strlen(dir) >= sizeof(p.job_dir)) {
    log(Level::kWarn, "cuInit: this process was not started by devproxy-run, so it has no GPU");
    return kNoDevice;
  }
  snprintf(p.job_dir, sizeof(p.job_dir), "%s", dir);
  int count = atoi(gpus);
  if (count < 0) count = 0;
  if (count > kMaxDevices) count = kMaxDevices;
  p.count = visible_devices(count, p.ordinals);
  if (p.count == 0) return kNoDevice;
  detail::g_trace = getenv("DEVPROXY_TRACE") && strcmp(getenv("DEVPROXY_TRACE"), "1") == 0;
  pthread_key_create(&p.thread_end, thread_ended);
  static const int at_fork = pthread_atfork(nullptr, nullptr, after_fork_in_child);
  static_cast<void>(at_fork);
  detail::g_init_state = 1;
  return kOk;
}

int device_count() { return process().count; }

Attachment* attached(int ordinal) {
  if (ordinal < 0 || ordinal >= kMaxDevices) return nullptr;
  return process().devices[ordinal].load(std::memory_order_acquire);
}

Attachment* device(int ordinal, int32_t* error) {
  Process& p = process();
  if (__builtin_expect(ordinal < 0 || ordinal >= p.count, 0)) {
    *error = kInvalidDevice;
    return nullptr;
  }
  if (Attachment* c = p.devices[ordinal].load(std::memory_order_acquire); __builtin_expect(c != nullptr, 1)) return c;
  std::lock_guard lock(p.attach_mu);
  if (Attachment* c = p.devices[ordinal].load(std::memory_order_relaxed)) return c;
  if (p.attach_error[ordinal] != kOk) {
    *error = p.attach_error[ordinal];
    return nullptr;
  }
  auto* c = new Attachment;
  const int32_t rc = c->attach(p.job_dir, p.ordinals[ordinal], ordinal);
  if (rc != kOk) {
    delete c;
    *error = p.attach_error[ordinal] = rc;
    return nullptr;
  }
  p.devices[ordinal].store(c, std::memory_order_release);
  return c;
}

const DeviceProps* facts(int ordinal, int32_t* error) {
  Process& p = process();
  if (ordinal < 0 || ordinal >= p.count) {
    *error = kInvalidDevice;
    return nullptr;
  }
  // First: the job goes on with what it was told, also where it attaches behind a move.
  if (const DeviceProps* known = p.facts[ordinal].load(std::memory_order_acquire)) return known;
  if (const Attachment* c = p.devices[ordinal].load(std::memory_order_acquire)) return &c->props();
  std::lock_guard lock(p.attach_mu);
  if (const DeviceProps* known = p.facts[ordinal].load(std::memory_order_relaxed)) return known;
  int32_t rc = p.attach_error[ordinal];
  auto* found = new DeviceProps;
  if (rc == kOk) rc = p.attach_error[ordinal] = ask_facts(p.job_dir, p.ordinals[ordinal], found);
  if (rc != kOk) {
    delete found;
    *error = rc;
    return nullptr;
  }
  p.facts[ordinal].store(found, std::memory_order_release);
  return found;
}

Place place_of(uint64_t addr) {
  if (addr < kRangeBase || addr >= kRangeBase + kMaxSlots * kRangeBytes) {
    Variable v;
    return find_variable(addr, &v) ? Place{v.device, false} : Place{};
  }
  Process& p = process();
  for (int i = 0; i < p.count; ++i) {
    Attachment* c = p.devices[i].load(std::memory_order_acquire);
    if (!c) continue;
    if (c->is_device(addr)) return {i, false};
    if (c->is_pinned(addr)) return {i, true};
  }
  return {};
}

static bool count_step() {
  if (detail::g_init_state != 1) return false;  // 2: a forked child, which has no segment
  bool counted = false;
  for (int i = 0; i < device_count(); ++i) {  // the hook does not say which GPU the step was for
    Attachment* c = attached(i);
    if (!c) continue;
    c->control()->steps.fetch_add(1, std::memory_order_relaxed);
    counted = true;
  }
  return counted;
}

static bool busy(int gpu) {
  if (detail::g_init_state != 1 || gpu < 0 || gpu >= device_count()) return false;
  DeviceState* device = device_state_if_attached(gpu);
  if (!device) return false;
  for (uint32_t i = 0; i < device->streams_made(); ++i)
    if (!device->idle(*device->stream_at(i))) return true;
  return false;
}

static int memory_holders(int gpu, char* text, int bytes) {
  if (bytes < 1) return 0;
  size_t length = 0;
  if (detail::g_init_state == 1 && gpu >= 0 && gpu < device_count())
    if (DeviceState* device = device_state_if_attached(gpu))
      length = device->other_holders(text, static_cast<size_t>(bytes) - 1);
  text[length] = 0;
  return static_cast<int>(length);
}

static int trace(int gpu, const wire::TRACE_req& req, wire::TRACE_rep* rep, void* tail, int bytes) {
  if (detail::g_init_state != 1 || gpu < 0 || gpu >= device_count() || bytes < 0) return -1;
  DeviceState* device = device_state_if_attached(gpu);
  Reply reply{rep, sizeof *rep, tail, static_cast<size_t>(bytes)};
  if (!device || device->conn().call(wire::Opcode::TRACE, req, &reply) != kOk) return -1;
  return static_cast<int>(reply.tail_got);
}

}  // namespace devproxy::client

int devproxy_trace(int gpu, unsigned what, unsigned long keep_ms, unsigned long first, unsigned long* rep, void* tail,
                   int bytes) {
  return devproxy::client::trace(gpu, {what, 0, keep_ms, first}, reinterpret_cast<devproxy::wire::TRACE_rep*>(rep),
                                 tail, bytes);
}
int devproxy_memory_holders(int gpu, char* text, int bytes) {
  return devproxy::client::memory_holders(gpu, text, bytes);
}
int devproxy_busy(int gpu) { return devproxy::client::busy(gpu) ? 1 : 0; }
void devproxy_make_stable(int by) { devproxy::client::make_stable(by); }
int devproxy_step(void) { return devproxy::client::count_step() ? 1 : 0; }
void devproxy_warm(int gpu, const char* description) { devproxy::client::warm(gpu, description); }
void devproxy_warn(const char* line) { devproxy::client::log(devproxy::client::Level::kWarn, "%s", line); }
void devproxy_use_framework(void) { devproxy::client::g_framework.store(true, std::memory_order_relaxed); }
