// One client process on this server: its segment, its address range, its objects, and the thread that dispatches.
//
// Who owns what
//   dispatch thread   everything below "dispatch thread only"; the consuming side of the ring; all calls into the Space
//   device threads    call the SpaceOwner methods: they touch the lifeline, mirrors_mu_ and host_mu_ only
//   server thread     makes it, asks it to stop, joins it, reads the counters; while parked() it may read everything
// Locks: mirrors_mu_, host_mu_ and park_mu_ are leaves; none is taken under another.
//
// The mirrors are written by the dispatch thread under mirrors_mu_ and read by it without (nobody else writes); device
// threads read them under a shared lock. So the common case, a kernel that runs on the dispatch thread, takes no lock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/csrc/base/json.h"
#include "devproxy/csrc/server/handle_table.h"
#include "devproxy/csrc/server/image_store.h"
#include "devproxy/csrc/server/ledger.h"
#include "devproxy/csrc/server/lifeline.h"
#include "devproxy/csrc/server/live_trace.h"
#include "devproxy/csrc/server/memory_mirror.h"
#include "devproxy/csrc/server/message.h"
#include "devproxy/csrc/server/replay_log.h"
#include "devproxy/csrc/server/slot_table.h"
#include "devproxy/csrc/server/stored_graph.h"
#include "devproxy/csrc/transport/segment_view.h"
#include "devproxy/csrc/wire/attach.h"
#include "devproxy/hal/hal.h"

namespace devproxy::server {

// Written by one thread each (busy_us excepted), read by the server thread.
struct Counters {
  std::atomic<uint64_t> calls{0}, launches{0}, h2d_bytes{0}, d2h_bytes{0}, d2d_bytes{0}, memset_bytes{0}, allocs{0},
      frees{0}, busy_us{0}, live_bytes{0}, peak_bytes{0};
  std::atomic<uint64_t> modules{0}, streams{0}, events{0}, pinned_bytes{0};  // now
  std::atomic<uint64_t> machine_code{0};  // of the modules: those that only this kind of device runs
  std::atomic<uint64_t> trough_bytes{UINT64_MAX}, period_us{0};  // as LiveTrace says
  static void add(std::atomic<uint64_t>& counter, uint64_t n) {  // one writer: no locked instruction
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
};

// What all connections of a server share.
struct ServerParts {
  std::string job_dir;
  uint32_t gpu = 0;           // the job's ordinal
  uint32_t physical_gpu = 0;  // of the machine
  bool other_gpu = false;     // a restore may be of another kind or model of GPU
  hal::Device* device = nullptr;
  Ledger* ledger = nullptr;
  SlotTable* slots = nullptr;
  ImageStore images;
  std::atomic<uint64_t> live_bytes{0}, peak_bytes{0};  // of all clients
  std::function<void()> wake;  // the server thread: a connection has parked, or finished as its last act
};

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
  // The same from a dump in `dir`. client: the client's object in the state file.
  // shared: the client's object in the shared file, nullptr for a handover. An empty pointer: the client has gone
  // meanwhile. Its start() parks at once.
  static StatusOr<std::unique_ptr<Connection>> restore(ServerParts& parts, const Json& client, const Json* shared,
                                                       const std::string& dir);
  ~Connection() override;

  void start();
  // Any thread. The dispatch thread ends the streams, gives everything back, and calls connection_finished.
  void request_stop();
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  void join();
  // Any thread, any time: for a connection whose kernel does not end.
  void remove_files() const;
  // The read end of the link: polls as hung up when the client is gone. Open as long as the connection lives.
  int link() const { return link_; }

  // -- the cut; server thread. The argument is at the top of dispatch.cc.
  // Stops the consumption of the ring at the first boundary where that is possible; from until_us (now_us()) on at any
  // such boundary, before that only at least live bytes.
  void request_cut(uint64_t until_us);
  void resume();
  bool parked() const {
    return cut_number_ != 0 && parked_number_.load(std::memory_order_acquire) == cut_number_ && !resumed_;
  }
  // Moves while the connection comes nearer to parking.
  uint64_t cut_progress() const {
    return counters_.calls.load(std::memory_order_relaxed) + drained_.load(std::memory_order_relaxed);
  }
  struct CutFacts {
    uint64_t live_bytes = 0, trough_bytes = 0, waited_us = 0, drained_us = 0;
  };
  const CutFacts& cut_facts() const { return cut_facts_; }  // Precondition: parked()
  size_t host_functions_out();
  bool faulted() const { return lifeline_->faulted(); }
  // Why this client cannot be dumped now; empty where it can. Any thread.
  std::string undumpable();
  // The client's object of the state file. Precondition: parked().
  StatusOr<std::string> state_json();
  // Takes its place in the crash handler's list and the slot table, again or for the first time.
  void own();

  const Peer& peer() const { return peer_; }
  uint32_t slot() const { return slot_; }
  const Counters& counters() const { return counters_; }
  uint64_t wakes() const { return view_.control()->wakes.load(std::memory_order_relaxed); }
  uint64_t steps() const { return view_.control()->steps.load(std::memory_order_relaxed); }
  const std::string& segment_path() const { return segment_path_; }
  const std::string& pinned_path() const { return pinned_path_; }
  Lifeline& lifeline() { return *lifeline_; }

