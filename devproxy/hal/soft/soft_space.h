// SPDX-License-Identifier: Apache-2.0
// One client process on the software GPU. soft_space.cc puts it together: its memory (soft_memory.h), its queues
// (soft_queues.cc), what its commands do (soft_execute.cc), those that a cut finds (soft_pending.cc), its events and
// its modules.
//
// Who owns what
//   the submitting thread   one, the owner's dispatch thread; calls every submitting method; owns SoftQueue::submitted,
//                           the list of queues, idle_ and everything without another owner
//   a worker                one thread per queue, made at the first command that needs one; executes the commands of
//                           that queue
//   mu_                     guards every queue's `commands`, `current`, `closing`, `asleep_on`, stopping_ and withheld_
//   atomics                 SoftQueue::published (written by whoever executed), pending_*_ (the submitter adds, workers
//                           subtract), faulted_
// Locks: mu_, and under it CommGroup::mu_ and the engine's, leaves. No owner callback runs under mu_, and no kernel's
// turn is waited for.
//
// Order. Every dependency is (queue, position) with a smaller position than the command that has it, and a queue runs
// its commands in order. So the pending command with the smallest position can always run, or is a host function that
// the client will answer: there is no cycle.
//
// Inline execution. A command of the legacy queue that waits for nobody runs on the submitting thread when no legacy or
// blocking command is pending on a worker. Nothing can slip in meanwhile, because the only thread that submits is busy; so later commands
// of blocking queues wait for it for free. Non-blocking queues go on by themselves.
//
// Turns. Where several of the job's GPUs share this one, a kernel runs in their turn (hal/engine.h). A worker keeps its
// part of the turn from one kernel to the next and gives it up before it sleeps, communicates or calls the client; the
// submitter, before it waits for messages (yield()). Copies need no turn: they are another engine's.
//
// Interleavings that worried us
//   1. A legacy command finished on the worker, but its on_complete has not been called yet, and the submitter runs the
//      next one inline: the counters of the legacy stream would go backwards. Therefore a worker subtracts from
//      pending_blocking_ (release) after on_complete, and the submitter reads 0 (acquire) before it runs inline.
//   2. The client saw a command complete and asks EVENT_ELAPSED: Record::time_ns is stored before on_complete.
//   3. A stream index is given to a new queue while the old one still completes commands: the new queue's first
//      command depends on the old queue's last. Dependencies look at `published`, which is set after on_complete, so
//      the counters of one index never go backwards either.
//   4. A worker finds its dependency unsatisfied and sleeps while the other worker publishes: both under mu_.
//   5. A cut asks whether all stands (pending.h) while a worker is between two commands: it counts as going on unless it
//      sleeps for a dependency that is still unsatisfied, or in front of a host function. All under mu_, as in 4.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "devproxy/hal/basic_space.h"
#include "devproxy/hal/hal.h"
#include "devproxy/hal/host_module/host_module.h"
#include "devproxy/hal/sharing.h"
#include "devproxy/hal/soft/comm/hold.h"
#include "devproxy/hal/soft/comm/soft_comm.h"
#include "devproxy/hal/soft/soft_device.h"
#include "devproxy/hal/soft/soft_memory.h"
#include "devproxy/hal/splice/splicer.h"

namespace devproxy::hal::soft {

// What the calling thread runs just now; read by the crash handler.
const char* running_here() noexcept;

class SoftSpace final : public BasicSpace {
 public:
  static StatusOr<std::unique_ptr<Space>> open(const SoftConfig& device, const SpaceConfig& config, SpaceOwner& owner);
  SoftSpace(const SoftConfig& device, const SpaceConfig& config, SpaceOwner& owner, int memory_fd);
  ~SoftSpace() override;

  Status commit(uint64_t addr, uint64_t bytes, bool stable) override;
  void freed(uint64_t addr, uint64_t bytes, uint64_t position) override;
  void release(uint64_t addr, uint64_t bytes) override;
  void reuse(uint64_t addr, uint64_t bytes) override;
  void tidy() override;
  void yield() override { yield(turn_); }

  QueueRef create_queue(QueueKind kind, int32_t priority, uint32_t index) override;
  void destroy_queue(const QueueRef& queue) override;
  uint64_t oldest_pending() override;
  PendingUse pending_use() override;
  bool idle() const override { return pending() == 0; }
  uint32_t pending() const override { return pending_all_.load(std::memory_order_acquire); }

  void nop(const QueueRef& queue, Ticket ticket) override;
  void copy(const QueueRef& queue, Ticket ticket, const CopyArgs& args) override;
  void memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& args) override;
  void launch(const QueueRef& queue, Ticket ticket, const FunctionRef& function, const LaunchArgs& args) override;
  void host_function(const QueueRef& queue, Ticket ticket, uint64_t token) override;

