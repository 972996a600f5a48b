// SPDX-License-Identifier: Apache-2.0
// CudaSpace: contents of memory and arrays for a dump and a restore; pages that are mapped twice.
#include <algorithm>
#include <cstring>

#include "devproxy/hal/cuda/space_common.h"

namespace devproxy::hal::cuda {

// Two slots: while the device fills one, the host empties the other.
Status CudaSpace::move(uint64_t addr, uint8_t* host, size_t bytes, bool to_host) {
  if (!memory_->mapped(addr, bytes) && !in_variable(addr, bytes))
    return {kInvalidValue, "the range is not committed device memory of this process"};
  const Driver& cu = context_->enter();
  std::lock_guard lock(io_mu_);
  const size_t piece = device_.staging_bytes;
  auto wait = [&](size_t i) {
    return cu.status(cu.cuEventSynchronize(io_done_[i % 2]), cu.cuEventSynchronize, "moving device memory");
  };
  auto empty = [&](size_t i) {
    if (Status s = wait(i); !s.ok()) return s;
    std::memcpy(host + i * piece, io_slots_[i % 2], std::min(piece, bytes - i * piece));
    return Status();
  };
  const size_t pieces = (bytes + piece - 1) / piece;
  Status s;
  for (size_t i = 0; i < pieces && s.ok(); i++) {
    const size_t n = std::min(piece, bytes - i * piece);
    uint8_t* const slot = io_slots_[i % 2];
    if (to_host) {
      s = cu.status(cu.cuMemcpyDtoHAsync(slot, addr + i * piece, n, transfer_), cu.cuMemcpyDtoHAsync,
                    "reading device memory");
    } else {
      if (i >= 2) s = wait(i);
      if (s.ok()) {
        std::memcpy(slot, host + i * piece, n);
        s = cu.status(cu.cuMemcpyHtoDAsync(addr + i * piece, slot, n, transfer_), cu.cuMemcpyHtoDAsync,
                      "writing device memory");
      }
    }
    if (s.ok()) s = cu.status(cu.cuEventRecord(io_done_[i % 2], transfer_), cu.cuEventRecord, "moving device memory");
    if (s.ok() && to_host && i > 0) s = empty(i - 1);
  }
  if (s.ok() && to_host && pieces) s = empty(pieces - 1);
  if (s.ok() && !to_host)
    s = cu.status(cu.cuStreamSynchronize(transfer_), cu.cuStreamSynchronize, "writing device memory");
  return s;
}

Status CudaSpace::read(uint64_t addr, void* to, size_t bytes) {
  return move(addr, static_cast<uint8_t*>(to), bytes, true);
}

Status CudaSpace::write(uint64_t addr, const void* from, size_t bytes) {
  return move(addr, const_cast<uint8_t*>(static_cast<const uint8_t*>(from)), bytes, false);  // only read from
}

// Through one slot: arrays are small beside the rest.
Status CudaSpace::move_array(const ArrayRef& ref, uint64_t first_row, uint64_t rows, uint8_t* host, bool to_host) {
  const ArrayExtent& extent = static_cast<const CudaArray&>(*ref).extent;
  if (rows > extent.rows * extent.slices || first_row > extent.rows * extent.slices - rows)
    return {kInvalidValue, "the array has fewer rows"};
  const Driver& cu = context_->enter();
  std::lock_guard lock(io_mu_);
  uint8_t* const slot = io_slots_[0];
  const uint64_t columns = std::min<uint64_t>(extent.width_bytes, device_.staging_bytes / 16 * 16);
  const uint64_t rows_at_once = std::max<uint64_t>(1, device_.staging_bytes / columns);
  const char* const doing = to_host ? "reading an array" : "writing an array";
  for (uint64_t row = 0, n; row < rows; row += n) {
    const uint64_t y = (first_row + row) % extent.rows, z = (first_row + row) / extent.rows;
    n = std::min({rows_at_once, rows - row, extent.rows - y});
    for (uint64_t x = 0; x < extent.width_bytes; x += columns) {
      const uint64_t width = std::min(columns, extent.width_bytes - x);
      const auto staged = reinterpret_cast<uint64_t>(slot);
      const auto at = reinterpret_cast<uint64_t>(host) + row * extent.width_bytes + x;
      const ArrayCopy::Side in_array{ref, x, y, z, 0, 0, 0, true};
      const ArrayCopy::Side on_host{nullptr, 0, 0, 0, staged, width, n, false};
      CopyArgs packed{staged, at, width, extent.width_bytes, width, n, false, false};
      if (!to_host) copy_rows(packed);
      const CUDA_MEMCPY3D c =
          driver_copy(to_host ? ArrayCopy{on_host, in_array, width, n, 1} : ArrayCopy{in_array, on_host, width, n, 1});
      Status s = cu.status(cu.cuMemcpy3DAsync(&c, transfer_), cu.cuMemcpy3DAsync, doing);
      if (s.ok()) s = cu.status(cu.cuStreamSynchronize(transfer_), cu.cuStreamSynchronize, doing);
      if (!s.ok()) return s;
      std::swap(packed.dst, packed.src), std::swap(packed.dst_pitch, packed.src_pitch);
      if (to_host) copy_rows(packed);
    }
  }
  return {};
}

Status CudaSpace::read_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, void* to) {
  return move_array(array, first_row, rows, static_cast<uint8_t*>(to), true);
}

Status CudaSpace::write_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, const void* from) {
  return move_array(array, first_row, rows, const_cast<uint8_t*>(static_cast<const uint8_t*>(from)), false);
}

Status CudaSpace::alias(uint64_t addr, size_t bytes, Space& from, uint64_t from_addr) {
  auto& other = static_cast<CudaSpace&>(from);  // one device has one kind of space
  std::unique_lock first((this < &other ? *this : other).io_mu_);
  std::unique_lock<std::mutex> second;
  if (&other != this) second = std::unique_lock((this < &other ? other : *this).io_mu_);
  return memory_->alias(addr, bytes, *other.memory_, from_addr, transfer_, other.transfer_);
}

Status CudaSpace::unalias(uint64_t addr, size_t bytes) {
  std::lock_guard lock(io_mu_);
  return memory_->unalias(addr, bytes, transfer_);
}

}  // namespace devproxy::hal::cuda
