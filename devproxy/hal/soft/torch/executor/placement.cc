#include "devproxy/hal/soft/torch/executor/placement.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdint>

#include "devproxy/csrc/wire/segment.h"

namespace devproxy::softtorch {
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

// Device addresses are a fixed part of the address space that no heap ever uses. oneDNN allocates raw and may free from
// another thread or after the op: by the address alone the deleter knows what is not the heap's.
bool is_device_address(const void* p) {
  const auto a = reinterpret_cast<uint64_t>(p);
  return a >= kRangeBase && a < kRangeBase + kMaxSlots * kRangeBytes;
}

class PlacingAllocator final : public c10::Allocator {
 public:
  explicit PlacingAllocator(c10::Allocator* base) : base_(base) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (t_offers.open && bytes != 0) {
      for (Offer& o : t_offers.list) {
        if (o.taken || o.bytes != bytes) continue;
        o.taken = true;
        return {o.p, o.p, &give_back, c10::kCPU};
      }
    }
    return base_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_raw; }
  void copy_data(void* dst, const void* src, size_t bytes) const override { base_->copy_data(dst, src, bytes); }

 private:
  // A temporary that went before the op ended: the next allocation of that size may have the buffer.
  static void give_back(void* p) {
    for (Offer& o : t_offers.list)
      if (o.p == p) o.taken = false;
  }
  static void free_raw(void* p);

  c10::Allocator* const base_;
};

PlacingAllocator* g_allocator = nullptr;
c10::Allocator* g_base = nullptr;

void PlacingAllocator::free_raw(void* p) {
  if (is_device_address(p)) {
    give_back(p);
  } else {
    g_base->raw_deallocate(p);
  }
}

}  // namespace

void install_placement() {
  static const bool installed = [] {
    g_base = c10::GetAllocator(c10::kCPU);
    g_allocator = new PlacingAllocator(g_base);
    c10::SetAllocator(c10::kCPU, g_allocator, 255);
    return true;
  }();
  (void)installed;
}

PlacementScope::PlacementScope() {
  t_offers.list.clear();
  t_offers.open = false;
}
PlacementScope::~PlacementScope() { close(); }

void PlacementScope::offer(void* p, size_t bytes) {
  if (!is_device_address(p)) return;
  t_offers.list.push_back({p, bytes, false});
  t_offers.open = true;
}
void PlacementScope::close() { t_offers.open = false; }

}  // namespace devproxy::softtorch