  EventRef create_event(bool timed) override;
  void record(const QueueRef& queue, Ticket ticket, const EventRef& event) override;
  void wait(const QueueRef& queue, Ticket ticket, const EventRef& event) override;
  StatusOr<double> elapsed_ms(const EventRef& start, const EventRef& end) override;

  StatusOr<CommRef> create_comm(const CommConfig& config) override;
  void init_comm(const QueueRef& queue, Ticket ticket, const CommRef& comm) override;
  void communicate(const QueueRef& queue, Ticket ticket, std::vector<CommCall> group) override;
  void abort_comm(const CommRef& comm) override { static_cast<SoftComm&>(*comm).abort(); }
  bool comm_complete(const CommRef& comm) override { return static_cast<const SoftComm&>(*comm).complete(); }
  CommState comm_state(const CommRef& comm, std::string* why) override {
    return static_cast<const SoftComm&>(*comm).state(why);
  }
  void destroy_comm(const CommRef& comm) override { static_cast<SoftComm&>(*comm).leave(); }
  int share_memory() override;

  bool withhold(bool on) override;
  bool stands() override;
  bool stuck() override { return stands(); }
  bool in_host_function() override;
  StatusOr<std::vector<PendingCommand>> pending_commands() override;
  std::optional<CommandPlace> pending_record(const EventRef& event) override;
  Status submit_pending(const PendingCommand& command) override;

  StatusOr<ArrayRef> create_array(const ArrayShape& shape) override;
  void copy_array(const QueueRef& queue, Ticket ticket, const ArrayCopy& args) override;

