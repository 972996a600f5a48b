// SPDX-License-Identifier: Apache-2.0
// A kernel that reduces buffers element by element, as PTX text. It computes what hal/soft/comm/reduce.cc computes, bit
// for bit, except which NaN a NaN is: hal/comm.h says the order and the accumulators. Pure; knows no driver.
//
// Assumed of the buffers: each begins at a multiple of its element's size. A destination is a source or overlaps none,
// and no scalar on the device lies in a destination.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "devproxy/csrc/args/comm.h"

namespace devproxy::hal::cuda {

inline constexpr uint32_t kMostSources = 64;
inline constexpr uint32_t kReduceThreads = 256;  // of a block, at most. Any number of blocks will do
inline constexpr const char* kReduceEntry = "devproxy_reduce";

// What the text depends on. The kernel takes any number of elements.
struct ReduceShape {
  CommType type = CommType::kFloat32;
  CommReduction reduction = CommReduction::kSum;
  uint32_t sources = 1;       // ranks: 1 .. kMostSources
  uint32_t destinations = 1;  // how many buffers get the result: 1 .. sources
  uint64_t on_device = 0;     // of kPreMulSum, a bit by rank: its scalar's parameter is an address
  auto operator<=>(const ReduceShape&) const = default;
};

// For any GPU since Turing. The first line repeats the shape; `on_device` has a digit by rank, rank 0's first:
//   // devproxy reduce type=7 reduction=0 sources=4 destinations=4 on_device=0000
std::string reduce_ptx(const ReduceShape& shape);

// The entry's parameters, 8 bytes each: the elements' number, where the sources and the destinations begin, and for
// kPreMulSum a scalar by rank: its address, or an element in the low bytes. For the others `scalars` is empty.
std::vector<uint64_t> reduce_params(uint64_t count, const std::vector<uint64_t>& sources,
                                    const std::vector<uint64_t>& destinations, const std::vector<uint64_t>& scalars);

}  // namespace devproxy::hal::cuda
