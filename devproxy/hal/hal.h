// What devproxy asks of a device. The server talks to this; hal/soft and hal/cuda implement it.
//
// A Device is one GPU of one server. A Space is one client process on it: an address range, queues, events, modules.
// A HAL knows no connection, ring or replica: it gets tickets (numbers that only grow) and says when they are done.
//
// Level 1 runs a job. Level 2 adds what a checkpoint needs, level 3 what several ranks on one GPU need. caps() says how
// far a device goes; nobody guesses.
//
// Threads: every method of a Space is called by one thread, the owner's dispatch thread, unless it says otherwise.
// No submitting method blocks. SpaceOwner's methods are called from any device thread and from inside submissions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/wire/array.h"
#include "devproxy/csrc/wire/launch.h"
#include "devproxy/csrc/wire/link.h"

namespace devproxy::hal {

struct Caps {
  int level = 1;  // 1 run, 2 dump and restore, 3 splice
  bool kernels_see_host_window = false;
  bool keeps_host_pages = false;  // it remembers pages of the window: freed ones must not be given back to the machine
  bool reads_after_fault = true;  // level 2: what an execution fault leaves can still be read
};

struct Properties {
  std::string name;
  std::array<uint8_t, 16> uuid{};
  uint64_t total_bytes = 0;
  int32_t major = 0, minor = 0;
  int32_t pci_domain = 0, pci_bus = 0, pci_device = 0;
  std::array<int32_t, 256> attributes{};  // by CUdevice_attribute
};

// Physical objects. A VHandle never reaches the HAL and a Ref never leaves the server, so they cannot be mixed.
// References are shared because a submitted command keeps alive what it uses after the handle was destroyed.
class Queue {
 public:
  virtual ~Queue() = default;
};
class Event {
 public:
  virtual ~Event() = default;
};
class Module {
 public:
  virtual ~Module() = default;
};
class Function {
 public:
  virtual ~Function() = default;
};
class Array {
 public:
  virtual ~Array() = default;
};
// A texture or surface object: kernels get `value` in their parameters.
class Texture {
 public:
  virtual ~Texture() = default;
  uint64_t value = 0;
};
using QueueRef = std::shared_ptr<Queue>;
using EventRef = std::shared_ptr<Event>;
using ModuleRef = std::shared_ptr<Module>;
using FunctionRef = std::shared_ptr<Function>;
using ArrayRef = std::shared_ptr<Array>;
using TextureRef = std::shared_ptr<Texture>;

// CUDA's rule of the legacy stream: a command on kLegacy waits for all earlier commands of kLegacy and kBlocking queues
// of its space, and they for it. kNonBlocking is exempt.
enum class QueueKind : uint8_t { kLegacy, kBlocking, kNonBlocking };

// Names one command. position grows from submission to submission over all queues of a space.
struct Ticket {
  uint64_t position = 0;
  uint32_t tag = 0;     // handed back in on_complete
  uint32_t caller = 0;  // handed back in on_refused
};

// A rectangle of bytes; height 1 is a plain copy. An address is a device address where *_device is set, else a pointer
// into host memory of the server that stays valid until on_complete.
struct CopyArgs {
  uint64_t dst = 0, src = 0;
  uint64_t dst_pitch = 0, src_pitch = 0;
  uint64_t width_bytes = 0, height = 1;
  bool dst_device = false, src_device = false;
};

// A box of bytes, from or to an array, or both. A side without an array is as in CopyArgs, its slices slice_rows rows
// apart. An array keeps what a submitted copy needs of it alive.
struct ArrayCopy {
  struct Side {
    ArrayRef array;
    uint64_t x_bytes = 0, y = 0, z = 0;
    uint64_t addr = 0, pitch = 0, slice_rows = 0;
    bool device = false;
  } dst, src;
  uint64_t width_bytes = 0, rows = 1, slices = 1;
};

struct MemsetArgs {
  uint64_t dst = 0, pitch = 0;    // pitch in bytes, between rows
  uint64_t count = 0, rows = 1;   // elements in a row
  uint32_t value = 0, width = 1;  // bytes of one element: 1, 2 or 4
};

struct LaunchArgs {
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  uint32_t shared_bytes = 0;
  const uint8_t* params = nullptr;  // 16-byte aligned; only read during the call
  size_t params_bytes = 0;
  const LaunchAttribute* attributes = nullptr;  // only read during the call
  size_t n_attributes = 0;
};

// What a device can tell about how much of a kernel it can run at once.
struct OccupancyQuery {
  OccupancyKind kind = OccupancyKind::kActiveBlocks;
  uint32_t flags = 0;  // of cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
  uint64_t shared_bytes = 0;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  const LaunchAttribute* attributes = nullptr;
  size_t n_attributes = 0;
};

struct ParamPlace {
  uint32_t offset_bytes = 0, size_bytes = 0;
};

struct FunctionInfo {
  uint32_t max_threads = 0, shared_bytes = 0, regs = 0;
  std::vector<ParamPlace> params;  // empty where the function takes one opaque block
  // By CUfunction_attribute; kNoAttribute where the device does not know it. Empty: it knows no more than the above.
  std::vector<int32_t> attributes;
  bool uses_heap = false;  // it calls malloc: the device's heap, which no dump holds
};
inline constexpr int32_t kNoAttribute = INT32_MIN;

// CUjitInputType; data is only read during the call.
struct LinkInput {
  uint32_t type = 0;
  std::string name;
  const uint8_t* data = nullptr;
  size_t bytes = 0;
};
struct LinkOutput {
  std::vector<uint8_t> image;
  std::string info, error;  // the vendor's logs, also of a link that failed
};

// What a Space tells and asks. Every method may be called from several device threads at once and must not block,
// host_function excepted.
class SpaceOwner {
 public:
  virtual ~SpaceOwner() = default;
  // A device thread begins (alternative signal stack, names).
  virtual void on_thread_start() noexcept = 0;
  // Commands of one queue complete in order; every submitted command completes, also after a fault.
  virtual void on_complete(uint32_t queue_index, uint64_t position, uint32_t tag) noexcept = 0;
  // An execution fault. From now on the space executes nothing, but completes everything.
  virtual void on_fault(int32_t result, const char* text) noexcept = 0;
  // The device would not take a command, which is no fault: it completes unexecuted and the space goes on. Called
  // inside a submission or on a device thread, with the device's locks held: must not call the space.
  virtual void on_refused(uint32_t caller, int32_t result, const char* text) noexcept {
    (void)caller;
    on_fault(result, text);
  }
  // Is [addr, addr + bytes) inside one allocation that was live for the command at `position`? on_submitter: the caller
  // is the dispatch thread inside a submission.
  virtual bool range_live(uint64_t addr, uint64_t bytes, uint64_t position, bool on_submitter) noexcept = 0;
  // Runs the host function `token`; returns when it has returned, or when the space is being stopped.
  virtual void host_function(uint64_t token) noexcept = 0;
  // The device takes memory of the GPU for itself (what an executor needs while it computes); false where the GPU has
  // not so much left. Given back in the same amounts or others.
  virtual bool take_memory(uint64_t bytes) noexcept {
    (void)bytes;
    return true;
  }
  virtual void give_memory(uint64_t bytes) noexcept { (void)bytes; }
};

// Chooses the device address of a module's global; 0 where there is no memory.
using PlaceGlobal = std::function<uint64_t(uint64_t bytes)>;

struct SpaceConfig {
  uint64_t device_base = 0, device_bytes = 0;  // where device memory appears, page aligned
  uint64_t host_base = 0, host_bytes = 0;      // the pinned window, mapped by the caller at this address
  bool framework = false;  // for a process whose kernels a framework runs in this one (hal/host_module)
};

class Space {
 public:
  virtual ~Space() = default;

