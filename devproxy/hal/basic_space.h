// SPDX-License-Identifier: Apache-2.0
// What a device answers for what it does not have. A device derives from this and overrides what it can do.
#pragma once

#include <vector>

#include "devproxy/hal/space.h"

namespace devproxy::hal {

class BasicSpace : public Space {
 public:
  // -- memory
  void freed(uint64_t, uint64_t, uint64_t) override {}
  void reuse(uint64_t, uint64_t) override {}
  PendingUse pending_use() override { return {oldest_pending(), {}}; }
  void host_window(uint64_t, uint64_t) override {}
  void host_allocated(uint64_t, uint64_t) override {}
  StatusOr<uint64_t> host_device_address(uint64_t, uint64_t) override {
    return Status(kNotSupported, "kernels of this device do not see host memory");
  }
  Status read(uint64_t, void*, size_t) override {
    return {kNotSupported, "this device cannot read memory for a checkpoint (level 2)"};
  }
  Status write(uint64_t, const void*, size_t) override {
    return {kNotSupported, "this device cannot write memory for a restore (level 2)"};
  }
  Status read_pieces(uint64_t addr, size_t bytes, const PieceSink& sink) override {
    std::vector<uint8_t> bounce(bytes);
    if (Status s = read(addr, bounce.data(), bytes); !s.ok()) return s;
    return sink(bounce.data(), bytes, 0);
  }
  Status write_pieces(uint64_t addr, size_t bytes, const PieceSource& source) override {
    std::vector<uint8_t> bounce(bytes);
    if (Status s = source(bounce.data(), bytes, 0); !s.ok()) return s;
    return write(addr, bounce.data(), bytes);
  }
  void* host_view(uint64_t, uint64_t) override { return nullptr; }
  void reserve(uint64_t) override {}
  uint64_t room_bytes(uint64_t) override { return UINT64_MAX; }
  void give_back() override {}
  uint64_t mapped_bytes() override { return UINT64_MAX; }
  void trim() override {}
  Status alias(uint64_t, size_t, Space&, uint64_t) override {
    return {kNotSupported, "this device cannot map one page twice (level 3)"};
  }
  Status loaded(uint64_t, uint64_t) override { return {}; }
  void all_loaded() override {}
  Status unalias(uint64_t, size_t) override {
    return {kNotSupported, "this device cannot map one page twice (level 3)"};
  }

  // -- queues
  Status set_queue_attribute(const QueueRef&, Ticket, const LaunchAttribute&) override { return {}; }
  void awaited(const QueueRef&) override {}
  uint32_t pending() const override { return idle() ? 0 : 1; }

  // -- events
  uint64_t event_clock_ns() override { return 0; }
  StatusOr<uint64_t> event_time_ns(const EventRef&) override {
    return Status(kNotSupported, "this device cannot tell an event's time for a checkpoint (level 2)");
  }
  Status restore_event(const EventRef&, uint64_t) override {
    return {kNotSupported, "this device cannot restore an event (level 2)"};
  }

  // -- modules
  StatusOr<std::vector<Variable>> variables(const ModuleRef&) override { return std::vector<Variable>{}; }
  StatusOr<std::vector<std::string>> function_names(const ModuleRef&) override {
    return Status(kNotSupported, "this device cannot list the kernels of a module: ask for them by name");
  }
  StatusOr<int64_t> occupancy(const FunctionRef&, const OccupancyQuery&) override {
    return Status(kNotSupported, "this device cannot tell how many blocks of a kernel run at once");
  }
  Status link(const std::vector<LinkOption>&, const std::vector<LinkInput>&, LinkOutput*) override {
    return {kNotSupported, "linking needs NVIDIA's compiler, which this device does not have; link before loading"};
  }
  Status tensor_map(const TensorMapArgs&, uint8_t (&)[kTensorMapBytes]) override {
    return {kNotSupported, "this device has no tensor maps"};
  }
  bool portable(const ModuleRef&) override { return false; }
  bool prints(const ModuleRef&) override { return false; }
  void take_output(std::string*, std::string*) override {}
  StatusOr<std::vector<uint8_t>> save_module(const ModuleRef&) override { return std::vector<uint8_t>{}; }
  Status load_module_state(const ModuleRef&, const uint8_t*, size_t) override {
    return {kNotSupported, "modules of this device keep nothing that could be restored"};
  }

  // -- arrays
  StatusOr<ArrayRef> create_array(const ArrayShape&) override {
    return Status(kNotSupported, "this device has no CUDA arrays");
  }
  void copy_array(const QueueRef& queue, Ticket ticket, const ArrayCopy&) override { nop(queue, ticket); }
  StatusOr<TextureRef> create_texture(const TextureArgs&, const ArrayRef&) override {
    return Status(kNotSupported, "this device has no texture units, so no texture and surface objects");
  }
  Status read_array(const ArrayRef&, uint64_t, uint64_t, void*) override {
    return {kNotSupported, "this device cannot read arrays for a checkpoint (level 2)"};
  }
  Status write_array(const ArrayRef&, uint64_t, uint64_t, const void*) override {
    return {kNotSupported, "this device cannot write arrays for a restore (level 2)"};
  }

  // -- communicators
  StatusOr<CommRef> create_comm(const CommConfig&) override {
    return Status(kNotSupported, "this device does not carry collectives between GPUs yet");
  }
  void init_comm(const QueueRef& queue, Ticket ticket, const CommRef&) override { nop(queue, ticket); }
  void communicate(const QueueRef& queue, Ticket ticket, std::vector<CommCall>) override { nop(queue, ticket); }
  void abort_comm(const CommRef&) override {}
  bool comm_complete(const CommRef&) override { return false; }
  CommState comm_state(const CommRef&, std::string*) override { return CommState::kOk; }
  void destroy_comm(const CommRef&) override {}
  void leave_comms() override {}
  int share_memory() override { return -1; }

  // -- pending commands. Caps::takes_back is false.
  bool withhold(bool) override { return true; }
  bool stands() override { return idle(); }
  bool stuck() override { return idle(); }
  bool in_host_function() override { return false; }
  StatusOr<std::vector<PendingCommand>> pending_commands() override {
    return Status(kNotSupported, "this device cannot take back what was submitted");
  }
  std::optional<CommandPlace> pending_record(const EventRef&) override { return std::nullopt; }
  Status submit_pending(const PendingCommand&) override {
    return {kNotSupported, "this device cannot take over what was submitted elsewhere"};
  }

  // -- the space
  void tidy() override {}
  void yield() override {}
  Status set_limit(uint32_t, uint64_t) override { return {kNotSupported, "this device has no limits to set"}; }
  StatusOr<uint64_t> get_limit(uint32_t) override { return Status(kNotSupported, "this device has no limits"); }
  Status reset_persisting_l2() override { return {}; }
  void restore_fault(int32_t) override {}
};

}  // namespace devproxy::hal
