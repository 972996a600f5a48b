// SPDX-License-Identifier: Apache-2.0
// The command ring over real threads and, with --kill, over two processes of which one dies by SIGKILL.
//
//   ring_stress [--messages N (per producer)] [--producers P] [--seed S]
//   ring_stress --kill ROUNDS [--seed S]
//
// Each record carries (producer, number, length) and a pattern; the consumer checks that each producer's records come
// in order, each once, bytes intact, and that positions are contiguous. The consumer sleeps whenever it finds nothing,
// with a long time-out: one that strikes while a record lies published is a lost wake-up and fails the run.
// -DRELAXED_PUBLISH: a deliberately wrong policy that ThreadSanitizer must report.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/transport/ring.h"

namespace {

using devproxy::futex_wait;
using devproxy::futex_wake;
using devproxy::now_us;

constexpr size_t kLine = 64;
constexpr size_t kCapacity = 4096;  // small: full all the time
constexpr uint64_t kLostWakeUs = 5'000'000;

#ifdef RELAXED_PUBLISH
struct StressSync {
  template <class T>
  struct Atomic : std::atomic<T> {
    void store(T v, std::memory_order) { std::atomic<T>::store(v, std::memory_order_relaxed); }
  };
  // TSan does not model fences, so this one hides nothing from it.
  static void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
};
#else
using StressSync = devproxy::RealSync;
#endif

template <class T>
using Atomic = typename StressSync::template Atomic<T>;

struct Commit {
  Atomic<uint32_t>& operator()(uint8_t* p) const { return *std::launder(reinterpret_cast<Atomic<uint32_t>*>(p)); }
};
using StressRing = devproxy::Ring<StressSync, Commit>;

struct Shared {
  alignas(64) Atomic<uint64_t> tail;
  alignas(64) Atomic<uint64_t> head;
  alignas(64) Atomic<uint32_t> sleeping;
  alignas(64) Atomic<uint32_t> space_waiters;
  Atomic<uint32_t> space_seq;
  alignas(64) Atomic<uint32_t> producers_left;
  std::atomic<uint64_t> wakes;
};

struct Body {  // behind the commit word
  uint32_t producer;
  uint32_t number;
  uint32_t bytes;
};

uint8_t pattern(uint32_t producer, uint32_t number, size_t i) {
  return static_cast<uint8_t>(producer * 31 + number * 7 + i);
}

// [Shared page][ring][ring again], shared with children.
struct Segment {
  Shared* shared;
  StressRing ring;
};

Segment make_segment() {
  const size_t page = 4096;
  const int fd = memfd_create("ring_stress", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(page + kCapacity)) != 0) {
    perror("ring_stress: memfd");
    exit(2);
  }
  auto* base =
      static_cast<uint8_t*>(mmap(nullptr, page + 2 * kCapacity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mmap(base, page + kCapacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  mmap(base + page + kCapacity, kCapacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
       static_cast<off_t>(page));
  close(fd);
  auto* s = new (base) Shared();
  return {s, StressRing(devproxy::RingParts<StressSync>{base + page, kCapacity, kLine, &s->tail, &s->head, &s->sleeping,
                                                        &s->space_waiters, &s->space_seq})};
}

void post(Segment& s, uint32_t producer, uint32_t number, size_t bytes) {
  const auto r = s.ring.reserve(bytes);
  while (!s.ring.has_space(r)) {
    const uint32_t seq = s.ring.space_prepare();
    if (!s.ring.has_space(r))
      futex_wait(reinterpret_cast<std::atomic<uint32_t>*>(&s.shared->space_seq), seq, kLostWakeUs);
    s.ring.space_done();
  }
  // The ring maps twice, but a second address of one byte blinds TSan: write each byte through the first mapping.
  auto at = [&](size_t i) { return s.ring.at(r.pos + i); };
  const Body body{producer, number, static_cast<uint32_t>(bytes)};
  memcpy(at(0) + 4, &body, sizeof body);
  for (size_t i = 4 + sizeof body; i < bytes; ++i) *at(i) = pattern(producer, number, i);
  if (s.ring.publish(r)) {
    s.shared->wakes.fetch_add(1, std::memory_order_relaxed);
    futex_wake(reinterpret_cast<std::atomic<uint32_t>*>(&s.shared->sleeping), 1);
  }
}

size_t random_bytes(std::mt19937& rng) { return rng() % 8 == 0 ? 16 + rng() % (kCapacity / 2 - 16) : 16 + rng() % 112; }

// Returns false and says why on the first wrong byte.
bool check(Segment& s, uint32_t length, std::vector<uint32_t>& next) {
  const uint64_t pos = s.ring.head();
  auto at = [&](size_t i) { return s.ring.at(pos + i); };
  Body body;
  memcpy(&body, at(0) + 4, sizeof body);
  if (!s.ring.valid_length(length) || body.producer >= next.size() || body.number != next[body.producer] ||
      s.ring.round_up(body.bytes) != length) {
    printf("FAIL at %llu: length %u, producer %u number %u bytes %u\n", static_cast<unsigned long long>(pos), length,
           body.producer, body.number, body.bytes);
    return false;
  }
  for (size_t i = 4 + sizeof body; i < body.bytes; ++i)
    if (*at(i) != pattern(body.producer, body.number, i)) {
      printf("FAIL at %llu: byte %zu of record %u of producer %u differs\n", static_cast<unsigned long long>(pos), i,
             body.number, body.producer);
      return false;
    }
  ++next[body.producer];
  return true;
}

// Consumes until `total` records came, or, with total 0, until `gone()` and nothing is published. Returns the count,
// or -1 after a failure.
template <class Gone>
int64_t consume(Segment& s, std::vector<uint32_t>& next, uint64_t total, uint64_t timeout_us, Gone gone) {
  uint64_t n = 0;
  while (total == 0 || n < total) {
    const bool over = gone();
    uint32_t length = s.ring.peek();
    if (length) {
      if (!check(s, length, next)) return -1;
      if (s.ring.release(length)) futex_wake(reinterpret_cast<std::atomic<uint32_t>*>(&s.shared->space_seq), INT32_MAX);
      ++n;
      continue;
    }
    if (over) break;
    s.ring.sleep_prepare();
    length = s.ring.peek();
    if (!length) {
      const uint64_t start = now_us();
      futex_wait(reinterpret_cast<std::atomic<uint32_t>*>(&s.shared->sleeping), 1, timeout_us);
      if (total && now_us() - start >= timeout_us && s.ring.peek()) {
        printf("FAIL: lost wake-up, a published record lay for %llu us\n", static_cast<unsigned long long>(timeout_us));
        return -1;
      }
    }
    s.ring.sleep_done();
  }
  return static_cast<int64_t>(n);
}

int run_threads(uint32_t producers, uint32_t messages, uint32_t seed) {
  Segment s = make_segment();
  std::vector<std::thread> threads;
  for (uint32_t p = 0; p < producers; ++p)
    threads.emplace_back([&, p] {
      std::mt19937 rng(seed * 1000 + p);
      for (uint32_t i = 0; i < messages; ++i) {
        post(s, p, i, random_bytes(rng));
        if (rng() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 50));
      }
    });
  std::vector<uint32_t> next(producers);
  const int64_t n = consume(s, next, uint64_t{producers} * messages, kLostWakeUs, [] { return false; });
  if (n < 0) _exit(1);
  for (auto& t : threads) t.join();
  printf("ok: %lld records of %u producers, %llu wakes\n", static_cast<long long>(n), producers,
         static_cast<unsigned long long>(s.shared->wakes.load()));
  return 0;
}

// A process with three producer threads dies at a random moment; the consumer drains what was published.
int run_kills(int rounds, uint32_t seed) {
  std::mt19937 rng(seed);
  uint64_t records = 0, stopped_before_tail = 0;
  for (int round = 0; round < rounds; ++round) {
    Segment s = make_segment();
    const pid_t child = fork();
    if (child < 0) return perror("ring_stress: fork"), 2;
    if (child == 0) {
      std::vector<std::thread> threads;
      for (uint32_t p = 0; p < 3; ++p)
        threads.emplace_back([&, p] {
          std::mt19937 mine(seed + static_cast<uint32_t>(round) * 10 + p);
          for (uint32_t i = 0;; ++i) post(s, p, i, random_bytes(mine));
        });
      for (auto& t : threads) t.join();
    }
    const uint64_t die_at = now_us() + 500 + rng() % 20'000;
    bool dead = false;
    std::vector<uint32_t> next(3);
    const int64_t n = consume(s, next, 0, 2000, [&] {
      if (!dead && now_us() >= die_at) {
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
        dead = true;
      }
      return dead;
    });
    if (n < 0) {
      kill(child, SIGKILL);
      return 1;
    }
    records += static_cast<uint64_t>(n);
    stopped_before_tail += s.ring.head() != s.ring.tail();
  }
  printf("ok: %d kills, %llu records intact, %llu times a reservation was left unpublished\n", rounds,
         static_cast<unsigned long long>(records), static_cast<unsigned long long>(stopped_before_tail));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  uint32_t messages = 200'000, producers = 3, seed = 1;
  int kills = 0;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string arg = argv[i];
    const int value = atoi(argv[i + 1]);
    if (arg == "--messages")
      messages = static_cast<uint32_t>(value);
    else if (arg == "--producers")
      producers = static_cast<uint32_t>(value);
    else if (arg == "--seed")
      seed = static_cast<uint32_t>(value);
    else if (arg == "--kill")
      kills = value;
    else
      return fprintf(stderr, "ring_stress: unknown option %s\n", argv[i]), 2;
  }
  return kills ? run_kills(kills, seed) : run_threads(producers, messages, seed);
}
