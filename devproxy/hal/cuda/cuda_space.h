// SPDX-License-Identifier: Apache-2.0
// One client process on a real GPU: its context, its memory, its queues.
//
// Queues are driver streams: kLegacy is CU_STREAM_LEGACY of the space's own context, kBlocking a stream with
// CU_STREAM_DEFAULT, kNonBlocking one with CU_STREAM_NON_BLOCKING. Their order is the driver's own, so it is CUDA's.
// Where several of the job's GPUs share this one they are in one context. With one legacy stream a rank's work would wait
// for another rank's, and that one for a collective with a third GPU: a circle that the job does not have. So there the legacy
// queue is a stream with CU_STREAM_DEFAULT too, and what the legacy stream's rule says is said by events between it and
// the blocking queues of its space (follow_other_side()).
//
// Completion. The driver tells nobody that a command has finished; three ways to find out were weighed:
//   - a host function behind each command: some 10 us of host time each, and it holds the stream up meanwhile;
//   - a thread in cuEventSynchronize: it can wait for one queue only, and if that queue waits for something which the
//     client does when it sees another queue complete, nobody ever tells it;
//   - marks, chosen: the stream itself writes a number into page-locked host memory (cuStreamWriteValue64), and one
//     thread of the space, the watcher, looks at one word per busy queue. Where 64-bit memory operations are missing
//     (attribute CAN_USE_64_BIT_STREAM_MEM_OPS), a mark is a pooled event and a look is cuEventQuery.
// A mark costs the stream, the driver's lock and the watcher's spinning, so not every command gets one. It must never come
// so late that somebody waits for a command behind it, so a queue is marked
//   - when the client says that it waits for the queue (awaited());
//   - after each event record, before each host function, each wait for an event and each group of collectives (the
//     client, or another rank's, may be asked to act before the stream goes on), and behind a host function (commands may be held until it has ended);
//   - when commands are held, and when the queue is destroyed;
//   - before a legacy command, if a blocking queue is unmarked, and the reverse: a mark is itself a command, and one
//     that came later would wait for the other side, as the legacy stream's rule says;
//   - after a copy to the host, whose result somebody will read;
//   - after every mark_every commands;
//   - by the watcher, where no command has come in for settle_us: for whoever looks without waiting. An executor's
//     operator takes 5 to 15 us of the dispatch thread, so a shorter time marks nearly every command of a launch-bound job
//     (it did: docs/gpu-results.md).
// The watcher spins only while a queue is awaited and has not got there, or commands are held. Otherwise it naps: its spinning slows the dispatch
// thread down where the two share a core, and nobody gains by it.
//
// Executors (hal/host_module). A launch of an executor's function calls the framework, which submits kernels of its own
// to the queue's stream and may wait for that stream. It is called without mu_, by whoever hands the command on: the
// dispatch thread, or, while commands are held, the watcher. Rules, and why they suffice:
//   - one at a time: the dispatch thread submits, and holds its commands back while any is held or the watcher is
//     inside a call (issuing_held_). So the order of submission is the ring's.
//   - none is begun while a host function is the driver's: a call may wait for the stream, and whatever precedes it
//     there is then work that ends without the client. Such a launch is held, and all that comes behind it.
//   - its Pending is kIssuing meanwhile: no mark covers it, nobody takes it out of the queue, and a fault that is told
//     during the call leaves it to the caller, who drops it.
//
// Collectives (cuda_comm.h). NCCL may put a group into its stream late, on a thread of its own: until it has, no command
// that must come behind it is the driver's. So a group that NCCL is busy with stays held, and so does what depends on it:
// its queue, what waits for an event that is recorded there, the other side of the legacy stream's rule. Everything else
// goes on; a group may wait for another rank, and that one for something else of this space. Groups keep their order among
// one another, as calls of one thread natively do: NCCL wants the same order on all GPUs. But for sends and receives: NCCL
// connects a pair at its first one, which may last until the other rank comes there, and whose other groups may be what it
// does before. Nor does a group of ranks that share a GPU (shared_comm.h) keep others: it waits for those ranks, and NCCL has
// nothing of it. Executors keep their order, since they draw random numbers in it.
//
// An executor that waits for its stream waits for the collectives in it, on the dispatch thread. If a member of those is
// gone, the job's abort lies behind in the ring, and nobody reads it. The end of the client does (leave_comms()).
//
// Splicing (cuda_pages.h; off unless DEVPROXY_SPLICING says otherwise). Launches of executors go through the splicer, where one
// may wait for other ranks; what else writes device memory asks it first. It is called without mu_, since it takes the mu_ of
// spaces whose pages it moves, and then waits for their work. So no host function of the client's is begun meanwhile, and
// no command that it may be asked about while one is the driver's: only the client could end that.
//
// No submission blocks, but for those. The driver blocks the submitting thread when about a thousand commands are
// pending [open: the number]. If that was the dispatch thread while a host function waits for the client's answer,
// which the dispatch thread would have to read, nothing would ever move. So at most max_in_flight commands are the
// driver's; the others are held here, and the watcher hands them on: all in one order while room is missing
// (held_for_room_), else each when nothing that it depends on is held (behind_held()).
//
// Host memory. An asynchronous copy from memory that the driver does not know as page-locked is copied at the call, or
// blocks; either breaks D2H-then-H2D through one pinned buffer. So what is not registered goes through a page-locked
// slot of the queue, filled and emptied by host functions in stream order: right, and slow. A small copy from or to a
// chunk goes through a page-locked cell, without a host function: the chunk is the client's for this one copy, so its
// bytes can be taken at submission, or put there when the watcher sees the end.
//
// Who owns what
//   mu_        queues' contents, held_, host_ (slots and cells too), every submission to the driver, the fault flags
//   io_mu_     the transfer stream and its slot (arrays, alias)
//   lanes_mu_  which lanes are free (read, write); a lane is the thread's that took it
//   watcher    calls on_complete, and copies out of cells before; nobody else does. Alone it takes queues out of busy_, so
//              it may look at their words without mu_
//   driver's callback thread   runs jobs; touches owner_, stopping_, faulted_ and the job only
// Locks: of two spaces' io_mu_, the one at the lower address first; io_mu_ and mu_ are never held together; memory_ has
// a leaf of its own. A communicator's own lock comes behind mu_ or comms_mu_. No owner callback runs under a lock.
//
// Open on a device: whether host functions of different streams run side by side (a host function that waits for a
// staged copy of another stream would otherwise wait for ever), whether cuMemCreate, cuMemUnmap, cuModuleLoadDataEx,
// cuMemHostAlloc or the making and ending of arrays and objects wait for running work, and what a mark costs.
// docs/gpu-results.md has the list.
//
// Bodies: cuda_space.cc (beginning and end, queues), space_submit.cc, space_held.cc, space_comms.cc, space_watch.cc,
// space_events.cc, space_modules.cc, space_contents.cc.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "devproxy/hal/basic_space.h"
#include "devproxy/hal/cuda/cuda_array.h"
#include "devproxy/hal/cuda/cuda_comm.h"
#include "devproxy/hal/cuda/cuda_host.h"
#include "devproxy/hal/cuda/cuda_memory.h"
#include "devproxy/hal/cuda/cuda_module.h"
#include "devproxy/hal/hal.h"
#include "devproxy/hal/host_module/host_module.h"
#include "devproxy/hal/splice/splicer.h"

