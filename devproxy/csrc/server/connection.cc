// SPDX-License-Identifier: Apache-2.0
// The dispatch thread: the one consumer of a connection's ring.
//
// The cut. The server thread asks the gate, the dispatch thread stops at a message boundary, waits until the device is
// idle, and parks: it holds the ring, but takes nothing out of it. Then everything that the server has of this client
// stands still, and the server thread may read it: Gate::drained() hands it over, resume() hands it back. The device
// threads are asleep, since nothing is pending. No thread of the client takes part, and none has to: what it posts
// stays in the ring, which is state of the job like its heap.
//
// Interleavings that worried us
//   1. The client posts during the cut. Records published or half written lie between head and tail; whoever stores the
//      segment while the process is frozen stores them too. A full ring makes the client wait for space as ever.
//   2. A caller sleeps for an answer, or for a completion. Its message was either consumed, then it is answered and
//      complete before the drain ends, or it lies in the ring, and the caller sleeps until somebody goes on with it. It
//      looks at the link every 100 ms, so the end of a parked server reaches it like that of any other.
//   3. A host function is out. It may need a lock whose holder waits for an answer of ours, and its HOST_FUNC_DONE
//      comes through the ring. So a cut consumes on until none is out. A client with a sticky error posts nothing any
//      more, HOST_FUNC_DONE included: then it is not waited for (Connection::on_fault).
//   4. A free was announced, and a command in a stream still used the memory. After the drain none does, so drain()
//      retires every freed range: a dump has live ranges only.
//   5. A client attaches during the cut: its connection is made with the cut already asked for, and parks at once.
//   6. The client goes while parked: the server thread, which alone reads the parked state, is the one who sees it and
//      calls request_stop; so no dump is in progress. A stop ends the rest, and tear_down is as ever.
//   7. resume() races with a stop: the two are apart in the gate, and a stop beats every phase.
//   8. A resume and a new cut before the thread has woken: the gate's phase is then kCutting, so the thread leaves its
//      rest, passes at_boundary() again and drains again, which is over at once. Until then it is not parked.
//   9. The server gives up waiting for the drain (a kernel that does not end), and perhaps cuts again: draining() and
//      drained() answer with the step of that moment, so the thread never parks for a cut that was given up. Nothing
//      was lost, since nothing had been taken.
#include "devproxy/csrc/server/connection.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/log.h"
#include "devproxy/csrc/server/crash.h"
#include "devproxy/csrc/server/handlers.h"
#include "devproxy/csrc/server/pending.h"
#include "devproxy/csrc/server/state_record.h"

