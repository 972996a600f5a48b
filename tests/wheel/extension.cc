// SPDX-License-Identifier: Apache-2.0
// What a user's extension asks torch's CUDA library for: the current stream and device, guards, streams of the pool.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace {

int64_t current_stream(const at::Tensor& x) {
  const c10::cuda::CUDAGuard guard(x.device());
  return reinterpret_cast<int64_t>(at::cuda::getCurrentCUDAStream().stream());
}

// The stream of `device`, and the device that the runtime says is current: no guard.
std::vector<int64_t> unguarded() {
  int device = -1;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  return {device, c10::cuda::current_device(), at::cuda::getCurrentCUDAStream().device_index()};
}

// Ops behind a guard of C++ run on that guard's stream, which is what torch.cuda would answer there.
std::tuple<at::Tensor, int64_t> doubled_aside(const at::Tensor& x) {
  const auto here = at::cuda::getCurrentCUDAStream(x.device().index());
  const auto side = at::cuda::getStreamFromPool(/*isHighPriority=*/true, x.device().index());
  at::cuda::CUDAEvent ready, done;
  ready.record(here);
  at::Tensor result;
  {
    const c10::cuda::CUDAStreamGuard guard(side);
    ready.block(side);
    result = x * 2;
    done.record(side);
  }
  done.block(here);
  result.record_stream(here);
  return {result, reinterpret_cast<int64_t>(side.stream())};
}

// The current stream as the dispatcher's guards see it, inside a guard of C++.
bool guards_agree(const at::Tensor& x) {
  const auto side = at::cuda::getStreamFromPool(false, x.device().index());
  const c10::cuda::CUDAStreamGuard guard(side);
  const c10::impl::VirtualGuardImpl impl(c10::kCUDA);
  return impl.getStream(x.device()) == side.unwrap();
}

void select_device(int64_t device) { C10_CUDA_CHECK(cudaSetDevice(static_cast<int>(device))); }

}  // namespace

TORCH_LIBRARY(extension_test, m) {
  m.def("current_stream(Tensor x) -> int", &current_stream);
  m.def("unguarded() -> int[]", &unguarded);
  m.def("doubled_aside(Tensor x) -> (Tensor, int)", &doubled_aside);
  m.def("guards_agree(Tensor x) -> bool", &guards_agree);
  m.def("select_device(int device) -> ()", &select_device);
}
