// SPDX-License-Identifier: Apache-2.0
// Streams, events, host functions. Completion is a counter in shared memory, so queries and waits send nothing.
#include <pthread.h>
#include <signal.h>
#include <string.h>

#include <algorithm>
#include <unordered_map>

#include "devproxy/interceptors/sync/client.h"

#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/graph/hooks.h"
#include "devproxy/interceptors/launch/client.h"

namespace devproxy::sa::sync {

using client::DeviceState;
using client::EventObj;
using client::events;
using client::StreamObj;
using wire::Opcode;

namespace {

// Posts one command on a stream and notes it as the stream's newest.
template <class Req>
int32_t command(DeviceState* d, StreamObj* s, Opcode op, const Req& req, uint64_t* end_out = nullptr) {
  uint64_t end = 0;
  const int32_t rc = d->conn().post(op, req, &end);
  if (rc == kOk) s->note(end);
  if (end_out) *end_out = end;
  return rc;
}

VHandle vhandle(const StreamObj* s) { return VHandle{s->handle.load(std::memory_order_relaxed)}; }

// cuda.h, cuStreamCreateWithPriority: a priority outside of cuCtxGetStreamPriorityRange is moved into it.
int clamped(int priority) { return std::clamp(priority, -5, 0); }

// Waits as CUDA waits on a stream: the legacy stream waits for every blocking stream too.
int32_t wait(DeviceState* d, StreamObj* s) {
  if (s->index == 0) {
    const auto waits_for = [d](uint32_t i) {
      const StreamObj& other = *d->stream_at(i);
      return !(other.flags & CU_STREAM_NON_BLOCKING) && !d->idle(other);
    };
    for (uint32_t i = 1; i < d->streams_made(); ++i)
      if (waits_for(i)) d->want(*d->stream_at(i));
    d->want(*s);
    for (uint32_t i = 1; i < d->streams_made(); ++i)
      if (waits_for(i))
        if (const int32_t rc = d->wait_stream(*d->stream_at(i)); rc != kOk) return rc;
  }
  return d->wait_stream(*s);
}

}  // namespace

// -- streams --------------------------------------------------------------------------------------------------------

CUresult cuStreamCreateWithPriority(CUstream* phStream, unsigned int flags, int priority) {
  if (flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING)) return CUDA_ERROR_INVALID_VALUE;
  DP_CURRENT(d);
  int32_t error = kOk;
  StreamObj* s = d->create_stream(flags, clamped(priority), client::current_context(), &error);
  if (!s) return result(error);
  *phStream = handle<CUstream>(s->handle.load());
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* phStream, unsigned int Flags) {
  return sync::cuStreamCreateWithPriority(phStream, Flags, 0);
}

CUresult cuStreamDestroy_v2(CUstream hStream) {
  if (bits(hStream) <= 2) return CUDA_ERROR_INVALID_HANDLE;
  DP_STREAM(hStream, s, d);
  return result(d->destroy_stream(s));  // cuda.h: returns at once; what is queued still runs
}

CUresult captured::cuStreamDestroy_v2(CUstream hStream) {
  if (bits(hStream) <= 2) return CUDA_ERROR_INVALID_HANDLE;
  DP_STREAM(hStream, s, d);
  graph::stream_destroyed(s);
  return result(d->destroy_stream(s));
}

CUresult cuStreamGetPriority(CUstream hStream, int* priority) {
  DP_STREAM(hStream, s, d);
  *priority = s->priority;
  return CUDA_SUCCESS;
}

// -- attributes of streams ------------------------------------------------------------------------------------------
// The client owns a stream's attributes, as everything of a stream. The server keeps them in its replay log and passes them
// to the device, except the policy of waiting: this library waits by itself.

