#include "devproxy/csrc/server/server.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "devproxy/csrc/base/log.h"
#include "devproxy/csrc/server/crash.h"
#include "devproxy/csrc/transport/futex.h"

#include "wire.gen.h"

namespace devproxy::server {

namespace {

constexpr uint64_t kHelloUs = 5'000'000;  // a peer that says nothing is dropped
constexpr uint64_t kLeaveUs = 2'000'000;  // how long a kernel may hold up the end

std::string hex(const uint8_t* bytes, size_t n) {
  std::string text;
  char two[3];
  for (size_t i = 0; i < n; i++) std::snprintf(two, sizeof two, "%02x", bytes[i]), text += two;
  return text;
}

std::string json_string(const std::string& s) {
  std::string out = "\"";
  for (const char c : s) {
    if (c == '"' || c == '\\') {
      out += '\\', out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string json_number(const char* name, uint64_t value) {
  return '"' + std::string(name) + "\":" + std::to_string(value);
}

// Fixed structs and short texts into an empty socket buffer: one send, and a peer that is gone is not waited for.
void send_all(int socket, const void* data, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = send(socket, at + done, bytes - done, MSG_NOSIGNAL);
    if (n <= 0 && errno != EINTR) return;
    if (n > 0) done += static_cast<size_t>(n);
  }
}

}  // namespace

Status Server::open() {
  started_us_ = now_us();
  struct stat folder;
  if (stat(config_.job_dir.c_str(), &folder) != 0)
    return Status::from_errno(kFileNotFound, "job folder " + config_.job_dir);
  if (!S_ISDIR(folder.st_mode) || folder.st_uid != geteuid())
    return {kNotPermitted, "job folder " + config_.job_dir + " belongs to another user"};
  if (folder.st_mode & 077)
    return {kNotPermitted, "job folder " + config_.job_dir + " is open to others: chmod 700 it"};
  socket_path_ = config_.job_dir + "/gpu" + std::to_string(config_.gpu) + ".sock";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_path_.size() >= sizeof address.sun_path)
    return {kInvalidValue, "the path " + socket_path_ + " is too long for a unix socket: choose a shorter job name"};
  std::memcpy(address.sun_path, socket_path_.c_str(), socket_path_.size() + 1);

  auto ledger = Ledger::open(config_.ledger_path, total_bytes_);
  if (!ledger.ok()) return std::move(ledger).status().with("memory ledger");
  ledger_ = std::move(*ledger);
  auto slots = SlotTable::open(config_.job_dir + "/slots");
  if (!slots.ok()) return std::move(slots).status().with("slot table");
  slots_ = std::move(*slots);

  listen_fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listen_fd_ < 0) return Status::from_errno(kUnknown, "making a socket");
  // A socket that somebody still answers is another server's; one that nobody answers was left by a kill.
  if (connect(listen_fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0)
    return {kDeviceUnavailable, "another server already listens on " + socket_path_};
  unlink(socket_path_.c_str());
  if (bind(listen_fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    return Status::from_errno(kNotPermitted, "binding " + socket_path_);
  if (chmod(socket_path_.c_str(), 0600) != 0 || listen(listen_fd_, 64) != 0)
    return Status::from_errno(kNotPermitted, "listening on " + socket_path_);

  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  signal_fd_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (signal_fd_ < 0 || wake_fd_ < 0) return Status::from_errno(kUnknown, "making descriptors");
  install_crash_handler(device_.get(), socket_path_.c_str());

  parts_.job_dir = config_.job_dir;
  parts_.gpu = config_.gpu;
  parts_.device = device_.get();
  parts_.ledger = ledger_.get();
  parts_.slots = slots_.get();
  parts_.connection_finished = [this] {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t ignored = write(wake_fd_, &one, sizeof one);
  };
  return {};
}

bool Server::anybody() const {
  return std::any_of(clients_.begin(), clients_.end(), [](const Client& c) { return c.socket >= 0; });
}

void Server::run() {
  bool lease_ended = false;
  for (;;) {
    std::vector<pollfd> fds = {{listen_fd_, POLLIN, 0},
                               {signal_fd_, POLLIN, 0},
                               {wake_fd_, POLLIN, 0},
                               {lease_ended ? -1 : config_.lease_fd, POLLIN, 0}};
    const size_t first_hello = fds.size();
    for (const Hello& h : hellos_) fds.push_back({h.socket, POLLIN, 0});
    const size_t first_client = fds.size();
    for (const Client& c : clients_) fds.push_back({c.socket, POLLIN | POLLRDHUP, 0});
    if (poll(fds.data(), fds.size(), hellos_.empty() ? -1 : 1000) < 0 && errno != EINTR) break;

    if (fds[1].revents) {
      DP_LOG(kInfo, kServer, 0, "SIGTERM: leaving");
      return stop_all(true);
    }
    if (fds[2].revents) {
      uint64_t count;
      [[maybe_unused]] const ssize_t ignored = read(wake_fd_, &count, sizeof count);
      reap();
    }
    if (fds[3].revents) {
      char byte;                                           // nobody writes to a lease; only its end counts
      const ssize_t n = read(config_.lease_fd, &byte, 1);  // end-of-file leaves errno as it was
      if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) lease_ended = true;
    }
    // Before accept_all and reap change the vectors: the clients that poll saw, by socket.
    for (size_t i = first_client; i < fds.size(); i++) {
      if (!fds[i].revents) continue;
      char byte;
      if (recv(fds[i].fd, &byte, 1, MSG_DONTWAIT) > 0) continue;  // clients say nothing after the hello
      for (Client& c : clients_) {
        if (c.socket != fds[i].fd || c.socket < 0) continue;
        DP_LOG(kInfo, kServer, c.connection->peer().number, "pid=%u hung up", c.connection->peer().pid);
        close(c.socket);
        c.socket = -1;
        c.connection->request_stop();
      }
    }
    std::vector<Hello> waiting;
    for (size_t i = 0; i < hellos_.size(); i++) {
      Hello& hello = hellos_[i];
      const bool stays = fds[first_hello + i].revents ? read_hello(hello) : now_us() < hello.until_us;
      if (stays)
        waiting.push_back(hello);
      else if (hello.socket >= 0)
        close(hello.socket);
    }
    hellos_ = std::move(waiting);
    if (fds[0].revents) accept_all();
    if (lease_ended && !anybody()) {
      DP_LOG(kInfo, kServer, 0, "the job is gone: leaving");
      return stop_all(false);
    }
  }
}

void Server::accept_all() {
  for (;;) {
    const int socket = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) return;
    hellos_.push_back({socket, now_us() + kHelloUs, 0, {}});
  }
}

// False when the hello needs no more waiting; hello.socket is -1 where it became a client's.
bool Server::read_hello(Hello& hello) {
  auto* bytes = reinterpret_cast<uint8_t*>(&hello.request);
  const ssize_t n = recv(hello.socket, bytes + hello.got, sizeof hello.request - hello.got, MSG_DONTWAIT);
  if (n <= 0) return n < 0 && (errno == EAGAIN || errno == EINTR);
  hello.got += static_cast<size_t>(n);
  if (hello.got < sizeof hello.request) return true;

  AttachReply reply{};
  reply.magic = kAttachMagic;
  reply.status = AttachStatus::kRefused;
  std::memcpy(reply.abi_id, wire::kAbiId, sizeof reply.abi_id);
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(hello.socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != geteuid()) {
    std::snprintf(reply.text, sizeof reply.text, "this server serves user %u, not user %u", geteuid(), peer.uid);
  } else if (hello.request.magic != kAttachMagic) {
    std::snprintf(reply.text, sizeof reply.text, "this is no attach request of devproxy");
  } else if (hello.request.kind == AttachKind::kStats) {
    send_stats(hello.socket);
    return false;
  } else if (hello.request.kind != AttachKind::kClient) {
    std::snprintf(reply.text, sizeof reply.text, "unknown kind %u of attach request",
                  static_cast<unsigned>(hello.request.kind));
  } else if (std::memcmp(hello.request.abi_id, wire::kAbiId, sizeof wire::kAbiId) != 0) {
    reply.status = AttachStatus::kAbiDiffers;
    std::snprintf(
        reply.text, sizeof reply.text,
        "client and server are of different builds (client ABI %.16s, server ABI %.16s): rebuild, or use one version",
        hex(hello.request.abi_id, 8).c_str(), hex(wire::kAbiId, 8).c_str());
  } else {
    attach(hello.socket, hello.request, static_cast<uint32_t>(peer.pid));
    hello.socket = -1;
    return false;
  }
  DP_LOG(kWarn, kServer, 0, "pid=%d refused: %s", peer.pid, reply.text);
  send_all(hello.socket, &reply, sizeof reply);
  return false;
}

void Server::attach(int socket, const AttachRequest& request, uint32_t pid) {
  AttachReply reply{};
  reply.magic = kAttachMagic;
  std::memcpy(reply.abi_id, wire::kAbiId, sizeof reply.abi_id);
  auto connection = Connection::make(parts_, {next_number_++, pid, request.wanted_slot}, &reply);
  if (connection) {
    connection->start();
    DP_LOG(kInfo, kServer, connection->peer().number, "pid=%u attached, slot %u", pid, connection->slot());
    clients_.push_back({socket, std::move(connection)});
  } else {
    DP_LOG(kWarn, kServer, 0, "pid=%u refused: %s", pid, reply.text);
  }
  send_all(socket, &reply, sizeof reply);
  if (reply.status != AttachStatus::kOk) close(socket);
}

void Server::Totals::add(const Connection& connection) {
  const Counters& n = connection.counters();
  auto get = [](const std::atomic<uint64_t>& v) { return v.load(std::memory_order_relaxed); };
  calls += get(n.calls), launches += get(n.launches);
  h2d_bytes += get(n.h2d_bytes), d2h_bytes += get(n.d2h_bytes), d2d_bytes += get(n.d2d_bytes);
  memset_bytes += get(n.memset_bytes), allocs += get(n.allocs), frees += get(n.frees);
  wakes += connection.wakes(), busy_us += get(n.busy_us);
}

void Server::reap() {
  std::erase_if(clients_, [&](Client& c) {
    if (!c.connection->finished()) return false;
    c.connection->join();
    gone_.add(*c.connection);
    if (last_fault_.empty()) last_fault_ = c.connection->lifeline().fault_text();
    if (c.socket >= 0) close(c.socket);
    return true;
  });
}

// tell: somebody may still be connected. Either way files are gone when it returns, threads as far as possible.
void Server::stop_all(bool tell) {
  if (listen_fd_ >= 0) close(listen_fd_);
  unlink(socket_path_.c_str());
  for (Client& c : clients_) {
    if (tell && c.socket >= 0) c.connection->lifeline().end(ServerState::kGone);
    c.connection->request_stop();
  }
  const uint64_t until = now_us() + kLeaveUs;
  while (!clients_.empty() && now_us() < until) {
    pollfd wake{wake_fd_, POLLIN, 0};
    poll(&wake, 1, 100);
    reap();
  }
  for (Client& c : clients_) {  // its kernel does not end; it ends with the process
    c.connection->remove_files();
    slots_->give(c.connection->slot());
  }
  ledger_->leave();
}

std::string Server::stats_json() const {
  Totals t = gone_;
  std::string clients, fault = last_fault_;
  uint64_t now = 0;
  for (const Client& c : clients_) {
    t.add(*c.connection);
    if (fault.empty()) fault = c.connection->lifeline().fault_text();
    if (c.socket < 0) continue;
    const Counters& n = c.connection->counters();
    clients += (now++ ? ",{" : "{") + json_number("pid", c.connection->peer().pid) + ',' +
               json_number("slot", c.connection->slot()) + ',' + json_number("calls", n.calls) + ',' +
               json_number("launches", n.launches) + ',' + json_number("live_bytes", n.live_bytes) + ',' +
               json_number("peak_bytes", n.peak_bytes) + '}';
  }
  char uptime[32];
  std::snprintf(uptime, sizeof uptime, "%.3f", static_cast<double>(now_us() - started_us_) * 1e-6);
  return "{\"job\":" + json_string(config_.job) + ',' + json_number("gpu", config_.gpu) + ',' +
         json_number("pid", static_cast<uint64_t>(getpid())) + ",\"device\":" + json_string(config_.device) +
         ",\"name\":" + json_string(device_->properties().name) + ",\"uptime_s\":" + uptime +
         ",\"chaos\":" + (config_.chaos ? "true" : "false") + ",\"memory\":{" + json_number("total", total_bytes_) +
         ',' + json_number("used", parts_.live_bytes.load()) + ',' + json_number("peak", parts_.peak_bytes.load()) +
         "}," + json_number("clients_now", now) + ",\"totals\":{" + json_number("calls", t.calls) + ',' +
         json_number("launches", t.launches) + ',' + json_number("h2d_bytes", t.h2d_bytes) + ',' +
         json_number("d2h_bytes", t.d2h_bytes) + ',' + json_number("d2d_bytes", t.d2d_bytes) + ',' +
         json_number("memset_bytes", t.memset_bytes) + ',' + json_number("allocs", t.allocs) + ',' +
         json_number("frees", t.frees) + ',' + json_number("wakes", t.wakes) + ',' + json_number("busy_us", t.busy_us) +
         "},\"clients\":[" + clients + "],\"sticky\":" + json_string(fault) + '}';
}

void Server::send_stats(int socket) {
  const std::string text = stats_json();
  const auto length = static_cast<uint32_t>(text.size());
  send_all(socket, &length, sizeof length);
  send_all(socket, text.data(), text.size());
}

}  // namespace devproxy::server
