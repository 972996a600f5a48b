// SPDX-License-Identifier: Apache-2.0
// Communicators, the client's half: what libnccl.so.2 (interceptors/nccl) asks of the core.
#include <string.h>

#include <algorithm>
#include <atomic>

#include "devproxy/csrc/core/core.h"
#include "devproxy/csrc/core/watched.h"
#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/graph/hooks.h"

namespace devproxy::sa::comm {

using client::DeviceState;
using client::Reply;
using client::StreamObj;
using wire::Opcode;

namespace {

DeviceState* state_of(int32_t device, int32_t* error) { return client::device_state(device, error); }

// All devices' legacy streams share a handle, so resolve() says CU_STREAM_LEGACY, and the device comes from beside it.
constexpr uint64_t kLegacy = 1;

// The stream behind what resolve or create_stream gave; nullptr where it is none of the device's.
StreamObj* stream_of(int32_t device, uint64_t stream, DeviceState** d) {
  if (stream == kLegacy) {
    *d = client::device_state_if_attached(device);
    return *d ? (*d)->legacy() : nullptr;
  }
  StreamObj* s = nullptr;
  return client::resolve_stream(stream, &s, d) == kOk && s->device == device ? s : nullptr;
}

int32_t current_device(int32_t* device) {
  DeviceState* d = nullptr;
  const int32_t rc = client::current_device(&d);
  if (rc == kOk) *device = d->ordinal();
  return rc;
}

int32_t resolve(uint64_t stream, CoreStream* out) {
  StreamObj* s = nullptr;
  DeviceState* d = nullptr;
  const int32_t rc = client::resolve_stream(stream, &s, &d);
  if (rc != kOk) return rc;
  const uint64_t handle = s == d->legacy() ? kLegacy : s->handle.load(std::memory_order_relaxed);
  *out = {handle, d->ordinal(), s->capture.load(std::memory_order_relaxed) != 0};
  return kOk;
}

int32_t create_stream(int32_t device, uint64_t* stream) {
  int32_t error = kOk;
  DeviceState* d = state_of(device, &error);
  const StreamObj* s = d ? d->create_stream(CU_STREAM_NON_BLOCKING, 0, 0, &error) : nullptr;
  if (s) *stream = s->handle.load(std::memory_order_relaxed);
  return error;
}

int32_t destroy_stream(int32_t device, uint64_t stream) {
  DeviceState* d = nullptr;
  StreamObj* s = stream_of(device, stream, &d);
  return s ? d->destroy_stream(s) : static_cast<int32_t>(kInvalidHandle);
}

int32_t query_stream(int32_t device, uint64_t stream) {
  DeviceState* d = nullptr;
  const StreamObj* s = stream_of(device, stream, &d);
  if (!s) return kInvalidHandle;
  if (d->idle(*s)) return kOk;
  d->want(*s);
  const int32_t rc = d->conn().error_now_and_then();
  return rc == kOk ? static_cast<int32_t>(kNotReady) : rc;
}

int32_t wait_stream(int32_t device, uint64_t stream) {
  DeviceState* d = nullptr;
  const StreamObj* s = stream_of(device, stream, &d);
  return s ? d->wait_stream(*s) : static_cast<int32_t>(kInvalidHandle);
}

int32_t make_comm(int32_t device, uint64_t* comm) {
  static std::atomic<uint64_t> serial{0};
  int32_t error = kOk;
  if (!state_of(device, &error)) return error;
  *comm = VHandle::make(HandleKind::kComm, ++serial << 4 | static_cast<uint64_t>(device), 0).value;
  return kOk;
}

int32_t init_comm(int32_t device, uint64_t comm, uint64_t stream, CommKey key, uint32_t ranks, uint32_t rank) {
  DeviceState* d = nullptr;
  StreamObj* s = stream_of(device, stream, &d);
  if (!s) return kInvalidHandle;
  const wire::COMM_INIT_req req{
      VHandle{comm}, VHandle{s->handle.load(std::memory_order_relaxed)}, key.low, key.high, ranks, rank};
  d->tell_all();
  uint64_t end;
  const int32_t rc = d->conn().post(Opcode::COMM_INIT, req, &end);
  if (rc == kOk) s->note(end);
  return rc;
}

int32_t comm_group(uint64_t stream, const CommOp* ops, size_t n) {
  DeviceState* d = nullptr;
  StreamObj* s = stream_of(client::ContextMap::device_of(ops->comm), stream, &d);
  if (!s) return kInvalidHandle;
  if (CUresult captured; graph::capturing() && graph::capture_comm(s, ops, n, &captured)) return captured;
  if (n * sizeof *ops > kMaxInlineBytes) return kInvalidValue;
  wire::COMM_GROUP_req req{};
  req.stream = VHandle{s->handle.load(std::memory_order_relaxed)};
  uint64_t end;
  const int32_t rc = d->conn().post_bulk(Opcode::COMM_GROUP, req, {ops, n * sizeof *ops}, &end);
  if (rc == kOk) s->note(end);
  return rc;
}

template <class Request>
int32_t announce(Opcode op, int32_t device, const Request& req) {
  DeviceState* d = client::device_state_if_attached(device);
  return d ? d->conn().post(op, req) : static_cast<int32_t>(kInvalidDevice);
}

int32_t abort_comm(int32_t device, uint64_t comm) {
  return announce(Opcode::COMM_ABORT, device, wire::COMM_ABORT_req{VHandle{comm}});
}

int32_t destroy_comm(int32_t device, uint64_t comm) {
  return announce(Opcode::COMM_DESTROY, device, wire::COMM_DESTROY_req{VHandle{comm}});
}

int32_t comm_state(int32_t device, uint64_t comm, uint32_t* state, char* why, size_t why_bytes) {
  DeviceState* d = client::device_state_if_attached(device);
  if (!d || why_bytes == 0) return kInvalidValue;
  wire::COMM_STATE_rep rep{};
  Reply reply{&rep, sizeof rep, why, why_bytes - 1};
  const int32_t rc = d->conn().call(Opcode::COMM_STATE, wire::COMM_STATE_req{VHandle{comm}}, &reply);
  why[rc == kOk ? std::min(reply.tail_got, why_bytes - 1) : 0] = 0;
  *state = rep.state;
  return rc;
}

bool held(int32_t device) {
  DeviceState* d = client::device_state_if_attached(device);
  return d && d->conn().held();
}

int32_t device_of(uint64_t addr) {
  const client::Place place = client::place_of(addr);
  return place.pinned ? -1 : place.device;
}

constexpr Core kCore = {
    .init = client::init,
    .current_device = current_device,
    .resolve_stream = resolve,
    .create_stream = create_stream,
    .destroy_stream = destroy_stream,
    .query_stream = query_stream,
    .wait_stream = wait_stream,
    .make_comm = make_comm,
    .comm_init = init_comm,
    .comm_group = comm_group,
    .comm_abort = abort_comm,
    .comm_destroy = destroy_comm,
    .comm_state = comm_state,
    .held = held,
    .device_of = device_of,
};

}  // namespace
}  // namespace devproxy::sa::comm

const devproxy::Core* devproxy_core(uint32_t version) {
  return version == devproxy::kCoreVersion ? &devproxy::sa::comm::kCore : nullptr;
}

#ifdef DEVPROXY_CHECK_SENDS
int devproxy_call_begins(const char* name, uint64_t sends) { return devproxy::client::Sends::begin(name, sends); }
void devproxy_call_ends() { devproxy::client::Sends::end(); }
#endif
