// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "devproxy/hal/soft/comm/lane.h"
#include "devproxy/hal/soft/comm/reduce.h"

namespace devproxy::hal::soft {

namespace {

// What rank `rank` of n does of `count` elements: begins at this one. Whole lines, so that no two write into one.
uint64_t share_begin(uint64_t count, uint32_t rank, uint32_t n) {
  if (rank >= n) return count;
  const auto begin = static_cast<uint64_t>(static_cast<unsigned __int128>(count) * rank / n);
  return begin & ~uint64_t{63};
}

}  // namespace

// What these ranks' tree needs of this rank's memory for their results.
std::vector<CommGroup::Lane::Span> CommGroup::Lane::needed_by(const std::vector<uint32_t>& ranks) const {
  const CommOp& op = all_.front();
  const uint32_t element = comm_type_bytes(op.type_of());
  const uint64_t part = op.count * element;
  const auto root = static_cast<uint32_t>(op.peer);
  const bool is_root = root == comm_.config().rank;
  const bool has_root = std::find(ranks.begin(), ranks.end(), root) != ranks.end();
  std::vector<Span> needed;
  bool reduces = false;
  if (part == 0) return needed;
  switch (op.kind_of()) {
    case CommKind::kAllReduce: reduces = true; [[fallthrough]];
    case CommKind::kAllGather: needed.push_back({op.send, part}); break;
    case CommKind::kBroadcast:
      if (is_root) needed.push_back({op.send, part});
      break;
    case CommKind::kReduce: reduces = has_root; [[fallthrough]];
    case CommKind::kGather:
      if (has_root) needed.push_back({op.send, part});
      break;
    case CommKind::kReduceScatter: reduces = true; [[fallthrough]];
    case CommKind::kAllToAll:
    case CommKind::kScatter:
      if (op.kind_of() == CommKind::kScatter && !is_root) break;
      for (const uint32_t rank : ranks) {
        const uint64_t addr = op.send + rank * part;
        if (!needed.empty() && needed.back().addr + needed.back().bytes == addr)
          needed.back().bytes += part;
        else
          needed.push_back({addr, part});
      }
      break;
    case CommKind::kSend:
    case CommKind::kRecv: break;
  }
  if (reduces && op.reduction_of() == CommReduction::kPreMulSum && op.scalar_on_device)
    needed.push_back({op.scalar, element});
  return needed;
}

// What rank `who` does of the operation, or all of it. Every element of every receive buffer is written by exactly one
// rank, and no rank reads what another writes: that holds in place too, as nccl.h defines it for each function. Of the
// results of other trees' members nothing is done here, and of a shadow only what its rank has sent is read.
bool CommGroup::Lane::share(uint32_t who, uint32_t n, bool all) {
  const CommOp& op = all_.front();
  const uint32_t element = comm_type_bytes(op.type_of());
  const auto root = static_cast<uint32_t>(op.peer);
  const Spread* const spread = comm_.spread();
  auto of = [&](uint32_t r) { return comm_.board().cell(r).op; };
  const uint64_t part = op.count * element;
  if (all && op.kind_of() != CommKind::kAllReduce && op.kind_of() != CommKind::kReduce) {
    for (uint32_t r = 0; r < n; r++)
      if (!share(r, n, false)) return false;
    return true;
  }
  auto copy = [&](uint32_t to, uint64_t to_offset, uint32_t from, uint64_t from_offset) {
    uint8_t* const dst = comm_.reach(to, of(to).recv + to_offset, part);
    const uint8_t* const src = dst ? comm_.reach(from, of(from).send + from_offset, part) : nullptr;
    if (!src) return false;
    if (dst != src) std::memmove(dst, src, part);
    return true;
  };
  switch (op.kind_of()) {
    case CommKind::kBroadcast: return copy(who, 0, root, 0);
    case CommKind::kAllGather:
      for (uint32_t r = 0; r < n; r++)
        if (!copy(who, r * part, r, 0)) return false;
      return true;
    case CommKind::kAllToAll:
      for (uint32_t r = 0; r < n; r++)
        if (!copy(who, r * part, r, who * part)) return false;
      return true;
    case CommKind::kGather:
      if (spread && !comm_.is_local(root)) return true;
      if (!copy(root, who * part, who, 0)) return false;
      if (spread && who == root)
        for (const auto& [tree, ranks] : spread->others)
          for (const uint32_t r : ranks)
            if (!copy(root, r * part, r, 0)) return false;
      return true;
    case CommKind::kScatter: return copy(who, 0, root, who * part);
    case CommKind::kAllReduce:
    case CommKind::kReduce:
    case CommKind::kReduceScatter: break;
    case CommKind::kSend:
    case CommKind::kRecv: return false;
  }
  if (spread && op.kind_of() == CommKind::kReduce && !comm_.is_local(root)) return true;
  const bool scatter = op.kind_of() == CommKind::kReduceScatter;
  Reduction work;
  work.type = op.type_of();
  work.op = op.reduction_of();
  std::deque<uint64_t> immediate;  // stay where they are
  for (uint32_t r = 0; r < n; r++) {
    const CommOp other = of(r);
    const uint8_t* const in = comm_.reach(r, other.send + (scatter ? who * part : 0), part);
    if (!in) return false;
    work.inputs.push_back(in);
    if (work.op == CommReduction::kPreMulSum) {
      immediate.push_back(other.scalar);
      const uint8_t* const scalar = other.scalar_on_device ? comm_.reach(r, other.scalar, element)
                                                           : reinterpret_cast<const uint8_t*>(&immediate.back());
      if (!scalar) return false;
      work.scalars.push_back(scalar);
    }
    const bool receives = scatter ? r == who : op.kind_of() == CommKind::kAllReduce || r == root;
    if (!receives || (spread && !comm_.is_local(r))) continue;
    uint8_t* const out = comm_.reach(r, other.recv, part);
    if (!out) return false;
    work.outputs.push_back(out);
  }
  const bool whole = scatter || all;
  const uint32_t index = spread ? spread->index : who,
                 shares = spread ? static_cast<uint32_t>(spread->locals.size()) : n;
  const uint64_t begin = whole ? 0 : share_begin(op.count, index, shares),
                 end = whole ? op.count : share_begin(op.count, index + 1, shares);
  if (begin < end) reduce(work, begin, end - begin);
  return true;
}

}  // namespace devproxy::hal::soft
