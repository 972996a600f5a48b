// SPDX-License-Identifier: Apache-2.0
// The pure cores of the server against slow models: mirror, handle table, replay log, ledger table, range set;
// and the decisions of a cut.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <list>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/csrc/base/json.h"
#include "devproxy/csrc/server/cut.h"
#include "devproxy/csrc/server/gate.h"
#include "devproxy/csrc/server/handle_table.h"
#include "devproxy/csrc/server/image_store.h"
#include "devproxy/csrc/server/ledger.h"
#include "devproxy/csrc/server/live_trace.h"
#include "devproxy/csrc/server/memory_mirror.h"
#include "devproxy/csrc/server/memory_turns.h"
#include "devproxy/csrc/server/replay_log.h"
#include "devproxy/csrc/server/state_record.h"
#include "devproxy/hal/queue.h"
#include "devproxy/hal/soft/range_set.h"
#include "devproxy/torch/executor/placement.h"

using namespace devproxy;
using namespace devproxy::server;

#define EXPECT(condition)                                                           \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                \
    }                                                                               \
  } while (0)

namespace {

using Answer = MemoryMirror::Answer;

void mirror_knows_what_is_live() {
  MemoryMirror m(1000, 2000);
  std::vector<Range> forgotten;
  Range freed;
  EXPECT(m.add(1000, 100, 7, &forgotten) == Answer::kOk);
  EXPECT(m.add(1050, 100, 0, &forgotten) == Answer::kOverlaps);
  EXPECT(m.add(999, 10, 0, &forgotten) == Answer::kOutside);
  EXPECT(m.add(1990, 11, 0, &forgotten) == Answer::kOutside);
  EXPECT(m.add(1500, 0, 0, &forgotten) == Answer::kOutside);
  EXPECT(m.add(1500, UINT64_MAX, 0, &forgotten) == Answer::kOutside);
  EXPECT(m.add(1100, 900, 0, &forgotten) == Answer::kOk);
  EXPECT(m.contains(1000, 100, 1) && m.contains(1099, 1, 1) && !m.contains(1050, 51, 1));  // not across two allocations
  EXPECT(!m.contains(1050, UINT64_MAX, 1) && !m.contains(999, 1, 1) && !m.contains(2000, 1, 1));
  EXPECT(m.remove(1001, 50, false, &freed) == Answer::kUnknown);
  EXPECT(m.remove(1000, 50, true, &freed) == Answer::kOk && freed == (Range{1000, 100}));
  EXPECT(m.remove(1000, 51, true, &freed) == Answer::kUnknown);
  EXPECT(m.contains(1000, 10, 49) && !m.contains(1000, 10, 50) && m.live_bytes() == 900 && m.live_count() == 1);
  m.retire(49, &forgotten);
  EXPECT(forgotten.empty() && m.has_freed());
  m.retire(50, &forgotten);
  EXPECT(forgotten.size() == 1 && !m.has_freed() && !m.contains(1000, 10, 1));
  EXPECT(m.first_gap(1000, 2000, 100, 4) == 1000 && m.first_gap(1000, 2000, 101, 4) == 0);
}

// The client gives out what a stream has freed in other pieces, while commands from before that are still to come.
void mirror_keeps_what_is_left_of_a_freed_range() {
  MemoryMirror m(1000, 2000);
  std::vector<Range> reused, forgotten;
  Range freed;
  EXPECT(m.add(1000, 100, 0, &reused) == Answer::kOk && m.add(1100, 100, 0, &reused) == Answer::kOk);
  EXPECT(m.remove(1000, 10, true, &freed) == Answer::kOk && m.remove(1100, 20, true, &freed) == Answer::kOk);
  EXPECT(!m.contains(1050, 100, 5));  // these were two
  EXPECT(m.add(1040, 100, 0, &reused) == Answer::kOk);
  EXPECT((reused == std::vector<Range>{{1040, 60}, {1100, 40}}) && m.freed_bytes() == 100);
  EXPECT(m.contains(1000, 100, 9) && m.contains(1030, 70, 9) && !m.contains(1030, 70, 10));
  EXPECT(m.contains(1100, 100, 19) && !m.contains(1100, 100, 20) && m.contains(1040, 100, 20));
  EXPECT(m.remove(1040, 30, true, &freed) == Answer::kOk && m.add(1000, 200, 0, &reused) == Answer::kOk);
  EXPECT(!m.has_freed() && m.contains(1000, 100, 9) && m.contains(1100, 100, 19) && m.contains(1040, 100, 29));
  EXPECT(m.remove(1000, 40, true, &freed) == Answer::kOk);
  m.retire(39, &forgotten);
  EXPECT(forgotten.empty());
  m.retire(40, &forgotten);
  EXPECT((forgotten == std::vector<Range>{{1000, 200}}));
  // A restore says again what a dump has seen.
  EXPECT(m.add(1000, 60, 0, &reused) == Answer::kOk && m.remove(1000, 50, true, &freed) == Answer::kOk);
  EXPECT(m.add(1000, 20, 0, &reused) == Answer::kOk);
  MemoryMirror again(1000, 2000);
  m.for_each_live([&](uint64_t addr, const auto& r) {
    EXPECT(again.add(addr, r.bytes, r.flags, &reused, r.crossed_before) == Answer::kOk);
  });
  m.for_each_freed([&](uint64_t addr, const auto& r) {
    EXPECT(again.add(addr, r.bytes, r.flags, &reused, r.crossed_before) == Answer::kOk);
    EXPECT(again.remove(addr, r.freed_at, true, &freed) == Answer::kOk);
  });
  EXPECT(again.contains(1000, 60, 49) && !again.contains(1000, 60, 50) && again.contains(1000, 20, 50));
}

// A collective that waits for another rank keeps its own buffers, and not all that was freed behind it.
void mirror_lets_go_behind_a_collective() {
  MemoryMirror m(1000, 2000);
  std::vector<Range> told;
  Range freed;
  for (uint64_t at = 1000; at < 1400; at += 100) EXPECT(m.add(at, 100, 0, &told) == Answer::kOk);
  for (uint64_t at = 1000; at < 1400; at += 100)
    EXPECT(m.remove(at, 20 + (at - 1000) / 10, true, &freed) == Answer::kOk);
  hal::PendingUse use{.anything_from = 45, .ranges = {{10, 1099, 2}, {40, 1200, 100}}};
  const auto look = [&] {
    told.clear();
    m.retire_unless([&](auto... range) { return use.touches(range...); }, &told);
    return told;
  };
  EXPECT(look() ==
         std::vector<Range>({{1200, 100}}));  // freed at 40; the others: the first two lie in a buffer, 50 is late
  EXPECT(m.contains(1000, 100, 19) && m.contains(1100, 100, 29) && m.contains(1300, 100, 49) &&
         !m.contains(1200, 1, 1));
  EXPECT(look().empty());
  use.anything_from = UINT64_MAX;
  EXPECT(look() == std::vector<Range>({{1300, 100}}));
  use.ranges[0] = {10, 1100, 1};
  EXPECT(look() == std::vector<Range>({{1000, 100}}));
  use.ranges.clear();
  EXPECT(look() == std::vector<Range>({{1100, 100}}) && !m.has_freed() && m.freed_bytes() == 0);
  // One whose range was reused since is passed over.
  EXPECT(m.add(1000, 100, 0, &told) == Answer::kOk && m.remove(1000, 60, true, &freed) == Answer::kOk);
  EXPECT(m.add(1000, 50, 0, &told) == Answer::kOk);
  EXPECT(look() == std::vector<Range>({{1050, 50}}) && m.live_bytes() == 50);
}

// byte by byte; and every command that may still come finds the allocation that it was sent for.
void mirror_agrees_with_bytes(uint32_t seed) {
  constexpr uint64_t kBegin = 64, kEnd = 320;
  std::mt19937 random(seed);
  MemoryMirror m(kBegin, kEnd);
  struct Byte {
    bool live = false;
    uint64_t freed_at = 0;
  };
  std::array<Byte, kEnd> bytes_now;
  struct Past {
    uint64_t addr, bytes, freed_at;
  };
  std::map<uint64_t, uint64_t> live;  // addr, bytes
  std::vector<Past> past;             // of which commands may come
  for (uint64_t position = 1; position < 4000; position++) {
    const uint64_t addr = kBegin + random() % (kEnd - kBegin), bytes = 1 + random() % 24;
    const uint32_t what = random() % 8;
    std::vector<Range> told;
    std::set<uint64_t> expected, got;
    if (what < 4) {
      bool overlaps = addr + bytes > kEnd;
      for (uint64_t at = addr; at < std::min(addr + bytes, kEnd); at++) {
        overlaps |= bytes_now[at].live;
        if (bytes_now[at].freed_at) expected.insert(at);
      }
      if (overlaps) expected.clear();
      EXPECT((m.add(addr, bytes, 0, &told) == Answer::kOk) == !overlaps);
      if (!overlaps) {
        live[addr] = bytes;
        for (uint64_t at = addr; at < addr + bytes; at++) bytes_now[at] = {true, 0};
      }
    } else if (what < 7 && !live.empty()) {
      const auto it = std::next(live.begin(), static_cast<long>(random() % live.size()));
      const bool keep = random() % 8;
      Range freed;
      EXPECT(m.remove(it->first, position, keep, &freed) == Answer::kOk && freed == (Range{it->first, it->second}));
      for (uint64_t at = it->first; at < it->first + it->second; at++) bytes_now[at] = {false, keep ? position : 0};
      if (keep)
        past.push_back({it->first, it->second, position});
      else
        past.clear();  // nothing is under way
      live.erase(it);
    } else if (what == 7) {
      const uint64_t oldest = position - std::min<uint64_t>(position, random() % 50);
      m.retire(oldest, &told);
      std::erase_if(past, [&](const Past& p) { return p.freed_at <= oldest; });
      for (uint64_t at = kBegin; at < kEnd; at++)
        if (bytes_now[at].freed_at && bytes_now[at].freed_at <= oldest) bytes_now[at] = {}, expected.insert(at);
    }
    for (const Range& range : told)
      for (uint64_t at = range.addr; at < range.addr + range.bytes; at++) EXPECT(got.insert(at).second);
    EXPECT(got == expected);
    uint64_t live_bytes = 0, freed_bytes = 0;
    for (const Byte& b : bytes_now) live_bytes += b.live, freed_bytes += b.freed_at != 0;
    EXPECT(m.live_bytes() == live_bytes && m.live_count() == live.size() && m.freed_bytes() == freed_bytes);
    EXPECT(m.has_freed() == (freed_bytes != 0));
    // A range that no allocation holds is refused where a byte of it is nobody's.
    const uint64_t ask = position - std::min<uint64_t>(position, random() % 100);
    bool known = addr + bytes <= kEnd;
    for (uint64_t at = addr; at < std::min(addr + bytes, kEnd); at++)
      known &= bytes_now[at].live || bytes_now[at].freed_at > ask;
    EXPECT(known || !m.contains(addr, bytes, ask));
    for (const auto& [begin, size] : live) EXPECT(m.contains(begin, size, position));
    for (const Past& p : past) {
      const uint64_t skip = random() % p.bytes;
      EXPECT(m.contains(p.addr + skip, 1 + random() % (p.bytes - skip), p.freed_at - 1));
    }
    if (const uint64_t border = addr; live.contains(border))  // nothing was cut since
      for (const auto& [begin, size] : live)
        if (begin + size == border) EXPECT(!m.contains(begin, size + 1, position));
  }
}

void handles_are_typed_and_never_stale() {
  HandleTable<int, HandleKind::kEvent> table;
  const VHandle a = VHandle::make(HandleKind::kEvent, 1, 0), b = VHandle::make(HandleKind::kEvent, 2, 0);
  EXPECT(table.insert(a, 10) && !table.insert(a, 11) && table.insert(b, 20));
  EXPECT(!table.insert(VHandle::make(HandleKind::kStream, 3, 3), 1) && !table.insert(VHandle{}, 1));
  EXPECT(*table.find(a) == 10 && *table.find(a) == 10 && *table.find(b) == 20 && !table.find(VHandle{}));
  EXPECT(table.erase(b) && !table.find(b) && !table.erase(b) && *table.find(a) == 10);
  table.erase_if([](VHandle, int v) { return v == 10; });
  EXPECT(!table.find(a) && table.size() == 0);
}

void replay_log_is_as_long_as_the_state() {
  ReplayLog log;
  const VHandle module = VHandle::make(HandleKind::kModule, 1, 0),
                function = VHandle::make(HandleKind::kFunction, 1, 0), event = VHandle::make(HandleKind::kEvent, 1, 0);
  const int one = 1, two = 2;
  EXPECT(!log.create(function, module, 2, &one, sizeof one));  // its module does not exist
  EXPECT(log.create(module, {}, 1, &one, sizeof one, {9, 9}) && !log.create(module, {}, 1, &one, sizeof one));
  EXPECT(log.create(function, module, 2, &one, sizeof one) && log.create(event, {}, 3, &one, sizeof one));
  for (int i = 0; i < 100; i++) EXPECT(log.set(event, 4, 0, &i, sizeof i));
  EXPECT(log.set(function, 5, 1, &one, sizeof one) && log.set(function, 5, 2, &one, sizeof one) &&
         log.set(function, 5, 1, &two, sizeof two));
  EXPECT(!log.set(VHandle{5}, 4, 0, &one, sizeof one) && !log.destroy(VHandle{5}));
  EXPECT(log.entries().size() == 6);
  std::vector<uint16_t> order;
  for (const auto& e : log.entries()) order.push_back(e.opcode);
  EXPECT((order == std::vector<uint16_t>{1, 2, 3, 4, 5, 5}));
  EXPECT(log.entries().back().key == 1 && log.entries().back().request[0] == 2);  // set last, so last
  EXPECT(log.entries().front().creates && log.entries().front().bulk.size() == 2);
  EXPECT(log.destroy(module));  // with its function and that one's attributes
  EXPECT(log.entries().size() == 2 && !log.destroy(function));
  EXPECT(log.create(module, {}, 1, &one, sizeof one) && log.create(function, module, 2, &one, sizeof one));
  EXPECT(log.destroy(function) && log.destroy(module) && log.destroy(event) && log.entries().empty());
  // A root is there without an entry, and has only what was set.
  const VHandle legacy = kLegacyStream;
  log.root(legacy);
  EXPECT(!log.create(legacy, {}, 1, &one, sizeof one));
  EXPECT(log.set(legacy, 6, 8, &one, sizeof one) && log.set(legacy, 6, 8, &two, sizeof two));
  EXPECT(log.entries().size() == 1 && log.entries().front().request[0] == 2 && !log.entries().front().creates);
  EXPECT(log.destroy(legacy) && log.entries().empty() && !log.set(legacy, 6, 8, &one, sizeof one));
}

void ledger_never_gives_more_than_there_is(uint32_t seed) {
  std::mt19937 random(seed);
  const std::map<uint32_t, uint64_t> limits{{1, 1000}, {2, 1000}, {3, 500}, {4, 300}, {5, 700}, {6, 100}};
  LedgerTable table;
  std::map<uint32_t, uint64_t> model;  // those who have joined
  for (int step = 0; step < 3000; step++) {
    const uint32_t pid = 1 + random() % 6;
    const ProcessId owner{pid, 0, 100};
    const uint64_t limit = limits.at(pid);
    uint64_t used = 0, total = limit;
    for (const auto& [p, bytes] : model) used += bytes, total = std::max(total, limits.at(p));
    EXPECT(table.used() == used);
    const uint64_t own = model.count(pid) ? model[pid] : 0;
    const uint64_t free = std::min(limit - own, total > used ? total - used : 0);
    EXPECT(table.free(owner, limit) == free);
    const uint64_t wanted = random() % 600, minimum = random() % 400;
    switch (random() % 5) {
      case 0:
      case 1: {
        const auto got = table.take(owner, wanted, minimum, limit);
        EXPECT(got.has_value() == (minimum <= free && model.count(pid)));
        if (!got) break;
        EXPECT(*got >= minimum && *got <= free && (*got >= wanted || wanted > free));
        model[pid] += *got;
        break;
      }
      case 2:
        table.give(owner, wanted);
        if (model.count(pid)) model[pid] -= std::min(model[pid], wanted);
        break;
      case 3:
        EXPECT(table.join(owner, pid, limit));
        model[pid] += 0;
        break;
      default:
        if (random() % 20) break;
        table.reap([&](const ProcessId& id) { return id.pid != pid; });
        model.erase(pid);
    }
  }
}

void ledger_limits_each_job_and_all_of_them() {
  LedgerTable table;
  const ProcessId large{1, 0, 100}, small{2, 0, 100};
  EXPECT(table.join(large, 1, 1024) && table.join(small, 2, 512) && table.take(large, 320, 320, 1024) == 320);
  EXPECT(table.free(small, 512) == 512 && table.take(small, 512, 512, 512) == 512);
  EXPECT(table.free(small, 512) == 0 && table.free(large, 1024) == 1024 - 320 - 512);
  EXPECT(!table.take(large, 200, 200, 1024));
  table.give(small, 512);
  EXPECT(table.free(large, 1024) == 1024 - 320);
}

// Entries with what is kept once, and with jobs that move, against sums by job.
void ledger_counts_pages_once_and_moving_jobs_once(uint32_t seed) {
  std::mt19937 random(seed);
  constexpr uint64_t kLimit = 1000;
  LedgerTable table;
  struct One {
    uint64_t bytes = 0, saved = 0;
    bool aside = false;
    uint64_t need() const { return bytes > saved ? bytes - saved : 0; }
  };
  std::map<uint32_t, One> model;
  const auto job_of = [](uint32_t pid) { return pid % 3; };
  for (int step = 0; step < 3000; step++) {
    const uint32_t pid = 1 + random() % 8;
    const ProcessId owner{pid, 0, 100};
    uint64_t aside[3] = {}, here[3] = {}, used = 0;
    for (const auto& [p, one] : model) (one.aside ? aside : here)[job_of(p)] += one.need();
    for (int job = 0; job < 3; job++) used += std::max(aside[job], here[job]);
    EXPECT(table.used() == used);
    if (!model.count(pid)) {
      EXPECT(table.join(owner, job_of(pid), kLimit) && !table.find(owner)->bytes);
      model[pid] = {};
      continue;
    }
    One& own = model[pid];
    switch (random() % 6) {
      case 0:
      case 1: {
        // A fresh server has the room of what is set aside of its own job, and nobody else has.
        if (own.aside) break;
        const uint64_t others = used - std::max(aside[job_of(pid)], here[job_of(pid)]) + here[job_of(pid)];
        const uint64_t free = std::min(kLimit - std::min(kLimit, own.need()), others > kLimit ? 0 : kLimit - others);
        EXPECT(table.free(owner, kLimit) == free);
        const uint64_t bytes = random() % 600;
        const uint64_t beside = used - std::max(aside[job_of(pid)], here[job_of(pid)]) + bytes;
        EXPECT(table.free_alone(owner, kLimit, bytes) ==
               std::min(kLimit - bytes, beside > kLimit ? 0 : kLimit - beside));
        const uint64_t wanted = random() % 400, most = random() % 800;
        const auto got = table.take(owner, wanted, wanted, kLimit, most);
        EXPECT(got.has_value() == (wanted <= std::min(free, most)));
        own.bytes += got.value_or(0);
        break;
      }
      case 2: {
        const uint64_t less = random() % 300;
        table.give(owner, less);
        own.bytes -= std::min(own.bytes, less);
        break;
      }
      case 3: table.find(owner)->saved = own.saved = random() % 500; break;
      case 4: table.find(owner)->aside = own.aside = random() % 2; break;
      default:
        if (random() % 4) break;
        table.reap([&](const ProcessId& id) { return id.pid != pid; });
        model.erase(pid);
    }
  }
}

void range_set_agrees_with_bits(uint32_t seed) {
  std::mt19937 random(seed);
  hal::soft::RangeSet set;
  std::vector<bool> bits(256);
  for (int step = 0; step < 3000; step++) {
    const uint64_t a = random() % 250, b = a + 1 + random() % std::min<uint64_t>(40, 255 - a);
    const bool insert = random() % 2;
    if (insert)
      set.insert(a, b);
    else
      set.erase(a, b);
    for (uint64_t i = a; i < b; i++) bits[i] = insert;
    uint64_t bytes = 0, last_end = 0;
    for (const auto& [begin, end] : set) {
      EXPECT(begin < end && (last_end == 0 || begin > last_end));  // disjoint, neighbours joined
      for (uint64_t i = begin; i < end; i++) EXPECT(bits[i]);
      bytes += end - begin;
      last_end = end;
    }
    EXPECT(bytes == set.bytes() && bytes == static_cast<uint64_t>(std::count(bits.begin(), bits.end(), true)));
  }
}

// A training job's allocations, as sizes over time. step() plays one step and remembers where the gradients are gone.
struct Training {
  LiveTrace trace;
  uint64_t clock_us = 0, live = 0;
  static constexpr uint64_t kMiB = 1 << 20, kLayers = 24, kParams = 200 * kMiB, kOptimizer = 400 * kMiB;
  void change(int64_t bytes) {
    live += static_cast<uint64_t>(bytes);
    clock_us += 10;
    trace.changed(live, [&] { return clock_us; });
  }
  void temporaries(int n) {
    for (int i = 0; i < n; i++) change(3 * kMiB), change(-3 * static_cast<int64_t>(kMiB));
  }
  void start(bool optimizer) { change(kParams), optimizer ? change(kOptimizer) : void(); }
  void step(int micro_batches = 1) {
    uint64_t grads = 0;
    for (int m = 0; m < micro_batches; m++) {
      for (uint64_t i = 0; i < kLayers; i++) change(20 * kMiB), temporaries(5);
      for (uint64_t i = 0; i < kLayers; i++) {
        temporaries(5);
        if (m == 0) change(kParams / kLayers), grads += kParams / kLayers;
        change(-20 * static_cast<int64_t>(kMiB));
      }
    }
    for (int i = 0; i < 8; i++) change(kParams / 8);
    for (int i = 0; i < 8; i++) change(-static_cast<int64_t>(kParams / 8));
    if (!optimizer_there) change(kOptimizer), optimizer_there = true;
    for (; grads; grads -= kParams / kLayers) change(-static_cast<int64_t>(kParams / kLayers));
  }
  bool optimizer_there = true;
};

void trace_finds_the_point_after_zero_grad() {
  for (const int micro_batches : {1, 8}) {
    Training t;
    t.start(true);
    for (int i = 0; i < 6; i++) t.step(micro_batches);
    const uint64_t least = Training::kParams + Training::kOptimizer;
    t.change(20 * Training::kMiB);
    EXPECT(t.trace.trough_bytes() == 0 || t.trace.trough_bytes() >= least);
    t.change(-20 * static_cast<int64_t>(Training::kMiB));
    for (int i = 0; i < 2; i++) t.step(micro_batches);
    EXPECT(t.trace.trough_bytes() == least && t.trace.period_us() > 1000);
    EXPECT(t.trace.at_trough(t.live) && !t.trace.at_trough(t.live + Training::kParams / Training::kLayers));
    EXPECT(!t.trace.at_trough(least + Training::kParams));  // behind backward, with gradients
  }
}

void trace_forgets_an_earlier_phase() {
  Training t;
  t.optimizer_there = false;
  t.start(false);
  t.temporaries(50);
  for (int i = 0; i < 12; i++) t.step();  // the first one makes the optimizer's state
  EXPECT(t.trace.trough_bytes() == Training::kParams + Training::kOptimizer);
}

void trace_of_constant_and_random_memory() {
  LiveTrace constant;
  constant.changed(1 << 30, [] { return 1; });
  for (int i = 0; i < 1000; i++) constant.changed((1 << 30) + i % 2 * 4096, [] { return 1; });
  EXPECT(constant.trough_bytes() == UINT64_MAX && constant.at_trough(1 << 30));  // now is as good as ever
  // Ever rising: no value comes again, so a cut waits for its deadline.
  LiveTrace rising;
  for (uint64_t i = 1; i < 60; i++) {
    rising.changed(i * (100 << 20) + (1 << 30), [] { return 1; });
    rising.changed(i * (100 << 20), [] { return 1; });
  }
  EXPECT(rising.trough_bytes() == 0 && !rising.at_trough(1) && !rising.at_trough(UINT64_MAX / 2));
}

// An op that makes temporaries of `bytes` first, as many as `before`, and then its result. Where that came to lie.
const void* run_op(const void* op, void* output, size_t bytes, int before) {
  static char heap[8];
  int heaps = 0;
  const auto allocate = [&] {
    if (void* p = aten::placement::take(bytes)) return static_cast<const void*>(p);
    aten::placement::note(bytes, &heap[heaps]);
    return static_cast<const void*>(&heap[heaps++]);
  };
  aten::PlacementScope scope(op);
  const size_t number = scope.offer(output, bytes);
  scope.open();
  for (int i = 0; i < before; i++) allocate();
  const void* const result = allocate();
  scope.close();
  scope.became(number, result);
  scope.remember();
  return result;
}

void a_result_gets_its_place_also_behind_temporaries_of_its_size() {
  void* const output = reinterpret_cast<void*>(kRangeBase + 4096);
  int op = 0, other = 0;
  EXPECT(run_op(&op, output, 64, 0) == output);
  EXPECT(run_op(&op, output, 128, 2) != output);
  for (int i = 0; i < 3; i++) EXPECT(run_op(&op, output, 128, 2) == output);               // remembered
  EXPECT(run_op(&op, output, 64, 0) == output);                                            // of that size only
  EXPECT(run_op(&other, output, 128, 0) == output);                                        // and of that op
  EXPECT(run_op(&op, output, 128, 1) != output && run_op(&op, output, 128, 1) == output);  // it may go another way
  // What is freed before the result comes is free for it.
  aten::PlacementScope scope(&other);
  scope.offer(output, 32);
  EXPECT(aten::placement::take(32) == nullptr);  // not open yet
  scope.open();
  EXPECT(aten::placement::take(32) == output && aten::placement::take(32) == nullptr);
  aten::placement::give_back(output);
  EXPECT(aten::placement::take(32) == output && aten::placement::take(16) == nullptr);
}

// A state as servers wrote it before they had structs for it: members in another order, some missing.
void a_state_keeps_its_form() {
  const std::string text =
      R"({"version":2,"abi":"ab","gpu":1,"device":"soft","memory_bytes":64,"next_number":3,"uptime_us":5,"last_fault":"",)"
      R"("gone":{"calls":7,"peak_bytes":9},"images":[[1,18446744073709551615,3]],"clients":[{"number":2,"pid":10,"slot":4,)"
      R"("position":128,"device":[{"addr":4096,"bytes":8,"flags":1,"offset":0},)"
      R"({"addr":18446744073709551000,"bytes":4,"offset":8,"module":5,"name":"x\n\u00e9\"","given":true}],)"
      R"("pinned":[[32,64]],"events":[[3,44]],"limits":[[1,2]],"output":"YWI=","log":[{"opcode":9,"handle":6,"key":0,)"
      R"("request":"AAEC","globals":[12]}],"host_functions":[8],"fault":{"code":-1,"text":"t","ended":true}}]})";
  auto read = read_state(text);
  EXPECT(read.ok() && read->abi == "ab" && read->gone.calls == 7 && read->gone.frees == 0 && read->clients.size() == 1);
  EXPECT(read->images[0] == (ImageRecord{1, UINT64_MAX, 3}));
  const ClientRecord& c = read->clients[0];
  EXPECT(c.slot == 4 && !c.framework && c.told.major == -1 && c.position == 128 && c.pinned[0] == Pair(32, 64));
  EXPECT(c.device[0].flags == 1 && c.device[0].module == 0 && c.device[1].addr == 18446744073709551000u);
  EXPECT(c.device[1].name == "x\n\xc3\xa9\"" && c.device[1].given && c.errors.bytes.empty());
  EXPECT(c.output.bytes == (std::vector<uint8_t>{'a', 'b'}) && c.log[0].request.bytes.size() == 3);
  EXPECT(c.log[0].globals == std::vector<uint64_t>{12} && c.host_functions[0] == 8 && c.fault.code == -1);
  // What is written is read as the same, and is one text.
  const std::string again = json_of(*read);
  auto reread = read_state(again);
  EXPECT(reread.ok() && json_of(*reread) == again);
  for (const char* bad :
       {"", "{", "[2]", "7", "{\"version\":1}", "{\"version\":\"2\"}", "{\"version\":2,\"gpu\":\"x\"}",
        "{\"version\":2,\"clients\":7}", "{\"version\":2,\"clients\":[{\"output\":\"a*cd\"}]}"})
    EXPECT(!read_state(bad).ok());
  // The error names the member that is of another kind.
  for (const auto& [bad, member] : std::vector<std::pair<const char*, const char*>>{
           {R"({"version":2,"gpu":"x"})", "(/gpu)"},
           {R"({"version":2,"clients":[{},{"told":{"major":[]}}]})", "(/clients/1/told/major)"},
           {R"({"version":2,"clients":[{"pinned":[[1,"a"]]}]})", "(/clients/0/pinned/0/1)"},
           {R"({"version":2,"clients":[{"output":"a*cd"}]})", "'a*cd'"}})
    EXPECT(read_state(bad).status().text().find(member) != std::string::npos);
}

