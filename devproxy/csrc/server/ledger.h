// Who has how much of one GPU's memory: a file shared by all servers of that GPU, one entry per server process.
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
    uint64_t bytes = 0;
  };
  uint32_t magic = kMagic, version = 1;
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
  // The granted bytes: `wanted` where that fits into `total`, else `minimum` where that fits, else none.
  std::optional<uint64_t> take(const ProcessId& owner, uint64_t wanted, uint64_t minimum, uint64_t total);
  void give(const ProcessId& owner, uint64_t bytes);

 private:
  Entry* find(const ProcessId& owner);
};

// Any thread. The job's GPUs on this one share it.
class Ledger {
 public:
  static StatusOr<std::unique_ptr<Ledger>> open(const std::string& path, uint64_t total_bytes);
  Ledger(LockedFile file, uint64_t total_bytes) : file_(std::move(file)), total_bytes_(total_bytes) {}
  void join() { users_++; }
  void leave();  // when the last has left, what this process holds is given back

  std::optional<uint64_t> take(uint64_t wanted, uint64_t minimum);
  void give(uint64_t bytes);
  uint64_t used_bytes();
  uint64_t total_bytes() const { return total_bytes_; }

 private:
  template <class Change>
  auto change(Change change);
  LockedFile file_;
  const uint64_t total_bytes_;
  const ProcessId self_ = this_process();
  std::atomic<uint32_t> users_{0};
};

}  // namespace devproxy::server
