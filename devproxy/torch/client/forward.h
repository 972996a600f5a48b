// SPDX-License-Identifier: Apache-2.0
// Sends an ATen op to the device: one cuLaunchKernel of the executor module's entry point of that name.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "devproxy/torch/client/device.h"
#include "devproxy/torch/client/generator.h"

namespace devproxy::aten {

// Over the ordinary CUDA wheel there are CUDA kernels already, and ours take the place of each of them.
#ifdef DEVPROXY_TORCH_OVERRIDE
inline constexpr bool kReplace = true;
#else
inline constexpr bool kReplace = false;
#endif

// Replaces the op's arguments on the stack by its results. The results' metadata come from the schema (in-place, out=),
// else from a cache by signature, else from the device ('infer', which waits).
void forward_op(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The same for an op by name.
torch::jit::Stack forward_named(const char* name, const char* overload, torch::jit::Stack arguments);

// The gradients of a composite op whose forward was sent whole: see kVjpPrefix. `wanted` has one flag per defined
// tensor among the arguments; the result has one tensor per set flag. (seed, offset) replay the forward's random
// numbers.
std::vector<at::Tensor> forward_vjp(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                    const std::vector<at::Tensor>& gradients, const std::vector<bool>& wanted,
                                    const RandomState& random_state);
// As forward_op, but with the random state given.
void forward_op_with_state(const c10::OperatorHandle& op, torch::jit::Stack* stack, const RandomState& random_state);

// Registers a kernel of the op's own signature where there is one: for small ops, most of whose cost is the boxing of
// their arguments and the making of their results. False: the op is not of such a form, or goes another way.
// `replaced`: it has a kernel of the CUDA wheel's, which ours takes the place of.
bool register_small(torch::Library& m, const c10::OperatorHandle& op, bool replaced);

// Address of the first element; 0 for a tensor without memory.
CUdeviceptr address_of(const at::Tensor& t);

// A new tensor on the device, without going through the dispatcher.
at::Tensor new_tensor(DeviceIndex device, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides);

struct OpCounts {
  int64_t launches = 0, infers = 0;
};
std::map<std::string, OpCounts> op_counts();

// On the software GPU over the CUDA wheel. Ops that were there at note_known_ops() stay as they are; those that have come since
// and have kernels for CUDA and the CPU are sent to the device as all others, which finds their CPU kernels (forward.cc, runs_here).
void note_known_ops();
void take_package_ops();

}  // namespace devproxy::aten
