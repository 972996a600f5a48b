// SPDX-License-Identifier: Apache-2.0
// hal/cuda's communicators on the fake driver and the fake NCCL: what may go on while NCCL is busy with a group, and what may
// not. A communicator has one rank, so all is one process; NCCL puts each group into its stream `g_late` later.
//
//   comm_test FAKE_DRIVER.so FAKE_NCCL.so [events] [chaos]
#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/hal/cuda/shared_comm.h"
#include "tests/native/hal_cuda/fixture.h"

namespace {

void (*g_set_late)(uint64_t us) = nullptr;  // of the fake NCCL: exactly so late; 0: at once
std::string g_folder;
uint64_t g_key = 0;

constexpr uint64_t kIn = 0, kOut = 4096, kSeen = 8192;  // from Fixture::base
constexpr uint32_t kWords = 16;

struct Ranks : Fixture {
  explicit Ranks(bool framework = false) : Fixture(0, config(), nullptr, framework) {
    owner.folder = g_folder;
    load_module();
    EXPECT_OK(space->commit(base, 4 * kMiB, false));
    comm = make();
    g_set_late(0);
    fill(legacy, 0, base + kIn, kWords, 100);
    space->memset(legacy, ticket(0), {base + kOut, 0, 64 * kWords, 1, 0, 4});
    space->memset(legacy, ticket(0), {base + kSeen, 0, 64 * kWords, 1, 0, 4});
    EXPECT(sync(0));
    g_set_late(20'000);
  }
  ~Ranks() {
    for (const CommRef& one : made) space->destroy_comm(one);
    g_set_late(0);
  }
  static cuda::CudaConfig config() {
    cuda::CudaConfig config = g_config;
    config.collectives = true;
    return config;
  }
  CommRef make() {
    auto got = space->create_comm({{++g_key, 7}, 1, 0});
    EXPECT_OK(got.status());
    made.push_back(*got);
    space->init_comm(legacy, ticket(0), *got);
    EXPECT(sync(0));
    return *got;
  }
  static CommOp op_of(uint64_t send, uint64_t recv, CommKind kind = CommKind::kAllReduce) {
    CommOp op;
    op.kind = static_cast<uint8_t>(kind);
    op.type = static_cast<uint8_t>(CommType::kUint32);
    op.send = send, op.recv = recv, op.count = kWords;
    return op;
  }
  void group(const QueueRef& queue, uint32_t index, const CommRef& with, uint64_t send, uint64_t recv) {
    space->communicate(queue, ticket(index), {{with, op_of(send, recv)}});
  }
  void group(const QueueRef& queue, uint32_t index) { group(queue, index, comm, base + kIn, base + kOut); }
  void copy(const QueueRef& queue, uint32_t index, uint64_t to = kSeen, uint64_t from = kOut) {
    space->copy(queue, ticket(index), {base + to, base + from, 0, 0, 4 * kWords, 1, true, true});
  }
  QueueRef queue(QueueKind kind, uint32_t index) { return space->create_queue(kind, 0, index); }
  bool seen(uint64_t at = kSeen) {
    const auto found = words(base + at, kWords);
    return found.front() == 100 && found.back() == 100 + kWords - 1;
  }

  CommRef comm;
  std::vector<CommRef> made;
};

void test_its_queue_waits() {
  Ranks f;
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1);
  f.group(a, 1);
  f.copy(a, 1);
  EXPECT(f.sync(1) && f.seen());
}

void test_another_queue_goes_on() {
  Ranks f;
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1), b = f.queue(QueueKind::kNonBlocking, 2);
  g_set_late(300'000);
  f.group(a, 1);
  f.copy(b, 2, kSeen, kIn);
  EXPECT(f.owner.wait(2, f.last[2], 200) && !f.owner.done(1, f.last[1]));
  EXPECT(f.seen());
}

void test_who_waits_for_an_event() {
  Ranks f;
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1), b = f.queue(QueueKind::kNonBlocking, 2);
  const EventRef e = f.space->create_event(false), later = f.space->create_event(false);
  f.group(a, 1);
  f.space->record(a, f.ticket(1), e);
  f.space->wait(b, f.ticket(2), e);
  f.copy(b, 2);
  f.space->record(b, f.ticket(2), later);
  EXPECT(f.sync(2) && f.seen());
}

