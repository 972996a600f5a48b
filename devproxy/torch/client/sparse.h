// SPDX-License-Identifier: Apache-2.0
// Sparse tensors: what they are made of, and how one is made of its parts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "devproxy/torch/block.h"

namespace devproxy::aten {

using Parts = c10::SmallVector<at::Tensor, kMaxParts>;

inline bool is_sparse(const at::Tensor& t) { return t.defined() && t.layout() != at::kStrided; }

// Dense tensors, in the order of SparseHead. Throws for a tensor of another kind (nested, quantized), by name.
Parts parts_of(const at::Tensor& t);

// A tensor over the parts, which the device will fill.
at::Tensor make_sparse(at::Layout layout, at::IntArrayRef sizes, bool coalesced, const Parts& parts);

// The tensor becomes what `from` is, and shares its parts.
void become(const at::Tensor& t, const at::Tensor& from);

}  // namespace devproxy::aten
