// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/executor/other_types.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/sum.h>

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

}  // namespace

Instead instead_of(const std::string& name) {
  static const auto* const all = new std::unordered_map<std::string, Instead>{
      {"aten::abs", abs},       {"aten::abs_", abs_in_place},     {"aten::abs.out", abs_out},
      {"aten::trace", trace},   {"aten::histc", histc},           {"aten::histc.out", histc_out},
      {"aten::nansum", nansum}, {"aten::nansum.out", nansum_out},
  };
  const auto found = all->find(name);
  return found == all->end() ? nullptr : found->second;
}

}  // namespace devproxy::aten
