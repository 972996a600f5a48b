// SPDX-License-Identifier: Apache-2.0
// CudaSpace: marks, and the watcher, which sees what has completed.
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/log.h"
#include "devproxy/hal/cuda/cuda_space.h"

namespace devproxy::hal::cuda {

namespace {

using std::chrono::microseconds;

constexpr auto kProbeEvery = std::chrono::microseconds(1000);  // asking a silent context whether it has failed
constexpr auto kEventEvery = std::chrono::microseconds(4);     // looking at events, where marks are such
constexpr auto kLaunchEvery = std::chrono::microseconds(20);   // asking NCCL whether it has launched a group

}  // namespace

Status CudaSpace::mark(CudaQueue& queue) {
  if (queue.marked == queue.issued) return {};
  const Driver& cu = context_->driver();
  const char* const doing = "marking how far a stream is";
  if (queue.word) {
    // cuda.h: by default the write comes behind a memory barrier, so what the commands wrote to host memory is there.
    if (Status s = cu.status(
            cu.cuStreamWriteValue64(queue.stream, queue.word_device, queue.issued, CU_STREAM_WRITE_VALUE_DEFAULT),
            cu.cuStreamWriteValue64, doing);
        !s.ok())
      return s;
  } else {
    CUevent event = nullptr;
    if (event_pool_.empty()) {
      if (Status s = cu.status(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), cu.cuEventCreate, doing); !s.ok())
        return s;
    } else {
      event = event_pool_.back();
      event_pool_.pop_back();
    }
    if (Status s = cu.status(cu.cuEventRecord(event, queue.stream), cu.cuEventRecord, doing); !s.ok()) {
      event_pool_.push_back(event);
      return s;
    }
    queue.marks.push_back({queue.issued, event});
  }
  queue.marked = queue.issued;
  queue.since_mark = 0;
  if (std::has_single_bit(++marks_))
    DP_LOG(kInfo, kDevice, 0, "streams were marked %lu times so far, for %lu commands",
           static_cast<unsigned long>(marks_), static_cast<unsigned long>(sequence_));
  return {};
}

// What is held gets its mark when it is issued.
void CudaSpace::awaited(const QueueRef& ref) {
  context_->enter();
  {
    std::unique_lock lock(mu_);
    auto& queue = static_cast<CudaQueue&>(*ref);
    if (queue.pending.empty()) return;  // completed, or the watcher is just telling
    queue.pending.back().awaited = true;
    queue.awaited = queue.pending.back().sequence;
    if (!faulted_.load(std::memory_order_relaxed))
      if (Status s = mark(queue); !s.ok()) fault(s, lock);
  }
  kick();
}

void CudaSpace::nap(uint32_t calls, uint32_t most_us) {
  napping_.store(true);
  futex_wait(&calls_, calls, most_us);
  napping_.store(false);
}

// Unless commands come in still, so that a burst has few marks.
Status CudaSpace::mark_if_settled(CudaQueue& queue) {
  if (queue.marked == queue.issued || Clock::now() - queue.issued_at < microseconds(device_.settle_us)) return {};
  return mark(queue);
}

Status CudaSpace::mark_all() {
  for (const CudaQueueRef& queue : busy_)
    if (Status s = mark(*queue); !s.ok()) return s;
  return {};
}

