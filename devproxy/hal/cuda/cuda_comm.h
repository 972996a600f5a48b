// SPDX-License-Identifier: Apache-2.0
// A member of a communicator on a real GPU: NCCL's own, made in the server.
//
// NCCL's communicator need not block (nccl.h, ncclConfig_t): a call that it cannot end at once it ends on a thread of its
// own, and until it has (ncclCommGetAsyncError) nothing may be asked of that communicator, and its operations may not be in
// their stream yet.
//
// A thread for each member, the minder, makes all calls that may take long: it finds the library, carries the id, makes
// NCCL's communicator, makes it again when another member has been replaced (comm_board.h), looks whether the others are
// there, and ends it. Operations are submitted by whoever submits for the space, under the space's lock.
//
// Who owns what
//   mu_       phase, NCCL's communicator, state and text. A leaf, but for NCCL's calls that return at once
//   minder    NCCL's communicator, in every phase but kReady
//   the space's lock   users_, the operations between use() and unuse(): the minder ends nothing in between
// The minder owns a reference to the member and goes when it is over. It knows nothing of the space, which may be gone by
// then: what it needs of the owner was asked at the beginning, and changed() is forgotten before the space ends.
//
// Interleavings that worried us
//   1. An abort while an operation is being submitted: use() and unuse() stand around that, and the minder waits.
//   2. An abort while NCCL still puts operations into their stream: ncclCommAbort stops that first (nccl.h). What NCCL has
//      begun is kGone behind it, and only then the commands behind the operation follow. What it has not begun is at once.
//   3. ncclCommAbort and ncclCommDestroy may wait for the other members' (NCCL's proxies serve them). So this member's row
//      says that it is gone before.
//   4. A member is replaced while this one is just making its communicator: the generation has changed, the making is given
//      up and begun anew. A failure of a making is forgotten then.
//   5. The job goes on before the minder has seen the new generation: use() compares it too.
//   6. Of several servers that are replaced, some are new and some old for a while, and two ranks may be on one GPU then. A
//      member that took its row from another server makes no communicator before its server goes on (Standing::goes_on). So
//      no mixed generation is ever complete.
//   7. This member is replaced: its row has another incarnation. It touches nothing any more. If its successor dies before
//      it has taken over, the row's process is gone, and the member takes its row again.
//   8. It is replaced while it ends the communicator of the last generation, which takes long: it must not put an id of its
//      own there for the present one. So it looks at its row again behind each wait.
//   9. The job destroys the communicator while operations are under way in a stream that it has destroyed: the minder
//      serves them first.
//
// Ranks that share a GPU (shared_comm.h). Who is in which server process the rows say. They are one generation's: read while it
// stays the same. A communicator whose members are all in one process has no NCCL. Of one with members in several, those
// that share a process have one NCCL communicator together, and members that send to each other have one for the two.
//
// Several trees (comm_board.h). A member tells the other trees of itself at the beginning of each making, and where a
// connection is another one, but nothing while its server stands at a cut. Rank 0 sends NCCL's id behind it. Behind each cut
// it asks, and until all have answered (confirmed()) it neither makes a communicator nor lets one be used. A tree that has no
// member is told to forget the communicator as soon as all have come.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/hal/comm.h"
#include "devproxy/hal/cuda/comm_board.h"
#include "devproxy/hal/cuda/cuda_context.h"
#include "devproxy/hal/cuda/cuda_device.h"
#include "devproxy/hal/cuda/nccl_table.h"
#include "devproxy/hal/cuda/shared_comm.h"
#include "devproxy/hal/links/links.h"
#include "devproxy/hal/owner.h"

