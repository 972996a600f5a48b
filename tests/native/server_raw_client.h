// SPDX-License-Identifier: Apache-2.0
// A client of the wire and nothing else: no shim, no allocator. For tests of the server that say exactly what they
// post.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/image_hash.h"
#include "devproxy/csrc/base/result.h"
#include "devproxy/csrc/transport/segment_view.h"
#include "devproxy/csrc/wire/attach.h"
#include "dispatch.gen.h"

namespace devproxy::test {

#define EXPECT(condition)                                                           \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                \
    }                                                                               \
  } while (0)

inline constexpr uint64_t kTimeoutUs = 20'000'000;

class RawClient {
 public:
  explicit RawClient(const std::string& socket_path, bool use_pinned = false) {
    socket_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s", socket_path.c_str());
    EXPECT(connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    AttachRequest hello{};
    hello.magic = kAttachMagic;
    hello.kind = AttachKind::kClient;
    std::memcpy(hello.abi_id, wire::kAbiId, 32);
    hello.pid = static_cast<uint32_t>(getpid());
    hello.wanted_slot = 0xffffffff;
    EXPECT(send(socket_, &hello, sizeof hello, 0) == sizeof hello);
    EXPECT(recv(socket_, &attached, sizeof attached, MSG_WAITALL) == sizeof attached);
    if (attached.status != AttachStatus::kOk) std::fprintf(stderr, "attach: %s\n", attached.text);
    EXPECT(attached.status == AttachStatus::kOk);
    const std::string dir = socket_path.substr(0, socket_path.rfind('/') + 1);
    const int segment = open((dir + attached.segment_name).c_str(), O_RDWR | O_CLOEXEC);
    EXPECT(segment >= 0 && view.map(segment));
    close(segment);
    EXPECT(view.control()->magic == kSegmentMagic && view.control()->slot == attached.slot);
    link_ = open((dir + attached.link_name).c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    EXPECT(link_ >= 0 && send(socket_, &kLinked, sizeof kLinked, 0) == sizeof kLinked);
    close(socket_);
    if (!use_pinned) return;
    const int pinned = open((dir + attached.pinned_name).c_str(), O_RDWR | O_CLOEXEC);
    void* want = reinterpret_cast<void*>(pinned_base());
    EXPECT(mmap(want, kPinnedBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE, pinned,
                0) == want);
    close(pinned);
    pinned_ = true;
  }
  ~RawClient() {
    if (pinned_) munmap(reinterpret_cast<void*>(pinned_base()), kPinnedBytes);
    view.unmap();
    hang_up();
  }

  uint64_t base() const { return range_base(attached.slot); }
  uint64_t pinned_base() const { return base() + kDeviceBytes; }

  // Posts; returns the position of the record's end. A request type of size 1 is an empty one.
  template <class Request>
  uint64_t post(wire::Opcode opcode, const Request& request, const void* bulk = nullptr, size_t bulk_bytes = 0,
                uint32_t seq = 0, uint16_t slot = 0) {
    const size_t fixed = sizeof request == 1 ? 0 : sizeof request;
    return post_bytes(static_cast<uint16_t>(opcode), &request, fixed, bulk, bulk_bytes, seq, slot);
  }
  uint64_t post_bytes(uint16_t opcode, const void* request, size_t fixed, const void* bulk, size_t bulk_bytes,
                      uint32_t seq, uint16_t slot) {
    CommandRing& ring = view.ring();
    const auto r = ring.reserve(sizeof(MsgHeader) + fixed + bulk_bytes);
    const uint64_t until = now_us() + kTimeoutUs;
    while (!ring.has_space(r)) EXPECT(now_us() < until);
    uint8_t* at = ring.at(r.pos);
    auto* head = reinterpret_cast<MsgHeader*>(at);
    head->opcode = opcode;
    head->slot = slot;
    head->payload_bytes = static_cast<uint32_t>(fixed + bulk_bytes);
    head->seq = seq;
    if (fixed) std::memcpy(at + sizeof(MsgHeader), request, fixed);
    if (bulk_bytes) std::memcpy(at + sizeof(MsgHeader) + fixed, bulk, bulk_bytes);
    if (ring.publish(r)) futex_wake(&view.control()->doorbell.sleeping, 1);
    return r.end();
  }
  // Posts and waits for the answer. Returns its status; `tail` gets what the server sent. kDeviceUnavailable where the
  // server is gone or has poisoned the connection.
  template <class Request>
  int call(wire::Opcode opcode, const Request& request, const void* bulk = nullptr, size_t bulk_bytes = 0,
           std::vector<uint8_t>* tail = nullptr) {
    const uint32_t seq = ++seq_;
    post(opcode, request, bulk, bulk_bytes, seq);
    ReplySlot& slot = view.replies()[0];
    const uint64_t until = now_us() + kTimeoutUs;
    while (slot.seq.load(std::memory_order_acquire) != seq) {
      if (state() != ServerState::kRunning) return kDeviceUnavailable;
      EXPECT(now_us() < until);
    }
    if (tail) tail->assign(slot.data, slot.data + slot.bytes);
    return slot.status;
  }
  void wait(uint32_t stream, uint64_t position) {
    const uint64_t until = now_us() + kTimeoutUs;
    while (view.streams()[stream].completed.load(std::memory_order_acquire) < position) EXPECT(now_us() < until);
  }
  bool complete(uint32_t stream, uint64_t position) { return view.streams()[stream].completed.load() >= position; }
  ServerState state() const {
    return static_cast<ServerState>(view.control()->server_state.load(std::memory_order_acquire));
  }
  int take_late_error() { return view.replies()[0].late_error.exchange(0); }

  int nop() { return call(wire::Opcode::NOP, wire::NOP_req{}); }
  void credit(uint64_t bytes) { EXPECT(call(wire::Opcode::MEM_CREDIT, wire::MEM_CREDIT_req{bytes, bytes}) == kOk); }
  void alloc(uint64_t addr, uint64_t bytes) { post(wire::Opcode::MEM_ALLOC, wire::MEM_ALLOC_req{addr, bytes, 0, 0}); }
  void free(uint64_t addr) { post(wire::Opcode::MEM_FREE, wire::MEM_FREE_req{addr, 0, 0}); }
  // Through chunk `chunk`; bytes <= kChunkBytes.
  uint64_t h2d(VHandle stream, uint64_t dst, const void* src, uint64_t bytes, uint32_t chunk = 0) {
    view.control()->chunk_busy[chunk].store(1);
    std::memcpy(view.chunk(chunk), src, bytes);
    return post(wire::Opcode::COPY, wire::COPY_req{stream, dst, chunk * kChunkBytes, bytes, 0, 2, 0, chunk + 1});
  }
  void d2h(VHandle stream, void* dst, uint64_t src, uint64_t bytes, uint32_t chunk = 1) {
    const uint64_t p = post(wire::Opcode::COPY, wire::COPY_req{stream, chunk * kChunkBytes, src, bytes, 2, 0, 0, 0});
    wait(stream.index(), p);
    std::memcpy(dst, view.chunk(chunk), bytes);
  }
  uint64_t fill(VHandle stream, uint64_t dst, uint64_t count, uint32_t value) {
    return post(wire::Opcode::MEMSET, wire::MEMSET_req{stream, dst, 0, count, 1, value, 4});
  }
  int load(VHandle module, const std::vector<uint8_t>& image) {
    const auto chunks = static_cast<uint32_t>((image.size() + kChunkBytes - 1) / kChunkBytes);
    std::vector<uint16_t> index;
    for (uint32_t i = 0; i < chunks; i++) {
      const auto chunk = static_cast<uint16_t>(kChunks - 1 - i);  // not in order, to see that they are looked at
      view.control()->chunk_busy[chunk].store(1);
      std::memcpy(view.chunk(chunk), image.data() + i * kChunkBytes,
                  std::min(kChunkBytes, image.size() - i * kChunkBytes));
      index.push_back(chunk);
    }
    const ImageHash hash = image_hash(image.data(), image.size());
    post(wire::Opcode::IMAGE_PUT,
         wire::IMAGE_PUT_req{hash.low, hash.high, image.size(), 0, static_cast<uint32_t>(image.size()), chunks},
         index.data(), index.size() * 2);
    bool known = false;
    const int status = load_known(module, hash, image.size(), &known);
    for (const uint16_t chunk : index) EXPECT(view.control()->chunk_busy[chunk].load() == 0);
    EXPECT(known || status != kOk);
    return status;
  }
  // Without sending it. *known: whether the server had it, and so has loaded it.
  int load_known(VHandle module, const ImageHash& hash, uint64_t bytes, bool* known) {
    std::vector<uint8_t> tail;
    const int status =
        call(wire::Opcode::MODULE_LOAD, wire::MODULE_LOAD_req{module, hash.low, hash.high, bytes}, nullptr, 0, &tail);
    *known = tail.size() >= sizeof(wire::MODULE_LOAD_rep) && tail[0] == 1;
    return status;
  }
  int function(VHandle module, VHandle function, const std::string& name, std::vector<uint8_t>* tail = nullptr) {
    return call(wire::Opcode::FUNCTION_GET,
                wire::FUNCTION_GET_req{module, function, static_cast<uint32_t>(name.size()), 0}, name.data(),
                name.size(), tail);
  }
  uint64_t launch(VHandle function, VHandle stream, const void* params, uint32_t bytes) {
    return post(wire::Opcode::LAUNCH, wire::LAUNCH_req{function, stream, 1, 1, 1, 1, 1, 1, 0, 0, bytes, 0}, params,
                bytes);
  }
  void create_stream(VHandle stream, uint32_t flags = 0) {
    post(wire::Opcode::STREAM_CREATE, wire::STREAM_CREATE_req{stream, flags, 0});
  }
  void hang_up() {
    if (link_ >= 0) close(link_);
    link_ = -1;
  }
  bool server_lives() const {
    pollfd link{link_, 0, 0};
    return poll(&link, 1, 0) == 0;
  }

  AttachReply attached{};
  SegmentView view;

 private:
  int socket_ = -1, link_ = -1;
  uint32_t seq_ = 0;
  bool pinned_ = false;
};

// The coordinator's end of a control channel.
class RawControl {
 public:
  explicit RawControl(const std::string& socket_path) {
    socket_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s", socket_path.c_str());
    EXPECT(connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    AttachRequest hello{};
    hello.magic = kAttachMagic;
    hello.kind = AttachKind::kControl;
    EXPECT(send(socket_, &hello, sizeof hello, 0) == sizeof hello);
  }
  ~RawControl() { close(socket_); }
  std::string ask(const std::string& json) {
    auto length = static_cast<uint32_t>(json.size());
    EXPECT(send(socket_, &length, sizeof length, 0) == sizeof length);
    EXPECT(send(socket_, json.data(), json.size(), 0) == static_cast<ssize_t>(json.size()));
    EXPECT(recv(socket_, &length, sizeof length, MSG_WAITALL) == sizeof length && length < 1 << 20);
    std::string text(length, 0);
    EXPECT(recv(socket_, text.data(), length, MSG_WAITALL) == static_cast<ssize_t>(length));
    return text;
  }
  bool ok(const std::string& json) { return ask(json).find("\"ok\":true") != std::string::npos; }

 private:
  int socket_ = -1;
};

// A server of its own in a folder of its own; both go with it.
class TestServer {
 public:
  TestServer(const std::string& program, const std::vector<std::string>& more = {}, std::string dir = "", int gpu = 0,
             const std::string& memory = "1073741824") {
    if (dir.empty()) {
      char name[] = "/dev/shm/devproxy-test-XXXXXX";
      EXPECT(mkdtemp(name));
      dir = name;
      owns_dir_ = true;
    }
    dir_ = dir;
    socket_path = dir + "/gpu" + std::to_string(gpu) + ".sock";
    int ready[2], lease[2];
    EXPECT(pipe(ready) == 0 && pipe(lease) == 0);
    fcntl(ready[0], F_SETFD, FD_CLOEXEC);
    fcntl(lease[1], F_SETFD, FD_CLOEXEC);
    std::vector<std::string> args = {program,
                                     "--job",
                                     "test",
                                     "--job-dir",
                                     dir,
                                     "--gpu",
                                     std::to_string(gpu),
                                     "--device",
                                     "soft",
                                     "--gpu-memory",
                                     memory,
                                     "--ledger",
                                     dir + "/ledger",
                                     "--lease-fd",
                                     std::to_string(lease[0]),
                                     "--ready-fd",
                                     std::to_string(ready[1])};
    args.insert(args.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& a : args) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
      execv(program.c_str(), argv.data());
      _exit(127);
    }
    close(ready[1]);
    close(lease[0]);
    lease_ = lease[1];
    char line[512];
    const ssize_t n = read(ready[0], line, sizeof line - 1);
    ready_line.assign(line, n > 0 ? static_cast<size_t>(n) : 0);
    close(ready[0]);
  }
  ~TestServer() {
    end_lease();
    if (pid > 0) wait();
    if (owns_dir_) [[maybe_unused]]
      const int ignored = system(("rm -rf " + dir_).c_str());
  }
  void end_lease() {
    if (lease_ >= 0) close(lease_);
    lease_ = -1;
  }
  // Exit status, or 256 + signal.
  int wait() {
    int status = 0;
    EXPECT(waitpid(pid, &status, 0) == pid);
    pid = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
  }
  // Names in the folder that begin with "gpu".
  int files() const {
    FILE* out = popen(("ls " + dir_ + " | grep -c '^gpu'").c_str(), "r");
    int n = -1;
    EXPECT(fscanf(out, "%d", &n) == 1);
    pclose(out);
    return n;
  }
  std::string stats() const {
    const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s", socket_path.c_str());
    EXPECT(connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    AttachRequest hello{};
    hello.magic = kAttachMagic;
    hello.kind = AttachKind::kStats;
    EXPECT(send(socket, &hello, sizeof hello, 0) == sizeof hello);
    uint32_t length = 0;
    EXPECT(recv(socket, &length, sizeof length, MSG_WAITALL) == sizeof length && length < 1 << 20);
    std::string text(length, 0);
    EXPECT(recv(socket, text.data(), length, MSG_WAITALL) == static_cast<ssize_t>(length));
    close(socket);
    return text;
  }
  const std::string& dir() const { return dir_; }

  std::string socket_path, ready_line;
  pid_t pid = -1;

 private:
  std::string dir_;
  bool owns_dir_ = false;
  int lease_ = -1;
};

inline std::vector<uint8_t> read_file(const std::string& path) {
  std::vector<uint8_t> bytes;
  FILE* file = std::fopen(path.c_str(), "rb");
  EXPECT(file);
  uint8_t block[65536];
  for (size_t n; (n = std::fread(block, 1, sizeof block, file)) > 0;) bytes.insert(bytes.end(), block, block + n);
  std::fclose(file);
  return bytes;
}

}  // namespace devproxy::test
