// SPDX-License-Identifier: Apache-2.0
// What is counted of a client, and of all clients of a server.
#pragma once

#include <atomic>
#include <cstdint>

namespace devproxy::server {

// What only grows, and goes on after a restore: X(name) for each. A server's totals, a dump's records and the answer to
// stats are made from this list.
#define DP_COUNTED(X) \
  X(calls) X(launches) X(h2d_bytes) X(d2h_bytes) X(d2d_bytes) X(memset_bytes) X(allocs) X(frees) X(busy_us)

struct Counted {
#define DP_FIELD(name) uint64_t name = 0;
  DP_COUNTED(DP_FIELD)
#undef DP_FIELD

  void add(const Counted& more) {
#define DP_ADD(name) name += more.name;
    DP_COUNTED(DP_ADD)
#undef DP_ADD
  }
};

// Written by the dispatch thread, read by the server thread.
struct Counters {
#define DP_FIELD(name) std::atomic<uint64_t> name{0};
  DP_COUNTED(DP_FIELD)
#undef DP_FIELD
  std::atomic<uint64_t> live_bytes{0}, stable_bytes{0}, peak_bytes{0};
  std::atomic<uint64_t> modules{0}, streams{0}, events{0}, pinned_bytes{0};  // now
  std::atomic<uint64_t> machine_code{0};  // of the modules: those that only this kind of device runs
  std::atomic<uint64_t> trough_bytes{UINT64_MAX}, period_us{0};  // as LiveTrace says

  Counted counted() const {
    Counted now;
#define DP_GET(name) now.name = name.load(std::memory_order_relaxed);
    DP_COUNTED(DP_GET)
#undef DP_GET
    return now;
  }
  void restore(const Counted& was) {
#define DP_SET(name) name = was.name;
    DP_COUNTED(DP_SET)
#undef DP_SET
  }
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
