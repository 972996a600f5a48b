// SPDX-License-Identifier: Apache-2.0
// Splicing (hal/splice): ranks that run mostly equal programs on one GPU, against the same programs run alone. Every
// rank's memory is what it would be by itself, whatever is spliced and broken on the way. Under TSan.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/hal/soft/soft_pages.h"
#include "devproxy/hal/splice/splicer.h"

using namespace devproxy;
using namespace devproxy::hal;
using namespace devproxy::hal::splice;
using devproxy::hal::soft::SoftPages;

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition); \
      std::_Exit(1);                                                         \
    }                                                                        \
  } while (0)

namespace {

void ok(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.text().c_str());
  std::_Exit(1);
}

constexpr uint64_t kPage = 4096, kBlocks = 12, kBlock = 5 * kPage + 512, kYoungs = 4, kBytes = 120 * kPage;
constexpr uint64_t kDerived = 4, kNorm = 512;
constexpr uint32_t kReads = DEVPROXY_EXECUTOR_READS, kMakes = DEVPROXY_EXECUTOR_WRITES | DEVPROXY_EXECUTOR_WHOLE;
constexpr uint32_t kRW = DEVPROXY_EXECUTOR_READS | DEVPROXY_EXECUTOR_WRITES | DEVPROXY_EXECUTOR_WHOLE;

uint64_t offset_of(uint64_t block) { return block * kBlock + 512; }  // neighbours share pages

// What a step takes and changes, and what lies elsewhere each time: as gradients.
uint64_t young_of(uint32_t rank, uint64_t number) { return kBlocks + (rank + number) % kYoungs; }

// What is made of a block anew each time, and what is small of it.
uint64_t derived_of(uint32_t rank, uint64_t number, uint64_t block) {
  return kBlocks + kYoungs + (rank + number + block / 4) % kDerived;
}
uint64_t norm_of() { return offset_of(kBlocks + kYoungs + kDerived); }

// What a rank does next. Equal ranks have equal lists, but for what is odd.
struct Op {
  enum Kind { kUpdate, kCopy, kFill, kShare, kOpaque, kRenew, kFlip, kBarrier, kDerive, kRead, kPeek } kind;
  uint64_t block, other;  // updated by what is read of the other
  uint64_t number;        // an argument
  uint64_t at, bytes;     // of a copy
};

// What touches every byte says so to TSan as a range and is not watched itself: watched byte by byte it took four fifths of
// this program's time.
#ifdef DEVPROXY_TSAN
extern "C" void __tsan_read_range(const void* from, unsigned long bytes);
extern "C" void __tsan_write_range(void* to, unsigned long bytes);
#define BY_RANGES __attribute__((no_sanitize("thread"), noinline))
void reads(const void* from, uint64_t bytes) { __tsan_read_range(from, bytes); }
void writes(void* to, uint64_t bytes) { __tsan_write_range(to, bytes); }
#else
#define BY_RANGES
void reads(const void*, uint64_t) {}
void writes(void*, uint64_t) {}
#endif

// The update, on any memory: depends on every byte that it reads.
BY_RANGES void update(uint8_t* block, const uint8_t* other, uint64_t number, uint8_t* young = nullptr) {
  reads(other, kBlock);
  writes(block, kBlock);
  if (young) number % 4 ? writes(young, kBlock) : reads(young, kBlock);
  uint64_t mix = number;
  for (uint64_t i = 0; i < kBlock; i += 64) mix = mix * 31 + other[i];
  for (uint64_t i = 0; i < kBlock; i++) block[i] = static_cast<uint8_t>(block[i] * 5 + other[i] + (mix >> (i % 57)));
  for (uint64_t i = 0; young && i < kBlock; i++) {
    block[i] = static_cast<uint8_t>(block[i] + young[i]);
    if (number % 4) young[i] = static_cast<uint8_t>(young[i] * 3 + 1);
  }
}

BY_RANGES uint64_t sum_of(const uint8_t* block, uint64_t bytes = kBlock) {
  reads(block, bytes);
  uint64_t sum = 1;
  for (uint64_t i = 0; i < bytes; i++) sum = sum * 31 + block[i];
  return sum;
}
BY_RANGES void derive(uint8_t* to, const uint8_t* from, uint64_t number) {
  reads(from, kBlock);
  writes(to, kBlock);
  for (uint64_t i = 0; i < kBlock; i++) to[i] = static_cast<uint8_t>(from[i] * 7 + number);
}
void mix(uint8_t* to, const uint8_t* block, const uint8_t* part) {
  const uint64_t sum = sum_of(block) + sum_of(part, 64);
  std::memcpy(to, &sum, sizeof sum);
}
BY_RANGES void scale(uint8_t* block, const uint8_t* norm) {
  reads(norm, 8);
  writes(block, kBlock);
  for (uint64_t i = 0; i < kBlock; i++) block[i] = static_cast<uint8_t>(block[i] * 3 + norm[i % 8]);
}
void norm(uint8_t* to, const uint8_t* block, uint64_t bytes = kBlock) {
  const uint64_t sum = sum_of(block, bytes);
  std::memcpy(to, &sum, sizeof sum);
}

BY_RANGES void flip(uint8_t* block, uint64_t number) {
  writes(block, kBlock);
  for (uint64_t i = 0; i < kBlock; i++) block[i] ^= static_cast<uint8_t>(number);
}

// A rank whose pages are mapped slowly, as those of a large range are.
struct SlowPages final : RankMemory {
  std::unique_ptr<RankMemory> pages;
  std::atomic<uint64_t>& delay_us;
  SlowPages(std::unique_ptr<RankMemory> pages, std::atomic<uint64_t>& delay_us)
      : pages(std::move(pages)), delay_us(delay_us) {}
  Status give(uint64_t begin, uint64_t end, uint64_t pool_at) override { return pages->give(begin, end, pool_at); }
  Status show(uint64_t begin, uint64_t end, uint64_t pool_at, RankMemory& from, uint64_t from_begin) override {
    usleep(static_cast<useconds_t>(delay_us));
    return pages->show(begin, end, pool_at, *static_cast<SlowPages&>(from).pages, from_begin);
  }
  Status own(uint64_t begin, uint64_t end, bool contents) override { return pages->own(begin, end, contents); }
  void protect(uint64_t begin, uint64_t end, bool on) override { pages->protect(begin, end, on); }
};

std::atomic<uint64_t> mapping_us{0};  // of each range that a rank is shown

struct Rank {
  uint8_t* base = nullptr;
  int fd = -1;
  std::shared_ptr<Splicer::Member> member;
  std::vector<uint8_t> alone = std::vector<uint8_t>(kBytes);  // what its memory would be by itself
  std::vector<Op> program;
  uint64_t position = 0;
  uint64_t seen = 0, expected = 0;  // a hash of what it has read
  bool pending = false;             // it says that there are commands that may touch what it has freed
  uint64_t shift = 0;               // of all that it has, beside where others have it
  bool swaps = false;               // and each eighth block lies where others have another one

  uint64_t place(uint64_t block) const {
    if (swaps && block < kBlocks && (block % 8 < kBlocks - 8)) block ^= 8;
    return offset_of(block) + shift;
  }
  uint64_t place_of_norm() const { return norm_of() + shift; }

