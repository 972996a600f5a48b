// SPDX-License-Identifier: Apache-2.0
// The steps of a graph, as they travel in GRAPH_CREATE and GRAPH_UPDATE: each is a message that is a command on a
// stream. A launch has the server post them to itself, with the launch's stream (and a HOST_FUNC's token) put in.
//
#pragma once

#include <cstddef>
#include <cstdint>

namespace devproxy::wire {

// Then come the request and the bulk data, each filled up with zeroes to kGraphStepAlign.
struct GraphStepHead {
  uint16_t opcode;
  uint16_t request_bytes;
  uint32_t bulk_bytes;
  uint64_t zero;
};
inline constexpr size_t kGraphStepAlign = 16;
static_assert(sizeof(GraphStepHead) == kGraphStepAlign);
inline constexpr size_t graph_step_round(size_t bytes) {
  return (bytes + kGraphStepAlign - 1) & ~(kGraphStepAlign - 1);
}

// Ring positions of a launch that ends at `end` and has `records` EVENT_RECORD steps: the record of number j, from 0,
// has the first of these and what lies between it and the next one the position behind it; the launch itself ends at
// `end`, behind all. So an event of the graph is complete when its record is, and no sooner.
inline constexpr uint64_t graph_record_position(uint64_t end, uint64_t records, uint64_t j) {
  return end - 2 * (records - j);
}
// How many bytes a launch's record must have beside its header, so that the positions are its own.
inline constexpr uint64_t graph_positions(uint64_t records) { return 2 * records + 2; }

}  // namespace devproxy::wire
