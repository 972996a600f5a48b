// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/splice/splicer.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <sstream>
#include <type_traits>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/csrc/base/file.h"

namespace devproxy::hal::soft {

namespace {

constexpr size_t kMaxMembers = 64;  // bits of a page's sharers
constexpr uint32_t kMaxBreaks = 2;  // memory that its rank has changed alone so often is copied for a while
constexpr uint32_t kForgiven = 8,
                   kMaxDoubled =
                       20;  // so many launches for several, twice as many with each time that it is changed again
constexpr uint32_t kMaxStrikes = 2;                              // meetings in a row to which somebody did not come
constexpr uint32_t kProvenMeetings = 16, kMaxProvenStrikes = 6;  // where so many have met, it may be a pause
constexpr uint64_t kSayTimes = 4;  // in a row, so that ranks that are one step apart find each other
constexpr uint64_t kLookNs = 2'000'000;
constexpr size_t kMaxKeys = 8192, kMaxSaid = 256;
constexpr size_t kMaxRuns = 20000;  // of all members; the kernel allows a process 65,530 mappings
constexpr uint32_t kFreeMeetings = 2, kJudgedMeetings = 10;
constexpr uint64_t kMeetingNs = 30'000;  // of each that comes: two switches between threads
constexpr uint64_t kAlign = 64;          // bytes; operators may go by it
constexpr size_t kMaxPlaces = 32768, kMaxSmall = 4096, kMaxFreed = 65536, kLookBack = 64, kMaxAlone = 1024;
constexpr ptrdiff_t kMaxLives = 16;                                               // of one place, that are remembered
constexpr uint64_t kJudgedLoans = 1000, kFirstRefusals = 8, kMaxRefusals = 4096;  // of a kind of launch

uint64_t floor_page(uint64_t at) { return at & ~(kPoolPage - 1); }
uint64_t ceil_page(uint64_t at) { return (at + kPoolPage - 1) & ~(kPoolPage - 1); }

bool writes(const Access& access) { return access.flags & DEVPROXY_EXECUTOR_WRITES; }
bool reads(const Access& access) { return access.flags & DEVPROXY_EXECUTOR_READS; }
bool is_memory(const Access& access) { return !(access.flags & DEVPROXY_EXECUTOR_NUMBER); }
bool is_whole(const Access& access) { return access.flags & DEVPROXY_EXECUTOR_WHOLE; }
// Less is compared, not numbered.
bool is_numbered(const Access& access) { return is_memory(access) && access.bytes >= kPoolPage; }

// To be found at another rank instead of being run.
bool is_worth_it(const SpliceLaunch& launch, uint64_t least_bytes) {
  uint64_t bytes = 0;
  for (const Access& access : launch.accesses) bytes += is_numbered(access) ? access.bytes : 0;
  return bytes >= least_bytes;
}
uint64_t purpose_of(const SpliceLaunch& launch) {
  uint64_t key = XXH3_64bits(launch.name.data(), launch.name.size());
  for (const Access& access : launch.accesses) {
    if (!is_memory(access)) continue;
    const uint64_t words[] = {access.bytes, access.flags & ~kYoung};
    key = XXH3_64bits_withSeed(words, sizeof words, key);
  }
  return key;
}

class Hash {
 public:
  Hash() { XXH3_128bits_reset(&state_); }
  void add(const void* from, uint64_t bytes) { XXH3_128bits_update(&state_, from, bytes); }
  template <class T>
  void add(const T& value) {
    static_assert(std::has_unique_object_representations_v<T>);
    add(&value, sizeof value);
  }
  Contents contents() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return {hash.low64, hash.high64};
  }

 private:
  XXH3_state_t state_;
};

template <class... T>
Contents derived(const T&... from) {
  Hash hash;
  (hash.add(from), ...);
  return hash.contents();
}

}  // namespace

// One space. Offsets are from its base: equal ranks have equal offsets.
class Splicer::Member {
 public:
  uint64_t bit = 0, base = 0, bytes = 0;
  uint32_t number = 0;
  int fd = -1;
  Pending pending;
  std::atomic<bool> spliced{false}, hurried{false};
  std::atomic<bool> deals{false};  // it lends or borrows

  // Does a write to its range matter to others, or to what is known of it?
  bool concerned() const {
    return spliced.load(std::memory_order_acquire) || knows.load(std::memory_order_acquire) ||
           deals.load(std::memory_order_acquire);
  }
  bool holds(uint64_t addr, uint64_t n) const { return addr >= base && n <= bytes && addr - base <= bytes - n; }
  uint8_t* at(uint64_t offset) const { return reinterpret_cast<uint8_t*>(base + offset); }

  // pages_mu_: what is mapped from the pool, by its offset.
  struct Run {
    uint64_t end = 0, pool = 0;
  };
  std::map<uint64_t, Run> runs;
  bool all_loaded = false;  // pages_mu_: it was restored, and nobody fills it any more
  // pages_mu_: what ranges hold that have not been written since, by their offset.
  struct Held {
    uint64_t end = 0;
    Contents contents;
  };
  std::map<uint64_t, Held> held;
  std::atomic<bool> knows{false};
  std::optional<Contents> contents_of(uint64_t begin, uint64_t size) const {
    auto it = held.upper_bound(begin);
    if (it == held.begin() || (--it)->second.end < begin + size) return {};
    if (it->first == begin && it->second.end == begin + size) return it->second.contents;
    return derived(it->second.contents, begin - it->first, size);
  }
  void hold(uint64_t begin, uint64_t size, const Contents& contents) {
    forget(begin, begin + size);
    if (size < kPoolPage) return;
    held[begin] = {begin + size, contents};
    knows = true;
  }
  void forget(uint64_t begin, uint64_t end) {
    auto it = held.lower_bound(begin);
    if (it != held.begin() && std::prev(it)->second.end > begin) --it;
    while (it != held.end() && it->first < end) it = held.erase(it);
    knows = !held.empty();
  }

