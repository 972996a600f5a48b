// SPDX-License-Identifier: Apache-2.0
// The space's queues and their workers: when a command runs, and on which thread (soft_space.h has the rules).
#include <time.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "devproxy/hal/soft/soft_space.h"

namespace devproxy::hal::soft {

namespace {

uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

}  // namespace

QueueRef SoftSpace::create_queue(QueueKind kind, int32_t, uint32_t index) {  // all priorities are one to us
  reap(false);
  auto queue = std::make_shared<SoftQueue>();
  queue->kind = kind;
  queue->index = index;
  queue->chaos_state = device_.chaos_seed * 0x9e3779b97f4a7c15 + index;
  for (const auto& old : leaving_)  // the latest of several wins: it waited for those before it
    if (old->index == index && old->submitted > old->published.load(std::memory_order_acquire))
      queue->before = {old, old->submitted};
  std::lock_guard lock(mu_);
  queues_[index] = queue;
  return queue;
}

void SoftSpace::destroy_queue(const QueueRef& ref) {
  SoftQueue& queue = of(ref);
  const auto it = queues_.find(queue.index);
  if (it == queues_.end() || it->second.get() != &queue) return;
  {
    std::lock_guard lock(mu_);
    queue.closing = true;
    queue.wake.notify_one();
    leaving_.push_back(it->second);
    queues_.erase(it);
  }
  reap(false);
}

// Joins the workers of destroyed queues that have finished, or of all.
void SoftSpace::reap(bool all) {
  std::vector<std::shared_ptr<SoftQueue>> over;
  {
    std::lock_guard lock(mu_);
    std::erase_if(leaving_, [&](const std::shared_ptr<SoftQueue>& queue) {
      if (!all && queue->worker.joinable() && !queue->gone) return false;
      over.push_back(queue);
      return true;
    });
  }
  for (const auto& queue : over)
    if (queue->worker.joinable()) queue->worker.join();
}

void SoftSpace::stop() {
  ended_.store(true, std::memory_order_release);
  if (splicer_) splicer_->hurry(*member_, true);
  {
    std::lock_guard lock(mu_);
    stopping_ = true;
    for (auto& [index, queue] : queues_) queue->wake.notify_one();
    for (auto& queue : leaving_) queue->wake.notify_one();
    for (auto& [index, queue] : queues_) leaving_.push_back(queue);
    queues_.clear();
  }
  reap(true);
}

void SoftSpace::submit(const QueueRef& ref, Command& command, std::shared_ptr<void> keeps, const Dependency* extra) {
  SoftQueue& queue = of(ref);
  command.queue_index = queue.index;
  submitted_ = command.ticket.position;
  const bool at_once = queue.kind == QueueKind::kLegacy && !device_.chaos && command.action != Action::kHostFunction &&
                       command.action != Action::kComm && pending_blocking_.load(std::memory_order_acquire) == 0 &&
                       (!extra || extra->queue->published.load(std::memory_order_acquire) >= extra->position);
  if (!at_once) return enqueue(ref, command, std::move(keeps), extra);
  execute(command, turn_, true);
  queue.submitted = command.ticket.position;
  owner_.on_complete(queue.index, command.ticket.position, command.ticket.tag);
  queue.published.store(command.ticket.position, std::memory_order_release);
}

void SoftSpace::enqueue(const QueueRef& ref, Command& command, std::shared_ptr<void> keeps, const Dependency* extra) {
  SoftQueue& queue = of(ref);
  Pending pending;
  auto need = [&](const std::shared_ptr<SoftQueue>& other, uint64_t position) {
    if (position > other->published.load(std::memory_order_acquire)) pending.needs.push_back({other, position});
  };
  if (extra) need(extra->queue, extra->position);
  if (queue.before.queue) need(queue.before.queue, queue.before.position), queue.before = {};
  const auto legacy = queues_.find(0);
  if (queue.kind == QueueKind::kBlocking && legacy != queues_.end()) need(legacy->second, legacy->second->submitted);
  if (queue.kind == QueueKind::kLegacy) {
    for (const auto& [index, other] : queues_)
      if (other->kind == QueueKind::kBlocking) need(other, other->submitted);
    for (const auto& other : leaving_)
      if (other->kind == QueueKind::kBlocking) need(other, other->submitted);
  }
  pending.command = command;
  pending.keeps = std::move(keeps);
  if (command.action == Action::kLaunch) pending.keep_params();
  push(ref, std::move(pending));
}

void SoftSpace::push(const QueueRef& ref, Pending pending) {
  SoftQueue& queue = of(ref);
  queue.submitted = pending.command.ticket.position;
  pending_all_.fetch_add(1, std::memory_order_relaxed);
  if (queue.kind != QueueKind::kNonBlocking) pending_blocking_.fetch_add(1, std::memory_order_relaxed);
  {
    std::lock_guard lock(mu_);
    queue.commands.push_back(std::move(pending));
    queue.wake.notify_one();
  }
  if (!queue.worker.joinable())
    queue.worker = std::thread([this, self = std::static_pointer_cast<SoftQueue>(ref)] { work(self); });
}

void SoftSpace::work(const std::shared_ptr<SoftQueue>& queue) {
  owner_.on_thread_start();
  std::unique_lock lock(mu_);
  for (;;) {
    if (queue->commands.empty()) yield(queue->turn);
    queue->wake.wait(lock, [&] { return stopping_ || !queue->commands.empty() || queue->closing; });
    if (stopping_ || queue->commands.empty()) break;
    // push_back never moves the front of a deque, so this reference stays good while mu_ is let go.
    for (const Dependency& need : queue->commands.front().needs) {
      if (need.queue->published.load(std::memory_order_acquire) >= need.position) continue;
      yield(queue->turn);
      queue->asleep_on = &need;
      sleepers_.push_back(queue.get());
      queue->wake.wait(
          lock, [&] { return stopping_ || need.queue->published.load(std::memory_order_acquire) >= need.position; });
      std::erase(sleepers_, queue.get());
      queue->asleep_on = nullptr;
    }
    if (!stopping_ && withheld_ && queue->commands.front().command.action == Action::kHostFunction) {
      yield(queue->turn);
      queue->withheld = true;
      sleepers_.push_back(queue.get());
      queue->wake.wait(lock, [&] { return stopping_ || !withheld_; });
      std::erase(sleepers_, queue.get());
      queue->withheld = false;
    }
    if (stopping_) break;
    Pending pending = std::move(queue->commands.front());
    queue->commands.pop_front();
    const Ticket ticket = pending.command.ticket;
    queue->current = &pending;
    lock.unlock();

    if (device_.chaos) chaos_delay(*queue);
    execute(pending.command, queue->turn, false);
    owner_.on_complete(queue->index, ticket.position, ticket.tag);
    lock.lock();
    queue->current = nullptr;
    lock.unlock();
    pending = {};  // may unload a module; not under the lock

    lock.lock();
    queue->published.store(ticket.position, std::memory_order_release);
    if (queue->kind != QueueKind::kNonBlocking) pending_blocking_.fetch_sub(1, std::memory_order_release);
    pending_all_.fetch_sub(1, std::memory_order_release);
    for (SoftQueue* other : sleepers_)
      if (other->asleep_on && other->asleep_on->queue == queue && ticket.position >= other->asleep_on->position)
        other->wake.notify_one();
  }
  yield(queue->turn);
  queue->gone = true;
}

// Legal but unkind: streams drift apart, never a stream within itself.
void SoftSpace::chaos_delay(SoftQueue& queue) {
  const uint64_t dice = next_random(queue.chaos_state);
  uint64_t delay_us = 0;
  if (dice % 64 == 0)
    delay_us = dice / 64 % 3000;
  else if (dice % 8 == 0)
    delay_us = dice / 64 % 300;
  if (delay_us) {
    const timespec nap{0, static_cast<long>(delay_us * 1000)};
    nanosleep(&nap, nullptr);
  } else {
    std::this_thread::yield();
  }
}

}  // namespace devproxy::hal::soft
