// SPDX-License-Identifier: Apache-2.0
// Who has how much of one GPU's memory: a file shared by all servers of that GPU, one entry per server process.
//
// A job's limit is its own (--gpu-memory), and what all take together is limited by the GPU's total. A software GPU has no
// size but what its jobs are given: its total is the largest of their limits.
//
// A process's need is what it has taken, less what its ranks keep once (replica splicing): pages count once. What a server
// comes with must fit. What its ranks do then is not refused for the others' sake: each was promised a GPU of its own,
// and a launch that writes a shared page alone cannot be refused at all. So a job's need may pass the total; then no other
// job gets any more until it is below again.
//
// While a job moves, its parked servers and the fresh ones that take their state have the same memory. The parked ones
// are set aside: of the two sums the larger counts. So a fresh server has the room that its predecessor has, and
// nobody else gets that before it is known who of the two goes on.
//
// Changed under flock only. Whoever looks drops the entries of dead processes, so a server that was killed gives its
// memory back at the next look.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
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
    uint64_t job = 0;  // the hash of its name
    uint64_t bytes = 0, limit = 0;
    uint64_t saved = 0;  // of bytes, what other ranks of the process have too
    uint64_t aside = 0;  // 1: parked, and a successor may take the same
    uint64_t need() const { return bytes > saved ? bytes - saved : 0; }
  };
  static constexpr uint32_t kVersion = 3;
  uint32_t magic = kMagic, version = kVersion;
  std::array<Entry, 255> entries{};

  template <class Alive>
  void reap(Alive alive) {
    for (Entry& e : entries)
      if (e.owner.pid && !alive(e.owner)) e = {};
  }
  uint64_t used() const;
  uint64_t total(uint64_t limit) const;
  // What the owner may still take: of its own limit, and of what the others have left of the GPU.
  uint64_t free(const ProcessId& owner, uint64_t limit) const;
  // From now on the owner's limit counts for the GPU's total. False: 255 servers are on it.
  bool join(const ProcessId& owner, uint64_t job, uint64_t limit);
  // The same as if the owner, who may have several of the job's GPUs, and all others of its job had no more than own_bytes.
  uint64_t free_alone(const ProcessId& owner, uint64_t limit, uint64_t own_bytes) const;
  // What the other jobs leave to this one.
  uint64_t left_to(uint64_t job, uint64_t limit) const;
  // The granted bytes: `wanted` where that is free, else `minimum` where that is, else none. most: of this time.
  std::optional<uint64_t> take(const ProcessId& owner, uint64_t wanted, uint64_t minimum, uint64_t limit,
                               uint64_t most = UINT64_MAX);
  void give(const ProcessId& owner, uint64_t bytes);
  Entry* find(const ProcessId& owner);

 private:
  struct Needs {
    uint64_t aside = 0, here = 0;
  };
  Needs needs_of(uint64_t job) const;
  const Entry* find(const ProcessId& owner) const;
};

// Any thread. The job's GPUs on this one share it. While somebody holds the lock for long, nothing is granted.
class Ledger {
 public:
  // job: its name.
  static StatusOr<std::unique_ptr<Ledger>> open(const std::string& path, const std::string& job, uint64_t limit_bytes);
  Ledger(LockedFile file, uint64_t job, uint64_t limit_bytes)
      : file_(std::move(file)), job_(job), limit_bytes_(limit_bytes) {}
  void join();
  uint64_t limit_bytes() const { return limit_bytes_; }
  void leave();  // when the last has left, what this process holds is given back
  // What the ranks keep once, now. Any thread, at any time. Before the first join().
  void set_saved(std::function<uint64_t()> saved) { saved_ = std::move(saved); }
  void set_aside(bool aside);

  struct Use {
    uint64_t taken = 0, saved = 0;  // by this process
    uint64_t used = 0, total = 0;   // of the GPU, by all
  };
  Use use() const;
  // Of the GPU, by the other jobs, to this one; nobody needs to have joined.
  uint64_t left_bytes() const;
  // Other jobs that have memory of the GPU, for people to read: "job a has 12.0 MiB, job b has 1.0 MiB". The most first.
  std::string other_holders() const;

 private:
  std::optional<LedgerTable> read() const;
  friend class LedgerShare;
  template <class Change>
  auto change(Change change);
  LockedFile file_;
  const uint64_t job_, limit_bytes_;
  std::function<uint64_t()> saved_;
  const ProcessId self_ = this_process();
  std::atomic<uint32_t> users_{0};
  std::atomic<uint64_t> owed_{0};  // could not be given back while somebody held the lock: it is with the next change
};

// What one of the job's GPUs has of the physical one. It never has more than the limit, whatever its ranks share with
// others. shared: others of the job's are there too. Any thread.
class LedgerShare {
 public:
  LedgerShare(Ledger& ledger, bool shared) : ledger_(ledger), shared_(shared) {}
  // As LedgerTable::take(): what is there already must fit.
  std::optional<uint64_t> take(uint64_t wanted, uint64_t minimum);
  // The same for what the job asks for while it runs: where it is shared, `minimum` also beyond the GPU's total, but not
  // at other jobs' cost.
  std::optional<uint64_t> grow(uint64_t wanted, uint64_t minimum);
  void give(uint64_t bytes);
  uint64_t free_bytes();                                         // for grow()
  uint64_t room_bytes();                                         // for take()
  uint64_t total_bytes() const { return ledger_.limit_bytes_; }  // as this job sees its GPU
  std::string other_holders() const { return ledger_.other_holders(); }

 private:
  std::optional<uint64_t> take(uint64_t wanted, uint64_t minimum, bool beyond);
  Ledger& ledger_;
  const bool shared_;
  std::atomic<uint64_t> bytes_{0};  // grows under the ledger's lock
};

}  // namespace devproxy::server
