// SPDX-License-Identifier: Apache-2.0
// One client process on this server: its endpoint, its gate, its state and memory, the door to its device, and the
// thread that takes its messages from the one to the other.
//
// Who owns what
//   dispatch thread   the consuming side of the ring, the door, the client's state and memory; all handlers run on it
//   device threads    call the SpaceOwner methods: they touch the endpoint, ClientMemory::live(), HostFunctions and
//                     Communicators::meta_done() only
//   server thread     makes it, asks its gate, joins it, reads the counters; while parked() it may read everything
// Locks: those of the parts are leaves; none is taken under another.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/csrc/server/client_memory.h"
#include "devproxy/csrc/server/client_state.h"
#include "devproxy/csrc/server/communicators.h"
#include "devproxy/csrc/server/counters.h"
#include "devproxy/csrc/server/device_door.h"
#include "devproxy/csrc/server/endpoint.h"
#include "devproxy/csrc/server/host_functions.h"
#include "devproxy/csrc/server/image_store.h"
#include "devproxy/csrc/server/ledger.h"
#include "devproxy/csrc/server/memory_turns.h"
#include "devproxy/csrc/server/message.h"
#include "devproxy/csrc/server/peer_link.h"
#include "devproxy/csrc/server/shared_gate.h"
#include "devproxy/csrc/server/slot_table.h"
#include "devproxy/csrc/server/windows.h"
#include "devproxy/csrc/wire/attach.h"
#include "devproxy/hal/hal.h"

namespace devproxy::server {

// What all connections of a server share.
struct ServerParts {
  std::string job_dir;
  uint32_t tree = 0;          // of the job's process trees, this one
  uint32_t gpu = 0;           // the tree's ordinal
  uint32_t physical_gpu = 0;  // of the machine
  bool other_gpu = false;     // a restore may be of another kind or model of GPU
  bool shared = false;        // other GPUs of the job are on the physical one
  bool metas = false;         // the job's collectives carry metas (meta_barrier.h)
  hal::Device* device = nullptr;
  hal::Properties properties;  // as the job sees them: with its GPU's identity, wherever it is
  LedgerShare* ledger = nullptr;
  MemoryTurns* turns = nullptr;  // of the job's GPUs on the physical one; nullptr: there is one only
  SlotTable* slots = nullptr;
  ImageStore images;
  LiveBytes live;
  std::function<void()> wake;  // the server thread: a connection has parked, or finished as its last act
};

struct ClientRecord;
struct LogRecord;
struct SharedClientRecord;
class StagedReader;

// What the client answers without a message.
void fill_facts(const hal::Properties& from, DeviceProps* props);

class Connection final : public hal::SpaceOwner {
 public:
  struct Peer {
    uint64_t number = 0;  // of the connection, from 1
    uint32_t pid = 0;
    uint32_t wanted_slot = SlotTable::kAny;
    bool framework = false;  // AttachKind::kFramework
  };
  // Makes files, mappings and the space; the answer for the client is in `reply` either way.
  static std::unique_ptr<Connection> make(ServerParts& parts, const Peer& peer, AttachReply* reply);
  // The same from a dump in `dir`. shared: nullptr for a handover. An empty pointer: the client has gone meanwhile. Its
  // start() parks at once.
  static StatusOr<std::unique_ptr<Connection>> restore(ServerParts& parts, const ClientRecord& client,
                                                       const SharedClientRecord* shared, const std::string& dir);
  ~Connection() override;

