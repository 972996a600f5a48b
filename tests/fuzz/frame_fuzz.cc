// SPDX-License-Identifier: Apache-2.0
// Hostile servers of other process trees, which know the job's token: connections, receivers, boards and members of
// communicators are the product's (hal/links, hal/soft/comm, hal/cuda/comm_*), all in this process, so that millions of
// frames are sent in minutes.
//
//   frame_fuzz [--frames N] [--seed S] [--device soft|cuda]
//
// A round has a job folder of its own. In it are the honest server of tree 0, whose members begin communicators together
// with ranks of other trees and run operations, and attackers in the place of those trees. They do what a member does, and
// bend it: words, order, lengths, the moment in which they go. In every third round another process of the job, as it were,
// writes whatever it likes into the boards (board.h: nothing in them is trusted).
//
// What must hold
//   no sanitizer reports anything
//   an abort ends what a member waits for, whatever the others have said
//   what is sent of a rank's memory lies inside of it
//   outside of what its operations receive, a member's memory stays as it was (not where boards are written to: then a
//     member of the job's is told by the job itself to write elsewhere in the job's memory)
//   nobody speaks for a rank of the honest tree
//   a communicator that attackers do not know works, and its sums are right
//
// Prints one line of JSON; exits 0 when all held, 1 when not.
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/hal/comm_text.h"
#include "devproxy/hal/cuda/comm_board.h"
#include "devproxy/hal/cuda/comm_receiver.h"
#include "devproxy/hal/links/links.h"
#include "devproxy/hal/soft/comm/board_receiver.h"
#include "devproxy/hal/soft/comm/soft_comm.h"

namespace {

using namespace devproxy;
using namespace devproxy::hal;
using soft::Board;
using soft::CommGroup;
using soft::SoftComm;

constexpr uint64_t kMemory = 256 << 10, kGuarded = kMemory / 2;  // of a member: what lies behind is never received into
constexpr uint64_t kTheirs = uint64_t{0x7000} << 32;             // where attackers say that their memory is
constexpr uint32_t kSlots = 4, kMostRanks = 4, kAttackers = 3;
constexpr uint64_t kAbortUs =
    60'000'000;  // nothing here is timed; the bound is for a sanitized program on a loaded machine
constexpr uint64_t kFramesOfRound = 20'000;
constexpr uint8_t kToken = 0x5a;

class Random {
 public:
  explicit Random(uint64_t seed) : numbers_(seed) {}
  uint64_t any() { return numbers_(); }
  uint64_t below(uint64_t n) { return n ? numbers_() % n : 0; }
  bool chance(double percent) { return static_cast<double>(numbers_() >> 11) * 0x1p-53 * 100 < percent; }
  // A number that somebody might have forgotten.
  uint64_t evil() {
    switch (below(6)) {
      case 0: return below(16);
      case 1: return uint64_t{1} << below(64);
      case 2: return (uint64_t{1} << below(64)) - 1;
      case 3: return ~uint64_t{0} - below(64);
      case 4: return kTheirs + below(kMemory * 2);
      default: return any();
    }
  }
  // evils: how many percent.
  template <class T>
  T bent(T good, double evils) {
    return chance(evils) ? static_cast<T>(evil()) : good;
  }

 private:
  std::mt19937_64 numbers_;
};

uint64_t g_seed = 1;
std::atomic<uint64_t> g_frames{0}, g_connections{0}, g_cut_off{0}, g_operations{0}, g_failed{0}, g_ended{0},
    g_aborted{0}, g_private{0};

[[noreturn]] void die(const char* format, ...) {
  va_list ap;
  va_start(ap, format);
  printf("{\"ok\": false, \"seed\": %llu, \"frames\": %llu, \"why\": \"", static_cast<unsigned long long>(g_seed),
         static_cast<unsigned long long>(g_frames));
  vprintf(format, ap);
  printf("\"}\n");
  fflush(stdout);
  _exit(1);
}

// -- what attackers know ----------------------------------------------------------------------------------------------

// A communicator that is under way, with ranks of both sides.
struct Known {
  CommKey key;
  uint32_t ranks = 0, ours = 0;    // bits: ranks of the honest tree
  std::vector<uint64_t> memory;    // of those
  std::vector<CommOp> operations;  // in order; addresses are offsets
};

struct Slot {
  std::mutex mu;
  Known known;