namespace devproxy::hal::cuda {

class CudaComm final : public Comm {
 public:
  struct Config {
    CommConfig comm;
    std::string folder;                        // the job's
    CommSeat seat;                             // of this member
    uint64_t incarnation = 0;                  // of its space
    std::string library;                       // CudaConfig::nccl_path
    bool may_come = false;                     // a framework may still bring the library
    std::shared_ptr<const Standing> standing;  // CudaConfig::standing
    bool shared = false, tree_order = false;   // CudaConfig's
    std::shared_ptr<Links> links = {};         // to the other trees; nullptr: nobody there is told
    std::vector<uint32_t> names = {};          // of its ranks, for texts; empty: their numbers
    std::optional<uint32_t> only_tree = {};    // of the others, that has a member
  };
  // changed: called by the minder, under the lock, when something has changed that somebody may wait for.
  static std::shared_ptr<CudaComm> make(Config config, std::shared_ptr<Context> context, std::function<void()> changed);
  explicit CudaComm(Config config, std::shared_ptr<Context> context, std::function<void()> changed);
  ~CudaComm() override;

  // -- any thread
  void abort() { end(Ending::kAbort); }
  void destroy() { end(Ending::kDestroy); }
  void died() { end(Ending::kDied); }  // the member's process has ended
  bool complete() const { return complete_.load(std::memory_order_acquire); }
  CommState state(std::string* why) const;
  // changed() is not called any more.
  void forget();
  // Does NCCL do nothing for it any more that the space could miss? Waits at most so long.
  bool over(uint32_t wait_ms) const;
  const CommConfig& config() const { return config_.comm; }

  // CudaSpace::pass_, where a command that names it is held, or one that waits for another rank. Under the space's lock
  uint64_t held = 0, waits = 0;
  uint64_t collectives = 0;  // that are in their streams: the same number at all members. Under the space's lock

  // -- under the space's lock
  enum class Ready : uint8_t {
    kYes,
    kNotYet,  // NCCL is busy with it, or it is being made
    kNever,   // it has failed, and waits for its abort
    kGone,    // it has ended, and NCCL has nothing of it any more
  };
  // generation: of the communicator that NCCL has begun the operation in; 0: it has not begun it.
  Ready look(uint64_t generation);
  // look(0), and where it is kYes nothing is ended before unuse().
  Ready use();
  void unuse();
  // Between use() and unuse(), and NCCL's begin and end of a group. reduction: of make_reduction(), for kPreMulSum.
  int submit(const CommOp& op, int reduction, NcclStream stream);
  StatusOr<int> make_reduction(const CommOp& op);
  void drop_reduction(int reduction);
  void failed(const Status& why);
  const Nccl& nccl() const { return *nccl_; }
  // In the place of NCCL; nullptr: NCCL it is. Between use() and unuse().
  const std::shared_ptr<SharedComm>& shared() const { return shared_; }
  uint64_t generation() const { return generation_; }

  // Of a member whose communicator is shared, not before it was seen kYes: the communicator of it and that member of another
  // place, for sends and receives. This member is rank 0 in it if its own number is the lower one.
  StatusOr<std::shared_ptr<CudaComm>> pair(uint32_t peer);
  // For operations that should not wait in the space's streams. Made when it is asked for.
  StatusOr<CUstream> own_stream();
  // A group that names it was submitted, and has completed or was dropped. Any thread.
  void begin() { in_flight_.fetch_add(1, std::memory_order_relaxed); }
  void done() { in_flight_.fetch_sub(1, std::memory_order_relaxed); }

 private:
  enum class Phase : uint8_t { kJoining, kReady, kEnding, kOver };
  enum class Ending : uint8_t { kNone, kDestroy, kAbort, kDied };
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;
  // What another tree was told, by the connection that took it (Links::epoch); 0: none.
  struct Told {
    uint64_t row = 0, id = 0, ask = 0, answer = 0;
    uint64_t answered_ask = 0;            // the one that `answer` was for
    bool knows = false;                   // of this member
    Clock::time_point unreached_since{};  // it could not be told
  };

  static CommState state_of(int result);
  Ready look_locked(uint64_t generation);

