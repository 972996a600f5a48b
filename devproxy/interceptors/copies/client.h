// SPDX-License-Identifier: Apache-2.0
// Copies of rectangles, boxes and arrays.
#pragma once

#include "devproxy/interceptors/client_common.h"

namespace devproxy::sa::copies {

// What cuMemcpy3D would say of it, with nothing sent.
[[nodiscard]] int32_t check_3d(const CUDA_MEMCPY3D& p);

// -- where a side is an array (client_array.cc) -----------------------------------------------------------------------

inline bool has_array(const CUDA_MEMCPY3D& p) {
  return p.srcMemoryType == CU_MEMORYTYPE_ARRAY || p.dstMemoryType == CU_MEMORYTYPE_ARRAY;
}
// Precondition: has_array(p), and s captures nothing.
[[nodiscard]] int32_t copy(client::DeviceState* d, client::StreamObj* s, const CUDA_MEMCPY3D& p, bool wait);

// The same without the copy: would it be sent? Precondition: has_array(p).
[[nodiscard]] int32_t check_copy(const CUDA_MEMCPY3D& p);

}  // namespace devproxy::sa::copies
