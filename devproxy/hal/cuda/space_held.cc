// SPDX-License-Identifier: Apache-2.0
// CudaSpace: commands that cannot be the driver's yet, and in which order they become it.
#include <algorithm>
#include <chrono>
#include <utility>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/hal/cuda/space_common.h"

namespace devproxy::hal::cuda {

namespace {

// How long NCCL may be busy with a group of sends and receives whose pairs are connected.
constexpr auto kConnect = std::chrono::milliseconds(2);

}  // namespace

bool CudaSpace::may_issue(const Command& command) const {
  if (in_flight_ >= device_.max_in_flight) return false;
  return tokens_ == 0 || !(command.executor || (splicer_ && command.group) || concerns_splicer(command));
}

// Is something held that must come before this command?
bool CudaSpace::behind_held(const CudaQueue& queue, const Command& command) const {
  if (queue.held == pass_) return true;
  if (queue.must_wait_before && queue.before && queue.before->held == pass_) return true;
  if (queue.kind == QueueKind::kLegacy && held_blocking_) return true;
  if (queue.kind == QueueKind::kBlocking && held_legacy_) return true;
  // A wait is for the latest record before it, and a record must not come before a wait that means the one before.
  if (const CudaEvent* event = command.event.get())
    if (event->record_held == pass_ || (command.action == Action::kRecord && event->held == pass_)) return true;
  if (command.executor && (held_executor_ || executing_)) return true;
  // Nor may an executor's pages be moved while it submits.
  if (splicer_ && executing_ &&
      (command.action == Action::kHostFunction || must_clear(command) || concerns_splicer(command)))
    return true;
  if (!command.group) return false;
  if (command.action == Action::kCommunicate && held_group_) return true;
  // Also where the held group lets other communicators pass: NCCL may be done with it by now, but what is held behind it
  // comes before this.
  return std::any_of(command.group->entries.begin(), command.group->entries.end(),
                     [this](const auto& entry) { return entry.comm->held == pass_; });
}

void CudaSpace::note_held(CudaQueue& queue, const Command& command) {
  queue.held = pass_;
  held_legacy_ |= queue.kind == QueueKind::kLegacy;
  held_blocking_ |= queue.kind == QueueKind::kBlocking;
  held_executor_ |= command.executor != nullptr;
  if (CudaEvent* event = command.event.get()) {
    event->held = pass_;
    if (command.action == Action::kRecord) {
      event->record_held = pass_;
      if (queue.waits == pass_) event->waits = pass_;
    } else if (event->waits == pass_) {
      queue.waits = pass_;
    }
  }
  if (!command.group) return;
  for (const auto& entry : command.group->entries) entry.comm->held = pass_;
  if (command.action != Action::kCommunicate) return;
  // A group that waits for an abort, for a rank to come to a first send or receive, or for ranks that share this GPU, must
  // not keep others from going on; nor must what waits behind it.
  const CommGroup& group = *command.group;
  bool waits = group.stuck || queue.waits == pass_, busy = false;
  for (const auto& entry : group.entries) {
    waits |= entry.comm->waits == pass_;
    waits |= entry.beside && !entry.over;
    if (entry.over || !entry.begun) continue;
    waits |= entry.pairs && Clock::now() - entry.begun_at > kConnect;
    busy |= !entry.shared || entry.shared->busy();
  }
  if (waits) {
    queue.waits = pass_;
    for (const auto& entry : group.entries) entry.comm->waits = pass_;
  }
  held_group_ |= !waits;
  launching_ |= busy && !group.stuck;
}

// Nothing is held, as far as behind_held() knows.
void CudaSpace::forget_held() {
  pass_++;
  held_for_room_ = held_legacy_ = held_blocking_ = held_executor_ = held_group_ = launching_ = false;
}

void CudaSpace::kick() {
  calls_.fetch_add(1);
  if (napping_.load()) futex_wake(&calls_, 1);
}

void CudaSpace::hold(const CudaQueueRef& queue, Command& command, Pending& pending,
                     std::unique_lock<std::mutex>& lock) {
  pending.state = Pending::State::kHeld;
  if (command.launch.params_bytes) {
    command.params.assign(command.launch.params, command.launch.params + command.launch.params_bytes);
    command.launch.params = nullptr;
  }
  const bool room = !held_for_room_ && !may_issue(command);
  held_for_room_ |= room;
  note_held(*queue, command);
  const bool group = command.group != nullptr;
  held_.push_back({queue, std::move(command), &pending});
  holds_++;
  if (group) kick();  // the watcher looks at it more often than it would
  if (room)           // what it waits for is seen to end
    if (Status s = mark_all(); !s.ok()) fault(s, lock);
}

// Other ranks of this GPU may wait for what has begun here, and room for the rest may come only behind that.
void CudaSpace::poke_groups(size_t from) {
  for (size_t i = from; i < held_.size(); i++) {
    if (!held_[i].command.group) continue;
    for (const auto& entry : held_[i].command.group->entries)
      if (entry.begun && !entry.over && entry.shared) entry.shared->poke(entry.work);
  }
}

// The watcher's. Inside a call of an executor the lock is free, and more may be held behind; that is looked at too.
void CudaSpace::issue_held(std::unique_lock<std::mutex>& lock) {
  for (uint64_t holds = 0; !held_.empty() && holds != holds_;) {
    holds = holds_;
    forget_held();
    for (size_t i = 0; i < held_.size();) {
      CudaQueue& queue = *held_[i].queue;
      Command& command = held_[i].command;
      if (!may_issue(command)) {
        held_for_room_ = true;
        poke_groups(i);
        break;
      }
      const bool behind = behind_held(queue, command);
      if (!behind && must_clear(command) && !clear_group(command.group, /*on_watcher=*/true, lock)) return;
      if (behind || (command.group && !start_group(queue, command))) {
        note_held(queue, command);
        i++;
        continue;
      }
      Held held = std::move(held_[i]);
      held_.erase(held_.begin() + static_cast<ptrdiff_t>(i));
      issuing_held_ = true;
      Status s = issue(held.queue, held.command, *held.pending, lock);
      issuing_held_ = false;
      if (!s.ok()) return fault(s, lock);
      if (faulted_.load(std::memory_order_relaxed)) return;
    }
  }
  if (!held_for_room_) return;
  if (Status s = mark_all(); !s.ok()) fault(s, lock);  // what the rest waits for is seen to end
}

}  // namespace devproxy::hal::cuda