  Known get() {
    std::lock_guard lock(mu);
    return known;
  }
  void set(const Known& to) {
    std::lock_guard lock(mu);
    known = to;
  }
};

struct Round {
  std::string folder;
  bool cuda = false, scribbled = false;
  Slot slots[kSlots];
  std::atomic<bool> over{false};
  uint64_t last_frame = 0;
  std::mutex mu;
  std::set<uint64_t> lengths{kMemory};  // of memory, as attackers have said
};

// -- the honest tree ----------------------------------------------------------------------------------------------------

struct Member final : SpaceOwner {
  Member(const Round& round, std::vector<Member*>& all, Random& random) : folder(round.folder), members(all) {
    slot = static_cast<uint32_t>(all.size());
    all.push_back(this);
    incarnation = random.any() | 1;
    memory = memfd_create("frame_fuzz", MFD_CLOEXEC);
    if (ftruncate(memory, kMemory) != 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, alive) != 0)
      die("no memory for a member");
    base = static_cast<uint8_t*>(mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0));
    memset(base + kGuarded, 0x77, kMemory - kGuarded);
  }
  ~Member() override {
    munmap(base, kMemory);
    close(memory), close(alive[0]), close(alive[1]);
  }
  SpaceConfig config() const { return {address(), kMemory, 0, 0}; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(base); }
  void check() const {
    for (uint64_t i = kGuarded; i < kMemory; i++)
      if (base[i] != 0x77) die("byte %llu of a member's memory changed", static_cast<unsigned long long>(i));
  }

  void on_thread_start() noexcept override {}
  void on_complete(uint32_t, uint64_t, uint32_t) noexcept override {}
  void on_fault(int32_t, const char*) noexcept override {}
  bool range_live(uint64_t, uint64_t, uint64_t, bool) noexcept override { return true; }
  void host_function(uint64_t) noexcept override {}
  SpacePlace place() noexcept override { return {0, slot, 0}; }
  std::string job_folder() override { return folder; }
  StatusOr<PeerLink> reach_peer(const SpacePlace& peer) override {
    if (peer.gpu != 0 || peer.tree != 0 || peer.slot >= members.size())
      return Status(kNotFound, "there is no such one");
    const Member& other = *members[peer.slot];
    return PeerLink{dup(other.memory), dup(other.alive[0])};
  }

  const std::string folder;
  std::vector<Member*>& members;
  uint32_t slot = 0;
  uint64_t incarnation = 0;
  int memory = -1, alive[2] = {-1, -1};
  uint8_t* base = nullptr;
  soft::CommHold hold;
};

CommOp at(CommOp op, uint64_t base) {
  op.send += base;
  op.recv += base;
  if (op.scalar_on_device) op.scalar += base;
  return op;
}

// Buffers lie in the first half of the memory.
CommOp operation(Random& random, uint32_t ranks, uint32_t me_of_pairs) {
  CommOp op;
  op.kind = static_cast<uint8_t>(random.below(random.chance(10) ? kCommKinds : kCommKinds - 2));
  op.type = static_cast<uint8_t>(random.below(kCommTypes));
  op.reduction = static_cast<uint8_t>(random.below(kCommReductions));
  op.scalar_on_device = random.chance(20);
  op.peer = static_cast<int32_t>(random.below(ranks));
  if (is_pair(op) && static_cast<uint32_t>(op.peer) == me_of_pairs) op.kind = 0;
  op.count = random.chance(80) ? random.below(64) : random.below(kGuarded / 16 / kMostRanks);
  op.send = random.below(64) * 8;
  op.recv = random.chance(30) ? op.send : kGuarded / 2 + random.below(64) * 8;
  return op;
}

// With ranks on both sides.
Known communicator(Random& random) {
  Known known;
  known.key = {random.any(), random.any()};
  known.ranks = static_cast<uint32_t>(2 + random.below(kMostRanks - 1));
  while (known.ours == 0) known.ours = static_cast<uint32_t>(random.below((1u << known.ranks) - 1));
  return known;
}

