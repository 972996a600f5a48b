// SPDX-License-Identifier: Apache-2.0
// What the server tells a client outside of replies: completions, faults, and the end. Everything here is
// async-signal-safe and may be called by any thread, also by the crash handler of a dying server.
#pragma once

#include <atomic>
#include <cstdint>

#include "devproxy/csrc/transport/segment_view.h"

namespace devproxy::server {

class Lifeline {
 public:
  explicit Lifeline(const SegmentView& view) : view_(view) {}
  Lifeline(const Lifeline&) = delete;

  // The command that ends at `position` of stream `index` has completed.
  void complete(uint32_t index, uint64_t position) noexcept;
  // The chunk may be taken again. Precondition: index < kChunks.
  void release_chunk(uint32_t index) noexcept;
  // An execution fault, or the server's end as one: the first text and code stay.
  void fault(int32_t result, const char* text) noexcept;
  // The client gives the credit back that it does not use.
  void want_credit() noexcept;
  // Says whether devproxy holds the client (ControlPage::held).
  void hold(bool on) noexcept;
  // What an earlier server of this client had told it; the segment says it already.
  void restore(int32_t result, const char* text, bool ended) noexcept;
  bool ended() const noexcept { return ended_.load(std::memory_order_relaxed); }
  bool faulted() const noexcept { return fault_code_.load(std::memory_order_acquire) != 0; }
  int32_t fault_code() const noexcept { return fault_code_.load(std::memory_order_acquire); }
  const char* fault_text() const noexcept { return faulted() ? fault_text_ : ""; }
  // Nothing of this client will be executed any more: says so, completes everything, wakes everybody.
  //   worker in complete()          whoever ends
  //   completed = position          ended_ = true
  //   fence                         fence
  //   ended_ ?  -> completed = max  completed = max
  // One of the two sees the other, so the last value of the counter is the largest one.
  void end(ServerState state) noexcept;

 private:
  SegmentView view_;
  std::atomic<bool> ended_{false};
  std::atomic<bool> fault_claimed_{false};
  std::atomic<int32_t> fault_code_{0};  // ours: what the control page says, the client can change
  char fault_text_[sizeof ControlPage::sticky_text] = {};
};

}  // namespace devproxy::server