  // mu_
  struct Block {
    uint64_t bytes = 0, since = 0;
    bool stable = false;
    uint32_t breaks = 0;
    uint32_t equal = 0;  // launches for several that have written it since the last break, where it was not spliced
    bool is_broken() const {
      return breaks >= kMaxBreaks && equal >> std::min(breaks - kMaxBreaks, kMaxDoubled) < kForgiven;
    }
    void add_break() { breaks++, equal = 0; }
  };
  // Allocations, by address. A stable one stays when it is freed: the next step's lies in the same place.
  std::map<uint64_t, Block> blocks;
  Block* block_of(uint64_t addr, uint64_t n) {
    auto it = blocks.upper_bound(addr);
    if (it == blocks.begin()) return nullptr;
    --it;
    return addr + n <= it->first + it->second.bytes ? &it->second : nullptr;
  }
  // Blocks that were freed, by address and position: their ends.
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> freed;
  std::unordered_map<uint64_t, uint64_t> last;  // by operator and sizes: the position of the last
  struct Learned {
    uint64_t seen = 0;      // times
    uint64_t say_from = 2;  // at which times it says its hash
    std::shared_ptr<Group> group;
  };
  std::unordered_map<uint64_t, Learned> learned;  // by operator, sizes and the offsets of what is old
};

// Which stretches of a launch overlap so that it matters.
class Splicer::Layout {
 public:
  explicit Layout(const SpliceLaunch& launch) {
    for (const Access& access : launch.accesses) {
      if (!is_memory(access)) continue;
      all_.push_back({access.addr, access.addr + access.bytes});
      if (writes(access)) written_.push_back(all_.back());
    }
    for (std::vector<Stretch>* list : {&all_, &written_}) {
      std::sort(list->begin(), list->end());
      uint64_t end = 0;
      for (Stretch& one : *list) one.reach = end = std::max(end, one.end);
    }
  }
  // Is it written and something else is there, or is it read and something else is written there?
  bool collides(const Access& access) const {
    const std::vector<Stretch>& others = writes(access) ? all_ : written_;
    const auto behind = std::lower_bound(others.begin(), others.end(), Stretch{access.addr + access.bytes});
    const auto first = std::lower_bound(others.begin(), behind, Stretch{access.addr});
    if (first != others.begin() && std::prev(first)->reach > access.addr) return true;
    return behind - first > (writes(access) ? 1 : 0);  // itself
  }

 private:
  struct Stretch {
    uint64_t begin = 0, end = 0, reach = 0;  // reach: the farthest end of this and all before
    bool operator<(const Stretch& other) const { return begin < other.begin; }
  };
  std::vector<Stretch> all_, written_;
};

struct Splicer::Arrival {
  Member* member = nullptr;
  const SpliceLaunch* launch = nullptr;
  Runner* runner = nullptr;
  uint64_t seen = 0;                     // Learned::seen with it
  bool done = false, dissolved = false;  // mu_
  Status status;
};

// Ranks whose launches of one key have had equal results.
struct Splicer::Group {
  uint64_t key = 0, members = 0;
  std::vector<Arrival*> present;
  std::condition_variable come;
  bool retired = false;
  uint32_t strikes = 0, meetings = 0;
  // Learned::seen of each at one and the same launch, as far as that is known: so who has passed a launch is known.
  uint64_t aligned = 0;
  std::array<uint64_t, kMaxMembers> seen_then{};
  uint64_t spent_ns = 0, saved_ns = 0;
};

StatusOr<SpliceConfig> SpliceConfig::parse(const std::string& words) {
  SpliceConfig config;
  std::istringstream list(words);
  for (std::string word; std::getline(list, word, ',');) {
    if (word == "off") {
      config.on = false;
    } else if (word == "guard") {
      config.guard = true;
    } else if (word == "eager") {
      config.thrifty = false;
      config.least_bytes = 512;
      config.least_ns = 0;
    } else if (word == "patient") {
      config.idle_patience_ns = 20'000'000'000;
      config.patience_ns = 60'000'000'000;
    } else if (word != "on") {
      return Status(kInvalidValue, "'" + word + "' is none of on, off, guard, eager and patient");
    }
  }
  return config;
}

StatusOr<std::shared_ptr<Splicer>> Splicer::open(const SpliceConfig& config, const Engine* engine) {
  auto pool = PagePool::open();
  if (!pool.ok()) return std::move(pool).status();
  return std::shared_ptr<Splicer>(new Splicer(config, engine, std::move(*pool)));
}

Splicer::~Splicer() = default;

std::shared_ptr<Splicer::Member> Splicer::join(uint64_t base, uint64_t bytes, int memory_fd, Pending pending) {
  std::scoped_lock lock(pages_mu_, mu_);
  size_t number = 0;
  while (number < members_.size() && members_[number]) number++;
  if (number == kMaxMembers) return nullptr;
  if (number == members_.size()) members_.emplace_back();
  auto member = std::make_shared<Member>();
  member->number = static_cast<uint32_t>(number);
  member->bit = uint64_t{1} << number;
  member->base = base;
  member->bytes = bytes;
  member->fd = memory_fd;
  member->pending = std::move(pending);
  members_[number] = member;
  return member;
}

void Splicer::leave(Member& member) {
  std::unique_lock pages(pages_mu_);
  loans_.repay(member.number, 0, member.bytes);
  // Nobody is left to be told: a borrower that gets no pages has what it had.
  [[maybe_unused]] const Status ignored = settle(loans_.call_in(member.number, 0, member.bytes));
  loans_changed();
  std::lock_guard lock(mu_);
  for (const auto& group : groups_) {
    if (!(group->members & member.bit)) continue;
    dissolve(*group);
    group->members &= ~member.bit;
    group->aligned &= ~member.bit;
    if (std::popcount(group->members) < 2) group->retired = true;
  }
  for (const auto& [begin, run] : member.runs) pool_->leave(run.pool, run.end - begin, member.bit);
  member.runs.clear();
  saved_bytes_ = pool_->saved_bytes();
  for (auto& one : members_)
    if (one.get() == &member) one = nullptr;
}

SpliceCounts Splicer::counts() const {
  std::lock_guard lock(mu_);
  SpliceCounts all = counts_;
  all.compared_bytes = compared_bytes_;
  all.broken = broken_;
  all.lent_bytes = lent_bytes_;
  all.settled_bytes = settled_bytes_;
  all.saved_bytes = saved_bytes_;
  return all;
}

Splicer::Member* Splicer::at(uint64_t addr) const {
  for (const auto& member : members_)
    if (member && member->holds(addr, 0)) return member.get();
  return nullptr;
}

// -- pages (under pages_mu_) ----------------------------------------------------------------------------------------