namespace devproxy::hal::cuda {

class CudaSpace final : public BasicSpace {
 public:
  static StatusOr<std::unique_ptr<Space>> open(const CudaConfig& device, std::shared_ptr<const Driver> driver,
                                               CUdevice number, const SpaceConfig& config, SpaceOwner& owner);
  CudaSpace(const CudaConfig& device, const SpaceConfig& config, SpaceOwner& owner, std::shared_ptr<Context> context);
  ~CudaSpace() override;

  Status commit(uint64_t addr, uint64_t bytes, bool stable) override;
  void release(uint64_t addr, uint64_t bytes) override;

  void reserve(uint64_t bytes) override { memory_->reserve(bytes); }
  void give_back() override { memory_->give_back(); }
  uint64_t mapped_bytes() override { return memory_->mapped_bytes(); }
  uint64_t room_bytes(uint64_t had) override { return memory_->room_bytes(had); }

  QueueRef create_queue(QueueKind kind, int32_t priority, uint32_t index) override;
  void destroy_queue(const QueueRef& queue) override;
  Status set_queue_attribute(const QueueRef& queue, Ticket ticket, const LaunchAttribute& attribute) override;
  Status reset_persisting_l2() override;
  void awaited(const QueueRef& queue) override;
  uint64_t oldest_pending() override;
  PendingUse pending_use() override;
  bool stuck() override { return stands_still(); }
  bool idle() const override { return pending_all_.load(std::memory_order_acquire) == 0; }
  uint32_t pending() const override { return pending_all_.load(std::memory_order_acquire); }

