// SPDX-License-Identifier: Apache-2.0
// The pure cores behind a C ABI, for hypothesis: no device, no clock, no socket.
#include <cstdint>

#include "devproxy/csrc/client/alloc_bidir.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using devproxy::BidirAllocator;

EXPORT BidirAllocator* alloc_new(uint64_t base, uint64_t bytes) { return new BidirAllocator(base, bytes); }
EXPORT void alloc_delete(BidirAllocator* a) { delete a; }
EXPORT uint64_t alloc_take(BidirAllocator* a, uint64_t bytes, int stable) { return a->take(bytes, stable != 0); }
EXPORT void alloc_give(BidirAllocator* a, uint64_t addr, uint64_t bytes) { a->give(addr, bytes); }
EXPORT uint64_t alloc_low_top(const BidirAllocator* a) { return a->low_top(); }
EXPORT uint64_t alloc_high_bottom(const BidirAllocator* a) { return a->high_bottom(); }
EXPORT uint64_t alloc_free_runs(const BidirAllocator* a) { return a->free_runs(); }
