// SPDX-License-Identifier: Apache-2.0
// Model checker of the command ring: the real code of devproxy/csrc/transport/ring.h, over all interleavings.
//
// Each thread of the model is a fibre that runs the ring's own template with `ModelSync`: every atomic operation is a
// scheduling point. The memory model is x86-TSO: a store goes into its thread's FIFO store buffer, and leaving it
// ("flush") is a step of its own that the explorer places anywhere; locked operations and fences wait until the
// buffer is empty; futex calls do too (the kernel takes a locked bucket). Every sequentially consistent interleaving is
// among them. Under TSO a missing fence is a real failure, which a sequentially consistent model could not see.
//
// Exploration: depth first over snapshots of the whole world (stacks included), pruned by state hash. A state is shared
// memory + store buffers + what each thread has read since its last `local_state()`, which determines the thread. The
// graph is acyclic (a cycle is reported), so the number of schedules is the number of paths through it.
//
// Not covered: reordering beyond TSO (ThreadSanitizer over tests/stress checks the acquire/release pairs), futex
// time-outs (they would hide lost wake-ups; a lost wake-up is a failure here), 32-bit wrap of space_seq.
//
// ring_model [--mutant N] [--config TEXT] | --list: a mutant (mutant_names) breaks the ring on purpose and must be
// caught: exit code 1 and the schedule that shows it. Built with -DMUTANT=0 the mutants cost nothing.
#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "devproxy/csrc/transport/ring.h"

