// SPDX-License-Identifier: Apache-2.0
// Whether a client's messages are taken: what its dispatch thread is to do next. Pure: events in, steps and wakes out;
// no thread, lock, clock, socket or device. SharedGate puts it between two threads; tests/model/gate_model.cc runs it
// over all interleavings of them.
//
// The server thread asks (stop, cut, resume). The dispatch thread reports (at_boundary, draining, drained), and every
// report is answered with its next step, as of this moment.
//
//   kRunning --cut--> kCutting --at_boundary--> kDraining --drained--> kParked
//      ^                  |                         |                     |
//      +------------------+-------- resume ---------+---------------------+
//
// A stop is no phase. It is final, it may come in any phase, and every later answer is kLeave.
//
// Communication is no matter of the gate: a cut of many ranks must not stop between the two sides of a collective, so
// before it comes, Connection::consume() holds a communication message that goes beyond what the ranks agreed on
// (communicators.h). at_boundary() hears of it only whether others wait for this client (Boundary::owes).
#pragma once

#include <cstdint>

namespace devproxy::server {

class Gate {
 public:
  enum class Phase : uint8_t { kRunning, kCutting, kDraining, kParked };
  enum class Step : uint8_t {
    kServe,  // take the next message
    kDrain,  // take none; look until the device is idle, then say drained()
    kRest,   // parked, or aimed and at least memory: take none and sleep until the step is another
    kLeave,  // give everything back
  };
  // Who may sleep over an event and must be woken: the dispatch thread at its ring, or where it rests.
  struct Wake {
    bool ring = false, rest = false;
  };
  // Bits of attention().
  static constexpr uint32_t kStop = 1, kCut = 2;

  // -- the server thread

  Wake stop() {
    stopping_ = true;
    return {true, true};
  }
  // Stop at the first boundary where that is possible; before until_us only at one of least memory. A client that is
  // not running keeps the cut that it has.
  Wake cut(uint64_t until_us, uint64_t now_us) {
    if (phase_ != Phase::kRunning) return {};
    const bool rests = rests_;
    phase_ = Phase::kCutting;
    until_us_ = until_us;
    asked_us_ = now_us;
    rests_ = false;
    return {true, rests};
  }
  // Rest at the first boundary of least memory, as long as this one is not needed by others. A cut comes later.
  Wake aim(bool on) {
    const bool rests = rests_;
    aims_ = on;
    rests_ = false;
    return {on, rests};
  }
  // Others may need it by now: it asks again.
  Wake look_again() {
    const bool rests = rests_;
    rests_ = false;
    return {false, rests};
  }
  // A thread that is serving or draining asks by itself before it does anything else.
  Wake resume() {
    const bool rests = phase_ == Phase::kParked;
    phase_ = Phase::kRunning;
    return {false, rests};
  }

  // -- the dispatch thread

  // Between two messages.
  struct Boundary {
    uint64_t now_us = 0;
    bool host_functions_out = false;  // their ends come through the ring, so it must be served on
    bool least_memory = false;
    bool owes = false;  // others cannot come to a cut before it has gone on
  };
  Step at_boundary(const Boundary& b) {
    rests_ = aims_ && phase_ == Phase::kRunning && b.least_memory && !b.host_functions_out && !b.owes;
    if (phase_ == Phase::kCutting && !b.host_functions_out && (b.least_memory || b.now_us >= until_us_)) {
      phase_ = Phase::kDraining;
      began_us_ = b.now_us;
      pending_ = 0;
    }
    return step();
  }
  // The device is not idle: so many commands have not completed.
  Step draining(uint32_t pending) {
    if (pending != pending_) drain_progress_++;
    pending_ = pending;
    return step();
  }
  // The device is idle. Parked only if that was asked for without a break: the cut may have been given up meanwhile,
  // and another one asked for.
  Step drained(uint64_t now_us) {
    if (phase_ == Phase::kDraining && !stopping_) {
      phase_ = Phase::kParked;
      drained_us_ = now_us - began_us_;
    }
    return step();
  }
  Step step() const {
    if (stopping_) return Step::kLeave;
    if (phase_ == Phase::kDraining) return Step::kDrain;
    return phase_ == Phase::kParked || rests_ ? Step::kRest : Step::kServe;
  }
  // It waits at a boundary of least memory.
  bool rests() const { return rests_; }

  // -- facts

  Phase phase() const { return phase_; }
  // 0: the next message may be taken without a question.
  uint32_t attention() const { return (stopping_ ? kStop : 0) | (phase_ != Phase::kRunning || aims_ ? kCut : 0); }
  // Moves while a drain comes nearer to its end.
  uint64_t drain_progress() const { return drain_progress_; }
  // Of the last cut. Precondition: kParked.
  uint64_t waited_us() const { return began_us_ > asked_us_ ? began_us_ - asked_us_ : 0; }
  uint64_t drained_us() const { return drained_us_; }

 private:
  bool stopping_ = false, aims_ = false, rests_ = false;
  Phase phase_ = Phase::kRunning;
  uint64_t until_us_ = 0, asked_us_ = 0, began_us_ = 0, drained_us_ = 0;
  uint64_t drain_progress_ = 0;
  uint32_t pending_ = 0;
};

}  // namespace devproxy::server
