// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/executor/other_types.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/div.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/fmod.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace devproxy::aten {
namespace {

using torch::jit::Stack;

const at::Tensor& self_of(const Stack& stack) { return stack[0].toTensor(); }

void returns(Stack& stack, at::Tensor result) {
  stack.clear();
  stack.emplace_back(std::move(result));
}

// out= is the last argument.
void returns_out(Stack& stack, const at::Tensor& result) {
  const at::Tensor out = stack.back().toTensor();
  at::native::resize_output(out, result.sizes());
  out.copy_(result);
  returns(stack, out);
}

bool is_bool(const Stack& stack) { return self_of(stack).scalar_type() == at::kBool; }

bool abs(Stack& stack) {
  if (!is_bool(stack)) return false;
  returns(stack, self_of(stack).clone());
  return true;
}
bool abs_in_place(Stack& stack) { return is_bool(stack); }
bool abs_out(Stack& stack) {
  if (!is_bool(stack)) return false;
  returns_out(stack, self_of(stack));
  return true;
}

bool trace(Stack& stack) {
  if (!is_bool(stack)) return false;
  const at::Tensor self = self_of(stack);
  TORCH_CHECK(self.dim() == 2, "trace: expected a matrix, but got tensor with dim ", self.dim());
  returns(stack, self.diagonal().sum());
  return true;
}

// Of integers, in integers: each bin has its lower end and not its upper one, but for the last, which has both.
std::optional<at::Tensor> integers_histc(const Stack& stack) {
  const at::Tensor self = self_of(stack);
  if (!at::isIntegralType(self.scalar_type(), /*includeBool=*/false)) return {};
  const int64_t bins = stack[1].toInt();
  int64_t least = stack[2].toScalar().toLong(), most = stack[3].toScalar().toLong();
  TORCH_CHECK(bins > 0, "bins must be > 0");
  if (least == most && self.numel() != 0) {
    least = self.min().item().toLong();
    most = self.max().item().toLong();
  }
  if (least == most) least -= 1, most += 1;
  TORCH_CHECK(least < most, "max must be larger than min");
  at::Tensor values = self.reshape({-1}).to(at::kLong);
  values = values.masked_select(values.ge(least).logical_and_(values.le(most)));
  values = values.sub_(least).mul_(bins).floor_divide_(most - least).clamp_max_(bins - 1);
  return at::bincount(values, {}, bins).to(self.scalar_type());
}
bool histc(Stack& stack) {
  auto result = integers_histc(stack);
  if (!result) return false;
  returns(stack, *std::move(result));
  return true;
}
bool histc_out(Stack& stack) {
  const auto result = integers_histc(stack);
  if (!result) return false;
  returns_out(stack, *result);
  return true;
}

std::optional<at::Tensor> complex_nansum(const Stack& stack) {
  at::Tensor self = self_of(stack);
  if (!self.is_complex()) return {};
  const auto type = stack[3].isNone() ? self.scalar_type() : static_cast<at::ScalarType>(stack[3].toInt());
  if (self.scalar_type() == at::kComplexHalf) self = self.to(at::kComplexFloat);  // the CPU cannot add halves either
  const std::vector<int64_t> dims = stack[1].isNone() ? std::vector<int64_t>{} : stack[1].toIntVector();
  return at::sum(self.masked_fill(self.isnan(), 0), dims, stack[2].toBool()).to(type);
}
bool nansum(Stack& stack) {
  auto result = complex_nansum(stack);
  if (!result) return false;
  returns(stack, *std::move(result));
  return true;
}
bool nansum_out(Stack& stack) {
  const auto result = complex_nansum(stack);
  if (!result) return false;
  returns_out(stack, *result);
  return true;
}

// Of integers, by zero: the CPU raises an exception. A GPU goes on, and CUDA leaves open with what. Here with what NVIDIA's
// GPUs give by PyTorch's own test of it (test_fmod_remainder_by_zero_integral): all bits set, and in a remainder of 64 bits
// only the lower half where the dividend is not negative.
// The least integer by -1, rounded to zero: the CPU ends the process (SIGFPE). A GPU goes on with the dividend.
enum class Division { kFloorDivide, kRounded, kRemainder, kFmod };

at::Tensor operand(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::native::wrapped_scalar_tensor(value.toScalar());
}

at::Tensor divide(Division what, const Stack& stack, const at::Tensor& self, const at::Tensor& by) {
  switch (what) {
    case Division::kFloorDivide: return at::floor_divide(self, by);
    case Division::kRounded: return at::div(self, by, stack[2].toStringView());
    case Division::kRemainder: return at::remainder(self, by);
    case Division::kFmod: return at::fmod(self, by);
  }
  return {};
}

at::Tensor overflows(const at::Tensor& self, const at::Tensor& by) {
  const int64_t least = int64_t{-1} << (8 * self.element_size() - 1);
  return self.eq(least).logical_and(by.eq(-1));
}

std::optional<at::Tensor> odd_division(Division what, const Stack& stack) {
  if (what == Division::kRounded && stack[2].isNone()) return {};
  at::Tensor self = operand(stack[0]), by = operand(stack[1]);
  const at::ScalarType type = at::result_type(self, by);
  if (!at::isIntegralType(type, /*includeBool=*/false)) return {};
  self = self.to(type);
  by = by.to(type);
  const at::Tensor zero = by.eq(0);
  at::Tensor odd = zero;
  if (what == Division::kRounded && at::isSignedType(type)) odd = odd.logical_or(overflows(self, by));
  if (!odd.any().item<bool>()) return {};
  const at::Tensor result = divide(what, stack, self, at::where(odd, at::ones({}, by.options()), by));
  at::Tensor instead = at::zeros({}, by.options()).bitwise_not_();
  const bool remainder = what == Division::kRemainder || what == Division::kFmod;
  if (remainder && type == at::kLong) instead = at::where(self.lt(0), instead, at::full_like(instead, 0xFFFFFFFF));
  return at::where(zero, instead, result);
}

template <Division what>
bool division(Stack& stack) {
  auto result = odd_division(what, stack);
  if (!result) return false;
  returns(stack, *std::move(result));
  return true;
}
template <Division what>
bool division_in_place(Stack& stack) {
  const auto result = odd_division(what, stack);
  if (!result) return false;
  at::Tensor self = self_of(stack);
  TORCH_CHECK(result->sizes() == self.sizes(), "output with shape ", self.sizes(),
              " doesn't match the broadcast shape ", result->sizes());
  returns(stack, self.copy_(*result));
  return true;
}
template <Division what>
bool division_out(Stack& stack) {
  const auto result = odd_division(what, stack);
  if (!result) return false;
  returns_out(stack, *result);
  return true;
}

// MKL reads beyond a matrix that is not finite, and the process ends (SIGSEGV). torch.linalg.eig() looks by itself.
bool finite_eigenvalues(Stack& stack) {
  TORCH_CHECK_LINALG(self_of(stack).isfinite().all().item<bool>(),
                     "torch.linalg.eigvals: input tensor should not contain infs or NaNs.");
  return false;
}

// Which library computes it is for CUDA alone.
bool any_driver(Stack& stack) {
  for (c10::IValue& value : stack)
    if (value.isString()) value = c10::IValue();
  return false;
}

// 16-bit matrices with a result of 32 bits: CUDA sums so without rounding between.
bool mm_dtype(Stack& stack) {
  const auto type = static_cast<at::ScalarType>(stack[2].toInt());
  returns(stack, at::matmul(stack[0].toTensor().to(type), stack[1].toTensor().to(type)));
  return true;
}
template <bool kBatches>
bool addmm_dtype(Stack& stack) {
  const auto type = static_cast<at::ScalarType>(stack[3].toInt());
  const at::Tensor self = stack[0].toTensor().to(type), a = stack[1].toTensor().to(type),
                   b = stack[2].toTensor().to(type);
  const at::Scalar beta = stack[4].toScalar(), alpha = stack[5].toScalar();
  returns(stack, kBatches ? at::baddbmm(self, a, b, beta, alpha) : at::addmm(self, a, b, beta, alpha));
  return true;
}

}  // namespace