// What the ranks of this tree do of one communicator after another, each for some milliseconds.
void party(Round& round, Slot& slot, Links* links, std::vector<Member*> own, uint64_t seed) {
  Random random(seed);
  while (!round.over) {
    Known known = communicator(random);
    for (uint64_t n = 1 + random.below(30); n-- > 0;)
      known.operations.push_back(operation(random, known.ranks, static_cast<uint32_t>(random.below(known.ranks))));
    for (const Member* member : own) known.memory.push_back(member->address());
    slot.set(known);
    std::vector<std::shared_ptr<SoftComm>> comms;
    std::vector<std::thread> threads;
    std::atomic<size_t> left{0};
    for (uint32_t rank = 0; rank < known.ranks; rank++) {
      if (!(known.ours >> rank & 1) || comms.size() == own.size()) continue;
      Member& member = *own[comms.size()];
      const CommConfig config{known.key, known.ranks, rank};
      comms.push_back(
          std::make_shared<SoftComm>(config, member.config(), member.incarnation, member, member.hold, links));
      left++;
      threads.emplace_back([&round, &known, &left, &member, comm = comms.back()] {
        CommGroup({{comm, {}}}, true).run(round.over);
        std::string why;
        for (const CommOp& op : known.operations) {
          std::vector<CommCall> group{{comm, at(op, member.address())}};
          if (is_pair(op) && static_cast<uint32_t>(op.peer) == comm->config().rank) {  // it sends to itself
            group.push_back(group.front());
            group.front().op.kind = static_cast<uint8_t>(CommKind::kSend);
            group.back().op.kind = static_cast<uint8_t>(CommKind::kRecv);
          }
          CommGroup(std::move(group), false).run(round.over);
          if (comm->aborted() || comm->state(&why) != CommState::kOk) break;
          g_operations++;
        }
        left--;
      });
    }
    const uint64_t begun = now_us(), until = begun + 1000 * (2 + random.below(random.chance(20) ? 10 : 3000));
    std::string why;
    bool failed = false;  // a member that has failed waits for the abort
    while (left != 0 && now_us() < until && !round.over && !failed) {
      usleep(300);
      for (const auto& comm : comms)
        if (!failed) failed = comm->state(&why) != CommState::kOk;
    }
    (failed ? g_failed : left != 0 ? g_aborted : g_ended)++;
    auto board = Board::find(round.folder, known.key, known.ranks);
    for (uint32_t rank = 0; board.ok() && !round.scribbled && rank < known.ranks; rank++) {
      const soft::BoardCell& cell = (*board)->cell(rank);
      if (known.ours >> rank & 1 && cell.tree == 0 && cell.told.load() != 0)
        die("another tree has spoken for rank %u of this one", rank);
    }
    for (const auto& comm : comms) comm->abort();
    for (const uint64_t aborted = now_us(); left != 0; usleep(300))
      if (now_us() > aborted + kAbortUs) die("an abort does not end what waits: %s", why.c_str());
    for (std::thread& thread : threads) thread.join();
    if (!round.scribbled)
      for (const Member* member : own) member->check();
  }
}

// A communicator of this tree alone, whose key nobody else knows.
void private_party(Round& round, Links* links, std::vector<Member*> own, uint64_t seed) {
  Random random(seed);
  const CommKey key{random.any(), random.any()};
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < own.size(); rank++)
    threads.emplace_back([&, rank] {
      Member& member = *own[rank];
      const auto ranks = static_cast<uint32_t>(own.size());
      const auto comm = std::make_shared<SoftComm>(CommConfig{key, ranks, rank}, member.config(), member.incarnation,
                                                   member, member.hold, links);
      CommGroup({{comm, {}}}, true).run(round.over);
      auto* const words = reinterpret_cast<uint64_t*>(member.base);
      constexpr uint64_t kWords = 300;
      for (uint64_t turn = 1; !round.over; turn++) {
        for (uint64_t i = 0; i < kWords; i++) words[i] = turn * 1000 + i + rank;
        CommOp op;
        op.type = static_cast<uint8_t>(CommType::kUint64);
        op.count = kWords;
        op.recv = kGuarded / 2;
        CommGroup({{comm, at(op, member.address())}}, false).run(round.over);
        if (round.over) break;
        std::string why;
        if (comm->state(&why) != CommState::kOk)
          die("a communicator that attackers do not know failed: %s", why.c_str());
        for (uint64_t i = 0; i < kWords; i++)
          if (words[kGuarded / 16 + i] != (turn * 1000 + i) * ranks + ranks * (ranks - 1) / 2)
            die("a sum of turn %llu is wrong", static_cast<unsigned long long>(turn));
        g_private++;
        usleep(1000);
      }
      comm->leave();
    });
  for (std::thread& thread : threads) thread.join();
}

// On hal/cuda the boards are all that frames reach: NCCL has the data.
void cuda_party(Round& round, Slot& slot, uint64_t seed) {
  Random random(seed);
  while (!round.over) {
    Known known = communicator(random);
    auto board = cuda::CommBoard::open(round.folder, known.key, known.ranks);
    if (!board.ok()) die("no board: %s", board.status().text().c_str());
    cuda::CommBoard& b = **board;
    uint64_t incarnations[kMostRanks] = {};
    const auto take = [&](uint32_t rank) {  // at first, or as the member's next server
      incarnations[rank] = random.any() | 1;
      if (!b.take_row(rank, incarnations[rank], {{0, rank, 0}, 1 + rank, 2 + rank}).ok())
        die("another tree has taken rank %u", rank);
    };
    for (uint32_t rank = 0; rank < known.ranks; rank++)
      if (known.ours >> rank & 1) take(rank);
    slot.set(known);
    for (uint64_t turns = 20 + random.below(200); turns-- > 0 && !round.over; usleep(100)) {
      const auto rank = static_cast<uint32_t>(random.below(known.ranks));
      char id[kCommIdBytes];
      switch (random.below(6)) {
        case 0:
          if (known.ours >> rank & 1) take(rank);
          break;
        case 1:
          if (incarnations[rank] != 0 && !b.has_row(rank, incarnations[rank])) die("rank %u has lost its row", rank);
          g_private += incarnations[rank] != 0;
          break;
        case 2:
          if (b.get_id(b.set(), id)) g_operations++;
          break;
        case 3:
          memset(id, static_cast<int>(random.any()), sizeof id);
          b.put_id(b.set(), id);
          break;
        case 4: b.head().asks++; break;
        default:
          if (random.chance(10) && incarnations[rank] != 0) b.mark(rank, cuda::Gone::kLeft);
      }
    }
  }
}

