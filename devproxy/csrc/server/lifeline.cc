// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/lifeline.h"

#include <climits>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/result.h"

namespace devproxy::server {

namespace {

void wake_stream(StreamState& stream) noexcept {
  if (stream.waiters.load(std::memory_order_relaxed) == 0) return;
  stream.wake_seq.fetch_add(1, std::memory_order_relaxed);
  futex_wake(&stream.wake_seq, INT_MAX);
}

}  // namespace

void Lifeline::complete(uint32_t index, uint64_t position) noexcept {
  StreamState& stream = view_.streams()[index];
  stream.completed.store(position, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (ended_.load(std::memory_order_relaxed)) stream.completed.store(UINT64_MAX, std::memory_order_release);
  wake_stream(stream);
}

void Lifeline::release_chunk(uint32_t index) noexcept {
  ControlPage* control = view_.control();
  control->chunk_busy[index].store(0, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (control->chunk_waiters.load(std::memory_order_relaxed) == 0) return;
  control->chunk_seq.fetch_add(1, std::memory_order_relaxed);
  futex_wake(&control->chunk_seq, INT_MAX);
}

void Lifeline::fault(int32_t result, const char* text) noexcept {
  if (fault_claimed_.exchange(true)) return;
  ControlPage* control = view_.control();
  size_t n = 0;
  for (; text[n] && n + 1 < sizeof fault_text_; n++) control->sticky_text[n] = fault_text_[n] = text[n];
  control->sticky_text[n] = fault_text_[n] = 0;
  control->sticky_error.store(result, std::memory_order_release);
  fault_code_.store(result, std::memory_order_release);
}

void Lifeline::want_credit() noexcept { view_.control()->credit_wanted.fetch_add(1, std::memory_order_relaxed); }

void Lifeline::hold(bool on) noexcept {
  if (view_.mapped()) view_.control()->held.store(on, std::memory_order_relaxed);
}

void Lifeline::restore(int32_t result, const char* text, bool ended) noexcept {
  ended_.store(ended, std::memory_order_relaxed);
  if (!result || fault_claimed_.exchange(true)) return;
  size_t n = 0;
  for (; text[n] && n + 1 < sizeof fault_text_; n++) fault_text_[n] = text[n];
  fault_text_[n] = 0;
  fault_code_.store(result, std::memory_order_release);
}

void Lifeline::end(ServerState state) noexcept {
  ended_.store(true, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ControlPage* control = view_.control();
  control->server_state.store(static_cast<uint32_t>(state), std::memory_order_release);
  for (uint32_t i = 0; i < kStreams; i++) view_.streams()[i].completed.store(UINT64_MAX, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (uint32_t i = 0; i < kStreams; i++) wake_stream(view_.streams()[i]);
  // A thread that waits for an answer will get none: it wakes, finds its sequence number missing, and looks at
  // server_state. The number that it waits for is not ours to invent.
  for (uint32_t i = 0; i < kReplySlots; i++) {
    ReplySlot& slot = view_.replies()[i];
    if (slot.waiting.load(std::memory_order_relaxed)) futex_wake(&slot.seq, INT_MAX);
  }
  control->space_seq.fetch_add(1, std::memory_order_relaxed);
  futex_wake(&control->space_seq, INT_MAX);
  control->chunk_seq.fetch_add(1, std::memory_order_relaxed);
  futex_wake(&control->chunk_seq, INT_MAX);
  control->hostfunc_seq.fetch_add(1, std::memory_order_relaxed);
  futex_wake(&control->hostfunc_seq, INT_MAX);
}

}  // namespace devproxy::server
