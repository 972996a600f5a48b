// SPDX-License-Identifier: Apache-2.0
// Graphs, the server's half: what was instantiated is kept as a list of messages, and a launch has the server post them
// to itself on the launch's stream. So each step is checked by the handler of its message, at every launch, and a
// device needs to know nothing of graphs.
//
// The order of the list is one that the graph's edges allow; the client has chosen it. Launches of one graph never
// overlap (cuda.h, cuGraphLaunch): where the stream is another than last time, the launch waits for the one before.
#include "devproxy/csrc/wire/graph_step.h"

#include <cstring>

#include "devproxy/csrc/server/handlers.h"

namespace devproxy::server::graph {

bool graph_create(Connection& c, const Message& m) {
  const auto& r = m.as<wire::GRAPH_CREATE_req>();
  if (r.graph.kind() != HandleKind::kGraph || c.state().graphs().find(r.graph))
    return c.reply(m, kInvalidHandle), false;
  StoredGraph graph;
  if (!graph.splice(0, 0, m.bulk, m.bulk_bytes)) return c.reply(m, kInvalidValue), false;
  graph.done = c.device().create_event(false);
  if (!c.state().graphs().insert(r.graph, std::move(graph))) return c.reply(m, kInvalidHandle), false;
  return true;
}

void graph_update(Connection& c, const Message& m) {
  const auto& r = m.as<wire::GRAPH_UPDATE_req>();
  StoredGraph* graph = c.state().graphs().find(r.graph);
  if (!graph) return c.fail(m, kInvalidHandle);
  if (!graph->splice(r.first, r.count, m.bulk, m.bulk_bytes)) c.fail(m, kInvalidValue);
}

bool graph_destroy(Connection& c, const Message& m) {
  const auto& r = m.as<wire::GRAPH_DESTROY_req>();
  // A launch that has not completed keeps what it needs by itself: its steps were submitted.
  if (!c.state().graphs().erase(r.graph)) return c.fail(m, kInvalidHandle), false;
  return true;
}

void graph_launch(Connection& c, const Message& m) {
  const auto& r = m.as<wire::GRAPH_LAUNCH_req>();
  hal::QueueRef* queue = c.device().queue_of(r.stream);
  StoredGraph* graph = c.state().graphs().find(r.graph);
  if (!queue || !graph) return c.refuse(m, r.stream, kInvalidHandle);
  // Bulk data in chunks takes no place in the ring, so its length says nothing of the positions that are free.
  if (r.bulk_chunks || sizeof r + m.bulk_bytes < wire::graph_positions(graph->records))
    return c.refuse(m, r.stream, kInvalidValue);
  Message step;
  step.slot = m.slot;
  step.in_graph = true;
  step.end = wire::graph_record_position(m.end, graph->records, 0) - 1;
  if (graph->last_stream.value && graph->last_stream != r.stream) c.device().wait(*queue, {step.end, 0}, graph->done);
  graph->last_stream = r.stream;
  uint64_t token = r.token, record = 0;
  for (const GraphStep& stored : graph->steps) {
    step.info = stored.info;
    std::memcpy(step.request, stored.request, sizeof step.request);
    std::memcpy(step.request + stored.info->stream_offset, &r.stream, sizeof r.stream);
    if (stored.info->opcode == static_cast<uint16_t>(wire::Opcode::HOST_FUNC)) {
      std::memcpy(step.request + offsetof(wire::HOST_FUNC_req, token), &token, sizeof token);
      token++;
    }
    const bool records = stored.info->opcode == static_cast<uint16_t>(wire::Opcode::EVENT_RECORD);
    if (records) step.end = wire::graph_record_position(m.end, graph->records, record++);
    step.bulk = stored.bulk.get();
    step.bulk_bytes = stored.bulk_bytes;
    handler_of (*stored.info)(c, step);
    if (records) step.end++;
    if (c.poisoned()) return;
  }
  c.device().record(*queue, {m.end, 0}, graph->done);
}

}  // namespace devproxy::server::graph
