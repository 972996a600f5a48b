// SPDX-License-Identifier: Apache-2.0
// Checker of the software GPU's communicators and of the cut that takes back what has not begun: the real code of
// devproxy/hal/soft/comm (lanes, boards, receivers, shadows, peers' memory, hold.h) in one process, without threads of its
// own but for the receivers, each of which does one packet when it is told to. The connections (links.h) are this
// checker's: they deliver in order, whenever they like.
//
// A program is a list of groups for each rank, made so that it would run to its end without a cut: communicators over
// random sets of ranks, collectives of all kinds over them, in place and not, sends and receives, groups over several
// communicators, on two streams. The ranks live on servers, the servers in process trees. At random moments a coordinator
// cuts, as control/barrier.py and control/coordinator.py do: all servers withhold; marks; all park; some dump; marks; some
// of these are replaced; all go on.
//
// What must hold
//   every cut comes to its end, whatever the hosts do: a rank that waits submits nothing meanwhile
//   in a cut each operation has ended at all of its members or begun at none
//   nothing is sent that its receiver must refuse, and nobody is found gone
//   after it all ranks run to their end, all memory is what the program says, and the boards are gone
//
// comm_model [--first S] [--seeds N] [--seed S] [--mutant M] | --list. Exit code 1 and the program where something fails.
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/hal/links/links.h"
#include "devproxy/hal/soft/comm/board.h"
#include "devproxy/hal/soft/comm/board_receiver.h"
#include "devproxy/hal/soft/comm/peers.h"
#include "devproxy/hal/soft/comm/shadow.h"
#include "devproxy/hal/soft/comm/soft_comm.h"

namespace {

using namespace devproxy;
using namespace devproxy::hal;
using namespace devproxy::hal::soft;

enum Mutant {
  kNone,
  kOneGoesOn,        // a server does not withhold
  kNotStill,         // nobody waits until lanes that were inside are out
  kNoFirstMarks,     // parked while posts are on their way
  kNoSecondMarks,    // replaced while others do not know what was taken back
  kMarksTooEarly,    // a mark goes out before what is still being said
  kNoDrain,          // parked while an operation that has begun is not over
  kNotTakenBack,     // the dump leaves the board as it is
  kUnpostLost,       // other trees are not told
  kPairUnpostLost,   // nor of sends
  kWholeGroupAgain,  // operations of a group that are over are submitted again
  kOrderLost,        // what was pending is submitted in another order
  kGoesOnTooEarly,   // a server goes on before another one is parked
  kDumpedGoesOn,     // a server goes on between its dump and its successor
  kUnpostTwice,      // other trees are told twice
  kMutants
};
const char* const mutant_names[kMutants] = {"none",
                                            "one-goes-on",
                                            "not-still",
                                            "no-first-marks",
                                            "no-second-marks",
                                            "marks-too-early",
                                            "no-drain",
                                            "not-taken-back",
                                            "unpost-lost",
                                            "pair-unpost-lost",
                                            "whole-group-again",
                                            "order-lost",
                                            "goes-on-too-early",
                                            "dumped-goes-on",
                                            "unpost-twice"};
int mutant = kNone;

using Random = std::mt19937_64;
Random* g_random;
uint32_t dice(size_t n) { return static_cast<uint32_t>((*g_random)() % n); }
bool chance(size_t n) { return dice(n) == 0; }

[[noreturn]] void violation(const std::string& what);

// -- connections: what links.cc is in a server ------------------------------------------------------------------------

// From a server to one of another tree.
struct Connection {
  Links *from, *to;
  int near = -1, far = -1;
  std::deque<std::vector<uint8_t>> packets;
  std::unique_ptr<Receiver> receiver;
  std::thread thread;
  std::atomic<uint64_t> done{0};  // packets
  uint64_t written = 0;
  std::atomic<bool> over{false}, closing{false}, leaving{false}, idle{false};
};
constexpr uint64_t kOwnMark = uint64_t{1} << 60;

struct World;
World* g_world;
std::deque<std::unique_ptr<Connection>>& connections();
Links* server_of_tree(uint32_t tree);
std::vector<uint32_t> all_trees();
void accept(Connection& connection);

// Does its next packet, if there is one.
bool deliver(Connection& c) {
  if (c.packets.empty() || c.near < 0) return false;
  const std::vector<uint8_t> packet = std::move(c.packets.front());
  c.packets.pop_front();
  Frame mark;
  mark.kind = FrameKind::kMark;
  mark.bytes = kOwnMark | ++c.written;
  auto write_all = [&](const void* data, size_t bytes) {
    for (auto* at = static_cast<const uint8_t*>(data); bytes != 0;) {
      const ssize_t n = send(c.near, at, bytes, MSG_NOSIGNAL);
      if (n <= 0) return;
      at += n, bytes -= static_cast<size_t>(n);
    }
  };
  write_all(packet.data(), packet.size());
  write_all(&mark, sizeof mark);
  while (c.done.load() != c.written && !c.over.load()) c.done.wait(c.written - 1);
  if (c.done.load() != c.written) {
    Frame first;
    std::memcpy(&first, packet.data(), sizeof first);
    if (first.kind != FrameKind::kBye) violation("a receiver cut a connection off");
    close(c.near);
    c.near = -1;
  }
  return true;
}

void hang_up(Connection& c) {
  if (c.near >= 0) close(c.near);
  c.near = -1;
  if (c.thread.joinable()) c.thread.join();
  if (c.far >= 0) close(c.far);
  c.far = -1;
}

}  // namespace

