// SPDX-License-Identifier: Apache-2.0
// What the generated exports and the other interceptors ask of stream capture and of graphs' memory: the one header of
// this domain that those below it include. While no stream of the process captures,
// an export pays one load and a predicted branch for it: capturing(). What it does then is a word of its entry
// (codegen/spec.py, Capture): it calls captured::<symbol>, or one of refuse_*().
#pragma once

#include <atomic>

#include "devproxy/csrc/args/comm.h"
#include "devproxy/interceptors/client_common.h"

namespace devproxy::sa::launch {
struct Geometry;
}

namespace devproxy::sa::graph {

extern constinit std::atomic<uint32_t> g_captures;  // capture sequences under way in this process

inline bool capturing() { return __builtin_expect(g_captures.load(std::memory_order_relaxed) != 0, 0); }

// Precondition of what follows: capturing().

// For exports. True: the call is over, and *rc is its error. A handle that names nothing is left to the interceptor.
[[nodiscard]] bool refuse_command(CUstream stream, CUresult* rc);  // a command that no graph can hold
[[nodiscard]] bool refuse_stream(CUresult* rc);                    // asks or waits for what the default stream has done
[[nodiscard]] bool refuse_stream(CUstream stream, CUresult* rc);
[[nodiscard]] bool refuse_device(CUresult* rc);  // the same for everything on the current device
[[nodiscard]] bool refuse_device(CUcontext context, CUresult* rc);
// What cuThreadExchangeStreamCaptureMode calls potentially unsafe: refused where this thread may not do it now. event:
// of which it asks.
[[nodiscard]] bool refuse_unsafe(CUresult* rc);
[[nodiscard]] bool refuse_unsafe(CUevent event, CUresult* rc);

// A command on a stream. True: it is over, captured as a node or refused, and *rc is its result.
[[nodiscard]] bool capture_kernel(client::StreamObj* s, CUfunction f, const launch::Geometry& g, void** kernelParams,
                                  void** extra, const CUlaunchConfig* config, CUresult* rc);
[[nodiscard]] bool capture_copy(client::StreamObj* s, const CUDA_MEMCPY3D& p, CUresult* rc);
[[nodiscard]] bool capture_memset(client::StreamObj* s, const CUDA_MEMSET_NODE_PARAMS& p, CUresult* rc);
[[nodiscard]] bool capture_comm(client::StreamObj* s, const CommOp* ops, size_t count, CUresult* rc);
[[nodiscard]] bool capture_host(client::StreamObj* s, CUhostFn fn, void* data, CUresult* rc);
[[nodiscard]] bool capture_record(client::StreamObj* s, CUevent event, bool external, CUresult* rc);
[[nodiscard]] bool capture_wait(client::StreamObj* s, CUevent event, bool external, CUresult* rc);
[[nodiscard]] bool capture_alloc(client::StreamObj* s, client::DeviceState* d, CUdeviceptr* ptr, size_t bytes,
                                 CUresult* rc);
[[nodiscard]] bool capture_free(client::StreamObj* s, CUdeviceptr ptr, CUresult* rc);

void stream_destroyed(client::StreamObj* s);

// -- memory that graphs allocate (client_memory.cc). While there is none, other memory pays one load for it.
extern constinit std::atomic<size_t> g_memories;

inline bool has_memory() { return __builtin_expect(g_memories.load(std::memory_order_relaxed) != 0, 0); }

// Whether an allocation of a graph begins at `ptr`, and whether a launch has made it and nobody has freed it since.
enum class MemoryState { kNone, kIdle, kLive };
[[nodiscard]] MemoryState memory_state(CUdeviceptr ptr);
// Precondition: memory_state() was not kNone. Frees it in the order of `s`; nullptr: every stream was waited for.
[[nodiscard]] CUresult free_memory(CUdeviceptr ptr, client::StreamObj* s);
// The primary context of a device was reset: nothing is allocated any more.
void free_all_memory(client::DeviceState* d);

// No precondition: an event whose last record is in a capture, which may be over.
[[nodiscard]] CUresult captured_event(const client::EventObj* e);
void event_destroyed(uint64_t event);

}  // namespace devproxy::sa::graph

#define DP_EVENT_OUTSIDE(e)                                                   \
  if (__builtin_expect((e)->capture.load(std::memory_order_relaxed) != 0, 0)) \
  return ::devproxy::sa::graph::captured_event(e)
