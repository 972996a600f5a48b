// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "devproxy/csrc/base/fault.h"
#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/json.h"
#include "devproxy/csrc/base/log.h"
#include "devproxy/csrc/server/crash.h"
#include "devproxy/csrc/server/dump.h"
#include "devproxy/csrc/server/peer_link.h"
#include "devproxy/csrc/server/state_files.h"
#include "devproxy/hal/identity.h"
#include "devproxy/hal/sharing.h"

#include "wire.gen.h"

namespace devproxy::server {

namespace {

constexpr uint64_t kHelloUs = 5'000'000;      // a peer that says nothing is dropped
constexpr uint64_t kLeaveUs = 2'000'000;      // how long a kernel may hold up the end
constexpr uint64_t kStragglerUs = 5'000'000;  // how long one may hold up what its client has, before it is named
constexpr int kCutLookMs = 20, kLookMs = 1000;
constexpr uint64_t kAcceptPauseUs = 200'000;

std::string hex(const uint8_t* bytes, size_t n) {
  std::string text;
  char two[3];
  for (size_t i = 0; i < n; i++) std::snprintf(two, sizeof two, "%02x", bytes[i]), text += two;
  return text;
}

}  // namespace

// As the record has them. The uuid in hex.
IdentityRecord record_of(const hal::Properties& properties) {
  const hal::Identity identity = hal::identity_of(properties);
  return {hex(identity.uuid.data(), identity.uuid.size()), identity.pci_domain, identity.pci_bus, identity.pci_device};
}

Status assume(const IdentityRecord& record, hal::Properties* properties) {
  hal::Identity identity{{}, record.pci_domain, record.pci_bus, record.pci_device};
  bool good = record.uuid.size() == 2 * identity.uuid.size();
  unsigned byte = 0;
  for (size_t i = 0; good && i < identity.uuid.size(); i++) {
    good = std::sscanf(record.uuid.c_str() + 2 * i, "%2x", &byte) == 1;
    identity.uuid[i] = static_cast<uint8_t>(byte);
  }
  if (!good) return {kInvalidImage, "the state's uuid '" + record.uuid.substr(0, 40) + "' is none"};
  hal::assume(identity, properties);
  return {};
}

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
  // With room for what listen_here() appends.
  if (socket_path_.size() + 16 >= sizeof sockaddr_un::sun_path)
    return {kInvalidValue, "the path " + socket_path_ + " is too long for a unix socket: choose a shorter job name"};

  ledger_->join();
  auto slots = SlotTable::open(config_.job_dir + "/slots", config_.first_slot, config_.end_slot);
  if (!slots.ok()) return std::move(slots).status().with("slot table");
  slots_ = std::move(*slots);

  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) return Status::from_errno(kUnknown, "making descriptors");
  parts_.job_dir = config_.job_dir;
  parts_.gpu = config_.gpu;
  parts_.tree = config_.tree;
  parts_.physical_gpu = config_.physical_gpu;
  parts_.other_gpu = config_.other_gpu;
  parts_.shared = sharing_ != nullptr;
  parts_.metas = config_.metas;
  parts_.device = device_.get();
  parts_.properties = device_->properties();
  parts_.ledger = &share_;
  parts_.slots = slots_.get();
  parts_.wake = [this] {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t ignored = write(wake_fd_, &one, sizeof one);
  };
  if (Status s = open_data(); !s.ok()) return s;
  // Before anybody can attach: a restored server has its clients first.
  if (!config_.restore_dir.empty())
    if (Status s = restore(); !s.ok()) return std::move(s).with("restore from " + config_.restore_dir);
  return {};
}

std::string ahead_path(const std::string& dir, uint32_t gpu) { return dir + "/gpu" + std::to_string(gpu) + ".ahead"; }

Status Server::announce() {
  if (Status s = listen_here(); !s.ok()) return s;
  if (Status s = write_data_file(); !s.ok()) return s;
  unlink_in_crash(socket_path_.c_str());
  return {};
}

