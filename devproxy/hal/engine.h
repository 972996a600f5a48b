// SPDX-License-Identifier: Apache-2.0
// Turns on one physical GPU that several of the job's GPUs share (Singularity, 5.2: time-slicing of replicas).
//
// A seat is one of the job's GPUs. Kernels of one seat run at a time, and those of the others wait. A seat keeps the
// turn while it has something to run: between two kernels each thread of it says whether it keeps its part (`Turn`) for
// what follows. When no thread keeps one, because all wait for a collective, for the client or for nothing, the turn
// goes to the next seat that wants it, in ascending order. So a seat runs until it comes to a point of communication or
// synchronisation, and the GPU never idles while somebody can run.
//
// Nothing depends on a seat giving the turn up. Who waits longer than the quantum takes it as soon as no kernel of the
// holder runs. So there is no deadlock, whatever a thread does while it keeps a part, and nobody starves.
//
// Locks: mu_ is a leaf; callers may hold a space's mu_ over yield(), and never over begin().
//
// Interleavings that worried us
//   1. A turn is given to a seat whose threads have not woken yet: they count as users from the moment it is given, so
//      nobody takes the GPU for free meanwhile.
//   2. A thread comes back with a part of a turn that was taken from its seat: parts carry the turn's number, and an old
//      one is worth nothing.
//   3. The quantum is over while two threads of the holder run kernels: no further kernel of it begins, and the last of
//      the two that ends hands over.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>

namespace devproxy::hal {

class Engine {
 public:
  static constexpr uint64_t kQuantumNs = 250'000'000;

  // A thread's part of its seat's turn. One thread's own.
  class Turn {
    friend class Engine;
    uint64_t number_ = 0;  // 0: none
  };

  explicit Engine(uint64_t quantum_ns = kQuantumNs) : quantum_ns_(quantum_ns) {}

  // Before a kernel: waits until it is the seat's turn.
  void begin(uint32_t seat, Turn& turn);
  // After it. The thread keeps its part.
  void end(Turn& turn);
  // The thread has nothing to run just now.
  void yield(Turn& turn);

  // Nobody has the turn, and nobody wants it.
  bool idle() const;
  // How often the GPU went from one seat to another.
  uint64_t switches() const;

 private:
  struct Waiter {
    uint32_t seat = 0;
    uint64_t turn = 0;  // that it was given; 0: it waits
    std::condition_variable given;
  };
  static constexpr uint32_t kNobody = UINT32_MAX;

  bool spent(uint64_t now) const { return now - since_ns_ >= quantum_ns_; }
  void drop_part(Turn& turn);
  void settle();
  void give(uint32_t seat);

  const uint64_t quantum_ns_;
  mutable std::mutex mu_;
  uint32_t holder_ = kNobody, last_ = kNobody;
  uint64_t number_ = 0;    // of the turn
  uint64_t since_ns_ = 0;  // when it began
  uint32_t users_ = 0;     // threads with a part of it
  uint32_t running_ = 0;   // of these, in a kernel
  uint64_t switches_ = 0;
  std::list<Waiter*> waiters_;
};

}  // namespace devproxy::hal
