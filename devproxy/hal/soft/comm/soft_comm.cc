// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/comm/soft_comm.h"
#include "devproxy/hal/comm_text.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/hal/comm_text.h"
#include "devproxy/hal/soft/comm/reduce.h"

namespace devproxy::hal::soft {

namespace {

constexpr uint64_t kLookUs = 50'000;        // how often a waiter looks whether the others are there
constexpr uint64_t kManyBoardsUs = 200;     // a group over several boards sleeps at one of them at most so long
constexpr uint64_t kSmallBytes = 64 << 10;  // of all contributions: one member does it for all
constexpr int kSpins = 200;
constexpr size_t kNamedRanks = 4;          // in a message
constexpr uint64_t kWithheldUs = 1'000;    // how often a lane looks whether it may go on
constexpr uint64_t kReachUs = 30'000'000;  // how long another tree may be out of reach
constexpr uint64_t kMoveUs = 60'000'000;   // how long a server of another tree may take to be replaced

// Where it is another one than the reader's.
std::string in_tree(uint32_t tree, uint32_t own) {
  return tree == own ? std::string() : " of tree " + std::to_string(tree);
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
  if (!joined_.exchange(false)) return leave_place();
  leave(*board_);
  if (!links_) return;
  const uint64_t told = told_trees_.load();
  for (uint32_t tree = 0; tree < kMaxTrees; tree++)
    if (told >> tree & 1) links_->post(tree, frame(FrameKind::kLeave));
}

void SoftComm::leave(Board& board) const {
  if (board.cell(config_.rank).left.exchange(1) == 0 &&
      board.head().left.fetch_add(1, std::memory_order_acq_rel) + 1 == config_.ranks)
    board.remove();
  board.ring();
}

// A server that was replaced took this member's place; this one has done nothing yet.
void SoftComm::leave_place() {
  auto board = Board::find(owner_.job_folder(), config_.key, config_.ranks);
  if (!board.ok()) return;
  const BoardCell& cell = (*board)->cell(config_.rank);
  const SpacePlace place = owner_.place();
  if (cell.incarnation.load(std::memory_order_acquire) != 0 && cell.gpu == place.gpu && cell.slot == place.slot &&
      cell.tree == place.tree)
    leave(**board);
  if (!links_) return;
  for (const uint32_t tree : links_->others().value_or(std::vector<uint32_t>{}))
    links_->post(tree, frame(FrameKind::kLeave));
}

CommState SoftComm::state(std::string* why) const {
  std::lock_guard lock(mu_);
  *why = state_ == CommState::kOk ? waits_ : why_;
  return state_;
}

void SoftComm::fail(CommState state, std::string why) {
  std::lock_guard lock(mu_);
  if (state_ != CommState::kOk) return;  // the first cause
  state_ = state;
  why_ = "rank " + std::to_string(config_.rank) + " of " + std::to_string(config_.ranks) + ": " + std::move(why);
}

void SoftComm::note_wait(std::string whom) {
  std::lock_guard lock(mu_);
  waits_ = std::move(whom);
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
  const SpacePlace place = place_ = owner_.place();
  const uint64_t before = cell.incarnation.load(std::memory_order_acquire);
  if (before == incarnation_) {
    fail(CommState::kInvalidUsage, "this process is this rank already");
    return false;
  }
  if (before != 0 && (cell.gpu != place.gpu || cell.slot != place.slot || cell.tree != place.tree)) {
    fail(CommState::kInvalidUsage, "two processes say that they are this rank: on GPU " + std::to_string(cell.gpu) +
                                       in_tree(cell.tree, place.tree) + " and on GPU " + std::to_string(place.gpu) +
                                       in_tree(place.tree, cell.tree));
    return false;
  }
  cell.gpu = place.gpu;
  cell.slot = place.slot;
  cell.tree = place.tree;
  cell.device_base = space_.device_base;
  cell.device_bytes = space_.device_bytes;
  cell.incarnation.store(incarnation_, std::memory_order_release);
  board_ = std::move(*board);
  taken_over_ = before != 0;
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
  auto opened =
      is_local(rank)
          ? PeerMemory::open(owner_, {cell.gpu, cell.slot, cell.tree}, incarnation, cell.device_base, cell.device_bytes)
          : PeerMemory::open_shadow(owner_.job_folder(), incarnation, cell.device_base, cell.device_bytes);
  if (!opened.ok()) {
    if (cell.incarnation.load(std::memory_order_acquire) != incarnation) return peer(rank);  // it has just moved
    if (opened.status().code() == kNotFound)
      report_gone(rank, opened.status().text());
    else
      fail(CommState::kSystemError, name_of(rank) + " cannot be reached: " + opened.status().text());
    return nullptr;
  }
  peers_[rank] = *opened;
  return peers_[rank].get();
}

std::string SoftComm::name_of(uint32_t rank) const {
  const BoardCell& cell = board_->cell(rank);
  return "rank " + std::to_string(rank) + " on GPU " + std::to_string(cell.gpu) + in_tree(cell.tree, place_.tree);
}

void SoftComm::report_gone(uint32_t rank, const std::string& why) {
  uint32_t first = rank + 1;
  if (uint32_t before = 0; !board_->head().gone.compare_exchange_strong(before, first)) first = before;
  const uint32_t cause = first - 1 < config_.ranks ? first - 1 : rank;
  fail(CommState::kRemoteError,
       name_of(cause) + " cannot be reached: " + (cause == rank ? why : "another rank has found it gone"));
}

// This member's own addresses are looked at too: they stand on the board, to which a process of the job can write.
uint8_t* SoftComm::reach(uint32_t rank, uint64_t addr, uint64_t bytes) {
  uint8_t* at = nullptr;
  if (rank == config_.rank) {
    const uint64_t base = space_.device_base, all = space_.device_bytes;
    const bool own = bytes == 0 || (addr >= base && bytes <= all && addr - base <= all - bytes);
    if (own) at = reinterpret_cast<uint8_t*>(addr);
  } else {
    const PeerMemory* const memory = peer(rank);
    if (!memory) return nullptr;
    at = memory->at(addr, bytes);
  }
  if (!at) fail(CommState::kInvalidUsage, "rank " + std::to_string(rank) + " names memory that is not its own");
  return at;
}

bool SoftComm::look_at_head() {
  BoardHead& head = board_->head();
  if (const uint32_t twice = head.twice.load(); twice != 0) {
    fail(CommState::kInvalidUsage, "processes of two trees say that they are rank " + std::to_string(twice - 1));
    return false;
  }
  if (const uint32_t ranks = head.other_ranks.load(); ranks != 0) {
    fail(CommState::kInvalidUsage, "the members do not agree how many they are: " + std::to_string(config_.ranks) +
                                       " and, in another tree, " + std::to_string(ranks));
    return false;
  }
  return true;
}

bool SoftComm::look_at(uint32_t rank, uint32_t operation) {
  if (rank == config_.rank || !has_joined(rank)) return true;
  if (!is_local(rank)) {
    BoardCell& cell = board_->cell(rank);
    const CellState state = cell.state.load();
    if (state != CellState::kLost && !(state == CellState::kMoving && now_us() > cell.moved_us.load() + kMoveUs))
      return true;
    if (operation != 0 && static_cast<int32_t>(cell.finished.load(std::memory_order_acquire) - operation) >= 0)
      return true;
    report_gone(rank, state == CellState::kLost ? "its process or its server is gone"
                                                : "its server has ended, and none has taken its place");
    return false;
  }
  if (peers_[rank] && peers_[rank]->alive()) return true;
  peers_[rank].reset();  // moved to another server, or gone
  return peer(rank) != nullptr;
}

// -- members in other trees -----------------------------------------------------------------------------------------

Frame SoftComm::frame(FrameKind kind) const {
  Frame frame;
  frame.kind = kind;
  frame.key = config_.key;
  frame.ranks = config_.ranks;
  frame.rank = config_.rank;
  frame.slot = place_.slot;
  frame.incarnation = incarnation_;
  frame.device_base = space_.device_base;
  frame.device_bytes = space_.device_bytes;
  return frame;
}

// Nobody knows where the other members are, so every tree is told, and again whenever its connection is another one: a
// server that was replaced meanwhile may not have read it. Once all have come, a tree without members need not know; by
// whom it was told, it is told to forget it (find_members).
bool SoftComm::tell(const Links::Stop& stop) {
  untold_.reset();
  const auto trees = links_->others();
  if (!trees) return false;
  const bool complete = all_joined();
  for (const uint32_t tree : *trees) {
    uint64_t& told = told_[tree];
    if (told != 0 && (complete || told == links_->epoch(tree))) continue;
    bool has_member = false;
    for (uint32_t r = 0; complete && r < config_.ranks; r++) has_member |= board_->cell(r).tree == tree;
    if (complete && !has_member) continue;
    Frame join = frame(FrameKind::kJoin);
    told_trees_.fetch_or(uint64_t{1} << tree);
    if (aborted()) return false;  // either this is seen here, or the bit in leave()
    uint64_t epoch = 0;
    if (links_->send(tree, {{&join, sizeof join}}, stop, &epoch) == Links::Sent::kSent)
      told = epoch;
    else if (told == 0)
      untold_ = tree;
  }
  return !untold_;
}

std::string SoftComm::why_not_told() const { return links_->trouble(untold_.value_or(place_.tree)); }

void SoftComm::find_members() {
  Spread spread;
  for (uint32_t r = 0; r < config_.ranks; r++) {
    if (!is_local(r)) {
      spread.others[board_->cell(r).tree].push_back(r);
      continue;
    }
    if (r == config_.rank) spread.index = static_cast<uint32_t>(spread.locals.size());
    spread.locals.push_back(r);
  }
  for (const uint32_t tree : links_->others().value_or(std::vector<uint32_t>{})) {
    if (spread.others.contains(tree) || (told_[tree] == 0 && !taken_over_)) continue;
    links_->post(tree, frame(FrameKind::kElsewhere));
    told_trees_.fetch_and(~(uint64_t{1} << tree));
  }
  if (!spread.others.empty()) spread_ = std::move(spread);
  knows_members_ = true;
}

// -- groups ---------------------------------------------------------------------------------------------------------

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

bool CommGroup::Lane::go_on() {
  if (place_ == Place::kOver) return false;
  if (place_ == Place::kTurn) {
    if (!comm_.is_turn(turn_)) return false;
    if (comm_.aborted()) return end(), true;
    if (!enter()) return false;
    if (!comm_.join()) return stuck(), true;
    has_board_ = true;
    place_ = Place::kTell;
  }
  if (comm_.aborted()) return end(), true;
  if (!outbox_.empty()) return flush();
  if (place_ == Place::kStuck) return false;
  BoardHead& head = comm_.board().head();
  switch (place_) {
    case Place::kTell:
      if (comm_.links() && !comm_.tell(stop_)) return late(false);
      late_since_ = 0;
      leave();
      place_ = init_ ? Place::kInit : Place::kAll;
      return true;
    case Place::kInit:
      if (!have_all_joined()) return false;
      end();
      return true;
    case Place::kAll:
      if (all_.empty()) return place_ = Place::kPairs, true;
      // Whom this is to be told, that is where all the members are.
      if (comm_.links() && !comm_.knows_members() && !have_all_joined()) return false;
      if (!enter()) return false;
      place_ = Place::kSent;
      if (comm_.spread()) send_data();
      return true;
    case Place::kSent: return post();
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
  note_result();
  forget_wait();
  all_.pop_front();
  place_ = Place::kAll;
  return true;
}

void CommGroup::Lane::note_result() {
  const CommOp& op = all_.front();
  const CommConfig& config = comm_.config();
  const uint64_t part = op.count * comm_type_bytes(op.type_of());
  switch (op.kind_of()) {
    case CommKind::kBroadcast:
      if (config.rank == static_cast<uint32_t>(op.peer) && op.send != op.recv)
        results_.push_back({config.key, target_, op.send, part});
      [[fallthrough]];
    case CommKind::kAllReduce: return results_.push_back({config.key, target_, op.recv, part});
    case CommKind::kAllGather: return results_.push_back({config.key, target_, op.recv, part * config.ranks});
    default: return;
  }
}

bool CommGroup::Lane::post() {
  const uint32_t n = comm_.config().ranks;
  BoardHead& head = comm_.board().head();
  comm_.board().cell(comm_.config().rank).op = all_.front();
  const uint64_t before = head.posted.fetch_add(1, std::memory_order_acq_rel);
  leave();
  target_ = (before / n + 1) * n;
  comm_.board().cell(comm_.config().rank).submitted.store(number(), std::memory_order_relaxed);
  last_ = before + 1 == target_;
  place_ = Place::kPosted;
  if (last_) comm_.spread() ? comm_.board().ring() : static_cast<void>(try_start());
  return true;
}

// Before this member has posted here: what it sends, others of its tree may overwrite with results as soon as it has.
void CommGroup::Lane::send_data() {
  Frame frame = comm_.frame(FrameKind::kPost);
  frame.op = all_.front();
  for (const auto& [tree, ranks] : comm_.spread()->others) outbox_.push_back({tree, frame, needed_by(ranks)});
}

// What these ranks' tree needs of this rank's memory for their results.
std::vector<CommGroup::Lane::Span> CommGroup::Lane::needed_by(const std::vector<uint32_t>& ranks) const {
  const CommOp& op = all_.front();
  const uint32_t element = comm_type_bytes(op.type_of());
  const uint64_t part = op.count * element;
  const auto root = static_cast<uint32_t>(op.peer);
  const bool is_root = root == comm_.config().rank;
  const bool has_root = std::find(ranks.begin(), ranks.end(), root) != ranks.end();
  std::vector<Span> needed;
  bool reduces = false;
  if (part == 0) return needed;
  switch (op.kind_of()) {
    case CommKind::kAllReduce: reduces = true; [[fallthrough]];
    case CommKind::kAllGather: needed.push_back({op.send, part}); break;
    case CommKind::kBroadcast:
      if (is_root) needed.push_back({op.send, part});
      break;
    case CommKind::kReduce: reduces = has_root; [[fallthrough]];
    case CommKind::kGather:
      if (has_root) needed.push_back({op.send, part});
      break;
    case CommKind::kReduceScatter: reduces = true; [[fallthrough]];
    case CommKind::kAllToAll:
    case CommKind::kScatter:
      if (op.kind_of() == CommKind::kScatter && !is_root) break;
      for (const uint32_t rank : ranks) {
        const uint64_t addr = op.send + rank * part;
        if (!needed.empty() && needed.back().addr + needed.back().bytes == addr)
          needed.back().bytes += part;
        else
          needed.push_back({addr, part});
      }
      break;
    case CommKind::kSend:
    case CommKind::kRecv: break;
  }
  if (reduces && op.reduction_of() == CommReduction::kPreMulSum && op.scalar_on_device)
    needed.push_back({op.scalar, element});
  return needed;
}

bool CommGroup::Lane::flush() {
  bool moved = false;
  while (!outbox_.empty()) {
    Parcel& parcel = outbox_.front();
    Frame data = comm_.frame(FrameKind::kData);
    std::vector<iovec> parts;
    bool last = true;
    if (parcel.span < parcel.data.size()) {
      const Span& span = parcel.data[parcel.span];
      data.addr = span.addr + parcel.done;
      data.bytes = std::min(kChunkBytes, span.bytes - parcel.done);
      parts = {{&data, sizeof data}, {reinterpret_cast<void*>(data.addr), data.bytes}};
      last = parcel.span + 1 == parcel.data.size() && parcel.done + data.bytes == span.bytes;
    }
    if (last) parts.push_back({&parcel.frame, sizeof parcel.frame});
    uint64_t epoch = 0;
    switch (comm_.links()->send(parcel.tree, std::move(parts), stop_, &epoch)) {
      case Links::Sent::kNotYet: return late(moved);
      case Links::Sent::kStopped: return moved;
      case Links::Sent::kSent: break;
    }
    moved = true;
    late_since_ = 0;
    if (last) {
      outbox_.pop_front();
      if (outbox_.empty() && place_ != Place::kSent) leave();
      continue;
    }
    parcel.done += data.bytes;
    if (parcel.done == parcel.data[parcel.span].bytes) parcel.span++, parcel.done = 0;
  }
  return moved;
}

// Another tree is out of reach.
bool CommGroup::Lane::late(bool moved) {
  const uint64_t now = now_us();
  if (late_since_ == 0) late_since_ = now;
  if (now < late_since_ + kReachUs) return moved;
  comm_.fail(CommState::kRemoteError,
             outbox_.empty() ? comm_.why_not_told() : comm_.links()->trouble(outbox_.front().tree));
  outbox_.clear();
  return stuck(), true;
}

bool CommGroup::Lane::have_all_joined() {
  if (comm_.all_joined()) {
    if (comm_.links() && !comm_.knows_members()) comm_.find_members();
    return true;
  }
  if (comm_.links() && !comm_.hold().on()) comm_.tell(stop_);  // whom a connection has lost
  return false;
}

// All have posted.
bool CommGroup::Lane::try_start() {
  const uint32_t n = comm_.config().ranks, me = comm_.config().rank;
  const CommOp& op = all_.front();
  const uint64_t bytes = op.count * comm_type_bytes(op.type_of()) * n;
  const Spread* const spread = comm_.spread();
  const bool one_does_all = bytes <= kSmallBytes && !spread;
  // Then the others' descriptions are only theirs to read if the last to come has found them wrong: else it may be done
  // already, and they have posted their next.
  if (one_does_all && !last_ && comm_.board().head().wrong.load(std::memory_order_acquire) != target_) return false;
  for (uint32_t r = 0; r < n; r++) {
    const CommOp other = comm_.board().cell(r).op;
    if (match(op, other)) continue;
    comm_.fail(CommState::kInvalidUsage, text_of_ranks(me, op, r, other));
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
  if (last_ && !spread) comm_.board().ring();
  if (!share(me, n, false)) return stuck(), true;
  place_ = Place::kShared;
  if (comm_.board().head().finished.fetch_add(1, std::memory_order_acq_rel) + 1 == target_) comm_.board().ring();
  if (spread)
    for (const auto& [tree, ranks] : spread->others) outbox_.push_back({tree, comm_.frame(FrameKind::kFinish), {}});
  return true;
}

// What rank `who` does of the operation, or all of it. Every element of every receive buffer is written by exactly one
// rank, and no rank reads what another writes: that holds in place too, as nccl.h defines it for each function. Of the
// results of other trees' members nothing is done here, and of a shadow only what its rank has sent is read.
bool CommGroup::Lane::share(uint32_t who, uint32_t n, bool all) {
  const CommOp& op = all_.front();
  const uint32_t element = comm_type_bytes(op.type_of());
  const auto root = static_cast<uint32_t>(op.peer);
  const Spread* const spread = comm_.spread();
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
    case CommKind::kGather:
      if (spread && !comm_.is_local(root)) return true;
      if (!copy(root, who * part, who, 0)) return false;
      if (spread && who == root)
        for (const auto& [tree, ranks] : spread->others)
          for (const uint32_t r : ranks)
            if (!copy(root, r * part, r, 0)) return false;
      return true;
    case CommKind::kScatter: return copy(who, 0, root, who * part);
    case CommKind::kAllReduce:
    case CommKind::kReduce:
    case CommKind::kReduceScatter: break;
    case CommKind::kSend:
    case CommKind::kRecv: return false;
  }
  if (spread && op.kind_of() == CommKind::kReduce && !comm_.is_local(root)) return true;
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
    if (!receives || (spread && !comm_.is_local(r))) continue;
    uint8_t* const out = comm_.reach(r, other.recv, part);
    if (!out) return false;
    work.outputs.push_back(out);
  }
  const bool whole = scatter || all;
  const uint32_t index = spread ? spread->index : who,
                 shares = spread ? static_cast<uint32_t>(spread->locals.size()) : n;
  const uint64_t begin = whole ? 0 : share_begin(op.count, index, shares),
                 end = whole ? op.count : share_begin(op.count, index + 1, shares);
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
  if (left || !outbox_.empty()) return moved;
  end();
  return true;
}

bool CommGroup::Lane::step_send(uint32_t to, std::deque<PairOp>& ops) {
  BoardPair& pair = comm_.board().pair(comm_.config().rank, to);
  PairOp& first = ops.front();
  if (!first.posted) {
    if (comm_.links() && !comm_.has_joined(to)) return comm_.tell(stop_), false;
    if (!enter()) return false;
    pair.addr = first.op.send;
    pair.bytes = first.op.count * comm_type_bytes(first.op.type_of());
    pair.posted.fetch_add(1, std::memory_order_release);
    if (comm_.is_local(to)) {
      comm_.board().ring();
    } else {
      Frame frame = comm_.frame(FrameKind::kPairPost);
      frame.other = to;
      frame.addr = pair.addr;
      frame.bytes = pair.bytes;
      outbox_.push_back({comm_.board().cell(to).tree, frame, {}});
      if (frame.bytes != 0) outbox_.back().data.push_back({frame.addr, frame.bytes});
    }
    if (outbox_.empty()) leave();
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
  if (!enter()) return false;
  const bool moved = receive(from, ops);
  if (outbox_.empty()) leave();
  return moved;
}

bool CommGroup::Lane::receive(uint32_t from, std::deque<PairOp>& ops) {
  BoardPair& pair = comm_.board().pair(from, comm_.config().rank);
  if (pair.posted.load(std::memory_order_acquire) == pair.finished.load(std::memory_order_relaxed)) return false;
  const CommOp& op = ops.front().op;
  const uint64_t bytes = op.count * comm_type_bytes(op.type_of()), there = pair.bytes;
  if (there != bytes) {
    comm_.fail(CommState::kInvalidUsage, text_of_pair(from, there, comm_.config().rank, bytes));
    pair.wanted.store(bytes, std::memory_order_relaxed);
    pair.wrong.store(pair.posted.load(std::memory_order_relaxed), std::memory_order_release);
    comm_.board().ring();
    tell_sender(from, FrameKind::kPairWrong, bytes);
    return stuck(), true;
  }
  const uint8_t* const src = comm_.reach(from, pair.addr, bytes);
  if (!src) return stuck(), true;
  std::memmove(reinterpret_cast<void*>(op.recv), src, bytes);
  pair.finished.fetch_add(1, std::memory_order_release);
  comm_.board().ring();
  tell_sender(from, FrameKind::kPairFinish, bytes);
  ops.pop_front();
  return true;
}

void CommGroup::Lane::tell_sender(uint32_t from, FrameKind kind, uint64_t bytes) {
  if (comm_.is_local(from)) return;
  Frame frame = comm_.frame(kind);
  frame.other = from;
  frame.bytes = bytes;
  outbox_.push_back({comm_.board().cell(from).tree, frame, {}});
}

void CommGroup::Lane::look() {
  if (place_ == Place::kTurn || place_ == Place::kStuck || place_ == Place::kOver) return;
  bool well = comm_.look_at_head();
  const bool in_operation = place_ == Place::kPosted || place_ == Place::kShared;
  if (place_ == Place::kPairs) {
    for (const auto& [key, ops] : pairs_)
      if (!ops.empty()) well = well && comm_.look_at(key.second, 0);
  } else {
    for (uint32_t r = 0; r < comm_.config().ranks; r++) well = well && comm_.look_at(r, in_operation ? number() : 0);
  }
  // The count may have been completed by the one that has gone.
  if (!well) return go_on() ? void() : stuck();
  std::string whom = waits_for();
  if (whom.empty()) return forget_wait();
  noted_wait_ = true;
  comm_.note_wait(std::move(whom));
}

std::string CommGroup::Lane::waits_for() const {
  const uint32_t n = comm_.config().ranks;
  std::vector<uint32_t> ranks;
  const auto say = [&](const std::string& to_do_what) {
    std::string text;
    for (size_t i = 0; i < std::min(ranks.size(), kNamedRanks); i++)
      text +=
          (i ? ", " : "") + (comm_.has_joined(ranks[i]) ? comm_.name_of(ranks[i]) : "rank " + std::to_string(ranks[i]));
    if (ranks.size() > kNamedRanks) text += " and " + std::to_string(ranks.size() - kNamedRanks) + " more";
    return text + to_do_what;
  };
  for (uint32_t r = 0; r < n; r++)
    if (!comm_.has_joined(r)) ranks.push_back(r);
  if (!ranks.empty()) return say(" to join the communicator");
  if (place_ == Place::kPosted) {
    for (uint32_t r = 0; r < n; r++) {
      const BoardCell& cell = comm_.board().cell(r);
      const auto& posted = comm_.is_local(r) ? cell.submitted : cell.told;
      if (posted.load(std::memory_order_acquire) != number()) ranks.push_back(r);
    }
    return ranks.empty()
               ? ""
               : say(" to submit what rank " + std::to_string(comm_.config().rank) + " has: " + text_of(all_.front()));
  }
  if (place_ != Place::kPairs) return {};
  std::string text;
  for (const auto& [key, ops] : pairs_) {
    if (ops.empty()) continue;
    ranks = {key.second};
    if (!text.empty()) text += ", and ";
    text += say(key.first ? " to receive what rank " : " to send what rank ") + std::to_string(comm_.config().rank) +
            (key.first ? " sends" : " receives") + ": " + text_of(ops.front().op);
  }
  return text;
}

// As it is with each of the places: nothing but the hold's end makes it go on.
bool CommGroup::Lane::stands() const {
  if (!outbox_.empty()) return false;
  switch (place_) {
    case Place::kTurn:  // it is not its turn, and whose it is stands too; or it may not join
    case Place::kAll:
    case Place::kOver: return true;
    case Place::kInit: return comm_.board().head().joined.load(std::memory_order_acquire) < comm_.config().ranks;
    case Place::kPosted: {
      const BoardHead& head = comm_.board().head();
      return head.posted.load(std::memory_order_acquire) < target_ &&
             head.finished.load(std::memory_order_acquire) < target_;
    }
    case Place::kPairs:
      return std::all_of(pairs_.begin(), pairs_.end(), [&](const auto& item) {
        const auto& [key, ops] = item;
        if (ops.empty() || !key.first || !ops.front().posted) return true;
        const BoardPair& pair = comm_.board().pair(comm_.config().rank, key.second);
        return pair.finished.load(std::memory_order_acquire) != pair.posted.load(std::memory_order_relaxed) &&
               pair.wrong.load(std::memory_order_acquire) != pair.posted.load(std::memory_order_relaxed);
      });
    case Place::kTell:
    case Place::kSent:
    case Place::kShared:
    case Place::kStuck: return false;
  }
  return false;
}

void CommGroup::Lane::take_back(std::vector<CommCall>* calls) {
  if (place_ == Place::kOver) return;
  forget_wait();
  if (init_) return calls->push_back({ref_, {}});
  if (place_ == Place::kPosted) {
    std::atomic<uint64_t>& posted = comm_.board().head().posted;
    uint64_t count = posted.load(std::memory_order_acquire);
    while (count < target_ && !posted.compare_exchange_weak(count, count - 1, std::memory_order_acq_rel)) {}
    if (count < target_) {
      comm_.board().cell(comm_.config().rank).submitted.store(number() - 1, std::memory_order_relaxed);
      place_ = Place::kAll;
      if (const Spread* const spread = comm_.spread())
        for (const auto& [tree, ranks] : spread->others) tell_back(tree, comm_.frame(FrameKind::kUnpost));
    }
  }
  for (const CommOp& op : all_) calls->push_back({ref_, op});
  for (auto& [key, ops] : pairs_)
    for (PairOp& pair : ops) {
      if (std::exchange(pair.posted, false)) {
        comm_.board().pair(comm_.config().rank, key.second).posted.fetch_sub(1, std::memory_order_release);
        Frame frame = comm_.frame(FrameKind::kPairUnpost);
        frame.other = key.second;
        if (!comm_.is_local(key.second)) tell_back(comm_.board().cell(key.second).tree, frame);
      }
      calls->push_back({ref_, pair.op});
    }
}

CommGroup::CommGroup(std::vector<CommCall> calls, bool init) : init_(init) {
  std::map<const Comm*, Lane*> by_comm;
  for (CommCall& call : calls) {
    Lane*& lane = by_comm[call.comm.get()];
    if (!lane) {
      lanes_.push_back(std::make_unique<Lane>(call.comm, init));
      lane = lanes_.back().get();
    }
    if (init) continue;
    lane->add(call.op);
    const CommOp& op = call.op;
    const CommConfig& config = static_cast<const SoftComm&>(*call.comm).config();
    const auto [send, recv] = comm_bytes(op, config.ranks, config.rank);
    if (send) buffers_.emplace_back(op.send, send);
    if (recv) buffers_.emplace_back(op.recv, recv);
    if (op.scalar_on_device) buffers_.emplace_back(op.scalar, sizeof(uint64_t));
  }
}

CommGroup::~CommGroup() = default;

// This lane's thread sends it, and counts as inside until it has.
void CommGroup::Lane::tell_back(uint32_t tree, const Frame& frame) {
  if (!std::exchange(inside_, true)) comm_.hold().enter_anyway();
  outbox_.push_back({tree, frame, {}});
}

bool CommGroup::stands() {
  std::lock_guard lock(mu_);
  return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->stands(); });
}

std::vector<CommGroup::Result> CommGroup::results() const {
  std::vector<Result> all;
  for (const auto& lane : lanes_) all.insert(all.end(), lane->results().begin(), lane->results().end());
  return all;
}

std::vector<CommCall> CommGroup::take_back() {
  std::lock_guard lock(mu_);
  std::vector<CommCall> calls;
  for (const auto& lane : lanes_) lane->take_back(&calls);
  return calls;
}

bool CommGroup::step(size_t lane, const std::atomic<bool>& ended) {
  std::lock_guard lock(mu_);
  Lane& one = *lanes_[lane % lanes_.size()];
  one.watch(ended);
  return one.go_on();
}

bool CommGroup::over() {
  std::lock_guard lock(mu_);
  return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->over(); });
}

