// SPDX-License-Identifier: Apache-2.0
// Pages of the physical GPU that belong to no rank: those that several have mapped into their own ranges.
//
// A page has the set of its sharers, as bits. The last one to leave frees it. So it does not matter who was there first:
// a rank that ends, or that needs contents of its own, takes nothing from the others.
//
// Not thread-safe: the splicer's page lock guards it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "devproxy/csrc/base/status.h"

namespace devproxy::hal::soft {

inline constexpr uint64_t kPoolPage = 4096;

class PagePool {
 public:
  static StatusOr<std::unique_ptr<PagePool>> open();
  ~PagePool();
  PagePool(const PagePool&) = delete;

  int fd() const { return fd_; }
  // A run of pages without sharers, whose contents are open. Multiples of kPoolPage.
  StatusOr<uint64_t> take(uint64_t bytes);
  void share(uint64_t at, uint64_t bytes, uint64_t sharer);
  void leave(uint64_t at, uint64_t bytes, uint64_t sharer);
  // Everybody who shares any page of the run.
  uint64_t sharers(uint64_t at, uint64_t bytes) const;

  // Those who share all of them.
  uint64_t common_sharers(uint64_t at, uint64_t bytes) const;

  // Bytes that would be needed besides if each sharer had its own.
  uint64_t saved_bytes() const { return saved_pages_ * kPoolPage; }
  uint64_t used_bytes() const { return used_pages_ * kPoolPage; }

 private:
  explicit PagePool(int fd) : fd_(fd) {}
  void free(uint64_t first, uint64_t pages);

  const int fd_;
  std::vector<uint64_t> sharers_;       // by page
  std::map<uint64_t, uint64_t> holes_;  // free runs: first page, pages
  uint64_t saved_pages_ = 0, used_pages_ = 0;
};

}  // namespace devproxy::hal::soft
