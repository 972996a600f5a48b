// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/control.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "devproxy/csrc/base/fault.h"
#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/json.h"
#include "devproxy/csrc/base/log.h"
#include "devproxy/csrc/server/block_index.h"
#include "devproxy/csrc/server/comm_json.h"
#include "devproxy/csrc/server/dump.h"
#include "devproxy/csrc/server/server.h"
#include "devproxy/csrc/server/state_files.h"
#include "devproxy/csrc/server/state_record.h"

namespace devproxy::server {

namespace {

constexpr uint64_t kAutoWaitMaxUs = 30'000'000;
constexpr uint64_t kStragglerUs = 2'000'000;

// A member of a request; what is missing or of another kind is as if it were not there.
std::string text_of(const Json& request, const char* name) {
  const auto it = request.find(name);
  return it != request.end() && it->is_string() ? it->get<std::string>() : std::string();
}
bool flag_of(const Json& request, const char* name) {
  const auto it = request.find(name);
  return it != request.end() && it->is_boolean() && it->get<bool>();
}
int64_t number_of(const Json& request, const char* name, int64_t otherwise) {
  const auto it = request.find(name);
  return it != request.end() && it->is_number_integer() ? it->get<int64_t>() : otherwise;
}

double seconds(uint64_t us) { return static_cast<double>(us) * 1e-6; }

}  // namespace

Outbox::~Outbox() { close(socket_); }

void Outbox::say(const std::string& text) {
  const auto length = static_cast<uint32_t>(text.size());
  if (out_.empty()) moved_us_ = now_us();
  out_.append(reinterpret_cast<const char*>(&length), sizeof length).append(text);
  [[maybe_unused]] const bool told = flush();  // a peer that has gone is noticed by its socket
}

bool Outbox::flush() {
  while (!out_.empty()) {
    const ssize_t n = send(socket_, out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      out_.erase(0, static_cast<size_t>(n));
      moved_us_ = now_us();
    } else if (errno == EAGAIN) {
      if (now_us() - moved_us_ < kUnreadUs) return true;
      DP_LOG(kWarn, kServer, 0, "a peer has not read its answer for %lu s: hanging up",
             static_cast<unsigned long>(kUnreadUs / 1'000'000));
      return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool ControlPeer::receive() {
  char block[4096];
  const ssize_t n = recv(socket(), block, sizeof block, MSG_DONTWAIT);
  if (n <= 0) return n < 0 && (errno == EAGAIN || errno == EINTR);
  in_.append(block, static_cast<size_t>(n));
  uint32_t length = 0;
  if (in_.size() >= sizeof length) std::memcpy(&length, in_.data(), sizeof length);
  return length <= kMaxControlBytes;
}

std::optional<std::string> ControlPeer::request() {
  uint32_t length;
  if (in_.size() < sizeof length) return std::nullopt;
  std::memcpy(&length, in_.data(), sizeof length);
  if (in_.size() - sizeof length < length) return std::nullopt;
  std::string text = in_.substr(sizeof length, length);
  in_.erase(0, sizeof length + length);
  return text;
}

void ControlPeer::answer(const Json& json) { say(json_text(json)); }

void send_now(int socket, const void* data, size_t bytes) {
  [[maybe_unused]] const ssize_t ignored = send(socket, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// -- the server's half ------------------------------------------------------------------------------------------------

Json Server::refused(const std::string& why) const {
  return {{"ok", false},
          {"error", "GPU " + std::to_string(config_.gpu) + ": " + why},
          {"state", parked() ? "parked" : "running"}};
}

// All requests that have arrived. False when the peer has gone, or the server leaves.
void Server::serve_control(ControlPeer& peer) {
  while (!peer.waits()) {
    auto text = peer.request();
    if (!text) return;
    const Json request = Json::parse(*text, nullptr, false);
    if (!request.is_object()) {
      peer.answer(refused("a control request is not JSON"));
      continue;
    }
    const std::string op = text_of(request, "op"), dir = text_of(request, "dir");
    if (op == "cut") {
      begin_cut(peer, request);
    } else if (op == "ranks") {
      peer.answer({{"ok", true}, {"reports", comm_reports()}});
    } else if (op == "barrier") {
      peer.answer(barrier(peer, request));
    } else if (op == "aim") {
      peer.answer(aim(peer, request));
    } else if (op == "hold") {
      peer.answer(hold(peer));
    } else if (op == "withhold") {
      peer.answer(withhold(peer));
    } else if (op == "mark") {
      peer.answer(mark(request));
    } else if (op == "agree") {
      peer.answer(agree(request));
    } else if (op == "lift") {
      peer.answer(lift());
    } else if (op == "can_dump") {
      peer.answer(can_dump());
    } else if (op == "dump") {
      peer.answer(dump(dir, flag_of(request, "moves")));
    } else if (op == "dump_shared") {
      peer.answer(dump_shared(dir));
    } else if (op == "executors") {
      peer.answer(list_executors(dir));
    } else if (op == "resume") {
      peer.answer(resume());
    } else if (op == "steps") {
      uint64_t steps = gone_.steps;
      for (const Client& c : clients_) steps = std::max(steps, gone_.steps_before + c.connection->endpoint().steps());
      peer.answer({{"ok", true}, {"steps", steps}});
    } else if (op == "leave") {
      peer.answer(leave());
      if (leaving_) return;
    } else {
      peer.answer(refused("unknown control request '" + op + "'"));
    }
  }
}

// -- agreement --------------------------------------------------------------------------------------------------------

Json Server::comm_reports() {
  Json reports = Json::array();
  for (const Client& c : clients_) {
    if (!c.here) continue;
    Json report = to_json(c.connection->comm_report());
    report["pid"] = c.connection->peer().pid;
    report["gpu"] = config_.gpu;
    report["launches"] = c.connection->counters().launches.load();
    report["host_functions"] = c.connection->host_functions().count();
    report["period_us"] = c.connection->counters().period_us.load();
    report["rests"] = c.connection->rests();
    report["takes_back"] = device_->caps().takes_back;
    report["traffic"] = to_json(c.connection->communicators().traffic(), now_us());
    reports.push_back(std::move(report));
  }
  return reports;
}

Json Server::barrier(ControlPeer& peer, const Json& request) {
  if (hold_peer_ && hold_peer_ != &peer) return refused("another agreement is under way");
  if (held_) return refused(parked() ? "it is parked already" : "a cut is under way already");
  if (!config_.metas) return refused("this job's collectives carry no metas (--barrier agree)");
  const auto comm = comm_key_of(request);
  const int64_t attempt = number_of(request, "attempt", 0);
  if (!comm || attempt < 1 || attempt > MetaBarrier::kMaxAttempt)
    return refused("a barrier names a communicator by two numbers, and its attempt by one up to 2^20");
  held_by(peer);
  size_t members = 0, acquired = 0;
  for (const Client& c : clients_) {
    if (!c.here) continue;
    const Communicators::Asked asked = c.connection->communicators().ask(*comm, static_cast<int32_t>(attempt));
    members += asked.member;
    acquired += asked.member && asked.acquired;
  }
  return {{"ok", true}, {"members", members}, {"acquired", acquired}, {"reports", comm_reports()}};
}

// Whoever has the least memory rests, and is seen to rest in the reports. Asked again, with what all have reported, whoever
// owes goes on: others may be past their own point, and need it to come to the next.
Json Server::aim(ControlPeer& peer, const Json& request) {
  if (hold_peer_ && hold_peer_ != &peer) return refused("another agreement is under way");
  if (held_) return refused(parked() ? "it is parked already" : "a cut is under way already");
  if (hold_peer_ != &peer)
    for (const Client& c : clients_)
      if (c.here) c.connection->aim(true);
  held_by(peer);
  if (request.contains("reports")) {
    const auto reports = comm_reports_of(request);
    if (!reports) return refused("the reports of the other ranks are damaged");
    const CommVerdict verdict = judge(*reports);
    for (const Client& c : clients_) {
      if (!c.here) continue;
      c.connection->communicators().learn(verdict, nullptr);
      if (c.connection->communicators().owes()) c.connection->look_again();
    }
  }
  return {{"ok", true}, {"reports", comm_reports()}};
}

Json Server::hold(ControlPeer& peer) {
  if (hold_peer_ && hold_peer_ != &peer) return refused("another agreement is under way");
  if (held_) return refused(parked() ? "it is parked already" : "a cut is under way already");
  held_by(peer);
  for (const Client& c : clients_)
    if (c.here) c.connection->communicators().hold();
  return {{"ok", true}, {"reports", comm_reports()}};
}

Json Server::agree(const Json& request) {
  if (!hold_peer_) return refused("nothing is held: hold first");
  const auto reports = comm_reports_of(request);
  if (!reports) return refused("the reports of the other ranks are damaged");
  const CommVerdict verdict = judge(*reports);
  bool settled = true;
  for (const Client& c : clients_) {
    if (!c.here) continue;
    const uint64_t id = c.connection->comm_report().client;
    const auto own =
        std::find_if(reports->begin(), reports->end(), [&](const CommReport& r) { return r.client == id; });
    settled = c.connection->communicators().learn(verdict, own == reports->end() ? nullptr : &*own) && settled;
    if (c.connection->communicators().owes()) c.connection->look_again();
    // Its end comes through the ring, perhaps behind what is held.
    settled = settled && c.connection->host_functions().none_out();
  }
  return {{"ok", true},           {"settled", settled},      {"reports", comm_reports()}, {"failure", verdict.failure},
          {"debt", verdict.debt}, {"debtor", verdict.debtor}};
}

// Nothing of a communicator begins here any more, once it is still. When all servers of the job are, a cut needs no
// agreement.
Json Server::withhold(ControlPeer& peer) {
  if (hold_peer_ && hold_peer_ != &peer) return refused("another agreement is under way");
  if (held_) return refused(parked() ? "it is parked already" : "a cut is under way already");
  if (!device_->caps().takes_back) return refused("the device '" + config_.device + "' takes nothing back here");
  held_by(peer);
  withholds_ = true;
  bool still = true;
  for (const Client& c : clients_)
    if (c.here) still = c.connection->withhold() && still;
  return {{"ok", true}, {"still", still}, {"reports", comm_reports()}};
}

// Is all that the servers of other trees have said here? See Device::mark_transport.
Json Server::mark(const Json& request) {
  const int64_t number = number_of(request, "number", 0);
  if (!withholds_) return refused("nothing is withheld: withhold first");
  if (number <= 0) return refused("a mark has a number above 0");
  bool still = true;
  for (const Client& c : clients_)
    if (c.here) still = c.connection->withhold() && still;
  Json to = Json::array(), from = Json::array();
  // What is still being said would come behind the mark.
  const hal::TransportMarks marks =
      still ? device_->mark_transport(static_cast<uint64_t>(number)) : hal::TransportMarks{};
  for (const uint64_t server : marks.to) to.push_back(std::to_string(server));
  for (const uint64_t server : marks.from) from.push_back(std::to_string(server));
  return {{"ok", true}, {"still", still}, {"server", std::to_string(marks.server)}, {"to", to}, {"from", from}};
}

void Server::held_by(ControlPeer& peer) {
  if (std::exchange(hold_peer_, &peer) == &peer) return;
  for (const Client& c : clients_)
    if (c.here) c.connection->say_held(true);
}

// Of all three. Whoever is parked stays as it is until it goes on.
Json Server::lift() {
  hold_peer_ = nullptr;
  for (const Client& c : clients_) {
    c.connection->communicators().lift();
    c.connection->aim(false);
  }
  if (held_) return {{"ok", true}};
  withholds_ = false;
  for (const Client& c : clients_) {
    if (!c.here) continue;  // it may have given its device back
    c.connection->let_go();
    c.connection->say_held(false);
  }
  return {{"ok", true}};
}

// -- the cut ----------------------------------------------------------------------------------------------------------

Json describe(const hal::Properties& gpu) {
  return {{"name", gpu.name}, {"major", gpu.major}, {"minor", gpu.minor}, {"memory_bytes", gpu.total_bytes}};
}

Json Server::can_dump() {
  Json clients = Json::array(), refusals = Json::array();
  const int level = device_->caps().level;
  if (level < 2)
    refusals.push_back("the device '" + config_.device + "' of GPU " + std::to_string(config_.gpu) +
                       " cannot be dumped: it has level " + std::to_string(level) + ", a checkpoint needs 2");
  for (const Client& c : clients_) {
    if (!c.here) continue;
    if (std::string why = c.connection->undumpable(); !why.empty()) refusals.push_back(std::move(why));
    const Counters& n = c.connection->counters();
    const uint64_t trough = n.trough_bytes;
    clients.push_back({{"number", c.connection->number()},
                       {"pid", c.connection->peer().pid},
                       {"slot", c.connection->slot()},
                       {"ranked", c.connection->communicators().place().ranks != 0},
                       {"live_bytes", n.live_bytes.load()},
                       {"stable_bytes", n.stable_bytes.load()},
                       {"ranges", n.allocs.load() - n.frees.load()},
                       {"pinned_bytes", n.pinned_bytes.load()},
                       {"modules", n.modules.load()},
                       {"machine_code", n.machine_code.load()},
                       {"streams", n.streams.load()},
                       {"events", n.events.load()},
                       {"host_functions", c.connection->host_functions().count()},
                       {"trough_bytes", trough == UINT64_MAX ? 0 : trough},
                       {"period_us", n.period_us.load()},
                       {"faulted", c.connection->faulted()}});
  }
  return {{"ok", true},
          {"level", level},
          {"gpu", describe(device_->properties())},
          {"clients", clients},
          {"refusals", refusals}};
}

void Server::begin_cut(ControlPeer& peer, const Json& request) {
  if (held_) return peer.answer(refused(parked() ? "it is parked already" : "a cut is under way already"));
  if (device_->caps().level < 2) return peer.answer(refused("the device '" + config_.device + "' cannot be dumped"));
  const int64_t wait_ms = number_of(request, "wait_ms", 0);
  uint64_t wait_us = static_cast<uint64_t>(wait_ms) * 1000;
  if (wait_ms < 0) {  // two periods, as far as they are known
    wait_us = 0;
    for (const Client& c : clients_) wait_us = std::max<uint64_t>(wait_us, 2 * c.connection->counters().period_us);
    wait_us = std::min(wait_us, kAutoWaitMaxUs);
  }
  held_ = true;
  cut_peer_ = &peer;
  cut_.emplace(now_us(), wait_us,
               static_cast<uint64_t>(std::max<int64_t>(1, number_of(request, "drain_ms", 10'000))) * 1000);
  DP_LOG(kInfo, kServer, 0, "cut: waiting up to %lu ms for least live bytes",
         static_cast<unsigned long>(wait_us / 1000));
  for (Client& c : clients_)
    if (c.here) c.connection->request_cut(cut_->until_us());
  look_at_cut();
}

// Called whenever a connection has woken the server thread, and every few milliseconds during a cut.
void Server::look_at_cut() {
  if (!cut_) return;
  uint64_t progress = 0;
  const Client* waits_for = nullptr;
  for (const Client& c : clients_) {
    if (!c.here) continue;
    progress += c.connection->cut_progress();
    if (!c.connection->parked()) waits_for = &c;
  }
  const size_t out = waits_for ? waits_for->connection->host_functions().count() : 0;
  const Cut::Verdict verdict = cut_->on({now_us(), !waits_for, progress, out != 0});
  if (verdict == Cut::Verdict::kWait) return;
  if (verdict == Cut::Verdict::kParked) {
    Status fault = DP_FAULT(server_cut_parked);
    if (!fault.ok()) return fail_cut(fault.text());
    cut_.reset();
    forget_dump();
    device_->park_transport();
    Connection::CutFacts sum;
    for (const Client& c : clients_) {
      if (!c.here) continue;
      const Connection::CutFacts f = c.connection->cut_facts();
      sum.live_bytes += f.live_bytes;
      sum.trough_bytes += f.trough_bytes == UINT64_MAX ? f.live_bytes : f.trough_bytes;
      sum.waited_us = std::max(sum.waited_us, f.waited_us);
      sum.drained_us = std::max(sum.drained_us, f.drained_us);
    }
    DP_LOG(kInfo, kServer, 0, "parked: live_bytes=%lu waited_us=%lu drained_us=%lu",
           static_cast<unsigned long>(sum.live_bytes), static_cast<unsigned long>(sum.waited_us),
           static_cast<unsigned long>(sum.drained_us));
    if (cut_peer_)
      cut_peer_->answer({{"ok", true},
                         {"live_bytes", sum.live_bytes},
                         {"trough_bytes", sum.trough_bytes},
                         {"waited_us", sum.waited_us},
                         {"drained_us", sum.drained_us}});
    return;
  }
  const std::string who = "client " + std::to_string(waits_for->connection->number()) + " (pid " +
                          std::to_string(waits_for->connection->peer().pid) + ")";
  if (out)
    return fail_cut(who + " has " + std::to_string(out) + " host functions that do not return" +
                    (verdict == Cut::Verdict::kOverlap ? ", or always one more" : "") + ": try again, or end them");
  fail_cut("a kernel or copy of " + who + " does not end: try again, or with a longer drain time");
}

void Server::fail_cut(const std::string& why) {
  for (Client& c : clients_) c.connection->resume();
  held_ = false;
  lift();
  cut_.reset();
  DP_LOG(kWarn, kServer, 0, "cut given up: %s", why.c_str());
  if (cut_peer_) cut_peer_->answer(refused(why + "; the job runs on"));
  cut_peer_ = nullptr;
}

// A client that attached while the server was parked parks on its own.
Status Server::all_parked() {
  if (!parked()) return {kIllegalState, "it is not parked: cut first"};
  const uint64_t until = now_us() + kStragglerUs;
  for (const Client& c : clients_)
    while (c.here && !c.connection->parked() && !c.connection->finished()) {
      if (now_us() > until) return {kNotReady, "a client that has just attached has not parked yet: try again"};
      usleep(100);
    }
  return {};
}

Status Server::dump_client(const Client& c, const std::string& dir, BlockIndex* index, DeviceBytes* bytes) {
  // Asked before the cut too; a fault may have come since.
  if (std::string why = c.connection->undumpable(); !why.empty()) return {kNotSupported, std::move(why)};
  c.connection->device().trim();  // what it computes with is none of the job's
  if (Status s = server::dump_device(*c.connection, dir, index, bytes); !s.ok()) return s;
  dumped_.insert(c.connection->number());
  return {};
}

Status Server::write_state(const std::string& dir) {
  const std::string stem = dir + "/gpu" + std::to_string(config_.gpu);
  ServerRecord state;
  if (Status s = dump_images(parts_.images, stem + ".images", &state); !s.ok()) return s;
  for (const Client& c : clients_) {
    if (!c.here) continue;
    if (Status s = c.connection->save(&state.clients.emplace_back()); !s.ok()) return s;
  }
  const bool pending = std::any_of(state.clients.begin(), state.clients.end(),
                                   [](const ClientRecord& client) { return !client.pending.empty(); });
  state.version = pending ? kPendingVersion : kStateVersion;
  state.abi = abi_hex();
  state.gpu = config_.gpu;
  state.device = config_.device;
  state.identity = record_of(parts_.properties);
  state.memory_bytes = total_bytes_;
  state.next_number = next_number_;
  state.uptime_us = now_us() - started_us_;
  state.last_fault = last_fault_;
  state.gone = gone_;
  state.gone.peak_bytes = parts_.live.peak;
  return write_file(stem + ".state.json", json_of(state));
}

Json Server::dump(const std::string& dir, bool moves) {
  const uint64_t began = now_us();
  DeviceBytes total;
  Json clients = Json::array();
  Status s = all_parked();
  if (s.ok()) s = DP_FAULT(server_dump_start);
  forget_dump();
  auto index = BlockIndex::open(dir);
  if (s.ok()) s = index.status();
  for (const Client& c : clients_) {
    if (!c.here || !s.ok()) continue;
    DeviceBytes bytes;
    s = dump_client(c, dir, index->get(), &bytes);
    clients.push_back({{"number", c.connection->number()}, {"bytes", bytes.all}, {"written_bytes", bytes.written}});
    total.all += bytes.all;
    total.written += bytes.written;
  }
  if (s.ok()) s = write_state(dir);
  if (s.ok()) s = DP_FAULT(server_dump_end);
  if (!s.ok()) {
    forget_dump();
    return refused("dump to " + dir + " failed: " + s.text());
  }
  has_dump_ = true;
  moves_ = moves;
  ledger_->set_aside(true);  // whoever takes the state over needs the same memory
  const uint64_t us = now_us() - began;
  DP_LOG(kInfo, kServer, 0, "dumped: bytes=%lu us=%lu written=%lu", static_cast<unsigned long>(total.all),
         static_cast<unsigned long>(us), static_cast<unsigned long>(total.written));
  return {{"ok", true},
          {"device_bytes", total.all},
          {"written_bytes", total.written},
          {"seconds", seconds(us)},
          {"clients", clients}};
}

Json Server::dump_shared(const std::string& dir) {
  const uint64_t began = now_us();
  uint64_t total = 0;
  SharedRecord shared{kStateVersion, {}};
  Status s = all_parked();
  if (s.ok() && !has_dump_ && anybody()) s = {kIllegalState, "dump first: there is no state of these clients"};
  bool changed = false;
  size_t here = 0;
  auto index = BlockIndex::open(dir);
  if (s.ok()) s = index.status();
  for (const Client& c : clients_) {
    if (!c.here || !s.ok()) continue;
    here++;
    DeviceBytes bytes;
    if (!dumped_.contains(c.connection->number())) {  // attached since the dump
      s = dump_client(c, dir, index->get(), &bytes);
      changed = true;
    }
    if (!s.ok()) break;
    SharedClientRecord& client = shared.clients.emplace_back();
    s = server::dump_shared(*c.connection, dir, &client);
    total += client.segment.bytes + client.pinned.bytes;
  }
  // Whoever came or went between the dump and the freeze: the state is that of the frozen tree.
  if (s.ok() && (changed || here != dumped_.size())) s = write_state(dir);
  if (s.ok()) s = write_file(dir + "/gpu" + std::to_string(config_.gpu) + ".shared.json", json_of(shared));
  if (!s.ok()) return refused("dump of shared memory to " + dir + " failed: " + s.text());
  return {{"ok", true}, {"shared_bytes", total}, {"seconds", seconds(now_us() - began)}};
}

// For a successor that loads them before anything stops. Which of the small images describe an executor, the device knows.
Json Server::list_executors(const std::string& dir) {
  std::string all;
  for (const ImageStore::Ref& image : parts_.images.all()) {
    if (image->bytes.size() > kMaxWarmBytes) continue;
    const auto bytes = static_cast<uint32_t>(image->bytes.size());
    all.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
    all.append(image->bytes.begin(), image->bytes.end());
  }
  const std::string path = ahead_path(dir, config_.gpu);
  if (Status s = write_file(path, all); !s.ok()) return refused(s.text());
  return {{"ok", true}};
}

Json Server::resume() {
  moves_ = false;
  if (cut_) {
    fail_cut("it was told to resume");
    return {{"ok", true}};
  }
  if (!held_) return refused("it is not parked");
  Status s = listen_here();  // a successor that did not take over has the socket's name
  if (s.ok()) s = write_data_file();
  if (!s.ok()) return refused(s.text());
  device_->resume_transport();
  for (Client& c : clients_) {
    if (!c.here) continue;
    c.connection->own();
    c.connection->resume();
    s = DP_FAULT(server_resume);  // "error": the others must go on all the same
  }
  held_ = false;
  ledger_->set_aside(false);
  lift();
  if (borrowed_) device_->take_over_transport();
  borrowed_ = false;
  cut_peer_ = nullptr;
  forget_dump();
  admit_waiting();
  DP_LOG(kInfo, kServer, 0, "resumed");
  // Not "the job runs on": after a restore there is none yet, and whoever asked knows what becomes of it.
  return s.ok() ? Json{{"ok", true}} : refused(s.text());
}

Json Server::leave() {
  if (!parked()) return refused("only a parked server leaves: cut and dump first");
  if (!borrowed_) {
    take_hellos();  // whoever knocks now belongs to this server, or to its successor
    for (const Client& c : clients_)
      if (c.here && !dumped_.contains(c.connection->number()))
        return refused("client " + std::to_string(c.connection->number()) + " (pid " +
                       std::to_string(c.connection->peer().pid) +
                       ") attached after the dump: its device state would be lost");
  }
  leaving_ = true;
  for (const Hello& hello : hellos_) close(hello.socket);  // they ask the successor
  hellos_.clear();
  if (!borrowed_) device_->leave_transport();
  unlink_data_file();
  ledger_->leave();
  DP_LOG(kInfo, kServer, 0, "leaving to a successor");
  return {{"ok", true}};
}

}  // namespace devproxy::server
