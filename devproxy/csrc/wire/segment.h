// SPDX-License-Identifier: Apache-2.0
// The shared-memory segment between one client process and one device-proxy server.
//
// One file on tmpfs, mode 0600, made by the server at attach, mapped by both. Nothing in it is a pointer, and its bytes
// are state of the job like the process's own memory: at a checkpoint they are stored while the process is frozen
// (CRIU keeps nothing of a named shared mapping), and a restore writes them back before the process runs again.
// The server trusts no byte of it: every field that it reads is read once into a local and checked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace devproxy {

inline constexpr uint32_t kSegmentMagic = 0x53505044;  // "DPPS"
inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kLineBytes = 64;

inline constexpr size_t kRingBytes = 1u << 20;        // power of two; mapped twice in a row, so records never wrap
inline constexpr size_t kMaxInlineBytes = 64u << 10;  // longer bulk data travels in chunks
inline constexpr size_t kChunkBytes = 512u << 10;
inline constexpr uint32_t kChunks = 64;       // 32 MiB of staging, touched from the low end first
inline constexpr uint32_t kReplySlots = 256;  // client threads that may be inside a call at once
inline constexpr size_t kReplyBytes = 4096;
inline constexpr uint32_t kStreams = 1024;   // stream index 0 is the legacy default stream
inline constexpr uint32_t kHostFuncs = 256;  // entries of the server -> client queue of host functions

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// Address ranges: one of kRangeBytes per (process slot, device), device memory first, the pinned window behind it.
// Build constants: a program under ThreadSanitizer may map nothing at 0x2000_0000_0000.
#ifdef DEVPROXY_TSAN
inline constexpr uint64_t kRangeBase = 0x40'0000'0000;
inline constexpr uint64_t kRangeBytes = 0x8'0000'0000;  // 32 GiB
inline constexpr uint64_t kDeviceBytes = 0x6'0000'0000;
#else
inline constexpr uint64_t kRangeBase = 0x2000'0000'0000;
inline constexpr uint64_t kRangeBytes = 0x40'0000'0000;   // 256 GiB
inline constexpr uint64_t kDeviceBytes = 0x30'0000'0000;  // 192 GiB of device addresses
#endif
// A device range: the client's allocator (cuMemAlloc and its kin) has the lower 160 GiB, more than any one GPU's memory
// up to the H200; cuMemAddressReserve has what is above; the top belongs to the server: globals of modules live there.
inline constexpr uint64_t kHeapBytes = kDeviceBytes / 6 * 5;
inline constexpr uint64_t kGlobalsBytes = 1ull << 30;
inline constexpr uint64_t kReservableBytes = kDeviceBytes - kHeapBytes - kGlobalsBytes;
// The top of that: numbers of the server's own collectives (csrc/server/meta_slots.h). A device may give it whole pages.
inline constexpr uint64_t kMetaBytes = 2ull << 20;
// MEM_ALLOC.flags: a stable buffer (SpaceMemory::commit); one range with the neighbours that have this flag too.
inline constexpr uint32_t kStableFlag = 1, kPieceFlag = 2;
inline constexpr uint64_t kPinnedBytes = kRangeBytes - kDeviceBytes;
inline constexpr uint32_t kMaxSlots = 128;
inline constexpr uint64_t range_base(uint32_t slot) { return kRangeBase + slot * kRangeBytes; }

// The doorbell of the ring's consumer. Written by both sides.
struct alignas(kLineBytes) Doorbell {
  std::atomic<uint32_t> sleeping;  // futex word: 1 while the consumer sleeps or is about to
};

struct alignas(kLineBytes) RingCounter {
  std::atomic<uint64_t> value;  // absolute byte position since the first message of this client; never wraps back
};

// Completion of one stream: the ring position just behind the last command that has finished on it. A command with
// ring position p (its end) is complete when completed >= p: cuEventQuery and cuStreamQuery are local.
struct alignas(kLineBytes) StreamState {
  std::atomic<uint64_t> completed;  // server writes
  std::atomic<uint32_t> waiters;    // client threads that sleep or are about to
  std::atomic<uint32_t> wake_seq;   // futex word; server adds 1, then wakes, when waiters != 0
};

enum class ServerState : uint32_t { kStarting = 0, kRunning = 1, kPoisoned = 2, kGone = 3 };

