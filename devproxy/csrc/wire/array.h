// SPDX-License-Identifier: Apache-2.0
// Copies from and to CUDA arrays, as they travel.
#pragma once

#include <cstdint>

namespace devproxy {

// ARRAY_COPY: one side of a box of bytes. space: as in COPY, or 3, then place is the array's handle and x_bytes, y, z
// say where in it; elsewhere place is the box's first byte, rows are pitch bytes apart and slices pitch * slice_rows.
inline constexpr uint8_t kArraySpace = 3;
struct ArrayCopySide {
  uint64_t place = 0, pitch = 0, slice_rows = 0;
  uint32_t x_bytes = 0, y = 0, z = 0;
  uint8_t space = 0, pad[3] = {};
};
struct ArrayCopyArgs {
  ArrayCopySide dst, src;
  uint64_t width_bytes = 0, rows = 0, slices = 0;
};

static_assert(sizeof(ArrayCopyArgs) == 104);

}  // namespace devproxy
