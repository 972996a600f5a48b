// Pinned host memory, the server's half: which parts of the window are allocated. The pages are the client's to free:
// it may write to a range that it allocated anew before its announcement is read here.
#include "devproxy/csrc/server/handlers.h"

namespace devproxy::server::hostmem {

void host_alloc(Connection& c, const Message& m) {
  const auto& r = m.as<wire::HOST_ALLOC_req>();
  std::vector<Range> forgotten;
  if (!c.in_a_window(r.addr, r.bytes)) return c.fail(m, kInvalidValue);
  {
    auto lock = c.change_mirrors();
    if (c.pinned_mirror.add(r.addr, r.bytes, 0, &forgotten) != MemoryMirror::Answer::kOk)
      return c.fail(m, kInvalidValue);
  }
  if (c.in_own_window(r.addr, r.bytes)) Counters::add(c.counting().pinned_bytes, r.bytes);
  c.space().host_allocated(r.addr, r.bytes);
}

void host_window(Connection& c, const Message& m) {
  const auto& r = m.as<wire::HOST_WINDOW_req>();
  if (Status s = c.open_window({r.number, r.gpu, r.slot}); !s.ok()) c.fail(m, s);
}

void host_device_address(Connection& c, const Message& m) {
  const auto& r = m.as<wire::HOST_DEVICE_ADDRESS_req>();
  if (r.bytes == 0 || !c.pinned_mirror.contains(r.addr, r.bytes, m.end)) return c.reply(m, kInvalidValue);
  auto addr = c.space().host_device_address(r.addr, r.bytes);
  if (!addr.ok()) return c.fail(m, addr.status());
  const wire::HOST_DEVICE_ADDRESS_rep rep{*addr};
  c.reply(m, kOk, &rep, sizeof rep);
}

void host_free(Connection& c, const Message& m) {
  const auto& r = m.as<wire::HOST_FREE_req>();
  const bool idle = c.space().idle();
  const uint64_t oldest = c.pinned_mirror.has_freed() ? c.space().oldest_pending() : 0;
  std::vector<Range> forgotten;
  Range freed;
  auto lock = c.change_mirrors();
  if (c.pinned_mirror.remove(r.addr, m.end, !idle, &freed) != MemoryMirror::Answer::kOk) c.fail(m, kInvalidValue);
  if (oldest) c.pinned_mirror.retire(oldest, &forgotten);
  if (c.in_own_window(freed.addr, freed.bytes)) Counters::add(c.counting().pinned_bytes, -freed.bytes);
}

}  // namespace devproxy::server::hostmem
