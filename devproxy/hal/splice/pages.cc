// SPDX-License-Identifier: Apache-2.0
#include <set>

#include "devproxy/csrc/base/log.h"
#include "devproxy/hal/splice/parts.h"

namespace devproxy::hal::splice {

// All under pages_mu_.

// The member's own pages show again in the range, and all pages that it touches.
Status Splicer::own_pages(Member& member, uint64_t begin, uint64_t end, bool contents) {
  std::vector<std::pair<uint64_t, uint64_t>> parts;
  for_each_part(member, floor_page(begin), ceil_page(end), [&](uint64_t b, uint64_t e, uint64_t pool) {
    if (pool != UINT64_MAX) parts.emplace_back(b, e);
  });
  for (const auto& [b, e] : parts) {
    if (Status s = member.memory->own(b, e, contents); !s.ok())
      return std::move(s).with("giving a rank pages of its own");
    leave_pages(member, b, e);
  }
  return {};
}

// In the books: the whole pages are the member's own.
void Splicer::leave_pages(Member& member, uint64_t begin, uint64_t end) {
  struct Part {
    uint64_t begin, end, pool;
  };
  std::vector<Part> parts;
  for_each_part(member, begin, end, [&](uint64_t b, uint64_t e, uint64_t pool) {
    if (pool != UINT64_MAX) parts.push_back({b, e, pool});
  });
  for (const Part& part : parts) {
    const auto it = std::prev(member.runs.upper_bound(part.begin));
    const Member::Run run = it->second;
    const uint64_t first = it->first;
    if (first == part.begin)
      member.runs.erase(it);
    else
      it->second.end = part.begin;
    if (run.end > part.end) member.runs[part.end] = {run.end, run.pool + (part.end - first)};
    pool_.leave(part.pool, part.end - part.begin, member.bit);
  }
  if (parts.empty()) return;
  member.spliced = !member.runs.empty();
  saved_bytes_ = pool_.saved_bytes();
}

// Precondition: the range is the member's own, and the device has made it show the pool's.
void Splicer::note_run(Member& member, uint64_t begin, uint64_t end, uint64_t pool_at) {
  member.runs[begin] = {end, pool_at};
  member.spliced = true;
  pool_.share(pool_at, end - begin, member.bit);
}

// What of the range is the member's own moves into the pool.
Status Splicer::pool_pages(Member& member, uint64_t begin, uint64_t end) {
  std::vector<std::pair<uint64_t, uint64_t>> own;
  for_each_part(member, begin, end, [&](uint64_t b, uint64_t e, uint64_t pool) {
    if (pool == UINT64_MAX) own.emplace_back(b, e);
  });
  for (const auto& [b, e] : own) {
    auto at = pool_.take(e - b);
    if (!at.ok()) return std::move(at).status();
    if (Status s = member.memory->give(b, e, *at); !s.ok()) {
      pool_.share(*at, e - b, member.bit);
      pool_.leave(*at, e - b, member.bit);
      return s;
    }
    note_run(member, b, e, *at);
    if (config_.guard) member.memory->protect(b, e, true);
  }
  return {};
}

// Whole pages: `to` shows the pages of `from`. No rank shows a page twice.
Status Splicer::splice(Member& from, Member& to, uint64_t begin, uint64_t end, uint64_t to_begin) {
  struct Part {
    uint64_t begin, end, pool;
  };
  std::vector<Part> parts;
  bool twice = false;
  const uint64_t ahead = to_begin - begin;  // modulo 2^64
  for_each_part(from, begin, end, [&](uint64_t b, uint64_t e, uint64_t pool) {
    for_each_part(to, b + ahead, e + ahead, [&](uint64_t bb, uint64_t ee, uint64_t have) {
      const uint64_t want = pool + (bb - ahead - b);
      if (have == want) return;
      parts.push_back({bb, ee, want});
      twice |= (pool_.sharers(want, ee - bb) & to.bit) != 0;
    });
  });
  if (twice) return {kNotSupported, "the rank shows these pages elsewhere"};
  moved_ |= ahead != 0 && !parts.empty();
  for (const Part& part : parts) {
    if (Status s = to.memory->show(part.begin, part.end, part.pool, *from.memory, part.begin - ahead); !s.ok())
      return s;
    leave_pages(to, part.begin, part.end);
    note_run(to, part.begin, part.end, part.pool);
    if (config_.guard) to.memory->protect(part.begin, part.end, true);
  }
  return {};
}

// What they do not share.
Status Splicer::copy(Member& from, Member& to, uint64_t begin, uint64_t end, uint64_t to_begin) {
  Status status;
  const uint64_t ahead = to_begin - begin;
  const bool may_share = in_phase(begin, to_begin, page_);
  for_each_part(from, begin, end, [&](uint64_t b, uint64_t e, uint64_t pool) {
    std::vector<std::pair<uint64_t, uint64_t>> parts;
    for_each_part(to, b + ahead, e + ahead, [&](uint64_t bb, uint64_t ee, uint64_t have) {
      if (!may_share || pool == UINT64_MAX || have != pool + (bb - ahead - b)) parts.emplace_back(bb, ee);
    });
    for (const auto& [bb, ee] : parts) {
      if (status.ok()) status = own_pages(to, bb, ee, true);
      if (status.ok()) status = gpu_->copy(to.base + bb, from.base + bb - ahead, ee - bb);
    }
  });
  return status;
}

// The lead is about to write for all. Pages there become its own that a rank shows who does not write, or who writes elsewhere
// than it shows them.
Status Splicer::keep_apart(const std::vector<Arrival*>& all, const Arrival& lead, size_t access) {
  Member& own = *lead.member;
  const Access& written = lead.launch->accesses[access];
  // What is young may lie elsewhere at the others, and somebody may show these pages who writes other ones.
  const bool young = written.flags & kYoung;
  uint64_t writers = own.bit;
  for (const Arrival* one : all) writers |= young ? 0 : one->member->bit;
  std::vector<std::pair<uint64_t, uint64_t>> apart;
  const uint64_t begin = written.addr - own.base;
  for_each_part(own, floor_page(begin), ceil_page(begin + written.bytes), [&](uint64_t b, uint64_t e, uint64_t pool) {
    if (pool == UINT64_MAX) return;
    const uint64_t sharers = pool_.sharers(pool, e - b);
    if (sharers & ~writers) apart.emplace_back(b, e);
    for (const Arrival* one : all) {
      if (!moved_ || one == &lead || !(sharers & writers & one->member->bit)) continue;
      const uint64_t ahead = one->launch->accesses[access].addr - one->member->base - begin;
      if (ahead % page_ != 0) {
        apart.emplace_back(b, e);
        continue;
      }
      for_each_part(*one->member, b + ahead, e + ahead, [&](uint64_t bb, uint64_t ee, uint64_t have) {
        const uint64_t want = pool + (bb - ahead - b);
        if (have != want && pool_.sharers(want, ee - bb) & one->member->bit) apart.emplace_back(bb - ahead, ee - ahead);
      });
    }
  });
  for (const auto& [b, e] : apart)
    if (Status s = own_pages(own, b, e, true); !s.ok()) return s;
  return {};
}

// Where whole pages end that are to be one. Of the last page of a block the argument may leave out what the size was rounded
// up by. Nobody here knows what of that is the program's, so it is compared.
StatusOr<uint64_t> Splicer::spliced_end(const std::vector<Arrival*>& all, const Arrival& lead, size_t access) {
  const Access& written = lead.launch->accesses[access];
  const uint64_t begin = written.addr - lead.member->base, end = begin + written.bytes, last = floor_page(end);
  if (last == end || gpu_->traits.joins_edges) return last;
  const auto offset_of = [&](const Arrival* one) { return one->launch->accesses[access].addr - one->member->base; };
  const auto shown = [&](const Arrival* one) {
    uint64_t at = UINT64_MAX;
    const uint64_t page = last + (offset_of(one) - begin);
    for_each_part(*one->member, page, page + page_, [&](uint64_t, uint64_t, uint64_t pool) { at = pool; });
    return at;
  };
  for (const Arrival* one : all)
    if (!in_phase(offset_of(one), begin, page_)) return last;
  const uint64_t there = shown(&lead);
  if (there != UINT64_MAX &&
      std::all_of(all.begin(), all.end(), [&](const Arrival* one) { return shown(one) == there; }))
    return last + page_;
  {
    std::lock_guard lock(mu_);
    for (const Arrival* one : all) {
      const auto it = one->member->around(one->launch->accesses[access].addr, written.bytes);
      if (it == one->member->blocks.end()) return last;
      if (it->first + it->second.bytes - one->member->base != last + page_ + (offset_of(one) - begin)) return last;
    }
  }
  std::vector<PhysicalMemory::Pair> tails;
  for (const Arrival* one : all)
    if (one != &lead)
      tails.push_back(
          {lead.member->base + end, one->member->base + offset_of(one) + written.bytes, last + page_ - end});
  for (const PhysicalMemory::Pair& pair : tails) compared_bytes_ += pair.bytes;
  auto same = gpu_->same(tails);
  if (!same.ok()) return std::move(same).status();
  return *same ? last + page_ : last;
}

void Splicer::guard(const Member& member, const SpliceLaunch& launch, bool on) const {
  if (!config_.guard) return;
  for (const Access& access : launch.accesses) {
    if (!writes(access)) continue;
    const uint64_t begin = access.addr - member.base;
    for_each_part(member, floor_page(begin), ceil_page(begin + access.bytes),
                  [&](uint64_t b, uint64_t e, uint64_t pool) {
                    if (pool != UINT64_MAX) member.memory->protect(b, e, on);
                  });
  }
}

// The pages in which an argument begins and ends have other buffers too. When launches for several have had all that is
// allocated there, it is mostly equal; so it is compared, and such a page becomes one.
void Splicer::join_edges(const std::vector<Arrival*>& all, const Arrival& lead) {
  std::set<uint64_t> pages;
  for (const Access& access : lead.launch->accesses) {
    if (!is_memory(access) || access.bytes == 0) continue;
    if (!writes(access)) {
      agree(all, &access - lead.launch->accesses.data());
      continue;
    }
    if (access.flags & kYoung) continue;
    const uint64_t begin = access.addr - lead.member->base;
    pages.insert(floor_page(begin));
    pages.insert(floor_page(begin + access.bytes - 1));
  }
  for (const uint64_t page : pages) {
    // That a page stays two costs memory, and nothing else.
    if (const Status s = join_edge(all, lead, page); !s.ok())
      DP_LOG(kInfo, kServer, 0, "splicing a page: %s", s.text().c_str());
  }
}

Status Splicer::join_edge(const std::vector<Arrival*>& all, const Arrival& lead, uint64_t page) {
  const auto shown = [&](const Member& member) {
    uint64_t at = UINT64_MAX;
    for_each_part(member, page, page + page_, [&](uint64_t, uint64_t, uint64_t pool) { at = pool; });
    return at;
  };
  const uint64_t there = shown(*lead.member);
  const auto is_there = [&](const Arrival* one) { return there != UINT64_MAX && shown(*one->member) == there; };
  if (std::all_of(all.begin(), all.end(), is_there)) return {};
  using Stretches = std::vector<std::pair<uint64_t, uint64_t>>;  // offset, bytes: what is allocated in the page
  std::optional<Stretches> stretches;
  {
    std::lock_guard lock(mu_);
    for (const Arrival* one : all) {
      Member& member = *one->member;
      Stretches own;
      auto it = member.blocks.upper_bound(member.base + page);
      if (it != member.blocks.begin()) --it;
      for (; it != member.blocks.end() && it->first < member.base + page + page_; ++it) {
        const uint64_t begin = std::max(it->first - member.base, page);
        const uint64_t end = std::min(it->first - member.base + it->second.bytes, page + page_);
        if (begin >= end) continue;
        if (!it->second.agreed) return {};
        own.emplace_back(begin, end - begin);
      }
      if (stretches && *stretches != own) return {};
      stretches = std::move(own);
    }
  }
  std::vector<PhysicalMemory::Pair> pairs;
  for (const Arrival* one : all)
    for (const auto& [offset, bytes] : *stretches)
      if (one != &lead) pairs.push_back({lead.member->base + offset, one->member->base + offset, bytes});
  for (const PhysicalMemory::Pair& pair : pairs) compared_bytes_ += pair.bytes;
  auto same = gpu_->same(pairs);
  if (!same.ok() || !*same) return std::move(same).status();
  Status s = pool_pages(*lead.member, page, page + page_);
  for (const Arrival* one : all)
    if (one != &lead && s.ok()) s = splice(*lead.member, *one->member, page, page + page_, page);
  return s;
}

// What it only reads has been found equal.
void Splicer::agree(const std::vector<Arrival*>& all, ptrdiff_t place) {
  std::lock_guard lock(mu_);
  for (const Arrival* one : all) {
    const Access& access = one->launch->accesses[static_cast<size_t>(place)];
    Member::Block* const block = one->member->block_of(access.addr, access.bytes);
    if (block && one->member->covers_block(access.addr, access.bytes)) block->agreed = true;
  }
}

void Splicer::disagree(Member& member, uint64_t addr, uint64_t bytes) {
  if (!gpu_->traits.joins_edges) return;
  std::lock_guard lock(mu_);
  auto it = member.blocks.upper_bound(addr);
  if (it != member.blocks.begin()) --it;
  for (; it != member.blocks.end() && it->first < addr + bytes; ++it)
    if (it->first + it->second.bytes > addr) it->second.agreed = false;
}

bool Splicer::may_splice(Member& member, uint64_t addr, uint64_t bytes, bool placed) {
  size_t runs = 0;
  for (const auto& one : members_) runs += one ? one->runs.size() : 0;
  if (runs >= kMaxRuns) return false;
  std::lock_guard lock(mu_);
  Member::Block* const block = member.block_of(addr, bytes);
  if (!block) return false;
  block->placed |= placed;
  const bool broken = block->is_broken();
  if (broken) block->equal++;
  // Something else may be on its way to what is left out.
  if (member.covers_block(addr, bytes)) block->agreed = true;
  block->agreed &= !broken;
  return !broken;
}

}  // namespace devproxy::hal::splice
