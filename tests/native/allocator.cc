// SPDX-License-Identifier: Apache-2.0
// The pure cores behind a C ABI, for hypothesis: no device, no clock, no socket.
#include <cstdint>

#include "devproxy/csrc/client/alloc_bidir.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using devproxy::BidirAllocator;
using devproxy::PendingRuns;

EXPORT BidirAllocator* alloc_new(uint64_t base, uint64_t bytes) { return new BidirAllocator(base, bytes); }
EXPORT void alloc_delete(BidirAllocator* a) { delete a; }
EXPORT uint64_t alloc_take(BidirAllocator* a, uint64_t bytes, int stable) { return a->take(bytes, stable != 0); }
EXPORT void alloc_give(BidirAllocator* a, uint64_t addr, uint64_t bytes) { a->give(addr, bytes); }
EXPORT uint64_t alloc_low_top(const BidirAllocator* a) { return a->low_top(); }
EXPORT uint64_t alloc_high_bottom(const BidirAllocator* a) { return a->high_bottom(); }
EXPORT uint64_t alloc_free_runs(const BidirAllocator* a) { return a->free_runs(); }

EXPORT uint64_t alloc_best_low(const BidirAllocator* a, uint64_t bytes) { return a->best_low(bytes); }

EXPORT PendingRuns* pending_new() { return new PendingRuns; }
EXPORT void pending_delete(PendingRuns* p) { delete p; }
EXPORT void pending_give(PendingRuns* p, uint64_t addr, uint64_t bytes, uint64_t after) { p->give(addr, bytes, after); }
EXPORT uint64_t pending_best(const PendingRuns* p, uint64_t bytes) { return p->best(bytes); }
EXPORT uint64_t pending_take(PendingRuns* p, uint64_t bytes) { return p->take(bytes); }
EXPORT int pending_gather(PendingRuns* p, BidirAllocator* a, uint64_t bytes) { return p->gather(*a, bytes); }
EXPORT uint64_t pending_runs(const PendingRuns* p) { return p->runs(); }
// Those that are over at `position`: address, bytes, address, ... Returns how many numbers; room for them is the caller's.
EXPORT uint64_t pending_reclaim(PendingRuns* p, uint64_t position, uint64_t* out) {
  uint64_t* const begin = out;
  p->reclaim([&](uint64_t after) { return after <= position; },
             [&](uint64_t addr, uint64_t bytes) { *out++ = addr, *out++ = bytes; });
  return static_cast<uint64_t>(out - begin);
}
