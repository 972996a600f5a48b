// SPDX-License-Identifier: Apache-2.0
// Drives hal/cuda through the whole of hal.h on the fake driver. One line per test: "PASS name" or "FAIL name: ...".
//
//   hal_cuda_test FAKE_DRIVER.so [events] [register] [chaos]    events: marks are events, not written words;
//                                                               register: the pinned window is registered
//   hal_cuda_test --open PATH                                   prints why this driver cannot be opened
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/hal_cuda/fixture.h"

namespace {

void test_properties() {
  Fixture f;
  const Properties& p = f.device->properties();
  EXPECT(p.name == "Fake GPU" && p.major == 9 && p.minor == 0 && p.uuid[15] == 0x5a && p.total_bytes == 8ull << 30);
  // Managed memory, its concurrent access: mapped host memory's, whatever the driver has; pageable memory: never.
  EXPECT(p.attributes[83] == g_config.register_host_window && p.attributes[89] == g_config.register_host_window);
  EXPECT(p.attributes[88] == 0 && p.attributes[101] == 0);
  // The driver has them, and devproxy refuses what they stand for: atomics towards the host, flushing of RDMA writes,
  // unified functions. Domains of kernels are the device's.
  EXPECT(p.attributes[86] == 0 && p.attributes[117] == 0 && p.attributes[129] == 0 && p.attributes[126] == 4);
  const Caps caps = f.device->caps();
  EXPECT(caps.kernels_see_host_window == g_config.register_host_window);
  EXPECT(!caps.reads_after_fault);
  EXPECT(f.device->running_here() == nullptr);
}

void test_memory() {
  fake.set_memory(1ull << 30);
  Fixture f;
  const uint64_t maps = fake.calls("cuMemMap"), accesses = fake.calls("cuMemSetAccess");
  EXPECT_OK(f.space->commit(f.base, 512, false));
  EXPECT_OK(f.space->commit(f.base + 4096, 8 * kMiB, false));
  EXPECT(fake.calls("cuMemMap") == maps + 1);                             // one slab serves both
  EXPECT_OK(f.space->commit(f.base + kDeviceBytes - kMiB, kMiB, false));  // the high end
  EXPECT_OK(f.space->commit(f.base + 60 * kMiB, 200 * kMiB, false));      // over the border of a slab
  EXPECT(fake.calls("cuMemSetAccess") - accesses == 3);                   // once per range
  std::vector<uint8_t> data(3 * kMiB + 7), back(data.size());
  for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<uint8_t>(i * 7);
  EXPECT_OK(f.space->write(f.base + 62 * kMiB + 3, data.data(), data.size()));
  EXPECT_OK(f.space->read(f.base + 62 * kMiB + 3, back.data(), back.size()));
  EXPECT(data == back);
  EXPECT(f.space->read(f.base + 600 * kMiB, back.data(), 1).code() == kInvalidValue);  // nothing there, so no fault
  EXPECT(f.space->commit(f.base + kDeviceBytes, 1, false).code() == kInvalidValue);

  // 1 GiB device: 64 + 256 + 64 are in use. 600 MiB fit only without the slabs' rounding; 700 MiB do not.
  EXPECT(f.space->commit(f.base + 1024 * kMiB, 700 * kMiB, false).code() == kOutOfMemory);
  EXPECT_OK(f.space->commit(f.base + 1024 * kMiB + 32 * kMiB, 600 * kMiB, false));
  const uint64_t used = fake.used_memory();
  f.space->release(f.base + 1024 * kMiB + 32 * kMiB, 600 * kMiB);
  EXPECT(fake.used_memory() < used);  // above the floor, so given back
  EXPECT_OK(f.space->commit(f.base + 2048 * kMiB, 500 * kMiB, false));
  f.space->release(f.base, 512);
  EXPECT_OK(f.space->read(f.base + 4096, back.data(), 16));  // the neighbour in the same slab still has its memory
  fake.fail("cuMemSetAccess", 1, 999);
  const Status broken = f.space->commit(f.base + 4096 * kMiB, kMiB, false);
  EXPECT(broken.code() == 999 && broken.text().find("cuMemSetAccess") != std::string::npos);
  EXPECT_OK(f.space->commit(f.base + 4096 * kMiB, kMiB, false));  // nothing of the failed attempt is left behind
  fake.set_memory(8ull << 30);
}

// What a stream frees and takes again, in other pieces, is committed while its commands run: it stays mapped, though nothing
// idle is to be kept, also where there is no memory for the rest. An H200 went on with the unmapping, and the commands with
// a fault.
void test_memory_in_use_stays() {
  auto config = g_config;
  config.slab_bytes = config.max_handle_bytes = 2 * kMiB;
  config.idle_floor_bytes = 0;
  Fixture f(0, config);
  f.load_module();
  const QueueRef queue = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  EXPECT_OK(f.space->commit(f.base, 4 * kMiB, false));
  EXPECT_OK(f.space->commit(f.base + 4 * kMiB, 4 * kMiB, false));
  f.spin(queue, 1);
  for (uint64_t i = 0; i < 4; i++) f.fill(queue, 1, f.base + i * 2 * kMiB, 1024, static_cast<uint32_t>(5 + i));
  const uint64_t begin = f.base + 3 * kMiB;
  f.space->reuse(begin, kMiB);
  f.space->reuse(f.base + 4 * kMiB, 4 * kMiB);
  fake.set_memory(fake.used_memory() + 2 * kMiB);
  EXPECT(f.space->commit(begin, 12 * kMiB, false).code() == kOutOfMemory);
  const uint64_t before = fake.calls("cuMemUnmap");
  f.space->release(f.base, 1024);  // lets go of what is idle
  fake.set_memory(8ull << 30);
  EXPECT_OK(f.space->commit(begin, 12 * kMiB, false));
  f.fill(queue, 1, f.base + 4096, 1024, 9);
  usleep(20'000);
  EXPECT(fake.calls("cuMemUnmap") == before);
  fake.hold_spin(0);
  EXPECT(f.sync(1) && f.owner.faults == 0 && f.words(f.base + 4096, 1)[0] == 9);
  for (uint64_t i = 0; i < 4; i++) EXPECT(f.words(f.base + i * 2 * kMiB, 1)[0] == 5 + i);
  // With nothing under way it goes back to the driver, at once or when the watcher falls asleep.
  f.space->release(f.base, 3 * kMiB);
  f.space->release(begin, 12 * kMiB);
  for (int i = 0; i < 1000 && fake.calls("cuMemUnmap") < before + 8; i++) usleep(1000);
  EXPECT(fake.calls("cuMemUnmap") == before + 8);
}

// A training step allocates its activations and frees them again. Within what the client has for itself they stay mapped
// from step to step; what it gives back goes back to the driver.
void test_memory_of_a_step() {
  Fixture f;
  const auto step = [&] {
    for (uint64_t i = 0; i < 40; i++) EXPECT_OK(f.space->commit(f.base + i * 50 * kMiB, 50 * kMiB, false));
    for (uint64_t i = 40; i-- > 0;) f.space->release(f.base + i * 50 * kMiB, 50 * kMiB);
  };
  const auto changes = [] { return fake.calls("cuMemMap") + fake.calls("cuMemUnmap"); };
  f.space->reserve(2000 * kMiB);
  step();
  const uint64_t first = changes(), used = fake.used_memory();
  for (int i = 0; i < 3; i++) step();
  EXPECT(changes() == first && fake.used_memory() == used && used >= 2000 * kMiB);
  const auto use_a_little = [&] {
    usleep(3000);  // the GPU is asked once in a millisecond whether it has plenty
    EXPECT_OK(f.space->commit(f.base, 100 * kMiB, false));
    f.space->release(f.base, 100 * kMiB);
  };
  f.space->reserve(600 * kMiB);
  use_a_little();
  EXPECT(fake.used_memory() <= 1900 * kMiB && fake.used_memory() >= 1100 * kMiB);
  fake.set_memory(fake.used_memory() + 100 * kMiB);  // others have the rest
  use_a_little();
  // If the watcher tidied in between, the GPU has plenty again, and 128 MiB were mapped anew.
  EXPECT(fake.used_memory() <= 1000 * kMiB && fake.used_memory() >= 600 * kMiB);
  fake.set_memory(8ull << 30);
  // Not all at once, but at more addresses than it needs at once.
  f.space->reserve(0);
  use_a_little();
  f.space->reserve(600 * kMiB);
  const auto roaming = [&] {
    for (const uint64_t at : {f.base, f.base + 4096 * kMiB}) {
      for (uint64_t i = 0; i < 8; i++) EXPECT_OK(f.space->commit(at + i * 50 * kMiB, 50 * kMiB, false));
      for (uint64_t i = 8; i-- > 0;) f.space->release(at + i * 50 * kMiB, 50 * kMiB);
    }
  };
  usleep(3000);
  roaming();
  const uint64_t roamed = changes();
  for (int i = 0; i < 3; i++) roaming();
  EXPECT(changes() == roamed);
  // Without a reservation only a little is kept.
  f.space->reserve(0);
  step();
  const uint64_t before = changes();
  step();
  EXPECT(changes() - before > 20);
}

// What may be committed is what the driver has left, and what is idle; not what the GPU has by its size.
void test_room() {
  Fixture f;
  fake.set_memory(1ull << 30);
  const uint64_t had = fake.used_memory();
  EXPECT_OK(f.space->commit(f.base, 256 * kMiB, false));
  const uint64_t left = (1ull << 30) - had - 256 * kMiB, margin = 8 * kMiB;
  const auto about = [&](uint64_t bytes, uint64_t wanted) { return bytes <= wanted && bytes >= wanted - margin; };
  EXPECT(about(f.space->room_bytes(0), left) && about(f.space->room_bytes(256 * kMiB), left));
  EXPECT(about(f.space->room_bytes(300 * kMiB), left - 44 * kMiB));  // 44 MiB of them are not committed yet
  f.space->reserve(256 * kMiB);
  f.space->release(f.base, 256 * kMiB);  // stays mapped, and is room
  EXPECT(fake.used_memory() >= had + 256 * kMiB && about(f.space->room_bytes(0), left + 256 * kMiB));
  EXPECT(about(f.space->room_bytes(256 * kMiB), left));
  EXPECT(f.space->room_bytes(2048 * kMiB) == 0);
  fake.fail("cuMemGetInfo", 1, 999);
  EXPECT(f.space->room_bytes(0) == UINT64_MAX);  // commit() says what is wrong
  fake.set_memory(8ull << 30);
}

// Copies of a few numbers from and to chunks: no host function, in the stream's order, also where cells run out.
void test_small_copies() {
  Fixture f;
  f.load_module();
  const QueueRef queue = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  const uint64_t host_functions = fake.calls("cuLaunchHostFunc");
  uint32_t from[2] = {41, 42}, to[2] = {};
  f.space->copy(queue, f.ticket(1, 7), f.up(f.base, from, 8));
  from[0] = from[1] = 0;  // taken at the call: the chunk is the copy's own, and its end is when it is over
  f.space->copy(queue, f.ticket(1, 8), f.down(to, f.base, 8));
  EXPECT(f.sync(1));
  EXPECT(to[0] == 41 && to[1] == 42 && f.owner.tags == (std::vector<uint32_t>{7, 8}));
  EXPECT(fake.calls("cuLaunchHostFunc") == host_functions);
  // Behind a kernel, more than there are cells; each sees the memory as it is at its place in the stream.
  std::vector<uint32_t> got(300, 1);
  f.spin(queue, 1);
  for (uint32_t i = 0; i < got.size(); i++) {
    f.fill(queue, 1, f.base, 1, 1000 + i);
    f.space->copy(queue, f.ticket(1), f.down(&got[i], f.base, 4));
  }
  EXPECT(got[0] == 1);
  fake.hold_spin(0);
  EXPECT(f.sync(1));
  for (uint32_t i = 0; i < got.size(); i++) EXPECT(got[i] == 1000 + i);
  // A page-locked buffer is everybody's: there the stream's order is all.
  f.space->memset(queue, f.ticket(1), {f.base, 0, 16, 1, 0x22, 1});
  f.space->copy(queue, f.ticket(1), f.down(f.window, f.base, 16));
  f.space->copy(queue, f.ticket(1), f.up(f.base + 64, f.window, 16));
  EXPECT(f.sync(1) && f.words(f.base + 64, 1)[0] == 0x22222222);
}

// A dump and a restore ask from several threads.
void test_contents_by_threads() {
  auto config = g_config;
  config.staging_bytes = 64u << 10;
  Fixture f(0, config);
  const size_t n = kMiB / 2 + 5, threads = 16;  // more than there are lanes
  EXPECT_OK(f.space->commit(f.base, threads * 4 * kMiB, false));
  std::atomic<int> wrong{0};
  auto each = [&](const std::function<void(uint64_t addr, size_t i)>& work) {
    std::vector<std::thread> all;
    for (size_t i = 0; i < threads; i++) all.emplace_back([&, i] { work(f.base + i * 4 * kMiB + 3, i); });
    for (std::thread& one : all) one.join();
  };
  auto byte = [](size_t i, size_t at) { return static_cast<uint8_t>(i * 31 + at * 7 + at / 251); };
  each([&](uint64_t addr, size_t i) {
    size_t next = 0;
    const Status s = f.space->write_pieces(addr, n, [&](void* piece, size_t bytes, size_t offset) {
      wrong += offset != next;
      next = offset + bytes;
      for (size_t k = 0; k < bytes; k++) static_cast<uint8_t*>(piece)[k] = byte(i, offset + k);
      return Status();
    });
    wrong += !s.ok() || next != n;
  });
  each([&](uint64_t addr, size_t i) {
    size_t next = 0;
    const Status s = f.space->read_pieces(addr, n, [&](const void* piece, size_t bytes, size_t offset) {
      wrong += offset != next;
      next = offset + bytes;
      for (size_t k = 0; k < bytes; k++) wrong += static_cast<const uint8_t*>(piece)[k] != byte(i, offset + k);
      return Status();
    });
    wrong += !s.ok() || next != n;
  });
  EXPECT(wrong == 0);
  // An error of whoever takes the bytes ends it, and is what is answered; the lane is good for the next.
  int pieces = 0;
  EXPECT(f.space
             ->read_pieces(f.base, n,
                           [&](const void*, size_t, size_t) {
                             return ++pieces == 2 ? Status(kOutOfMemory, "the disk is full") : Status();
                           })
             .text() == "the disk is full");
  EXPECT(pieces == 2);
  EXPECT(f.space->write_pieces(f.base, n, [&](void*, size_t, size_t) { return Status(kInvalidImage, "cut short"); })
             .text() == "cut short");
  EXPECT(f.words(f.base + 4 * kMiB + 4, 1)[0] != 0);
}

void test_tuning() {
  cuda::CudaConfig config;
  EXPECT_OK(config.tune("settle_us=9,staging_bytes=8192"));
  EXPECT(config.settle_us == 9 && config.staging_bytes == 8192 && config.mark_every == cuda::CudaConfig().mark_every);
  EXPECT_OK(config.tune(""));
  for (const char* wrong : {"settle", "settle_us", "settle_us=", "settle_us=x", "settle_us=-1", "a=1", "mark_every=0",
                            "staging_bytes=100", "nap_us=99999999999"}) {
    const Status s = cuda::CudaConfig().tune(wrong);
    EXPECT(s.code() == kInvalidValue);
  }
}

void test_address_taken() {
  void* const want = reinterpret_cast<void*>(kBase + kRange + 64 * kMiB);
  void* const block = mmap(want, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  EXPECT(block == want);
  {
    Fixture f(1);
    EXPECT(!f.space && f.open_error.find("instead of the device addresses") != std::string::npos);
  }
  munmap(block, 4096);
}

void test_stream_order() {
  Fixture f;
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, 4 * kMiB, false));
  const QueueRef blocking = f.space->create_queue(QueueKind::kBlocking, 0, 1);
  const QueueRef other = f.space->create_queue(QueueKind::kBlocking, 0, 2);
  const QueueRef free = f.space->create_queue(QueueKind::kNonBlocking, 0, 3);
  EXPECT(f.space->idle() && f.space->oldest_pending() == UINT64_MAX);

  f.fill(f.legacy, 0, f.base, 16, 100);
  const uint64_t before_spin = f.last[0];
  f.spin(blocking, 1);
  const uint64_t spin_position = f.last[1];
  f.fill(other, 2, f.base + 4096, 16, 200);
  f.fill(free, 3, f.base + 8192, 16, 300);
  EXPECT(f.owner.wait(0, before_spin));  // a mark that came later would wait for the spin
  EXPECT(f.sync(3) && f.sync(2));        // blocking streams do not wait for one another
  // A command that was just told may still count for a moment.
  for (int i = 0; i < 2000 && f.space->oldest_pending() != spin_position; i++) usleep(1000);
  EXPECT(f.space->oldest_pending() == spin_position);
  f.fill(f.legacy, 0, f.base + 64, 16, 400);  // waits for the spin
  f.fill(other, 2, f.base + 128, 16, 500);    // waits for that
  f.fill(free, 3, f.base + 8192, 16, 600);
  EXPECT(f.sync(3));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT(!f.owner.done(1, f.last[1]) && !f.owner.done(0, f.last[0]) && !f.owner.done(2, f.last[2]) && !f.space->idle());
  fake.hold_spin(0);
  EXPECT(f.sync(0) && f.sync(1) && f.sync(2));
  for (int i = 0; i < 1000 && !f.space->idle(); i++) usleep(1000);
  EXPECT(f.space->idle());
  EXPECT(f.words(f.base, 1)[0] == 100 && f.words(f.base + 64, 1)[0] == 400 && f.words(f.base + 128, 2)[1] == 501);
  EXPECT(f.words(f.base + 4096, 1)[0] == 200 && f.words(f.base + 8192, 1)[0] == 600);
}

// Somebody waits for a command while a later one of the same stream does not end: its mark must not lie behind that.
void test_marks_are_not_late() {
  Fixture f;
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, 4 * kMiB, false));
  const QueueRef queue = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  const QueueRef second = f.space->create_queue(QueueKind::kNonBlocking, 0, 2);
  const EventRef event = f.space->create_event(false);

  f.fill(queue, 1, f.base, 16, 1);
  f.space->record(queue, f.ticket(1), event);
  const uint64_t recorded = f.last[1];
  f.spin(queue, 1);
  EXPECT(f.owner.wait(1, recorded, 2000));
  fake.hold_spin(0);
  EXPECT(f.sync(1));

  // A host function that returns only when the client has seen what was before it.
  f.fill(queue, 1, f.base, 16, 2);
  const uint64_t filled = f.last[1];
  f.owner.run = [&](uint64_t) { EXPECT(f.owner.wait(1, filled, 2000)); };
  f.space->host_function(queue, f.ticket(1), 7);
  EXPECT(f.sync(1) && f.owner.host_functions == 1);

  // The same with a wait for another stream in place of the host function.
  f.spin(second, 2);
  f.space->record(second, f.ticket(2), event);
  f.fill(queue, 1, f.base, 16, 3);
  const uint64_t before_wait = f.last[1];
  f.space->wait(queue, f.ticket(1), event);
  EXPECT(f.owner.wait(1, before_wait, 2000));
  EXPECT(!f.owner.done(1, f.last[1]));
  fake.hold_spin(0);
  EXPECT(f.sync(1));
}