  void start();
  // Any thread. The dispatch thread ends the streams, gives everything back, and wakes the server thread.
  void request_stop();
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  void join();
  // -- the cut; server thread. The argument is at the top of connection.cc.
  // Stops the consumption of the ring at the first boundary where that is possible; from until_us (now_us()) on at any
  // such boundary, before that only at least live bytes.
  void request_cut(uint64_t until_us);
  Trace& trace() { return device_.trace(); }  // any thread
  // What a profile in the job has recorded and not fetched yet. Dispatch thread.
  struct Profile {
    std::vector<Trace::Event> events;
    std::string names;
    uint64_t lost = 0;
  };
  Profile& profile() { return profile_; }
  // From now on it rests where it has the least memory, as long as it owes nothing (Communicators::learn()).
  void aim(bool on);
  bool rests() const {
    return gate_.ask([](const Gate& g) { return g.rests(); });
  }
  // What it owes may be another by now.
  void look_again() { gate_.look_again(); }
  void resume();
  // Says to the client that it is held, or not any more (ControlPage::held). A cut and its end say so by themselves.
  void say_held(bool on) { endpoint_.lifeline().hold(on); }
  // Nothing of a communicator begins from here on, also while it is parked, until let_go(). False: something is about to;
  // ask again. A cut takes what has not begun as it is. Any thread.
  bool withhold();
  // Not while it is parked. What resume() goes on with lets go by itself.
  void let_go();
  bool parked() const { return gate_.phase() == Gate::Phase::kParked; }
  // Moves while the connection comes nearer to parking.
  uint64_t cut_progress() const {
    return counters_.calls.load(std::memory_order_relaxed) +
           gate_.ask([](const Gate& g) { return g.drain_progress(); });
  }
  struct CutFacts {
    uint64_t live_bytes = 0, trough_bytes = 0, waited_us = 0, drained_us = 0;
  };
  CutFacts cut_facts() const;  // Precondition: parked()
  bool faulted() const { return endpoint_.lifeline().faulted(); }
  // Why this client cannot be dumped now; empty where it can. Any thread.
  std::string undumpable() const;
  // Into the record, of which nothing is filled yet. Precondition: parked().
  Status save(ClientRecord* client);
  // Takes its place in the crash handler's list and the slot table, again or for the first time.
  void own();

  const Peer& peer() const { return peer_; }
  uint32_t slot() const { return slot_; }
  const Counters& counters() const { return counters_; }
  Endpoint& endpoint() { return endpoint_; }
  const Endpoint& endpoint() const { return endpoint_; }

  // -- for handlers; dispatch thread only -----------------------------------------------------------------------------

  DeviceDoor& device() { return device_; }
  ServerParts& parts() { return parts_; }
  Counters& counting() { return counters_; }
  uint64_t number() const { return peer_.number; }
  // Answers the message. bytes: of the reply struct and its tail.
  void reply(const Message& message, int32_t status, const void* data = nullptr, size_t bytes = 0);
  // A failure of this message that is not an execution fault.
  void fail(const Message& message, int32_t code);
  // The same where the device says why: a caller that waits gets the text, and says it where the code alone would not
  // do.
  void fail(const Message& message, const Status& why);
  // The same for a command: it completes in its stream, unexecuted. chunk_tag: as in hal::Ticket.
  void refuse(const Message& message, VHandle stream, int32_t code, uint32_t chunk_tag = 0);
  // Lets go of what was freed, as far as nothing can touch it any more. wanted: also behind commands that wait for another
  // rank, which takes a look at all of them. False: there was nothing.
  bool forget_freed(bool wanted);
  // Memory that the client was promised is not there: what it has posted cannot run. As behind an execution fault: every
  // call says so, and what is not under way on the device completes unexecuted.
  void lost_memory(uint64_t bytes, const Status& why);
  // The client breaks the protocol: it is told, and nothing of it is looked at any more.
  void poison(const char* text);
  bool poisoned() const { return poisoned_; }

  ClientState& state() { return state_; }
  ClientMemory& memory() { return memory_; }
  Windows& windows() { return windows_; }
  HostFunctions& host_functions() { return host_functions_; }
  // What a question for credit may be given beyond what it needs; and how much its client may keep unused.
  uint64_t credit_most() const { return credit_most_; }
  // Ranks of the job share the GPU; until one of them has given something back, or a moment.
  bool shares() const { return seat_ != nullptr; }
  void wait_for_others() { parts_.turns->wait(); }
  // What it was promised of the GPU. Where ranks take turns, it asks again for what it does not use.
  uint64_t promised_bytes() const { return seat_ ? memory_.taken_bytes() : memory_.credit_bytes(); }
  uint64_t spare_bytes(uint64_t free_bytes) {
    return seat_ ? parts_.turns->spare_bytes(seat_, memory_.room_bytes(free_bytes)) : free_bytes;
  }
  // Also the server thread.
  Communicators& communicators() { return communicators_; }
  CommReport comm_report() {
    return communicators_.report(uint64_t{parts_.tree} << 48 | uint64_t{parts_.gpu} << 32 | number(), device_);
  }
  // -- hal::SpaceOwner; any device thread -----------------------------------------------------------------------------