Instead instead_of(const std::string& name) {
  static const auto* const all = new std::unordered_map<std::string, Instead>{
      {"aten::abs", abs},
      {"aten::abs_", abs_in_place},
      {"aten::abs.out", abs_out},
      {"aten::trace", trace},
      {"aten::histc", histc},
      {"aten::histc.out", histc_out},
      {"aten::nansum", nansum},
      {"aten::nansum.out", nansum_out},
      {"aten::linalg_eigvals", finite_eigenvalues},
      {"aten::linalg_eigvals.out", finite_eigenvalues},
      {"aten::_linalg_eigvals", finite_eigenvalues},
      {"aten::_linalg_svd", any_driver},
      {"aten::_linalg_svd.U", any_driver},
      {"aten::mm.dtype", mm_dtype},
      {"aten::bmm.dtype", mm_dtype},
      {"aten::addmm.dtype", addmm_dtype<false>},
      {"aten::baddbmm.dtype", addmm_dtype<true>},
      {"aten::floor_divide", division<Division::kFloorDivide>},
      {"aten::floor_divide_.Tensor", division_in_place<Division::kFloorDivide>},
      {"aten::floor_divide.out", division_out<Division::kFloorDivide>},
      {"aten::div.Tensor_mode", division<Division::kRounded>},
      {"aten::div_.Tensor_mode", division_in_place<Division::kRounded>},
      {"aten::div.out_mode", division_out<Division::kRounded>},
      {"aten::remainder.Tensor", division<Division::kRemainder>},
      {"aten::remainder.Scalar_Tensor", division<Division::kRemainder>},
      {"aten::remainder_.Tensor", division_in_place<Division::kRemainder>},
      {"aten::remainder.Tensor_out", division_out<Division::kRemainder>},
      {"aten::fmod.Tensor", division<Division::kFmod>},
      {"aten::fmod_.Tensor", division_in_place<Division::kFmod>},
      {"aten::fmod.Tensor_out", division_out<Division::kFmod>},
  };
  const auto found = all->find(name);
  return found == all->end() ? nullptr : found->second;
}

}  // namespace devproxy::aten
