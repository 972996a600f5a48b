// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/cuda_comm.h"

#include <chrono>
#include <thread>

#include "devproxy/csrc/base/log.h"

namespace devproxy::hal::cuda {

namespace {

using std::chrono::milliseconds;

// The same at both ends, and nobody else's: the communicator's own key is random, and this mixes all of its bits.
CommKey pair_key(const CommKey& key, uint64_t set, uint32_t low, uint32_t high) {
  const auto mix = [](uint64_t x) {  // SplitMix64's finalizer
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  };
  const uint64_t which = mix(set ^ mix(uint64_t{low} << 32 | high));
  return {mix(key.low ^ which), mix(key.high + which)};
}

}  // namespace

// nccl.h: a bad argument is the caller's fault as bad usage is; what the device or NCCL itself did wrong is the system's.
CommState CudaComm::state_of(int result) {
  switch (result) {
    case kNcclInvalidArgument:
    case kNcclInvalidUsage: return CommState::kInvalidUsage;
    case kNcclRemoteError: return CommState::kRemoteError;
    default: return CommState::kSystemError;
  }
}

std::shared_ptr<CudaComm> CudaComm::make(Config config, std::shared_ptr<Context> context,
                                         std::function<void()> changed) {
  auto comm = std::make_shared<CudaComm>(std::move(config), std::move(context), std::move(changed));
  std::thread([comm] { comm->mind(); }).detach();
  return comm;
}

CudaComm::CudaComm(Config config, std::shared_ptr<Context> context, std::function<void()> changed)
    : config_(std::move(config)),
      context_(std::move(context)),
      changed_(std::move(changed)),
      gone_since_(config_.comm.ranks) {
  const CommConfig& c = config_.comm;
  auto board = CommBoard::open(config_.folder, c.key, c.ranks);
  if (!board.ok()) {
    fail(board.status().code() == kInvalidValue ? CommState::kInvalidUsage : CommState::kSystemError,
         board.status().text());
    return;
  }
  auto taken = (*board)->take_row(c.rank, config_.incarnation, config_.seat);
  if (!taken.ok()) {
    fail(CommState::kInvalidUsage, taken.status().text());
    return;
  }
  took_over_ = predecessor_told_ = taken->from_another;
  version_ = taken->version;
  board_ = std::move(*board);
  // Of a fresh member there is nothing that the others could have missed.
  if (!took_over_) confirmed_resume_ = config_.standing->resumes;
}

CudaComm::~CudaComm() {
  if (stream_) (void)context_->enter().cuStreamDestroy(stream_);  // cuda.h: released when its work is done
}

// -- any thread -----------------------------------------------------------------------------------------------------

CommState CudaComm::state(std::string* why) const {
  std::lock_guard lock(mu_);
  if (state_ == CommState::kOk && shared_)
    if (const Status s = shared_->failure(); !s.ok()) {  // before its minder has heard of it
      *why = s.text();
      return state_of(s.code());
    }
  *why = why_;
  return state_;
}

void CudaComm::forget() {
  std::lock_guard lock(mu_);
  changed_ = nullptr;
  if (shared_) shared_->forget(config_.comm.rank);
  for (const auto& pair : all_pairs()) pair->forget();
}

bool CudaComm::over(uint32_t wait_ms) const {
  const auto until = Clock::now() + milliseconds(wait_ms);
  Lock lock(mu_);
  if (!cv_.wait_until(lock, until, [&] { return phase_ == Phase::kOver || idle_end_; })) return false;
  const auto pairs = all_pairs();
  lock.unlock();
  return std::all_of(pairs.begin(), pairs.end(), [&](const auto& pair) {
    const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now()).count();
    return pair->over(static_cast<uint32_t>(std::max<int64_t>(left, 0)));
  });
}

void CudaComm::end(Ending ending) {
  std::lock_guard lock(mu_);
  if (ending_ == Ending::kNone || ending_ == Ending::kDestroy) ending_ = ending;
  if (ending != Ending::kDestroy) end_pairs(ending);
  cv_.notify_all();
  if (changed_) changed_();
}

void CudaComm::end_pairs(Ending ending) {
  for (const auto& [peer, pair] : pairs_) pair->end(ending);
}

std::vector<std::shared_ptr<CudaComm>> CudaComm::all_pairs() const {
  auto all = former_pairs_;
  for (const auto& [peer, pair] : pairs_) all.push_back(pair);
  return all;
}

// -- under the space's lock -----------------------------------------------------------------------------------------

CudaComm::Ready CudaComm::look(uint64_t generation) {
  std::lock_guard lock(mu_);
  return look_locked(generation);
}

CudaComm::Ready CudaComm::look_locked(uint64_t generation) {
  if (phase_ == Phase::kOver || (aborted() && generation == 0)) return Ready::kGone;
  if (aborted()) return Ready::kNotYet;
  if (state_ != CommState::kOk) return Ready::kNever;
  if (phase_ != Phase::kReady) return Ready::kNotYet;
  if (shared_) {
    take_failure();
  } else {
    int result = kNcclSuccess;
    if (int asked = nccl_->get_async_error(comm_, &result); asked != kNcclSuccess) result = asked;
    if (result == kNcclInProgress) return Ready::kNotYet;
    if (result != kNcclSuccess) fail(state_of(result), nccl_->status(result, "NCCL").text());
  }
  if (generation != 0 && generation != generation_)
    fail(CommState::kSystemError, "its communicator was made anew under an operation that had begun");
  return state_ == CommState::kOk ? Ready::kYes : Ready::kNever;
}

