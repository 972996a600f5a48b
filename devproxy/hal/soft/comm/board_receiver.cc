// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/comm/board_receiver.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/log.h"
#include "devproxy/hal/soft/comm/shadow.h"

namespace devproxy::hal::soft {

namespace {

constexpr uint64_t kTurnUs = 2'000'000;                // how long the finish of a predecessor's connection may be late
constexpr size_t kMaxBoards = 256, kMaxShadows = 256;  // that a connection keeps mapped

}  // namespace

// Memory of a member as it is sent, mapped for writing.
struct BoardReceiver::Shadow {
  int fd = -1;
  uint8_t* at = nullptr;
  uint64_t base = 0, bytes = 0;
  ~Shadow() {
    if (at) munmap(at, bytes);
    if (fd >= 0) close(fd);
  }
};

BoardReceiver::BoardReceiver(std::string folder, const PeerServer& peer, uint64_t chaos, Marked marked)
    : Receiver(peer, chaos, std::move(marked)), folder_(std::move(folder)) {}
BoardReceiver::~BoardReceiver() = default;

MakeReceiver BoardReceiver::maker(const std::string& folder) {
  return [folder](const PeerServer& peer, uint64_t chaos, Marked marked) {
    return std::make_unique<BoardReceiver>(folder, peer, chaos, std::move(marked));
  };
}

void BoardReceiver::arrived() {
  Board::each(folder_, [this](Board& board) {
    for (uint32_t r = 0; r < board.ranks(); r++) {
      BoardCell& cell = board.cell(r);
      if (!is_peers(cell) || cell.gpu != peer_.gpu || cell.server.load() == peer_.server ||
          cell.state.load() == CellState::kLost)
        continue;
      cell.server.store(peer_.server);
      cell.state.store(CellState::kAwaited);
    }
  });
}

void BoardReceiver::ended(bool planned) {
  Board::each(folder_, [&](Board& board) {
    bool changed = false;
    for (uint32_t r = 0; r < board.ranks(); r++) {
      BoardCell& cell = board.cell(r);
      if (!is_peers(cell) || cell.server.load() != peer_.server || cell.state.load() == CellState::kLost) continue;
      cell.moved_us.store(now_us());
      cell.state.store(planned ? CellState::kMoving : CellState::kLost);
      if (!planned) remove_shadow(folder_, cell.incarnation.load());
      changed = true;
    }
    if (changed) board.ring();
  });
}

const char* BoardReceiver::take(const Frame& frame, Stream& stream) {
  if (frame.kind == FrameKind::kGone) return gone(frame), nullptr;
  if (frame.ranks == 0 || frame.ranks > kMaxCommRanks || frame.rank >= frame.ranks || frame.other >= frame.ranks)
    return "it is of no rank";
  if (frame.kind == FrameKind::kJoin) return join(frame);
  Board* const board = board_of(frame);
  if (frame.kind == FrameKind::kLeave || frame.kind == FrameKind::kElsewhere) {
    if (board) frame.kind == FrameKind::kLeave ? leave(frame, *board) : forget(frame, *board);
    return nullptr;
  }
  if (!board || !is_peers(board->cell(frame.rank))) return "that rank has not come";
  switch (frame.kind) {
    case FrameKind::kData: return data(frame, *board, stream);
    case FrameKind::kPost:
    case FrameKind::kFinish: return post(frame, *board);
    case FrameKind::kPairPost:
    case FrameKind::kPairFinish:
    case FrameKind::kPairWrong: return pair(frame, *board);
    case FrameKind::kUnpost:
    case FrameKind::kPairUnpost: return unpost(frame, *board);
    case FrameKind::kMark:
    case FrameKind::kJoin:
    case FrameKind::kLeave:
    case FrameKind::kElsewhere:
    case FrameKind::kGone:
    case FrameKind::kId:
    case FrameKind::kAsk:
    case FrameKind::kHere:
    case FrameKind::kBye: break;
  }
  return "there is no such kind";
}

Board* BoardReceiver::board_of(const Frame& frame) {
  if (const auto it = boards_.find(frame.key); it != boards_.end())
    return it->second->ranks() == frame.ranks ? it->second.get() : nullptr;
  auto board = Board::find(folder_, frame.key, frame.ranks);
  if (!board.ok()) return nullptr;
  if (boards_.size() >= kMaxBoards) boards_.clear();
  return (boards_[frame.key] = std::move(*board)).get();
}

const char* BoardReceiver::join(const Frame& frame) {
  if (frame.incarnation == 0 || frame.device_bytes == 0 || frame.device_bytes > kMaxShadowBytes ||
      frame.device_base + frame.device_bytes < frame.device_base)
    return "it has no such memory";
  auto board = Board::open(folder_, frame.key, frame.ranks);
  if (!board.ok()) {
    // Its own members say another number: they learn it from the board.
    Board::each(folder_, [&](Board& other) {
      if (!other.is(folder_, frame.key)) return;
      other.head().other_ranks.store(frame.ranks);
      other.ring();
    });
    return nullptr;
  }
  BoardCell& cell = (*board)->cell(frame.rank);
  const uint64_t before = cell.incarnation.load(std::memory_order_acquire);
  if (before != 0 && (cell.tree != peer_.tree || cell.gpu != peer_.gpu || cell.slot != frame.slot)) {
    (*board)->head().twice.store(frame.rank + 1);
    (*board)->ring();
    return nullptr;
  }
  if (before != frame.incarnation) {
    auto made = open_shadow(folder_, frame.incarnation, frame.device_bytes, true);
    if (!made.ok()) return "its shadow cannot be made";
    close(*made);
    cell.tree = peer_.tree;
    cell.gpu = peer_.gpu;
    cell.slot = frame.slot;
    cell.device_base = frame.device_base;
    cell.device_bytes = frame.device_bytes;
    cell.incarnation.store(frame.incarnation, std::memory_order_release);
    if (before != 0) remove_shadow(folder_, before);  // who finds it gone looks at the cell again
  }
  cell.server.store(peer_.server);
  cell.state.store(CellState::kHere);
  if (before == 0) (*board)->head().joined.fetch_add(1, std::memory_order_acq_rel);
  (*board)->ring();
  return nullptr;
}

BoardReceiver::Shadow* BoardReceiver::shadow_of(const BoardCell& cell) {
  const uint64_t incarnation = cell.incarnation.load(std::memory_order_acquire), bytes = cell.device_bytes;
  if (const auto it = shadows_.find(incarnation); it != shadows_.end()) return it->second.get();
  auto fd = open_shadow(folder_, incarnation, bytes, false);
  if (!fd.ok()) return nullptr;
  auto shadow = std::make_unique<Shadow>();
  shadow->fd = *fd;
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, *fd, 0);
  if (at == MAP_FAILED) return nullptr;
  madvise(at, bytes, MADV_DONTDUMP);
  shadow->at = static_cast<uint8_t*>(at);
  shadow->base = cell.device_base;
  shadow->bytes = bytes;
  if (shadows_.size() >= kMaxShadows) shadows_.clear();
  return (shadows_[incarnation] = std::move(shadow)).get();
}

