// SPDX-License-Identifier: Apache-2.0
// The smallest device that compiles: a start for a new one. The guide is at the top of template_device.cc.
#pragma once

#include <memory>

#include "devproxy/hal/hal.h"

namespace devproxy::hal::example {

struct TemplateConfig {
  uint64_t memory_bytes = 1ull << 30;
};

std::unique_ptr<Device> make_device(const TemplateConfig& config);

}  // namespace devproxy::hal::example
