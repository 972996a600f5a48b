// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/executor/placement.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "devproxy/csrc/wire/segment.h"

namespace devproxy::aten {
namespace {

constexpr uint32_t kAny = UINT32_MAX;
constexpr size_t kRemembered = 4096;  // ops with their sizes, per thread

struct Offer {
  void* p;
  size_t bytes;
  bool taken;
  uint32_t turn;  // which allocation of that size gets it, from 0; kAny: the first that finds it free
  bool missed;    // the result came to lie elsewhere
  uint32_t was;   // then: which allocation it was; kAny: none that was seen
};

struct Seen {
  size_t bytes;
  const void* p;
  uint32_t turn;
};

// Of this thread: an op runs on one.
struct Offers {
  std::vector<Offer> list;
  std::vector<Seen> seen;
  bool open = false;
  std::unordered_map<uint64_t, std::vector<uint32_t>> turns;

  uint32_t turn_of(size_t bytes) const {
    return static_cast<uint32_t>(
        std::count_if(seen.begin(), seen.end(), [bytes](const Seen& s) { return s.bytes == bytes; }));
  }
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
  uint32_t turn = kAny;
  for (Offer& o : t_offers.list) {
    if (o.bytes != bytes) continue;
    if (turn == kAny) turn = t_offers.turn_of(bytes);
    if (o.taken || (o.turn != kAny && o.turn != turn)) continue;
    o.taken = true;
    t_offers.seen.push_back({bytes, o.p, turn});
    return o.p;
  }
  return nullptr;
}

void note(size_t bytes, const void* p) {
  if (!t_offers.open) return;
  if (std::none_of(t_offers.list.begin(), t_offers.list.end(), [bytes](const Offer& o) { return o.bytes == bytes; }))
    return;
  t_offers.seen.push_back({bytes, p, t_offers.turn_of(bytes)});
}

void give_back(void* p) {
  for (Offer& o : t_offers.list)
    if (o.p == p) o.taken = false;
}

}  // namespace placement

PlacementScope::PlacementScope(const void* op) noexcept : key_(reinterpret_cast<uintptr_t>(op)) {
  t_offers.list.clear();
  t_offers.seen.clear();
  t_offers.open = false;
}
PlacementScope::~PlacementScope() { close(); }

size_t PlacementScope::offer(void* p, size_t bytes) {
  if (!placement::is_device_address(p)) return SIZE_MAX;
  t_offers.list.push_back({p, bytes, false, kAny, false, kAny});
  key_ = (key_ ^ bytes) * 0xff51afd7ed558ccdull, key_ ^= key_ >> 32;
  return t_offers.list.size() - 1;
}

void PlacementScope::open() {
  t_offers.open = !t_offers.list.empty();
  if (!t_offers.open) return;
  const auto known = t_offers.turns.find(key_);
  if (known == t_offers.turns.end() || known->second.size() != t_offers.list.size()) return;
  for (size_t i = 0; i < t_offers.list.size(); ++i) t_offers.list[i].turn = known->second[i];
}

void PlacementScope::close() { t_offers.open = false; }

void PlacementScope::became(size_t number, const void* p) {
  if (number >= t_offers.list.size()) return;
  Offer& o = t_offers.list[number];
  if (p == o.p) return;
  o.missed = true;
  for (const Seen& s : t_offers.seen)
    if (s.bytes == o.bytes && s.p == p) o.was = s.turn;  // the last: the address may have been a temporary's before
}

// Also of the offers that did not miss: else one of those might take what is another's turn the next time.
void PlacementScope::remember() {
  std::vector<Offer>& list = t_offers.list;
  if (std::none_of(list.begin(), list.end(), [](const Offer& o) { return o.missed; })) return;
  if (t_offers.turns.size() >= kRemembered) t_offers.turns.clear();
  std::vector<uint32_t>& turns = t_offers.turns[key_];
  turns.clear();
  for (const Offer& o : list) {
    uint32_t turn = o.was;
    if (!o.missed)  // where it lies, it was given
      for (const Seen& s : t_offers.seen)
        if (s.p == o.p) turn = s.turn;
    turns.push_back(turn);
  }
}

}  // namespace devproxy::aten
