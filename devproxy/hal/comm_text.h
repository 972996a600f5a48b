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
  constexpr const char* kTypes[kCommTypes] = {"int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
                                              "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  constexpr const char* kReductions[kCommReductions] = {"sum", "prod", "max", "min", "avg", "premulsum"};
  const CommKind kind = op.kind_of();
  const bool reduces = kind == CommKind::kAllReduce || kind == CommKind::kReduce || kind == CommKind::kReduceScatter;
  const bool has_root = kind == CommKind::kBroadcast || kind == CommKind::kReduce || kind == CommKind::kGather ||
                        kind == CommKind::kScatter;
  std::string text = op.kind < kCommKinds ? kNames[op.kind] : "?";
  text += "(" + std::to_string(op.count) + " x " + (op.type < kCommTypes ? kTypes[op.type] : "?");
  if (reduces) text += std::string(", ") + (op.reduction < kCommReductions ? kReductions[op.reduction] : "?");
  if (has_root) text += ", root " + std::to_string(op.peer);
  return text + ")";
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