  void open(Splicer& splicer) {
    fd = memfd_create("rank", MFD_CLOEXEC);
    CHECK(ftruncate(fd, kBytes) == 0);
    base = static_cast<uint8_t*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    CHECK(base != MAP_FAILED);
    auto pages = static_cast<SoftPages&>(splicer.physical()).rank(at(0), fd);
    member = splicer.join(at(0), kBytes, std::make_unique<SlowPages>(std::move(pages), mapping_us),
                          [this](auto...) { return pending; });
    CHECK(member);
    for (uint64_t block = 0; block < kBlocks + kYoungs + kDerived; block++)
      splicer.committed(*member, at(place(block)), kBlock, position, false);
    splicer.committed(*member, at(place_of_norm()), kNorm, position, false);
  }
  void free(Splicer& splicer, uint64_t addr, uint64_t last) {
    splicer.freed(*member, addr, kBlock, last);
    splicer.released(*member, addr);
  }
  // Like a copy to the host. Not of what was made on the way, and is freed.
  bool is_as_alone(Splicer& splicer) const {
    const uint64_t bytes = offset_of(kBlocks + kYoungs);
    ok(splicer.before_read(at(shift), bytes));
    ok(splicer.before_read(at(place_of_norm()), 16));
    return std::memcmp(base + shift, alone.data() + shift, bytes) == 0 &&
           std::memcmp(base + place_of_norm(), alone.data() + place_of_norm(), 16) == 0;
  }
  // Comes with contents, as from an image: by stretches that end between two pages. odd: so many blocks of a thousand are
  // like nobody's.
  void load(Splicer& splicer, uint32_t number, uint32_t odd, std::mt19937& dice) {
    for (uint64_t block = 0; block < kBlocks; block++) {
      const uint64_t begin = place(block), end = begin + kBlock;
      for (uint64_t i = begin; i < end; i++) alone[i] = static_cast<uint8_t>((i - begin) * 7 + block * 3);
      if (dice() % 1000 < odd) alone[begin + dice() % kBlock] = static_cast<uint8_t>(number);
      splicer.committed(*member, at(begin), kBlock, position, true);
      for (uint64_t from = begin; from < end;) {
        const uint64_t to = std::min(end, ((from + kPage) & ~(kPage - 1)) + dice() % 3 * kPage);
        std::memcpy(base + from, alone.data() + from, to - from);
        ok(splicer.loaded(*member, at(from), to - from));
        from = to;
      }
    }
    splicer.all_loaded(*member);
    CHECK(std::memcmp(base, alone.data(), kBytes) == 0);
  }
  void close(Splicer& splicer) {
    splicer.leave(*member);
    munmap(base, kBytes);
    ::close(fd);
  }
  uint64_t at(uint64_t offset) const { return reinterpret_cast<uint64_t>(base) + offset; }
};

struct Here final : Runner {
  Engine& engine;
  uint32_t seat;
  Engine::Turn turn;
  uint8_t *block = nullptr, *other = nullptr, *young = nullptr;
  uint64_t number = 0;
  std::function<void()> what;  // instead
  std::atomic<uint64_t>& runs;
  Here(Engine& engine, uint32_t seat, std::atomic<uint64_t>& runs) : engine(engine), seat(seat), runs(runs) {}
  void begin() override { engine.begin(seat, turn); }
  Status run() override {
    if (what)
      what();
    else
      other ? update(block, other, number, young) : flip(block, number);
    runs++;
    return {};
  }
  void end() override { engine.end(turn); }
  void yield() override { engine.yield(turn); }
};

// All of it, or every other byte as in rows.
void copy_in(uint8_t* to, const Op& op) {
  for (uint64_t i = 0; i < op.bytes; i += 1 + op.number % 2) to[i] = static_cast<uint8_t>(op.number);
}

void apply(const Op& op, uint32_t rank, Rank& of) {
  std::vector<uint8_t>& memory = of.alone;
  uint8_t* const block = memory.data() + of.place(op.block);
  switch (op.kind) {
    case Op::kUpdate: {
      uint8_t* const young = memory.data() + of.place(young_of(rank, op.number));
      std::memset(young, static_cast<int>(op.number), kBlock);
      return update(block, memory.data() + of.place(op.other), op.number, young);
    }
    case Op::kFlip: return flip(block, op.number);
    case Op::kOpaque: return update(block, memory.data() + of.place(op.other), op.number + rank);
    case Op::kCopy: return copy_in(block + op.at, op);
    case Op::kFill:
    case Op::kRenew: std::memset(block, static_cast<int>(op.number), kBlock); return;
    case Op::kDerive: {
      uint8_t* const made = memory.data() + of.place(derived_of(rank, op.number, op.block));
      derive(made, memory.data() + of.place(op.other), op.number);
      norm(memory.data() + of.place_of_norm(), made);
      mix(memory.data() + of.place_of_norm() + 8, memory.data() + of.place(op.other), made);
      if (op.number % 3) scale(made, memory.data() + of.place_of_norm());
      return update(block, made, op.number);
    }
    case Op::kPeek: return norm(memory.data() + of.place_of_norm(), block + op.at, op.bytes);
    case Op::kRead:
    case Op::kShare:
    case Op::kBarrier: return;
  }
}

// A launch of an operator whose arguments are its accesses, after the numbers.
struct Simple {
  std::vector<uint64_t> params;
  SpliceLaunch launch;
  Simple(const char* name, std::vector<uint64_t> numbers, std::vector<Access> accesses, Rank& rank)
      : params(std::move(numbers)) {
    for (Access& access : accesses) {
      access.place = static_cast<uint32_t>(params.size() * sizeof(uint64_t));
      params.push_back(access.addr);
    }
    launch.name = name;
    launch.params = reinterpret_cast<const uint8_t*>(params.data());
    launch.params_bytes = params.size() * sizeof(uint64_t);
    launch.position = ++rank.position;
    launch.repeatable = true;
    launch.accesses = std::move(accesses);
  }
};

void launch_simple(const char* name, std::vector<Access> accesses, uint64_t number, Rank& rank, Splicer& splicer,
                   Here& here, std::function<void()> what) {
  Simple simple(name, {number}, std::move(accesses), rank);
  here.what = std::move(what);
  ok(splicer.launch(*rank.member, simple.launch, here));
  here.what = nullptr;
}