  void nop(const QueueRef& queue, Ticket ticket) override;
  void copy(const QueueRef& queue, Ticket ticket, const CopyArgs& args) override;
  void copy_array(const QueueRef& queue, Ticket ticket, const ArrayCopy& args) override;
  StatusOr<ArrayRef> create_array(const ArrayShape& shape) override;
  StatusOr<TextureRef> create_texture(const TextureArgs& args, const ArrayRef& array) override;
  void memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& args) override;
  void launch(const QueueRef& queue, Ticket ticket, const FunctionRef& function, const LaunchArgs& args) override;
  void host_function(const QueueRef& queue, Ticket ticket, uint64_t token) override;

  EventRef create_event(bool timed) override;
  void record(const QueueRef& queue, Ticket ticket, const EventRef& event) override;
  void wait(const QueueRef& queue, Ticket ticket, const EventRef& event) override;
  StatusOr<double> elapsed_ms(const EventRef& start, const EventRef& end) override;

  StatusOr<ModuleRef> load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) override;
  StatusOr<std::vector<std::string>> function_names(const ModuleRef& module) override;
  StatusOr<FunctionRef> get_function(const ModuleRef& module, const std::string& name, FunctionInfo* info) override;
  StatusOr<Global> get_global(const ModuleRef& module, const std::string& name) override;
  std::vector<Global> globals(const ModuleRef& module) override;
  StatusOr<std::vector<Variable>> variables(const ModuleRef& module) override;
  bool portable(const ModuleRef& module) override;
  bool prints(const ModuleRef& module) override;
  void take_output(std::string* out, std::string* err) override;
  void host_window(uint64_t addr, uint64_t bytes) override;
  void host_allocated(uint64_t addr, uint64_t bytes) override;
  StatusOr<uint64_t> host_device_address(uint64_t addr, uint64_t bytes) override;
  Status link(const std::vector<LinkOption>& options, const std::vector<LinkInput>& inputs, LinkOutput* out) override;
  Status tensor_map(const TensorMapArgs& args, uint8_t (&map)[kTensorMapBytes]) override;
  Status set_limit(uint32_t limit, uint64_t value) override;
  StatusOr<uint64_t> get_limit(uint32_t limit) override;
  Status set_attribute(const FunctionRef& function, uint32_t attribute, int32_t value) override;
  StatusOr<int64_t> occupancy(const FunctionRef& function, const OccupancyQuery& query) override;

  StatusOr<CommRef> create_comm(const CommConfig& config) override;
  void init_comm(const QueueRef& queue, Ticket ticket, const CommRef& comm) override;
  void communicate(const QueueRef& queue, Ticket ticket, std::vector<CommCall> group) override;
  void abort_comm(const CommRef& comm) override { static_cast<CudaComm&>(*comm).abort(); }
  bool comm_complete(const CommRef& comm) override { return static_cast<CudaComm&>(*comm).complete(); }
  CommState comm_state(const CommRef& comm, std::string* why) override {
    return static_cast<CudaComm&>(*comm).state(why);
  }
  void destroy_comm(const CommRef& comm) override { static_cast<CudaComm&>(*comm).destroy(); }
  void leave_comms() override;

  void stop() override;

  StatusOr<std::vector<uint8_t>> save_module(const ModuleRef& module) override;
  Status load_module_state(const ModuleRef& module, const uint8_t* from, size_t bytes) override;
  void trim() override;
  Status read(uint64_t addr, void* to, size_t bytes) override;
  Status write(uint64_t addr, const void* from, size_t bytes) override;
  Status read_pieces(uint64_t addr, size_t bytes, const PieceSink& sink) override;
  Status write_pieces(uint64_t addr, size_t bytes, const PieceSource& source) override;
  Status read_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, void* to) override;
  Status write_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, const void* from) override;
  uint64_t event_clock_ns() override;
  StatusOr<uint64_t> event_time_ns(const EventRef& event) override;
  Status restore_event(const EventRef& event, uint64_t time_ns) override;
  void restore_fault(int32_t result) override;
  Status loaded(uint64_t addr, uint64_t bytes) override;
  void all_loaded() override;
  Status alias(uint64_t addr, size_t bytes, Space& from, uint64_t from_addr) override;
  Status unalias(uint64_t addr, size_t bytes) override;

 private:
  enum class Action : uint8_t {
    kNop,
    kCopy,
    kStagedCopy,
    kCellCopy,  // between the device and a chunk, which no other command sees, by way of a cell
    kArrayCopy,
    kStagedArrayCopy,
    kHostCopy,
    kMemset,
    kHostMemset,
    kLaunch,
    kRecord,
    kWait,
    kHostFunction,
    kAttribute,
    kInitComm,
    kCommunicate
  };
  // Other than a group's buffers.
  static bool may_touch_memory(Action action) {
    switch (action) {
      case Action::kNop:
      case Action::kRecord:
      case Action::kWait:
      case Action::kHostFunction:
      case Action::kAttribute:
      case Action::kInitComm:
      case Action::kCommunicate: return false;
      default: return true;
    }
  }

  struct CudaEvent final : Event {
    std::shared_ptr<Context> context;
    CUevent handle = nullptr;
    Status made;
    bool timed = true;
    uint64_t submitted = 0, issued = 0;  // records; under mu_
    uint64_t restored_ns = 0;            // of event_clock_ns(); 0: the handle knows. Under mu_
    uint64_t held = 0, record_held = 0;  // pass_, where a command that names it, or records it, is held. Under mu_
    uint64_t waits = 0;                  // pass_, where its held record waits for another rank
    ~CudaEvent() override;
  };

  // A launch of the host executor (CudaConfig::host_executor), until its stream comes to it.
  struct HostKernel {
    std::shared_ptr<HostFunction> function;
    LaunchArgs args;
    std::vector<uint8_t> params;
    uint64_t position = 0;
  };

  // What a host function of the driver does. Lives until its command has completed, so the driver may look at it.
  struct Job {
    CudaSpace* space = nullptr;
    enum class Kind : uint8_t { kCopyRows, kFillRows, kToken, kKernel } kind = Kind::kCopyRows;
    CopyArgs copy = {};
    MemsetArgs memset = {};
    uint64_t token = 0;
    std::shared_ptr<const HostKernel> kernel = {};
  };

  // Operations that were submitted together; of kInitComm an empty one, for the communicator. NCCL gets those of one
  // communicator after another, each when the last are in the stream: of a group over several, an abort of one would take
  // the others along. What ranks that share a GPU have among themselves, and sends to others of their communicator, keep
  // nothing back ("beside").
  struct CommGroup {
    struct Entry {
      std::shared_ptr<CudaComm> comm;
      std::vector<CommOp> ops;  // in the order of their calls
      bool beside = false;
      bool over = false;
      bool gone = false;        // it was aborted before it was over
      bool begun = false;       // NCCL has it, or `shared`
      uint64_t generation = 0;  // of the communicator, then
      std::chrono::steady_clock::time_point begun_at = {};
      bool pairs = false;                       // it has sends or receives
      std::vector<int> reductions = {};         // made for it
      std::shared_ptr<SharedComm> shared = {};  // has it in NCCL's place
      SharedComm::Work work = {};
    };
    explicit CommGroup(std::vector<CommCall> calls);
    std::vector<PendingUse::Range> ranges(uint64_t position) const;
    ~CommGroup();
    CommGroup(const CommGroup&) = delete;
    std::list<Entry> entries;                 // each communicator once, in the order of their keys
    std::shared_ptr<SharedComm::Mark> ready;  // in its queue's stream, for what goes to other streams
    bool prepared = false;
    bool stuck = false;    // it waits for the abort of one that failed
    bool cleared = false;  // what it will write is not spliced
  };

  struct Command {
    Action action = Action::kNop;
    Ticket ticket;
    bool last = true;  // of the pieces of one copy: completes the ticket
    CopyArgs copy;
    MemsetArgs memset;
    LaunchArgs launch;
    uint64_t token = 0;
    std::vector<uint8_t> params;                // launch.params, once the command is held
    std::vector<CUlaunchAttribute> attributes;  // of the launch; the one of kAttribute
    std::shared_ptr<CudaFunction> function;
    std::shared_ptr<HostFunction> executor;  // in the place of `function`
    std::shared_ptr<CudaEvent> event;
    std::shared_ptr<const ArrayCopy> array_copy;
    std::shared_ptr<CommGroup> group;
  };

  struct Pending {
    enum class State : uint8_t { kHeld, kIssuing, kIssued, kDropped } state = State::kIssued;
    bool token = false;     // a host function of the client's
    bool awaited = false;   // somebody waits for it
    uint64_t sequence = 0;  // of the space; grows from submission to submission; what a mark writes
    Ticket ticket;
    bool last = true;
    bool touches = true;  // anything, else only `ranges`
    std::vector<PendingUse::Range> ranges;
    std::shared_ptr<void> keeps;
    std::unique_ptr<Job> job;
    uint8_t* cell = nullptr;       // of a kCellCopy
    void* from_cell_to = nullptr;  // the watcher copies that many bytes when the command has completed
    uint32_t from_cell_bytes = 0;
  };

  struct CudaQueue final : Queue {
    QueueKind kind = QueueKind::kBlocking;
    uint32_t index = 0;
    // under mu_
    CUstream stream = nullptr;
    Status made;
    std::deque<Pending> pending;  // grows behind, shrinks in front: a reference to an element stays good
    uint64_t issued = 0, marked = 0, reached = 0;  // sequences
    uint64_t awaited = 0;                          // the same: the last that somebody waits for
    std::chrono::steady_clock::time_point issued_at;
    uint32_t since_mark = 0;
    std::atomic<uint64_t>* word = nullptr;  // else events
    CUdeviceptr word_device = 0;
    std::deque<std::pair<uint64_t, CUevent>> marks;
    uint8_t* slot = nullptr;
    std::shared_ptr<CudaQueue> before;  // the former queue of this index, while it has work
    bool must_wait_before = false;      // on the device, at the first command
    uint64_t completing = 0;            // the watcher is telling the owner from this position on
    uint64_t legacy_follows = 0,
             follows_legacy = 0;  // of a blocking one: sequences up to which one waits for the other
    bool busy = false;            // in busy_
    uint64_t held = 0;            // pass_, where a command of it is held
    uint64_t waits = 0;           // pass_, where one waits for another rank
  };
  using CudaQueueRef = std::shared_ptr<CudaQueue>;

  struct Held {
    CudaQueueRef queue;
    Command command;
    Pending* pending = nullptr;
  };

  struct Done {
    CudaQueueRef queue;
    Pending pending;
  };

  Status start();
  void submit(const QueueRef& queue, Command command);
  void submit_locked(const CudaQueueRef& queue, Command& command, std::unique_lock<std::mutex>& lock);
  Status issue(const CudaQueueRef& queue, Command& command, Pending& pending, std::unique_lock<std::mutex>& lock);
  Status issue_executor(CudaQueue& queue, const Command& command, Pending& pending, std::unique_lock<std::mutex>& lock);
  Status prepare(CudaQueue& queue, const Command& command);
  bool may_issue(const Command& command) const;
  bool behind_held(const CudaQueue& queue, const Command& command) const;
  void note_held(CudaQueue& queue, const Command& command);
  void forget_held();
  void kick();
  void hold(const CudaQueueRef& queue, Command& command, Pending& pending, std::unique_lock<std::mutex>& lock);
  bool start_group(CudaQueue& queue, const Command& command);
  class Rank;
  void join_splicing();
  void leave_splicing();
  StatusOr<bool> stands() const;
  bool stands_still();
  void add_comms(std::set<std::shared_ptr<SharedComm>>* to);
  bool concerns_splicer(const Command& command) const;
  template <class F>
  StatusOr<bool> beside(Pending& pending, std::unique_lock<std::mutex>& lock, F f);
  StatusOr<bool> tell_splicer(const Command& command, Pending& pending, std::unique_lock<std::mutex>& lock);
  Status spliced_launch(const Command& command, const std::function<Status()>& run, CUstream stream);
  bool must_clear(const Command& command) const { return splicer_ && command.group && !command.group->cleared; }
  bool clear_group(std::shared_ptr<CommGroup> group, bool on_watcher, std::unique_lock<std::mutex>& lock);
  StatusOr<bool> note_received(const CommGroup& group, Pending& pending, std::unique_lock<std::mutex>& lock);
  bool begin_entry(CommGroup& group, std::list<CommGroup::Entry>::iterator entry, CudaQueue& queue,
                   const Command& command);
  bool end_entry(CommGroup& group, CommGroup::Entry& entry, CudaQueue& queue);
  Status take_pairs_out(CommGroup& group, std::list<CommGroup::Entry>::iterator entry);
  Status hand_to_nccl(CommGroup::Entry& entry, CUstream stream);
  void end_comms();
  Status issue_cell(CudaQueue& queue, const CopyArgs& copy, Pending& pending);
  Status issue_staged(CudaQueue& queue, const CopyArgs& copy, Pending& pending);
  Status issue_array_copy(CUstream stream, const ArrayCopy& copy);
  Status issue_staged_array(CudaQueue& queue, const ArrayCopy& copy, Pending& pending);
  void forgive(const Command& command, Status* s);
  Status issue_attribute(const CudaQueue& queue, const CUlaunchAttribute& attribute);
  Status issue_launch(CudaQueue& queue, const Command& command);
  Status issue_copy(CUstream stream, const CopyArgs& copy);
  Status issue_memset(CUstream stream, const MemsetArgs& memset);
  Status issue_job(CudaQueue& queue, Pending& pending, const Job& job);
  Status tie_clock();  // tie_mu_ held
  Status mark(CudaQueue& queue);
  Status mark_other_side(const CudaQueue& queue);
  Status follow_other_side(CudaQueue& queue);
  Status mark_if_settled(CudaQueue& queue);
  Status mark_all();
  using Clock = std::chrono::steady_clock;
  void wait_for_movement(std::unique_lock<std::mutex>& lock, Clock::time_point moved);
  void nap(uint32_t calls, uint32_t most_us);
  Status look(CudaQueue& queue);
  void fault(const Status& why, std::unique_lock<std::mutex>& lock);
  bool alive() const;
  void issue_held(std::unique_lock<std::mutex>& lock);
  void poke_groups(size_t from);
  void collect(std::vector<Done>* done, std::unique_lock<std::mutex>& lock);
  void reap();
  void note_oldest();
  void watch();
  void close_queue(CudaQueue& queue);
  bool in_variable(uint64_t addr, uint64_t bytes);
  Status move_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, uint8_t* host, bool to_host);
  void host_kernel_failed(const Status& why);
  static void CUDA_CB run_job(void* job);

  const CudaConfig device_;
  const SpaceConfig config_;
  SpaceOwner& owner_;
  const std::shared_ptr<Context> context_;
  std::unique_ptr<DeviceMemory> memory_;

  std::atomic<uint32_t> pending_all_{0};
  std::atomic<uint32_t> jobs_running_{0};
  std::atomic<bool> stopping_{false}, faulted_{false};
  std::atomic<uint64_t> oldest_{0};  // of the pending commands' positions, or less; written under mu_
  // Written under mu_; the watcher waits for their change. issues_: the last command that was handed to the driver.
  std::atomic<uint64_t> issues_{0}, busy_changes_{0};

  std::mutex mu_;
  std::condition_variable wake_;
  bool asleep_ = false;  // the watcher must be woken
  // awaited() adds 1 to calls_, a futex word, and then wakes a watcher that naps; this one says so first and then sleeps only
  // while calls_ is what it was. So of a call and a nap that begins, one sees the other.
  std::atomic<uint32_t> calls_{0};
  std::atomic<bool> napping_{false};
  bool fault_told_ = false;  // only then dropped commands complete
  bool dead_ = false;        // the context itself has failed: nothing in it will ever finish
  Status fault_, host_failure_;
  uint64_t sequence_ = 0, marks_ = 0;
  uint64_t told_ = 0;       // the highest position that the owner was told of
  uint32_t in_flight_ = 0;  // commands that the driver has
  uint32_t tokens_ = 0;     // of those, host functions of the client's
  bool issuing_held_ = false;
  uint32_t executing_ = 0;  // commands that are inside an executor or the splicer, without mu_
  uint64_t submitted_ = 0;  // the last position
  std::unique_ptr<HostMemory> host_;
  std::deque<Held> held_;
  // What the held commands are about: of the last look at all of them, and of those that came since.
  uint64_t pass_ = 1;
  bool held_for_room_ = false;  // the driver has enough to do: nothing overtakes
  bool held_legacy_ = false, held_blocking_ = false, held_executor_ = false, held_group_ = false;
  bool launching_ = false;          // NCCL is busy with a group
  uint64_t holds_ = 0;              // how many commands were ever held
  std::vector<CudaQueueRef> busy_;  // with pending commands
  std::map<uint32_t, CudaQueueRef> queues_;
  std::vector<CudaQueueRef> leaving_;
  std::vector<CUevent> event_pool_;
  CUevent order_ = nullptr;                      // of follow_other_side()
  std::vector<std::unique_ptr<Job>> graveyard_;  // jobs that the driver may still know after a fault

  std::mutex io_mu_;
  CUstream transfer_ = nullptr;
  uint8_t* io_slot_ = nullptr;
  std::mutex tie_mu_;  // a leaf, but for the driver; guards the next three
  CUevent tie_ = nullptr;
  uint64_t tie_ns_ = 0, tie_records_ = 0;
  std::atomic<uint64_t> records_{0};

  // For the contents of device memory: as many as there are threads that ask, made when they do and kept.
  struct Lane {
    ~Lane();
    std::shared_ptr<Context> context;
    CUstream stream = nullptr;
    uint8_t* memory = nullptr;  // page-locked, staging_bytes of it
    CUevent done[2] = {};
  };
  static constexpr size_t kMostLanes = 12;
  std::mutex lanes_mu_;  // a leaf, but for the driver
  std::condition_variable lane_free_;
  std::vector<std::unique_ptr<Lane>> free_lanes_;
  size_t lanes_made_ = 0;
  StatusOr<std::unique_ptr<Lane>> make_lane();
  StatusOr<std::unique_ptr<Lane>> take_lane();  // waits for one
  void give_lane(std::unique_ptr<Lane> lane);
  Status move(Lane& lane, uint64_t addr, size_t bytes, const PieceSink* sink, const PieceSource* source);
  Status with_lane(uint64_t addr, size_t bytes, const PieceSink* sink, const PieceSource* source);

  std::shared_ptr<splice::Splicer> splicer_;  // nullptr: nothing is spliced
  std::shared_ptr<splice::Splicer::Member> member_;

  uint64_t incarnation_ = 0;
  std::mutex comms_mu_;  // a leaf, but for those of CudaComm
  std::vector<std::weak_ptr<CudaComm>> comms_;
  bool comms_run_ = false;                  // at the end: a collective that still runs may reach this space's memory
  std::shared_ptr<ReduceKernels> kernels_;  // as long as there is a space: an unload may wait for what runs

  std::mutex modules_mu_;  // a leaf
  std::vector<std::weak_ptr<CudaModule>> modules_;
  std::vector<std::weak_ptr<HostModule>> executors_;

  std::thread watcher_;
  std::vector<std::pair<std::atomic<uint64_t>*, uint64_t>> words_;  // the watcher's own
};

}  // namespace devproxy::hal::cuda
