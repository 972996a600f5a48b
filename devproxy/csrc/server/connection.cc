#include "devproxy/csrc/server/connection.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <climits>
#include <cstdio>
#include <cstring>

#include "devproxy/csrc/base/log.h"
#include "devproxy/csrc/server/crash.h"
#include "devproxy/csrc/transport/futex.h"

namespace devproxy::server {

namespace {

int make_file(const std::string& path) {
  unlink(path.c_str());  // left by a server that was killed; names are ours alone
  return ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
}

}  // namespace

Connection::Connection(ServerParts& parts, const Peer& peer, uint32_t slot)
    : parts_(parts),
      peer_(peer),
      slot_(slot),
      device_(*parts.device),
      memory_(slot, *parts.ledger, parts.live, counters_),
      windows_(parts.job_dir, slot) {
  const std::string stem = parts_.job_dir + "/gpu" + std::to_string(parts_.gpu) + "-" + std::to_string(peer_.number);
  segment_path_ = stem + ".seg";
  pinned_path_ = stem + ".pinned";
  link_path_ = stem + ".link";
}

std::unique_ptr<Connection> Connection::make(ServerParts& parts, const Peer& peer, AttachReply* reply) {
  const auto slot = parts.slots->take(peer.wanted_slot);
  if (!slot) {
    reply->status = AttachStatus::kNoSlot;
    if (peer.wanted_slot == SlotTable::kAny)
      std::snprintf(reply->text, sizeof reply->text, "all %u process slots of this job are taken", kMaxSlots);
    else
      std::snprintf(reply->text, sizeof reply->text, "process slot %u of this job is not free", peer.wanted_slot);
    return nullptr;
  }
  std::unique_ptr<Connection> connection(new Connection(parts, peer, *slot));
  Status status = connection->make_files();
  if (status.ok()) status = connection->open_files();
  if (status.ok()) {
    ControlPage* control = connection->view_.control();
    control->magic = kSegmentMagic;
    control->slot = *slot;
    std::memcpy(control->abi_id, wire::kAbiId, sizeof control->abi_id);
    control->server_state.store(static_cast<uint32_t>(ServerState::kRunning), std::memory_order_release);
    status = connection->open_memory();
  }
  if (!status.ok()) {
    reply->status = AttachStatus::kNoMemory;
    std::snprintf(reply->text, sizeof reply->text, "%s", status.text().c_str());
    return nullptr;
  }
  connection->own();
  connection->fill_reply(reply);
  return connection;
}

namespace {

struct Closer {
  int fd;
  ~Closer() { close(fd); }
};

}  // namespace

Status Connection::make_files() {
  const int segment = make_file(segment_path_);
  if (segment < 0) return Status::from_errno(kOutOfMemory, "making " + segment_path_);
  const Closer close_segment{segment};
  // The pages of everything but the chunks now: on a full /dev/shm this is an error, later it would be a SIGBUS.
  const int no_space = ftruncate(segment, kSegmentBytes) != 0 ? errno : posix_fallocate(segment, 0, kChunksOffset);
  if (no_space) {
    errno = no_space;
    return Status::from_errno(kOutOfMemory, "making the shared segment in " + parts_.job_dir +
                                                " (make /dev/shm larger; in a container --shm-size)");
  }
  const int pinned = make_file(pinned_path_);
  if (pinned < 0) return Status::from_errno(kOutOfMemory, "making " + pinned_path_);
  const Closer close_pinned{pinned};
  if (ftruncate(pinned, static_cast<off_t>(kPinnedBytes)) != 0)
    return Status::from_errno(kOutOfMemory, "sizing the pinned window");
  unlink(link_path_.c_str());
  if (mkfifo(link_path_.c_str(), 0600) != 0) return Status::from_errno(kOutOfMemory, "making " + link_path_);
  return {};
}

Status Connection::open_files() {
  const int segment = ::open(segment_path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (segment < 0) return Status::from_errno(kFileNotFound, "opening " + segment_path_);
  const Closer close_segment{segment};
  struct stat info;
  if (fstat(segment, &info) != 0 || static_cast<uint64_t>(info.st_size) != kSegmentBytes)
    return {kInvalidValue, segment_path_ + " has another size than a segment of this build"};
  if (!view_.map(segment)) return Status::from_errno(kOutOfMemory, "mapping the shared segment");
  lifeline_ = std::make_unique<Lifeline>(view_);

  if (Status s = map_window(pinned_path_, pinned_begin()); !s.ok()) return s;
  pinned_mapped_ = true;

  // Non-blocking: no writer is awaited. poll() says POLLHUP only when a writer has been there since (pipe(7); the
  // kernel compares the count of writers at open), so before the client opens its end the link is quiet.
  link_ = ::open(link_path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
  if (link_ < 0) return Status::from_errno(kFileNotFound, "opening " + link_path_);
  return {};
}

Status Connection::open_memory() {
  Status opened =
      device_.open({memory_.device_begin(), kDeviceBytes, pinned_begin(), kPinnedBytes, peer_.framework}, *this);
  if (!opened.ok()) return opened;
  state_.replay().root(kLegacyStream);
  return {};
}

void Connection::own() {
  keep_files_ = false;
  parts_.slots->adopt(slot_);
  register_for_crash(slot_, lifeline_.get(), segment_path_.c_str(), pinned_path_.c_str(), link_path_.c_str());
}

void Connection::fill_reply(AttachReply* reply) const {
  reply->status = AttachStatus::kOk;
  reply->slot = slot_;
  reply->flags = device_.caps().keeps_host_pages ? kKeepsHostPages : 0;
  auto name = [](const std::string& path, auto& to) {
    std::snprintf(to, sizeof to, "%s", path.substr(path.rfind('/') + 1).c_str());
  };
  name(segment_path_, reply->segment_name);
  name(pinned_path_, reply->pinned_name);
  name(link_path_, reply->link_name);
  const hal::Properties& from = device_.properties();
  DeviceProps& to = reply->props;
  std::snprintf(to.name, sizeof to.name, "%s", from.name.c_str());
  std::copy(from.uuid.begin(), from.uuid.end(), to.uuid);
  to.total_bytes = from.total_bytes;
  to.major = from.major;
  to.minor = from.minor;
  to.pci_domain = from.pci_domain;
  to.pci_bus = from.pci_bus;
  to.pci_device = from.pci_device;
  std::copy(from.attributes.begin(), from.attributes.end(), to.attributes);
}

void Connection::start() {
  thread_ = std::thread([this] { run(); });
}

void Connection::request_stop() {
  attention_.fetch_or(kStop, std::memory_order_seq_cst);
  host_functions_.look_again();
  {
    std::lock_guard lock(park_mu_);
    park_wake_.notify_all();
  }
  call_dispatch_thread();
}

// The dispatch thread looks at attention_ at least every 100 ms; this makes it look now.
void Connection::call_dispatch_thread() {
  if (finished() || !view_.mapped()) return;
  view_.control()->doorbell.sleeping.store(0, std::memory_order_relaxed);
  futex_wake(&view_.control()->doorbell.sleeping, 1);
}

void Connection::request_cut(uint64_t until_us) {
  {
    std::lock_guard lock(park_mu_);
    cut_number_++;
  }
  resumed_ = false;
  cut_until_us_.store(until_us, std::memory_order_relaxed);
  cut_asked_us_.store(now_us(), std::memory_order_relaxed);
  attention_.fetch_or(kCut, std::memory_order_seq_cst);
  call_dispatch_thread();
}

void Connection::resume() {
  resumed_ = true;
  {
    std::lock_guard lock(park_mu_);
    attention_.fetch_and(~kCut, std::memory_order_seq_cst);
    park_wake_.notify_all();
  }
}

void Connection::join() {
  if (thread_.joinable()) thread_.join();
}

void Connection::remove_files() const {
  if (keep_files_) return;
  if (!segment_path_.empty()) unlink(segment_path_.c_str());
  if (!pinned_path_.empty()) unlink(pinned_path_.c_str());
  if (!link_path_.empty()) unlink(link_path_.c_str());
}

// Gives everything back; also what a half-made connection has.
void Connection::tear_down() {
  if (device_.is_open()) device_.stop();
  state_.clear();
  device_.close();
  forget_for_crash(slot_);
  memory_.give_all();
  remove_files();
  if (pinned_mapped_) unmap_window(pinned_begin());
  pinned_mapped_ = false;
  windows_.close();
  if (!keep_files_) parts_.slots->give(slot_);
}

Connection::~Connection() {
  if (thread_.joinable()) request_stop();  // a restore that failed after this client was back
  join();
  if (!finished()) tear_down();
  if (link_ >= 0) close(link_);
  view_.unmap();
}

// -- for handlers ---------------------------------------------------------------------------------------------------

void Connection::reply(const Message& message, int32_t status, const void* data, size_t bytes) {
  answered_ = true;
  if (message.seq == 0) {
    if (state_.replaying().on) state_.replaying().status = status;
    return;
  }
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

void Connection::fail(const Message& message, int32_t code) {
  DP_LOG(kDebug, kConnection, number(), "%s fails late with %d", message.info->name, code);
  if (message.seq || state_.replaying().on)
    return reply(message, code);  // a thread's late error is the job's, not a replay's
  int32_t none = 0;
  view_.replies()[message.slot].late_error.compare_exchange_strong(none, code, std::memory_order_release);
}

void Connection::fail(const Message& message, const Status& why) {
  DP_LOG(kWarn, kDevice, number(), "%s: %s", message.info->name, why.text().c_str());
  if (message.seq) return reply(message, why.code(), why.text().c_str(), why.text().size() + 1);
  fail(message, why.code());
}

void Connection::refuse(const Message& message, VHandle stream, int32_t code, uint32_t chunk_tag) {
  fail(message, code);
  // Also a command on a stream that does not exist completes, or somebody would wait for it. Where its index now
  // belongs to another stream, it completes in that one's order.
  if (const hal::QueueRef* queue = device_.queue_at(stream.index()))
    return device_.nop(*queue, {message.end, chunk_tag});
  if (chunk_tag) lifeline_->release_chunk(chunk_tag - 1);
  if (stream.index() < kStreams) lifeline_->complete(stream.index(), message.end);
}

void Connection::poison(const char* text) {
  if (poisoned_) return;
  poisoned_ = true;
  DP_LOG(kError, kConnection, number(), "pid=%u poisoned: %s", peer_.pid, text);
  lifeline_->fault(kUnknown, text);
  lifeline_->end(ServerState::kPoisoned);
  // What waits in streams completes unexecuted: nobody will answer a host function any more.
  if (device_.is_open()) device_.restore_fault(kUnknown);
  host_functions_.look_again();
}

std::vector<uint8_t> Connection::take_bulk(const Message& message) {
  if (message.bulk == gathered_.data()) return std::move(gathered_);
  return {message.bulk, message.bulk + message.bulk_bytes};
}

std::string Connection::undumpable() const {
  const std::string who = "client " + std::to_string(number()) + " (pid " + std::to_string(peer_.pid) + "): ";
  if (faulted() && !device_.caps().reads_after_fault)
    return who + "its GPU context has failed with error " + std::to_string(lifeline_->fault_code()) +
           ", and the driver reads no memory of a failed context; that process must end before a checkpoint";
  const std::string why = state_.obstacles().text();
  return why.empty() ? why : who + why;
}

// -- hal::SpaceOwner ------------------------------------------------------------------------------------------------

void Connection::on_thread_start() noexcept { prepare_thread_for_crash(); }

void Connection::on_complete(uint32_t queue_index, uint64_t position, uint32_t tag) noexcept {
  if (tag) lifeline_->release_chunk(tag - 1);
  lifeline_->complete(queue_index, position);
}

void Connection::on_fault(int32_t result, const char* text) noexcept {
  DP_LOG(kWarn, kLaunch, number(), "pid=%u execution fault %d: %s", peer_.pid, result, text);
  lifeline_->fault(result, text);
  // The client posts nothing more, so no host function will be said to be done: those who wait for one go on.
  host_functions_.look_again();
}

void Connection::on_refused(uint32_t caller, int32_t result, const char* text) noexcept {
  DP_LOG(kWarn, kLaunch, number(), "pid=%u the device refused a command: %s", peer_.pid, text);
  int32_t none = 0;
  if (caller < kReplySlots)
    view_.replies()[caller].late_error.compare_exchange_strong(none, result, std::memory_order_release);
}

bool Connection::range_live(uint64_t addr, uint64_t bytes, uint64_t position, bool on_submitter) noexcept {
  return memory_.live(addr, bytes, position, !on_submitter);
}

void Connection::host_function(uint64_t token) noexcept {
  HostFuncEntry& entry = view_.control()->hostfuncs[token % kHostFuncs];
  // The entry is taken while the client has not yet looked at the function of kHostFuncs tokens ago: rare, so polled.
  for (uint64_t empty = 0; !entry.token.compare_exchange_weak(empty, token, std::memory_order_release); empty = 0) {
    if (stopping() || lifeline_->faulted()) return;
    usleep(100);
  }
  view_.control()->hostfunc_seq.fetch_add(1, std::memory_order_release);
  futex_wake(&view_.control()->hostfunc_seq, INT_MAX);
  host_functions_.wait(token, [this] { return stopping() || lifeline_->faulted(); });
}

}  // namespace devproxy::server