void perform(const Op& op, uint32_t number, Rank& rank, Splicer& splicer, Here& here) {
  uint8_t* const block = rank.base + rank.place(op.block);
  uint8_t* const other = rank.base + rank.place(op.other);
  switch (op.kind) {
    case Op::kFlip:
    case Op::kUpdate: {
      const bool flips = op.kind == Op::kFlip;
      struct Params {
        uint64_t block, number, other, young;
      } params{rank.at(rank.place(op.block)), op.number, rank.at(rank.place(op.other)), 0};
      SpliceLaunch launch;
      launch.name = flips ? "flip" : "update";
      launch.params = reinterpret_cast<const uint8_t*>(&params);
      launch.params_bytes = sizeof params;
      launch.position = ++rank.position;
      launch.repeatable = true;
      launch.accesses = {{params.block, kBlock, offsetof(Params, block), kRW},
                         {params.other, kBlock, offsetof(Params, other), DEVPROXY_EXECUTOR_READS}};
      here.young = nullptr;
      if (!flips) {
        const uint64_t young = rank.place(young_of(number, op.number));
        params.young = rank.at(young);
        here.young = rank.base + young;
        rank.free(splicer, params.young, rank.position - 1);
        splicer.committed(*rank.member, params.young, kBlock, rank.position, false);
        CHECK(splicer.before_write(params.young, kBlock, true).ok());
        std::memset(here.young, static_cast<int>(op.number), kBlock);
        launch.accesses.push_back({params.young, kBlock, offsetof(Params, young), kRW});
      }
      here.block = block, here.other = flips ? nullptr : other, here.number = op.number;
      ok(splicer.launch(*rank.member, launch, here));
      return;
    }
    case Op::kOpaque:
      CHECK(splicer.before_anything(*rank.member).ok());
      return update(block, other, op.number + number);
    case Op::kCopy:
      ok(splicer.before_write(reinterpret_cast<uint64_t>(block) + op.at, op.bytes, op.number % 2 == 0));
      return copy_in(block + op.at, op);
    case Op::kRenew:
      rank.free(splicer, reinterpret_cast<uint64_t>(block), rank.position);
      if (op.number & 1 && !splicer.physical().traits.joins_edges) {  // whole pages of it are gone
        splicer.discard(*rank.member, reinterpret_cast<uint64_t>(block), kBlock);
        const uint64_t begin = (rank.place(op.block) + kPage - 1) & ~(kPage - 1);
        std::memset(rank.base + begin, 0xee, ((rank.place(op.block) + kBlock) & ~(kPage - 1)) - begin);
      }
      splicer.committed(*rank.member, reinterpret_cast<uint64_t>(block), kBlock, rank.position, false);
      [[fallthrough]];
    case Op::kFill:
      CHECK(splicer.before_write(reinterpret_cast<uint64_t>(block), kBlock, true).ok());
      std::memset(block, static_cast<int>(op.number), kBlock);
      return;
    case Op::kBarrier: return;
    // As of gradients: they are copied out of what is equal, measured, changed by the result in place, and used.
    case Op::kDerive: {
      const uint64_t made = rank.place(derived_of(number, op.number, op.block));
      uint8_t *const to = rank.base + made, *const small = rank.base + rank.place_of_norm();
      const uint64_t n = op.number;
      splicer.committed(*rank.member, rank.at(made), kBlock, rank.position, false);
      const Access from{rank.at(rank.place(op.other)), kBlock, 0, kReads}, in_place{rank.at(made), kBlock, 0, kRW};
      const Access seen{rank.at(made), kBlock, 0, kReads}, result{rank.at(rank.place_of_norm()), 8, 0, kMakes};
      launch_simple("derive", {{rank.at(made), kBlock, 0, kMakes}, from}, n, rank, splicer, here,
                    [=] { derive(to, other, n); });
      launch_simple("norm", {result, seen}, 0, rank, splicer, here, [=] { norm(small, to); });
      const Access mixed{rank.at(rank.place_of_norm() + 8), 8, 0, kMakes}, first{rank.at(made), 64, 0, kReads};
      launch_simple("mix", {mixed, from, first}, 0, rank, splicer, here, [=] { mix(small + 8, other, to); });
      if (n % 3)
        launch_simple("scale", {in_place, {rank.at(rank.place_of_norm()), 8, 0, kReads}}, 0, rank, splicer, here,
                      [=] { scale(to, small); });
      launch_simple("use", {{rank.at(rank.place(op.block)), kBlock, 0, kRW}, seen, first}, n, rank, splicer, here,
                    [=] { update(block, to, n); });
      if (op.bytes == 0) rank.free(splicer, rank.at(made), rank.position);
      return;
    }
    case Op::kPeek: {
      uint8_t* const small = rank.base + rank.place_of_norm();
      const uint8_t* const from = block + op.at;
      const uint64_t bytes = op.bytes;
      launch_simple(
          "peek", {{rank.at(rank.place_of_norm()), 8, 0, kMakes}, {reinterpret_cast<uint64_t>(from), bytes, 0, kReads}},
          0, rank, splicer, here, [=] { norm(small, from, bytes); });
      return;
    }
    case Op::kRead:
      ok(splicer.before_read(reinterpret_cast<uint64_t>(block), kBlock));
      rank.seen = rank.seen * 31 + sum_of(block);
      return;
    case Op::kShare: {  // somebody reads through the descriptor, as a peer's server does
      CHECK(splicer.before_sharing(*rank.member, reinterpret_cast<uint64_t>(block), kBlock).ok());
      std::vector<uint8_t> seen(kBlock);
      CHECK(pread(rank.fd, seen.data(), kBlock, static_cast<off_t>(rank.place(op.block))) ==
            static_cast<ssize_t>(kBlock));
      CHECK(std::memcmp(seen.data(), block, kBlock) == 0);
      rank.seen = rank.seen * 31 + sum_of(block);
      return;
    }
  }
}

// Steps as of training, each after a collective: the same updates again and again; now and then something
// else, for all ranks or for one. flips: the first two ranks change every block and change it
// back, but for once.
// derives: and make something of every other block, use it, and now and then read it.
std::vector<std::vector<Op>> programs(uint32_t ranks, uint32_t steps, double odd, bool flips, bool derives,
                                      std::mt19937& dice) {
  std::vector<std::vector<Op>> all(ranks);
  std::uniform_real_distribution<double> chance;
  for (uint32_t step = 0; step < steps; step++) {
    for (auto& program : all) program.push_back({Op::kBarrier, 0, 0, 0, 0, 0});
    for (uint32_t rank = 0; derives && odd > 0 && step % 5 == 1 && rank < ranks; rank++)
      all[rank].push_back({Op::kRead, derived_of(rank, step - 1, 0), 0, 0, 0, 0});
    for (uint64_t i = 0; i + 1 < kBlocks; i += 2) {
      const Op usual{Op::kUpdate, i, i + 1, step % 3, 0, 0};
      for (auto& program : all) program.push_back(usual);
      for (size_t rank = 0; flips && rank < 2; rank++)
        for (const uint64_t block : {i, i + 1})
          for (int times = step == 30 ? 1 : 2; times > 0; times--)
            all[rank].push_back({Op::kFlip, block, block, 0x5a, 0, 0});
      if (derives && i % 4 == 0)
        for (uint32_t rank = 0; rank < ranks; rank++) {
          const bool read = odd > 0 && step % 5 == 0;
          all[rank].push_back({Op::kDerive, i, i + 1, step, 0, read});
          if (!read) continue;
          // Of what is kept: all of it, some of it, or what changes it.
          constexpr Op::Kind kKinds[] = {Op::kRead, Op::kPeek,  Op::kPeek,   Op::kCopy,
                                         Op::kFill, Op::kShare, Op::kOpaque, Op::kRenew};
          const uint64_t derived = derived_of(rank, step, i);
          for (int times = 0; times < 2; times++) {
            const uint64_t at = dice() % kBlock, bytes = 1 + dice() % (dice() % 2 ? 600 : kBlock);
            all[rank].push_back(
                {kKinds[dice() % std::size(kKinds)], derived, i, dice() % 4, at, std::min(bytes, kBlock - at)});
          }
        }
      if (chance(dice) > odd) continue;
      const auto kind = static_cast<Op::Kind>(dice() % 6);
      const uint64_t at = dice() % kBlock;
      const Op other{kind, dice() % kBlocks, dice() % kBlocks, dice() % 4, at, 1 + dice() % (kBlock - at)};
      if (dice() % 3) {
        for (auto& program : all) program.push_back(other);
      } else {
        all[dice() % ranks].push_back(other);
      }
    }
  }
  return all;
}

// As on a real GPU: two or three blocks share a page.
constexpr PhysicalMemory::Traits kLargePages{
    .page = 8 * kPage, .least_numbered = 1, .lends = false, .joins_edges = true};

struct Outcome {
  SpliceCounts counts;
  uint64_t updates = 0, runs = 0;
};

