// SPDX-License-Identifier: Apache-2.0
// Turns on a shared GPU: kernels of one seat at a time, everybody comes to an end, and nobody who keeps a turn holds up
// the others for longer than the quantum. Under TSan.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "devproxy/hal/engine.h"

using devproxy::hal::Engine;

namespace {

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition); \
      std::exit(1);                                                          \
    }                                                                        \
  } while (0)

constexpr uint64_t kQuantumNs = 2'000'000;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Kernels of several seats, with threads that keep their part, let it go, and wait for another seat while they keep it.
void stress(uint32_t seats, uint32_t threads, uint32_t seed) {
  Engine engine(kQuantumNs);
  std::vector<std::atomic<int>> inside(seats), done(seats);
  std::vector<std::thread> all;
  constexpr int kKernels = 120;
  for (uint32_t seat = 0; seat < seats; seat++)
    for (uint32_t t = 0; t < threads; t++)
      all.emplace_back([&, seat, t] {
        std::mt19937 dice(seed * 1000 + seat * 10 + t);
        Engine::Turn turn;
        for (int i = 0; i < kKernels; i++) {
          engine.begin(seat, turn);
          inside[seat]++;
          for (uint32_t other = 0; other < seats; other++) CHECK(other == seat || inside[other] == 0);
          if (dice() % 16 == 0) usleep(dice() % 400);
          inside[seat]--;
          engine.end(turn);
          done[seat]++;
          switch (dice() % 8) {
            case 0: usleep(dice() % 200); break;  // the dispatch thread is busy, and keeps it
            case 1:
            case 2: engine.yield(turn); break;
            case 3: {  // for another seat's kernel: a dependency that the engine does not know
              const uint32_t other = dice() % seats;
              const int seen = done[other];
              while (other != seat && done[other] == seen && seen < static_cast<int>(threads) * kKernels / 2)
                usleep(50);
              break;
            }
            default: break;
          }
        }
        engine.yield(turn);
      });
  for (auto& thread : all) thread.join();
  for (uint32_t seat = 0; seat < seats; seat++) CHECK(done[seat] == static_cast<int>(threads) * kKernels);
  CHECK(seats == 1 || engine.switches() >= seats - 1);
}

// Whoever runs on keeps the turn; it goes to the next seat, not to the first.
void order() {
  Engine engine(10'000'000'000);
  std::vector<uint32_t> ran;
  std::atomic<int> waiting{0};
  Engine::Turn first;
  engine.begin(1, first);
  std::vector<std::thread> others;
  for (uint32_t seat : {0u, 3u, 2u})
    others.emplace_back([&, seat] {
      Engine::Turn turn;
      waiting++;
      engine.begin(seat, turn);
      ran.push_back(seat);
      engine.end(turn);
      engine.yield(turn);
    });
  while (waiting != 3) usleep(100);
  usleep(100'000);  // now they wait in begin()
  for (int i = 0; i < 10; i++) {
    engine.end(first);
    engine.begin(1, first);
    CHECK(ran.empty());
  }
  engine.end(first);
  usleep(20'000);
  CHECK(ran.empty());
  engine.yield(first);
  for (auto& thread : others) thread.join();
  CHECK((ran == std::vector<uint32_t>{2, 3, 0}));
  CHECK(engine.switches() == 3);
}

// A thread that keeps its part and never comes back: the others take the turn when the quantum is over, and the part is
// worth nothing then.
void nobody_holds_it_up() {
  Engine engine(50'000'000);
  Engine::Turn kept, other;
  engine.begin(0, kept);
  engine.end(kept);
  const auto start = std::chrono::steady_clock::now();
  engine.begin(1, other);
  CHECK(seconds_since(start) > 0.02);
  std::atomic<bool> came{false};
  std::thread back([&] {
    engine.begin(0, kept);
    came = true;
    engine.end(kept);
    engine.yield(kept);
  });
  usleep(120'000);
  CHECK(!came);  // the other's kernel still runs, however long
  engine.end(other);
  engine.yield(other);
  back.join();
}

}  // namespace

int main() {
  order();
  nobody_holds_it_up();
  for (uint32_t seed = 0; seed < 6; seed++)
    for (uint32_t seats : {1u, 2u, 4u}) stress(seats, 1 + seed % 3, seed);
  std::puts("good");
  return 0;
}