namespace devproxy::server {

namespace {

constexpr uint64_t kDrainLookUs = 50;
// Commands that wait in streams; each is some 300 bytes and its parameters.
constexpr uint32_t kMaxPending = 1u << 16, kMaxPendingEver = 1u << 20;

// A client has so much unused at most: one part in so many of the GPU (client/device_state.cc).
constexpr uint64_t kUnusedParts = 32;

}  // namespace

Connection::Connection(ServerParts& parts, const Peer& peer, uint32_t slot)
    : parts_(parts),
      peer_(peer),
      slot_(slot),
      endpoint_(parts.job_dir + "/gpu" + std::to_string(parts.gpu) + "-" + std::to_string(peer.number), slot),
      device_(*parts.device),
      memory_(slot, *parts.ledger, parts.live, counters_),
      windows_(parts.job_dir, slot),
      communicators_(memory_.device_begin(), parts.metas) {}

std::unique_ptr<Connection> Connection::make(ServerParts& parts, const Peer& peer, AttachReply* reply) {
  const auto slot = parts.slots->take(peer.wanted_slot);
  if (!slot) {
    reply->status = AttachStatus::kNoSlot;
    if (peer.wanted_slot == SlotTable::kAny)
      std::snprintf(reply->text, sizeof reply->text, "all %u process slots of this job are taken", kMaxSlots);
    else
      std::snprintf(reply->text, sizeof reply->text, "process slot %u of this job is not free", peer.wanted_slot);
    return nullptr;
  }
  std::unique_ptr<Connection> connection(new Connection(parts, peer, *slot));
  Status status = connection->endpoint_.make_files();
  if (status.ok()) status = connection->endpoint_.open_files();
  if (status.ok()) {
    connection->endpoint_.begin();
    status = connection->open_memory();
  }
  if (!status.ok()) {
    reply->status = AttachStatus::kNoMemory;
    std::snprintf(reply->text, sizeof reply->text, "%s", status.text().c_str());
    return nullptr;
  }
  connection->own();
  connection->fill_reply(reply);
  return connection;
}

Status Connection::open_memory() {
  Status opened = device_.open(
      {memory_.device_begin(), kDeviceBytes, endpoint_.pinned_begin(), kPinnedBytes, peer_.framework}, *this);
  if (!opened.ok()) return opened;
  endpoint_.say_habits(device_.caps().wants_awaited, device_.caps().splices);
  state_.replay().root(kLegacyStream);
  return {};
}

void Connection::own() {
  endpoint_.own();
  parts_.slots->adopt(slot_);
}

void Connection::fill_reply(AttachReply* reply) const {
  reply->status = AttachStatus::kOk;
  reply->slot = slot_;
  reply->flags = device_.caps().keeps_host_pages ? kKeepsHostPages : 0;
  endpoint_.name_files(reply);
  fill_facts(parts_.properties, &reply->props);
}

void fill_facts(const hal::Properties& from, DeviceProps* props) {
  DeviceProps& to = *props;
  std::snprintf(to.name, sizeof to.name, "%s", from.name.c_str());
  std::copy(from.uuid.begin(), from.uuid.end(), to.uuid);
  to.total_bytes = from.total_bytes;
  to.major = from.major;
  to.minor = from.minor;
  to.pci_domain = from.pci_domain;
  to.pci_bus = from.pci_bus;
  to.pci_device = from.pci_device;
  std::copy(from.attributes.begin(), from.attributes.end(), to.attributes);
}

void Connection::start() {
  thread_ = std::thread([this] { run(); });
}

void Connection::request_stop() {
  // The dispatch thread may wait in a collective whose other members are gone. It closes the device behind this alone.
  if (!stop_requested_.exchange(true) && device_.is_open()) device_.leave_comms();
  [[maybe_unused]] const bool always = gate_.stop();
  host_functions_.look_again();
  if (!finished()) endpoint_.wake_dispatch_thread();
}

void Connection::request_cut(uint64_t until_us) {
  say_held(true);
  if (gate_.cut(until_us, now_us()) && !finished()) endpoint_.wake_dispatch_thread();
}

void Connection::aim(bool on) {
  if (gate_.aim(on) && !finished()) endpoint_.wake_dispatch_thread();
}

void Connection::resume() {
  // Before the gate opens: what waits for a communicator may use memory that open_restored() brings back.
  if (parked()) goes_on_.store(true);
  say_held(false);
  gate_.resume();
}

bool Connection::withhold() {
  if (goes_on_.load() && !finished()) return false;  // that end would be this beginning's
  withholds_.store(true);
  return device_.withhold(true);
}

void Connection::let_go() {
  if (goes_on_.load() || !withholds_.exchange(false)) return;
  device_.withhold(false);
}

Connection::CutFacts Connection::cut_facts() const {
  return gate_.ask([this](const Gate& g) {
    return CutFacts{counters_.live_bytes.load(std::memory_order_relaxed), memory_.trough_bytes(), g.waited_us(),
                    g.drained_us()};
  });
}

void Connection::join() {
  if (thread_.joinable()) thread_.join();
}

// Gives everything back; also what a half-made connection has.
void Connection::tear_down() {
  if (seat_) parts_.turns->leave(std::exchange(seat_, nullptr));
  if (device_.is_open()) device_.stop();
  state_.clear();
  communicators_.clear();
  device_.close();
  memory_.give_all();
  endpoint_.give_back();
  windows_.close();
  if (!endpoint_.keeps_files()) parts_.slots->give(slot_);
}

Connection::~Connection() {
  if (thread_.joinable()) request_stop();  // a restore that failed after this client was back
  join();
  if (!finished()) tear_down();
}

Status Connection::save(ClientRecord* client) {
  if (std::string why = undumpable(); !why.empty()) return {kNotSupported, std::move(why)};
  const hal::Caps caps = device_.caps();
  const hal::Properties& gpu = device_.properties();
  const Lifeline& lifeline = endpoint_.lifeline();
  client->number = number();
  client->pid = peer_.pid;
  client->slot = slot_;
  client->framework = peer_.framework;
  client->told = {caps.kernels_see_host_window, caps.keeps_host_pages, gpu.major, gpu.minor};
  client->position = endpoint_.position();
  client->host_functions.assign(host_functions_.tokens().begin(), host_functions_.tokens().end());
  client->fault = {lifeline.fault_code(), lifeline.fault_text(), lifeline.ended(), poisoned_};
  client->counters = {counters_.counted(), counters_.peak_bytes};
  memory_.save(client);
  windows_.save(client);
  for (const auto& [key, count] : communicators_.counts())
    client->comm_counts.push_back({key.comm.low, key.comm.high, static_cast<uint64_t>(key.from + 1),
                                   static_cast<uint64_t>(key.to + 1), key.receives, count});
  if (Status pending = save_pending(*this, client); !pending.ok())
    return std::move(pending).with("saving client " + std::to_string(number()) + ": what has not begun");
  Status s = state_.save(device_, end_of(memory_.pieces()), client);
  return std::move(s).with("saving client " + std::to_string(number()));
}

// -- the dispatch thread ----------------------------------------------------------------------------------------------

void Connection::run() {
  prctl(PR_SET_NAME, "dp-dispatch");  // as top -H and profilers show it
  prepare_thread_for_crash();
  if (parts_.turns) take_seat();
  try {
    dispatch();
  } catch (const std::exception& e) {  // our bug or no memory: this connection pays, the others go on
    char text[sizeof ControlPage::sticky_text];
    std::snprintf(text, sizeof text, "devproxy-server failed internally: %s", e.what());
    poison(text);
  }
  device_.yield();
  while (attend()) endpoint_.wait(gate_, true, [this] { look_around(); });  // poisoned: until the client goes
  tear_down();
  finished_.store(true, std::memory_order_release);
  parts_.wake();
}

void Connection::dispatch() {
  uint64_t busy_since = now_us();
  auto count_busy = [&] { Counters::add(counters_.busy_us, now_us() - busy_since); };
  while (!poisoned_) {
    if (gate_.attention() != 0) [[unlikely]] {
      count_busy();
      device_.yield();
      if (!attend() || poisoned_) return;
      busy_since = now_us();
    }
    const uint32_t bytes = endpoint_.peek();
    if (bytes == 0) {
      // The next message of a caller that was just answered comes within this; the clock is only read after it.
      for (int i = 0; i < 64 && endpoint_.peek() == 0; i++) RealSync::pause();
      if (endpoint_.peek() != 0) continue;
      count_busy();
      device_.yield();
      while (!endpoint_.wait(gate_, false, [this] { look_around(); }) && gate_.attention() == 0) {}
      busy_since = now_us();
      continue;
    }
    switch (consume(bytes)) {
      case Taken::kPoisoned: return;
      case Taken::kHeld: device_.yield(), communicators_.wait(); continue;
      case Taken::kHeldForMemory: device_.yield(), parts_.turns->wait(); continue;
      case Taken::kYes: endpoint_.release(bytes);
    }
    if (device_.pending() > kMaxPending) throttle();
  }
}

Gate::Boundary Connection::boundary() {
  // Those that wait in a stream do not begin while communication is withheld; a dump takes them as they are.
  const bool out = withholds_.load() ? device_.in_host_function() : !host_functions_.none_out();
  return {now_us(), !poisoned_ && out && !faulted(), poisoned_ || memory_.at_trough(), communicators_.owes()};
}

// Between two messages: does what the gate asks. True when the next one may be taken, false when it is time to leave.
bool Connection::attend() {
  const uint64_t since_ns = device_.trace().on() ? now_ns() : 0;
  bool stood = false;
  for (Gate::Step step = gate_.at_boundary(boundary());;) {
    stood = stood || step != Gate::Step::kServe;
    switch (step) {
      case Gate::Step::kServe:
        if (since_ns && stood) device_.trace().span(0, Trace::Kind::kCut, since_ns, now_ns(), "cut");
        return true;
      case Gate::Step::kLeave: return false;
      case Gate::Step::kDrain: step = drain(); break;
      case Gate::Step::kRest:
        parts_.wake();
        if (gate_.rest() != Gate::Step::kLeave && !poisoned_)
          if (Status s = windows_.open_restored(memory_.pinned(), device_); !s.ok())
            poison(("restoring client " + std::to_string(number()) + ": " + s.text()).c_str());
        if (goes_on_.load()) {
          if (withholds_.exchange(false)) device_.withhold(false);
          goes_on_.store(false);
        }
        step = gate_.at_boundary(boundary());
        break;
    }
  }
}

// Waits until nothing that was submitted is pending, or can go on, or the gate says otherwise.
Gate::Step Connection::drain() {
  device_.all_awaited();
  while (!device_.idle()) {
    if (withholds_.load() && device_.stands()) return gate_.drained(now_us());
    if (const Gate::Step step = gate_.draining(device_.pending()); step != Gate::Step::kDrain) return step;
    usleep(kDrainLookUs);
  }
  // Nothing that was submitted can still use what was freed.
  for (const Range& range : memory_.retire_all()) device_.release(range.addr, range.bytes);
  return gate_.drained(now_us());
}

// Streams are far behind: lets the ring fill up, and with it the client wait, until they have caught up. Not while a
// host function is out: its end comes through the ring.
void Connection::throttle() {
  device_.yield();
  while (device_.pending() > kMaxPending / 2) {
    if (gate_.attention() != 0 && gate_.at_boundary(boundary()) != Gate::Step::kServe) return;  // dispatch() attends
    if (!host_functions_.none_out()) break;
    usleep(200);
  }
  if (device_.pending() > kMaxPendingEver) poison("more than a million commands wait behind a host function");
}

bool Connection::changes_credit(const Message& m) const {
  switch (static_cast<wire::Opcode>(m.info->opcode)) {
    case wire::Opcode::MEM_CREDIT:
    case wire::Opcode::MEM_CREDIT_RETURN: return true;
    case wire::Opcode::MEM_ALLOC: return memory_.missing_bytes(m.as<wire::MEM_ALLOC_req>().bytes) != 0;
    default: return false;
  }
}

// May the client have the memory that the message wants? Asked again until it may, where ranks share the GPU.
bool Connection::may_take_memory(const Message& m) {
  uint64_t wanted = 0, needed = 0;
  if (m.info->opcode == static_cast<uint16_t>(wire::Opcode::MEM_CREDIT)) {
    wanted = m.as<wire::MEM_CREDIT_req>().bytes;
    needed = m.as<wire::MEM_CREDIT_req>().minimum;
  } else if (m.info->opcode == static_cast<uint16_t>(wire::Opcode::MEM_ALLOC)) {
    needed = memory_.missing_bytes(m.as<wire::MEM_ALLOC_req>().bytes);
    wanted = std::max(needed, ClientMemory::kOwedStep);
  }
  credit_most_ = UINT64_MAX;
  if (needed == 0 || needed > memory_.free_alone_bytes() || faulted()) return true;  // then its handler refuses it
  const uint64_t there = device_.room_bytes(memory_.taken_bytes());
  credit_most_ = parts_.turns->may_take(seat_, wanted, needed, memory_.room_bytes(there), there == UINT64_MAX);
  return credit_most_ != 0;
}

void Connection::take_seat() {
  const uint64_t peak = counters_.peak_bytes.load(std::memory_order_relaxed);
  seat_ = parts_.turns->sit(
      {.state =
           [this] {
             using State = MemoryTurns::State;
             return device_.pending() == 0 ? State::kRests : device_.stuck() ? State::kWaits : State::kMoves;
           },
       // Not its calls: a watchdog asks after the state of a communicator all the time.
       .progress =
           [this] {
             const Counted n = counters_.counted();
             return n.launches + n.allocs + n.frees + n.h2d_bytes + n.d2h_bytes + n.d2d_bytes + n.memset_bytes -
                    device_.pending();
           },
       .steps = [this] { return endpoint_.steps(); },
       .want_credit = [this] { endpoint_.lifeline().want_credit(); },
       .look = [this] { endpoint_.wake_dispatch_thread(); }},
      memory_.taken_bytes(), peak ? peak + memory_.total_bytes() / kUnusedParts : 0);
}

void Connection::note_memory() {
  parts_.turns->now(seat_, memory_.taken_bytes(), memory_.trough_bytes(), device_.mapped_bytes());
  if (!std::exchange(frugal_, parts_.turns->tight()) && frugal_) device_.give_back();
}

bool Connection::forget_freed(bool wanted) {
  if (!memory_.device().has_freed()) return false;
  std::vector<Range> forgotten = memory_.retire(device_.oldest_pending());
  if (wanted && memory_.device().has_freed()) {
    const std::vector<Range> more = memory_.retire(device_.pending_use());
    forgotten.insert(forgotten.end(), more.begin(), more.end());
  }
  for (const Range& range : forgotten) device_.release(range.addr, range.bytes);
  return !forgotten.empty();
}

// Nothing has come: gives back what no command can touch any more.
void Connection::look_around() {
  if (seat_) {
    forget_freed(parts_.turns->tight());
    if (parts_.turns->tight()) {
      memory_.owe_unused();
      note_memory();
      device_.reserve(memory_.taken_bytes());
    }
  }
  device_.tidy();
}

// Handles the record at the ring's head. kHeld: it must wait for the other ranks, and is read again.
Connection::Taken Connection::consume(uint32_t record_bytes) {
  Message message;
  const char* const wrong = endpoint_.read(record_bytes, &message);
  if (!wrong) {
    const bool captured = message.info->opcode == static_cast<uint16_t>(wire::Opcode::GRAPH_LAUNCH);
    if (message.info->communicates && !communicators_.take(comm_steps(message), captured)) [[unlikely]]
      return Taken::kHeld;
    const bool takes = seat_ && changes_credit(message);
    if (takes && !may_take_memory(message)) return Taken::kHeldForMemory;
    Counters::add(counters_.calls, 1);
    answered_ = false;
    Trace& trace = device_.trace();
    const uint64_t began_ns = trace.on() ? now_ns() : 0;
    // What kernels said before a fault is for the job to read.
    const bool always = message.info->opcode == static_cast<uint16_t>(wire::Opcode::OUTPUT);
    if (message.info->is_sync && faulted() && !always) {
      reply(message, endpoint_.lifeline().fault_code());
    } else {
      handler_of (*message.info)(*this, message);
    }
    if (takes) note_memory();
    if (!poisoned_) {
      if (!answered_) reply(message, kOk);
      if (began_ns) [[unlikely]]
        trace_message(message, began_ns);
      return Taken::kYes;
    }
  }
  // One that waits for this very message can be answered; the others learn it from server_state.
  if (wrong) poison(wrong);
  if (message.slot < kReplySlots) reply(message, kUnknown);
  return Taken::kPoisoned;
}

// Waits for room and answers that somebody waits for, and steps of the optimizer, which the client counts.
void Connection::trace_message(const Message& message, uint64_t began_ns) {
  Trace& trace = device_.trace();
  endpoint_.take_room_waits([&](uint16_t slot, uint64_t begin_ns, uint64_t end_ns) {
    trace.span(slot, Trace::Kind::kRoom, begin_ns, end_ns, "room in the ring");
  });
  if (message.seq) trace.span(message.slot, Trace::Kind::kCall, began_ns, now_ns(), message.info->name);
  const uint64_t steps = endpoint_.steps();
  if (traced_times_ != trace.times()) {  // the step under way began before anybody looked
    traced_times_ = trace.times();
    traced_steps_ = steps;
    step_began_ns_ = 0;
  }
  if (steps == traced_steps_) return;
  if (step_began_ns_) trace.span(0, Trace::Kind::kStep, step_began_ns_, began_ns, "step");
  traced_steps_ = steps;
  step_began_ns_ = began_ns;
}

void Connection::comm_steps_of(const uint8_t* ops, size_t bytes, std::vector<CommStep>* steps) {
  for (size_t at = 0; at + sizeof(CommOp) <= bytes; at += sizeof(CommOp)) {
    CommOp op;
    std::memcpy(&op, ops + at, sizeof op);
    const CommObject* object = state_.comms().find(VHandle{op.comm});
    if (!object) continue;  // its handler refuses it
    CountKey key{object->key, -1, -1, false};
    const auto me = static_cast<int32_t>(object->rank);
    if (op.kind_of() == CommKind::kSend) key = {object->key, me, op.peer, false};
    if (op.kind_of() == CommKind::kRecv) key = {object->key, op.peer, me, true};
    steps->push_back({key, object->ranks, object->rank, false});
  }
}

// What a message adds to the counts of the agreement. A graph's launch adds all of its operations.
std::vector<CommStep> Connection::comm_steps(const Message& m) {
  std::vector<CommStep> steps;
  switch (static_cast<wire::Opcode>(m.info->opcode)) {
    case wire::Opcode::COMM_INIT: {
      const auto& r = m.as<wire::COMM_INIT_req>();
      steps.push_back({{{r.key_low, r.key_high}, -1, -1, false}, r.ranks, r.rank, true});
      break;
    }
    case wire::Opcode::COMM_GROUP: comm_steps_of(m.bulk, m.bulk_bytes, &steps); break;
    case wire::Opcode::GRAPH_LAUNCH:
      if (const StoredGraph* graph = state_.graphs().find(m.as<wire::GRAPH_LAUNCH_req>().graph);
          graph && graph->communicates)
        for (const GraphStep& step : graph->steps)
          if (step.info->communicates) comm_steps_of(step.bulk.get(), step.bulk_bytes, &steps);
      break;
    default: break;
  }
  return steps;
}

// -- for handlers ---------------------------------------------------------------------------------------------------

void Connection::reply(const Message& message, int32_t status, const void* data, size_t bytes) {
  answered_ = true;
  if (message.seq == 0) {
    if (state_.replaying().on) state_.replaying().status = status;
    return;
  }
  endpoint_.answer(message, status, data, bytes);
}

void Connection::fail(const Message& message, int32_t code) {
  DP_LOG(kDebug, kConnection, number(), "%s fails late with %d", message.info->name, code);
  if (message.seq || state_.replaying().on)
    return reply(message, code);  // a thread's late error is the job's, not a replay's
  endpoint_.late_error(message.slot, code);
}

void Connection::fail(const Message& message, const Status& why) {
  DP_LOG(kWarn, kDevice, number(), "%s: %s", message.info->name, why.text().c_str());
  if (message.seq) return reply(message, why.code(), why.text().c_str(), why.text().size() + 1);
  fail(message, why.code());
}

void Connection::refuse(const Message& message, VHandle stream, int32_t code, uint32_t chunk_tag) {
  fail(message, code);
  // Also a command on a stream that does not exist completes, or somebody would wait for it. Where its index now
  // belongs to another stream, it completes in that one's order.
  if (const hal::QueueRef* queue = device_.queue_at(stream.index()))
    return device_.nop(*queue, {message.end, chunk_tag});
  if (chunk_tag) endpoint_.lifeline().release_chunk(chunk_tag - 1);
  if (stream.index() < kStreams) endpoint_.lifeline().complete(stream.index(), message.end);
}

void Connection::lost_memory(uint64_t bytes, const Status& why) {
  const std::string text = "the GPU has no memory left behind " + std::to_string(bytes) +
                           " bytes that were promised to the process; its kernels do not run any more (" +
                           std::string(why.text()) + ")";
  on_fault(why.code(), text.c_str());
  device_.restore_fault(why.code());
}

void Connection::poison(const char* text) {
  if (poisoned_) return;
  poisoned_ = true;
  DP_LOG(kError, kConnection, number(), "pid=%u poisoned: %s", peer_.pid, text);
  endpoint_.lifeline().fault(kUnknown, text);
  endpoint_.lifeline().end(ServerState::kPoisoned);
  // What waits in streams completes unexecuted: nobody will answer a host function any more.
  if (device_.is_open()) device_.restore_fault(kUnknown);
  host_functions_.look_again();
}

std::string Connection::undumpable() const {
  const std::string who = "client " + std::to_string(number()) + " (pid " + std::to_string(peer_.pid) + "): ";
  if (faulted() && !device_.caps().reads_after_fault)
    return who + "its GPU context has failed with error " + std::to_string(endpoint_.lifeline().fault_code()) +
           ", and the driver reads no memory of a failed context; that process must end before a checkpoint";
  const std::string why = state_.obstacles().text();
  return why.empty() ? why : who + why;
}

// -- hal::SpaceOwner ------------------------------------------------------------------------------------------------

void Connection::on_thread_start() noexcept { prepare_thread_for_crash(); }

void Connection::on_complete(uint32_t queue_index, uint64_t position, uint32_t tag) noexcept {
  if (tag & kMetaTag)
    communicators_.meta_done(tag & ~kMetaTag);
  else if (tag)
    endpoint_.lifeline().release_chunk(tag - 1);
  device_.trace().complete(queue_index, position);
  endpoint_.lifeline().complete(queue_index, position);
}

void Connection::on_fault(int32_t result, const char* text) noexcept {
  DP_LOG(kWarn, kLaunch, number(), "pid=%u execution fault %d: %s", peer_.pid, result, text);
  endpoint_.lifeline().fault(result, text);
  // The client posts nothing more, so no host function will be said to be done: those who wait for one go on.
  host_functions_.look_again();
}

void Connection::on_refused(uint32_t caller, int32_t result, const char* text) noexcept {
  DP_LOG(kWarn, kLaunch, number(), "pid=%u the device refused a command: %s", peer_.pid, text);
  if (caller < kReplySlots) endpoint_.late_error(caller, result);
}

bool Connection::range_live(uint64_t addr, uint64_t bytes, uint64_t position, bool on_submitter) noexcept {
  return memory_.live(addr, bytes, position, !on_submitter);
}

void Connection::host_function(uint64_t token) noexcept {
  auto ended = [this] { return gate_.stopping() || faulted(); };
  if (endpoint_.post_host_function(token, ended)) host_functions_.wait(token, ended);
}

}  // namespace devproxy::server
