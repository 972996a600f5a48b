// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/hal/splice/parts.h"

namespace devproxy::hal::splice {

namespace {

// The time of the calling thread's kernels, while a launch of it is measured.
struct Meter {
  bool on = false;
  uint64_t cpu_ns = 0, wall_ns = 0;
};
thread_local Meter t_meter;

}  // namespace

Status Splicer::alone(Member& member, const SpliceLaunch& launch, Runner& runner, bool counts, bool borrows) {
  if (!busy_.load(std::memory_order_acquire)) {
    runner.begin();
    const Status done = run(member, launch, runner);
    runner.end();
    return done;
  }
  std::optional<Contents> result;
  const auto find = [&]() -> std::optional<std::vector<Found>> {
    if (!borrows || !result || !is_worth_it(launch) || !pays(purpose_of(launch))) return {};
    return found_elsewhere(member, launch, *result);
  };
  const auto borrow_all = [&](const std::vector<Found>& found) {
    account_.save(purposes_[purpose_of(launch)].run_ns);
    {
      std::lock_guard lock(mu_);
      counts_.squashed++;
    }
    return borrow(member, launch, found, counts);
  };
  {
    std::lock_guard pages(pages_mu_);
    Status s = settle_reads(member, launch, least_numbered_ - 1);  // those count by their bytes
    if (!s.ok()) return s;
    if (!off_) result = result_of(member, launch);
    if (!config_.guard)
      if (const auto found = find()) return borrow_all(*found);
    if (!result || !borrows) {
      s = settle_reads(member, launch, UINT64_MAX);
      if (s.ok()) s = break_writes(member, launch, counts);
      if (!s.ok()) return s;
    }
  }
  runner.begin();
  Status done;
  if (result && borrows) {  // somebody may have computed it while this one waited for the turn
    std::lock_guard pages(pages_mu_);
    if (!config_.guard)
      if (const auto found = find()) {
        done = borrow_all(*found);
        runner.end();
        return done;
      }
    done = settle_reads(member, launch, UINT64_MAX);
    if (done.ok()) done = break_writes(member, launch, counts);
  }
  const uint64_t before = now_ns();
  if (done.ok()) done = run(member, launch, runner);
  if (result && done.ok()) {
    const uint64_t run_ns = gpu_->kernel_ns(bytes_of(launch), now_ns() - before);
    std::lock_guard pages(pages_mu_);
    if (is_worth_it(launch)) purposes_[purpose_of(launch)].run_ns = run_ns;
    if (const auto found = config_.guard ? find() : std::nullopt)
      done = same_as_found(*found)
                 ? borrow(member, launch, *found, counts)
                 : Status(kLaunchFailed,
                          std::string(launch.name) + " has other results than at the rank that had them first");
    else
      keep_results(member, launch, *result);
  }
  runner.end();
  return done;
}

// Under pages_mu_: what stands for the results of the launch, where what it reads has numbers. Most launches read
// something that has none, and are through soon.
std::optional<Contents> Splicer::result_of(const Member& member, const SpliceLaunch& launch) const {
  if (!launch.repeatable) return {};
  bool counts = false;
  for (const Access& access : launch.accesses) {
    if (!is_memory(access)) continue;
    if (!member.holds(access.addr, access.bytes)) return {};
    if (!is_numbered(access)) continue;
    if (reads(access) && !member.contents_of(access.addr - member.base, access.bytes)) return {};
    counts |= writes(access) && is_whole(access);
  }
  if (!counts && !is_worth_it(launch)) return {};
  const Layout layout(launch);
  Hash hash;
  hash.add(launch.name.data(), launch.name.size());
  hash.add(launch.digest);
  hash.add(launch.params_bytes);
  uint64_t at = 0;
  for (const Access& access : launch.accesses) {
    if (access.place < at || access.place + sizeof access.addr > launch.params_bytes) return {};
    hash.add(launch.params + at, access.place - at);
    at = access.place + sizeof access.addr;
    if (!is_memory(access)) continue;
    if (writes(access) && layout.collides(access)) return {};
    hash.add(access.bytes);
    hash.add(access.addr % kAlign);
    hash.add(access.flags & ~kYoung);
    if (!reads(access)) continue;
    const uint64_t begin = access.addr - member.base;
    if (is_numbered(access))
      hash.add(*member.contents_of(begin, access.bytes));
    else
      hash.add(member.at(begin), access.bytes);
  }
  hash.add(launch.params + at, launch.params_bytes - at);
  return hash.contents();
}

Status Splicer::run(const Member& member, const SpliceLaunch& launch, Runner& runner) const {
  if (config_.guard) return run_guarded(member, launch, runner);
  if (!t_meter.on) return runner.run();
  const uint64_t wall = now_ns(), cpu = thread_cpu_ns();
  Status done = runner.run();
  t_meter.cpu_ns += thread_cpu_ns() - cpu;
  t_meter.wall_ns += gpu_->kernel_ns(bytes_of(launch), now_ns() - wall);
  return done;
}

// A launch must not change what it says it only reads.
Status Splicer::run_guarded(const Member& member, const SpliceLaunch& launch, Runner& runner) const {
  const Layout layout(launch);
  std::vector<std::pair<const Access*, uint64_t>> before;
  const auto hash = [](const Access& access) {
    return XXH3_64bits(reinterpret_cast<const void*>(access.addr), access.bytes);
  };
  for (const Access& access : launch.accesses)
    if (is_memory(access) && !writes(access) && member.holds(access.addr, access.bytes) && !layout.collides(access))
      before.emplace_back(&access, hash(access));
  Status done = runner.run();
  for (const auto& [access, was] : before)
    if (done.ok() && hash(*access) != was)
      done = {kLaunchFailed, std::string(launch.name) + " has written an argument that it says it only reads"};
  return done;
}

Status Splicer::launch(Member& member, SpliceLaunch& launch, int kind, Runner& runner) {
  launch.repeatable = kind == DEVPROXY_EXECUTOR_REPEATABLE;
  if (kind != DEVPROXY_EXECUTOR_UNKNOWN) return this->launch(member, launch, runner);
  if (Status s = before_anything(member); !s.ok()) return s;
  runner.begin();
  const Status done = runner.run();
  runner.end();
  return done;
}

// CPU time of the splicer, since it waits for locks and turns; wall time of the kernel, which may use several threads.
Status Splicer::launch(Member& member, SpliceLaunch& launch, Runner& runner) {
  if (!config_.thrifty || off_ || member.launches.fetch_add(1, std::memory_order_relaxed) % Account::kSampled != 0)
    return launch_unmeasured(member, launch, runner);
  t_meter = {true, 0, 0};
  const uint64_t begin = thread_cpu_ns();
  Status done = launch_unmeasured(member, launch, runner);
  const uint64_t used = thread_cpu_ns() - begin;
  t_meter.on = false;
  if (account_.spend(used - std::min(used, t_meter.cpu_ns), t_meter.wall_ns)) switch_off();
  return done;
}

Status Splicer::launch_unmeasured(Member& member, SpliceLaunch& launch, Runner& runner) {
  if (off_ && !member.concerned()) return alone(member, launch, runner, true, false);
  uint64_t written = 0;
  bool fit = launch.repeatable;
  for (const Access& access : launch.accesses) {
    if (!is_memory(access)) continue;
    fit = fit && member.holds(access.addr, access.bytes);
    if (!writes(access)) continue;
    fit = fit && is_whole(access);
    written += access.bytes;
  }
  if (!fit || written < config_.least_bytes) return alone(member, launch, runner, true, !off_);

  const uint64_t purpose = purpose_of(launch);
  uint64_t key = purpose;
  std::unique_lock lock(mu_);
  if (member.last.size() >= kMaxKeys) member.last.clear();
  const uint64_t last = std::exchange(member.last[key], launch.position);
  uint64_t changed = 0, settled = 0, in_places = 0;
  for (Access& access : launch.accesses) {
    if (!is_memory(access) || !writes(access)) continue;
    const Member::Block* const block = member.block_of(access.addr, access.bytes);
    fit = fit && block;
    const bool stable = block && block->stable;
    const bool in_place = reads(access) && !(access.flags & DEVPROXY_EXECUTOR_RESETS);
    if (stable || in_place) changed += access.bytes;
    if (in_place) in_places += access.bytes;
    if (!stable && !(block && block->since < last)) {
      access.flags |= kYoung;
      continue;
    }
    const uint64_t home = block ? member.home_of(*block, access.addr) : access.addr - member.base;
    key = XXH3_64bits_withSeed(&home, sizeof home, key);
    if (stable || in_place) settled += access.bytes;
  }
  const auto meets_others = [&] {
    const auto it = member.learned.find(key);
    return it != member.learned.end() && it->second.group && !it->second.group->retired;
  };
  // Young contents that are changed in place, where everything has a number: equal ranks are told by it.
  std::optional<Contents> number;
  if (fit && settled * 2 < changed && in_places >= config_.least_bytes && !off_ &&
      busy_.load(std::memory_order_acquire)) {
    // Those who meet judge it by their meetings. Would only one of them try without, the others waited for it.
    const bool meets = meets_others();
    lock.unlock();
    {
      std::lock_guard pages(pages_mu_);
      if (Status s = settle_reads(member, launch, least_numbered_ - 1); !s.ok()) return s;
      if (meets || pays(purpose) || !gpu_->traits.lends) number = result_of(member, launch);
    }
    lock.lock();
  }
  if (!fit || changed < config_.least_bytes || (settled * 2 < changed && !number)) {
    if (meets_others()) member.learned[key].seen++;
    lock.unlock();
    return alone(member, launch, runner, true, !off_);
  }
  if (member.learned.size() >= kMaxKeys)
    std::erase_if(member.learned, [](const auto& item) { return !item.second.group; });
  const auto meets_nobody = [&] {
    const Member::Learned& known = member.learned[key];
    return known.seen == 0 && !known.group;
  };
  if (!number && meets_nobody() && member.spliced) {
    lock.unlock();  // pages_mu_ comes first
    const uint64_t sharers = sharers_of(member, launch);
    lock.lock();
    if (std::popcount(sharers) > 1 && meets_nobody())
      member.learned[key].group = group_of(key, settled_of(member, launch).alike, sharers);
  }
  Member::Learned& learned = member.learned[key];
  learned.seen++;
  if (learned.group && learned.group->retired) {
    learned.group = nullptr;
    learned.say_from = learned.seen * 2;
    for (const Access& access : launch.accesses)  // its blocks may be like others of theirs now
      if (is_memory(access) && writes(access))
        if (Member::Block* const block = member.block_of(access.addr, access.bytes)) block->placed = false;
  }
  // Whoever has gone on alone with this number does not come again, and it is to be found there.
  const bool late = number && went_alone_.contains(*number);
  if (const std::shared_ptr<Group> group = late ? nullptr : learned.group) {
    Arrival me{&member, &launch, &runner, learned.seen, false, false, {}};
    if (meet(lock, group, me, runner)) return me.status;
    if (number) goes_alone(*number);
    lock.unlock();
    return alone(member, launch, runner, false,
                 number.has_value());  // a cut, or a slow rank: the next time may be better
  }
  const bool say = !off_ && learned.seen >= learned.say_from;
  if (learned.seen >= learned.say_from + kSayTimes) learned.say_from = learned.seen * 2;
  // Another launch of the same step may have learnt faster, and have spliced what this one writes.
  const uint64_t seen = learned.seen;
  const bool counts = seen > kSayTimes;
  if (number) goes_alone(*number);
  lock.unlock();
  if (say && number) learn(member, launch, key, seen, *number);
  const uint64_t before = now_ns();
  Status done = alone(member, launch, runner, counts, number.has_value());
  if (say && !number && done.ok() && gpu_->kernel_ns(bytes_of(launch), now_ns() - before) >= config_.least_ns) {
    auto said = left_by(launch, runner);
    if (!said.ok()) return std::move(said).status();
    learn(member, launch, key, seen, *said);
  }
  return done;
}

// Under mu_.
void Splicer::goes_alone(const Contents& number) {
  if (!went_alone_.insert(number).second) return;
  alone_in_order_.push_back(number);
  if (alone_in_order_.size() <= kMaxAlone) return;
  went_alone_.erase(alone_in_order_.front());
  alone_in_order_.pop_front();
}

// Those who share all pages of what is settled and written: they may well be replicas. 0: nobody.
uint64_t Splicer::sharers_of(const Member& member, const SpliceLaunch& launch) {
  std::lock_guard pages(pages_mu_);
  uint64_t all = ~uint64_t{0};
  bool any = false;
  for (const Access& access : launch.accesses) {
    if (!is_memory(access) || !writes(access) || access.flags & kYoung) continue;
    const uint64_t begin = ceil_page(access.addr - member.base);
    const uint64_t end = floor_page(access.addr - member.base + access.bytes);
    if (begin >= end) continue;
    any = true;
    for_each_part(member, begin, end, [&](uint64_t b, uint64_t e, uint64_t pool) {
      all &= pool == UINT64_MAX ? 0 : pool_.common_sharers(pool, e - b);
    });
    if (std::popcount(all) < 2) return 0;
  }
  return any ? all : 0;
}

// Under mu_. One that has begun already may have other members: somebody has learnt better, or has left the pages.
std::shared_ptr<Splicer::Group> Splicer::group_of(uint64_t key, uint64_t alike, uint64_t members) {
  for (const auto& one : groups_)
    if (!one->retired && one->key == key && one->members & members) return one;
  auto group = std::make_shared<Group>();
  group->key = key;
  group->alike = alike;
  group->members = members;
  groups_.push_back(group);
  return group;
}

// said: what the launch has left, or will: equal at equal ranks.
void Splicer::learn(Member& member, const SpliceLaunch& launch, uint64_t key, uint64_t seen, const Contents& contents) {
  std::lock_guard lock(mu_);
  say(member, launch, key, seen, contents);
  // Those who meet already say nothing any more. They are to say it again, in case that the member is one of them.
  const auto it = member.learned.find(key);
  if (it != member.learned.end() && it->second.group) return;
  const uint64_t alike = settled_of(member, launch).alike;
  for (const auto& group : groups_)
    if (!group->retired && group->alike == alike && !(group->members & member.bit)) group->asked = kSayTimes;
}

StatusOr<Contents> Splicer::left_by(const SpliceLaunch& launch, Runner& runner) {
  std::vector<PhysicalMemory::Range> written;
  for (const Access& access : launch.accesses)
    if (is_memory(access) && writes(access)) written.push_back({access.addr, access.bytes});
  return gpu_->hash(runner, written);
}

// Under mu_.
void Splicer::say(Member& member, const SpliceLaunch& launch, uint64_t key, uint64_t seen, const Contents& contents) {
  if (said_.size() >= kMaxKeys) said_.clear();
  key = correspond(member, launch, key, contents);
  std::deque<Said>& said = said_[key];
  if (said.size() >= kMaxSaid) said.pop_front();
  said.push_back({member.bit, seen, contents});
  uint64_t same = 0;
  std::array<uint64_t, kMaxMembers> seen_by{};
  for (const Said& one : said)
    if (one.contents == contents) same |= one.member, seen_by[std::countr_zero(one.member)] = one.seen;
  if (same == member.bit) return;
  std::erase_if(groups_, [](const auto& group) { return group->retired && group->present.empty(); });
  std::shared_ptr<Group> group;
  for (const auto& one : groups_)
    if (!one->retired && one->key == key && one->members & same) group = one;
  if (!group) {
    group = std::make_shared<Group>();
    group->key = key;
    group->alike = settled_of(member, launch).alike;
    groups_.push_back(group);
  }
  std::optional<uint64_t> since;  // launches since Group::seen_then
  if (!group->aligned) since = 0;
  for (const auto& one : members_)
    if (one && same & group->aligned & one->bit) since = seen_by[one->number] - group->seen_then[one->number];
  for (const auto& one : members_) {
    if (!one || !(same & one->bit)) continue;
    const auto it = one->learned.find(key);
    if (it == one->learned.end() || (it->second.group && !it->second.group->retired)) continue;
    it->second.group = group;
    group->members |= one->bit;
    if (!since) continue;
    group->aligned |= one->bit;
    group->seen_then[one->number] = seen_by[one->number] - *since;
  }
}

}  // namespace devproxy::hal::splice