// Binds under a name of its own, then renames: whoever connects finds the old socket or the new one, never none. A
// handover takes the name from a living predecessor, which keeps answering those that it has accepted.
Status Server::listen_here() {
  struct stat there;
  if (socket_inode_ && lstat(socket_path_.c_str(), &there) == 0 && there.st_ino == socket_inode_) return {};
  auto address_of = [](const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    return address;
  };
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return Status::from_errno(kUnknown, "making a socket");
  // A socket that somebody still answers is another server's; one that nobody answers was left by a kill.
  sockaddr_un address = address_of(socket_path_);
  if (config_.restore_dir.empty() && !socket_inode_ &&
      connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
    close(fd);
    return {kDeviceUnavailable, "another server already listens on " + socket_path_};
  }
  const std::string own = socket_path_ + "." + std::to_string(getpid());
  address = address_of(own);
  unlink(own.c_str());
  Status s;
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    s = Status::from_errno(kNotPermitted, "binding " + own);
  else if (chmod(own.c_str(), 0600) != 0 || listen(fd, 64) != 0 || lstat(own.c_str(), &there) != 0 ||
           rename(own.c_str(), socket_path_.c_str()) != 0)
    s = Status::from_errno(kNotPermitted, "listening on " + socket_path_);
  if (!s.ok()) {
    unlink(own.c_str());
    close(fd);
    return s;
  }
  if (listen_fd_ >= 0) close(listen_fd_);
  listen_fd_ = fd;
  socket_inode_ = there.st_ino;
  return {};
}

void Server::unlink_socket() const {
  struct stat there;
  if (lstat(socket_path_.c_str(), &there) == 0 && there.st_ino == socket_inode_) unlink(socket_path_.c_str());
}

// Listens before anybody is told the port. The file is written last: a restore that fails leaves the predecessor's.
Status Server::open_data() {
  if (config_.data_address.empty()) return {};
  auto port =
      device_->open_transport({config_.job_dir, config_.tree, config_.gpu, config_.data_address, config_.encrypt_data});
  if (!port.ok()) return std::move(port).status().with("listening for other trees");
  data_port_ = *port;
  return {};
}

Status Server::write_data_file() {
  if (data_port_ == 0) return {};
  const std::string path = config_.job_dir + "/gpu" + std::to_string(config_.gpu) + ".data";
  const std::string own = path + "." + std::to_string(getpid());
  struct stat there;
  std::string text = config_.data_address + " " + std::to_string(data_port_);
  if (device_->caps().trees_apart) {
    const auto& uuid = device_->properties().uuid;
    text += " " + hex(uuid.data(), uuid.size());
  }
  if (Status s = write_file(own, text + "\n"); !s.ok()) return s;
  if (lstat(own.c_str(), &there) == 0 && rename(own.c_str(), path.c_str()) == 0) {
    data_inode_ = there.st_ino;
    return {};
  }
  Status s = Status::from_errno(kNotPermitted, "naming " + path);
  unlink(own.c_str());
  return s;
}

void Server::unlink_data_file() const {
  const std::string path = config_.job_dir + "/gpu" + std::to_string(config_.gpu) + ".data";
  struct stat there;
  if (data_inode_ && lstat(path.c_str(), &there) == 0 && there.st_ino == data_inode_) unlink(path.c_str());
}

std::string Server::abi_hex() { return hex(wire::kAbiId, sizeof wire::kAbiId); }