  void on_thread_start() noexcept override;
  void on_complete(uint32_t queue_index, uint64_t position, uint32_t tag) noexcept override;
  void on_fault(int32_t result, const char* text) noexcept override;
  void on_refused(uint32_t caller, int32_t result, const char* text) noexcept override;
  bool range_live(uint64_t addr, uint64_t bytes, uint64_t position, bool on_submitter) noexcept override;
  void host_function(uint64_t token) noexcept override;
  bool take_memory(uint64_t bytes) noexcept override {
    if (parts_.ledger->grow(bytes, bytes)) return true;
    endpoint_.lifeline().want_credit();
    return false;
  }
  void give_memory(uint64_t bytes) noexcept override { parts_.ledger->give(bytes); }
  hal::SpacePlace place() noexcept override { return {parts_.gpu, slot_, parts_.tree}; }
  std::string job_folder() override { return parts_.job_dir; }
  StatusOr<hal::PeerLink> reach_peer(const hal::SpacePlace& peer) override {
    return server::reach_peer(parts_.job_dir, peer);
  }

 private:
  Connection(ServerParts& parts, const Peer& peer, uint32_t slot);
  Status open_memory();
  void fill_reply(AttachReply* reply) const;

  // The dispatch thread.
  void run();
  void dispatch();
  bool attend();
  Gate::Boundary boundary();
  Gate::Step drain();
  void throttle();
  enum class Taken : uint8_t { kYes, kHeld, kHeldForMemory, kPoisoned };
  Taken consume(uint32_t record_bytes);
  bool changes_credit(const Message& message) const;
  bool may_take_memory(const Message& message);
  void take_seat();
  void note_memory();
  void look_around();
  void trace_message(const Message& message, uint64_t began_ns);
  std::vector<CommStep> comm_steps(const Message& message);
  void comm_steps_of(const uint8_t* ops, size_t bytes, std::vector<CommStep>* steps);
  void tear_down();

  // restore.cc
  Status restore_memory(const ClientRecord& client);
  Status restore_objects(const ClientRecord& client);
  Status restore_contents(const ClientRecord& client, const std::string& dir, bool use_up);
  Status restore_arrays(const ClientRecord& client, const StagedReader& file);
  Status replay_entry(const LogRecord& entry);
  Status same_value(const LogRecord& entry);

  ServerParts& parts_;
  const Peer peer_;
  const uint32_t slot_;
  Endpoint endpoint_;
  SharedGate gate_;
  Counters counters_;
  MemoryTurns::Seat* seat_ = nullptr;
  bool frugal_ = false;                // its device keeps nothing for later
  uint64_t credit_most_ = UINT64_MAX;  // that the next question for credit may be given
  std::thread thread_;
  std::atomic<bool> finished_{false};
  std::atomic<bool> withholds_{false};
  // Resumed: the dispatch thread lets go when the pinned memory of others is there again.
  std::atomic<bool> goes_on_{false};
  std::atomic<bool> stop_requested_{false};

  // dispatch thread only; while the client is parked, the server thread
  DeviceDoor device_;
  ClientState state_;
  ClientMemory memory_;
  Windows windows_;
  HostFunctions host_functions_;
  Communicators communicators_;
  bool poisoned_ = false;
  bool answered_ = false;  // the message being handled has its reply
  uint32_t traced_times_ = 0;
  uint64_t traced_steps_ = 0, step_began_ns_ = 0;
  Profile profile_;
};

}  // namespace devproxy::server
