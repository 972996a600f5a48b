// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/splice/loans.h"

#include <algorithm>
#include <iterator>

namespace devproxy::hal::splice {

namespace {

// What of the loan lies in [begin, end) of the borrower.
Loan cut(const Loan& loan, uint64_t begin, uint64_t end) {
  Loan part = loan;
  const uint64_t first = std::max(begin, loan.to), last = std::min(end, loan.to + loan.bytes);
  part.from += first - loan.to;
  part.to = first;
  part.bytes = last - first;
  return part;
}

}  // namespace

Loans::Account& Loans::account(uint32_t member) {
  if (member >= accounts_.size()) accounts_.resize(member + 1);
  return accounts_[member];
}

void Loans::add(const Loan& loan) {
  account(loan.borrower).borrowed.emplace(loan.to, loan);
  Account& lender = account(loan.lender);
  lender.lent.emplace(loan.from, std::pair(loan.borrower, loan.to));
  lender.longest = std::max(lender.longest, loan.bytes);
  loans_++;
}

void Loans::remove(const Loan& loan) {
  Account& lender = account(loan.lender);
  const auto [first, last] = lender.lent.equal_range(loan.from);
  lender.lent.erase(
      std::find_if(first, last, [&](const auto& item) { return item.second == std::pair(loan.borrower, loan.to); }));
  if (lender.lent.empty()) lender.longest = 0;
  account(loan.borrower).borrowed.erase(loan.to);
  loans_--;
}

template <class F>
void Loans::for_each_borrowed(uint32_t borrower, uint64_t begin, uint64_t end, F f) const {
  if (borrower >= accounts_.size()) return;
  const std::map<uint64_t, Loan>& borrowed = accounts_[borrower].borrowed;
  auto it = borrowed.upper_bound(begin);
  if (it != borrowed.begin() && std::prev(it)->second.to + std::prev(it)->second.bytes > begin) --it;
  for (; it != borrowed.end() && it->first < end; ++it) f(it->second);
}

void Loans::lend(const Loan& loan) {
  if (loan.bytes != 0) add(loan);
}

std::vector<Loan> Loans::repay(uint32_t borrower, uint64_t begin, uint64_t end) {
  std::vector<Loan> whole;
  for_each_borrowed(borrower, begin, end, [&](const Loan& loan) { whole.push_back(loan); });
  for (Loan& loan : whole) {
    remove(loan);
    if (loan.to < begin) add(cut(loan, loan.to, begin));
    if (loan.to + loan.bytes > end) add(cut(loan, end, loan.to + loan.bytes));
    loan = cut(loan, begin, end);
  }
  return whole;
}

std::vector<Loan> Loans::call_in(uint32_t lender, uint64_t begin, uint64_t end) {
  std::vector<Loan> parts;
  if (lender >= accounts_.size()) return parts;
  const Account& own = accounts_[lender];
  std::vector<Loan> whole;
  for (auto it = own.lent.lower_bound(begin > own.longest ? begin - own.longest : 0);
       it != own.lent.end() && it->first < end; ++it) {
    const auto& [borrower, to] = it->second;
    const Loan& loan = accounts_[borrower].borrowed.at(to);
    if (loan.from + loan.bytes > begin) whole.push_back(loan);
  }
  for (const Loan& loan : whole) {
    const uint64_t first = loan.to + (std::max(begin, loan.from) - loan.from);
    const uint64_t last = loan.to + (std::min(end, loan.from + loan.bytes) - loan.from);
    for (const Loan& part : repay(loan.borrower, first, last)) parts.push_back(part);
  }
  return parts;
}

uint64_t Loans::borrowed_bytes(uint32_t borrower, uint64_t begin, uint64_t end) const {
  uint64_t bytes = 0;
  for_each_borrowed(borrower, begin, end, [&](const Loan& loan) { bytes += cut(loan, begin, end).bytes; });
  return bytes;
}

bool Loans::concern(uint32_t member) const {
  return member < accounts_.size() && !(accounts_[member].borrowed.empty() && accounts_[member].lent.empty());
}

}  // namespace devproxy::hal::splice
