// SPDX-License-Identifier: Apache-2.0
// How to add a device
//
//  1. Copy this folder to hal/<name>/, rename namespace and classes. It compiles, and copies and sets memory already.
//  2. Make memory real, at addresses that the caller chose: the one thing devproxy cannot do without. If your device
//     cannot, stop here.
//  3. Make queues real: commands of one queue in order, queues side by side, kLegacy as queue.h says. Look at hal/soft
//     (threads of its own) and hal/cuda (the driver's streams) for the two ways. The rules that are easy to break:
//       - a submission never blocks, not even when your driver's queue is full;
//       - every command completes, once, in the order of its queue, also after a fault;
//       - nobody may have to wait for a command behind the one he waits for;
//       - on_complete and on_fault are never called under a lock that a submission takes.
//  4. Make kernels real: load_module, get_function (with the layout of the parameters), launch.
//  5. Level 1 is done when tests/subjects/driver pass on it. Level 2: read and write. Level 3: alias and unalias. Raise
//     caps().level only then.
//  6. Give devproxy-server a word for it: a branch in hal/devices.cc beside "soft", a target in hal/CMakeLists.txt, the
//     word in devproxy/cli/run.py (--device), and your folder's line in tests/native/test_layers.py.
//
// Your folder knows the headers of hal, csrc/base and csrc/args, nothing else: no connection, no ring, no vendor header
// outside of it.
#include "devproxy/hal/template/template_device.h"

#include <sys/mman.h>

#include <cstring>

#include "devproxy/hal/basic_device.h"
#include "devproxy/hal/basic_space.h"

namespace devproxy::hal::example {

namespace {

struct TemplateQueue final : Queue {
  uint32_t index = 0;
};

struct TemplateEvent final : Event {
  bool recorded = false;
};

// Everything happens inside the submission, so order is trivial and nothing is ever pending.
class TemplateSpace final : public BasicSpace {
 public:
  TemplateSpace(const SpaceConfig& config, SpaceOwner& owner) : config_(config), owner_(owner) {}
  ~TemplateSpace() override { munmap(reinterpret_cast<void*>(config_.device_base), config_.device_bytes); }

  // -- memory
  Status commit(uint64_t, uint64_t, bool) override { return {}; }  // pages appear at first touch
  void release(uint64_t addr, uint64_t bytes) override { (void)addr, (void)bytes; }

  // -- queues
  QueueRef create_queue(QueueKind, int32_t, uint32_t index) override {
    auto queue = std::make_shared<TemplateQueue>();
    queue->index = index;
    return queue;
  }
  void destroy_queue(const QueueRef&) override {}
  uint64_t oldest_pending() override { return UINT64_MAX; }
  bool idle() const override { return true; }

  // -- commands
  void nop(const QueueRef& queue, Ticket ticket) override { complete(queue, ticket); }
  void copy(const QueueRef& queue, Ticket ticket, const CopyArgs& a) override {
    for (uint64_t row = 0; row < a.height && !faulted_; row++)
      std::memmove(reinterpret_cast<uint8_t*>(a.dst) + row * a.dst_pitch,
                   reinterpret_cast<const uint8_t*>(a.src) + row * a.src_pitch, a.width_bytes);
    complete(queue, ticket);
  }
  void memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& a) override {
    for (uint64_t row = 0; row < a.rows && !faulted_; row++)
      for (uint64_t i = 0; i < a.count; i++)  // little endian, as the host is
        std::memcpy(reinterpret_cast<uint8_t*>(a.dst) + row * a.pitch + i * a.width, &a.value, a.width);
    complete(queue, ticket);
  }
  void launch(const QueueRef& queue, Ticket ticket, const FunctionRef&, const LaunchArgs&) override {
    if (!faulted_) owner_.on_fault(kLaunchFailed, "the template device runs no kernels");
    faulted_ = true;
    complete(queue, ticket);
  }
  // A real device must not do this here: the submitter is the thread that would read the client's answer.
  void host_function(const QueueRef& queue, Ticket ticket, uint64_t) override {
    if (!faulted_) owner_.on_fault(kNotSupported, "the template device runs no host functions");
    faulted_ = true;
    complete(queue, ticket);
  }

  // -- events
  EventRef create_event(bool) override { return std::make_shared<TemplateEvent>(); }
  void record(const QueueRef& queue, Ticket ticket, const EventRef& event) override {
    static_cast<TemplateEvent&>(*event).recorded = true;
    complete(queue, ticket);
  }
  void wait(const QueueRef& queue, Ticket ticket, const EventRef&) override { complete(queue, ticket); }
  StatusOr<double> elapsed_ms(const EventRef& start, const EventRef& end) override {
    if (!static_cast<const TemplateEvent&>(*start).recorded || !static_cast<const TemplateEvent&>(*end).recorded)
      return Status(kInvalidHandle, "an event was never recorded");
    return 0.0;
  }

  // -- modules
  StatusOr<ModuleRef> load_module(const uint8_t*, size_t, const PlaceGlobal&) override {
    return Status(kNotSupported, "the template device loads no modules");
  }
  StatusOr<FunctionRef> get_function(const ModuleRef&, const std::string& name, FunctionInfo*) override {
    return Status(kNotFound, "no function '" + name + "'");
  }
  StatusOr<Global> get_global(const ModuleRef&, const std::string& name) override {
    return Status(kNotFound, "no global '" + name + "'");
  }
  std::vector<Global> globals(const ModuleRef&) override { return {}; }
  Status set_attribute(const FunctionRef&, uint32_t, int32_t) override { return {}; }

  void stop() override {}

 private:
  void complete(const QueueRef& queue, Ticket ticket) {
    owner_.on_complete(static_cast<const TemplateQueue&>(*queue).index, ticket.position, ticket.tag);
  }

  const SpaceConfig config_;
  SpaceOwner& owner_;
  bool faulted_ = false;
};

class TemplateDevice final : public BasicDevice {
 public:
  explicit TemplateDevice(const TemplateConfig& config) {
    properties_.name = "devproxy template device";
    properties_.total_bytes = config.memory_bytes;
  }
  Caps caps() const override { return {1}; }
  const Properties& properties() const override { return properties_; }
  StatusOr<std::unique_ptr<Space>> open_space(const SpaceConfig& config, SpaceOwner& owner) override {
    void* const want = reinterpret_cast<void*>(config.device_base);
    void* const got = mmap(want, config.device_bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == MAP_FAILED) return Status::from_errno(kOutOfMemory, "mapping device memory at its fixed address");
    if (got != want) {  // a kernel before 4.17 takes the address as a wish
      munmap(got, config.device_bytes);
      return Status(kOutOfMemory, "device memory cannot lie at its fixed address");
    }
    return std::unique_ptr<Space>(std::make_unique<TemplateSpace>(config, owner));
  }
  const char* running_here() const noexcept override { return nullptr; }

 private:
  Properties properties_;
};

}  // namespace

std::unique_ptr<Device> make_device(const TemplateConfig& config) { return std::make_unique<TemplateDevice>(config); }

}  // namespace devproxy::hal::example
