// Launches, the server's half. A correct client has checked all this before it posted; what is wrong here is refused
// late.
#include "devproxy/csrc/server/handlers.h"

namespace devproxy::server::launch {

namespace {

constexpr size_t kMaxSharedOptin = 97;  // cuda.h: CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN

}  // namespace

void launch(Connection& c, const Message& m) {
  const auto& r = m.as<wire::LAUNCH_req>();
  hal::QueueRef* queue = c.queue_of(r.stream);
  const Connection::FunctionObject* object = c.functions.find(r.function);
  if (!queue || !object) return c.refuse(m, r.stream, kInvalidHandle);
  uint64_t threads;
  if (__builtin_mul_overflow(uint64_t{r.block_x} * r.block_y, uint64_t{r.block_z}, &threads) || threads == 0 ||
      threads > object->max_threads || r.grid_x == 0 || r.grid_y == 0 || r.grid_z == 0 ||
      r.shared_bytes > static_cast<uint32_t>(c.parts().device->properties().attributes[kMaxSharedOptin]) ||
      m.bulk_bytes < object->params_bytes)
    return c.refuse(m, r.stream, kInvalidValue);
  Counters::add(c.counting().launches, 1);
  c.space().launch(
      *queue, {m.end, 0}, object->function,
      {{r.grid_x, r.grid_y, r.grid_z}, {r.block_x, r.block_y, r.block_z}, r.shared_bytes, m.bulk, m.bulk_bytes});
}

}  // namespace devproxy::server::launch