// -- attackers ------------------------------------------------------------------------------------------------------------

class Attacker {
 public:
  Attacker(Round& round, uint16_t port, uint32_t number, uint64_t seed)
      : round_(round), port_(port), number_(number), tree_(1 + number % 2), random_(seed) {}

  void run() {
    while (!round_.over && g_frames < round_.last_frame) {
      if (greet()) live();
      if (fd_ >= 0) close(fd_);
      fd_ = -1;
    }
  }

 private:
  bool greet() {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port_);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) return false;
    g_connections++;
    Hello hello;
    memset(hello.token, kToken, sizeof hello.token);
    hello.tree = tree_;
    hello.gpu = random_.chance(99.7) ? number_ : static_cast<uint32_t>(random_.below(4));
    hello.server = random_.chance(95) ? random_.any() | 1 : 77;
    salt_ = random_.chance(90) ? random_.any() : salt_;  // another server's processes
    const bool wrong = random_.chance(3);
    if (wrong)
      reinterpret_cast<uint8_t*>(&hello)[random_.below(sizeof hello)] ^= static_cast<uint8_t>(1 << random_.below(8));
    const size_t bytes = random_.chance(99) ? sizeof hello : random_.below(sizeof hello);
    if (send(fd_, &hello, bytes, MSG_NOSIGNAL) != static_cast<ssize_t>(bytes) || bytes != sizeof hello) return false;
    Welcome welcome;
    timeval limit{wrong ? 0 : 20, 50'000};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    const bool welcomed = recv(fd_, &welcome, sizeof welcome, MSG_WAITALL) == sizeof welcome;
    for (const uint8_t byte : hello.token)
      if (welcomed && byte != kToken) die("a wrong token was welcomed");
    return welcomed;
  }

  void live() {
    alive_ = true;
    memset(static_cast<void*>(said_), 0, sizeof said_);
    memset(static_cast<void*>(said_of_pairs_), 0, sizeof said_of_pairs_);
    for (uint64_t most = 20 + random_.below(3000); most-- > 0 && alive_ && !round_.over;) {
      one_frame();
      if (out_.size() > (16 << 10) || random_.chance(5)) flush();
    }
    flush();
    out_.clear();
    if (!alive_) g_cut_off++;
  }

  void add(const void* from, size_t bytes) {
    const auto* p = static_cast<const uint8_t*>(from);
    out_.insert(out_.end(), p, p + bytes);
  }

  void flush() {
    const uint64_t until = now_us() + kAbortUs;
    for (size_t done = 0; done < out_.size() && alive_;) {
      pollfd look{fd_, POLLOUT | POLLRDHUP, 0};
      poll(&look, 1, 100);
      if (look.revents & (POLLHUP | POLLRDHUP | POLLERR)) alive_ = false;
      const ssize_t n = send(fd_, out_.data() + done, out_.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) done += static_cast<size_t>(n);
      if (n < 0 && errno != EAGAIN) alive_ = false;
      if (now_us() > until) die("a receiver reads no more");
      if (round_.over) break;
    }
    out_.clear();
  }

  void add(Frame frame, double evils) {
    if (random_.chance(evils)) {
      auto* const bytes = reinterpret_cast<uint8_t*>(&frame);
      for (uint64_t n = 1 + random_.below(4); n-- > 0;)
        bytes[random_.below(sizeof frame)] ^= static_cast<uint8_t>(1 << random_.below(8));
    }
    if (frame.device_bytes != kMemory) {
      std::lock_guard lock(round_.mu);
      round_.lengths.insert(frame.device_bytes);
    }
    add(&frame, sizeof frame);
    g_frames++;
  }

  uint64_t incarnation_of(const Known& known, uint32_t rank) const {
    return (known.key.low ^ salt_ ^ (uint64_t{rank} << 7)) | 1;
  }

  Frame frame_of(const Known& known, uint32_t rank, FrameKind kind) {
    Frame frame;
    frame.kind = kind;
    frame.key = known.key;
    frame.ranks = known.ranks;
    frame.rank = rank;
    frame.other = static_cast<uint32_t>(random_.below(known.ranks));
    frame.slot = rank;
    frame.incarnation = incarnation_of(known, rank);
    frame.device_base = kTheirs;
    frame.device_bytes = kMemory;
    return frame;
  }

  void one_frame() {
    constexpr double kEvils = 0.05;  // a word in so many percent of frames: the connection is cut off for most of them
    const auto slot = static_cast<uint32_t>(random_.below(kSlots));
    Known known = round_.slots[slot].get();
    if (known.ranks == 0 || random_.chance(0.1)) {
      known.key = {random_.below(4), random_.chance(50) ? 0 : random_.any()};
      known.ranks = static_cast<uint32_t>(1 + random_.below(kMostRanks)), known.ours = 1, known.operations.clear();
    }
    // A rank is one attacker's, mostly: else they are in each other's way, and nothing comes to its end.
    std::vector<uint32_t> mine;
    for (uint32_t r = 0; r < known.ranks; r++)
      if (!(known.ours >> r & 1) && (r + slot) % kAttackers == number_) mine.push_back(r);
    const bool any = random_.chance(0.1);
    if (mine.empty() && !any) {
      if (out_.empty()) usleep(20);
      return;
    }
    const auto rank = any ? static_cast<uint32_t>(random_.below(known.ranks)) : mine[random_.below(mine.size())];
    if (round_.cuda) return cuda_frame(known, rank, kEvils);
    Board* const board = look_at(slot, known);
    if (board && random_.chance(0.03)) return speak_for_another(*board, known);
    const bool has_come = board && board->cell(rank).incarnation.load() == incarnation_of(known, rank);
    if (!has_come || random_.chance(2)) {
      if (!random_.chance(10)) flush();
      Frame join = frame_of(known, rank, FrameKind::kJoin);
      if (random_.chance(0.3)) {
        join.incarnation = random_.bent(random_.any(), 30);
        join.device_base = random_.bent(kTheirs, 30), join.device_bytes = random_.bent(kMemory, 30);
      }
      return add(join, kEvils);
    }
    soft::BoardCell& cell = board->cell(rank);
    const uint32_t told = cell.told.load(), finished = cell.finished.load();
    Said& said = said_[slot][rank];
    const bool waits = said.key == known.key && said.told == told && said.finished == finished;  // until that was read
    Frame frame = frame_of(known, rank, FrameKind::kMark);
    frame.other = random_.bent(frame.other, 0.05);
    const uint64_t dice = random_.below(100);
    if (dice < 40) {  // the next operation, if the last one is over
      if (waits && !random_.chance(0.003)) return flush();
      if (told != finished && !random_.chance(0.003)) {  // else the receiver waits for seconds, and cuts off
        // In order: when all have posted.
        const bool all = board->head().posted.load() >= uint64_t{told} * known.ranks;
        if (!all && !random_.chance(0.1)) return flush();
        said = {known.key, told, finished};
        frame.kind = FrameKind::kFinish;
        return add(frame, kEvils);
      }
      frame.kind = FrameKind::kPost;
      said = {known.key, told, finished};
      size_t next = told;  // pairs are none of the board's operations
      for (const CommOp& op : known.operations)
        if (!is_pair(op) && next-- == 0) frame.op = op;
      if (random_.chance(1)) frame.op = operation(random_, known.ranks, rank);
      frame.op = at(frame.op, kTheirs);
      if (random_.chance(1)) frame.op.send = random_.evil();
      if (random_.chance(5) && !known.memory.empty())
        frame.op.recv = known.memory[random_.below(known.memory.size())] + random_.below(kMemory);
      if (random_.chance(0.5)) frame.op.count = random_.evil();
      if (random_.chance(0.5)) frame.op.scalar = random_.evil();
      if (random_.chance(0.05)) frame.op.peer = static_cast<int32_t>(random_.evil());
      if (!random_.chance(20)) add_data(known, rank, frame.op.send, frame.op.count % 4096);
      return add(frame, kEvils);
    }
    if (dice < 55) return add_data(known, rank, kTheirs + random_.below(kMemory), random_.below(300));
    if (dice < 75) {  // pairs: send where nothing is under way, receive where something is
      soft::BoardPair& to = board->pair(rank, frame.other % known.ranks);
      soft::BoardPair& from = board->pair(frame.other % known.ranks, rank);
      const bool sends = to.posted.load() == to.finished.load(), receives = from.posted.load() != from.finished.load();
      Said& last = said_of_pairs_[slot][rank][frame.other % kMostRanks];
      const uint64_t counts = to.posted.load() + from.finished.load();
      if (last.key == known.key && last.told == counts && !random_.chance(0.1)) return flush();
      last = {known.key, static_cast<uint32_t>(counts), 0};
      frame.addr = kTheirs + random_.below(4096);
      frame.bytes = random_.below(512);
      for (const CommOp& op : known.operations)
        if (op.kind_of() == CommKind::kRecv && static_cast<uint32_t>(op.peer) == rank && random_.chance(70))
          frame.bytes = op.count * comm_type_bytes(op.type_of());
      if (random_.chance(1)) frame.addr = random_.evil();
      if (random_.chance(1)) frame.bytes = random_.evil();
      if (receives && random_.chance(50))
        frame.kind = random_.chance(90) ? FrameKind::kPairFinish : FrameKind::kPairWrong;
      else if (sends)
        frame.kind = FrameKind::kPairPost;
      else
        frame.kind = random_.chance(80) ? FrameKind::kMark : FrameKind::kPairUnpost;
      return add(frame, kEvils);
    }
    if (dice < 77) {
      frame.kind = told != finished && !waits ? FrameKind::kUnpost : FrameKind::kMark;
      said = {known.key, told, finished};
      return add(frame, kEvils);
    }
    if (dice < 78 && random_.chance(20)) {
      const FrameKind kinds[] = {FrameKind::kLeave, FrameKind::kElsewhere, FrameKind::kGone, FrameKind::kBye};
      frame.kind = kinds[random_.below(4)];
      if (frame.kind == FrameKind::kGone && random_.chance(50)) frame.incarnation = random_.evil();
      return add(frame, kEvils);
    }
    if (dice < 79 && random_.chance(3)) {  // what there is not, or not here
      frame.kind = static_cast<FrameKind>(random_.chance(50) ? random_.below(20) : random_.any());
      frame.rank = random_.bent(frame.rank, 30), frame.ranks = random_.bent(frame.ranks, 30);
      return add(frame, 50);
    }
    frame.bytes = random_.any();
    add(frame, kEvils);
  }

  // How far the operations of a communicator are.
  Board* look_at(uint32_t slot, const Known& known) {
    Seen& seen = seen_[slot];
    if (!seen.board || seen.key != known.key || seen.board->ranks() != known.ranks) {
      auto found = Board::find(round_.folder, known.key, known.ranks);
      seen = {known.key, found.ok() ? std::move(*found) : nullptr};
    }
    return seen.board.get();
  }

  // Of a rank of the honest tree: that it receives elsewhere. To be cut off for that.
  void speak_for_another(Board& board, const Known& known) {
    const auto rank = static_cast<uint32_t>(random_.below(known.ranks));
    if (!(known.ours >> rank & 1) || known.memory.empty()) return;
    Frame frame = frame_of(known, rank, FrameKind::kPost);
    frame.op = board.cell(rank).op;
    frame.op.recv = known.memory[random_.below(known.memory.size())] + kGuarded + random_.below(64);
    add(frame, 0);
  }

  void add_data(const Known& known, uint32_t rank, uint64_t addr, uint64_t bytes) {
    Frame frame = frame_of(known, rank, FrameKind::kData);
    const bool fits = bytes != 0 && addr >= kTheirs && bytes <= kMemory && addr - kTheirs <= kMemory - bytes;
    if (!fits && !random_.chance(0.2)) return;
    if (random_.chance(0.1)) addr = kTheirs + kMemory - random_.below(bytes + 1) + random_.below(3) * kMemory;
    if (random_.chance(0.02)) bytes = kChunkBytes - 8 + random_.below(16);
    frame.addr = addr;
    frame.bytes = random_.bent(bytes, 0.03);
    if (random_.chance(0.03)) frame.incarnation = random_.any();
    add(frame, 0.02);
    std::vector<uint8_t> contents(random_.chance(99.98) ? bytes : random_.below(bytes + 1));
    for (uint8_t& byte : contents) byte = static_cast<uint8_t>(random_.any());
    add(contents.data(), contents.size());
  }

  void cuda_frame(const Known& known, uint32_t rank, double evils) {
    const FrameKind kinds[] = {FrameKind::kJoin, FrameKind::kJoin,  FrameKind::kId,
                               FrameKind::kAsk,  FrameKind::kHere,  FrameKind::kHere,
                               FrameKind::kMark, FrameKind::kLeave, FrameKind::kElsewhere};
    Frame frame = frame_of(known, rank, kinds[random_.below(random_.chance(5) ? 9 : 7)]);
    frame.bytes = random_.bent(1 + random_.below(4), 5);
    frame.addr = random_.bent(1 + random_.below(4), 5);
    if (random_.chance(5)) frame.incarnation = random_.any();
    if (frame.kind == FrameKind::kId) {
      if (random_.chance(95)) frame.rank = 0;
      auto board = cuda::CommBoard::find(round_.folder, known.key, known.ranks);
      if (board.ok()) frame.incarnation = random_.bent((*board)->set(), 5);
    }
    if (random_.chance(0.02)) frame.kind = static_cast<FrameKind>(random_.any());
    const bool id = frame.kind == FrameKind::kId;
    add(frame, evils);
    if (!id) return;
    char contents[kCommIdBytes];
    memset(contents, static_cast<int>(random_.any()), sizeof contents);
    add(contents, random_.chance(99.97) ? sizeof contents : random_.below(sizeof contents));
  }

  // The counts of a member's cell when it said something last.
  struct Said {
    CommKey key;
    uint32_t told = 0, finished = 0;
  };

  struct Seen {
    CommKey key;
    std::unique_ptr<Board> board;
  };

  Round& round_;
  const uint16_t port_;
  const uint32_t number_, tree_;
  Random random_;
  uint64_t salt_ = 0;
  Seen seen_[kSlots];
  Said said_[kSlots][kMostRanks], said_of_pairs_[kSlots][kMostRanks][kMostRanks];
  int fd_ = -1;
  bool alive_ = false;
  std::vector<uint8_t> out_;
};

