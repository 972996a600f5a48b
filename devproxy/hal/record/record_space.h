// SPDX-License-Identifier: Apache-2.0
// One client process on the recording GPU: a software GPU's space, but for modules and launches, with every call
// written down. A launch is checked on the submitting thread; one that fails is an execution fault of the space.
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>

#include "devproxy/hal/forwarding_space.h"
#include "devproxy/hal/hal.h"
#include "devproxy/hal/record/record_module.h"
#include "devproxy/hal/record/recorder.h"

namespace devproxy::hal::record {

class RecordSpace final : public ForwardingSpace {
 public:
  RecordSpace(std::unique_ptr<Space> inner, SpaceOwner& owner, const image::Arch& arch, const Properties& properties,
              Recorder& recorder, uint32_t number)
      : ForwardingSpace(std::move(inner)),
        owner_(owner),
        arch_(arch),
        properties_(properties),
        recorder_(recorder),
        number_(number) {}
  ~RecordSpace() override { recorder_.flush(); }

  Status commit(uint64_t addr, uint64_t bytes, bool stable) override;
  void release(uint64_t addr, uint64_t bytes) override;
  void reuse(uint64_t addr, uint64_t bytes) override;
  void host_allocated(uint64_t addr, uint64_t bytes) override;

  QueueRef create_queue(QueueKind kind, int32_t priority, uint32_t index) override;
  void destroy_queue(const QueueRef& queue) override;
  Status set_queue_attribute(const QueueRef& queue, Ticket ticket, const LaunchAttribute& attribute) override;

  void copy(const QueueRef& queue, Ticket ticket, const CopyArgs& args) override;
  void memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& args) override;
  void launch(const QueueRef& queue, Ticket ticket, const FunctionRef& function, const LaunchArgs& args) override;
  void host_function(const QueueRef& queue, Ticket ticket, uint64_t token) override;

  EventRef create_event(bool timed) override;
  void record(const QueueRef& queue, Ticket ticket, const EventRef& event) override;
  void wait(const QueueRef& queue, Ticket ticket, const EventRef& event) override;

  // Modules are this device's own: none may reach the software GPU.
  StatusOr<ModuleRef> load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) override;
  StatusOr<std::vector<std::string>> function_names(const ModuleRef& module) override;
  StatusOr<FunctionRef> get_function(const ModuleRef& module, const std::string& name, FunctionInfo* info) override;
  StatusOr<Global> get_global(const ModuleRef& module, const std::string& name) override;
  std::vector<Global> globals(const ModuleRef& module) override;
  StatusOr<std::vector<Variable>> variables(const ModuleRef&) override { return std::vector<Variable>{}; }
  Status set_attribute(const FunctionRef& function, uint32_t attribute, int32_t value) override;
  StatusOr<int64_t> occupancy(const FunctionRef& function, const OccupancyQuery& query) override;
  bool portable(const ModuleRef&) override { return false; }
  bool prints(const ModuleRef&) override { return false; }  // nothing runs
  StatusOr<std::vector<uint8_t>> save_module(const ModuleRef&) override { return std::vector<uint8_t>{}; }
  Status load_module_state(const ModuleRef&, const uint8_t*, size_t) override {
    return {kNotSupported, "modules of the recording GPU keep nothing that could be restored"};
  }

  StatusOr<ArrayRef> create_array(const ArrayShape& shape) override;
  void copy_array(const QueueRef& queue, Ticket ticket, const ArrayCopy& args) override;
  StatusOr<TextureRef> create_texture(const TextureArgs& args, const ArrayRef& array) override;

  void tidy() override;
  Status set_limit(uint32_t limit, uint64_t value) override;
  Status reset_persisting_l2() override;
  void stop() override;
  void restore_fault(int32_t result) override;

 private:
  // A line of this space.
  template <class F>
  void line(std::string_view op, const F& fill) {
    recorder_.line(op, [&](Line& line) {
      line.add("space", number_);
      fill(line);
    });
  }
  uint32_t index_of(const QueueRef& queue) const;
  uint64_t id_of(const EventRef& event) const;
  void fail(const QueueRef& queue, Ticket ticket, int32_t result, const std::string& text);

  SpaceOwner& owner_;
  const image::Arch arch_;
  const Properties& properties_;
  Recorder& recorder_;
  const uint32_t number_;

  // Submitting thread only. Names for the record; an address that is used again has got a new name by then.
  std::unordered_map<const Queue*, uint32_t> queues_;
  std::unordered_map<const Event*, uint64_t> events_;
  uint64_t next_event_ = 1, next_module_ = 1, next_texture_ = 1;
  bool faulted_ = false;
};

}  // namespace devproxy::hal::record
