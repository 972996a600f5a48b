// SPDX-License-Identifier: Apache-2.0
// The one way from a client's messages to its device. Everything that a handler, a dump or a restore asks of the
// client's hal::Space is a method here, and nobody else holds that space: what must look at every command (a
// collective that must be noted, a slice that must be opened, a rank that runs what another one runs) belongs in this
// class.
//
// Threads: the dispatch thread, and while the client is parked the server thread. idle() may be asked by any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/trace.h"
#include "devproxy/csrc/wire/handle.h"
#include "devproxy/csrc/wire/segment.h"
#include "devproxy/hal/hal.h"

namespace devproxy::server {

class DeviceDoor {
 public:
  using Ticket = hal::Ticket;

  explicit DeviceDoor(hal::Device& device) : device_(device) {}

  // With the legacy stream, which every client has from the start.
  Status open(const hal::SpaceConfig& config, hal::SpaceOwner& owner) {
    auto space = device_.open_space(config, owner);
    if (!space.ok()) return std::move(space).status();
    space_ = std::move(*space);
    streams_[0] = {kLegacyStream, space_->create_queue(hal::QueueKind::kLegacy, 0, 0)};
    trace_.know_stream(streams_[0].queue.get(), 0);
    return {};
  }
  bool is_open() const { return space_ != nullptr; }
  // Ends every stream. Afterwards nothing is submitted, and close() may follow when nobody holds an object any more.
  void stop() { space_->stop(); }
  void close() {
    streams_.clear();
    space_.reset();
  }

  hal::Caps caps() const { return device_.caps(); }
  const hal::Properties& properties() const { return device_.properties(); }

  // -- streams. nullptr: there is no such stream.

  hal::QueueRef* queue_of(VHandle stream) {
    if (stream.index() >= streams_.size()) return nullptr;
    Stream& entry = streams_[stream.index()];
    return entry.queue && entry.handle == stream ? &entry.queue : nullptr;
  }
  // Whatever stream has this index now.
  hal::QueueRef* queue_at(uint32_t index) {
    return index < streams_.size() && streams_[index].queue ? &streams_[index].queue : nullptr;
  }
  bool create_stream(VHandle stream, hal::QueueKind kind, int32_t priority) {
    if (stream.kind() != HandleKind::kStream || stream.index() == 0 || stream.index() >= streams_.size()) return false;
    Stream& entry = streams_[stream.index()];
    if (entry.queue) return false;
    entry = {stream, space_->create_queue(kind, priority, stream.index())};
    trace_.know_stream(entry.queue.get(), stream.index());
    return true;
  }
  bool destroy_stream(VHandle stream) {
    if (stream.index() == 0 || !queue_of(stream)) return false;
    trace_.forget_stream(streams_[stream.index()].queue.get());
    space_->destroy_queue(streams_[stream.index()].queue);
    streams_[stream.index()] = {};
    return true;
  }
  Status set_queue_attribute(const hal::QueueRef& queue, Ticket ticket, const LaunchAttribute& attribute) {
    return space_->set_queue_attribute(queue, ticket, attribute);
  }

  Trace& trace() { return trace_; }

  // -- commands on a stream: what is submitted completes at its ticket

  void nop(const hal::QueueRef& queue, Ticket ticket) {
    if (trace_.on()) trace_.begin(queue.get(), ticket.position, Trace::Kind::kNop);
    space_->nop(queue, ticket);
  }
  void copy(const hal::QueueRef& queue, Ticket ticket, const hal::CopyArgs& args) {
    if (trace_.on()) trace_.begin(queue.get(), ticket.position, Trace::Kind::kCopy, args.width_bytes * args.height);
    space_->copy(queue, ticket, args);
  }
  void copy_array(const hal::QueueRef& queue, Ticket ticket, const hal::ArrayCopy& args) {
    if (trace_.on()) trace_.begin(queue.get(), ticket.position, Trace::Kind::kCopy);
    space_->copy_array(queue, ticket, args);
  }
  void memset(const hal::QueueRef& queue, Ticket ticket, const hal::MemsetArgs& args) {
    if (trace_.on())
      trace_.begin(queue.get(), ticket.position, Trace::Kind::kMemset, args.width * args.count * args.rows);
    space_->memset(queue, ticket, args);
  }
  void launch(const hal::QueueRef& queue, Ticket ticket, const hal::FunctionRef& function,
              const hal::LaunchArgs& args) {
    if (trace_.on()) trace_.begin(queue.get(), ticket.position, Trace::Kind::kLaunch, 0, function.get());
    space_->launch(queue, ticket, function, args);
  }
  void host_function(const hal::QueueRef& queue, Ticket ticket, uint64_t token) {
    if (trace_.on()) trace_.begin(queue.get(), ticket.position, Trace::Kind::kHostFunction);
    space_->host_function(queue, ticket, token);
  }
  void record(const hal::QueueRef& queue, Ticket ticket, const hal::EventRef& event) {
    if (trace_.on()) trace_.begin(queue.get(), ticket.position, Trace::Kind::kRecord);
    space_->record(queue, ticket, event);
  }
  void wait(const hal::QueueRef& queue, Ticket ticket, const hal::EventRef& event) {
    if (trace_.on()) trace_.begin(queue.get(), ticket.position, Trace::Kind::kWait);
    space_->wait(queue, ticket, event);
  }

