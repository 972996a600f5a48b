// SPDX-License-Identifier: Apache-2.0
// What a job recognises one of its GPUs by. It stays with the job, whatever GPU is behind it, and several of the job's
// GPUs that are on one never look like one.
#pragma once

#include <array>
#include <cstdint>

namespace devproxy::hal {

struct Properties;

struct Identity {
  std::array<uint8_t, 16> uuid{};
  int32_t pci_domain = 0, pci_bus = 0, pci_device = 0;
};

Identity identity_of(const Properties& properties);
// Attributes included.
void assume(const Identity& identity, Properties* properties);

}  // namespace devproxy::hal
