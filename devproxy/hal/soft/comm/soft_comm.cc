#include "devproxy/hal/soft/comm/soft_comm.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/hal/soft/comm/reduce.h"

namespace devproxy::hal::soft {

namespace {

constexpr uint64_t kLookUs = 50'000;        // how often a waiter looks whether the others are there
constexpr uint64_t kManyBoardsUs = 200;     // a group over several boards sleeps at one of them at most so long
constexpr uint64_t kSmallBytes = 64 << 10;  // of all contributions: one member does it for all
constexpr int kSpins = 200;

const char* const kNames[kCommKinds] = {"AllReduce", "Broadcast", "Reduce",  "AllGather", "ReduceScatter",
                                        "AllToAll",  "Gather",    "Scatter", "Send",      "Recv"};

std::string text_of(const CommOp& op) {
  return std::string(op.kind < kCommKinds ? kNames[op.kind] : "?") + "(count " + std::to_string(op.count) + ", type " +
         std::to_string(op.type) + ", op " + std::to_string(op.reduction) + ", root " + std::to_string(op.peer) + ")";
}

std::string text_of_pair(uint32_t from, uint64_t sent, uint32_t to, uint64_t wanted) {
  return "rank " + std::to_string(from) + " sends " + std::to_string(sent) + " bytes to rank " + std::to_string(to) +
         ", which receives " + std::to_string(wanted);
}

bool is_pair(const CommOp& op) { return op.kind_of() == CommKind::kSend || op.kind_of() == CommKind::kRecv; }

// Do two members mean the same?
bool match(const CommOp& a, const CommOp& b) {
  return a.kind == b.kind && a.type == b.type && a.reduction == b.reduction && a.peer == b.peer && a.count == b.count;
}

// What rank `rank` of n does of `count` elements: begins at this one. Whole lines, so that no two write into one.
uint64_t share_begin(uint64_t count, uint32_t rank, uint32_t n) {
  if (rank >= n) return count;
  const auto begin = static_cast<uint64_t>(static_cast<unsigned __int128>(count) * rank / n);
  return begin & ~uint64_t{63};
}

}  // namespace

// -- a member -------------------------------------------------------------------------------------------------------

void SoftComm::abort() {
  aborted_.store(true, std::memory_order_release);
  leave();
}

void SoftComm::leave() {
  if (!joined_.exchange(false)) return;
  if (board_->head().left.fetch_add(1, std::memory_order_acq_rel) + 1 == config_.ranks) board_->remove();
  board_->ring();
}

CommState SoftComm::state(std::string* why) const {
  std::lock_guard lock(mu_);
  *why = why_;
  return state_;
}

void SoftComm::fail(CommState state, std::string why) {
  std::lock_guard lock(mu_);
  if (state_ != CommState::kOk) return;  // the first cause
  state_ = state;
  why_ = "rank " + std::to_string(config_.rank) + " of " + std::to_string(config_.ranks) + ": " + std::move(why);
}

bool SoftComm::join() {
  if (board_) return true;
  auto board = Board::open(owner_.job_folder(), config_.key, config_.ranks);
  if (!board.ok()) {
    fail(board.status().code() == kInvalidValue ? CommState::kInvalidUsage : CommState::kSystemError,
         board.status().text());
    return false;
  }
  BoardCell& cell = (*board)->cell(config_.rank);
  const SpacePlace place = owner_.place();
  const uint64_t before = cell.incarnation.load(std::memory_order_acquire);
  if (before == incarnation_) {
    fail(CommState::kInvalidUsage, "this process is this rank already");
    return false;
  }
  if (before != 0 && (cell.gpu != place.gpu || cell.slot != place.slot)) {
    fail(CommState::kInvalidUsage, "two processes say that they are this rank: on GPU " + std::to_string(cell.gpu) +
                                       " and on GPU " + std::to_string(place.gpu));
    return false;
  }
  cell.gpu = place.gpu;
  cell.slot = place.slot;
  cell.device_base = space_.device_base;
  cell.device_bytes = space_.device_bytes;
  cell.incarnation.store(incarnation_, std::memory_order_release);
  board_ = std::move(*board);
  joined_.store(true);
  if (before == 0) board_->head().joined.fetch_add(1, std::memory_order_acq_rel);
  board_->ring();
  if (aborted()) leave();  // an abort that came before saw nothing to leave
  return true;
}

const PeerMemory* SoftComm::peer(uint32_t rank) {
  BoardCell& cell = board_->cell(rank);
  const uint64_t incarnation = cell.incarnation.load(std::memory_order_acquire);
  if (peers_[rank] && peers_[rank]->incarnation() == incarnation) return peers_[rank].get();
  auto opened = PeerMemory::open(owner_, {cell.gpu, cell.slot}, incarnation, cell.device_base, cell.device_bytes);
  if (!opened.ok()) {
    const bool is_gone = opened.status().code() == kNotFound;
    uint32_t first = rank + 1;
    if (uint32_t before = 0; is_gone && !board_->head().gone.compare_exchange_strong(before, first)) first = before;
    const uint32_t cause = first - 1 < config_.ranks ? first - 1 : rank;
    fail(is_gone ? CommState::kRemoteError : CommState::kSystemError,
         "rank " + std::to_string(cause) + " on GPU " + std::to_string(board_->cell(cause).gpu) +
             " cannot be reached: " + (cause == rank ? opened.status().text() : "another rank has found it gone"));
    return nullptr;
  }
  peers_[rank] = *opened;
  return peers_[rank].get();
}

uint8_t* SoftComm::reach(uint32_t rank, uint64_t addr, uint64_t bytes) {
  if (rank == config_.rank) return reinterpret_cast<uint8_t*>(addr);
  const PeerMemory* const memory = peer(rank);
  if (!memory) return nullptr;
  uint8_t* const at = memory->at(addr, bytes);
  if (!at) fail(CommState::kInvalidUsage, "rank " + std::to_string(rank) + " names memory that is not its own");
  return at;
}

bool SoftComm::look_at(uint32_t rank) {
  if (rank == config_.rank || board_->cell(rank).incarnation.load(std::memory_order_acquire) == 0) return true;
  if (peers_[rank] && peers_[rank]->alive()) return true;
  peers_[rank].reset();  // moved to another server, or gone
  return peer(rank) != nullptr;
}

// -- groups ---------------------------------------------------------------------------------------------------------

// The operations of one communicator in a group: first those of all members in order, then sends and receives, of each
// pair in order and of all pairs at once.
class CommGroup::Lane {
 public:
  Lane(CommRef ref, bool init)
      : ref_(std::move(ref)), comm_(static_cast<SoftComm&>(*ref_)), init_(init), turn_(comm_.take_turn()) {}