Outcome run(uint32_t ranks, uint32_t steps, double odd, uint32_t seed, bool leave, bool flips = false,
            bool loads = false, bool derives = false, bool large_pages = false, bool moved = false) {
  std::mt19937 dice(seed);
  Engine engine(5'000'000);
  SpliceConfig config;
  config.guard = seed % 2;
  config.least_bytes = kPage;
  config.least_ns = 0;
  const bool calm = odd == 0 && !flips;
  config.thrifty = seed % 4 == 0;
  config.patience_ns = calm ? 60'000'000'000 : 20'000'000;
  config.idle_patience_ns = calm ? 10'000'000'000 : 2'000'000;
  if (flips) config.patience_ns = 1'000'000'000, config.idle_patience_ns = 100'000'000;
  auto pages = SoftPages::open(&engine, large_pages ? kLargePages : PhysicalMemory::Traits());
  CHECK(pages.ok());
  Splicer splicer(config, std::move(*pages));
  std::vector<Rank> all(ranks);
  const auto lists = programs(ranks, steps, odd, flips, derives, dice);
  std::atomic<uint64_t> runs{0};
  Outcome outcome;
  for (uint32_t i = 0; i < ranks; i++) {
    all[i].program = lists[i];
    if (moved) all[i].shift = i % 3 * 8 * kPage, all[i].swaps = i % 2;
    all[i].open(splicer);
    for (uint64_t block = 0; moved && block < kBlocks; block++) {  // what tells them
      const uint64_t begin = all[i].place(block);
      std::memset(all[i].base + begin, static_cast<int>(block + 1), kBlock);
      std::memset(all[i].alone.data() + begin, static_cast<int>(block + 1), kBlock);
    }
    if (loads) all[i].load(splicer, i, calm ? 0 : 100, dice);
    if (leave && i == 0) all[i].program.resize(lists[i].size() / 2);
    for (const Op& op : all[i].program) {
      apply(op, i, all[i]);
      outcome.updates += op.kind == Op::kUpdate || op.kind == Op::kFlip;
      if (op.kind == Op::kDerive) outcome.updates += op.number % 3 ? 5 : 4;
      outcome.updates += op.kind == Op::kPeek;
      if (op.kind == Op::kRead || op.kind == Op::kShare)
        all[i].expected = all[i].expected * 31 + sum_of(all[i].alone.data() + all[i].place(op.block));
    }
  }
  // Each block has four or five whole pages.
  const uint64_t saved = splicer.counts().saved_bytes;
  CHECK(!loads || large_pages || (calm ? saved >= kBlocks * 4 * kPage * (ranks - 1) : saved > 0));
  std::barrier together(ranks);  // as a collective of every step
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < ranks; i++)
    threads.emplace_back([&, i] {
      std::mt19937 own(seed * 100 + i);
      Here here(engine, i, runs);
      for (const Op& op : all[i].program) {
        if (op.kind == Op::kBarrier) {
          here.yield();
          together.arrive_and_wait();
        }
        perform(op, i, all[i], splicer, here);
        if (own() % 16 == 0) here.yield();
        if (!calm && own() % 64 == 0) {
          splicer.hurry(*all[i].member, true);
          splicer.hurry(*all[i].member, false);
        }
      }
      here.yield();
      together.arrive_and_drop();
      CHECK(all[i].is_as_alone(splicer) && all[i].seen == all[i].expected);
      if (leave && i == 0) all[i].close(splicer);  // the others still share its pages
    });
  for (std::thread& thread : threads) thread.join();
  for (uint32_t i = leave ? 1 : 0; i < ranks; i++) CHECK(all[i].is_as_alone(splicer));
  outcome.counts = splicer.counts();
  outcome.runs = runs;
  CHECK(outcome.runs + outcome.counts.squashed == outcome.updates);
  for (uint32_t i = leave ? 1 : 0; i < ranks; i++) all[i].close(splicer);
  CHECK(splicer.counts().saved_bytes == 0);
  return outcome;
}

struct Doing final : Runner {
  Engine& engine;
  uint32_t seat;
  Engine::Turn turn;
  std::function<void()> what;
  Status result;  // of the next launch
  Doing(Engine& engine, uint32_t seat) : engine(engine), seat(seat) {}
  void begin() override { engine.begin(seat, turn); }
  Status run() override { return what(), result; }
  void end() override { engine.end(turn); }
  void yield() override { engine.yield(turn); }
};

// Ranks in lockstep, each with a thread: step(number, rank, runner) is called `steps` times.
struct Lockstep {
  Engine engine;
  std::shared_ptr<Splicer> splicer;
  std::vector<Rank> ranks;
  std::barrier<> together;

  // account_ns: splicing has to pay, by windows of that.
  explicit Lockstep(uint32_t count, bool guard = false, uint64_t idle_patience_ns = 10'000'000'000,
                    uint64_t account_ns = 0)
      : ranks(count), together(count) {
    SpliceConfig config;
    config.guard = guard;
    config.least_bytes = kPage;
    config.least_ns = 0;
    config.thrifty = account_ns != 0;
    if (account_ns) config.account_ns = account_ns;
    config.patience_ns = 6 * idle_patience_ns, config.idle_patience_ns = idle_patience_ns;
    auto pages = SoftPages::open(&engine);
    CHECK(pages.ok());
    splicer = std::make_shared<Splicer>(config, std::move(*pages));
    for (Rank& rank : ranks) rank.open(*splicer);
  }
  ~Lockstep() {
    for (Rank& rank : ranks) rank.close(*splicer);
  }

  template <class Step>
  void run(int steps, Step step, int first = 0) {
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < ranks.size(); i++)
      threads.emplace_back([&, i] {
        Doing doing(engine, i);
        for (int number = first; number < first + steps; number++) {
          step(number, i, doing);
          doing.yield();
          together.arrive_and_wait();
        }
      });
    for (std::thread& thread : threads) thread.join();
  }
  void launch(Rank& rank, const char* name, std::vector<Access> accesses, Doing& doing, std::function<void()> what) {
    Simple simple(name, {}, std::move(accesses), rank);
    doing.what = std::move(what);
    CHECK(splicer->launch(*rank.member, simple.launch, doing).code() == doing.result.code());
  }
  void fill(Rank& rank, uint64_t offset, uint64_t bytes, int value) {
    ok(splicer->before_write(rank.at(offset), bytes, true));
    std::memset(rank.base + offset, value, bytes);
  }
};

constexpr uint64_t kPart = 512;

void add(uint8_t* block, const uint8_t* part) {
  for (uint64_t i = 0; i < kBlock; i++) block[i] = static_cast<uint8_t>(block[i] + part[i % kPart] + 1);
}

// The launch that most tests repeat: a block is changed in place by a part that is only read. also: what it does besides.
void launch_add(Lockstep& job, Rank& rank, Doing& doing, uint64_t block, uint64_t part, std::function<void()> also = {},
                const char* name = "add") {
  job.launch(rank, name, {{rank.at(block), kBlock, 0, kRW}, {rank.at(part), kPart, 0, kReads}}, doing, [=, &rank] {
    add(rank.base + block, rank.base + part);
    if (also) also();
  });
}

// Ranks that have one block at different offsets share its pages. Then the second rank goes on with a new block, which lies where
// the first one's does, while it still shows most pages of the old one: those are not written for it.
void test_homes() {
  Lockstep job(2, false, /*idle_patience_ns=*/20'000'000);
  constexpr int kFirst = 8;  // so that both say what they have left in the same steps again, some steps later
  const uint64_t here = offset_of(0), there = offset_of(8), part = offset_of(3);
  const auto block_of = [&](int step, uint32_t i) { return i == 0 || step >= kFirst ? here : there; };
  std::vector<uint8_t> left(kBlock);
  uint64_t saved = 0;
  job.run(40, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    if (step == kFirst && i == 1) {
      saved = job.splicer->counts().saved_bytes;
      job.splicer->committed(*rank.member, rank.at(here), kBlock, rank.position - 1, false);  // not young
      ok(job.splicer->before_write(rank.at(here), kBlock, true));
      std::memcpy(rank.base + here, rank.base + there, kBlock);
      job.fill(rank, there, kPart, 5);
      std::memcpy(left.data(), rank.base + there, kBlock);
    }
    if (step == kFirst && i == 0) usleep(5'000);  // it comes last then, and runs the launch for both
    launch_add(job, rank, doing, block_of(step, i), part);
  });
  CHECK(saved >= 4 * kPage && job.splicer->counts().saved_bytes >= 4 * kPage);
  CHECK(std::memcmp(job.ranks[1].base + there, left.data(), kBlock) == 0);
  CHECK(std::memcmp(job.ranks[0].base + here, job.ranks[1].base + here, kBlock) == 0);
}