uint64_t marks() { return fake.calls("cuStreamWriteValue64_v2") + fake.calls("cuEventRecord"); }

// Nobody waits, so hardly a command needs a mark, though the dispatch thread takes longer for each than a C program needs to
// launch a kernel. Where another process has the processor meanwhile, or the driver takes its time, the stream rests.
void test_marks_are_few() {
  auto config = g_config;
  config.max_in_flight = 1000;  // what is held has marks of its own
  Fixture f(0, config, nullptr, /*framework=*/true);
  f.load_executor();
  if (!f.executor) return;
  const QueueRef queue = f.space->create_queue(QueueKind::kBlocking, 0, 1);
  f.op("busy", queue, 1, 0, 0, 1);
  EXPECT(f.sync(1));
  constexpr uint64_t kOps = 640, kOwn = kOps / 32;
  const uint64_t before = marks();
  uint64_t rests = 0;
  auto last = steady_clock::now();
  for (uint64_t i = 0; i < kOps; i++) {
    f.op("busy", queue, 1, 0, 0, 12);
    const auto now = steady_clock::now();
    rests += now - std::exchange(last, now) > std::chrono::microseconds(25);
  }
  const uint64_t made = marks() - before;
  EXPECT(made + 1 >= kOwn && made <= kOwn + 1 + rests);
  f.space->awaited(queue);
  EXPECT(f.sync(1));
}

