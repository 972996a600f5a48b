// SPDX-License-Identifier: Apache-2.0
// CUDA arrays as the client knows them: a virtual handle and a shape. Their memory is the server's.
#pragma once

#include "devproxy/csrc/args/array.h"
#include "devproxy/interceptors/client_common.h"

namespace devproxy::sa::texture {

struct ArrayObj {
  client::DeviceState* device = nullptr;
  ArrayShape shape;
  ArrayExtent extent;
  uint64_t context = 0;
};
using ArrayMap = client::HandleMap<ArrayObj, HandleKind::kArray>;
ArrayMap& arrays();

// Destroys what was made under a context. Precondition: every stream of its device is idle.
void end_context(uint64_t context);

}  // namespace devproxy::sa::texture
