// SPDX-License-Identifier: Apache-2.0
// Pages that ranks share, on the software GPU: those of one file, mapped into each rank's range.
#pragma once

#include <memory>

#include "devproxy/hal/engine.h"
#include "devproxy/hal/splice/physical.h"

namespace devproxy::hal::soft {

class SoftPages final : public splice::PhysicalMemory {
 public:
  // engine: of the GPU; nullptr: it is always idle.
  // Other traits: tests of what other devices have. The host can read device memory here, so guards may stay.
  static StatusOr<std::unique_ptr<SoftPages>> open(const Engine* engine, const Traits& traits = {});
  ~SoftPages() override;
  // memory_fd is mapped at base, as a whole.
  std::unique_ptr<splice::RankMemory> rank(uint64_t base, int memory_fd) const;

  Status grow_pool(uint64_t bytes) override;
  void empty_pool(uint64_t at, uint64_t bytes) override;
  StatusOr<bool> same(const std::vector<Pair>& pairs) override;
  bool is_known_same(const Pair& pair) override;
  Status copy(uint64_t to, uint64_t from, uint64_t bytes) override;
  StatusOr<splice::Contents> hash(splice::Runner&, const std::vector<Range>& ranges) override;
  uint64_t kernel_ns(uint64_t, uint64_t measured_ns) const override { return measured_ns; }
  bool idle() override { return !engine_ || engine_->idle(); }

 private:
  SoftPages(int fd, const Engine* engine, const Traits& traits) : PhysicalMemory(traits), fd_(fd), engine_(engine) {}
  const int fd_;
  const Engine* const engine_;
};

}  // namespace devproxy::hal::soft
