// SPDX-License-Identifier: Apache-2.0
// Which rank may take more memory now, where the job's ranks on one GPU do not all fit at their peaks: the paper's time-slicing
// holds one set of activations at a time (Singularity, 5.2).
//
// Each rank claims what it had at the peak of its step, and comes back to what it has between two steps. More memory is given
// only if all can still finish, one after the other (the banker's algorithm: Dijkstra, EWD 108). So ranks do not wait for
// memory in a circle; and while all peaks fit, nobody waits.
//
// A rank's first steps show what it claims. Until then one such rank leads: it takes what it wants, and the others little. When
// it waits for another rank in a collective, the next one leads.
//
// Behind its peak a rank frees its activations, and takes only little in between. So it claims that much then, and is let go
// on where it could not come to its peak again.
//
// The order in which the job lets its ranks finish is not known here: one may wait in a collective for a rank that waits for
// memory. Then nobody moves, which is seen, and the one that is nearest to its peak gets what it wants. If nobody can get it,
// the ranks need more memory at the same time than the GPU has: there are no turns any more, and the device says what there
// is, as without this.
//
// The unit is the credit of a client (client_memory.h). A client whose request must wait leaves it in its ring.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <vector>

namespace devproxy::server {

// Bytes of one rank. least <= has <= most.
struct MemoryClaim {
  uint64_t has = 0;
  uint64_t most = 0;   // it may come to want
  uint64_t least = 0;  // it comes back to
};

// Where in its step a rank is: on its way up, or behind its peak. Pure.
class MemoryPhase {
 public:
  // Behind each change. claim.most: it has been there, in this step or before.
  void now(const MemoryClaim& claim);
  // What it claims now. Behind its peak: little more, and that it goes down to the end of that phase without anybody.
  MemoryClaim claim(MemoryClaim claim) const;

 private:
  bool behind_ = false;
  uint64_t top_ = 0;   // on its way up: the most in this step
  uint64_t low_ = 0;   // behind the peak: the least since
  uint64_t rise_ = 0;  // the most that it ever took on top of that
};

// Can all come to their most, one after the other, if so much is free? Pure.
bool all_can_finish(std::vector<MemoryClaim> claims, uint64_t free_bytes);

// Any thread. Locks: mu_ comes before what a Member's functions take (that of its space).
class MemoryTurns {
 public:
  using Clock = std::chrono::steady_clock;
  // Of a client. moves: what it does can go on. waits: it can't before somebody else does something. rests: nothing of it is
  // under way; its program is busy elsewhere.
  enum class State : uint8_t { kMoves, kWaits, kRests };
  // Each may be called on any thread until leave() has returned.
  struct Member {
    std::function<State()> state;
    std::function<uint64_t()> progress;  // differs if it has moved
    std::function<uint64_t()> steps;     // of its optimizer, as far as its framework counts them
    std::function<void()> want_credit;   // it should keep no credit that it does not use
    std::function<void()> look;          // at what it can give back
  };
  struct Counts {
    uint64_t waits = 0;      // requests that had to wait
    uint64_t waited_us = 0;  // their time
    uint64_t still = 0;      // times that nobody moved
    bool off = false;        // no turns any more
  };
  class Seat;
  struct Rank {
    MemoryClaim claim;
    State state = State::kMoves;
    bool known = false, waits = false;
  };

  explicit MemoryTurns(std::function<Clock::time_point()> clock = Clock::now) : clock_(std::move(clock)) {}

  // peak_bytes: of its life so far, elsewhere, with what its client keeps unused; 0: none.
  Seat* sit(Member member, uint64_t has, uint64_t peak_bytes);
  void leave(Seat* seat);
  // What it has now. trough_bytes: the least of its rhythm (LiveTrace); 0 and UINT64_MAX: not known. backed_bytes: of the
  // GPU's memory, what is behind it already.
  void now(Seat* seat, uint64_t has, uint64_t trough_bytes, uint64_t backed_bytes = UINT64_MAX);
  // How much more it may take of what is free: `wanted`, else `needed`, which is > 0; 0: neither, look again behind wait().
  // beyond: the device would give more than is free, as the software GPU does. Then nobody waits long in vain.
  [[nodiscard]] uint64_t may_take(Seat* seat, uint64_t wanted, uint64_t needed, uint64_t free_bytes, bool beyond);
  // Until somebody has given something back, or a moment.
  void wait();
  // How much of what is free a rank may keep unused, if the others come to want as much as it has.
  uint64_t spare_bytes(const Seat* seat, uint64_t free_bytes);
  // Somebody had to wait, and not all peaks fit. Then nobody keeps what it does not use.
  bool tight() const { return tight_.load(std::memory_order_relaxed) && !off_.load(std::memory_order_relaxed); }
  Counts counts();
  std::vector<Rank> ranks();

  class Seat {
    friend class MemoryTurns;
    Member member;
    MemoryClaim claim;
    uint64_t backed = UINT64_MAX;
    MemoryPhase phase;
    bool known = false;  // its claim, from two steps, its rhythm or an earlier life
    uint64_t steps = 0, first_steps = 0;
    uint64_t low = UINT64_MAX, low_before = UINT64_MAX;  // the least that it had in this step, and in the last one
    bool waits = false;                                  // for memory
    uint64_t wants = 0;                                  // then: so much
    uint64_t progress = 0;
    Clock::time_point since, moved;  // since when it waits; when it was last seen to have moved
  };

 private:
  State look_at(Seat& seat, Clock::time_point now);
  void count_steps(Seat& seat);
  void know(Seat& seat);
  bool fits(Seat* seat, uint64_t bytes, uint64_t free_bytes);
  bool leads(Seat* seat);
  std::chrono::milliseconds still_for(Clock::time_point now, bool* elsewhere);
  bool goes_on(Seat* seat, uint64_t free_bytes, bool beyond);
  void end_wait(Seat* seat);

  const std::function<Clock::time_point()> clock_;
  std::mutex mu_;
  std::condition_variable changed_;
  uint64_t changes_ = 0;
  std::list<Seat> seats_;
  Seat* leader_ = nullptr;  // of those whose claims are not known
  std::atomic<bool> tight_{false}, off_{false};
  Clock::time_point asked_, looked_;
  Counts counts_;
};

}  // namespace devproxy::server
