// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/comm/peers.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "devproxy/hal/soft/comm/shadow.h"

namespace devproxy::hal::soft {

namespace {

std::mutex g_mu;
// By incarnation. Never destroyed: device threads may outlive main().
std::map<uint64_t, std::weak_ptr<PeerMemory>>& registry() {
  static auto* all = new std::map<uint64_t, std::weak_ptr<PeerMemory>>;
  return *all;
}

std::shared_ptr<PeerMemory> known(uint64_t incarnation) {
  std::lock_guard lock(g_mu);
  const auto it = registry().find(incarnation);
  std::shared_ptr<PeerMemory> peer = it == registry().end() ? nullptr : it->second.lock();
  return peer && peer->alive() ? peer : nullptr;
}

}  // namespace

StatusOr<std::shared_ptr<PeerMemory>> PeerMemory::open(SpaceOwner& owner, const SpacePlace& place, uint64_t incarnation,
                                                       uint64_t device_base, uint64_t device_bytes) {
  if (auto peer = known(incarnation)) return peer;
  auto link = owner.reach_peer(place);
  if (!link.ok()) return std::move(link).status();
  return map(link->memory, link->alive, incarnation, device_base, device_bytes);
}

StatusOr<std::shared_ptr<PeerMemory>> PeerMemory::open_shadow(const std::string& folder, uint64_t incarnation,
                                                              uint64_t device_base, uint64_t device_bytes) {
  if (auto peer = known(incarnation)) return peer;
  auto memory = soft::open_shadow(folder, incarnation, device_bytes, false);
  if (!memory.ok()) return std::move(memory).status();
  return map(*memory, -1, incarnation, device_base, device_bytes);
}

// Closes `memory`, and `alive` where it fails.
StatusOr<std::shared_ptr<PeerMemory>> PeerMemory::map(int memory, int alive, uint64_t incarnation, uint64_t device_base,
                                                      uint64_t device_bytes) {
  struct stat there;
  void* at = MAP_FAILED;
  Status s;
  // A file that is shorter than its owner says would fault here.
  if (fstat(memory, &there) != 0 || static_cast<uint64_t>(there.st_size) != device_bytes)
    s = {kInvalidValue, "the memory of a peer has another size than the communicator says"};
  else if (at = mmap(nullptr, device_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory, 0);
           at == MAP_FAILED)
    s = Status::from_errno(kOutOfMemory, "mapping a peer's memory");
  close(memory);
  if (!s.ok()) {
    if (alive >= 0) close(alive);
    return s;
  }
  madvise(at, device_bytes, MADV_DONTDUMP);
  std::shared_ptr<PeerMemory> peer(
      new PeerMemory(static_cast<uint8_t*>(at), device_base, device_bytes, alive, incarnation));
  std::lock_guard lock(g_mu);
  std::erase_if(registry(), [](const auto& item) { return item.second.expired(); });
  registry()[incarnation] = peer;
  return peer;
}

PeerMemory::~PeerMemory() {
  munmap(base_, bytes_);
  if (alive_ >= 0) close(alive_);
}

bool PeerMemory::alive() const {
  if (alive_ < 0) return true;
  pollfd fd{alive_, POLLIN, 0};
  return poll(&fd, 1, 0) == 0;  // nobody writes: whatever is to be read is its end
}

}  // namespace devproxy::hal::soft