Status Server::restore() {
  const std::string stem = config_.restore_dir + "/gpu" + std::to_string(config_.gpu);
  auto text = read_file(stem + ".state.json");
  if (!text.ok()) return std::move(text).status();
  auto read = read_state(*text);
  if (!read.ok()) return read.status();
  const ServerRecord& state = *read;
  if (!state.identity.uuid.empty())
    if (Status s = assume(state.identity, &parts_.properties); !s.ok()) return s;
  if (state.abi != abi_hex())
    return {kInvalidImage, "the state is of another build (ABI " + state.abi.substr(0, 16) + ", this server " +
                               abi_hex().substr(0, 16) + "): restore with the build that the image carries"};
  if (state.device != config_.device && !config_.other_gpu)
    return {kInvalidDevice, "the state is of a '" + state.device + "' device, this one is '" + config_.device + "'"};
  SharedRecord shared;
  if (config_.restore_shared) {
    auto shared_text = read_file(stem + ".shared.json");
    if (!shared_text.ok()) return std::move(shared_text).status();
    auto found = read_shared(*shared_text);
    if (!found.ok()) return std::move(found).status();
    shared = std::move(*found);
  }
  if (Status s = DP_FAULT(server_restore_start); !s.ok()) return s;
  // Held until the clients' logs hold them.
  const auto images = restore_images(parts_.images, state, stem + ".images");
  if (!images.ok()) return images.status();
  for (const ClientRecord& client : state.clients) {
    const SharedClientRecord* files = nullptr;
    for (const SharedClientRecord& one : shared.clients)
      if (one.number == client.number) files = &one;
    if (config_.restore_shared && !files)
      return {kInvalidImage, "the shared memory of client " + std::to_string(client.number) + " is missing"};
    auto connection = Connection::restore(parts_, client, files, config_.restore_dir);
    if (!connection.ok()) return std::move(connection).status();
    if (!*connection) {
      DP_LOG(kInfo, kServer, client.number, "the client has gone during the handover");
      continue;
    }
    (*connection)->start();
    clients_.push_back({-1, true, std::move(*connection), {}});
  }
  next_number_ = state.next_number;
  last_fault_ = state.last_fault;
  started_us_ -= state.uptime_us;
  gone_ = state.gone;
  parts_.live.peak = std::max(parts_.live.peak.load(), gone_.peak_bytes);
  held_ = true;
  borrowed_ = true;
  if (Status s = all_parked(); !s.ok()) return s;
  return DP_FAULT(server_restore_end);
}

bool Server::anybody() const {
  return std::any_of(clients_.begin(), clients_.end(), [](const Client& c) { return c.here; });
}

void Server::run() {
  bool lease_ended = false;
  for (;;) {
    std::vector<pollfd> fds = {{accept_from_us_ > now_us() ? -1 : listen_fd_, POLLIN, 0},
                               {wake_fd_, POLLIN, 0},
                               {lease_ended ? -1 : config_.lease_fd, POLLIN, 0}};
    const size_t first_hello = fds.size();
    for (const Hello& h : hellos_) fds.push_back({h.socket, static_cast<short>(h.whole() ? 0 : POLLIN), 0});
    const size_t first_client = fds.size();
    for (const Client& c : clients_)
      if (c.here && c.socket >= 0)
        fds.push_back({c.socket, POLLIN | POLLRDHUP, 0});
      else if (c.here)
        fds.push_back({c.connection->endpoint().link(), 0, 0});
    const size_t first_control = fds.size();
    // The server takes no request from a peer that does not read its answers.
    auto waits_for = [](const Outbox& box) { return static_cast<short>(box.waits() ? POLLOUT : POLLIN); };
    for (const auto& control : controls_) fds.push_back({control->socket(), waits_for(*control), 0});
    for (const auto& box : farewells_) fds.push_back({box->socket(), waits_for(*box), 0});
    if (poll(fds.data(), fds.size(), timeout_ms()) < 0 && errno != EINTR) break;

    if (end_) {
      DP_LOG(kInfo, kServer, 0, "GPU %u: told to end", config_.gpu);
      return borrowed_ ? leave_files() : stop_all(true);
    }
    if (fds[1].revents) {
      uint64_t count;
      [[maybe_unused]] const ssize_t ignored = read(wake_fd_, &count, sizeof count);
      reap();
    }
    if (fds[2].revents) {
      char byte;                                           // nobody writes to a lease; only its end counts
      const ssize_t n = read(config_.lease_fd, &byte, 1);  // end-of-file leaves errno as it was
      if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) lease_ended = true;
    }
    // Before accept_all and reap change the vectors: the clients that poll saw, by descriptor.
    look_at_clients({fds.begin() + static_cast<std::ptrdiff_t>(first_client),
                     fds.begin() + static_cast<std::ptrdiff_t>(first_control)});
    std::vector<ControlPeer*> called;
    for (size_t i = 0; i < controls_.size(); i++)
      if (fds[first_control + i].revents || controls_[i]->waits()) called.push_back(controls_[i].get());
    std::erase_if(farewells_, [](const auto& box) { return !box->flush() || !box->waits(); });
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
    for (ControlPeer* peer : called) {
      if (peer->flush() && (peer->waits() || peer->receive())) {
        serve_control(*peer);
        if (leaving_) return;
        continue;
      }
      // A coordinator that is gone must not leave the job standing. A restored server has a predecessor that does the
      // same, and two must not go on: its lease decides.
      if (peer == hold_peer_) lift();
      if (peer == cut_peer_ && !borrowed_) {
        DP_LOG(kWarn, kServer, 0, "the coordinator hung up during a cut: going on");
        cut_peer_ = nullptr;
        resume();
      }
      if (peer == cut_peer_) cut_peer_ = nullptr;
      std::erase_if(controls_, [&](const auto& c) { return c.get() == peer; });
    }
    look_at_cut();
    name_stragglers();
    if (lease_ended && borrowed_) {
      DP_LOG(kInfo, kServer, 0, "the coordinator is gone before this server was told to go on: leaving");
      return leave_files();
    }
    if (lease_ended && !anybody()) {
      DP_LOG(kInfo, kServer, 0, "the job is gone: leaving");
      return stop_all(false);
    }
  }
}

