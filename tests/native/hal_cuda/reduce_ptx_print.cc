// SPDX-License-Identifier: Apache-2.0
// Prints reduce_ptx() of each shape on stdin, a line "type reduction sources destinations on_device", and behind it
// what reduce_params() makes of count 1, sources 1000.., destinations 2000.. and scalars 3000.. A zero byte ends each.
#include <cinttypes>
#include <cstdio>

#include "devproxy/hal/cuda/reduce_ptx.h"

using namespace devproxy;

namespace {

std::vector<uint64_t> numbers(uint64_t first, uint32_t count) {
  std::vector<uint64_t> all;
  for (uint32_t i = 0; i < count; i++) all.push_back(first + i);
  return all;
}

}  // namespace

int main() {
  uint32_t type, reduction, sources, destinations;
  uint64_t on_device;
  while (std::scanf("%" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu64, &type, &reduction, &sources,
                    &destinations, &on_device) == 5) {
    const hal::cuda::ReduceShape shape{static_cast<CommType>(type), static_cast<CommReduction>(reduction), sources,
                                       destinations, on_device};
    std::fputs(hal::cuda::reduce_ptx(shape).c_str(), stdout);
    std::fputs("//", stdout);
    const bool scaled = shape.reduction == CommReduction::kPreMulSum;
    for (uint64_t one : hal::cuda::reduce_params(1, numbers(1000, sources), numbers(2000, destinations),
                                                 numbers(3000, scaled ? sources : 0)))
      std::printf(" %" PRIu64, one);
    std::putchar('\n');
    std::putchar('\0');
  }
  return 0;
}