void base64_is_its_own_inverse() {
  for (size_t n = 0; n < 50; n++) {
    std::vector<uint8_t> bytes(n);
    for (size_t i = 0; i < n; i++) bytes[i] = static_cast<uint8_t>(i * 37 + n);
    EXPECT(from_base64(base64(bytes.data(), n)) == bytes);
  }
  EXPECT(!from_base64("abc") && !from_base64("a*cd") && !from_base64("ab=c"));
}

// Threads put, find and drop few images: whoever finds one finds its bytes, there is never a second one of a hash, and
// in the end there is none.
void images_live_as_long_as_somebody_holds_them() {
  ImageStore store;
  auto work = [&](uint32_t seed) {
    std::mt19937 random(seed);
    ImageUpload upload;
    std::vector<ImageStore::Ref> held(4);
    for (int i = 0; i < 20000; i++) {
      const std::vector<uint8_t> bytes(100 + random() % 3, static_cast<uint8_t>(random() % 3));
      const ImageHash hash = image_hash(bytes.data(), bytes.size());
      ImageStore::Ref& place = held[random() % held.size()];
      place = store.find(hash);
      if (!place) {
        const size_t first = random() % bytes.size();
        if (first) EXPECT(!upload.piece(store, hash, bytes.size(), 0, bytes.data(), first));
        place = upload.piece(store, hash, bytes.size(), first, bytes.data() + first, bytes.size() - first);
      }
      EXPECT(place && place->hash == hash && place->bytes == bytes);
      if (const ImageStore::Ref again = store.find(hash)) EXPECT(again == place);
      if (random() % 2) place.reset();
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t seed = 1; seed <= 4; seed++) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  EXPECT(store.all().empty());
}

// All orders of its events: tests/model/gate_model.cc.
void gate_stops_and_cuts() {
  using Step = Gate::Step;
  Gate g;
  EXPECT(g.attention() == 0 && g.at_boundary({100, false, true}) == Step::kServe);
  EXPECT(g.cut(200, 100).ring && g.attention() == Gate::kCut);
  EXPECT(g.at_boundary({150, false, false}) == Step::kServe);  // waits for the moment of least memory
  EXPECT(g.at_boundary({150, true, true}) == Step::kServe);    // a host function is out
  EXPECT(g.at_boundary({250, true, false}) == Step::kServe);
  EXPECT(g.at_boundary({150, false, true}) == Step::kDrain && g.phase() == Gate::Phase::kDraining);
  const uint64_t before = g.drain_progress();
  EXPECT(g.draining(3) == Step::kDrain && g.draining(3) == Step::kDrain && g.drain_progress() == before + 1);
  EXPECT(g.draining(2) == Step::kDrain && g.drain_progress() == before + 2);
  EXPECT(g.drained(180) == Step::kRest && g.phase() == Gate::Phase::kParked);
  EXPECT(g.waited_us() == 50 && g.drained_us() == 30);
  EXPECT(!g.cut(900, 190).ring && g.phase() == Gate::Phase::kParked);  // it has its cut already
  EXPECT(g.resume().rest && g.step() == Step::kServe && g.attention() == 0);

  // Given up in a drain, and asked for again: the drain that ends now is not the new cut's.
  (void)g.cut(0, 300);
  EXPECT(g.at_boundary({300, false, false}) == Step::kDrain);
  EXPECT(!g.resume().rest && g.draining(1) == Step::kServe);
  (void)g.cut(0, 400);
  EXPECT(g.drained(400) == Step::kServe && g.phase() == Gate::Phase::kCutting);
  EXPECT(g.at_boundary({410, false, false}) == Step::kDrain && g.drained(420) == Step::kRest);

  // A stop beats every phase, and leaves the phase alone.
  EXPECT(g.stop().rest && g.step() == Step::kLeave && g.phase() == Gate::Phase::kParked);
  EXPECT(g.attention() == (Gate::kStop | Gate::kCut));
  (void)g.resume();
  EXPECT(g.at_boundary({500, false, true}) == Step::kLeave && g.drained(500) == Step::kLeave);
}

void cut_has_patience() {
  using Verdict = Cut::Verdict;
  Cut c(1000, 500, 100);
  EXPECT(c.until_us() == 1500);
  EXPECT(c.on({1499, false, 1, true}) == Verdict::kWait && c.on({1499, true, 1, false}) == Verdict::kParked);
  EXPECT(c.on({1600, false, 0, false}) == Verdict::kWait && c.on({1601, false, 0, false}) == Verdict::kNoProgress);
  EXPECT(c.on({1601, false, 7, false}) == Verdict::kWait && c.on({1701, false, 7, false}) == Verdict::kWait);
  EXPECT(c.on({1702, false, 7, true}) == Verdict::kNoProgress);
  // Host functions overlap without end: there is progress, but not for ever.
  uint64_t progress = 8;
  for (uint64_t now = 1702; now <= 3500; now += 50) EXPECT(c.on({now, false, progress++, true}) == Verdict::kWait);
  EXPECT(c.on({3501, false, progress++, false}) == Verdict::kWait);
  EXPECT(c.on({3501, false, progress++, true}) == Verdict::kOverlap);
}

// Against every order in which they could finish.
void claims_that_can_finish_are_found(uint32_t seed) {
  std::mt19937 rng(seed);
  for (int round = 0; round < 300; round++) {
    std::vector<MemoryClaim> claims(rng() % 5);
    for (MemoryClaim& c : claims) {
      c.least = rng() % 10;
      c.has = c.least + rng() % 10;
      c.most = c.has + rng() % 15;
    }
    const uint64_t free = rng() % 20;
    std::vector<size_t> order(claims.size());
    std::iota(order.begin(), order.end(), 0);
    bool one = claims.empty();
    do {
      uint64_t left = free;
      bool all = true;
      for (const size_t i : order) {
        all &= claims[i].most - claims[i].has <= left;
        left += claims[i].has - claims[i].least;
      }
      one |= all;
    } while (!one && std::next_permutation(order.begin(), order.end()));
    EXPECT(all_can_finish(claims, free) == one);
  }
}

// Behind its peak a rank claims little, until it is back at its least.
void a_rank_behind_its_peak_claims_little() {
  MemoryPhase phase;
  MemoryClaim claim{100, 1000, 100};
  const auto at = [&](uint64_t has) {
    claim.has = has;
    phase.now(claim);
    EXPECT(phase.claim(claim).least == (phase.claim(claim).most == 1000 ? 100 : 325));
    return phase.claim(claim).most;
  };
  EXPECT(at(100) == 1000 && at(500) == 1000 && at(400) == 1000);  // no peak
  EXPECT(at(1000) == 1000 && at(950) == 1000);                    // it may come to it again
  EXPECT(at(930) == 986 && at(500) == 556 && at(550) == 556);
  EXPECT(at(400) == 456 && at(490) == 490 && at(380) == 470);  // it took 90 on top of a low
  EXPECT(at(390) == 470 && at(325) == 1000);
  EXPECT(at(1000) == 1000 && at(600) == 690 && at(830) == 1000);  // that was no peak
  EXPECT(at(1000) == 1000 && at(600) == 690);
  MemoryClaim none{7, 7, 7};
  MemoryPhase first;
  first.now(none);
  EXPECT(first.claim(none).most == 7);
}

// Data-parallel ranks whose activations do not fit beside each other. In each step a rank goes up by pieces, comes down to
// what it has and its gradients, meets the others there, and drops the gradients. Whoever may not take more waits, so the
// sum never passes the GPU's memory; and nobody waits in a circle. fresh: nothing is known of them at first. middle: they
// also meet at that height on the way up.
struct TurnsWorld {
  struct Rank {
    MemoryTurns::Seat* seat = nullptr;
    uint64_t has = 0, steps = 0, moves = 0, meetings = 0;
    bool falls = false, meets = false, waits = false;
  };
  std::mt19937 rng;
  size_t ranks;
  uint64_t base, gradients, peak, total, middle;
  std::chrono::steady_clock::time_point now{std::chrono::seconds(1)};
  MemoryTurns turns{[this] { return now; }};
  std::list<Rank> all;
  size_t waited = 0;

  TurnsWorld(uint32_t seed, bool fresh, bool meets) : rng(seed) {
    ranks = 2 + rng() % 3;
    base = 10 + rng() % 20;
    gradients = 1 + rng() % 10;
    peak = base + gradients + 20 + rng() % 60;
    middle = meets ? base + gradients + 1 + rng() % (peak - base - gradients - 1) : 0;
    total = (ranks - 1) * std::max(base + gradients, middle) + peak + rng() % 10;
    total += total / 5;  // what is kept back, and free for all at first
    for (size_t i = 0; i < ranks; i++) {
      Rank& r = all.emplace_back();
      r.has = fresh ? 0 : base;
      r.seat = turns.sit(
          {[this, &r] { return state_of(r); }, [&r] { return r.moves; }, [&r] { return r.steps; }, [] {}, [] {}}, r.has,
          fresh ? 0 : peak + total / 32);  // and what a client keeps unused
    }
  }
  ~TurnsWorld() {
    for (Rank& r : all) turns.leave(r.seat);
  }
  MemoryTurns::State state_of(const Rank& r) const {
    return r.meets && !all_here(r) ? MemoryTurns::State::kWaits : MemoryTurns::State::kMoves;
  }
  bool all_here(const Rank& r) const {
    return std::all_of(all.begin(), all.end(),
                       [&](const Rank& o) { return o.meetings > r.meetings || (o.meetings == r.meetings && o.meets); });
  }
  uint64_t has() const {
    uint64_t sum = 0;
    for (const Rank& r : all) sum += r.has;
    return sum;
  }
  bool move(Rank& r) {
    if (r.meets) {
      if (!all_here(r)) return false;
      r.meets = false;
      r.meetings++;
      if (r.falls) {
        r.falls = false;
        r.steps++;
        r.has = base;
      }
    } else if (r.falls && rng() % 4 == 0 && r.has < peak) {
      const uint64_t more = std::min<uint64_t>(peak - r.has, 1 + rng() % 2);
      if (!turns.may_take(r.seat, more, more, total - has(), false)) return waited++, false;
      r.has += more;
    } else if (r.falls) {
      r.has -= std::min<uint64_t>(r.has - base - gradients, 1 + rng() % 20);
      r.meets = r.has == base + gradients;
    } else {
      const uint64_t top = r.has < middle ? middle : peak;
      const uint64_t more = std::min<uint64_t>(top - r.has, 1 + rng() % 20);
      if (!turns.may_take(r.seat, more + rng() % 3, more, total - has(), false)) return waited++, false;
      r.has += more;
      r.falls = r.has == peak;
      r.meets = r.has == middle;
    }
    r.moves++;
    turns.now(r.seat, r.has, r.steps > 2 ? base : 0);
    EXPECT(has() <= total);
    return true;
  }
  void run() {
    for (size_t still = 0; std::any_of(all.begin(), all.end(), [](const Rank& r) { return r.steps < 20; });) {
      now += std::chrono::microseconds(100);
      still = move(*std::next(all.begin(), static_cast<ptrdiff_t>(rng() % ranks))) ? 0 : still + 1;
      EXPECT(still < 100'000);  // a circle
    }
  }
};

void ranks_take_turns_for_memory(uint32_t seed) {
  TurnsWorld moved(seed, false, false);
  moved.run();
  EXPECT(moved.turns.counts().still == 0 && !moved.turns.counts().off);  // no time is lost
  if (moved.ranks * moved.peak > moved.total + 60) EXPECT(moved.waited > 0);
  std::printf("fresh %u\n", seed);
  TurnsWorld fresh(seed, true, false);
  fresh.run();
  EXPECT(!fresh.turns.counts().off);
  std::printf("meet %u\n", seed);
  TurnsWorld meet(seed, false, true);
  meet.run();
  EXPECT(!meet.turns.counts().off);
}

// A rank that takes as much in each step asks for nothing any more. Its claim is known all the same.
void a_rank_that_asks_for_nothing_is_known() {
  MemoryTurns turns;
  uint64_t steps = 7;
  const MemoryTurns::Member busy{[] { return MemoryTurns::State::kMoves; }, [] { return uint64_t{0}; },
                                 [&] { return steps; }, [] {}, [] {}};
  MemoryTurns::Seat* const seats[] = {turns.sit(busy, 0, 0), turns.sit(busy, 0, 0)};
  for (MemoryTurns::Seat* seat : seats) {
    EXPECT(turns.may_take(seat, 50, 50, 950, false) == 50);  // little
    turns.now(seat, 50, 0);
  }
  steps = 8;
  EXPECT(turns.may_take(seats[0], 200, 200, 900, false) == 200);  // it leads
  turns.now(seats[0], 250, 0);
  EXPECT(turns.may_take(seats[1], 200, 200, 700, false) == 0 && turns.tight());
  steps = 9;
  EXPECT(turns.may_take(seats[1], 200, 200, 700, false) == 200 && !turns.tight());  // nor is there too little
  for (MemoryTurns::Seat* seat : seats) turns.leave(seat);
}

// They meet at their peaks, and all peaks do not fit: that is seen, and the device has the word.
void ranks_that_need_all_at_once_are_let_go() {
  using State = MemoryTurns::State;
  std::chrono::steady_clock::time_point now{std::chrono::seconds(1)};
  MemoryTurns turns([&] { return now; });
  uint64_t moves = 0;
  const auto none = [] { return uint64_t{0}; };
  auto* a = turns.sit({[] { return State::kWaits; }, none, none, [] {}, [] {}}, 60, 60);
  State state = State::kMoves;  // what it has freed comes when its kernels have run
  auto* b = turns.sit({[&] { return state; }, [&] { return moves; }, none, [] {}, [] {}}, 30, 60);
  EXPECT(turns.may_take(b, 30, 20, 10, false) == 0 && turns.counts().waits == 1);
  for (int ms = 0; ms < 2000; ms++) {
    now += std::chrono::milliseconds(1);
    EXPECT(turns.may_take(b, 30, 20, 10, false) == 0);
  }
  state = State::kRests;
  moves++;
  for (int ms = 0; ms < 900; ms++) {
    now += std::chrono::milliseconds(1);
    EXPECT(turns.may_take(b, 30, 20, 10, false) == 0);
  }
  now += std::chrono::seconds(10);  // a cut: nobody looks
  EXPECT(turns.may_take(b, 30, 20, 10, false) == 0);
  for (int ms = 0; ms < 1000; ms++) {
    now += std::chrono::milliseconds(1);
    EXPECT(turns.may_take(b, 30, 20, 10, false) == 0);
  }
  now += std::chrono::milliseconds(1);
  EXPECT(turns.may_take(b, 30, 20, 10, false) == 20 && turns.counts().off);
  EXPECT(turns.may_take(b, 1000, 900, 0, false) == 1000);
  turns.leave(a);
  turns.leave(b);
}

}  // namespace

int main() {
  gate_stops_and_cuts();
  cut_has_patience();
  images_live_as_long_as_somebody_holds_them();
  trace_finds_the_point_after_zero_grad();
  a_result_gets_its_place_also_behind_temporaries_of_its_size();
  trace_forgets_an_earlier_phase();
  trace_of_constant_and_random_memory();
  a_state_keeps_its_form();
  base64_is_its_own_inverse();
  mirror_knows_what_is_live();
  mirror_keeps_what_is_left_of_a_freed_range();
  mirror_lets_go_behind_a_collective();
  handles_are_typed_and_never_stale();
  replay_log_is_as_long_as_the_state();
  ledger_limits_each_job_and_all_of_them();
  a_rank_behind_its_peak_claims_little();
  a_rank_that_asks_for_nothing_is_known();
  ranks_that_need_all_at_once_are_let_go();
  for (uint32_t seed = 1; seed <= 20; seed++) {
    mirror_agrees_with_bytes(seed);
    ledger_never_gives_more_than_there_is(seed);
    ledger_counts_pages_once_and_moving_jobs_once(seed);
    range_set_agrees_with_bits(seed);
    claims_that_can_finish_are_found(seed);
    ranks_take_turns_for_memory(seed);
  }
  std::printf("ok\n");
  return 0;
}
