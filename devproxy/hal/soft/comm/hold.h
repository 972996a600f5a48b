// SPDX-License-Identifier: Apache-2.0
// Whether the members in a space may begin something (hal/pending.h).
//
// Lanes enter before they say something to other members or take something of theirs, and leave when it is said, also to
// other trees. Who withholds asks until nobody is inside. Both look at the other's word behind their own, sequentially
// consistent: either the lane sees that it may not, or who withholds sees the lane.
//
// Nobody waits here: a lane that is inside may ask a peer's server for its memory, and that server may be withholding.
#pragma once

#include <atomic>
#include <cstdint>

namespace devproxy::hal::soft {

class CommHold {
 public:
  // A lane; false: not now.
  [[nodiscard]] bool enter() {
    inside_.fetch_add(1, std::memory_order_seq_cst);
    if (!on_.load(std::memory_order_seq_cst)) return true;
    leave();
    return false;
  }
  // Whatever is said: who takes something back is inside until the others know.
  void enter_anyway() { inside_.fetch_add(1, std::memory_order_seq_cst); }
  void leave() { inside_.fetch_sub(1, std::memory_order_release); }
  bool on() const { return on_.load(std::memory_order_acquire); }

  // Any other thread. True: nobody is inside.
  bool set(bool on) {
    on_.store(on, std::memory_order_seq_cst);
    return inside_.load(std::memory_order_seq_cst) == 0;
  }

 private:
  std::atomic<uint32_t> inside_{0};
  std::atomic<bool> on_{false};
};

}  // namespace devproxy::hal::soft
