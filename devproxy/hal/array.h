// SPDX-License-Identifier: Apache-2.0
// A space's CUDA arrays, and the objects that show memory to kernels. The caller has checked each shape (array_extent)
// and that a copy lies inside of its arrays.
#pragma once

#include <cstdint>

#include "devproxy/csrc/args/array.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/object.h"

namespace devproxy::hal {

// A box of bytes, from or to an array, or both. A side without an array is as in CopyArgs, its slices slice_rows rows
// apart. An array keeps what a submitted copy needs of it alive.
struct ArrayCopy {
  struct Side {
    ArrayRef array;
    uint64_t x_bytes = 0, y = 0, z = 0;
    uint64_t addr = 0, pitch = 0, slice_rows = 0;
    bool device = false;
  } dst, src;
  uint64_t width_bytes = 0, rows = 1, slices = 1;
};

class SpaceArrays {
 public:
  virtual StatusOr<ArrayRef> create_array(const ArrayShape& shape) = 0;
  virtual void copy_array(const QueueRef& queue, Ticket ticket, const ArrayCopy& args) = 0;
  // array: the one that args names, or none. The object keeps it alive.
  virtual StatusOr<TextureRef> create_texture(const TextureArgs& args, const ArrayRef& array) = 0;

  // Level 2: whole rows, packed, counted through the slices. Precondition: idle().
  virtual Status read_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, void* to) = 0;
  virtual Status write_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, const void* from) = 0;

 protected:
  ~SpaceArrays() = default;
};

}  // namespace devproxy::hal
