// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "devproxy/hal/soft/comm/lane.h"

namespace devproxy::hal::soft {

bool CommGroup::Lane::step_pairs() {
  bool moved = false, left = false;
  for (auto& [key, ops] : pairs_) {
    if (ops.empty()) continue;
    const auto& [sends, other] = key;
    moved |= sends ? step_send(other, ops) : step_recv(other, ops);
    if (place_ == Place::kStuck) return true;
    left |= !ops.empty();
  }
  if (left || !outbox_.empty()) return moved;
  end();
  return true;
}

bool CommGroup::Lane::step_send(uint32_t to, std::deque<PairOp>& ops) {
  BoardPair& pair = comm_.board().pair(comm_.config().rank, to);
  PairOp& first = ops.front();
  if (!first.posted) {
    if (comm_.links() && !comm_.has_joined(to)) return comm_.tell(stop_), false;
    if (!enter()) return false;
    pair.addr = first.op.send;
    pair.bytes = first.op.count * comm_type_bytes(first.op.type_of());
    pair.posted.fetch_add(1, std::memory_order_release);
    if (comm_.is_local(to)) {
      comm_.board().ring();
    } else {
      Frame frame = comm_.frame(FrameKind::kPairPost);
      frame.other = to;
      frame.addr = pair.addr;
      frame.bytes = pair.bytes;
      outbox_.push_back({comm_.board().cell(to).tree, frame, {}});
      if (frame.bytes != 0) outbox_.back().data.push_back({frame.addr, frame.bytes});
    }
    if (outbox_.empty()) leave();
    return first.posted = true;
  }
  if (pair.wrong.load(std::memory_order_acquire) == pair.posted.load(std::memory_order_relaxed)) {
    comm_.fail(CommState::kInvalidUsage,
               text_of_pair(comm_.config().rank, pair.bytes, to, pair.wanted.load(std::memory_order_relaxed)));
    return stuck(), true;
  }
  if (pair.finished.load(std::memory_order_acquire) != pair.posted.load(std::memory_order_relaxed)) return false;
  ops.pop_front();
  return true;
}

bool CommGroup::Lane::step_recv(uint32_t from, std::deque<PairOp>& ops) {
  if (!enter()) return false;
  const bool moved = receive(from, ops);
  if (outbox_.empty()) leave();
  return moved;
}

bool CommGroup::Lane::receive(uint32_t from, std::deque<PairOp>& ops) {
  BoardPair& pair = comm_.board().pair(from, comm_.config().rank);
  if (pair.posted.load(std::memory_order_acquire) == pair.finished.load(std::memory_order_relaxed)) return false;
  const CommOp& op = ops.front().op;
  const uint64_t bytes = op.count * comm_type_bytes(op.type_of()), there = pair.bytes;
  if (there != bytes) {
    comm_.fail(CommState::kInvalidUsage, text_of_pair(from, there, comm_.config().rank, bytes));
    pair.wanted.store(bytes, std::memory_order_relaxed);
    pair.wrong.store(pair.posted.load(std::memory_order_relaxed), std::memory_order_release);
    comm_.board().ring();
    tell_sender(from, FrameKind::kPairWrong, bytes);
    return stuck(), true;
  }
  const uint8_t* const src = comm_.reach(from, pair.addr, bytes);
  if (!src) return stuck(), true;
  std::memmove(reinterpret_cast<void*>(op.recv), src, bytes);
  pair.finished.fetch_add(1, std::memory_order_release);
  comm_.board().ring();
  tell_sender(from, FrameKind::kPairFinish, bytes);
  ops.pop_front();
  return true;
}

void CommGroup::Lane::tell_sender(uint32_t from, FrameKind kind, uint64_t bytes) {
  if (comm_.is_local(from)) return;
  Frame frame = comm_.frame(kind);
  frame.other = from;
  frame.bytes = bytes;
  outbox_.push_back({comm_.board().cell(from).tree, frame, {}});
}

}  // namespace devproxy::hal::soft
