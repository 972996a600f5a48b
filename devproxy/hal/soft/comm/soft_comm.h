// SPDX-License-Identifier: Apache-2.0
// A member of a communicator on the software GPU, and the groups of operations that its queues run.
//
// The members reach one another's device memory directly, so an operation is: say what is to be done, wait until all
// have said theirs, do one's share, wait until all have done theirs (board.h). Which share that is changes no bit of the
// result. What is small the last to come does for all: the others sleep once instead of twice.
//
// Members of several trees (links.h). A member's memory is sent to the trees that need it, where it lies in a shadow
// (shadow.h); each tree computes the results of its own members. So an operation is: send the data and what is to be done
// to every other tree that has members, say it on the own board, wait until all have said theirs, do one's share of the
// own tree's results, say that everywhere, wait until all have. No lane waits for a connection or in it: what it
// has to send is in its outbox, and nothing else of the lane goes on before that is sent.
//
//   soft_comm.cc  a member
//   group.cc      a group, and the thread that drives it
//   lane.h        the course of one communicator in a group
//
// Who owns what
//   the submitting thread   next_turn_: the order of the groups that use this communicator
//   device threads          a group's run(), one thread for each group; lanes_ state is the thread's whose turn it is:
//                           turn_ is stored with release by the thread that is done and read with acquire by the next
//   any thread              abort(), state()
//   CommGroup::mu_          the lanes of a group, between its run() and whoever asks what is pending; SoftSpace::mu_ may be held
// Locks: SoftComm::mu_ guards state and text. Both are leaves.
//
// Interleavings that worried us
//   1. Two queues run operations of one communicator. They take turns in the order of submission; a turn waits only for
//      groups submitted before, as every other dependency of a space does, so there is no circle within a server. A
//      circle over several servers is the job's, as with NCCL.
//   2. A group has operations of several communicators, and another rank submits them one by one in another order. All
//      lanes of a group go on independently; none waits for another.
//   3. A member's server is replaced (a migrate) between two operations: its cell has another incarnation, and the
//      mapping is made anew before the next operation reads it. During an operation no server is replaced: a dump waits
//      until a client is idle.
//   4. A member dies. Whoever waits looks every kLookUs whether all members' servers still have them. Only those are
//      looked at that the operation waits for: who has finished may go.
//   5. An operation in place: as soon as all have posted, a member of this tree writes results over what another one is
//      still sending to the next tree. So a member sends first and posts on its own board then.
//   6. The space withholds (hold.h), for a cut, and so do those of all members. Nobody posts any more, so an operation that
//      all have posted goes on to its end, and every other one stands. What a dump takes of a group it takes back from the
//      board: else another member could let go and begin before this one is there again, perhaps on another server.
//      The lane posts it again. Other trees are told; whoever drives the cut waits until all that was said between trees
//      has come, before it and before anybody goes on (Device::mark_transport). Meanwhile nobody looks whether members are
//      there: their servers may be replaced.
//   7. A member in another tree sees an operation's end and dies before the finish of a third tree's member has come
//      here. It has finished this operation too: its cell says so, and its death is none of this operation's.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/hal/comm.h"
#include "devproxy/hal/hal.h"
#include "devproxy/hal/links/links.h"
#include "devproxy/hal/soft/comm/board.h"
#include "devproxy/hal/soft/comm/hold.h"
#include "devproxy/hal/soft/comm/peers.h"

namespace devproxy::hal::soft {

// Where the members of a communicator are that has some in several trees.
struct Spread {
  std::vector<uint32_t> locals;                      // ranks of this tree, in order
  uint32_t index = 0;                                // of this rank among them
  std::map<uint32_t, std::vector<uint32_t>> others;  // ranks by tree
};

class SoftComm final : public Comm {
 public:
  // links: nullptr in a job of one tree.
  SoftComm(const CommConfig& config, const SpaceConfig& space, uint64_t incarnation, SpaceOwner& owner, CommHold& hold,
           Links* links)
      : config_(config),
        space_(space),
        incarnation_(incarnation),
        owner_(owner),
        hold_(hold),
        links_(links),
        peers_(config.ranks) {}

  // -- any thread
  void abort();
  CommState state(std::string* why) const;
  bool complete() const { return complete_.load(std::memory_order_acquire); }
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  // This member will do nothing more.
  void leave();

  // -- the submitting thread
  uint64_t take_turn() { return next_turn_++; }

