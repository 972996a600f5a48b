// SPDX-License-Identifier: Apache-2.0
// A space's memory, and host memory that kernels see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "devproxy/csrc/base/status.h"

namespace devproxy::hal {

class Space;

class SpaceMemory {
 public:
  // stable: the program keeps it from step to step, or makes the like of it in each step at the same place (the
  // allocator's high end). A hint.
  virtual Status commit(uint64_t addr, uint64_t bytes, bool stable) = 0;
  // The program has freed the range: no command behind `position` touches it as what it was. A hint; release() follows.
  virtual void freed(uint64_t addr, uint64_t bytes, uint64_t position) = 0;
  // Precondition: no submitted command can still touch the range.
  virtual void release(uint64_t addr, uint64_t bytes) = 0;
  // In place of release(): the program has the range again, or a part of it, in the order of the stream that used it, and
  // commands that use it as what it was may be under way. commit() follows, of a range that it is part of.
  virtual void reuse(uint64_t addr, uint64_t bytes) = 0;
  // The program has so much of the GPU's memory for itself from now on, committed or not: the device may keep what is
  // released within that. The thread that commits and releases.
  virtual void reserve(uint64_t bytes) = 0;
  // How much more than `had`, which the program has for itself already, the device could commit now; all of it where only the
  // GPU's account limits that. The same thread.
  virtual uint64_t room_bytes(uint64_t had) = 0;
  // Others of the job's on this GPU need what is kept for later, and what will be.
  virtual void give_back() = 0;
  // Of the GPU's memory, what is behind addresses of this space. All of it where only the GPU's account limits memory.
  virtual uint64_t mapped_bytes() = 0;

  // Another window of host memory, which the caller has mapped, until the space ends.
  virtual void host_window(uint64_t addr, uint64_t bytes) = 0;
  // A part of a window is in use from now on.
  virtual void host_allocated(uint64_t addr, uint64_t bytes) = 0;
  // By which address kernels reach it. Precondition: it is in use.
  virtual StatusOr<uint64_t> host_device_address(uint64_t addr, uint64_t bytes) = 0;

  // Level 2: contents. Precondition: idle(). Any thread.
  virtual Status read(uint64_t addr, void* to, size_t bytes) = 0;
  virtual Status write(uint64_t addr, const void* from, size_t bytes) = 0;
  // The same in pieces, in their order, through host memory of the device's own; several threads at once are faster than
  // one. An error of the sink or source ends it.
  using PieceSink = std::function<Status(const void* piece, size_t bytes, size_t offset)>;
  using PieceSource = std::function<Status(void* piece, size_t bytes, size_t offset)>;
  virtual Status read_pieces(uint64_t addr, size_t bytes, const PieceSink& sink) = 0;
  virtual Status write_pieces(uint64_t addr, size_t bytes, const PieceSource& source) = 0;
  // Device memory as plain memory of this process, which a dump or restore may use in place of read() and write();
  // nullptr where it is none.
  virtual void* host_view(uint64_t addr, uint64_t bytes) = 0;
  // Level 2, in a restore: the range, which is stable, has its contents. Where spaces on one physical GPU have equal ones
  // (hal/sharing.h), these may be one from now on. Precondition: idle(). Any thread.
  virtual Status loaded(uint64_t addr, uint64_t bytes) = 0;
  // All of it has. From now on others may be found to be equal to it.
  virtual void all_loaded() = 0;
  // Level 2: gives back memory of the GPU that the device keeps for itself and can do without, for now. The owner's
  // thread, or idle().
  virtual void trim() = 0;

  // Level 3: [addr, addr + bytes) shows the same physical pages as [from_addr, ...) of `from`, a space of the same
  // device, until unalias gives it pages of its own with the same contents. Page aligned. Precondition: idle().
  virtual Status alias(uint64_t addr, size_t bytes, Space& from, uint64_t from_addr) = 0;
  virtual Status unalias(uint64_t addr, size_t bytes) = 0;

 protected:
  ~SpaceMemory() = default;
};

}  // namespace devproxy::hal