namespace devproxy::hal {

Links::Links(const TransportConfig& config, uint64_t chaos, MakeReceiver receiver, int listen_fd, uint16_t port)
    : config_(config), chaos_(chaos), make_receiver_(std::move(receiver)), listen_fd_(listen_fd), port_(port) {}
Links::~Links() = default;

// chaos: the server's number.
StatusOr<std::unique_ptr<Links>> Links::open(const TransportConfig& config, uint64_t chaos, MakeReceiver receiver) {
  std::unique_ptr<Links> links(new Links(config, 0, std::move(receiver), -1, 0));
  links->server_ = chaos;
  return links;
}

std::optional<std::vector<uint32_t>> Links::others() {
  std::vector<uint32_t> trees = all_trees();
  std::erase(trees, config_.tree);
  return trees;
}

void Links::try_connect(uint32_t tree) {
  Link& link = links_[tree];
  auto c = std::make_unique<Connection>();
  c->from = this;
  c->to = server_of_tree(tree);
  link.fd = static_cast<int>(connections().size());
  link.peer = c->to->server_;
  link.epoch = ++serial_;
  link.marked = 0;
  connections().push_back(std::move(c));
  Connection& made = *connections().back();
  Links* const to = made.to;
  made.receiver =
      to->make_receiver_({config_.tree, config_.gpu, server_}, 0, [&made, to, from = server_](uint64_t number) {
        if (number & kOwnMark) {
          made.done.store(number & ~kOwnMark);
          made.done.notify_all();
        } else {
          std::lock_guard lock(to->mu_);
          to->marks_[from] = number;
        }
      });
  accept(made);
  while (!link.posted.empty()) {
    const Frame frame = link.posted.front().frame;
    link.posted.pop_front();
    const auto* bytes = reinterpret_cast<const uint8_t*>(&frame);
    made.packets.emplace_back(bytes, bytes + sizeof frame);
  }
}

Links::Sent Links::send(uint32_t tree, std::vector<iovec> parts, const Stop&, uint64_t* epoch) {
  Link& link = links_[tree];
  if (link.fd < 0) {
    if (!chance(3)) return Sent::kNotYet;
    try_connect(tree);
  }
  Frame last;
  std::memcpy(&last, parts.back().iov_base, sizeof last);
  *epoch = link.epoch;
  if (mutant == kUnpostLost && last.kind == FrameKind::kUnpost) return Sent::kSent;
  if (mutant == kPairUnpostLost && last.kind == FrameKind::kPairUnpost) return Sent::kSent;
  std::vector<uint8_t> packet;
  for (const iovec& part : parts) {
    const auto* bytes = static_cast<const uint8_t*>(part.iov_base);
    packet.insert(packet.end(), bytes, bytes + part.iov_len);
  }
  auto& packets = connections()[static_cast<size_t>(link.fd)]->packets;
  if (mutant == kUnpostTwice && last.kind == FrameKind::kUnpost) packets.push_back(packet);
  packets.push_back(std::move(packet));
  return Sent::kSent;
}

uint64_t Links::epoch(uint32_t tree) {
  const auto it = links_.find(tree);
  return it == links_.end() || it->second.fd < 0 ? 0 : it->second.epoch;
}
std::string Links::trouble(uint32_t) { return "no connection"; }

void Links::post(uint32_t tree, const Frame& frame) {
  Link& link = links_[tree];
  link.posted.push_back({frame, 0});
  if (link.fd < 0) return try_connect(tree);
  const Frame copy = link.posted.front().frame;
  link.posted.pop_front();
  const auto* bytes = reinterpret_cast<const uint8_t*>(&copy);
  connections()[static_cast<size_t>(link.fd)]->packets.emplace_back(bytes, bytes + sizeof copy);
}

TransportMarks Links::mark(uint64_t number) {
  TransportMarks marks;
  marks.server = server_;
  for (auto& [tree, link] : links_) {
    if (link.fd < 0) continue;
    marks.to.push_back(link.peer);
    if (std::exchange(link.marked, number) == number) continue;
    Frame frame;
    frame.kind = FrameKind::kMark;
    frame.bytes = number;
    post(tree, frame);
  }
  std::lock_guard lock(mu_);
  for (const auto& [server, seen] : marks_)
    if (seen == number) marks.from.push_back(server);
  return marks;
}

// Says bye, and does what has come.
void Links::leave() {
  Frame bye;
  bye.kind = FrameKind::kBye;
  for (auto& [tree, link] : links_)
    if (link.fd >= 0) post(tree, bye);
  finish_incoming();
}

void Links::finish_incoming() {
  for (const auto& c : connections()) {
    if (c->to != this || c->near < 0) continue;
    while (deliver(*c)) {}
    c->closing.store(true);
    hang_up(*c);
    if (Link& link = c->from->links_[config_.tree]; link.peer == server_) link.fd = -1;
  }
}

void Links::take_over() {
  const auto trees = others();
  for (const uint32_t tree : *trees)
    if (links_[tree].fd < 0) try_connect(tree);
}

}  // namespace devproxy::hal

