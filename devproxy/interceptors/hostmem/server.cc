// SPDX-License-Identifier: Apache-2.0
// Pinned host memory, the server's half: which parts of the window are allocated. The pages are the client's to free:
// it may write to a range that it allocated anew before its announcement is read here.
#include "devproxy/csrc/server/handlers.h"

namespace devproxy::server::hostmem {

void host_alloc(Connection& c, const Message& m) {
  const auto& r = m.as<wire::HOST_ALLOC_req>();
  if (!c.windows().in_any(r.addr, r.bytes) || c.memory().allocate_pinned(r.addr, r.bytes) != MemoryMirror::Answer::kOk)
    return c.fail(m, kInvalidValue);
  if (c.windows().in_own(r.addr, r.bytes)) Counters::add(c.counting().pinned_bytes, r.bytes);
  c.device().host_allocated(r.addr, r.bytes);
}

void host_window(Connection& c, const Message& m) {
  const auto& r = m.as<wire::HOST_WINDOW_req>();
  if (Status s = c.windows().open({r.number, r.gpu, r.slot}, c.device()); !s.ok()) c.fail(m, s);
}

void host_device_address(Connection& c, const Message& m) {
  const auto& r = m.as<wire::HOST_DEVICE_ADDRESS_req>();
  if (r.bytes == 0 || !c.memory().pinned().contains(r.addr, r.bytes, m.end)) return c.reply(m, kInvalidValue);
  auto addr = c.device().host_device_address(r.addr, r.bytes);
  if (!addr.ok()) return c.fail(m, addr.status());
  const wire::HOST_DEVICE_ADDRESS_rep rep{*addr};
  c.reply(m, kOk, &rep, sizeof rep);
}

void host_free(Connection& c, const Message& m) {
  const auto& r = m.as<wire::HOST_FREE_req>();
  const bool idle = c.device().idle();
  const uint64_t oldest = c.memory().pinned().has_freed() ? c.device().oldest_pending() : 0;
  Range freed;
  if (c.memory().free_pinned(r.addr, m.end, !idle, oldest, &freed) != MemoryMirror::Answer::kOk)
    c.fail(m, kInvalidValue);
  if (c.windows().in_own(freed.addr, freed.bytes)) Counters::add(c.counting().pinned_bytes, -freed.bytes);
}

}  // namespace devproxy::server::hostmem
