// SPDX-License-Identifier: Apache-2.0
// The limits that the proxy's costs are held against, measured on this machine without any of the proxy's processes:
// a bare 64-byte post on the same ring, a bare cache-line ping-pong, a bare futex wake and answer, a bare memcpy.
// Threads are not pinned: the proxy's are not either. Prints one line of JSON.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/transport/segment_view.h"
#include "tests/bench/measure.h"

namespace {

using namespace devproxy;
using bench::Quantiles;
using bench::quantiles;
using bench::time_each_ns;
using bench::time_ns;

constexpr int kSpinPauses = 600;  // as the client: csrc/client/attachment.cc

// The ring of a segment with nothing around it.
struct BareRing {
  SegmentView producer, consumer;
  BareRing() {
    const int fd = memfd_create("bench", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(kSegmentBytes)) != 0 || !producer.map(fd) || !consumer.map(fd)) {
      perror("bench_post: segment");
      exit(2);
    }
    close(fd);
  }
};

// One record of one line: 16 bytes of header and 48 of payload.
void post(SegmentView& v, const uint8_t* payload) {
  CommandRing& ring = v.ring();
  const auto r = ring.reserve(kLineBytes);
  while (!ring.has_space(r)) RealSync::pause();
  uint8_t* p = ring.at(r.pos);
  memcpy(p + 4, payload, 60);
  if (ring.publish(r)) futex_wake(&v.control()->doorbell.sleeping, 1);
}

// `producers` threads post in bursts that the ring can hold; the consumer reads each record's bytes while they come.
// Median over groups of kGroup posts, p99 over single ones.
constexpr int kGroup = 20;
Quantiles bare_post(int producers) {
  BareRing bare;
  std::atomic<bool> stop{false};
  std::thread consumer([&] {
    CommandRing& ring = bare.consumer.ring();
    uint8_t sink[64];
    while (!stop.load(std::memory_order_relaxed)) {
      const uint32_t n = ring.peek();
      if (!n) {
        RealSync::pause();
        continue;
      }
      memcpy(sink, ring.at(ring.head()), sizeof sink);
      asm volatile("" ::"r"(sink) : "memory");
      (void)ring.release(n);
    }
  });
  std::vector<std::vector<double>> grouped(static_cast<size_t>(producers)), single(static_cast<size_t>(producers));
  std::vector<std::thread> others;
  auto produce = [&](int me) {
    uint8_t payload[60] = {static_cast<uint8_t>(me)};
    for (int burst = 0; burst < 440; ++burst) {
      if (burst % 2)
        for (int i = 0; i < 500; ++i)
          single[static_cast<size_t>(me)].push_back(time_ns([&] { post(bare.producer, payload); }));
      else
        for (int i = 0; i < 500; i += kGroup)
          grouped[static_cast<size_t>(me)].push_back(time_each_ns(kGroup, [&] { post(bare.producer, payload); }));
      usleep(200);
    }
  };
  for (int p = 1; p < producers; ++p) others.emplace_back(produce, p);
  produce(0);
  for (auto& t : others) t.join();
  stop = true;
  consumer.join();
  auto all = [](std::vector<std::vector<double>>& parts) {  // less a tenth of each to warm up
    std::vector<double> out;
    for (auto& part : parts) out.insert(out.end(), part.begin() + static_cast<long>(part.size() / 10), part.end());
    return quantiles(std::move(out));
  };
  return {all(grouped).median, all(single).p99};
}

struct Line {
  alignas(64) std::atomic<uint64_t> value{0};
};

Quantiles ping_pong() {
  static Line there, back;
  std::atomic<bool> stop{false};
  std::thread other([&] {
    uint64_t seen = 0;
    while (!stop.load(std::memory_order_relaxed)) {
      const uint64_t v = there.value.load(std::memory_order_acquire);
      if (v == seen) {
        RealSync::pause();
        continue;
      }
      seen = v;
      back.value.store(v, std::memory_order_release);
    }
  });
  std::vector<double> samples;
  uint64_t n = 0;
  for (int i = 0; i < 100'000; i += kGroup)
    samples.push_back(time_each_ns(kGroup, [&] {
      there.value.store(++n, std::memory_order_release);
      while (back.value.load(std::memory_order_acquire) != n) RealSync::pause();
    }));
  stop = true;
  other.join();
  samples.erase(samples.begin(), samples.begin() + 10'000 / kGroup);
  return quantiles(std::move(samples));
}

// Another process sleeps in a futex; it is woken, answers, and goes back to sleep. The asker spins as the client does,
// then sleeps. A process and not a thread, as the server is one.
struct FutexPage {
  alignas(64) std::atomic<uint32_t> request, answer, waiting, stop;
};

void answer_for_ever(FutexPage* page) {
  uint32_t seen = 0;
  while (!page->stop.load(std::memory_order_relaxed)) {
    const uint32_t v = page->request.load(std::memory_order_acquire);
    if (v == seen) {
      futex_wait(&page->request, seen, 100'000);
      continue;
    }
    seen = v;
    page->answer.store(v, std::memory_order_release);
    RealSync::fence();
    if (page->waiting.load(std::memory_order_relaxed)) futex_wake(&page->answer, 1);
  }
}

Quantiles futex_wake_and_answer() {
  void* shared = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) exit(2);
  auto* page = new (shared) FutexPage();
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    answer_for_ever(page);
    _exit(0);
  }
  std::vector<double> samples;
  for (uint32_t n = 1; n <= 2'000; ++n) {
    usleep(1000);
    samples.push_back(time_ns([&] {
      page->request.store(n, std::memory_order_release);
      futex_wake(&page->request, 1);
      auto answered = [&] { return page->answer.load(std::memory_order_acquire) == n; };
      for (int i = 0; i < kSpinPauses && !answered(); ++i) RealSync::pause();
      while (!answered()) {
        page->waiting.store(1, std::memory_order_relaxed);
        RealSync::fence();
        if (!answered()) futex_wait(&page->answer, n - 1, 100'000);
        page->waiting.store(0, std::memory_order_relaxed);
      }
    }));
  }
  page->stop = 1;
  waitpid(child, nullptr, 0);
  return quantiles(std::move(samples));
}

double memcpy_gb_per_s() {
  const size_t bytes = 64u << 20;
  auto* a = static_cast<uint8_t*>(aligned_alloc(4096, bytes));
  auto* b = static_cast<uint8_t*>(aligned_alloc(4096, bytes));
  memset(a, 1, bytes);
  memset(b, 2, bytes);
  std::vector<double> samples;
  for (int i = 0; i < 25; ++i)
    samples.push_back(time_ns([&] {
      memcpy(b, a, bytes);
      asm volatile("" ::"r"(b) : "memory");
    }));
  free(a);
  free(b);
  return static_cast<double>(bytes) / quantiles(std::move(samples)).median;
}

}  // namespace

int main() {
  bench::Json json;
  json.put("bare_post_ns", bare_post(1));
  json.put("bare_post_2_producers_ns", bare_post(2));
  json.put("ping_pong_ns", ping_pong());
  json.put("futex_answer_ns", futex_wake_and_answer());
  json.put("memcpy_gb_per_s", memcpy_gb_per_s());
  json.print();
  return 0;
}