// A block takes whole pages, and what changes it leaves out the end of the last one. That page becomes one where the rest of it
// is equal; otherwise each rank keeps its own rest.
void test_tails() {
  for (const bool equal : {true, false}) {
    Lockstep job(2);
    const uint64_t block = 104 * kPage, used = 5 * kPage + 100;
    for (uint32_t i = 0; i < 2; i++) {
      Rank& rank = job.ranks[i];
      job.splicer->committed(*rank.member, rank.at(block), 6 * kPage, rank.position, true);
      std::memset(rank.base + block + used, equal ? 1 : static_cast<int>(i), 6 * kPage - used);
    }
    job.run(8, [&](int, uint32_t i, Doing& doing) {
      Rank& rank = job.ranks[i];
      job.launch(rank, "add", {{rank.at(block), used, 0, kRW}}, doing, [=, &rank] {
        for (uint64_t at = block; at < block + used; at++) rank.base[at]++;
      });
    });
    CHECK(job.splicer->counts().saved_bytes == (equal ? 6 : 5) * kPage);
    for (uint32_t i = 0; i < 2; i++)
      for (uint64_t at = 0; at < 6 * kPage; at++)
        CHECK(job.ranks[i].base[block + at] == (at < used ? 8 : equal ? 1 : i));
  }
}

// What a launch only reads may lie elsewhere in each rank, but not where one of them writes: the first rank reads from the
// block itself in the end, the second what is equal before the launch.
void test_overlap() {
  Lockstep job(2);
  job.run(12, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    const uint64_t block = offset_of(0), inside = block + 2 * kPart;
    const uint64_t part = step > 7 && i == 0 ? inside : offset_of(2 + i);
    ok(job.splicer->before_write(rank.at(offset_of(2 + i)), kPart, true));
    std::memcpy(rank.base + offset_of(2 + i), rank.base + inside, kPart);
    add(rank.alone.data() + block, std::vector<uint8_t>(rank.base + part, rank.base + part + kPart).data());
    if (part == inside) {  // as it is where it reads what it has written
      std::memcpy(rank.alone.data() + block, rank.base + block, kBlock);
      add(rank.alone.data() + block, rank.alone.data() + inside);
    }
    job.launch(rank, "add", {{rank.at(block), kBlock, 0, kRW}, {rank.at(part), kPart, 0, DEVPROXY_EXECUTOR_READS}},
               doing, [&rank, block, part] { add(rank.base + block, rank.base + part); });
    CHECK(std::memcmp(rank.base + block, rank.alone.data() + block, kBlock) == 0);
  });
  const SpliceCounts counts = job.splicer->counts();
  CHECK(counts.squashed > 0 && counts.different > 0);
}

// One rank of three reads something else, at another place: whoever is compared last.
void test_one_differs() {
  Lockstep job(3);
  job.run(40, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    const uint64_t block = offset_of(0), part = offset_of(2 + i);
    job.fill(rank, part, kPart, step > 9 && step % 3 == static_cast<int>(i) ? step + 1 : step);
    add(rank.alone.data() + block, rank.base + part);
    job.launch(rank, "add", {{rank.at(block), kBlock, 0, kRW}, {rank.at(part), kPart, 0, DEVPROXY_EXECUTOR_READS}},
               doing, [&rank, block, part] { add(rank.base + block, rank.base + part); });
    CHECK(std::memcmp(rank.base + block, rank.alone.data() + block, kBlock) == 0);
  });
  const SpliceCounts counts = job.splicer->counts();
  CHECK(counts.squashed > 0 && counts.different > 0);
}

// A launch that fails in the middle leaves ranks with unequal contents (at the edges, which are no whole pages), and what
// was known of them before is not true any more.
void test_failure() {
  Lockstep job(2);
  job.run(16, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    const uint64_t block = offset_of(0), part = offset_of(2);
    std::vector<uint8_t> expected(rank.base + block, rank.base + block + kBlock);
    add(expected.data(), rank.base + part);
    const bool fails = step == 9;
    doing.result = fails ? Status(kOutOfMemory, "in the middle") : Status();
    job.launch(rank, "add", {{rank.at(block), kBlock, 0, kRW}, {rank.at(part), kPart, 0, DEVPROXY_EXECUTOR_READS}},
               doing, [&rank, block, part, fails] {
                 fails ? static_cast<void>(rank.base[block]++) : add(rank.base + block, rank.base + part);
               });
    if (!fails) CHECK(std::memcmp(rank.base + block, expected.data(), kBlock) == 0);
  });
  const SpliceCounts counts = job.splicer->counts();
  CHECK(counts.squashed > 0 && counts.different > 0);
}

// A step as of training: what a collective gives is copied, scaled by a number in memory, and used in place; and the step
// makes something on the way, in a stable buffer of its own. Once it is learnt, one rank computes all of it.
void test_numbers() {
  constexpr int kSteps = 30, kLearnt = 8;
  Lockstep job(3);
  std::atomic<uint64_t> compared{0}, squashed{0};
  const auto train = [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    // From kSteps on, one rank's collective is another one, or its scale.
    const bool odd = step >= kSteps && i == static_cast<uint32_t>(step % 3);
    const int value = 3 * step + (odd && step % 2), factor = step + (odd && step % 2 == 0);
    Splicer& splicer = *job.splicer;
    if (step == kLearnt && i == 0) compared = splicer.counts().compared_bytes, squashed = splicer.counts().squashed;
    if (step == kLearnt) doing.yield(), job.together.arrive_and_wait();
    const uint64_t state = offset_of(0), made = offset_of(1), scale = offset_of(2);
    const uint64_t sum = offset_of(4 + (i + step) % 4), copied = offset_of(8 + (2 * i + step) % 4);
    job.fill(rank, scale, 8, factor);
    job.fill(rank, sum, kBlock, value);
    splicer.received(*rank.member, rank.at(sum), kBlock, {1, 2, static_cast<uint64_t>(value)});
    uint8_t* const at = rank.base;
    rank.free(splicer, rank.at(copied), rank.position);
    splicer.committed(*rank.member, rank.at(copied), kBlock, rank.position, false);
    job.launch(rank, "copy", {{rank.at(copied), kBlock - 64, 0, kMakes}, {rank.at(sum + 64), kBlock - 64, 0, kReads}},
               doing, [=] { std::memcpy(at + copied, at + sum + 64, kBlock - 64); });
    job.launch(rank, "scale", {{rank.at(copied), kBlock - 64, 0, kRW}, {rank.at(scale), 8, 0, kReads}}, doing, [=] {
      for (uint64_t k = 0; k < kBlock - 64; k++) at[copied + k] = static_cast<uint8_t>(at[copied + k] * at[scale]);
    });
    job.launch(rank, "use", {{rank.at(state), kBlock, 0, kRW}, {rank.at(copied), kBlock - 64, 0, kReads}}, doing,
               [=] { add(at + state, at + copied); });
    splicer.committed(*rank.member, rank.at(made), kBlock, rank.position, true);
    job.launch(rank, "make", {{rank.at(made), kBlock, 0, kMakes}, {rank.at(state), kBlock, 0, kReads}}, doing, [=] {
      for (uint64_t k = 0; k < kBlock; k++) at[made + k] = static_cast<uint8_t>(at[state + k] * 7);
    });
    job.launch(rank, "take", {{rank.at(state), kBlock, 0, kRW}, {rank.at(made), kBlock, 0, kReads}}, doing,
               [=] { add(at + state, at + made); });
    rank.free(splicer, rank.at(made), rank.position);
    std::vector<uint8_t> sums(kPart, static_cast<uint8_t>(value * factor)), half(kPart);
    add(rank.alone.data() + state, sums.data());
    for (uint64_t k = 0; k < kPart; k++) half[k] = static_cast<uint8_t>(rank.alone[state + k] * 7);
    add(rank.alone.data() + state, half.data());
    CHECK(std::memcmp(at + state, rank.alone.data() + state, kBlock) == 0);
  };
  job.run(kSteps, train);
  const SpliceCounts counts = job.splicer->counts();
  CHECK(counts.different == 0 && counts.given_up == 0);
  CHECK(counts.squashed - squashed == 5 * 2 * (kSteps - kLearnt));        // all five launches, for two others
  CHECK(counts.compared_bytes - compared == 8 * 2 * (kSteps - kLearnt));  // the scale, which is small
  CHECK(counts.lent_bytes > 0);
  job.run(12, train, kSteps);
  CHECK(job.splicer->counts().different > 0);
}