struct alignas(kLineBytes) ReplySlot {
  std::atomic<uint32_t> seq;      // futex word: the sequence number of the last answered call
  std::atomic<uint32_t> waiting;  // client sleeps or is about to
  std::atomic<int32_t>
      late_error;  // CUresult of an asynchronous call of this thread that failed late (not an execution fault)
  int32_t status;  // CUresult of the answered call
  uint32_t bytes;  // length of the reply struct plus tail in data
  uint8_t data[kReplyBytes - 64];
};

struct HostFuncEntry {
  std::atomic<uint64_t> token;  // 0 = empty
};

// One wait of a thread for room in the ring or for a chunk. `begin` claims an entry and `end` fills it (client); the server
// takes what is filled while somebody traces. Where all are taken, nobody traces, and a wait is not noted.
struct RoomWait {
  std::atomic<uint64_t> begin;  // day_ns(); 0: free
  std::atomic<uint64_t> end;    // 0: not filled
  std::atomic<uint32_t> slot;   // reply slot of the thread
};
inline constexpr uint32_t kRoomWaits = 16;

struct ControlPage {
  uint32_t magic;
  uint32_t slot;  // address range of this process on this device
  uint8_t abi_id[32];
  std::atomic<uint32_t> server_state;  // ServerState
  std::atomic<int32_t> sticky_error;   // CUresult of an execution fault; never cleared
  char sticky_text[240];               // NUL-terminated, written before sticky_error
  // The server adds 1 where memory of the GPU is missing. When it has changed, the client gives its unused credit back, at
  // its next allocation or release.
  std::atomic<uint32_t> credit_wanted;
  // 1: devproxy holds the job, at its communication or in a cut, until it goes on. What waits meanwhile is not late. And a cut
  // may wait for the moment of least memory, so the client keeps nothing that was freed.
  std::atomic<uint32_t> held;
  std::atomic<uint32_t> wants_awaited;  // 1: the device tells of completions late, unless it hears STREAM_AWAITED
  // 1: replicas are spliced. So what a rank has freed is read by others as long as nothing else is there, and equal ranks are to
  // have their buffers at equal places.
  std::atomic<uint32_t> splices;
  std::atomic<uint64_t> wakes;  // how often a producer had to wake the server
  std::atomic<uint64_t> steps;  // optimizer steps, counted by the job's import hook (devproxy_step)
  Doorbell doorbell;
  RingCounter tail;                     // producers reserve here
  RingCounter head;                     // consumer releases here
  std::atomic<uint32_t> space_waiters;  // producers asleep on a full ring
  std::atomic<uint32_t> space_seq;      // futex word for them
  alignas(
      kLineBytes) std::atomic<uint32_t> chunk_busy[kChunks];  // 0 free, 1 taken by the client, freed by whoever is last
  alignas(kLineBytes) std::atomic<uint32_t> chunk_waiters;
  std::atomic<uint32_t> chunk_seq;                         // futex word
  alignas(kLineBytes) std::atomic<uint32_t> hostfunc_seq;  // futex word: server adds 1 after it filled an entry
  HostFuncEntry hostfuncs[kHostFuncs];                     // token t goes to entry t % kHostFuncs; client empties it
  std::atomic<uint32_t> room_waits_filled;                 // some entries are
  RoomWait room_waits[kRoomWaits];
};

inline constexpr size_t round_page(size_t n) { return (n + kPageBytes - 1) & ~(kPageBytes - 1); }
inline constexpr size_t kControlOffset = 0;
inline constexpr size_t kStreamsOffset = round_page(sizeof(ControlPage));
inline constexpr size_t kRepliesOffset = kStreamsOffset + round_page(sizeof(StreamState) * kStreams);
inline constexpr size_t kRingOffset = kRepliesOffset + round_page(sizeof(ReplySlot) * kReplySlots);
inline constexpr size_t kChunksOffset = kRingOffset + kRingBytes;
inline constexpr size_t kSegmentBytes = kChunksOffset + kChunkBytes * kChunks;

static_assert(sizeof(ReplySlot) == kReplyBytes);
static_assert(kRingOffset % kPageBytes == 0 && kChunksOffset % kPageBytes == 0);

// Head of every ring record. `commit` is 0 until the producer publishes; then it is the record's whole length, a
// multiple of kLineBytes. The consumer zeroes the first word of every line it gives back, so a stale payload can
// never look like a published head.
struct MsgHeader {
  std::atomic<uint32_t> commit;
  uint16_t opcode;
  uint16_t slot;           // reply slot of the posting thread, also where its late errors go
  uint32_t payload_bytes;  // request struct and what follows it inline
  uint32_t seq;            // 0: no reply wanted; else the slot's sequence number to answer with
};
static_assert(sizeof(MsgHeader) == 16);

}  // namespace devproxy
