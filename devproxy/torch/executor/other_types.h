// SPDX-License-Identifier: Apache-2.0
// Ops that CUDA has for a type and the CPU refuses, beside those of 16 bits (half.h): here they are made of others.
#pragma once

#include <ATen/core/stack.h>

#include <string>

namespace devproxy::aten {

// Computes the op as a CUDA tensor's kernel does. False: the CPU has a kernel for these types, and nothing has been done.
using Instead = bool (*)(torch::jit::Stack& stack);

// For the op of this name; null: the CPU lacks no type of it.
Instead instead_of(const std::string& name);

}  // namespace devproxy::aten