namespace {

// Guards the values of all streams; held while the message is sent, so that the server gets them in the order of the values.
std::mutex attributes_mu;

using AttributeValue = std::array<uint64_t, 4>;
static_assert(sizeof(CUaccessPolicyWindow) <= sizeof(AttributeValue));  // the largest that streams have

constexpr CUstreamAttrID kStreamAttributes[] = {
    CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, CU_STREAM_ATTRIBUTE_PRIORITY,
    CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN};

// cuda.h: the number of domains is a device attribute; a device that says none has the one that every kernel runs in.
int domains(DeviceState* d) {
  return std::max(1, d->conn().props().attributes[CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT]);
}

// What a stream has before anybody sets it.
CUstreamAttrValue first_value(DeviceState* d, CUstreamAttrID attr) {
  CUstreamAttrValue value{};
  if (attr == CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY) value.syncPolicy = CU_SYNC_POLICY_AUTO;
  if (attr == CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP)
    value.memSyncDomainMap.remote = static_cast<unsigned char>(std::min(1, domains(d) - 1));
  return value;
}

// attributes_mu held. False: no attribute of streams.
bool read_attribute(DeviceState* d, const StreamObj& s, CUstreamAttrID attr, CUstreamAttrValue* out) {
  if (std::find(std::begin(kStreamAttributes), std::end(kStreamAttributes), attr) == std::end(kStreamAttributes))
    return false;
  *out = first_value(d, attr);
  if (attr == CU_STREAM_ATTRIBUTE_PRIORITY) out->priority = s.priority.load();
  if (const auto it = s.attributes.find(attr); it != s.attributes.end())
    memcpy(static_cast<void*>(out), it->second.data(), sizeof(AttributeValue));
  return true;
}

// A value as it is kept and sent: only what the attribute has, so that nothing else of the caller's union travels.
CUresult take_value(DeviceState* d, CUstreamAttrID attr, const CUstreamAttrValue& from, AttributeValue* out) {
  CUstreamAttrValue value{};
  switch (attr) {
    case CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW: {
      const CUaccessPolicyWindow& w = from.accessPolicyWindow;
      if (const CUresult rc = launch::check_window(*d, w); rc != CUDA_SUCCESS) return rc;
      value.accessPolicyWindow.base_ptr = w.base_ptr;
      value.accessPolicyWindow.num_bytes = w.num_bytes;
      value.accessPolicyWindow.hitRatio = w.hitRatio;
      value.accessPolicyWindow.hitProp = w.hitProp;
      value.accessPolicyWindow.missProp = w.missProp;
      break;
    }
    case CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      if (from.syncPolicy < CU_SYNC_POLICY_AUTO || from.syncPolicy > CU_SYNC_POLICY_BLOCKING_SYNC)
        return CUDA_ERROR_INVALID_VALUE;
      value.syncPolicy = from.syncPolicy;
      break;
    case CU_STREAM_ATTRIBUTE_PRIORITY: value.priority = clamped(from.priority); break;
    case CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      if (std::max(from.memSyncDomainMap.default_, from.memSyncDomainMap.remote) >= domains(d))
        return CUDA_ERROR_INVALID_VALUE;
      value.memSyncDomainMap = from.memSyncDomainMap;
      break;
    case CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN:
      if (from.memSyncDomain != CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT &&
          from.memSyncDomain != CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE)
        return CUDA_ERROR_INVALID_VALUE;
      value.memSyncDomain = from.memSyncDomain;
      break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  memcpy(out->data(), &value, sizeof(AttributeValue));
  return CUDA_SUCCESS;
}

// attributes_mu held.
CUresult set_attribute(DeviceState* d, StreamObj* s, CUstreamAttrID attr, const AttributeValue& v) {
  if (attr != CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY) {
    const wire::STREAM_SET_ATTRIBUTE_req req{vhandle(s), static_cast<uint32_t>(attr), 0, v[0], v[1], v[2], v[3]};
    if (const int32_t rc = d->conn().call(Opcode::STREAM_SET_ATTRIBUTE, req); rc != kOk) return result(rc);
  }
  if (attr == CU_STREAM_ATTRIBUTE_PRIORITY)
    s->priority = static_cast<int32_t>(v[0]);
  else
    s->attributes[attr] = v;
  return CUDA_SUCCESS;
}

// The legacy stream belongs to the context that is current, every other one to its own.
uint64_t context_of(const StreamObj& s) { return s.index == 0 ? client::current_context() : s.context; }

}  // namespace

CUresult cuStreamGetAttribute(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue* value_out) {
  DP_STREAM(hStream, s, d);
  CUstreamAttrValue value;
  {
    std::lock_guard lock(attributes_mu);
    if (!read_attribute(d, *s, attr, &value)) return CUDA_ERROR_INVALID_VALUE;
  }
  // cuda.h: it is stored in the corresponding member. A caller may have no more room than that.
  switch (attr) {
    case CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW: value_out->accessPolicyWindow = value.accessPolicyWindow; break;
    case CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY: value_out->syncPolicy = value.syncPolicy; break;
    case CU_STREAM_ATTRIBUTE_PRIORITY: value_out->priority = value.priority; break;
    case CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP: value_out->memSyncDomainMap = value.memSyncDomainMap; break;
    default: value_out->memSyncDomain = value.memSyncDomain; break;
  }
  return CUDA_SUCCESS;
}

CUresult cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue* value) {
  DP_STREAM(hStream, s, d);
  AttributeValue taken{};
  if (const CUresult rc = take_value(d, attr, *value, &taken); rc != CUDA_SUCCESS) return rc;
  std::lock_guard lock(attributes_mu);
  return set_attribute(d, s, attr, taken);
}