int Server::timeout_ms() const {
  auto waits = [](const auto& box) { return box->waits(); };
  if (cut_) return kCutLookMs;
  if (accept_from_us_ > now_us()) return static_cast<int>(kAcceptPauseUs / 1000);
  const bool looks = !hellos_.empty() || !farewells_.empty() ||
                     std::any_of(controls_.begin(), controls_.end(), waits) ||
                     std::any_of(clients_.begin(), clients_.end(), [](const Client& c) { return c.name_at_us != 0; });
  return looks ? kLookMs : -1;
}

void Server::load_ahead(const std::string& dir) {
  const std::string path = ahead_path(dir, config_.gpu);
  auto text = read_file(path);
  Status s = text.ok() ? Status() : text.status();
  uint32_t bytes = 0;
  for (size_t at = 0; s.ok() && at + sizeof bytes <= text->size(); at += bytes) {
    std::memcpy(&bytes, text->data() + at, sizeof bytes);
    at += sizeof bytes;
    if (bytes > text->size() - at) break;
    s = device_->load_ahead(
        {text->begin() + static_cast<std::ptrdiff_t>(at), text->begin() + static_cast<std::ptrdiff_t>(at + bytes)});
  }
  // A restore reports its own errors, and may not need the executor.
  if (!s.ok()) DP_LOG(kWarn, kServer, 0, "nothing is loaded ahead: %s", s.text().c_str());
}

void Server::end() {
  end_ = true;
  parts_.wake();
}