namespace devproxy::hal::soft {

// -- peers.cc, without what a process shares: here many servers are one process

StatusOr<std::shared_ptr<PeerMemory>> PeerMemory::map(int memory, int alive, uint64_t incarnation, uint64_t device_base,
                                                      uint64_t device_bytes) {
  void* const at = mmap(nullptr, device_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory, 0);
  if (at == MAP_FAILED) std::abort();
  close(memory);
  return std::shared_ptr<PeerMemory>(
      new PeerMemory(static_cast<uint8_t*>(at), device_base, device_bytes, alive, incarnation));
}

StatusOr<std::shared_ptr<PeerMemory>> PeerMemory::open(SpaceOwner& owner, const SpacePlace& place, uint64_t incarnation,
                                                       uint64_t device_base, uint64_t device_bytes) {
  auto link = owner.reach_peer(place);
  if (!link.ok()) return std::move(link).status();
  return map(link->memory, link->alive, incarnation, device_base, device_bytes);
}

StatusOr<std::shared_ptr<PeerMemory>> PeerMemory::open_shadow(const std::string& folder, uint64_t incarnation,
                                                              uint64_t device_base, uint64_t device_bytes) {
  auto memory = soft::open_shadow(folder, incarnation, device_bytes, false);
  if (!memory.ok()) return std::move(memory).status();
  return map(*memory, -1, incarnation, device_base, device_bytes);
}

PeerMemory::~PeerMemory() {
  munmap(base_, bytes_);
  if (alive_ >= 0) close(alive_);
}

bool PeerMemory::alive() const {
  if (alive_ < 0) return true;
  pollfd fd{alive_, POLLIN, 0};
  return poll(&fd, 1, 0) == 0;
}

}  // namespace devproxy::hal::soft

namespace {

// -- the job ----------------------------------------------------------------------------------------------------------

constexpr uint64_t kBytes = 1 << 20;  // of a rank's memory
constexpr uint64_t kBase = uint64_t{0x5000} << 32;
constexpr uint64_t kAccumulators = 64 << 10;  // of each communicator, at the beginning
constexpr int kStreams = 2;

struct Operation {
  int comm = 0;
  CommOp op;
};
struct Message {
  int stream = 0;
  bool init = false;
  std::vector<Operation> operations;
};
struct Program {
  int ranks = 2, trees = 1;
  std::vector<std::pair<uint32_t, uint32_t>> places;  // of each rank: tree, gpu
  std::vector<std::vector<int>> comms;                // members; place is the rank
  std::vector<std::vector<Message>> messages;
  std::vector<std::vector<uint64_t>> memory;  // of each rank, at the end
  std::vector<std::vector<uint64_t>> first;   // at the beginning
};

uint64_t va(int rank) { return kBase + static_cast<uint64_t>(rank) * (kBytes * 2); }

// Runs it on the side, one operation after another.
class Writer {
 public:
  explicit Writer(Program& p) : p_(p) {
    p_.memory.assign(static_cast<size_t>(p.ranks), std::vector<uint64_t>(kBytes / 8));
    for (auto& memory : p_.memory)
      for (size_t i = 0; i < p.comms.size() * kAccumulators / 8; i++) memory[i] = (*g_random)();
    p_.first = p_.memory;
    next_ = p.comms.size() * kAccumulators / 8;
  }

  bool room(uint64_t words) const { return next_ + words <= kBytes / 8; }

  // A collective over a communicator: one operation for each of its members.
  std::vector<CommOp> collective(int comm) {
    const auto& members = p_.comms[static_cast<size_t>(comm)];
    const uint64_t n = members.size(), base = static_cast<uint64_t>(comm) * kAccumulators / 8;
    const auto kind = static_cast<CommKind>(dice(8));
    uint64_t count = chance(3) ? 2000 + dice(1000) : 1 + dice(40);
    const bool in_parts = kind != CommKind::kAllReduce && kind != CommKind::kBroadcast && kind != CommKind::kReduce;
    if (in_parts) count = count / n + 1;
    const bool in_place = (kind == CommKind::kAllReduce || kind == CommKind::kBroadcast) && !chance(3);
    const auto root = static_cast<int32_t>(dice(n));
    const uint64_t to = in_place ? base : next_, words = in_parts ? count * n : count;
    if (!in_place) {
      if (!room(words)) return {};
      next_ += words;
    }
    std::vector<std::vector<uint64_t>> in;
    for (const int rank : members) {
      const auto& memory = p_.memory[static_cast<size_t>(rank)];
      in.emplace_back(memory.begin() + static_cast<long>(base), memory.begin() + static_cast<long>(base + words));
    }
    std::vector<CommOp> all;
    for (uint64_t r = 0; r < n; r++) {
      CommOp op;
      op.kind = static_cast<uint8_t>(kind);
      op.type = static_cast<uint8_t>(CommType::kUint64);
      op.peer = kind == CommKind::kAllReduce || kind == CommKind::kAllGather || kind == CommKind::kReduceScatter ||
                        kind == CommKind::kAllToAll
                    ? 0
                    : root;
      op.count = count;
      op.send = va(members[r]) + base * 8;
      op.recv = va(members[r]) + to * 8;
      all.push_back(op);
      auto out = [&](uint64_t i) -> uint64_t& { return p_.memory[static_cast<size_t>(members[r])][to + i]; };
      auto sum = [&](uint64_t i) {
        uint64_t total = 0;
        for (const auto& one : in) total += one[i];
        return total;
      };
      const bool is_root = static_cast<int32_t>(r) == root;
      for (uint64_t i = 0; i < words; i++) switch (kind) {
          case CommKind::kAllReduce: out(i) = sum(i); break;
          case CommKind::kBroadcast: out(i) = in[static_cast<size_t>(root)][i]; break;
          case CommKind::kReduce:
            if (is_root) out(i) = sum(i);
            break;
          case CommKind::kAllGather: out(i) = in[i / count][i % count]; break;
          case CommKind::kReduceScatter:
            if (i < count) out(i) = sum(r * count + i);
            break;
          case CommKind::kAllToAll: out(i) = in[i / count][r * count + i % count]; break;
          case CommKind::kGather:
            if (is_root) out(i) = in[i / count][i % count];
            break;
          case CommKind::kScatter:
            if (i < count) out(i) = in[static_cast<size_t>(root)][r * count + i];
            break;
          case CommKind::kSend:
          case CommKind::kRecv: break;
        }
    }
    return all;
  }

