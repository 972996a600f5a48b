// SPDX-License-Identifier: Apache-2.0
// A device that passes everything on to another, for those that wrap one: they override what they look at. Its spaces are
// forwarding_space.h's.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include "devproxy/hal/hal.h"

namespace devproxy::hal {

class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::unique_ptr<Device> inner) : inner_(std::move(inner)) {}

  Caps caps() const override { return inner_->caps(); }
  const Properties& properties() const override { return inner_->properties(); }
  void warm(std::vector<uint8_t> description) override { inner_->warm(std::move(description)); }
  Status load_ahead(const std::vector<uint8_t>& description) override { return inner_->load_ahead(description); }
  StatusOr<std::unique_ptr<Space>> open_space(const SpaceConfig& config, SpaceOwner& owner) override {
    return inner_->open_space(config, owner);
  }
  StatusOr<uint16_t> open_transport(const TransportConfig& config) override { return inner_->open_transport(config); }
  void park_transport() override { inner_->park_transport(); }
  void resume_transport() override { inner_->resume_transport(); }
  void leave_transport() override { inner_->leave_transport(); }
  void take_over_transport() override { inner_->take_over_transport(); }
  TransportMarks mark_transport(uint64_t number) override { return inner_->mark_transport(number); }
  const char* running_here() const noexcept override { return inner_->running_here(); }

 protected:
  Device& inner() { return *inner_; }

 private:
  const std::unique_ptr<Device> inner_;
};

// Nothing of Device is left to a class that derives from this one.
static_assert(!std::is_abstract_v<ForwardingDevice>);

}  // namespace devproxy::hal
