// SPDX-License-Identifier: Apache-2.0
// Locks: the one here guards what this process has noted, and nothing is taken under it.
#include "devproxy/csrc/client/sends.h"

#ifdef DEVPROXY_CHECK_SENDS

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <set>
#include <string>

#include "dispatch.gen.h"

namespace devproxy::client {

namespace {

struct Call {
  const char* name = nullptr;
  uint64_t sends = 0;
};
thread_local Call t_call;

// One write per line, so that lines of several processes do not mix.
void note(const char* api, const char* verb, const char* object = "") {
  static const char* const path = getenv("DEVPROXY_CHECK_SENDS");
  if (!path) return;
  const std::string line = std::string(api) + ' ' + verb + object + '\n';
  {
    static auto* const mu = new std::mutex;
    static auto* const noted = new std::set<std::string>;
    std::lock_guard lock(*mu);
    if (!noted->insert(line).second) return;
  }
  const int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) abort();
  close(fd);
}

}  // namespace

bool Sends::begin(const char* name, uint64_t sends) {
  note(name, "called");
  if (t_call.name) return false;
  t_call = {name, sends};
  return true;
}

void Sends::end() { t_call = {}; }

Sends::Sends(const ApiInfo& api) : outermost_(begin(api.name, api.sends)) {}

Sends::~Sends() {
  if (outermost_) end();
}

void Sends::check(uint16_t opcode) {
  if (opcode == static_cast<uint16_t>(wire::Opcode::STREAM_AWAITED)) return;  // part of any wait (codegen/ops.py)
  if (!t_call.name) return;
  const bool named = t_call.sends >> wire::kOpIndex[opcode] & 1;
  note(t_call.name, named ? "sent " : "sends ", wire::op_info(opcode)->name);
}

}  // namespace devproxy::client

#endif
