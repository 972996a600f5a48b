// SPDX-License-Identifier: Apache-2.0
// The end of a connection at which frames arrive (frame.h): what members in the sender's server have done is done on
// this tree's boards and shadows.
//
// Threads: one for each connection, which owns its Receiver. It waits for no lane and holds no lock, so a sender never
// waits for an operation. Beside it write to a board: the members of this tree, in their own cells, and the receivers of
// other connections, in the cells of their servers' members. All of them change the counts by atomic additions, and each
// says what it did (release) before the count that shows it.
//
// Nothing that arrives is trusted: lengths, ranks, kinds and addresses are checked, and that a member speaks for itself
// and in turn. Whoever breaks that is cut off, and its members are lost, as if it had died.
//
// Interleavings that worried us
//   1. A server is replaced (a migrate). Its successor's frames come on another connection, while this one still has some
//      of the old server's. Those can only be finishes: a member is parked when it has seen all others finish, which they
//      do when they were told its posts. So the successor's post may find its member's last finish missing, and waits for
//      it a while (in_turn). The old connection's bye finds only cells that the successor has not taken yet.
//   2. A process ends and another one gets its slot. kGone names the incarnation, and takes a cell by its slot only while
//      that waits for the incarnation that nobody has told.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "devproxy/hal/soft/comm/board.h"
#include "devproxy/hal/soft/comm/frame.h"

namespace devproxy::hal::soft {

// At the other end.
struct PeerServer {
  uint32_t tree = 0, gpu = 0;
  uint64_t server = 0;
};

class Receiver {
 public:
  // chaos: a seed; 0 for none. marked: of each mark, when all before it is done.
  Receiver(std::string folder, const PeerServer& peer, uint64_t chaos, std::function<void(uint64_t)> marked);
  ~Receiver();
  Receiver(const Receiver&) = delete;

  // Until the connection ends. What that means for the peer's members is done too, unless this server ends itself.
  // leaving: this server's end is planned, so is the other's then. idle: whether all that has come so far was done.
  void run(int fd, const std::atomic<bool>& closing, const std::atomic<bool>& leaving, std::atomic<bool>& idle);

 private:
  struct Shadow;
  class Stream;

  void arrived();
  void ended(bool planned);
  // What is wrong with it; nullptr where nothing is.
  const char* take(const Frame& frame, Stream& stream);
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
  void delay();

  const std::string folder_;
  const PeerServer peer_;
  uint64_t chaos_;
  const std::function<void(uint64_t)> marked_;
  std::map<CommKey, std::unique_ptr<Board>> boards_;
  std::map<uint64_t, std::unique_ptr<Shadow>> shadows_;  // by incarnation
};

}  // namespace devproxy::hal::soft
