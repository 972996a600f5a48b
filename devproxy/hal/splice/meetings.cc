// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <chrono>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/hal/splice/parts.h"

namespace devproxy::hal::splice {

// Under mu_. Somebody for whom it waits has passed this launch: it has run it alone, for a reason of its own.
bool Splicer::waits_in_vain(const Group& group, const Arrival& me) const {
  if (!(group.aligned & me.member->bit)) return false;
  uint64_t missing = group.members & group.aligned;
  for (const Arrival* one : group.present) missing &= ~one->member->bit;
  return std::any_of(members_.begin(), members_.end(), [&](const auto& one) {
    return one && missing & one->bit &&
           group.round(one->number, one->learned[group.key].seen) >= group.round(me.member->number, me.seen);
  });
}

// Under mu_: somebody is missing who waits in another meeting for somebody who waits here.
bool Splicer::waits_for_itself(const Group& group) const {
  uint64_t here = 0;
  for (const Arrival* one : group.present) here |= one->member->bit;
  uint64_t wanted = group.members & ~here;
  for (uint64_t before = 0; before != wanted;) {
    before = wanted;
    for (const auto& other : groups_) {
      uint64_t there = 0;
      for (const Arrival* one : other->present) there |= one->member->bit;
      if (there & wanted) wanted |= other->members & ~there;
    }
  }
  return wanted & here;
}

// Under mu_. Groups wait for one another, this one among them. Those that have met least often are given up, until none does:
// ranks that come to meetings in another order are no replicas there, and other groups, which have met, are to stay.
void Splicer::break_cycles(Group& group) {
  while (!group.present.empty() && waits_for_itself(group)) {
    Group* least = &group;
    for (const auto& other : groups_)
      if (!other->present.empty() && other->meetings < least->meetings && waits_for_itself(*other)) least = other.get();
    nobody_came(*least);
  }
}

// Under mu_: all that are present go on alone.
void Splicer::dissolve(Group& group) {
  for (Arrival* one : group.present) one->dissolved = true;
  if (!group.present.empty()) counts_.given_up++;
  group.present.clear();
  group.come.notify_all();
}

// Under mu_: this time. That cost nothing, so it may yet do. Those who come later to what one has passed are no strikes
// of their own: one slow rank of many would end the meetings for good.
void Splicer::passed_by(Group& group) {
  std::optional<int64_t> round;
  for (const Arrival* one : group.present)
    if (group.aligned & one->member->bit)
      round = std::max(round.value_or(INT64_MIN), group.round(one->member->number, one->seen));
  const uint32_t most = group.meetings >= kProvenMeetings ? kMaxProvenStrikes : kMaxStrikes;
  if (!round || *round > group.struck) group.strikes++;
  if (round) group.struck = std::max(group.struck, *round);
  group.strikes >= most ? retire(group) : dissolve(group);
}

void Splicer::nobody_came(Group& group) { group.meetings == 0 ? retire(group) : passed_by(group); }

void Splicer::retire(Group& group) {
  dissolve(group);
  group.retired = true;
}

// True: the launch has been run. lock is of mu_, and held again afterwards.
bool Splicer::meet(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Group>& group, Arrival& me,
                   Runner& runner) {
  uint64_t here = me.member->bit;
  for (const Arrival* one : group->present) {
    if (one->member == me.member) return false;
    here |= one->member->bit;
  }
  group->present.push_back(&me);
  if (here == group->members) {
    const std::vector<Arrival*> all = std::exchange(group->present, {});
    const bool asked = group->asked != 0;
    if (asked) group->asked--;
    lock.unlock();
    Ran ran;
    const bool joins = gpu_->traits.joins_edges && std::has_single_bit(group->meetings + 1);
    const bool equal = run_for_all(all, me, runner, joins, asked, &ran);
    lock.lock();
    for (Arrival* one : all) {
      if (one != &me) one->status = me.status;
      (equal ? one->done : one->dissolved) = true;
    }
    group->come.notify_all();
    counts_.validations++;
    group->aligned = here;
    for (const Arrival* one : all) group->seen_then[one->member->number] = one->seen;
    group->struck = 0;
    if (equal) {
      counts_.squashed += all.size() - 1;
      group->strikes = 0;
      group->kept_bytes = ran.kept_bytes;
      if (ran.left) say(*me.member, *me.launch, group->key, me.seen, *ran.left);
      account_.save(ran.run_ns * (all.size() - 1));
      // The first times compare what has numbers from then on.
      if (++group->meetings > kFreeMeetings) {
        group->spent_ns += ran.spent_ns + kMeetingNs * all.size();
        group->saved_ns += ran.run_ns * (all.size() - 1);
      }
      if (config_.thrifty && group->meetings % kJudgedMeetings == 0) {
        if (group->spent_ns > group->saved_ns && !group->keeps())
          retire(*group);
        else
          group->spent_ns = group->saved_ns = 0;
      }
    } else {
      counts_.different++;
      retire(*group);
    }
    return equal;
  }
  if (waits_in_vain(*group, me)) passed_by(*group);
  break_cycles(*group);
  if (me.dissolved) return false;
  runner.yield();
  const uint64_t start = now_ns();
  uint64_t idle_since = 0;
  const uint64_t idle_patience_ns = config_.idle_patience_ns * (group->keeps() ? kKeepsPatience : 1);
  while (!me.done && !me.dissolved) {
    group->come.wait_for(lock, std::chrono::nanoseconds(kLookNs));
    if (std::find(group->present.begin(), group->present.end(), &me) == group->present.end()) continue;
    const uint64_t now = now_ns();
    const bool idle = gpu_->idle();
    if (!idle) idle_since = 0;
    if (idle && idle_since == 0) idle_since = now;
    // The GPU could have run this launch meanwhile.
    if (idle && group->present.front() == &me && group->meetings >= kFreeMeetings) group->spent_ns += kLookNs;
    if (waits_in_vain(*group, me))
      passed_by(*group);
    else if (me.member->hurried || now - start >= config_.patience_ns || (idle && now - idle_since >= idle_patience_ns))
      nobody_came(*group);
  }
  return me.done;
}

bool Splicer::run_for_all(const std::vector<Arrival*>& all, Arrival& me, Runner& runner, bool joins, bool wants_left,
                          Ran* ran) {
  runner.begin();
  std::unique_lock pages(pages_mu_);
  const uint64_t start = now_ns();
  mapping_ns_ = 0;
  // The streams of those who have come, before and behind what is done for all.
  const auto order = [&](bool before) {
    Status s;
    for (const Arrival* one : all)
      if (one != &me && s.ok()) s = before ? runner.follow(*one->runner) : one->runner->follow(runner);
    return s;
  };
  StatusOr<bool> same = false;
  if (Status s = order(true); s.ok()) {
    gpu_->begin_work(&runner);
    same = equal(all, me);
  } else {
    same = std::move(s);
  }
  if (!same.ok()) {
    me.status = same.status();
  } else if (*same) {
    Arrival& lead = lead_of(all, me);
    me.status = run_at(lead, all, &ran->run_ns);
    if (wants_left && me.status.ok()) {
      auto left = left_by(*lead.launch, *lead.runner);
      if (left.ok())
        ran->left = *left;
      else
        me.status = std::move(left).status();
    }
    if (me.status.ok()) me.status = hand_out(all, lead, &ran->kept_bytes);
    if (me.status.ok() && joins) join_edges(all, lead);
    if (!me.status.ok())  // nobody knows what is where
      for (const Arrival* one : all)
        for (const Access& access : one->launch->accesses)
          if (is_memory(access) && writes(access)) {
            const uint64_t begin = access.addr - one->member->base;
            one->member->forget(begin, begin + access.bytes);
          }
    loans_changed();
    saved_bytes_ = pool_.saved_bytes();
    busy_ = true;
  }
  gpu_->end_work();
  if (Status s = order(false); me.status.ok()) me.status = std::move(s);
  ran->spent_ns = now_ns() - start - ran->run_ns - mapping_ns_;
  pages.unlock();
  runner.end();
  return !same.ok() || *same;
}

// Whoever has borrowed least of what is read: its copy is not needed then.
Splicer::Arrival& Splicer::lead_of(const std::vector<Arrival*>& all, Arrival& me) const {
  Arrival* lead = &me;
  uint64_t least = UINT64_MAX;
  for (Arrival* one : all) {
    uint64_t borrowed = 0;
    for (const Access& access : one->launch->accesses)
      if (is_memory(access) && reads(access)) {
        const uint64_t begin = access.addr - one->member->base;
        borrowed += loans_.borrowed_bytes(one->member->number, begin, begin + access.bytes);
      }
    if (borrowed < least || (borrowed == least && one == &me)) least = borrowed, lead = one;
  }
  return *lead;
}

// By this thread, whose turn it is. Those who have come wait for it, so the lead's runner is its own.
Status Splicer::run_at(Arrival& lead, const std::vector<Arrival*>& all, uint64_t* run_ns) {
  if (config_.guard)
    if (Status s = check_numbers(all, lead); !s.ok()) return s;
  Member& own = *lead.member;
  Status status = settle_reads(own, *lead.launch, UINT64_MAX);
  const auto for_each_written = [&](auto f) {
    for (const Access& access : lead.launch->accesses) {
      if (!is_memory(access) || !writes(access)) continue;
      const auto place = static_cast<size_t>(&access - lead.launch->accesses.data());
      for (const Arrival* one : all) f(access, *one->member, one->launch->accesses[place].addr - one->member->base);
    }
  };
  // A launch that fails may have written a part of it. Each one's is written as a whole, so what was borrowed goes.
  std::vector<Loan> dropped;
  for_each_written([&](const Access& access, Member& member, uint64_t there) {
    member.forget(there, there + access.bytes);
    for (const Loan& loan : loans_.repay(member.number, there, there + access.bytes)) dropped.push_back(loan);
  });
  for_each_written([&](const Access& access, Member& member, uint64_t there) {
    if (status.ok()) status = settle(loans_.call_in(member.number, there, there + access.bytes));
  });
  for (size_t i = 0; i < lead.launch->accesses.size(); i++) {
    const Access& access = lead.launch->accesses[i];
    if (is_memory(access) && writes(access) && status.ok()) status = keep_apart(all, lead, i);
  }
  if (status.ok()) {
    guard(own, *lead.launch, false);
    const uint64_t before = now_ns();
    status = run(own, *lead.launch, *lead.runner);
    *run_ns = gpu_->kernel_ns(bytes_of(*lead.launch), now_ns() - before);
    guard(own, *lead.launch, true);
  }
  // Each rank has then what its own launch would have left that failed at the same place.
  if (!status.ok()) [[maybe_unused]]
    const Status ignored = settle(dropped);
  return status;
}

// With guard: what is known to be equal is.
Status Splicer::check_numbers(const std::vector<Arrival*>& all, const Arrival& me) const {
  const auto is_there = [&](const Arrival& one, size_t i) {
    const Access& access = one.launch->accesses[i];
    const uint64_t begin = access.addr - one.member->base;
    return loans_.borrowed_bytes(one.member->number, begin, begin + access.bytes) == 0;
  };
  for (size_t i = 0; i < me.launch->accesses.size(); i++) {
    const Access& access = me.launch->accesses[i];
    if (!is_numbered(access) || !reads(access) || !is_there(me, i)) continue;
    for (const Arrival* one : all)
      if (known_equal(me, *one, i) && is_there(*one, i) &&
          std::memcmp(reinterpret_cast<const void*>(access.addr),
                      reinterpret_cast<const void*>(one->launch->accesses[i].addr), access.bytes) != 0)
        return {kLaunchFailed, std::string(me.launch->name) + " reads contents of one number that differ"};
  }
  return {};
}

// The same but for contents. What lies elsewhere has nothing to do with anything that is written.
bool Splicer::same_launch(const Arrival& first, const Arrival& second) {
  const SpliceLaunch &a = *first.launch, &b = *second.launch;
  if (a.name != b.name || a.digest != b.digest || a.params_bytes != b.params_bytes ||
      a.accesses.size() != b.accesses.size())
    return false;
  uint64_t at = 0;
  bool moved = false;
  for (size_t i = 0; i < a.accesses.size(); i++) {
    const Access &x = a.accesses[i], &y = b.accesses[i];
    if (x.place != y.place || x.flags != y.flags || x.bytes != y.bytes || x.place < at) return false;
    if (std::memcmp(a.params + at, b.params + at, x.place - at) != 0) return false;
    at = x.place + 8;
    if (!is_memory(x)) continue;
    if ((x.addr - y.addr) % kAlign != 0) return false;
    if (x.addr - first.member->base == y.addr - second.member->base) continue;
    moved = true;
  }
  if (at > a.params_bytes || std::memcmp(a.params + at, b.params + at, a.params_bytes - at) != 0) return false;
  if (!moved) return true;
  const Layout here(a), there(b);
  for (size_t i = 0; i < a.accesses.size(); i++) {
    const Access &x = a.accesses[i], &y = b.accesses[i];
    if (!is_memory(x) || x.addr - first.member->base == y.addr - second.member->base) continue;
    if (here.collides(x) || there.collides(y)) return false;
  }
  return true;
}

StatusOr<bool> Splicer::equal(const std::vector<Arrival*>& all, const Arrival& me) {
  const SpliceLaunch& a = *me.launch;
  for (const Arrival* one : all)
    if (one != &me && !same_launch(me, *one)) return false;
  // Not what is known already, or named twice.
  std::vector<bool> skip(a.accesses.size(), false);
  std::map<uint64_t, std::pair<uint64_t, size_t>> seen;  // address: bytes, place in the list
  for (size_t i = 0; i < a.accesses.size(); i++) {
    const Access& access = a.accesses[i];
    skip[i] = !is_memory(access) || !reads(access);
    if (skip[i]) continue;
    const auto [it, is_new] = seen.try_emplace(access.addr, access.bytes, i);
    if (is_new || it->second.first != access.bytes) continue;
    skip[i] = std::all_of(all.begin(), all.end(), [&](const Arrival* one) {
      return one->launch->accesses[i].addr == one->launch->accesses[it->second.second].addr;
    });
  }
  std::vector<PhysicalMemory::Pair> pairs;
  for (const Arrival* one : all)
    for (size_t i = 0; one != &me && i < a.accesses.size(); i++) {
      if (skip[i] || known_equal(me, *one, i)) continue;
      for (const Arrival* either : {&me, one}) {
        const uint64_t begin = either->launch->accesses[i].addr - either->member->base;
        if (Status s = settle(loans_.repay(either->member->number, begin, begin + a.accesses[i].bytes)); !s.ok())
          return s;
      }
      add_pairs(me, *one, i, &pairs);
    }
  for (const PhysicalMemory::Pair& pair : pairs) compared_bytes_ += pair.bytes;
  if (!pairs.empty()) {
    StatusOr<bool> same = gpu_->same(pairs);
    if (!same.ok() || !*same) return same;
  }
  // What the launch only reads need not be compared again.
  for (size_t i = 0; i < a.accesses.size(); i++) {
    if (skip[i] || writes(a.accesses[i]) || !is_numbered(a.accesses[i])) continue;
    if (std::all_of(all.begin(), all.end(), [&](const Arrival* one) { return known_equal(me, *one, i); })) continue;
    const Contents contents{++numbers_, 0};
    for (const Arrival* one : all)
      one->member->hold(one->launch->accesses[i].addr - one->member->base, a.accesses[i].bytes, contents);
  }
  return true;
}

// What the two do not share, to be compared.
void Splicer::add_pairs(const Arrival& a, const Arrival& b, size_t access,
                        std::vector<PhysicalMemory::Pair>* pairs) const {
  const Access& here = a.launch->accesses[access];
  const uint64_t begin = here.addr - a.member->base, there = b.launch->accesses[access].addr - b.member->base;
  const auto compare = [&](uint64_t x, uint64_t y, uint64_t bytes) {
    pairs->push_back({a.member->base + x, b.member->base + y, bytes});
  };
  if (!in_phase(begin, there, page_)) return compare(begin, there, here.bytes);
  const uint64_t ahead = there - begin;  // modulo 2^64
  for_each_part(*a.member, begin, begin + here.bytes, [&](uint64_t first, uint64_t end, uint64_t pool) {
    for_each_part(*b.member, first + ahead, end + ahead, [&](uint64_t from, uint64_t to, uint64_t other) {
      if (pool == UINT64_MAX || other != pool + (from - ahead - first)) compare(from - ahead, from, to - from);
    });
  });
}

bool Splicer::known_equal(const Arrival& a, const Arrival& b, size_t access) const {
  const Access &x = a.launch->accesses[access], &y = b.launch->accesses[access];
  if (!is_numbered(x)) return false;
  const auto known = a.member->contents_of(x.addr - a.member->base, x.bytes);
  return known && known == b.member->contents_of(y.addr - b.member->base, y.bytes);
}

// What the launch has written, to those for whom it ran.
Status Splicer::hand_out(const std::vector<Arrival*>& all, const Arrival& lead, uint64_t* kept_bytes) {
  Member& from = *lead.member;
  const uint64_t purpose = purpose_of(*lead.launch);
  const bool lends = pays(purpose);
  for (const Access& access : lead.launch->accesses) {
    if (!is_memory(access) || !writes(access)) continue;
    const uint64_t begin = access.addr - from.base, end = begin + access.bytes;
    const auto place = static_cast<size_t>(&access - lead.launch->accesses.data());
    const Contents contents{++numbers_, 0};
    for (const Arrival* one : all) {
      const uint64_t there = one->launch->accesses[place].addr - one->member->base;
      one->member->hold(there, access.bytes, contents);
      if (one == &lead || !(access.flags & kYoung)) continue;
      if (lends && is_numbered(access)) {
        if (config_.guard) {
          if (Status s = own_pages(*one->member, there, there + access.bytes, true); !s.ok()) return s;
          std::memset(one->member->at(there), 0xdb, access.bytes);
        }
        lend({from.number, one->member->number, begin, there, access.bytes, purpose, one->launch->position});
        continue;
      }
      if (gpu_->is_known_same({one->member->base + there, access.addr, access.bytes})) continue;
      Status s = own_pages(*one->member, there, there + access.bytes, true);
      if (s.ok()) s = gpu_->copy(one->member->base + there, access.addr, access.bytes);
      if (!s.ok()) return s;
    }
    if (access.flags & kYoung) continue;
    const auto offset_of = [&](const Arrival* one) { return one->launch->accesses[place].addr - one->member->base; };
    const auto may_share = [&](const Arrival* one) { return one == &lead || in_phase(offset_of(one), begin, page_); };
    auto whole = spliced_end(all, lead, place);
    if (!whole.ok()) return std::move(whole).status();
    uint64_t first = ceil_page(begin), last = *whole;
    bool spliced = first < last && std::count_if(all.begin(), all.end(), may_share) > 1;
    for (const Arrival* one : all)  // asks all of them: each counts
      if (!may_splice(*one->member, one->launch->accesses[place].addr, access.bytes, true)) spliced = false;
    // Without memory for that, copy all of it.
    const uint64_t before = now_ns();
    if (!spliced || !pool_pages(from, first, last).ok()) first = last = begin;
    std::vector<const Arrival*> unspliced;
    for (const Arrival* one : all) {
      if (one == &lead || first == last) continue;
      const uint64_t there = first + (offset_of(one) - begin);
      if (!may_share(one) || !splice(from, *one->member, first, last, there).ok()) unspliced.push_back(one);
    }
    mapping_ns_ += now_ns() - before;
    if (unspliced.empty()) *kept_bytes += last - first;
    for (const Arrival* one : all) {
      if (one == &lead) continue;
      const uint64_t there = offset_of(one);
      Status s = copy(from, *one->member, begin, first, there);
      if (s.ok() && last < end) s = copy(from, *one->member, last, end, there + (last - begin));
      if (!s.ok()) return s;
    }
    for (const Arrival* one : unspliced)
      if (Status s = copy(from, *one->member, first, std::min(last, end), first + (offset_of(one) - begin)); !s.ok())
        return s;
  }
  return {};
}

}  // namespace devproxy::hal::splice
