// SPDX-License-Identifier: Apache-2.0
// What members in another tree's server have done, done on this tree's boards and shadows (hal/links/receiver.h).
//
// Threads: one for each connection. It waits for no lane and holds no lock, so a sender never waits for an operation. Beside
// it write to a board: the members of this tree, in their own cells, and the receivers of other connections, in the cells of
// their servers' members. All of them change the counts by atomic additions, and each says what it did (release) before the
// count that shows it.
//
// Lengths, ranks, kinds and addresses are checked, and that a member speaks for itself and in turn.
//
// Interleavings that worried us
//   1. A server is replaced (a migrate). Its successor's frames come on another connection, while this one still has some
//      of the old server's. Those can only be finishes: a member is parked when it has seen all others finish, which they
//      do when they were told its posts. So the successor's post may find its member's last finish missing, and waits for
//      it a while (in_turn). The old connection's bye finds only cells that the successor has not taken yet.
//   2. A process ends and another one gets its slot. kGone names the incarnation, and takes a cell by its slot only while
//      that waits for the incarnation that nobody has told.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "devproxy/hal/links/receiver.h"
#include "devproxy/hal/soft/comm/board.h"

namespace devproxy::hal::soft {

class BoardReceiver final : public Receiver {
 public:
  BoardReceiver(std::string folder, const PeerServer& peer, uint64_t chaos, Marked marked);
  ~BoardReceiver() override;
  // For Links::open.
  static MakeReceiver maker(const std::string& folder);

 private:
  struct Shadow;

  void arrived() override;
  void ended(bool planned) override;
  const char* take(const Frame& frame, Stream& stream) override;
  const char* join(const Frame& frame);
  const char* data(const Frame& frame, Board& board, Stream& stream);
  const char* post(const Frame& frame, Board& board);
  const char* unpost(const Frame& frame, Board& board);
  const char* pair(const Frame& frame, Board& board);
  void leave(const Frame& frame, Board& board);
  void forget(const Frame& frame, Board& board);
  void gone(const Frame& frame);
  Board* board_of(const Frame& frame);
  Shadow* shadow_of(const BoardCell& cell);
  bool is_peers(const BoardCell& cell) const {
    return cell.incarnation.load(std::memory_order_acquire) != 0 && cell.tree == peer_.tree;
  }

  const std::string folder_;
  std::map<CommKey, std::unique_ptr<Board>> boards_;
  std::map<uint64_t, std::unique_ptr<Shadow>> shadows_;  // by incarnation
};

}  // namespace devproxy::hal::soft