CUresult cuStreamCopyAttributes(CUstream dst, CUstream src) {
  DP_STREAM(dst, to, d);
  DP_STREAM(src, from, from_device);
  if (d != from_device || context_of(*to) != context_of(*from)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(attributes_mu);
  for (const CUstreamAttrID attr : kStreamAttributes) {
    CUstreamAttrValue has, wanted;
    read_attribute(d, *to, attr, &has);
    read_attribute(d, *from, attr, &wanted);
    AttributeValue value;
    memcpy(value.data(), &wanted, sizeof value);
    if (memcmp(&has, value.data(), sizeof value) == 0) continue;  // the memory that a window shows may be gone
    if (const CUresult rc = set_attribute(d, to, attr, value); rc != CUDA_SUCCESS) return rc;
  }
  return CUDA_SUCCESS;
}

void reset_attributes(DeviceState* d) {
  std::lock_guard lock(attributes_mu);
  StreamObj* s = d->legacy();
  for (const CUstreamAttrID attr : kStreamAttributes) {
    CUstreamAttrValue has;
    read_attribute(d, *s, attr, &has);
    const CUstreamAttrValue first = first_value(d, attr);
    AttributeValue value;
    memcpy(value.data(), &first, sizeof value);
    // An error only says that the server is gone.
    if (memcmp(&has, value.data(), sizeof value) != 0) static_cast<void>(set_attribute(d, s, attr, value));
  }
  s->attributes.clear();
}

CUresult cuStreamGetFlags(CUstream hStream, unsigned int* flags) {
  DP_STREAM(hStream, s, d);
  *flags = s->flags;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream hStream, unsigned long long* streamId) {
  DP_STREAM(hStream, s, d);
  *streamId = s->id + 1;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream hStream, CUcontext* pctx) {
  DP_STREAM(hStream, s, d);
  *pctx = handle<CUcontext>(s->index == 0 ? client::current_context() : s->context);
  return CUDA_SUCCESS;
}

CUresult cuStreamGetDevice(CUstream hStream, CUdevice* device) {
  DP_STREAM(hStream, s, d);
  *device = d->ordinal();
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream hStream) {
  DP_STREAM(hStream, s, d);
  if (d->idle(*s)) {
    const int32_t e = d->conn().error();
    return result(e != kOk ? e : d->conn().take_late_error());
  }
  d->want(*s);
  const int32_t e = d->conn().error_now_and_then();
  return result(e != kOk ? e : kNotReady);
}

CUresult cuStreamSynchronize(CUstream hStream) {
  DP_STREAM(hStream, s, d);
  return result(wait(d, s));
}

// -- events ---------------------------------------------------------------------------------------------------------

CUresult cuEventCreate(CUevent* phEvent, unsigned int Flags) {
  if (Flags & ~0x7u) return CUDA_ERROR_INVALID_VALUE;
  if (Flags & CU_EVENT_INTERPROCESS) {
    client::log(client::Level::kWarn, "cuEventCreate refuses CU_EVENT_INTERPROCESS: IPC between jobs is not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  DP_CURRENT(d);
  uint64_t value = 0;
  EventObj* e = events().add(d->ordinal(), &value);
  if (!e) return CUDA_ERROR_OUT_OF_MEMORY;
  e->device = d->ordinal();
  e->flags = Flags;
  e->record.store(0);
  e->capture.store(0, std::memory_order_relaxed);
  const int32_t rc = d->conn().post(Opcode::EVENT_CREATE, wire::EVENT_CREATE_req{VHandle{value}, Flags, 0});
  events().publish(value);
  if (rc != kOk) {
    events().remove(value);
    return result(rc);
  }
  *phEvent = handle<CUevent>(value);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent hEvent) {
  EventObj* e = events().get(bits(hEvent));
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  DeviceState* d = client::device_state_if_attached(e->device);
  if (e->capture.load(std::memory_order_relaxed)) graph::event_destroyed(bits(hEvent));
  const int32_t rc = d->conn().post(Opcode::EVENT_DESTROY, wire::EVENT_DESTROY_req{VHandle{bits(hEvent)}});
  events().remove(bits(hEvent));
  return result(rc);
}

void set_record(EventObj* e, const StreamObj* s, uint64_t end) {
  e->capture.store(0, std::memory_order_relaxed);
  e->record.store(static_cast<uint64_t>(s->index) << EventObj::kIndexShift | end, std::memory_order_release);
}

CUresult cuEventRecord(CUevent hEvent, CUstream hStream) {
  EventObj* e = events().get(bits(hEvent));
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  DP_STREAM(hStream, s, d);
  if (d->ordinal() != e->device) return CUDA_ERROR_INVALID_HANDLE;  // cuda.h: event and stream are of one context
  uint64_t end = 0;
  const wire::EVENT_RECORD_req req{VHandle{bits(hEvent)}, vhandle(s)};
  const int32_t rc = command(d, s, Opcode::EVENT_RECORD, req, &end);
  if (rc == kOk) set_record(e, s, end);
  return result(rc);
}

CUresult cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags) {
  // CU_EVENT_RECORD_EXTERNAL is for captures.
  return flags == CU_EVENT_RECORD_DEFAULT ? sync::cuEventRecord(hEvent, hStream) : CUDA_ERROR_INVALID_VALUE;
}

CUresult captured::cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags) {
  const bool external = flags == CU_EVENT_RECORD_EXTERNAL;
  if (flags != CU_EVENT_RECORD_DEFAULT && !external) return CUDA_ERROR_INVALID_VALUE;
  EventObj* e = events().get(bits(hEvent));
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  DP_STREAM(hStream, s, d);
  if (d->ordinal() != e->device) return CUDA_ERROR_INVALID_HANDLE;
  CUresult rc = CUDA_SUCCESS;
  return graph::capture_record(s, hEvent, external, &rc) ? rc : sync::cuEventRecordWithFlags(hEvent, hStream, flags);
}

CUresult captured::cuEventRecord(CUevent hEvent, CUstream hStream) {
  return captured::cuEventRecordWithFlags(hEvent, hStream, CU_EVENT_RECORD_DEFAULT);
}

namespace {
struct Recorded {
  uint32_t index;
  uint64_t position;
};
Recorded recorded(const EventObj& e) {
  const uint64_t r = e.record.load(std::memory_order_acquire);
  return {static_cast<uint32_t>(r >> EventObj::kIndexShift), r & ((1ull << EventObj::kIndexShift) - 1)};
}
}  // namespace

CUresult cuEventQuery(CUevent hEvent) {
  EventObj* e = events().get(bits(hEvent));
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  DP_EVENT_OUTSIDE(e);
  DeviceState* d = client::device_state_if_attached(e->device);
  const Recorded r = recorded(*e);
  if (r.position == 0 || d->conn().completed(r.index, r.position)) return result(d->conn().error());
  d->conn().want(r.index, r.position);
  const int32_t error = d->conn().error_now_and_then();
  return result(error != kOk ? error : kNotReady);
}

CUresult cuEventSynchronize(CUevent hEvent) {
  EventObj* e = events().get(bits(hEvent));
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  DP_EVENT_OUTSIDE(e);
  DeviceState* d = client::device_state_if_attached(e->device);
  const Recorded r = recorded(*e);
  if (r.position == 0) return result(d->conn().error());
  const int32_t rc = d->conn().wait(r.index, r.position);
  d->flush_output();
  return result(rc);
}

CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags) {
  if (Flags & ~1u) return CUDA_ERROR_INVALID_VALUE;
  EventObj* e = events().get(bits(hEvent));
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  DP_STREAM(hStream, s, d);
  if (Flags == CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;  // cuda.h: invalid outside of a capture
  DP_EVENT_OUTSIDE(e);
  const Recorded r = recorded(*e);
  if (r.position == 0) return CUDA_SUCCESS;
  if (e->device != d->ordinal()) {
    // Another GPU's server: the order is kept by waiting here, before anything later is posted. Stronger than asked.
    return result(client::device_state_if_attached(e->device)->conn().wait(r.index, r.position));
  }
  if (d->conn().completed(r.index, r.position)) return CUDA_SUCCESS;
  return result(
      command(d, s, Opcode::STREAM_WAIT_EVENT, wire::STREAM_WAIT_EVENT_req{vhandle(s), VHandle{bits(hEvent)}}));
}

CUresult captured::cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags) {
  if (Flags & ~1u) return CUDA_ERROR_INVALID_VALUE;
  if (!events().get(bits(hEvent))) return CUDA_ERROR_INVALID_HANDLE;
  DP_STREAM(hStream, s, d);
  CUresult rc = CUDA_SUCCESS;
  return graph::capture_wait(s, hEvent, Flags == CU_EVENT_WAIT_EXTERNAL, &rc)
             ? rc
             : sync::cuStreamWaitEvent(hStream, hEvent, Flags);
}

