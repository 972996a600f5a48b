// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/ledger.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace devproxy::server {

LedgerTable::Entry* LedgerTable::find(const ProcessId& owner) {
  const auto it = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.owner == owner; });
  return it == entries.end() ? nullptr : &*it;
}

const LedgerTable::Entry* LedgerTable::find(const ProcessId& owner) const {
  return const_cast<LedgerTable*>(this)->find(owner);
}

uint64_t LedgerTable::used() const {
  uint64_t sum = 0;
  for (const Entry& e : entries) {
    if (!e.owner.pid) continue;
    if (!e.aside) {
      sum += e.need();
      continue;
    }
    // Once for each job: what is set aside, as far as its successors do not have it.
    uint64_t aside = 0, here = 0;
    bool first = true;
    for (const Entry& other : entries) {
      if (!other.owner.pid || other.job != e.job) continue;
      if (other.aside && &other < &e) first = false;
      (other.aside ? aside : here) += other.need();
    }
    if (first && aside > here) sum += aside - here;
  }
  return sum;
}

uint64_t LedgerTable::total(uint64_t limit) const {
  for (const Entry& e : entries) limit = std::max(limit, e.limit);
  return limit;
}

LedgerTable::Needs LedgerTable::needs_of(uint64_t job) const {
  Needs needs;
  for (const Entry& e : entries)
    if (e.owner.pid && e.job == job) (e.aside ? needs.aside : needs.here) += e.need();
  return needs;
}

uint64_t LedgerTable::free_alone(const ProcessId& owner, uint64_t limit, uint64_t own_bytes) const {
  uint64_t others = used();
  if (const Entry* const own = find(owner)) {
    const auto [aside, here] = needs_of(own->job);
    others -= std::max(aside, here);
  }
  const uint64_t taken = others + own_bytes, all = total(limit);
  return std::min(limit > own_bytes ? limit - own_bytes : 0, all > taken ? all - taken : 0);
}

uint64_t LedgerTable::left_to(uint64_t job, uint64_t limit) const {
  const auto [aside, here] = needs_of(job);
  const uint64_t others = used() - std::max(aside, here), all = total(limit);
  return all > others ? all - others : 0;
}

uint64_t LedgerTable::free(const ProcessId& owner, uint64_t limit) const {
  const auto left = [](uint64_t of, uint64_t taken) { return of > taken ? of - taken : 0; };
  const Entry* const own = find(owner);
  if (!own) return std::min(limit, left(total(limit), used()));
  const auto [aside, here] = needs_of(own->job);
  const uint64_t others = used() - std::max(aside, here);  // used() has the larger one of the two
  return std::min(left(limit, own->need()), left(total(limit), others + (own->aside ? std::max(aside, here) : here)));
}

bool LedgerTable::join(const ProcessId& owner, uint64_t job, uint64_t limit) {
  Entry* entry = find(owner);
  if (!entry) entry = find({});
  if (!entry) return false;
  entry->owner = owner;
  entry->job = job;
  entry->limit = limit;
  return true;
}

std::optional<uint64_t> LedgerTable::take(const ProcessId& owner, uint64_t wanted, uint64_t minimum, uint64_t limit,
                                          uint64_t most) {
  Entry* const own = find(owner);
  const uint64_t left = std::min(free(owner, limit), most);
  if (!own || minimum > left) return std::nullopt;
  const uint64_t granted = wanted <= left ? std::max(wanted, minimum) : minimum;
  own->bytes += granted;
  return granted;
}

void LedgerTable::give(const ProcessId& owner, uint64_t bytes) {
  if (Entry* entry = find(owner)) entry->bytes -= std::min(entry->bytes, bytes);
}

StatusOr<std::unique_ptr<Ledger>> Ledger::open(const std::string& path, const std::string& job, uint64_t limit_bytes) {
  auto file = LockedFile::open(path);
  if (!file.ok()) return std::move(file).status();
  return std::make_unique<Ledger>(std::move(*file), XXH3_64bits(job.data(), job.size()), limit_bytes);
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
  if (!lock.held()) return decltype(change(table)){};
  if (file_.read(&table, sizeof table) != sizeof table || table.magic != LedgerTable::kMagic ||
      table.version != LedgerTable::kVersion)
    table = {};
  table.reap(is_alive);
  if (LedgerTable::Entry* const own = table.find(self_); own && saved_) own->saved = saved_();
  table.give(self_, owed_.exchange(0));
  const auto answer = change(table);
  // A full file system: the answer is still right for this process, and the next writer brings the file up to date
  // except for our entry. The file is one page of tmpfs that exists from the first write on.
  [[maybe_unused]] const bool ignored = file_.write(&table, sizeof table);
  return answer;
}