  void init_comm(const hal::QueueRef& queue, Ticket ticket, const hal::CommRef& comm) {
    if (trace_.on()) trace_.begin(queue.get(), ticket.position, Trace::Kind::kCommunicate);
    space_->init_comm(queue, ticket, comm);
  }
  void communicate(const hal::QueueRef& queue, Ticket ticket, std::vector<hal::CommCall> group) {
    if (trace_.on()) trace_.begin(queue.get(), ticket.position, Trace::Kind::kCommunicate);
    space_->communicate(queue, ticket, std::move(group));
  }

  // -- how far the commands are

  void awaited(const hal::QueueRef& queue) { space_->awaited(queue); }
  void all_awaited() {
    if (!device_.caps().wants_awaited) return;
    for (const Stream& stream : streams_)
      if (stream.queue) space_->awaited(stream.queue);
  }
  bool idle() const { return space_->idle(); }
  uint32_t pending() const { return space_->pending(); }
  uint64_t oldest_pending() { return space_->oldest_pending(); }
  hal::PendingUse pending_use() { return space_->pending_use(); }
  void tidy() { space_->tidy(); }
  void yield() { space_->yield(); }

  // -- what has not begun (hal/pending.h)

  bool withhold(bool on) { return space_->withhold(on); }
  bool stands() { return space_->stands(); }
  bool stuck() { return space_->stuck(); }
  bool in_host_function() { return space_->in_host_function(); }
  StatusOr<std::vector<hal::PendingCommand>> pending_commands() { return space_->pending_commands(); }
  std::optional<hal::CommandPlace> pending_record(const hal::EventRef& event) { return space_->pending_record(event); }
  Status submit_pending(const hal::PendingCommand& command) { return space_->submit_pending(command); }

  // -- memory

  Status commit(uint64_t addr, uint64_t bytes, bool stable) { return space_->commit(addr, bytes, stable); }
  void freed(uint64_t addr, uint64_t bytes, uint64_t position) { space_->freed(addr, bytes, position); }
  void reuse(uint64_t addr, uint64_t bytes) { space_->reuse(addr, bytes); }
  void release(uint64_t addr, uint64_t bytes) { space_->release(addr, bytes); }
  void reserve(uint64_t bytes) { space_->reserve(bytes); }
  void give_back() { space_->give_back(); }
  uint64_t mapped_bytes() { return space_->mapped_bytes(); }
  uint64_t room_bytes(uint64_t had) { return space_->room_bytes(had); }
  Status loaded(uint64_t addr, uint64_t bytes) { return space_->loaded(addr, bytes); }
  void all_loaded() { space_->all_loaded(); }
  void trim() { space_->trim(); }
  void host_window(uint64_t addr, uint64_t bytes) { space_->host_window(addr, bytes); }
  void host_allocated(uint64_t addr, uint64_t bytes) { space_->host_allocated(addr, bytes); }
  StatusOr<uint64_t> host_device_address(uint64_t addr, uint64_t bytes) {
    return space_->host_device_address(addr, bytes);
  }

  // -- objects