namespace {
CUresult elapsed(double* ms, CUevent hStart, CUevent hEnd) {
  EventObj* a = events().get(bits(hStart));
  EventObj* b = events().get(bits(hEnd));
  if (!a || !b || a->device != b->device) return CUDA_ERROR_INVALID_HANDLE;
  DP_EVENT_OUTSIDE(a);
  DP_EVENT_OUTSIDE(b);
  if ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  const Recorded ra = recorded(*a), rb = recorded(*b);
  if (ra.position == 0 || rb.position == 0) return CUDA_ERROR_INVALID_HANDLE;
  DeviceState* d = client::device_state_if_attached(a->device);
  if (!d->conn().completed(ra.index, ra.position) || !d->conn().completed(rb.index, rb.position)) {
    d->conn().want(ra.index, ra.position);
    d->conn().want(rb.index, rb.position);
    const int32_t error = d->conn().error_now_and_then();
    return result(error != kOk ? error : kNotReady);
  }
  wire::EVENT_ELAPSED_rep rep{};
  client::Reply reply{&rep, sizeof(rep)};
  const int32_t rc = d->conn().call(Opcode::EVENT_ELAPSED,
                                    wire::EVENT_ELAPSED_req{VHandle{bits(hStart)}, VHandle{bits(hEnd)}}, &reply);
  *ms = rep.ms;
  return result(rc);
}
}  // namespace

