// SPDX-License-Identifier: Apache-2.0
// What NCCL takes of a tensor: its type, its operator, and which tensors it refuses.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

#include "devproxy/torch/client/c10d/nccl_api.h"

namespace devproxy::aten {

// Throws for the types that torch's NCCL backend refuses.
nccl::ncclDataType_t data_type(at::ScalarType type);

// Throws unless it is a dense, contiguous tensor of a GPU.
void check_operand(const at::Tensor& tensor);
void check_operands(const std::vector<at::Tensor>& tensors);
// As real numbers, where it is complex: NCCL knows none.
at::Tensor as_real(const at::Tensor& tensor);
std::vector<at::Tensor> as_real(const std::vector<at::Tensor>& tensors);
// For a reduction. Throws where the operator does not act on the parts of complex numbers one by one.
at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op);

// An operator of NCCL's for one call; PREMUL_SUM is made for the communicator, and destroyed with this object.
class Reduction {
 public:
  Reduction(const c10d::ReduceOp& op, const at::Tensor& tensor, nccl::ncclComm_t comm);
  ~Reduction();
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;
  operator nccl::ncclRedOp_t() const { return op_; }

 private:
  nccl::ncclRedOp_t op_;
  nccl::ncclComm_t made_for_ = nullptr;
};

}  // namespace devproxy::aten
