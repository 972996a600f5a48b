// What the other interceptors ask of stream capture. While no stream of the process captures, each of them pays one
// load and a predicted branch: capturing().
#pragma once

#include <atomic>

#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/launch/client.h"

namespace devproxy::sa::graph {

extern constinit std::atomic<uint32_t> g_captures;  // capture sequences under way in this process

inline bool capturing() { return __builtin_expect(g_captures.load(std::memory_order_relaxed) != 0, 0); }

// Precondition of what follows: capturing().

// A command on a stream. True: it is over, captured as a node or refused, and *rc is its result.
[[nodiscard]] bool capture_kernel(client::StreamObj* s, CUfunction f, const launch::Geometry& g, void** kernelParams,
                                  void** extra, const CUlaunchConfig* config, CUresult* rc);
[[nodiscard]] bool capture_copy(client::StreamObj* s, const CUDA_MEMCPY3D& p, CUresult* rc);
[[nodiscard]] bool capture_memset(client::StreamObj* s, const CUDA_MEMSET_NODE_PARAMS& p, CUresult* rc);
[[nodiscard]] bool capture_host(client::StreamObj* s, CUhostFn fn, void* data, CUresult* rc);
[[nodiscard]] bool capture_record(client::StreamObj* s, CUevent event, bool external, CUresult* rc);
[[nodiscard]] bool capture_wait(client::StreamObj* s, CUevent event, bool external, CUresult* rc);
[[nodiscard]] bool capture_alloc(client::StreamObj* s, client::DeviceState* d, CUdeviceptr* ptr, size_t bytes,
                                 CUresult* rc);
[[nodiscard]] bool capture_free(client::StreamObj* s, client::DeviceState* d, CUdeviceptr ptr, CUresult* rc);
// A command that no graph can hold.
[[nodiscard]] bool capture_unsupported(client::StreamObj* s, CUresult* rc);

// A call that asks for, or waits for, what `s` has done: true, with the error, where that is in a capture, or where the
// call is unsafe now.
[[nodiscard]] bool prohibited(client::StreamObj* s, CUresult* rc);
// The same for everything on a device.
[[nodiscard]] bool prohibited(client::DeviceState* d, CUresult* rc);
// A call that cuThreadExchangeStreamCaptureMode calls potentially unsafe: true, with the error, where this thread may
// not make it now.
[[nodiscard]] bool unsafe(CUresult* rc);

void stream_destroyed(client::StreamObj* s);

// No precondition: an event whose last record is in a capture, which may be over.
[[nodiscard]] CUresult captured_event(const client::EventObj* e);
void event_destroyed(uint64_t event);

}  // namespace devproxy::sa::graph

#define DP_NOT_IN_CAPTURE(s)                                                    \
  if (::devproxy::sa::graph::capturing()) {                                     \
    CUresult prohibited_ = CUDA_SUCCESS;                                        \
    if (::devproxy::sa::graph::prohibited(s, &prohibited_)) return prohibited_; \
  }
#define DP_SAFE()                                                \
  if (::devproxy::sa::graph::capturing()) {                      \
    CUresult unsafe_ = CUDA_SUCCESS;                             \
    if (::devproxy::sa::graph::unsafe(&unsafe_)) return unsafe_; \
  }
#define DP_EVENT_OUTSIDE(e)                                                   \
  if (__builtin_expect((e)->capture.load(std::memory_order_relaxed) != 0, 0)) \
  return ::devproxy::sa::graph::captured_event(e)
