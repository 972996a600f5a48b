// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/slot_table.h"

#include <cstring>

namespace devproxy::server {

StatusOr<std::unique_ptr<SlotTable>> SlotTable::open(const std::string& path, uint32_t first, uint32_t end) {
  auto file = LockedFile::open(path);
  if (!file.ok()) return std::move(file).status();
  return std::make_unique<SlotTable>(std::move(*file), first, end);
}

template <class Change>
auto SlotTable::change(Change change) {
  std::lock_guard guard(mu_);
  LockedFile::Lock lock(file_);
  Table table;
  if (!lock.held()) return decltype(change(table)){};
  if (file_.read(&table, sizeof table) != sizeof table || table.magic != kMagic || table.version != 1) {
    table = {};
    table.magic = kMagic;
    table.version = 1;
  }
  const auto answer = change(table);
  [[maybe_unused]] const bool ignored = file_.write(&table, sizeof table);
  return answer;
}

std::optional<uint32_t> SlotTable::take(uint32_t wanted) {
  return change([&](Table& table) -> std::optional<uint32_t> {
    const uint32_t first = wanted == kAny ? first_ : wanted, last = wanted == kAny ? end_ : wanted + 1;
    for (uint32_t i = first; i < last && i < kMaxSlots; i++) {
      if (table.servers[i].pid && is_alive(table.servers[i])) continue;
      table.servers[i] = self_;
      return i;
    }
    return std::nullopt;
  });
}

void SlotTable::adopt(uint32_t slot) {
  change([&](Table& table) {
    if (slot < kMaxSlots) table.servers[slot] = self_;
    return 0;
  });
}

void SlotTable::give(uint32_t slot) {
  change([&](Table& table) {
    if (slot < kMaxSlots && table.servers[slot] == self_) table.servers[slot] = {};
    return 0;
  });
}

}  // namespace devproxy::server
