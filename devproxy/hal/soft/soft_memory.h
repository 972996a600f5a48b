// SPDX-License-Identifier: Apache-2.0
// The device memory of one client process on the software GPU: a file, mapped at its fixed address. Its pages appear at
// first touch; those of freed memory go back to the host when nobody has allocated it again for a while.
//
// The owner's submitting thread calls what changes it. owns() is for any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "devproxy/hal/hal.h"
#include "devproxy/hal/soft/range_set.h"

namespace devproxy::hal::soft {

class SoftMemory {
 public:
  // The file, sized and mapped. A SoftMemory takes it over.
  static StatusOr<int> map(const SpaceConfig& config);
  SoftMemory(const SpaceConfig& config, int fd) : base_(config.device_base), size_(config.device_bytes), fd_(fd) {}
  ~SoftMemory();
  SoftMemory(const SoftMemory&) = delete;
  SoftMemory& operator=(const SoftMemory&) = delete;

  int fd() const { return fd_; }
  bool owns(uint64_t addr, uint64_t bytes) const {
    return addr >= base_ && bytes <= size_ && addr - base_ <= size_ - bytes;
  }

  void committed(uint64_t addr, uint64_t bytes);
  void released(uint64_t addr, uint64_t bytes);
  void reused(uint64_t bytes);
  // Ranges of whole pages, (address, bytes), that were idle for too long: the caller gives them back.
  std::vector<std::pair<uint64_t, uint64_t>> take_idle();
  void give_back(uint64_t addr, uint64_t bytes);

  // As Space::alias and Space::unalias.
  Status alias(uint64_t addr, size_t bytes, const SoftMemory& from, uint64_t from_addr);
  Status unalias(uint64_t addr, size_t bytes);

 private:
  const uint64_t base_, size_;
  const int fd_;
  RangeSet idle_, idle_long_;  // released, perhaps still holding pages
  uint64_t aged_ns_ = 0;       // when idle_ last became idle_long_
  uint64_t live_bytes_ = 0;
};

}  // namespace devproxy::hal::soft
