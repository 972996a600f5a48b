// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/stored_graph.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "devproxy/csrc/wire/graph_step.h"

namespace devproxy::server {

namespace {

// A command on a stream that nobody waits for. No launch within a launch: a graph in a graph travels as its steps.
bool may_be_step(const wire::OpInfo* info) {
  return info && info->stream_offset >= 0 && !info->is_sync &&
         info->opcode != static_cast<uint16_t>(wire::Opcode::GRAPH_LAUNCH);
}

}  // namespace

bool StoredGraph::splice(size_t first, size_t count, const uint8_t* bytes, size_t n_bytes) {
  if (first > steps.size() || count > steps.size() - first) return false;
  std::vector<GraphStep> fresh;
  for (size_t at = 0; at < n_bytes;) {
    wire::GraphStepHead head;
    if (n_bytes - at < sizeof head) return false;
    std::memcpy(&head, bytes + at, sizeof head);
    at += sizeof head;
    GraphStep step;
    step.info = wire::op_info(head.opcode);
    if (!may_be_step(step.info) || head.request_bytes != step.info->req_bytes) return false;
    if (head.bulk_bytes != 0 && !step.info->has_bulk) return false;
    const size_t request = wire::graph_step_round(head.request_bytes), bulk = wire::graph_step_round(head.bulk_bytes);
    if (request > n_bytes - at || bulk > n_bytes - at - request) return false;
    std::memcpy(step.request, bytes + at, head.request_bytes);
    if (head.bulk_bytes) {
      step.bulk_bytes = head.bulk_bytes;
      step.bulk = std::make_unique<uint8_t[]>(head.bulk_bytes);
      std::memcpy(step.bulk.get(), bytes + at + request, head.bulk_bytes);
    }
    at += request + bulk;
    fresh.push_back(std::move(step));
  }
  const auto begin = steps.begin() + static_cast<std::ptrdiff_t>(first);
  const auto where = steps.erase(begin, begin + static_cast<std::ptrdiff_t>(count));
  steps.insert(where, std::make_move_iterator(fresh.begin()), std::make_move_iterator(fresh.end()));
  records = static_cast<uint64_t>(std::count_if(steps.begin(), steps.end(), [](const GraphStep& s) {
    return s.info->opcode == static_cast<uint16_t>(wire::Opcode::EVENT_RECORD);
  }));
  communicates = std::any_of(steps.begin(), steps.end(), [](const GraphStep& s) { return s.info->communicates; });
  return true;
}

std::vector<uint8_t> StoredGraph::encoded() const {
  std::vector<uint8_t> out;
  auto append = [&](const void* from, size_t n) {
    const auto* p = static_cast<const uint8_t*>(from);
    out.insert(out.end(), p, p + n);
    out.resize(wire::graph_step_round(out.size()));
  };
  for (const GraphStep& step : steps) {
    const wire::GraphStepHead head{step.info->opcode, step.info->req_bytes, static_cast<uint32_t>(step.bulk_bytes), 0};
    append(&head, sizeof head);
    append(step.request, step.info->req_bytes);
    append(step.bulk.get(), step.bulk_bytes);
  }
  return out;
}

}  // namespace devproxy::server