  // -- for handlers; dispatch thread only -----------------------------------------------------------------------------

  hal::Space& space() { return *space_; }
  ServerParts& parts() { return parts_; }
  Counters& counting() { return counters_; }
  uint64_t number() const { return peer_.number; }
  uint64_t position() const { return position_; }
  uint64_t device_begin() const { return range_base(slot_); }
  uint64_t globals_begin() const { return range_base(slot_) + kDeviceBytes - kGlobalsBytes; }
  uint64_t pinned_begin() const { return range_base(slot_) + kDeviceBytes; }
  const SegmentView& view() const { return view_; }

  // Answers the message. bytes: of the reply struct and its tail.
  void reply(const Message& message, int32_t status, const void* data = nullptr, size_t bytes = 0);
  // A failure of this message that is not an execution fault.
  void fail(const Message& message, int32_t code);
  // The same where the device says why: a caller that waits gets the text, and says it where the code alone would not
  // do.
  void fail(const Message& message, const Status& why);
  // The same for a command: it completes in its stream, unexecuted. chunk_tag: as in hal::Ticket.
  void refuse(const Message& message, VHandle stream, int32_t code, uint32_t chunk_tag = 0);
  // The client breaks the protocol: it is told, and nothing of it is looked at any more.
  void poison(const char* text);
  bool poisoned() const { return poisoned_; }
  // The message is of a replay log: what it names may be gone by now, and its caller is not there.
  bool replaying() const { return replaying_; }

  // nullptr where the stream does not exist.
  hal::QueueRef* queue_of(VHandle stream);
  bool create_stream(VHandle stream, uint32_t flags, int32_t priority);
  bool destroy_stream(VHandle stream);

  struct FunctionObject {
    hal::FunctionRef function;
    VHandle module;
    uint32_t max_threads = 0;
    uint32_t params_bytes = 0;  // least length of a parameter block
  };
  HandleTable<hal::EventRef, HandleKind::kEvent> events;
  HandleTable<hal::ModuleRef, HandleKind::kModule> modules;
  HandleTable<FunctionObject, HandleKind::kFunction> functions;
  struct ArrayObject {
    hal::ArrayRef array;
    ArrayShape shape;
    ArrayExtent extent;
  };
  // What a texture or surface object shows: an array, or linear memory.
  struct TextureObject {
    hal::TextureRef texture;
    VHandle array;
    uint64_t addr = 0, bytes = 0;
  };
  HandleTable<StoredGraph, HandleKind::kGraph> graphs;
  HandleTable<ArrayObject, HandleKind::kArray> arrays;
  HandleTable<TextureObject, HandleKind::kTexture> textures;
  ReplayLog replay;
  ImageUpload upload;
  ImageStore::Ref uploaded;  // whole, and not loaded yet

  MemoryMirror device_mirror, pinned_mirror;  // pinned: of all windows
  // Another window of the same process, as the server of `gpu` made it for its connection `number`.
  struct Window {
    uint64_t number = 0;
    uint32_t gpu = 0, slot = 0;
    bool mapped = false;
    uint64_t begin() const { return range_base(slot) + kDeviceBytes; }
    bool holds(uint64_t addr, uint64_t bytes) const {
      return addr >= begin() && addr - begin() < kPinnedBytes && bytes <= kPinnedBytes - (addr - begin());
    }
  };
  Status open_window(Window window);
  // Is it a part of this client's window on this server, or of another that is open?
  bool in_own_window(uint64_t addr, uint64_t bytes) const { return Window{0, 0, slot_}.holds(addr, bytes); }
  bool in_a_window(uint64_t addr, uint64_t bytes) const;
  // Changes a mirror: the lock that device threads read under.
  [[nodiscard]] std::unique_lock<std::shared_mutex> change_mirrors() { return std::unique_lock(mirrors_mu_); }
  uint64_t credit_bytes = 0;   // granted to the client's allocator
  uint64_t client_bytes = 0;   // of that, allocated
  uint64_t globals_bytes = 0;  // of modules, taken from the ledger beside the credit
  uint64_t arrays_bytes = 0;   // of arrays, likewise
  void count_memory(int64_t change_bytes);
  void trace_memory();  // after an allocation or release of the client's
  // Variables of modules that lie where the device put them, by address: live memory outside of the range. given: the
  // job was told the address, so it must be the same after a restore.
  struct VariableObject {
    uint64_t bytes = 0;
    VHandle module;
    std::string name;
    bool given = false;
  };
  std::map<uint64_t, VariableObject> variables;
  bool in_variable(uint64_t addr, uint64_t bytes) const;
  // Is [addr, addr + bytes) device memory that is live for a command at `position`?
  bool in_device(uint64_t addr, uint64_t bytes, uint64_t position) const {
    return device_mirror.contains(addr, bytes, position) || in_variable(addr, bytes);
  }
  // Device memory goes: an object that shows some of it cannot be made again.
  void texture_memory_gone(uint64_t addr, uint64_t bytes);
  std::vector<uint8_t> link_image;      // linked last, until it was fetched
  std::map<uint32_t, uint64_t> limits;  // those that the job set
  // What kernels printed and nobody has asked for yet.
  std::string output_text, error_text;
  bool any_prints = false;  // some module's kernels do, or may
  void gather_output() { space_->take_output(&output_text, &error_text); }
  std::optional<uint64_t> replayed_value;                  // during a replay: the number of the next object
  std::vector<uint64_t> replayed_globals;                  // during a replay: where the next globals lie, in order
  std::vector<uint8_t> take_bulk(const Message& message);  // for keeping; may be called once per message

