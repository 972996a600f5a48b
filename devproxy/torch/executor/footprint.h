// SPDX-License-Identifier: Apache-2.0
// What a launch would do to device memory, by its parameter block alone: devproxy_executor_table::footprint.
#pragma once

#include <cstdint>

#include "devproxy/hal/host_module/include/devproxy_executor.h"

namespace devproxy::aten {

int footprint(void* state, const char* name, const uint8_t* params, uint64_t params_bytes, devproxy_executor_access* to,
              uint32_t room, uint32_t* needed, uint64_t* digest);

}  // namespace devproxy::aten