namespace {

enum Mutant {
  kNone,
  kNoZeroing,           // released lines keep their first word
  kZeroHeadLineOnly,    // only the record's first line is zeroed
  kNoPublishFence,      // commit store, then look at `sleeping`, no fence between
  kNoSleepFence,        // `sleeping` store, then look at the ring, no fence between
  kNoReleaseFence,      // head store, then look at space_waiters, no fence between
  kPublishBeforeWrite,  // commit word first, payload after
  kNoSleepRecheck,      // consumer sleeps without looking again
  kNoSpaceRecheck,      // producer sleeps for space without looking again
  kSpaceOffByOneLine,   // a producer believes in one line more than there is
  kHeadBeforeZeroing,   // head moves, then the lines are zeroed
  kSleepingNotCleared,  // the waker leaves `sleeping` set
  kNoSpaceSeqBump,      // space wake without changing the futex word
  kReserveNotAtomic,    // tail: load, then store
  kWakeOneSpaceWaiter,  // wakes one space waiter, not all
  kSkipUnpublished,     // consumer steps over a reserved line that is not published
  kNoSpaceWaiterCount,  // producer does not announce that it waits for space
  kMutants
};
const char* const mutant_names[kMutants] = {"none",
                                            "no-zeroing",
                                            "zero-head-line-only",
                                            "no-publish-fence",
                                            "no-sleep-fence",
                                            "no-release-fence",
                                            "publish-before-write",
                                            "no-sleep-recheck",
                                            "no-space-recheck",
                                            "space-off-by-one-line",
                                            "head-before-zeroing",
                                            "sleeping-not-cleared",
                                            "no-space-seq-bump",
                                            "reserve-not-atomic",
                                            "wake-one-space-waiter",
                                            "skip-unpublished",
                                            "no-space-waiter-count"};

#ifdef MUTANT
constexpr int mutant = MUTANT;
#else
int mutant = kNone;
#endif

constexpr int kProducers = 3;
constexpr int kConsumer = 3;  // thread index
constexpr int kThreads = 4;
constexpr size_t kLine = 8;  // one line = two 32-bit words; the first is the commit word of a record's first line
constexpr int kMaxLines = 8;
constexpr int kMaxRecords = 3;       // per producer
constexpr int kMaxPositions = 24;    // lines over a whole run
constexpr size_t kStackBytes = 512;  // a snapshot is copied for every state; the explorer checks the canary
constexpr int kBufferMax = 12;
constexpr uint64_t kStackMagic = 0x5ca1ab1e0ddba11ull;

struct Config {
  const char* name;
  int capacity_lines;
  int records[kProducers];             // how many
  int lines[kProducers][kMaxRecords];  // how long each
  int kills;                           // how many producers may die
};

enum Var { kTail, kHead, kSleeping, kSpaceWaiters, kSpaceSeq, kWords };  // kWords + 2 * line + word
constexpr int kVars = kWords + 2 * kMaxLines;

enum class OpKind : uint8_t { kStart, kLoad, kRmw, kFence, kWait, kBlocked, kWake, kReadPayload, kDone, kDead };
const char* const op_names[] = {"start",  "load",       "rmw",          "fence", "futex_wait",
                                "asleep", "futex_wake", "read payload", "done",  "dead"};

struct Store {
  int32_t var;
  uint32_t payload;  // 1: a plain store of the record's bytes
  uint64_t value;
};

struct Thread {
  OpKind op;
  bool woken;
  uint8_t buffered;
  int32_t var;         // of the pending operation
  int32_t last_store;  // var of the newest store, to know which fence is meant (mutants)
  uint64_t need_end;   // a producer that waits for space: end of its reservation
  uint64_t history;    // hash of everything read since local_state()
  void* sp;
  Store buffer[kBufferMax];
  alignas(16) uint8_t stack[kStackBytes];
};

// What really happened, kept beside the ring to compare with.
struct Ghost {
  int8_t owner;  // producer + 1, 0 = nobody reserved here
  int8_t record;
  int8_t lines;
  bool published, consumed;
};

constexpr size_t kRingObjectBytes = 128;

struct World {
  uint64_t mem[kVars];
  Thread t[kThreads];
  Ghost ghost[kMaxPositions];
  int kills_left;
  bool killed, hangup;
  int prefix_at_hangup;
  int consumed;
  const char* failed;
  // The ring's own object, once for the producers and once for the consumer, as the two processes have it: the
  // consumer's private head is part of the state.
  alignas(16) uint8_t ring[2][kRingObjectBytes];
};

World w;
Config cfg;
int total_records;
int cur;  // thread that runs
void* scheduler_sp;
uint8_t ring_bytes[2 * kMaxLines * kLine];

uint64_t mix(uint64_t h, uint64_t v) {
  h ^= v + 0x9e3779b97f4a7c15ull + (h << 6) + (h >> 2);
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93ull;
  return h ^ (h >> 29);
}

// -- fibres ---------------------------------------------------------------------------------------------------------
extern "C" void model_switch(void** save_sp, void* load_sp);
asm(R"(
.text
.globl model_switch
model_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

// The thread stops before its next operation; the scheduler says when it goes on.
void stop_before(OpKind op, int var = -1) {
  Thread& t = w.t[cur];
  t.op = op;
  t.var = var;
  model_switch(&w.t[cur].sp, scheduler_sp);
}

[[noreturn]] void fail_here(const char* why) {
  if (!w.failed) w.failed = why;
  for (;;) stop_before(OpKind::kDone);
}

void saw(uint64_t v) { w.t[cur].history = mix(w.t[cur].history, v); }
// The thread's local variables are a function of `v` from here on; what it read before no longer matters.
void local_state(uint64_t v) { w.t[cur].history = mix(0x10ca1, v); }

uint64_t newest(int var) {  // store-to-load forwarding
  const Thread& t = w.t[cur];
  for (int i = t.buffered; i-- > 0;)
    if (t.buffer[i].var == var) return t.buffer[i].value;
  return w.mem[var];
}

uint64_t do_load(int var) {
  if (!(cur == kConsumer && var == kHead)) stop_before(OpKind::kLoad, var);  // only the consumer writes head
  const uint64_t v = newest(var);
  saw(v);
  return v;
}

void buffer_store(int var, uint64_t value, uint32_t payload = 0) {
  Thread& t = w.t[cur];
  if (t.buffered == kBufferMax) fail_here("model: store buffer too small");
  t.buffer[t.buffered++] = {var, payload, value};
  t.last_store = var;
}

bool is_commit(int var) { return var >= kWords && (var - kWords) % 2 == 0; }

void do_store(int var, uint64_t value) {
  const bool zeroing = cur == kConsumer && is_commit(var) && value == 0;
  if (zeroing) {
    if (mutant == kNoZeroing) return;
    const int head_line = static_cast<int>(newest(kHead) / kLine % cfg.capacity_lines);
    if (mutant == kZeroHeadLineOnly && (var - kWords) / 2 != head_line) return;
  }
  if (mutant == kHeadBeforeZeroing && cur == kConsumer && var == kHead) {
    // Reorder: head enters the buffer before the zeroes of this release, which are its newest entries.
    Thread& t = w.t[cur];
    int first = t.buffered;
    while (first > 0 && is_commit(t.buffer[first - 1].var)) --first;
    buffer_store(var, value);
    std::rotate(t.buffer + first, t.buffer + t.buffered - 1, t.buffer + t.buffered);
    return;
  }
  buffer_store(var, value);
}

template <class F>
uint64_t do_rmw(int var, F f) {
  stop_before(OpKind::kRmw, var);
  const uint64_t old = w.mem[var];
  w.mem[var] = f(old);
  saw(old);
  return old;
}

// -- the ring's Sync policy -------------------------------------------------------------------------------------------
struct ModelSync {
  template <class T>
  struct Atomic {
    int var;
    T load(std::memory_order) const { return static_cast<T>(do_load(var)); }
    void store(T v, std::memory_order) { do_store(var, v); }
    T exchange(T v, std::memory_order) {
      return static_cast<T>(do_rmw(var, [&](uint64_t old) { return mutant == kSleepingNotCleared ? old : v; }));
    }
    T fetch_add(T v, std::memory_order) {
      if (mutant == kNoSpaceSeqBump && var == kSpaceSeq) return static_cast<T>(w.mem[var]);
      if (mutant == kNoSpaceWaiterCount && var == kSpaceWaiters) return 0;
      if (mutant == kReserveNotAtomic && var == kTail) {
        const uint64_t old = do_load(var);
        do_store(var, old + v);
        return static_cast<T>(old);
      }
      return static_cast<T>(do_rmw(var, [&](uint64_t old) { return static_cast<T>(old + v); }));
    }
    T fetch_sub(T v, std::memory_order) {
      if (mutant == kNoSpaceWaiterCount && var == kSpaceWaiters) return 0;
      return static_cast<T>(do_rmw(var, [&](uint64_t old) { return static_cast<T>(old - v); }));
    }
  };
  static void fence() {
    Thread& t = w.t[cur];
    if (mutant == kNoPublishFence && cur != kConsumer && is_commit(t.last_store) && t.buffered) return;
    if (mutant == kNoSleepFence && cur == kConsumer && t.last_store == kSleeping) return;
    if (mutant == kNoReleaseFence && cur == kConsumer && t.last_store != kSleeping) return;
    if (t.buffered) stop_before(OpKind::kFence);
  }
  static void pause() {}
};

ModelSync::Atomic<uint64_t> tail{kTail}, head{kHead};
ModelSync::Atomic<uint32_t> sleeping{kSleeping}, space_waiters{kSpaceWaiters}, space_seq{kSpaceSeq};
ModelSync::Atomic<uint32_t> commit_words[kMaxLines];

struct ModelCommit {
  ModelSync::Atomic<uint32_t>& operator()(uint8_t* p) const {
    return commit_words[static_cast<size_t>(p - ring_bytes) / kLine % cfg.capacity_lines];
  }
};
using ModelRing = devproxy::Ring<ModelSync, ModelCommit>;
static_assert(sizeof(ModelRing) <= kRingObjectBytes);
ModelRing& producer_ring() { return *std::launder(reinterpret_cast<ModelRing*>(w.ring[0])); }
ModelRing& consumer_ring() { return *std::launder(reinterpret_cast<ModelRing*>(w.ring[1])); }

void futex_wait(int var, uint32_t expected) {
  stop_before(OpKind::kWait, var);
  const uint64_t v = w.mem[var];
  saw(v != expected);
  if (v != expected) return;
  stop_before(OpKind::kBlocked, var);
}

void futex_wake(int var, int n) {
  stop_before(OpKind::kWake, var);
  for (int i = 0; i < kThreads && n > 0; ++i) {
    Thread& t = w.t[i];
    if (t.op == OpKind::kBlocked && t.var == var && !t.woken) {
      t.woken = true;
      --n;
    }
  }
}

// -- the two sides, as client and server use the ring -----------------------------------------------------------------
int word(uint64_t pos, int which) { return kWords + 2 * static_cast<int>(pos / kLine % cfg.capacity_lines) + which; }
uint64_t record_id(int producer, int record) { return 0x1000 + producer * 16 + record; }

void write_payload(uint64_t pos, int lines, uint64_t id) {
  buffer_store(word(pos, 1), id, 1);
  if (lines == 2) {
    buffer_store(word(pos + kLine, 0), kLine, 1);  // a trap: looks like a published one-line record
    buffer_store(word(pos + kLine, 1), id + 0x100, 1);
  }
}

void producer(int me) {
  ModelRing& ring = producer_ring();
  for (int i = 0; i < cfg.records[me]; ++i) {
    local_state(static_cast<uint64_t>(i));
    const int lines = cfg.lines[me][i];
    const auto r = ring.reserve(lines * kLine - 1);
    for (int l = 0; l < lines; ++l) {
      const uint64_t at = r.pos / kLine + l;
      if (at >= kMaxPositions) fail_here("model: positions exceed the ghost");
      if (w.ghost[at].owner) fail_here("two producers own one reservation");
      w.ghost[at] = {static_cast<int8_t>(me + 1), static_cast<int8_t>(i), static_cast<int8_t>(l ? 0 : lines), false,
                     false};
    }
    auto has_space = [&] {
      if (mutant == kSpaceOffByOneLine) return r.end() - do_load(kHead) <= ring.capacity() + kLine;
      return ring.has_space(r);
    };
    w.t[cur].need_end = r.end();
    for (;;) {
      local_state(mix(i, r.pos));
      if (has_space()) break;
      const uint32_t seq = ring.space_prepare();
      const bool still_full = mutant == kNoSpaceRecheck || !has_space();
      if (still_full) futex_wait(kSpaceSeq, seq);
      ring.space_done();
    }
    w.t[cur].need_end = 0;
    if (mutant != kPublishBeforeWrite) write_payload(r.pos, lines, record_id(me, i));
    w.ghost[r.pos / kLine].published = true;
    const bool wake = ring.publish(r);
    if (mutant == kPublishBeforeWrite) write_payload(r.pos, lines, record_id(me, i));
    if (wake) futex_wake(kSleeping, 1);
  }
}

void consume(ModelRing& ring, uint32_t bytes) {
  const uint64_t pos = ring.head();
  if (!ring.valid_length(bytes)) fail_here("length of a published record is not valid");
  if (pos / kLine >= kMaxPositions || w.ghost[pos / kLine].lines == 0) fail_here("consumed what nobody reserved");
  Ghost& g = w.ghost[pos / kLine];
  if (!g.published) fail_here("stale head taken for a published record");
  if (g.consumed) fail_here("record consumed twice");
  if (bytes != static_cast<uint32_t>(g.lines) * kLine) fail_here("length of the record differs");
  stop_before(OpKind::kReadPayload);
  const uint64_t id = record_id(g.owner - 1, g.record);
  if (newest(word(pos, 1)) != id) fail_here("payload of the first line differs");
  if (g.lines == 2 && (newest(word(pos + kLine, 0)) != kLine || newest(word(pos + kLine, 1)) != id + 0x100))
    fail_here("payload of the second line differs");
  g.consumed = true;
  ++w.consumed;
  if (ring.release(bytes)) futex_wake(kSpaceSeq, mutant == kWakeOneSpaceWaiter ? 1 : INT_MAX);
}

void consumer() {
  ModelRing& ring = consumer_ring();
  while (w.consumed < total_records) {
    const bool gone = w.hangup;
    local_state(mix(static_cast<uint64_t>(w.consumed), gone));
    uint32_t bytes = ring.peek();
    if (bytes) {
      consume(ring, bytes);
      continue;
    }
    if (gone) break;
    if (mutant == kSkipUnpublished && commit_words[(ring.head() / kLine + 1) % cfg.capacity_lines].load({}) != 0) {
      (void)ring.release(kLine);
      continue;
    }
    ring.sleep_prepare();
    bytes = mutant == kNoSleepRecheck ? 0 : ring.peek();
    if (!bytes) futex_wait(kSleeping, 1);
    ring.sleep_done();
  }
  if (w.consumed < w.prefix_at_hangup) fail_here("records before the dead producer's were not consumed");
}

extern "C" void model_thread_main() {
  const int me = cur;
  if (me == kConsumer)
    consumer();
  else
    producer(me);
  for (;;) stop_before(OpKind::kDone);
}

// -- the explorer -----------------------------------------------------------------------------------------------------
struct Action {
  enum Kind : uint8_t { kStep, kFlush, kKill, kHangup } kind;
  uint8_t thread;
};

void run_thread(int i) {
  cur = i;
  model_switch(&scheduler_sp, w.t[i].sp);
  if (*reinterpret_cast<uint64_t*>(w.t[i].stack) != kStackMagic) w.failed = "model: stack overflow";
}

void reset_world() {
  memset(static_cast<void*>(&w), 0, sizeof w);
  w.kills_left = cfg.kills;
  devproxy::RingParts<ModelSync> parts{
      ring_bytes, static_cast<size_t>(cfg.capacity_lines) * kLine, kLine, &tail, &head, &sleeping, &space_waiters,
      &space_seq};
  for (auto& storage : w.ring) new (storage) ModelRing(parts);
  for (int i = 0; i < kMaxLines; ++i) commit_words[i].var = kWords + 2 * i;
  for (int i = 0; i < kThreads; ++i) {
    Thread& t = w.t[i];
    *reinterpret_cast<uint64_t*>(t.stack) = kStackMagic;
    t.last_store = -1;
    auto* top = reinterpret_cast<uint64_t*>(t.stack + kStackBytes) - 2;
    top[0] = reinterpret_cast<uint64_t>(&model_thread_main);  // popped by ret; the stack is then 8 mod 16, as on a call
    t.sp = top - 6;
    run_thread(i);  // up to its first operation
  }
}

bool can_step(const Thread& t) {
  switch (t.op) {
    case OpKind::kLoad:
    case OpKind::kReadPayload: return true;
    case OpKind::kRmw:
    case OpKind::kFence:
    case OpKind::kWait:
    case OpKind::kWake: return t.buffered == 0;
    case OpKind::kBlocked: return t.woken;
    default: return false;
  }
}

int enabled(Action* out) {
  int n = 0;
  for (uint8_t i = 0; i < kThreads; ++i) {
    const Thread& t = w.t[i];
    if (can_step(t)) out[n++] = {Action::kStep, i};
    if (t.buffered) out[n++] = {Action::kFlush, i};
  }
  if (n == 0 && w.killed && !w.hangup && w.t[kConsumer].op == OpKind::kBlocked) out[n++] = {Action::kHangup, kConsumer};
  const bool alive = n != 0;
  if (alive && w.kills_left)
    for (uint8_t i = 0; i < kProducers; ++i)
      if (w.t[i].op != OpKind::kDone && w.t[i].op != OpKind::kDead) out[n++] = {Action::kKill, i};
  return n;
}

// The oldest store reaches memory, and with a payload word the rest of its payload: a consumer that could see a part
// could as well have come before the first word, so nothing is missed.
void flush_some(Thread& t) {
  int n = 0;
  do {
    w.mem[t.buffer[n].var] = t.buffer[n].value;
    ++n;
  } while (n < t.buffered && t.buffer[n - 1].payload && t.buffer[n].payload);
  t.buffered = static_cast<uint8_t>(t.buffered - n);
  memmove(t.buffer, t.buffer + n, sizeof(Store) * t.buffered);
}

void perform(Action a) {
  Thread& t = w.t[a.thread];
  switch (a.kind) {
    case Action::kStep:
      t.woken = false;
      run_thread(a.thread);
      return;
    case Action::kFlush:
      flush_some(t);
      if (t.buffered == 0 && t.op == OpKind::kFence) run_thread(a.thread);  // the fence's own step is invisible
      return;
    case Action::kKill:  // what it has stored still reaches memory; it does nothing more
      t.op = OpKind::kDead;
      t.history = 0;
      --w.kills_left;
      w.killed = true;
      return;
    case Action::kHangup: {
      // The server sees the socket hang up, drains what is published, and ends. All store buffers are empty here.
      w.hangup = true;
      w.t[kConsumer].woken = true;
      uint64_t at = 0;
      while (at < kMaxPositions && w.ghost[at].owner && w.ghost[at].published) {
        at += w.ghost[at].lines;
        ++w.prefix_at_hangup;
      }
      // What stops the consumer there: the dead one's record, or one whose producer waits for lines that the drain will
      // give back (the dead one had taken the right to wake the consumer with it).
      if (at < kMaxPositions && w.ghost[at].owner) {
        const Thread& owner = w.t[w.ghost[at].owner - 1];
        if (owner.op != OpKind::kDead && owner.op != OpKind::kBlocked)
          w.failed = "a living producer is stuck before the dead one's record";
      }
      return;
    }
  }
}

// No action is enabled: is this a right end?
void check_end() {
  for (int i = 0; i < kProducers; ++i) {
    const Thread& t = w.t[i];
    if (t.op == OpKind::kDone || t.op == OpKind::kDead) continue;
    const bool full = t.need_end && t.need_end - w.mem[kHead] > static_cast<uint64_t>(cfg.capacity_lines) * kLine;
    if (t.op == OpKind::kBlocked && full)
      continue;  // right if it waits for a dead one's lines; else the consumer is to blame
    w.failed = "lost space wake: a producer sleeps although its lines are free";
    return;
  }
  const Thread& c = w.t[kConsumer];
  if (c.op != OpKind::kDone) {
    w.failed =
        c.op == OpKind::kBlocked ? "lost wake-up: the consumer sleeps and nobody will wake it" : "consumer stuck";
    return;
  }
  if (w.killed) return;
  if (w.consumed != total_records) w.failed = "not every record was consumed";
  if (w.mem[kTail] != w.mem[kHead]) w.failed = "head and tail differ at the end";
  for (int l = 0; l < cfg.capacity_lines; ++l)
    if (w.mem[kWords + 2 * l]) w.failed = "a free line's first word is not zero";
}

uint64_t state_hash() {
  uint64_t h = 0x57a7e;
  for (int i = 0; i < kWords + 2 * cfg.capacity_lines; ++i) h = mix(h, w.mem[i]);
  for (const Thread& t : w.t) {
    h = mix(h, t.history);
    h = mix(
        h, static_cast<uint64_t>(t.op) | static_cast<uint64_t>(t.woken) << 8 | static_cast<uint64_t>(t.buffered) << 16);
    for (int i = 0; i < t.buffered; ++i) h = mix(mix(h, static_cast<uint64_t>(t.buffer[i].var)), t.buffer[i].value);
  }
  for (const Ghost& g : w.ghost)
    h = mix(h, static_cast<uint64_t>(g.owner) | g.record << 8 | g.lines << 16 | g.published << 24 | g.consumed << 25);
  h = mix(h, consumer_ring().head());
  return mix(h, static_cast<uint64_t>(w.kills_left) | w.killed << 8 | w.hangup << 9 |
                    static_cast<uint64_t>(w.prefix_at_hangup) << 16);
}

// State hash -> number of schedules from there to an end; -1 while it is on the stack.
class Visited {
 public:
  Visited() { grow(1 << 16); }
  double* find(uint64_t key) {
    size_t i = slot(key);
    return keys_[i] ? &paths_[i] : nullptr;
  }
  void set(uint64_t key, double paths) {
    size_t i = slot(key);
    if (!keys_[i]) {
      keys_[i] = key;
      if (++used_ * 10 > keys_.size() * 7) {
        paths_[i] = paths;
        grow(keys_.size() * 2);
        return;
      }
    }
    paths_[i] = paths;
  }
  size_t size() const { return used_; }

 private:
  size_t slot(uint64_t key) const {
    size_t i = key & (keys_.size() - 1);
    while (keys_[i] && keys_[i] != key) i = (i + 1) & (keys_.size() - 1);
    return i;
  }
  void grow(size_t n) {
    std::vector<uint64_t> keys = std::move(keys_);
    std::vector<double> paths = std::move(paths_);
    keys_.assign(n, 0);
    paths_.assign(n, 0);
    for (size_t i = 0; i < keys.size(); ++i)
      if (keys[i]) {
        const size_t s = slot(keys[i]);
        keys_[s] = keys[i];
        paths_[s] = paths[i];
      }
  }
  std::vector<uint64_t> keys_;
  std::vector<double> paths_;
  size_t used_ = 0;
};

struct Frame {
  World before;
  uint64_t hash;
  double paths;
  int n, next;
  Action actions[3 * kThreads + 1];
};

void print_trace(const std::vector<Frame*>& stack, size_t depth) {
  printf("VIOLATION in '%s' (mutant %s): %s\n", cfg.name, mutant_names[mutant], w.failed);
  for (size_t d = 0; d < depth; ++d) {
    const Frame& f = *stack[d];
    const Action a = f.actions[f.next - 1];
    const Thread& t = f.before.t[a.thread];
    const std::string who = a.thread == kConsumer ? "consumer" : "producer " + std::to_string(a.thread);
    if (a.kind == Action::kFlush)
      printf("  %3zu %-11s flush var %d = %llu\n", d, who.c_str(), t.buffer[0].var,
             static_cast<unsigned long long>(t.buffer[0].value));
    else if (a.kind == Action::kKill)
      printf("  %3zu %-11s dies\n", d, who.c_str());
    else if (a.kind == Action::kHangup)
      printf("  %3zu %-11s hears of the death\n", d, who.c_str());
    else
      printf("  %3zu %-11s %s var %d (%llu)\n", d, who.c_str(), op_names[static_cast<int>(t.op)], t.var,
             t.var >= 0 ? static_cast<unsigned long long>(f.before.mem[t.var]) : 0ull);
  }
}

struct Totals {
  double schedules = 0;
  size_t states = 0, transitions = 0;
};

// True when every state holds.
bool explore(Totals* totals) {
  const auto start = std::chrono::steady_clock::now();
  total_records = 0;
  for (int n : cfg.records) total_records += n;
  reset_world();
  Visited visited;
  std::vector<Frame*> frames;  // reused; frames[0, depth) are live
  size_t depth = 0, transitions = 0, deepest = 0;

  auto push = [&](uint64_t hash) {
    if (depth == frames.size()) frames.push_back(new Frame);
    Frame& f = *frames[depth++];
    f.hash = hash;
    f.paths = 0;
    f.next = 0;
    f.n = enabled(f.actions);
    if (f.n == 0) {
      check_end();
      f.paths = 1;
    } else {
      memcpy(static_cast<void*>(&f.before), &w, sizeof w);
    }
    visited.set(hash, -1);
    deepest = std::max(deepest, depth);
  };

  bool ok = !w.failed;
  double schedules = 0;
  push(state_hash());
  while (ok && depth) {
    Frame& f = *frames[depth - 1];
    if (w.failed) {
      print_trace(frames, depth - 1);
      ok = false;
      break;
    }
    if (f.next == f.n) {
      visited.set(f.hash, f.paths);
      schedules = f.paths;
      --depth;
      if (depth) frames[depth - 1]->paths += f.paths;
      continue;
    }
    memcpy(static_cast<void*>(&w), &f.before, sizeof w);
    const Action a = f.actions[f.next++];
    perform(a);
    ++transitions;
    if (w.failed) {
      print_trace(frames, depth);
      ok = false;
      break;
    }
    const uint64_t h = state_hash();
    if (const double* known = visited.find(h)) {
      if (*known < 0) {
        w.failed = "cycle: threads can go round without progress";
        print_trace(frames, depth);
        ok = false;
        break;
      }
      f.paths += *known;
      continue;
    }
    push(h);
  }
  for (Frame* f : frames) delete f;
  const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  printf("%-28s %10zu states %11zu transitions %12.4g schedules, depth %zu, %.2f s%s\n", cfg.name, visited.size(),
         transitions, schedules, deepest, s, ok ? "" : "  FAILED");
  fflush(stdout);
  totals->schedules += schedules;
  totals->states += visited.size();
  totals->transitions += transitions;
  return ok;
}

const Config configs[] = {
    {"3 producers, wrap", 4, {1, 1, 1}, {{2}, {2}, {2}}, 0},
    {"3 producers, mixed", 4, {1, 2, 1}, {{2}, {1, 1}, {2}}, 0},
    {"2 producers, two laps", 4, {3, 2, 0}, {{1, 2, 1}, {2, 1}, {}}, 0},
    {"1 producer, three laps", 4, {3, 0, 0}, {{2, 2, 2}, {}, {}}, 0},
    {"capacity 2, 3 producers", 2, {1, 1, 1}, {{1}, {1}, {1}}, 0},
    {"a producer dies", 4, {1, 1, 1}, {{2}, {1}, {2}}, 1},
    {"a producer dies, ring full", 4, {2, 1, 0}, {{2, 2}, {2}, {}}, 1},
};

}  // namespace

int main(int argc, char** argv) {
  const char* only = "";
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--list") {
      for (int m = 1; m < kMutants; ++m) printf("%d %s\n", m, mutant_names[m]);
      return 0;
    }
    if (arg == "--config" && i + 1 < argc) {
      only = argv[++i];
      continue;
    }
#ifndef MUTANT
    if (arg == "--mutant" && i + 1 < argc && (mutant = atoi(argv[++i])) >= 0 && mutant < kMutants) continue;
#endif
    fprintf(stderr, "usage: ring_model [--mutant N] [--config TEXT] | --list\n");
    return 2;
  }
  Totals totals;
  for (const Config& c : configs) {
    if (!strstr(c.name, only)) continue;
    cfg = c;
    if (!explore(&totals)) return 1;
  }
  printf("total: %zu states, %zu transitions, %.4g schedules; mutant %s: every state holds\n", totals.states,
         totals.transitions, totals.schedules, mutant_names[mutant]);
  return 0;
}
