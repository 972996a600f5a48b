// SPDX-License-Identifier: Apache-2.0
// Limits and what kernels print, the server's half.
#include <algorithm>
#include <cstring>

#include "devproxy/csrc/server/handlers.h"

namespace devproxy::server::context {

void set_limit(Connection& c, const Message& m) {
  const auto& r = m.as<wire::SET_LIMIT_req>();
  if (Status s = c.device().set_limit(r.limit, r.value); !s.ok()) return c.fail(m, s);
  c.state().limits()[r.limit] = r.value;
}

void get_limit(Connection& c, const Message& m) {
  auto value = c.device().get_limit(m.as<wire::GET_LIMIT_req>().limit);
  if (!value.ok()) return c.fail(m, value.status());
  const wire::GET_LIMIT_rep rep{*value};
  c.reply(m, kOk, &rep, sizeof rep);
}

void reset_persisting_l2(Connection& c, const Message& m) {
  if (Status s = c.device().reset_persisting_l2(); !s.ok()) c.fail(m, s);
}

// As much as a reply holds; the rest stays here for the next question.
void output(Connection& c, const Message& m) {
  Output& output = c.state().output();
  output.gather(c.device());
  uint8_t reply[sizeof ReplySlot::data];
  wire::OUTPUT_rep rep{};
  size_t at = sizeof rep;
  auto put = [&](std::string& from) {
    const size_t n = std::min(from.size(), sizeof reply - at);
    if (n) std::memcpy(reply + at, from.data(), n);
    at += n;
    from.erase(0, n);
    return static_cast<uint32_t>(n);
  };
  rep.out_bytes = put(output.text);
  rep.err_bytes = output.text.empty() ? put(output.errors) : 0;
  rep.more = !output.text.empty() || !output.errors.empty();
  std::memcpy(reply, &rep, sizeof rep);
  c.reply(m, kOk, reply, at);
}

}  // namespace devproxy::server::context
