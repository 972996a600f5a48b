// SPDX-License-Identifier: Apache-2.0
// Does a call send only the messages that its entry names (codegen/spec.py, Api.ops)? A build with DEVPROXY_CHECK_SENDS
// watches every post and notes what it saw in the file that the variable of that name names: "<api> called" once per
// process, and "<api> sends <message>" for a message that the entry does not name. Any other build does nothing here.
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

 private:
  const ApiInfo* before_;
};

#else

struct Sends {
  explicit Sends(const ApiInfo&) {}
  static void check(uint16_t) {}
};

#endif

}  // namespace devproxy::client
