// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/identity.h"

#include "cuda_number.gen.h"
#include "devproxy/hal/hal.h"

namespace devproxy::hal {

Identity identity_of(const Properties& properties) {
  return {properties.uuid, properties.pci_domain, properties.pci_bus, properties.pci_device};
}

void assume(const Identity& identity, Properties* properties) {
  using namespace cuda_number;
  auto& attributes = properties->attributes;
  properties->uuid = identity.uuid;
  properties->pci_domain = attributes[CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID] = identity.pci_domain;
  properties->pci_bus = attributes[CU_DEVICE_ATTRIBUTE_PCI_BUS_ID] = identity.pci_bus;
  properties->pci_device = attributes[CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID] = identity.pci_device;
}

}  // namespace devproxy::hal
