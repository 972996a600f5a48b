// SPDX-License-Identifier: Apache-2.0
// The device memory of one space: one reserved address range, physical memory behind the parts that are in use.
//
// Reserving costs addresses only. Physical memory comes in large handles ("extents"), because the driver's cost is per
// mapping and not per byte: whole slabs where there is room, exact granules when memory runs short. An extent stays
// mapped until nothing in it is committed, and idle ones stay for the next step, within what the client has for itself
// of the GPU: mapping a step's memory anew costs about 160 us for each 64 MiB (H200, driver 580). The driver maps
// and unmaps a handle only as a whole (cuda.h, cuMemMap: offset must be zero), so whatever needs a border inside an
// extent (aliasing) first rebuilds it from smaller handles with the same contents.
//
// Locks: mu_ is a leaf but for alias(), which takes the two spaces' in address order. Driver calls are made under it.
#pragma once

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "devproxy/hal/cuda/cuda_context.h"
#include "devproxy/hal/cuda/cuda_device.h"

namespace devproxy::hal::cuda {

// Disjoint ranges, neighbours joined. Pure.
class Ranges {
 public:
  void insert(uint64_t begin, uint64_t end);
  void erase(uint64_t begin, uint64_t end);
  bool touches(uint64_t begin, uint64_t end) const;
  std::vector<std::pair<uint64_t, uint64_t>> in(uint64_t begin, uint64_t end) const;  // begin, end
  uint64_t bytes() const { return bytes_; }

 private:
  std::map<uint64_t, uint64_t> ranges_;  // begin -> end
  uint64_t bytes_ = 0;
};

class DeviceMemory {
 public:
  static StatusOr<std::unique_ptr<DeviceMemory>> open(const std::shared_ptr<Context>& context, const CudaConfig& config,
                                                      const SpaceConfig& space);
  DeviceMemory(std::shared_ptr<Context> context, const CudaConfig& config, const SpaceConfig& space,
               uint64_t granularity);
  ~DeviceMemory();

  bool owns(uint64_t addr, uint64_t bytes) const {
    return addr >= base_ && bytes <= bytes_ && addr - base_ <= bytes_ - bytes;
  }
  // Parts of it may be committed already: what a stream frees and takes again stays so, since commands may be under way and
  // cuMemUnmap does not wait for them (seen on an H200). So it does if there is no memory for the rest.
  // by_page: in handles of one page, so that each can be another rank's.
  Status commit(uint64_t addr, uint64_t bytes, bool by_page = false);
  // Precondition: no command can touch it.
  void release(uint64_t addr, uint64_t bytes);
  // Idle memory stays mapped as long as not much more than this is mapped in all, and as much again while the GPU has plenty: a
  // step takes its memory at more addresses than it needs at once (ResNet-50, 3.0 GB, mapped twenty slabs anew in each step
  // on an H200: 3 ms of 20). Until the first call: a little.
  void reserve(uint64_t bytes);
  // What could be committed beyond `had` bytes, of which some are: contexts, modules and the framework's own memory are in
  // nobody's account, so the GPU has less than its size.
  uint64_t room_bytes(uint64_t had) const;
  // Gives idle memory back to the driver, but for what is kept for the next step.
  void tidy();
  // All of it, and from now on whatever is idle.
  void give_back();
  // Is physical memory behind every byte?
  bool mapped(uint64_t addr, uint64_t bytes) const;
  uint64_t mapped_bytes() const;
  uint64_t granularity() const { return granularity_; }

  // Precondition of both: the device is idle for both spaces. stream: for copies, of this context; from_stream of the
  // other.
  Status alias(uint64_t addr, uint64_t bytes, DeviceMemory& from, uint64_t from_addr, CUstream stream,
               CUstream from_stream);
  Status unalias(uint64_t addr, uint64_t bytes, CUstream stream);
  // A handle for each page of the range. Precondition: as above, and the range is mapped.
  Status split(uint64_t addr, uint64_t bytes, CUstream stream);

 private:
  // One cuMemCreate; released with the last extent that shows it.
  struct Handle {
    std::shared_ptr<Context> context;
    CUmemGenericAllocationHandle value = 0;
    ~Handle();
  };
  struct Extent {
    uint64_t bytes = 0;
    std::shared_ptr<Handle> handle;
    bool idle = false;  // nothing in it is committed; counted in idle_bytes_
  };
  using Extents = std::map<uint64_t, Extent>;  // by address

  // All below: under mu_.
  bool covered(uint64_t begin, uint64_t end) const;
  Status ensure(uint64_t begin, uint64_t end, bool by_page = false);
  Status fill_gap(uint64_t begin, uint64_t end, bool by_page);
  Status map_fresh(uint64_t begin, uint64_t end, bool by_page, std::array<uint64_t, 2> cuts = {});
  Status map(uint64_t addr, uint64_t bytes, const Handle& handle) const;
  Status allow(uint64_t addr, uint64_t bytes) const;
  StatusOr<std::shared_ptr<Handle>> create(uint64_t bytes) const;
  void unmap(Extents::iterator extent);
  void trim(uint64_t keep_bytes);
  void tidy_locked();
  bool is_plenty();
  void note_idle(uint64_t begin, uint64_t end);
  Extents::iterator first_in(uint64_t addr);
  Status isolate(uint64_t begin, uint64_t end, CUstream stream);
  Status rebuild(uint64_t addr, uint64_t cut, bool by_page, CUstream stream);
  bool aligned(uint64_t value) const { return value % granularity_ == 0; }
  CUmemAllocationProp properties() const;

  const std::shared_ptr<Context> context_;
  const CudaConfig config_;
  const uint64_t base_, bytes_, granularity_;
  mutable std::mutex mu_;
  Extents extents_;
  Ranges committed_;
  uint64_t mapped_bytes_ = 0, idle_bytes_ = 0, reserved_bytes_ = 0;
  uint64_t maps_ = 0;  // for the log
  bool plenty_ = false, frugal_ = false;
  std::chrono::steady_clock::time_point asked_;
};

}  // namespace devproxy::hal::cuda
