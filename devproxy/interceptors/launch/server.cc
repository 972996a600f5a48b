// SPDX-License-Identifier: Apache-2.0
// Launches, the server's half. A correct client has checked all this before it posted; what is wrong here is refused
// late.
#include <algorithm>

#include "cuda_number.gen.h"
#include "devproxy/csrc/server/handlers.h"

namespace devproxy::server::launch {

namespace {

using namespace cuda_number;

int32_t attribute(Connection& c, int32_t which) {
  return c.device().properties().attributes[static_cast<size_t>(which)];
}

bool takes(Connection& c, uint32_t id) {
  switch (id) {
    case kLaunchCooperative: return attribute(c, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH) != 0;
    case kLaunchClusterDimension:
    case kLaunchPreferredClusterDimension: return attribute(c, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH) != 0;
    case kLaunchAccessPolicyWindow:
    case kLaunchSynchronizationPolicy:
    case kLaunchClusterScheduling:
    case kLaunchProgrammaticSerialization:
    case kLaunchPriority:
    case kLaunchMemSyncDomainMap:
    case kLaunchMemSyncDomain:
    case kLaunchSharedMemoryCarveout:
    case kLaunchNvlinkCentricScheduling: return true;
    default: return false;
  }
}

// The attributes at the beginning of the bulk data; false where a correct client would not have sent them.
bool attributes_of(Connection& c, const Message& m, size_t n) {
  if (n > kMaxLaunchAttributes || n * sizeof(LaunchAttribute) > m.bulk_bytes) return false;
  const auto* list = reinterpret_cast<const LaunchAttribute*>(m.bulk);
  for (size_t i = 0; i < n; i++)
    if (!takes(c, list[i].id)) return false;
  return true;
}

template <class Request>
void launch_with(Connection& c, const Message& m, const Request& r, size_t n_attributes) {
  hal::QueueRef* queue = c.device().queue_of(r.stream);
  const FunctionObject* object = c.state().functions().find(r.function);
  if (!queue || !object) return c.refuse(m, r.stream, kInvalidHandle);
  uint64_t threads;
  if (__builtin_mul_overflow(uint64_t{r.block_x} * r.block_y, uint64_t{r.block_z}, &threads) || threads == 0 ||
      threads > object->max_threads || r.grid_x == 0 || r.grid_y == 0 || r.grid_z == 0 ||
      r.shared_bytes > static_cast<uint32_t>(attribute(c, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)) ||
      (n_attributes && !attributes_of(c, m, n_attributes)))
    return c.refuse(m, r.stream, kInvalidValue);
  const size_t skip = n_attributes * sizeof(LaunchAttribute);
  if (m.bulk_bytes - skip < object->params_bytes) return c.refuse(m, r.stream, kInvalidValue);
  Counters::add(c.counting().launches, 1);
  c.device().launch(*queue, {m.end, 0, m.slot}, object->function,
                    {{r.grid_x, r.grid_y, r.grid_z},
                     {r.block_x, r.block_y, r.block_z},
                     r.shared_bytes,
                     m.bulk + skip,
                     m.bulk_bytes - skip,
                     reinterpret_cast<const LaunchAttribute*>(m.bulk),
                     n_attributes});
}

}  // namespace

void launch(Connection& c, const Message& m) { launch_with(c, m, m.as<wire::LAUNCH_req>(), 0); }

void launch_ex(Connection& c, const Message& m) {
  const auto& r = m.as<wire::LAUNCH_EX_req>();
  launch_with(c, m, r, r.n_attributes);
}

void occupancy(Connection& c, const Message& m) {
  const auto& r = m.as<wire::OCCUPANCY_req>();
  const FunctionObject* object = c.state().functions().find(r.function);
  if (!object) return c.reply(m, kInvalidHandle);
  const size_t n = m.bulk_bytes / sizeof(LaunchAttribute);
  if (r.kind >= kOccupancyKinds || r.block_x == 0 || m.bulk_bytes % sizeof(LaunchAttribute) || !attributes_of(c, m, n))
    return c.reply(m, kInvalidValue);
  hal::OccupancyQuery query;
  query.kind = static_cast<OccupancyKind>(r.kind);
  query.flags = r.flags;
  query.shared_bytes = r.shared_bytes;
  const uint32_t grid[3] = {r.grid_x, r.grid_y, r.grid_z}, block[3] = {r.block_x, r.block_y, r.block_z};
  std::copy_n(grid, 3, query.grid);
  std::copy_n(block, 3, query.block);
  query.attributes = reinterpret_cast<const LaunchAttribute*>(m.bulk);
  query.n_attributes = n;
  auto answer = c.device().occupancy(object->function, query);
  if (!answer.ok()) return c.fail(m, answer.status());
  const wire::OCCUPANCY_rep rep{*answer};
  c.reply(m, kOk, &rep, sizeof rep);
}

}  // namespace devproxy::server::launch
