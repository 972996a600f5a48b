// Pinned host memory, the server's half: which parts of the window are allocated. The pages are the client's to free:
// it may write to a range that it allocated anew before its announcement is read here.
#include "devproxy/csrc/server/handlers.h"

namespace devproxy::server::hostmem {

void host_alloc(Connection& c, const Message& m) {
  const auto& r = m.as<wire::HOST_ALLOC_req>();
  std::vector<Range> forgotten;
  auto lock = c.change_mirrors();
  if (c.pinned_mirror.add(r.addr, r.bytes, 0, &forgotten) != MemoryMirror::Answer::kOk) c.fail(m, kInvalidValue);
  c.counting().pinned_bytes.store(c.pinned_mirror.live_bytes(), std::memory_order_relaxed);
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
  c.counting().pinned_bytes.store(c.pinned_mirror.live_bytes(), std::memory_order_relaxed);
}

}  // namespace devproxy::server::hostmem