// Also of a lane that is over, which looks at nothing.
void CommGroup::look() {
  std::lock_guard lock(mu_);
  for (const auto& lane : lanes_) lane->look();
}

void CommGroup::run(const std::atomic<bool>& ended) {
  std::unique_lock lock(mu_);
  for (const auto& lane : lanes_) lane->watch(ended);
  uint64_t looked = 0;
  for (int idle = 0;;) {
    Lane* waits = nullptr;
    bool moved = false, withheld = false;
    uint32_t seen = 0;
    size_t left = 0;
    for (const auto& lane : lanes_) {
      if (lane->over()) continue;
      if (lane->has_board()) seen = lane->comm().board().head().bell.load(std::memory_order_seq_cst);
      withheld = lane->comm().hold().on();
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
    if (moved || (idle++ < kSpins && !withheld)) {
      if (moved) idle = 0;
      __builtin_ia32_pause();
      continue;
    }
    if (const uint64_t now = now_us(); now - looked > kLookUs && !withheld) {
      if (looked)
        for (const auto& lane : lanes_) lane->look();
      looked = now;
    }
    const bool polls = left > 1 || !waits->has_board() || waits->waits_for_link();
    Board* const board = polls || withheld ? nullptr : &waits->comm().board();
    // Asleep it is to be asked, and taken back.
    lock.unlock();
    if (board)
      board->sleep(seen, kLookUs);
    else
      usleep(withheld ? kWithheldUs : kManyBoardsUs);
    lock.lock();
  }
}

}  // namespace devproxy::hal::soft
