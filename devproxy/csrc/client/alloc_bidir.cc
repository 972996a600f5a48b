// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/client/alloc_bidir.h"

#include <algorithm>
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

uint64_t BidirAllocator::take_low_chunk() {
  for (auto it = low_.lower_bound({kChunkBytes, 0}); it != low_.end(); ++it) {
    const auto [run_bytes, run_addr] = *it;
    const uint64_t end = run_addr + run_bytes, chunk = (run_addr + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
    if (chunk + kChunkBytes > end) continue;
    erase(by_addr_.find(run_addr));
    if (chunk > run_addr) insert(run_addr, chunk - run_addr);
    if (chunk + kChunkBytes < end) insert(chunk + kChunkBytes, end - chunk - kChunkBytes);
    return chunk;
  }
  const uint64_t chunk = (low_top_ + kChunkBytes - 1) / kChunkBytes * kChunkBytes, skipped = low_top_;
  if (chunk > high_bottom_ || high_bottom_ - chunk < kChunkBytes) return 0;
  low_top_ = chunk + kChunkBytes;
  if (chunk > skipped) insert(skipped, chunk - skipped);
  return chunk;
}

uint64_t BidirAllocator::take_small_low(uint64_t bytes) {
  if (small_.best(bytes) == 0) {
    const uint64_t chunk = take_low_chunk();
    if (chunk == 0) return 0;
    small_chunks_.insert(chunk / kChunkBytes);
    small_.give(chunk, kChunkBytes, 0);
  }
  return small_.take(bytes);
}

void BidirAllocator::give_small_low(uint64_t addr, uint64_t bytes) {
  small_.give(addr, bytes, 0);
  const auto [begin, end] = small_.around(addr);
  const uint64_t first = (begin + kChunkBytes - 1) / kChunkBytes, last = end / kChunkBytes;
  if (first >= last) return;
  small_.cut(first * kChunkBytes, last * kChunkBytes);
  for (uint64_t chunk = first; chunk < last; ++chunk) small_chunks_.erase(chunk);
  give(first * kChunkBytes, (last - first) * kChunkBytes);
}

uint64_t BidirAllocator::take(uint64_t bytes, bool stable) {
  if (stable && bytes <= kSmallBytes)
    if (const uint64_t addr = take_small(bytes)) return addr;
  if (!stable && bytes <= kSmallLowBytes && end_ - base_ > kChunkBytes)  // a chunk has none
    if (const uint64_t addr = take_small_low(bytes)) return addr;
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

uint64_t BidirAllocator::best_low(uint64_t bytes) const {
  if (bytes <= kSmallLowBytes) return small_.best(bytes);
  const auto it = low_.lower_bound({bytes, 0});
  return it == low_.end() ? 0 : it->first;
}

uint64_t BidirAllocator::low_run_before(uint64_t addr) const {
  auto it = by_addr_.lower_bound(addr);
  if (it == by_addr_.begin() || addr > low_top_) return 0;
  --it;
  return it->first + it->second == addr ? it->second : 0;
}

uint64_t BidirAllocator::low_run_at(uint64_t addr) const {
  const auto it = addr < low_top_ ? by_addr_.find(addr) : by_addr_.end();
  return it == by_addr_.end() ? 0 : it->second;
}

bool BidirAllocator::take_top(uint64_t bytes) {
  if (high_bottom_ - low_top_ < bytes) return false;
  low_top_ += bytes;
  return true;
}

void BidirAllocator::give(uint64_t addr, uint64_t bytes) {
  if (is_small(addr)) return give_small_low(addr, bytes);
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

// -- what a stream may use again --------------------------------------------------------------------------------------

void PendingRuns::give(uint64_t addr, uint64_t bytes, uint64_t after) {
  auto next = by_addr_.lower_bound(addr);
  const auto join = [&](auto it) {
    bytes += it->second.bytes;
    after = std::max(after, it->second.after);
    by_bytes_.erase({it->second.bytes, it->first});
    return by_addr_.erase(it);
  };
  if (next != by_addr_.end() && next->first == addr + bytes) next = join(next);
  if (next != by_addr_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes == addr) {
      addr = before->first;
      next = join(before);
    }
  }
  by_addr_.emplace_hint(next, addr, Run{bytes, after});
  by_bytes_.emplace(bytes, addr);
}

bool PendingRuns::gather(BidirAllocator& free, uint64_t bytes) {
  uint64_t begin = 0, end = 0, found_begin = 0, found_bytes = UINT64_MAX;
  for (auto it = by_addr_.begin(); it != by_addr_.end(); ++it) {
    if (it->first != end) begin = it->first - free.low_run_before(it->first);
    end = it->first + it->second.bytes;
    end += free.low_run_at(end);
    if (end - begin >= bytes && end - begin < found_bytes) found_begin = begin, found_bytes = end - begin;
  }
  if (found_bytes == UINT64_MAX) {
    if (by_addr_.empty() || end != free.low_top() || !free.take_top(begin + bytes - end)) return false;
    give(end, begin + bytes - end, 0);
    found_begin = begin, found_bytes = bytes;
  }
  for (uint64_t at = found_begin; at < found_begin + found_bytes;) {
    const uint64_t run = free.low_run_at(at);
    if (run == 0) {
      at = std::prev(by_addr_.upper_bound(at))->first + std::prev(by_addr_.upper_bound(at))->second.bytes;
      continue;
    }
    free.take_run(at);
    give(at, run, 0);
    at += run;
  }
  return true;
}

uint64_t PendingRuns::best(uint64_t bytes) const {
  const auto it = by_bytes_.lower_bound({bytes, 0});
  return it == by_bytes_.end() ? 0 : it->first;
}

std::pair<uint64_t, uint64_t> PendingRuns::around(uint64_t addr) const {
  const auto it = std::prev(by_addr_.upper_bound(addr));
  return {it->first, it->first + it->second.bytes};
}

void PendingRuns::cut(uint64_t begin, uint64_t end) {
  const auto it = std::prev(by_addr_.upper_bound(begin));
  const auto [addr, run] = *it;
  by_bytes_.erase({run.bytes, addr});
  by_addr_.erase(it);
  if (addr < begin) give(addr, begin - addr, run.after);
  if (addr + run.bytes > end) give(end, addr + run.bytes - end, run.after);
}

uint64_t PendingRuns::take(uint64_t bytes) {
  const auto best = by_bytes_.lower_bound({bytes, 0});
  const auto [run_bytes, addr] = *best;
  by_bytes_.erase(best);
  const auto it = by_addr_.find(addr);
  if (run_bytes > bytes) {
    by_addr_.emplace_hint(std::next(it), addr + bytes, Run{run_bytes - bytes, it->second.after});
    by_bytes_.emplace(run_bytes - bytes, addr + bytes);
  }
  by_addr_.erase(it);
  return addr;
}

}  // namespace devproxy
