// SPDX-License-Identifier: Apache-2.0
// The books of pages that belong to no rank: those that several show in their own ranges. The device has the pages.
//
// A page has the set of its sharers, as bits. The last one to leave frees it. So it does not matter who was there first:
// a rank that ends, or that needs contents of its own, takes nothing from the others.
//
// Not thread-safe: the splicer's page lock guards it.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/splice/physical.h"

namespace devproxy::hal::splice {

class PagePool {
 public:
  explicit PagePool(PhysicalMemory& memory) : memory_(memory), page_(memory.traits.page) {}
  PagePool(const PagePool&) = delete;

  // A run of pages without sharers, whose contents are open. Multiples of a page.
  StatusOr<uint64_t> take(uint64_t bytes);
  void share(uint64_t at, uint64_t bytes, uint64_t sharer);
  void leave(uint64_t at, uint64_t bytes, uint64_t sharer);
  // Everybody who shares any page of the run.
  uint64_t sharers(uint64_t at, uint64_t bytes) const;

  // Those who share all of them.
  uint64_t common_sharers(uint64_t at, uint64_t bytes) const;

  // Bytes that would be needed besides if each sharer had its own.
  uint64_t saved_bytes() const { return saved_pages_ * page_; }
  uint64_t used_bytes() const { return used_pages_ * page_; }

 private:
  void free(uint64_t first, uint64_t pages);

  PhysicalMemory& memory_;
  const uint64_t page_;
  std::vector<uint64_t> sharers_;       // by page
  std::map<uint64_t, uint64_t> holes_;  // free runs: first page, pages
  uint64_t saved_pages_ = 0, used_pages_ = 0;
};

}  // namespace devproxy::hal::splice