  // From member a to member b of a communicator, and what b receives.
  std::vector<CommOp> pair(int comm, uint32_t a, uint32_t b) {
    const auto& members = p_.comms[static_cast<size_t>(comm)];
    const uint64_t base = static_cast<uint64_t>(comm) * kAccumulators / 8;
    const uint64_t count = chance(3) ? 5000 + dice(1000) : 1 + dice(40), to = next_;
    if (!room(count)) return {};
    next_ += count;
    CommOp send, recv;
    send.kind = static_cast<uint8_t>(CommKind::kSend);
    recv.kind = static_cast<uint8_t>(CommKind::kRecv);
    send.type = recv.type = static_cast<uint8_t>(CommType::kUint64);
    send.count = recv.count = count;
    send.peer = static_cast<int32_t>(b);
    recv.peer = static_cast<int32_t>(a);
    send.send = va(members[a]) + base * 8;
    recv.recv = va(members[b]) + to * 8;
    const auto& from = p_.memory[static_cast<size_t>(members[a])];
    std::copy_n(from.begin() + static_cast<long>(base), count,
                p_.memory[static_cast<size_t>(members[b])].begin() + static_cast<long>(to));
    return {send, recv};
  }

 private:
  Program& p_;
  uint64_t next_;  // words of every rank's memory that are used
};

// A program that runs: it is written as one order of events, and each rank gets its own of them.
Program make() {
  Program p;
  p.ranks = 2 + static_cast<int>(dice(4));
  p.trees = 1 + static_cast<int>(dice(3));
  const auto gpus = 1 + dice(3);
  for (int r = 0; r < p.ranks; r++) p.places.emplace_back(dice(static_cast<size_t>(p.trees)), dice(gpus));
  p.messages.resize(static_cast<size_t>(p.ranks));
  const auto n_comms = 1 + dice(3);
  for (uint32_t c = 0; c < n_comms; c++) {
    std::vector<int> members;
    for (int rank = 0; rank < p.ranks; rank++)
      if (c == 0 || !chance(3)) members.push_back(rank);
    if (members.size() < 2) members = {0, 1};
    std::shuffle(members.begin(), members.end(), *g_random);
    p.comms.push_back(members);
  }
  Writer writer(p);
  auto say = [&](int rank, std::vector<Operation> operations, bool init = false) {
    p.messages[static_cast<size_t>(rank)].push_back({static_cast<int>(dice(kStreams)), init, std::move(operations)});
  };
  for (uint32_t c = 0; c < n_comms; c++)
    for (const int rank : p.comms[c]) say(rank, {{static_cast<int>(c), {}}}, true);
  const auto events = 2 + dice(10);
  for (uint32_t e = 0; e < events; e++) {
    const auto comm = static_cast<int>(dice(n_comms));
    const auto& members = p.comms[static_cast<size_t>(comm)];
    const auto n = static_cast<uint32_t>(members.size());
    std::map<int, std::vector<Operation>> group;
    const auto what = dice(10);
    if (what < 6) {  // one or more, in a group or one after another
      const auto more = 1 + (chance(3) ? dice(3) : 0);
      for (uint32_t i = 0; i < more; i++) {
        const auto all = writer.collective(comm);
        for (uint32_t r = 0; r < all.size(); r++) group[members[r]].push_back({comm, all[r]});
      }
    } else if (what < 8) {  // one sends, another receives
      const auto a = dice(n), b = (a + 1 + dice(n - 1)) % n;
      if (const auto pair = writer.pair(comm, a, b); !pair.empty()) {
        say(members[a], {{comm, pair[0]}});
        say(members[b], {{comm, pair[1]}});
      }
    } else {  // a ring, and perhaps a collective of another communicator in the same group
      for (uint32_t r = 0; r < n; r++)
        if (const auto pair = writer.pair(comm, r, (r + 1) % n); !pair.empty()) {
          group[members[r]].push_back({comm, pair[0]});
          group[members[(r + 1) % n]].push_back({comm, pair[1]});
        }
      if (chance(2)) {
        const auto other = static_cast<int>(dice(n_comms));
        if (other != comm) {
          const auto all = writer.collective(other);
          for (uint32_t r = 0; r < all.size(); r++)
            group[p.comms[static_cast<size_t>(other)][r]].push_back({other, all[r]});
        }
      }
    }
    for (auto& [rank, operations] : group) say(rank, std::move(operations));
  }
  return p;
}

// -- what runs it -----------------------------------------------------------------------------------------------------

struct Server {
  uint32_t tree, gpu;
  std::unique_ptr<Links> links;  // nullptr in a job of one tree
  std::vector<int> ranks;
};

// A group that was submitted.
struct Submitted {
  uint64_t serial;
  Message message;
  std::unique_ptr<CommGroup> group;
};

struct Rank final : SpaceOwner {
  int number = 0;
  Server* server = nullptr;
  uint32_t slot = 0;
  std::string folder;
  uint64_t incarnation = 0;
  int memory = -1, alive[2] = {-1, -1};
  std::unique_ptr<CommHold> hold;
  std::map<int, CommRef> comms;
  std::deque<Submitted> streams[kStreams];
  size_t next = 0;  // message
  uint64_t serial = 0;
  std::map<std::tuple<int, int, int>, uint64_t> submitted;  // by communicator and pair, -1 for collectives

