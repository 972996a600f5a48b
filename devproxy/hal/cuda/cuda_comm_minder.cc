// SPDX-License-Identifier: Apache-2.0
// CudaComm: the thread that makes NCCL's communicator, looks after it, and ends it.
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "devproxy/csrc/base/log.h"
#include "devproxy/hal/cuda/cuda_comm.h"

namespace devproxy::hal::cuda {

namespace {

using std::chrono::milliseconds;

constexpr uint32_t kLookMs = 50;          // how often a minder looks at the others
constexpr uint32_t kSoonMs = 5;           // while it waits for its server to go on, or for operations to end
constexpr uint32_t kJoinMs = 1;           // at a making under way, and at an id that is awaited; less often later
constexpr uint32_t kGoneMs = 500;         // how long a member may be gone before that is an error
constexpr uint32_t kJoinGoneMs = 2000;    // the same while the communicator is made
constexpr uint32_t kMoveMs = 30'000;      // for the successor of another tree's server
constexpr uint32_t kLibraryMs = 60'000;   // for a framework to bring the library
constexpr uint32_t kPairsMs = 30'000;     // for its pairs' ends
constexpr uint32_t kFinalizeMs = 10'000;  // for what is under way, when the job destroys a communicator

}  // namespace

void CudaComm::tell() {
  cv_.notify_all();
  if (changed_) changed_();
}

// What a destroyed one has under way is served first, as far as that is possible.
bool CudaComm::ends() const {
  if (ending_ == Ending::kNone) return false;
  return aborted() || !complete() || state_ != CommState::kOk || in_flight_.load(std::memory_order_acquire) == 0;
}

// False: it ends, or the others are of another generation, or it was replaced.
bool CudaComm::pause(Lock& lock, uint32_t ms) {
  cv_.wait_for(lock, milliseconds(ms), [&] { return ends(); });
  return !ends() && !stale() && has_row();
}

void CudaComm::mind() {
  prctl(PR_SET_NAME, "dp-minder");
  context_->enter();
  Lock lock(mu_);
  while (!ends()) {
    if (board_) turn(lock);
    const bool stands = config_.links && config_.standing->stands;
    const bool asks = is_live() && must_ask() && !stands;
    const bool soon = ending_ == Ending::kDestroy || (is_live() && (phase_ == Phase::kJoining || stands));
    // Whoever waits for answers gives them soon, too.
    const uint32_t ms = asks ? kJoinMs : soon ? kSoonMs : kLookMs;
    cv_.wait_for(lock, milliseconds(ms), [&] { return ends() || (!asks && wakes()); });
  }
  const bool kindly = ending_ == Ending::kDestroy && state_ == CommState::kOk;
  idle_end_ = kindly && !shared_ && in_flight_.load(std::memory_order_acquire) == 0;
  end_pairs(kindly || aborted() ? ending_ : Ending::kAbort);
  if (board_ && !has_row()) take_row_again();
  if (board_ && has_row()) leave_row();
  end_now(lock, kindly);
  end_pairs(kindly || aborted() ? ending_ : Ending::kAbort);  // one that was made since; nobody makes any more
  const auto pairs = all_pairs();
  lock.unlock();
  // As long as this member is there the space knows of them.
  for (const auto& pair : pairs)
    while (!pair->over(kPairsMs))
      DP_LOG(kWarn, kDevice, 0, "communicator %08x: the end of a pair lasts over %u ms",
             static_cast<unsigned>(config_.comm.key.low), kPairsMs);
  lock.lock();
  phase_ = Phase::kOver;
  tell();
}

// Is there something to do that use() waits for?
bool CudaComm::wakes() const {
  if (!is_live() || phase_ != Phase::kReady || (config_.links && config_.standing->stands)) return false;
  return stale() || must_ask();
}

void CudaComm::turn(Lock& lock) {
  if (!has_row()) return take_row_again();
  // At a cut the other trees hear nothing, and a communicator's end may wait for their members.
  if (config_.links && config_.standing->stands) return;
  if (join_failed_ && stale()) {
    join_failed_ = false, state_ = CommState::kOk, why_.clear();
    if (shared_) drop_shared(lock, false);
  }
  if (phase_ == Phase::kReady && shared_ && comm_) {
    take_failure();
    if (state_ != CommState::kOk) {  // what its place has under way may wait for ever
      shared_->take_nccl(config_.comm.rank, false);
      drop(lock, std::exchange(comm_, nullptr), false);
      shared_->nccl_over(config_.comm.rank);
    }
  }
  if (state_ != CommState::kOk) return tell_others(lock);
  if (phase_ == Phase::kReady && stale()) {
    tell_again();
    tell_others(lock);  // first: theirs must end as well
    end_now(lock, false);
    phase_ = Phase::kJoining;
  }
  if (phase_ == Phase::kReady) {
    take_failure();
    tell_others(lock);
    if (must_ask() && confirmed()) {
      tell();
      tell_others(lock);  // what they have asked before they answered
    }
    return look_at_others(kGoneMs);
  }
  if (may_join()) join(lock);
}

// Makes what the operations of the present generation go to. Leaves kReady, a failure, or nothing where it has to begin
// anew.
void CudaComm::join(Lock& lock) {
  const CommConfig& c = config_.comm;
  generation_ = board_->generation();
  set_ = 0;
  if (!has_row()) return;  // a successor that took it came before this generation
  std::fill(gone_since_.begin(), gone_since_.end(), Clock::time_point{});
  tell_again();
  id_.reset();
  Places places;
  if (!find_places(lock, &places)) return;
  // Also a rank alone, where others share its GPU: so that nothing of it waits for what NCCL does for them.
  const bool shared = !places.each_alone() || config_.tree_order || (config_.shared && places.of.size() == 1);
  if (!(shared ? join_shared(lock, places) : join_nccl(lock, c.ranks, c.rank))) return;
  phase_ = Phase::kReady;
  complete_.store(true, std::memory_order_release);
  DP_LOG(kInfo, kDevice, 0, "communicator %08x: rank %u of %u, generation %lu, by %s", static_cast<unsigned>(c.key.low),
         c.rank, c.ranks, static_cast<unsigned long>(generation_),
         nccl_ && comm_ ? nccl_->path().c_str() : "its server");
  tell();
}

// In which server processes are the members? Waits until all have a row.
bool CudaComm::find_places(Lock& lock, Places* places) {
  std::vector<uint64_t> processes(config_.comm.ranks);
  for (uint32_t looks = 0;; looks++) {
    bool all = true;
    for (uint32_t rank = 0; rank < config_.comm.ranks; rank++) {
      all &= board_->is_there(rank);
      processes[rank] = board_->row(rank).process;
    }
    // In this order: what is confirmed was told before, and what was told since shows in the generation.
    const uint64_t set = board_->set();
    all = all && confirmed();
    if (stale() || !has_row()) return false;  // before what was read is believed
    if (!look_at_board(all)) {
      tell_others(lock);  // who knows of this member only now finds the same
      return false;
    }
    if (all) {
      set_ = set;
      break;
    }
    tell_others(lock);
    look_at_others(kJoinGoneMs);
    if (state_ != CommState::kOk || !pause(lock, std::min(kJoinMs + looks / 16, kLookMs))) return false;
  }
  tell_others(lock);
  *places = Places::make(processes, config_.seat.process);
  return state_ == CommState::kOk && !stale() && has_row();
}

// Do all trees mean the same members, each on a GPU that no other tree has? NCCL takes one rank for each GPU, and ranks of
// two trees are never in one server.
bool CudaComm::look_at_board(bool all) {
  const CommBoardHead& head = board_->head();
  std::string why;
  if (const uint32_t ranks = head.other_ranks)
    why = "the members do not agree how many they are: " + std::to_string(config_.comm.ranks) + " and " +
          std::to_string(ranks);
  if (const uint32_t twice = head.twice)
    why = "two processes say that they are rank " + std::to_string(twice - 1) + ", in two trees";
  std::map<uint64_t, uint32_t> ranks;  // by GPU: one of its members
  for (uint32_t rank = 0; all && config_.links && rank < config_.comm.ranks; rank++) {
    if (board_->row(rank).device == 0) continue;
    const auto [first, is_new] = ranks.try_emplace(board_->row(rank).device, rank);
    if (!is_new && board_->row(first->second).tree != board_->row(rank).tree)
      why = where(first->second) + " and " + where(rank) +
            " are on the same GPU, and NCCL takes one rank for each GPU: give every node GPUs of its own";
  }
  if (why.empty()) return true;
  join_failed_ = true;
  fail(CommState::kInvalidUsage, std::move(why));
  tell();
  return false;
}

bool CudaComm::join_shared(Lock& lock, const Places& places) {
  const CommConfig& c = config_.comm;
  shared_ = SharedComm::of(c.key, generation_, places, context_);
  if (c.rank == places.locals().front()) {
    const auto shared = shared_;
    lock.unlock();
    shared->warm();
    lock.lock();
  }
  shared_->join(c.rank, changed_);
  if (places.members.size() > 1 && c.rank == places.locals().front()) {
    if (!join_nccl(lock, static_cast<uint32_t>(places.members.size()), places.own)) {
      // Others of the place may not have asked for it yet: it stays until this member ends, or begins anew.
      if (state_ == CommState::kOk)
        drop_shared(lock, false);
      else
        shared_->fail({static_cast<int32_t>(state_), why_});
      return false;
    }
    shared_->give_nccl(nccl_, comm_);
  }
  for (uint32_t looks = 0; !shared_->ready(); looks++) {
    take_failure();
    tell_others(lock);
    if (state_ == CommState::kOk) look_at_others(kJoinGoneMs);
    if (state_ == CommState::kOk && pause(lock, std::min(kJoinMs + looks / 16, kLookMs))) continue;
    join_failed_ |= state_ != CommState::kOk;
    end_now(lock, false);
    phase_ = Phase::kJoining;
    return false;
  }
  return true;
}

// One rank of NCCL's, of so many: this member's own, or its place's.
bool CudaComm::join_nccl(Lock& lock, uint32_t ranks, uint32_t rank) {
  Status failed = find_library(lock);
  DevproxyNcclId id{};
  if (failed.ok() && !get_id(lock, &id, &failed) && failed.ok()) return false;
  NcclComm made = nullptr;
  if (failed.ok()) {
    NcclConfig config;
    lock.unlock();
    int result = nccl_->init_rank(&made, static_cast<int>(ranks), id, static_cast<int>(rank), &config);
    lock.lock();
    for (uint32_t looks = 0; made && (result == kNcclSuccess || result == kNcclInProgress); looks++) {
      int now = kNcclSuccess;
      result = nccl_->get_async_error(made, &now);
      if (result == kNcclSuccess) result = now;
      if (result != kNcclInProgress) break;
      look_at_others(kJoinGoneMs);
      if (!pause(lock, std::min(kJoinMs + looks / 16, kLookMs)) || state_ != CommState::kOk) {
        drop(lock, made, false);
        return false;
      }
      // A predecessor of rank 0 that had not seen that it is one may have put its own there.
      if (rank == 0 && !board_->has_id(set_)) board_->put_id(set_, id.internal);
      DevproxyNcclId there{};
      if (rank != 0 && board_->get_id(set_, there.internal) && std::memcmp(&there, &id, sizeof id) != 0) {
        drop(lock, made, false);  // rank 0 has begun anew
        return false;
      }
      tell_others(lock);
    }
    failed = nccl_->status(result, "making NCCL's communicator");
  }
  if (!failed.ok()) {
    join_failed_ = true;
    fail(state_of(failed.code()), failed.text());
    if (made) drop(lock, made, false);
    tell();
    return false;
  }
  comm_ = made;
  return true;
}

Status CudaComm::find_library(Lock& lock) {
  const auto until = Clock::now() + milliseconds(config_.may_come ? kLibraryMs : 0);
  while (!nccl_) {
    lock.unlock();
    auto found = Nccl::open(config_.library, config_.may_come && Clock::now() < until);
    lock.lock();
    if (found.ok())
      nccl_ = std::move(*found);
    else if (found.status().code() != kNotFound || Clock::now() >= until)
      return {kNcclSystemError, found.status().text()};
    else if (!pause(lock, kLookMs) && ends())
      return {kNcclSystemError, "it ended before the library was there"};
  }
  return {};
}

// False: it failed, or it has to begin anew.
bool CudaComm::get_id(Lock& lock, DevproxyNcclId* id, Status* failed) {
  if (config_.comm.rank == 0) {
    lock.unlock();
    const int result = nccl_->get_unique_id(id);
    lock.lock();
    *failed = nccl_->status(result, "making an id for NCCL's communicator");
    if (!failed->ok() || stale() || !has_row()) return false;
    board_->put_id(set_, id->internal);
    id_ = *id;
    for (auto& [tree, told] : told_) told.id = 0;
    tell_others(lock);
    return true;
  }
  for (uint32_t looks = 0; !board_->get_id(set_, id->internal); looks++) {
    tell_others(lock);
    look_at_others(kJoinGoneMs);
    if (state_ != CommState::kOk || !pause(lock, std::min(kJoinMs + looks / 16, kLookMs))) return false;
  }
  return true;
}

// Is somebody gone whom this member waits for? NCCL itself notices it over some transports only. grace_ms: one that has
// done its part and ended is no cause, and a row may be taken again.
void CudaComm::look_at_others(uint32_t grace_ms) {
  if (in_flight_.load(std::memory_order_relaxed) == 0)
    return std::fill(gone_since_.begin(), gone_since_.end(), Clock::time_point{});
  const auto now = Clock::now();
  for (uint32_t rank = 0; rank < config_.comm.ranks; rank++) {
    const char* const why = rank == config_.comm.rank ? nullptr : why_gone(rank);
    Clock::time_point& since = gone_since_[rank];
    if (!why || since == Clock::time_point{}) {
      since = why ? now : Clock::time_point{};
      continue;
    }
    const bool moving = board_->row(rank).gone == Gone::kMoving;
    if (now - since < milliseconds(moving ? kMoveMs : grace_ms)) continue;
    join_failed_ = phase_ == Phase::kJoining;
    fail(CommState::kRemoteError, where(rank) + " cannot be reached: " + why);
    return tell();
  }
}

std::string CudaComm::where(uint32_t rank) const {
  const CommRow& row = board_->row(rank);
  std::string text = "rank " + std::to_string(name_of(rank)) + " on GPU " + std::to_string(row.gpu);
  if (config_.links) text += " of tree " + std::to_string(row.tree);
  return text;
}

const char* CudaComm::why_gone(uint32_t rank) const {
  const CommRow& row = board_->row(rank);
  if (row.incarnation.load(std::memory_order_acquire) == 0) return nullptr;
  switch (row.gone.load()) {
    case Gone::kDied: return "its process has ended";
    case Gone::kServer: return "its server or host has ended, or the connection with it";
    case Gone::kMoving: return "its server has ended, and none has taken its place";
    case Gone::kNot:
    case Gone::kLeft: break;
  }
  const pid_t pid = row.pid;
  return pid != 0 && kill(pid, 0) != 0 && errno == ESRCH ? "its server has ended" : nullptr;
}

// For all who know of this member.
void CudaComm::leave_row() {
  const Gone how = ending_ == Ending::kDied ? Gone::kDied : Gone::kLeft;
  Frame leave = frame(FrameKind::kLeave);
  leave.bytes = static_cast<uint64_t>(how);
  for (const uint32_t tree : other_trees()) {
    // Its members wait for this one, also where it has failed and gone before it could tell them that it is there.
    bool has_member = false;
    for (uint32_t rank = 0; rank < config_.comm.ranks; rank++)
      has_member |=
          board_->row(rank).incarnation.load(std::memory_order_acquire) != 0 && board_->row(rank).tree == tree;
    if (!told_[tree].knows && !predecessor_told_ && !has_member) continue;
    if (!told_[tree].knows) config_.links->post(tree, frame(FrameKind::kJoin));  // or they know its predecessor
    config_.links->post(tree, leave);
  }
  board_->mark(config_.comm.rank, how);
}

// Another server has our row. If that one has ended, it will not take over.
void CudaComm::take_row_again() {
  const CommRow& row = board_->row(config_.comm.rank);
  if (kill(row.pid.load(), 0) == 0 || errno != ESRCH) return;
  auto taken = board_->take_row(config_.comm.rank, config_.incarnation, config_.seat);
  if (!taken.ok()) return;
  version_ = taken->version;
  took_over_ = false;
}

// NCCL has nothing of it any more when this returns.
void CudaComm::end_now(Lock& lock, bool kindly) {
  phase_ = Phase::kEnding;  // nobody uses it from now on
  cv_.wait(lock, [&] { return users_ == 0; });
  if (shared_) shared_->take_nccl(config_.comm.rank, kindly);
  const NcclComm comm = std::exchange(comm_, nullptr);
  if (comm) drop(lock, comm, kindly);
  if (shared_) shared_->nccl_over(config_.comm.rank);
  if (shared_) drop_shared(lock, kindly);
}

void CudaComm::drop_shared(Lock& lock, bool kindly) {
  auto shared = std::exchange(shared_, nullptr);
  shared->forget(config_.comm.rank);
  if (ending_ == Ending::kNone) {  // another generation, in which nothing is under way: those that come then are others
    end_pairs(Ending::kAbort);
    former_pairs_ = all_pairs();
    pairs_.clear();
    std::erase_if(former_pairs_, [](const auto& pair) { return pair->over(0); });
  }
  lock.unlock();
  while (!shared->leave(config_.comm.rank, kindly, kFinalizeMs))
    DP_LOG(kWarn, kDevice, 0, "communicator %08x: an operation of rank %u still runs after %u ms",
           static_cast<unsigned>(config_.comm.key.low), config_.comm.rank, kFinalizeMs);
  shared.reset();  // perhaps the last: no lock is held
  lock.lock();
}

// What one member of a shared one does wrong is known to all; and of a pair's failure its member hears.
void CudaComm::take_failure() {
  if (!shared_ || state_ != CommState::kOk) return;
  if (const Status s = shared_->failure(); !s.ok()) return fail(state_of(s.code()), s.text());
  for (const auto& [peer, pair] : pairs_) {
    std::string why;
    if (const CommState state = pair->state(&why); state != CommState::kOk) return fail(state, std::move(why));
  }
}

// kindly: what is under way ends first (nccl.h, ncclCommFinalize).
void CudaComm::drop(Lock& lock, NcclComm comm, bool kindly) {
  lock.unlock();
  const auto until = Clock::now() + milliseconds(kFinalizeMs);
  const auto settled = [&] {
    int result = kNcclInProgress;
    for (; result == kNcclInProgress && Clock::now() < until; std::this_thread::sleep_for(milliseconds(kJoinMs)))
      if (const int asked = nccl_->get_async_error(comm, &result); asked != kNcclSuccess) result = asked;
    return result;
  };
  int result = kindly ? settled() : kNcclSystemError;
  if (result == kNcclSuccess) result = nccl_->finalize(comm);
  if (result == kNcclSuccess || result == kNcclInProgress) result = settled();
  (void)(result == kNcclSuccess ? nccl_->destroy(comm) : nccl_->abort(comm));
  lock.lock();
}

}  // namespace devproxy::hal::cuda
