// SPDX-License-Identifier: Apache-2.0
// CudaComm: what a member tells the job's other trees, and asks them.
#include <chrono>

#include "devproxy/hal/cuda/cuda_comm.h"

namespace devproxy::hal::cuda {

namespace {

using std::chrono::milliseconds;

constexpr uint32_t kReachMs = 30'000;  // for a way to another tree
constexpr uint32_t kTellMs = 50;       // for one frame

}  // namespace

Frame CudaComm::frame(FrameKind kind) const {
  Frame frame;
  frame.kind = kind;
  frame.key = config_.comm.key;
  frame.ranks = config_.comm.ranks;
  frame.rank = config_.comm.rank;
  frame.slot = config_.seat.place.slot;
  frame.incarnation = config_.incarnation;
  switch (kind) {
    case FrameKind::kJoin:
      frame.device_base = config_.seat.device;
      frame.addr = config_.seat.process;
      frame.bytes = version_;
      break;
    case FrameKind::kId:
      frame.incarnation = set_;
      frame.bytes = version_;
      break;
    case FrameKind::kAsk: frame.bytes = own_ask_; break;
    case FrameKind::kHere: frame.addr = version_; break;
    default: break;
  }
  return frame;
}

std::vector<uint32_t> CudaComm::other_trees() const {
  if (!config_.links) return {};
  auto known = config_.links->others();
  if (!known) return {};
  if (config_.only_tree) std::erase_if(*known, [this](uint32_t tree) { return tree != *config_.only_tree; });
  return std::move(*known);
}

// Have all members of other trees said, since this server has gone on last, that they go on too? What they had to tell has
// come then.
bool CudaComm::confirmed() {
  if (!must_ask()) return true;
  if (config_.standing->stands) return false;
  bool all_local = true;
  for (uint32_t rank = 0; rank < config_.comm.ranks; rank++) {
    const CommRow& row = board_->row(rank);
    const Gone gone = row.gone;
    if (row.incarnation.load(std::memory_order_acquire) == 0) return false;
    if (row.teller == 0 || gone == Gone::kLeft || gone == Gone::kDied) continue;
    all_local = false;
    if (asked_resume_ != config_.standing->resumes || board_->answered(rank) < own_ask_) return false;
  }
  confirmed_resume_ = all_local ? config_.standing->resumes.load() : asked_resume_;
  return !must_ask();
}

// As far as there are connections: what could not be told is told at the next turn.
void CudaComm::tell_others(Lock& lock) {
  if (!config_.links || config_.standing->stands) return;
  if (must_ask() && asked_resume_ != config_.standing->resumes) {
    asked_resume_ = config_.standing->resumes;
    own_ask_ = ++board_->head().asks;
    tell_again();
  }
  for (const uint32_t tree : other_trees()) {
    if (!has_row() || ends() || config_.standing->stands) return;
    bool has_member = false, has_live = false;
    for (uint32_t rank = 0; rank < config_.comm.ranks; rank++) {
      const CommRow& row = board_->row(rank);
      if (row.incarnation.load(std::memory_order_acquire) == 0 || row.tree != tree) continue;
      has_member = true;
      const Gone gone = row.gone;
      has_live |= gone != Gone::kLeft && gone != Gone::kDied;
    }
    Told& told = told_[tree];
    if (set_ != 0 && !has_live) {  // all have come
      if (!has_member && std::exchange(told.knows, false)) config_.links->post(tree, frame(FrameKind::kElsewhere));
      continue;
    }
    if (told.row == 0 || told.row != config_.links->epoch(tree)) {
      told = {.knows = told.knows, .unreached_since = told.unreached_since};  // what went there before may be lost
      send(lock, tree, frame(FrameKind::kJoin), {}, &told.row);
    }
    look_at_link(tree, told);
    if (told.row == 0) continue;
    told.knows = true;
    if (id_ && told.id != told.row) send(lock, tree, frame(FrameKind::kId), *id_, &told.id);
    if (must_ask() && told.ask != told.row) send(lock, tree, frame(FrameKind::kAsk), {}, &told.ask);
    const uint64_t asked = board_->head().asked[tree];
    if (asked == 0 || (told.answered_ask == asked && told.answer == told.row)) continue;
    Frame here = frame(FrameKind::kHere);
    here.bytes = asked;
    send(lock, tree, here, {}, &told.answer);
    if (told.answer == told.row) told.answered_ask = asked;
  }
  if (set_ != 0) predecessor_told_ = false;
}

// Nobody waits for ever for a tree that there is no way to.
void CudaComm::look_at_link(uint32_t tree, Told& told) {
  const auto now = Clock::now();
  if (told.row != 0 || in_flight_.load(std::memory_order_relaxed) == 0 || state_ != CommState::kOk) {
    told.unreached_since = {};
    return;
  }
  if (told.unreached_since == Clock::time_point{}) told.unreached_since = now;
  if (now - told.unreached_since < milliseconds(kReachMs)) return;
  join_failed_ = phase_ == Phase::kJoining;
  fail(CommState::kRemoteError, config_.links->trouble(tree));
  tell();
}

void CudaComm::tell_again() {
  for (auto& [tree, told] : told_) told = {.knows = told.knows, .unreached_since = told.unreached_since};
}

void CudaComm::send(Lock& lock, uint32_t tree, Frame frame, std::optional<DevproxyNcclId> id, uint64_t* told) {
  const auto until = Clock::now() + milliseconds(kTellMs);
  std::vector<iovec> parts{{&frame, sizeof frame}};
  if (id) parts.push_back({id->internal, sizeof id->internal});
  uint64_t epoch = 0;
  lock.unlock();
  const auto sent = config_.links->send(tree, std::move(parts), [until] { return Clock::now() > until; }, &epoch);
  lock.lock();
  if (sent == Links::Sent::kSent) *told = epoch;
}

}  // namespace devproxy::hal::cuda
