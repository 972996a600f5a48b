// SPDX-License-Identifier: Apache-2.0
// Where the numbers of metas (meta_barrier.h) lie: in a piece of the client's device range that is no allocation, and here
// on the host, where the device copies the sums to.
//
// The piece is the top of what belongs to the server in each device range (kGlobalsBytes). No list of memory has it, so
// the job does not see it, no image has it, and the ledger does not count it: a job has as much memory with metas as
// without. What lies in it is written when the client's first communicator is made, and again when a restore makes it
// (interceptors/comm). A slot holds the sums of one meta from its submission until they are read, and a client is parked
// only when all are.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "devproxy/csrc/server/meta_barrier.h"
#include "devproxy/csrc/wire/segment.h"

namespace devproxy::server {

class MetaSlots {
 public:
  static constexpr uint32_t kSlots = 1024;
  static constexpr uint32_t kNone = UINT32_MAX;
  // What a meta may say that acknowledges nothing. Constants, so that no command has to write them.
  static constexpr std::array<MetaSums, 2> kWords{{{0, 0}, {1, 0}}};

  // The AllReduce that a meta is.
  static CommOp op(uint64_t send, uint64_t recv) {
    CommOp op;
    op.kind = static_cast<uint8_t>(CommKind::kAllReduce);
    op.type = static_cast<uint8_t>(CommType::kInt32);
    op.reduction = static_cast<uint8_t>(CommReduction::kSum);
    op.send = send;
    op.recv = recv;
    op.count = sizeof(MetaSums) / sizeof(int32_t);
    return op;
  }

  explicit MetaSlots(uint64_t device_begin) : begin_(device_begin + kDeviceBytes - kMetaBytes) {}

  uint64_t begin() const { return begin_; }
  bool owns(uint64_t addr) const { return addr >= begin_ && addr - begin_ < kMetaBytes; }
  uint64_t word_at(const MetaSums& says) const { return begin_ + (says.need ? sizeof(MetaSums) : 0); }
  // For sums that nobody reads.
  uint64_t scratch_at() const { return begin_ + kScratch; }
  uint64_t slot_at(uint32_t slot) const { return begin_ + kFirstSlot + 2 * sizeof(MetaSums) * slot; }
  // Where slot_at() is copied to.
  MetaSums& sums(uint32_t slot) { return sums_[slot]; }
  // What a meta says that acknowledges: copied from says() to said_at() in front of it.
  MetaSums& says(uint32_t slot) { return says_[slot]; }
  uint64_t said_at(uint32_t slot) const { return slot_at(slot) + sizeof(MetaSums); }

  struct Reading {
    CommKey comm;
    uint64_t number = 0;
  };
  // kNone: all are in use.
  uint32_t take() {
    if (free_.empty() && used_ == kSlots) return kNone;
    if (free_.empty()) free_.push_back(used_++);
    const uint32_t slot = free_.back();
    free_.pop_back();
    sums_[slot] = kNothing;
    return slot;
  }
  void reads(uint32_t slot, const Reading& reading) { readings_[slot] = reading; }
  Reading give(uint32_t slot, std::optional<MetaSums>* sums) {
    free_.push_back(slot);
    if (sums_[slot] != kNothing) *sums = sums_[slot];
    return readings_[slot];
  }

 private:
  static constexpr uint64_t kScratch = 64, kFirstSlot = 128;
  static_assert(kFirstSlot + 2 * sizeof(MetaSums) * kSlots <= kMetaBytes);
  static constexpr MetaSums kNothing{-1, -1};  // no copy was executed: after a fault

  const uint64_t begin_;
  std::array<MetaSums, kSlots> sums_{}, says_{};
  std::array<Reading, kSlots> readings_{};
  std::vector<uint32_t> free_;
  uint32_t used_ = 0;  // slots from here on were never taken
};

}  // namespace devproxy::server
