// SPDX-License-Identifier: Apache-2.0
// The members of one communicator that are in this server process: several of the job's GPUs share one (hal/sharing.h).
//
// NCCL takes one rank for each GPU, so these members' operations are not NCCL's. They meet here. A member posts its part:
// an event in its stream says when its buffers are ready. When all have posted, whoever comes last submits the whole
// operation to the communicator's own stream, behind all those events: copies, and a kernel for a reduction
// (reduce_ptx.h), in the order that hal/comm.h promises. An event behind it is what the members' streams wait for. Until
// it is there a member's group is held as one that NCCL is busy with (cuda_space.h, Collectives), so nobody ever blocks,
// and no stream of a member waits for another member that has not come.
//
// A send meets its receive: the n-th from one rank to another, the n-th there.
//
// Members in several processes ("places"). One NCCL communicator has a rank for each place; the place's lowest member makes
// it. What goes from place to place goes by NCCL's sends and receives, of which all places know the same list. A reduction
// has an owner for each part of the result: all other places send it their members' contributions, it reduces them in the
// order of the ranks, and sends the result. So the numbers are the same wherever the ranks are. A send to a member of
// another place does not meet here: it has an NCCL communicator of the two ranks (CudaComm::pair).
//
// Who owns what
//   mu_      everything. Behind a space's lock and a member's (CudaComm::mu_). Driver and NCCL calls that return at once are
//            made under it
//   changed  a member's, called under mu_ when its work may go on; it takes no lock (CudaSpace::kick)
//
// Interleavings that worried us
//   1. A member leaves between its post and the meeting: what it posted is taken back, the others' stays, and waits for
//      their own abort, as with NCCL.
//   2. A member leaves while the operation runs: its memory must stay until then. leave() waits for what has begun.
//   3. Two groups of one rank are in one meeting: not possible, the space holds the second (behind_held()).
//   4. Streams: the communicator's waits for the members', and those for it, always for events that are recorded already.
//      So there is no circle within a process. Between processes the order is NCCL's: meetings have the same one everywhere.
//   5. The driver blocks a thread that gives a stream too much (cuda_space.h), which may be the one that the stream waits for.
//      So the communicator's stream has a few hundred operations under way at most, and the rest waits here: the
//      spaces' watchers ask again.
//   6. NCCL's communicator is aborted under an operation that is in the stream already: what follows it there runs on
//      half of its data, and its members' streams go on. So the others have failed before the abort.
//   7. The member that made NCCL's communicator ends it: take_nccl() first, under mu_. A meeting that is in the middle has
//      failed then. It may do so before another member has seen that it was there (the job made it and destroyed it).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/csrc/args/comm.h"
#include "devproxy/hal/cuda/cuda_context.h"
#include "devproxy/hal/cuda/nccl_table.h"
#include "devproxy/hal/cuda/reduce_kernels.h"

namespace devproxy::hal::cuda {

// Which members are in one process, by place; places in the order of their lowest members.
struct Places {
  std::vector<std::vector<uint32_t>> members;
  std::vector<uint32_t> of;  // by rank
  uint32_t own = 0;

  static Places make(const std::vector<uint64_t>& processes, uint64_t own);  // processes: by rank
  const std::vector<uint32_t>& locals() const { return members[own]; }
  bool is_local(uint32_t rank) const { return of[rank] == own; }
  bool each_alone() const { return members.size() == of.size(); }
};

class SharedComm {
 public:
  // An event of the driver.
  class Mark {
   public:
    static StatusOr<std::shared_ptr<Mark>> record(const std::shared_ptr<Context>& context, CUstream stream);
    Mark(std::shared_ptr<Context> context, CUevent event) : context_(std::move(context)), event_(event) {}
    ~Mark() { (void)context_->enter().cuEventDestroy(event_); }  // cuda.h: released when it completes
    Mark(const Mark&) = delete;
    Status wait_in(CUstream stream) const;
    bool reached() const { return context_->enter().cuEventQuery(event_) != CUDA_ERROR_NOT_READY; }

   private:
    const std::shared_ptr<Context> context_;
    const CUevent event_;
  };

  // An operation of one member.
  struct Part {
    CommOp op;
    std::shared_ptr<Mark> ready;         // in the member's stream
    std::shared_ptr<Mark> done;          // in the communicator's; nullptr: it has not been submitted. Under mu_
    std::pair<uint32_t, uint32_t> pair;  // of a send or receive: from, to
  };
  using Work = std::vector<std::shared_ptr<Part>>;

  // The one of this process for that communicator and generation, made by whoever asks first.
  static std::shared_ptr<SharedComm> of(const CommKey& key, uint64_t generation, const Places& places,
                                        const std::shared_ptr<Context>& context);
  SharedComm(Places places, std::shared_ptr<Context> context);
  ~SharedComm();
  SharedComm(const SharedComm&) = delete;

  // Compiles the kernels that most jobs need. May take a second.
  void warm();

  // -- any thread
  void join(uint32_t rank, std::function<void()> changed);
  // The communicator of the places, by the lowest member of this one, until take_nccl().
  void give_nccl(std::shared_ptr<const Nccl> nccl, NcclComm comm);
  // Nothing, but from the rank that gave it. kindly: it was destroyed, with nothing under way. nccl_over() behind its end.
  void take_nccl(uint32_t rank, bool kindly);
  void nccl_over(uint32_t rank);
  bool ready() const;  // all members of this place have joined, and NCCL was there where it is needed
  const Places& places() const { return places_; }
  // changed is not called any more.
  void forget(uint32_t rank);
  // Takes back what of the rank's has not begun, and waits for what has. False: that lasted longer, and is to be done again.
  bool leave(uint32_t rank, bool kindly, uint32_t most_ms);
  void fail(const Status& why);
  Status failure() const;

