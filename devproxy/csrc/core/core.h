// SPDX-License-Identifier: Apache-2.0
// What the client core in libcuda.so.1 offers devproxy's other shims in the same process (libnccl.so.2): one process has
// one connection to each server, one order of its messages and one set of handles, whichever library posts.
//
// Private to devproxy, and versioned: a program may bring an older shim of ours along. devproxy_core(kCoreVersion)
// answers nullptr where the library in the process is of another version. Functions are only ever added at the end,
// and a version has its number in the table: what a caller does not find behind `bytes` is not there.
//
// Plain C at the edge: no exception, no C++ type and no vendor type crosses it. Numbers are CUresult's. Every function
// may be called by any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "devproxy/csrc/args/comm.h"

namespace devproxy {

inline constexpr uint32_t kCoreVersion = 2;

// A stream of the job, or one of the library's own, as it is now.
struct CoreStream {
  uint64_t stream = 0;  // what the driver API calls it
  int32_t device = 0;
  int32_t capturing = 0;  // its commands become nodes of a graph
};

// What a message of the ring holds.
inline constexpr size_t kMaxGroup = (64u << 10) / sizeof(CommOp);

struct Core {
  uint32_t version = kCoreVersion, bytes = sizeof(Core);
  // Initialises the driver, as cuInit does.
  int32_t (*init)();
  int32_t (*current_device)(int32_t* device);
  int32_t (*resolve_stream)(uint64_t stream, CoreStream* out);
  // A stream that no API call of the job names. It waits for none of the others.
  int32_t (*create_stream)(int32_t device, uint64_t* stream);
  int32_t (*destroy_stream)(int32_t device, uint64_t stream);
  // Whether all that was posted on the stream has completed. kNotReady: not yet.
  int32_t (*query_stream)(int32_t device, uint64_t stream);
  int32_t (*wait_stream)(int32_t device, uint64_t stream);

  // -- communicators. comm: a handle that make_comm gave.
  int32_t (*make_comm)(int32_t device, uint64_t* comm);
  // Posts a member's arrival on a stream of create_stream, which completes when all have come.
  int32_t (*comm_init)(int32_t device, uint64_t comm, uint64_t stream, CommKey key, uint32_t ranks, uint32_t rank);
  // Posts operations as one message, at most kMaxGroup of them. On a stream that captures they become one node.
  int32_t (*comm_group)(uint64_t stream, const CommOp* ops, size_t n);
  int32_t (*comm_abort)(int32_t device, uint64_t comm);
  int32_t (*comm_destroy)(int32_t device, uint64_t comm);
  // why: gets text_bytes at most, with a NUL.
  int32_t (*comm_state)(int32_t device, uint64_t comm, uint32_t* state, char* why, size_t why_bytes);

  // Whether devproxy holds the job now, so that what waits is not late.
  bool (*held)(int32_t device);

  // Which device an address belongs to; -1: none.
  int32_t (*device_of)(uint64_t addr);
};

using CoreEntry = const Core*(uint32_t version);

}  // namespace devproxy

extern "C" __attribute__((visibility("default"))) devproxy::CoreEntry devproxy_core;
