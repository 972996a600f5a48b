// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/c10d/operands.h"

#include <ATen/ops/view_as_real.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace devproxy::aten {

using c10d::ReduceOp;

nccl::ncclDataType_t data_type(at::ScalarType type) {
  switch (type) {
    case at::kChar: return nccl::ncclInt8;
    case at::kByte:
    case at::kBool: return nccl::ncclUint8;
    case at::kInt: return nccl::ncclInt32;
    case at::kLong: return nccl::ncclInt64;
    case at::kHalf: return nccl::ncclFloat16;
    case at::kFloat: return nccl::ncclFloat32;
    case at::kDouble: return nccl::ncclFloat64;
    case at::kBFloat16: return nccl::ncclBfloat16;
    case at::kFloat8_e4m3fn: return nccl::ncclFloat8e4m3;
    case at::kFloat8_e5m2: return nccl::ncclFloat8e5m2;
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2fnuz: return nccl::ncclUint8;
    default: TORCH_CHECK_TYPE(false, "Input tensor data type is not supported for NCCL process group: ", type);
  }
}

void check_operand(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cuda() && !tensor.is_sparse(), "Tensors must be CUDA and dense, but one is ",
                    tensor.toString());
  TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
}

void check_operands(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), "Tensor list must be nonempty");
  for (const at::Tensor& t : tensors) {
    check_operand(t);
    TORCH_CHECK_VALUE(t.device() == tensors.front().device(), "Tensors must be on the same device, but there are ",
                      tensors.front().device(), " and ", t.device());
  }
}

at::Tensor as_real(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

std::vector<at::Tensor> as_real(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> real;
  for (const at::Tensor& t : tensors) real.push_back(as_real(t));
  return real;
}

at::Tensor as_real(const at::Tensor& tensor, const ReduceOp& op) {
  TORCH_CHECK(
      !tensor.is_complex() || c10d::isComplexViewAsRealAllowed(op),
      "A reduction of complex tensors takes SUM, AVG, PREMUL_SUM or UNUSED; others do not act on the parts alone");
  return as_real(tensor);
}

namespace {

nccl::ncclRedOp_t plain_operator(const ReduceOp& op, at::ScalarType type) {
  const bool truth = type == at::kBool;
  switch (op.op_) {
    // Truth is one byte, 0 or 1: a sum would make other bytes of it.
    case ReduceOp::SUM: return truth ? nccl::ncclMax : nccl::ncclSum;
    case ReduceOp::PRODUCT: return truth ? nccl::ncclMin : nccl::ncclProd;
    case ReduceOp::MIN: return nccl::ncclMin;
    case ReduceOp::MAX: return nccl::ncclMax;
    case ReduceOp::AVG: TORCH_CHECK_TYPE(!truth, "Cannot use ReduceOp.AVG with Boolean inputs"); return nccl::ncclAvg;
    case ReduceOp::BAND: C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BAND with NCCL");
    case ReduceOp::BOR: C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BOR with NCCL");
    case ReduceOp::BXOR: C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BXOR with NCCL");
    default: C10_THROW_ERROR(ValueError, "Unhandled ReduceOp");
  }
}

template <class T>
nccl::ncclRedOp_t multiply_and_sum(double factor, nccl::ncclDataType_t type, nccl::ncclComm_t comm) {
  auto scalar = static_cast<T>(factor);
  nccl::ncclRedOp_t made{};
  nccl::check(nccl::api().ncclRedOpCreatePreMulSum(&made, &scalar, type, nccl::ncclScalarHostImmediate, comm), comm,
              "ncclRedOpCreatePreMulSum");
  return made;
}

nccl::ncclRedOp_t make_premul_sum(const ReduceOp& op, const at::Tensor& tensor, nccl::ncclComm_t comm) {
  const auto* given = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(given != nullptr, "ReduceOp.PREMUL_SUM has no factor; make it by _make_nccl_premul_sum");
  const auto type = data_type(tensor.scalar_type());
  if (given->tensor_factor.defined()) {
    const at::Tensor& factor = given->tensor_factor;
    TORCH_CHECK_VALUE(factor.device() == tensor.device() && factor.scalar_type() == tensor.scalar_type(),
                      "PREMUL_SUM's factor is ", factor.toString(), " on ", factor.device(), ", but the tensor is ",
                      tensor.toString(), " on ", tensor.device());
    nccl::ncclRedOp_t made{};
    nccl::check(nccl::api().ncclRedOpCreatePreMulSum(&made, factor.data_ptr(), type, nccl::ncclScalarDevice, comm),
                comm, "ncclRedOpCreatePreMulSum");
    return made;
  }
  switch (type) {
    case nccl::ncclFloat16: return multiply_and_sum<c10::Half>(given->double_factor, type, comm);
    case nccl::ncclFloat32: return multiply_and_sum<float>(given->double_factor, type, comm);
    case nccl::ncclBfloat16: return multiply_and_sum<c10::BFloat16>(given->double_factor, type, comm);
    case nccl::ncclFloat64: return multiply_and_sum<double>(given->double_factor, type, comm);
    default: TORCH_CHECK_TYPE(false, "PREMUL_SUM takes half, bfloat16, float or double, but got ", tensor.toString());
  }
}

}  // namespace

Reduction::Reduction(const ReduceOp& op, const at::Tensor& tensor, nccl::ncclComm_t comm) {
  if (op.op_ == ReduceOp::PREMUL_SUM) {
    op_ = make_premul_sum(op, tensor, comm);
    made_for_ = comm;
  } else {
    op_ = plain_operator(op, tensor.scalar_type());
  }
}

Reduction::~Reduction() {
  if (made_for_ != nullptr) (void)nccl::api().ncclRedOpDestroy(op_, made_for_);
}

}  // namespace devproxy::aten