// With marks of its own accord as good as off, the watcher sees completions because it is told that somebody waits.
void test_awaited() {
  auto config = g_config;
  config.settle_us = 60'000'000;
  config.max_in_flight = 40;
  Fixture f(0, config);
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  const QueueRef queue = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  const QueueRef second = f.space->create_queue(QueueKind::kNonBlocking, 0, 2);
  f.space->awaited(queue);  // nothing was submitted
  for (uint32_t i = 0; i < 3; i++) f.fill(queue, 1, f.base, 4, i);
  usleep(20'000);
  EXPECT(!f.owner.done(1, f.last[1]));
  f.space->awaited(queue);
  EXPECT(f.owner.wait(1, f.last[1], 2000));
  f.space->awaited(queue);  // has completed

  // What the driver has no room for yet gets its mark when it is issued; and one call is enough for a sleeping watcher.
  for (uint32_t round = 0; round < 20; round++) {
    f.spin(second, 2);
    f.space->record(second, f.ticket(2), f.space->create_event(false));
    for (uint32_t i = 0; i < 100; i++) f.fill(queue, 1, f.base, 4, i);
    f.space->awaited(queue);
    if (round % 2) usleep(2000);
    fake.hold_spin(0);
    EXPECT(f.owner.wait(1, f.last[1], 2000) && f.owner.wait(2, f.last[2], 2000));
  }

  // Many streams with few commands each fill the driver's queue, and none has a mark of its own.
  std::vector<QueueRef> many;
  for (uint32_t q = 0; q < 12; q++) many.push_back(f.space->create_queue(QueueKind::kNonBlocking, 0, 3 + q));
  const uint64_t full = f.position * 64 + 64;  // the first of them
  for (uint32_t i = 0; i < 15; i++)
    for (uint32_t q = 0; q < 12; q++) f.fill(many[q], 3 + q, f.base, 4, i);
  EXPECT(f.owner.wait(3, full, 2000));
  for (const QueueRef& one : many) f.space->awaited(one);
  for (uint32_t q = 0; q < 12; q++) EXPECT(f.owner.wait(3 + q, f.last[3 + q], 2000));

  // Nobody can ask for a stream that is gone. What is behind a host function is seen to end too.
  f.fill(many[0], 3, f.base, 4, 1);
  f.space->destroy_queue(many[0]);
  EXPECT(f.owner.wait(3, f.last[3], 2000));
  f.space->host_function(queue, f.ticket(1), 1);
  EXPECT(f.owner.wait(1, f.last[1], 2000));
}

void test_events() {
  Fixture f;
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, 4 * kMiB, false));
  const QueueRef a = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  const QueueRef b = f.space->create_queue(QueueKind::kNonBlocking, -5, 2);
  const EventRef start = f.space->create_event(true), end = f.space->create_event(true),
                 untimed = f.space->create_event(false);
  EXPECT(f.space->elapsed_ms(start, end).status().code() == kInvalidHandle);
  f.space->wait(b, f.ticket(2), start);  // never recorded: no wait
  EXPECT(f.sync(2));
  f.space->record(a, f.ticket(1), start);
  EXPECT(f.sync(1));  // so that the time begins before the spin
  f.spin(a, 1);
  f.space->record(a, f.ticket(1), end);
  f.space->record(a, f.ticket(1), untimed);
  EXPECT(f.space->elapsed_ms(start, end).status().code() == kNotReady);
  EXPECT(f.space->elapsed_ms(start, untimed).status().code() == kInvalidHandle);
  f.fill(a, 1, f.base, 4, 10);
  f.space->record(a, f.ticket(1), end);  // the wait is for this one
  f.space->wait(b, f.ticket(2), end);
  f.fill(b, 2, f.base, 4, 20);
  usleep(20'000);
  EXPECT(!f.owner.done(2, f.last[2]));
  fake.hold_spin(0);
  EXPECT(f.sync(2) && f.words(f.base, 1)[0] == 20);
  auto ms = f.space->elapsed_ms(start, end);
  EXPECT_OK(ms.status());
  EXPECT(ms.ok() && *ms >= 15 && *ms < 10'000);
  // What a dump keeps of them has their distance, however late whoever asks is woken.
  fake.late(10'000);
  auto from = f.space->event_time_ns(start), to = f.space->event_time_ns(end);
  fake.late(0);
  EXPECT(from.ok() && to.ok() && ms.ok() && std::abs(static_cast<double>(*to - *from) * 1e-6 - *ms) < 0.01);
}

void test_copies() {
  auto config = g_config;
  config.staging_bytes = 64u << 10;  // so that pieces are many
  Fixture f(0, config);
  EXPECT_OK(f.space->commit(f.base, 16 * kMiB, false));
  const QueueRef queue = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  std::mt19937 random(1);
  for (size_t i = 0; i < kWindowBytes; i += 4) {
    const uint32_t word = random();
    std::memcpy(f.window + i, &word, 4);
  }
  // Pinned window up, across pieces of registration; on the device; down into memory that nobody registered.
  const size_t n = 5 * kMiB + 13;
  f.space->copy(queue, f.ticket(1), f.up(f.base + 5, f.window + kMiB + 3, n));
  f.space->copy(queue, f.ticket(1), {f.base + 8 * kMiB, f.base + 5, 0, 0, n, 1, true, true});
  std::vector<uint8_t> chunk(n);
  f.space->copy(queue, f.ticket(1, 77), f.down(chunk.data(), f.base + 8 * kMiB, n));
  EXPECT(f.sync(1));
  EXPECT(std::memcmp(chunk.data(), f.window + kMiB + 3, n) == 0);
  EXPECT(f.owner.tags == std::vector<uint32_t>{77});  // once, though the copy went in pieces
  EXPECT(f.owner.total == 3);

  // One buffer down and up again: nothing may be read before the stream is there (hal/cuda/cuda_space.h: host memory).
  std::memset(f.window, 0xee, 4096);
  f.space->memset(queue, f.ticket(1), {f.base, 0, 4096, 1, 0x11, 1});
  f.space->copy(queue, f.ticket(1), f.down(f.window, f.base, 4096));
  f.space->copy(queue, f.ticket(1), f.up(f.base + 4096, f.window, 4096));
  // From the window to the window, in order too.
  f.space->copy(queue, f.ticket(1), {f.window_base + 8192, f.window_base, 0, 0, 4096, 1, false, false});
  EXPECT(f.sync(1));
  EXPECT(f.words(f.base + 4096, 1)[0] == 0x11111111 && f.window[8192 + 4095] == 0x11);

  // Rectangles: 200 x 300 bytes, then rows that are longer than a slot.
  for (uint64_t width : {uint64_t{200}, uint64_t{150'000}}) {
    const uint64_t height = width == 200 ? 300 : 5, pitch = width + 56, device_pitch = width + 312;
    std::vector<uint8_t> out(pitch * height, 0);
    f.space->copy(queue, f.ticket(1),
                  {f.base, f.window_base + 16 * kMiB + 1, device_pitch, pitch, width, height, true, false});
    f.space->copy(queue, f.ticket(1), {f.base + 4 * kMiB, f.base, pitch, device_pitch, width, height, true, true});
    f.space->copy(
        queue, f.ticket(1),
        {reinterpret_cast<uint64_t>(out.data()), f.base + 4 * kMiB, pitch, pitch, width, height, false, true});
    EXPECT(f.sync(1));
    bool same = true, untouched = true;
    for (uint64_t y = 0; y < height; y++) {
      same &= std::memcmp(out.data() + y * pitch, f.window + 16 * kMiB + 1 + y * pitch, width) == 0;
      untouched &= out[y * pitch + width] == 0;
    }
    EXPECT(same && untouched);
  }
  EXPECT((fake.calls("cuMemHostRegister_v2") != 0) == g_config.register_host_window);
}

ArrayShape shape_of(uint64_t width, uint64_t height, uint64_t depth, uint32_t format, uint32_t channels,
                    uint32_t flags = 0) {
  return {width, height, depth, format, channels, flags, 0};
}

ArrayCopy::Side in_array(const ArrayRef& array, uint64_t x = 0, uint64_t y = 0, uint64_t z = 0) {
  return {array, x, y, z, 0, 0, 0, true};
}

ArrayCopy::Side at(uint64_t addr, uint64_t pitch, uint64_t rows, bool device) {
  return {nullptr, 0, 0, 0, addr, pitch, rows, device};
}

// Boxes of odd sizes at odd places: up from the window, on the device, down to memory that nobody registered.
void test_arrays() {
  Fixture f;
  std::mt19937 random(9);
  for (uint64_t i = 0; i < 16 * kMiB; i++) f.window[i] = static_cast<uint8_t>(random());
  EXPECT_OK(f.space->commit(f.base, 16 * kMiB, false));
  const QueueRef queue = f.space->create_queue(QueueKind::kBlocking, 0, 1);
  const ArrayShape shapes[] = {
      shape_of(1000, 0, 0, 0x01, 1),        // bytes, one row
      shape_of(77, 0, 5, 0x20, 2, 0x01),    // rows in layers
      shape_of(301, 203, 0, 0x02, 4),       // 8-byte elements
      shape_of(33, 17, 9, 0x20, 4, 0x02),   // 16-byte elements, three dimensions
      shape_of(100'000, 3, 2, 0x20, 4, 0),  // rows longer than a slot
  };
  for (const ArrayShape& shape : shapes) {
    ArrayExtent e;
    EXPECT(array_extent(shape, &e));
    auto first = f.space->create_array(shape), second = f.space->create_array(shape);
    EXPECT_OK(first.status());
    EXPECT_OK(second.status());
    if (!first.ok() || !second.ok()) return;
    const uint64_t pitch = e.width_bytes + 48, rows = e.rows + 2, window = f.window_base + 3;
    const uint64_t span = ((e.slices - 1) * rows + e.rows - 1) * pitch + e.width_bytes;
    // All of it up; the box without its first element, row and slice over to the other; that one down, by the device.
    const uint64_t element = e.width_bytes / shape.width, y = e.rows > 1, z = e.slices > 1;
    f.space->copy_array(queue, f.ticket(1),
                        {in_array(*first), at(window, pitch, rows, false), e.width_bytes, e.rows, e.slices});
    f.space->copy_array(queue, f.ticket(1),
                        {in_array(*second), at(window, pitch, rows, false), e.width_bytes, e.rows, e.slices});
    f.space->copy_array(
        queue, f.ticket(1),
        {in_array(*second), in_array(*first, element, y, z), e.width_bytes - element, e.rows - y, e.slices - z});
    f.space->copy_array(queue, f.ticket(1),
                        {at(f.base, pitch, rows, true), in_array(*second), e.width_bytes, e.rows, e.slices});
    std::vector<uint8_t> down(span, 0x5a), direct(span, 0x5a), want(span, 0x5a);
    const auto out = reinterpret_cast<uint64_t>(down.data());
    f.space->copy_array(queue, f.ticket(1, 77),
                        {at(out, pitch, rows, false), in_array(*second), e.width_bytes, e.rows, e.slices});
    EXPECT(f.sync(1));
    EXPECT(f.owner.tags == std::vector<uint32_t>{77});  // once, though it went in pieces
    f.owner.tags.clear();
    for (uint64_t s = 0; s < e.slices; s++)
      for (uint64_t r = 0; r < e.rows; r++) {
        uint8_t* const to = want.data() + (s * rows + r) * pitch;
        std::memcpy(to, f.window + 3 + (s * rows + r) * pitch, e.width_bytes);
        if (s + z < e.slices && r + y < e.rows)
          std::memcpy(to, f.window + 3 + ((s + z) * rows + r + y) * pitch + element, e.width_bytes - element);
      }
    EXPECT(down == want);
    EXPECT_OK(f.space->read(f.base, direct.data(), span));
    for (uint64_t s = 0; s < e.slices; s++)
      for (uint64_t r = 0; r < e.rows; r++)
        EXPECT(std::memcmp(direct.data() + (s * rows + r) * pitch, want.data() + (s * rows + r) * pitch,
                           e.width_bytes) == 0);
    // From the device's pitched memory into the first: it is then the second.
    f.space->copy_array(queue, f.ticket(1),
                        {in_array(*first), at(f.base, pitch, rows, true), e.width_bytes, e.rows, e.slices});
    EXPECT(f.sync(1));
    // The contents as a checkpoint takes them, in two parts, and back into the first.
    const uint64_t all = e.rows * e.slices, half = all / 2;
    std::vector<uint8_t> packed(e.bytes()), again(e.bytes());
    EXPECT_OK(f.space->read_array(*second, 0, half, packed.data()));
    EXPECT_OK(f.space->read_array(*second, half, all - half, packed.data() + half * e.width_bytes));
    for (uint64_t s = 0; s < e.slices; s++)
      for (uint64_t r = 0; r < e.rows; r++)
        EXPECT(std::memcmp(packed.data() + (s * e.rows + r) * e.width_bytes, want.data() + (s * rows + r) * pitch,
                           e.width_bytes) == 0);
    EXPECT_OK(f.space->read_array(*first, 0, all, again.data()));
    EXPECT(packed == again);
    std::fill(packed.begin(), packed.end(), uint8_t{0x3c});
    EXPECT_OK(f.space->write_array(*first, half, all - half, packed.data() + half * e.width_bytes));
    EXPECT_OK(f.space->write_array(*first, 0, half, packed.data()));
    EXPECT_OK(f.space->read_array(*first, 0, all, again.data()));
    EXPECT(packed == again);
    EXPECT(!f.space->read_array(*first, 1, all, again.data()).ok());
  }
  // A destroyed array lives as long as its copy.
  f.load_module();
  auto last = f.space->create_array(shapes[2]);
  f.spin(queue, 1);
  f.space->copy_array(queue, f.ticket(1), {at(f.base, 4096, 4, true), in_array(*last), 4096 / 8 * 4, 4, 1});
  last = Status(kNotFound, "");
  EXPECT(fake.alive(nullptr, 0) > 0);
  fake.hold_spin(0);
  EXPECT(f.sync(1) && f.owner.faults == 0);
}

void test_objects() {
  Fixture f;
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  auto array = f.space->create_array(shape_of(64, 32, 0, 0x20, 1, 0x02));
  EXPECT_OK(array.status());
  TextureArgs surface;
  surface.kind = static_cast<uint32_t>(TextureKind::kSurface);
  TextureArgs texture, linear, pitched;
  texture.flags = 0x02, texture.filter_mode = 1, texture.address_mode[1] = 3;
  texture.has_view = 1, texture.view_width = 64, texture.view_height = 32;
  linear.resource = static_cast<uint32_t>(TextureResource::kLinear);
  linear.address = f.base, linear.bytes = 4096, linear.format = 0x03, linear.channels = 2;
  pitched = linear;
  pitched.resource = static_cast<uint32_t>(TextureResource::kPitch2D);
  pitched.width = 100, pitched.height = 5, pitched.pitch = 1024;
  std::vector<TextureRef> made;
  for (const TextureArgs& args : {texture, surface, linear, pitched}) {
    auto one = f.space->create_texture(args, args.resource == 0 ? *array : nullptr);
    EXPECT_OK(one.status());
    if (one.ok()) made.push_back(*one);
  }
  EXPECT(made.size() == 4);
  for (size_t i = 0; i < made.size(); i++) EXPECT(made[i]->value == i + 1);
  made.erase(made.begin() + 1);
  auto again = f.space->create_texture(surface, *array);
  EXPECT(again.ok() && (*again)->value == 2);  // the lowest that is free: the second one's
  array = Status(kNotFound, "");               // the objects keep it
}

void test_refused_arrays() {
  Fixture f;
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  fake.fail("cuArray3DCreate_v2", 1, 2);
  auto none = f.space->create_array(shape_of(64, 0, 0, 0x20, 1));
  EXPECT(none.status().code() == 2 && none.status().text().find("cuArray3DCreate_v2") != std::string::npos);
  auto array = f.space->create_array(shape_of(64, 8, 0, 0x20, 1));
  fake.fail("cuTexObjectCreate", 1, 1);
  EXPECT(f.space->create_texture({}, *array).status().code() == 1);
  // A copy that the driver does not take is an error of that call; the space goes on, and the copy completes.
  const ArrayCopy up{in_array(*array), at(f.window_base, 256, 8, false), 256, 8, 1};
  for (int n : {1, 2}) {
    fake.fail("cuMemcpy3DAsync_v2", 1, 1);
    f.space->copy_array(f.legacy, {f.last[0] = ++f.position * 64, 0, 9}, up);
    EXPECT(f.sync() && f.owner.faults == 0 && f.owner.refused.size() == static_cast<size_t>(n));
  }
  EXPECT(!f.owner.refused.empty() && f.owner.refused[0].caller == 9 && f.owner.refused[0].result == 1);
  // After a fault it is dropped, and completes.
  f.load_module();
  f.space->launch(f.legacy, f.ticket(0), f.fault_f, {});
  EXPECT(f.sync());
  f.space->copy_array(f.legacy, f.ticket(0), up);
  EXPECT(f.sync() && f.owner.faults == 1);
}

void test_register_fails() {
  auto config = g_config;
  config.register_host_window = true;
  fake.fail("cuMemHostRegister_v2", 1, 801);
  Fixture f(0, config);
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  std::memset(f.window, 0x42, 4096);
  f.space->copy(f.legacy, f.ticket(0), f.up(f.base, f.window, 4096));  // staged instead
  EXPECT(f.sync() && f.words(f.base + 4092, 1)[0] == 0x42424242 && f.owner.faults == 0);
}

void test_memset() {
  Fixture f;
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  const auto set = [&](uint64_t at, uint64_t pitch, uint64_t count, uint64_t rows, uint32_t value, uint32_t width) {
    f.space->memset(f.legacy, f.ticket(0), {at, pitch, count, rows, value, width});
  };
  set(f.base, 0, 65536, 1, 0, 1);
  set(f.base + 4, 0, 8, 1, 0x1AB, 1);  // the low byte counts
  set(f.base + 16, 0, 4, 1, 0x12345, 2);
  set(f.base + 32, 0, 2, 1, 0xdeadbeef, 4);
  set(f.base + 1024, 64, 3, 4, 0x01020304, 4);
  set(f.base + 2048, 64, 3, 4, 0x0505, 2);
  set(f.base + 4096, 100, 3, 4, 9, 1);
  set(f.window_base + 64, 32, 3, 2, 0x0a0b, 2);  // pinned memory, by the device's order
  EXPECT(f.sync());
  const auto w = f.words(f.base, 2048);
  EXPECT(w[0] == 0 && w[1] == 0xabababab && w[2] == 0xabababab && w[3] == 0 && w[4] == 0x23452345 && w[6] == 0);
  EXPECT(w[8] == 0xdeadbeef && w[9] == 0xdeadbeef && w[10] == 0);
  EXPECT(w[256] == 0x01020304 && w[258] == 0x01020304 && w[259] == 0 && w[256 + 48] == 0x01020304 && w[256 + 64] == 0);
  EXPECT(w[512] == 0x05050505 && w[513] == 0x0505 && w[1024] == 0x090909 && w[1024 + 25] == 0x090909);
  EXPECT(f.window[64] == 0x0b && f.window[69] == 0x0a && f.window[70] == 0 && f.window[96] == 0x0b &&
         f.window[128] == 0);
}

void test_launch_and_modules() {
  Fixture f;
  f.load_module();
  FunctionInfo info;
  auto function = f.space->get_function(f.module, "offset", &info);
  EXPECT_OK(function.status());
  EXPECT(info.params.size() == 2 && info.params[0].offset_bytes == 4 && info.params[1].size_bytes == 40);
  EXPECT(info.max_threads == 1024 && info.regs == 40 && info.shared_bytes == 16);
  EXPECT(f.space->get_function(f.module, "absent", &info).status().code() == kNotFound);

  alignas(16) uint8_t block[4096], seen[4096] = {};
  for (size_t i = 0; i < sizeof block; i++) block[i] = static_cast<uint8_t>(i * 13 + 1);  // padding too
  LaunchArgs args;
  args.grid[0] = 3, args.block[1] = 7;
  args.params = block;
  args.params_bytes = 3522;
  f.space->launch(f.legacy, f.ticket(0), *function, args);
  EXPECT(f.sync());
  EXPECT(fake.last_params(seen, sizeof seen) == 3522 && std::memcmp(seen, block, 3522) == 0);

  auto global = f.space->get_global(f.module, "table");
  EXPECT_OK(global.status());
  EXPECT(global.ok() && global->bytes == 4096 && f.space->globals(f.module).empty());
  EXPECT(f.space->get_global(f.module, "absent").status().code() == kNotFound);
  EXPECT_OK(f.space->set_attribute(*function, 8, 65536));
  EXPECT(f.space->set_attribute(*function, 99, 0).code() == kInvalidValue);

  auto image = [&](std::vector<uint8_t> bytes) {
    return f.space->load_module(bytes.data(), bytes.size(), nullptr).status();
  };
  const std::string nonsense = "nonsense of sixteen letters and more";
  const Status compiler = image({nonsense.begin(), nonsense.end()});
  EXPECT(compiler.code() == kInvalidImage &&
         compiler.text().find("compiler says: line not understood") != std::string::npos);
  std::vector<uint8_t> fatbin = {0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0, 200, 0, 0, 0, 0, 0, 0, 0};
  EXPECT(image(fatbin).text().find("shorter than it says") != std::string::npos);
  std::vector<uint8_t> elf(64, 0);
  std::memcpy(elf.data(), "\177ELF\2\1\1", 7);
  elf[0x28] = 64, elf[0x3a] = 64, elf[0x3c] = 1;  // a section table just behind the end
  EXPECT(image(elf).code() == kInvalidImage);
  EXPECT(image({0xb1, 0x43, 0x62, 0x46, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}).text().find("wrapper") !=
         std::string::npos);
  EXPECT(image({1, 2, 3}).code() == kInvalidImage);

  // The last reference goes while a kernel of the module is queued: unloading waits for it.
  const QueueRef queue = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  f.spin(queue, 1);
  f.spin_f.reset(), f.fill_f.reset(), f.fault_f.reset(), f.offset_f.reset(), f.module.reset();
  function = Status(1, "");
  usleep(10'000);
  fake.hold_spin(0);
  EXPECT(f.sync(1));
}

// Variables lie where the driver put them: they are memory, and their contents can be read and written.
void test_variables() {
  Fixture f;
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  const char image[] =
      ".version 7.0\n.target sm_70\n.address_size 64\n"
      "// .global .u32 no_variable;\n"
      ".visible .global .align 4 .u32 counter = 5;\n"
      ".extern .global .u32 elsewhere;\n"
      ".const .align 16 .b8 table[4096];\n"
      ".visible .entry bump() { .reg .b32 %r<2>; ld.global.u32 %r1, [counter]; ret; }\n"
      ".visible .entry peek(.param .u64 p) { ret; }\n";
  auto module = f.space->load_module(reinterpret_cast<const uint8_t*>(image), sizeof image - 1, nullptr);
  EXPECT_OK(module.status());
  auto variables = f.space->variables(*module);
  EXPECT_OK(variables.status());
  EXPECT(!f.space->prints(*module));
  EXPECT(variables->size() == 2 && variables->at(0).name == "counter" && variables->at(1).name == "table");
  EXPECT(variables->at(0).bytes == 4 && variables->at(1).bytes == 4096);
  const uint64_t counter = variables->at(0).addr, table = variables->at(1).addr;
  auto global = f.space->get_global(*module, "table");
  EXPECT(global.ok() && global->addr == table && global->bytes == 4096);
  EXPECT(table < f.base || table >= f.base + kRange);

  FunctionInfo info;
  auto bump = f.space->get_function(*module, "bump", &info);
  EXPECT_OK(bump.status());
  f.space->launch(f.legacy, f.ticket(0), *bump, {});
  f.space->launch(f.legacy, f.ticket(0), *bump, {});
  EXPECT(f.sync());
  EXPECT(f.words(counter, 1)[0] == 7);
  f.space->memset(f.legacy, f.ticket(0), {table, 0, 1024, 1, 9, 4});
  f.space->copy(f.legacy, f.ticket(0), {f.base, table, 0, 0, 4096, 1, true, true});
  f.space->copy(f.legacy, f.ticket(0), f.down(f.window, table + 100, 100));
  EXPECT(f.sync());
  EXPECT(f.words(f.base, 1024)[1023] == 9 && f.window[0] == 9);
  const uint32_t word = 77;
  EXPECT_OK(f.space->write(counter, &word, 4));
  EXPECT(f.words(counter, 1)[0] == 77);
  EXPECT(f.space->write(table + 4095, &word, 2).code() == kInvalidValue);
  const uint64_t gone = table;
  bump = FunctionRef();
  module = ModuleRef();
  EXPECT(f.space->read(gone, f.window, 1).code() == kInvalidValue);

  // What devproxy does not read is loaded all the same, and says that it was not read.
  f.load_module();
  EXPECT(!f.space->variables(f.module).status().ok() && f.space->prints(f.module));
}

void test_submission_never_blocks() {
  Fixture f;
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  const QueueRef queue = f.space->create_queue(QueueKind::kBlocking, 0, 1);
  const QueueRef free = f.space->create_queue(QueueKind::kNonBlocking, 0, 2);
  const EventRef event = f.space->create_event(true), other = f.space->create_event(true);
  std::atomic<bool> answered{false};
  f.owner.run = [&](uint64_t) {
    while (!answered) usleep(100);  // the answer comes from this very thread, after everything was submitted
  };
  f.space->host_function(queue, f.ticket(1), 1);
  const uint64_t host_position = f.last[1];
  f.space->record(free, f.ticket(2), other);
  for (uint32_t i = 0; i < 3000; i++) {
    f.fill(queue, 1, f.base, 4, i);
    f.fill(f.legacy, 0, f.base + 4096, 4, i);
  }
  f.space->record(queue, f.ticket(1), event);
  f.space->wait(free, f.ticket(2), event);
  f.fill(free, 2, f.base, 4, 7);
  EXPECT(f.space->oldest_pending() <= host_position + 64);
  EXPECT(f.space->elapsed_ms(other, event).status().code() == kNotReady);  // held, not even recorded
  answered = true;
  EXPECT(f.sync(1) && f.sync(0) && f.sync(2));
  EXPECT(f.words(f.base, 1)[0] == 7 && f.words(f.base + 4096, 1)[0] == 2999);
  EXPECT(fake.blocked() == 0);
  EXPECT(f.owner.total == 6000 + 5);
}

void test_queue_index_is_used_again() {
  Fixture f;
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  QueueRef queue = f.space->create_queue(QueueKind::kNonBlocking, 0, 5);
  f.spin(queue, 5);
  const uint64_t old = f.last[5];
  f.space->destroy_queue(queue);
  queue = f.space->create_queue(QueueKind::kNonBlocking, 0, 5);
  f.fill(queue, 5, f.base, 4, 3);
  usleep(20'000);
  EXPECT(!f.owner.done(5, old));
  fake.hold_spin(0);
  EXPECT(f.sync(5) && f.words(f.base, 1)[0] == 3);
  for (uint32_t i = 0; i < 200; i++) {
    f.space->destroy_queue(queue);
    queue = f.space->create_queue(i % 2 ? QueueKind::kBlocking : QueueKind::kNonBlocking, 0, 5);
    f.fill(queue, 5, f.base, 4, i);
  }
  EXPECT(f.sync(5) && f.words(f.base, 1)[0] == 199);
}

void test_execution_fault() {
  Fixture f;
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  const QueueRef a = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  const QueueRef b = f.space->create_queue(QueueKind::kBlocking, 0, 2);
  const EventRef event = f.space->create_event(true);
  f.fill(a, 1, f.base, 4, 1);
  EXPECT(f.sync(1));
  f.space->launch(a, f.ticket(1), f.fault_f, {});
  for (uint32_t i = 0; i < 500; i++) f.fill(i % 2 ? a : b, i % 2 ? 1 : 2, f.base, 4, 50);
  f.space->host_function(b, f.ticket(2), 9);
  EXPECT(f.sync(1) && f.sync(2));  // everything completes
  f.space->copy(f.legacy, f.ticket(0, 5), f.up(f.base, f.window, 64));
  f.space->record(a, f.ticket(1), event);
  EXPECT(f.sync(0) && f.sync(1));
  EXPECT(f.owner.faults == 1 && f.owner.fault == kIllegalAddress);
  EXPECT(f.owner.fault_text.find("CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access") != std::string::npos);
  EXPECT(f.owner.tags == std::vector<uint32_t>{5});
  EXPECT(f.space->elapsed_ms(event, event).status().code() == kIllegalAddress);
  EXPECT(f.space->read(f.base, f.window, 4).code() == kIllegalAddress);
}

// The owner is told of a fault before the launch counts as done, and may ask at once for what it said.
void test_output_after_a_fault() {
  Fixture f;
  f.load_module();
  const QueueRef queue = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  const int log = memfd_create("stderr", MFD_CLOEXEC), before = dup(STDERR_FILENO);
  f.owner.at_fault = [&] {
    EXPECT(!f.space->idle());
    dup2(log, STDERR_FILENO);
    std::string out, err;
    f.space->take_output(&out, &err);
    dup2(before, STDERR_FILENO);
  };
  FunctionInfo info;
  f.space->launch(queue, f.ticket(1), *f.space->get_function(f.module, "claim", &info), {});
  EXPECT(f.sync(1));
  EXPECT(f.owner.faults == 1);
  EXPECT(f.owner.refused.empty());
  char text[256] = {};
  EXPECT(pread(log, text, sizeof text - 1, 0) > 0 && strstr(text, "Assertion `1 == 2` failed."));
  close(before);
  close(log);
}

void test_refused_command() {
  Fixture f;
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  const QueueRef a = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  f.spin(a, 1);
  // A launch that the driver does not take is that call's error; what follows runs.
  fake.fail("cuLaunchKernel", 1, 701);
  f.fill(a, 1, f.base, 4, 1);
  f.fill(f.legacy, 0, f.base, 4, 7);
  EXPECT(f.sync(0));
  EXPECT(f.words(f.base, 4)[3] == 10);
  EXPECT(f.owner.faults == 0 && f.owner.refused.size() == 1 && f.owner.refused[0].result == kLaunchOutOfResources);
  EXPECT(f.owner.refused[0].text.find("launching 'fill': cuLaunchKernel failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES") !=
         std::string::npos);
  EXPECT(!f.owner.done(1, f.last[1]));  // it completes in its stream's order: the spin before it still runs
  fake.hold_spin(0);
  EXPECT(f.sync(1));

  // Another command that the driver refuses ends the process's work: the ones behind it count on its effect.
  f.spin(a, 1);
  fake.fail("cuMemsetD8Async", 1, 1);
  f.space->memset(a, f.ticket(1), {f.base, 0, 16, 1, 0, 1});
  f.fill(f.legacy, 0, f.base, 4, 1);  // dropped
  EXPECT(f.sync(0));
  EXPECT(f.owner.faults == 1 && f.owner.fault == kInvalidValue);
  EXPECT(f.owner.fault_text.find("cuMemsetD8Async failed: CUDA_ERROR_INVALID_VALUE") != std::string::npos);
  EXPECT(!f.owner.done(1, f.last[1]));
  fake.hold_spin(0);
  EXPECT(f.sync(1));
}

LaunchAttribute attribute(uint32_t id, uint32_t first_word) {
  LaunchAttribute a;
  a.id = id;
  std::memcpy(a.value, &first_word, sizeof first_word);
  return a;
}

void test_launch_attributes() {
  Fixture f;
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  const LaunchAttribute list[] = {attribute(kLaunchCooperative, 1), attribute(kLaunchClusterDimension, 2),
                                  attribute(kLaunchPriority, 0xfffffffd)};
  struct alignas(16) {
    uint64_t to;
    uint32_t n, value;
  } p{f.base, 8, 5};
  LaunchArgs args;
  args.grid[0] = 8;
  args.params = reinterpret_cast<const uint8_t*>(&p);
  args.params_bytes = 16;
  args.attributes = list;
  args.n_attributes = 3;
  const uint64_t plain = fake.calls("cuLaunchKernel");
  f.space->launch(f.legacy, f.ticket(0), f.fill_f, args);
  EXPECT(f.sync());
  EXPECT(f.words(f.base, 8)[7] == 12);
  EXPECT(fake.calls("cuLaunchKernel") == plain);
  uint32_t ids[4], words[4];
  EXPECT(fake.last_attributes(ids, words, 4) == 3);
  EXPECT(ids[0] == 2 && words[0] == 1 && ids[1] == 4 && words[1] == 2 && ids[2] == 8 && words[2] == 0xfffffffd);

  // Held behind others, the attributes and parameters of a command are its own copies.
  auto config = g_config;
  config.max_in_flight = 2;
  {
    Fixture held(1, config);
    held.load_module();
    EXPECT_OK(held.space->commit(held.base, kMiB, false));
    const QueueRef a = held.space->create_queue(QueueKind::kNonBlocking, 0, 1);
    for (int i = 0; i < 3; i++) held.spin(a, 1);
    LaunchAttribute mine = attribute(kLaunchClusterDimension, 4);
    p = {held.base, 8, 9};
    args.attributes = &mine;
    args.n_attributes = 1;
    held.space->launch(a, held.ticket(1), held.fill_f, args);
    mine = attribute(99, 99);
    p = {};
    fake.hold_spin(0);
    EXPECT(held.sync(1));
    EXPECT(held.words(held.base, 1)[0] == 9);
    EXPECT(fake.last_attributes(ids, words, 4) == 1 && ids[0] == 4 && words[0] == 4);
  }

  // What only the driver can find is an error of that launch, told to its caller.
  const LaunchAttribute large = attribute(kLaunchClusterDimension, 8);
  p = {f.base, 8, 1};
  args.attributes = &large;
  args.n_attributes = 1;
  Ticket ticket = f.ticket(0);
  ticket.caller = 3;
  f.space->launch(f.legacy, ticket, f.fill_f, args);
  EXPECT(f.sync());
  EXPECT(f.owner.faults == 0 && f.owner.refused.size() == 1);
  EXPECT(f.owner.refused.at(0).caller == 3 && f.owner.refused.at(0).result == kInvalidClusterSize);
  EXPECT(f.words(f.base, 1)[0] == 5);

  // Occupancy is the driver's answer.
  OccupancyQuery q;
  q.block[0] = 256, q.shared_bytes = 2048, q.flags = 1;
  EXPECT(*f.space->occupancy(f.fill_f, q) == 5);
  q.kind = OccupancyKind::kAvailableShared, q.grid[0] = 4;
  EXPECT(*f.space->occupancy(f.fill_f, q) == (50 << 10) + 256);
  q.kind = OccupancyKind::kActiveClusters, q.attributes = list + 1, q.n_attributes = 1;
  EXPECT(*f.space->occupancy(f.fill_f, q) == 66);
  q.kind = OccupancyKind::kMaxClusterSize;
  EXPECT(*f.space->occupancy(f.fill_f, q) == 8);

  // All attributes of a function, and what this driver does not know.
  FunctionInfo info;
  EXPECT_OK(f.space->get_function(f.module, "fill", &info).status());
  EXPECT(info.attributes.size() == 16 && info.attributes[0] == 1024 && info.attributes[4] == 40 &&
         info.attributes[6] == 90 && info.attributes[15] == kNoAttribute);
}

void test_stream_attributes() {
  Fixture f;
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  const QueueRef a = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  uint32_t id = 0;
  uint64_t value[2], submitted = 0;
  const uint64_t before = fake.stream_attribute(&id, value, &submitted);
  auto sets = [&] { return fake.stream_attribute(&id, value, &submitted) - before; };

  LaunchAttribute window = attribute(kLaunchAccessPolicyWindow, 0);
  const uint64_t shown[] = {f.base, 4096};
  std::memcpy(window.value, shown, sizeof shown);
  EXPECT_OK(f.space->set_queue_attribute(a, f.ticket(1), window));
  EXPECT(sets() == 1 && id == 1 && value[0] == f.base && value[1] == 4096);
  EXPECT_OK(f.space->set_queue_attribute(f.legacy, f.ticket(0), attribute(kLaunchMemSyncDomain, 1)));
  EXPECT(sets() == 2 && id == 10 && value[0] == 1);
  // It completes nothing: nobody waits for its ticket.
  f.last.clear();
  f.fill(a, 1, f.base, 8, 1);
  EXPECT(f.sync(1) && f.owner.total == 1);
  // The driver's own answer, and it is nobody's fault.
  const Status refused = f.space->set_queue_attribute(a, {}, attribute(kLaunchPriority, 7));
  EXPECT(refused.code() == kInvalidValue && refused.text().find("attribute 8 of stream 1") != std::string::npos);
  EXPECT(f.owner.faults == 0 && f.owner.refused.empty() && sets() == 2);
  EXPECT_OK(f.space->reset_persisting_l2());
  EXPECT(fake.calls("cuCtxResetPersistingL2Cache") > 0);
  fake.fail("cuCtxResetPersistingL2Cache", 1, 801);
  EXPECT(f.space->reset_persisting_l2().code() == kNotSupported);

  // Behind commands that the space keeps back: in their order, for what comes later and nothing that came before. What
  // the driver refuses then is told to the caller.
  auto config = g_config;
  config.max_in_flight = 2;
  Fixture held(1, config);
  held.load_module();
  EXPECT_OK(held.space->commit(held.base, kMiB, false));
  const QueueRef b = held.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  for (int i = 0; i < 5; i++) held.spin(b, 1);
  EXPECT_OK(held.space->set_queue_attribute(b, held.ticket(1), attribute(kLaunchPriority, -3)));
  Ticket wrong = held.ticket(1);
  wrong.caller = 5;
  EXPECT_OK(held.space->set_queue_attribute(b, wrong, attribute(kLaunchPriority, 7)));
  held.fill(b, 1, held.base, 8, 9);
  EXPECT(sets() == 2);  // all of it waits: the device has two launches
  fake.hold_spin(0);
  EXPECT(held.sync(1));
  EXPECT(sets() == 3 && id == 8 && static_cast<uint32_t>(value[0]) == 0xfffffffd);
  EXPECT(submitted >= 5);  // behind the five launches, and the marks between them
  EXPECT(held.words(held.base, 1)[0] == 9);
  EXPECT(held.owner.total == 6 && held.owner.faults == 0);
  EXPECT(held.owner.refused.size() == 1 && held.owner.refused.at(0).caller == 5 &&
         held.owner.refused.at(0).result == kInvalidValue);
}

void test_function_names() {
  Fixture f;
  f.load_module();
  auto names = f.space->function_names(f.module);
  EXPECT_OK(names.status());
  EXPECT((*names == std::vector<std::string>{"fill", "offset", "spin", "fault", "claim"}));  // the image's order
  fake.fail("cuFuncGetName", 2, 801);
  EXPECT(f.space->function_names(f.module).status().code() == kNotSupported);
}

void test_alias() {
  auto made = cuda::make_device(g_config);
  EXPECT_OK(made.status());
  Fixture a(0, g_config, made->get());
  Fixture b(1, g_config, made->get());
  EXPECT_OK(a.space->commit(a.base, 32 * kMiB, false));
  EXPECT_OK(b.space->commit(b.base, 32 * kMiB, false));
  std::vector<uint32_t> pattern(32 * kMiB / 4);
  for (size_t i = 0; i < pattern.size(); i++) pattern[i] = static_cast<uint32_t>(i);
  EXPECT_OK(a.space->write(a.base, pattern.data(), 32 * kMiB));
  for (auto& word : pattern) word = ~word;
  EXPECT_OK(b.space->write(b.base, pattern.data(), 32 * kMiB));

  EXPECT(b.space->alias(b.base + 4096, 4096, *a.space, a.base).code() == kInvalidValue);  // pages of 2 MiB here
  EXPECT_OK(b.space->alias(b.base + 6 * kMiB, 4 * kMiB, *a.space, a.base + 2 * kMiB));
  const auto at = [](Fixture& f, uint64_t offset) { return f.words(f.base + offset, 1)[0]; };
  EXPECT(at(b, 6 * kMiB) == 2 * kMiB / 4 && at(b, 10 * kMiB - 4) == 6 * kMiB / 4 - 1);
  EXPECT(at(b, 6 * kMiB - 4) == ~(6u * 1048576 / 4 - 1) && at(b, 10 * kMiB) == ~(10u * 1048576 / 4));  // the neighbours
  EXPECT(at(a, 0) == 0 && at(a, 32 * kMiB - 4) == 32 * kMiB / 4 - 1);
  const uint32_t mark = 0x12345678;
  EXPECT_OK(a.space->write(a.base + 3 * kMiB, &mark, 4));
  EXPECT(at(b, 7 * kMiB) == mark);  // one page, two addresses
  EXPECT(a.space->alias(a.base + 16 * kMiB, 2 * kMiB, *b.space, b.base + 8 * kMiB).code() ==
         kNotSupported);  // would cut it
  EXPECT_OK(b.space->unalias(b.base + 6 * kMiB, 4 * kMiB));
  EXPECT(at(b, 7 * kMiB) == mark);
  const uint32_t second = 0x9abcdef0;
  EXPECT_OK(a.space->write(a.base + 3 * kMiB, &second, 4));
  EXPECT(at(b, 7 * kMiB) == mark && at(a, 3 * kMiB) == second);  // pages of its own again
}

void test_stop_with_work() {
  std::atomic<bool> in_host{false}, leave{false};
  Fixture f;
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  const QueueRef a = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  f.owner.run = [&](uint64_t) {
    in_host = true;
    while (!leave) usleep(100);  // as the owner's: returns when the space is being stopped
  };
  f.space->host_function(a, f.ticket(1), 1);
  for (uint32_t i = 0; i < 1000; i++) f.space->host_function(a, f.ticket(1), 2 + i), f.fill(a, 1, f.base, 4, i);
  while (!in_host) usleep(100);
  std::thread later([&] {
    usleep(30'000);
    leave = true;
  });
  f.space->stop();
  later.join();
  EXPECT(f.owner.host_functions == 1);  // the others were dropped
  f.last.clear();
}

// Many commands of all kinds on several queues against a model in plain memory; each queue has a region of its own.
void test_random_work() {
  auto config = g_config;
  config.staging_bytes = 16u << 10;
  config.max_in_flight = 40;
  config.mark_every = 5;
  Fixture f(0, config);
  f.load_module();
  constexpr size_t kQueues = 4, kRegion = 256u << 10;
  EXPECT_OK(f.space->commit(f.base, kQueues * kRegion, false));
  std::vector<QueueRef> queues = {f.legacy};
  for (uint32_t i = 1; i < kQueues; i++)
    queues.push_back(f.space->create_queue(i % 2 ? QueueKind::kBlocking : QueueKind::kNonBlocking, 0, i));
  // The model runs at submission: right as long as every queue keeps its order.
  std::vector<uint8_t> device(kQueues * kRegion, 0), window(kQueues * kRegion, 0);
  for (uint32_t q = 0; q < kQueues; q++)
    f.space->memset(queues[q], f.ticket(q), {f.base + q * kRegion, 0, kRegion, 1, 0, 1});
  std::mt19937 random(7);
  std::vector<EventRef> events;
  for (int i = 0; i < 8; i++) events.push_back(f.space->create_event(true));
  for (int step = 0; step < 3000; step++) {
    const uint32_t q = random() % kQueues;
    const size_t n = 4 + random() % (step % 50 ? 5000 : 60'000) / 4 * 4;
    const size_t x = q * kRegion + random() % ((kRegion - n) / 4) * 4,
                 y = q * kRegion + random() % ((kRegion - n) / 4) * 4;
    const uint32_t value = random();
    switch (random() % 7) {
      case 0:
        f.space->copy(queues[q], f.ticket(q), f.up(f.base + x, f.window + y, n));
        std::memcpy(&device[x], &window[y], n);
        break;
      case 1:
        f.space->copy(queues[q], f.ticket(q), f.down(f.window + y, f.base + x, n));
        std::memcpy(&window[y], &device[x], n);
        break;
      case 2:
        f.space->memset(queues[q], f.ticket(q), {f.window_base + y, 0, n / 4, 1, value, 4});
        for (size_t i = 0; i < n; i += 4) std::memcpy(&window[y + i], &value, 4);
        break;
      case 3:
        f.fill(queues[q], q, f.base + x, static_cast<uint32_t>(n / 4), value);
        for (uint32_t i = 0; i < n / 4; i++) {
          const uint32_t word = value + i;
          std::memcpy(&device[x + i * 4], &word, 4);
        }
        break;
      case 4: f.space->record(queues[q], f.ticket(q), events[random() % 8]); break;
      case 5: f.space->wait(queues[q], f.ticket(q), events[random() % 8]); break;
      case 6: f.space->host_function(queues[q], f.ticket(q), step + 1); break;
    }
  }
  for (uint32_t q = 0; q < kQueues; q++) EXPECT(f.sync(q));
  std::vector<uint8_t> seen(device.size());
  EXPECT_OK(f.space->read(f.base, seen.data(), seen.size()));
  EXPECT(seen == device);
  EXPECT(std::memcmp(f.window, window.data(), window.size()) == 0);
  EXPECT(f.owner.faults == 0 && f.owner.total == f.position);
}

// A device that is told early loads by itself. Runs before every other test of executors.
void test_warm() {
  auto made = cuda::make_device(g_config);
  EXPECT_OK(made.status());
  if (!made.ok()) return;
  const std::string file = g_config.folder + "/fake/executor.so", name = executor_name();
  auto loaded = [&] {
    void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library) dlclose(library);
    return library != nullptr;
  };
  EXPECT(!loaded());
  (*made)->warm({1, 2, 3});  // no description: nothing happens, and the next one is not looked at
  auto second = cuda::make_device(g_config);
  EXPECT_OK(second.status());
  (*second)->warm({name.c_str(), name.c_str() + name.size() + 1});
  for (int i = 0; i < 5000 && !loaded(); i++) usleep(1000);
  EXPECT(loaded());
}

// A framework's operators beside plain commands: one order, on the streams that they were launched on.
void test_executor() {
  Fixture f(0, g_config, nullptr, /*framework=*/true);
  f.load_module();
  f.load_executor();
  if (!f.executor) return;
  EXPECT(f.owner.taken == 4096);
  EXPECT_OK(f.space->commit(f.base, 4 * kMiB, false));
  const QueueRef side = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  f.fill(f.legacy, 0, f.base, 16, 7);                // a kernel of the job's own: 7, 8, ...
  f.op("fill", f.legacy, 0, f.base + 16, 32, 0x11);  // an operator: words 4 to 11
  f.fill(f.legacy, 0, f.base + 32, 2, 9);            // a kernel again: words 8 and 9
  f.op("fill", side, 1, f.base + 4096, 64, 0x22);
  f.op("sync", f.legacy, 0);
  EXPECT(f.sync(0) && f.sync(1));
  const auto words = f.words(f.base, 16);
  EXPECT(words[3] == 10 && words[4] == 0x11111111 && words[8] == 9 && words[9] == 10 && words[10] == 0x11111111 &&
         words[12] == 19);  // the kernel adds the index
  EXPECT(f.words(f.base + 4096, 1)[0] == 0x22222222);

  f.space->trim();
  EXPECT(f.owner.taken == 0);
  FunctionInfo info;
  EXPECT(f.space->get_function(f.executor, "no_such_op", &info).status().code() == kNotFound);
  EXPECT(f.space->variables(f.executor).ok() && f.space->globals(f.executor).empty());
  EXPECT(!f.space->function_names(f.executor).ok() && !f.space->set_attribute(f.ops["fill"], 8, 1).ok());
  EXPECT(!f.space->occupancy(f.ops["fill"], {}).ok());

  // Its state.
  for (uint64_t i = 1; i <= 3; i++) f.op("note", f.legacy, 0, 0, 0, i);
  EXPECT(f.sync(0));
  EXPECT((f.notes() == std::vector<uint64_t>{1, 2, 3}));
  const uint64_t other[] = {8, 9};
  EXPECT_OK(f.space->load_module_state(f.executor, reinterpret_cast<const uint8_t*>(other), sizeof other));
  EXPECT((f.notes() == std::vector<uint64_t>{8, 9}));
  EXPECT(
      f.space->load_module_state(f.executor, reinterpret_cast<const uint8_t*>(other), 3).text().find("half a note") !=
      std::string::npos);
  EXPECT(f.space->save_module(f.module).ok() && f.space->save_module(f.module)->empty());
  f.op("note", f.legacy, 0, 0, 0, 666);
  EXPECT(f.sync(0) && f.space->save_module(f.executor).status().text().find("no good note") != std::string::npos);
}

// An operator may wait for its stream, and what precedes it there must then end without the client. A host function
// does not: what is launched behind one is kept back until it is over, in its order, and the dispatch thread goes on.
void test_executor_behind_a_host_function() {
  Fixture f(0, g_config, nullptr, true);
  f.load_module();
  f.load_executor();
  if (!f.executor) return;
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  const QueueRef side = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  std::mutex mu;
  std::condition_variable changed;
  bool go = false;
  f.owner.run = [&](uint64_t) {
    std::unique_lock lock(mu);
    changed.wait_for(lock, std::chrono::seconds(10), [&] { return go; });
  };
  f.op("note", f.legacy, 0, 0, 0, 1);
  f.space->host_function(f.legacy, f.ticket(0), 5);
  for (int i = 0; i < 2000 && f.owner.host_functions == 0; i++) usleep(1000);
  f.op("sync", f.legacy, 0);  // were it begun now, this thread would wait for the client for ever
  f.op("note", side, 1, 0, 0, 2);
  f.fill(side, 1, f.base, 4, 3);
  f.op("note", f.legacy, 0, 0, 0, 4);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT(!f.owner.done(1, f.last[1]) && !f.space->idle());
  {
    std::lock_guard lock(mu);
    go = true;
    changed.notify_all();
  }
  EXPECT(f.sync(0) && f.sync(1));
  EXPECT((f.notes() == std::vector<uint64_t>{1, 2, 4}));
  EXPECT(f.words(f.base, 4)[0] == 3);
  f.op("note", f.legacy, 0, 0, 0, 5);  // nothing is held any more
  EXPECT(f.sync(0) && f.notes().back() == 5);
}

// While the watcher is inside a call, nothing is held any more, and this thread must not overtake it all the same.
void test_executor_in_the_watcher() {
  Fixture f(0, g_config, nullptr, true);
  f.load_module();
  f.load_executor();
  if (!f.executor) return;
  const QueueRef side = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  std::atomic<bool> go{false};
  f.owner.run = [&](uint64_t) {
    for (int i = 0; i < 10'000 && !go; i++) usleep(1000);
  };
  f.space->host_function(f.legacy, f.ticket(0), 5);
  f.op("slow", side, 1, 1, 0, 150'000);  // held, so the watcher's
  go = true;
  EXPECT(f.sync(0));
  usleep(30'000);  // it is in there now, or will be
  f.op("note", f.legacy, 0, 0, 0, 2);
  EXPECT(f.sync(0) && f.sync(1));
  EXPECT((f.notes() == std::vector<uint64_t>{1, 2}));
}

// A fault elsewhere, during a call: the launch completes when the call is over and not before.
void test_fault_during_a_call() {
  Fixture f(0, g_config, nullptr, true);
  f.load_module();
  f.load_executor();
  if (!f.executor) return;
  const QueueRef side = f.space->create_queue(QueueKind::kNonBlocking, 0, 1);
  f.spin(side, 1);
  f.space->launch(side, f.ticket(1), f.fault_f, {});
  const uint64_t position = (f.position + 1) * 64;
  bool told = false, early = false;
  std::thread other([&] {
    usleep(30'000);
    fake.hold_spin(0);
    for (int i = 0; i < 150 && !told; i++) {
      usleep(1000);
      std::lock_guard lock(f.owner.mu);
      told = f.owner.faults != 0;
    }
    usleep(20'000);
    early = f.owner.done(0, position);
  });
  f.op("slow", f.legacy, 0, 1, 0, 400'000);
  other.join();
  EXPECT(told && !early && f.last[0] == position);
  EXPECT(f.sync(0) && f.sync(1));
}

// Many launches, more than the driver is given at once, on several streams: their order is that of submission.
void test_executor_order() {
  Fixture f(0, g_config, nullptr, true);
  f.load_module();
  f.load_executor();
  if (!f.executor) return;
  EXPECT_OK(f.space->commit(f.base, kMiB, false));
  std::vector<QueueRef> queues = {f.legacy};
  for (uint32_t i = 1; i < 4; i++)
    queues.push_back(f.space->create_queue(i == 1 ? QueueKind::kBlocking : QueueKind::kNonBlocking, 0, i));
  std::mt19937 random(3);
  std::vector<uint64_t> wanted;
  f.spin(queues[2], 2);  // until the driver has had enough
  for (uint64_t i = 0; i < 2000; i++) {
    const uint32_t q = random() % 4;
    if (random() % 8 == 0) {
      f.fill(queues[q], q, f.base, 4, 1);
    } else {
      f.op("note", queues[q], q, 0, 0, i);
      wanted.push_back(i);
    }
    if (i == 1000) fake.hold_spin(0);
    if (random() % 400 == 0) f.op("slow", queues[q], q, i, 0, 2000), wanted.push_back(i);
  }
  for (uint32_t q = 0; q < 4; q++) EXPECT(f.sync(q));
  EXPECT(f.notes() == wanted);
}

void test_executor_failures() {
  {
    Fixture f(0, g_config, nullptr, true);
    f.load_module();
    f.load_executor();
    if (!f.executor) return;
    EXPECT_OK(f.space->commit(f.base, kMiB, false));
    // Out of memory is that launch's, and late: the process goes on.
    f.op("fails", f.legacy, 0, 0, 0, kOutOfMemory);
    f.fill(f.legacy, 0, f.base, 4, 6);
    EXPECT(f.sync(0));
    EXPECT(f.owner.refused.size() == 1 && f.owner.refused[0].result == kOutOfMemory && f.owner.faults == 0);
    EXPECT(f.words(f.base, 1)[0] == 6);
    // Memory that is not the process's is a fault, and sticks.
    f.owner.not_live = f.base + 512;
    f.op("fill", f.legacy, 0, f.base + 512, 16, 1);
    f.op("note", f.legacy, 0, 0, 0, 1);
    EXPECT(f.sync(0));
    EXPECT(f.owner.faults == 1 && f.owner.fault == kIllegalAddress &&
           f.owner.fault_text.find("not its memory") != std::string::npos);
    EXPECT(f.notes().empty());
  }
  // Without the framework's context there is no executor, and what does not fit says why.
  Fixture plain;
  auto refused = [&](Fixture& f, const std::string& name, const char* why) {
    const auto got = f.space->load_module(reinterpret_cast<const uint8_t*>(name.c_str()), name.size() + 1, nullptr);
    EXPECT(!got.ok());
    if (got.ok() || got.status().text().find(why) == std::string::npos)
      g_failures += " '" + name + "': " + got.status().text();
  };
  refused(plain, executor_name(), "import the framework before");
  Fixture f(1, g_config, nullptr, true);
  refused(f, executor_name("other-build"), "of build test-build");
  refused(f, executor_name("test-build", "../executor.so"), "FOLDER/NAME");
  refused(f, executor_name("test-build", "fake/missing.so"), "build it");
  // Two copies of one library cannot both be there: the second would use the first one's symbols.
  auto needs = [](const std::string& path) { return executor_name() + "needs cuda " + path + "\n"; };
  const std::string once = g_config.folder + "/fake/executor.so", again = g_config.folder + "/./fake/executor.so";
  const std::string good = needs(once);
  EXPECT_OK(f.space->load_module(reinterpret_cast<const uint8_t*>(good.c_str()), good.size() + 1, nullptr).status());
  refused(f, needs(again), "let the job's processes use one Python environment");
  refused(f, needs("/no/such/library.so"), "the framework's library cannot be loaded");
  refused(f, "devproxy executor 2\n", "another version");
  refused(f, "devproxy executor 1\nbuild b\nset LD_PRELOAD=x\n", "not for a job to set");
  refused(f, "devproxy executor 1\nbuild b\nhost fake/executor.so\n", "CPU build");
  refused(f, "devproxy executor 1\nbuild b\nwhat is this\n", "does not know");
}

// Processes with a framework share the device's primary context; others have their own.
void test_primary_context() {
  auto made = cuda::make_device(g_config);
  EXPECT_OK(made.status());
  if (!made.ok()) return;
  const uint64_t retained = fake.calls("cuDevicePrimaryCtxRetain"), own = fake.calls("cuCtxCreate_v2");
  {
    Fixture a(0, g_config, made->get(), true), b(1, g_config, made->get(), true), c(2, g_config, made->get());
    EXPECT(fake.calls("cuDevicePrimaryCtxRetain") == retained + 2 && fake.calls("cuCtxCreate_v2") == own + 1);
    a.load_module(), c.load_module();
    EXPECT_OK(a.space->commit(a.base, kMiB, false));
    EXPECT_OK(c.space->commit(c.base, kMiB, false));
    a.fill(a.legacy, 0, a.base, 4, 1), c.fill(c.legacy, 0, c.base, 4, 2);
    EXPECT(a.sync() && c.sync() && a.words(a.base, 1)[0] == 1 && c.words(c.base, 1)[0] == 2);
  }
  EXPECT(fake.calls("cuDevicePrimaryCtxRelease_v2") >= 2);
}

const Test kTests[] = {
    {"properties", test_properties},
    {"memory", test_memory},
    {"memory in use stays", test_memory_in_use_stays},
    {"memory of a step", test_memory_of_a_step},
    {"room", test_room},
    {"small copies", test_small_copies},
    {"contents by threads", test_contents_by_threads},
    {"tuning", test_tuning},
    {"address taken", test_address_taken},
    {"stream order", test_stream_order},
    {"marks are not late", test_marks_are_not_late},
    {"awaited", test_awaited},
    {"events", test_events},
    {"copies", test_copies},
    {"registration fails", test_register_fails},
    {"memset", test_memset},
    {"launch and modules", test_launch_and_modules},
    {"variables", test_variables},
    {"submission never blocks", test_submission_never_blocks},
    {"queue index is used again", test_queue_index_is_used_again},
    {"execution fault", test_execution_fault},
    {"output after a fault", test_output_after_a_fault},
    {"refused command", test_refused_command},
    {"launch attributes", test_launch_attributes},
    {"stream attributes", test_stream_attributes},
    {"names of kernels", test_function_names},
    {"alias", test_alias},
    {"arrays", test_arrays},
    {"objects", test_objects},
    {"arrays that are refused", test_refused_arrays},
    {"stop with work", test_stop_with_work},
    {"random work", test_random_work},
    {"warm", test_warm},
    {"executor", test_executor},
    {"marks are few", test_marks_are_few},
    {"executor behind a host function", test_executor_behind_a_host_function},
    {"executor in the watcher", test_executor_in_the_watcher},
    {"fault during an executor's call", test_fault_during_a_call},
    {"order of executors' launches", test_executor_order},
    {"executor's failures", test_executor_failures},
    {"primary context", test_primary_context},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--open") {
    g_config.driver_path = argv[2];
    const auto made = cuda::make_device(g_config);
    std::printf("%d %s\n", made.status().code(), made.status().text().c_str());
    return 0;
  }
  if (argc < 2 || !load_fake(argv[1])) return 2;
  g_config.staging_bytes = kMiB;
  std::string only;
  for (int i = 2; i < argc; i++) {
    const std::string word = argv[i];
    if (word == "events")
      fake.set_attribute(122, 0);  // no 64-bit memory operations: chosen by the attribute
    else if (word == "register")
      g_config.register_host_window = true;
    else if (word == "chaos")
      fake.set_chaos(11);
    else
      only = word;
  }
  return run_tests(std::begin(kTests), std::end(kTests), only);
}
