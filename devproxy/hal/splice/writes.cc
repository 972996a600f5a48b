// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/splice/parts.h"

namespace devproxy::hal::splice {

void Splicer::count_breaks(Member& member, uint64_t addr, uint64_t bytes) {
  auto it = member.blocks.upper_bound(addr);
  if (it != member.blocks.begin()) --it;
  for (; it != member.blocks.end() && it->first < addr + bytes; ++it)
    if (it->first + it->second.bytes > addr) it->second.add_break();
}

// Under pages_mu_.
Status Splicer::break_off(Member& member, uint64_t addr, uint64_t bytes, bool counts, bool whole) {
  const uint64_t begin = addr - member.base;
  member.forget(begin, begin + bytes);
  disagree(member, addr, bytes);
  if (member.deals) {
    const std::vector<Loan> borrowed = loans_.repay(member.number, begin, begin + bytes);
    Status s = whole ? Status{} : settle(borrowed);
    if (s.ok()) s = settle(loans_.call_in(member.number, begin, begin + bytes));
    loans_changed();
    if (!s.ok()) return s;
  }
  bool any = false;
  for_each_part(member, begin, begin + bytes, [&](uint64_t, uint64_t, uint64_t pool) { any |= pool != UINT64_MAX; });
  if (!any) return {};
  broken_++;
  if (counts) {
    std::lock_guard lock(mu_);
    count_breaks(member, addr, bytes);
  }
  return own_pages(member, begin, begin + bytes, true);
}

Status Splicer::before_read(uint64_t addr, uint64_t bytes) {
  if (!lending_.load(std::memory_order_acquire) || bytes == 0) return {};
  std::lock_guard pages(pages_mu_);
  Member* const member = at(addr);
  if (!member || !member->deals || !member->holds(addr, bytes)) return {};
  const Status done = settle(loans_.repay(member->number, addr - member->base, addr - member->base + bytes));
  loans_changed();
  return done;
}

Status Splicer::before_write(uint64_t addr, uint64_t bytes, bool whole) {
  if (!busy_.load(std::memory_order_acquire) || bytes == 0) return {};
  std::lock_guard pages(pages_mu_);
  Member* const member = at(addr);
  return member && member->holds(addr, bytes) ? break_off(*member, addr, bytes, true, whole) : Status{};
}

Status Splicer::before(const CopyArgs& a) {
  if (a.width_bytes == 0 || a.height == 0) return {};
  if (Status s = before_read(a.src, (a.height - 1) * a.src_pitch + a.width_bytes); !s.ok()) return s;
  return before_write(a.dst, (a.height - 1) * a.dst_pitch + a.width_bytes,
                      a.height == 1 || a.dst_pitch == a.width_bytes);
}

Status Splicer::before(const ArrayCopy& a) {
  if (a.slices == 0 || a.rows == 0) return {};
  const auto reach = [&](const ArrayCopy::Side& end) {
    return ((a.slices - 1) * end.slice_rows + a.rows - 1) * end.pitch + a.width_bytes;
  };
  if (!a.src.array)
    if (Status s = before_read(a.src.addr, reach(a.src)); !s.ok()) return s;
  return a.dst.array ? Status() : before_write(a.dst.addr, reach(a.dst), false);
}

Status Splicer::before(const MemsetArgs& a) {
  if (a.rows == 0 || a.count == 0) return {};
  return before_write(a.dst, (a.rows - 1) * a.pitch + a.count * a.width, a.rows == 1 || a.pitch == a.count * a.width);
}

// Under pages_mu_. What the launch reads has been settled.
Status Splicer::break_writes(Member& member, const SpliceLaunch& launch, bool counts) {
  for (const Access& access : launch.accesses) {
    if (!is_memory(access) || !writes(access) || access.bytes == 0) continue;
    Member* const owner = member.holds(access.addr, access.bytes) ? &member : at(access.addr);
    if (!owner || !owner->concerned() || !owner->holds(access.addr, access.bytes)) continue;
    if (Status s = break_off(*owner, access.addr, access.bytes, counts, is_whole(access)); !s.ok()) return s;
  }
  return {};
}

Status Splicer::before_sharing(Member& member, uint64_t addr, uint64_t bytes) {
  if (bytes == 0 || !member.holds(addr, bytes)) return {};
  {
    std::lock_guard lock(mu_);
    count_breaks(member, addr, bytes);
  }
  disagree(member, addr, bytes);
  if (!member.concerned()) return {};
  std::lock_guard pages(pages_mu_);
  const uint64_t begin = addr - member.base;
  member.forget(begin, begin + bytes);
  if (member.deals) {
    Status s = settle(loans_.repay(member.number, begin, begin + bytes));
    if (s.ok()) s = settle(loans_.call_in(member.number, begin, begin + bytes));
    loans_changed();
    if (!s.ok()) return s;
  }
  return own_pages(member, begin, begin + bytes, true);
}

Status Splicer::before_anything(Member& member) {
  if (!member.concerned()) return {};
  std::lock_guard pages(pages_mu_);
  if (member.spliced) {
    broken_++;
    std::lock_guard lock(mu_);
    count_breaks(member, member.base, member.bytes);
  }
  member.forget(0, member.bytes);
  disagree(member, member.base, member.bytes);
  Status s = settle(loans_.repay(member.number, 0, member.bytes));
  if (s.ok()) s = settle(loans_.call_in(member.number, 0, member.bytes));
  loans_changed();
  return s.ok() ? own_pages(member, 0, member.bytes, true) : std::move(s);
}

}  // namespace devproxy::hal::splice
