// SPDX-License-Identifier: Apache-2.0
// The bidirectional allocator (paper 5.2.2): stable buffers from the high end of the range, all others from the low
// end, so that what varies between replicas never moves what must not. Small stable buffers lie in chunks of their own:
// each rank writes some of them alone (an optimizer's step counts, a batch norm's averages), and replica splicing, which
// goes by the device's pages, would keep the parameters between them apart. Other small buffers lie apart too: some live
// long (a list of losses), and would cut what a step's large ones need in one piece. Pure: addresses in, addresses out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <unordered_set>
#include <utility>

namespace devproxy {

class BidirAllocator;

// Free runs that know until when somebody uses them. Of a stream, what it has freed while it is busy: it may use that again
// at once, since its own order keeps the old use before the new one, and in other pieces; for all others it is free once
// the stream has come so far. Pure: addresses and positions.
class PendingRuns {
 public:
  // Joins the run with its neighbours; of their positions the last one counts.
  void give(uint64_t addr, uint64_t bytes, uint64_t after);
  // Makes a run of at least `bytes`, of neighbours here and in `free`, the smallest that will do; else of the last ones and
  // what must be added at low_top(). False: there is none.
  bool gather(BidirAllocator& free, uint64_t bytes);
  // As BidirAllocator::best_low(); and the lower part of that run, which there must be.
  uint64_t best(uint64_t bytes) const;
  [[nodiscard]] uint64_t take(uint64_t bytes);
  // Begin and end of the run around addr, which there must be; and a part of that is none of it any more.
  std::pair<uint64_t, uint64_t> around(uint64_t addr) const;
  void cut(uint64_t begin, uint64_t end);
  // Takes out what is over(after), and hands each run to give(addr, bytes).
  template <class Over, class Give>
  void reclaim(Over over, Give give) {
    for (auto it = by_addr_.begin(); it != by_addr_.end();) {
      const auto [addr, run] = *it;
      if (!over(run.after)) {
        ++it;
        continue;
      }
      by_bytes_.erase({run.bytes, addr});
      it = by_addr_.erase(it);
      give(addr, run.bytes);
    }
  }
  size_t runs() const { return by_addr_.size(); }

 private:
  struct Run {
    uint64_t bytes, after;
  };
  std::map<uint64_t, Run> by_addr_;
  std::set<std::pair<uint64_t, uint64_t>> by_bytes_;  // (bytes, addr) of the same runs
};

class BidirAllocator {
 public:
  static constexpr uint64_t kGranule = 512;                    // bytes; the CUDA allocators' alignment
  static constexpr uint64_t kSmallBytes = uint64_t{16} << 10;  // of stable ones
  // Of stable ones that are not small: a page of the host. So none shares a page with its neighbours, and a rank that has one
  // more than the others has what lies below it in other pages, but not in other places of pages.
  static constexpr uint64_t kStableGranule = uint64_t{4} << 10;
  static constexpr uint64_t kSmallLowBytes = uint64_t{1} << 20;  // of all others; as in torch's allocator
  static constexpr uint64_t kChunkBytes = uint64_t{2} << 20;     // at a multiple of it: one page of a GPU

  BidirAllocator() = default;
  BidirAllocator(uint64_t base, uint64_t bytes)
      : low_top_(base), high_bottom_(base + bytes), base_(base), end_(base + bytes) {}

  static uint64_t round_up(uint64_t bytes, bool stable = false) {
    const uint64_t granule = stable && bytes > kSmallBytes ? kStableGranule : kGranule;
    return (bytes + granule - 1) & ~(granule - 1);
  }

  // Address of a free run of `bytes` (a multiple of kGranule, > 0), 0 when the range has none. Best fit, and among
  // equals the end that the buffer belongs to.
  [[nodiscard]] uint64_t take(uint64_t bytes, bool stable);
  // Of the free runs below low_top() that have room for it, the smallest one's size; 0: none has. Small buffers have runs of
  // their own.
  uint64_t best_low(uint64_t bytes) const;
  // Does it lie where small buffers do that are not stable?
  bool is_small(uint64_t addr) const { return small_chunks_.contains(addr / kChunkBytes); }
  // The bytes of the free run below low_top() that ends, or begins, at addr; 0: none does.
  uint64_t low_run_before(uint64_t addr) const;
  uint64_t low_run_at(uint64_t addr) const;
  // Takes that one, as a whole.
  void take_run(uint64_t addr) { erase(by_addr_.find(addr)); }
  // Takes what begins at low_top(). False: there is not so much.
  [[nodiscard]] bool take_top(uint64_t bytes);

  // Gives a run back and joins it with its neighbours. The run was taken as a whole.
  void give(uint64_t addr, uint64_t bytes);

  uint64_t low_top() const { return low_top_; }
  uint64_t high_bottom() const { return high_bottom_; }
  size_t free_runs() const { return by_addr_.size(); }

 private:
  uint64_t take_small(uint64_t bytes);
  uint64_t take_chunk();
  uint64_t take_small_low(uint64_t bytes);
  uint64_t take_low_chunk();
  void give_small_low(uint64_t addr, uint64_t bytes);
  void insert(uint64_t addr, uint64_t bytes);
  void erase(std::map<uint64_t, uint64_t>::iterator it);

  std::map<uint64_t, uint64_t> by_addr_;                        // free runs below low_top_ and above high_bottom_
  std::set<std::pair<uint64_t, uint64_t>> low_, high_;          // (bytes, addr) of the same runs, by end
  std::map<uint64_t, std::unique_ptr<BidirAllocator>> chunks_;  // of small stable buffers, which are taken low in them
  PendingRuns small_;                          // free runs in chunks of small buffers that are not stable
  std::unordered_set<uint64_t> small_chunks_;  // those chunks, as numbers of chunks from address 0
  uint64_t low_top_ = 0, high_bottom_ = 0, base_ = 0, end_ = 0;
};

}  // namespace devproxy
