// SPDX-License-Identifier: Apache-2.0
// Fat binaries: a header and entries back to back, each a header of its own and a body. All numbers little endian.
//
//   container   u32 magic, u16 version (1), u16 bytes of this header (16), u64 bytes behind it
//   entry       0 u16 kind (1 PTX, 2 ELF, 8 intermediate code), 2 u16 version (0x101), 4 u32 bytes of this header,
//               8 u64 bytes of the body with padding, 16 u32 bytes of the packed body (0: not packed),
//               28 u32 architecture (90 is sm_90), 40 u64 flags, 56 u64 bytes of the unpacked body
//   flags       0x2000 the body is one LZ4 block, 0x8000 one zstd frame, 0x100000 'a', 0x200000 'f'
//
// Learnt from fat binaries that nvcc 13.0 writes, in each -compress-mode and for each kind of architecture.
#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <climits>

#include "devproxy/hal/image/bytes.h"
#include "devproxy/hal/image/image.h"

namespace devproxy::hal::image {

namespace {

constexpr size_t kContainerBytes = 16, kLeastEntryBytes = 64;
constexpr uint64_t kLz4 = 0x2000, kZstd = 0x8000, kOnlyThis = 1 << 20, kFamily = 1 << 21;
constexpr size_t kMaxEntries = 4096;
constexpr uint64_t kMaxUnpackedBytes = 1ull << 30;
// An LZ4 block cannot do better (one byte of length stands for at most 255), so a larger claim is a lie. zstd can, but
// code and text do not come near it.
constexpr uint64_t kMaxRatio = 4096;

Status damaged(const std::string& why) { return {kInvalidImage, "the fat binary is damaged: " + why}; }

}  // namespace

StatusOr<std::vector<Entry>> fatbin_entries(const uint8_t* image, size_t bytes) {
  const Bytes all(image, bytes);
  if (!all.has(0, kContainerBytes)) return damaged("shorter than its header");
  const uint64_t head = all.get<uint16_t>(6);
  const auto body = all.part(head, all.get<uint64_t>(8));
  if (!body || head < kContainerBytes) return damaged("it is shorter than it says");
  if (all.get<uint16_t>(4) != 1) return damaged("version " + std::to_string(all.get<uint16_t>(4)) + " is unknown");
  std::vector<Entry> entries;
  for (uint64_t at = 0; at < body->size();) {
    if (!body->has(at, kLeastEntryBytes)) return damaged("an entry's header does not fit");
    const uint64_t head_bytes = body->get<uint32_t>(at + 4), body_bytes = body->get<uint64_t>(at + 8);
    if (head_bytes < kLeastEntryBytes || !body->has(at, head_bytes) || !body->has(at + head_bytes, body_bytes))
      return damaged("an entry does not fit");
    if (entries.size() >= kMaxEntries) return damaged("more than 4096 entries");
    const uint64_t flags = body->get<uint64_t>(at + 40);
    const auto kind = body->get<uint16_t>(at);
    if (kind == static_cast<uint16_t>(EntryKind::kPtx) || kind == static_cast<uint16_t>(EntryKind::kElf)) {
      Entry e;
      e.kind = static_cast<EntryKind>(kind);
      const auto number = body->get<uint32_t>(at + 28);
      e.arch = {number / 10, number % 10, flags & kOnlyThis ? 'a' : flags & kFamily ? 'f' : '\0'};
      e.offset = head + at + head_bytes;
      e.stored_bytes = e.bytes = body_bytes;
      if (flags & (kLz4 | kZstd)) {
        e.packing = flags & kZstd ? Packing::kZstd : Packing::kLz4;
        e.stored_bytes = body->get<uint32_t>(at + 16);
        e.bytes = body->get<uint64_t>(at + 56);
        if (e.stored_bytes > body_bytes) return damaged("a packed body is longer than its entry");
        if (e.bytes > kMaxUnpackedBytes || e.bytes / kMaxRatio > e.stored_bytes)
          return damaged("a packed body claims an impossible length");
      }
      entries.push_back(e);
    }
    at += head_bytes + body_bytes;
  }
  return entries;
}

StatusOr<std::vector<uint8_t>> unpack(const uint8_t* image, size_t bytes, const Entry& entry) {
  const auto body = Bytes(image, bytes).part(entry.offset, entry.stored_bytes);
  if (!body || entry.bytes > kMaxUnpackedBytes) return damaged("an entry lies outside");
  if (entry.packing == Packing::kNone) return std::vector<uint8_t>(body->data(), body->data() + body->size());
  std::vector<uint8_t> out(entry.bytes);
  bool whole;
  if (entry.packing == Packing::kLz4) {
    if (body->size() > INT_MAX) return damaged("a packed body is too long");
    whole = LZ4_decompress_safe(reinterpret_cast<const char*>(body->data()), reinterpret_cast<char*>(out.data()),
                                static_cast<int>(body->size()),
                                static_cast<int>(out.size())) == static_cast<int>(out.size());
  } else {
    const size_t n = ZSTD_decompress(out.data(), out.size(), body->data(), body->size());
    whole = !ZSTD_isError(n) && n == out.size();
  }
  if (!whole) return damaged("a packed body cannot be unpacked to the length that it claims");
  return out;
}

}  // namespace devproxy::hal::image