void Server::look_at_clients(const std::vector<pollfd>& fds) {
  for (const pollfd& fd : fds) {
    if (!fd.revents) continue;
    for (Client& c : clients_) {
      if (!c.here || fd.fd != (c.socket >= 0 ? c.socket : c.connection->endpoint().link())) continue;
      uint8_t byte = 0;
      if (c.socket >= 0) {
        const ssize_t n = recv(c.socket, &byte, 1, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
        close(c.socket);
        c.socket = -1;
        if (n == 1 && byte == kLinked) break;  // from now on its link shows that it lives
      }
      DP_LOG(kInfo, kServer, c.connection->peer().number, "pid=%u hung up", c.connection->peer().pid);
      c.here = false;
      c.name_at_us = now_us() + kStragglerUs;
      c.connection->request_stop();
      close_peers(c);
      break;
    }
  }
}

// Nobody waits for its thread, and no cut does; but what it has stays taken, and others on this GPU may wait for their turn.
void Server::name_stragglers() {
  for (Client& c : clients_) {
    if (c.name_at_us == 0 || now_us() < c.name_at_us || c.connection->finished()) continue;
    c.name_at_us = 0;
    DP_LOG(kWarn, kServer, c.connection->peer().number,
           "pid=%u has ended, and its work on GPU %u has not within %lu s: until it does, its memory stays taken",
           c.connection->peer().pid, config_.gpu, static_cast<unsigned long>(kStragglerUs / 1'000'000));
  }
}

void Server::take_hellos() {
  accept_all();
  std::erase_if(hellos_, [this](Hello& hello) {
    pollfd fd{hello.socket, static_cast<short>(hello.whole() ? 0 : POLLIN), 0};
    if (poll(&fd, 1, 0) <= 0 || read_hello(hello)) return false;
    if (hello.socket >= 0) close(hello.socket);
    return true;
  });
}

// The rest of the message must have come with the hello; the server does not wait for it.
void Server::warm(int socket) {
  uint32_t bytes = 0;
  if (recv(socket, &bytes, sizeof bytes, MSG_DONTWAIT) != sizeof bytes || bytes == 0 || bytes > kMaxWarmBytes) return;
  std::vector<uint8_t> text(bytes + 1);  // NUL behind it, as an image has
  if (recv(socket, text.data(), bytes, MSG_DONTWAIT) == static_cast<ssize_t>(bytes)) device_->warm(std::move(text));
}

// The socket of a peer that has gone is closed together with the client's: there are few.
bool Server::admit_peer(int socket, uint32_t slot) {
  for (Client& c : clients_) {
    if (!c.here || c.connection->slot() != slot) continue;
    const int memory = c.connection->device().share_memory();
    answer_peer(socket, memory);
    if (memory < 0) return false;
    close(memory);
    c.peers.push_back(socket);
    return true;
  }
  answer_peer(socket, -1);
  return false;
}

void Server::close_peers(Client& c) {
  for (const int socket : c.peers) close(socket);
  c.peers.clear();
}

void Server::leave_files() {
  unlink_socket();
  unlink_data_file();
  ledger_->leave();
}

void Server::accept_all() {
  for (;;) {
    const int socket = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) {
      // Newcomers stay in the queue, so poll would report them again at once.
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        if (!accept_from_us_)
          DP_LOG(kWarn, kServer, 0, "no descriptor is left (%s): who comes now waits (see: ulimit -n)",
                 std::strerror(errno));
        accept_from_us_ = now_us() + kAcceptPauseUs;
      }
      return;
    }
    accept_from_us_ = 0;
    hellos_.push_back({socket, now_us() + kHelloUs, 0, {}});
  }
}

// False when the hello needs no more waiting; hello.socket is -1 where it became a client's.
bool Server::read_hello(Hello& hello) {
  if (hello.whole()) return false;  // it waits, and its peer has hung up
  auto* bytes = reinterpret_cast<uint8_t*>(&hello.request);
  const ssize_t n = recv(hello.socket, bytes + hello.got, sizeof hello.request - hello.got, MSG_DONTWAIT);
  if (n <= 0) return n < 0 && (errno == EAGAIN || errno == EINTR);
  hello.got += static_cast<size_t>(n);
  return !hello.whole() || serve_hello(hello);
}

bool Server::serve_hello(Hello& hello) {
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
  } else if (hello.request.kind == AttachKind::kWarm) {
    warm(hello.socket);
    return false;
  } else if (hello.request.kind == AttachKind::kPeer) {
    if (admit_peer(hello.socket, hello.request.wanted_slot)) hello.socket = -1;
    return false;
  } else if (hello.request.kind == AttachKind::kStats) {
    send_stats(hello.socket);
    hello.socket = -1;
    return false;
  } else if (hello.request.kind == AttachKind::kTrace) {
    send_trace(hello.socket);
    hello.socket = -1;
    return false;
  } else if (hello.request.kind == AttachKind::kControl) {
    controls_.push_back(std::make_unique<ControlPeer>(hello.socket));
    hello.socket = -1;
    return false;
  } else if (hello.request.kind != AttachKind::kClient && hello.request.kind != AttachKind::kFramework &&
             hello.request.kind != AttachKind::kFacts) {
    std::snprintf(reply.text, sizeof reply.text, "unknown kind %u of attach request",
                  static_cast<unsigned>(hello.request.kind));
  } else if (std::memcmp(hello.request.abi_id, wire::kAbiId, sizeof wire::kAbiId) != 0) {
    reply.status = AttachStatus::kAbiDiffers;
    std::snprintf(
        reply.text, sizeof reply.text,
        "client and server are of different builds (client ABI %.16s, server ABI %.16s): rebuild, or use one version",
        hex(hello.request.abi_id, 8).c_str(), hex(wire::kAbiId, 8).c_str());
  } else if (closed()) {
    return true;
  } else if (hello.request.kind == AttachKind::kFacts) {
    reply.status = AttachStatus::kOk;
    fill_facts(parts_.properties, &reply.props);
    send_now(hello.socket, &reply, sizeof reply);
    return false;
  } else {
    attach(hello.socket, hello.request, static_cast<uint32_t>(peer.pid));
    hello.socket = -1;
    return false;
  }
  DP_LOG(kWarn, kServer, 0, "pid=%d refused: %s", peer.pid, reply.text);
  send_now(hello.socket, &reply, sizeof reply);
  return false;
}