const char* BoardReceiver::data(const Frame& frame, Board& board, Stream& stream) {
  const BoardCell& cell = board.cell(frame.rank);
  if (cell.incarnation.load(std::memory_order_acquire) != frame.incarnation) return "it is of another process";
  Shadow* const shadow = shadow_of(cell);
  if (!shadow) return "its shadow cannot be mapped";
  if (frame.bytes == 0 || frame.bytes > kChunkBytes || frame.addr < shadow->base || frame.bytes > shadow->bytes ||
      frame.addr - shadow->base > shadow->bytes - frame.bytes)
    return "it is outside that rank's memory";
  if (!stream.read_into(shadow->fd, shadow->at, frame.addr - shadow->base, frame.bytes))
    return "the rest does not come or has no room";
  return nullptr;
}

const char* BoardReceiver::post(const Frame& frame, Board& board) {
  BoardCell& cell = board.cell(frame.rank);
  BoardHead& head = board.head();
  const uint32_t told = cell.told.load(std::memory_order_acquire);
  if (frame.kind == FrameKind::kFinish) {
    if (cell.finished.load(std::memory_order_acquire) == told) return "it has finished before";
    cell.finished.fetch_add(1, std::memory_order_acq_rel);
    if ((head.finished.fetch_add(1, std::memory_order_acq_rel) + 1) % board.ranks() == 0) board.ring();
    return nullptr;
  }
  if (frame.op.kind >= kCommKinds || frame.op.type >= kCommTypes || frame.op.reduction >= kCommReductions ||
      frame.op.peer < 0 || static_cast<uint32_t>(frame.op.peer) >= board.ranks())
    return "there is no such operation";
  for (const uint64_t until = now_us() + kTurnUs; cell.finished.load(std::memory_order_acquire) != told; usleep(200))
    if (now_us() > until) return "it has not finished its last operation";
  cell.op = frame.op;
  cell.told.store(told + 1, std::memory_order_release);
  if ((head.posted.fetch_add(1, std::memory_order_acq_rel) + 1) % board.ranks() == 0) board.ring();
  return nullptr;
}

