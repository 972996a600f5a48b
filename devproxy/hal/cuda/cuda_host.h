// SPDX-License-Identifier: Apache-2.0
// Host memory that the device can reach: staging slots, completion words, and the registered parts of the pinned
// windows.
//
// Owner: the space, under its lock.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "devproxy/hal/cuda/cuda_context.h"
#include "devproxy/hal/cuda/cuda_device.h"

namespace devproxy::hal::cuda {

class HostMemory {
 public:
  static constexpr uint32_t kWords = 1024;  // queues with a completion word; those behind have events

  static StatusOr<std::unique_ptr<HostMemory>> make(const std::shared_ptr<Context>& context, const CudaConfig& config,
                                                    const SpaceConfig& space);
  HostMemory(std::shared_ptr<Context> context, const CudaConfig& config, const SpaceConfig& space);
  ~HostMemory();

  // staging_bytes of page-locked memory; nullptr where the host has none left.
  uint8_t* take_slot();
  void give_slot(uint8_t* slot) { free_slots_.push_back(slot); }

  // kCellBytes of page-locked memory, for a copy of a few numbers; nullptr where all are in use.
  static constexpr uint64_t kCellBytes = 4096;
  uint8_t* take_cell();
  void give_cell(uint8_t* cell) { free_cells_.push_back(cell); }

  // nullptr where the queue must use events.
  std::atomic<uint64_t>* word(uint32_t index) const;
  CUdeviceptr word_device(uint32_t index) const { return words_device_ + index * kWordBytes; }

  // One thread adds windows, under the space's lock; it may ask without.
  void add_window(uint64_t begin, uint64_t bytes) { windows_.push_back({begin, begin + bytes}); }
  bool in_window(uint64_t addr, uint64_t bytes) const { return window_of(addr, bytes) != nullptr; }
  // How many of the `bytes` from `addr` on the device reaches in one registration; registers what is not. 0: must be
  // staged.
  uint64_t direct_bytes(uint64_t addr, uint64_t bytes);

 private:
  static constexpr uint64_t kCells = 128;
  static constexpr uint64_t kWordBytes = 64;  // a line each: the device writes, the completion thread reads
  static constexpr uint64_t kPieceBytes =
      2ull << 20;  // registering pins the pages, so small; a driver call each, so not tiny

  struct Window {
    uint64_t begin, end;
  };
  const Window* window_of(uint64_t addr, uint64_t bytes) const;
  Status allocate();
  Status add_slot();

  const std::shared_ptr<Context> context_;
  const CudaConfig config_;
  std::vector<Window> windows_;
  uint8_t* words_ = nullptr;
  CUdeviceptr words_device_ = 0;
  std::vector<uint8_t*> slots_, free_slots_, free_cells_;
  uint8_t* cells_ = nullptr;
  std::map<uint64_t, uint64_t> registered_;  // begin -> end, one cuMemHostRegister each
  bool can_register_;
};

}  // namespace devproxy::hal::cuda