  // -- level 1: memory. Precondition of release: no submitted command can still touch the range.
  virtual Status commit(uint64_t addr, uint64_t bytes) = 0;
  virtual void release(uint64_t addr, uint64_t bytes) = 0;
  // The submitter has nothing to do just now: a good moment for what can wait.
  virtual void tidy() {}

  // Another such window, which the caller has mapped, until the space ends.
  virtual void host_window(uint64_t addr, uint64_t bytes) { (void)addr, (void)bytes; }
  // A part of a window is in use from now on.
  virtual void host_allocated(uint64_t addr, uint64_t bytes) { (void)addr, (void)bytes; }
  // By which address kernels reach it. Precondition: it is in use.
  virtual StatusOr<uint64_t> host_device_address(uint64_t addr, uint64_t bytes) {
    (void)addr, (void)bytes;
    return Status(kNotSupported, "kernels of this device do not see host memory");
  }

  // -- level 1: queues. index: what on_complete says. A destroyed queue still completes what was submitted to it, and
  // a new queue of the same index starts after that.
  virtual QueueRef create_queue(QueueKind kind, int32_t priority, uint32_t index) = 0;
  virtual void destroy_queue(const QueueRef& queue) = 0;
  // Of kLaunchAccessPolicyWindow, kLaunchPriority, kLaunchMemSyncDomainMap and kLaunchMemSyncDomain: it holds for what
  // is submitted from now on. A device without such a thing does nothing. Where the device keeps commands of the queue
  // back, it is refused late (SpaceOwner::on_refused).
  virtual Status set_queue_attribute(const QueueRef& queue, Ticket ticket, const LaunchAttribute& attribute) {
    (void)queue, (void)ticket, (void)attribute;
    return {};
  }
  // What persists in the second-level cache is as any other line of it when this returns.
  virtual Status reset_persisting_l2() { return {}; }
  // The smallest position that has not completed, or UINT64_MAX. idle() is the cheap form of the question; any thread
  // may ask it, and true means that everything that was written can be seen.
  virtual uint64_t oldest_pending() = 0;
  virtual bool idle() const = 0;
  // How many commands have not completed, for a device that keeps them itself.
  virtual uint32_t pending() const { return idle() ? 0 : 1; }