// f(begin, end, pool address or UINT64_MAX): Status.
template <class F>
void Splicer::for_each_part(const Member& member, uint64_t begin, uint64_t end, F f) {
  auto it = member.runs.upper_bound(begin);
  if (it != member.runs.begin() && std::prev(it)->second.end > begin) --it;
  for (uint64_t at = begin; at < end;) {
    if (it == member.runs.end() || it->first >= end) return f(at, end, UINT64_MAX);
    if (it->first > at) f(at, it->first, UINT64_MAX), at = it->first;
    const uint64_t last = std::min(end, it->second.end);
    f(at, last, it->second.pool + (at - it->first));
    at = last;
    ++it;
  }
}

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

// -- what changes memory in other ways ------------------------------------------------------------------------------

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
  Status s = settle(loans_.repay(member.number, 0, member.bytes));
  if (s.ok()) s = settle(loans_.call_in(member.number, 0, member.bytes));
  loans_changed();
  return s.ok() ? own_pages(member, 0, member.bytes, true) : std::move(s);
}

// -- loans (under pages_mu_) ----------------------------------------------------------------------------------------

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
    std::memcpy(borrower.at(loan.to), members_[loan.lender]->at(loan.from), loan.bytes);
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
  if (!config_.thrifty) return true;
  if (purposes_.size() >= kMaxKeys) purposes_.clear();
  Purpose& known = purposes_[purpose];
  if (known.loans < kJudgedLoans) return true;
  const bool good = known.settled_bytes * 2 <= known.lent_bytes;
  if (!good && ++known.refused < known.refusals) return false;
  // Ranks that have not learnt yet to meet settle the first ones; so it begins with short refusals.
  const uint64_t refusals = good ? kFirstRefusals : std::min(known.refusals * 2, kMaxRefusals);
  known = {};
  known.refusals = refusals;
  return true;
}

void Splicer::lend(const Loan& loan) {
  loans_.lend(loan);
  lent_bytes_ += loan.bytes;
  Purpose& known = purposes_[loan.purpose];
  known.loans++;
  known.lent_bytes += loan.bytes;
}

// Where a result lies already.
struct Splicer::Found {
  const Access* access = nullptr;
  Contents contents;
  uint32_t lender = 0;
  uint64_t from = 0;
  const std::vector<uint8_t>* small = nullptr;
};

std::optional<std::vector<Splicer::Found>> Splicer::found_elsewhere(const Member& member, const SpliceLaunch& launch,
                                                                    const Contents& result) {
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
  const bool worth = is_worth_it(launch, config_.least_bytes);
  for (size_t i = 0; i < launch.accesses.size(); i++) {
    const Access& access = launch.accesses[i];
    if (!is_memory(access) || !writes(access) || !is_whole(access)) continue;
    const uint64_t begin = access.addr - member.base;
    const Contents contents = derived(result, i);
    if (is_numbered(access)) {
      member.hold(begin, access.bytes, contents);
      places_[contents] = {member.number, begin, access.bytes};
    } else if (worth) {
      small_[contents].assign(member.at(begin), member.at(begin + access.bytes));
    }
  }
}

void Splicer::hurry(Member& member, bool on) {
  member.hurried = on;
  if (!on) return;
  std::lock_guard lock(mu_);
  for (const auto& group : groups_)
    for (const Arrival* one : group->present)
      if (one->member == &member) {
        dissolve(*group);
        break;
      }
}

void Splicer::committed(Member& member, uint64_t addr, uint64_t bytes, uint64_t position, bool stable) {
  {
    std::lock_guard lock(mu_);
    auto it = member.blocks.lower_bound(addr);
    if (it != member.blocks.begin() && std::prev(it)->first + std::prev(it)->second.bytes > addr) --it;
    Member::Block block{bytes, position, stable};
    while (it != member.blocks.end() && it->first < addr + bytes) {
      if (stable && it->first == addr && it->second.bytes == bytes)
        block.breaks = it->second.breaks, block.equal = it->second.equal;
      it = member.blocks.erase(it);
    }
    member.blocks[addr] = block;
  }
  // What a step makes on the way is spliced already. Anything else will be its rank's own.
  if (stable || !member.spliced.load(std::memory_order_acquire)) return;
  std::lock_guard pages(pages_mu_);
  const uint64_t begin = addr - member.base;
  // A page at an edge may hold a neighbour's bytes; spliced pages do not, but this does not have to rely on it.
  [[maybe_unused]] const Status ignored = own_pages(member, begin, begin + bytes, true);
}

