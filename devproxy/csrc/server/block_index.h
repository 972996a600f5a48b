// SPDX-License-Identifier: Apache-2.0
// Which blocks of device memory lie in a staging folder already. The servers of a tree share it in one dump, so that
// replicas lie there once: DIR/blocks.index. Who makes the folder makes the index (checkpoint/staged.py); without one,
// everybody writes everything.
//
//   0      the magic, the number of slots (a power of two), the secret of the hash
//   4096   the slots
//
// A block is named by XXH3-128 of its bytes under a secret that is random in each dump. Nobody compares the bytes: those
// of the other block may still be on their way. A million blocks have two of one name with probability 1e-27. Nobody
// outside the servers knows the secret while it matters, so blocks of one name cannot be made on purpose.
//
// No lock, and no wait for another server. Slots are only ever filled. To fill one:
//
//   1  low: 0 -> the name's lower half, by compare-and-swap. One server wins.
//   2  who, offset
//   3  high: 0 -> the upper half, released
//
// Two servers with the same block probe the same slots in the same order, and come to the same empty one. The one that
// does not win it finds the lower half there, and either the upper half, and then who and offset, or 0: then it is
// between 1 and 3 of the other, and writes its own bytes too. A server that dies there leaves a slot that nobody uses. One
// that is full, or whose neighbourhood is, costs room and nothing else.
//
// Found does not mean written: the other server may be about to. Its dump may fail, or it may die; then the dump of the
// job fails as a whole, as it always did. Whoever reads checks it: the other dump has ended if it has its list of
// references (staged_dump.h), which is written last.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "devproxy/csrc/base/status.h"

namespace devproxy::server {

// Some bytes of DIR/gpu<gpu>-<client>.dev.
struct BlockPlace {
  uint32_t gpu = 0, client = 0;
  uint64_t offset = 0;
  bool operator==(const BlockPlace&) const = default;
};

class BlockIndex {
 public:
  static constexpr char kMagic[9] = "DPBLOCK1";
  static constexpr uint64_t kSlotsAt = 4096;
  static constexpr uint32_t kSecretBytes = 192, kProbes = 64;
  static constexpr uint64_t kBlockBytes = 1u << 20;  // as large as a chunk of the store
  static constexpr uint64_t kLeastBytes = 4096;      // less saves no page

  // Null where the folder has none.
  static StatusOr<std::unique_ptr<BlockIndex>> open(const std::string& dir);
  ~BlockIndex();
  BlockIndex(const BlockIndex&) = delete;

  // Any thread. Where the same bytes lie, or will when their dump ends. nullopt: the caller writes them to `mine`, where
  // others may look for them from now on.
  std::optional<BlockPlace> find_or_claim(const void* block, uint64_t bytes, const BlockPlace& mine);

 private:
  struct Slot {
    std::atomic<uint64_t> low, high, who, offset;
  };
  static_assert(sizeof(Slot) == 32 && std::atomic<uint64_t>::is_always_lock_free);
  struct Header {
    char magic[8];
    uint64_t slots;
    uint8_t secret[kSecretBytes];
  };

  BlockIndex(void* map, uint64_t bytes);
  Slot* slots() const { return reinterpret_cast<Slot*>(static_cast<uint8_t*>(map_) + kSlotsAt); }

  void* const map_;
  const uint64_t map_bytes_, slots_;
  std::array<uint8_t, kSecretBytes> secret_;
};

}  // namespace devproxy::server
