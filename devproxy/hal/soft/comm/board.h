// SPDX-License-Identifier: Apache-2.0
// What the members of a communicator share: one file in the job's folder, mapped by every server that has a member.
//
// The board counts. An operation of the whole communicator is two counts up to ranks: `posted`, when a member has said
// what it does, and `finished`, when it has done its share. No member posts its next operation before all have finished
// the last one, so one description for each member is enough, and operation s is under way exactly while
// posted > (s - 1) * ranks or finished < s * ranks. A send and its receive count by pair of ranks.
//
// The board outlives a server: who takes a member over finds the counts where they were, and puts its own place and
// incarnation into the member's cell. The others see the other incarnation and look for the memory anew.
//
// Bell. Whoever waits reads `bell`, looks at what it waits for, says in `sleepers` that it sleeps, and waits for another
// value of the bell. Whoever changes something adds to the bell afterwards, and wakes if there are sleepers. All four
// accesses are sequentially consistent: either the waiter sees the change, or the changer sees the sleeper or changes the
// value that it sleeps on.
//
// Several trees. Every tree has a board of its own for a communicator. What a member of another tree does, a receiver
// (board_receiver.h) does here on its behalf, when it is told. Of one member all is told in order, of two members in any order.
// So here the post of a member's next operation may come before another member's finish of the last one. That is well:
//   - posted > (s - 1) * ranks counts posts of operation s only when all have posted s - 1, and they have: a member posts
//     s when its own board shows all finishes of s - 1, and each of those was told after the post of its member. So the
//     counts name the same operation at every tree, and a member's `posted` grows by one between two of its finishes.
//   - a member's cell is overwritten by its next operation while `finished` here lacks somebody's finish of the last one,
//     but never while a member of this tree still reads it: that one has not finished, so nobody posts the next.
//   - who waits for `finished` waits for all, in whatever order they come; a member of this tree posts s only then.
// The rule that the last to come does small operations for all holds only where all members are of one tree: with it
// nobody else finishes, and the others would not know when a description may be read.
//
// A job's process could write to this file, so nothing in it is trusted: whoever reads an address or a length checks it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "devproxy/csrc/args/comm.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/board_file.h"

namespace devproxy::hal::soft {

inline constexpr uint32_t kBoardMagic = 0x42505044;  // "DPPB"

struct BoardHead {
  uint32_t magic = 0, ranks = 0;
  alignas(64) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> joined, left;  // members
  std::atomic<uint32_t> gone;          // 1 + the rank that was found gone first; who gives up after that is no cause
  alignas(64) std::atomic<uint64_t> posted;
  alignas(64) std::atomic<uint64_t> finished;
  std::atomic<uint64_t> wrong;        // `posted` of an operation of which the members said different things
  std::atomic<uint32_t> twice;        // 1 + a rank that processes of two trees say they are
  std::atomic<uint32_t> other_ranks;  // how many members another tree says that there are, where that is another number
};

// How a member of another tree is.
enum class CellState : uint32_t {
  kHere = 0,
  kMoving,   // its server has ended as planned: it comes again on another one
  kAwaited,  // that server is here; the member tells its new incarnation before its next operation
  kLost,
};

// A member, and the operation that it posted last.
struct alignas(64) BoardCell {
  std::atomic<uint64_t> incarnation;  // of its space; 0: it has not come. Written last
  uint32_t gpu = 0, slot = 0;
  uint64_t device_base = 0, device_bytes = 0;
  CommOp op;
  uint32_t tree = 0;
  std::atomic<uint32_t> submitted;  // operations that a member of this tree has posted, modulo 2^32: for messages only
  // Of members of other trees; the receivers write them.
  std::atomic<CellState> state;
  std::atomic<uint64_t> server;          // that told of it last
  std::atomic<uint64_t> moved_us;        // now_us() when it was kMoving
  std::atomic<uint32_t> told, finished;  // operations posted and finished, modulo 2^32
  std::atomic<uint32_t> left;            // it is counted in BoardHead::left
};
static_assert(sizeof(BoardCell) == 128);

// Sends from one rank to another.
struct alignas(64) BoardPair {
  std::atomic<uint64_t> posted, finished;
  uint64_t addr = 0, bytes = 0;
  std::atomic<uint64_t> wrong, wanted;  // `posted` of a send whose receiver wants so many bytes instead
};

class Board {
 public:
  // The communicator's board, made by whoever comes first. A board of another number of ranks is kInvalidValue.
  static StatusOr<std::unique_ptr<Board>> open(const std::string& folder, const CommKey& key, uint32_t ranks);
  // The same of one that exists; kNotFound where it does not.
  static StatusOr<std::unique_ptr<Board>> find(const std::string& folder, const CommKey& key, uint32_t ranks);
  // Every board in the folder.
  static void each(const std::string& folder, const std::function<void(Board&)>& look);
  ~Board();
  Board(const Board&) = delete;

  BoardHead& head() { return *head_; }
  uint32_t ranks() const { return ranks_; }
  BoardCell& cell(uint32_t rank) { return cells_[rank]; }
  BoardPair& pair(uint32_t from, uint32_t to) { return pairs_[size_t{from} * ranks_ + to]; }

  // Something has changed.
  void ring();
  // Until something changes behind `seen`, or so long.
  void sleep(uint32_t seen, uint64_t us);
  bool is(const std::string& folder, const CommKey& key) const;
  // The last member has left: the name goes.
  void remove() const;

 private:
  Board(std::string path, void* at, size_t bytes, uint32_t ranks);
  static StatusOr<std::unique_ptr<Board>> made(const std::string& path, StatusOr<MappedBoard> mapped);

  const std::string path_;
  void* const at_;
  const size_t bytes_;
  const uint32_t ranks_;
  BoardHead* head_;
  BoardCell* cells_;
  BoardPair* pairs_;
};

}  // namespace devproxy::hal::soft
