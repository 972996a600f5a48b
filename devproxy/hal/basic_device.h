// SPDX-License-Identifier: Apache-2.0
// What a device without executors and without transport answers. A device derives from this and overrides what it can do.
#pragma once

#include "devproxy/hal/hal.h"

namespace devproxy::hal {

class BasicDevice : public Device {
 public:
  void warm(std::vector<uint8_t>) override {}
  Status load_ahead(const std::vector<uint8_t>&) override { return {}; }
  StatusOr<uint16_t> open_transport(const TransportConfig&) override {
    return Status(kNotSupported, "communicators of this device stay on one host");
  }
  void park_transport() override {}
  void resume_transport() override {}
  void leave_transport() override {}
  void take_over_transport() override {}
  TransportMarks mark_transport(uint64_t) override { return {}; }
};

}  // namespace devproxy::hal
