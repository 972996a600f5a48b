// SPDX-License-Identifier: Apache-2.0
// Copies across the border between host and device, and between devices.
#pragma once

#include <ATen/core/Tensor.h>

namespace devproxy::aten {

at::Tensor& copy_(at::Tensor& dst, const at::Tensor& src, bool non_blocking);
at::Scalar local_scalar_dense(const at::Tensor& t);

}  // namespace devproxy::aten