// Where the honest server connects to: takes what comes, or not.
class Listener {
 public:
  Listener(Round& round, uint64_t seed) : round_(round), random_(seed) {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof at;
    if (bind(fd_, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0 || listen(fd_, 16) != 0 ||
        getsockname(fd_, reinterpret_cast<sockaddr*>(&at), &length) != 0)
      die("cannot listen");
    port_ = ntohs(at.sin_port);
  }
  ~Listener() {
    for (const int fd : taken_) close(fd);
    close(fd_);
  }
  uint16_t port() const { return port_; }
  void run() {
    std::vector<uint8_t> sink(256 << 10);
    while (!round_.over) {
      std::vector<pollfd> look{{fd_, POLLIN, 0}};
      for (const int fd : taken_) look.push_back({fd, POLLIN, 0});
      poll(look.data(), look.size(), 50);
      for (size_t i = 1; i < look.size(); i++) {
        if (!look[i].revents || random_.chance(1)) continue;
        const ssize_t n = recv(look[i].fd, sink.data(), sink.size(), MSG_DONTWAIT);
        if (n <= 0 ? errno != EAGAIN || n == 0 : random_.chance(0.2)) {
          close(look[i].fd);
          std::erase(taken_, look[i].fd);
        }
      }
      const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) continue;
      Welcome welcome;
      welcome.server = 77;
      if (random_.chance(5)) reinterpret_cast<uint8_t*>(&welcome)[random_.below(sizeof welcome)] ^= 1;
      const size_t bytes = random_.chance(97) ? sizeof welcome : random_.below(sizeof welcome);
      if (send(fd, &welcome, bytes, MSG_NOSIGNAL) < 0 || random_.chance(3))
        close(fd);
      else
        taken_.push_back(fd);
    }
  }

