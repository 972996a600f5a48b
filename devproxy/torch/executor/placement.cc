// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/executor/placement.h"

#include <cstdint>
#include <vector>

#include "devproxy/csrc/wire/segment.h"

namespace devproxy::aten {
namespace {

struct Offer {
  void* p;
  size_t bytes;
  bool taken;
};

struct Offers {
  std::vector<Offer> list;
  bool open = false;
};
thread_local Offers t_offers;

}  // namespace

namespace placement {

bool is_device_address(const void* p) {
  const auto a = reinterpret_cast<uint64_t>(p);
  return a >= kRangeBase && a < kRangeBase + kMaxSlots * kRangeBytes;
}

void* take(size_t bytes) {
  if (!t_offers.open || bytes == 0) return nullptr;
  for (Offer& o : t_offers.list) {
    if (o.taken || o.bytes != bytes) continue;
    o.taken = true;
    return o.p;
  }
  return nullptr;
}

void give_back(void* p) {
  for (Offer& o : t_offers.list)
    if (o.p == p) o.taken = false;
}

}  // namespace placement

PlacementScope::PlacementScope() {
  t_offers.list.clear();
  t_offers.open = false;
}
PlacementScope::~PlacementScope() { close(); }

void PlacementScope::offer(void* p, size_t bytes) {
  if (!placement::is_device_address(p)) return;
  t_offers.list.push_back({p, bytes, false});
  t_offers.open = true;
}
void PlacementScope::close() { t_offers.open = false; }

}  // namespace devproxy::aten
