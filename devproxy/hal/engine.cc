// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/engine.h"

#include <algorithm>
#include <chrono>

#include "devproxy/csrc/base/clock.h"

namespace devproxy::hal {

void Engine::begin(uint32_t seat, Turn& turn) {
  std::unique_lock lock(mu_);
  if (turn.number_ && turn.number_ == number_ && (waiters_.empty() || !spent(now_ns()))) {
    running_++;
    return;
  }
  drop_part(turn);
  settle();
  for (;;) {
    if (holder_ == kNobody) give(seat);
    // Another thread of the seat may join its turn, unless that one is over.
    if (holder_ == seat && (waiters_.empty() || !spent(now_ns()))) {
      users_++;
      break;
    }
    Waiter waiter;
    waiter.seat = seat;
    waiters_.push_back(&waiter);
    while (waiter.turn == 0) {
      waiter.given.wait_for(lock, std::chrono::nanoseconds(quantum_ns_));
      if (waiter.turn == 0) settle();
    }
    if (waiter.turn == number_) break;  // else it was taken again before this thread woke
  }
  running_++;
  turn.number_ = number_;
}

void Engine::end(Turn& turn) {
  std::lock_guard lock(mu_);
  // A turn is not taken while a kernel of it runs, so this part is of the turn that is on.
  running_--;
  if (waiters_.empty()) return;
  if (spent(now_ns())) drop_part(turn);
  settle();
}

void Engine::yield(Turn& turn) {
  if (turn.number_ == 0) return;
  std::lock_guard lock(mu_);
  drop_part(turn);
  settle();
}

bool Engine::idle() const {
  std::lock_guard lock(mu_);
  return holder_ == kNobody && waiters_.empty();
}

uint64_t Engine::switches() const {
  std::lock_guard lock(mu_);
  return switches_;
}

void Engine::drop_part(Turn& turn) {
  if (turn.number_ && turn.number_ == number_) users_--;
  turn.number_ = 0;
}

// The turn ends where nobody has a part of it, and where it is spent, others wait and nothing of it runs.
void Engine::settle() {
  if (running_ != 0 || holder_ == kNobody) return;
  if (users_ != 0 && (waiters_.empty() || !spent(now_ns()))) return;
  const uint32_t from = holder_;
  holder_ = kNobody;
  users_ = 0;
  number_++;  // parts of the old turn are worth nothing from now on
  uint32_t next = kNobody, lowest = kNobody;
  for (const Waiter* waiter : waiters_) {
    lowest = std::min(lowest, waiter->seat);
    if (waiter->seat > from) next = std::min(next, waiter->seat);
  }
  if (next == kNobody) next = lowest;
  if (next != kNobody) give(next);
}

// To all threads of the seat that wait.
void Engine::give(uint32_t seat) {
  holder_ = seat;
  number_++;
  since_ns_ = now_ns();
  users_ = 0;
  if (last_ != kNobody && last_ != seat) switches_++;
  last_ = seat;
  for (auto it = waiters_.begin(); it != waiters_.end();) {
    Waiter* const waiter = *it;
    if (waiter->seat != seat) {
      ++it;
      continue;
    }
    waiter->turn = number_;
    users_++;
    it = waiters_.erase(it);
    waiter->given.notify_one();
  }
}

}  // namespace devproxy::hal