const char* BoardReceiver::pair(const Frame& frame, Board& board) {
  const bool sends = frame.kind == FrameKind::kPairPost;
  BoardPair& pair = sends ? board.pair(frame.rank, frame.other) : board.pair(frame.other, frame.rank);
  const bool under_way = pair.posted.load(std::memory_order_acquire) != pair.finished.load(std::memory_order_acquire);
  if (sends == under_way) return sends ? "its last send has not been received" : "nothing was sent";
  if (sends) {
    pair.addr = frame.addr;
    pair.bytes = frame.bytes;
    pair.posted.fetch_add(1, std::memory_order_release);
  } else if (frame.kind == FrameKind::kPairFinish) {
    pair.finished.fetch_add(1, std::memory_order_release);
  } else {
    pair.wanted.store(frame.bytes, std::memory_order_relaxed);
    pair.wrong.store(pair.posted.load(std::memory_order_relaxed), std::memory_order_release);
  }
  board.ring();
  return nullptr;
}

// Only of what has not begun, which the sender's server knows: all servers of the job withhold.
const char* BoardReceiver::unpost(const Frame& frame, Board& board) {
  if (frame.kind == FrameKind::kPairUnpost) {
    BoardPair& pair = board.pair(frame.rank, frame.other);
    if (pair.posted.load(std::memory_order_acquire) == pair.finished.load(std::memory_order_acquire))
      return "it has sent nothing";
    pair.posted.fetch_sub(1, std::memory_order_release);
    return nullptr;
  }
  BoardCell& cell = board.cell(frame.rank);
  const uint32_t told = cell.told.load(std::memory_order_acquire);
  if (cell.finished.load(std::memory_order_acquire) == told) return "it has posted nothing";
  cell.told.store(told - 1, std::memory_order_release);
  board.head().posted.fetch_sub(1, std::memory_order_acq_rel);
  return nullptr;
}

void BoardReceiver::leave(const Frame& frame, Board& board) {
  BoardCell& cell = board.cell(frame.rank);
  if (!is_peers(cell) || cell.left.exchange(1) != 0) return;
  const bool last = board.head().left.fetch_add(1, std::memory_order_acq_rel) + 1 == board.ranks();
  if (last) board.remove();
  board.ring();
  if (last) boards_.erase(frame.key);
}

// Another member may not know yet that all have come, and tell this tree of itself afterwards. Then it says this too.
void BoardReceiver::forget(const Frame& frame, Board& board) {
  if (!is_peers(board.cell(frame.rank))) return;
  for (uint32_t r = 0; r < board.ranks(); r++) {
    const BoardCell& cell = board.cell(r);
    if (cell.incarnation.load(std::memory_order_acquire) != 0 && cell.server.load() == 0) return;  // of this tree
  }
  board.remove();
  boards_.erase(frame.key);
}

void BoardReceiver::gone(const Frame& frame) {
  Board::each(folder_, [&](Board& board) {
    bool changed = false;
    for (uint32_t r = 0; r < board.ranks(); r++) {
      BoardCell& cell = board.cell(r);
      if (!is_peers(cell) || cell.gpu != peer_.gpu) continue;
      const bool same = cell.incarnation.load() == frame.incarnation;
      if (!same && !(cell.state.load() == CellState::kAwaited && cell.slot == frame.slot)) continue;
      cell.state.store(CellState::kLost);
      remove_shadow(folder_, cell.incarnation.load());
      changed = true;
    }
    if (changed) board.ring();
  });
  shadows_.erase(frame.incarnation);
  remove_shadow(folder_, frame.incarnation);
}

}  // namespace devproxy::hal::soft
