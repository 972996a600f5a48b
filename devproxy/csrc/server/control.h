// SPDX-License-Identifier: Apache-2.0
// The control channel: what the coordinator of a job says to its servers, and how frames are read.
//
// AttachKind::kControl on gpuK.sock; the socket stays open. A frame is a uint32_t length (little endian) and JSON, one
// answer per request, in order. {"ok":true,...} or {"ok":false,"error":...,"state":"running|parked"}. The requests are
// listed in docs/protocol.md.
//
// The server thread answers. A cut is answered later, when the last connection has parked (ServerParts::wake) or no
// progress was made; meanwhile the thread serves everybody else. A dump blocks it: nobody runs then anyway.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "devproxy/csrc/base/json_fwd.h"

namespace devproxy::hal {
struct Properties;
}

namespace devproxy::server {

inline constexpr size_t kMaxControlBytes = 64u << 10;
inline constexpr uint64_t kUnreadUs = 10'000'000;

// What is said into a socket of which nobody knows whether the other side reads. Never waits. Owns the socket.
class Outbox {
 public:
  explicit Outbox(int socket) : socket_(socket) {}
  Outbox(const Outbox&) = delete;
  ~Outbox();
  int socket() const { return socket_; }
  void say(const std::string& text);  // behind its length
  bool waits() const { return !out_.empty(); }
  // As much as goes now. False: the peer is gone, or has read nothing for kUnreadUs.
  bool flush();

 private:
  const int socket_;
  std::string out_;
  uint64_t moved_us_ = 0;  // when some of it went
};

// One control connection: bytes in, whole requests out. One whose answers are not read is asked nothing more.
class ControlPeer : public Outbox {
 public:
  using Outbox::Outbox;
  bool receive();                        // false: it hung up, or says what no coordinator says
  std::optional<std::string> request();  // the next whole one
  void answer(const Json& json);

 private:
  std::string in_;
};

// What an image keeps of its GPU, and a restore compares: {"name", "major", "minor", "memory_bytes"}.
Json describe(const hal::Properties& gpu);

// A fixed struct into a fresh socket, which has room for it: nobody is waited for.
void send_now(int socket, const void* data, size_t bytes);

}  // namespace devproxy::server