// The wait means the record before it.
void test_an_event_that_is_recorded_again() {
  Ranks f;
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1), b = f.queue(QueueKind::kNonBlocking, 2),
                 c = f.queue(QueueKind::kNonBlocking, 3);
  const EventRef e = f.space->create_event(false);
  f.group(a, 1);
  f.space->record(a, f.ticket(1), e);
  f.space->wait(b, f.ticket(2), e);
  f.copy(b, 2);
  f.space->record(c, f.ticket(3), e);
  EXPECT(f.sync(2) && f.sync(3) && f.seen());
}

// And the record after a wait that is held for another reason is not what the wait means.
void test_a_held_wait_and_a_later_record() {
  Ranks f;
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1), b = f.queue(QueueKind::kNonBlocking, 2);
  const EventRef e = f.space->create_event(false);
  f.space->record(b, f.ticket(2), e);
  f.group(a, 1);
  f.space->wait(a, f.ticket(1), e);  // of what was: nothing
  f.spin(b, 2);
  f.space->record(b, f.ticket(2), e);
  f.copy(a, 1);
  EXPECT(f.owner.wait(1, f.last[1], 2000));  // it does not wait for the kernel that spins
  fake.hold_spin(0);
  EXPECT(f.sync(1) && f.sync(2) && f.seen());
}

void test_the_legacy_stream() {
  {
    Ranks f;
    const QueueRef a = f.queue(QueueKind::kBlocking, 1);
    f.group(a, 1);
    f.copy(f.legacy, 0);
    EXPECT(f.sync(0) && f.seen());
  }
  {
    Ranks f;
    const QueueRef a = f.queue(QueueKind::kBlocking, 1);
    f.group(f.legacy, 0);
    f.copy(a, 1);
    EXPECT(f.sync(1) && f.seen());
  }
}

void test_a_queue_of_the_same_number() {
  Ranks f;
  QueueRef a = f.queue(QueueKind::kNonBlocking, 1);
  f.group(a, 1);
  f.space->destroy_queue(a);
  a = f.queue(QueueKind::kNonBlocking, 1);
  f.copy(a, 1);
  EXPECT(f.sync(1) && f.seen());
}

// The fake ends the process where two groups are on their way into their streams.
void test_groups_keep_their_order() {
  Ranks f;
  const CommRef other = f.make();
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1), b = f.queue(QueueKind::kNonBlocking, 2);
  g_set_late(5000);
  for (int i = 0; i < 4; i++) {
    f.group(a, 1);
    f.group(b, 2, other, f.base + kOut, f.base + kSeen);
    f.group(a, 1);
  }
  EXPECT(f.sync(1) && f.sync(2));
}

// NCCL connects a pair at its first send, which lasts until the other side comes. Here that is a receive behind it.
void test_a_send_does_not_keep_others() {
  Ranks f;
  const CommRef other = f.make();
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1), b = f.queue(QueueKind::kNonBlocking, 2),
                 c = f.queue(QueueKind::kNonBlocking, 3);
  g_set_late(0);
  const EventRef e = f.space->create_event(false);
  const QueueRef d = f.queue(QueueKind::kNonBlocking, 4);
  f.space->communicate(a, f.ticket(1), {{f.comm, Ranks::op_of(f.base + kIn, 0, CommKind::kSend)}});
  f.group(a, 1);  // nor does what waits behind it, in its queue, by its communicator, or by an event
  f.space->record(a, f.ticket(1), e);
  f.group(d, 4);
  f.space->wait(c, f.ticket(3), e);
  f.group(c, 3, other, f.base + kIn, f.base + kSeen);
  const CommRef third = f.make();
  f.group(b, 2, third, f.base + kIn, f.base + kOut);
  EXPECT(f.owner.wait(2, f.last[2], 2000) && !f.owner.done(1, f.last[1]));
  f.copy(b, 2);
  EXPECT(f.sync(2) && f.seen() && !f.owner.done(3, f.last[3]) && !f.owner.done(4, f.last[4]));
  f.space->abort_comm(f.comm);  // the receive would be an operation of the same communicator, so held
  EXPECT(f.sync(1) && f.sync(3) && f.sync(4));
}

