// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/peer_link.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/wire/attach.h"
#include "wire.gen.h"

namespace devproxy::server {

namespace {

constexpr uint64_t kReplacedUs = 10'000'000;  // as long as a client that attaches waits
constexpr timeval kAnswerTime{5, 0};

union Ancillary {
  cmsghdr head;
  char space[CMSG_SPACE(sizeof(int))];
};

// A connected socket, or -1.
int connect_to(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return -1;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &kAnswerTime, sizeof kAnswerTime);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &kAnswerTime, sizeof kAnswerTime);  // connect(2) too: its queue may be full
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

// 1: answered, *memory is -1 where there is no such client. 0: the server hung up or was silent.
int ask(int fd, uint32_t slot, int* memory) {
  AttachRequest request{};
  request.magic = kAttachMagic;
  request.kind = AttachKind::kPeer;
  std::memcpy(request.abi_id, wire::kAbiId, sizeof request.abi_id);
  request.pid = static_cast<uint32_t>(getpid());
  request.wanted_slot = slot;
  if (send(fd, &request, sizeof request, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof request)) return 0;
  uint8_t found = 0;
  iovec io{&found, 1};
  Ancillary ancillary{};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = &ancillary;
  message.msg_controllen = sizeof ancillary;
  ssize_t n;
  do n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  while (n < 0 && errno == EINTR);
  if (n != 1) return 0;
  *memory = -1;
  const cmsghdr* const head = CMSG_FIRSTHDR(&message);
  if (found && head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS &&
      head->cmsg_len == CMSG_LEN(sizeof(int)))
    std::memcpy(memory, CMSG_DATA(head), sizeof(int));
  return 1;
}

}  // namespace

StatusOr<hal::PeerLink> reach_peer(const std::string& job_dir, const hal::SpacePlace& peer) {
  const std::string path = job_dir + "/gpu" + std::to_string(peer.gpu) + ".sock";
  const uint64_t until = now_us() + kReplacedUs;
  for (;;) {
    const int fd = connect_to(path);
    if (fd < 0) return Status(kNotFound, "the server of GPU " + std::to_string(peer.gpu) + " is gone");
    int memory = -1;
    if (ask(fd, peer.slot, &memory)) {
      if (memory >= 0) return hal::PeerLink{memory, fd};
      close(fd);
      return Status(kNotFound, "the process that had it is gone");
    }
    close(fd);
    if (now_us() > until)
      return Status(kNotFound, "the server of GPU " + std::to_string(peer.gpu) + " does not answer");
    usleep(10'000);
  }
}

void answer_peer(int socket, int memory) {
  uint8_t found = memory >= 0;
  iovec io{&found, 1};
  Ancillary ancillary{};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  if (found) {
    message.msg_control = &ancillary;
    message.msg_controllen = sizeof ancillary;
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &memory, sizeof memory);
  }
  [[maybe_unused]] const ssize_t ignored = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace devproxy::server
