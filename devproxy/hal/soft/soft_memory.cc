// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/soft_memory.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/csrc/base/file.h"

namespace devproxy::hal::soft {

namespace {

// Freed memory is given back to the host when this much of it may hold pages, or a quarter of what is live, and it was
// not allocated again for kIdleNs to twice that. So resident memory follows the job, and a training step that frees
// its activations and allocates them again does not fault every page anew.
constexpr uint64_t kIdleFloorBytes = 256u << 20;
constexpr uint64_t kIdleNs = 2'000'000'000;
constexpr uint64_t kPage = 4096;

}  // namespace

StatusOr<int> SoftMemory::map(const SpaceConfig& config) {
  const int fd = memfd_create("devproxy-device-memory", MFD_CLOEXEC);
  if (fd < 0) return Status::from_errno(kOutOfMemory, "making the software GPU's memory");
  if (ftruncate(fd, static_cast<off_t>(config.device_bytes)) != 0) {
    const Status why = Status::from_errno(kOutOfMemory, "sizing the software GPU's memory");
    close(fd);
    return why;
  }
  void* const want = reinterpret_cast<void*>(config.device_base);
  void* const got =
      mmap(want, config.device_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, fd, 0);
  if (got != want) {
    const Status why = Status::from_errno(kOutOfMemory, "mapping the software GPU's memory at its fixed address");
    if (got != MAP_FAILED) munmap(got, config.device_bytes);  // a kernel before 4.17 ignores NOREPLACE
    close(fd);
    return why;
  }
  madvise(want, config.device_bytes, MADV_DONTDUMP);  // a core file of the server is about the server
  return fd;
}

SoftMemory::~SoftMemory() {
  munmap(reinterpret_cast<void*>(base_), size_);
  close(fd_);
}

void SoftMemory::committed(uint64_t addr, uint64_t bytes) {
  idle_.erase(addr, addr + bytes);
  idle_long_.erase(addr, addr + bytes);
  live_bytes_ += bytes;
}

void SoftMemory::released(uint64_t addr, uint64_t bytes) {
  reused(bytes);
  idle_.insert(addr, addr + bytes);
}

void SoftMemory::reused(uint64_t bytes) { live_bytes_ -= std::min(live_bytes_, bytes); }

std::vector<std::pair<uint64_t, uint64_t>> SoftMemory::take_idle() {
  std::vector<std::pair<uint64_t, uint64_t>> pages;
  if (idle_.bytes() + idle_long_.bytes() <= std::max(kIdleFloorBytes, live_bytes_ / 4)) return pages;
  const uint64_t now = now_ns();
  if (now - aged_ns_ < kIdleNs) return pages;
  aged_ns_ = now;
  for (const auto& [begin, end] : idle_long_) {
    const uint64_t first = (begin + kPage - 1) & ~(kPage - 1), last = end & ~(kPage - 1);
    if (first < last) pages.emplace_back(first, last - first);
  }
  idle_long_ = std::exchange(idle_, {});
  return pages;
}

void SoftMemory::give_back(uint64_t addr, uint64_t bytes) {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(addr - base_),
            static_cast<off_t>(bytes));
}

Status SoftMemory::alias(uint64_t addr, size_t bytes, const SoftMemory& from, uint64_t from_addr) {
  if (!owns(addr, bytes) || !from.owns(from_addr, bytes) || (addr | from_addr | bytes) % kPage != 0)
    return {kInvalidValue, "an alias covers whole pages inside the device memory of both processes"};
  if (mmap(reinterpret_cast<void*>(addr), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
           from.fd_, static_cast<off_t>(from_addr - from.base_)) == MAP_FAILED)
    return Status::from_errno(kOutOfMemory, "mapping pages a second time");
  return {};
}

Status SoftMemory::unalias(uint64_t addr, size_t bytes) {
  if (!owns(addr, bytes) || (addr | bytes) % kPage != 0)
    return {kInvalidValue, "an alias covers whole pages inside the device memory of the process"};
  const uint64_t offset = addr - base_;
  auto* const at = reinterpret_cast<void*>(addr);
  // The contents first, into the pages that will show again.
  if (Status s = write_all(fd_, at, bytes, offset); !s.ok())
    return std::move(s).with("giving an alias pages of its own");
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd_,
           static_cast<off_t>(offset)) == MAP_FAILED)
    return Status::from_errno(kOutOfMemory, "mapping a process's own pages again");
  return {};
}

}  // namespace devproxy::hal::soft
