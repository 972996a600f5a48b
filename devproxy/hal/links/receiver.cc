// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/links/receiver.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "devproxy/csrc/base/log.h"

namespace devproxy::hal {

namespace {

constexpr uint64_t kChaosUs = 2'000;
constexpr int kQuietMs = 1000;

}  // namespace

bool Receiver::Stream::read(Frame* frame) {
  idle_.store(begin_ == end_ && !(tls_ && tls_->has_pending()), std::memory_order_release);
  return read(frame, sizeof *frame);
}

bool Receiver::Stream::read(void* to, size_t bytes) {
  auto* out = static_cast<uint8_t*>(to);
  while (bytes != 0) {
    if (begin_ == end_ && !fill()) return false;
    const size_t n = std::min(bytes, end_ - begin_);
    std::memcpy(out, buffer_ + begin_, n);
    begin_ += n, out += n, bytes -= n;
  }
  return true;
}

bool Receiver::Stream::read_into(int file, uint8_t* at, uint64_t offset, size_t bytes) {
  do {
    const size_t have = std::min(bytes, end_ - begin_);
    if (have != 0 && pwrite(file, buffer_ + begin_, have, static_cast<off_t>(offset)) != static_cast<ssize_t>(have))
      return false;
    begin_ += have, offset += have, bytes -= have;
    // OpenSSL writes by its own code, so through the buffer.
  } while (tls_ && bytes != 0 && fill_from_tls());
  while (!tls_ && bytes != 0) {
    const ssize_t n = recv(fd_, at + offset, bytes, MSG_WAITALL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    offset += static_cast<size_t>(n), bytes -= static_cast<size_t>(n);
  }
  return bytes == 0;
}

bool Receiver::Stream::fill() {
  if (tls_) return fill_from_tls();
  ssize_t n;
  do n = recv(fd_, buffer_, sizeof buffer_, 0);
  while (n < 0 && errno == EINTR);
  if (n <= 0) return false;
  idle_.store(false, std::memory_order_release);
  begin_ = 0;
  end_ = static_cast<size_t>(n);
  return true;
}

// What has left the socket's buffer must not look as if it were done: so it first waits, then is not idle, then reads.
bool Receiver::Stream::fill_from_tls() {
  pollfd look{fd_, POLLIN, 0};
  while (!tls_->has_pending() && poll(&look, 1, kQuietMs) == 0) {}
  idle_.store(false, std::memory_order_release);
  begin_ = end_ = 0;
  return tls_->read(buffer_, sizeof buffer_, &end_) == 1;
}

void Receiver::run(int fd, Tls* tls, const std::atomic<bool>& closing, const std::atomic<bool>& leaving,
                   std::atomic<bool>& idle) {
  arrived();
  Stream stream(fd, tls, idle);
  Frame frame;
  bool planned = false;
  while (!planned && stream.read(&frame)) {
    if (chaos_) delay();
    if (frame.magic == kFrameMagic && frame.kind == FrameKind::kBye) {
      planned = true;
      continue;
    }
    if (const char* wrong = look_at(frame, stream)) {
      if (tls && tls->wrong()) break;  // said below
      DP_LOG(kWarn, kServer, 0, "the server of GPU %u of tree %u sends what it must not (kind %u): %s: cut off",
             peer_.gpu, peer_.tree, static_cast<unsigned>(frame.kind), wrong);
      break;
    }
  }
  if (tls && tls->wrong())
    DP_LOG(kWarn, kServer, 0, "what comes from the server of GPU %u of tree %u is not what it has sent: %s: cut off",
           peer_.gpu, peer_.tree, tls->wrong());
  else
    DP_LOG(kInfo, kServer, 0, "the server of GPU %u of tree %u has hung up%s", peer_.gpu, peer_.tree,
           planned ? ", as planned" : "");
  // Where both leave at the same time, the other end may find that this one has hung up before it has said bye.
  if (!closing.load(std::memory_order_acquire)) ended(planned || leaving.load());
}

const char* Receiver::look_at(const Frame& frame, Stream& stream) {
  if (frame.magic != kFrameMagic) return "it is no frame";
  if (frame.kind == FrameKind::kMark) return marked_(frame.bytes), nullptr;
  return take(frame, stream);
}

// Its frames stay in order; against those of other connections they move.
void Receiver::delay() {
  chaos_ = chaos_ * 6364136223846793005 + 1442695040888963407;
  const uint64_t dice = chaos_ >> 33;
  if (dice % 4 == 0) usleep(static_cast<useconds_t>(dice / 4 % kChaosUs));
}

}  // namespace devproxy::hal
