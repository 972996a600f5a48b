// SPDX-License-Identifier: Apache-2.0
// Splicing (hal/soft/splice): ranks that run mostly equal programs on one GPU, against the same programs run alone. Every
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

#include "devproxy/hal/soft/splice/splicer.h"

using namespace devproxy;
using namespace devproxy::hal;
using namespace devproxy::hal::soft;

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

constexpr uint64_t kPage = 4096, kBlocks = 12, kBlock = 5 * kPage + 512, kYoungs = 4, kBytes = 100 * kPage;
constexpr uint32_t kRW = DEVPROXY_EXECUTOR_READS | DEVPROXY_EXECUTOR_WRITES | DEVPROXY_EXECUTOR_WHOLE;

uint64_t offset_of(uint64_t block) { return block * kBlock + 512; }  // neighbours share pages

// What a step takes and changes, and what lies elsewhere each time: as gradients.
uint64_t young_of(uint32_t rank, uint64_t number) { return kBlocks + (rank + number) % kYoungs; }

// What a rank does next. Equal ranks have equal lists, but for what is odd.
struct Op {
  enum Kind { kUpdate, kCopy, kFill, kShare, kOpaque, kRenew, kFlip, kBarrier } kind;
  uint64_t block, other;  // updated by what is read of the other
  uint64_t number;        // an argument
  uint64_t at, bytes;     // of a copy
};

// The update, on any memory: depends on every byte that it reads.
void update(uint8_t* block, const uint8_t* other, uint64_t number, uint8_t* young = nullptr) {
  uint64_t mix = number;
  for (uint64_t i = 0; i < kBlock; i += 64) mix = mix * 31 + other[i];
  for (uint64_t i = 0; i < kBlock; i++) block[i] = static_cast<uint8_t>(block[i] * 5 + other[i] + (mix >> (i % 57)));
  for (uint64_t i = 0; young && i < kBlock; i++) {
    block[i] = static_cast<uint8_t>(block[i] + young[i]);
    if (number) young[i] = static_cast<uint8_t>(young[i] * 3 + 1);
  }
}

void flip(uint8_t* block, uint64_t number) {
  for (uint64_t i = 0; i < kBlock; i++) block[i] ^= static_cast<uint8_t>(number);
}

struct Rank {
  uint8_t* base = nullptr;
  int fd = -1;
  std::shared_ptr<Splicer::Member> member;
  std::vector<uint8_t> alone = std::vector<uint8_t>(kBytes);  // what its memory would be by itself
  std::vector<Op> program;
  uint64_t position = 0;