  hal::EventRef create_event(bool timed) { return space_->create_event(timed); }
  StatusOr<double> elapsed_ms(const hal::EventRef& start, const hal::EventRef& end) {
    return space_->elapsed_ms(start, end);
  }
  StatusOr<hal::ModuleRef> load_module(const uint8_t* image, size_t bytes, const hal::PlaceGlobal& place) {
    return space_->load_module(image, bytes, place);
  }
  StatusOr<hal::FunctionRef> get_function(const hal::ModuleRef& module, const std::string& name,
                                          hal::FunctionInfo* info) {
    auto function = space_->get_function(module, name, info);
    if (function.ok()) trace_.know(function->get(), name);
    return function;
  }
  StatusOr<hal::Space::Global> get_global(const hal::ModuleRef& module, const std::string& name) {
    return space_->get_global(module, name);
  }
  std::vector<hal::Space::Global> globals(const hal::ModuleRef& module) { return space_->globals(module); }
  StatusOr<std::vector<hal::Space::Variable>> variables(const hal::ModuleRef& module) {
    return space_->variables(module);
  }
  StatusOr<std::vector<std::string>> function_names(const hal::ModuleRef& module) {
    return space_->function_names(module);
  }
  bool portable(const hal::ModuleRef& module) { return space_->portable(module); }
  bool prints(const hal::ModuleRef& module) { return space_->prints(module); }
  Status set_attribute(const hal::FunctionRef& function, uint32_t attribute, int32_t value) {
    return space_->set_attribute(function, attribute, value);
  }
  StatusOr<int64_t> occupancy(const hal::FunctionRef& function, const hal::OccupancyQuery& query) {
    return space_->occupancy(function, query);
  }
  StatusOr<hal::ArrayRef> create_array(const ArrayShape& shape) { return space_->create_array(shape); }
  StatusOr<hal::TextureRef> create_texture(const TextureArgs& args, const hal::ArrayRef& array) {
    return space_->create_texture(args, array);
  }

  StatusOr<hal::CommRef> create_comm(const hal::CommConfig& config) { return space_->create_comm(config); }
  void abort_comm(const hal::CommRef& comm) { space_->abort_comm(comm); }
  void destroy_comm(const hal::CommRef& comm) { space_->destroy_comm(comm); }
  // Any thread, these four.
  CommState comm_state(const hal::CommRef& comm, std::string* why) { return space_->comm_state(comm, why); }
  bool comm_complete(const hal::CommRef& comm) { return space_->comm_complete(comm); }
  void leave_comms() { space_->leave_comms(); }
  int share_memory() { return space_->share_memory(); }

  // -- the device as a whole

  Status link(const std::vector<LinkOption>& options, const std::vector<hal::LinkInput>& inputs, hal::LinkOutput* out) {
    return space_->link(options, inputs, out);
  }
  Status tensor_map(const TensorMapArgs& args, uint8_t (&map)[kTensorMapBytes]) {
    return space_->tensor_map(args, map);
  }
  Status set_limit(uint32_t limit, uint64_t value) { return space_->set_limit(limit, value); }
  StatusOr<uint64_t> get_limit(uint32_t limit) { return space_->get_limit(limit); }
  Status reset_persisting_l2() { return space_->reset_persisting_l2(); }
  void take_output(std::string* out, std::string* err) { space_->take_output(out, err); }

  // -- dump and restore. Precondition: idle(), or stands().

  void* host_view(uint64_t addr, uint64_t bytes) { return space_->host_view(addr, bytes); }
  Status write(uint64_t addr, const void* from, size_t bytes) { return space_->write(addr, from, bytes); }
  Status read_pieces(uint64_t addr, size_t bytes, const hal::SpaceMemory::PieceSink& sink) {
    return space_->read_pieces(addr, bytes, sink);
  }
  Status write_pieces(uint64_t addr, size_t bytes, const hal::SpaceMemory::PieceSource& source) {
    return space_->write_pieces(addr, bytes, source);
  }
  Status read_array(const hal::ArrayRef& array, uint64_t first_row, uint64_t rows, void* to) {
    return space_->read_array(array, first_row, rows, to);
  }
  Status write_array(const hal::ArrayRef& array, uint64_t first_row, uint64_t rows, const void* from) {
    return space_->write_array(array, first_row, rows, from);
  }
  StatusOr<std::vector<uint8_t>> save_module(const hal::ModuleRef& module) { return space_->save_module(module); }
  Status load_module_state(const hal::ModuleRef& module, const uint8_t* from, size_t bytes) {
    return space_->load_module_state(module, from, bytes);
  }
  uint64_t event_clock_ns() { return space_->event_clock_ns(); }
  StatusOr<uint64_t> event_time_ns(const hal::EventRef& event) { return space_->event_time_ns(event); }
  Status restore_event(const hal::EventRef& event, uint64_t time_ns) { return space_->restore_event(event, time_ns); }
  void restore_fault(int32_t result) { space_->restore_fault(result); }

 private:
  struct Stream {
    VHandle handle;
    hal::QueueRef queue;
  };
  hal::Device& device_;
  std::unique_ptr<hal::Space> space_;
  std::vector<Stream> streams_{kStreams};
  Trace trace_;
};

}  // namespace devproxy::server
