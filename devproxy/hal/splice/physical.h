// SPDX-License-Identifier: Apache-2.0
// What a device does for the splicer: physical pages of one GPU, and the ranks' views of them.
//
// The splicer keeps the books (page_pool.h). Places in the pool are its names for pages that several ranks may show; a device
// that finds such pages by themselves need not look at them.
#pragma once

#include <cstdint>
#include <vector>

#include "devproxy/csrc/base/status.h"

namespace devproxy::hal::splice {

class Runner;

// The number of what a range holds. Not all zero.
struct Contents {
  uint64_t low = 0, high = 0;
  bool operator==(const Contents&) const = default;
};

// Where a rank's device addresses show their contents. Offsets are from its base, in whole pages. Under the splicer's page lock.
class RankMemory {
 public:
  virtual ~RankMemory() = default;
  // Its own pages become those at pool_at, with their contents.
  virtual Status give(uint64_t begin, uint64_t end, uint64_t pool_at) = 0;
  // It shows the pages at pool_at in place of its own, which are free then. `from` shows them at from_begin.
  virtual Status show(uint64_t begin, uint64_t end, uint64_t pool_at, RankMemory& from, uint64_t from_begin) = 0;
  // It shows pages of its own again. contents: with what the shared ones hold, else with anything.
  virtual Status own(uint64_t begin, uint64_t end, bool contents) = 0;
  // With SpliceConfig::guard: who writes the pages at this rank's addresses ends the process, or may.
  virtual void protect(uint64_t begin, uint64_t end, bool on) = 0;
};

class PhysicalMemory {
 public:
  struct Pair {
    uint64_t a, b, bytes;  // addresses
  };
  struct Range {
    uint64_t addr, bytes;
  };
  struct Traits {
    uint64_t page = 4096;            // bytes; a power of two
    uint64_t least_numbered = 4096;  // ranges of less have no numbers: their bytes count, which the host can read
    bool lends = true;               // a rank's memory may lag behind what it has been told (loans.h)
    bool guards = true;              // protect() works, and the host can read device memory
    bool joins_edges = false;        // pages are so large that several buffers share one
  };

  explicit PhysicalMemory(const Traits& traits) : traits(traits) {}
  virtual ~PhysicalMemory() = default;
  const Traits traits;

  // -- under the splicer's page lock
  virtual Status grow_pool(uint64_t bytes) = 0;
  virtual void empty_pool(uint64_t at, uint64_t bytes) = 0;  // nobody shows these pages any more
  // Do all pairs hold the same?
  virtual StatusOr<bool> same(const std::vector<Pair>& pairs) = 0;
  // Cheaper than a copy: false where that would have to be found out.
  virtual bool is_known_same(const Pair& pair) = 0;
  virtual Status copy(uint64_t to, uint64_t from, uint64_t bytes) = 0;
  // Between the two, copies and comparisons belong to that launch: in its order, behind what follow() has put before it.
  virtual void begin_work(Runner*) {}
  virtual void end_work() {}

  // -- any thread
  // Of what the launch has left.
  virtual StatusOr<Contents> hash(Runner& runner, const std::vector<Range>& ranges) = 0;
  // The time of a kernel that touches so much, whose run() took measured_ns.
  virtual uint64_t kernel_ns(uint64_t bytes, uint64_t measured_ns) const = 0;
  // The GPU has nothing to run.
  virtual bool idle() = 0;
};

// How a launch is run, by the space that it is of.
class Runner {
 public:
  virtual void begin() = 0;  // waits for the turn
  virtual Status run() = 0;
  virtual void end() = 0;
  virtual void yield() = 0;  // the thread is about to wait
  // What this one's stream gets from now on comes behind what the other's has. The other's thread waits meanwhile.
  virtual Status follow(Runner&) { return {}; }

 protected:
  ~Runner() = default;
};

}  // namespace devproxy::hal::splice