  void open(Splicer& splicer) {
    fd = memfd_create("rank", MFD_CLOEXEC);
    CHECK(ftruncate(fd, kBytes) == 0);
    base = static_cast<uint8_t*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    CHECK(base != MAP_FAILED);
    member = splicer.join(at(0), kBytes, fd);
    CHECK(member);
    for (uint64_t block = 0; block < kBlocks + kYoungs; block++)
      splicer.committed(*member, at(offset_of(block)), kBlock, position, false);
  }
  // Comes with contents, as from an image: by stretches that end between two pages. odd: so many blocks of a thousand are
  // like nobody's.
  void load(Splicer& splicer, uint32_t number, uint32_t odd, std::mt19937& dice) {
    for (uint64_t block = 0; block < kBlocks; block++) {
      const uint64_t begin = offset_of(block), end = begin + kBlock;
      for (uint64_t i = begin; i < end; i++) alone[i] = static_cast<uint8_t>(i * 7 + block);
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
  std::atomic<uint64_t>& runs;
  Here(Engine& engine, uint32_t seat, std::atomic<uint64_t>& runs) : engine(engine), seat(seat), runs(runs) {}
  void begin() override { engine.begin(seat, turn); }
  Status run() override {
    other ? update(block, other, number, young) : flip(block, number);
    runs++;
    return {};
  }
  void end() override { engine.end(turn); }
  void yield() override { engine.yield(turn); }
};

void apply(const Op& op, uint32_t rank, std::vector<uint8_t>& memory) {
  uint8_t* const block = memory.data() + offset_of(op.block);
  switch (op.kind) {
    case Op::kUpdate: {
      uint8_t* const young = memory.data() + offset_of(young_of(rank, op.number));
      std::memset(young, static_cast<int>(op.number), kBlock);
      return update(block, memory.data() + offset_of(op.other), op.number, young);
    }
    case Op::kFlip: return flip(block, op.number);
    case Op::kOpaque: return update(block, memory.data() + offset_of(op.other), op.number + rank);
    case Op::kCopy: std::memset(block + op.at, static_cast<int>(op.number), op.bytes); return;
    case Op::kFill:
    case Op::kRenew: std::memset(block, static_cast<int>(op.number), kBlock); return;
    case Op::kShare:
    case Op::kBarrier: return;
  }
}

void perform(const Op& op, uint32_t number, Rank& rank, Splicer& splicer, Here& here) {
  uint8_t* const block = rank.base + offset_of(op.block);
  uint8_t* const other = rank.base + offset_of(op.other);
  switch (op.kind) {
    case Op::kFlip:
    case Op::kUpdate: {
      const bool flips = op.kind == Op::kFlip;
      struct Params {
        uint64_t block, number, other, young;
      } params{rank.at(offset_of(op.block)), op.number, rank.at(offset_of(op.other)), 0};
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
        const uint64_t young = offset_of(young_of(number, op.number));
        params.young = rank.at(young);
        here.young = rank.base + young;
        splicer.released(*rank.member, params.young);
        splicer.committed(*rank.member, params.young, kBlock, rank.position, false);
        CHECK(splicer.before_write(params.young, kBlock).ok());
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
      CHECK(splicer.before_write(reinterpret_cast<uint64_t>(block) + op.at, op.bytes).ok());
      std::memset(block + op.at, static_cast<int>(op.number), op.bytes);
      return;
    case Op::kRenew:
      splicer.released(*rank.member, reinterpret_cast<uint64_t>(block));
      if (op.number & 1) splicer.discard(*rank.member, reinterpret_cast<uint64_t>(block), kBlock);
      splicer.committed(*rank.member, reinterpret_cast<uint64_t>(block), kBlock, rank.position, false);
      [[fallthrough]];
    case Op::kFill:
      CHECK(splicer.before_write(reinterpret_cast<uint64_t>(block), kBlock).ok());
      std::memset(block, static_cast<int>(op.number), kBlock);
      return;
    case Op::kBarrier: return;
    case Op::kShare: {  // somebody reads through the descriptor, as a peer's server does
      CHECK(splicer.before_sharing(*rank.member, reinterpret_cast<uint64_t>(block), kBlock).ok());
      std::vector<uint8_t> seen(kBlock);
      CHECK(pread(rank.fd, seen.data(), kBlock, static_cast<off_t>(offset_of(op.block))) ==
            static_cast<ssize_t>(kBlock));
      CHECK(std::memcmp(seen.data(), block, kBlock) == 0);
      return;
    }
  }
}

// Steps as of training, each after a collective: the same updates again and again; now and then something
// else, for all ranks or for one. flips: the first two ranks change every block and change it
// back, but for once.
std::vector<std::vector<Op>> programs(uint32_t ranks, uint32_t steps, double odd, bool flips, std::mt19937& dice) {
  std::vector<std::vector<Op>> all(ranks);
  std::uniform_real_distribution<double> chance;
  for (uint32_t step = 0; step < steps; step++) {
    for (auto& program : all) program.push_back({Op::kBarrier, 0, 0, 0, 0, 0});
    for (uint64_t i = 0; i + 1 < kBlocks; i += 2) {
      const Op usual{Op::kUpdate, i, i + 1, step % 3, 0, 0};
      for (auto& program : all) program.push_back(usual);
      for (size_t rank = 0; flips && rank < 2; rank++)
        for (const uint64_t block : {i, i + 1})
          for (int times = step == 30 ? 1 : 2; times > 0; times--)
            all[rank].push_back({Op::kFlip, block, block, 0x5a, 0, 0});
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

struct Outcome {
  SpliceCounts counts;
  uint64_t updates = 0, runs = 0;
};

Outcome run(uint32_t ranks, uint32_t steps, double odd, uint32_t seed, bool leave, bool flips = false,
            bool loads = false) {
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
  auto opened = Splicer::open(config, &engine);
  CHECK(opened.ok());
  Splicer& splicer = **opened;
  std::vector<Rank> all(ranks);
  const auto lists = programs(ranks, steps, odd, flips, dice);
  std::atomic<uint64_t> runs{0};
  Outcome outcome;
  for (uint32_t i = 0; i < ranks; i++) {
    all[i].program = lists[i];
    all[i].open(splicer);
    if (loads) all[i].load(splicer, i, calm ? 0 : 100, dice);
    if (leave && i == 0) all[i].program.resize(lists[i].size() / 2);
    for (const Op& op : all[i].program) {
      apply(op, i, all[i].alone);
      outcome.updates += op.kind == Op::kUpdate || op.kind == Op::kFlip;
    }
  }
  // Each block has four or five whole pages.
  const uint64_t saved = splicer.counts().saved_bytes;
  CHECK(!loads || (calm ? saved >= kBlocks * 4 * kPage * (ranks - 1) : saved > 0));
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
      CHECK(std::memcmp(all[i].base, all[i].alone.data(), kBytes) == 0);
      if (leave && i == 0) all[i].close(splicer);  // the others still share its pages
    });
  for (std::thread& thread : threads) thread.join();
  for (uint32_t i = leave ? 1 : 0; i < ranks; i++) CHECK(std::memcmp(all[i].base, all[i].alone.data(), kBytes) == 0);
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

  explicit Lockstep(uint32_t count) : ranks(count), together(count) {
    SpliceConfig config;
    config.least_bytes = kPage;
    config.least_ns = 0;
    config.thrifty = false;
    config.patience_ns = 60'000'000'000, config.idle_patience_ns = 10'000'000'000;
    auto opened = Splicer::open(config, &engine);
    CHECK(opened.ok());
    splicer = std::move(*opened);
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
  // The places of the accesses are those of their addresses, one after another.
  void launch(Rank& rank, const char* name, std::vector<Access> accesses, Doing& doing, std::function<void()> what) {
    std::vector<uint64_t> params;
    for (Access& access : accesses) {
      access.place = static_cast<uint32_t>(params.size() * sizeof(uint64_t));
      params.push_back(access.addr);
    }
    SpliceLaunch launch;
    launch.name = name;
    launch.params = reinterpret_cast<const uint8_t*>(params.data());
    launch.params_bytes = params.size() * sizeof(uint64_t);
    launch.position = ++rank.position;
    launch.repeatable = true;
    launch.accesses = std::move(accesses);
    doing.what = std::move(what);
    CHECK(splicer->launch(*rank.member, launch, doing).code() == doing.result.code());
  }
  void fill(Rank& rank, uint64_t offset, uint64_t bytes, int value) {
    ok(splicer->before_write(rank.at(offset), bytes));
    std::memset(rank.base + offset, value, bytes);
  }
};

constexpr uint64_t kPart = 512;

void add(uint8_t* block, const uint8_t* part) {
  for (uint64_t i = 0; i < kBlock; i++) block[i] = static_cast<uint8_t>(block[i] + part[i % kPart] + 1);
}

// What a launch only reads may lie elsewhere in each rank, but not where one of them writes: the first rank reads from the
// block itself in the end, the second what is equal before the launch.
void test_overlap() {
  Lockstep job(2);
  job.run(12, [&](int step, uint32_t i, Doing& doing) {
    Rank& rank = job.ranks[i];
    const uint64_t block = offset_of(0), inside = block + 2 * kPart;
    const uint64_t part = step > 7 && i == 0 ? inside : offset_of(2 + i);
    ok(job.splicer->before_write(rank.at(offset_of(2 + i)), kPart));
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
// makes something on the way, in a stable buffer of its own. Nothing of it is compared once it is learnt.
void test_numbers() {
  constexpr uint32_t kReads = DEVPROXY_EXECUTOR_READS, kMakes = DEVPROXY_EXECUTOR_WRITES | DEVPROXY_EXECUTOR_WHOLE;
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
    splicer.released(*rank.member, rank.at(copied));
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
    splicer.released(*rank.member, rank.at(made));
    std::vector<uint8_t> sums(kPart, static_cast<uint8_t>(value * factor)), half(kPart);
    add(rank.alone.data() + state, sums.data());
    for (uint64_t k = 0; k < kPart; k++) half[k] = static_cast<uint8_t>(rank.alone[state + k] * 7);
    add(rank.alone.data() + state, half.data());
    CHECK(std::memcmp(at + state, rank.alone.data() + state, kBlock) == 0);
  };
  job.run(kSteps, train);
  const SpliceCounts counts = job.splicer->counts();
  CHECK(counts.different == 0 && counts.given_up == 0);
  CHECK(counts.squashed - squashed == 3 * 2 * (kSteps - kLearnt));  // use, make and take, for two others
  CHECK(counts.compared_bytes == compared);
  job.run(12, train, kSteps);
  CHECK(job.splicer->counts().different > 0);
}

void test_pool() {
  auto opened = PagePool::open();
  CHECK(opened.ok());
  PagePool& pool = **opened;
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

int main() {
  test_pool();
  test_overlap();
  test_one_differs();
  test_failure();
  test_numbers();
  // Equal ranks: nearly everything is computed once.
  const Outcome calm = run(4, 40, 0, 1, false);
  CHECK(calm.counts.squashed > calm.updates / 2 && calm.counts.broken == 0 && calm.counts.different == 0 &&
        calm.counts.saved_bytes > 0);
  // Those that come with equal contents: everything is, from the first step on, and nothing else is ever kept.
  const Outcome loaded = run(4, 40, 0, 5, false, false, true);
  CHECK(loaded.runs * 4 == loaded.updates && loaded.counts.broken == 0);
  const Outcome flipped = run(3, 40, 0, 3, false, true);
  CHECK(flipped.counts.squashed > 0);
  uint64_t squashed = 0, different = 0, broken = 0, given_up = 0;
  for (uint32_t seed = 2; seed < 14; seed++) {
    const Outcome outcome = run(2 + seed % 4, 40, seed % 3 ? 0.05 : 0.4, seed, seed % 5 == 0, false, seed % 2);
    squashed += outcome.counts.squashed;
    different += outcome.counts.different;
    broken += outcome.counts.broken;
    given_up += outcome.counts.given_up;
  }
  CHECK(squashed > 0 && different > 0 && broken > 0 && given_up > 0);
  std::printf("%llu squashed, %llu different, %llu broken, %llu given up\n", static_cast<unsigned long long>(squashed),
              static_cast<unsigned long long>(different), static_cast<unsigned long long>(broken),
              static_cast<unsigned long long>(given_up));
}