CUresult cuEventElapsedTime(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  double ms = 0;
  const CUresult rc = elapsed(&ms, hStart, hEnd);
  if (rc == CUDA_SUCCESS) *pMilliseconds = static_cast<float>(ms);
  return rc;
}

CUresult cuEventElapsedTime_v2(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  return sync::cuEventElapsedTime(pMilliseconds, hStart, hEnd);
}

// -- host functions -------------------------------------------------------------------------------------------------
// The server announces a token in the segment's table when the stream has come to it; a thread of the client, one per
// device, runs the function and answers. The stream goes on only then.

namespace {

class HostFunctions {
 public:
  explicit HostFunctions(DeviceState* d) : d_(d) {}

  // post_with(token) posts the message that has the calls run, numbered from token.
  template <class Post>
  int32_t post(const HostCall* calls, size_t n, Post post_with) {
    std::lock_guard lock(mu_);
    // Token t goes through entry t % kHostFuncs; the server waits for the entry, which the loop below empties before
    // it runs the function, so any number may be under way.
    const uint64_t token = next_ + 1;
    next_ += n;
    for (size_t i = 0; i < n; ++i) calls_[token + i] = calls[i];
    int32_t rc = kOk;
    if (!started_) {
      pthread_t t;
      if (pthread_create(&t, nullptr, &HostFunctions::run, this) == 0) {
        started_ = true;
        pthread_detach(t);
      } else {
        rc = kOutOfMemory;
      }
    }
    if (rc == kOk) rc = post_with(token);
    if (rc != kOk)
      for (size_t i = 0; i < n; ++i) calls_.erase(token + i);
    return rc;
  }

