// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/comm/lane.h"

#include <algorithm>

#include "devproxy/csrc/base/futex.h"

namespace devproxy::hal::soft {

namespace {

constexpr uint64_t kSmallBytes = 64 << 10;  // of all contributions: one member does it for all
constexpr size_t kNamedRanks = 4;           // in a message
constexpr uint64_t kReachUs = 30'000'000;   // how long another tree may be out of reach

}  // namespace

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

// This lane's thread sends it, and counts as inside until it has.
void CommGroup::Lane::tell_back(uint32_t tree, const Frame& frame) {
  if (!std::exchange(inside_, true)) comm_.hold().enter_anyway();
  outbox_.push_back({tree, frame, {}});
}

}  // namespace devproxy::hal::soft
