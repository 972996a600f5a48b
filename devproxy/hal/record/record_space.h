// One client process on the recording GPU: a software GPU's space, but for modules and launches, with every call
// written down. A launch is checked on the submitting thread; one that fails is an execution fault of the space.
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>

#include "devproxy/hal/hal.h"
#include "devproxy/hal/record/record_module.h"
#include "devproxy/hal/record/recorder.h"

namespace devproxy::hal::record {

class RecordSpace final : public Space {
 public:
  RecordSpace(std::unique_ptr<Space> inner, SpaceOwner& owner, const image::Arch& arch, const Properties& properties,
              Recorder& recorder, uint32_t number)
      : inner_(std::move(inner)),
        owner_(owner),
        arch_(arch),
        properties_(properties),
        recorder_(recorder),
        number_(number) {}
  ~RecordSpace() override { recorder_.flush(); }

  Status commit(uint64_t addr, uint64_t bytes) override;
  void release(uint64_t addr, uint64_t bytes) override;
  void tidy() override;
  void host_window(uint64_t addr, uint64_t bytes) override { inner_->host_window(addr, bytes); }
  void host_allocated(uint64_t addr, uint64_t bytes) override;

  QueueRef create_queue(QueueKind kind, int32_t priority, uint32_t index) override;
  void destroy_queue(const QueueRef& queue) override;
  Status set_queue_attribute(const QueueRef& queue, Ticket ticket, const LaunchAttribute& attribute) override;
  Status reset_persisting_l2() override;
  uint64_t oldest_pending() override { return inner_->oldest_pending(); }
  bool idle() const override { return inner_->idle(); }
  uint32_t pending() const override { return inner_->pending(); }

  void nop(const QueueRef& queue, Ticket ticket) override { inner_->nop(queue, ticket); }
  void copy(const QueueRef& queue, Ticket ticket, const CopyArgs& args) override;
  StatusOr<ArrayRef> create_array(const ArrayShape& shape) override;
  void copy_array(const QueueRef& queue, Ticket ticket, const ArrayCopy& args) override;
  StatusOr<TextureRef> create_texture(const TextureArgs& args, const ArrayRef& array) override;
  void memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& args) override;
  void launch(const QueueRef& queue, Ticket ticket, const FunctionRef& function, const LaunchArgs& args) override;
  void host_function(const QueueRef& queue, Ticket ticket, uint64_t token) override;

  EventRef create_event(bool timed) override;
  void record(const QueueRef& queue, Ticket ticket, const EventRef& event) override;
  void wait(const QueueRef& queue, Ticket ticket, const EventRef& event) override;
  StatusOr<double> elapsed_ms(const EventRef& start, const EventRef& end) override {
    return inner_->elapsed_ms(start, end);
  }

  StatusOr<ModuleRef> load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) override;
  StatusOr<std::vector<std::string>> function_names(const ModuleRef& module) override;
  StatusOr<FunctionRef> get_function(const ModuleRef& module, const std::string& name, FunctionInfo* info) override;
  StatusOr<Global> get_global(const ModuleRef& module, const std::string& name) override;
  std::vector<Global> globals(const ModuleRef& module) override;
  Status set_attribute(const FunctionRef& function, uint32_t attribute, int32_t value) override;

  StatusOr<int64_t> occupancy(const FunctionRef& function, const OccupancyQuery& query) override;
  Status set_limit(uint32_t limit, uint64_t value) override;
  StatusOr<uint64_t> get_limit(uint32_t limit) override { return inner_->get_limit(limit); }
  StatusOr<uint64_t> host_device_address(uint64_t addr, uint64_t bytes) override {
    return inner_->host_device_address(addr, bytes);
  }

  void stop() override;

  Status read(uint64_t addr, void* to, size_t bytes) override { return inner_->read(addr, to, bytes); }
  Status write(uint64_t addr, const void* from, size_t bytes) override { return inner_->write(addr, from, bytes); }
  Status read_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, void* to) override {
    return inner_->read_array(array, first_row, rows, to);
  }
  Status write_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, const void* from) override {
    return inner_->write_array(array, first_row, rows, from);
  }
  void* host_view(uint64_t addr, uint64_t bytes) override { return inner_->host_view(addr, bytes); }
  uint64_t event_clock_ns() override { return inner_->event_clock_ns(); }
  StatusOr<uint64_t> event_time_ns(const EventRef& event) override { return inner_->event_time_ns(event); }
  Status restore_event(const EventRef& event, uint64_t time_ns) override {
    return inner_->restore_event(event, time_ns);
  }
  void restore_fault(int32_t result) override;
  Status alias(uint64_t addr, size_t bytes, Space& from, uint64_t from_addr) override {
    return inner_->alias(addr, bytes, *static_cast<RecordSpace&>(from).inner_, from_addr);  // one device, one kind
  }
  Status unalias(uint64_t addr, size_t bytes) override { return inner_->unalias(addr, bytes); }

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

  const std::unique_ptr<Space> inner_;
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
