// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/client/attachment.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <string_view>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/csrc/client/log.h"

namespace devproxy::client {

std::atomic<bool> g_framework{false};

namespace {

// On two cores a spinning client steals from the server, so it soon sleeps. But a waker pays about 50 us for the futex
// call on a virtual CPU that has halted: a spin shorter than that lets two sides that answer each other in 1 us fall
// asleep in turn and stay so.
constexpr uint64_t kSpinUs = 60;
constexpr uint64_t kNapUs = 50;                   // with a full ring
constexpr uint64_t kAgainUs = 1000;               // until a thread says again that it waits, where the ring was full
constexpr uint64_t kHintMargin = 128 << 10;       // of the ring that a hint leaves alone
constexpr uint64_t kSleepUs = 100'000;            // between two looks at the link
constexpr int kAttachTimeoutMs = 60'000;          // a server that writes a dump answers nobody meanwhile
constexpr uint64_t kAttachAgainUs = 600'000'000;  // a move of much memory hangs up on newcomers all the while
constexpr uint64_t kListenAgainUs = 10'000'000;   // a successor may be gone before its predecessor listens again

// Spins until done() or for kSpinUs; true when done. Not at all when this thread has just woken the server: sleeping at
// once leaves it this processor, and a server that has to be scheduled is no matter of a spin.
template <class Done>
bool spin(Done done) {
  if (t_state.woke_server) {
    t_state.woke_server = false;
    return done();
  }
  uint64_t until = 0;  // no look at the clock before the first round: an awake server answers within it
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      RealSync::pause();
    }
    const uint64_t now = now_us();
    if (until == 0) until = now + kSpinUs;
    if (now >= until) return done();
  }
}

enum class Asked { kAnswered, kHungUp, kSilent };

// Says hello and reads the answer.
Asked ask(int fd, AttachKind kind, AttachReply* reply) {
  AttachRequest req{kAttachMagic, kind, {}, static_cast<uint32_t>(getpid()), 0xffffffffu};
  memcpy(req.abi_id, wire::kAbiId, sizeof(req.abi_id));
  if (send(fd, &req, sizeof(req), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(req))) return Asked::kHungUp;
  auto* p = reinterpret_cast<uint8_t*>(reply);
  for (size_t left = sizeof(*reply); left;) {
    pollfd pfd{fd, POLLIN, 0};
    const int ready = poll(&pfd, 1, kAttachTimeoutMs);
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return Asked::kSilent;
    const ssize_t n = read(fd, p, left);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Asked::kHungUp;
    p += n;
    left -= static_cast<size_t>(n);
  }
  return reply->magic == kAttachMagic ? Asked::kAnswered : Asked::kSilent;
}

int open_in(const char* job_dir, const char* name, int flags) {
  char path[512];
  const int n = snprintf(path, sizeof(path), "%s/%s", job_dir, name);
  if (n < 0 || static_cast<size_t>(n) >= sizeof(path) || strchr(name, '/')) return errno = ENAMETOOLONG, -1;
  return open(path, flags | O_CLOEXEC);
}

uint64_t coarse_us() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &ts);
  return static_cast<uint64_t>(ts.tv_sec) * 1'000'000 + static_cast<uint64_t>(ts.tv_nsec) / 1000;
}

void hex(const uint8_t* id, char* out) {
  for (int i = 0; i < 8; ++i) snprintf(out + 2 * i, 3, "%02x", id[i]);
}

