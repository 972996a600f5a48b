// SPDX-License-Identifier: Apache-2.0
// What the client's allocator says is allocated: the server's mirror. Pure: no device, no clock, no lock.
//
// Positions. A command that was posted before a free may still run after the free was announced (it waits in a stream),
// and it may use the memory. So a freed range stays known, with the position of its free, until every command before
// that position has completed; contains() answers for the position of the command that asks.
//
// The client gives a freed range out again before that, in the order of the stream that used it, and also in other pieces:
// a part of it, or several with what lies between. So a new range takes bytes of freed ones over, the rest of these stays
// known, and a command from before may cross such borders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

namespace devproxy::server {

struct Range {
  uint64_t addr = 0, bytes = 0;
  bool operator==(const Range&) const = default;
};

class MemoryMirror {
 public:
  MemoryMirror() = default;
  // Everything that is added lies in [begin, end).
  MemoryMirror(uint64_t begin, uint64_t end) : begin_(begin), end_(end) {}

  enum class Answer { kOk, kOutside, kOverlaps, kUnknown };

  // What the new range takes over of freed ones is appended to `reused`: the client only reuses what no command can
  // touch any more, or what commands of the same stream touch before those of the new range.
  // crossed_before: in a restore, what for_each_live() and for_each_freed() have said.
  [[nodiscard]] Answer add(uint64_t addr, uint64_t bytes, uint32_t flags, std::vector<Range>* reused,
                           uint64_t crossed_before = 0);
  // keep: some command before `position` has not completed. freed: the range, for whoever accounts.
  [[nodiscard]] Answer remove(uint64_t addr, uint64_t position, bool keep, Range* freed);
  // Forgets freed ranges that no command at or after `oldest_pending` can have in use; appends them to `forgotten`.
  void retire(uint64_t oldest_pending, std::vector<Range>* forgotten);
  // And of the rest those that in_use(addr, bytes, freed_at) says no command can have in use.
  template <class InUse>
  void retire_unless(InUse in_use, std::vector<Range>* forgotten) {
    std::erase_if(freed_, [&](const Freed& f) {
      const auto it = ranges_.find(f.addr);
      if (it == ranges_.end() || it->second.freed_at != f.position) return true;  // reused since
      if (in_use(f.addr, it->second.bytes, f.position)) return false;
      forget(it, forgotten);
      return true;
    });
  }
  bool has_freed() const { return freed_count_ != 0; }
  uint64_t freed_bytes() const {
    uint64_t sum = 0;
    for_each_freed([&](uint64_t, const Allocation& a) { sum += a.bytes; });
    return sum;
  }

  // Is [addr, addr + bytes) inside one allocation (or pieces side by side: kPieceFlag) that was live for a command at
  // `position`? An empty range is, where its address is. Where ranges were cut, the answer for a position before that may
  // be yes for what lies in several that touch.
  bool contains(uint64_t addr, uint64_t bytes, uint64_t position) const;

  // Lowest address in [lo, hi) with room for `bytes`, aligned; 0 where there is none.
  uint64_t first_gap(uint64_t lo, uint64_t hi, uint64_t bytes, uint64_t align) const;

  uint64_t live_bytes() const { return live_bytes_; }
  uint64_t stable_bytes() const { return stable_bytes_; }  // of the live ones, with kStableFlag
  uint64_t peak_bytes() const { return peak_bytes_; }
  size_t live_count() const { return ranges_.size() - freed_count_; }

  // Live allocations in address order: what a dump writes.
  template <class Visit>  // visit(addr, allocation)
  void for_each_live(Visit visit) const {
    for (const auto& [addr, a] : ranges_)
      if (!a.freed_at) visit(addr, a);
  }
  // Freed ranges that are still known, in address order.
  template <class Visit>  // visit(addr, allocation)
  void for_each_freed(Visit visit) const {
    for (const auto& [addr, a] : ranges_)
      if (a.freed_at) visit(addr, a);
  }

  struct Allocation {
    uint64_t bytes = 0;
    uint64_t freed_at = 0;  // 0: live; positions of messages are never 0
    uint32_t flags = 0;
    // Commands from before this position may cross its borders, to a neighbour that says so too. 0: none may.
    uint64_t crossed_before = 0;
  };

 private:
  using Ranges = std::map<uint64_t, Allocation>;  // by address
  void forget(Ranges::iterator freed, std::vector<Range>* forgotten);
  Ranges::iterator reuse(Ranges::iterator it, uint64_t begin, uint64_t end, uint64_t* crossed_before);
  uint64_t begin_ = 0, end_ = 0;
  Ranges ranges_;
  uint64_t live_bytes_ = 0, stable_bytes_ = 0, peak_bytes_ = 0;
  size_t freed_count_ = 0;
  struct Freed {
    uint64_t position, addr;
  };
  std::deque<Freed> freed_;  // in position order; entries of what was reused since are skipped
};

}  // namespace devproxy::server
