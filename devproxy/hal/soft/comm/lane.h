// SPDX-License-Identifier: Apache-2.0
// The course of one communicator in a group of operations (soft_comm.h): from its turn to the end of its last operation.
//   lane.cc        the course: places, operations of all members, what goes to other trees, and what is taken back for a cut
//   lane_share.cc  what a member computes and sends of an operation of all members
//   lane_pairs.cc  sends and receives
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/hal/comm_text.h"
#include "devproxy/hal/soft/comm/soft_comm.h"

namespace devproxy::hal::soft {

// The operations of one communicator in a group: first those of all members in order, then sends and receives, of each
// pair in order and of all pairs at once.
class CommGroup::Lane {
 public:
  Lane(CommRef ref, bool init)
      : ref_(std::move(ref)), comm_(static_cast<SoftComm&>(*ref_)), init_(init), turn_(comm_.take_turn()) {}
  ~Lane() { leave(); }

  void add(const CommOp& op) {
    if (!is_pair(op))
      all_.push_back(op);
    else
      pairs_[{op.kind_of() == CommKind::kSend, static_cast<uint32_t>(op.peer)}].push_back({op, false});
  }
  SoftComm& comm() { return comm_; }
  bool has_board() const { return has_board_; }
  const std::vector<Result>& results() const { return results_; }

  // As far as it goes without waiting. True when it has come nearer to its end.
  bool go_on();
  bool over() const { return place_ == Place::kOver; }
  // Whatever it waits for: is that still there? Else it waits for the abort.
  void look();
  void watch(const std::atomic<bool>& ended) {
    stop_ = [this, &ended] { return comm_.aborted() || ended.load(std::memory_order_acquire); };
  }
  // The operation under way, modulo 2^32. Precondition: this member has posted it.
  uint32_t number() const { return static_cast<uint32_t>(target_ / comm_.config().ranks); }
  bool waits_for_link() const { return place_ == Place::kTell || !outbox_.empty(); }
  // The space ends: nobody waits for a turn any more.
  void give_up() {
    leave();
    place_ = Place::kOver;
  }

  // -- while the spaces of all members withhold
  bool stands() const;
  void take_back(std::vector<CommCall>* calls);
  void tell_back(uint32_t tree, const Frame& frame);

 private:
  enum class Place : uint8_t { kTurn, kTell, kInit, kAll, kSent, kPosted, kShared, kPairs, kStuck, kOver };
  struct PairOp {
    CommOp op;
    bool posted;
  };
  // For one other tree: data, then what it is for.
  struct Span {
    uint64_t addr, bytes;
  };
  struct Parcel {
    uint32_t tree;
    Frame frame;
    std::vector<Span> data;
    size_t span = 0;    // under way
    uint64_t done = 0;  // of it
  };

  void end() {
    leave();
    place_ = Place::kOver;
    forget_wait();
    comm_.end_turn();
  }
  // It cannot go on: an operation waits for the abort. A making that has failed ends, and its caller reads the state.
  void stuck() {
    if (init_) return end();
    leave();
    place_ = Place::kStuck;
  }
  // Around what this member says to others (hold.h).
  bool enter() { return inside_ = inside_ || comm_.hold().enter(); }
  void leave() {
    if (std::exchange(inside_, false)) comm_.hold().leave();
  }
  // For whom it waits (SoftComm::note_wait).
  std::string waits_for() const;
  void forget_wait() {
    if (std::exchange(noted_wait_, false)) comm_.note_wait({});
  }
  void send_data();
  bool post();
  std::vector<Span> needed_by(const std::vector<uint32_t>& ranks) const;
  bool flush();
  bool late(bool moved);
  void note_result();
  bool have_all_joined();
  bool try_start();
  bool share(uint32_t who, uint32_t n, bool all);
  bool step_pairs();
  bool step_send(uint32_t to, std::deque<PairOp>& ops);
  bool step_recv(uint32_t from, std::deque<PairOp>& ops);
  bool receive(uint32_t from, std::deque<PairOp>& ops);
  void tell_sender(uint32_t from, FrameKind kind, uint64_t bytes);

  const CommRef ref_;
  SoftComm& comm_;
  const bool init_;
  const uint64_t turn_;
  bool inside_ = false;
  Place place_ = Place::kTurn;
  bool has_board_ = false;  // the communicator's own pointer is another thread's until it is our turn
  std::deque<CommOp> all_;
  std::map<std::pair<bool, uint32_t>, std::deque<PairOp>> pairs_;  // by (send, other rank)
  uint64_t target_ = 0;                                            // of both counts, for the operation under way
  bool noted_wait_ = false;
  bool last_ = false;  // this member posted last
  std::vector<Result> results_;
  std::deque<Parcel> outbox_;
  uint64_t late_since_ = 0;  // when another tree was out of reach first
  Links::Stop stop_;
};

}  // namespace devproxy::hal::soft