  // -- the thread whose turn it is
  bool is_turn(uint64_t turn) const { return turn_.load(std::memory_order_acquire) == turn; }
  void end_turn() { turn_.fetch_add(1, std::memory_order_release); }
  // Takes this member's place on the board. False: it cannot, and state() says why.
  bool join();
  bool all_joined() {
    if (board_->head().joined.load(std::memory_order_acquire) < config_.ranks) return false;
    complete_.store(true, std::memory_order_release);
    return true;
  }
  Board& board() { return *board_; }
  CommHold& hold() { return hold_; }
  const CommConfig& config() const { return config_; }
  // Memory of a rank that has joined; nullptr: there is no way to it, and state() says why.
  const PeerMemory* peer(uint32_t rank);
  uint8_t* reach(uint32_t rank, uint64_t addr, uint64_t bytes);
  // Is the server of this rank there? One that has not joined counts as there. operation: the number of the one that
  // this is about, 0 for none.
  bool look_at(uint32_t rank, uint32_t operation);
  // Do all trees mean the same members?
  bool look_at_head();

  // -- the same, in a job of several trees
  Links* links() { return links_; }
  // Tells the other trees that this member has come, as far as there are connections. False: some do not know it yet that
  // must.
  bool tell(const Links::Stop& stop);
  std::string why_not_told() const;
  bool has_joined(uint32_t rank) { return board_->cell(rank).incarnation.load(std::memory_order_acquire) != 0; }
  // Precondition of the next two: that rank, or all, have joined.
  bool is_local(uint32_t rank) { return !links_ || board_->cell(rank).tree == place_.tree; }
  void find_members();
  bool knows_members() const { return knows_members_; }
  // nullptr: all members are in this tree, or it is not known yet.
  const Spread* spread() const { return spread_ ? &*spread_ : nullptr; }
  Frame frame(FrameKind kind) const;
  void fail(CommState state, std::string why);
  // For whom the operation whose turn it is waits, in words that follow 'waits for'; empty: for nobody. state() says it
  // while the communicator is well.
  void note_wait(std::string whom);
  std::string name_of(uint32_t rank) const;

 private:
  void leave(Board& board) const;
  void leave_place();
  void report_gone(uint32_t rank, const std::string& why);

  const CommConfig config_;
  const SpaceConfig space_;
  const uint64_t incarnation_;
  SpaceOwner& owner_;
  CommHold& hold_;
  Links* const links_;

  SpacePlace place_;
  bool knows_members_ = false;
  std::optional<Spread> spread_;
  std::map<uint32_t, uint64_t> told_;    // by tree: the epoch of the connection that took it
  std::optional<uint32_t> untold_;       // a tree that could not be told
  std::atomic<uint64_t> told_trees_{0};  // bits: those that may know of this member

  uint64_t next_turn_ = 0;
  std::atomic<uint64_t> turn_{0};
  std::unique_ptr<Board> board_;
  bool taken_over_ = false;  // another server has told trees of this member
  std::atomic<bool> joined_{false};
  std::vector<std::shared_ptr<PeerMemory>> peers_;
  std::atomic<bool> aborted_{false}, complete_{false};

  mutable std::mutex mu_;
  CommState state_ = CommState::kOk;
  std::string why_, waits_;
};

// Operations that were submitted together.
class CommGroup {
 public:
  // init: only takes the places, and ends when all members have come. On the submitting thread.
  CommGroup(std::vector<CommCall> calls, bool init);
  ~CommGroup();
  // Until all is done, or given up: `ended` is asked now and then.
  void run(const std::atomic<bool>& ended);
  // What run() does, one act of one lane (modulo their number) at a time, in whatever order: for the checker of
  // tests/model/comm_model.cc. False: it could do nothing.
  bool step(size_t lane, const std::atomic<bool>& ended);
  bool over();
  void look();

  // -- any thread, while the spaces of all members withhold
  bool stands();
  bool is_init() const { return init_; }
  // The memory of its own space that it names: address and bytes.
  const std::vector<std::pair<uint64_t, uint64_t>>& buffers() const { return buffers_; }
  // What all members have alike now, by operations that are over. After run().
  struct Result {
    CommKey comm;
    uint64_t operation, addr, bytes;  // operation: which of the communicator's
  };
  std::vector<Result> results() const;
  // What has not begun; of an init the communicator. The board forgets that this member has posted it.
  std::vector<CommCall> take_back();

 private:
  class Lane;
  const bool init_;
  std::vector<std::pair<uint64_t, uint64_t>> buffers_;
  std::mutex mu_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace devproxy::hal::soft
