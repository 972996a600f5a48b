// SPDX-License-Identifier: Apache-2.0
// Copies as the driver describes them, for graphs.
#pragma once

#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart::memory {

// Of one element, of the formats that arrays can have here.
size_t element_bytes(const CUDA_ARRAY3D_DESCRIPTOR& d);
cudaError_t describe(const cudaMemcpy3DParms& p, CUDA_MEMCPY3D* c);
cudaError_t describe(void* dst, const void* src, size_t count, cudaMemcpyKind kind, CUDA_MEMCPY3D* c);
// Where `count` bytes of a variable lie that a copy of that kind goes to, or comes from.
cudaError_t address_of_symbol(const void* symbol, size_t count, size_t offset, bool to, cudaMemcpyKind kind,
                              void** out);

}  // namespace devproxy::sa::cudart::memory
