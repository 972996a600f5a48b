// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/client/alloc_bidir.h"

#include <iterator>

namespace devproxy {

void BidirAllocator::insert(uint64_t addr, uint64_t bytes) {
  by_addr_.emplace(addr, bytes);
  (addr < low_top_ ? low_ : high_).emplace(bytes, addr);
}

void BidirAllocator::erase(std::map<uint64_t, uint64_t>::iterator it) {
  (it->first < low_top_ ? low_ : high_).erase({it->second, it->first});
  by_addr_.erase(it);
}

uint64_t BidirAllocator::take_chunk() {
  for (auto it = high_.lower_bound({kChunkBytes, 0}); it != high_.end(); ++it) {
    const auto [run_bytes, run_addr] = *it;
    const uint64_t end = run_addr + run_bytes, chunk = (end - kChunkBytes) / kChunkBytes * kChunkBytes;
    if (chunk < run_addr) continue;
    erase(by_addr_.find(run_addr));
    if (chunk > run_addr) insert(run_addr, chunk - run_addr);
    if (chunk + kChunkBytes < end) insert(chunk + kChunkBytes, end - chunk - kChunkBytes);
    return chunk;
  }
  if (high_bottom_ < kChunkBytes) return 0;
  const uint64_t chunk = (high_bottom_ - kChunkBytes) / kChunkBytes * kChunkBytes;
  if (chunk < low_top_ || chunk == 0) return 0;
  const uint64_t above = chunk + kChunkBytes, rest = high_bottom_ - above;
  high_bottom_ = chunk;
  if (rest) insert(above, rest);
  return chunk;
}

uint64_t BidirAllocator::take_small(uint64_t bytes) {
  for (const auto& [base, chunk] : chunks_)
    if (const uint64_t addr = chunk->take(bytes, false)) return addr;
  const uint64_t base = take_chunk();
  if (!base) return 0;
  return chunks_.emplace(base, std::make_unique<BidirAllocator>(base, kChunkBytes)).first->second->take(bytes, false);
}

uint64_t BidirAllocator::take(uint64_t bytes, bool stable) {
  if (stable && bytes <= kSmallBytes)
    if (const uint64_t addr = take_small(bytes)) return addr;
  auto& runs = stable ? high_ : low_;
  if (auto it = runs.lower_bound({bytes, 0}); it != runs.end()) {
    const auto [run_bytes, run_addr] = *it;
    erase(by_addr_.find(run_addr));
    const uint64_t rest = run_bytes - bytes;
    // A stable buffer takes the upper part of its run, the others the lower: both stay near their own end.
    if (stable) {
      if (rest) insert(run_addr, rest);
      return run_addr + rest;
    }
    if (rest) insert(run_addr + bytes, rest);
    return run_addr;
  }
  if (high_bottom_ - low_top_ < bytes) return 0;
  if (stable) return high_bottom_ -= bytes;
  const uint64_t addr = low_top_;
  low_top_ += bytes;
  return addr;
}

void BidirAllocator::give(uint64_t addr, uint64_t bytes) {
  if (auto it = chunks_.upper_bound(addr); it != chunks_.begin() && addr < (--it)->first + kChunkBytes) {
    it->second->give(addr, bytes);
    if (it->second->low_top() != it->first) return;
    addr = it->first;  // nothing is in it any more
    bytes = kChunkBytes;
    chunks_.erase(it);
  }
  const bool low = addr < low_top_;
  auto next = by_addr_.lower_bound(addr);
  // Neighbours join only on their own side of the gap; the gap itself grows back below.
  if (next != by_addr_.end() && next->first == addr + bytes && (next->first < low_top_) == low) {
    bytes += next->second;
    auto after = std::next(next);
    erase(next);
    next = after;
  }
  if (next != by_addr_.begin()) {
    auto prev = std::prev(next);
    if (prev->first + prev->second == addr && (prev->first < low_top_) == low) {
      addr = prev->first;
      bytes += prev->second;
      erase(prev);
    }
  }
  if (low && addr + bytes == low_top_) {
    low_top_ = addr;
  } else if (!low && addr == high_bottom_) {
    high_bottom_ = addr + bytes;
  } else {
    insert(addr, bytes);
  }
}

}  // namespace devproxy