// Precondition: the lock is held, and everything was looked at under it. Returns without it, when there is something to do
// under it: a word has moved, a queue became busy or is awaited, or one that has unmarked commands has rested for settle_us.
// Submitters take the lock for each command, so nothing here wants it, and nobody is woken for each. The queues stay: only
// this thread takes one out of busy_.
void CudaSpace::wait_for_movement(std::unique_lock<std::mutex>& lock, Clock::time_point moved) {
  const auto begun = Clock::now();
  const Clock::duration settle = microseconds(device_.settle_us);
  words_.clear();
  bool events = false, awaited = held_for_room_;
  auto end = begun + kProbeEvery;
  for (const CudaQueueRef& queue : busy_) {
    if (queue->marked != queue->issued) end = std::min(end, queue->issued_at + settle);
    awaited |= queue->reached < queue->awaited;
    if (queue->word)
      words_.emplace_back(queue->word, queue->reached);
    else
      events = true;
  }
  if (events) end = std::min(end, begun + kEventEvery);
  if (launching_) end = std::min(end, begun + kLaunchEvery);
  const uint64_t issues = issues_.load(std::memory_order_relaxed), busy = busy_changes_.load(std::memory_order_relaxed);
  const uint32_t calls = calls_.load();
  const auto most_us = launching_ ? static_cast<uint32_t>(kLaunchEvery.count()) : std::max(1u, device_.nap_us);
  lock.unlock();
  uint32_t nap_us = awaited ? 1 : most_us;
  bool more = false;
  while (!stopping_.load(std::memory_order_relaxed) && busy_changes_.load(std::memory_order_relaxed) == busy &&
         calls_.load(std::memory_order_relaxed) == calls) {
    for (const auto& [word, reached] : words_)
      if (word->load(std::memory_order_acquire) > reached) return;
    const auto now = Clock::now();
    // What was issued meanwhile may have been the last of its queue.
    if (!more && issues_.load(std::memory_order_relaxed) != issues) more = true, end = std::min(end, now + settle);
    if (now >= end) return;
    if (awaited && now - moved < microseconds(device_.spin_us)) {
      sched_yield();
    } else {
      nap(calls, nap_us);
      nap_us = std::min(nap_us * 2, most_us);
    }
  }
}

Status CudaSpace::mark_other_side(const CudaQueue& queue) {
  if (queue.kind == QueueKind::kNonBlocking) return {};
  const QueueKind other = queue.kind == QueueKind::kLegacy ? QueueKind::kBlocking : QueueKind::kLegacy;
  for (const CudaQueueRef& busy : busy_)
    if (busy->kind == other)
      if (Status s = mark(*busy); !s.ok()) return s;
  return {};
}

// Updates queue.reached.
Status CudaSpace::look(CudaQueue& queue) {
  if (queue.word) {
    queue.reached = std::max(queue.reached, queue.word->load(std::memory_order_acquire));
    return {};
  }
  const Driver& cu = context_->driver();
  while (!queue.marks.empty()) {
    const auto [sequence, event] = queue.marks.front();
    const CUresult r = cu.cuEventQuery(event);
    if (r == CUDA_ERROR_NOT_READY) return {};
    if (Status s = cu.status(r, cu.cuEventQuery, "work on the GPU failed"); !s.ok()) return s;
    queue.reached = sequence;
    event_pool_.push_back(event);
    queue.marks.pop_front();
  }
  return {};
}

// The first failure is told, once; nothing is executed after it. hal.h knows only execution faults, so a command that
// the driver refuses is one too: its call returned long ago, and the ones behind it count on its effect.
void CudaSpace::fault(const Status& why, std::unique_lock<std::mutex>& lock) {
  context_->enter();
  if (!alive()) dead_ = true;
  if (faulted_.exchange(true, std::memory_order_acq_rel)) return;
  fault_ = why;
  for (const Held& held : held_) held.pending->state = Pending::State::kDropped;
  held_.clear();
  forget_held();
  lock.unlock();
  owner_.on_fault(why.code(), why.text().c_str());
  lock.lock();
  fault_told_ = true;
  wake_.notify_one();
}

