// What is counted of a client, and of all clients of a server.
#pragma once

#include <atomic>
#include <cstdint>

namespace devproxy::server {

// Written by the dispatch thread, read by the server thread.
struct Counters {
  std::atomic<uint64_t> calls{0}, launches{0}, h2d_bytes{0}, d2h_bytes{0}, d2d_bytes{0}, memset_bytes{0}, allocs{0},
      frees{0}, busy_us{0}, live_bytes{0}, peak_bytes{0};
  std::atomic<uint64_t> modules{0}, streams{0}, events{0}, pinned_bytes{0};  // now
  std::atomic<uint64_t> machine_code{0};  // of the modules: those that only this kind of device runs
  std::atomic<uint64_t> trough_bytes{UINT64_MAX}, period_us{0};  // as LiveTrace says
  static void add(std::atomic<uint64_t>& counter, uint64_t n) {  // one writer: no locked instruction
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
};

// Device memory of all clients. Any thread.
struct LiveBytes {
  std::atomic<uint64_t> now{0}, peak{0};
  void change(uint64_t by) {  // wraps where memory goes
    const uint64_t all = now.fetch_add(by, std::memory_order_relaxed) + by;
    uint64_t before = peak.load(std::memory_order_relaxed);
    while (all > before && !peak.compare_exchange_weak(before, all, std::memory_order_relaxed)) {}
  }
};

}  // namespace devproxy::server
