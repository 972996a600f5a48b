// SPDX-License-Identifier: Apache-2.0
// Memory pools as the client knows them: names for the one allocator, with attributes and an account of their own.
#pragma once

#include <cstdint>

namespace devproxy::sa::memory {

// The pool that cuMemAllocAsync takes from on a device.
uint64_t current_pool(int device);

// False for a handle that is no pool.
bool pool_device(uint64_t pool, int* device);

// An allocation in stream order belongs to its pool until it is freed, by whichever call.
void pool_took(uint64_t pool, uint64_t addr, uint64_t bytes);
// Before the address can be given out again. Costs nothing while no pool has anything. How much unused memory the pool
// may hold on to from now on: its release threshold, less what of it is allocated.
uint64_t pool_lost(uint64_t addr);

}  // namespace devproxy::sa::memory
