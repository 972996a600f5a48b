// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/links/links.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/log.h"

namespace devproxy::hal {

namespace {

constexpr int kLookMs = 50;
constexpr uint64_t kConnectUs = 2'000'000;  // one try
constexpr uint64_t kHelloUs = 5'000'000;    // for a hello, and for the roster that says whether it is right
constexpr uint64_t kWantedUs = 1'000'000;   // nobody asks any more: no more tries
constexpr uint64_t kPostedUs = 30'000'000;  // then a frame that nobody waits for is forgotten
constexpr uint64_t kFarewellUs = 1'000'000;
constexpr uint64_t kSettleUs = 20'000;
constexpr uint64_t kPauseUs = 20'000;            // between tries
constexpr size_t kMaxIncoming = 512;             // connections at a time
constexpr size_t kSealBytes = 256 << 10;         // at a time
constexpr uint64_t kSameRefusalUs = 10'000'000;  // said once in that time
constexpr unsigned kSilentMs = 20'000;           // what was sent and is not acknowledged so long ends a connection

void set(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); }

void tune(int fd) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kSilentMs);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 3);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

// Its receiver never writes: whatever is to be read is its end.
bool hung_up(int fd) {
  pollfd look{fd, POLLIN | POLLRDHUP, 0};
  return poll(&look, 1, 0) != 0;
}