  void set_undumpable(VHandle handle, std::string why);  // an empty text: it can be again
  bool add_host_function(uint64_t token);                // false: it is already there
  bool finish_host_function(uint64_t token);             // false: it is not

  // -- hal::SpaceOwner; any device thread -----------------------------------------------------------------------------

  void on_thread_start() noexcept override;
  void on_complete(uint32_t queue_index, uint64_t position, uint32_t tag) noexcept override;
  void on_fault(int32_t result, const char* text) noexcept override;
  void on_refused(uint32_t caller, int32_t result, const char* text) noexcept override;
  bool range_live(uint64_t addr, uint64_t bytes, uint64_t position, bool on_submitter) noexcept override;
  void host_function(uint64_t token) noexcept override;
  bool take_memory(uint64_t bytes) noexcept override { return parts_.ledger->take(bytes, bytes).has_value(); }
  void give_memory(uint64_t bytes) noexcept override { parts_.ledger->give(bytes); }

 private:
  Connection(ServerParts& parts, const Peer& peer);
  void name_files();
  Status make_files();
  Status open_files();
  Status open_memory();
  Status map_window(const Window& window) const;
  void end_host_functions();
  void fill_reply(AttachReply* reply) const;

  // dispatch.cc
  void run();
  void dispatch();
  bool wait_for_work();
  void throttle();
  bool cut_ready();
  void park();
  bool open_restored_windows();
  std::string told_json() const;
  Status check_told(const Json& told) const;
  Status restore_memory(const Json& client);
  Status restore_objects(const Json& client);
  Status restore_contents(const Json& client, const std::string& path, bool use_up);
  Status place_variable(const Json& saved, uint64_t* addr);
  Status replay_entry(const Json& entry);
  Status same_value(const Json& entry);
  Status restore_arrays(const Json& client, int fd);

  bool consume(uint32_t record_bytes);
  bool fetch_bulk(Message& message, const uint8_t* inline_bytes, uint32_t inline_length);
  void tear_down();

  ServerParts& parts_;
  const Peer peer_;
  uint32_t slot_ = SlotTable::kAny;
  std::string segment_path_, pinned_path_, link_path_;
  int link_ = -1;
  bool keep_files_ = false;  // they and the slot belong to a successor or predecessor: our end leaves them
  bool pinned_mapped_ = false;
  SegmentView view_;
  std::unique_ptr<Lifeline> lifeline_;
  Counters counters_;

  std::thread thread_;
  static constexpr uint32_t kStop = 1, kCut = 2;
  std::atomic<uint32_t> attention_{0};  // what the dispatch thread shall look at: one load per message
  std::atomic<bool> finished_{false};
  bool stopping() const { return attention_.load(std::memory_order_relaxed) & kStop; }
  void call_dispatch_thread();

  std::mutex park_mu_;
  std::condition_variable park_wake_;
  uint64_t cut_number_ = 0;  // server thread writes, under park_mu_
  bool resumed_ = false;     // server thread only
  std::atomic<uint64_t> cut_until_us_{0}, cut_asked_us_{0};
  std::atomic<uint64_t> parked_number_{0}, drained_{0};
  CutFacts cut_facts_;  // dispatch thread writes, before parked_number_

  // dispatch thread only
  std::unique_ptr<hal::Space> space_;
  struct Stream {
    VHandle handle;
    hal::QueueRef queue;
  };
  std::vector<Stream> streams_{kStreams};
  std::vector<Window> windows_;
  uint64_t position_ = 0;  // our own copy of the ring's head
  bool poisoned_ = false;
  LiveTrace trace_;
  bool replaying_ = false;
  int32_t replay_status_ = kOk;
  bool answered_ = false;     // the message being handled has its reply
  bool woke_caller_ = false;  // and its caller slept
  alignas(64) uint8_t inline_[kMaxInlineBytes];
  std::vector<uint8_t> gathered_;  // bulk that came in chunks

  std::shared_mutex mirrors_mu_;
  std::mutex undumpable_mu_;  // a leaf
  std::map<VHandle, std::string, bool (*)(const VHandle&, const VHandle&)> undumpable_{
      [](const VHandle& a, const VHandle& b) { return a.value < b.value; }};
  std::mutex host_mu_;
  std::condition_variable host_wake_;
  std::set<uint64_t> host_functions_;  // posted to the stream, not done yet
};

}  // namespace devproxy::server
