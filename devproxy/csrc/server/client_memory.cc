// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/client_memory.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <utility>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/server/state_record.h"

namespace devproxy::server {

void ClientMemory::count(int64_t change_bytes) {
  const auto change = static_cast<uint64_t>(change_bytes);  // wraps as it should
  const uint64_t live = counters_.live_bytes.load(std::memory_order_relaxed) + change;
  counters_.live_bytes.store(live, std::memory_order_relaxed);
  if (live > counters_.peak_bytes.load(std::memory_order_relaxed))
    counters_.peak_bytes.store(live, std::memory_order_relaxed);
  counters_.stable_bytes.store(device_.stable_bytes(), std::memory_order_relaxed);
  server_.change(change);
}

void ClientMemory::trace() {
  trace_.changed(client_bytes_ - std::min(kept_bytes_, client_bytes_), [this] {
    counters_.trough_bytes.store(trace_.trough_bytes(), std::memory_order_relaxed);
    counters_.period_us.store(trace_.period_us(), std::memory_order_relaxed);
    return now_us();
  });
}

bool ClientMemory::in_variable(uint64_t addr, uint64_t bytes) const {
  auto it = variables_.upper_bound(addr);
  if (it == variables_.begin()) return false;
  --it;
  const uint64_t offset = addr - it->first;
  return offset <= it->second.bytes && bytes <= it->second.bytes - offset;
}

std::optional<uint64_t> ClientMemory::take_credit(uint64_t wanted, uint64_t minimum, uint64_t most) {
  if (minimum > most) return std::nullopt;
  const auto granted = ledger_.grow(std::min(wanted, most), minimum);
  if (granted) credit_bytes_ += *granted;
  return granted;
}

bool ClientMemory::return_credit(uint64_t bytes) {
  if (bytes > credit_bytes_ - client_bytes_) return false;
  credit_bytes_ -= bytes;
  const uint64_t owed = std::min(bytes, owed_bytes_);
  owed_bytes_ -= owed;
  if (bytes > owed) ledger_.give(bytes - owed);
  return true;
}

uint64_t ClientMemory::free_bytes(uint64_t most) const {
  const uint64_t free = std::min(ledger_.free_bytes(), most);
  return free > owed_bytes_ ? free - owed_bytes_ : 0;
}

void ClientMemory::owe_unused() {
  const uint64_t unused = credit_bytes_ - client_bytes_ - owed_bytes_;
  if (unused == 0) return;
  ledger_.give(unused);
  owed_bytes_ += unused;
}

bool ClientMemory::use_credit(uint64_t bytes, uint64_t most) {
  const uint64_t unused = credit_bytes_ - client_bytes_;
  if (bytes > unused) return false;
  const uint64_t missing = missing_bytes(bytes);
  if (missing == 0) return true;
  const auto granted = ledger_.grow(std::min(owed_bytes_, std::max(missing, most)), missing);
  if (granted) owed_bytes_ -= *granted;
  return granted.has_value();
}

MemoryMirror::Answer ClientMemory::allocate(uint64_t addr, uint64_t bytes, uint32_t flags, std::vector<Range>* reused) {
  {
    std::unique_lock lock(mu_);
    if (const Answer answer = device_.add(addr, bytes, flags, reused); answer != Answer::kOk) return answer;
  }
  trace();  // what was freed since the last message without a word
  client_bytes_ += bytes;
  count(static_cast<int64_t>(bytes));
  Counters::add(counters_.allocs, 1);
  trace();
  return Answer::kOk;
}

MemoryMirror::Answer ClientMemory::free(uint64_t addr, uint64_t position, bool keep, uint64_t oldest_pending,
                                        Range* freed, std::vector<Range>* forgotten) {
  {
    std::unique_lock lock(mu_);
    const Answer answer = device_.remove(addr, position, keep, freed);
    if (oldest_pending) device_.retire(oldest_pending, forgotten);
    if (answer != Answer::kOk) return answer;
  }
  client_bytes_ -= freed->bytes;
  count(-static_cast<int64_t>(freed->bytes));
  Counters::add(counters_.frees, 1);
  trace();
  return Answer::kOk;
}

bool ClientMemory::add_global(uint64_t addr, uint64_t bytes) {
  if (!ledger_.grow(bytes, bytes)) return false;
  std::vector<Range> reused;
  {
    std::unique_lock lock(mu_);
    if (device_.add(addr, bytes, 0, &reused) != Answer::kOk) {
      ledger_.give(bytes);
      return false;
    }
  }
  globals_bytes_ += bytes;
  count(static_cast<int64_t>(bytes));
  return true;
}

MemoryMirror::Answer ClientMemory::drop_global(uint64_t addr, uint64_t position, bool keep, Range* freed) {
  {
    std::unique_lock lock(mu_);
    if (const Answer answer = device_.remove(addr, position, keep, freed); answer != Answer::kOk) return answer;
  }
  ledger_.give(freed->bytes);
  globals_bytes_ -= freed->bytes;
  count(-static_cast<int64_t>(freed->bytes));
  return Answer::kOk;
}

bool ClientMemory::take_array(uint64_t bytes) {
  if (!ledger_.grow(bytes, bytes)) return false;
  arrays_bytes_ += bytes;
  count(static_cast<int64_t>(bytes));
  return true;
}

void ClientMemory::give_array(uint64_t bytes) {
  ledger_.give(bytes);
  arrays_bytes_ -= bytes;
  count(-static_cast<int64_t>(bytes));
}

MemoryMirror::Answer ClientMemory::allocate_pinned(uint64_t addr, uint64_t bytes) {
  std::vector<Range> reused;
  std::unique_lock lock(mu_);
  return pinned_.add(addr, bytes, 0, &reused);
}

MemoryMirror::Answer ClientMemory::free_pinned(uint64_t addr, uint64_t position, bool keep, uint64_t oldest_pending,
                                               Range* freed) {
  std::vector<Range> forgotten;
  std::unique_lock lock(mu_);
  const Answer answer = pinned_.remove(addr, position, keep, freed);
  if (oldest_pending) pinned_.retire(oldest_pending, &forgotten);
  return answer;
}

std::vector<Range> ClientMemory::retire(uint64_t oldest_pending) {
  std::vector<Range> forgotten;
  std::unique_lock lock(mu_);
  device_.retire(oldest_pending, &forgotten);
  return forgotten;
}

std::vector<Range> ClientMemory::retire(const hal::PendingUse& use) {
  std::vector<Range> forgotten;
  std::unique_lock lock(mu_);
  device_.retire_unless([&](auto... range) { return use.touches(range...); }, &forgotten);
  return forgotten;
}

std::vector<Range> ClientMemory::retire_all() {
  std::vector<Range> forgotten, window;
  std::unique_lock lock(mu_);
  device_.retire(UINT64_MAX, &forgotten);
  pinned_.retire(UINT64_MAX, &window);
  return forgotten;
}

void ClientMemory::give_all() {
  const uint64_t taken = credit_bytes_ - owed_bytes_ - untaken_bytes_.exchange(0) + globals_bytes_ + arrays_bytes_;
  if (taken) ledger_.give(taken);
  credit_bytes_ = owed_bytes_ = globals_bytes_ = arrays_bytes_ = 0;
  count(-static_cast<int64_t>(counters_.live_bytes.load(std::memory_order_relaxed)));
}

// -- dump and restore -------------------------------------------------------------------------------------------------

std::vector<Piece> ClientMemory::pieces() const {
  std::vector<Piece> pieces;
  uint64_t offset = 0;
  device_.for_each_live([&](uint64_t addr, const auto& a) {
    pieces.push_back({addr, offset, a.bytes});
    offset += a.bytes;
  });
  for (const auto& [addr, variable] : variables_) {
    pieces.push_back({addr, offset, variable.bytes});
    offset += variable.bytes;
  }
  device_.for_each_freed([&](uint64_t addr, const auto& a) {
    if (addr >= globals_begin()) return;
    pieces.push_back({addr, offset, a.bytes});
    offset += a.bytes;
  });
  return pieces;
}

void ClientMemory::save(ClientRecord* client) const {
  client->credit_bytes = credit_bytes_;
  client->client_bytes = client_bytes_;
  client->globals_bytes = globals_bytes_;
  client->arrays_bytes = arrays_bytes_;
  uint64_t offset = 0;  // as pieces() places them
  const auto save_range = [&](uint64_t addr, const MemoryMirror::Allocation& a) {
    client->device.push_back({addr, a.bytes, offset, a.flags, 0, {}, false, a.freed_at, a.crossed_before});
    offset += a.bytes;
  };
  device_.for_each_live(save_range);
  for (const auto& [addr, v] : variables_) {
    client->device.push_back({addr, v.bytes, offset, 0, v.module.value, v.name, v.given});
    offset += v.bytes;
  }
  device_.for_each_freed([&](uint64_t addr, const auto& a) {
    if (addr < globals_begin()) save_range(addr, a);
  });
  pinned_.for_each_live([&](uint64_t addr, const auto& a) { client->pinned.emplace_back(addr, a.bytes); });
  pinned_.for_each_freed(
      [&](uint64_t addr, const auto& a) { client->pinned_freed.push_back({addr, a.bytes, a.freed_at}); });
}

Status ClientMemory::no_room(uint64_t needed) const {
  return {kOutOfMemory, "GPU " + std::to_string(physical_gpu_) + " of this machine has " +
                            std::to_string(ledger_.room_bytes()) + " of " + std::to_string(ledger_.total_bytes()) +
                            " bytes free, the client needs " + std::to_string(needed)};
}

Status ClientMemory::restore(const ClientRecord& client, uint32_t physical_gpu, bool shared) {
  physical_gpu_ = physical_gpu;
  const uint64_t credit = client.credit_bytes, beside = client.globals_bytes + client.arrays_bytes;
  uint64_t later = 0;
  for (const RangeRecord& range : client.device)
    if (shared && range.is_stable()) later += range.bytes;
  if (later > client.client_bytes || client.client_bytes > credit)
    return {kInvalidImage, "the state's device ranges do not add up to its count"};
  // Globals and arrays are taken one by one when they are made again; whether all fits is asked here, at once. What the
  // client has not allocated is for those who need it now: several ranks may come to one GPU.
  const uint64_t needed = client.client_bytes - later + beside;
  if (!ledger_.take(needed, needed)) return no_room(needed);
  ledger_.give(beside);
  credit_bytes_ = credit;
  owed_bytes_ = credit - client.client_bytes;
  restored_unused_ = owed_bytes_ != 0;
  untaken_bytes_ = later;
  std::vector<Range> reused;
  for (const RangeRecord& range : client.device) {
    if (range.addr >= globals_begin() || range.module) continue;  // comes with its module
    if (device_.add(range.addr, range.bytes, range.flags, &reused, range.crossed_before) != Answer::kOk)
      return {kInvalidImage, "the state's device ranges overlap or lie outside"};
    if (range.freed_at) continue;
    client_bytes_ += range.bytes;
    count(static_cast<int64_t>(range.bytes));
  }
  for (const auto& [addr, bytes] : client.pinned)
    if (pinned_.add(addr, bytes, 0, &reused) != Answer::kOk)
      return {kInvalidImage, "the state's pinned ranges overlap or lie outside"};
  if (Status s = restore_freed(client); !s.ok()) return s;
  if (client_bytes_ != client.client_bytes || client_bytes_ > credit_bytes_)
    return {kInvalidImage, "the state's device ranges do not add up to its count"};
  return {};
}

Status ClientMemory::take_stable(uint64_t bytes) {
  if (bytes == 0 || untaken_bytes_.load() == 0) return {};
  if (!ledger_.take(bytes, bytes))
    return no_room(bytes).with("filling what it keeps from step to step, beside what other ranks have too");
  untaken_bytes_ -= bytes;
  return {};
}

// The mirrors keep freed ranges in the order of their positions.
Status ClientMemory::restore_freed(const ClientRecord& client) {
  struct Freed {
    uint64_t freed_at, addr;
    MemoryMirror* mirror;
  };
  std::vector<Freed> all;
  for (const RangeRecord& range : client.device)
    if (range.freed_at) all.push_back({range.freed_at, range.addr, &device_});
  std::vector<Range> reused;
  for (const auto& [addr, bytes, freed_at] : client.pinned_freed) {
    if (pinned_.add(addr, bytes, 0, &reused) != Answer::kOk || !freed_at)
      return {kInvalidImage, "the state's pinned ranges overlap or lie outside"};
    all.push_back({freed_at, addr, &pinned_});
  }
  std::sort(all.begin(), all.end(), [](const Freed& a, const Freed& b) { return a.freed_at < b.freed_at; });
  Range freed;
  for (const Freed& one : all)
    if (one.mirror->remove(one.addr, one.freed_at, true, &freed) != Answer::kOk)
      return {kInvalidImage, "the state's freed ranges overlap or lie outside"};
  return {};
}

Status ClientMemory::check_restored(const ClientRecord& client) const {
  if (arrays_bytes_ != client.arrays_bytes) return {kInvalidImage, "the state's arrays do not add up to its count"};
  if (globals_bytes_ != client.globals_bytes)
    return {kInvalidImage, "the modules' globals take other memory than before"};
  return {};
}

Status ClientMemory::place_variable(const RangeRecord& saved, uint64_t* addr) {
  const std::string& name = saved.name;
  for (auto& [now, variable] : variables_) {
    if (variable.module.value != saved.module || variable.name != name) continue;
    if (variable.bytes != saved.bytes)
      return {kInvalidImage, "the module's variable '" + name + "' has another size than before"};
    if (saved.given && now != saved.addr) {
      char text[64];
      std::snprintf(text, sizeof text, "0x%llx and lies at 0x%llx now", static_cast<unsigned long long>(saved.addr),
                    static_cast<unsigned long long>(now));
      return {kNotSupported, "the job was told that its module's variable '" + name + "' lies at " + text +
                                 ": the driver chose another place, and the job cannot be told; nothing of it runs"};
    }
    variable.given = variable.given || saved.given;
    *addr = now;
    return {};
  }
  return {kInvalidImage, "the module has no variable '" + name + "' any more"};
}

}  // namespace devproxy::server
