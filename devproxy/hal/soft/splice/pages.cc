// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>

#include "devproxy/csrc/base/file.h"
#include "devproxy/hal/soft/splice/parts.h"

namespace devproxy::hal::soft {

// All under pages_mu_.

// The member's own pages show again in the range, and all pages that it touches.
Status Splicer::own_pages(Member& member, uint64_t begin, uint64_t end, bool contents) {
  begin = floor_page(begin);
  end = ceil_page(end);
  struct Spliced {
    uint64_t begin, end, pool;
  };
  std::vector<Spliced> parts;
  for_each_part(member, begin, end, [&](uint64_t b, uint64_t e, uint64_t pool) {
    if (pool != UINT64_MAX) parts.push_back({b, e, pool});
  });
  for (const Spliced& part : parts) {
    const uint64_t bytes = part.end - part.begin;
    if (contents)
      if (Status s = write_all(member.fd, member.at(part.begin), bytes, part.begin); !s.ok())
        return std::move(s).with("giving a rank pages of its own");
    if (mmap(member.at(part.begin), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, member.fd,
             static_cast<off_t>(part.begin)) == MAP_FAILED)
      return Status::from_errno(kOutOfMemory, "giving a rank pages of its own");
    auto it = std::prev(member.runs.upper_bound(part.begin));
    const Member::Run run = it->second;
    const uint64_t first = it->first;
    if (first == part.begin)
      member.runs.erase(it);
    else
      it->second.end = part.begin;
    if (run.end > part.end) member.runs[part.end] = {run.end, run.pool + (part.end - first)};
    pool_->leave(part.pool, bytes, member.bit);
  }
  if (parts.empty()) return {};
  member.spliced = !member.runs.empty();
  saved_bytes_ = pool_->saved_bytes();
  return {};
}

// Precondition: the range is the member's own. The pages there show the pool's from now on.
Status Splicer::map_pool(Member& member, uint64_t begin, uint64_t end, uint64_t pool_at) {
  const int access = config_.guard ? PROT_READ : PROT_READ | PROT_WRITE;
  if (mmap(member.at(begin), end - begin, access, MAP_SHARED | MAP_FIXED | MAP_NORESERVE | MAP_POPULATE, pool_->fd(),
           static_cast<off_t>(pool_at)) == MAP_FAILED)
    return Status::from_errno(kOutOfMemory, "mapping pages that ranks share");
  member.runs[begin] = {end, pool_at};
  member.spliced = true;
  pool_->share(pool_at, end - begin, member.bit);
  fallocate(member.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
            static_cast<off_t>(end - begin));
  return {};
}

// What of the range is the member's own moves into the pool.
Status Splicer::pool_pages(Member& member, uint64_t begin, uint64_t end) {
  std::vector<std::pair<uint64_t, uint64_t>> own;
  for_each_part(member, begin, end, [&](uint64_t b, uint64_t e, uint64_t pool) {
    if (pool == UINT64_MAX) own.emplace_back(b, e);
  });
  for (const auto& [b, e] : own) {
    auto at = pool_->take(e - b);
    if (!at.ok()) return std::move(at).status();
    Status s = write_all(pool_->fd(), member.at(b), e - b, *at).with("filling pages that ranks share");
    if (s.ok()) s = map_pool(member, b, e, *at);
    if (s.ok()) continue;
    pool_->share(*at, e - b, member.bit);
    pool_->leave(*at, e - b, member.bit);
    return s;
  }
  return {};
}

// Whole pages: `to` shows the pages of `from`.
Status Splicer::splice(Member& from, Member& to, uint64_t begin, uint64_t end) {
  struct Part {
    uint64_t begin, end, pool;
  };
  std::vector<Part> parts;
  for_each_part(from, begin, end, [&](uint64_t b, uint64_t e, uint64_t pool) {
    for_each_part(to, b, e, [&](uint64_t bb, uint64_t ee, uint64_t have) {
      if (have != pool + (bb - b)) parts.push_back({bb, ee, pool + (bb - b)});
    });
  });
  for (const Part& part : parts) {
    Status s = own_pages(to, part.begin, part.end, false);
    if (s.ok()) s = map_pool(to, part.begin, part.end, part.pool);
    if (!s.ok()) return s;
  }
  return {};
}

Status Splicer::copy(Member& from, Member& to, uint64_t begin, uint64_t end) {
  Status status;
  for_each_part(from, begin, end, [&](uint64_t b, uint64_t e, uint64_t pool) {
    std::vector<std::pair<uint64_t, uint64_t>> parts;
    for_each_part(to, b, e, [&](uint64_t bb, uint64_t ee, uint64_t have) {
      if (pool == UINT64_MAX || have != pool + (bb - b)) parts.emplace_back(bb, ee);
    });
    for (const auto& [bb, ee] : parts) {
      if (status.ok()) status = own_pages(to, bb, ee, true);
      if (status.ok()) std::memcpy(to.at(bb), from.at(bb), ee - bb);
    }
  });
  return status;
}

void Splicer::guard(const Member& member, const SpliceLaunch& launch, bool on) const {
  if (!config_.guard) return;
  for (const Access& access : launch.accesses) {
    if (!writes(access)) continue;
    const uint64_t begin = access.addr - member.base;
    for_each_part(member, floor_page(begin), ceil_page(begin + access.bytes),
                  [&](uint64_t b, uint64_t e, uint64_t pool) {
                    if (pool != UINT64_MAX) mprotect(member.at(b), e - b, on ? PROT_READ : PROT_READ | PROT_WRITE);
                  });
  }
}

bool Splicer::may_splice(Member& member, uint64_t addr, uint64_t bytes) {
  size_t runs = 0;
  for (const auto& one : members_) runs += one ? one->runs.size() : 0;
  if (runs >= kMaxRuns) return false;
  std::lock_guard lock(mu_);
  Member::Block* const block = member.block_of(addr, bytes);
  if (!block) return false;
  const bool broken = block->is_broken();
  if (broken) block->equal++;
  return !broken;
}

}  // namespace devproxy::hal::soft