  void on_thread_start() noexcept override {}
  void on_complete(uint32_t, uint64_t, uint32_t) noexcept override {}
  void on_fault(int32_t, const char*) noexcept override {}
  bool range_live(uint64_t, uint64_t, uint64_t, bool) noexcept override { return true; }
  void host_function(uint64_t) noexcept override {}
  SpacePlace place() noexcept override { return {server->gpu, slot, server->tree}; }
  std::string job_folder() override { return folder; }
  StatusOr<PeerLink> reach_peer(const SpacePlace& peer) override;
};

struct World {
  Program program;
  std::string root;
  // Whoever has gone stays until the end: mappings and lanes of it may be in use.
  std::deque<std::unique_ptr<Connection>> connections;
  std::vector<std::unique_ptr<Server>> servers, gone_servers;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::unique_ptr<CommHold>> gone_holds;
  std::vector<CommRef> gone_comms;
  std::vector<int> gone_alive;
  uint64_t ids = 0, cuts = 0, taken_back = 0, replaced = 0;
  std::atomic<bool> ended{false};

  explicit World(Program p) : program(std::move(p)) {}
  ~World();
  void start();
  uint64_t run();

 private:
  Server* serve(uint32_t tree, uint32_t gpu);
  void give_memory(Rank& rank, const void* from);
  void create_comms(Rank& rank);
  void submit(Rank& rank, Message message);
  bool act();
  bool act_of(Rank& rank);
  bool rank_is_over(const Rank& rank) const;
  bool stands(const Rank& rank);
  // A cut, one step at a time. False while it waits.
  bool step_cut();
  bool flushed();
  void dump(Rank& rank);
  void replace(Server& old);
  void check_closed();
  void check_end();

  enum class Cut : uint8_t {
    kNone,
    kWithhold,
    kFirstMarks,
    kPark,
    kDump,
    kSecondMarks,
    kReplace,
    kGoOn
  } cut_ = Cut::kNone;
  uint64_t mark_ = 0;
  std::set<Server*> withholding_, dumps_, moves_, parked_;
  std::vector<Server*> left_;                  // that the stage has not done
  std::map<int, std::vector<Message>> taken_;  // by rank: what its dump holds, as submitted
  uint64_t cuts_wanted_ = 0;
  size_t tempo_ = 20;  // of the coordinator, against the ranks'
};

std::deque<std::unique_ptr<Connection>>& connections() { return g_world->connections; }

Links* server_of_tree(uint32_t tree) {
  std::vector<Links*> there;
  for (const auto& server : g_world->servers)
    if (server->tree == tree) there.push_back(server->links.get());
  return there[dice(there.size())];
}

std::vector<uint32_t> all_trees() {
  std::set<uint32_t> trees;
  for (const auto& server : g_world->servers) trees.insert(server->tree);
  return {trees.begin(), trees.end()};
}

void accept(Connection& c) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) std::abort();
  c.near = pair[0];
  c.far = pair[1];
  c.thread = std::thread([&c] {
    c.receiver->run(c.far, nullptr, c.closing, c.leaving, c.idle);
    c.over.store(true);
    c.done.fetch_or(kOwnMark << 1);  // wakes
    c.done.notify_all();
  });
}

StatusOr<PeerLink> Rank::reach_peer(const SpacePlace& peer) {
  for (const auto& rank : g_world->ranks)
    if (rank->server->gpu == peer.gpu && rank->server->tree == peer.tree && rank->slot == peer.slot)
      return PeerLink{dup(rank->memory), dup(rank->alive[0])};
  return Status(kNotFound, "there is no such space");
}

World::~World() {
  ended.store(true);
  for (const auto& c : connections) {
    c->closing.store(true);
    hang_up(*c);
  }
  for (const auto& rank : ranks) {
    for (auto& stream : rank->streams) stream.clear();
    rank->comms.clear();
    munmap(reinterpret_cast<void*>(va(rank->number)), kBytes);
    for (const int fd : {rank->memory, rank->alive[0], rank->alive[1]}) close(fd);
  }
  for (const int fd : gone_alive) close(fd);
  std::filesystem::remove_all(root);
}

Server* World::serve(uint32_t tree, uint32_t gpu) {
  auto server = std::make_unique<Server>();
  server->tree = tree;
  server->gpu = gpu;
  TransportConfig config;
  config.folder = root + "/" + std::to_string(tree);
  config.tree = tree;
  config.gpu = gpu;
  if (program.trees > 1) server->links = std::move(*Links::open(config, ++ids, BoardReceiver::maker(config.folder)));
  servers.push_back(std::move(server));
  return servers.back().get();
}

void World::give_memory(Rank& rank, const void* from) {
  rank.incarnation = (*g_random)() | 1;
  const int fd = memfd_create("rank", MFD_CLOEXEC);
  if (ftruncate(fd, kBytes) != 0) std::abort();
  if (pwrite(fd, from, kBytes, 0) != static_cast<ssize_t>(kBytes)) std::abort();
  const int flags = rank.memory < 0 ? MAP_FIXED_NOREPLACE : MAP_FIXED;
  void* const at =
      mmap(reinterpret_cast<void*>(va(rank.number)), kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
  if (at == MAP_FAILED) std::abort();
  if (rank.memory >= 0) {  // who goes on with the old memory sees it
    const std::vector<uint8_t> rubbish(kBytes, 0xee);
    if (pwrite(rank.memory, rubbish.data(), kBytes, 0) != static_cast<ssize_t>(kBytes)) std::abort();
    close(rank.memory);
  }
  rank.memory = fd;
  if (rank.alive[0] >= 0) {
    close(rank.alive[1]);
    gone_alive.push_back(rank.alive[0]);
  }
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, rank.alive) != 0) std::abort();
}

