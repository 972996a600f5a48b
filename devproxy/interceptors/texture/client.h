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

inline bool has_array(const CUDA_MEMCPY3D& p) {
  return p.srcMemoryType == CU_MEMORYTYPE_ARRAY || p.dstMemoryType == CU_MEMORYTYPE_ARRAY;
}
// Precondition: has_array(p), and s captures nothing.
[[nodiscard]] int32_t copy(client::DeviceState* d, client::StreamObj* s, const CUDA_MEMCPY3D& p, bool wait);

// The same without the copy: would it be sent? Precondition: has_array(p).
[[nodiscard]] int32_t check_copy(const CUDA_MEMCPY3D& p);

// Destroys what was made under a context. Precondition: every stream of its device is idle.
void end_context(uint64_t context);

}  // namespace devproxy::sa::texture
