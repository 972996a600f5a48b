// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/block_index.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "devproxy/csrc/server/state_files.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace devproxy::server {

StatusOr<std::unique_ptr<BlockIndex>> BlockIndex::open(const std::string& dir) {
  const std::string path = dir + "/blocks.index";
  const File file(path, O_RDWR);
  if (file.fd < 0 && errno == ENOENT) return std::unique_ptr<BlockIndex>();
  struct stat info;
  if (file.fd < 0 || fstat(file.fd, &info) != 0) return Status::from_errno(kFileNotFound, "opening " + path);
  const auto bytes = static_cast<uint64_t>(info.st_size);
  Header header;
  if (bytes < kSlotsAt) return Status(kInvalidImage, path + " is damaged");
  if (Status s = read_all(file.fd, &header, sizeof header, 0); !s.ok()) return std::move(s).with(path);
  if (std::memcmp(header.magic, kMagic, sizeof header.magic) != 0 || !std::has_single_bit(header.slots) ||
      header.slots != (bytes - kSlotsAt) / sizeof(Slot))
    return Status(kInvalidImage, path + " is damaged");
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
  if (map == MAP_FAILED) return Status::from_errno(kOutOfMemory, "mapping " + path);
  return std::unique_ptr<BlockIndex>(new BlockIndex(map, bytes));
}

BlockIndex::BlockIndex(void* map, uint64_t bytes)
    : map_(map), map_bytes_(bytes), slots_((bytes - kSlotsAt) / sizeof(Slot)) {
  const auto* header = static_cast<const Header*>(map);
  std::copy_n(header->secret, kSecretBytes, secret_.begin());
}

BlockIndex::~BlockIndex() { munmap(map_, map_bytes_); }

std::optional<BlockPlace> BlockIndex::find_or_claim(const void* block, uint64_t bytes, const BlockPlace& mine) {
  const XXH128_hash_t hash = XXH3_128bits_withSecret(block, bytes, secret_.data(), secret_.size());
  // 0 is an empty slot's.
  const uint64_t low = hash.low64 ? hash.low64 : 1, high = hash.high64 ? hash.high64 : 1;
  for (uint64_t probe = 0; probe < std::min<uint64_t>(kProbes, slots_); probe++) {
    Slot& slot = slots()[(low + probe) & (slots_ - 1)];
    uint64_t there = slot.low.load(std::memory_order_relaxed);
    if (there == 0 && slot.low.compare_exchange_strong(there, low, std::memory_order_relaxed)) {
      slot.who.store(uint64_t{mine.gpu} << 32 | mine.client, std::memory_order_relaxed);
      slot.offset.store(mine.offset, std::memory_order_relaxed);
      slot.high.store(high, std::memory_order_release);
      return std::nullopt;
    }
    if (there != low) continue;
    const uint64_t other = slot.high.load(std::memory_order_acquire);
    if (other == 0) return std::nullopt;
    if (other != high) continue;
    const uint64_t who = slot.who.load(std::memory_order_relaxed);
    return BlockPlace{static_cast<uint32_t>(who >> 32), static_cast<uint32_t>(who),
                      slot.offset.load(std::memory_order_relaxed)};
  }
  return std::nullopt;
}

}  // namespace devproxy::server
