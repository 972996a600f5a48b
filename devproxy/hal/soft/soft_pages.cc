// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/soft_pages.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include "devproxy/csrc/base/file.h"

namespace devproxy::hal::soft {

namespace {

void punch(int fd, uint64_t at, uint64_t bytes) {
  fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at), static_cast<off_t>(bytes));
}

class SoftRank final : public splice::RankMemory {
 public:
  SoftRank(uint64_t base, int fd, int pool_fd) : base_(base), fd_(fd), pool_fd_(pool_fd) {}

  Status give(uint64_t begin, uint64_t end, uint64_t pool_at) override {
    Status s = write_all(pool_fd_, at(begin), end - begin, pool_at).with("filling pages that ranks share");
    return s.ok() ? map_pool(begin, end, pool_at) : s;
  }
  Status show(uint64_t begin, uint64_t end, uint64_t pool_at, splice::RankMemory&, uint64_t) override {
    return map_pool(begin, end, pool_at);
  }
  Status own(uint64_t begin, uint64_t end, bool contents) override {
    if (contents)
      if (Status s = write_all(fd_, at(begin), end - begin, begin); !s.ok()) return s;
    if (mmap(at(begin), end - begin, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd_,
             static_cast<off_t>(begin)) == MAP_FAILED)
      return Status::from_errno(kOutOfMemory, "mapping them");
    return {};
  }
  void protect(uint64_t begin, uint64_t end, bool on) override {
    mprotect(at(begin), end - begin, on ? PROT_READ : PROT_READ | PROT_WRITE);
  }

 private:
  Status map_pool(uint64_t begin, uint64_t end, uint64_t pool_at) const {
    if (mmap(at(begin), end - begin, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE | MAP_POPULATE,
             pool_fd_, static_cast<off_t>(pool_at)) == MAP_FAILED)
      return Status::from_errno(kOutOfMemory, "mapping pages that ranks share");
    punch(fd_, begin, end - begin);
    return {};
  }
  uint8_t* at(uint64_t offset) const { return reinterpret_cast<uint8_t*>(base_ + offset); }

  const uint64_t base_;
  const int fd_, pool_fd_;
};

const void* address(uint64_t at) { return reinterpret_cast<const void*>(at); }

bool same_bytes(const splice::PhysicalMemory::Pair& pair) {
  return std::memcmp(address(pair.a), address(pair.b), pair.bytes) == 0;
}

}  // namespace

StatusOr<std::unique_ptr<SoftPages>> SoftPages::open(const Engine* engine, const Traits& traits) {
  const int fd = memfd_create("devproxy-spliced-memory", MFD_CLOEXEC);
  if (fd < 0) return Status::from_errno(kOutOfMemory, "making the memory that ranks share");
  return std::unique_ptr<SoftPages>(new SoftPages(fd, engine, traits));
}

SoftPages::~SoftPages() { close(fd_); }

std::unique_ptr<splice::RankMemory> SoftPages::rank(uint64_t base, int memory_fd) const {
  return std::make_unique<SoftRank>(base, memory_fd, fd_);
}

Status SoftPages::grow_pool(uint64_t bytes) {
  if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0)
    return Status::from_errno(kOutOfMemory, "growing the memory that ranks share");
  return {};
}

void SoftPages::empty_pool(uint64_t at, uint64_t bytes) { punch(fd_, at, bytes); }

StatusOr<bool> SoftPages::same(const std::vector<Pair>& pairs) {
  for (const Pair& pair : pairs)
    if (!same_bytes(pair)) return false;
  return true;
}

bool SoftPages::is_known_same(const Pair& pair) { return same_bytes(pair); }

Status SoftPages::copy(uint64_t to, uint64_t from, uint64_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), address(from), bytes);
  return {};
}

StatusOr<splice::Contents> SoftPages::hash(splice::Runner&, const std::vector<Range>& ranges) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (const Range& range : ranges) XXH3_128bits_update(&state, address(range.addr), range.bytes);
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return splice::Contents{hash.low64, hash.high64};
}

}  // namespace devproxy::hal::soft