  // -- cuda_comm_minder.cc
  void mind();
  void turn(Lock& lock);
  void join(Lock& lock);
  bool find_places(Lock& lock, Places* places);
  bool join_shared(Lock& lock, const Places& places);
  bool join_nccl(Lock& lock, uint32_t ranks, uint32_t rank);
  Status find_library(Lock& lock);
  bool get_id(Lock& lock, DevproxyNcclId* id, Status* failed);
  void look_at_others(uint32_t grace_ms);
  bool look_at_board(bool all);
  bool is_live() const { return board_ && state_ == CommState::kOk && has_row(); }
  bool wakes() const;
  void leave_row();
  void take_row_again();
  void end_now(Lock& lock, bool kindly);
  void drop(Lock& lock, NcclComm comm, bool kindly);
  void drop_shared(Lock& lock, bool kindly);
  void take_failure();
  bool pause(Lock& lock, uint32_t ms);
  bool has_row() const { return board_->has_row(config_.comm.rank, config_.incarnation); }
  bool stale() const { return board_->generation() != generation_; }
  bool aborted() const { return ending_ == Ending::kAbort || ending_ == Ending::kDied; }
  bool ends() const;
  // Must the other trees be asked whether they are where they were?
  bool must_ask() const { return config_.links && confirmed_resume_ != config_.standing->resumes.load(); }
  bool may_join() const { return !took_over_ || config_.standing->goes_on.load(std::memory_order_acquire); }
  const char* why_gone(uint32_t rank) const;
  std::string where(uint32_t rank) const;
  uint32_t name_of(uint32_t rank) const { return config_.names.empty() ? rank : config_.names[rank]; }
  void tell();

  // -- cuda_comm_trees.cc
  bool confirmed();
  void tell_others(Lock& lock);
  void tell_again();
  void look_at_link(uint32_t tree, Told& told);
  void send(Lock& lock, uint32_t tree, Frame frame, std::optional<DevproxyNcclId> id, uint64_t* told);
  Frame frame(FrameKind kind) const;
  std::vector<uint32_t> other_trees() const;

  void end(Ending ending);
  void end_pairs(Ending ending);
  std::vector<std::shared_ptr<CudaComm>> all_pairs() const;
  void fail(CommState state, std::string why);

  const Config config_;
  const std::shared_ptr<Context> context_;
  std::unique_ptr<CommBoard> board_;
  std::atomic<bool> complete_{false};
  std::atomic<uint32_t> in_flight_{0};
  CUstream stream_ = nullptr;  // own_stream(). Under the space's lock

  mutable std::mutex mu_;
  mutable std::condition_variable cv_;
  std::function<void()> changed_;
  Phase phase_ = Phase::kJoining;
  Ending ending_ = Ending::kNone;
  bool took_over_ = false;         // its row, from a server that may go on
  bool predecessor_told_ = false;  // others may know a predecessor of this member, and not it
  uint64_t version_ = 0;           // of its row
  bool idle_end_ = false;          // it ends with nothing under way
  uint32_t users_ = 0;
  uint64_t generation_ = 0;  // of comm_, or of the one that is being made
  uint64_t set_ = 0;         // the same, as all trees name it; 0: not all members are there
  NcclComm comm_ = nullptr;
  std::shared_ptr<SharedComm> shared_;  // or this
  std::shared_ptr<const Nccl> nccl_;
  CommState state_ = CommState::kOk;
  bool join_failed_ = false;  // that is why state_ is what it is
  std::string why_;
  // Which of the server's resumes (Standing) the others have confirmed; for which they were asked, and with which number.
  uint64_t confirmed_resume_ = 0, asked_resume_ = 0, own_ask_ = 0;
  // The minder's.
  std::vector<Clock::time_point> gone_since_;  // by rank
  std::map<uint32_t, Told> told_;              // by tree
  std::optional<DevproxyNcclId> id_;           // of set_, by rank 0

  std::map<uint32_t, std::shared_ptr<CudaComm>> pairs_;  // by peer, of this generation
  std::vector<std::shared_ptr<CudaComm>> former_pairs_;  // that may not be over
};

}  // namespace devproxy::hal::cuda
