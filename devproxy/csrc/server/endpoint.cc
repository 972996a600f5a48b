// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/endpoint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <utility>

#include "devproxy/csrc/server/crash.h"
#include "devproxy/csrc/server/state_files.h"
#include "devproxy/csrc/server/windows.h"

#include "wire.gen.h"

namespace devproxy::server {

namespace {

constexpr int kNew = O_RDWR | O_CREAT | O_EXCL;

}  // namespace

Endpoint::~Endpoint() {
  if (link_ >= 0) close(link_);
  view_.unmap();
}

Status Endpoint::make_files() {
  // Left by a server that was killed; names are ours alone.
  for (const std::string& path : {segment_path_, pinned_path_, link_path_}) unlink(path.c_str());
  const File segment(segment_path_, kNew);
  if (segment.fd < 0) return Status::from_errno(kOutOfMemory, "making " + segment_path_);
  // The pages of everything but the chunks now: on a full /dev/shm this is an error, later it would be a SIGBUS.
  const int no_space =
      ftruncate(segment.fd, kSegmentBytes) != 0 ? errno : posix_fallocate(segment.fd, 0, kChunksOffset);
  if (no_space) {
    errno = no_space;
    return Status::from_errno(kOutOfMemory, "making the shared segment in " +
                                                segment_path_.substr(0, segment_path_.rfind('/')) +
                                                " (make /dev/shm larger; in a container --shm-size)");
  }
  const File pinned(pinned_path_, kNew);
  if (pinned.fd < 0) return Status::from_errno(kOutOfMemory, "making " + pinned_path_);
  if (ftruncate(pinned.fd, static_cast<off_t>(kPinnedBytes)) != 0)
    return Status::from_errno(kOutOfMemory, "sizing the pinned window");
  if (mkfifo(link_path_.c_str(), 0600) != 0) return Status::from_errno(kOutOfMemory, "making " + link_path_);
  return {};
}

Status Endpoint::open_files() {
  const File segment(segment_path_, O_RDWR);
  if (segment.fd < 0) return Status::from_errno(kFileNotFound, "opening " + segment_path_);
  struct stat info;
  if (fstat(segment.fd, &info) != 0 || static_cast<uint64_t>(info.st_size) != kSegmentBytes)
    return {kInvalidValue, segment_path_ + " has another size than a segment of this build"};
  if (!view_.map(segment.fd)) return Status::from_errno(kOutOfMemory, "mapping the shared segment");
  lifeline_ = std::make_unique<Lifeline>(view_);

  if (Status s = map_window(pinned_path_, pinned_begin()); !s.ok()) return s;
  pinned_mapped_ = true;

  // Non-blocking: no writer is awaited. poll() says POLLHUP only when a writer has been there since (pipe(7); the
  // kernel compares the count of writers at open), so before the client opens its end the link is quiet.
  link_ = ::open(link_path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
  if (link_ < 0) return Status::from_errno(kFileNotFound, "opening " + link_path_);
  return {};
}

void Endpoint::begin() {
  ControlPage* control = view_.control();
  control->magic = kSegmentMagic;
  control->slot = slot_;
  std::memcpy(control->abi_id, wire::kAbiId, sizeof control->abi_id);
  control->server_state.store(static_cast<uint32_t>(ServerState::kRunning), std::memory_order_release);
}

Status Endpoint::go_on(uint64_t position) {
  view_.ring().own();
  if (view_.control()->magic != kSegmentMagic || view_.ring().head() != position)
    return {kInvalidImage, "the segment " + segment_path_ + " does not belong to this state"};
  return {};
}

void Endpoint::say_habits(bool wants_awaited, bool splices) {
  const auto say = [](std::atomic<uint32_t>& said, uint32_t now) {
    if (said.load(std::memory_order_relaxed) != now) said.store(now, std::memory_order_relaxed);
  };
  say(view_.control()->wants_awaited, wants_awaited);
  say(view_.control()->splices, splices);
}

bool Endpoint::client_went() const {
  char byte;
  return ::read(link_, &byte, 1) == 0;
}

void Endpoint::own() {
  keep_files_ = false;
  register_for_crash(slot_, lifeline_.get(), segment_path_.c_str(), pinned_path_.c_str(), link_path_.c_str());
}

void Endpoint::remove_files() const {
  if (keep_files_) return;
  for (const std::string& path : {segment_path_, pinned_path_, link_path_}) unlink(path.c_str());
}

void Endpoint::give_back() {
  forget_for_crash(slot_);
  remove_files();
  if (pinned_mapped_) unmap_window(pinned_begin());
  pinned_mapped_ = false;
}

void Endpoint::name_files(AttachReply* reply) const {
  auto name = [](const std::string& path, auto& to) {
    std::snprintf(to, sizeof to, "%s", path.substr(path.rfind('/') + 1).c_str());
  };
  name(segment_path_, reply->segment_name);
  name(pinned_path_, reply->pinned_name);
  name(link_path_, reply->link_name);
}

void Endpoint::wake_dispatch_thread() {
  if (!view_.mapped()) return;
  view_.control()->doorbell.sleeping.store(0, std::memory_order_relaxed);
  futex_wake(&view_.control()->doorbell.sleeping, 1);
}

const char* Endpoint::read(uint32_t record_bytes, Message* message) {
  const CommandRing& ring = view_.ring();
  message->slot = kReplySlots;
  if (!ring.valid_length(record_bytes)) return "malformed message: impossible record length";
  const uint8_t* record = ring.at(ring.head());
  struct {
    uint16_t opcode, slot;
    uint32_t payload_bytes, seq;
  } head;
  static_assert(sizeof head == sizeof(MsgHeader) - offsetof(MsgHeader, opcode));
  std::memcpy(&head, record + offsetof(MsgHeader, opcode), sizeof head);
  if (head.slot >= kReplySlots) return "malformed message: no such reply slot";
  woke_caller_ = false;
  message->info = wire::op_info(head.opcode);
  message->end = ring.head() + record_bytes;
  message->slot = head.slot;
  message->seq = head.seq;
  if (!message->info) return "malformed message: unknown opcode";
  if (head.payload_bytes > record_bytes - sizeof(MsgHeader)) return "malformed message: payload longer than its record";
  if (head.payload_bytes < message->info->req_bytes) return "malformed message: request too short";
  // Always the longest request: a constant length is one move, and the ring is mapped twice, so it is all there.
  std::memcpy(message->request, record + sizeof(MsgHeader), kMaxRequestBytes);
  if (message->info->has_bulk && !fetch_bulk(*message, record + sizeof(MsgHeader) + message->info->req_bytes,
                                             head.payload_bytes - message->info->req_bytes))
    return "malformed message: bulk data does not fit its description";
  return nullptr;
}

// Copies the bulk data out of shared memory and frees its chunks.
bool Endpoint::fetch_bulk(Message& message, const uint8_t* inline_bytes, uint32_t inline_length) {
  struct {
    uint32_t bytes, chunks;
  } bulk;
  std::memcpy(&bulk, message.request + message.info->bulk_offset, sizeof bulk);
  message.bulk_bytes = bulk.bytes;
  if (bulk.chunks == 0) {
    if (bulk.bytes > inline_length || bulk.bytes > kMaxInlineBytes) return false;
    std::memcpy(inline_, inline_bytes, bulk.bytes);
    message.bulk = inline_;
    return true;
  }
  if (bulk.chunks > kChunks || bulk.chunks * sizeof(uint16_t) > inline_length) return false;
  if (bulk.bytes > bulk.chunks * kChunkBytes || bulk.bytes <= (bulk.chunks - 1) * kChunkBytes) return false;
  uint16_t index[kChunks];
  std::memcpy(index, inline_bytes, bulk.chunks * sizeof(uint16_t));
  for (uint32_t i = 0; i < bulk.chunks; i++)
    if (index[i] >= kChunks) return false;
  gathered_.resize(bulk.bytes);
  for (uint32_t i = 0; i < bulk.chunks; i++) {
    const size_t at = i * kChunkBytes;
    std::memcpy(gathered_.data() + at, view_.chunk(index[i]), std::min(kChunkBytes, bulk.bytes - at));
    lifeline_->release_chunk(index[i]);
  }
  message.bulk = gathered_.data();
  return true;
}

std::vector<uint8_t> Endpoint::take_bulk(const Message& message) {
  if (message.bulk == gathered_.data()) return std::move(gathered_);
  return {message.bulk, message.bulk + message.bulk_bytes};
}

void Endpoint::answer(const Message& message, int32_t status, const void* data, size_t bytes) {
  ReplySlot& slot = view_.replies()[message.slot];
  bytes = std::min(bytes, sizeof slot.data);
  slot.status = status;
  slot.bytes = static_cast<uint32_t>(bytes);
  if (bytes) std::memcpy(slot.data, data, bytes);
  slot.seq.store(message.seq, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (slot.waiting.load(std::memory_order_relaxed)) {
    woke_caller_ = true;
    futex_wake(&slot.seq, INT_MAX);
  }
}

}  // namespace devproxy::server
