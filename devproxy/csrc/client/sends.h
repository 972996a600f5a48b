// SPDX-License-Identifier: Apache-2.0
// Does a call send what its entry names (codegen/spec.py, Api.ops), and nothing else? A build with DEVPROXY_CHECK_SENDS
// watches every post and notes what it saw in the file that the variable of that name names, once per process: "<api>
// called", "<api> sent <message>" for a message that the entry names, and "<api> sends <message>" for one that it does not.
// Any other build does nothing here. Calls of libnccl.so.2 come in by csrc/core/watched.h.
#pragma once

#include <cstdint>

namespace devproxy::client {

struct ApiInfo {
  const char* name;
  uint16_t id;
  bool needs_init;
  uint64_t sends = 0;  // bit: place of a message in wire::kOps
};

#ifdef DEVPROXY_CHECK_SENDS

// The outermost export that this thread is in.
class Sends {
 public:
  explicit Sends(const ApiInfo& api);
  ~Sends();
  Sends(const Sends&) = delete;
  Sends& operator=(const Sends&) = delete;
  static void check(uint16_t opcode);
  // Of a call by its name: whether this thread is in no other. Then whoever began it ends it.
  static bool begin(const char* name, uint64_t sends);
  static void end();

 private:
  const bool outermost_;
};

#else

struct Sends {
  explicit Sends(const ApiInfo&) {}
  static void check(uint16_t) {}
};

#endif

}  // namespace devproxy::client
