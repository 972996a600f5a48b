// SPDX-License-Identifier: Apache-2.0
// What those of the job's GPUs share that are on one physical GPU: its turns and, where the device can, equal work and
// equal memory (Singularity, 5.2).
#pragma once

#include <cstdint>
#include <memory>

#include "devproxy/hal/engine.h"

namespace devproxy::hal {

struct SpliceCounts {
  uint64_t squashed = 0;        // launches that another rank's stood for
  uint64_t validations = 0;     // times that launches of several ranks were compared
  uint64_t different = 0;       // of these, those that were not equal
  uint64_t given_up = 0;        // times that a rank did not come
  uint64_t broken = 0;          // times that a rank wrote spliced memory on its own
  uint64_t compared_bytes = 0;  // of launches' arguments in memory
  uint64_t saved_bytes = 0;     // of physical memory, now
  uint64_t lent_bytes = 0;      // of results that another rank's stood for, without a copy
  uint64_t settled_bytes = 0;   // of these, those that were copied after all
  bool off = false;             // it cost more than it saved, so it learns nothing more until another rank joins
};

// Of a device: what it does so that equal ranks cost less. Any thread.
class Splicing {
 public:
  virtual ~Splicing() = default;
  virtual SpliceCounts counts() const = 0;
  // That of the counts. Takes no lock.
  virtual uint64_t saved_bytes() const = 0;
};

struct Sharing {
  explicit Sharing(uint32_t seats) : seats(seats) {}
  const uint32_t seats;  // the job's GPUs that are on it
  Engine engine;
  std::shared_ptr<Splicing> splicing;  // the first device that can makes it; nullptr: none of them can
};

}  // namespace devproxy::hal
