// SPDX-License-Identifier: Apache-2.0
// The bidirectional allocator (paper 5.2.2): stable buffers from the high end of the range, all others from the low
// end, so that what varies between replicas never moves what must not. Small stable buffers lie in chunks of their own:
// each rank writes some of them alone (an optimizer's step counts, a batch norm's averages), and replica splicing, which
// goes by the device's pages, would keep the parameters between them apart. Pure: addresses in, addresses out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>

namespace devproxy {

class BidirAllocator {
 public:
  static constexpr uint64_t kGranule = 512;  // bytes; the CUDA allocators' alignment
  static constexpr uint64_t kSmallBytes = uint64_t{16} << 10;
  static constexpr uint64_t kChunkBytes = uint64_t{2} << 20;  // at a multiple of it: one page of a GPU

  BidirAllocator() = default;
  BidirAllocator(uint64_t base, uint64_t bytes)
      : low_top_(base), high_bottom_(base + bytes), base_(base), end_(base + bytes) {}

  static uint64_t round_up(uint64_t bytes) { return (bytes + kGranule - 1) & ~(kGranule - 1); }

  // Address of a free run of `bytes` (a multiple of kGranule, > 0), 0 when the range has none. Best fit, and among
  // equals the end that the buffer belongs to.
  [[nodiscard]] uint64_t take(uint64_t bytes, bool stable);

  // Gives a run back and joins it with its neighbours. The run was taken as a whole.
  void give(uint64_t addr, uint64_t bytes);

  uint64_t low_top() const { return low_top_; }
  uint64_t high_bottom() const { return high_bottom_; }
  size_t free_runs() const { return by_addr_.size(); }

 private:
  uint64_t take_small(uint64_t bytes);
  uint64_t take_chunk();
  void insert(uint64_t addr, uint64_t bytes);
  void erase(std::map<uint64_t, uint64_t>::iterator it);

  std::map<uint64_t, uint64_t> by_addr_;                        // free runs below low_top_ and above high_bottom_
  std::set<std::pair<uint64_t, uint64_t>> low_, high_;          // (bytes, addr) of the same runs, by end
  std::map<uint64_t, std::unique_ptr<BidirAllocator>> chunks_;  // of small stable buffers, which are taken low in them
  uint64_t low_top_ = 0, high_bottom_ = 0, base_ = 0, end_ = 0;
};

}  // namespace devproxy
