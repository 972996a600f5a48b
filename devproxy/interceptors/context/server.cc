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

void trace(Connection& c, const Message& m) {
  constexpr uint64_t kLongestMs = 3'600'000;
  const auto& r = m.as<wire::TRACE_req>();
  Trace& trace = c.trace();
  Connection::Profile& profile = c.profile();
  wire::TRACE_rep rep{now_ns(), 0, profile.lost};
  const uint8_t* from = nullptr;
  size_t unit = 1;
  switch (r.what) {
    case 0:
      profile = {};
      trace.keep_on(Trace::Reader::kProfile, 0);  // what an earlier one has left
      trace.keep_on(Trace::Reader::kProfile, rep.now_ns + std::min(r.keep_ms, kLongestMs) * 1'000'000);
      break;
    case 1: {
      Trace::Taken taken = trace.take(Trace::Reader::kProfile);
      trace.keep_on(Trace::Reader::kProfile, 0);
      profile = {std::move(taken.events), {}, taken.lost};
      for (const std::string& name : taken.names) profile.names.append(name).push_back('\0');
      rep.total = profile.events.size();
      rep.lost = profile.lost;
      break;
    }
    case 2:
      from = reinterpret_cast<const uint8_t*>(profile.events.data());
      rep.total = profile.events.size();
      unit = sizeof(Trace::Event);
      break;
    case 3:
      from = reinterpret_cast<const uint8_t*>(profile.names.data());
      rep.total = profile.names.size();
      break;
    case 4: profile = {}; break;
    default: return c.reply(m, kInvalidValue);
  }
  uint8_t reply[sizeof ReplySlot::data];
  const size_t left = rep.total - std::min(rep.total, r.first);
  const size_t bytes = from ? std::min<size_t>(left, (sizeof reply - sizeof rep) / unit) * unit : 0;
  std::memcpy(reply, &rep, sizeof rep);
  if (bytes) std::memcpy(reply + sizeof rep, from + r.first * unit, bytes);
  c.reply(m, kOk, reply, sizeof rep + bytes);
}

}  // namespace devproxy::server::context
