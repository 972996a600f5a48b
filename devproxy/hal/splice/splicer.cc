// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <sstream>

#include "devproxy/csrc/base/log.h"
#include "devproxy/hal/splice/parts.h"

namespace devproxy::hal::splice {

StatusOr<SpliceConfig> SpliceConfig::parse(const std::string& words) {
  SpliceConfig config;
  std::istringstream list(words);
  for (std::string word; std::getline(list, word, ',');) {
    if (word == "off") {
      config.on = false;
    } else if (word == "guard") {
      config.guard = true;
    } else if (word == "eager") {
      config.thrifty = false;
      config.least_bytes = 512;
      config.least_ns = 0;
    } else if (word == "patient") {
      config.idle_patience_ns = 20'000'000'000;
      config.patience_ns = 60'000'000'000;
    } else if (word != "on") {
      return Status(kInvalidValue, "'" + word + "' is none of on, off, guard, eager and patient");
    }
  }
  return config;
}

namespace {

SpliceConfig guarded_where_possible(SpliceConfig config, const PhysicalMemory& memory) {
  config.guard &= memory.traits.guards;
  return config;
}

}  // namespace

Splicer::Splicer(const SpliceConfig& config, std::unique_ptr<PhysicalMemory> memory)
    : config_(guarded_where_possible(config, *memory)),
      gpu_(std::move(memory)),
      page_(gpu_->traits.page),
      least_numbered_(gpu_->traits.least_numbered),
      pool_(*gpu_),
      account_(config.account_ns) {}

Splicer::~Splicer() = default;

std::shared_ptr<Splicer::Member> Splicer::join(uint64_t base, uint64_t bytes, std::unique_ptr<RankMemory> memory,
                                               Pending pending) {
  std::scoped_lock lock(pages_mu_, mu_);
  size_t number = 0;
  while (number < members_.size() && members_[number]) number++;
  if (number == kMaxMembers) return nullptr;
  if (number == members_.size()) members_.emplace_back();
  auto member = std::make_shared<Member>();
  member->number = static_cast<uint32_t>(number);
  member->bit = uint64_t{1} << number;
  member->base = base;
  member->bytes = bytes;
  member->least_numbered = least_numbered_;
  member->memory = std::move(memory);
  member->pending = std::move(pending);
  members_[number] = member;
  account_.begin_anew();
  off_ = false;
  return member;
}

void Splicer::leave(Member& member) {
  std::unique_lock pages(pages_mu_);
  loans_.repay(member.number, 0, member.bytes);
  // Nobody is left to be told: a borrower that gets no pages has what it had.
  [[maybe_unused]] const Status ignored = settle(loans_.call_in(member.number, 0, member.bytes));
  loans_changed();
  std::lock_guard lock(mu_);
  for (const auto& group : groups_) {
    if (!(group->members & member.bit)) continue;
    dissolve(*group);
    group->members &= ~member.bit;
    group->aligned &= ~member.bit;
    if (std::popcount(group->members) < 2) group->retired = true;
  }
  for (const auto& [begin, run] : member.runs) pool_.leave(run.pool, run.end - begin, member.bit);
  member.runs.clear();
  saved_bytes_ = pool_.saved_bytes();
  for (auto& one : members_)
    if (one.get() == &member) one = nullptr;
}

bool Splicer::concerned(const Member& member) { return member.concerned(); }

SpliceCounts Splicer::counts() const {
  std::lock_guard lock(mu_);
  SpliceCounts all = counts_;
  all.compared_bytes = compared_bytes_;
  all.broken = broken_;
  all.lent_bytes = lent_bytes_;
  all.settled_bytes = settled_bytes_;
  all.saved_bytes = saved_bytes_;
  all.off = off_;
  return all;
}

// Without loans nobody uses the numbers of contents, and each write would still update them.
void Splicer::switch_off() {
  const Account::Window window = account_.last();
  {
    std::lock_guard pages(pages_mu_);
    off_ = true;
    places_.clear();
    small_.clear();
    for (const auto& member : members_)
      if (member) member->forget(0, member->bytes);
  }
  const auto ms = [](uint64_t ns) { return static_cast<unsigned long long>(ns / 1'000'000); };
  DP_LOG(kWarn, kServer, 0, "splicing is off: beside %llu ms of kernels it took %llu ms, and saved kernels of %llu ms",
         ms(window.kernels_ns), ms(window.own_ns), ms(window.saved_ns));
}

bool Splicer::is_numbered(const Access& access) const {
  return is_memory(access) && access.bytes != 0 && access.bytes >= least_numbered_;
}

bool Splicer::is_worth_it(const SpliceLaunch& launch) const {
  uint64_t bytes = 0;
  for (const Access& access : launch.accesses) bytes += is_numbered(access) ? access.bytes : 0;
  return bytes >= config_.least_bytes;
}

Splicer::Member* Splicer::at(uint64_t addr) const {
  for (const auto& member : members_)
    if (member && member->holds(addr, 0)) return member.get();
  return nullptr;
}

void Splicer::hurry(Member& member, bool on) {
  member.hurried = on;
  if (!on) return;
  std::lock_guard lock(mu_);
  for (const auto& group : groups_)
    for (const Arrival* one : group->present)
      if (one->member == &member) {
        dissolve(*group);
        break;
      }
}

void Splicer::committed(Member& member, uint64_t addr, uint64_t bytes, uint64_t position, bool stable) {
  {
    std::lock_guard lock(mu_);
    auto it = member.blocks.lower_bound(addr);
    if (it != member.blocks.begin() && std::prev(it)->first + std::prev(it)->second.bytes > addr) --it;
    Member::Block block{bytes, position, stable};
    while (it != member.blocks.end() && it->first < addr + bytes) {
      const auto [begin, old] = *it;
      const uint64_t end = begin + old.bytes;
      if (stable && begin == addr && old.bytes == bytes) {
        block.breaks = old.breaks, block.equal = old.equal;
        block.shift = old.shift, block.placed = old.placed;
      }
      it = member.blocks.erase(it);
      if (old.stable || !gpu_->traits.joins_edges) continue;
      // Commands of its stream may still write what is left of it: as in released().
      if (begin < addr) member.blocks.emplace_hint(it, begin, Member::Block{addr - begin, old.since, false});
      if (end > addr + bytes)
        member.blocks.emplace_hint(it, addr + bytes, Member::Block{end - addr - bytes, old.since, false});
    }
    member.blocks[addr] = block;
  }
  // What a step makes on the way is spliced already. Anything else will be its rank's own.
  if (stable || gpu_->traits.joins_edges || !member.spliced.load(std::memory_order_acquire)) return;
  std::lock_guard pages(pages_mu_);
  const uint64_t begin = addr - member.base;
  // A page at an edge may hold a neighbour's bytes; spliced pages do not, but this does not have to rely on it.
  [[maybe_unused]] const Status ignored = own_pages(member, begin, begin + bytes, true);
}

void Splicer::freed(Member& member, uint64_t addr, uint64_t bytes, uint64_t position) {
  if (!busy_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(mu_);
  if (member.freed.size() >= kMaxFreed) member.freed.clear();
  const auto first = member.freed.lower_bound({addr, 0}), last = member.freed.upper_bound({addr, UINT64_MAX});
  if (std::distance(first, last) >= kMaxLives) member.freed.erase(first);
  member.freed[{addr, position}] = addr + bytes;
}

void Splicer::released(Member& member, uint64_t addr) {
  std::lock_guard lock(mu_);
  const auto it = member.blocks.find(addr);
  if (it == member.blocks.end() || it->second.stable) return;
  if (gpu_->traits.joins_edges)
    it->second.agreed = false;  // commands of its stream may still write there
  else
    member.blocks.erase(it);
}

void Splicer::discard(Member& member, uint64_t addr, uint64_t bytes) {
  if (!member.concerned()) return;
  std::lock_guard pages(pages_mu_);
  member.forget(addr - member.base, addr - member.base + bytes);
  if (member.deals) {
    loans_.repay(member.number, addr - member.base, addr - member.base + bytes);
    [[maybe_unused]] const Status ignored =
        settle(loans_.call_in(member.number, addr - member.base, addr - member.base + bytes));
    loans_changed();
  }
  const uint64_t begin = ceil_page(addr - member.base), end = floor_page(addr - member.base + bytes);
  if (begin >= end) return;
  [[maybe_unused]] const Status ignored = own_pages(member, begin, end, false);
}

void Splicer::received(Member& member, uint64_t addr, uint64_t bytes, const std::array<uint64_t, 3>& operation) {
  if (off_ || !busy_.load(std::memory_order_acquire) || !member.holds(addr, bytes)) return;
  std::lock_guard pages(pages_mu_);
  member.hold(addr - member.base, bytes, derived(operation));
}

// -- restore --------------------------------------------------------------------------------------------------------

// The stretch may begin and end within a page: the last page is left to the stretch that fills it.
Status Splicer::loaded(Member& member, uint64_t addr, uint64_t bytes) {
  std::lock_guard pages(pages_mu_);
  uint64_t allocation = 0;
  {
    std::lock_guard lock(mu_);
    const auto it = member.around(addr, bytes);
    if (it == member.blocks.end() || !it->second.stable) return {};
    allocation = it->first - member.base;
  }
  const uint64_t begin = std::max(ceil_page(allocation), floor_page(addr - member.base));
  const uint64_t end = floor_page(addr - member.base + bytes);
  if (begin >= end || !may_splice(member, addr, bytes, false)) return {};
  for (const auto& other : members_) {
    if (!other || other.get() == &member || !other->all_loaded) continue;
    std::vector<uint64_t> places;
    {
      std::lock_guard lock(mu_);
      places = alike(member, allocation, *other, begin == ceil_page(allocation));
    }
    for (const uint64_t place : places) {
      const uint64_t first = place + (begin - allocation), last = place + (end - allocation);
      bool shown = false;  // by the member already, elsewhere
      for_each_part(*other, first, last, [&](uint64_t b, uint64_t e, uint64_t pool) {
        shown |= pool != UINT64_MAX && (pool_.sharers(pool, e - b) & member.bit) != 0;
      });
      if (shown || loans_.borrowed_bytes(other->number, first, last) != 0) continue;
      compared_bytes_ += end - begin;
      auto same = gpu_->same({{member.base + begin, other->base + first, end - begin}});
      if (!same.ok()) return std::move(same).status();
      if (!*same) continue;
      busy_ = true;
      Status s = pool_pages(*other, first, last);
      if (s.ok()) s = splice(*other, member, first, last, begin);
      saved_bytes_ = pool_.saved_bytes();
      if (!s.ok()) return s;
      std::lock_guard lock(mu_);
      Splicer::place(member, allocation, *other, place);
      return {};
    }
  }
  return {};
}

void Splicer::all_loaded(Member& member) {
  std::lock_guard pages(pages_mu_);
  member.all_loaded = true;
}

}  // namespace devproxy::hal::splice
