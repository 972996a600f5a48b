// SPDX-License-Identifier: Apache-2.0
// The end of a connection at which frames arrive (frame.h). A device derives from this: it does for the members of its
// communicators what those of the sender's server have said.
//
// Threads: one for each connection, which owns its Receiver.
//
// Nothing that arrives is trusted. Whoever sends what it must not is cut off, and its members are lost, as if it had died.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "devproxy/hal/links/frame.h"
#include "devproxy/hal/links/tls.h"

namespace devproxy::hal {

// At the other end.
struct PeerServer {
  uint32_t tree = 0, gpu = 0;
  uint64_t server = 0;
};

class Receiver {
 public:
  using Marked = std::function<void(uint64_t)>;
  // chaos: a seed; 0 for none. marked: of each mark, when all before it is done.
  Receiver(const PeerServer& peer, uint64_t chaos, Marked marked)
      : peer_(peer), chaos_(chaos), marked_(std::move(marked)) {}
  virtual ~Receiver() = default;
  Receiver(const Receiver&) = delete;

  // Until the connection ends. What that means for the peer's members is done too, unless this server ends itself.
  // leaving: this server's end is planned, so is the other's then. idle: whether all that has come so far was done.
  // tls: of an encrypted connection, else nullptr.
  void run(int fd, Tls* tls, const std::atomic<bool>& closing, const std::atomic<bool>& leaving,
           std::atomic<bool>& idle);

 protected:
  // What comes, behind a buffer.
  class Stream {
   public:
    Stream(int fd, Tls* tls, std::atomic<bool>& idle) : fd_(fd), tls_(tls), idle_(idle) {}
    bool read(Frame* frame);
    bool read(void* to, size_t bytes);
    // The next bytes into a file that is mapped at `at`, through system calls alone: they fail where no page is left, and
    // a write by this thread would be a fault.
    bool read_into(int file, uint8_t* at, uint64_t offset, size_t bytes);

   private:
    bool fill();
    bool fill_from_tls();

    const int fd_;
    Tls* const tls_;
    std::atomic<bool>& idle_;
    size_t begin_ = 0, end_ = 0;
    uint8_t buffer_[16 << 10];  // of TLS: a record
  };

  const PeerServer peer_;

 private:
  // The connection is there; it has ended.
  virtual void arrived() = 0;
  virtual void ended(bool planned) = 0;
  // What is wrong with it; nullptr where nothing is. No bye and no mark.
  virtual const char* take(const Frame& frame, Stream& stream) = 0;
  const char* look_at(const Frame& frame, Stream& stream);
  void delay();

  uint64_t chaos_;
  const Marked marked_;
};

using MakeReceiver = std::function<std::unique_ptr<Receiver>(const PeerServer&, uint64_t chaos, Receiver::Marked)>;

}  // namespace devproxy::hal