  void add(const CommOp& op) {
    if (!is_pair(op))
      all_.push_back(op);
    else
      pairs_[{op.kind_of() == CommKind::kSend, static_cast<uint32_t>(op.peer)}].push_back({op, false});
  }
  SoftComm& comm() { return comm_; }
  bool has_board() const { return has_board_; }

  // As far as it goes without waiting. True when it has come nearer to its end.
  bool go_on();
  bool over() const { return place_ == Place::kOver; }
  // Whatever it waits for: is that still there? Else it waits for the abort.
  void look();
  // The space ends: nobody waits for a turn any more.
  void give_up() { place_ = Place::kOver; }

 private:
  enum class Place : uint8_t { kTurn, kInit, kAll, kPosted, kShared, kPairs, kStuck, kOver };
  struct PairOp {
    CommOp op;
    bool posted;
  };

  void end() {
    place_ = Place::kOver;
    comm_.end_turn();
  }
  // It cannot go on: an operation waits for the abort. A making that has failed ends, and its caller reads the state.
  void stuck() {
    if (init_) return end();
    place_ = Place::kStuck;
  }
  bool post();
  bool try_start();
  bool share(uint32_t who, uint32_t n, bool all);
  bool step_pairs();
  bool step_send(uint32_t to, std::deque<PairOp>& ops);
  bool step_recv(uint32_t from, std::deque<PairOp>& ops);

