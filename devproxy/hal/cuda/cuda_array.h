// SPDX-License-Identifier: Apache-2.0
// Arrays, texture and surface objects of the real driver.
#pragma once

#include <memory>

#include "devproxy/hal/cuda/cuda_context.h"
#include "devproxy/hal/hal.h"

namespace devproxy::hal::cuda {

struct CudaArray final : Array {
  std::shared_ptr<Context> context;
  CUarray handle = nullptr;
  ArrayExtent extent;
  ~CudaArray() override;

  static StatusOr<std::shared_ptr<CudaArray>> create(const std::shared_ptr<Context>& context, const ArrayShape& shape);
};

struct CudaTexture final : Texture {
  std::shared_ptr<Context> context;
  ArrayRef array;
  TextureKind kind = TextureKind::kTexture;
  bool made = false;
  ~CudaTexture() override;

  static StatusOr<std::shared_ptr<CudaTexture>> create(const std::shared_ptr<Context>& context, const TextureArgs& args,
                                                       const ArrayRef& array);
};

// As the driver describes it.
CUDA_MEMCPY3D driver_copy(const ArrayCopy& copy);

}  // namespace devproxy::hal::cuda
