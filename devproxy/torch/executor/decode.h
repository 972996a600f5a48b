// SPDX-License-Identifier: Apache-2.0
// From the bytes of a parameter block to ATen values over device memory. Trusts nothing.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <utility>
#include <vector>

#include "devproxy/hal/host_module/include/devproxy_soft_module.h"
#include "devproxy/torch/block.h"
#include "devproxy/torch/executor/client.h"

namespace devproxy::aten {

// A tensor that the op writes, and the device memory that must hold the result afterwards. The memory is not a tensor
// yet: nearly every op leaves its result where it belongs, and then nobody asks for one.
struct Written {
  at::Tensor given;  // what the op got
  void* p;           // the device memory, its bits without conjugation or negation
  uint64_t bytes;
  at::ScalarType dtype;
  bool conj, neg;  // how the client reads those bits
  // As the client said it; the op may have resized `given`. Copies: the client can change the block meanwhile.
  c10::SmallVector<int64_t, 5> sizes, strides;

  at::Tensor memory(const Client& client) const;
};

class Decoder {
 public:
  Decoder(Client& client, Reader reader, const devproxy_soft_services* services, const BlockHeader& header)
      : client_(client),
        reader_(reader),
        services_(services),
        infer_(header.mode == Mode::kInfer),
        copy_all_(header.flags & kFlagWritesUndeclared),
        blank_(header.flags & kFlagBlank) {}

  c10::IValue value(int depth = 0);
  // An output that the client allocated: kTensor or kUndefined.
  at::Tensor output();
  // The generator of a random op; the next value must be one.
  at::Generator generator();
  // Those that the op may draw from and that live here.
  std::vector<at::Generator>& kept_generators() { return kept_generators_; }

  bool at_end() const { return reader_.left() == 0; }
  // Those that have elements.
  c10::ArrayRef<Written> written() const { return written_; }

 private:
  at::Tensor device_tensor(bool is_output);
  at::Tensor host_tensor();
  at::Tensor sparse_tensor();
  at::Generator read_generator(Tag tag);
  void check_range(uint64_t addr, uint64_t bytes) const;

  Client& client_;
  Reader reader_;
  const devproxy_soft_services* services_;
  bool infer_, copy_all_, blank_;
  // kTensor arguments in order, for kSameTensor. Not owned: value() has returned each to the caller, who keeps all of
  // them as long as values are read, or has it in a list that it is about to return.
  c10::SmallVector<c10::TensorImpl*, 8> tensors_;
  c10::SmallVector<Written, 2> written_;
  std::vector<at::Generator> kept_generators_;
};

// Where a launch asks for an address outside its own memory: CUDA_ERROR_ILLEGAL_ADDRESS.
struct IllegalAddress : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace devproxy::aten