 private:
  static void* run(void* self) {
    static_cast<HostFunctions*>(self)->loop();
    return nullptr;
  }

  void loop() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);  // the job's signals are for the job's own threads
    ControlPage* c = d_->conn().control();
    for (;;) {
      const uint32_t seq = c->hostfunc_seq.load(std::memory_order_acquire);
      bool any = false;
      for (auto& entry : c->hostfuncs) {
        const uint64_t token = entry.token.exchange(0, std::memory_order_acquire);
        if (!token) continue;
        any = true;
        HostCall call;
        {
          std::lock_guard lock(mu_);
          const auto it = calls_.find(token);
          if (it == calls_.end()) continue;
          call = it->second;
        }
        if (call.callback) call.callback(call.stream, result(d_->conn().error()), call.data);
        if (call.fn) call.fn(call.data);
        {
          std::lock_guard lock(mu_);
          calls_.erase(token);
        }
        call.keep.reset();
        if (d_->conn().post(Opcode::HOST_FUNC_DONE, wire::HOST_FUNC_DONE_req{token}) != kOk) return;
      }
      if (!any) {
        futex_wait(&c->hostfunc_seq, seq, 100'000);
        if (d_->conn().error_now_and_then() == kDeviceUnavailable) return;
      }
    }
  }

  DeviceState* d_;
  std::mutex mu_;
  std::unordered_map<uint64_t, HostCall> calls_;
  uint64_t next_ = 0;
  bool started_ = false;
};

HostFunctions& host_functions(DeviceState* d) {
  static std::atomic<HostFunctions*> table[client::kMaxDevices];
  static std::mutex mu;
  auto& slot = table[d->ordinal()];
  if (HostFunctions* h = slot.load(std::memory_order_acquire)) return *h;
  std::lock_guard lock(mu);
  if (!slot.load()) slot.store(new HostFunctions(d), std::memory_order_release);
  return *slot.load();
}

}  // namespace

int32_t post_host_calls(DeviceState* d, const HostCall* calls, size_t n,
                        const std::function<int32_t(uint64_t token)>& post) {
  return host_functions(d).post(calls, n, post);
}

namespace {
CUresult post_host_call(DeviceState* d, StreamObj* s, const HostCall& call) {
  return result(host_functions(d).post(&call, 1, [&](uint64_t token) {
    return command(d, s, Opcode::HOST_FUNC, wire::HOST_FUNC_req{vhandle(s), token});
  }));
}
}  // namespace

CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData) {
  if (!fn) return CUDA_ERROR_INVALID_VALUE;
  DP_STREAM(hStream, s, d);
  return post_host_call(d, s, HostCall{fn, nullptr, userData, hStream, nullptr});
}

CUresult captured::cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData) {
  if (!fn) return CUDA_ERROR_INVALID_VALUE;
  DP_STREAM(hStream, s, d);
  CUresult rc = CUDA_SUCCESS;
  return graph::capture_host(s, fn, userData, &rc) ? rc : sync::cuLaunchHostFunc(hStream, fn, userData);
}

CUresult cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void* userData, unsigned int flags) {
  if (flags != 0 || !callback) return CUDA_ERROR_INVALID_VALUE;
  DP_STREAM(hStream, s, d);
  return post_host_call(d, s, HostCall{nullptr, callback, userData, hStream, nullptr});
}

}  // namespace devproxy::sa::sync
