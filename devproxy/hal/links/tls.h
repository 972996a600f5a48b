// SPDX-License-Identifier: Apache-2.0
// TLS 1.3 over a connection between the servers of two trees, for a job that encrypts its data (roster.h says whether).
// Both ends show that they know the job's key, by an external PSK. An ephemeral exchange comes beside it: whoever learns the
// key later cannot read what was said before.
//
// OpenSSL does it. Its library is loaded with the first such connection: nobody else needs it.
//
// A Tls belongs to one thread at a time. After the handshake it never writes into the socket: seal() makes the bytes, and its
// owner sends them. So a connection goes one way, as a plain one does (frame.h).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/links/frame.h"

namespace devproxy::hal {

using DataKey = std::array<uint8_t, kTokenBytes>;

// The first byte of a connection that begins with TLS; a Hello begins with another.
inline constexpr uint8_t kTlsFirstByte = 22;

// What OpenSSL's callbacks see of a connection.
struct TlsWire {
  const int fd;
  const DataKey key;
  std::vector<uint8_t> out;
  bool hung_up = false;
};

class Tls {
 public:
  enum class Role : uint8_t { kOpener, kAccepter };
  // Under the limit of RFC 8446, 5.5 for AES-GCM (2^24.5 records of 16 KiB) by far.
  static constexpr uint64_t kBytesOfAKey = uint64_t{64} << 30;

  // Of OpenSSL. Who will encrypt asks first.
  static Status load();

  // The first contact, on a connected socket that does not block. The error is for people.
  static StatusOr<std::unique_ptr<Tls>> shake_hands(int fd, Role role, const DataKey& key, uint64_t until_us,
                                                    const std::atomic<bool>& closing,
                                                    uint64_t bytes_of_a_key = kBytesOfAKey);
  ~Tls();
  Tls(const Tls&) = delete;

  // What goes over the wire for these bytes comes behind what sealed() has.
  bool seal(const void* from, size_t bytes);
  std::vector<uint8_t>& sealed() { return wire_.out; }

  // 1: some bytes, *got of them. 0: none yet, where the socket does not block. -1: the end, or wrong bytes.
  int read(void* to, size_t bytes, size_t* got);
  // Something has been read from the socket that read() has not given.
  bool has_pending() const;
  // Why read() said -1; nullptr where the other end has hung up.
  const char* wrong() const { return wrong_; }

 private:
  Tls(int fd, const DataKey& key, uint64_t bytes_of_a_key) : wire_{fd, key, {}}, bytes_of_a_key_(bytes_of_a_key) {}
  bool begin(Role role);
  std::string refusal(Role role) const;
  // Precondition: the socket does not block.
  bool flush(uint64_t until_us, const std::atomic<bool>& closing);

  TlsWire wire_;
  const uint64_t bytes_of_a_key_;
  void* ssl_ = nullptr;        // SSL*: OpenSSL's headers stay in tls.cc
  uint64_t sealed_bytes_ = 0;  // under this key
  const char* wrong_ = nullptr;
};

}  // namespace devproxy::hal
