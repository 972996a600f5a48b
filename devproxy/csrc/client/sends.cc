// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/client/sends.h"

#ifdef DEVPROXY_CHECK_SENDS

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "dispatch.gen.h"

namespace devproxy::client {

namespace {

thread_local const ApiInfo* t_api = nullptr;

// One write per line, so that lines of several processes do not mix.
void note(const ApiInfo& api, const char* verb, const char* object) {
  static const char* const path = getenv("DEVPROXY_CHECK_SENDS");
  if (!path) return;
  char line[256];
  const int bytes = snprintf(line, sizeof line, "%s %s%s\n", api.name, verb, object);
  const int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || write(fd, line, static_cast<size_t>(bytes)) != bytes) abort();
  close(fd);
}

}  // namespace

Sends::Sends(const ApiInfo& api) : before_(t_api) {
  static std::atomic<bool> called[4096];
  if (!called[api.id & 4095].exchange(true)) note(api, "called", "");
  if (!t_api) t_api = &api;
}

Sends::~Sends() { t_api = before_; }

void Sends::check(uint16_t opcode) {
  if (opcode == static_cast<uint16_t>(wire::Opcode::STREAM_AWAITED)) return;  // part of any wait (codegen/ops.py)
  if (t_api && !(t_api->sends >> wire::kOpIndex[opcode] & 1)) note(*t_api, "sends ", wire::op_info(opcode)->name);
}

}  // namespace devproxy::client

#endif