// What the server of GPU `device` answers. kOk: *reply is a good one, and *connected the socket, which the caller closes. Else a
// result number after one log line that says why.
int32_t say_hello(const char* job_dir, int device, AttachKind kind, AttachReply* reply, int* connected) {
  sockaddr_un addr{};
  addr.sun_family = AF_UNIX;
  const int n = snprintf(addr.sun_path, sizeof(addr.sun_path), "%s/gpu%d.sock", job_dir, device);
  if (n < 0 || static_cast<size_t>(n) >= sizeof(addr.sun_path)) {
    log(Level::kError, "attach: the job folder's name is too long for a socket: %s", job_dir);
    return kDeviceUnavailable;
  }
  int fd = -1;
  // A server that hands its clients over hangs up on whoever it has not answered yet: its successor listens already.
  const uint64_t until = now_us() + kAttachAgainUs;
  uint64_t hung_up_us = 0;
  for (Asked asked = Asked::kHungUp; asked == Asked::kHungUp;) {
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    // connect(2) waits where the queue of a server that does not accept is full.
    const timeval patience{kAttachTimeoutMs / 1000, 0};
    if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&addr), sizeof(addr)) != 0) {
      if (fd >= 0 && hung_up_us && now_us() < hung_up_us + kListenAgainUs) {
        close(fd);
        usleep(10'000);
        continue;
      }
      log(Level::kError, "attach: no device-proxy server of GPU %d at %s: %s; is the job still run by devproxy-run?",
          device, addr.sun_path, strerror(errno));
      if (fd >= 0) close(fd);
      return kDeviceUnavailable;
    }
    asked = ask(fd, kind, reply);
    if (asked == Asked::kAnswered) break;
    close(fd);
    if (asked == Asked::kSilent || now_us() > until) {
      log(Level::kError, "attach: the server of GPU %d did not answer", device);
      return kDeviceUnavailable;
    }
    hung_up_us = now_us();
    usleep(10'000);
  }
  if (reply->status != AttachStatus::kOk) {
    reply->text[sizeof(reply->text) - 1] = 0;
    char ours[17], theirs[17];
    hex(wire::kAbiId, ours);
    hex(reply->abi_id, theirs);
    log(Level::kError, "attach: the server of GPU %d refused: %s (client ABI %s, server ABI %s)", device, reply->text,
        ours, theirs);
    close(fd);
    return reply->status == AttachStatus::kNoMemory ? kOutOfMemory : kDeviceUnavailable;
  }
  *connected = fd;
  return kOk;
}

}  // namespace

