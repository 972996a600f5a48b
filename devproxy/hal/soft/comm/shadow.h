// SPDX-License-Identifier: Apache-2.0
// What a rank of another tree has sent of its memory: a sparse file as long as that memory, in the job's folder, with
// the contributions at the rank's own addresses. The server that receives them writes it; every server of the tree maps
// it where it would map the memory of a rank of its own tree.
//
// Nothing is overwritten too early. While an operation is under way its rank may not change what it contributes (nccl.h:
// neither the job before the operation is over, nor another operation), so what another operation of the rank sends of
// the same bytes meanwhile is the same. And a rank posts the next operation of a communicator, or the next send of a
// pair, only when all have finished the last one.
//
// A shadow holds at most what its rank has ever contributed, so no more than the rank's device memory.
#pragma once

#include <cstdint>
#include <string>

#include "devproxy/csrc/base/status.h"

namespace devproxy::hal::soft {

inline constexpr uint64_t kMaxShadowBytes = uint64_t{1} << 46;

// make: whoever receives; the descriptor is the caller's. kNotFound: there is none.
StatusOr<int> open_shadow(const std::string& folder, uint64_t incarnation, uint64_t device_bytes, bool make);
void remove_shadow(const std::string& folder, uint64_t incarnation);

}  // namespace devproxy::hal::soft
