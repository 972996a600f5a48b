// SPDX-License-Identifier: Apache-2.0
// The kernels of reduce_ptx.h in this process: one for each shape, compiled by the driver when it is first launched.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "devproxy/hal/cuda/cuda_context.h"
#include "devproxy/hal/cuda/reduce_ptx.h"

namespace devproxy::hal::cuda {

class ReduceKernels {
 public:
  // Those of the process, whose GPU and primary context are one.
  static std::shared_ptr<ReduceKernels> of(const std::shared_ptr<Context>& context);
  explicit ReduceKernels(std::shared_ptr<Context> context);
  ~ReduceKernels();
  ReduceKernels(const ReduceKernels&) = delete;

  // Compiles it ahead. cuda.h does not say that loading a module never waits for what runs in the context, and that may
  // wait for another rank.
  Status load(const ReduceShape& shape);
  // Elements 0 .. count of all sources into every destination, in the stream. scalars: of kPreMulSum, by source.
  Status launch(const ReduceShape& shape, uint64_t count, const std::vector<uint64_t>& sources,
                const std::vector<uint64_t>& destinations, const std::vector<uint64_t>& scalars, CUstream stream);

 private:
  struct Kernel {
    CUmodule module = nullptr;
    CUfunction function = nullptr;
  };
  StatusOr<Kernel> kernel(const ReduceShape& shape);

  const std::shared_ptr<Context> context_;
  uint32_t most_blocks_ = 0;
  std::mutex mu_;  // a leaf, but for the driver
  std::map<ReduceShape, Kernel> kernels_;
};

}  // namespace devproxy::hal::cuda
