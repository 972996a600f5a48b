// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/comm_receiver.h"

#include <sys/random.h>

#include <mutex>
#include <utility>

namespace devproxy::hal::cuda {

namespace {

std::mutex g_mu;  // a leaf; nobody reads a connection under it

uint64_t random_number() {
  uint64_t number = 0;
  while (number == 0 && getrandom(&number, sizeof number, 0) != sizeof number) {}
  return number;
}

constexpr size_t kMaxBoards = 256;  // that a connection keeps mapped

// To the greater of the two.
void raise(std::atomic<uint64_t>& value, uint64_t to) {
  uint64_t is = value.load();
  while (is < to && !value.compare_exchange_weak(is, to)) {}
}

}  // namespace

CommReceiver::CommReceiver(std::string folder, const PeerServer& peer, uint64_t chaos, Marked marked)
    : Receiver(peer, chaos, std::move(marked)), folder_(std::move(folder)), number_(random_number()) {}

MakeReceiver CommReceiver::maker(const std::string& folder) {
  return [folder](const PeerServer& peer, uint64_t chaos, Marked marked) {
    return std::make_unique<CommReceiver>(folder, peer, chaos, std::move(marked));
  };
}

void CommReceiver::ended(bool planned) {
  std::lock_guard lock(g_mu);
  CommBoard::each(folder_, [&](CommBoard& board) { board.teller_ended(number_, planned); });
}

const char* CommReceiver::take(const Frame& frame, Stream& stream) {
  if (frame.ranks == 0 || frame.ranks > kMaxCommRanks || frame.rank >= frame.ranks) return "it is of no rank";
  char id[kCommIdBytes];
  if (frame.kind == FrameKind::kId && !stream.read(id, sizeof id)) return "the rest does not come";
  std::lock_guard lock(g_mu);
  switch (frame.kind) {
    case FrameKind::kJoin: return join(frame);
    case FrameKind::kId: return take_id(frame, id);
    case FrameKind::kLeave:
    case FrameKind::kAsk:
    case FrameKind::kHere:
    case FrameKind::kElsewhere: break;
    default: return "there is no such kind";
  }
  CommBoard* const board = board_of(frame);
  if (!board || !is_peers(board->row(frame.rank))) return nullptr;  // it has gone, or was never of this tree
  switch (frame.kind) {
    case FrameKind::kLeave: leave(frame, *board); break;
    case FrameKind::kElsewhere: forget(frame, *board); break;
    case FrameKind::kAsk: raise(board->head().asked[peer_.tree], frame.bytes); break;
    default:
      if (board->row(frame.rank).version == frame.addr) raise(board->answered(frame.rank), frame.bytes);
  }
  return nullptr;
}

CommBoard* CommReceiver::board_of(const Frame& frame) {
  if (const auto it = boards_.find(frame.key); it != boards_.end())
    return it->second->ranks() == frame.ranks ? it->second.get() : nullptr;
  auto board = CommBoard::find(folder_, frame.key, frame.ranks);
  if (!board.ok()) return nullptr;
  if (boards_.size() >= kMaxBoards) boards_.clear();
  return (boards_[frame.key] = std::move(*board)).get();
}

const char* CommReceiver::join(const Frame& frame) {
  if (frame.incarnation == 0 || frame.bytes == 0 || frame.addr == 0) return "it has no row";
  boards_.erase(frame.key);  // its file may be another one
  auto board = CommBoard::open(folder_, frame.key, frame.ranks);
  if (!board.ok()) {
    // Its own members say another number: they learn it from the board.
    CommBoard::each(folder_, [&](CommBoard& other) {
      if (other.is(folder_, frame.key)) other.head().other_ranks = frame.ranks;
    });
    return nullptr;
  }
  const CommSeat seat{{peer_.gpu, frame.slot, peer_.tree}, frame.addr, frame.device_base};
  // That of a rank which another one has is no reason to lose all of this server's: the members of this tree say it.
  (void)(*board)->told_row(frame.rank, frame.incarnation, frame.bytes, seat, number_);
  return nullptr;
}

const char* CommReceiver::take_id(const Frame& frame, const char (&id)[kCommIdBytes]) {
  if (frame.rank != 0 || frame.incarnation == 0) return "it is no id of a set";
  CommBoard* const board = board_of(frame);
  if (!board) return nullptr;
  const CommRow& row = board->row(0);
  if (is_peers(row) && row.version <= frame.bytes) board->put_id(frame.incarnation, id);
  return nullptr;
}

void CommReceiver::leave(const Frame& frame, CommBoard& board) {
  const CommRow& row = board.row(frame.rank);
  if (row.incarnation.load(std::memory_order_acquire) != frame.incarnation) return;  // somebody has taken its place
  board.mark(frame.rank, frame.bytes == static_cast<uint64_t>(Gone::kDied) ? Gone::kDied : Gone::kLeft);
  if (board.head().gone == board.ranks()) boards_.erase(frame.key);
}

// Another member may not know yet that all have come, and tell this tree of itself afterwards. Then it says this too.
void CommReceiver::forget(const Frame& frame, CommBoard& board) {
  for (uint32_t rank = 0; rank < board.ranks(); rank++) {
    const CommRow& row = board.row(rank);
    if (row.incarnation.load(std::memory_order_acquire) != 0 && row.teller == 0) return;  // of this tree
  }
  board.remove();
  boards_.erase(frame.key);
}

}  // namespace devproxy::hal::cuda