  // -- under the space's lock
  // All operations of one group, whose buffers are ready at that mark.
  Work post(uint32_t rank, const std::vector<CommOp>& ops, const std::shared_ptr<Mark>& ready);
  // Lets the stream wait for all of it. False: some of it has not been submitted.
  StatusOr<bool> follow(const Work& work, CUstream stream);
  // Goes on as far as follow() would, and lets nobody wait for it.
  void poke(const Work& work);
  // Must follow() be asked again soon, because NCCL is busy?
  bool busy() const;

  // For whoever moves the members' pages: nothing is submitted while the lock is held. Behind the locks of spaces and members.
  std::unique_lock<std::mutex> hold() const { return std::unique_lock(mu_); }
  bool stands() const;  // the GPU has nothing of it. Under that lock

 private:
  using PartRef = std::shared_ptr<Part>;
  using Parts = std::vector<PartRef>;          // by rank; nullptr: in another place
  using Pair = std::pair<uint32_t, uint32_t>;  // from, to

  // A part of an operation. exchanges: it is a group of NCCL's, which must be in the stream before the next.
  struct Step {
    bool exchanges;
    std::function<Status()> run;
  };
  struct Meeting {
    Parts parts;
    size_t arrived = 0;
    bool begun = false;
    std::deque<Step> steps;
  };
  struct Member {
    bool joined = false;
    uint64_t meetings = 0;  // that it has come to
    std::function<void()> changed;
  };
  struct Running {
    std::shared_ptr<Mark> mark;  // behind so many of the driver's operations
    size_t operations;
    Pair who;  // kAll, or the ranks of a send and its receive
  };
  static constexpr Pair kAll{UINT32_MAX, UINT32_MAX};
  // What one place makes of all ranks' elements from `skip` on, for its members in `ranks`, whose outputs have it at `into`.
  struct Block {
    uint32_t owner;
    uint64_t skip, count;
    std::vector<uint32_t> ranks;
    uint64_t into;
  };
  using Round = std::vector<Block>;  // at most one for each place
  // What goes from one rank to another. An address is 0 where its rank is in another place.
  struct Transfer {
    uint32_t from, to;
    uint64_t at, into, count;
  };

  // Under mu_.
  void advance();
  void advance_pair(const Pair& pair);
  void advance_for(const Work& work);
  bool all_reached() const;
  bool has_room();
  void note_mark(std::shared_ptr<Mark> mark);
  Status count_operations(size_t n);
  Status check(const Meeting& meeting) const;
  Status begin(const std::vector<PartRef>& parts);
  Status end(const std::vector<PartRef>& parts);
  StatusOr<bool> settled();  // has NCCL put its group into the stream?
  Status plan(Meeting& meeting);
  std::vector<Round> rounds_of(const CommOp& op) const;
  Status plan_reduction(Meeting& meeting);
  void plan_collecting(Meeting& meeting, const Round& piece, uint64_t stride);
  void plan_spreading(Meeting& meeting, const Round& piece);
  void plan_scalars(Meeting& meeting);
  void plan_copies(Meeting& meeting);
  void add_copies(Meeting& meeting, const std::vector<Transfer>& copies, uint64_t bytes);
  void exchange(Meeting& meeting, const std::vector<Transfer>& transfers, CommType type);
  Status transfer(const std::vector<Transfer>& transfers, CommType type);
  ReduceShape shape_of(const Parts& parts, size_t destinations) const;
  Status reduce(const Parts& parts, uint64_t skip, uint64_t count, uint64_t stride, const std::vector<uint64_t>& to);
  Status copy(uint64_t to, uint64_t from, uint64_t bytes);
  Status set_scalar(uint64_t at, const CommOp& op);
  StatusOr<uint64_t> scratch();
  void fail_locked(const Status& why);
  void tell();

  const Places places_;
  const uint32_t ranks_;
  const std::shared_ptr<Context> context_;
  mutable std::mutex mu_;
  std::vector<Member> members_;  // by rank
  size_t joined_ = 0;
  std::shared_ptr<const Nccl> nccl_;
  NcclComm comm_ = nullptr;
  bool given_ = false;       // comm_ was there: whoever made it may leave before others have looked
  bool exchanging_ = false;  // NCCL is busy with a group
  bool dropping_ = false;    // comm_ was taken, and is being ended
  std::deque<Meeting> meetings_;
  uint64_t first_meeting_ = 0;  // the number of meetings_.front()
  std::map<Pair, std::deque<PartRef>> sends_, receives_;
  CUstream stream_ = nullptr;
  std::shared_ptr<ReduceKernels> kernels_;
  std::deque<Running> running_;  // what has begun, in the stream's order
  size_t under_way_ = 0;         // operations in all of them, and behind the last
  size_t unmarked_ = 0;          // behind the last
  Pair who_ = kAll;              // of what is being submitted
  CUdeviceptr scratch_ = 0;      // of kScratchBytes, where members of other places are
  CUmemGenericAllocationHandle scratch_handle_ = 0;
  Status failure_;
  std::atomic<bool> failed_{false};
};

}  // namespace devproxy::hal::cuda