void Splicer::freed(Member& member, uint64_t addr, uint64_t bytes, uint64_t position) {
  if (!busy_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(mu_);
  if (member.freed.size() >= kMaxFreed) member.freed.clear();
  const auto first = member.freed.lower_bound({addr, 0}), last = member.freed.upper_bound({addr, UINT64_MAX});
  if (std::distance(first, last) >= kMaxLives) member.freed.erase(first);
  member.freed[{addr, position}] = addr + bytes;
}

void Splicer::released(Member& member, uint64_t addr) {
  std::lock_guard lock(mu_);
  if (const auto it = member.blocks.find(addr); it != member.blocks.end() && !it->second.stable)
    member.blocks.erase(it);
}

void Splicer::discard(Member& member, uint64_t addr, uint64_t bytes) {
  if (!member.concerned()) return;
  std::lock_guard pages(pages_mu_);
  member.forget(addr - member.base, addr - member.base + bytes);
  if (member.deals) {
    loans_.repay(member.number, addr - member.base, addr - member.base + bytes);
    [[maybe_unused]] const Status ignored =
        settle(loans_.call_in(member.number, addr - member.base, addr - member.base + bytes));
    loans_changed();
  }
  const uint64_t begin = ceil_page(addr - member.base), end = floor_page(addr - member.base + bytes);
  if (begin >= end) return;
  [[maybe_unused]] const Status ignored = own_pages(member, begin, end, false);
}

void Splicer::received(Member& member, uint64_t addr, uint64_t bytes, const std::array<uint64_t, 3>& operation) {
  if (!busy_.load(std::memory_order_acquire) || !member.holds(addr, bytes)) return;
  std::lock_guard pages(pages_mu_);
  member.hold(addr - member.base, bytes, derived(operation));
}

// -- restore --------------------------------------------------------------------------------------------------------

// The stretch may begin and end within a page: the last page is left to the stretch that fills it.
Status Splicer::loaded(Member& member, uint64_t addr, uint64_t bytes) {
  std::lock_guard pages(pages_mu_);
  uint64_t allocation = 0, size = 0;
  {
    std::lock_guard lock(mu_);
    const auto it = member.blocks.upper_bound(addr);
    if (it == member.blocks.begin()) return {};
    const auto& [at, block] = *std::prev(it);
    if (!block.stable || addr + bytes > at + block.bytes) return {};
    allocation = at - member.base;
    size = block.bytes;
  }
  const uint64_t begin = std::max(ceil_page(allocation), floor_page(addr - member.base));
  const uint64_t end = floor_page(addr - member.base + bytes);
  if (begin >= end || !may_splice(member, addr, bytes)) return {};
  for (const auto& other : members_) {
    if (!other || other.get() == &member || !other->all_loaded || other->bytes < end) continue;
    {
      std::lock_guard lock(mu_);
      const auto it = other->blocks.find(other->base + allocation);
      if (it == other->blocks.end() || !it->second.stable || it->second.bytes != size) continue;
    }
    compared_bytes_ += end - begin;
    if (loans_.borrowed_bytes(other->number, begin, end) != 0) continue;
    if (std::memcmp(member.at(begin), other->at(begin), end - begin) != 0) continue;
    busy_ = true;
    Status s = pool_pages(*other, begin, end);
    if (s.ok()) s = splice(*other, member, begin, end);
    saved_bytes_ = pool_->saved_bytes();
    return s;
  }
  return {};
}

void Splicer::all_loaded(Member& member) {
  std::lock_guard pages(pages_mu_);
  member.all_loaded = true;
}

// -- launches -------------------------------------------------------------------------------------------------------

Status Splicer::alone(Member& member, const SpliceLaunch& launch, Runner& runner, bool counts, bool borrows) {
  if (!busy_.load(std::memory_order_acquire)) {
    runner.begin();
    const Status done = run(member, launch, runner);
    runner.end();
    return done;
  }
  std::optional<Contents> result;
  const auto find = [&]() -> std::optional<std::vector<Found>> {
    if (!borrows || !result || !is_worth_it(launch, config_.least_bytes) || !pays(purpose_of(launch))) return {};
    return found_elsewhere(member, launch, *result);
  };
  const auto borrow_all = [&](const std::vector<Found>& found) {
    {
      std::lock_guard lock(mu_);
      counts_.squashed++;
    }
    return borrow(member, launch, found, counts);
  };
  {
    std::lock_guard pages(pages_mu_);
    Status s = settle_reads(member, launch, kPoolPage - 1);  // those count by their bytes
    if (!s.ok()) return s;
    result = result_of(member, launch);
    if (!config_.guard)
      if (const auto found = find()) return borrow_all(*found);
    if (!result || !borrows) {
      s = settle_reads(member, launch, UINT64_MAX);
      if (s.ok()) s = break_writes(member, launch, counts);
      if (!s.ok()) return s;
    }
  }
  runner.begin();
  Status done;
  if (result && borrows) {  // somebody may have computed it while this one waited for the turn
    std::lock_guard pages(pages_mu_);
    if (!config_.guard)
      if (const auto found = find()) {
        done = borrow_all(*found);
        runner.end();
        return done;
      }
    done = settle_reads(member, launch, UINT64_MAX);
    if (done.ok()) done = break_writes(member, launch, counts);
  }
  if (done.ok()) done = run(member, launch, runner);
  if (result && done.ok()) {
    std::lock_guard pages(pages_mu_);
    if (const auto found = config_.guard ? find() : std::nullopt)
      done = same_as_found(*found)
                 ? borrow(member, launch, *found, counts)
                 : Status(kLaunchFailed,
                          std::string(launch.name) + " has other results than at the rank that had them first");
    else
      keep_results(member, launch, *result);
  }
  runner.end();
  return done;
}

// Under pages_mu_: what stands for the results of the launch, where what it reads has numbers. Most launches read
// something that has none, and are through soon.
std::optional<Contents> Splicer::result_of(const Member& member, const SpliceLaunch& launch) const {
  if (!launch.repeatable) return {};
  bool counts = false;
  for (const Access& access : launch.accesses) {
    if (!is_memory(access)) continue;
    if (!member.holds(access.addr, access.bytes)) return {};
    if (!is_numbered(access)) continue;
    if (reads(access) && !member.contents_of(access.addr - member.base, access.bytes)) return {};
    counts |= writes(access) && is_whole(access);
  }
  if (!counts && !is_worth_it(launch, config_.least_bytes)) return {};
  const Layout layout(launch);
  Hash hash;
  hash.add(launch.name.data(), launch.name.size());
  hash.add(launch.digest);
  hash.add(launch.params_bytes);
  uint64_t at = 0;
  for (const Access& access : launch.accesses) {
    if (access.place < at || access.place + sizeof access.addr > launch.params_bytes) return {};
    hash.add(launch.params + at, access.place - at);
    at = access.place + sizeof access.addr;
    if (!is_memory(access)) continue;
    if (writes(access) && layout.collides(access)) return {};
    hash.add(access.bytes);
    hash.add(access.addr % kAlign);
    hash.add(access.flags & ~kYoung);
    if (!reads(access)) continue;
    const uint64_t begin = access.addr - member.base;
    if (is_numbered(access))
      hash.add(*member.contents_of(begin, access.bytes));
    else
      hash.add(member.at(begin), access.bytes);
  }
  hash.add(launch.params + at, launch.params_bytes - at);
  return hash.contents();
}

// With guard, a launch must not change what it says it only reads.
Status Splicer::run(const Member& member, const SpliceLaunch& launch, Runner& runner) const {
  if (!config_.guard) return runner.run();
  const Layout layout(launch);
  std::vector<std::pair<const Access*, uint64_t>> before;
  const auto hash = [](const Access& access) {
    return XXH3_64bits(reinterpret_cast<const void*>(access.addr), access.bytes);
  };
  for (const Access& access : launch.accesses)
    if (is_memory(access) && !writes(access) && member.holds(access.addr, access.bytes) && !layout.collides(access))
      before.emplace_back(&access, hash(access));
  Status done = runner.run();
  for (const auto& [access, was] : before)
    if (done.ok() && hash(*access) != was)
      done = {kLaunchFailed, std::string(launch.name) + " has written an argument that it says it only reads"};
  return done;
}

Status Splicer::launch(Member& member, SpliceLaunch& launch, Runner& runner) {
  uint64_t written = 0;
  bool fit = launch.repeatable;
  for (const Access& access : launch.accesses) {
    if (!is_memory(access)) continue;
    fit = fit && member.holds(access.addr, access.bytes);
    if (!writes(access)) continue;
    fit = fit && is_whole(access);
    written += access.bytes;
  }
  if (!fit || written < config_.least_bytes) return alone(member, launch, runner, true, true);

  const uint64_t purpose = purpose_of(launch);
  uint64_t key = purpose;
  std::unique_lock lock(mu_);
  if (member.last.size() >= kMaxKeys) member.last.clear();
  const uint64_t last = std::exchange(member.last[key], launch.position);
  uint64_t changed = 0, settled = 0, in_places = 0;
  for (Access& access : launch.accesses) {
    if (!is_memory(access) || !writes(access)) continue;
    const Member::Block* const block = member.block_of(access.addr, access.bytes);
    fit = fit && block;
    const bool stable = block && block->stable;
    const bool in_place = reads(access) && !(access.flags & DEVPROXY_EXECUTOR_RESETS);
    if (stable || in_place) changed += access.bytes;
    if (in_place) in_places += access.bytes;
    if (!stable && !(block && block->since < last)) {
      access.flags |= kYoung;
      continue;
    }
    const uint64_t offset = access.addr - member.base;
    key = XXH3_64bits_withSeed(&offset, sizeof offset, key);
    if (stable || in_place) settled += access.bytes;
  }
  const auto meets_others = [&] {
    const auto it = member.learned.find(key);
    return it != member.learned.end() && it->second.group && !it->second.group->retired;
  };
  // Young contents that are changed in place, where everything has a number: equal ranks are told by it.
  std::optional<Contents> number;
  if (fit && settled * 2 < changed && in_places >= config_.least_bytes && busy_.load(std::memory_order_acquire)) {
    // Those who meet judge it by their meetings. Would only one of them try without, the others waited for it.
    const bool meets = meets_others();
    lock.unlock();
    {
      std::lock_guard pages(pages_mu_);
      if (Status s = settle_reads(member, launch, kPoolPage - 1); !s.ok()) return s;
      if (meets || pays(purpose)) number = result_of(member, launch);
    }
    lock.lock();
  }
  if (!fit || changed < config_.least_bytes || (settled * 2 < changed && !number)) {
    if (meets_others()) member.learned[key].seen++;
    lock.unlock();
    return alone(member, launch, runner, true, true);
  }
  if (member.learned.size() >= kMaxKeys)
    std::erase_if(member.learned, [](const auto& item) { return !item.second.group; });
  const auto meets_nobody = [&] {
    const Member::Learned& known = member.learned[key];
    return known.seen == 0 && !known.group;
  };
  if (!number && meets_nobody() && member.spliced) {
    lock.unlock();  // pages_mu_ comes first
    const uint64_t sharers = sharers_of(member, launch);
    lock.lock();
    if (std::popcount(sharers) > 1 && meets_nobody()) member.learned[key].group = group_of(key, sharers);
  }
  Member::Learned& learned = member.learned[key];
  learned.seen++;
  if (learned.group && learned.group->retired) {
    learned.group = nullptr;
    learned.say_from = learned.seen * 2;
  }
  // Whoever has gone on alone with this number does not come again, and it is to be found there.
  const bool late = number && went_alone_.contains(*number);
  if (const std::shared_ptr<Group> group = late ? nullptr : learned.group) {
    Arrival me{&member, &launch, &runner, learned.seen, false, false, {}};
    if (meet(lock, group, me, runner)) return me.status;
    if (number) goes_alone(*number);
    lock.unlock();
    return alone(member, launch, runner, false,
                 number.has_value());  // a cut, or a slow rank: the next time may be better
  }
  const bool say = learned.seen >= learned.say_from;
  if (learned.seen >= learned.say_from + kSayTimes) learned.say_from = learned.seen * 2;
  // Another launch of the same step may have learnt faster, and have spliced what this one writes.
  const uint64_t seen = learned.seen;
  const bool counts = seen > kSayTimes;
  if (number) goes_alone(*number);
  lock.unlock();
  if (say && number) learn(member, key, seen, *number);
  const uint64_t before = now_ns();
  Status done = alone(member, launch, runner, counts, number.has_value());
  if (say && !number && done.ok() && now_ns() - before >= config_.least_ns) {
    Hash hash;
    for (const Access& access : launch.accesses)
      if (is_memory(access) && writes(access)) hash.add(reinterpret_cast<const void*>(access.addr), access.bytes);
    learn(member, key, seen, hash.contents());
  }
  return done;
}

// Under mu_.
void Splicer::goes_alone(const Contents& number) {
  if (!went_alone_.insert(number).second) return;
  alone_in_order_.push_back(number);
  if (alone_in_order_.size() <= kMaxAlone) return;
  went_alone_.erase(alone_in_order_.front());
  alone_in_order_.pop_front();
}

// Those who share all pages of what is settled and written: they may well be replicas. 0: nobody.
uint64_t Splicer::sharers_of(const Member& member, const SpliceLaunch& launch) {
  std::lock_guard pages(pages_mu_);
  uint64_t all = ~uint64_t{0};
  bool any = false;
  for (const Access& access : launch.accesses) {
    if (!is_memory(access) || !writes(access) || access.flags & kYoung) continue;
    const uint64_t begin = ceil_page(access.addr - member.base);
    const uint64_t end = floor_page(access.addr - member.base + access.bytes);
    if (begin >= end) continue;
    any = true;
    for_each_part(member, begin, end, [&](uint64_t b, uint64_t e, uint64_t pool) {
      all &= pool == UINT64_MAX ? 0 : pool_->common_sharers(pool, e - b);
    });
    if (std::popcount(all) < 2) return 0;
  }
  return any ? all : 0;
}

// Under mu_. One that has begun already may have other members: somebody has learnt better, or has left the pages.
std::shared_ptr<Splicer::Group> Splicer::group_of(uint64_t key, uint64_t members) {
  for (const auto& one : groups_)
    if (!one->retired && one->key == key && one->members & members) return one;
  auto group = std::make_shared<Group>();
  group->key = key;
  group->members = members;
  groups_.push_back(group);
  return group;
}

// said: what the launch has left, or will: equal at equal ranks.
void Splicer::learn(Member& member, uint64_t key, uint64_t seen, const Contents& contents) {
  std::lock_guard lock(mu_);
  if (said_.size() >= kMaxKeys) said_.clear();
  std::deque<Said>& said = said_[key];
  if (said.size() >= kMaxSaid) said.pop_front();
  said.push_back({member.bit, seen, contents});
  uint64_t same = 0;
  std::array<uint64_t, kMaxMembers> seen_by{};
  for (const Said& one : said)
    if (one.contents == contents) same |= one.member, seen_by[std::countr_zero(one.member)] = one.seen;
  if (same == member.bit) return;
  std::erase_if(groups_, [](const auto& group) { return group->retired && group->present.empty(); });
  std::shared_ptr<Group> group;
  for (const auto& one : groups_)
    if (!one->retired && one->key == key && one->members & same & ~member.bit) group = one;
  if (!group) {
    group = std::make_shared<Group>();
    group->key = key;
    groups_.push_back(group);
  }
  std::optional<uint64_t> since;  // launches since Group::seen_then
  if (!group->aligned) since = 0;
  for (const auto& one : members_)
    if (one && same & group->aligned & one->bit) since = seen_by[one->number] - group->seen_then[one->number];
  for (const auto& one : members_) {
    if (!one || !(same & one->bit)) continue;
    const auto it = one->learned.find(key);
    if (it == one->learned.end() || (it->second.group && !it->second.group->retired)) continue;
    it->second.group = group;
    group->members |= one->bit;
    if (!since) continue;
    group->aligned |= one->bit;
    group->seen_then[one->number] = seen_by[one->number] - *since;
  }
}

// -- meetings -------------------------------------------------------------------------------------------------------

// Under mu_. Somebody for whom it waits has passed this launch: it has run it alone, for a reason of its own.
bool Splicer::waits_in_vain(const Group& group, const Arrival& me) const {
  if (!(group.aligned & me.member->bit)) return false;
  const auto launches = [&](const Member& member, uint64_t seen) {
    return static_cast<int64_t>(seen - group.seen_then[member.number]);
  };
  uint64_t missing = group.members & group.aligned;
  for (const Arrival* one : group.present) missing &= ~one->member->bit;
  return std::any_of(members_.begin(), members_.end(), [&](const auto& one) {
    return one && missing & one->bit && launches(*one, one->learned[group.key].seen) >= launches(*me.member, me.seen);
  });
}

// Under mu_: somebody is missing who waits in another meeting for somebody who waits here.
bool Splicer::waits_for_itself(const Group& group) const {
  uint64_t here = 0;
  for (const Arrival* one : group.present) here |= one->member->bit;
  uint64_t wanted = group.members & ~here;
  for (uint64_t before = 0; before != wanted;) {
    before = wanted;
    for (const auto& other : groups_) {
      uint64_t there = 0;
      for (const Arrival* one : other->present) there |= one->member->bit;
      if (there & wanted) wanted |= other->members & ~there;
    }
  }
  return wanted & here;
}

// Under mu_. Groups wait for one another, this one among them. Those that have met least often are given up, until none does:
// ranks that come to meetings in another order are no replicas there, and other groups, which have met, are to stay.
void Splicer::break_cycles(Group& group) {
  while (!group.present.empty() && waits_for_itself(group)) {
    Group* least = &group;
    for (const auto& other : groups_)
      if (!other->present.empty() && other->meetings < least->meetings && waits_for_itself(*other)) least = other.get();
    nobody_came(*least);
  }
}

// Under mu_: all that are present go on alone.
void Splicer::dissolve(Group& group) {
  for (Arrival* one : group.present) one->dissolved = true;
  if (!group.present.empty()) counts_.given_up++;
  group.present.clear();
  group.come.notify_all();
}

// Under mu_: this time. That cost nothing, so it may yet do.
void Splicer::passed_by(Group& group) {
  const uint32_t most = group.meetings >= kProvenMeetings ? kMaxProvenStrikes : kMaxStrikes;
  ++group.strikes >= most ? retire(group) : dissolve(group);
}

void Splicer::nobody_came(Group& group) { group.meetings == 0 ? retire(group) : passed_by(group); }

void Splicer::retire(Group& group) {
  dissolve(group);
  group.retired = true;
}

// True: the launch has been run. lock is of mu_, and held again afterwards.
bool Splicer::meet(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Group>& group, Arrival& me,
                   Runner& runner) {
  uint64_t here = me.member->bit;
  for (const Arrival* one : group->present) {
    if (one->member == me.member) return false;
    here |= one->member->bit;
  }
  group->present.push_back(&me);
  if (here == group->members) {
    const std::vector<Arrival*> all = std::exchange(group->present, {});
    lock.unlock();
    uint64_t spent_ns = 0, run_ns = 0;
    const bool equal = run_for_all(all, me, runner, &spent_ns, &run_ns);
    lock.lock();
    for (Arrival* one : all) {
      if (one != &me) one->status = me.status;
      (equal ? one->done : one->dissolved) = true;
    }
    group->come.notify_all();
    counts_.validations++;
    group->aligned = here;
    for (const Arrival* one : all) group->seen_then[one->member->number] = one->seen;
    if (equal) {
      counts_.squashed += all.size() - 1;
      group->strikes = 0;
      // The first times it maps pages, which pays later or never.
      if (++group->meetings > kFreeMeetings) {
        group->spent_ns += spent_ns + kMeetingNs * all.size();
        group->saved_ns += run_ns * (all.size() - 1);
      }
      if (config_.thrifty && group->meetings % kJudgedMeetings == 0) {
        if (group->spent_ns > group->saved_ns)
          retire(*group);
        else
          group->spent_ns = group->saved_ns = 0;
      }
    } else {
      counts_.different++;
      retire(*group);
    }
    return equal;
  }
  if (waits_in_vain(*group, me)) passed_by(*group);
  break_cycles(*group);
  if (me.dissolved) return false;
  runner.yield();
  const uint64_t start = now_ns();
  uint64_t idle_since = 0;
  while (!me.done && !me.dissolved) {
    group->come.wait_for(lock, std::chrono::nanoseconds(kLookNs));
    if (std::find(group->present.begin(), group->present.end(), &me) == group->present.end()) continue;
    const uint64_t now = now_ns();
    const bool idle = !engine_ || engine_->idle();
    if (!idle) idle_since = 0;
    if (idle && idle_since == 0) idle_since = now;
    // The GPU could have run this launch meanwhile.
    if (idle && group->present.front() == &me && group->meetings >= kFreeMeetings) group->spent_ns += kLookNs;
    if (waits_in_vain(*group, me))
      passed_by(*group);
    else if (me.member->hurried || now - start >= config_.patience_ns ||
             (idle && now - idle_since >= config_.idle_patience_ns))
      nobody_came(*group);
  }
  return me.done;
}

bool Splicer::run_for_all(const std::vector<Arrival*>& all, Arrival& me, Runner& runner, uint64_t* spent_ns,
                          uint64_t* run_ns) {
  runner.begin();
  std::unique_lock pages(pages_mu_);
  const uint64_t start = now_ns();
  StatusOr<bool> same = equal(all, me);
  if (!same.ok()) {
    me.status = same.status();
  } else if (*same) {
    Arrival& lead = lead_of(all, me);
    me.status = run_at(lead, all, run_ns);
    if (me.status.ok()) me.status = hand_out(all, lead);
    loans_changed();
    saved_bytes_ = pool_->saved_bytes();
    busy_ = true;
  }
  *spent_ns = now_ns() - start - *run_ns;
  pages.unlock();
  runner.end();
  return !same.ok() || *same;
}

// Whoever has borrowed least of what is read: its copy is not needed then.
Splicer::Arrival& Splicer::lead_of(const std::vector<Arrival*>& all, Arrival& me) const {
  Arrival* lead = &me;
  uint64_t least = UINT64_MAX;
  for (Arrival* one : all) {
    uint64_t borrowed = 0;
    for (const Access& access : one->launch->accesses)
      if (is_memory(access) && reads(access)) {
        const uint64_t begin = access.addr - one->member->base;
        borrowed += loans_.borrowed_bytes(one->member->number, begin, begin + access.bytes);
      }
    if (borrowed < least || (borrowed == least && one == &me)) least = borrowed, lead = one;
  }
  return *lead;
}

// By this thread, whose turn it is. Those who have come wait for it, so the lead's runner is its own.
Status Splicer::run_at(Arrival& lead, const std::vector<Arrival*>& all, uint64_t* run_ns) {
  if (config_.guard)
    if (Status s = check_numbers(all, lead); !s.ok()) return s;
  Member& own = *lead.member;
  Status status = settle_reads(own, *lead.launch, UINT64_MAX);
  const auto for_each_written = [&](auto f) {
    for (const Access& access : lead.launch->accesses) {
      if (!is_memory(access) || !writes(access)) continue;
      const auto place = static_cast<size_t>(&access - lead.launch->accesses.data());
      for (const Arrival* one : all) f(access, *one->member, one->launch->accesses[place].addr - one->member->base);
    }
  };
  // A launch that fails may have written a part of it. Each one's is written as a whole, so what was borrowed goes.
  std::vector<Loan> dropped;
  for_each_written([&](const Access& access, Member& member, uint64_t there) {
    member.forget(there, there + access.bytes);
    for (const Loan& loan : loans_.repay(member.number, there, there + access.bytes)) dropped.push_back(loan);
  });
  for_each_written([&](const Access& access, Member& member, uint64_t there) {
    if (status.ok()) status = settle(loans_.call_in(member.number, there, there + access.bytes));
  });
  uint64_t everybody = 0;
  for (const Arrival* one : all) everybody |= one->member->bit;
  for (const Access& access : lead.launch->accesses) {
    if (!is_memory(access) || !writes(access)) continue;
    // What is young may lie elsewhere at the others, and somebody may show these pages who writes other ones.
    const uint64_t writers = access.flags & kYoung ? own.bit : everybody;
    std::vector<std::pair<uint64_t, uint64_t>> others;
    const uint64_t begin = access.addr - own.base;
    for_each_part(own, floor_page(begin), ceil_page(begin + access.bytes), [&](uint64_t b, uint64_t e, uint64_t pool) {
      if (pool != UINT64_MAX && pool_->sharers(pool, e - b) & ~writers) others.emplace_back(b, e);
    });
    for (const auto& [b, e] : others)
      if (status.ok()) status = own_pages(own, b, e, true);
  }
  if (status.ok()) {
    guard(own, *lead.launch, false);
    const uint64_t before = now_ns();
    status = run(own, *lead.launch, *lead.runner);
    *run_ns = now_ns() - before;
    guard(own, *lead.launch, true);
  }
  // Each rank has then what its own launch would have left that failed at the same place.
  if (!status.ok()) [[maybe_unused]]
    const Status ignored = settle(dropped);
  return status;
}

// With guard: what is known to be equal is.
Status Splicer::check_numbers(const std::vector<Arrival*>& all, const Arrival& me) const {
  const auto is_there = [&](const Arrival& one, size_t i) {
    const Access& access = one.launch->accesses[i];
    const uint64_t begin = access.addr - one.member->base;
    return loans_.borrowed_bytes(one.member->number, begin, begin + access.bytes) == 0;
  };
  for (size_t i = 0; i < me.launch->accesses.size(); i++) {
    const Access& access = me.launch->accesses[i];
    if (!is_numbered(access) || !reads(access) || !is_there(me, i)) continue;
    for (const Arrival* one : all)
      if (known_equal(me, *one, i) && is_there(*one, i) &&
          std::memcmp(reinterpret_cast<const void*>(access.addr),
                      reinterpret_cast<const void*>(one->launch->accesses[i].addr), access.bytes) != 0)
        return {kLaunchFailed, std::string(me.launch->name) + " reads contents of one number that differ"};
  }
  return {};
}

// The same but for contents. What is settled and written lies at the same offsets. What is young or only read may lie
// elsewhere, but then it has nothing to do with what is written.
bool Splicer::same_launch(const Arrival& first, const Arrival& second) {
  const SpliceLaunch &a = *first.launch, &b = *second.launch;
  if (a.name != b.name || a.digest != b.digest || a.params_bytes != b.params_bytes ||
      a.accesses.size() != b.accesses.size())
    return false;
  uint64_t at = 0;
  bool moved = false;
  for (size_t i = 0; i < a.accesses.size(); i++) {
    const Access &x = a.accesses[i], &y = b.accesses[i];
    if (x.place != y.place || x.flags != y.flags || x.bytes != y.bytes || x.place < at) return false;
    if (std::memcmp(a.params + at, b.params + at, x.place - at) != 0) return false;
    at = x.place + 8;
    if (!is_memory(x)) continue;
    if ((x.addr - y.addr) % kAlign != 0) return false;
    if (x.addr - first.member->base == y.addr - second.member->base) continue;
    if (writes(x) && !(x.flags & kYoung)) return false;
    moved = true;
  }
  if (at > a.params_bytes || std::memcmp(a.params + at, b.params + at, a.params_bytes - at) != 0) return false;
  if (!moved) return true;
  const Layout here(a), there(b);
  for (size_t i = 0; i < a.accesses.size(); i++) {
    const Access &x = a.accesses[i], &y = b.accesses[i];
    if (!is_memory(x) || x.addr - first.member->base == y.addr - second.member->base) continue;
    if (here.collides(x) || there.collides(y)) return false;
  }
  return true;
}

StatusOr<bool> Splicer::equal(const std::vector<Arrival*>& all, const Arrival& me) {
  const SpliceLaunch& a = *me.launch;
  for (const Arrival* one : all)
    if (one != &me && !same_launch(me, *one)) return false;
  // Not what is known already, or named twice.
  std::vector<bool> skip(a.accesses.size(), false);
  std::map<uint64_t, std::pair<uint64_t, size_t>> seen;  // address: bytes, place in the list
  for (size_t i = 0; i < a.accesses.size(); i++) {
    const Access& access = a.accesses[i];
    skip[i] = !is_memory(access) || !reads(access);
    if (skip[i]) continue;
    const auto [it, is_new] = seen.try_emplace(access.addr, access.bytes, i);
    if (is_new || it->second.first != access.bytes) continue;
    skip[i] = std::all_of(all.begin(), all.end(), [&](const Arrival* one) {
      return one->launch->accesses[i].addr == one->launch->accesses[it->second.second].addr;
    });
  }
  for (const Arrival* one : all)
    for (size_t i = 0; one != &me && i < a.accesses.size(); i++) {
      if (skip[i] || known_equal(me, *one, i)) continue;
      for (const Arrival* either : {&me, one}) {
        const uint64_t begin = either->launch->accesses[i].addr - either->member->base;
        if (Status s = settle(loans_.repay(either->member->number, begin, begin + a.accesses[i].bytes)); !s.ok())
          return s;
      }
      if (!same_contents(me, *one, i)) return false;
    }
  // What the launch only reads need not be compared again.
  for (size_t i = 0; i < a.accesses.size(); i++) {
    if (skip[i] || writes(a.accesses[i]) || !is_numbered(a.accesses[i])) continue;
    if (std::all_of(all.begin(), all.end(), [&](const Arrival* one) { return known_equal(me, *one, i); })) continue;
    const Contents contents{++numbers_, 0};
    for (const Arrival* one : all)
      one->member->hold(one->launch->accesses[i].addr - one->member->base, a.accesses[i].bytes, contents);
  }
  return true;
}

// Compares what the two do not share.
bool Splicer::same_contents(const Arrival& a, const Arrival& b, size_t access) {
  const Access& here = a.launch->accesses[access];
  const uint64_t begin = here.addr - a.member->base, there = b.launch->accesses[access].addr - b.member->base;
  uint64_t compared = 0;
  bool same = true;
  const auto compare = [&](uint64_t x, uint64_t y, uint64_t bytes) {
    compared += bytes;
    same = same && std::memcmp(a.member->at(x), b.member->at(y), bytes) == 0;
  };
  if (begin != there) {
    compare(begin, there, here.bytes);
  } else {
    for_each_part(*a.member, begin, begin + here.bytes, [&](uint64_t first, uint64_t end, uint64_t pool) {
      for_each_part(*b.member, first, end, [&](uint64_t from, uint64_t to, uint64_t other) {
        if (same && (pool == UINT64_MAX || other != pool + (from - first))) compare(from, from, to - from);
      });
    });
  }
  compared_bytes_ += compared;
  return same;
}

bool Splicer::known_equal(const Arrival& a, const Arrival& b, size_t access) {
  const Access &x = a.launch->accesses[access], &y = b.launch->accesses[access];
  if (!is_numbered(x)) return false;
  const auto known = a.member->contents_of(x.addr - a.member->base, x.bytes);
  return known && known == b.member->contents_of(y.addr - b.member->base, y.bytes);
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

// What the launch has written, to those for whom it ran.
Status Splicer::hand_out(const std::vector<Arrival*>& all, const Arrival& lead) {
  Member& from = *lead.member;
  const uint64_t purpose = purpose_of(*lead.launch);
  const bool lends = pays(purpose);
  for (const Access& access : lead.launch->accesses) {
    if (!is_memory(access) || !writes(access)) continue;
    const uint64_t begin = access.addr - from.base, end = begin + access.bytes;
    const auto place = static_cast<size_t>(&access - lead.launch->accesses.data());
    const Contents contents{++numbers_, 0};
    for (const Arrival* one : all) {
      const uint64_t there = one->launch->accesses[place].addr - one->member->base;
      one->member->hold(there, access.bytes, contents);
      if (one == &lead || !(access.flags & kYoung)) continue;
      if (lends && is_numbered(access)) {
        if (config_.guard) {
          if (Status s = own_pages(*one->member, there, there + access.bytes, true); !s.ok()) return s;
          std::memset(one->member->at(there), 0xdb, access.bytes);
        }
        lend({from.number, one->member->number, begin, there, access.bytes, purpose, one->launch->position});
        continue;
      }
      if (std::memcmp(one->member->at(there), from.at(begin), access.bytes) == 0) continue;
      if (Status s = own_pages(*one->member, there, there + access.bytes, true); !s.ok()) return s;
      std::memcpy(one->member->at(there), from.at(begin), access.bytes);
    }
    if (access.flags & kYoung) continue;
    uint64_t first = ceil_page(begin), last = floor_page(end);
    bool spliced = first < last;
    for (const Arrival* one : all)  // asks all of them: each counts
      if (!may_splice(*one->member, begin + one->member->base, access.bytes)) spliced = false;
    if (spliced) {
      if (Status s = pool_pages(from, first, last); !s.ok()) return s;
    } else {
      first = last = begin;  // copy all of it
    }
    for (const Arrival* one : all) {
      if (one == &lead) continue;
      Status s = copy(from, *one->member, begin, first);
      if (s.ok() && first < last) s = splice(from, *one->member, first, last);
      if (s.ok()) s = copy(from, *one->member, last, end);
      if (!s.ok()) return s;
    }
  }
  return {};
}

}  // namespace devproxy::hal::soft
