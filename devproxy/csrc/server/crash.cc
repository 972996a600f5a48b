// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/crash.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "devproxy/csrc/base/result.h"

namespace devproxy::server {

namespace {

constexpr size_t kSignalStackBytes = 64u << 10;
constexpr uint32_t kMostGpus = 256;  // of a job in one process

struct Target {
  std::atomic<Lifeline*> lifeline{nullptr};
  char segment_path[256];
  char pinned_path[256];
  char link_path[256];
};
Target g_targets[kMaxSlots];
const hal::Device* g_device = nullptr;
char g_socket_paths[kMostGpus][256];
std::atomic<uint32_t> g_sockets{0};
std::atomic<bool> g_crashing{false};

// Only what a signal handler may use.
struct Text {
  char bytes[sizeof ControlPage::sticky_text] = {};
  size_t n = 0;
  void add(const char* s) {
    while (*s && n + 1 < sizeof bytes) bytes[n++] = *s++;
  }
  void add_hex(uint64_t v) {
    add("0x");
    int shift = 60;
    while (shift > 0 && (v >> shift) == 0) shift -= 4;
    for (; shift >= 0; shift -= 4) {
      const char digit[2] = {"0123456789abcdef"[v >> shift & 15], 0};
      add(digit);
    }
  }
};

const char* name_of(int signal) {
  switch (signal) {
    case SIGSEGV: return "SIGSEGV";
    case SIGBUS: return "SIGBUS";
    case SIGFPE: return "SIGFPE";
    case SIGILL: return "SIGILL";
    default: return "SIGABRT";
  }
}

void on_crash(int signal, siginfo_t* info, void*) {
  if (g_crashing.exchange(true)) {
    for (;;) pause();  // another thread is already telling everybody
  }
  const char* running = g_device ? g_device->running_here() : nullptr;
  const bool memory = signal == SIGSEGV || signal == SIGBUS;
  Text text;
  if (running) {
    text.add(memory ? "illegal memory access in kernel '" : "kernel '");
    text.add(running);
    text.add(memory ? "' (" : "' was ended by a signal (");
  } else {
    text.add("the device-proxy server crashed outside of any kernel, a bug of devproxy or of a module (");
  }
  text.add(name_of(signal));
  if (memory) text.add(" at "), text.add_hex(reinterpret_cast<uint64_t>(info->si_addr));
  text.add(signal == SIGBUS ? "; the host may be out of memory)" : ")");
  const int32_t code = !running ? kUnknown : memory ? kIllegalAddress : kLaunchFailed;
  // First of all: once a job knows of the fault it may end, and devproxy-run, which then finds no socket, waits for us.
  for (uint32_t i = 0; i < g_sockets.load(std::memory_order_acquire); i++) unlink(g_socket_paths[i]);
  for (Target& target : g_targets) {
    Lifeline* lifeline = target.lifeline.load(std::memory_order_acquire);
    if (!lifeline) continue;
    lifeline->fault(code, text.bytes);
    lifeline->end(ServerState::kGone);
    unlink(target.segment_path);
    unlink(target.pinned_path);
    unlink(target.link_path);
  }
  text.add("\n");
  [[maybe_unused]] const ssize_t ignored1 = write(STDERR_FILENO, "devproxy-server: ", 17);
  [[maybe_unused]] const ssize_t ignored2 = write(STDERR_FILENO, text.bytes, text.n);
  _exit(134);
}

// Freed when the thread ends; the kernel must be told first.
struct SignalStack {
  std::unique_ptr<uint8_t[]> bytes;
  ~SignalStack() {
    if (!bytes) return;
    stack_t off{};
    off.ss_flags = SS_DISABLE;
    sigaltstack(&off, nullptr);
  }
};
thread_local SignalStack t_stack;

}  // namespace

void install_crash_handler(const hal::Device* device) {
  g_device = device;
  prepare_thread_for_crash();
  struct sigaction action{};
  action.sa_sigaction = on_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigfillset(&action.sa_mask);
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaction(signal, &action, nullptr);
}

void unlink_in_crash(const char* socket_path) {
  const uint32_t i = g_sockets.load(std::memory_order_relaxed);
  if (i >= kMostGpus) return;
  std::snprintf(g_socket_paths[i], sizeof g_socket_paths[i], "%s", socket_path);
  g_sockets.store(i + 1, std::memory_order_release);
}

void prepare_thread_for_crash() {
  if (t_stack.bytes) return;
  t_stack.bytes = std::make_unique<uint8_t[]>(kSignalStackBytes);
  stack_t stack{};
  stack.ss_sp = t_stack.bytes.get();
  stack.ss_size = kSignalStackBytes;
  sigaltstack(&stack, nullptr);
}

void register_for_crash(uint32_t slot, Lifeline* lifeline, const char* segment_path, const char* pinned_path,
                        const char* link_path) {
  Target& target = g_targets[slot];
  std::snprintf(target.segment_path, sizeof target.segment_path, "%s", segment_path);
  std::snprintf(target.pinned_path, sizeof target.pinned_path, "%s", pinned_path);
  std::snprintf(target.link_path, sizeof target.link_path, "%s", link_path);
  target.lifeline.store(lifeline, std::memory_order_release);
}

void forget_for_crash(uint32_t slot) {
  if (slot < kMaxSlots) g_targets[slot].lifeline.store(nullptr, std::memory_order_release);
}

}  // namespace devproxy::server