  const CommRef ref_;
  SoftComm& comm_;
  const bool init_;
  const uint64_t turn_;
  Place place_ = Place::kTurn;
  bool has_board_ = false;  // the communicator's own pointer is another thread's until it is our turn
  std::deque<CommOp> all_;
  std::map<std::pair<bool, uint32_t>, std::deque<PairOp>> pairs_;  // by (send, other rank)
  uint64_t target_ = 0;                                            // of both counts, for the operation under way
  bool last_ = false;                                              // this member posted last
};

bool CommGroup::Lane::go_on() {
  if (place_ == Place::kOver) return false;
  if (place_ == Place::kTurn) {
    if (!comm_.is_turn(turn_)) return false;
    if (comm_.aborted()) return end(), true;
    if (!comm_.join()) return stuck(), true;
    has_board_ = true;
    place_ = init_ ? Place::kInit : Place::kAll;
  }
  if (comm_.aborted()) return end(), true;
  if (place_ == Place::kStuck) return false;
  BoardHead& head = comm_.board().head();
  switch (place_) {
    case Place::kInit:
      if (!comm_.all_joined()) return false;
      end();
      return true;
    case Place::kAll:
      if (!all_.empty()) return post();
      place_ = Place::kPairs;
      return true;
    case Place::kPosted:
      // Small ones are over when the last to come has done them.
      if (head.finished.load(std::memory_order_acquire) >= target_) break;
      return head.posted.load(std::memory_order_acquire) >= target_ && try_start();
    case Place::kShared:
      if (head.finished.load(std::memory_order_acquire) >= target_) break;
      return false;
    case Place::kPairs: return step_pairs();
    case Place::kTurn:
    case Place::kStuck:
    case Place::kOver: return false;
  }
  all_.pop_front();
  place_ = Place::kAll;
  return true;
}

bool CommGroup::Lane::post() {
  const uint32_t n = comm_.config().ranks;
  BoardHead& head = comm_.board().head();
  comm_.board().cell(comm_.config().rank).op = all_.front();
  const uint64_t before = head.posted.fetch_add(1, std::memory_order_acq_rel);
  target_ = (before / n + 1) * n;
  last_ = before + 1 == target_;
  place_ = Place::kPosted;
  if (last_) try_start();
  return true;
}

// All have posted.
bool CommGroup::Lane::try_start() {
  const uint32_t n = comm_.config().ranks, me = comm_.config().rank;
  const CommOp& op = all_.front();
  const uint64_t bytes = op.count * comm_type_bytes(op.type_of()) * n;
  const bool one_does_all = bytes <= kSmallBytes;
  // Then the others' descriptions are only theirs to read if the last to come has found them wrong: else it may be done
  // already, and they have posted their next.
  if (one_does_all && !last_ && comm_.board().head().wrong.load(std::memory_order_acquire) != target_) return false;
  for (uint32_t r = 0; r < n; r++) {
    const CommOp other = comm_.board().cell(r).op;
    if (match(op, other)) continue;
    comm_.fail(CommState::kInvalidUsage, "the ranks do different things: rank " + std::to_string(me) + " " +
                                             text_of(op) + ", rank " + std::to_string(r) + " " + text_of(other));
    comm_.board().head().wrong.store(target_, std::memory_order_release);
    comm_.board().ring();
    return stuck(), true;
  }
  if (one_does_all) {
    if (!share(0, n, true)) return stuck(), true;
    comm_.board().head().finished.store(target_, std::memory_order_release);
    comm_.board().ring();
    place_ = Place::kShared;
    return true;
  }
  if (last_) comm_.board().ring();
  if (!share(me, n, false)) return stuck(), true;
  place_ = Place::kShared;
  if (comm_.board().head().finished.fetch_add(1, std::memory_order_acq_rel) + 1 == target_) comm_.board().ring();
  return true;
}

// What rank `who` does of the operation, or all of it. Every element of every receive buffer is written by exactly one
// rank, and no rank reads what another writes: that holds in place too, as nccl.h defines it for each function.
bool CommGroup::Lane::share(uint32_t who, uint32_t n, bool all) {
  const CommOp& op = all_.front();
  const uint32_t element = comm_type_bytes(op.type_of());
  const auto root = static_cast<uint32_t>(op.peer);
  auto of = [&](uint32_t r) { return comm_.board().cell(r).op; };
  const uint64_t part = op.count * element;
  if (all && op.kind_of() != CommKind::kAllReduce && op.kind_of() != CommKind::kReduce) {
    for (uint32_t r = 0; r < n; r++)
      if (!share(r, n, false)) return false;
    return true;
  }
  auto copy = [&](uint32_t to, uint64_t to_offset, uint32_t from, uint64_t from_offset) {
    uint8_t* const dst = comm_.reach(to, of(to).recv + to_offset, part);
    const uint8_t* const src = dst ? comm_.reach(from, of(from).send + from_offset, part) : nullptr;
    if (!src) return false;
    if (dst != src) std::memmove(dst, src, part);
    return true;
  };
  switch (op.kind_of()) {
    case CommKind::kBroadcast: return copy(who, 0, root, 0);
    case CommKind::kAllGather:
      for (uint32_t r = 0; r < n; r++)
        if (!copy(who, r * part, r, 0)) return false;
      return true;
    case CommKind::kAllToAll:
      for (uint32_t r = 0; r < n; r++)
        if (!copy(who, r * part, r, who * part)) return false;
      return true;
    case CommKind::kGather: return copy(root, who * part, who, 0);
    case CommKind::kScatter: return copy(who, 0, root, who * part);
    case CommKind::kAllReduce:
    case CommKind::kReduce:
    case CommKind::kReduceScatter: break;
    case CommKind::kSend:
    case CommKind::kRecv: return false;
  }
  const bool scatter = op.kind_of() == CommKind::kReduceScatter;
  Reduction work;
  work.type = op.type_of();
  work.op = op.reduction_of();
  std::deque<uint64_t> immediate;  // stay where they are
  for (uint32_t r = 0; r < n; r++) {
    const CommOp other = of(r);
    const uint8_t* const in = comm_.reach(r, other.send + (scatter ? who * part : 0), part);
    if (!in) return false;
    work.inputs.push_back(in);
    if (work.op == CommReduction::kPreMulSum) {
      immediate.push_back(other.scalar);
      const uint8_t* const scalar = other.scalar_on_device ? comm_.reach(r, other.scalar, element)
                                                           : reinterpret_cast<const uint8_t*>(&immediate.back());
      if (!scalar) return false;
      work.scalars.push_back(scalar);
    }
    const bool receives = scatter ? r == who : op.kind_of() == CommKind::kAllReduce || r == root;
    if (!receives) continue;
    uint8_t* const out = comm_.reach(r, other.recv, part);
    if (!out) return false;
    work.outputs.push_back(out);
  }
  const bool whole = scatter || all;
  const uint64_t begin = whole ? 0 : share_begin(op.count, who, n),
                 end = whole ? op.count : share_begin(op.count, who + 1, n);
  if (begin < end) reduce(work, begin, end - begin);
  return true;
}

bool CommGroup::Lane::step_pairs() {
  bool moved = false, left = false;
  for (auto& [key, ops] : pairs_) {
    if (ops.empty()) continue;
    const auto& [sends, other] = key;
    moved |= sends ? step_send(other, ops) : step_recv(other, ops);
    if (place_ == Place::kStuck) return true;
    left |= !ops.empty();
  }
  if (left) return moved;
  end();
  return true;
}

bool CommGroup::Lane::step_send(uint32_t to, std::deque<PairOp>& ops) {
  BoardPair& pair = comm_.board().pair(comm_.config().rank, to);
  PairOp& first = ops.front();
  if (!first.posted) {
    pair.addr = first.op.send;
    pair.bytes = first.op.count * comm_type_bytes(first.op.type_of());
    pair.posted.fetch_add(1, std::memory_order_release);
    comm_.board().ring();
    return first.posted = true;
  }
  if (pair.wrong.load(std::memory_order_acquire) == pair.posted.load(std::memory_order_relaxed)) {
    comm_.fail(CommState::kInvalidUsage,
               text_of_pair(comm_.config().rank, pair.bytes, to, pair.wanted.load(std::memory_order_relaxed)));
    return stuck(), true;
  }
  if (pair.finished.load(std::memory_order_acquire) != pair.posted.load(std::memory_order_relaxed)) return false;
  ops.pop_front();
  return true;
}

bool CommGroup::Lane::step_recv(uint32_t from, std::deque<PairOp>& ops) {
  BoardPair& pair = comm_.board().pair(from, comm_.config().rank);
  if (pair.posted.load(std::memory_order_acquire) == pair.finished.load(std::memory_order_relaxed)) return false;
  const CommOp& op = ops.front().op;
  const uint64_t bytes = op.count * comm_type_bytes(op.type_of()), there = pair.bytes;
  if (there != bytes) {
    comm_.fail(CommState::kInvalidUsage, text_of_pair(from, there, comm_.config().rank, bytes));
    pair.wanted.store(bytes, std::memory_order_relaxed);
    pair.wrong.store(pair.posted.load(std::memory_order_relaxed), std::memory_order_release);
    comm_.board().ring();
    return stuck(), true;
  }
  const uint8_t* const src = comm_.reach(from, pair.addr, bytes);
  if (!src) return stuck(), true;
  std::memmove(reinterpret_cast<void*>(op.recv), src, bytes);
  pair.finished.fetch_add(1, std::memory_order_release);
  comm_.board().ring();
  ops.pop_front();
  return true;
}

void CommGroup::Lane::look() {
  if (place_ == Place::kTurn || place_ == Place::kStuck || place_ == Place::kOver) return;
  bool well = true;
  if (place_ == Place::kPairs) {
    for (const auto& [key, ops] : pairs_)
      if (!ops.empty()) well = well && comm_.look_at(key.second);
  } else {
    for (uint32_t r = 0; r < comm_.config().ranks; r++) well = well && comm_.look_at(r);
  }
  // The count may have been completed by the one that has gone.
  if (!well && !go_on()) stuck();
}

CommGroup::CommGroup(std::vector<CommCall> calls, bool init) {
  std::map<const Comm*, Lane*> by_comm;
  for (CommCall& call : calls) {
    Lane*& lane = by_comm[call.comm.get()];
    if (!lane) {
      lanes_.push_back(std::make_unique<Lane>(call.comm, init));
      lane = lanes_.back().get();
    }
    if (!init) lane->add(call.op);
  }
}

CommGroup::~CommGroup() = default;

void CommGroup::run(const std::atomic<bool>& ended) {
  uint64_t looked = 0;
  for (int idle = 0;;) {
    Lane* waits = nullptr;
    bool moved = false;
    uint32_t seen = 0;
    size_t left = 0;
    for (const auto& lane : lanes_) {
      if (lane->over()) continue;
      if (lane->has_board()) seen = lane->comm().board().head().bell.load(std::memory_order_seq_cst);
      while (lane->go_on()) moved = true;
      if (lane->over()) continue;
      left++;
      waits = lane.get();
    }
    if (left == 0) return;
    if (ended.load(std::memory_order_acquire)) {
      for (const auto& lane : lanes_) lane->give_up();
      return;
    }
    if (moved || idle++ < kSpins) {
      if (moved) idle = 0;
      __builtin_ia32_pause();
      continue;
    }
    if (const uint64_t now = now_us(); now - looked > kLookUs) {
      if (looked)
        for (const auto& lane : lanes_) lane->look();
      looked = now;
    }
    if (left > 1 || !waits->has_board())
      usleep(kManyBoardsUs);
    else
      waits->comm().board().sleep(seen, kLookUs);
  }
}

}  // namespace devproxy::hal::soft