void test_executors_keep_their_order() {
  Ranks f(/*framework=*/true);
  f.load_executor();
  if (!f.executor) return;
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1), b = f.queue(QueueKind::kNonBlocking, 2);
  std::vector<uint64_t> wanted;
  for (uint64_t i = 0; i < 20; i++) {
    f.group(a, 1);
    f.op("note", a, 1, 0, 0, i), wanted.push_back(i);
    f.op(i % 3 ? "note" : "slow", b, 2, 100 + i, 0, i % 3 ? 100 + i : 2000), wanted.push_back(100 + i);
    if (i % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(25));
  }
  EXPECT(f.sync(1) && f.sync(2));
  EXPECT(f.notes() == wanted);
  f.executor.reset();
}

void test_an_abort_while_nccl_is_busy() {
  Ranks f;
  const CommRef other = f.make();
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1), b = f.queue(QueueKind::kNonBlocking, 2);
  for (int i = 0; i < 20; i++) f.group(a, 1);
  std::thread aborts([&] { f.space->abort_comm(f.comm); });
  f.group(a, 1);
  f.copy(a, 1, kSeen, kIn);
  aborts.join();
  EXPECT(f.owner.wait(1, f.last[1], 2000) && f.seen());  // what is behind it goes on
  f.group(b, 2, other, f.base + kIn, f.base + kOut);
  EXPECT(f.sync(2) && f.seen(kOut));  // and so do others
  f.group(a, 1);
  EXPECT(f.owner.wait(1, f.last[1], 2000));
}

// The job's streams may be gone when it destroys the communicator, and then nobody waits for them.
void test_destroyed_with_work() {
  Ranks f;
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1);
  f.group(a, 1);
  f.group(a, 1, f.comm, f.base + kOut, f.base + kSeen);
  f.space->destroy_queue(a);
  f.space->destroy_comm(f.comm);
  EXPECT(f.sync(1) && f.seen());
}

void test_the_client_ends() {
  Ranks f;
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1);
  f.space->communicate(a, f.ticket(1), {{f.comm, Ranks::op_of(f.base + kIn, 0, CommKind::kSend)}});
  f.copy(a, 1, kSeen, kIn);
  EXPECT(!f.owner.wait(1, f.last[1], 50));
  f.space->leave_comms();
  EXPECT(f.owner.wait(1, f.last[1], 2000) && f.seen());
}

void test_a_fault_while_nccl_is_busy() {
  Ranks f;
  const QueueRef a = f.queue(QueueKind::kNonBlocking, 1), b = f.queue(QueueKind::kNonBlocking, 2);
  f.group(a, 1);
  f.copy(a, 1);
  f.space->launch(b, f.ticket(2), f.fault_f, {});
  EXPECT(f.sync(1) && f.sync(2) && f.owner.faults == 1);
}

// A server that takes over makes no communicator before it goes on: its predecessor may go on instead.
void test_a_successor_waits() {
  Ranks old;
  const uint64_t key = g_key;
  Fixture fresh(1, Ranks::config());
  fresh.owner.folder = g_folder;
  auto made = fresh.space->create_comm({{key, 7}, 1, 0});
  EXPECT_OK(made.status());
  fresh.space->init_comm(fresh.legacy, fresh.ticket(0), *made);
  EXPECT(!fresh.owner.wait(0, fresh.last[0], 200) && !fresh.space->comm_complete(*made));
  fresh.device->take_over_transport();
  EXPECT(fresh.sync(0) && fresh.space->comm_complete(*made));
  fresh.space->destroy_comm(*made);
}

