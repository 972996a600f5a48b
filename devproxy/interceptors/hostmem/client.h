// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace devproxy::sa::hostmem {

// True when the address lies in memory that the job gave to cuMemHostRegister.
bool is_registered(uint64_t addr);

}  // namespace devproxy::sa::hostmem
