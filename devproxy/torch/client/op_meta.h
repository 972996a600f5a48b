// SPDX-License-Identifier: Apache-2.0
// What the results of an op are: sizes, types and layouts, and the numbers among them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

#include "devproxy/torch/block.h"
#include "devproxy/torch/client/device.h"

namespace devproxy::aten {

struct TensorMeta {
  bool defined = false;
  bool on_host = false;  // the op returns it on the CPU
  at::ScalarType dtype = at::kFloat;
  uint8_t flags = 0;
  size_t bytes = 0;
  c10::SmallVector<int64_t, 5> sizes, strides;
  // Of a sparse tensor: what it is made of.
  at::Layout layout = at::kStrided;
  bool coalesced = false;
  std::vector<TensorMeta> parts;
};

struct ReturnMeta {
  Tag tag = Tag::kNone;
  uint32_t count = 1;  // tensors of it in Meta::tensors
  c10::IValue scalar;
};

struct Meta {
  std::vector<ReturnMeta> returns;
  std::vector<TensorMeta> tensors;  // of all returns, flattened
  bool host_results = false;        // some tensor is on_host
  bool sparse = false;              // some tensor is: how many elements that has only the data say
};

// From a device's answer (block.h).
std::shared_ptr<const Meta> read_meta(Reader r);

// A tensor as the metadata say, with memory of the device. Precondition: m.defined && m.parts.empty() && !m.on_host
at::Tensor new_tensor_of(DeviceIndex device, const TensorMeta& m);

// The flags of TensorHead that the tensor itself has.
uint8_t tensor_flags(const at::Tensor& t);

}  // namespace devproxy::aten
