// SPDX-License-Identifier: Apache-2.0
// The executor in the server, as the client sees it: a module whose functions are ops by name, and the few functions of
// it that are no ops (block.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "devproxy/torch/block.h"
#include "devproxy/torch/client/device.h"

namespace devproxy::aten {

// Do ops run on a CUDA device, as they would natively? Else on the host's memory, as on device='cpu': then the client
// takes ops apart the CPU's way.
bool ops_run_on_cuda();
// Do generators live in the executor? Else each random op carries its seed. True on CUDA.
bool executor_keeps_generators();

// Where torch's libraries lie.
const std::string& torch_folder();

// Throws NotImplementedError where the framework has no such op.
CUfunction executor_function(DeviceIndex device, const std::string& name);
void launch(CUfunction f, CUstream stream, const Writer& block);
// Returns when the executor has been given what this thread launched on the stream, and so has written its reply. Where
// that is when an op has run, it waits for that; on CUDA it does not wait for the GPU.
void wait_submitted(DeviceIndex device, CUstream stream);

// The number of this thread's settings at the device's executor, which has been told of them. Cheap where nothing
// changed.
uint32_t settings_number(DeviceIndex device);

void set_generator(DeviceIndex device, uint64_t id, uint64_t seed, uint64_t offset);
std::pair<uint64_t, uint64_t> get_generator(DeviceIndex device, uint64_t id);  // seed, offset; waits
void copy_generator(DeviceIndex device, uint64_t id, uint64_t from);
void forget_generator(DeviceIndex device, uint64_t id) noexcept;

// A command of the current stream that takes so many cycles of the GPU's clock.
void sleep_on_device(DeviceIndex device, int64_t cycles);

// torch's cache of cuFFT plans, which is the executor's: the number that was asked for. Waits; throws what torch
// throws.
int64_t plan_cache(DeviceIndex device, PlansBlock::What what, int64_t value = 0);

// Where cuDNN wants a recurrent layer's weights in one buffer: in elements of their type. Waits.
struct RnnLayout {
  int64_t elements = 0;
  std::vector<int64_t> offsets;
};
RnnLayout rnn_layout(DeviceIndex device, at::TensorList weights, const RnnForm& form);

// What the framework in the server says of itself and of the GPU; asked once. Empty on the host.
struct Facts {
  long cudnn = 0, cudnn_runtime = 0, cudnn_frontend = 0, cudart = 0;
  bool has_cudnn = false, has_cublaslt = false, has_cusolver = false, has_magma = false;
  bool dilated_conv = false, depthwise_conv = false, bfloat16_conv = false, bfloat16_rnn = false;
  double batchnorm_epsilon = 1e-5;
  std::string config;
};
const Facts& executor_facts();

// A pinned buffer for a reply: the executor writes there directly, the same address on both sides, so no copy comes
// back.
class ReplyBuffer {
 public:
  static constexpr size_t kBytes = 64 << 10;  // up to here they are kept and used again
  ReplyBuffer(DeviceIndex device, size_t bytes);
  ~ReplyBuffer();
  ReplyBuffer(const ReplyBuffer&) = delete;
  ReplyBuffer& operator=(const ReplyBuffer&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(p_); }
  size_t size() const { return bytes_; }

 private:
  void* p_ = nullptr;
  DeviceIndex device_;
  size_t bytes_;
};

}  // namespace devproxy::aten