// Contents that one rank has borrowed, and both would change: that fails in the middle, and each has what its own launch
// would have left.
void test_failure_of_loan() {
  Lockstep job(2);
  std::atomic<uint64_t> squashed{0};
  job.run(16, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    const uint64_t sum = offset_of(4 + i), copied = offset_of(8 + i);
    uint8_t* const at = rank.base;
    const uint64_t block = offset_of(0), part = offset_of(2);
    launch_add(job, rank, doing, block, part);  // the first thing that the two are known for
    job.fill(rank, sum, kBlock, step);
    job.splicer->received(*rank.member, rank.at(sum), kBlock, {1, 2, static_cast<uint64_t>(step)});
    job.splicer->committed(*rank.member, rank.at(copied), kBlock, rank.position, false);
    job.launch(rank, "copy", {{rank.at(copied), kBlock, 0, kMakes}, {rank.at(sum), kBlock, 0, kReads}}, doing,
               [=] { std::memcpy(at + copied, at + sum, kBlock); });
    const bool fails = step > 12;
    if (fails && i == 0) squashed = job.splicer->counts().squashed;
    doing.yield();
    job.together.arrive_and_wait();
    doing.result = fails ? Status(kOutOfMemory, "in the middle") : Status();
    job.launch(rank, "raise", {{rank.at(copied), kBlock, 0, kRW}}, doing, [=] {
      for (uint64_t k = 0; k < (fails ? kBlock / 2 : kBlock); k++) at[copied + k]++;
    });
    if (fails) CHECK(job.splicer->counts().squashed > squashed);
    doing.result = {};
    ok(job.splicer->before_read(rank.at(copied), kBlock));
    for (uint64_t k = 0; k < kBlock; k++) CHECK(at[copied + k] == step + (fails && k >= kBlock / 2 ? 0 : 1));
    rank.free(*job.splicer, rank.at(copied), rank.position);
  });
}

// A borrower has freed its loan when the lender writes there: the copy is left out, but where a command may still read it,
// or where it is another one's by then.
void test_freed_loans() {
  Lockstep job(2);
  const uint64_t sum = offset_of(4), copied = offset_of(8);
  uint64_t settled = 0;
  job.run(12, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    Splicer& splicer = *job.splicer;
    uint8_t* const at = rank.base;
    const uint64_t block = offset_of(0), part = offset_of(2);
    launch_add(job, rank, doing, block, part);
    if (step < 8) return;
    job.fill(rank, sum, kBlock, step);
    splicer.received(*rank.member, rank.at(sum), kBlock, {1, 2, static_cast<uint64_t>(step)});
    for (uint32_t turn = 0; turn < 2; turn++) {
      doing.yield();
      job.together.arrive_and_wait();
      if (turn == i)
        job.launch(rank, "copy", {{rank.at(copied), kBlock, 0, kMakes}, {rank.at(sum), kBlock, 0, kReads}}, doing,
                   [=] { std::memcpy(at + copied, at + sum, kBlock); });
    }
    const bool frees = step != 8, reads = step == 9, before = step == 10;
    if (i == 1) {
      rank.pending = reads;
      if (frees) splicer.freed(*rank.member, rank.at(copied), kBlock, before ? rank.position - 1 : rank.position);
    }
    doing.yield();
    job.together.arrive_and_wait();
    if (i != 0) return;
    job.fill(rank, copied, kBlock, 0);
    if (!frees || reads || before) settled += kBlock;
    CHECK(splicer.counts().settled_bytes == settled);
    const uint8_t* const other = job.ranks[1].base + copied;
    for (uint64_t k = 0; (!frees || reads || before) && k < kBlock; k++) CHECK(other[k] == step);
  });
  CHECK(job.splicer->counts().lent_bytes == 4 * kBlock && settled == 3 * kBlock);
}

// Memory that a rank has changed alone is copied for a while, and spliced again once that has paid.
void test_forgiven() {
  Lockstep job(2);
  const uint64_t block = offset_of(0), part = offset_of(2);
  const auto train = [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    uint8_t* const at = rank.base;
    if (i == 0 && step >= 12 && (step < 16 || step >= 100))
      ok(job.splicer->before_write(rank.at(block + 2 * kPage), 1, false));
    launch_add(job, rank, doing, block, part);
    add(rank.alone.data() + block, rank.alone.data() + part);
    CHECK(std::memcmp(at + block, rank.alone.data() + block, kBlock) == 0);
  };
  job.run(16, train);
  CHECK(job.splicer->counts().broken == 2 && job.splicer->counts().saved_bytes == 3 * kPage);
  job.run(84, train, 16);
  CHECK(job.splicer->counts().saved_bytes == 4 * kPage);
  job.run(400, train, 100);  // where that never ends it is spliced ever more seldom
  CHECK(job.splicer->counts().broken > 3 && job.splicer->counts().broken < 10);
}

constexpr uint64_t kHour = 3'600'000'000'000;

// One rank runs a launch alone of which the others know it: they do not wait for it, and meet it the next time.
void test_passed_by() {
  constexpr int kLearnt = 12, kSteps = 30;
  Lockstep job(3, false, kHour);
  job.run(kSteps, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    uint8_t* const at = rank.base;
    const uint64_t block = offset_of(0), part = offset_of(2), sum = offset_of(4 + i);
    launch_add(job, rank, doing, block, part);
    const bool odd = step > kLearnt && step % 2 && i == static_cast<uint32_t>(step / 2 % 3);
    job.splicer->committed(*rank.member, rank.at(sum), kBlock, rank.position, false);
    job.fill(rank, sum, kBlock, step);
    if (!odd) job.splicer->received(*rank.member, rank.at(sum), kBlock, {1, 2, static_cast<uint64_t>(step)});
    const uint64_t before = job.splicer->counts().squashed;
    doing.yield();
    job.together.arrive_and_wait();
    job.launch(rank, "raise", {{rank.at(sum), kBlock, 0, kRW}}, doing, [=] {
      for (uint64_t k = 0; k < kBlock; k++) at[sum + k]++;
    });
    doing.yield();
    job.together.arrive_and_wait();
    if (step > kLearnt && step % 2 == 0) CHECK(job.splicer->counts().squashed == before + 2);
    ok(job.splicer->before_read(rank.at(sum), kBlock));
    for (uint64_t k = 0; k < kBlock; k++) CHECK(at[sum + k] == step + 1);
    rank.free(*job.splicer, rank.at(sum), rank.position);
  });
  CHECK(job.splicer->counts().given_up > 0);
}