 private:
  Round& round_;
  Random random_;
  int fd_ = -1;
  uint16_t port_ = 0;
  std::vector<int> taken_;
};

// A process of the job that has the boards mapped, and writes into those that attackers know; the files' lengths stay.
void scribble(Round& round, uint64_t seed) {
  Random random(seed);
  while (!round.over) {
    const Known known = round.slots[random.below(kSlots)].get();
    auto board = Board::find(round.folder, known.key, known.ranks);
    if (!board.ok()) {
      usleep(200);
      continue;
    }
    for (int n = 0; n < 200; n++) {
      const auto rank = static_cast<uint32_t>(random.below(known.ranks));
      soft::BoardCell& cell = (*board)->cell(rank);
      soft::BoardPair& pair = (*board)->pair(rank, static_cast<uint32_t>(random.below(known.ranks)));
      switch (random.below(12)) {
        case 0:
          reinterpret_cast<volatile uint8_t*>(&cell)[random.below(sizeof cell)] = static_cast<uint8_t>(random.any());
          break;
        case 1:
          reinterpret_cast<volatile uint8_t*>(&pair)[random.below(sizeof pair)] = static_cast<uint8_t>(random.any());
          break;
        case 2: cell.op.recv = random.evil(); break;
        case 3: cell.op.send = random.evil(); break;
        case 4: cell.device_base = random.bent(kTheirs, 50); break;
        case 5: cell.tree = static_cast<uint32_t>(random.bent(random.below(3), 20)); break;
        case 6: (*board)->head().posted = random.bent((*board)->head().posted + 1, 20); break;
        case 7: (*board)->head().finished = random.bent((*board)->head().finished + 1, 20); break;
        case 8: cell.op.scalar = random.evil(); break;
        case 9: pair.addr = random.evil(), pair.posted++; break;
        case 10: (*board)->head().gone = static_cast<uint32_t>(random.evil()); break;
        default: cell.slot = static_cast<uint32_t>(random.below(8));
      }
      usleep(static_cast<useconds_t>(random.below(30)));
    }
  }
}