void World::create_comms(Rank& rank) {
  if (rank.hold) gone_holds.push_back(std::move(rank.hold));
  rank.hold = std::make_unique<CommHold>();
  SpaceConfig space;
  space.device_base = va(rank.number);
  space.device_bytes = kBytes;
  for (int c = 0; c < static_cast<int>(program.comms.size()); c++) {
    const auto& members = program.comms[static_cast<size_t>(c)];
    const auto at = std::find(members.begin(), members.end(), rank.number);
    if (at == members.end()) continue;
    CommConfig config;
    config.key = {static_cast<uint64_t>(c) + 1, 77};
    config.ranks = static_cast<uint32_t>(members.size());
    config.rank = static_cast<uint32_t>(at - members.begin());
    CommRef& ref = rank.comms[c];
    if (ref) gone_comms.push_back(ref);
    ref = std::make_shared<SoftComm>(config, space, rank.incarnation, rank, *rank.hold, rank.server->links.get());
  }
}

void World::start() {
  char name[] = "/dev/shm/comm-model-XXXXXX";
  root = mkdtemp(name);
  std::map<std::pair<uint32_t, uint32_t>, Server*> by_place;
  for (int t = 0; t < program.trees; t++) std::filesystem::create_directory(root + "/" + std::to_string(t));
  for (int r = 0; r < program.ranks; r++) {
    const auto [tree, gpu] = program.places[static_cast<size_t>(r)];
    Server*& server = by_place[{tree, gpu}];
    if (!server) server = serve(tree, gpu);
    auto rank = std::make_unique<Rank>();
    rank->number = r;
    rank->server = server;
    rank->slot = static_cast<uint32_t>(r);
    rank->folder = root + "/" + std::to_string(tree);
    server->ranks.push_back(r);
    ranks.push_back(std::move(rank));
  }
  for (const auto& rank : ranks) {
    give_memory(*rank, program.first[static_cast<size_t>(rank->number)].data());
    create_comms(*rank);
  }
  cuts_wanted_ = 1 + dice(6);
  tempo_ = chance(2) ? 2 : 20;
}

void World::submit(Rank& rank, Message message) {
  std::vector<CommCall> calls;
  for (const Operation& operation : message.operations) calls.push_back({rank.comms.at(operation.comm), operation.op});
  Submitted one{++rank.serial, message, std::make_unique<CommGroup>(std::move(calls), message.init)};
  rank.streams[message.stream].push_back(std::move(one));
}

bool World::rank_is_over(const Rank& rank) const {
  return rank.next == program.messages[static_cast<size_t>(rank.number)].size() &&
         std::all_of(std::begin(rank.streams), std::end(rank.streams), [](const auto& s) { return s.empty(); });
}

bool World::act_of(Rank& rank) {
  const auto& messages = program.messages[static_cast<size_t>(rank.number)];
  if (rank.next < messages.size() && !parked_.count(rank.server) && chance(4)) {
    const Message& message = messages[rank.next++];
    for (const auto& [comm, op] : message.operations) {
      if (message.init) continue;
      const int kind = op.kind_of() == CommKind::kSend ? 1 : op.kind_of() == CommKind::kRecv ? 2 : 0;
      rank.submitted[{comm, kind, kind ? op.peer : -1}]++;
    }
    submit(rank, message);
    return true;
  }
  auto& stream = rank.streams[dice(kStreams)];
  if (stream.empty()) return false;
  CommGroup& group = *stream.front().group;
  if (group.over()) return stream.pop_front(), true;
  if (!rank.hold->on() && chance(30)) group.look();
  return group.step(dice(4), ended);
}

bool World::act() {
  if (chance(tempo_) && step_cut()) return true;
  if (!connections.empty() && chance(3) && deliver(*connections[dice(connections.size())])) return true;
  return act_of(*ranks[dice(ranks.size())]);
}

bool World::stands(const Rank& rank) {
  return std::all_of(std::begin(rank.streams), std::end(rank.streams),
                     [](const auto& stream) { return stream.empty() || stream.front().group->stands(); });
}

// As csrc/server/control.cc answers, and control/barrier.py asks.
bool World::flushed() {
  std::map<uint64_t, TransportMarks> all;
  bool still = true;
  for (const auto& server : servers) {
    bool here = true;
    for (const int r : server->ranks) here = ranks[static_cast<size_t>(r)]->hold->set(true) && here;
    still = still && here;
    if ((here || mutant == kMarksTooEarly) && server->links) {
      const TransportMarks marks = server->links->mark(mark_);
      all[marks.server] = marks;
    }
  }
  if (!still) return false;
  for (const auto& [id, marks] : all)
    for (const uint64_t to : marks.to)
      if (const auto it = all.find(to);
          it != all.end() && std::find(it->second.from.begin(), it->second.from.end(), id) == it->second.from.end())
        return false;
  return true;
}

