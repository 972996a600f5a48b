// SPDX-License-Identifier: Apache-2.0
// Do members of a communicator mean the same operation, and if not, what each does.
#pragma once

#include <string>

#include "devproxy/csrc/args/comm.h"

namespace devproxy::hal {

inline bool is_pair(const CommOp& op) { return op.kind_of() == CommKind::kSend || op.kind_of() == CommKind::kRecv; }

inline bool match(const CommOp& a, const CommOp& b) {
  return a.kind == b.kind && a.type == b.type && a.reduction == b.reduction && a.peer == b.peer && a.count == b.count;
}

inline std::string text_of(const CommOp& op) {
  constexpr const char* kNames[kCommKinds] = {"AllReduce", "Broadcast", "Reduce",  "AllGather", "ReduceScatter",
                                              "AllToAll",  "Gather",    "Scatter", "Send",      "Recv"};
  return std::string(op.kind < kCommKinds ? kNames[op.kind] : "?") + "(count " + std::to_string(op.count) + ", type " +
         std::to_string(op.type) + ", op " + std::to_string(op.reduction) + ", root " + std::to_string(op.peer) + ")";
}

inline std::string text_of_pair(uint32_t from, uint64_t sent, uint32_t to, uint64_t wanted) {
  return "rank " + std::to_string(from) + " sends " + std::to_string(sent) + " bytes to rank " + std::to_string(to) +
         ", which receives " + std::to_string(wanted);
}

// match() is false for them.
inline std::string text_of_ranks(uint32_t a, const CommOp& what_a, uint32_t b, const CommOp& what_b) {
  return "the ranks do different things: rank " + std::to_string(a) + " " + text_of(what_a) + ", rank " +
         std::to_string(b) + " " + text_of(what_b);
}

}  // namespace devproxy::hal
