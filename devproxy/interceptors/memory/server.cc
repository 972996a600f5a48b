// SPDX-License-Identifier: Apache-2.0
// Memory, the server's half: the mirror of the client's allocator, the credit it allocates within, copies and sets.
//
// The client decides addresses and announces them in ring order; nothing here is believed: an allocation outside the
// credit or the range is not added, and what is not in the mirror is not touched.
#include "devproxy/interceptors/memory/server.h"

#include <chrono>
#include <optional>
#include <thread>

#include "devproxy/csrc/base/log.h"

namespace devproxy::server::memory {

namespace {

using enum wire::Space;

// For work behind which memory was freed. A host function in front of that may wait for this thread.
constexpr auto kRoomPatience = std::chrono::seconds(5);

// Bytes from the first to the last of a rectangle; false where that is no number of bytes.
bool extent(uint64_t width, uint64_t pitch, uint64_t rows, uint64_t* bytes) {
  uint64_t skipped;
  if (rows > 1 && pitch < width) return false;
  return !__builtin_mul_overflow(rows - 1, pitch, &skipped) && !__builtin_add_overflow(skipped, width, bytes);
}

}  // namespace

bool resolve(Connection& c, const Message& m, uint8_t space, uint64_t place, uint64_t bytes, uint64_t* addr) {
  *addr = place;
  if (space == kDevice) return c.memory().in_device(place, bytes, m.end);
  if (space == kPinned) return c.memory().pinned().contains(place, bytes, m.end);
  const uint64_t chunks_bytes = kChunkBytes * kChunks;
  if (space != kChunk || place > chunks_bytes || bytes > chunks_bytes - place) return false;
  *addr = reinterpret_cast<uint64_t>(c.endpoint().view().chunk(0)) + place;
  return true;
}

namespace {

void copy_rectangle(Connection& c, const Message& m, const wire::COPY_2D_req& r) {
  if (r.chunk_release > kChunks) return c.poison("malformed message: no such chunk");
  hal::QueueRef* queue = c.device().queue_of(r.stream);
  if (!queue) return c.refuse(m, r.stream, kInvalidHandle, r.chunk_release);
  if (r.width_bytes == 0 || r.height == 0) return c.device().nop(*queue, {m.end, r.chunk_release});
  hal::CopyArgs args{
      0, 0, r.dst_pitch, r.src_pitch, r.width_bytes, r.height, r.dst_space == kDevice, r.src_space == kDevice};
  uint64_t dst_bytes, src_bytes;
  if (!extent(r.width_bytes, r.dst_pitch, r.height, &dst_bytes) ||
      !extent(r.width_bytes, r.src_pitch, r.height, &src_bytes) ||
      !resolve(c, m, r.dst_space, r.dst, dst_bytes, &args.dst) ||
      !resolve(c, m, r.src_space, r.src, src_bytes, &args.src))
    return c.refuse(m, r.stream, kInvalidValue, r.chunk_release);
  Counters& n = c.counting();
  const uint64_t bytes = r.width_bytes * r.height;
  Counters::add(args.dst_device ? (args.src_device ? n.d2d_bytes : n.h2d_bytes) : n.d2h_bytes, bytes);
  c.device().copy(*queue, {m.end, r.chunk_release}, args);
}

void release_all(Connection& c, const std::vector<Range>& ranges) {
  for (const Range& range : ranges) c.device().release(range.addr, range.bytes);
}

// What was freed behind unfinished work keeps its memory until that is done, and the client's account knows nothing of it: a
// job that nearly fills its GPU and runs ahead has more there than it has. So where the device is full, what was freed is
// waited for, as a stream-ordered allocation natively comes behind the work of its stream. again: tries it; done: is there
// nothing more to wait for?
template <class Again, class Done>
void wait_for_freed(Connection& c, Again again, Done done) {
  using Clock = std::chrono::steady_clock;
  for (const auto until = Clock::now() + kRoomPatience;
       !done() && (c.shares() || c.memory().device().has_freed()) && Clock::now() < until;) {
    if (c.forget_freed(true))
      again();
    else if (c.shares())
      c.wait_for_others(), again();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace

void mem_alloc(Connection& c, const Message& m) {
  const auto& r = m.as<wire::MEM_ALLOC_req>();
  // This GPU may have less room than the one before. Not in the restore, which leaves the client's segment as it was.
  if (c.memory().restored_unused()) c.endpoint().lifeline().want_credit();
  if (!c.memory().use_credit(r.bytes, std::min(ClientMemory::kOwedStep, c.credit_most())))
    return c.fail(m, kOutOfMemory);
  if (r.addr >= c.memory().globals_begin() || r.bytes > c.memory().globals_begin() - r.addr)
    return c.fail(m, kInvalidValue);
  std::vector<Range> reused;
  c.memory().set_kept(r.kept_bytes);
  const auto answer = c.memory().allocate(r.addr, r.bytes, r.flags, &reused);
  for (const Range& range : reused) c.device().reuse(range.addr, range.bytes);
  if (answer != MemoryMirror::Answer::kOk) return c.fail(m, kInvalidValue);
  Status s;
  const auto commit = [&] { s = c.device().commit(r.addr, r.bytes, r.flags & kStableFlag); };
  commit();
  // Where only the account limits memory, waiting gives none.
  if (s.code() == kOutOfMemory && c.device().room_bytes(0) != UINT64_MAX)
    wait_for_freed(c, commit, [&] { return s.code() != kOutOfMemory; });
  if (s.code() == kOutOfMemory) return c.lost_memory(r.bytes, s);
  if (!s.ok()) c.fail(m, s.code());
}

void mem_free(Connection& c, const Message& m) {
  const auto& r = m.as<wire::MEM_FREE_req>();
  if (r.addr >= c.memory().globals_begin()) return c.fail(m, kInvalidValue);
  const bool idle = c.device().idle();
  const uint64_t oldest = c.memory().device().has_freed() ? c.device().oldest_pending() : 0;
  std::vector<Range> forgotten;
  Range freed;
  c.memory().set_kept(r.kept_bytes);
  const auto answer = c.memory().free(r.addr, m.end, !idle, oldest, &freed, &forgotten);
  if (answer != MemoryMirror::Answer::kOk) return release_all(c, forgotten), c.fail(m, kInvalidValue);
  c.state().texture_memory_gone(freed.addr, freed.bytes);
  c.device().freed(freed.addr, freed.bytes, m.end);
  if (idle) c.device().release(freed.addr, freed.bytes);
  release_all(c, forgotten);
}

void mem_credit(Connection& c, const Message& m) {
  const auto& r = m.as<wire::MEM_CREDIT_req>();
  uint64_t room = 0;
  std::optional<uint64_t> granted;
  const auto take = [&] {
    room = c.device().room_bytes(c.promised_bytes());
    granted = c.memory().take_credit(std::min(r.bytes, c.credit_most()), r.minimum, room);
  };
  take();
  if (!granted) {  // what the device keeps for later is the job's first
    c.device().trim();
    take();
  }
  const auto would_do = [&] { return room < r.minimum && r.minimum - room <= c.memory().device().freed_bytes(); };
  if (!granted) wait_for_freed(c, take, [&] { return granted || !would_do(); });
  if (!granted) return c.reply(m, kOutOfMemory);
  c.device().reserve(c.promised_bytes());
  const wire::MEM_CREDIT_rep rep{*granted};
  c.reply(m, kOk, &rep, sizeof rep);
  DP_LOG(kDebug, kMemory, c.number(), "credit +%lu of %lu wanted, %lu held", static_cast<unsigned long>(*granted),
         static_cast<unsigned long>(r.bytes), static_cast<unsigned long>(c.memory().credit_bytes()));
}

void mem_credit_return(Connection& c, const Message& m) {
  const auto& r = m.as<wire::MEM_CREDIT_RETURN_req>();
  if (!c.memory().return_credit(r.bytes)) return c.fail(m, kInvalidValue);
  c.device().reserve(c.promised_bytes());
}

constexpr size_t kMostHolders = 512;  // bytes of their names

void mem_info(Connection& c, const Message& m) {
  c.forget_freed(false);
  const uint64_t room = c.device().room_bytes(c.promised_bytes());
  const uint64_t free = c.memory().free_bytes(room);
  const wire::MEM_INFO_rep rep{free, c.memory().total_bytes(), c.spare_bytes(free)};
  std::string answer(reinterpret_cast<const char*>(&rep), sizeof rep);
  if (m.as<wire::MEM_INFO_req>().holders) answer += c.memory().other_holders().substr(0, kMostHolders);
  c.reply(m, kOk, answer.data(), answer.size());
}

void copy(Connection& c, const Message& m) {
  const auto& r = m.as<wire::COPY_req>();
  copy_rectangle(c, m, {r.stream, r.dst, r.src, 0, 0, r.bytes, 1, r.dst_space, r.src_space, 0, r.chunk_release});
}

void copy_2d(Connection& c, const Message& m) { copy_rectangle(c, m, m.as<wire::COPY_2D_req>()); }

void memset(Connection& c, const Message& m) {
  const auto& r = m.as<wire::MEMSET_req>();
  hal::QueueRef* queue = c.device().queue_of(r.stream);
  if (!queue) return c.refuse(m, r.stream, kInvalidHandle);
  if (r.count == 0 || r.rows == 0) return c.device().nop(*queue, {m.end, 0});
  uint64_t width_bytes, bytes;
  if ((r.width != 1 && r.width != 2 && r.width != 4) || r.dst % r.width != 0 ||
      (r.rows > 1 && r.pitch % r.width != 0) || __builtin_mul_overflow(r.count, uint64_t{r.width}, &width_bytes) ||
      !extent(width_bytes, r.pitch, r.rows, &bytes) ||
      !(c.memory().in_device(r.dst, bytes, m.end) || c.memory().pinned().contains(r.dst, bytes, m.end)))
    return c.refuse(m, r.stream, kInvalidValue);
  Counters::add(c.counting().memset_bytes, width_bytes * r.rows);
  c.device().memset(*queue, {m.end, 0}, {r.dst, r.pitch, r.count, r.rows, r.value, r.width});
}

}  // namespace devproxy::server::memory