  StatusOr<ModuleRef> load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) override;
  StatusOr<std::vector<std::string>> function_names(const ModuleRef& module) override;
  StatusOr<FunctionRef> get_function(const ModuleRef& module, const std::string& name, FunctionInfo* info) override;
  StatusOr<Global> get_global(const ModuleRef& module, const std::string& name) override;
  std::vector<Global> globals(const ModuleRef& module) override;
  Status set_attribute(const FunctionRef& function, uint32_t attribute, int32_t value) override;
  StatusOr<int64_t> occupancy(const FunctionRef& function, const OccupancyQuery& query) override;
  StatusOr<uint64_t> host_device_address(uint64_t addr, uint64_t) override { return addr; }  // one address space
  Status set_limit(uint32_t limit, uint64_t value) override;
  StatusOr<uint64_t> get_limit(uint32_t limit) override;

  void stop() override;

  Status read(uint64_t addr, void* to, size_t bytes) override;
  Status write(uint64_t addr, const void* from, size_t bytes) override;
  Status read_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, void* to) override;
  Status write_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, const void* from) override;
  bool portable(const ModuleRef& module) override { return static_cast<const HostModule&>(*module).is_executor(); }
  StatusOr<std::vector<uint8_t>> save_module(const ModuleRef& module) override {
    return static_cast<const HostModule&>(*module).save_state();
  }
  Status load_module_state(const ModuleRef& module, const uint8_t* from, size_t bytes) override {
    return static_cast<const HostModule&>(*module).load_state(from, bytes);
  }
  void* host_view(uint64_t addr, uint64_t bytes) override;
  uint64_t event_clock_ns() override;
  StatusOr<uint64_t> event_time_ns(const EventRef& event) override;
  Status restore_event(const EventRef& event, uint64_t time_ns) override;
  void restore_fault(int32_t) override { faulted_.store(true, std::memory_order_release); }
  Status alias(uint64_t addr, size_t bytes, Space& from, uint64_t from_addr) override;
  Status unalias(uint64_t addr, size_t bytes) override;
  Status loaded(uint64_t addr, uint64_t bytes) override;
  void all_loaded() override;

 private:
  struct SoftQueue;

  struct Dependency {
    std::shared_ptr<SoftQueue> queue;
    uint64_t position = 0;
  };

  // One record of an event; a new one per record call, so that a wait keeps the one that it was for.
  struct Record {
    std::shared_ptr<SoftQueue> queue;
    uint64_t position = 0;
    std::atomic<uint64_t> time_ns{0};  // 0 until complete
  };
  struct SoftEvent final : Event {
    bool timed = true;
    std::shared_ptr<Record> last;
  };

  enum class Action : uint8_t { kNop, kCopy, kArrayCopy, kMemset, kLaunch, kRecord, kHostFunction, kComm };

  struct Command {
    Action action = Action::kNop;
    uint32_t queue_index = 0;
    Ticket ticket;
    union {
      CopyArgs copy;
      MemsetArgs memset;
      LaunchArgs launch;
      uint64_t token;
    };
    const HostFunction* function = nullptr;
    const ArrayCopy* array_copy = nullptr;
    Record* record = nullptr;
    CommGroup* comm = nullptr;
    Command() : token(0) {}
  };

  // A command on a worker's list, with what it keeps alive and what it waits for.
  struct Pending {
    Command command;
    std::vector<Dependency> needs;
    std::shared_ptr<void> keeps;
    std::unique_ptr<uint8_t[]> params;

    void keep_params() {
      LaunchArgs& launch = command.launch;
      params = std::make_unique<uint8_t[]>(launch.params_bytes + 1);  // new[] aligns to 16
      if (launch.params_bytes) std::memcpy(params.get(), launch.params, launch.params_bytes);
      launch.params = params.get();
    }
  };

  struct SoftQueue final : Queue {
    QueueKind kind = QueueKind::kBlocking;
    uint32_t index = 0;
    uint64_t submitted = 0;              // submitting thread only
    Dependency before;                   // the former queue of this index; submitting thread only
    std::atomic<uint64_t> published{0};  // everything up to here has completed, on_complete included
    // under mu_
    std::deque<Pending> commands;
    const Pending* current = nullptr;  // being executed
    bool closing = false;
    bool gone = false;                      // the worker has returned
    const Dependency* asleep_on = nullptr;  // what the worker waits for
    bool withheld = false;                  // it waits in front of a host function
    std::condition_variable wake;
    std::thread worker;        // submitting thread only
    uint64_t chaos_state = 0;  // worker only
    Engine::Turn turn;         // worker only
  };

  static SoftQueue& of(const QueueRef& queue) { return static_cast<SoftQueue&>(*queue); }
  void submit_group(const QueueRef& queue, Ticket ticket, std::vector<CommCall> calls, bool init);
  void submit(const QueueRef& queue, Command& command, std::shared_ptr<void> keeps, const Dependency* extra);
  void enqueue(const QueueRef& queue, Command& command, std::shared_ptr<void> keeps, const Dependency* extra);
  void push(const QueueRef& queue, Pending pending);
  template <class Test>  // of all queues, also destroyed ones; under mu_
  bool every_queue(Test test) const {
    return std::all_of(queues_.begin(), queues_.end(), [&](const auto& item) { return test(*item.second); }) &&
           std::all_of(leaving_.begin(), leaving_.end(), [&](const auto& queue) { return test(*queue); });
  }
  bool stands(const SoftQueue& queue) const;  // under mu_
  PendingCommand pending_command(const SoftQueue& queue, const Pending& pending);
  void execute(Command& command, Engine::Turn& turn, bool on_submitter);
  void run_kernel(Command& command, Engine::Turn& turn, bool on_submitter);
  static bool may_touch(const Command& command, uint64_t addr, uint64_t bytes);
  bool may_touch(uint64_t addr, uint64_t bytes, uint64_t last);
  Status before_command(const Command& command);
  Status spliced_launch(const Command& command, splice::Runner& runner);
  void yield(Engine::Turn& turn) {
    if (device_.sharing) device_.sharing->engine.yield(turn);
  }
  void work(const std::shared_ptr<SoftQueue>& queue);
  void chaos_delay(SoftQueue& queue);
  void reap(bool all);

  const SoftConfig device_;
  const SpaceConfig config_;
  SpaceOwner& owner_;
  std::shared_ptr<splice::Splicer> splicer_;  // nullptr: nothing is spliced
  std::shared_ptr<splice::Splicer::Member> member_;
  const uint64_t incarnation_;  // tells this space from every other that was ever at its addresses

  std::atomic<uint32_t> pending_blocking_{0};  // on workers of legacy and blocking queues
  std::atomic<uint32_t> pending_all_{0};       // on all workers
  std::atomic<bool> faulted_{false};
  std::atomic<bool> ended_{false};  // stopping_, for those who do not hold mu_

  CommHold hold_;
  std::mutex mu_;
  bool stopping_ = false;
  bool withheld_ = false;             // as hold_, for host functions
  std::vector<SoftQueue*> sleepers_;  // workers that wait for another queue or for the hold's end; few

  // submitting thread only
  std::map<uint32_t, std::shared_ptr<SoftQueue>> queues_;  // by index; the submitting thread changes both, under mu_
  std::vector<std::shared_ptr<SoftQueue>> leaving_;        // destroyed, worker not joined yet
  uint64_t submitted_ = 0;                                 // position of the last command
  Engine::Turn turn_;                                      // for what runs inline
  // By CUlimit, as a chip has them at first: stack, printf, malloc, depth, pending launches, L2 fetch, persisting L2.
  uint64_t limits_[7] = {1024, 1 << 20, 8 << 20, 2, 2048, 128, 0};
  SoftMemory memory_;  // the last: it is unmapped before what else there is goes
};

}  // namespace devproxy::hal::soft