  // -- level 1: commands
  virtual void nop(const QueueRef& queue, Ticket ticket) = 0;
  virtual void copy(const QueueRef& queue, Ticket ticket, const CopyArgs& args) = 0;
  virtual void memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& args) = 0;
  virtual void launch(const QueueRef& queue, Ticket ticket, const FunctionRef& function, const LaunchArgs& args) = 0;
  virtual void host_function(const QueueRef& queue, Ticket ticket, uint64_t token) = 0;

  // -- level 1: events. wait: for the most recent record before this submission; none is no wait.
  virtual EventRef create_event(bool timed) = 0;
  virtual void record(const QueueRef& queue, Ticket ticket, const EventRef& event) = 0;
  virtual void wait(const QueueRef& queue, Ticket ticket, const EventRef& event) = 0;
  // kInvalidHandle: one was never recorded, or is not timed. kNotReady: one has not completed.
  virtual StatusOr<double> elapsed_ms(const EventRef& start, const EventRef& end) = 0;

  // -- level 1: modules
  virtual StatusOr<ModuleRef> load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) = 0;
  virtual StatusOr<FunctionRef> get_function(const ModuleRef& module, const std::string& name, FunctionInfo* info) = 0;
  struct Global {
    uint64_t addr = 0, bytes = 0;
  };
  virtual StatusOr<Global> get_global(const ModuleRef& module, const std::string& name) = 0;
  virtual std::vector<Global> globals(const ModuleRef& module) = 0;  // those that `place` placed
  // The module's other variables, where the device put them: outside of the space's range. They are memory like any
  // other, for copies, read() and write(). A module whose variables cannot be listed says why.
  struct Variable {
    std::string name;
    uint64_t addr = 0, bytes = 0;
  };
  virtual StatusOr<std::vector<Variable>> variables(const ModuleRef& module) {
    (void)module;
    return std::vector<Variable>{};
  }
  // Of all kernels that get_function() finds, in the device's own order.
  virtual StatusOr<std::vector<std::string>> function_names(const ModuleRef& module) {
    (void)module;
    return Status(kNotSupported, "this device cannot list the kernels of a module: ask for them by name");
  }
  virtual Status set_attribute(const FunctionRef& function, uint32_t attribute, int32_t value) = 0;
  virtual StatusOr<int64_t> occupancy(const FunctionRef& function, const OccupancyQuery& query) {
    (void)function, (void)query;
    return Status(kNotSupported, "this device cannot tell how many blocks of a kernel run at once");
  }

  // -- level 1: arrays. The caller has checked the shape (array_extent) and that a copy lies inside of its arrays.
  virtual StatusOr<ArrayRef> create_array(const ArrayShape& shape) {
    (void)shape;
    return Status(kNotSupported, "this device has no CUDA arrays");
  }
  virtual void copy_array(const QueueRef& queue, Ticket ticket, const ArrayCopy& args) {
    (void)args;
    nop(queue, ticket);
  }
  // array: the one that args names, or none. The object keeps it alive.
  virtual StatusOr<TextureRef> create_texture(const TextureArgs& args, const ArrayRef& array) {
    (void)args, (void)array;
    return Status(kNotSupported, "this device has no texture units, so no texture and surface objects");
  }

  // -- level 1: what only a vendor's compiler or driver can compute; functions of their arguments. A link without
  // inputs says whether there is a linker.
  virtual Status link(const std::vector<LinkOption>& options, const std::vector<LinkInput>& inputs, LinkOutput* out) {
    (void)options, (void)inputs, (void)out;
    return {kNotSupported, "linking needs NVIDIA's compiler, which this device does not have; link before loading"};
  }
  virtual Status tensor_map(const TensorMapArgs& args, uint8_t (&map)[kTensorMapBytes]) {
    (void)args, (void)map;
    return {kNotSupported, "this device has no tensor maps"};
  }

  // Are the module's kernels operators by name, which another kind of device can run too? False: machine code.
  virtual bool portable(const ModuleRef& module) {
    (void)module;
    return false;
  }
  // Does a kernel of the module print? True where that is not known.
  virtual bool prints(const ModuleRef& module) {
    (void)module;
    return false;
  }
  // Appends what kernels printed and what they said when an assertion failed, of work that has completed; nothing where
  // a device has no such thing. Also after a fault. Any thread, but not beside itself.
  virtual void take_output(std::string* out, std::string* err) { (void)out, (void)err; }

  // -- level 1: limits, by CUlimit. The result is the vendor's.
  virtual Status set_limit(uint32_t limit, uint64_t value) {
    (void)limit, (void)value;
    return {kNotSupported, "this device has no limits to set"};
  }
  virtual StatusOr<uint64_t> get_limit(uint32_t limit) {
    (void)limit;
    return Status(kNotSupported, "this device has no limits");
  }

  // Ends every queue: commands that run finish, the others are dropped without completion. Nothing may be submitted
  // afterwards. Blocks until the device threads are gone.
  virtual void stop() = 0;

  // -- level 2: contents. Precondition: idle(). Any thread.
  virtual Status read(uint64_t addr, void* to, size_t bytes) {
    (void)addr, (void)to, (void)bytes;
    return {kNotSupported, "this device cannot read memory for a checkpoint (level 2)"};
  }
  virtual Status write(uint64_t addr, const void* from, size_t bytes) {
    (void)addr, (void)from, (void)bytes;
    return {kNotSupported, "this device cannot write memory for a restore (level 2)"};
  }

  // The same of an array: whole rows, packed, counted through its slices. Precondition: idle().
  virtual Status read_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, void* to) {
    (void)array, (void)first_row, (void)rows, (void)to;
    return {kNotSupported, "this device cannot read arrays for a checkpoint (level 2)"};
  }
  virtual Status write_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, const void* from) {
    (void)array, (void)first_row, (void)rows, (void)from;
    return {kNotSupported, "this device cannot write arrays for a restore (level 2)"};
  }

  // Device memory as plain memory of this process, which a dump or restore may use in place of read() and write();
  // nullptr where it is none.
  virtual void* host_view(uint64_t addr, uint64_t bytes) {
    (void)addr, (void)bytes;
    return nullptr;
  }
  // -- level 2: what a module keeps for this process that is neither in memory nor in its image. Precondition: idle().
  virtual StatusOr<std::vector<uint8_t>> save_module(const ModuleRef& module) {
    (void)module;
    return std::vector<uint8_t>{};
  }
  virtual Status load_module_state(const ModuleRef& module, const uint8_t* from, size_t bytes) {
    (void)module, (void)from, (void)bytes;
    return {kNotSupported, "modules of this device keep nothing that could be restored"};
  }
  // Gives back memory of the GPU that the device keeps for itself and can do without, for now. The owner's thread, or
  // idle().
  virtual void trim() {}

  // -- level 2: events. Precondition: idle(). Times are nanoseconds of event_clock_ns(), whose zero is the space's own.
  virtual uint64_t event_clock_ns() { return 0; }
  // When the latest record completed; 0 where there was none.
  virtual StatusOr<uint64_t> event_time_ns(const EventRef& event) {
    (void)event;
    return Status(kNotSupported, "this device cannot tell an event's time for a checkpoint (level 2)");
  }
  // As after a record that completed at that time, which may lie before the space began.
  virtual Status restore_event(const EventRef& event, uint64_t time_ns) {
    (void)event, (void)time_ns;
    return {kNotSupported, "this device cannot restore an event (level 2)"};
  }
  // -- level 2: as after an execution fault of that result; the owner may be told again. The owner's thread.
  virtual void restore_fault(int32_t result) { (void)result; }

  // -- level 3: [addr, addr + bytes) shows the same physical pages as [from_addr, ...) of `from`, until unalias gives
  // it pages of its own with the same contents. Page aligned. Precondition: idle().
  virtual Status alias(uint64_t addr, size_t bytes, Space& from, uint64_t from_addr) {
    (void)addr, (void)bytes, (void)from, (void)from_addr;
    return {kNotSupported, "this device cannot map one page twice (level 3)"};
  }
  virtual Status unalias(uint64_t addr, size_t bytes) {
    (void)addr, (void)bytes;
    return {kNotSupported, "this device cannot map one page twice (level 3)"};
  }
};

class Device {
 public:
  virtual ~Device() = default;
  virtual Caps caps() const = 0;
  virtual const Properties& properties() const = 0;
  // A process is likely to load this description of an executor: a good moment to begin, on a thread of the device's
  // own. What is wrong with it is said when it is loaded.
  virtual void warm(std::vector<uint8_t> description) { (void)description; }
  // Any thread.
  virtual StatusOr<std::unique_ptr<Space>> open_space(const SpaceConfig& config, SpaceOwner& owner) = 0;
  // What the calling thread executes, for the text of a crash: nullptr where nothing. Async-signal-safe.
  virtual const char* running_here() const noexcept = 0;
};

}  // namespace devproxy::hal