void Server::admit_waiting() {
  std::erase_if(hellos_, [this](Hello& hello) {
    if (!hello.whole() || serve_hello(hello)) return false;
    if (hello.socket >= 0) close(hello.socket);
    return true;
  });
}

void Server::attach(int socket, const AttachRequest& request, uint32_t pid) {
  AttachReply reply{};
  reply.magic = kAttachMagic;
  std::memcpy(reply.abi_id, wire::kAbiId, sizeof reply.abi_id);
  auto connection = Connection::make(
      parts_, {next_number_++, pid, request.wanted_slot, request.kind == AttachKind::kFramework}, &reply);
  if (connection) {
    if (hold_peer_) connection->communicators().hold(), connection->say_held(true);
    if (withholds_) connection->withhold();
    if (held_) connection->request_cut(0);
    connection->start();
    DP_LOG(kInfo, kServer, connection->peer().number, "pid=%u attached, slot %u", pid, connection->slot());
    clients_.push_back({socket, true, std::move(connection), {}});
  } else {
    DP_LOG(kWarn, kServer, 0, "pid=%u refused: %s", pid, reply.text);
  }
  send_now(socket, &reply, sizeof reply);
  if (reply.status != AttachStatus::kOk) close(socket);
}

namespace {

Json rank_of(Connection& connection) {
  const Communicators::Place place = connection.communicators().place();
  return place.ranks ? Json(place.rank) : Json();
}

void add(const Connection& connection, GoneRecord* totals) {
  totals->add(connection.counters().counted());
  totals->wakes += connection.endpoint().wakes();
}

}  // namespace

void Server::reap() {
  std::erase_if(clients_, [&](Client& c) {
    if (!c.connection->finished()) return false;
    c.connection->join();
    add(*c.connection, &gone_);
    gone_.steps = std::max(gone_.steps, gone_.steps_before + c.connection->endpoint().steps());
    if (last_fault_.empty()) last_fault_ = c.connection->endpoint().lifeline().fault_text();
    if (c.socket >= 0) close(c.socket);
    close_peers(c);
    return true;
  });
  if (clients_.empty()) gone_.steps_before = gone_.steps;
}

// tell: somebody may still be connected. Either way files are gone when it returns, threads as far as possible.
void Server::stop_all(bool tell) {
  if (listen_fd_ >= 0) close(listen_fd_);
  unlink_socket();
  unlink_data_file();
  for (Client& c : clients_) {
    if (tell && c.here) c.connection->endpoint().lifeline().end(ServerState::kGone);
    c.connection->request_stop();
  }
  const uint64_t until = now_us() + kLeaveUs;
  while (!clients_.empty() && now_us() < until) {
    pollfd wake{wake_fd_, POLLIN, 0};
    poll(&wake, 1, 100);
    reap();
  }
  for (Client& c : clients_) {  // its kernel does not end; it ends with the process
    c.connection->endpoint().remove_files();
    slots_->give(c.connection->slot());
  }
  ledger_->leave();
}

