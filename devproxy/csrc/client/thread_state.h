// SPDX-License-Identifier: Apache-2.0
// What one thread of the job owns in the client: its reply slot, its context stack, its default-stream mode.
#pragma once

#include <cstdint>

#include "devproxy/csrc/wire/segment.h"

namespace devproxy::client {

inline constexpr int kMaxDevices = 64;  // devproxy/machine.py: MOST_GPUS
inline constexpr int kContextStack = 32;
inline constexpr uint16_t kNoSlot = 0xffff;
inline constexpr uint16_t kSharedSlot = kReplySlots - 1;  // for threads beyond the table; taken under a lock

struct ThreadState {
  uint16_t slot = kNoSlot;
  bool per_thread_default = false;
  bool past_fault = false;                    // inside of a call that is answered also after an execution fault
  bool woke_server = false;                   // since its last wait: the next one sleeps at once, see attachment.cc
  uint32_t seq[kMaxDevices] = {};             // last sequence number of this slot, per attachment
  int depth = 0;                              // contexts on the stack; the current one is the last
  uint64_t contexts[kContextStack] = {};      // VHandle values
  uint64_t default_stream[kMaxDevices] = {};  // VHandle value of this thread's default stream, made on first use
};

// initial-exec: the shim is preloaded, so its TLS is in the static block and an access is one instruction.
extern constinit thread_local ThreadState t_state __attribute__((tls_model("initial-exec")));

uint16_t take_thread_slot();

// This thread's slot; takes one at first use, gives it back when the thread ends.
inline uint16_t thread_slot() {
  return __builtin_expect(t_state.slot != kNoSlot, 1) ? t_state.slot : take_thread_slot();
}

}  // namespace devproxy::client
