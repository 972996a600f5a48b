// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/ledger.h"

#include <algorithm>
#include <mutex>

namespace devproxy::server {

LedgerTable::Entry* LedgerTable::find(const ProcessId& owner) {
  const auto it = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.owner == owner; });
  return it == entries.end() ? nullptr : &*it;
}

const LedgerTable::Entry* LedgerTable::find(const ProcessId& owner) const {
  return const_cast<LedgerTable*>(this)->find(owner);
}

uint64_t LedgerTable::free(const ProcessId& owner, uint64_t limit) const {
  const auto left = [](uint64_t of, uint64_t taken) { return of > taken ? of - taken : 0; };
  uint64_t total = limit;
  for (const Entry& e : entries) total = std::max(total, e.limit);
  const Entry* own = find(owner);
  return std::min(left(limit, own ? own->bytes : 0), left(total, used()));
}

bool LedgerTable::join(const ProcessId& owner, uint64_t limit) {
  Entry* entry = find(owner);
  if (!entry) entry = find({});
  if (!entry) return false;
  entry->owner = owner;
  entry->limit = limit;
  return true;
}

std::optional<uint64_t> LedgerTable::take(const ProcessId& owner, uint64_t wanted, uint64_t minimum, uint64_t limit) {
  const uint64_t left = free(owner, limit);
  if (minimum > left || !join(owner, limit)) return std::nullopt;
  const uint64_t granted = wanted <= left ? std::max(wanted, minimum) : minimum;
  find(owner)->bytes += granted;
  return granted;
}

void LedgerTable::give(const ProcessId& owner, uint64_t bytes) {
  if (Entry* entry = find(owner)) entry->bytes -= std::min(entry->bytes, bytes);
}

StatusOr<std::unique_ptr<Ledger>> Ledger::open(const std::string& path, uint64_t limit_bytes) {
  auto file = LockedFile::open(path);
  if (!file.ok()) return std::move(file).status();
  return std::make_unique<Ledger>(std::move(*file), limit_bytes);
}

// Two threads of this process share the descriptor, and flock would let both in: the mutex keeps them apart.
static std::mutex& in_process() {
  static std::mutex mu;
  return mu;
}

template <class Change>
auto Ledger::change(Change change) {
  std::lock_guard guard(in_process());
  LockedFile::Lock lock(file_);
  LedgerTable table;
  if (file_.read(&table, sizeof table) != sizeof table || table.magic != LedgerTable::kMagic ||
      table.version != LedgerTable::kVersion)
    table = {};
  table.reap(is_alive);
  const auto answer = change(table);
  // A full file system: the answer is still right for this process, and the next writer brings the file up to date
  // except for our entry. The file is one page of tmpfs that exists from the first write on.
  [[maybe_unused]] const bool ignored = file_.write(&table, sizeof table);
  return answer;
}

std::optional<uint64_t> Ledger::take(uint64_t wanted, uint64_t minimum) {
  return change([&](LedgerTable& table) { return table.take(self_, wanted, minimum, limit_bytes_); });
}

void Ledger::give(uint64_t bytes) {
  change([&](LedgerTable& table) { return table.give(self_, bytes), 0; });
}

uint64_t Ledger::free_bytes() {
  return change([&](LedgerTable& table) { return table.free(self_, limit_bytes_); });
}

void Ledger::join() {
  if (users_++ == 0) change([&](LedgerTable& table) { return table.join(self_, limit_bytes_); });
}

void Ledger::leave() {
  if (--users_ != 0) return;
  change([&](LedgerTable& table) {
    for (auto& entry : table.entries)
      if (entry.owner == self_) entry = {};
    return 0;
  });
}

}  // namespace devproxy::server
