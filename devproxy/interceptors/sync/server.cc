// SPDX-License-Identifier: Apache-2.0
// Streams, events and host functions, the server's half. Waiting itself is the client's: it looks at the completion
// counters in the segment.
#include "cuda_number.gen.h"
#include "devproxy/csrc/server/handlers.h"

#include <cstring>

namespace devproxy::server::sync {

namespace {

// cuda.h, CUaccessPolicyWindow: address and length come first. As of a launch's, only the beginning is looked at.
bool shows_memory(Connection& c, const Message& m, const wire::STREAM_SET_ATTRIBUTE_req& r) {
  return r.attr != kLaunchAccessPolicyWindow || r.value1 == 0 || c.memory().in_device(r.value0, 1, m.end);
}

}  // namespace

bool stream_create(Connection& c, const Message& m) {
  const auto& r = m.as<wire::STREAM_CREATE_req>();
  const auto kind =
      r.flags & cuda_number::CU_STREAM_NON_BLOCKING ? hal::QueueKind::kNonBlocking : hal::QueueKind::kBlocking;
  if (!c.device().create_stream(r.stream, kind, r.priority)) return c.fail(m, kInvalidHandle), false;
  Counters::add(c.counting().streams, 1);
  return true;
}

bool stream_destroy(Connection& c, const Message& m) {
  if (!c.device().destroy_stream(m.as<wire::STREAM_DESTROY_req>().stream)) return c.fail(m, kInvalidHandle), false;
  Counters::add(c.counting().streams, UINT64_MAX);
  return true;
}

bool stream_set_attribute(Connection& c, const Message& m) {
  const auto& r = m.as<wire::STREAM_SET_ATTRIBUTE_req>();
  hal::QueueRef* queue = c.device().queue_of(r.stream);
  if (!queue) return c.fail(m, kInvalidHandle), false;
  switch (r.attr) {
    case kLaunchAccessPolicyWindow:
    case kLaunchPriority:
    case kLaunchMemSyncDomainMap:
    case kLaunchMemSyncDomain: break;
    default: return c.fail(m, kInvalidValue), false;
  }
  LaunchAttribute attribute;
  attribute.id = r.attr;
  static_assert(offsetof(wire::STREAM_SET_ATTRIBUTE_req, value3) ==
                offsetof(wire::STREAM_SET_ATTRIBUTE_req, value0) + 3 * sizeof r.value0);
  std::memcpy(attribute.value, &r.value0, 4 * sizeof r.value0);
  // Memory that a window showed may have been freed since: then there is nothing that the hint could be about, and the
  // job can still read it back.
  const bool live = shows_memory(c, m, r);
  if (!live && !c.state().replaying().on) return c.fail(m, kInvalidValue), false;
  if (live)
    if (Status s = c.device().set_queue_attribute(*queue, {m.end, 0, m.slot}, attribute); !s.ok())
      return c.fail(m, s), false;
  return true;
}

void stream_wait_event(Connection& c, const Message& m) {
  const auto& r = m.as<wire::STREAM_WAIT_EVENT_req>();
  hal::QueueRef* queue = c.device().queue_of(r.stream);
  hal::EventRef* event = c.state().events().find(r.event);
  if (!queue || !event) return c.refuse(m, r.stream, kInvalidHandle);
  c.device().wait(*queue, {m.end, 0}, *event);
}

void stream_awaited(Connection& c, const Message& m) {
  // An event outlives the stream that it was recorded on.
  if (const hal::QueueRef* queue = c.device().queue_at(m.as<wire::STREAM_AWAITED_req>().index))
    c.device().awaited(*queue);
}

void host_func(Connection& c, const Message& m) {
  const auto& r = m.as<wire::HOST_FUNC_req>();
  hal::QueueRef* queue = c.device().queue_of(r.stream);
  if (!queue) return c.refuse(m, r.stream, kInvalidHandle);
  if (r.token == 0 || !c.host_functions().add(r.token)) return c.refuse(m, r.stream, kInvalidValue);
  c.device().host_function(*queue, {m.end, 0}, r.token);
}

void host_func_done(Connection& c, const Message& m) {
  if (!c.host_functions().finish(m.as<wire::HOST_FUNC_DONE_req>().token)) c.fail(m, kInvalidValue);
}

bool event_create(Connection& c, const Message& m) {
  const auto& r = m.as<wire::EVENT_CREATE_req>();
  if (!c.state().events().insert(r.event, c.device().create_event(!(r.flags & cuda_number::CU_EVENT_DISABLE_TIMING))))
    return c.fail(m, kInvalidHandle), false;
  c.counting().events.store(c.state().events().size(), std::memory_order_relaxed);
  return true;
}

bool event_destroy(Connection& c, const Message& m) {
  if (!c.state().events().erase(m.as<wire::EVENT_DESTROY_req>().event)) return c.fail(m, kInvalidHandle), false;
  c.counting().events.store(c.state().events().size(), std::memory_order_relaxed);
  return true;
}

bool event_record(Connection& c, const Message& m) {
  const auto& r = m.as<wire::EVENT_RECORD_req>();
  hal::QueueRef* queue = c.device().queue_of(r.stream);
  hal::EventRef* event = c.state().events().find(r.event);
  if (!queue || !event) return c.refuse(m, r.stream, kInvalidHandle), false;
  c.device().record(*queue, {m.end, 0}, *event);
  return true;
}

void event_elapsed(Connection& c, const Message& m) {
  const auto& r = m.as<wire::EVENT_ELAPSED_req>();
  hal::EventRef* start = c.state().events().find(r.start);
  if (!start) return c.reply(m, kInvalidHandle);
  const hal::EventRef first = *start;  // the next look-up may move the cached place, never the object
  hal::EventRef* end = c.state().events().find(r.end);
  if (!end) return c.reply(m, kInvalidHandle);
  auto ms = c.device().elapsed_ms(first, *end);
  if (!ms.ok()) return c.reply(m, ms.status().code());
  const wire::EVENT_ELAPSED_rep rep{*ms};
  c.reply(m, kOk, &rep, sizeof rep);
}

}  // namespace devproxy::server::sync
