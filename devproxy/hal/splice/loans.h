// SPDX-License-Identifier: Apache-2.0
// Contents that a rank has not computed, because another rank has the same: borrowed, until somebody reads them.
//
// Each byte of a borrower comes from one lender at most. What is borrowed is not lent on.
//
// Not thread-safe: the splicer's page lock guards it.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace devproxy::hal::splice {

// Members by their numbers, stretches by their offsets, in bytes.
struct Loan {
  uint32_t lender = 0, borrower = 0;
  uint64_t from = 0, to = 0, bytes = 0;
  uint64_t purpose = 0;   // the kind of launch that it stands for
  uint64_t position = 0;  // the borrower's command
};

class Loans {
 public:
  // Precondition: neither stretch is borrowed, and they are two members'.
  void lend(const Loan& loan);
  // Takes out what is borrowed in the stretch, or what is lent there: cut to it.
  std::vector<Loan> repay(uint32_t borrower, uint64_t begin, uint64_t end);
  std::vector<Loan> call_in(uint32_t lender, uint64_t begin, uint64_t end);

  uint64_t borrowed_bytes(uint32_t borrower, uint64_t begin, uint64_t end) const;
  bool concern(uint32_t member) const;
  bool empty() const { return loans_ == 0; }

 private:
  // Where a lender's loans begin: the borrower and the place there. Some may overlap.
  using Places = std::multimap<uint64_t, std::pair<uint32_t, uint64_t>>;
  struct Account {
    std::map<uint64_t, Loan> borrowed;  // by their place
    Places lent;
    uint64_t longest = 0;  // of what was lent since nothing was
  };
  Account& account(uint32_t member);
  void add(const Loan& loan);
  void remove(const Loan& loan);
  template <class F>
  void for_each_borrowed(uint32_t borrower, uint64_t begin, uint64_t end, F f) const;

  std::vector<Account> accounts_;  // by member
  uint64_t loans_ = 0;
};

}  // namespace devproxy::hal::splice