bool World::step_cut() {
  auto choose = [&](std::set<Server*>* some, const std::vector<Server*>& from) {
    some->clear();
    const auto of_two = dice(4);
    for (Server* const server : from)
      if (of_two == 0 || (of_two != 1 && chance(2))) some->insert(server);
  };
  auto all_servers = [&] {
    std::vector<Server*> all;
    for (const auto& server : servers) all.push_back(server.get());
    std::shuffle(all.begin(), all.end(), *g_random);
    return all;
  };
  auto next = [&](Cut stage) {
    cut_ = stage;
    left_ = all_servers();
    return true;
  };
  switch (cut_) {
    case Cut::kNone:
      if (cuts_wanted_ == 0 || !chance(60 / tempo_)) return false;
      cuts_wanted_--;
      withholding_.clear();
      next(Cut::kWithhold);
      if (mutant == kOneGoesOn && left_.size() > 1) left_.pop_back();
      return true;
    case Cut::kWithhold: {
      if (!left_.empty()) {
        for (const int r : left_.back()->ranks) ranks[static_cast<size_t>(r)]->hold->set(true);
        withholding_.insert(left_.back());
        left_.pop_back();
        return true;
      }
      bool still = true;
      for (Server* const server : withholding_)
        for (const int r : server->ranks) still = ranks[static_cast<size_t>(r)]->hold->set(true) && still;
      if (!still && mutant != kNotStill) return false;
      mark_ = ++ids;
      return next(Cut::kFirstMarks);
    }
    case Cut::kFirstMarks:
      if (mutant != kNoFirstMarks && mutant != kNotStill && mutant != kOneGoesOn && !flushed()) return false;
      return next(Cut::kPark);
    case Cut::kPark: {
      if (!left_.empty()) {
        Server* const server = left_.back();
        parked_.insert(server);  // its clients stop
        for (const int r : server->ranks)
          if (mutant != kNoDrain && !stands(*ranks[static_cast<size_t>(r)])) return false;
        left_.pop_back();
        if (mutant == kGoesOnTooEarly && chance(2))
          for (const int r : server->ranks) ranks[static_cast<size_t>(r)]->hold->set(false);
        return true;
      }
      cuts++;
      choose(&dumps_, all_servers());
      choose(&moves_, {dumps_.begin(), dumps_.end()});
      taken_.clear();
      return next(Cut::kDump);
    }
    case Cut::kDump:
      if (!left_.empty()) {
        if (dumps_.count(left_.back()))
          for (const int r : left_.back()->ranks) {
            Rank& rank = *ranks[static_cast<size_t>(r)];
            dump(rank);
            if (mutant == kDumpedGoesOn && moves_.count(left_.back())) rank.hold->set(false);
          }
        left_.pop_back();
        return true;
      }
      if (dumps_.size() == servers.size()) check_closed();
      mark_ = ++ids;
      return next(Cut::kSecondMarks);
    case Cut::kSecondMarks:
      if (mutant != kNoSecondMarks && mutant != kOneGoesOn && mutant != kGoesOnTooEarly && !flushed()) return false;
      next(Cut::kReplace);
      left_.assign(moves_.begin(), moves_.end());
      return true;
    case Cut::kReplace:
      if (!left_.empty()) {
        replace(*left_.back());
        left_.pop_back();
        return true;
      }
      return next(Cut::kGoOn);
    case Cut::kGoOn:
      if (!left_.empty()) {
        for (const int r : left_.back()->ranks) ranks[static_cast<size_t>(r)]->hold->set(false);
        parked_.erase(left_.back());
        left_.pop_back();
        return true;
      }
      parked_.clear();
      cut_ = Cut::kNone;
      return true;
  }
  return false;
}

void World::dump(Rank& rank) {
  std::map<uint64_t, Message> in_order;
  for (auto& stream : rank.streams)
    for (Submitted& one : stream) {
      if (one.group->over()) continue;
      Message message = one.message;
      if (mutant != kNotTakenBack) {
        const std::vector<CommCall> calls = one.group->take_back();
        if (mutant != kWholeGroupAgain && !message.init) {
          message.operations.clear();
          for (const CommCall& call : calls)
            for (const auto& [number, ref] : rank.comms)
              if (ref == call.comm) message.operations.push_back({number, call.op});
        }
      }
      taken_back += message.operations.size();
      in_order[one.serial] = std::move(message);
    }
  auto& taken = taken_[rank.number];
  for (auto& [serial, message] : in_order) taken.push_back(std::move(message));
  if (mutant == kOrderLost) std::reverse(taken.begin(), taken.end());
}

// All servers have dumped, so what has not begun is known.
void World::check_closed() {
  std::map<std::tuple<int, int, int>, uint64_t> done[16];
  for (const auto& rank : ranks) {
    auto& mine = done[rank->number] = rank->submitted;
    for (const Message& message : taken_[rank->number])
      for (const auto& [comm, op] : message.operations) {
        if (message.init) continue;
        const int kind = op.kind_of() == CommKind::kSend ? 1 : op.kind_of() == CommKind::kRecv ? 2 : 0;
        mine[{comm, kind, kind ? op.peer : -1}]--;
      }
  }
  for (int c = 0; c < static_cast<int>(program.comms.size()); c++) {
    const auto& members = program.comms[static_cast<size_t>(c)];
    const auto n = static_cast<int>(members.size());
    for (int a = 0; a < n; a++) {
      if (done[members[static_cast<size_t>(a)]][{c, 0, -1}] != done[members[0]][{c, 0, -1}])
        violation("a collective has begun at one member only");
      for (int b = 0; b < n; b++)
        if (done[members[static_cast<size_t>(a)]][{c, 1, b}] != done[members[static_cast<size_t>(b)]][{c, 2, a}])
          violation("a send is over and its receive is not");
    }
  }
}

