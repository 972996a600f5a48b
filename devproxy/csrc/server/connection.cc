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

constexpr uint32_t kNonBlockingFlag = 1;  // cuda.h: CU_STREAM_NON_BLOCKING

int make_file(const std::string& path) {
  unlink(path.c_str());  // left by a server that was killed; names are ours alone
  return ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
}

}  // namespace

Connection::Connection(ServerParts& parts, const Peer& peer) : parts_(parts), peer_(peer) {}

std::unique_ptr<Connection> Connection::make(ServerParts& parts, const Peer& peer, AttachReply* reply) {
  std::unique_ptr<Connection> connection(new Connection(parts, peer));
  const auto slot = parts.slots->take(peer.wanted_slot);
  if (!slot) {
    reply->status = AttachStatus::kNoSlot;
    if (peer.wanted_slot == SlotTable::kAny)
      std::snprintf(reply->text, sizeof reply->text, "all %u process slots of this job are taken", kMaxSlots);
    else
      std::snprintf(reply->text, sizeof reply->text, "process slot %u of this job is not free", peer.wanted_slot);
    return nullptr;
  }
  connection->slot_ = *slot;
  connection->name_files();
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

constexpr uint64_t kWindowAgainUs = 5'000'000;

// Maps a window's file at its address. A process that ended may still have it mapped here, by the connection to this
// server that looks for its end by itself: that passes.
Status map_pinned(int file, uint64_t begin) {
  void* const want = reinterpret_cast<void*>(begin);
  const uint64_t until = now_us() + kWindowAgainUs;
  for (;;) {
    void* const got =
        mmap(want, kPinnedBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE, file, 0);
    if (got == want) break;
    const Status why = Status::from_errno(kOutOfMemory, "mapping the pinned window at its fixed address");
    const bool taken = got != MAP_FAILED || errno == EEXIST;
    if (got != MAP_FAILED) munmap(got, kPinnedBytes);
    if (!taken || now_us() > until) return why;
    usleep(10'000);
  }
  madvise(want, kPinnedBytes, MADV_DONTDUMP);
  return {};
}

}  // namespace

void Connection::name_files() {
  const std::string stem = parts_.job_dir + "/gpu" + std::to_string(parts_.gpu) + "-" + std::to_string(peer_.number);
  segment_path_ = stem + ".seg";
  pinned_path_ = stem + ".pinned";
  link_path_ = stem + ".link";
}

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

  const int pinned = ::open(pinned_path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (pinned < 0) return Status::from_errno(kFileNotFound, "opening " + pinned_path_);
  const Closer close_pinned{pinned};
  if (Status s = map_pinned(pinned, pinned_begin()); !s.ok()) return s;
  pinned_mapped_ = true;

  // Non-blocking: no writer is awaited. poll() says POLLHUP only when a writer has been there since (pipe(7); the
  // kernel compares the count of writers at open), so before the client opens its end the link is quiet.
  link_ = ::open(link_path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
  if (link_ < 0) return Status::from_errno(kFileNotFound, "opening " + link_path_);
  return {};
}

Status Connection::open_memory() {
  auto space =
      parts_.device->open_space({device_begin(), kDeviceBytes, pinned_begin(), kPinnedBytes, peer_.framework}, *this);
  if (!space.ok()) return std::move(space).status();
  space_ = std::move(*space);
  streams_[0] = {kLegacyStream, space_->create_queue(hal::QueueKind::kLegacy, 0, 0)};
  replay.root(kLegacyStream);
  device_mirror = MemoryMirror(device_begin(), device_begin() + kDeviceBytes);
  pinned_mirror = MemoryMirror(kRangeBase, range_base(kMaxSlots));
  return {};
}

// Precondition: it is not mapped.
Status Connection::map_window(const Window& w) const {
  const std::string path = parts_.job_dir + "/gpu" + std::to_string(w.gpu) + "-" + std::to_string(w.number) + ".pinned";
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (file < 0) return Status::from_errno(kFileNotFound, "opening " + path);
  const Closer close_file{file};
  struct stat info;
  if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode) || static_cast<uint64_t>(info.st_size) != kPinnedBytes)
    return {kInvalidValue, path + " is no pinned window of this build"};
  if (Status s = map_pinned(file, w.begin()); !s.ok()) return std::move(s).with(path);
  space_->host_window(w.begin(), kPinnedBytes);
  return {};
}