// Both within the time.
bool read_all(int fd, Tls* tls, void* to, size_t bytes, uint64_t until, const std::atomic<bool>& closing) {
  auto* out = static_cast<uint8_t*>(to);
  while (bytes != 0) {
    if (now_us() > until || closing.load(std::memory_order_acquire)) return false;
    pollfd look{fd, POLLIN, 0};
    if (tls) {
      size_t n = 0;
      const int got = tls->read(out, bytes, &n);
      if (got < 0) return false;
      if (got == 0) poll(&look, 1, kLookMs);
      out += n, bytes -= n;
      continue;
    }
    if (poll(&look, 1, kLookMs) == 0) continue;
    const ssize_t n = recv(fd, out, bytes, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (n > 0) out += n, bytes -= static_cast<size_t>(n);
  }
  return true;
}

// The first bytes of a connection: there is room for them.
bool say(int fd, Tls* tls, const void* what, size_t bytes) {
  if (tls) {
    if (!tls->seal(what, bytes)) return false;
    const std::vector<uint8_t> sealed = std::exchange(tls->sealed(), {});
    return ::send(fd, sealed.data(), sealed.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(sealed.size());
  }
  return ::send(fd, what, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

bool peek(int fd, uint8_t* first, uint64_t until, const std::atomic<bool>& closing) {
  while (now_us() <= until && !closing.load(std::memory_order_acquire)) {
    pollfd look{fd, POLLIN, 0};
    if (poll(&look, 1, kLookMs) != 0) return recv(fd, first, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
  }
  return false;
}

void set_blocking(int fd, bool blocks) {
  const int flags = fcntl(fd, F_GETFL);
  fcntl(fd, F_SETFL, blocks ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

std::string name_of_peer(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  char text[INET6_ADDRSTRLEN] = "?";
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0) {
    const void* const where =
        address.ss_family == AF_INET
            ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(&address)->sin_addr)
            : static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(&address)->sin6_addr);
    inet_ntop(address.ss_family, where, text, sizeof text);
  }
  return text;
}

// Every byte is looked at, so that the time tells nothing about where they differ.
bool same_token(const uint8_t* a, const uint8_t* b) {
  unsigned differ = 0;
  for (size_t i = 0; i < kTokenBytes; i++) differ |= a[i] ^ b[i];
  return differ == 0;
}

}  // namespace

StatusOr<std::unique_ptr<Links>> Links::open(const TransportConfig& config, uint64_t chaos, MakeReceiver receiver) {
  if (config.encrypts)
    if (Status loaded = Tls::load(); !loaded.ok()) return loaded;
  auto at = parse_address(config.address, 0);
  if (!at.ok()) return std::move(at).status();
  const int fd = socket(at->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return Status::from_errno(kUnknown, "making a socket");
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (bind(fd, reinterpret_cast<const sockaddr*>(&at->address), at->length) != 0 || ::listen(fd, 64) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    Status why = Status::from_errno(kNotPermitted, "listening on " + config.address);
    close(fd);
    return why;
  }
  const uint16_t port = bound.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in*>(&bound)->sin_port
                                                   : reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port;
  return std::unique_ptr<Links>(new Links(config, chaos, std::move(receiver), fd, ntohs(port)));
}

Links::Links(const TransportConfig& config, uint64_t chaos, MakeReceiver receiver, int listen_fd, uint16_t port)
    : config_(config),
      chaos_(chaos),
      make_receiver_(std::move(receiver)),
      listen_fd_(listen_fd),
      port_(port),
      wake_fd_(eventfd(0, EFD_CLOEXEC)) {
  while (server_ == 0 && getrandom(&server_, sizeof server_, 0) != sizeof server_) {}
  listener_ = std::thread([this] { listen(); });
  connector_ = std::thread([this] { connect_all(); });
}

Links::~Links() {
  closing_.store(true, std::memory_order_release);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = ::write(wake_fd_, &one, sizeof one);
  {
    std::lock_guard lock(mu_);
    changed_.notify_all();
    for (const auto& incoming : incoming_)
      if (!incoming->over) shutdown(incoming->fd, SHUT_RDWR);
  }
  listener_.join();
  connector_.join();
  for (const auto& incoming : incoming_) incoming->thread.join();
  for (auto& [tree, link] : links_)
    if (link.fd >= 0) close(link.fd);
  close(listen_fd_);
  close(wake_fd_);
}

// -- incoming -------------------------------------------------------------------------------------------------------

void Links::listen() {
  while (!closing_.load(std::memory_order_acquire)) {
    pollfd look[] = {{listen_fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
    if (poll(look, 2, 1000) < 0 && errno != EINTR) return;
    std::vector<std::unique_ptr<Incoming>> over;
    {
      std::lock_guard lock(mu_);
      for (auto& incoming : incoming_)
        if (incoming->over) over.push_back(std::move(incoming));
      std::erase(incoming_, nullptr);
    }
    for (const auto& incoming : over) incoming->thread.join();
    const int fd = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    std::lock_guard lock(mu_);
    if (closing_.load(std::memory_order_acquire) || incoming_.size() >= kMaxIncoming) {
      close(fd);
      continue;
    }
    Incoming& incoming = *incoming_.emplace_back(std::make_unique<Incoming>());
    incoming.fd = fd;
    incoming.thread = std::thread([this, &incoming] { receive(incoming); });
  }
}

void Links::receive(Incoming& incoming) {
  tune(incoming.fd);
  std::unique_ptr<Tls> tls;
  if (Hello hello; admit(incoming.fd, &hello, &tls)) {
    DP_LOG(kInfo, kServer, 0, "the server of GPU %u of tree %u has connected%s", hello.gpu, hello.tree,
           tls ? ", encrypted" : "");
    const uint64_t chaos = chaos_ ? chaos_ * 0x9e3779b97f4a7c15 + hello.tree * kMaxTreeGpus + hello.gpu + 1 : 0;
    const auto receiver = make_receiver_({hello.tree, hello.gpu, hello.server}, chaos, [this, &hello](uint64_t number) {
      std::lock_guard lock(mu_);
      marks_[hello.server] = number;
    });
    receiver->run(incoming.fd, tls.get(), closing_, leaving_, incoming.idle);
  }
  std::lock_guard lock(mu_);
  close(incoming.fd);
  incoming.over = true;
}

bool Links::admit(int fd, Hello* hello, std::unique_ptr<Tls>* tls) {
  const uint64_t until = now_us() + kHelloUs;
  const auto is_hello = [&] {
    return hello->magic == kHelloMagic && hello->version == kFrameVersion && hello->tree < kMaxTrees &&
           hello->tree != config_.tree && hello->gpu < kMaxTreeGpus && hello->server != 0;
  };
  uint8_t first;
  if (!peek(fd, &first, until, closing_)) return false;
  const bool encrypted = first == kTlsFirstByte;
  if (encrypted && !config_.encrypts)
    return note_refusal(fd, "it encrypts, and this job's data is not encrypted: is it another job's?"), false;
  if (!encrypted && !(read_all(fd, nullptr, hello, sizeof *hello, until, closing_) && is_hello())) return false;
  auto roster = roster_now();
  // The other tree's supervisor may have been quicker than ours.
  while (!roster.ok() && now_us() < until && !closing_.load(std::memory_order_acquire)) {
    usleep(kPauseUs);
    roster = roster_now();
  }
  if (!roster.ok()) return false;
  if (encrypted && !(admit_encrypted(fd, *roster, until, hello, tls) && is_hello())) return false;
  if (!same_token(roster->token.data(), hello->token)) return false;
  Welcome welcome;
  welcome.server = server_;
  if (config_.encrypts && !encrypted) {  // who has the token is told why
    note_refusal(fd, "the server of GPU " + std::to_string(hello->gpu) + " of tree " + std::to_string(hello->tree) +
                         " does not encrypt, and this job's data is encrypted: are its devproxy-run's options others?");
    welcome.server = kEncryptedOnly;
  }
  return say(fd, tls->get(), &welcome, sizeof welcome) && welcome.server == server_;
}

bool Links::admit_encrypted(int fd, const Roster& roster, uint64_t until, Hello* hello, std::unique_ptr<Tls>* tls) {
  set_blocking(fd, false);
  auto made = Tls::shake_hands(fd, Tls::Role::kAccepter, *roster.key, until, closing_);
  if (!made.ok()) return note_refusal(fd, made.status().text()), false;
  *tls = std::move(*made);
  const bool read = read_all(fd, tls->get(), hello, sizeof *hello, until, closing_);
  set_blocking(fd, true);
  return read;
}

void Links::note_refusal(int fd, const std::string& why) {
  {
    std::lock_guard lock(mu_);
    if (refusal_ == why && now_us() < refusal_us_ + kSameRefusalUs) return;
    refusal_ = why;
    refusal_us_ = now_us();
  }
  DP_LOG(kWarn, kServer, 0, "a connection from %s is refused: %s", name_of_peer(fd).c_str(), why.c_str());
}

// -- outgoing -------------------------------------------------------------------------------------------------------

// Of a job that encrypts, only one with the key.
StatusOr<Roster> Links::roster_now() const {
  auto roster = read_roster(config_.folder);
  if (roster.ok() && roster->key.has_value() != config_.encrypts)
    return Status(kInvalidValue,
                  config_.folder + (config_.encrypts ? "/trees has no key, and this server encrypts"
                                                     : "/trees has a key, and this server does not encrypt"));
  return roster;
}

bool Links::read_roster_again() {
  auto roster = roster_now();
  std::lock_guard lock(mu_);
  if (roster.ok()) roster_ = std::move(*roster);
  roster_trouble_ = roster.status().text();
  return roster.ok();
}

std::optional<std::vector<uint32_t>> Links::others() {
  for (int turn = 0; turn < 2; turn++) {
    {
      std::lock_guard lock(mu_);
      if (roster_) {
        std::vector<uint32_t> found;
        for (const auto& [tree, servers] : roster_->trees)
          if (tree != config_.tree) found.push_back(tree);
        return found;
      }
    }
    if (!read_roster_again()) break;
  }
  return std::nullopt;
}

int Links::write(int fd, std::vector<iovec>& parts, std::vector<uint8_t>* tail, const Stop& stop) {
  size_t first = 0;
  bool begun = false;
  while (first < parts.size()) {
    msghdr message{};
    message.msg_iov = parts.data() + first;
    message.msg_iovlen = parts.size() - first;
    ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN) return -1;
    if (n < 0) {
      pollfd look{fd, POLLOUT, 0};
      if (!stop()) {
        poll(&look, 1, kLookMs);
        continue;
      }
      if (begun)
        for (; first < parts.size(); first++) {
          const auto* at = static_cast<const uint8_t*>(parts[first].iov_base);
          tail->insert(tail->end(), at, at + parts[first].iov_len);
        }
      return 0;
    }
    begun = true;
    for (auto left = static_cast<size_t>(n); left != 0;) {
      iovec& part = parts[first];
      const size_t taken = std::min(left, part.iov_len);
      part.iov_base = static_cast<uint8_t*>(part.iov_base) + taken;
      part.iov_len -= taken;
      left -= taken;
      if (part.iov_len == 0) first++;
    }
    while (first < parts.size() && parts[first].iov_len == 0) first++;
  }
  return 1;
}

// As write(). What is sealed must be sent, so nothing is before the socket takes something, but for the rest of what was
// begun.
int Links::write_sealed(int fd, Tls& tls, std::vector<iovec>& parts, std::vector<uint8_t>* tail, const Stop& stop) {
  bool begun = false, stopped = false;
  for (size_t first = 0; first < parts.size(); begun = true) {
    for (pollfd look{fd, POLLOUT, 0}; !stopped && poll(&look, 1, kLookMs) == 0;) stopped = stop();
    if (stopped && !begun) return 0;
    for (size_t room = kSealBytes; room != 0 && first < parts.size();) {
      iovec& part = parts[first];
      const size_t taken = std::min(room, part.iov_len);
      if (!tls.seal(part.iov_base, taken)) return -1;
      part.iov_base = static_cast<uint8_t*>(part.iov_base) + taken;
      part.iov_len -= taken;
      room -= taken;
      if (part.iov_len == 0) first++;
    }
    std::vector<uint8_t>& sealed = tls.sealed();
    std::vector<iovec> left{{sealed.data(), sealed.size()}};
    if (!stopped) {
      std::vector<uint8_t> rest;
      const int result = write(fd, left, &rest, stop);
      if (result < 0) return -1;
      stopped = result == 0;
    }
    if (stopped) {
      const auto* at = static_cast<const uint8_t*>(left[0].iov_base);
      tail->insert(tail->end(), at, at + left[0].iov_len);
    }
    sealed.clear();
  }
  return stopped ? 0 : 1;
}

Links::Sent Links::send(uint32_t tree, std::vector<iovec> parts, const Stop& stop, uint64_t* epoch) {
  std::unique_lock lock(mu_);
  Link& link = links_[tree];
  while (link.busy) {
    changed_.wait_for(lock, std::chrono::milliseconds(kLookMs));
    if (link.busy && stop()) return Sent::kStopped;
  }
  if (link.fd < 0) {
    if (link.wanted_us == 0) changed_.notify_all();
    link.wanted_us = now_us();
    return Sent::kNotYet;
  }
  link.busy = true;
  const int fd = link.fd;
  Tls* const tls = link.tls.get();
  *epoch = link.epoch;
  lock.unlock();

  int result = hung_up(fd) ? -1 : 1;
  if (result == 1 && !link.tail.empty()) {
    std::vector<uint8_t> rest = std::exchange(link.tail, {});
    std::vector<iovec> one{{rest.data(), rest.size()}};
    result = write(fd, one, &link.tail, stop);
    if (result == 0 && link.tail.empty()) link.tail = std::move(rest);
  }
  if (result == 1) result = tls ? write_sealed(fd, *tls, parts, &link.tail, stop) : write(fd, parts, &link.tail, stop);

  lock.lock();
  link.busy = false;
  if (result < 0) {
    close(fd);
    link.fd = -1;
    link.tls.reset();
    link.tail.clear();
    link.trouble = "the connection has ended";
    link.wanted_us = now_us();
  }
  changed_.notify_all();
  return result == 1 ? Sent::kSent : result == 0 ? Sent::kStopped : Sent::kNotYet;
}

uint64_t Links::epoch(uint32_t tree) {
  std::lock_guard lock(mu_);
  const Link& link = links_[tree];
  return link.fd < 0 || hung_up(link.fd) ? 0 : link.epoch;
}

std::string Links::trouble(uint32_t tree) {
  std::lock_guard lock(mu_);
  const Link& link = links_[tree];
  if (!roster_) return "the other trees are not known: " + roster_trouble_;
  return "tree " + std::to_string(tree) + (link.where.empty() ? "" : " at " + link.where) +
         " cannot be reached: " + (link.trouble.empty() ? "nothing has answered" : link.trouble);
}

void Links::post(uint32_t tree, const Frame& frame) {
  std::lock_guard lock(mu_);
  links_[tree].posted.push_back({frame, now_us() + kPostedUs});
  changed_.notify_all();
}

void Links::post_to_all(const Frame& frame) {
  std::lock_guard lock(mu_);
  for (auto& [tree, link] : links_)
    if (link.epoch != 0) link.posted.push_back({frame, now_us() + kPostedUs});
  changed_.notify_all();
}

TransportMarks Links::mark(uint64_t number) {
  TransportMarks marks;
  marks.server = server_;
  std::lock_guard lock(mu_);
  for (auto& [tree, link] : links_) {
    if (link.fd < 0) continue;
    marks.to.push_back(link.peer);
    if (std::exchange(link.marked, number) == number) continue;
    Frame frame;
    frame.kind = FrameKind::kMark;
    frame.bytes = number;
    link.posted.push_back({frame, now_us() + kPostedUs});
  }
  changed_.notify_all();
  for (const auto& [server, seen] : marks_)
    if (seen == number) marks.from.push_back(server);
  return marks;
}

void Links::take_over() {
  for (const uint32_t tree : others().value_or(std::vector<uint32_t>{})) {
    std::lock_guard lock(mu_);
    links_[tree].wanted_us = now_us() + kPostedUs;  // tried for so long
    changed_.notify_all();
  }
}

void Links::leave() {
  leaving_.store(true);
  std::vector<uint32_t> trees;
  {
    std::lock_guard lock(mu_);
    for (const auto& [tree, link] : links_)
      if (link.fd >= 0) trees.push_back(tree);
  }
  Frame bye;
  bye.kind = FrameKind::kBye;
  const uint64_t until = now_us() + kFarewellUs;
  for (const uint32_t tree : trees) {
    send_posted(tree);
    uint64_t epoch;
    send(tree, {{&bye, sizeof bye}}, [until] { return now_us() > until; }, &epoch);
  }
  finish_incoming();
  closing_.store(true, std::memory_order_release);
}

// Senders look for a hang-up before each frame. What they had begun by then has come after kSettleUs, but for the rest of
// a frame, which its receiver waits for.
void Links::finish_incoming() {
  const auto busy = [this](bool hang_up) {
    std::lock_guard lock(mu_);
    bool found = false;
    for (const auto& incoming : incoming_) {
      if (incoming->over) continue;
      if (hang_up) shutdown(incoming->fd, SHUT_WR);
      int waiting = 0;
      found |= !incoming->idle.load(std::memory_order_acquire) ||
               (ioctl(incoming->fd, FIONREAD, &waiting) == 0 && waiting != 0);
    }
    return found;
  };
  busy(true);
  usleep(kSettleUs);
  for (const uint64_t until = now_us() + kFarewellUs; busy(false) && now_us() < until;) usleep(1000);
}

// -- the connector --------------------------------------------------------------------------------------------------

void Links::connect_all() {
  std::unique_lock lock(mu_);
  while (!closing_.load(std::memory_order_acquire)) {
    std::vector<uint32_t> connect, send;
    const uint64_t now = now_us();
    for (auto& [tree, link] : links_) {
      std::erase_if(link.posted, [now](const Link::Posted& one) { return now > one.until_us; });
      if (link.fd >= 0) {
        link.wanted_us = 0;
        if (!link.posted.empty() && !link.busy) send.push_back(tree);
      } else if (!leaving_.load() && (!link.posted.empty() || now < link.wanted_us + kWantedUs)) {
        connect.push_back(tree);
      } else {
        link.wanted_us = 0;
      }
    }
    if (connect.empty() && send.empty()) {
      changed_.wait_for(lock, std::chrono::seconds(1));
      continue;
    }
    lock.unlock();
    for (const uint32_t tree : connect) try_connect(tree);
    for (const uint32_t tree : send) send_posted(tree);
    lock.lock();
    const bool waits = std::any_of(links_.begin(), links_.end(), [](const auto& item) {
      return item.second.fd < 0 && (item.second.wanted_us != 0 || !item.second.posted.empty());
    });
    if (waits) changed_.wait_for(lock, std::chrono::microseconds(kPauseUs));
  }
}

void Links::send_posted(uint32_t tree) {
  const uint64_t until = now_us() + kFarewellUs;
  for (;;) {
    Link::Posted one;
    {
      std::lock_guard lock(mu_);
      Link& link = links_[tree];
      if (link.posted.empty()) return;
      one = link.posted.front();
      link.posted.pop_front();
    }
    uint64_t epoch;
    const Sent sent = send(
        tree, {{&one.frame, sizeof one.frame}},
        [&] { return closing_.load(std::memory_order_acquire) || now_us() > until; }, &epoch);
    if (sent == Sent::kSent) continue;
    std::lock_guard lock(mu_);
    links_[tree].posted.push_front(one);  // what was begun comes twice then, which changes nothing
    return;
  }
}

void Links::try_connect(uint32_t tree) {
  read_roster_again();
  std::optional<Endpoint> to;
  std::optional<Roster> roster;
  {
    std::lock_guard lock(mu_);
    roster = roster_;
  }
  if (roster)
    if (const auto it = roster->trees.find(tree); it != roster->trees.end())
      to = it->second[config_.gpu % it->second.size()];
  std::string why = "it is not in the list of the job's trees";
  uint64_t peer = 0;
  std::unique_ptr<Tls> tls;
  const int fd = to ? connect_to(*to, *roster, &tls, &peer, &why) : -1;
  std::lock_guard lock(mu_);
  Link& link = links_[tree];
  link.where = to ? to->text : "";
  if (fd < 0) {
    if (link.trouble != why) DP_LOG(kInfo, kServer, 0, "tree %u at %s: %s", tree, link.where.c_str(), why.c_str());
    link.trouble = why;
    return;
  }
  if (leaving_.load()) {  // the hello has been read: the other end must hear that this is planned
    Frame bye;
    bye.kind = FrameKind::kBye;
    say(fd, tls.get(), &bye, sizeof bye);
    close(fd);
    return;
  }
  link.fd = fd;
  link.tls = std::move(tls);
  link.epoch = ++serial_;
  link.peer = peer;
  link.marked = 0;
  link.trouble.clear();
  changed_.notify_all();
}

int Links::connect_to(const Endpoint& to, const Roster& roster, std::unique_ptr<Tls>* tls, uint64_t* peer,
                      std::string* why) {
  const int fd = socket(to.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return *why = std::strerror(errno), -1;
  tune(fd);
  const uint64_t until = now_us() + kConnectUs;
  int error = connect(fd, reinterpret_cast<const sockaddr*>(&to.address), to.length) == 0 ? 0 : errno;
  while (error == EINPROGRESS && now_us() < until && !closing_.load(std::memory_order_acquire)) {
    pollfd look{fd, POLLOUT, 0};
    if (poll(&look, 1, kLookMs) <= 0) continue;
    socklen_t length = sizeof error;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  }
  if (error == 0)
    *why = introduce(fd, roster, tls, peer);
  else
    *why = error == EINPROGRESS ? "it does not answer" : std::strerror(error);
  if (why->empty()) return fd;
  close(fd);
  return -1;
}

std::string Links::introduce(int fd, const Roster& roster, std::unique_ptr<Tls>* tls, uint64_t* peer) {
  const uint64_t until = now_us() + kHelloUs;
  if (config_.encrypts) {
    auto made = Tls::shake_hands(fd, Tls::Role::kOpener, *roster.key, until, closing_);
    if (!made.ok()) return made.status().text();
    *tls = std::move(*made);
  }
  Hello hello;
  std::copy(roster.token.begin(), roster.token.end(), hello.token);
  hello.tree = config_.tree;
  hello.gpu = config_.gpu;
  hello.server = server_;
  Welcome welcome;
  if (!say(fd, tls->get(), &hello, sizeof hello) ||
      !read_all(fd, tls->get(), &welcome, sizeof welcome, until, closing_) || welcome.magic != kHelloMagic ||
      welcome.version != kFrameVersion)
    return "it does not take this job's token";
  if (welcome.server == kEncryptedOnly) return "it takes encrypted connections alone, and this node does not encrypt";
  *peer = welcome.server;
  return "";
}

}  // namespace devproxy::hal
