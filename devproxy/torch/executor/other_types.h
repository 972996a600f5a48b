// SPDX-License-Identifier: Apache-2.0
// Ops that CUDA has for a type or a value and the CPU refuses, beside types of 16 bits (half.h): made of other ops here.
#pragma once

#include <ATen/core/stack.h>

#include <string>

namespace devproxy::aten {

// Computes the op as a CUDA tensor's kernel does. False: the CPU's kernel does it, and nothing has been done.
using Instead = bool (*)(torch::jit::Stack& stack);

// For the op of this name; null: the CPU's kernel takes what CUDA's takes.
Instead instead_of(const std::string& name);

}  // namespace devproxy::aten