// Takes what has completed out of the queues, in order.
void CudaSpace::collect(std::vector<Done>* done, std::unique_lock<std::mutex>& lock) {
  Status failed;
  for (const CudaQueueRef& queue : busy_) {
    if (queue->before) {
      if (!queue->before->pending.empty() || queue->before->completing) continue;
      queue->before.reset();
    }
    if (!dead_)
      if (Status s = look(*queue); !s.ok()) failed = std::move(s);
    while (!queue->pending.empty()) {
      Pending& front = queue->pending.front();
      const bool issued = front.state == Pending::State::kIssued;
      const bool over = issued ? front.sequence <= queue->reached || (dead_ && fault_told_)
                               : front.state == Pending::State::kDropped && fault_told_;
      if (!over) break;
      if (issued) in_flight_--;
      if (front.token) tokens_--;
      if (!queue->completing) queue->completing = front.ticket.position;
      // Behind a fault the driver may know a job that it never ran, or that it is just running.
      if (front.job && front.sequence > queue->reached) graveyard_.push_back(std::move(front.job));
      done->push_back({queue, std::move(front)});
      queue->pending.pop_front();
    }
  }
  std::erase_if(busy_, [](const CudaQueueRef& queue) {
    if (!queue->pending.empty()) return false;
    queue->busy = false;
    return true;
  });
  if (!failed.ok()) fault(failed, lock);
}

void CudaSpace::watch() {
  owner_.on_thread_start();
  prctl(PR_SET_NAME, "dp-watcher");  // as top -H and profilers show it
  prctl(PR_SET_TIMERSLACK, 1000);    // ns; the default of 50 us is as long as a whole nap
  const Driver& cu = context_->enter();
  std::vector<Done> done;
  auto moved = Clock::now(), probed = moved;
  uint32_t heard = 0;
  std::unique_lock lock(mu_);
  while (!stopping_.load(std::memory_order_relaxed)) {
    collect(&done, lock);
    if (!done.empty()) {
      lock.unlock();
      for (Done& d : done) {
        if (d.pending.from_cell_to && !faulted_.load(std::memory_order_relaxed))
          std::memcpy(d.pending.from_cell_to, d.pending.cell, d.pending.from_cell_bytes);
        if (d.pending.last) owner_.on_complete(d.queue->index, d.pending.ticket.position, d.pending.ticket.tag);
        d.pending.keeps.reset();  // may unload a module
        pending_all_.fetch_sub(1, std::memory_order_release);
      }
      lock.lock();
      for (Done& d : done) {
        d.queue->completing = 0;
        told_ = std::max(told_, d.pending.ticket.position);
        if (d.pending.cell) host_->give_cell(d.pending.cell);
      }
      done.clear();
      issue_held(lock);
      reap();
      note_oldest();
      moved = probed = Clock::now();
      continue;
    }
    if (!faulted_.load(std::memory_order_relaxed)) issue_held(lock);
    if (const uint32_t calls = calls_.load(); calls != heard)
      heard = calls, moved = Clock::now();  // worth spinning for
    Status failed;
    if (!dead_)
      for (const CudaQueueRef& queue : busy_)
        if (Status s = mark_if_settled(*queue); !s.ok()) failed = std::move(s);
    if (!host_failure_.ok()) failed = std::exchange(host_failure_, {});
    const auto now = Clock::now();
    if (failed.ok() && !dead_ && !busy_.empty() && now - probed > kProbeEvery) {
      // A context that failed writes no word any more; any call tells.
      probed = now;
      if (const CUresult r = cu.cuStreamQuery(transfer_); r != CUDA_ERROR_NOT_READY)
        failed = cu.status(r, cu.cuStreamQuery, "work on the GPU failed");
    }
    if (!failed.ok()) {
      fault(failed, lock);
      continue;
    }
    if (busy_.empty() && now - moved > microseconds(device_.linger_us)) {
      memory_->tidy();
      asleep_ = true;
      wake_.wait(lock, [&] { return !asleep_ || stopping_.load(std::memory_order_relaxed); });
      asleep_ = false;
      moved = probed = Clock::now();
    } else {
      wait_for_movement(lock, moved);
      lock.lock();
    }
  }
}

}  // namespace devproxy::hal::cuda
