// SPDX-License-Identifier: Apache-2.0
// What other server halves ask of memory.
#pragma once

#include "devproxy/csrc/server/handlers.h"

namespace devproxy::server::memory {

// One side of a copy: where it is in this process, or on the device; false where the client has nothing there.
// space: as in COPY.
bool resolve(Connection& c, const Message& m, uint8_t space, uint64_t place, uint64_t bytes, uint64_t* addr);

}  // namespace devproxy::server::memory
