// SPDX-License-Identifier: Apache-2.0
// A space that passes everything on to another, for devices that wrap one: they override what they look at.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include "devproxy/hal/space.h"

namespace devproxy::hal {

class ForwardingSpace : public Space {
 public:
  explicit ForwardingSpace(std::unique_ptr<Space> inner) : inner_(std::move(inner)) {}

  // -- memory
  Status commit(uint64_t addr, uint64_t bytes, bool stable) override { return inner_->commit(addr, bytes, stable); }
  void freed(uint64_t addr, uint64_t bytes, uint64_t position) override { inner_->freed(addr, bytes, position); }
  void release(uint64_t addr, uint64_t bytes) override { inner_->release(addr, bytes); }
  void reuse(uint64_t addr, uint64_t bytes) override { inner_->reuse(addr, bytes); }
  void reserve(uint64_t bytes) override { inner_->reserve(bytes); }
  void give_back() override { inner_->give_back(); }
  uint64_t mapped_bytes() override { return inner_->mapped_bytes(); }
  uint64_t room_bytes(uint64_t had) override { return inner_->room_bytes(had); }
  void host_window(uint64_t addr, uint64_t bytes) override { inner_->host_window(addr, bytes); }
  void host_allocated(uint64_t addr, uint64_t bytes) override { inner_->host_allocated(addr, bytes); }
  StatusOr<uint64_t> host_device_address(uint64_t addr, uint64_t bytes) override {
    return inner_->host_device_address(addr, bytes);
  }
  Status read(uint64_t addr, void* to, size_t bytes) override { return inner_->read(addr, to, bytes); }
  Status write(uint64_t addr, const void* from, size_t bytes) override { return inner_->write(addr, from, bytes); }
  Status read_pieces(uint64_t addr, size_t bytes, const PieceSink& sink) override {
    return inner_->read_pieces(addr, bytes, sink);
  }
  Status write_pieces(uint64_t addr, size_t bytes, const PieceSource& source) override {
    return inner_->write_pieces(addr, bytes, source);
  }
  void* host_view(uint64_t addr, uint64_t bytes) override { return inner_->host_view(addr, bytes); }
  void trim() override { inner_->trim(); }
  // All spaces of one device are wrapped by the same class.
  Status alias(uint64_t addr, size_t bytes, Space& from, uint64_t from_addr) override {
    return inner_->alias(addr, bytes, *static_cast<ForwardingSpace&>(from).inner_, from_addr);
  }
  Status unalias(uint64_t addr, size_t bytes) override { return inner_->unalias(addr, bytes); }
  Status loaded(uint64_t addr, uint64_t bytes) override { return inner_->loaded(addr, bytes); }
  void all_loaded() override { inner_->all_loaded(); }

  // -- queues
  QueueRef create_queue(QueueKind kind, int32_t priority, uint32_t index) override {
    return inner_->create_queue(kind, priority, index);
  }
  void destroy_queue(const QueueRef& queue) override { inner_->destroy_queue(queue); }
  Status set_queue_attribute(const QueueRef& queue, Ticket ticket, const LaunchAttribute& attribute) override {
    return inner_->set_queue_attribute(queue, ticket, attribute);
  }
  void awaited(const QueueRef& queue) override { inner_->awaited(queue); }
  uint64_t oldest_pending() override { return inner_->oldest_pending(); }
  PendingUse pending_use() override { return inner_->pending_use(); }
  bool idle() const override { return inner_->idle(); }
  uint32_t pending() const override { return inner_->pending(); }

  // -- commands
  void nop(const QueueRef& queue, Ticket ticket) override { inner_->nop(queue, ticket); }
  void copy(const QueueRef& queue, Ticket ticket, const CopyArgs& args) override { inner_->copy(queue, ticket, args); }
  void memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& args) override {
    inner_->memset(queue, ticket, args);
  }
  void launch(const QueueRef& queue, Ticket ticket, const FunctionRef& function, const LaunchArgs& args) override {
    inner_->launch(queue, ticket, function, args);
  }
  void host_function(const QueueRef& queue, Ticket ticket, uint64_t token) override {
    inner_->host_function(queue, ticket, token);
  }

  // -- events
  EventRef create_event(bool timed) override { return inner_->create_event(timed); }
  void record(const QueueRef& queue, Ticket ticket, const EventRef& event) override {
    inner_->record(queue, ticket, event);
  }
  void wait(const QueueRef& queue, Ticket ticket, const EventRef& event) override {
    inner_->wait(queue, ticket, event);
  }
  StatusOr<double> elapsed_ms(const EventRef& start, const EventRef& end) override {
    return inner_->elapsed_ms(start, end);
  }
  uint64_t event_clock_ns() override { return inner_->event_clock_ns(); }
  StatusOr<uint64_t> event_time_ns(const EventRef& event) override { return inner_->event_time_ns(event); }
  Status restore_event(const EventRef& event, uint64_t time_ns) override {
    return inner_->restore_event(event, time_ns);
  }

