// SPDX-License-Identifier: Apache-2.0
// CudaSpace: contents of memory and arrays for a dump and a restore; pages that are mapped twice.
#include <algorithm>
#include <cstring>

#include "devproxy/hal/cuda/space_common.h"

namespace devproxy::hal::cuda {

// -- lanes: each a stream with page-locked memory, for one thread at a time

StatusOr<std::unique_ptr<CudaSpace::Lane>> CudaSpace::make_lane() {
  const Driver& cu = context_->driver();
  auto lane = std::make_unique<Lane>();
  lane->context = context_;
  Status s = cu.status(cu.cuStreamCreateWithPriority(&lane->stream, CU_STREAM_NON_BLOCKING, 0),
                       cu.cuStreamCreateWithPriority, "making a stream for device memory's contents");
  void* memory = nullptr;
  if (s.ok())
    s = cu.status(cu.cuMemHostAlloc(&memory, device_.staging_bytes, 0), cu.cuMemHostAlloc,
                  "taking page-locked memory for device memory's contents");
  lane->memory = static_cast<uint8_t*>(memory);
  for (CUevent& done : lane->done)
    if (s.ok())
      s = cu.status(cu.cuEventCreate(&done, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING), cu.cuEventCreate,
                    "making an event for device memory's contents");
  if (!s.ok()) return s;
  return lane;
}

CudaSpace::Lane::~Lane() {
  const Driver& cu = context->enter();
  for (CUevent event : done)
    if (event) (void)cu.cuEventDestroy(event);
  if (memory) (void)cu.cuMemFreeHost(memory);
  if (stream) (void)cu.cuStreamDestroy(stream);
}

StatusOr<std::unique_ptr<CudaSpace::Lane>> CudaSpace::take_lane() {
  std::unique_lock lock(lanes_mu_);
  for (;;) {
    if (!free_lanes_.empty()) {
      auto lane = std::move(free_lanes_.back());
      free_lanes_.pop_back();
      return lane;
    }
    if (lanes_made_ < kMostLanes) {
      auto lane = make_lane();
      if (lane.ok()) lanes_made_++;
      if (lane.ok() || lanes_made_ == 0) return lane;
    }
    lane_free_.wait(lock);
  }
}

void CudaSpace::give_lane(std::unique_ptr<Lane> lane) {
  std::lock_guard lock(lanes_mu_);
  free_lanes_.push_back(std::move(lane));
  lane_free_.notify_one();
}

// In two halves of the lane's memory: while the device has one, the host has the other.
Status CudaSpace::move(Lane& lane, uint64_t addr, size_t bytes, const PieceSink* sink, const PieceSource* source) {
  const Driver& cu = context_->driver();
  const size_t piece = device_.staging_bytes / 2, pieces = (bytes + piece - 1) / piece;
  const char* const doing = sink ? "reading device memory" : "writing device memory";
  auto half = [&](size_t i) { return lane.memory + i % 2 * piece; };
  auto size = [&](size_t i) { return std::min(piece, bytes - i * piece); };
  auto wait = [&](size_t i) {
    return cu.status(cu.cuEventSynchronize(lane.done[i % 2]), cu.cuEventSynchronize, doing);
  };
  auto empty = [&](size_t i) {
    if (Status s = wait(i); !s.ok()) return s;
    return (*sink)(half(i), size(i), i * piece);
  };
  Status s;
  for (size_t i = 0; i < pieces && s.ok(); i++) {
    const CUdeviceptr at = addr + i * piece;
    if (sink) {
      s = cu.status(cu.cuMemcpyDtoHAsync(half(i), at, size(i), lane.stream), cu.cuMemcpyDtoHAsync, doing);
    } else {
      if (i >= 2) s = wait(i);
      if (s.ok()) s = (*source)(half(i), size(i), i * piece);
      if (s.ok()) s = cu.status(cu.cuMemcpyHtoDAsync(at, half(i), size(i), lane.stream), cu.cuMemcpyHtoDAsync, doing);
    }
    if (s.ok()) s = cu.status(cu.cuEventRecord(lane.done[i % 2], lane.stream), cu.cuEventRecord, doing);
    if (s.ok() && sink && i > 0) s = empty(i - 1);
  }
  if (s.ok() && sink && pieces) return empty(pieces - 1);
  // Also after an error: the lane's memory is somebody else's next.
  Status last = cu.status(cu.cuStreamSynchronize(lane.stream), cu.cuStreamSynchronize, doing);
  return s.ok() ? last : s;
}

Status CudaSpace::with_lane(uint64_t addr, size_t bytes, const PieceSink* sink, const PieceSource* source) {
  if (!memory_->mapped(addr, bytes) && !in_variable(addr, bytes))
    return {kInvalidValue, "the range is not committed device memory of this process"};
  context_->enter();
  auto lane = take_lane();
  if (!lane.ok()) return std::move(lane).status();
  Status s = move(**lane, addr, bytes, sink, source);
  give_lane(std::move(*lane));
  return s;
}

Status CudaSpace::read_pieces(uint64_t addr, size_t bytes, const PieceSink& sink) {
  return with_lane(addr, bytes, &sink, nullptr);
}

Status CudaSpace::write_pieces(uint64_t addr, size_t bytes, const PieceSource& source) {
  if (splicer_)
    if (Status s = splicer_->before_write(addr, bytes, true); !s.ok()) return s;
  return with_lane(addr, bytes, nullptr, &source);
}

Status CudaSpace::read(uint64_t addr, void* to, size_t bytes) {
  return read_pieces(addr, bytes, [&](const void* piece, size_t n, size_t offset) {
    std::memcpy(static_cast<uint8_t*>(to) + offset, piece, n);
    return Status();
  });
}

Status CudaSpace::write(uint64_t addr, const void* from, size_t bytes) {
  return write_pieces(addr, bytes, [&](void* piece, size_t n, size_t offset) {
    std::memcpy(piece, static_cast<const uint8_t*>(from) + offset, n);
    return Status();
  });
}

// Through one slot: arrays are small beside the rest.
Status CudaSpace::move_array(const ArrayRef& ref, uint64_t first_row, uint64_t rows, uint8_t* host, bool to_host) {
  const ArrayExtent& extent = static_cast<const CudaArray&>(*ref).extent;
  if (rows > extent.rows * extent.slices || first_row > extent.rows * extent.slices - rows)
    return {kInvalidValue, "the array has fewer rows"};
  const Driver& cu = context_->enter();
  std::lock_guard lock(io_mu_);
  uint8_t* const slot = io_slot_;
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
