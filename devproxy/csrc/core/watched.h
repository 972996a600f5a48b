// SPDX-License-Identifier: Apache-2.0
// What a call of libnccl.so.2 may send, for a build that watches it (DEVPROXY_CHECK_SENDS, csrc/client/sends.h): its
// messages go out by libcuda.so.1, which cannot know whose they are. Any other build does nothing here.
#pragma once

#include <cstdint>

#ifdef DEVPROXY_CHECK_SENDS

extern "C" {
// 1: no other call is under way on this thread, and whoever begins this one ends it.
__attribute__((visibility("default"))) int devproxy_call_begins(const char* name, uint64_t sends);
__attribute__((visibility("default"))) void devproxy_call_ends();
}

#endif

namespace devproxy {

#ifdef DEVPROXY_CHECK_SENDS

class Watched {
 public:
  // sends: as ApiInfo::sends.
  Watched(const char* name, uint64_t sends) : outermost_(devproxy_call_begins(name, sends) != 0) {}
  ~Watched() {
    if (outermost_) devproxy_call_ends();
  }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

 private:
  const bool outermost_;
};

#else

struct Watched {
  Watched(const char*, uint64_t) {}
};

#endif

}  // namespace devproxy