void World::replace(Server& old) {
  Server* const fresh = serve(old.tree, old.gpu);
  fresh->ranks = old.ranks;
  // Nobody connects to the old one any more.
  const auto at = std::find_if(servers.begin(), servers.end(), [&](const auto& one) { return one.get() == &old; });
  gone_servers.push_back(std::move(*at));
  servers.erase(at);
  for (const int r : fresh->ranks) {
    Rank& rank = *ranks[static_cast<size_t>(r)];
    const std::vector<uint64_t> content(reinterpret_cast<const uint64_t*>(va(r)),
                                        reinterpret_cast<const uint64_t*>(va(r) + kBytes));
    for (auto& stream : rank.streams) stream.clear();
    rank.server = fresh;
    give_memory(rank, content.data());
    create_comms(rank);
    rank.hold->set(true);
    for (Message& message : taken_[r])
      if (!message.operations.empty()) submit(rank, std::move(message));
  }
  if (old.links) {
    old.links->leave();
    fresh->links->take_over();
  }
  parked_.erase(&old);
  parked_.insert(fresh);
  replaced++;
}

void World::check_end() {
  for (const auto& rank : ranks) {
    for (const auto& [number, comm] : rank->comms) {
      std::string why;
      if (static_cast<SoftComm&>(*comm).state(&why) != CommState::kOk) violation(why);
    }
    const auto* const is = reinterpret_cast<const uint64_t*>(va(rank->number));
    const auto& wanted = program.memory[static_cast<size_t>(rank->number)];
    for (size_t i = 0; i < wanted.size(); i++)
      if (is[i] != wanted[i])
        violation("rank " + std::to_string(rank->number) + " has other numbers, first at word " + std::to_string(i) +
                  ": " + std::to_string(is[i]) + ", not " + std::to_string(wanted[i]));
  }
  for (const auto& rank : ranks)
    for (const auto& [number, comm] : rank->comms) static_cast<SoftComm&>(*comm).leave();
  for (size_t i = 0; i < connections.size(); i++)
    while (deliver(*connections[i])) {}
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root))
    if (entry.path().filename().string().rfind("comm-", 0) == 0)
      violation("a board is left: " + entry.path().string().substr(root.size()));
}

uint64_t World::run() {
  uint64_t steps = 0;
  for (int idle = 0;; steps++) {
    if (cut_ == Cut::kNone && std::all_of(ranks.begin(), ranks.end(), [&](const auto& r) { return rank_is_over(*r); }))
      break;
    idle = act() ? 0 : idle + 1;
    if (idle > 200'000) {
      std::string why = cut_ == Cut::kNone ? "the job stands still" : "the cut does not come to its end";
      for (const auto& rank : ranks)
        for (const auto& [number, comm] : rank->comms)
          if (std::string text; static_cast<SoftComm&>(*comm).state(&text) != CommState::kOk) why += "; " + text;
      violation(why + " (stage " + std::to_string(static_cast<int>(cut_)) + ")");
    }
  }
  check_end();
  return steps;
}

uint64_t g_seed;

void print(const Program& p) {
  std::printf("%d ranks in %d trees:", p.ranks, p.trees);
  for (const auto& [tree, gpu] : p.places) std::printf(" %u/%u", tree, gpu);
  std::printf("\n");
  for (size_t c = 0; c < p.comms.size(); c++) {
    std::printf("communicator %zu:", c);
    for (const int rank : p.comms[c]) std::printf(" %d", rank);
    std::printf("\n");
  }
  for (size_t r = 0; r < p.messages.size(); r++) {
    std::printf("rank %zu:", r);
    for (const Message& message : p.messages[r]) {
      std::printf(" %s%d(", message.init ? "init" : "s", message.stream);
      for (const auto& [comm, op] : message.operations)
        std::printf(" c%d:k%d:n%llu:p%d:%llu>%llu", comm, op.kind, static_cast<unsigned long long>(op.count), op.peer,
                    static_cast<unsigned long long>(op.send % (kBytes * 2) / 8),
                    static_cast<unsigned long long>(op.recv % (kBytes * 2) / 8));
      std::printf(")");
    }
    std::printf("\n");
  }
}

void violation(const std::string& what) {
  std::printf("seed %llu: %s\n", static_cast<unsigned long long>(g_seed), what.c_str());
  print(g_world->program);
  std::fflush(stdout);
  std::filesystem::remove_all(g_world->root);
  _exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t first = 1, seeds = 300;
  for (int i = 1; i < argc; i++) {
    const std::string name = argv[i];
    if (name == "--list") {
      for (int m = 1; m < kMutants; m++) std::printf("%d %s\n", m, mutant_names[m]);
      return 0;
    }
    const char* const value = i + 1 < argc ? argv[++i] : "";
    if (name == "--first")
      first = std::strtoull(value, nullptr, 10);
    else if (name == "--seeds")
      seeds = std::strtoull(value, nullptr, 10);
    else if (name == "--seed")
      first = std::strtoull(value, nullptr, 10), seeds = 1;
    else if (name == "--mutant")
      mutant = std::atoi(value);
    else
      return std::fprintf(stderr, "comm_model [--first S] [--seeds N] [--seed S] [--mutant M] | --list\n"), 2;
  }
  uint64_t cuts = 0, taken_back = 0, replaced = 0, steps = 0;
  for (g_seed = first; g_seed < first + seeds; g_seed++) {
    Random random(g_seed);
    g_random = &random;
    World world(make());
    g_world = &world;
    world.start();
    steps += world.run();
    cuts += world.cuts, taken_back += world.taken_back, replaced += world.replaced;
  }
  std::printf("%llu programs hold: %llu steps, %llu cuts, %llu operations taken back, %llu servers replaced\n",
              static_cast<unsigned long long>(seeds), static_cast<unsigned long long>(steps),
              static_cast<unsigned long long>(cuts), static_cast<unsigned long long>(taken_back),
              static_cast<unsigned long long>(replaced));
  return cuts > seeds / 2 && taken_back > seeds && replaced > seeds / 2 ? 0 : 2;
}
