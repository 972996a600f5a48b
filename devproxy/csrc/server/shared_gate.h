// SPDX-License-Identifier: Apache-2.0
// A Gate between the server thread, which asks, and the dispatch thread, which obeys.
//
// Every event is one critical section, so the interleavings are those of the events (tests/model/gate_model.cc). What
// the dispatch thread wrote before drained() is visible to the server thread once it has seen kParked, and back with
// resume(): the mutex orders both. attention_ is a copy of Gate::attention() that the dispatch thread reads without the
// lock, once per message.
//
// Locks: mu_ is a leaf.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "devproxy/csrc/server/gate.h"

namespace devproxy::server {

class SharedGate {
 public:
  using Step = Gate::Step;

  // Whoever is about to sleep at the ring asks with seq_cst after it has said so: either it sees the event, or the
  // event's thread sees that it sleeps.
  uint32_t attention(std::memory_order order = std::memory_order_relaxed) const { return attention_.load(order); }
  bool stopping() const { return attention() & Gate::kStop; }

  // -- any thread. True: the dispatch thread may sleep at its ring, and the caller wakes it.
  [[nodiscard]] bool stop() {
    return change([](Gate& g) { return g.stop(); });
  }
  [[nodiscard]] bool cut(uint64_t until_us, uint64_t now_us) {
    return change([=](Gate& g) { return g.cut(until_us, now_us); });
  }
  void resume() {
    change([](Gate& g) { return g.resume(); });
  }
  [[nodiscard]] bool aim(bool on) {
    return change([=](Gate& g) { return g.aim(on); });
  }
  void look_again() {
    change([](Gate& g) { return g.look_again(); });
  }
  template <class Ask>  // ask(const Gate&)
  auto ask(Ask ask) const {
    std::lock_guard lock(mu_);
    return ask(gate_);
  }
  Gate::Phase phase() const {
    return ask([](const Gate& g) { return g.phase(); });
  }

  // -- the dispatch thread
  Step at_boundary(const Gate::Boundary& b) {
    return report([&](Gate& g) { return g.at_boundary(b); });
  }
  Step draining(uint32_t pending) {
    return report([=](Gate& g) { return g.draining(pending); });
  }
  Step drained(uint64_t now_us) {
    return report([=](Gate& g) { return g.drained(now_us); });
  }
  // Sleeps as long as the step is kRest.
  Step rest() {
    std::unique_lock lock(mu_);
    rest_.wait(lock, [&] { return gate_.step() != Step::kRest; });
    return gate_.step();
  }

 private:
  template <class Event>
  bool change(Event event) {
    std::lock_guard lock(mu_);
    const Gate::Wake wake = event(gate_);
    attention_.store(gate_.attention(), std::memory_order_seq_cst);
    if (wake.rest) rest_.notify_all();
    return wake.ring;
  }
  template <class Event>
  Step report(Event event) {
    std::lock_guard lock(mu_);
    return event(gate_);  // changes no bit of attention()
  }

  mutable std::mutex mu_;
  std::condition_variable rest_;
  Gate gate_;
  std::atomic<uint32_t> attention_{0};
};

}  // namespace devproxy::server