// -- a round ----------------------------------------------------------------------------------------------------------------

void one_round(const std::string& folder, bool cuda, bool scribbled, uint64_t frames, Random& random) {
  Round round;
  round.folder = folder;
  round.cuda = cuda;
  round.scribbled = scribbled;
  round.last_frame = g_frames + frames;
  std::filesystem::create_directory(folder);
  auto opened = Links::open({folder, 0, 0, "127.0.0.1"}, random.chance(20) ? random.any() | 1 : 0,
                            cuda ? cuda::CommReceiver::maker(folder) : soft::BoardReceiver::maker(folder));
  if (!opened.ok()) die("%s", opened.status().text().c_str());
  Links* const links = opened->get();
  Listener listener(round, random.any());
  {
    std::ofstream roster(folder + "/trees");
    roster << "token ";
    for (size_t i = 0; i < kTokenBytes; i++) roster << "5a";
    roster << "\ntree 0 1 127.0.0.1:" << links->port() << "\n";
    for (int tree = 1; tree <= 2; tree++) roster << "tree " << tree << " 1 127.0.0.1:" << listener.port() << "\n";
  }
  std::vector<Member*> members;
  std::vector<std::unique_ptr<Member>> all;
  const auto some = [&](size_t n) {
    std::vector<Member*> own;
    for (size_t i = 0; i < n; i++)
      own.push_back(all.emplace_back(std::make_unique<Member>(round, members, random)).get());
    return own;
  };
  std::vector<std::thread> honest, hostile;
  std::vector<std::vector<Member*>> owners;
  for (uint32_t i = 0; i < kSlots; i++) owners.push_back(some(kMostRanks - 1));
  const std::vector<Member*> alone = some(2);
  for (uint32_t i = 0; i < kSlots; i++)
    honest.emplace_back([&, i, seed = random.any()] {
      cuda ? cuda_party(round, round.slots[i], seed) : party(round, round.slots[i], links, owners[i], seed);
    });
  if (!cuda) honest.emplace_back([&, seed = random.any()] { private_party(round, links, alone, seed); });
  honest.emplace_back([&] { listener.run(); });
  if (scribbled) honest.emplace_back([&, seed = random.any()] { scribble(round, seed); });
  for (uint32_t i = 0; i < kAttackers; i++)
    hostile.emplace_back([&, i, seed = random.any()] { Attacker(round, links->port(), i, seed).run(); });
  for (std::thread& thread : hostile) thread.join();
  round.over = true;
  for (std::thread& thread : honest) thread.join();
  if (random.chance(50)) links->leave();
  opened->reset();
  for (const auto& file : std::filesystem::directory_iterator(folder))
    if (file.path().filename().string().starts_with("shadow-") && !round.lengths.contains(file.file_size()))
      die("a rank's memory has become %llu bytes long", static_cast<unsigned long long>(file.file_size()));
  std::filesystem::remove_all(folder);
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t frames = 100'000;
  bool cuda = false;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string arg = argv[i], value = argv[i + 1];
    if (arg == "--frames")
      frames = strtoull(argv[i + 1], nullptr, 0);
    else if (arg == "--seed")
      g_seed = strtoull(argv[i + 1], nullptr, 0);
    else if (arg == "--device" && (value == "soft" || value == "cuda"))
      cuda = value == "cuda";
    else
      return fprintf(stderr, "frame_fuzz: unknown option %s %s\n", argv[i], argv[i + 1]), 2;
  }
  Random random(g_seed);
  char root[] = "/dev/shm/devproxy-frames-XXXXXX";
  if (!mkdtemp(root)) die("no folder: %s", strerror(errno));
  for (uint64_t turn = 0; g_frames < frames; turn++)
    one_round(std::string(root) + "/" + std::to_string(turn), cuda, !cuda && turn % 3 == 2,
              std::min(kFramesOfRound, frames - g_frames), random);
  std::filesystem::remove_all(root);
  printf(
      "{\"ok\": true, \"seed\": %llu, \"frames\": %llu, \"connections\": %llu, \"cut_off\": %llu, \"operations\": "
      "%llu, "
      "\"ended\": %llu, \"failed\": %llu, \"aborted\": %llu, \"private\": %llu}\n",
      static_cast<unsigned long long>(g_seed), static_cast<unsigned long long>(g_frames),
      static_cast<unsigned long long>(g_connections), static_cast<unsigned long long>(g_cut_off),
      static_cast<unsigned long long>(g_operations), static_cast<unsigned long long>(g_ended),
      static_cast<unsigned long long>(g_failed), static_cast<unsigned long long>(g_aborted),
      static_cast<unsigned long long>(g_private));
  return 0;
}
