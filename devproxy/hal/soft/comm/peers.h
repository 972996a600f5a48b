// SPDX-License-Identifier: Apache-2.0
// The memory of other spaces of the job in this process. One mapping of each serves all communicators.
//
// Threads: any. A PeerMemory does not change; the registry's lock is a leaf.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/owner.h"

namespace devproxy::hal::soft {

class PeerMemory {
 public:
  // The memory of the space with that incarnation, which says that it is device_bytes long from device_base on.
  static StatusOr<std::shared_ptr<PeerMemory>> open(SpaceOwner& owner, const SpacePlace& place, uint64_t incarnation,
                                                    uint64_t device_base, uint64_t device_bytes);
  // What has come of the memory of a space in another tree (shadow.h).
  static StatusOr<std::shared_ptr<PeerMemory>> open_shadow(const std::string& folder, uint64_t incarnation,
                                                           uint64_t device_base, uint64_t device_bytes);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;

  uint64_t incarnation() const { return incarnation_; }
  // The peer's address here; nullptr where it is none of the peer's memory.
  uint8_t* at(uint64_t addr, uint64_t bytes) const {
    if (addr < device_base_ || bytes > bytes_ || addr - device_base_ > bytes_ - bytes) return nullptr;
    return base_ + (addr - device_base_);
  }
  // Whether its server still has it. Of a shadow the board says that (BoardCell::state).
  bool alive() const;

 private:
  static StatusOr<std::shared_ptr<PeerMemory>> map(int memory, int alive, uint64_t incarnation, uint64_t device_base,
                                                   uint64_t device_bytes);
  PeerMemory(uint8_t* base, uint64_t device_base, uint64_t bytes, int alive, uint64_t incarnation)
      : base_(base), device_base_(device_base), bytes_(bytes), alive_(alive), incarnation_(incarnation) {}
  uint8_t* const base_;
  const uint64_t device_base_, bytes_;
  const int alive_;
  const uint64_t incarnation_;
};

}  // namespace devproxy::hal::soft
