// SPDX-License-Identifier: Apache-2.0
// How a test drives the fake driver; found by dlsym in the fake's shared object.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// The n-th next call (1: the very next) of `symbol` returns `result` and does nothing.
void fake_fail(const char* symbol, int nth, int result);
uint64_t fake_calls(const char* symbol);
// Misuse so far, one line each, at most `bytes`; returns how many. Clears them.
int fake_violations(char* text, size_t bytes);
// Objects alive: contexts, streams, events, modules, reservations, mappings, handles, host allocations, registrations.
int fake_alive(char* text, size_t bytes);
void fake_set_memory(uint64_t bytes);  // of the device
uint64_t fake_used_memory();
void fake_set_attribute(int attribute, int value);
void fake_set_chaos(uint64_t seed);  // delays between operations; 0: none
void fake_hold_spin(int hold);       // 1: kernels named spin* stay; 0: they end
void fake_late(unsigned us);         // who waits for an event is woken late by up to so much
uint64_t fake_blocked();             // submissions that had to wait for a full queue
// Of the launch that came last: ids and the first four bytes of the values, at most n; returns how many it had.
size_t fake_last_attributes(uint32_t* ids, uint32_t* first_words, size_t n);
// Of the stream attributes that were set: how many; of the last one its id, the first 16 bytes of its value, and how
// much its stream had been given to do by then.
uint64_t fake_stream_attribute(uint32_t* id, uint64_t* value, uint64_t* submitted);
// For the fake NCCL: the GPU of this process; the primary context, or nullptr; the calling thread's; whether all of it is
// mapped device memory.
int fake_gpu();
void* fake_primary();
void* fake_current();
int fake_is_mapped(uint64_t addr, uint64_t bytes);
size_t fake_last_params(void* to, size_t bytes);  // of the kernel that ran last
}