// A rank is late once, so the others go on without it. That is one missed meeting, however many come to it late: the next one
// is held, and what was spliced is spliced again.
void test_late() {
  constexpr int kLate = 10, kSteps = 14;
  Lockstep job(4, false, 200'000'000);
  std::atomic<int> through{0};
  std::atomic<uint64_t> before{0};
  job.run(kSteps, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    uint8_t* const at = rank.base;
    const uint64_t block = offset_of(0), part = offset_of(2);
    if (i == 0) before = job.splicer->counts().squashed;
    doing.yield();
    job.together.arrive_and_wait();
    while (step == kLate && through < static_cast<int>(i == 2 ? 2 : i == 3 ? 3 : 0)) usleep(100);
    launch_add(job, rank, doing, block, part);
    if (step == kLate) through++;
    doing.yield();
    job.together.arrive_and_wait();
    if (step > kLate) CHECK(job.splicer->counts().squashed == before + 3);
    add(rank.alone.data() + block, rank.alone.data() + part);
    CHECK(std::memcmp(at + block, rank.alone.data() + block, kBlock) == 0);
  });
  CHECK(job.splicer->counts().given_up > 0 && job.splicer->counts().broken > 0);
  CHECK(job.splicer->counts().saved_bytes == 3 * 4 * kPage);
}

// Meetings are not judged by what it takes to map pages once more.
void test_mapping_is_no_cost() {
  constexpr int kBroken = 12;
  Lockstep job(2, false, kHour, kHour);
  mapping_us = 400'000;
  std::atomic<uint64_t> before{0};
  job.run(26, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    const uint64_t block = offset_of(0), part = offset_of(2);
    if (i == 0) before = job.splicer->counts().squashed;
    doing.yield();
    job.together.arrive_and_wait();
    if (step == kBroken) ok(job.splicer->before_write(rank.at(block + 2 * kPage), 1, false));
    launch_add(job, rank, doing, block, part, [] { usleep(20'000); });
    doing.yield();
    job.together.arrive_and_wait();
    if (step >= kBroken) CHECK(job.splicer->counts().squashed == before + 1);
  });
  mapping_us = 0;
  CHECK(job.splicer->counts().broken == 2 && job.splicer->counts().saved_bytes == 4 * kPage);
}

// Two ranks come to two meetings, each in its own order. The meeting that has never been is given up.
void test_cycle() {
  constexpr int kOther = 20, kCrossed = 22;
  Lockstep job(2, false, kHour);
  std::atomic<uint64_t> before{0};
  job.run(26, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    uint8_t* const at = rank.base;
    const uint64_t part = offset_of(2);
    const auto update = [&](const char* name, uint64_t block) {
      launch_add(job, rank, doing, block, part, {}, name);
      add(rank.alone.data() + block, rank.alone.data() + part);
    };
    if (i == 0) before = job.splicer->counts().squashed;
    doing.yield();
    job.together.arrive_and_wait();
    const bool last = step >= kCrossed && i == 1;
    if (!last && step >= kOther) update("another", offset_of(4));
    update("add", offset_of(0));
    if (last) update("another", offset_of(4));
    doing.yield();
    job.together.arrive_and_wait();
    if (step >= kCrossed) CHECK(job.splicer->counts().squashed == before + 1);
    for (const uint64_t block : {offset_of(0), offset_of(4)})
      CHECK(std::memcmp(at + block, rank.alone.data() + block, kBlock) == 0);
  });
  CHECK(job.splicer->counts().given_up == 1);
}

// Three bad windows in a row end it: once, and not where what was saved makes up for the cost.
void test_account() {
  constexpr uint64_t kWindow = 1'000'000, kLeast = 32;
  // One window: so many ns of the splicer for each launch of 1,000 ns.
  const auto window = [](Account& account, uint64_t own_ns) {
    bool off = false;
    for (uint64_t ns = 0; ns < kWindow; ns += Account::kSampled * (own_ns + 1000)) off |= account.spend(own_ns, 1000);
    return off;
  };
  Account account(kWindow);
  for (int i = 0; i < 8; i++) CHECK(!window(account, 49));  // under 5 %
  CHECK(!window(account, 60) && !window(account, 60));
  CHECK(!window(account, 10));  // in between one that pays
  CHECK(!window(account, 60) && !window(account, 60) && window(account, 60));
  CHECK(!window(account, 60));
  Account saves(kWindow);
  for (int i = 0; i < 8; i++) {
    saves.save(kWindow / 50);  // 2 % of it, where 6 % is spent
    CHECK(!window(saves, 60));
  }
  Account anew(kWindow);
  CHECK(!window(anew, 60) && !window(anew, 60));
  anew.begin_anew();
  CHECK(!window(anew, 60) && !window(anew, 60) && window(anew, 60));
  Account early(1);  // a few launches say nothing
  for (uint64_t i = 0; i < 3 * kLeast - 1; i++) CHECK(!early.spend(500, 1000));
  CHECK(early.spend(500, 1000));
}

// Each launch is of a new kind and takes no time, and the ranks are not equal: learning never pays. It stops until another rank
// joins.
void test_off() {
  Lockstep job(2, false, kHour, 1'000'000);
  std::atomic<int> steps{0};
  job.run(6000, [&](int step, uint32_t i, Doing& doing) {
    if (job.splicer->counts().off) return;
    Rank& rank = job.ranks[i];
    const uint64_t block = offset_of(0);
    if (step == 0) job.fill(rank, block, kBlock, static_cast<int>(i + 1));
    job.launch(rank, ("kind " + std::to_string(step / 4)).c_str(), {{rank.at(block), kBlock, 0, kRW}}, doing, [] {});
    steps = step;
  });
  CHECK(job.splicer->counts().off && steps < 5999);
  const auto equal = [&](int, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    const uint64_t block = offset_of(2), part = offset_of(6);
    launch_add(job, rank, doing, block, part);
  };
  job.run(12, equal);
  CHECK(job.splicer->counts().squashed == 0);
  Rank more;
  more.open(*job.splicer);
  CHECK(!job.splicer->counts().off);
  job.run(12, equal);
  CHECK(job.splicer->counts().squashed > 0);
  more.close(*job.splicer);
}

// Equal launches that take their time pay.
void test_pays() {
  Lockstep job(2, false, kHour, 1'000'000);
  job.run(400, [&](int, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    const uint64_t block = offset_of(0), part = offset_of(2);
    launch_add(job, rank, doing, block, part, [] {
      // Of processor's time, as the account counts it: on a busy machine 300 us of the clock may hold none.
      for (const uint64_t end = thread_cpu_ns() + 300'000; thread_cpu_ns() < end;) {}
    });
  });
  // All but a few on two free processors. On a busy machine a meeting itself may cost more than it saves; then its group rests,
  // which is no matter of the account.
  CHECK(!job.splicer->counts().off && job.splicer->counts().squashed >= 10);
}

// The lender ends, and another one takes its place.
void test_lender_leaves() {
  Lockstep job(3);
  const uint64_t sum = offset_of(4), copied = offset_of(8);
  job.run(8, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    uint8_t* const at = rank.base;
    const uint64_t block = offset_of(0), part = offset_of(2);
    launch_add(job, rank, doing, block, part);
    job.fill(rank, sum, kBlock, step);
    job.splicer->received(*rank.member, rank.at(sum), kBlock, {1, 2, static_cast<uint64_t>(step)});
    if (step < 7) return;
    for (uint32_t turn = 0; turn < 3; turn++) {  // the first one computes
      doing.yield();
      job.together.arrive_and_wait();
      if (turn != i) continue;
      job.launch(rank, "copy", {{rank.at(copied), kBlock, 0, kMakes}, {rank.at(sum), kBlock, 0, kReads}}, doing,
                 [=] { std::memcpy(at + copied, at + sum, kBlock); });
    }
  });
  CHECK(job.splicer->counts().lent_bytes == 2 * kBlock && job.splicer->counts().settled_bytes == 0);
  job.ranks[0].close(*job.splicer);
  job.ranks[0].open(*job.splicer);
  CHECK(job.splicer->counts().settled_bytes == 2 * kBlock);
  for (const Rank& rank : job.ranks)
    for (uint64_t k = 0; k < kBlock; k++) CHECK(rank.base[copied + k] == (&rank == job.ranks.data() ? 0 : 7));
}

void test_loans() {
  Loans loans;
  loans.lend({0, 1, 1000, 5000, 300, 7, 0});
  loans.lend({0, 2, 1100, 9000, 100, 7, 0});
  loans.lend({3, 1, 0, 5300, 50, 7, 0});
  CHECK(loans.borrowed_bytes(1, 0, 10000) == 350 && loans.borrowed_bytes(1, 5290, 5310) == 20 && loans.concern(0));
  // The middle of what the first has lent to two.
  std::vector<Loan> parts = loans.call_in(0, 1050, 1150);
  CHECK(parts.size() == 2 && loans.borrowed_bytes(1, 5000, 5300) == 200 && loans.borrowed_bytes(2, 0, 10000) == 50);
  for (const Loan& part : parts)
    CHECK(part.borrower == 1 ? part.from == 1050 && part.to == 5050 && part.bytes == 100
                             : part.from == 1100 && part.to == 9000 && part.bytes == 50);
  parts = loans.repay(1, 5290, 5310);
  CHECK(parts.size() == 2 && parts[0].from == 1290 && parts[0].bytes == 10 && parts[1].from == 0 &&
        parts[1].to == 5300);
  parts = loans.repay(1, 0, 10000);
  CHECK(parts.size() == 3 && parts[1].from == 1150 && parts[1].to == 5150 && parts[1].bytes == 140);
  CHECK(parts[2].lender == 3 && parts[2].from == 10 && parts[2].to == 5310 && parts[2].bytes == 40 && !loans.empty());
  CHECK(!loans.concern(1) && !loans.concern(3));
  CHECK(loans.call_in(0, 0, 10000).size() == 1 && loans.empty() && !loans.concern(0) && !loans.concern(2));
}

void test_pool() {
  auto pages = SoftPages::open(nullptr);
  CHECK(pages.ok());
  PagePool pool(**pages);
  const uint64_t a = *pool.take(4 * kPage), b = *pool.take(2 * kPage);
  CHECK(a == 0 && b == 4 * kPage && pool.used_bytes() == 0);
  pool.share(a, 4 * kPage, 1);
  pool.share(a, 3 * kPage, 2);
  pool.share(b, 2 * kPage, 4);
  CHECK(pool.used_bytes() == 6 * kPage && pool.saved_bytes() == 3 * kPage && pool.sharers(a, 4 * kPage) == 3);
  pool.leave(a, 4 * kPage, 1);
  CHECK(pool.used_bytes() == 5 * kPage && pool.saved_bytes() == 0 && pool.sharers(a + 3 * kPage, kPage) == 0);
  pool.leave(b, 2 * kPage, 4);
  CHECK(*pool.take(3 * kPage) == 3 * kPage);  // holes beside one another are one
  pool.leave(a, 3 * kPage, 2);
  CHECK(pool.used_bytes() == 0 && *pool.take(3 * kPage) == 0);
}

}  // namespace