// Without the primary context NCCL would work in another one.
void test_the_context() {
  Fixture f;
  const auto made = f.space->create_comm({{++g_key, 7}, 1, 0});
  EXPECT(made.status().code() == kNotSupported && made.status().text().find("primary context") != std::string::npos);
}

// As test_random_work of hal_cuda_test.cc: a model that runs at submission, right as long as each queue keeps its order, and
// what is handed from queue to queue goes by events.
void test_random_work() {
  auto config = Ranks::config();
  config.max_in_flight = 40;
  config.mark_every = 5;
  Fixture f(0, config);
  f.owner.folder = g_folder;
  f.load_module();
  constexpr size_t kQueues = 5, kRegion = 64u << 10;
  EXPECT_OK(f.space->commit(f.base, kQueues * kRegion, false));
  std::vector<QueueRef> queues = {f.legacy};
  std::vector<CommRef> comms;
  for (uint32_t i = 1; i < kQueues; i++)
    queues.push_back(f.space->create_queue(i % 2 ? QueueKind::kBlocking : QueueKind::kNonBlocking, 0, i));
  for (int i = 0; i < 3; i++) {
    comms.push_back(*f.space->create_comm({{++g_key, 7}, 1, 0}));
    f.space->init_comm(f.legacy, f.ticket(0), comms.back());
  }
  std::vector<uint8_t> device(kQueues * kRegion, 0);
  for (uint32_t q = 0; q < kQueues; q++)
    f.space->memset(queues[q], f.ticket(q), {f.base + q * kRegion, 0, kRegion, 1, 0, 1});
  std::mt19937 random(11);
  const EventRef hands = f.space->create_event(false);
  for (int step = 0; step < 1500; step++) {
    const uint32_t q = random() % kQueues, from = random() % kQueues;
    const size_t n = 4 + random() % 2000 * 4;
    const size_t x = q * kRegion + random() % ((kRegion - n) / 4) * 4;
    const size_t y = from * kRegion + random() % ((kRegion - n) / 4) * 4;
    if (step % 100 == 0) g_set_late(random() % 3 * 1000);
    switch (random() % 3) {
      case 0: {
        const uint32_t value = random();
        f.fill(queues[q], q, f.base + x, static_cast<uint32_t>(n / 4), value);
        for (uint32_t i = 0; i < n / 4; i++) {
          const uint32_t word = value + i;
          std::memcpy(&device[x + i * 4], &word, 4);
        }
        break;
      }
      case 1: {  // from another queue's memory, and that one waits until it is done
        if (from == q) break;
        f.space->record(queues[from], f.ticket(from), hands);
        f.space->wait(queues[q], f.ticket(q), hands);
        CommOp op = Ranks::op_of(f.base + y, f.base + x);
        op.count = n / 4;
        f.space->communicate(queues[q], f.ticket(q), {{comms[random() % 3], op}});
        f.space->record(queues[q], f.ticket(q), hands);
        f.space->wait(queues[from], f.ticket(from), hands);
        std::memcpy(&device[x], &device[y], n);
        break;
      }
      case 2: {
        if (from == q) break;
        f.space->record(queues[from], f.ticket(from), hands);
        f.space->wait(queues[q], f.ticket(q), hands);
        f.space->copy(queues[q], f.ticket(q), {f.base + x, f.base + y, 0, 0, n, 1, true, true});
        f.space->record(queues[q], f.ticket(q), hands);
        f.space->wait(queues[from], f.ticket(from), hands);
        std::memcpy(&device[x], &device[y], n);
        break;
      }
    }
  }
  for (uint32_t q = 0; q < kQueues; q++) EXPECT(f.owner.wait(q, f.last[q], 60'000));
  std::vector<uint8_t> seen(device.size());
  EXPECT_OK(f.space->read(f.base, seen.data(), seen.size()));
  EXPECT(seen == device);
  EXPECT(f.owner.faults == 0 && f.owner.total == f.position);
  for (const CommRef& comm : comms) f.space->destroy_comm(comm);
  g_set_late(0);
}

// -- ranks that share the GPU, each a space of one device -------------------------------------------------------------------

cuda::CudaConfig shared_config() {
  auto config = Ranks::config();
  config.shared = true;
  return config;
}

struct Sharing {
  static constexpr uint32_t kRanks = 3;
  Sharing() {
    const uint64_t key = ++g_key;
    for (uint32_t rank = 0; rank < kRanks; rank++) {
      ranks.push_back(std::make_unique<Fixture>(rank, g_config, device.get()));
      Fixture& f = *ranks.back();
      f.owner.folder = g_folder;
      f.load_module();
      EXPECT_OK(f.space->commit(f.base, 4 * kMiB, false));
      comms.push_back(*f.space->create_comm({{key, 9}, kRanks, rank}));
      f.space->init_comm(f.legacy, f.ticket(0), comms.back());
      queues.push_back(f.space->create_queue(QueueKind::kNonBlocking, 0, 1));
    }
    for (const auto& f : ranks) {
      EXPECT(f->sync(0));
      f->fill(f->legacy, 0, f->base + kIn, kWords, 100);
      f->space->memset(f->legacy, f->ticket(0), {f->base + kOut, 0, 64 * kWords, 1, 0, 4});
      EXPECT(f->sync(0));
    }
  }
  ~Sharing() {
    for (uint32_t rank = 0; rank < ranks.size(); rank++)
      if (ranks[rank]) ranks[rank]->space->destroy_comm(comms[rank]);
    queues.clear(), comms.clear();
    ranks.clear();
  }
  void reduce(uint32_t rank) {
    Fixture& f = *ranks[rank];
    f.space->communicate(queues[rank], f.ticket(1), {{comms[rank], Ranks::op_of(f.base + kIn, f.base + kOut)}});
  }
  bool reduced(uint32_t rank, uint32_t of = kRanks) {
    const auto found = ranks[rank]->words(ranks[rank]->base + kOut, kWords);
    return found.front() == 100 * of && found.back() == (100 + kWords - 1) * of;
  }
  CommState state(uint32_t rank) {
    std::string why;
    return ranks[rank]->space->comm_state(comms[rank], &why);
  }

  const std::unique_ptr<Device> device = std::move(*cuda::make_device(shared_config()));
  std::vector<std::unique_ptr<Fixture>> ranks;
  std::vector<CommRef> comms;
  std::vector<QueueRef> queues;
};

// What comes behind waits until the last has come, and what does not goes on.
void test_sharing_waits_for_the_last() {
  Sharing s;
  Fixture& first = *s.ranks[0];
  s.reduce(0);
  // Of what it waits with, the buffers alone may be touched; of what is behind that, anything.
  const uint64_t group = first.last[1];
  const auto touches = [&](uint64_t at, uint64_t bytes, uint64_t before) {
    return first.space->pending_use().touches(first.base + at, bytes, before);
  };
  EXPECT(touches(kIn, 4, group + 1) && touches(kOut, 4 * kWords, group + 1) && !touches(kOut, 4, group));
  EXPECT(!touches(kIn + 4 * kWords, kOut - 4 * kWords, group + 1) && !touches(kOut + 4 * kWords, kMiB, UINT64_MAX));
  first.space->copy(s.queues[0], first.ticket(1),
                    {first.base + kSeen, first.base + kOut, 0, 0, 4 * kWords, 1, true, true});
  EXPECT(!touches(kMiB, 1, first.last[1]) && touches(kMiB, 1, first.last[1] + 1));
  s.reduce(1);
  first.fill(first.legacy, 0, first.base + 3 * kSeen, kWords, 7);
  EXPECT(first.sync(0) && !first.owner.wait(1, first.last[1], 50));
  s.reduce(2);
  for (uint32_t rank = 0; rank < Sharing::kRanks; rank++) EXPECT(s.ranks[rank]->sync(1) && s.reduced(rank));
  EXPECT(first.words(first.base + kSeen, 1)[0] == 100 * Sharing::kRanks);
}

// Nor does it keep an operation of another communicator, of which all come.
void test_sharing_keeps_no_other_communicator() {
  Sharing s;
  s.reduce(0), s.reduce(1);
  const uint64_t key = ++g_key;
  std::vector<CommRef> two;
  for (uint32_t rank = 0; rank < 2; rank++) {
    Fixture& f = *s.ranks[rank];
    two.push_back(*f.space->create_comm({{key, 9}, 2, rank}));
    const QueueRef other = f.space->create_queue(QueueKind::kNonBlocking, 0, 2);
    f.space->init_comm(other, f.ticket(2), two.back());
    f.space->communicate(other, f.ticket(2), {{two.back(), Ranks::op_of(f.base + kIn, f.base + kSeen)}});
  }
  for (uint32_t rank = 0; rank < 2; rank++) {
    Fixture& f = *s.ranks[rank];
    EXPECT(f.owner.wait(2, f.last[2], 2000) && f.words(f.base + kSeen, 1)[0] == 200);
    f.space->destroy_comm(two[rank]);
  }
  EXPECT(!s.ranks[0]->owner.done(1, s.ranks[0]->last[1]));
  s.reduce(2);
  for (const auto& rank : s.ranks) EXPECT(rank->sync(1));
}

// With one default stream for all, the second rank would wait for the first one's kernel.
void test_sharing_has_a_default_stream_for_each() {
  Sharing s;
  s.ranks[0]->spin(s.ranks[0]->legacy, 0);
  s.ranks[1]->fill(s.ranks[1]->legacy, 0, s.ranks[1]->base + kSeen, kWords, 7);
  EXPECT(s.ranks[1]->owner.wait(0, s.ranks[1]->last[0], 2000) && !s.ranks[0]->owner.done(0, s.ranks[0]->last[0]));
  s.reduce(0), s.reduce(1), s.reduce(2);  // in streams of their own
  EXPECT(s.ranks[0]->owner.wait(1, s.ranks[0]->last[1], 2000) && s.reduced(0));
  fake.hold_spin(0);
}

void test_sharing_keeps_the_rule_of_the_default_stream() {
  Fixture f(0, shared_config());
  f.load_module();
  EXPECT_OK(f.space->commit(f.base, 4 * kMiB, false));
  constexpr uint32_t kRegion = 64 << 10;
  std::vector<QueueRef> queues = {f.legacy, f.space->create_queue(QueueKind::kBlocking, 0, 1),
                                  f.space->create_queue(QueueKind::kBlocking, 0, 2)};
  std::vector<uint8_t> device(3 * kRegion, 0);
  f.space->memset(f.legacy, f.ticket(0), {f.base, 0, device.size(), 1, 0, 1});
  std::mt19937 random(5);
  for (int step = 0; step < 2000; step++) {
    const uint32_t q = random() % 3, other = 1 + random() % 2;
    const size_t n = 4 + random() % 1000 * 4, x = random() % ((kRegion - n) / 4) * 4;
    if (q == 0) {  // a command of the default stream, from one blocking stream's memory to another's
      const size_t from = other * kRegion + x, to = (3 - other) * kRegion + x;
      f.space->copy(f.legacy, f.ticket(0), {f.base + to, f.base + from, 0, 0, n, 1, true, true});
      std::memcpy(&device[to], &device[from], n);
    } else if (step % 97 == 0) {  // a stream that is gone is waited for all the same
      f.space->destroy_queue(queues[q]);
      queues[q] = f.space->create_queue(QueueKind::kBlocking, 0, q);
    } else {
      const uint32_t value = random();
      f.fill(queues[q], q, f.base + q * kRegion + x, static_cast<uint32_t>(n / 4), value);
      for (uint32_t i = 0; i < n / 4; i++) {
        const uint32_t word = value + i;
        std::memcpy(&device[q * kRegion + x + i * 4], &word, 4);
      }
    }
  }
  for (uint32_t q = 0; q < 3; q++) EXPECT(f.owner.wait(q, f.last[q], 60'000));
  std::vector<uint8_t> seen(device.size());
  EXPECT_OK(f.space->read(f.base, seen.data(), seen.size()));
  EXPECT(seen == device);
}

// The others wait for their own abort, and what is behind theirs goes on then.
void test_sharing_and_an_abort() {
  Sharing s;
  s.reduce(0), s.reduce(1);
  s.ranks[1]->space->abort_comm(s.comms[1]);
  EXPECT(s.ranks[1]->owner.wait(1, s.ranks[1]->last[1], 2000));
  s.reduce(2);
  EXPECT(!s.ranks[0]->owner.wait(1, s.ranks[0]->last[1], 100));
  s.ranks[0]->space->abort_comm(s.comms[0]);
  s.ranks[2]->space->abort_comm(s.comms[2]);
  EXPECT(s.ranks[0]->sync(1) && s.ranks[2]->sync(1) && !s.reduced(0));
}

// Whoever comes last submits it; it runs when every rank's stream has come there.
void test_sharing_waits_for_every_stream() {
  Sharing s;
  Fixture& first = *s.ranks[0];
  first.spin(s.queues[0], 1);
  first.fill(s.queues[0], 1, first.base + kIn, kWords, 1100);
  for (uint32_t rank = 0; rank < Sharing::kRanks; rank++) s.reduce(rank);
  EXPECT(!s.ranks[2]->owner.wait(1, s.ranks[2]->last[1], 50));
  fake.hold_spin(0);
  for (uint32_t rank = 0; rank < Sharing::kRanks; rank++) {
    EXPECT(s.ranks[rank]->sync(1));
    EXPECT(s.ranks[rank]->words(s.ranks[rank]->base + kOut, 1)[0] == 1300);
  }
}

// Its memory is unmapped behind it, not under an operation that it is in. submitted: all have come, and it runs later.
void test_sharing_and_the_end_of_a_client() {
  for (const bool submitted : {false, true}) {
    Sharing s;
    s.ranks[0]->spin(s.queues[0], 1);
    s.reduce(0), s.reduce(1);
    if (submitted) s.reduce(2);
    s.ranks[1]->last.clear();
    s.ranks[1]->space->leave_comms();
    s.queues[1].reset(), s.comms[1].reset();
    std::thread later([&] {
      usleep(100'000);
      fake.hold_spin(0);
    });
    s.ranks[1]->space->stop();
    s.ranks[1].reset();
    later.join();
    EXPECT(submitted || !s.ranks[0]->owner.wait(1, s.ranks[0]->last[1], 50));
    if (submitted) EXPECT(s.ranks[0]->sync(1) && s.reduced(0));
    s.ranks[0]->space->abort_comm(s.comms[0]);
    s.ranks[2]->space->abort_comm(s.comms[2]);
    EXPECT(s.ranks[0]->sync(1));
  }
}

// Without spaces, whose own streams would wait too: who leaves waits for what it is in, and for nothing else.
void test_sharing_and_who_leaves() {
  const auto driver = *cuda::Driver::open(g_config.driver_path);
  CUdevice gpu = 0;
  EXPECT(driver->cuInit(0) == CUDA_SUCCESS && driver->cuDeviceGet(&gpu, 0) == CUDA_SUCCESS);
  const auto context = *cuda::Context::primary(driver, gpu);
  CUstream stream = nullptr;
  EXPECT(context->enter().cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
  {
    cuda::SharedComm comm(cuda::Places::make({1, 1, 1}, 1), context);
    EXPECT(driver->cuLaunchHostFunc(stream, [](void*) { usleep(200'000); }, nullptr) == CUDA_SUCCESS);
    const auto ready = *cuda::SharedComm::Mark::record(context, stream);
    CommOp send, recv;
    send.kind = static_cast<uint8_t>(CommKind::kSend), send.peer = 1;
    recv.kind = static_cast<uint8_t>(CommKind::kRecv), recv.peer = 0;
    comm.post(0, {send}, ready);
    comm.post(1, {recv}, ready);
    EXPECT(comm.leave(2, false, 20));
    EXPECT(!comm.leave(1, false, 20));
    EXPECT(comm.leave(1, false, 5000));
  }
  EXPECT(driver->cuStreamDestroy(stream) == CUDA_SUCCESS);
}

void test_sharing_and_ranks_that_disagree() {
  Sharing s;
  s.reduce(0), s.reduce(1);
  Fixture& f = *s.ranks[2];
  auto op = Ranks::op_of(f.base + kIn, f.base + kOut);
  op.count--;
  f.space->communicate(s.queues[2], f.ticket(1), {{s.comms[2], op}});
  for (uint32_t rank = 0; rank < Sharing::kRanks; rank++) {
    for (int i = 0; i < 200 && s.state(rank) == CommState::kOk; i++) usleep(10'000);
    EXPECT(s.state(rank) == CommState::kInvalidUsage);
    s.ranks[rank]->space->abort_comm(s.comms[rank]);
  }
  for (const auto& rank : s.ranks) EXPECT(rank->sync(1));
}

// A fault is the context's, so every rank's: all commands complete all the same.
void test_sharing_and_a_fault() {
  Sharing s;
  s.reduce(0);
  s.ranks[1]->space->launch(s.ranks[1]->legacy, s.ranks[1]->ticket(0), s.ranks[1]->fault_f, {});
  EXPECT(s.ranks[1]->sync(0));
  s.reduce(1), s.reduce(2);
  for (const auto& rank : s.ranks) EXPECT(rank->sync(1) && rank->owner.faults == 1);
}

const Test kTests[] = {
    {"its queue waits", test_its_queue_waits},
    {"another queue goes on", test_another_queue_goes_on},
    {"who waits for an event", test_who_waits_for_an_event},
    {"an event that is recorded again", test_an_event_that_is_recorded_again},
    {"a held wait and a later record", test_a_held_wait_and_a_later_record},
    {"the legacy stream", test_the_legacy_stream},
    {"a queue of the same number", test_a_queue_of_the_same_number},
    {"groups keep their order", test_groups_keep_their_order},
    {"a send does not keep others", test_a_send_does_not_keep_others},
    {"executors keep their order", test_executors_keep_their_order},
    {"an abort while NCCL is busy", test_an_abort_while_nccl_is_busy},
    {"destroyed with work", test_destroyed_with_work},
    {"the client ends", test_the_client_ends},
    {"a fault while NCCL is busy", test_a_fault_while_nccl_is_busy},
    {"a successor waits", test_a_successor_waits},
    {"the context", test_the_context},
    {"random work", test_random_work},
    {"sharing: waits for the last", test_sharing_waits_for_the_last},
    {"sharing: waits for every stream", test_sharing_waits_for_every_stream},
    {"sharing: keeps no other communicator", test_sharing_keeps_no_other_communicator},
    {"sharing: a default stream for each", test_sharing_has_a_default_stream_for_each},
    {"sharing: the rule of the default stream", test_sharing_keeps_the_rule_of_the_default_stream},
    {"sharing: an abort", test_sharing_and_an_abort},
    {"sharing: the end of a client", test_sharing_and_the_end_of_a_client},
    {"sharing: who leaves", test_sharing_and_who_leaves},
    {"sharing: ranks that disagree", test_sharing_and_ranks_that_disagree},
    {"sharing: a fault", test_sharing_and_a_fault},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  setenv("DEVPROXY_CUDA_DRIVER", argv[1], 1);  // the fake NCCL's
  if (!load_fake(argv[1])) return 2;
  void* const nccl = dlopen(argv[2], RTLD_NOW);
  if (!nccl) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  load(nccl, "fake_nccl_late", &g_set_late);
  g_config.nccl_path = argv[2];
  char folder[] = "/tmp/devproxy-comm-test-XXXXXX";
  if (!mkdtemp(folder)) return 2;
  g_folder = folder;
  std::string only;
  for (int i = 3; i < argc; i++) {
    const std::string word = argv[i];
    if (word == "events")
      fake.set_attribute(122, 0);
    else if (word == "chaos")
      fake.set_chaos(11);
    else
      only = word;
  }
  const int code = run_tests(std::begin(kTests), std::end(kTests), only);
  rmdir(folder);
  return code;
}
