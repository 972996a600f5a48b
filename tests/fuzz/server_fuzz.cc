// SPDX-License-Identifier: Apache-2.0
// A hostile client of the device-proxy server: sends well-formed, mutated and random messages, scribbles over the
// segment while the server reads it, goes away in the middle, and comes back.
//
//   devproxy-run --device soft -- server_fuzz --messages N --seed S [--kernels kernels.so]
//
// run against a server built with -fsanitize=address,undefined (DEVPROXY_SERVER). What must hold:
//   - the server lives, and answers an honest message after every attack that is not against the ring itself;
//   - a second, honest connection (the canary) keeps its memory, byte for byte, and its calls succeed;
//   - after the last hostile connection the server's memory is what the canary has.
// Not sent: a large part of the pinned window, which no credit bounds (a set of it lasts until the machine has found
// the pages, and the connection gives nothing back before); kernels that spin or crash on purpose, and whole images
// with damaged insides (a job's module runs with the job's rights in the job's own server; there the sticky error is
// the contract, and tests/subjects/driver/fault.c holds it).
//
// Prints one line of JSON; exits 0 when all held, 1 when not.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/csrc/args/array.h"
#include "devproxy/csrc/args/comm.h"
#include "devproxy/csrc/args/launch.h"
#include "devproxy/csrc/args/link.h"
#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/image_hash.h"
#include "devproxy/csrc/transport/segment_view.h"
#include "devproxy/csrc/wire/array.h"
#include "devproxy/csrc/wire/attach.h"
#include "devproxy/csrc/wire/graph_step.h"
#include "dispatch.gen.h"
#include "wire.gen.h"

namespace {

using namespace devproxy;
using wire::Opcode;

constexpr uint64_t kAnswerUs = 30'000'000;  // a sanitized server on a loaded machine is slow; nothing here is timed

std::mt19937_64 rng;
uint64_t rnd() { return rng(); }
uint64_t below(uint64_t n) { return n ? rng() % n : 0; }
bool chance(unsigned percent) { return below(100) < percent; }

uint64_t g_seed, g_sent, g_connections, g_poisoned, g_faults, g_scribbled, g_left_hanging;
std::vector<uint8_t> g_image;

[[noreturn]] void die(const char* format, ...) {
  va_list ap;
  va_start(ap, format);
  printf("{\"ok\": false, \"seed\": %llu, \"messages\": %llu, \"why\": \"", static_cast<unsigned long long>(g_seed),
         static_cast<unsigned long long>(g_sent));
  vprintf(format, ap);
  printf("\"}\n");
  fflush(stdout);
  _exit(1);
}

int connect_to_server() {
  sockaddr_un addr{};
  addr.sun_family = AF_UNIX;
  const char* dir = getenv("DEVPROXY_JOB_DIR");
  if (!dir) die("DEVPROXY_JOB_DIR is not set: run under devproxy-run");
  snprintf(addr.sun_path, sizeof addr.sun_path, "%s/gpu0.sock", dir);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&addr), sizeof addr) != 0) die("the server is gone: %s", strerror(errno));
  return fd;
}

