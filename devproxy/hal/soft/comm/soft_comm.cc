// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/comm/soft_comm.h"

#include <utility>

#include "devproxy/csrc/base/futex.h"

namespace devproxy::hal::soft {

namespace {

constexpr uint64_t kMoveUs = 60'000'000;  // how long a server of another tree may take to be replaced

// Where it is another one than the reader's.
std::string in_tree(uint32_t tree, uint32_t own) {
  return tree == own ? std::string() : " of tree " + std::to_string(tree);
}

}  // namespace

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

}  // namespace devproxy::hal::soft
