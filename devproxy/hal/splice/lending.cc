// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/splice/parts.h"

namespace devproxy::hal::splice {

// All under pages_mu_.

void Splicer::loans_changed() {
  for (const auto& one : members_)
    if (one) one->deals = loans_.concern(one->number);
  lending_.store(!loans_.empty(), std::memory_order_release);
}

// Has the borrower freed it, and is nothing left that it submitted before and that touches it? (Its allocator gives memory
// out again in the order of a stream.)
bool Splicer::dead(const Loan& loan) {
  const Member& borrower = *members_[loan.borrower];
  const uint64_t begin = borrower.base + loan.to, end = begin + loan.bytes;
  uint64_t freed = UINT64_MAX;
  {
    std::lock_guard lock(mu_);
    auto it = borrower.freed.upper_bound({begin, UINT64_MAX});
    for (size_t looked = 0; it != borrower.freed.begin() && looked < kLookBack; looked++) {
      --it;
      if (it->second >= end && it->first.second >= loan.position) freed = std::min(freed, it->first.second);
    }
  }
  if (freed == UINT64_MAX) return false;
  return !borrower.pending || !borrower.pending(begin, loan.bytes, freed);
}

// Precondition: the loans have been taken out, and the lender has their contents still.
Status Splicer::settle(const std::vector<Loan>& loans) {
  for (const Loan& loan : loans) {
    Member& borrower = *members_[loan.borrower];
    if (dead(loan)) {  // nothing is there any more
      borrower.forget(loan.to, loan.to + loan.bytes);
      continue;
    }
    if (Status s = own_pages(borrower, loan.to, loan.to + loan.bytes, true); !s.ok()) return s;
    if (Status s = gpu_->copy(borrower.base + loan.to, members_[loan.lender]->base + loan.from, loan.bytes); !s.ok())
      return s;
    settled_bytes_ += loan.bytes;
    purposes_[loan.purpose].settled_bytes += loan.bytes;
  }
  return {};
}

Status Splicer::settle_reads(Member& member, const SpliceLaunch& launch, uint64_t up_to_bytes) {
  if (loans_.empty()) return {};
  for (const Access& access : launch.accesses) {
    if (!is_memory(access) || !reads(access) || access.bytes > up_to_bytes) continue;
    Member* const owner = member.holds(access.addr, access.bytes) ? &member : at(access.addr);
    if (!owner || !owner->deals || !owner->holds(access.addr, access.bytes)) continue;
    const uint64_t begin = access.addr - owner->base;
    const Status done = settle(loans_.repay(owner->number, begin, begin + access.bytes));
    loans_changed();
    if (!done.ok()) return done;
  }
  return {};
}

// Are loans of this kind worth it? Most of the last ones were not settled, or it is time to try again.
bool Splicer::pays(uint64_t purpose) {
  if (!gpu_->traits.lends) return false;
  if (!config_.thrifty) return true;
  if (purposes_.size() >= kMaxKeys) purposes_.clear();
  Purpose& known = purposes_[purpose];
  if (known.loans < kJudgedLoans) return true;
  const bool good = known.settled_bytes * 2 <= known.lent_bytes;
  if (!good && ++known.refused < known.refusals) return false;
  // Ranks that have not learnt yet to meet settle the first ones; so it begins with short refusals.
  const uint64_t refusals = good ? kFirstRefusals : std::min(known.refusals * 2, kMaxRefusals);
  const uint64_t run_ns = known.run_ns;
  known = {};
  known.refusals = refusals;
  known.run_ns = run_ns;
  return true;
}

void Splicer::lend(const Loan& loan) {
  loans_.lend(loan);
  lent_bytes_ += loan.bytes;
  Purpose& known = purposes_[loan.purpose];
  known.loans++;
  known.lent_bytes += loan.bytes;
}

std::optional<std::vector<Splicer::Found>> Splicer::found_elsewhere(const Member& member, const SpliceLaunch& launch,
                                                                    const Contents& result) {
  if (!gpu_->traits.lends) return {};
  std::vector<Found> all;
  for (size_t i = 0; i < launch.accesses.size(); i++) {
    const Access& access = launch.accesses[i];
    if (!is_memory(access) || !writes(access) || access.bytes == 0) continue;
    if (!is_whole(access)) return {};
    Found one{&access, derived(result, i), 0, 0, nullptr};
    if (is_numbered(access)) {
      const auto it = places_.find(one.contents);
      if (it == places_.end() || it->second.bytes != access.bytes || it->second.member == member.number) return {};
      const auto& [lender, begin, bytes] = it->second;
      Member* const other = lender < members_.size() ? members_[lender].get() : nullptr;
      if (!other || other->contents_of(begin, bytes) != one.contents ||
          loans_.borrowed_bytes(lender, begin, begin + bytes) != 0)
        return {};
      std::lock_guard lock(mu_);  // what is freed is written soon
      if (!other->block_of(other->base + begin, bytes)) return {};
      one.lender = lender;
      one.from = begin;
    } else {
      const auto it = small_.find(one.contents);
      if (it == small_.end() || it->second.size() != access.bytes) return {};
      one.small = &it->second;
    }
    all.push_back(one);
  }
  return all;
}

// Precondition: the results were found, and nothing has changed since.
Status Splicer::borrow(Member& member, const SpliceLaunch& launch, const std::vector<Found>& found, bool counts) {
  const uint64_t purpose = purpose_of(launch);
  for (const Found& one : found) {
    const uint64_t begin = one.access->addr - member.base, bytes = one.access->bytes;
    if (Status s = break_off(member, one.access->addr, bytes, counts, true); !s.ok()) return s;
    if (one.small) {
      std::memcpy(member.at(begin), one.small->data(), bytes);
      continue;
    }
    if (config_.guard) std::memset(member.at(begin), 0xdb, bytes);  // whoever reads it all the same
    lend({one.lender, member.number, one.from, begin, bytes, purpose, launch.position});
    member.hold(begin, bytes, one.contents);
  }
  loans_changed();
  return {};
}

bool Splicer::same_as_found(const std::vector<Found>& found) const {
  for (const Found& one : found) {
    const void* const there =
        one.small ? static_cast<const void*>(one.small->data()) : members_[one.lender]->at(one.from);
    if (std::memcmp(reinterpret_cast<const void*>(one.access->addr), there, one.access->bytes) != 0) return false;
  }
  return true;
}

// For others, and for what follows from them.
void Splicer::keep_results(Member& member, const SpliceLaunch& launch, const Contents& result) {
  if (places_.size() >= kMaxPlaces) places_.clear();
  if (small_.size() >= kMaxSmall) small_.clear();
  const bool worth = is_worth_it(launch);
  for (size_t i = 0; i < launch.accesses.size(); i++) {
    const Access& access = launch.accesses[i];
    if (!is_memory(access) || !writes(access) || !is_whole(access)) continue;
    const uint64_t begin = access.addr - member.base;
    const Contents contents = derived(result, i);
    if (is_numbered(access)) {
      member.hold(begin, access.bytes, contents);
      if (gpu_->traits.lends) places_[contents] = {member.number, begin, access.bytes};
    } else if (worth) {
      small_[contents].assign(member.at(begin), member.at(begin + access.bytes));
    }
  }
}

}  // namespace devproxy::hal::splice
