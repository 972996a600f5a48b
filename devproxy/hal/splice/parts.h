// SPDX-License-Identifier: Apache-2.0
// What the files of the splicer share (splicer.h says how it works): who takes part, what is known of each, and how a launch's
// accesses are read.
//   splicer.cc   who comes and goes, what a space says of its memory, restores
//   pages.cc     which pages a range shows
//   writes.cc    what reads and writes in other ways than by a launch
//   lending.cc   what a rank has borrowed, and what is to be found at others
//   launches.cc  a launch, and what is learnt from it
//   homes.cc     which buffers of ranks correspond where their offsets differ
//   meetings.cc  launches that wait for one another, and run once for several
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include "devproxy/hal/splice/splicer.h"

namespace devproxy::hal::splice {

inline constexpr size_t kMaxMembers = 64;  // bits of a page's sharers
inline constexpr uint32_t kMaxBreaks = 2;  // memory that its rank has changed alone so often is copied for a while
// So many launches for several, twice as many with each time that it is changed again.
inline constexpr uint32_t kForgiven = 8, kMaxDoubled = 20;
inline constexpr uint32_t kMaxStrikes = 2;  // meetings in a row to which somebody did not come
inline constexpr uint32_t kProvenMeetings = 16, kMaxProvenStrikes = 6;  // where so many have met, it may be a pause
inline constexpr uint64_t kSayTimes = 4;  // in a row, so that ranks that are one step apart find each other
inline constexpr uint64_t kLookNs = 2'000'000;
inline constexpr size_t kMaxKeys = 8192, kMaxSaid = 256;
inline constexpr size_t kMaxRuns = 20000;  // of all members; the kernel allows a process 65,530 mappings
inline constexpr uint32_t kFreeMeetings = 2, kJudgedMeetings = 10;
inline constexpr uint64_t kKeptBytes = 1 << 20;
inline constexpr uint64_t kKeepsPatience = 10;  // times idle_patience_ns, where pages would be copied
inline constexpr uint64_t kMeetingNs = 30'000;  // of each that comes: two switches between threads
inline constexpr uint64_t kRounding = 4096;     // of an allocation's bytes
inline constexpr uint64_t kAlign = 64;          // bytes; operators may go by it
inline constexpr size_t kMaxPlaces = 32768, kMaxSmall = 4096, kMaxFreed = 65536, kLookBack = 64, kMaxAlone = 1024;
inline constexpr uint32_t kPrivateHomes = 56;  // the first bit of homes that no other rank has
inline constexpr size_t kMaxAlike = 16;        // of a block, that are looked at in a restore
inline constexpr ptrdiff_t kMaxLives = 16;     // of one place, that are remembered
inline constexpr uint64_t kJudgedLoans = 1000, kFirstRefusals = 8, kMaxRefusals = 4096;  // of a kind of launch

inline bool writes(const Access& access) { return access.flags & DEVPROXY_EXECUTOR_WRITES; }
inline bool reads(const Access& access) { return access.flags & DEVPROXY_EXECUTOR_READS; }
inline bool is_memory(const Access& access) { return !(access.flags & DEVPROXY_EXECUTOR_NUMBER); }
inline bool is_whole(const Access& access) { return access.flags & DEVPROXY_EXECUTOR_WHOLE; }
inline uint64_t bytes_of(const SpliceLaunch& launch) {
  uint64_t bytes = 0;
  for (const Access& access : launch.accesses) bytes += is_memory(access) ? access.bytes : 0;
  return bytes;
}
inline uint64_t purpose_of(const SpliceLaunch& launch) {
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

// One space. Offsets are from its base.
class Splicer::Member {
 public:
  uint64_t bit = 0, base = 0, bytes = 0;
  uint32_t number = 0;
  uint64_t least_numbered = 0;
  std::unique_ptr<RankMemory> memory;
  Pending pending;
  std::atomic<bool> spliced{false}, hurried{false};
  std::atomic<uint64_t> launches{0};
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
    if (size < least_numbered || size == 0) return;
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
    bool agreed = false;  // a launch for several has written or read all of it since anybody wrote there alone
    uint32_t equal = 0;   // launches for several that have written it since the last break, where it was not spliced
    uint64_t shift = 0;   // from its offset to its home, modulo 2^64
    bool placed = false;  // it has been equal to what has that home elsewhere, and nobody has written there alone since
    bool is_broken() const {
      return breaks >= kMaxBreaks && equal >> std::min(breaks - kMaxBreaks, kMaxDoubled) < kForgiven;
    }
    void add_break() { breaks++, equal = 0, placed = false; }
  };
  // Allocations, by address. A stable one stays when it is freed: the next step's lies in the same place.
  std::map<uint64_t, Block> blocks;
  std::map<uint64_t, Block>::const_iterator around(uint64_t addr, uint64_t n) const {
    auto it = blocks.upper_bound(addr);
    if (it == blocks.begin()) return blocks.end();
    --it;
    return addr + n <= it->first + it->second.bytes ? it : blocks.end();
  }
  Block* block_of(uint64_t addr, uint64_t n) {
    const auto it = around(addr, n);
    return it == blocks.end() ? nullptr : const_cast<Block*>(&it->second);
  }
  // Where a block is said to lie when launches are compared. Ranks that run one program have equal offsets mostly, so it lies
  // where it lies; where one has more buffers than the others, homes are learnt (correspond()). Wrong ones cost only time.
  uint64_t home_of(const Block& block, uint64_t addr) const { return addr - base + block.shift; }
  // By the offsets of blocks: they get these homes, and none of the member's others has those. False: one that is placed has, or
  // a block itself is placed elsewhere.
  bool move_homes(const std::map<uint64_t, uint64_t>& homes);
  // Is all of a block in the range, but for what its size was rounded up by?
  bool covers_block(uint64_t addr, uint64_t n) const {
    const auto it = blocks.find(addr);
    return it != blocks.end() && n <= it->second.bytes && it->second.bytes - n < kRounding;
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
  uint64_t key = 0, alike = 0, members = 0;  // alike: Settled's
  uint32_t asked = 0;  // its next launches say what they have left: a rank that came to it late has said that of one
  std::vector<Arrival*> present;
  std::condition_variable come;
  bool retired = false;
  uint32_t strikes = 0, meetings = 0;
  // Learned::seen of each at one and the same launch, as far as that is known: so who has passed a launch is known.
  uint64_t aligned = 0;
  std::array<uint64_t, kMaxMembers> seen_then{};
  // Which launch of the key a member's is, counted from that one.
  int64_t round(uint32_t member, uint64_t seen) const { return static_cast<int64_t>(seen - seen_then[member]); }
  int64_t struck = INT64_MIN;  // the last round that was a strike
  uint64_t spent_ns = 0, saved_ns = 0;
  // Of the pages that the last launch for all has left all of them. Written by each alone they are copied, and the memory is
  // what splicing is for: such a group is not judged by its time. What all of it costs, the account judges.
  uint64_t kept_bytes = 0;
  bool keeps() const { return kept_bytes >= kKeptBytes; }
};

// Where a result lies already.
struct Splicer::Found {
  const Access* access = nullptr;
  Contents contents;
  uint32_t lender = 0;
  uint64_t from = 0;
  const std::vector<uint8_t>* small = nullptr;
};

// -- pages

// Offsets of two ranks that could show one page.
inline bool in_phase(uint64_t a, uint64_t b, uint64_t page) { return (a - b) % page == 0; }

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

}  // namespace devproxy::hal::splice
