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

// One control connection: bytes in, whole requests out. Owns its socket.
class ControlPeer {
 public:
  explicit ControlPeer(int socket) : socket_(socket) {}
  ControlPeer(const ControlPeer&) = delete;
  ~ControlPeer();
  int socket() const { return socket_; }
  bool receive();                        // false: it hung up, or says what no coordinator says
  std::optional<std::string> request();  // the next whole one
  void answer(const Json& json) const;

 private:
  const int socket_;
  std::string in_;
};

// What an image keeps of its GPU, and a restore compares: {"name", "major", "minor", "memory_bytes"}.
Json describe(const hal::Properties& gpu);

// Fixed structs and short texts into a socket: a peer that is gone is not waited for.
void send_all(int socket, const void* data, size_t bytes);

}  // namespace devproxy::server