Status Connection::open_window(Window window) {
  if (window.slot >= kMaxSlots || window.slot == slot_) return {kInvalidValue, "no other window has such a slot"};
  for (const Window& w : windows_)
    if (w.slot == window.slot)
      return w.gpu == window.gpu && w.number == window.number
                 ? Status()
                 : Status(kInvalidValue, "another window of this client has that slot");
  if (Status s = map_window(window); !s.ok()) return s;
  window.mapped = true;
  windows_.push_back(window);
  return {};
}

bool Connection::in_a_window(uint64_t addr, uint64_t bytes) const {
  if (in_own_window(addr, bytes)) return true;
  return std::any_of(windows_.begin(), windows_.end(), [&](const Window& w) { return w.holds(addr, bytes); });
}

// The other servers of the job have their windows again only when all of them go on.
bool Connection::open_restored_windows() {
  for (Window& w : windows_) {
    if (w.mapped) continue;
    if (Status s = map_window(w); !s.ok()) {
      poison(("restoring client " + std::to_string(number()) + ": " + s.text()).c_str());
      return false;
    }
    w.mapped = true;
    pinned_mirror.for_each_live([&](uint64_t addr, uint64_t bytes, uint32_t) {
      if (w.holds(addr, bytes)) space_->host_allocated(addr, bytes);
    });
  }
  return true;
}

void Connection::own() {
  keep_files_ = false;
  parts_.slots->adopt(slot_);
  register_for_crash(slot_, lifeline_.get(), segment_path_.c_str(), pinned_path_.c_str(), link_path_.c_str());
}

void Connection::fill_reply(AttachReply* reply) const {
  reply->status = AttachStatus::kOk;
  reply->slot = slot_;
  reply->flags = parts_.device->caps().keeps_host_pages ? kKeepsHostPages : 0;
  auto name = [](const std::string& path, auto& to) {
    std::snprintf(to, sizeof to, "%s", path.substr(path.rfind('/') + 1).c_str());
  };
  name(segment_path_, reply->segment_name);
  name(pinned_path_, reply->pinned_name);
  name(link_path_, reply->link_name);
  const hal::Properties& from = parts_.device->properties();
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
  {
    std::lock_guard lock(host_mu_);
    host_wake_.notify_all();
  }
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
  if (space_) space_->stop();
  graphs.clear();
  textures.clear();
  arrays.clear();
  functions.clear();
  modules.clear();
  events.clear();
  streams_.clear();
  space_.reset();
  forget_for_crash(slot_);
  if (const uint64_t taken = credit_bytes + globals_bytes + arrays_bytes) parts_.ledger->give(taken);
  credit_bytes = globals_bytes = arrays_bytes = 0;
  count_memory(-static_cast<int64_t>(counters_.live_bytes.load(std::memory_order_relaxed)));
  remove_files();
  if (pinned_mapped_) munmap(reinterpret_cast<void*>(pinned_begin()), kPinnedBytes);
  pinned_mapped_ = false;
  for (const Window& w : windows_)
    if (w.mapped) munmap(reinterpret_cast<void*>(w.begin()), kPinnedBytes);
  windows_.clear();
  if (slot_ != SlotTable::kAny && !keep_files_) parts_.slots->give(slot_);
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
    if (replaying_) replay_status_ = status;
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
  if (message.seq || replaying_) return reply(message, code);  // a thread's late error is the job's, not a replay's
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
  if (stream.index() < kStreams && streams_[stream.index()].queue)
    return space_->nop(streams_[stream.index()].queue, {message.end, chunk_tag});
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
  if (space_) space_->restore_fault(kUnknown);
  end_host_functions();
}

hal::QueueRef* Connection::queue_of(VHandle stream) {
  if (stream.index() >= kStreams) return nullptr;
  Stream& entry = streams_[stream.index()];
  return entry.queue && entry.handle == stream ? &entry.queue : nullptr;
}

bool Connection::create_stream(VHandle stream, uint32_t flags, int32_t priority) {
  if (stream.kind() != HandleKind::kStream || stream.index() == 0 || stream.index() >= kStreams) return false;
  Stream& entry = streams_[stream.index()];
  if (entry.queue) return false;
  const auto kind = flags & kNonBlockingFlag ? hal::QueueKind::kNonBlocking : hal::QueueKind::kBlocking;
  entry = {stream, space_->create_queue(kind, priority, stream.index())};
  Counters::add(counters_.streams, 1);
  return true;
}

bool Connection::destroy_stream(VHandle stream) {
  if (stream.index() == 0 || !queue_of(stream)) return false;
  space_->destroy_queue(streams_[stream.index()].queue);
  streams_[stream.index()] = {};
  Counters::add(counters_.streams, UINT64_MAX);
  return true;
}