Json Server::stats() const {
  GoneRecord all = gone_;
  Json clients = Json::array();
  std::string fault = last_fault_;
  for (const Client& c : clients_) {
    add(*c.connection, &all);
    if (fault.empty()) fault = c.connection->endpoint().lifeline().fault_text();
    if (!c.here) continue;
    const Counters& n = c.connection->counters();
    clients.push_back({{"pid", c.connection->peer().pid},
                       {"slot", c.connection->slot()},
                       {"rank", rank_of(*c.connection)},
                       {"calls", n.calls.load()},
                       {"launches", n.launches.load()},
                       {"live_bytes", n.live_bytes.load()},
                       {"peak_bytes", n.peak_bytes.load()}});
  }
  uint64_t kept = 0, kept_bytes = 0;
  const ImageStore& images = parts_.images;
  for (const auto& image : images.all()) kept++, kept_bytes += image->bytes.size();
  Json totals{{"wakes", all.wakes}};
#define DP_PUT(name) totals[#name] = all.name;
  DP_COUNTED(DP_PUT)
#undef DP_PUT
  Json splicing;
  if (sharing_ && sharing_->splicing) {
    const hal::SpliceCounts c = sharing_->splicing->counts();
    splicing = {{"squashed", c.squashed},
                {"validations", c.validations},
                {"different", c.different},
                {"given_up", c.given_up},
                {"broken", c.broken},
                {"compared_bytes", c.compared_bytes},
                {"saved_bytes", c.saved_bytes},
                {"lent_bytes", c.lent_bytes},
                {"settled_bytes", c.settled_bytes},
                {"off", c.off}};
  }
  Json turns;
  if (parts_.turns) {
    const MemoryTurns::Counts c = parts_.turns->counts();
    turns = {{"waits", c.waits}, {"waited_ms", c.waited_us / 1000}, {"still", c.still}, {"off", c.off}};
    for (const MemoryTurns::Rank& r : parts_.turns->ranks()) {
      const char* const states[] = {"moves", "waits", "rests"};
      turns["ranks"].push_back({{"has", r.claim.has},
                                {"most", r.claim.most},
                                {"least", r.claim.least},
                                {"known", r.known},
                                {"waits", r.waits},
                                {"state", states[static_cast<size_t>(r.state)]}});
    }
  }
  const Ledger::Use use = ledger_->use();
  const uint64_t uptime_ms = (now_us() - started_us_) / 1000;
  return {{"job", config_.job},
          {"gpu", config_.gpu},
          {"pid", getpid()},
          {"physical_gpu", config_.physical_gpu},
          {"switches", sharing_ ? Json(sharing_->engine.switches()) : Json()},
          {"splicing", splicing},
          {"memory_turns", turns},
          {"device", config_.device},
          {"name", device_->properties().name},
          {"uptime_s", static_cast<double>(uptime_ms) / 1000},
          {"chaos", config_.chaos},
          {"memory", {{"total", total_bytes_}, {"used", parts_.live.now.load()}, {"peak", parts_.live.peak.load()}}},
          {"ledger", {{"taken", use.taken}, {"saved", use.saved}, {"used", use.used}, {"total", use.total}}},
          {"clients_now", clients.size()},
          {"totals", totals},
          {"images",
           {{"kept", kept},
            {"kept_bytes", kept_bytes},
            {"received_bytes", images.received_bytes.load()},
            {"loads", images.loads.load()},
            {"loads_known", images.loads_known.load()}}},
          {"clients", clients},
          {"sticky", fault}};
}

void Server::send_stats(int socket) {
  auto box = std::make_unique<Outbox>(socket);
  box->say(json_text(stats()));
  if (box->waits()) farewells_.push_back(std::move(box));
}

void Server::send_trace(int socket) {
  Json clients = Json::array();
  std::string events;
  const uint64_t until_ns = now_ns() + uint64_t{kTraceKeptS} * 1'000'000'000;
  for (Client& c : clients_) {
    Trace& trace = c.connection->trace();
    Trace::Taken taken = trace.take(Trace::Reader::kTool);
    trace.keep_on(Trace::Reader::kTool, until_ns);
    const size_t bytes = taken.events.size() * sizeof(Trace::Event);
    events.append(reinterpret_cast<const char*>(taken.events.data()), bytes);
    clients.push_back({{"pid", c.connection->peer().pid},
                       {"slot", c.connection->slot()},
                       {"rank", rank_of(*c.connection)},
                       {"names", taken.names},
                       {"events", taken.events.size()},
                       {"lost", taken.lost}});
  }
  auto box = std::make_unique<Outbox>(socket);
  box->say(json_text({{"gpu", config_.gpu},
                      {"pid", getpid()},
                      {"physical_gpu", config_.physical_gpu},
                      {"now_ns", now_ns()},
                      {"clients", clients}}));
  box->say(events);
  if (box->waits()) farewells_.push_back(std::move(box));
}

}  // namespace devproxy::server
