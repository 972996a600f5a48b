// SPDX-License-Identifier: Apache-2.0
// The block of one op: its arguments for the device, as block.h says.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstring>
#include <string>
#include <vector>

#include "devproxy/torch/block.h"
#include "devproxy/torch/client/device.h"
#include "devproxy/torch/client/generator.h"
#include "devproxy/torch/client/op_plan.h"

namespace devproxy::aten {

[[noreturn]] void throw_mixed_devices(DeviceIndex device, c10::Device other);
[[noreturn]] void refuse_sparse_in_capture();

// Writes a block and, beside it, the signature that decides the results' metadata.
class Encoder {
 public:
  Writer block;
  Key key;
  bool want_key = false;
  DeviceIndex device = -1;

  // fallback: where the op runs unless a tensor says otherwise.
  void begin(size_t n_args, DeviceIndex fallback);

  BlockHeader header() {
    BlockHeader h;
    std::memcpy(&h, block.at(0), sizeof h);
    return h;
  }
  void set_header(const BlockHeader& h) { std::memcpy(block.at(0), &h, sizeof h); }
  void add_flag(BlockFlags flag) {
    BlockHeader h = header();
    h.flags |= flag;
    set_header(h);
  }

  // -- arguments, in their order. scalar_in_key: a number's value decides the results' metadata too.
  void value(const c10::IValue& v, const ArgPlan& arg, bool scalar_in_key);
  void tensor(const at::Tensor& t, const ArgPlan& arg);
  void generator(const RandomState& state);
  void tensor_list(const std::vector<at::Tensor>& l);
  void bool_list(const std::vector<bool>& l);
  // Behind the arguments: a new result, or none.
  void output(const at::Tensor& t);

 private:
  static constexpr size_t kRemembered = 8;

  void see_device(c10::Device d) {
    if (tensors_++ == 0) {
      if (device != d.index()) [[unlikely]]
        move_to(d.index());
    } else if (device != d.index()) {
      throw_mixed_devices(device, d);
    }
  }

  // The signature leaves out the number of elements: no dense result's shape depends on it.
  void sparse_tensor(const at::Tensor& t, const ArgPlan& arg);

  // The op runs where its tensors are, which need not be the current device: that one too must know the settings.
  void move_to(DeviceIndex d);

  void mark(Tag tag, uint64_t what = 0) {
    block.tag(tag);
    if (!want_key) return;
    key.push_back(static_cast<uint64_t>(tag));
    key.push_back(what);
  }

  void device_tensor(const at::Tensor& t, uint8_t extra_flags);
  // Numbers, and what CUDA too takes from the host: index lists and sequence lengths.
  void host_tensor(const at::Tensor& t, const ArgPlan& arg);
  template <class T, class F>
  void words(Tag tag, c10::ArrayRef<c10::IValue> l, F get);
  void list(Tag tag, c10::ArrayRef<c10::IValue> l, const ArgPlan& arg, bool scalar_in_key);

  struct Seen {
    const c10::TensorImpl* impl;
    size_t head;  // where its TensorHead is in the block
  };
  c10::SmallVector<Seen, kRemembered> seen_;
  size_t tensors_ = 0;
};

}  // namespace devproxy::aten
