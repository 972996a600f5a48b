// SPDX-License-Identifier: Apache-2.0
// reduce() of the software GPU for ctypes.
#include <cstdint>

#include "devproxy/hal/soft/comm/reduce.h"

extern "C" void soft_reduce(int type, int op, int ranks, const uint8_t* const* inputs, const uint8_t* const* scalars,
                            int outputs, uint8_t* const* out, uint64_t first, uint64_t count) {
  devproxy::hal::soft::Reduction r;
  r.type = static_cast<devproxy::CommType>(type);
  r.op = static_cast<devproxy::CommReduction>(op);
  r.inputs.assign(inputs, inputs + ranks);
  if (r.op == devproxy::CommReduction::kPreMulSum) r.scalars.assign(scalars, scalars + ranks);
  r.outputs.assign(out, out + outputs);
  devproxy::hal::soft::reduce(r, first, count);
}
