// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/reduce_kernels.h"

#include <algorithm>
#include <string>
#include <utility>

namespace devproxy::hal::cuda {

namespace {

constexpr int kBlocksPerMultiprocessor = 8;  // 2,048 threads, which is all that one runs at once

}  // namespace

std::shared_ptr<ReduceKernels> ReduceKernels::of(const std::shared_ptr<Context>& context) {
  static std::mutex mu;
  static std::weak_ptr<ReduceKernels> known;
  std::lock_guard lock(mu);
  auto kernels = known.lock();
  if (!kernels) known = kernels = std::make_shared<ReduceKernels>(context);
  return kernels;
}

ReduceKernels::ReduceKernels(std::shared_ptr<Context> context) : context_(std::move(context)) {
  int multiprocessors = 0;
  (void)context_->enter().cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                               context_->device());
  most_blocks_ = static_cast<uint32_t>(std::max(multiprocessors, 1) * kBlocksPerMultiprocessor);
}

ReduceKernels::~ReduceKernels() {
  const Driver& cu = context_->enter();
  for (const auto& [shape, kernel] : kernels_) (void)cu.cuModuleUnload(kernel.module);
}

StatusOr<ReduceKernels::Kernel> ReduceKernels::kernel(const ReduceShape& shape) {
  std::lock_guard lock(mu_);
  if (const auto known = kernels_.find(shape); known != kernels_.end()) return known->second;
  const Driver& cu = context_->enter();
  const std::string text = reduce_ptx(shape);
  Kernel made;
  if (Status s = cu.status(cu.cuModuleLoadDataEx(&made.module, text.c_str(), 0, nullptr, nullptr),
                           cu.cuModuleLoadDataEx, "compiling the kernel of a reduction");
      !s.ok())
    return s;
  if (Status s = cu.status(cu.cuModuleGetFunction(&made.function, made.module, kReduceEntry), cu.cuModuleGetFunction,
                           "finding the kernel of a reduction");
      !s.ok()) {
    (void)cu.cuModuleUnload(made.module);
    return s;
  }
  return kernels_.emplace(shape, made).first->second;
}

Status ReduceKernels::load(const ReduceShape& shape) { return kernel(shape).status(); }

Status ReduceKernels::launch(const ReduceShape& shape, uint64_t count, const std::vector<uint64_t>& sources,
                             const std::vector<uint64_t>& destinations, const std::vector<uint64_t>& scalars,
                             CUstream stream) {
  if (count == 0) return {};
  auto found = kernel(shape);
  if (!found.ok()) return std::move(found).status();
  const Driver& cu = context_->enter();
  auto params = reduce_params(count, sources, destinations, scalars);
  size_t bytes = params.size() * sizeof params[0];
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, params.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  const auto blocks =
      static_cast<uint32_t>(std::min<uint64_t>((count + kReduceThreads - 1) / kReduceThreads, most_blocks_));
  return cu.status(cu.cuLaunchKernel(found->function, blocks, 1, 1, kReduceThreads, 1, 1, 0, stream, nullptr, extra),
                   cu.cuLaunchKernel, "launching the kernel of a reduction");
}

}  // namespace devproxy::hal::cuda
