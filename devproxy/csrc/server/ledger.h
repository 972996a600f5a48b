// SPDX-License-Identifier: Apache-2.0
// Who has how much of one GPU's memory: a file shared by all servers of that GPU, one entry per server process.
//
// A job's limit is its own (--gpu-memory), and what all take together is limited by the GPU's total. A software GPU has no
// size but what its jobs are given: its total is the largest of their limits.
//
// Changed under flock only. Whoever looks drops the entries of dead processes, so a server that was killed gives its
// memory back at the next look.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/locked_file.h"
#include "devproxy/csrc/server/process_id.h"

namespace devproxy::server {

// The decisions, pure: entries in, answers out. `alive` tells living processes.
struct LedgerTable {
  static constexpr uint32_t kMagic = 0x474c5044;  // "DPLG"
  struct Entry {
    ProcessId owner;
    uint64_t bytes = 0, limit = 0;
  };
  static constexpr uint32_t kVersion = 2;
  uint32_t magic = kMagic, version = kVersion;
  std::array<Entry, 255> entries{};

  template <class Alive>
  void reap(Alive alive) {
    for (Entry& e : entries)
      if (e.owner.pid && !alive(e.owner)) e = {};
  }
  uint64_t used() const {
    uint64_t sum = 0;
    for (const Entry& e : entries) sum += e.bytes;
    return sum;
  }
  // What the owner may still take: of its own limit, and of what the others have left of the GPU.
  uint64_t free(const ProcessId& owner, uint64_t limit) const;
  // From now on the owner's limit counts for the GPU's total. False: 255 servers are on it.
  bool join(const ProcessId& owner, uint64_t limit);
  // The granted bytes: `wanted` where that is free, else `minimum` where that is, else none.
  std::optional<uint64_t> take(const ProcessId& owner, uint64_t wanted, uint64_t minimum, uint64_t limit);
  void give(const ProcessId& owner, uint64_t bytes);

 private:
  Entry* find(const ProcessId& owner);
  const Entry* find(const ProcessId& owner) const;
};

// Any thread. The job's GPUs on this one share it.
class Ledger {
 public:
  static StatusOr<std::unique_ptr<Ledger>> open(const std::string& path, uint64_t limit_bytes);
  Ledger(LockedFile file, uint64_t limit_bytes) : file_(std::move(file)), limit_bytes_(limit_bytes) {}
  void join();
  void leave();  // when the last has left, what this process holds is given back

  std::optional<uint64_t> take(uint64_t wanted, uint64_t minimum);
  void give(uint64_t bytes);
  uint64_t free_bytes();
  uint64_t total_bytes() const { return limit_bytes_; }  // as this job sees its GPU

 private:
  template <class Change>
  auto change(Change change);
  LockedFile file_;
  const uint64_t limit_bytes_;
  const ProcessId self_ = this_process();
  std::atomic<uint32_t> users_{0};
};

}  // namespace devproxy::server