// [FIRST BEHIND]: the seeds of the random programs.
int main(int argc, char** argv) {
  const uint32_t first = argc == 3 ? static_cast<uint32_t>(std::atoi(argv[1])) : 2;
  const uint32_t behind = argc == 3 ? static_cast<uint32_t>(std::atoi(argv[2])) : 8;
  test_pool();
  test_loans();
  test_homes();
  test_tails();
  test_overlap();
  test_one_differs();
  test_failure();
  test_failure_of_loan();
  test_lender_leaves();
  test_forgiven();
  test_passed_by();
  test_late();
  test_mapping_is_no_cost();
  test_cycle();
  test_account();
  test_off();
  test_pays();
  test_freed_loans();
  test_numbers();
  // Equal ranks: nearly everything is computed once.
  const Outcome calm = run(4, 40, 0, 1, false);
  CHECK(calm.counts.squashed > calm.updates / 2 && calm.counts.broken == 0 && calm.counts.different == 0 &&
        calm.counts.saved_bytes > 0);
  // Those that come with equal contents: everything is, from the first step on, and nothing else is ever kept.
  const Outcome loaded = run(4, 40, 0, 5, false, false, true);
  CHECK(loaded.runs * 4 == loaded.updates && loaded.counts.broken == 0);
  // The same where ranks have their blocks at other offsets.
  const Outcome moved = run(4, 40, 0, 1, false, false, false, false, false, /*moved=*/true);
  CHECK(moved.counts.squashed > moved.updates / 2 && moved.counts.broken == 0 && moved.counts.saved_bytes > 0);
  const Outcome moved_in = run(4, 40, 0, 5, false, false, true, false, false, /*moved=*/true);
  CHECK(moved_in.runs * 4 == moved_in.updates && moved_in.counts.broken == 0);
  const Outcome flipped = run(3, 40, 0, 3, false, true);
  CHECK(flipped.counts.squashed > 0);
  // What is made anew each time is, too.
  const Outcome lent = run(4, 40, 0, 10, false, false, false, true);
  CHECK(lent.runs * 10 < lent.updates * 4 && lent.counts.lent_bytes > 0 && lent.counts.different == 0 &&
        lent.counts.given_up == 0);
  // Pages become one where all that is in them is equal, whatever shares them.
  const Outcome joined = run(4, 40, 0, 1, false, false, false, false, /*large_pages=*/true);
  CHECK(joined.counts.squashed > joined.updates / 2 && joined.counts.saved_bytes > 0 && joined.counts.lent_bytes == 0);
  uint64_t squashed = 0, different = 0, broken = 0, given_up = 0, settled = 0;
  for (uint32_t seed = first; seed < behind; seed++) {
    const Outcome outcome = run(2 + seed % 4, 40, seed % 3 ? 0.05 : 0.4, seed, seed % 5 == 0, false, seed % 2,
                                seed % 4 > 1, /*large_pages=*/true, /*moved=*/seed / 2 % 2);
    broken += outcome.counts.broken;
  }
  CHECK(broken > 0);
  for (uint32_t seed = first; seed < behind; seed++) {
    const Outcome outcome = run(2 + seed % 4, 40, seed % 3 ? 0.05 : 0.4, seed, seed % 5 == 0, false, seed % 2,
                                seed % 4 > 1, false, /*moved=*/seed / 3 % 2);
    settled += outcome.counts.settled_bytes;
    squashed += outcome.counts.squashed;
    different += outcome.counts.different;
    broken += outcome.counts.broken;
    given_up += outcome.counts.given_up;
  }
  CHECK(squashed > 0 && different > 0 && broken > 0 && given_up > 0 && settled > 0);
  std::printf("%llu squashed, %llu different, %llu broken, %llu given up\n", static_cast<unsigned long long>(squashed),
              static_cast<unsigned long long>(different), static_cast<unsigned long long>(broken),
              static_cast<unsigned long long>(given_up));
}