void Ledger::join() {
  if (users_++ == 0) change([&](LedgerTable& table) { return table.join(self_, job_, limit_bytes_); });
}

void Ledger::set_aside(bool aside) {
  change([&](LedgerTable& table) {
    if (LedgerTable::Entry* const own = table.find(self_)) own->aside = aside;
    return 0;
  });
}

// Without the lock: somebody may hold it for long, and a number that is shown may be in the middle of a change.
std::optional<LedgerTable> Ledger::read() const {
  LedgerTable table;
  if (file_.read(&table, sizeof table) != sizeof table || table.magic != LedgerTable::kMagic ||
      table.version != LedgerTable::kVersion)
    return std::nullopt;
  table.reap(is_alive);
  return table;
}

Ledger::Use Ledger::use() const {
  std::optional<LedgerTable> table = read();
  if (!table) return {};
  LedgerTable::Entry* const own = table->find(self_);
  if (own && saved_) own->saved = saved_();
  return {own ? own->bytes : 0, own ? own->saved : 0, table->used(), table->total(limit_bytes_)};
}

uint64_t Ledger::left_bytes() const {
  const std::optional<LedgerTable> table = read();
  return table ? table->left_to(job_, limit_bytes_) : limit_bytes_;
}

// As its command line has it (devproxy/proxy/server_set.py); by its number where that cannot be read.
static std::string job_of(uint32_t server_pid) {
  std::ifstream file("/proc/" + std::to_string(server_pid) + "/cmdline", std::ios::binary);
  for (std::string word; std::getline(file, word, '\0');)
    if (word == "--job" && std::getline(file, word, '\0') && word.size() <= 64) return "job " + word;
  return "the job of process " + std::to_string(server_pid);
}

std::string Ledger::other_holders() const {
  const std::optional<LedgerTable> table = read();
  if (!table) return "";
  std::map<uint64_t, std::pair<uint64_t, uint32_t>> jobs;  // by the hash: bytes, one of its servers
  for (const LedgerTable::Entry& e : table->entries) {
    if (e.owner.pid == 0 || e.job == job_ || e.need() == 0 || e.aside) continue;
    auto& [bytes, pid] = jobs[e.job];
    bytes += e.need();
    pid = e.owner.pid;
  }
  std::multimap<uint64_t, uint32_t, std::greater<>> sorted;
  for (const auto& [job, holder] : jobs) sorted.insert(holder);
  std::string text;
  for (const auto& [bytes, pid] : sorted) {
    char size[32];
    std::snprintf(size, sizeof size, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
    text += (text.empty() ? "" : ", ") + job_of(pid) + " has " + size;
  }
  return text;
}

void Ledger::leave() {
  if (--users_ != 0) return;
  change([&](LedgerTable& table) {
    for (auto& entry : table.entries)
      if (entry.owner == self_) entry = {};
    return 0;
  });
}

std::optional<uint64_t> LedgerShare::take(uint64_t wanted, uint64_t minimum) { return take(wanted, minimum, false); }

std::optional<uint64_t> LedgerShare::grow(uint64_t wanted, uint64_t minimum) { return take(wanted, minimum, shared_); }

std::optional<uint64_t> LedgerShare::take(uint64_t wanted, uint64_t minimum, bool beyond) {
  Ledger& all = ledger_;
  return all.change([&](LedgerTable& table) {
    // An entry is lost with a ledger of another version, or a full file system.
    if (!table.find(all.self_)) table.join(all.self_, all.job_, all.limit_bytes_);
    auto granted = table.take(all.self_, wanted, minimum, all.limit_bytes_, all.limit_bytes_ - bytes_);
    LedgerTable::Entry* const own = table.find(all.self_);
    if (!granted && beyond && own && minimum <= table.free_alone(all.self_, all.limit_bytes_, bytes_)) {
      own->bytes += minimum;
      granted = minimum;
    }
    bytes_ += granted.value_or(0);
    return granted;
  });
}

void LedgerShare::give(uint64_t bytes) {
  bytes_ -= std::min(bytes_.load(), bytes);
  if (!ledger_.change([&](LedgerTable& table) { return table.give(ledger_.self_, bytes), true; }))
    ledger_.owed_ += bytes;
}

uint64_t LedgerShare::free_bytes() {
  if (!shared_) return room_bytes();
  return ledger_.change(
      [&](LedgerTable& table) { return table.free_alone(ledger_.self_, ledger_.limit_bytes_, bytes_); });
}

uint64_t LedgerShare::room_bytes() {
  return ledger_.change([&](LedgerTable& table) {
    return std::min(table.free(ledger_.self_, ledger_.limit_bytes_), ledger_.limit_bytes_ - bytes_);
  });
}

}  // namespace devproxy::server