bool read_all(int fd, void* out, size_t bytes) {
  auto* p = static_cast<uint8_t*>(out);
  while (bytes) {
    pollfd pfd{fd, POLLIN, 0};
    if (poll(&pfd, 1, 30'000) <= 0) return false;
    const ssize_t n = read(fd, p, bytes);
    if (n <= 0) return false;
    p += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

// The server's own account (AttachKind::kStats): JSON text.
std::string stats() {
  const int fd = connect_to_server();
  AttachRequest request{kAttachMagic, AttachKind::kStats, {}, 0, 0};
  memcpy(request.abi_id, wire::kAbiId, sizeof request.abi_id);
  uint32_t length = 0;
  std::string text;
  if (send(fd, &request, sizeof request, MSG_NOSIGNAL) != sizeof request || !read_all(fd, &length, sizeof length))
    die("no statistics from the server");
  text.resize(length < (1u << 24) ? length : 0);
  read_all(fd, text.data(), text.size());
  close(fd);
  return text;
}

// The number behind "key": in JSON text; -1 when there is none.
long long number_of(const std::string& json, const char* key) {
  const size_t at = json.find("\"" + std::string(key) + "\"");
  return at == std::string::npos ? -1 : atoll(json.c_str() + json.find(':', at) + 1);
}

// One connection. Positions are kept here and not in the shared tail, which we attack.
class Raw {
 public:
  bool attach() {
    fd_ = connect_to_server();
    AttachRequest request{kAttachMagic, AttachKind::kClient, {}, static_cast<uint32_t>(getpid()), 0xffffffffu};
    memcpy(request.abi_id, wire::kAbiId, sizeof request.abi_id);
    if (send(fd_, &request, sizeof request, MSG_NOSIGNAL) != sizeof request || !read_all(fd_, &reply_, sizeof reply_))
      return false;
    if (reply_.status != AttachStatus::kOk) die("attach refused: %s", reply_.text);
    const std::string dir = std::string(getenv("DEVPROXY_JOB_DIR")) + "/";
    const int seg = open((dir + reply_.segment_name).c_str(), O_RDWR | O_CLOEXEC);
    if (seg < 0 || !view.map(seg)) die("cannot map the segment: %s", strerror(errno));
    close(seg);
    link_ = open((dir + reply_.link_name).c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    if (link_ < 0 || send(fd_, &kLinked, sizeof kLinked, MSG_NOSIGNAL) != sizeof kLinked)
      die("cannot link: %s", strerror(errno));
    close(fd_);
    fd_ = -1;
    ++g_connections;
    return true;
  }
  ~Raw() {
    if (fd_ >= 0) close(fd_);
    if (link_ >= 0) close(link_);
    view.unmap();
  }
  uint32_t slot() const { return reply_.slot; }
  uint64_t device_base() const { return range_base(reply_.slot); }
  bool hung_up() const {
    pollfd pfd{link_, 0, 0};
    return poll(&pfd, 1, 0) > 0;
  }
  bool poisoned() const { return view.control()->server_state.load() == static_cast<uint32_t>(ServerState::kPoisoned); }
  int32_t fault() const { return view.control()->sticky_error.load(); }

  struct Record {
    uint16_t opcode = 0, slot = 0;
    uint32_t payload_bytes = 0, seq = 0;
    uint32_t commit = 0;  // 0: the right length
    std::vector<uint8_t> payload;
  };

  // False when the record could not be sent: the server reads no more.
  bool send_record(const Record& r, uint64_t* end = nullptr) {
    CommandRing& ring = view.ring();
    const size_t bytes = ring.round_up(sizeof(MsgHeader) + r.payload.size());
    const uint64_t until = now_us() + kAnswerUs;
    while (pos_ + bytes - view.control()->head.value.load(std::memory_order_acquire) > ring.capacity()) {
      if (poisoned() || scribbled_) return false;
      if (hung_up()) die("the server hung up");
      if (now_us() > until) return false;
      usleep(50);
    }
    uint8_t* p = ring.at(pos_);
    memcpy(p + 4, &r.opcode, 2);
    memcpy(p + 6, &r.slot, 2);
    memcpy(p + 8, &r.payload_bytes, 4);
    memcpy(p + 12, &r.seq, 4);
    if (!r.payload.empty()) memcpy(p + sizeof(MsgHeader), r.payload.data(), r.payload.size());
    if (!scribbled_) view.control()->tail.value.store(pos_ + bytes, std::memory_order_relaxed);
    // The length is our own choice here, so not ring.publish().
    SegmentCommit{}(p).store(r.commit ? r.commit : static_cast<uint32_t>(bytes), std::memory_order_release);
    RealSync::fence();
    auto& sleeping = view.control()->doorbell.sleeping;
    if (sleeping.load(std::memory_order_relaxed) && sleeping.exchange(0)) futex_wake(&sleeping, 1);
    pos_ += bytes;
    if (end) *end = pos_;
    ++g_sent;
    return true;
  }

  template <class Request>
  static Record record(Opcode op, const Request& request, const void* tail = nullptr, size_t tail_bytes = 0) {
    Record r;
    r.opcode = static_cast<uint16_t>(op);
    const wire::OpInfo* info = wire::op_info(r.opcode);
    r.payload.resize(info->req_bytes + tail_bytes);
    memcpy(r.payload.data(), &request, info->req_bytes);
    if (tail_bytes) memcpy(r.payload.data() + info->req_bytes, tail, tail_bytes);
    r.payload_bytes = static_cast<uint32_t>(r.payload.size());
    return r;
  }

  // Waits until the server has read everything. False: it will not.
  bool drain() {
    const uint64_t until = now_us() + kAnswerUs;
    while (!scribbled_ && view.control()->head.value.load(std::memory_order_acquire) != pos_) {
      if (poisoned()) return false;
      if (hung_up()) die("the server hung up");
      if (now_us() > until) die("the server stopped reading");
      usleep(10);
    }
    return !scribbled_;
  }

  // Sends and waits; false: no answer (poisoned, hung up, or time is over).
  bool call(Record r, int32_t* status, void* out = nullptr, size_t out_bytes = 0) {
    r.slot = 0;
    r.seq = ++seq_;
    ReplySlot& s = view.replies()[0];
    if (!send_record(r)) return false;
    const uint64_t until = now_us() + kAnswerUs;
    while (s.seq.load(std::memory_order_acquire) != r.seq) {
      if (poisoned() || hung_up() || now_us() > until) return false;
      usleep(20);
    }
    *status = s.status;
    if (out) memcpy(out, s.data, std::min<size_t>(out_bytes, s.bytes));
    return true;
  }

  SegmentView view;
  bool scribbled_ = false;  // the ring's own words are broken: no answer is owed any more

 private:
  int fd_ = -1, link_ = -1;
  AttachReply reply_{};
  uint64_t pos_ = 0;
  uint32_t seq_ = 0;
};

// -- the honest neighbour -----------------------------------------------------------------------------------------
class Canary {
 public:
  static constexpr uint64_t kBytes = 256u << 10;

  Canary() {
    if (!c_.attach()) die("the canary cannot attach");
    int32_t status = -1;
    wire::MEM_CREDIT_rep credit{};
    if (!c_.call(Raw::record(Opcode::MEM_CREDIT, wire::MEM_CREDIT_req{kBytes, kBytes}), &status, &credit,
                 sizeof credit) ||
        status || credit.granted < kBytes)
      die("the canary gets no memory: %d", status);
    c_.send_record(Raw::record(Opcode::MEM_ALLOC, wire::MEM_ALLOC_req{address(), kBytes, 0, 0}));
    for (uint64_t i = 0; i < kBytes; ++i) c_.view.chunk(0)[i] = pattern(i);
    c_.view.control()->chunk_busy[0] = 1;
    copy(address(), 0, 0, 2);
    used_ = number_of(stats(), "used");  // the server has seen the allocation by now
  }
  uint64_t address() const { return c_.device_base(); }
  long long used_bytes() const { return used_; }

  void check() {
    memset(c_.view.chunk(1), 0, kBytes);
    copy(kChunkBytes, address(), 2, 0);
    for (uint64_t i = 0; i < kBytes; ++i)
      if (c_.view.chunk(1)[i] != pattern(i))
        die("byte %llu of the neighbour's memory changed", static_cast<unsigned long long>(i));
    if (c_.fault()) die("the neighbour got the sticky error %d", c_.fault());
  }

 private:
  static uint8_t pattern(uint64_t i) { return static_cast<uint8_t>(i * 167 + (i >> 8)); }
  void copy(uint64_t dst, uint64_t src, uint8_t dst_space, uint8_t src_space) {
    uint64_t end = 0;
    int32_t status = -1;
    c_.send_record(
        Raw::record(Opcode::COPY, wire::COPY_req{kLegacyStream, dst, src, kBytes, dst_space, src_space, 0, 0}), &end);
    if (!c_.call(Raw::record(Opcode::NOP, wire::NOP_req{}), &status) || status)
      die("the neighbour's call failed: %d", status);
    const uint64_t until = now_us() + kAnswerUs;
    while (c_.view.streams()[0].completed.load(std::memory_order_acquire) < end) {
      if (c_.hung_up() || now_us() > until) die("the neighbour's copy does not finish");
      usleep(50);
    }
    if (const int32_t late = c_.view.replies()[0].late_error.load()) die("the neighbour's copy failed: %d", late);
  }
  Raw c_;
  long long used_ = 0;
};

// -- the attacker ---------------------------------------------------------------------------------------------------
class Attacker {
 public:
  Attacker(const Canary& canary) : canary_(canary) {}

  // One connection's life: up to `most` messages.
  void live(uint64_t most) {
    if (!c_.attach()) return;
    prepare();
    std::atomic<bool> stop{false};
    std::thread scribbler;
    if (chance(25)) scribbler = std::thread([&, seed = rnd()] { scribble_payloads(stop, seed); });
    for (uint64_t i = 0; i < most && !over(); ++i) {
      if (chance(1) && chance(20)) attack_control_page();
      if (!one_message()) break;
      if (chance(25)) answer_host_functions();
      if (chance(12)) c_.drain();  // else most of what is sent would come behind a fault or the end of the connection
    }
    stop = true;
    if (scribbler.joinable()) scribbler.join();  // finish() is honest again
    finish();
  }

 private:
  static constexpr uint64_t kBlocks = 64, kBlockBytes = 128u << 10, kMostPinned = 16u << 20;
  struct Block {
    uint64_t addr, bytes;
  };

  bool over() {
    if (c_.hung_up()) die("the server closed the connection, or died");
    return c_.poisoned();
  }

  void prepare() {
    int32_t status = 0;
    wire::MEM_CREDIT_rep credit{};
    const uint64_t want = kBlocks * kBlockBytes;
    if (!c_.call(Raw::record(Opcode::MEM_CREDIT, wire::MEM_CREDIT_req{want, 0}), &status, &credit, sizeof credit))
      return;
    if (!g_image.empty() && chance(70)) load_module();
  }

  void load_module() {
    const auto module = VHandle::make(HandleKind::kModule, ++serial_, 0);
    std::vector<uint16_t> chunks;
    for (size_t at = 0; at < g_image.size(); at += kChunkBytes) {
      const auto i = static_cast<uint16_t>(at / kChunkBytes);
      memcpy(c_.view.chunk(i), g_image.data() + at, std::min(kChunkBytes, g_image.size() - at));
      chunks.push_back(i);
    }
    const ImageHash hash = image_hash(g_image.data(), g_image.size());
    wire::IMAGE_PUT_req put{hash.low,
                            hash.high,
                            g_image.size(),
                            0,
                            static_cast<uint32_t>(g_image.size()),
                            static_cast<uint32_t>(chunks.size())};
    int32_t status = -1;
    if (!c_.call(Raw::record(Opcode::IMAGE_PUT, put, chunks.data(), chunks.size() * 2), &status) || status) return;
    const wire::MODULE_LOAD_req req{module, hash.low, hash.high, g_image.size()};
    if (!c_.call(Raw::record(Opcode::MODULE_LOAD, req, nullptr, 0), &status) || status) return;
    modules_.push_back(module);
    for (const char* name : {"fill", "copy_words", "affine", "shape", "sum_extra", "saxpy", "sum_struct", "mixed"}) {
      const auto function = VHandle::make(HandleKind::kFunction, ++serial_, 0);
      wire::FUNCTION_GET_req get{module, function, static_cast<uint32_t>(strlen(name)), 0};
      if (!c_.call(Raw::record(Opcode::FUNCTION_GET, get, name, strlen(name)), &status)) return;
      if (status == 0) functions_.push_back(function);
    }
  }

  // A number that somebody might have forgotten.
  uint64_t evil() {
    switch (below(12)) {
      case 0: return 0;
      case 1: return below(16);
      case 2: return 1ull << below(64);
      case 3: return (1ull << below(64)) - 1;
      case 4: return ~0ull - below(64);
      case 5: return canary_.address() + below(2 * Canary::kBytes);
      case 6: return c_.device_base() + below(kRangeBytes);
      case 7: return c_.device_base() + kDeviceBytes - (1ull << 30) - 64 + below(128);
      case 8: return c_.device_base() + kDeviceBytes + below(1u << 20);
      case 9: return blocks_.empty() ? rnd() : blocks_[below(blocks_.size())].addr + blocks_[0].bytes - below(80);
      case 10: return 0x555555554000ull + (below(1 << 20) << 12);
      default: return rnd();
    }
  }
  uint64_t maybe_evil(uint64_t good, unsigned percent = 6) { return chance(percent) ? evil() : good; }
  VHandle handle(const std::vector<VHandle>& known, HandleKind kind, unsigned percent = 6) {
    if (known.empty() || chance(percent)) {
      if (chance(50)) return {evil()};
      return VHandle::make(kind, below(serial_ + 4), static_cast<uint16_t>(below(chance(50) ? 8 : 2000)));
    }
    return known[below(known.size())];
  }
  VHandle stream() { return chance(30) ? kLegacyStream : handle(streams_, HandleKind::kStream); }
  Block block() { return blocks_.empty() ? Block{c_.device_base(), 64} : blocks_[below(blocks_.size())]; }
  Block pinned() {
    return pinned_.empty() ? Block{c_.device_base() + kDeviceBytes, 64} : pinned_[below(pinned_.size())];
  }
  uint64_t piece(const Block& b, uint64_t* bytes) {
    const uint64_t at = below(b.bytes);
    *bytes = chance(70) ? below(b.bytes - at) : maybe_evil(b.bytes, 50);
    return b.addr + at;
  }
  // One side of a copy.
  uint64_t place(uint8_t* space, uint64_t* bytes) {
    *space = static_cast<uint8_t>(below(3));
    if (chance(2)) *space = static_cast<uint8_t>(rnd());
    if (*space == 2) {
      *bytes = below(kChunkBytes);
      return maybe_evil(below(kChunkBytes * 4));
    }
    return maybe_evil(piece(*space == 1 ? pinned() : block(), bytes));
  }

  Raw::Record generate() {
    const auto pad = static_cast<uint32_t>(rnd());
    switch (below(34)) {
      case 33:
        return Raw::record(
            Opcode::STREAM_AWAITED,
            wire::STREAM_AWAITED_req{static_cast<uint32_t>(chance(90) ? below(24) : maybe_evil(below(3000))), pad});
      case 30:
      case 31:
      case 32: return communicate();
      case 0:
      case 1:
      case 2: {
        // Mostly a place of its own, so that most live and the rest of the messages has something to work on.
        const uint64_t place = below(kBlocks);
        const bool good = chance(90) && !used_[place];
        const Block b{
            good ? c_.device_base() + place * kBlockBytes : maybe_evil(c_.device_base() + (below(1 << 12) << 12), 30),
            good ? 1024 + below(kBlockBytes - 1024) : maybe_evil(1 + below(200'000), 30)};
        if (good) {
          used_[place] = true;
          blocks_.push_back(b);
        }
        return Raw::record(Opcode::MEM_ALLOC,
                           wire::MEM_ALLOC_req{b.addr, b.bytes, static_cast<uint32_t>(below(4)), pad});
      }
      case 3: {
        if (blocks_.empty() || chance(30)) return Raw::record(Opcode::MEM_FREE, wire::MEM_FREE_req{evil(), pad, 0});
        const uint64_t at = below(blocks_.size());
        const uint64_t addr = blocks_[at].addr;
        if (chance(95)) {
          used_[(addr - c_.device_base()) / kBlockBytes] = false;
          blocks_.erase(blocks_.begin() + static_cast<long>(at));
        }
        return Raw::record(Opcode::MEM_FREE, wire::MEM_FREE_req{addr, pad, 0});
      }
      case 4:
        return with_seq(
            Raw::record(Opcode::MEM_CREDIT, wire::MEM_CREDIT_req{maybe_evil(1 << 20), chance(50) ? 0 : evil()}));
      case 5: return Raw::record(Opcode::MEM_CREDIT_RETURN, wire::MEM_CREDIT_RETURN_req{maybe_evil(below(4096), 30)});
      case 6: return with_seq(Raw::record(Opcode::MEM_INFO, wire::MEM_INFO_req{}));
      case 7:
      case 8:
      case 9: {
        wire::COPY_req r{};
        uint64_t a = 0, b = 0;
        r.stream = stream();
        r.dst = place(&r.dst_space, &a);
        r.src = place(&r.src_space, &b);
        r.bytes = maybe_evil(std::min(a, b));
        r.chunk_release = chance(80) ? 0 : static_cast<uint32_t>(chance(99) ? below(kChunks + 1) : rnd());
        return Raw::record(Opcode::COPY, r);
      }
      case 10: {
        wire::COPY_2D_req r{};
        uint64_t a = 0, b = 0;
        r.stream = stream();
        r.dst = place(&r.dst_space, &a);
        r.src = place(&r.src_space, &b);
        r.height = maybe_evil(1 + below(16));
        r.width_bytes = maybe_evil(std::min(a, b) / 20);
        r.dst_pitch = maybe_evil(r.width_bytes + below(32));
        r.src_pitch = maybe_evil(r.width_bytes + below(32));
        r.chunk_release = chance(90) ? 0 : static_cast<uint32_t>(below(kChunks + 2));
        return Raw::record(Opcode::COPY_2D, r);
      }
      case 11:
      case 12: {
        wire::MEMSET_req r{};
        uint64_t bytes = 0;
        const auto width = uint32_t{1} << below(3);
        r.stream = stream();
        r.dst = maybe_evil(piece(chance(80) ? block() : pinned(), &bytes) & ~uint64_t{3});
        r.rows = maybe_evil(1 + below(5));
        r.count = maybe_evil(bytes / 5 / width);
        r.pitch = maybe_evil((r.count * width + below(64)) & ~uint64_t{3});
        r.value = pad;
        r.width = static_cast<uint32_t>(maybe_evil(width, 2));
        return Raw::record(Opcode::MEMSET, r);
      }
      case 13: {
        Block b{maybe_evil(c_.device_base() + kDeviceBytes + (below(256) << 12)), maybe_evil(1 + below(100'000))};
        if (b.bytes <= kPinnedBytes) b.bytes %= kMostPinned;
        if (pinned_.size() < 32) pinned_.push_back(b);
        return Raw::record(Opcode::HOST_ALLOC, wire::HOST_ALLOC_req{b.addr, b.bytes});
      }
      case 14: return Raw::record(Opcode::HOST_FREE, wire::HOST_FREE_req{maybe_evil(pinned().addr)});
      case 15: {
        const auto s = VHandle::make(HandleKind::kStream, ++serial_,
                                     static_cast<uint16_t>(chance(90) ? 1 + below(24) : below(3000)));
        if (streams_.size() < 32) streams_.push_back(s);
        return Raw::record(Opcode::STREAM_CREATE,
                           wire::STREAM_CREATE_req{chance(95) ? s : VHandle{evil()}, static_cast<uint32_t>(below(3)),
                                                   static_cast<int32_t>(pad)});
      }
      case 16:
        return Raw::record(Opcode::STREAM_DESTROY, wire::STREAM_DESTROY_req{handle(streams_, HandleKind::kStream)});
      case 17:
        return Raw::record(Opcode::STREAM_WAIT_EVENT,
                           wire::STREAM_WAIT_EVENT_req{stream(), handle(events_, HandleKind::kEvent)});
      case 18: {
        const uint64_t token = maybe_evil(++token_);
        return Raw::record(Opcode::HOST_FUNC, wire::HOST_FUNC_req{stream(), token});
      }
      case 19: return Raw::record(Opcode::HOST_FUNC_DONE, wire::HOST_FUNC_DONE_req{maybe_evil(token_)});
      case 20: {
        const auto e = VHandle::make(HandleKind::kEvent, ++serial_, 0);
        if (events_.size() < 32) events_.push_back(e);
        return Raw::record(Opcode::EVENT_CREATE, wire::EVENT_CREATE_req{chance(95) ? e : VHandle{evil()},
                                                                        static_cast<uint32_t>(below(8)), pad});
      }
      case 21:
        return chance(30)
                   ? Raw::record(Opcode::EVENT_DESTROY, wire::EVENT_DESTROY_req{handle(events_, HandleKind::kEvent)})
                   : Raw::record(Opcode::EVENT_RECORD,
                                 wire::EVENT_RECORD_req{handle(events_, HandleKind::kEvent), stream()});
      case 22:
        return with_seq(Raw::record(
            Opcode::EVENT_ELAPSED,
            wire::EVENT_ELAPSED_req{handle(events_, HandleKind::kEvent), handle(events_, HandleKind::kEvent)}));
      case 23: return module_message();
      case 24:
        return Raw::record(Opcode::FUNCTION_SET_ATTR,
                           wire::FUNCTION_SET_ATTR_req{handle(functions_, HandleKind::kFunction),
                                                       static_cast<uint32_t>(below(12)), static_cast<int32_t>(evil())});
      case 25: return graph();
      case 26: {
        if (chance(30)) {
          const wire::FUNCTION_NAMES_req r{handle(modules_, HandleKind::kModule),
                                           static_cast<uint32_t>(maybe_evil(below(20))), pad};
          return with_seq(Raw::record(Opcode::FUNCTION_NAMES, r));
        }
        if (chance(10)) return with_seq(Raw::record(Opcode::RESET_PERSISTING_L2, wire::RESET_PERSISTING_L2_req{}));
        wire::STREAM_SET_ATTRIBUTE_req r{};
        r.stream = stream();
        r.attr = static_cast<uint32_t>(maybe_evil(below(12)));
        r.value0 = piece(block(), &r.value1);
        if (chance(50)) r.value0 = maybe_evil(below(4)), r.value1 = maybe_evil(below(8192));
        r.value2 = r.value3 = evil();
        return with_seq(Raw::record(Opcode::STREAM_SET_ATTRIBUTE, r));
      }
      case 28:
      case 29: return array_message();
      default: return launch();
    }
  }

  // Steps made of our own messages, mostly of those that may be steps, and sometimes bent.
  std::vector<uint8_t> steps() {
    std::vector<uint8_t> out;
    auto append = [&](const void* from, size_t n) {
      const auto* p = static_cast<const uint8_t*>(from);
      out.insert(out.end(), p, p + n);
      out.resize(wire::graph_step_round(out.size()));
    };
    in_graph_ = true;
    for (uint64_t n = below(10); n > 0; n--) {
      Raw::Record r = generate();
      const wire::OpInfo* info = wire::op_info(r.opcode);
      if (chance(95) && (!info || info->stream_offset < 0 || info->is_sync)) continue;
      const size_t request = info && info->req_bytes <= r.payload.size() ? info->req_bytes : r.payload.size();
      size_t bulk = r.payload.size() - request;
      if (bulk > 4096) bulk = 4096;
      const wire::GraphStepHead head{static_cast<uint16_t>(maybe_evil(r.opcode, 1)),
                                     static_cast<uint16_t>(maybe_evil(request, 1)),
                                     static_cast<uint32_t>(maybe_evil(bulk, 1)), 0};
      append(&head, sizeof head);
      append(r.payload.data(), request);
      append(r.payload.data() + request, bulk);
    }
    in_graph_ = false;
    if (chance(3)) out.resize(below(out.size() + 1));
    return out;
  }

  // Communicators, mostly of this one rank, so that their operations run; others wait for members that never come, or
  // meet one of this very connection. Whoever waits is aborted at some time, or ends with the connection.
  Raw::Record communicate() {
    switch (comms_.empty() && chance(90) ? 0 : below(12)) {
      case 0:
      case 1: {
        wire::COMM_INIT_req r{};
        r.comm = VHandle::make(HandleKind::kComm, ++serial_, 0);
        r.stream = stream();
        r.key_low = rnd();
        r.ranks = 1;
        if (chance(15)) {
          r.ranks = static_cast<uint32_t>(maybe_evil(1 + below(3), 10));
          r.rank = static_cast<uint32_t>(maybe_evil(below(r.ranks), 10));
          r.key_low = below(3);
          r.key_high = serial_ / 64;
        }
        if (comms_.size() < 16) comms_.push_back(r.comm);
        if (chance(4)) r.comm = handle(comms_, HandleKind::kComm);
        return Raw::record(Opcode::COMM_INIT, r);
      }
      case 2: return with_seq(Raw::record(Opcode::COMM_STATE, wire::COMM_STATE_req{handle(comms_, HandleKind::kComm)}));
      case 3: {
        const VHandle gone = handle(comms_, HandleKind::kComm);
        if (chance(60)) std::erase_if(comms_, [&](const VHandle& c) { return c.value == gone.value; });
        if (chance(50)) return Raw::record(Opcode::COMM_ABORT, wire::COMM_ABORT_req{gone});
        return Raw::record(Opcode::COMM_DESTROY, wire::COMM_DESTROY_req{gone});
      }
      default: break;
    }
    std::vector<CommOp> group(chance(80) ? 1 + below(4) : below(40));
    // One wrong word refuses the whole group, so most have none.
    const unsigned evils = chance(70) ? 0 : 3;
    const VHandle one = handle(comms_, HandleKind::kComm, evils);
    for (CommOp& op : group) {
      op.comm = chance(70) ? one.value : handle(comms_, HandleKind::kComm, evils).value;
      op.kind = static_cast<uint8_t>(maybe_evil(below(kCommKinds - (chance(80) ? 2 : 0)), evils));
      op.type = static_cast<uint8_t>(maybe_evil(below(kCommTypes), evils));
      op.reduction = static_cast<uint8_t>(maybe_evil(below(kCommReductions), evils));
      op.scalar_on_device = chance(20);
      op.peer = static_cast<int32_t>(maybe_evil(0, evils));
      const Block from = block(), to = chance(30) ? from : block();
      op.send = maybe_evil(from.addr + below(from.bytes / 2), evils);
      op.recv = from.addr == to.addr ? op.send : maybe_evil(to.addr + below(to.bytes / 2), evils);
      op.count = maybe_evil(below(std::min(from.bytes, to.bytes) / 2 / 24), evils);
      op.scalar = op.scalar_on_device ? maybe_evil(block().addr, evils) : rnd();
    }
    wire::COMM_GROUP_req r{};
    r.stream = stream();
    r.bulk_bytes = static_cast<uint32_t>(maybe_evil(group.size() * sizeof(CommOp), 1));
    r.bulk_chunks = static_cast<uint32_t>(chance(99) ? 0 : evil());
    return Raw::record(Opcode::COMM_GROUP, r, group.data(), group.size() * sizeof(CommOp));
  }

  Raw::Record graph() {
    if (in_graph_) {
      wire::GRAPH_LAUNCH_req nested{};
      nested.graph = handle(graphs_, HandleKind::kGraph);
      return Raw::record(Opcode::GRAPH_LAUNCH, nested);
    }
    switch (below(8)) {
      case 0:
      case 1: {
        const std::vector<uint8_t> bulk = steps();
        wire::GRAPH_CREATE_req r{};
        r.graph = VHandle::make(HandleKind::kGraph, ++serial_, 0);
        if (graphs_.size() < 32) graphs_.push_back(r.graph);
        if (chance(4)) r.graph = {evil()};
        r.bulk_bytes = static_cast<uint32_t>(maybe_evil(bulk.size(), 1));
        return with_seq(Raw::record(Opcode::GRAPH_CREATE, r, bulk.data(), bulk.size()));
      }
      case 2: {
        const std::vector<uint8_t> bulk = steps();
        wire::GRAPH_UPDATE_req r{};
        r.graph = handle(graphs_, HandleKind::kGraph);
        r.first = static_cast<uint32_t>(maybe_evil(below(8)));
        r.count = static_cast<uint32_t>(maybe_evil(below(4)));
        r.bulk_bytes = static_cast<uint32_t>(maybe_evil(bulk.size(), 1));
        return Raw::record(Opcode::GRAPH_UPDATE, r, bulk.data(), bulk.size());
      }
      case 3:
        if (chance(40))
          return Raw::record(Opcode::GRAPH_DESTROY, wire::GRAPH_DESTROY_req{handle(graphs_, HandleKind::kGraph)});
        [[fallthrough]];
      default: {
        const std::vector<uint8_t> filling(chance(70) ? 64 : below(200));
        wire::GRAPH_LAUNCH_req r{};
        r.graph = handle(graphs_, HandleKind::kGraph);
        r.stream = stream();
        r.token = maybe_evil(token_ + 1);
        token_ += 10;
        r.bulk_bytes = static_cast<uint32_t>(maybe_evil(filling.size(), 2));
        return Raw::record(Opcode::GRAPH_LAUNCH, r, filling.data(), filling.size());
      }
    }
  }

  // Limits, output, linking, tensor maps, addresses of pinned memory: all of them are answered.
  Raw::Record feature_message() {
    std::vector<uint8_t> bulk(chance(50) ? sizeof(TensorMapArgs) : below(400));
    for (auto& b : bulk) b = static_cast<uint8_t>(chance(70) ? below(3) : rnd());
    const auto n = static_cast<uint32_t>(maybe_evil(bulk.size(), 5));
    const auto chunks = static_cast<uint32_t>(chance(98) ? 0 : evil());
    switch (below(7)) {
      case 0:
        return with_seq(Raw::record(Opcode::SET_LIMIT,
                                    wire::SET_LIMIT_req{static_cast<uint32_t>(maybe_evil(below(10))), 0, evil()}));
      case 1:
        return with_seq(
            Raw::record(Opcode::GET_LIMIT, wire::GET_LIMIT_req{static_cast<uint32_t>(maybe_evil(below(10))), 0}));
      case 2: return with_seq(Raw::record(Opcode::OUTPUT, wire::OUTPUT_req{}));
      case 3:
        return with_seq(Raw::record(Opcode::HOST_DEVICE_ADDRESS,
                                    wire::HOST_DEVICE_ADDRESS_req{maybe_evil(pinned().addr), maybe_evil(below(4096))}));
      case 4:
        return with_seq(Raw::record(Opcode::TENSOR_MAP, wire::TENSOR_MAP_req{n, chunks}, bulk.data(), bulk.size()));
      case 5: return with_seq(Raw::record(Opcode::LINK, wire::LINK_req{n, chunks}, bulk.data(), bulk.size()));
      default:
        return with_seq(Raw::record(
            Opcode::LINK_FETCH, wire::LINK_FETCH_req{maybe_evil(0), static_cast<uint32_t>(maybe_evil(below(kChunks))),
                                                     static_cast<uint32_t>(maybe_evil(0, 30))}));
    }
  }

  ArrayCopySide array_side(bool array) {
    ArrayCopySide side;
    if (array) {
      side.place = handle(arrays_, HandleKind::kArray).value;
      side.x_bytes = static_cast<uint32_t>(maybe_evil(below(3) * 16, 3));
      side.y = static_cast<uint32_t>(maybe_evil(below(3), 3));
      side.z = static_cast<uint32_t>(maybe_evil(below(2), 3));
      side.space = kArraySpace;
      return side;
    }
    uint64_t bytes = 0;
    side.place = place(&side.space, &bytes);
    side.pitch = maybe_evil(128 + below(64), 3);
    side.slice_rows = maybe_evil(4 + below(4), 3);
    return side;
  }

  Raw::Record array_message() {
    const uint64_t dice = in_graph_ ? 9 : below(10);
    if (dice < 2) {
      const uint32_t formats[] = {0x01, 0x02, 0x03, 0x08, 0x10, 0x20};
      const auto a = VHandle::make(HandleKind::kArray, ++serial_, 0);
      if (arrays_.size() < 32) arrays_.push_back(a);
      return with_seq(Raw::record(
          Opcode::ARRAY_CREATE, wire::ARRAY_CREATE_req{chance(95) ? a : VHandle{evil()}, maybe_evil(16 + below(64), 3),
                                                       maybe_evil(below(16), 3), maybe_evil(below(4), 3),
                                                       static_cast<uint32_t>(maybe_evil(formats[below(6)], 3)),
                                                       static_cast<uint32_t>(maybe_evil(uint64_t{1} << below(3), 3)),
                                                       static_cast<uint32_t>(maybe_evil(below(4), 3)), 0}));
    }
    if (dice == 2 && chance(30))
      return Raw::record(Opcode::ARRAY_DESTROY, wire::ARRAY_DESTROY_req{handle(arrays_, HandleKind::kArray)});
    if (dice == 3) {
      TextureArgs args;
      args.kind = static_cast<uint32_t>(maybe_evil(below(2), 3));
      args.resource = static_cast<uint32_t>(maybe_evil(below(4), 3));
      args.array = handle(arrays_, HandleKind::kArray).value;
      args.address = block().addr, args.bytes = maybe_evil(64, 10);
      args.width = maybe_evil(16, 10), args.height = 1, args.pitch = maybe_evil(64, 10);
      args.format = 0x20, args.channels = 1;
      wire::TEXTURE_CREATE_req r{};
      r.texture = VHandle::make(HandleKind::kTexture, ++serial_, 0);
      if (textures_.size() < 32) textures_.push_back(r.texture);
      r.bulk_bytes = static_cast<uint32_t>(maybe_evil(sizeof args, 5));
      return with_seq(Raw::record(Opcode::TEXTURE_CREATE, r, &args, sizeof args));
    }
    if (dice == 4)
      return Raw::record(Opcode::TEXTURE_DESTROY, wire::TEXTURE_DESTROY_req{handle(textures_, HandleKind::kTexture)});
    ArrayCopyArgs args;
    const bool in = chance(50);
    args.dst = array_side(in || chance(10));
    args.src = array_side(!in || chance(10));
    args.width_bytes = maybe_evil(16 * below(5), 3);
    args.rows = maybe_evil(below(4), 3);
    args.slices = maybe_evil(1 + below(2), 3);
    wire::ARRAY_COPY_req r{};
    r.stream = stream();
    r.chunk_release = chance(90) ? 0 : static_cast<uint32_t>(chance(99) ? below(kChunks + 1) : rnd());
    r.bulk_bytes = static_cast<uint32_t>(maybe_evil(sizeof args, 1));
    return Raw::record(Opcode::ARRAY_COPY, r, &args, sizeof args);
  }

  Raw::Record module_message() {
    if (chance(25)) return feature_message();
    std::vector<uint8_t> text(below(200));
    for (auto& b : text) b = static_cast<uint8_t>(rnd());
    const auto n = static_cast<uint32_t>(maybe_evil(text.size()));
    const auto chunks = static_cast<uint32_t>(chance(98) ? 0 : evil());
    const VHandle m = handle(modules_, HandleKind::kModule);
    switch (below(5)) {
      case 0: {
        // The beginning of an image, too short for what its header says it holds, also after mutation (see the top).
        if (!g_image.empty() && chance(50))
          text.assign(g_image.begin(), g_image.begin() + static_cast<long>(below(200)));
        put_hash_ = image_hash(text.data(), text.size());
        put_bytes_ = text.size();
        if (chance(10)) put_hash_.low ^= 1;
        return Raw::record(Opcode::IMAGE_PUT,
                           wire::IMAGE_PUT_req{put_hash_.low, put_hash_.high, maybe_evil(put_bytes_),
                                               chance(90) ? 0 : evil(), static_cast<uint32_t>(text.size()), chunks},
                           text.data(), text.size());
      }
      case 3:
        return with_seq(Raw::record(Opcode::MODULE_LOAD,
                                    wire::MODULE_LOAD_req{VHandle::make(HandleKind::kModule, ++serial_, 0),
                                                          put_hash_.low, put_hash_.high, maybe_evil(put_bytes_)},
                                    nullptr, 0));
      case 1:
        return with_seq(
            Raw::record(Opcode::FUNCTION_GET,
                        wire::FUNCTION_GET_req{m, VHandle::make(HandleKind::kFunction, ++serial_, 0), n, chunks},
                        text.data(), text.size()));
      case 2:
        return with_seq(
            Raw::record(Opcode::MODULE_GLOBAL, wire::MODULE_GLOBAL_req{m, n, chunks}, text.data(), text.size()));
      default:
        if (chance(80))
          return with_seq(Raw::record(Opcode::MODULE_GLOBAL, wire::MODULE_GLOBAL_req{m, 5, 0}, "table", 5));
        return Raw::record(Opcode::MODULE_UNLOAD, wire::MODULE_UNLOAD_req{m});
    }
  }

  Raw::Record launch() {
    wire::LAUNCH_req r{};
    // The first five take (address, ...): most launches run.
    r.function =
        functions_.size() >= 5 && chance(85) ? functions_[below(5)] : handle(functions_, HandleKind::kFunction);
    r.stream = stream();
    uint32_t* shape[] = {&r.grid_x, &r.grid_y, &r.grid_z, &r.block_x, &r.block_y, &r.block_z};
    for (uint32_t* n : shape) *n = static_cast<uint32_t>(maybe_evil(1 + below(4), 3));
    r.shared_bytes = static_cast<uint32_t>(maybe_evil(0, 3));
    r.flags = static_cast<uint32_t>(maybe_evil(0, 3));
    // Parameters: addresses that are mostly ours, small counts, bytes. A wrong one is an execution fault, which ends
    // what this connection can do, so not too many.
    std::vector<uint8_t> params(chance(60) ? 64 : chance(80) ? below(400) : below(kMaxInlineBytes));
    for (size_t at = 0; at + 8 <= params.size(); at += 8) {
      const Block b = block();
      const uint64_t word = maybe_evil(at < 16 ? b.addr : below(128), 2);
      memcpy(params.data() + at, &word, 8);
    }
    if (chance(15)) {  // through chunks
      uint16_t index[kChunks + 8];
      const auto n = static_cast<uint32_t>(1 + below(3));
      for (auto& i : index) i = static_cast<uint16_t>(chance(99) ? below(kChunks) : rnd());
      r.bulk_chunks = static_cast<uint32_t>(maybe_evil(n, 2));
      r.bulk_bytes = static_cast<uint32_t>(maybe_evil((n - 1) * kChunkBytes + 1 + below(kChunkBytes), 2));
      return Raw::record(Opcode::LAUNCH, r, index, n * 2);
    }
    if (chance(20)) return attributes(r, params);
    r.bulk_bytes = static_cast<uint32_t>(maybe_evil(params.size(), 2));
    r.bulk_chunks = 0;
    return Raw::record(Opcode::LAUNCH, r, params.data(), params.size());
  }

  // The same launch with a list of attributes in front, or a question about it.
  Raw::Record attributes(const wire::LAUNCH_req& like, const std::vector<uint8_t>& params) {
    std::vector<uint8_t> bulk;
    const auto n = static_cast<uint32_t>(below(4));
    for (uint32_t i = 0; i < n; i++) {
      LaunchAttribute a;
      a.id = static_cast<uint32_t>(maybe_evil(below(18), 3));
      for (auto& byte : a.value) byte = static_cast<uint8_t>(rnd());
      const auto* from = reinterpret_cast<const uint8_t*>(&a);
      bulk.insert(bulk.end(), from, from + sizeof a);
    }
    if (chance(40)) {
      wire::OCCUPANCY_req q{};
      q.function = like.function, q.kind = static_cast<uint32_t>(maybe_evil(below(4), 3));
      q.flags = static_cast<uint32_t>(rnd()), q.shared_bytes = maybe_evil(below(1 << 16), 5);
      q.grid_x = like.grid_x, q.block_x = like.block_x;
      q.bulk_bytes = static_cast<uint32_t>(maybe_evil(bulk.size(), 3));
      return with_seq(Raw::record(Opcode::OCCUPANCY, q, bulk.data(), bulk.size()));
    }
    bulk.insert(bulk.end(), params.begin(), params.begin() + static_cast<long>(std::min<size_t>(params.size(), 4096)));
    const wire::LAUNCH_EX_req r{like.function,
                                like.stream,
                                like.grid_x,
                                like.grid_y,
                                like.grid_z,
                                like.block_x,
                                like.block_y,
                                like.block_z,
                                like.shared_bytes,
                                static_cast<uint32_t>(maybe_evil(n, 3)),
                                static_cast<uint32_t>(maybe_evil(bulk.size(), 2)),
                                0};
    return Raw::record(Opcode::LAUNCH_EX, r, bulk.data(), bulk.size());
  }

  Raw::Record with_seq(Raw::Record r) {
    r.seq = static_cast<uint32_t>(chance(90) ? 1 + below(1 << 20) : 0) | 0x80000000u;
    return r;
  }

  bool one_message() {
    Raw::Record r = generate();
    r.slot = static_cast<uint16_t>(1 + below(kReplySlots - 1));  // slot 0 is for our honest calls
    if (chance(3))                                               // flip some bytes of the request
      for (uint64_t n = 1 + below(4); n-- > 0 && !r.payload.empty();)
        r.payload[below(r.payload.size())] ^= static_cast<uint8_t>(1 << below(8));
    if (chance(1) && chance(60)) {
      switch (below(5)) {
        case 0: r.payload_bytes = static_cast<uint32_t>(evil()); break;
        case 1: r.opcode = static_cast<uint16_t>(chance(50) ? rnd() : below(0x720)); break;
        case 2: r.slot = static_cast<uint16_t>(rnd()); break;
        case 3: r.commit = static_cast<uint32_t>(chance(50) ? evil() : below(1 << 20) * 64); break;
        default: {  // nothing but noise
          for (auto& b : r.payload) b = static_cast<uint8_t>(rnd());
          r.opcode = static_cast<uint16_t>(rnd());
        }
      }
      if (r.commit) c_.scribbled_ = true;  // our idea of the position is no longer the server's
    }
    if (!c_.send_record(r)) return false;
    if (c_.fault() && !counted_fault_) {
      counted_fault_ = true;
      ++g_faults;
    }
    return !(counted_fault_ && chance(20));  // some more after a fault, then a fresh connection
  }

  void attack_control_page() {
    ControlPage* c = c_.view.control();
    switch (below(9)) {
      case 0:
        c->head.value = evil();
        c_.scribbled_ = true;
        break;
      case 1: c->tail.value = evil(); break;
      case 2: c->doorbell.sleeping = static_cast<uint32_t>(rnd()); break;
      case 3: c->space_waiters = static_cast<uint32_t>(rnd()); break;
      case 4:
        c->chunk_busy[below(kChunks)] = static_cast<uint32_t>(rnd());
        c->chunk_waiters = 1;
        break;
      case 5: c->hostfuncs[below(kHostFuncs)].token = evil(); break;
      case 6: c_.view.streams()[below(kStreams)].completed = evil(); break;
      case 7: {
        RoomWait& entry = c->room_waits[below(kRoomWaits)];
        entry.begin = evil(), entry.end = evil(), entry.slot = static_cast<uint32_t>(rnd());
        c->room_waits_filled = 1;
        break;
      }
      default: c_.view.replies()[below(kReplySlots)].waiting = 1; break;
    }
    ++g_scribbled;
  }

  // Changes bytes of records, never the words that commit them, while the server reads.
  void scribble_payloads(std::atomic<bool>& stop, uint64_t seed) {
    std::mt19937_64 mine(seed);
    uint8_t* ring = c_.view.ring().at(0);
    while (!stop) {
      for (int i = 0; i < 64; ++i) {
        const uint64_t v = mine();
        size_t at = v % kRingBytes;
        if (mine() % 2) at = (c_.view.control()->tail.value.load() + v % 512) % kRingBytes;
        if (at % kLineBytes >= 8) *reinterpret_cast<volatile uint8_t*>(ring + at) = static_cast<uint8_t>(v >> 32);
      }
      usleep(20);
    }
  }

  void answer_host_functions() {
    for (auto& entry : c_.view.control()->hostfuncs)
      if (const uint64_t token = entry.token.exchange(0))
        c_.send_record(Raw::record(Opcode::HOST_FUNC_DONE, wire::HOST_FUNC_DONE_req{token}));
  }

  void finish() {
    if (c_.poisoned()) {
      ++g_poisoned;
      return;
    }
    if (c_.scribbled_ || chance(30)) {  // goes in the middle of everything
      ++g_left_hanging;
      return;
    }
    answer_host_functions();
    int32_t status = -1;
    if (c_.call(Raw::record(Opcode::NOP, wire::NOP_req{}), &status) || c_.poisoned()) return;
    if (c_.hung_up()) die("the server died");
    die("the server does not answer an honest message");
  }

  Raw c_;
  const Canary& canary_;
  std::vector<Block> blocks_, pinned_;
  std::vector<VHandle> streams_, events_, modules_, functions_, graphs_, arrays_, textures_, comms_;
  bool in_graph_ = false;  // making the steps of one
  bool used_[kBlocks] = {};
  uint64_t serial_ = 0, token_ = 0;
  ImageHash put_hash_{};  // of the last image that was put
  uint64_t put_bytes_ = 0;
  bool counted_fault_ = false;
};

// All hostile connections are gone: the server has exactly what the canary has.
void check_nothing_left(const Canary& canary) {
  const uint64_t until = now_us() + kAnswerUs;
  for (;;) {
    const std::string s = stats();
    if (number_of(s, "clients_now") == 1 && number_of(s, "used") == canary.used_bytes()) return;
    if (now_us() > until)
      die("after the last hostile connection the server has %lld clients and %lld bytes in use, not 1 and %lld",
          number_of(s, "clients_now"), number_of(s, "used"), canary.used_bytes());
    usleep(20'000);
  }
}

// Operations of communicators that were carried out: of those whose boards are left (hal/soft/comm/board.h says where
// the counts are), since most connections end without destroying theirs.
uint64_t collectives() {
  uint64_t all = 0;
  for (const auto& entry : std::filesystem::directory_iterator(getenv("DEVPROXY_JOB_DIR"))) {
    if (!entry.path().filename().string().starts_with("comm-")) continue;
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    uint32_t ranks = 0;
    uint64_t finished = 0;
    if (pread(fd, &ranks, sizeof ranks, 4) == sizeof ranks && ranks &&
        pread(fd, &finished, sizeof finished, 192) == sizeof finished)
      all += finished / ranks;
    close(fd);
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t messages = 20'000;
  g_seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string arg = argv[i];
    if (arg == "--messages")
      messages = strtoull(argv[i + 1], nullptr, 0);
    else if (arg == "--seed")
      g_seed = strtoull(argv[i + 1], nullptr, 0);
    else if (arg == "--kernels") {
      FILE* f = fopen(argv[i + 1], "rb");
      if (!f) die("cannot read the kernels");
      g_image.resize(1 << 20);
      g_image.resize(fread(g_image.data(), 1, g_image.size(), f));
      fclose(f);
    } else
      return fprintf(stderr, "server_fuzz: unknown option %s\n", argv[i]), 2;
  }
  rng.seed(g_seed);
  Canary canary;
  while (g_sent < messages) {
    Attacker(canary).live(std::min<uint64_t>(20 + below(600), messages - g_sent));
    if (chance(10)) canary.check();
  }
  canary.check();
  check_nothing_left(canary);
  // What got through, of all clients: a fuzzer that is always refused tests little.
  const std::string all = stats(), account = all.substr(std::min(all.find("\"totals\""), all.size()));
  printf(
      "{\"ok\": true, \"seed\": %llu, \"messages\": %llu, \"connections\": %llu, \"poisoned\": %llu, \"faults\": %llu, "
      "\"control_page_attacks\": %llu, \"left_in_the_middle\": %llu, \"launches\": %lld, \"allocs\": %lld, "
      "\"d2d_bytes\": %lld, \"memset_bytes\": %lld, \"collectives\": %llu}\n",
      static_cast<unsigned long long>(g_seed), static_cast<unsigned long long>(g_sent),
      static_cast<unsigned long long>(g_connections), static_cast<unsigned long long>(g_poisoned),
      static_cast<unsigned long long>(g_faults), static_cast<unsigned long long>(g_scribbled),
      static_cast<unsigned long long>(g_left_hanging), number_of(account, "launches"), number_of(account, "allocs"),
      number_of(account, "d2d_bytes"), number_of(account, "memset_bytes"),
      static_cast<unsigned long long>(collectives()));
  return 0;
}
