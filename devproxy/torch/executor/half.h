// SPDX-License-Identifier: Apache-2.0
// What CUDA computes in types of 16 bits and the CPU does not: converted to float32, computed, and converted back.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <exception>

namespace devproxy::aten {

// Is that the CPU's refusal to compute in a type of 16 bits?
bool lacks_half(const std::exception& e);

// The tensors of 16 bits among the values become float32 ones, also those in lists; where autograd is on it sees that.
// Returns the type of the first; Undefined: there was none.
at::ScalarType widen(torch::jit::Stack& stack);

// softmax and log_softmax from half to float, and back: only CUDA's kernels take two types. Places of arguments, or -1.
struct MixedOptions {
  explicit MixedOptions(const c10::FunctionSchema& schema);
  int half_to_float, input_dtype;
};

// Calls the op as `op.callBoxed`.
void call_in_any_type(const c10::OperatorHandle& op, const MixedOptions& options, torch::jit::Stack& stack);

}  // namespace devproxy::aten
