// SPDX-License-Identifier: Apache-2.0
// What the copy engines of the software GPU do, and its arrays: rows and slices in the host's memory, one behind the
// other.
#pragma once

#include <cstdint>

#include "devproxy/hal/hal.h"

namespace devproxy::hal::soft {

void copy_rows(const CopyArgs& a);
void copy_box(const ArrayCopy& a);
void fill_rows(const MemsetArgs& a);

StatusOr<ArrayRef> make_array(const ArrayShape& shape);
void read_rows(const ArrayRef& array, uint64_t first_row, uint64_t rows, void* to);
void write_rows(const ArrayRef& array, uint64_t first_row, uint64_t rows, const void* from);

}  // namespace devproxy::hal::soft
