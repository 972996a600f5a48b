// From the bytes of a parameter block to ATen values over device memory. Trusts nothing.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <utility>
#include <vector>

#include "devproxy/hal/host_module/include/devproxy_soft_module.h"
#include "devproxy/torch/block.h"
#include "devproxy/torch/executor/client.h"

namespace devproxy::aten {

// A tensor that the op writes, and the device memory that must hold the result afterwards.
struct Written {
  at::Tensor given;   // what the op got
  at::Tensor memory;  // the device memory, its bits without conjugation or negation
  bool conj, neg;     // how the client reads those bits
};

class Decoder {
 public:
  Decoder(Client& client, Reader reader, const devproxy_soft_services* services, const BlockHeader& header)
      : client_(client),
        reader_(reader),
        services_(services),
        infer_(header.mode == Mode::kInfer),
        copy_all_(header.flags & kFlagCopyAll),
        blank_(header.flags & kFlagBlank) {}

  c10::IValue value(int depth = 0);
  // An output that the client allocated: kTensor or kUndefined.
  at::Tensor output();
  // The generator of a random op; the next value must be one.
  at::Generator generator();
  // Those that the op may draw from and that live here.
  std::vector<at::Generator>& kept_generators() { return kept_generators_; }

  bool at_end() const { return reader_.left() == 0; }
  std::vector<Written>& written() { return written_; }

 private:
  at::Tensor device_tensor(bool is_output);
  at::Tensor host_tensor();
  at::Generator read_generator(Tag tag);
  void check_range(uint64_t addr, uint64_t bytes) const;

  Client& client_;
  Reader reader_;
  const devproxy_soft_services* services_;
  bool infer_, copy_all_, blank_;
  std::vector<at::Tensor> tensors_;  // kTensor arguments in order, for kSameTensor
  std::vector<Written> written_;
  std::vector<at::Generator> kept_generators_;
};

// Where a launch asks for an address outside its own memory: CUDA_ERROR_ILLEGAL_ADDRESS.
struct IllegalAddress : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace devproxy::aten