void warm(int gpu, const char* description) {
  const char* const dir = getenv("DEVPROXY_JOB_DIR");
  const size_t length = strlen(description);
  if (!dir || length > kMaxWarmBytes) return;
  sockaddr_un addr{};
  addr.sun_family = AF_UNIX;
  const int n = snprintf(addr.sun_path, sizeof(addr.sun_path), "%s/gpu%d.sock", dir, gpu);
  if (n < 0 || static_cast<size_t>(n) >= sizeof(addr.sun_path)) return;
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return;
  AttachRequest hello{kAttachMagic, AttachKind::kWarm, {}, static_cast<uint32_t>(getpid()), 0xffffffffu};
  memcpy(hello.abi_id, wire::kAbiId, sizeof(hello.abi_id));
  const auto bytes = static_cast<uint32_t>(length);
  iovec parts[] = {
      {&hello, sizeof hello}, {const_cast<uint32_t*>(&bytes), sizeof bytes}, {const_cast<char*>(description), length}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 3;
  // One send: the server reads what is there and does not wait for more.
  if (connect(fd, reinterpret_cast<sockaddr*>(&addr), sizeof(addr)) == 0) (void)!sendmsg(fd, &message, MSG_NOSIGNAL);
  close(fd);
}

int32_t ask_facts(const char* job_dir, int device, DeviceProps* props) {
  AttachReply reply{};
  int fd = -1;
  if (const int32_t rc = say_hello(job_dir, device, AttachKind::kFacts, &reply, &fd); rc != kOk) return rc;
  close(fd);
  *props = reply.props;
  props->name[sizeof(props->name) - 1] = 0;
  return kOk;
}

int32_t Attachment::attach(const char* job_dir, int device, int ordinal) {
  const auto kind = g_framework.load(std::memory_order_relaxed) ? AttachKind::kFramework : AttachKind::kClient;
  AttachReply reply{};
  int fd = -1;
  if (const int32_t rc = say_hello(job_dir, device, kind, &reply, &fd); rc != kOk) return rc;
  reply.segment_name[sizeof(reply.segment_name) - 1] = reply.pinned_name[sizeof(reply.pinned_name) - 1] =
      reply.link_name[sizeof(reply.link_name) - 1] = 0;
  const int seg = open_in(job_dir, reply.segment_name, O_RDWR);
  const bool mapped = seg >= 0 && view_.map(seg);
  if (seg >= 0) close(seg);
  const int pin = open_in(job_dir, reply.pinned_name, O_RDWR);
  const auto base = reinterpret_cast<void*>(range_base(reply.slot));
  // The job holds the addresses of device memory, never the memory: PROT_NONE from the first moment.
  const bool reserved =
      mapped && mmap(base, kDeviceBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE,
                     -1, 0) == base;
  const auto pinned = reinterpret_cast<void*>(range_base(reply.slot) + kDeviceBytes);
  const bool window = reserved && pin >= 0 &&
                      mmap(pinned, kPinnedBytes, PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, pin, 0) == pinned;
  if (pin >= 0) close(pin);
  if (!window) {
    log(Level::kError, "attach: cannot map %s of GPU %d (slot %u): %s", !mapped ? "the segment" : "the address range",
        device, reply.slot, strerror(errno));
    if (reserved) munmap(base, kDeviceBytes);
    if (mapped) view_.unmap();
    close(fd);
    return kDeviceUnavailable;
  }
  // Opened for writing it blocks no one, since the server holds the read end from before its answer.
  const int link = open_in(job_dir, reply.link_name, O_WRONLY | O_NONBLOCK);
  const bool linked = link >= 0 && view_.control()->magic == kSegmentMagic &&
                      send(fd, &kLinked, sizeof(kLinked), MSG_NOSIGNAL) == sizeof(kLinked);
  if (!linked) {
    log(Level::kError, "attach: cannot link to the server of GPU %d: %s", device,
        link < 0 ? strerror(errno) : "it hung up, or its segment has a wrong magic number");
    munmap(base, kDeviceBytes);
    munmap(pinned, kPinnedBytes);
    view_.unmap();
    if (link >= 0) close(link);
    close(fd);
    return kDeviceUnavailable;
  }
  close(fd);
  device_ = ordinal;
  link_ = link;
  slot_ = reply.slot;
  unsigned long number = 0;
  if (sscanf(reply.pinned_name, "gpu%u-%lu.pinned", &window_gpu_, &number) == 2) window_number_ = number;
  keeps_host_pages_ = (reply.flags & kKeepsHostPages) != 0;
  props_ = reply.props;
  props_.name[sizeof(props_.name) - 1] = 0;
  return kOk;
}

int32_t Attachment::post_bytes(wire::Opcode op, const void* req, size_t req_bytes, Bulk bulk, uint32_t seq,
                               uint64_t* end) {
  CommandRing::Reservation r;
  uint8_t* p = nullptr;
  if (const int32_t e = begin_record(op, req_bytes + bulk.bytes, seq, &r, &p); __builtin_expect(e != kOk, 0)) return e;
  memcpy(p, req, req_bytes);
  if (bulk.bytes) memcpy(p + req_bytes, bulk.data, bulk.bytes);
  end_record(r);
  if (end) *end = r.end();
  return kOk;
}

void Attachment::wake_server() {
  view_.control()->wakes.fetch_add(1, std::memory_order_relaxed);
  t_state.woke_server = true;
  futex_wake(&view_.control()->doorbell.sleeping, 1);
}

void Attachment::note_room_wait(uint64_t began_ns) {
  ControlPage* control = view_.control();
  for (RoomWait& entry : control->room_waits) {
    uint64_t free = 0;
    if (entry.begin.load(std::memory_order_relaxed) != 0 ||
        !entry.begin.compare_exchange_strong(free, began_ns, std::memory_order_acquire))  // its taker is done with it
      continue;
    entry.slot.store(thread_slot(), std::memory_order_relaxed);
    entry.end.store(day_ns(), std::memory_order_release);
    // Before the message that waited is published, so its reader finds the entry.
    control->room_waits_filled.store(1, std::memory_order_release);
    return;
  }
}

int32_t Attachment::wait_for_space(const CommandRing::Reservation& r) {
  const uint64_t began_ns = day_ns();
  const int32_t found = sleep_for_space(r);
  note_room_wait(began_ns);
  return found;
}

int32_t Attachment::sleep_for_space(const CommandRing::Reservation& r) {
  // The reservation stands whatever happens: if the server is gone nobody will ever read the ring again.
  CommandRing& ring = view_.ring();
  // A full ring is work for longer than a nap. So while the server takes records, this thread naps until an eighth of the
  // ring is free: it takes no processor's time from the server, and none of its records is followed by a wake. (Seen on
  // an H200: a client that spins, record by record, for as long as a job is launch-bound.)
  const uint64_t wanted = ring.capacity() / 8;
  for (uint64_t before = 0, at; (at = ring.consumed()) != before; before = at) {
    if (ring.has_space(r, at - std::min(at, wanted))) return kOk;
    usleep(kNapUs);
  }
  for (;;) {
    const uint32_t seq = ring.space_prepare();
    if (!ring.has_space(r)) futex_wait(&view_.control()->space_seq, seq, kSleepUs);
    ring.space_done();
    if (ring.has_space(r)) return kOk;
    if (!check_alive()) return error();
  }
}

// A refusal has a name. Each is said once: a program may try again and again.
void Attachment::say_refusal(const char* text) {
  static std::atomic<size_t> said[64];
  const size_t hash = std::hash<std::string_view>{}(text) | 1;
  if (said[hash / 2 % 64].exchange(hash, std::memory_order_relaxed) == hash) return;
  log(Level::kWarn, "refused by the device of GPU %d: %s", device_, text);
}

int32_t Attachment::await_reply(uint16_t slot, uint32_t seq, Reply* reply) {
  ReplySlot& s = view_.replies()[slot];
  auto answered = [&] { return s.seq.load(std::memory_order_acquire) == seq; };
  spin(answered);
  while (!answered()) {
    const uint32_t seen = s.seq.load(std::memory_order_acquire);
    if (seen == seq) break;
    s.waiting.store(1, std::memory_order_relaxed);
    RealSync::fence();
    if (s.seq.load(std::memory_order_acquire) == seen) futex_wait(&s.seq, seen, kSleepUs);
    s.waiting.store(0, std::memory_order_relaxed);
    if (!answered() && !check_alive() && !answered()) return error();
  }
  const int32_t status = s.status;
  if ((status == kNotSupported || status == kNoBinaryForGpu) && s.bytes > 0 && s.bytes <= sizeof(s.data)) {
    s.data[s.bytes - 1] = 0;
    say_refusal(reinterpret_cast<const char*>(s.data));
  }
  if (reply && status == kOk) {
    const size_t got = s.bytes <= sizeof(s.data) ? s.bytes : sizeof(s.data);
    if (got < reply->rep_bytes) return kUnknown;
    if (reply->rep_bytes) memcpy(reply->rep, s.data, reply->rep_bytes);
    reply->tail_got = got - reply->rep_bytes;
    if (reply->tail_got > reply->tail_bytes) reply->tail_got = reply->tail_bytes;
    if (reply->tail_got) memcpy(reply->tail, s.data + reply->rep_bytes, reply->tail_got);
  }
  return status;
}

bool Attachment::want(uint32_t stream_index, uint64_t position) {
  if (view_.control()->wants_awaited.load(std::memory_order_relaxed) == 0) return true;
  std::atomic<uint64_t>& wanted = wanted_[stream_index];
  if (wanted.load(std::memory_order_relaxed) >= position) return true;
  // A query must not wait for a full ring, and a wait must not outlast what it waits for. Other producers may take the
  // room in between; the margin is for them.
  const uint64_t head = view_.ring().consumed();  // before the tail, which it never passes
  const uint64_t used = view_.control()->tail.value.load(std::memory_order_relaxed) - head;
  if (used > view_.ring().capacity() - kHintMargin) return false;
  wanted.store(position, std::memory_order_relaxed);  // of two at once both may send, which is harmless
  const bool woke = t_state.woke_server;              // it says something of the caller's own message
  // An error is the waiting thread's to find.
  static_cast<void>(post(wire::Opcode::STREAM_AWAITED, wire::STREAM_AWAITED_req{stream_index, 0}));
  t_state.woke_server = woke;
  return true;
}

int32_t Attachment::wait(uint32_t stream_index, uint64_t position) {
  StreamState& s = view_.streams()[stream_index];
  auto done = [&] { return s.completed.load(std::memory_order_acquire) >= position; };
  if (done()) return error();
  bool said = want(stream_index, position);
  if (spin(done)) return error();
  while (!done()) {
    s.waiters.fetch_add(1, std::memory_order_relaxed);
    const uint32_t seq = s.wake_seq.load(std::memory_order_relaxed);
    RealSync::fence();
    if (!done()) futex_wait(&s.wake_seq, seq, said ? kSleepUs : kAgainUs);
    s.waiters.fetch_sub(1, std::memory_order_relaxed);
    if (!done() && !said && (said = want(stream_index, position))) continue;
    if (!done() && !check_alive()) return error();
  }
  return error();
}

uint32_t Attachment::take_chunk(int32_t* error_out) {
  ControlPage* c = view_.control();
  for (;;) {
    // From the low end: the same few chunks stay warm in the cache.
    for (uint32_t i = 0; i < kChunks; ++i) {
      uint32_t free = 0;
      if (c->chunk_busy[i].load(std::memory_order_relaxed) == 0 &&
          c->chunk_busy[i].compare_exchange_strong(free, 1, std::memory_order_acquire)) {
        if (chunk_has_pages_[i]) return i;  // owned by us until it is freed: no race on the flag
        // As with pinned memory: a full /dev/shm must not be a SIGBUS in the job.
        chunk_has_pages_[i] = madvise(view_.chunk(i), kChunkBytes, MADV_POPULATE_WRITE) == 0 || errno == EINVAL;
        if (chunk_has_pages_[i]) return i;
        free_chunk(i);
        log(Level::kError, "no memory for staging: /dev/shm is full");
        *error_out = kOutOfMemory;
        return kChunks;
      }
    }
    c->chunk_waiters.fetch_add(1, std::memory_order_relaxed);
    const uint32_t seq = c->chunk_seq.load(std::memory_order_relaxed);
    RealSync::fence();
    bool any = false;
    for (uint32_t i = 0; i < kChunks && !any; ++i) any = c->chunk_busy[i].load(std::memory_order_relaxed) == 0;
    if (!any) {
      const uint64_t began_ns = day_ns();
      futex_wait(&c->chunk_seq, seq, kSleepUs);
      note_room_wait(began_ns);
    }
    c->chunk_waiters.fetch_sub(1, std::memory_order_relaxed);
    if (!any && !check_alive()) {
      *error_out = error();
      return kChunks;
    }
  }
}

void Attachment::free_chunk(uint32_t index) {
  ControlPage* c = view_.control();
  c->chunk_busy[index].store(0, std::memory_order_release);
  RealSync::fence();
  if (c->chunk_waiters.load(std::memory_order_relaxed) != 0) {
    c->chunk_seq.fetch_add(1, std::memory_order_relaxed);
    futex_wake(&c->chunk_seq, INT32_MAX);
  }
}

int32_t Attachment::fill_chunks(Bulk bulk, uint16_t* indices, uint32_t* n) {
  const size_t need = (bulk.bytes + kChunkBytes - 1) / kChunkBytes;
  if (need > kChunks) {
    log(Level::kError, "a message of %zu bytes is larger than the staging area of %zu bytes", bulk.bytes,
        static_cast<size_t>(kChunkBytes * kChunks));
    return kInvalidValue;
  }
  std::lock_guard gather(chunk_mu_);
  const auto* p = static_cast<const uint8_t*>(bulk.data);
  for (size_t i = 0; i < need; ++i) {
    int32_t rc = kOk;
    const uint32_t c = take_chunk(&rc);
    if (c == kChunks) {
      for (size_t k = 0; k < i; ++k) free_chunk(indices[k]);
      return rc;
    }
    const size_t bytes = i + 1 < need ? kChunkBytes : bulk.bytes - i * kChunkBytes;
    memcpy(view_.chunk(c), p + i * kChunkBytes, bytes);
    indices[i] = static_cast<uint16_t>(c);
  }
  *n = static_cast<uint32_t>(need);
  return kOk;
}

bool Attachment::check_alive() {
  if (lost_.load(std::memory_order_relaxed)) return false;
  const auto state = static_cast<ServerState>(view_.control()->server_state.load(std::memory_order_acquire));
  if (state == ServerState::kPoisoned) return false;
  last_look_us_.store(coarse_us(), std::memory_order_relaxed);
  pollfd pfd{link_, 0, 0};  // pipe(7): POLLERR when nobody holds the read end
  const int n = poll(&pfd, 1, 0);
  if (state != ServerState::kGone && (n == 0 || (n < 0 && errno == EINTR))) return true;
  if (!lost_.exchange(true)) {
    const int32_t sticky = view_.control()->sticky_error.load(std::memory_order_acquire);
    log(Level::kError, "the device-proxy server of GPU %d is gone%s%s; this job's device state is lost", device_,
        sticky ? ": " : " (it was killed or crashed)", sticky ? view_.control()->sticky_text : "");
  }
  return false;
}

int32_t Attachment::lost_result() const {
  const int32_t sticky = view_.control()->sticky_error.load(std::memory_order_relaxed);
  return sticky != kOk ? sticky : kDeviceUnavailable;
}

int32_t Attachment::error_now_and_then() {
  const int32_t e = error();
  if (e != kOk) return e;
  if (coarse_us() - last_look_us_.load(std::memory_order_relaxed) > kSleepUs) check_alive();
  return error();
}

const char* Attachment::error_text() const {
  if (view_.mapped() && view_.control()->sticky_error.load(std::memory_order_acquire) != kOk)
    return view_.control()->sticky_text;
  return lost_.load() ? "the device-proxy server is gone (it was killed or crashed)" : "";
}

void Attachment::close_in_child() {
  if (link_ >= 0) close(link_);
  link_ = -1;
}

}  // namespace devproxy::client