CudaComm::Ready CudaComm::use() {
  std::lock_guard lock(mu_);
  const Ready ready = look_locked(0);
  if (ready != Ready::kYes) return ready;
  if (stale() || must_ask()) {
    cv_.notify_all();
    return Ready::kNotYet;
  }
  users_++;
  return Ready::kYes;
}

void CudaComm::unuse() {
  Lock lock(mu_);
  if (--users_ == 0) cv_.notify_all();
}

StatusOr<std::shared_ptr<CudaComm>> CudaComm::pair(uint32_t peer) {
  std::lock_guard lock(mu_);
  if (const auto known = pairs_.find(peer); known != pairs_.end()) return known->second;
  const uint32_t own = config_.comm.rank;
  Config config = config_;
  config.comm = {pair_key(config_.comm.key, set_, std::min(own, peer), std::max(own, peer)), 2, own > peer};
  config.shared = config.tree_order = false;
  config.names = {std::min(own, peer), std::max(own, peer)};
  config.only_tree = board_->row(peer).tree.load();
  if (config.only_tree == config.seat.place.tree) config.links = nullptr;
  return pairs_.emplace(peer, make(std::move(config), context_, changed_)).first->second;
}

StatusOr<CUstream> CudaComm::own_stream() {
  const Driver& cu = context_->enter();
  if (!stream_)
    if (Status s = cu.status(cu.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0),
                             cu.cuStreamCreateWithPriority, "making the stream of a communicator");
        !s.ok())
      return s;
  return stream_;
}

StatusOr<int> CudaComm::make_reduction(const CommOp& op) {
  int made = 0;
  uint64_t scalar = op.scalar;
  void* const at = op.scalar_on_device ? reinterpret_cast<void*>(op.scalar) : static_cast<void*>(&scalar);
  // nccl.h, ncclScalarResidence_t: 0 on the device, 1 read before the call returns.
  const int result = nccl_->make_premulsum(&made, at, op.type, op.scalar_on_device ? 0 : 1, comm_);
  if (result != kNcclSuccess) return nccl_->status(result, "ncclRedOpCreatePreMulSum");
  return made;
}

void CudaComm::drop_reduction(int reduction) { (void)nccl_->destroy_op(reduction, comm_); }

int CudaComm::submit(const CommOp& op, int reduction, NcclStream stream) {
  const Nccl& n = *nccl_;
  const uint32_t ranks = config_.comm.ranks, rank = config_.comm.rank, root = static_cast<uint32_t>(op.peer);
  const uint64_t part = op.count * comm_type_bytes(op.type_of());
  const auto from = [&](uint64_t skip) { return reinterpret_cast<const void*>(op.send + skip); };
  const auto to = [&](uint64_t skip) { return reinterpret_cast<void*>(op.recv + skip); };
  const int how = op.reduction_of() == CommReduction::kPreMulSum ? reduction : op.reduction;
  // Those of which NCCL has no function before 2.28 are what they were before: sends and receives of one group.
  int result = kNcclSuccess;
  const auto also = [&](int other) {
    if (result == kNcclSuccess || result == kNcclInProgress) result = other;
  };
  switch (op.kind_of()) {
    case CommKind::kAllReduce: return n.all_reduce(from(0), to(0), op.count, op.type, how, comm_, stream);
    case CommKind::kBroadcast: return n.broadcast(from(0), to(0), op.count, op.type, op.peer, comm_, stream);
    case CommKind::kReduce: return n.reduce(from(0), to(0), op.count, op.type, how, op.peer, comm_, stream);
    case CommKind::kAllGather: return n.all_gather(from(0), to(0), op.count, op.type, comm_, stream);
    case CommKind::kReduceScatter: return n.reduce_scatter(from(0), to(0), op.count, op.type, how, comm_, stream);
    case CommKind::kSend: return n.send(from(0), op.count, op.type, op.peer, comm_, stream);
    case CommKind::kRecv: return n.recv(to(0), op.count, op.type, op.peer, comm_, stream);
    case CommKind::kAllToAll:
      for (uint32_t r = 0; part != 0 && r < ranks; r++) {
        also(n.send(from(r * part), op.count, op.type, static_cast<int>(r), comm_, stream));
        also(n.recv(to(r * part), op.count, op.type, static_cast<int>(r), comm_, stream));
      }
      return result;
    case CommKind::kGather:
      if (part != 0) also(n.send(from(0), op.count, op.type, op.peer, comm_, stream));
      for (uint32_t r = 0; part != 0 && rank == root && r < ranks; r++)
        also(n.recv(to(r * part), op.count, op.type, static_cast<int>(r), comm_, stream));
      return result;
    case CommKind::kScatter:
      for (uint32_t r = 0; part != 0 && rank == root && r < ranks; r++)
        also(n.send(from(r * part), op.count, op.type, static_cast<int>(r), comm_, stream));
      if (part != 0) also(n.recv(to(0), op.count, op.type, op.peer, comm_, stream));
      return result;
  }
  return kNcclInvalidUsage;
}

void CudaComm::failed(const Status& why) {
  Lock lock(mu_);
  fail(state_of(why.code()), why.text());
}

// mu_ held, or nobody knows this yet. The first cause stays.
void CudaComm::fail(CommState state, std::string why) {
  if (state_ != CommState::kOk) return;
  state_ = state;
  if (config_.names.empty())
    why = "rank " + std::to_string(config_.comm.rank) + " of " + std::to_string(config_.comm.ranks) + ": " + why;
  why_ = std::move(why);
  DP_LOG(kWarn, kDevice, 0, "communicator %08x: %s", static_cast<unsigned>(config_.comm.key.low), why_.c_str());
}

}  // namespace devproxy::hal::cuda
