// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/soft_copies.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

namespace devproxy::hal::soft {

namespace {

// Zeroes at first, though CUDA promises nothing.
struct SoftArray final : Array {
  ArrayExtent extent;
  uint8_t* memory = nullptr;
  ~SoftArray() override { std::free(memory); }
};

uint8_t* row_of(const ArrayCopy::Side& side, uint64_t z, uint64_t y) {
  if (!side.array) return reinterpret_cast<uint8_t*>(side.addr + (z * side.slice_rows + y) * side.pitch);
  const auto& array = static_cast<const SoftArray&>(*side.array);
  return array.memory + ((side.z + z) * array.extent.rows + side.y + y) * array.extent.width_bytes + side.x_bytes;
}

}  // namespace

void copy_rows(const CopyArgs& a) {
  auto* dst = reinterpret_cast<uint8_t*>(a.dst);
  const auto* src = reinterpret_cast<const uint8_t*>(a.src);
  for (uint64_t row = 0; row < a.height; row++)
    std::memmove(dst + row * a.dst_pitch, src + row * a.src_pitch, a.width_bytes);
}

void copy_box(const ArrayCopy& a) {
  for (uint64_t z = 0; z < a.slices; z++)
    for (uint64_t y = 0; y < a.rows; y++) std::memmove(row_of(a.dst, z, y), row_of(a.src, z, y), a.width_bytes);
}

void fill_rows(const MemsetArgs& a) {
  for (uint64_t row = 0; row < a.rows; row++) {
    const uint64_t at = a.dst + row * a.pitch;
    if (a.width == 1) std::memset(reinterpret_cast<void*>(at), static_cast<int>(a.value & 0xff), a.count);
    if (a.width == 2) std::fill_n(reinterpret_cast<uint16_t*>(at), a.count, static_cast<uint16_t>(a.value));
    if (a.width == 4) std::fill_n(reinterpret_cast<uint32_t*>(at), a.count, a.value);
  }
}

StatusOr<ArrayRef> make_array(const ArrayShape& shape) {
  auto array = std::make_shared<SoftArray>();
  if (!array_extent(shape, &array->extent)) return Status(kInvalidValue, "no array has that shape");
  array->memory = static_cast<uint8_t*>(std::calloc(array->extent.bytes(), 1));
  if (!array->memory)
    return Status(kOutOfMemory, "the host has no " + std::to_string(array->extent.bytes()) +
                                    " bytes for an array of the software GPU");
  return ArrayRef(array);
}

void read_rows(const ArrayRef& ref, uint64_t first_row, uint64_t rows, void* to) {
  const auto& array = static_cast<const SoftArray&>(*ref);
  const uint64_t row = array.extent.width_bytes;
  std::memcpy(to, array.memory + first_row * row, rows * row);
}

void write_rows(const ArrayRef& ref, uint64_t first_row, uint64_t rows, const void* from) {
  const auto& array = static_cast<const SoftArray&>(*ref);
  const uint64_t row = array.extent.width_bytes;
  std::memcpy(array.memory + first_row * row, from, rows * row);
}

}  // namespace devproxy::hal::soft