  // -- modules
  StatusOr<ModuleRef> load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) override {
    return inner_->load_module(image, image_bytes, place);
  }
  StatusOr<FunctionRef> get_function(const ModuleRef& module, const std::string& name, FunctionInfo* info) override {
    return inner_->get_function(module, name, info);
  }
  StatusOr<Global> get_global(const ModuleRef& module, const std::string& name) override {
    return inner_->get_global(module, name);
  }
  std::vector<Global> globals(const ModuleRef& module) override { return inner_->globals(module); }
  StatusOr<std::vector<Variable>> variables(const ModuleRef& module) override { return inner_->variables(module); }
  StatusOr<std::vector<std::string>> function_names(const ModuleRef& module) override {
    return inner_->function_names(module);
  }
  Status set_attribute(const FunctionRef& function, uint32_t attribute, int32_t value) override {
    return inner_->set_attribute(function, attribute, value);
  }
  StatusOr<int64_t> occupancy(const FunctionRef& function, const OccupancyQuery& query) override {
    return inner_->occupancy(function, query);
  }
  Status link(const std::vector<LinkOption>& options, const std::vector<LinkInput>& inputs, LinkOutput* out) override {
    return inner_->link(options, inputs, out);
  }
  Status tensor_map(const TensorMapArgs& args, uint8_t (&map)[kTensorMapBytes]) override {
    return inner_->tensor_map(args, map);
  }
  bool portable(const ModuleRef& module) override { return inner_->portable(module); }
  bool prints(const ModuleRef& module) override { return inner_->prints(module); }
  void take_output(std::string* out, std::string* err) override { inner_->take_output(out, err); }
  StatusOr<std::vector<uint8_t>> save_module(const ModuleRef& module) override { return inner_->save_module(module); }
  Status load_module_state(const ModuleRef& module, const uint8_t* from, size_t bytes) override {
    return inner_->load_module_state(module, from, bytes);
  }

  // -- communicators
  StatusOr<CommRef> create_comm(const CommConfig& config) override { return inner_->create_comm(config); }
  void init_comm(const QueueRef& queue, Ticket ticket, const CommRef& comm) override {
    inner_->init_comm(queue, ticket, comm);
  }
  void communicate(const QueueRef& queue, Ticket ticket, std::vector<CommCall> group) override {
    inner_->communicate(queue, ticket, std::move(group));
  }
  void abort_comm(const CommRef& comm) override { inner_->abort_comm(comm); }
  bool comm_complete(const CommRef& comm) override { return inner_->comm_complete(comm); }
  CommState comm_state(const CommRef& comm, std::string* why) override { return inner_->comm_state(comm, why); }
  void destroy_comm(const CommRef& comm) override { inner_->destroy_comm(comm); }
  void leave_comms() override { inner_->leave_comms(); }
  int share_memory() override { return inner_->share_memory(); }

  // -- pending commands
  bool withhold(bool on) override { return inner_->withhold(on); }
  bool stands() override { return inner_->stands(); }
  bool stuck() override { return inner_->stuck(); }
  bool in_host_function() override { return inner_->in_host_function(); }
  StatusOr<std::vector<PendingCommand>> pending_commands() override { return inner_->pending_commands(); }
  std::optional<CommandPlace> pending_record(const EventRef& event) override { return inner_->pending_record(event); }
  Status submit_pending(const PendingCommand& command) override { return inner_->submit_pending(command); }

  // -- arrays
  StatusOr<ArrayRef> create_array(const ArrayShape& shape) override { return inner_->create_array(shape); }
  void copy_array(const QueueRef& queue, Ticket ticket, const ArrayCopy& args) override {
    inner_->copy_array(queue, ticket, args);
  }
  StatusOr<TextureRef> create_texture(const TextureArgs& args, const ArrayRef& array) override {
    return inner_->create_texture(args, array);
  }
  Status read_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, void* to) override {
    return inner_->read_array(array, first_row, rows, to);
  }
  Status write_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, const void* from) override {
    return inner_->write_array(array, first_row, rows, from);
  }

  // -- the space
  void tidy() override { inner_->tidy(); }
  void yield() override { inner_->yield(); }
  Status set_limit(uint32_t limit, uint64_t value) override { return inner_->set_limit(limit, value); }
  StatusOr<uint64_t> get_limit(uint32_t limit) override { return inner_->get_limit(limit); }
  Status reset_persisting_l2() override { return inner_->reset_persisting_l2(); }
  void stop() override { inner_->stop(); }
  void restore_fault(int32_t result) override { inner_->restore_fault(result); }

 protected:
  const std::unique_ptr<Space> inner_;
};
static_assert(!std::is_abstract_v<ForwardingSpace>, "it must pass on what a subject's header has");

}  // namespace devproxy::hal
