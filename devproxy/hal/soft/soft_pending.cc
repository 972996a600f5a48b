// SPDX-License-Identifier: Apache-2.0
// The space's commands that have not completed: what they use, whether they stand, and how a cut takes them to another
// space.
#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "devproxy/hal/soft/soft_space.h"

namespace devproxy::hal::soft {

uint64_t SoftSpace::oldest_pending() {
  if (idle()) return UINT64_MAX;
  uint64_t oldest = UINT64_MAX;
  std::lock_guard lock(mu_);
  every_queue([&](const SoftQueue& queue) {
    if (queue.current)
      oldest = std::min(oldest, queue.current->command.ticket.position);
    else if (!queue.commands.empty())
      oldest = std::min(oldest, queue.commands.front().command.ticket.position);
    return true;
  });
  return oldest;
}

PendingUse SoftSpace::pending_use() {
  PendingUse use;
  if (idle()) return use;
  const auto add = [&](const Command& command) {
    const uint64_t position = command.ticket.position;
    switch (command.action) {
      case Action::kNop:
      case Action::kRecord:
      case Action::kHostFunction: return;
      case Action::kComm:
        for (const auto& [addr, bytes] : command.comm->buffers()) use.ranges.push_back({position, addr, bytes});
        return;
      default: use.anything_from = std::min(use.anything_from, position);
    }
  };
  std::lock_guard lock(mu_);
  every_queue([&](const SoftQueue& queue) {
    if (queue.current) add(queue.current->command);
    for (const Pending& one : queue.commands) add(one.command);
    return true;
  });
  return use;
}

bool SoftSpace::withhold(bool on) {
  if (splicer_) splicer_->hurry(*member_, on);
  const bool still = hold_.set(on);
  std::lock_guard lock(mu_);
  withheld_ = on;
  if (on) return still;
  for (SoftQueue* queue : sleepers_)
    if (queue->withheld) queue->wake.notify_one();
  return true;
}

bool SoftSpace::stands(const SoftQueue& queue) const {
  if (queue.current) return queue.current->command.action == Action::kComm && queue.current->command.comm->stands();
  if (queue.commands.empty() || queue.withheld) return true;
  return queue.asleep_on &&
         queue.asleep_on->queue->published.load(std::memory_order_acquire) < queue.asleep_on->position;
}

// Every pending command waits for one of its own queue or of another one: if no queue goes on, none will. Between two
// commands a worker has none and has not published the last one yet; then a command is pending that no queue has.
bool SoftSpace::stands() {
  std::lock_guard lock(mu_);
  size_t seen = 0;
  return every_queue([&](const SoftQueue& queue) {
           seen += queue.commands.size() + (queue.current ? 1 : 0);
           return stands(queue);
         }) &&
         seen == pending();
}

bool SoftSpace::in_host_function() {
  std::lock_guard lock(mu_);
  return !every_queue(
      [](const SoftQueue& queue) { return !queue.current || queue.current->command.action != Action::kHostFunction; });
}

StatusOr<std::vector<PendingCommand>> SoftSpace::pending_commands() {
  std::vector<PendingCommand> all;
  std::lock_guard lock(mu_);
  for (const auto& queue : leaving_)
    if (queue->current || !queue->commands.empty())
      return Status(kNotSupported, "a stream was destroyed that still has commands behind a collective");
  for (const auto& [index, queue] : queues_) {
    if (queue->current) all.push_back(pending_command(*queue, *queue->current));
    for (const Pending& pending : queue->commands) all.push_back(pending_command(*queue, pending));
  }
  // As they were submitted: communicators count turns. A message has one queue.
  std::stable_sort(all.begin(), all.end(), [](const PendingCommand& a, const PendingCommand& b) {
    return a.ticket.position < b.ticket.position;
  });
  return all;
}

PendingCommand SoftSpace::pending_command(const SoftQueue& queue, const Pending& pending) {
  const Command& command = pending.command;
  PendingCommand out;
  out.queue_index = queue.index;
  out.ticket = command.ticket;
  for (const Dependency& need : pending.needs)
    if (need.queue->published.load(std::memory_order_acquire) < need.position)
      out.needs.push_back({need.queue->index, need.position});
  using Kind = PendingCommand::Kind;
  switch (command.action) {
    case Action::kNop: out.kind = Kind::kNop; break;
    case Action::kCopy: out.kind = Kind::kCopy, out.copy = command.copy; break;
    case Action::kArrayCopy: out.kind = Kind::kCopyArray, out.array_copy = *command.array_copy; break;
    case Action::kMemset: out.kind = Kind::kMemset, out.memset = command.memset; break;
    case Action::kLaunch:
      out.kind = Kind::kLaunch;
      out.launch = command.launch;
      out.launch.attributes = nullptr;
      out.launch.n_attributes = 0;
      out.function = std::static_pointer_cast<Function>(pending.keeps);
      break;
    case Action::kRecord: out.kind = Kind::kRecord; break;
    case Action::kHostFunction: out.kind = Kind::kHostFunction, out.token = command.token; break;
    case Action::kComm:
      out.kind = command.comm->is_init() ? Kind::kInitComm : Kind::kCommunicate;
      out.calls = command.comm->take_back();
      break;
  }
  return out;
}

std::optional<CommandPlace> SoftSpace::pending_record(const EventRef& ref) {
  const auto& last = static_cast<const SoftEvent&>(*ref).last;
  if (!last || last->queue->published.load(std::memory_order_acquire) >= last->position) return std::nullopt;
  return CommandPlace{last->queue->index, last->position};
}

Status SoftSpace::submit_pending(const PendingCommand& from) {
  auto queue_at = [this](uint32_t index) {
    const auto it = queues_.find(index);
    return it == queues_.end() ? nullptr : it->second;
  };
  const std::shared_ptr<SoftQueue> queue = queue_at(from.queue_index);
  Pending pending;
  for (const CommandPlace& need : from.needs) {
    pending.needs.push_back({queue_at(need.queue_index), need.position});
    // Only what comes before a command can hold it up, so there is no circle.
    if (!pending.needs.back().queue || need.position >= from.ticket.position)
      return {kInvalidImage, "a pending command waits for what does not come"};
  }
  if (!queue || from.ticket.position < queue->submitted)
    return {kInvalidImage, "a pending command has no queue, or is out of order"};
  Command& command = pending.command;
  command.ticket = from.ticket;
  command.queue_index = from.queue_index;
  using Kind = PendingCommand::Kind;
  switch (from.kind) {
    case Kind::kNop: break;
    case Kind::kCopy: command.action = Action::kCopy, command.copy = from.copy; break;
    case Kind::kCopyArray: {
      auto copy = std::make_shared<ArrayCopy>(from.array_copy);
      command.action = Action::kArrayCopy;
      command.array_copy = copy.get();
      pending.keeps = std::move(copy);
      break;
    }
    case Kind::kMemset: command.action = Action::kMemset, command.memset = from.memset; break;
    case Kind::kLaunch:
      command.action = Action::kLaunch;
      command.launch = from.launch;
      command.function = static_cast<const HostFunction*>(from.function.get());
      pending.keeps = from.function;
      pending.keep_params();
      break;
    case Kind::kRecord: {
      auto record = std::make_shared<Record>();
      record->queue = queue;
      record->position = from.ticket.position;
      for (const EventRef& event : from.events) static_cast<SoftEvent&>(*event).last = record;
      command.action = Action::kRecord;
      command.record = record.get();
      pending.keeps = std::move(record);
      break;
    }
    case Kind::kHostFunction: command.action = Action::kHostFunction, command.token = from.token; break;
    case Kind::kInitComm:
    case Kind::kCommunicate: {
      auto group = std::make_shared<CommGroup>(from.calls, from.kind == Kind::kInitComm);
      command.action = Action::kComm;
      command.comm = group.get();
      pending.keeps = std::move(group);
      break;
    }
  }
  push(queue, std::move(pending));
  return {};
}

}  // namespace devproxy::hal::soft
