// SPDX-License-Identifier: Apache-2.0
// The software GPU behind hal.h, without server or client: contents, aliases, resident memory, order of queues.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "devproxy/csrc/wire/segment.h"
#include "devproxy/hal/soft/soft_device.h"

using namespace devproxy;
using namespace devproxy::hal;

#define EXPECT(condition)                                                           \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                \
    }                                                                               \
  } while (0)

namespace {

// Host functions wait for their token; completions are checked to be in order per queue.
struct Owner final : SpaceOwner {
  std::mutex mu;
  std::condition_variable changed;
  uint64_t completed[16] = {};
  uint64_t open_token = 0;

  void on_thread_start() noexcept override {}
  void on_complete(uint32_t queue, uint64_t position, uint32_t) noexcept override {
    std::lock_guard lock(mu);
    EXPECT(position > completed[queue]);
    completed[queue] = position;
    changed.notify_all();
  }
  void on_fault(int32_t, const char*) noexcept override { EXPECT(false); }
  bool range_live(uint64_t, uint64_t, uint64_t, bool) noexcept override { return true; }
  void host_function(uint64_t token) noexcept override {
    std::unique_lock lock(mu);
    changed.wait(lock, [&] { return open_token >= token; });
  }
  void open(uint64_t token) {
    std::lock_guard lock(mu);
    open_token = token;
    changed.notify_all();
  }
  void wait(uint32_t queue, uint64_t position) {
    std::unique_lock lock(mu);
    changed.wait(lock, [&] { return completed[queue] >= position; });
  }
  uint64_t at(uint32_t queue) {
    std::lock_guard lock(mu);
    return completed[queue];
  }
};

SpaceConfig config(uint32_t slot) { return {range_base(slot), kDeviceBytes, 0, 0}; }

uint64_t resident_pages(uint64_t addr, uint64_t bytes) {
  std::vector<unsigned char> pages(bytes / kPageBytes);
  EXPECT(mincore(reinterpret_cast<void*>(addr), bytes, pages.data()) == 0);
  uint64_t n = 0;
  for (const unsigned char page : pages) n += page & 1;
  return n;
}

std::unique_ptr<Space> open_space(Device& device, uint32_t slot, Owner& owner) {
  auto space = device.open_space(config(slot), owner);
  if (!space.ok()) std::fprintf(stderr, "%s\n", space.status().text().c_str());
  EXPECT(space.ok());
  return std::move(*space);
}

void contents_and_aliases(Device& device) {
  Owner owner;
  auto a = open_space(device, 0, owner), b = open_space(device, 1, owner);
  EXPECT(!device.open_space(config(0), owner).ok());  // the range is taken
  const uint64_t at = range_base(0), other = range_base(1) + 65536;
  EXPECT(a->commit(at, 8192, false).ok() && b->commit(other, 8192, false).ok());
  EXPECT(!a->commit(other, 4096, false).ok() && !a->commit(at + kDeviceBytes, 1, false).ok());
  EXPECT(a->write(at, "hello", 6).ok());
  EXPECT(b->alias(other, 8192, *a, at).ok());
  char text[6];
  EXPECT(b->read(other, text, 6).ok() && std::strcmp(text, "hello") == 0);
  EXPECT(a->write(at, "world", 6).ok() && b->read(other, text, 6).ok() && std::strcmp(text, "world") == 0);
  EXPECT(b->unalias(other, 8192).ok() && a->write(at, "again", 6).ok());
  EXPECT(b->read(other, text, 6).ok() && std::strcmp(text, "world") == 0);
  EXPECT(!b->alias(other + 1, 4096, *a, at).ok() && !a->read(at - 1, text, 2).ok());
}

void resident_memory_follows(Device& device) {
  Owner owner;
  auto space = open_space(device, 0, owner);
  constexpr uint64_t kBytes = 384u << 20;
  const uint64_t at = range_base(0);
  EXPECT(space->commit(at, kBytes, false).ok() && space->commit(at + kBytes, 4096, false).ok());
  std::memset(reinterpret_cast<void*>(at), 1, kBytes + 4096);
  EXPECT(resident_pages(at, kBytes) == kBytes / kPageBytes);
  space->release(at, kBytes);
  EXPECT(space->commit(at, 4096, false).ok());  // soon again, so it keeps its page
  for (int i = 0; i < 50; i++) space->tidy(), usleep(100'000);
  EXPECT(resident_pages(at, kBytes) == 1);
  EXPECT(resident_pages(at + kBytes, 4096) == 1 && *reinterpret_cast<uint8_t*>(at + kBytes) == 1);
}

void queues_keep_their_rules(Device& device) {
  Owner owner;
  auto space = open_space(device, 0, owner);
  auto legacy = space->create_queue(QueueKind::kLegacy, 0, 0);
  auto blocking = space->create_queue(QueueKind::kBlocking, 0, 1);
  auto free_running = space->create_queue(QueueKind::kNonBlocking, 0, 2);
  space->host_function(blocking, {10, 0}, 1);  // stuck until opened
  space->nop(legacy, {20, 0});                 // waits for it
  space->nop(free_running, {30, 0});           // does not
  owner.wait(2, 30);
  auto event = space->create_event(true);
  space->wait(free_running, {40, 0}, event);  // never recorded
  owner.wait(2, 40);
  space->record(blocking, {50, 0}, event);  // behind the legacy command
  space->wait(free_running, {60, 0}, event);
  space->record(blocking, {70, 0}, event);  // a later record does not matter to the wait
  usleep(50'000);
  EXPECT(owner.at(0) == 0 && owner.at(1) == 0 && owner.at(2) == 40 && space->oldest_pending() == 10 &&
         space->pending() == 5);
  EXPECT(!space->pending_use().touches(range_base(0), kDeviceBytes, UINT64_MAX));
  space->memset(blocking, {75, 0}, {range_base(0), 0, 1, 1, 0, 1});
  EXPECT(!space->pending_use().touches(range_base(0), 1, 75) && space->pending_use().touches(range_base(0), 1, 76));
  EXPECT(space->elapsed_ms(event, event).status().code() == kNotReady);
  owner.open(1);
  owner.wait(1, 75);
  owner.wait(2, 60);
  EXPECT(owner.at(0) == 20);
  while (!space->idle()) usleep(100);
  EXPECT(space->oldest_pending() == UINT64_MAX);

  // A destroyed queue still completes, and its index continues after it.
  space->host_function(free_running, {80, 0}, 2);
  space->destroy_queue(free_running);
  auto next = space->create_queue(QueueKind::kNonBlocking, 0, 2);
  space->nop(next, {90, 0});
  usleep(50'000);
  EXPECT(owner.at(2) == 60);
  owner.open(2);
  owner.wait(2, 90);

  // stop() drops what has not begun.
  space->host_function(next, {100, 0}, 3);
  for (uint64_t i = 0; i < 1000; i++) space->nop(next, {110 + i, 0});
  usleep(20'000);
  owner.open(3);
  space->stop();
}

}  // namespace

int main() {
  for (const bool chaos : {false, true}) {
    auto device = soft::make_device({0, 1 << 30, chaos, 7});
    EXPECT(device->caps().level == 3 && device->properties().attributes[75] == device->properties().major);
    queues_keep_their_rules(*device);
    if (chaos) break;
    contents_and_aliases(*device);
    resident_memory_follows(*device);
  }
  std::printf("ok\n");
  return 0;
}