void Connection::count_memory(int64_t change_bytes) {
  const auto change = static_cast<uint64_t>(change_bytes);  // wraps as it should
  const uint64_t live = counters_.live_bytes.load(std::memory_order_relaxed) + change;
  counters_.live_bytes.store(live, std::memory_order_relaxed);
  if (live > counters_.peak_bytes.load(std::memory_order_relaxed))
    counters_.peak_bytes.store(live, std::memory_order_relaxed);
  const uint64_t all = parts_.live_bytes.fetch_add(change, std::memory_order_relaxed) + change;
  uint64_t peak = parts_.peak_bytes.load(std::memory_order_relaxed);
  while (all > peak && !parts_.peak_bytes.compare_exchange_weak(peak, all, std::memory_order_relaxed)) {}
}

void Connection::trace_memory() {
  trace_.changed(client_bytes, [this] {
    counters_.trough_bytes.store(trace_.trough_bytes(), std::memory_order_relaxed);
    counters_.period_us.store(trace_.period_us(), std::memory_order_relaxed);
    return now_us();
  });
}

std::vector<uint8_t> Connection::take_bulk(const Message& message) {
  if (message.bulk == gathered_.data()) return std::move(gathered_);
  return {message.bulk, message.bulk + message.bulk_bytes};
}

void Connection::texture_memory_gone(uint64_t addr, uint64_t bytes) {
  if (textures.size() == 0) return;
  textures.for_each([&](VHandle handle, const TextureObject& t) {
    if (t.bytes && t.addr < addr + bytes && addr < t.addr + t.bytes)
      set_undumpable(handle, "a texture object shows device memory that was freed");
  });
}

bool Connection::in_variable(uint64_t addr, uint64_t bytes) const {
  auto it = variables.upper_bound(addr);
  if (it == variables.begin()) return false;
  --it;
  const uint64_t offset = addr - it->first;
  return offset <= it->second.bytes && bytes <= it->second.bytes - offset;
}

void Connection::set_undumpable(VHandle handle, std::string why) {
  std::lock_guard lock(undumpable_mu_);
  if (why.empty())
    undumpable_.erase(handle);
  else
    undumpable_[handle] = std::move(why);
}

std::string Connection::undumpable() {
  if (faulted() && !parts_.device->caps().reads_after_fault)
    return "client " + std::to_string(number()) + " (pid " + std::to_string(peer_.pid) +
           "): its GPU context has failed with error " + std::to_string(lifeline_->fault_code()) +
           ", and the driver reads no memory of a failed context; that process must end before a checkpoint";
  std::lock_guard lock(undumpable_mu_);
  if (undumpable_.empty()) return {};
  return "client " + std::to_string(number()) + " (pid " + std::to_string(peer_.pid) +
         "): " + undumpable_.begin()->second +
         (undumpable_.size() > 1 ? " (and " + std::to_string(undumpable_.size() - 1) + " more)" : "");
}

bool Connection::add_host_function(uint64_t token) {
  std::lock_guard lock(host_mu_);
  return host_functions_.insert(token).second;
}

bool Connection::finish_host_function(uint64_t token) {
  std::lock_guard lock(host_mu_);
  if (!host_functions_.erase(token)) return false;
  host_wake_.notify_all();
  return true;
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
  end_host_functions();
}

void Connection::on_refused(uint32_t caller, int32_t result, const char* text) noexcept {
  DP_LOG(kWarn, kLaunch, number(), "pid=%u the device refused a command: %s", peer_.pid, text);
  int32_t none = 0;
  if (caller < kReplySlots)
    view_.replies()[caller].late_error.compare_exchange_strong(none, result, std::memory_order_release);
}

// After a fault the client posts nothing more, so no host function will be said to be done: those who wait for one go
// on.
void Connection::end_host_functions() {
  std::lock_guard lock(host_mu_);
  host_wake_.notify_all();
}

size_t Connection::host_functions_out() {
  std::lock_guard lock(host_mu_);
  return host_functions_.size();
}

bool Connection::range_live(uint64_t addr, uint64_t bytes, uint64_t position, bool on_submitter) noexcept {
  auto live = [&] {
    return device_mirror.contains(addr, bytes, position) || pinned_mirror.contains(addr, bytes, position);
  };
  if (on_submitter) return live();
  std::shared_lock lock(mirrors_mu_);
  return live();
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
  std::unique_lock lock(host_mu_);
  host_wake_.wait(lock, [&] { return !host_functions_.contains(token) || stopping() || lifeline_->faulted(); });
}

}  // namespace devproxy::server
