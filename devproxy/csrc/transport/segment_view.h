// SPDX-License-Identifier: Apache-2.0
// A mapped segment: the pieces of segment.h by name, and the ring over them.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "devproxy/csrc/transport/ring.h"
#include "devproxy/csrc/wire/segment.h"

namespace devproxy {

struct SegmentCommit {
  std::atomic<uint32_t>& operator()(uint8_t* p) const {
    return *std::launder(reinterpret_cast<std::atomic<uint32_t>*>(p));
  }
};
using CommandRing = Ring<RealSync, SegmentCommit>;

// Maps the file behind fd; the ring's bytes appear twice in a row so that a record never wraps. Not RAII in the
// client on purpose: no static destructor may unmap what another thread still uses.
class SegmentView {
 public:
  // Returns false and leaves errno where the mapping fails. fd may be closed afterwards.
  bool map(int fd) {
    // [control streams replies ring][ring again][chunks]: one reservation, three fixed mappings into it.
    uint8_t* base = static_cast<uint8_t*>(
        mmap(nullptr, kSegmentBytes + kRingBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base == MAP_FAILED) return false;
    auto piece = [&](size_t at, size_t bytes, size_t file_offset) {
      return mmap(base + at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                  static_cast<off_t>(file_offset)) != MAP_FAILED;
    };
    if (!piece(0, kRingOffset + kRingBytes, 0) || !piece(kRingOffset + kRingBytes, kRingBytes, kRingOffset) ||
        !piece(kRingOffset + 2 * kRingBytes, kChunkBytes * kChunks, kChunksOffset)) {
      munmap(base, kSegmentBytes + kRingBytes);
      return false;
    }
    madvise(base, kSegmentBytes + kRingBytes, MADV_DONTFORK);  // a child must not see the parent's ring
    base_ = base;
    ring_ = CommandRing(RingParts<RealSync>{base + kRingOffset, kRingBytes, kLineBytes, &control()->tail.value,
                                            &control()->head.value, &control()->doorbell.sleeping,
                                            &control()->space_waiters, &control()->space_seq});
    return true;
  }
  void unmap() {
    if (base_) munmap(base_, kSegmentBytes + kRingBytes);
    base_ = nullptr;
  }
  bool mapped() const { return base_ != nullptr; }

  ControlPage* control() const { return std::launder(reinterpret_cast<ControlPage*>(base_)); }
  StreamState* streams() const { return std::launder(reinterpret_cast<StreamState*>(base_ + kStreamsOffset)); }
  ReplySlot* replies() const { return std::launder(reinterpret_cast<ReplySlot*>(base_ + kRepliesOffset)); }
  uint8_t* chunk(uint32_t i) const { return base_ + kRingOffset + 2 * kRingBytes + i * kChunkBytes; }
  CommandRing& ring() { return ring_; }
  const CommandRing& ring() const { return ring_; }

 private:
  uint8_t* base_ = nullptr;
  CommandRing ring_;
};

}  // namespace devproxy
