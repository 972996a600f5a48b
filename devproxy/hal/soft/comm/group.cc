// SPDX-License-Identifier: Apache-2.0
// CommGroup: the lanes of a group, and the thread that drives them.
#include <unistd.h>

#include <algorithm>
#include <map>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/hal/soft/comm/lane.h"

namespace devproxy::hal::soft {

namespace {

constexpr uint64_t kLookUs = 50'000;     // how often a waiter looks whether the others are there
constexpr uint64_t kManyBoardsUs = 200;  // a group over several boards sleeps at one of them at most so long
constexpr int kSpins = 200;
constexpr uint64_t kWithheldUs = 1'000;  // how often a lane looks whether it may go on

}  // namespace

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
