// SPDX-License-Identifier: Apache-2.0
// How the replay log follows a message.
#include <cstdint>
#include <cstring>
#include <vector>

#include "devproxy/csrc/server/handlers.h"

namespace devproxy::server {

namespace {

// A request that Message cannot hold does not compile.
consteval bool requests_fit() {
  for (const wire::OpInfo& info : wire::kOps)
    if (info.req_bytes > kMaxRequestBytes) return false;
  return true;
}
static_assert(requests_fit());

// A field of the request; T{} where the message has none.
template <class T>
T field(const Message& m, int16_t offset) {
  T value{};
  if (offset >= 0) std::memcpy(&value, m.request + offset, sizeof value);
  return value;
}

}  // namespace

bool log_message(Connection& c, const Message& m) {
  const wire::OpInfo& info = *m.info;
  const auto handle = field<VHandle>(m, info.handle_offset);
  ReplayLog& replay = c.state().replay();
  switch (info.log) {
    case wire::Log::kCreate:
      return replay.create(handle, field<VHandle>(m, info.parent_offset), info.opcode, m.request, info.req_bytes,
                           info.log_bulk ? c.endpoint().take_bulk(m) : std::vector<uint8_t>{});
    case wire::Log::kDestroy: return replay.destroy(handle);
    case wire::Log::kSet:
      return replay.set(handle, info.opcode, field<uint32_t>(m, info.key_offset), m.request, info.req_bytes);
    case wire::Log::kNone: break;
  }
  return true;
}

}  // namespace devproxy::server
