// SPDX-License-Identifier: Apache-2.0
// What SyncBatchNorm is made of. ATen has these ops for GPUs alone, so the device, which runs the CPU's kernels, has
// none of them: here they are a few ops of ATen each. Where ops run on CUDA nothing of this is registered.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/var_mean.h>
#include <torch/library.h>

#include "devproxy/torch/client/executor.h"

namespace devproxy::aten {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

bool given(const MaybeTensor& t) { return t.has_value() && t->defined(); }

// Of bfloat16 and half the statistics are float.
Tensor wide(const Tensor& t) { return t.scalar_type() == at::kDouble ? t : t.to(at::kFloat); }

// All dimensions but that of the channels.
std::vector<int64_t> all_but_channels(const Tensor& input) {
  TORCH_CHECK(input.dim() >= 2, "SyncBatchNorm expects an input of at least two dimensions, but got ", input.dim());
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < input.dim(); ++d) dims.push_back(d);
  return dims;
}

// A value of each channel, so that it meets the input's elements.
Tensor beside(const Tensor& of_channels, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = input.size(1);
  return of_channels.view(shape);
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  auto [variance, mean] =
      at::var_mean(wide(input), all_but_channels(input), /*correction=*/std::optional<at::Scalar>(0));
  return {mean, at::rsqrt(variance + eps)};
}

Tensor batch_norm_elemt(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& mean,
                        const Tensor& invstd, double /*eps*/) {
  Tensor result = (wide(input) - beside(mean, input)) * beside(invstd, input);
  if (given(weight)) result = result * beside(wide(*weight), input);
  if (given(bias)) result = result + beside(wide(*bias), input);
  return result.to(input.scalar_type()).contiguous(input.suggest_memory_format());
}

// Of one row for each rank.
std::tuple<Tensor, Tensor> gather_stats_with_counts(const Tensor& /*input*/, const Tensor& means, const Tensor& invstds,
                                                    const MaybeTensor& running_mean, const MaybeTensor& running_var,
                                                    double momentum, double eps, const Tensor& counts) {
  const Tensor share = counts.to(means.scalar_type()).view({-1, 1});
  const Tensor total = share.sum();
  const Tensor mean = (means * share).sum(0) / total;
  const Tensor squares = ((invstds.pow(-2) - eps + (means - mean).pow(2)) * share).sum(0);
  const Tensor invstd = at::rsqrt(squares / total + eps);
  if (given(running_mean)) running_mean->mul_(1 - momentum).add_(mean.to(running_mean->scalar_type()), momentum);
  if (given(running_var))
    running_var->mul_(1 - momentum).add_((squares / (total - 1)).to(running_var->scalar_type()), momentum);
  return {mean, invstd};
}

std::tuple<Tensor, Tensor> gather_stats(const Tensor& input, const Tensor& means, const Tensor& invstds,
                                        const MaybeTensor& running_mean, const MaybeTensor& running_var,
                                        double momentum, double eps, int64_t count) {
  const Tensor counts = at::full({means.size(0)}, count, means.options());
  return gather_stats_with_counts(input, means, invstds, running_mean, running_var, momentum, eps, counts);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                           const Tensor& invstd, const MaybeTensor& weight,
                                                           bool of_input, bool of_weight, bool of_bias) {
  const auto dims = all_but_channels(input);
  const Tensor dy = wide(grad);
  const Tensor sum_dy = dy.sum(dims);
  const Tensor sum_dy_xmu = (dy * (wide(input) - beside(mean, input))).sum(dims);
  const auto as_weight = [&](const Tensor& t) { return given(weight) ? t.to(weight->scalar_type()) : t; };
  return {of_input ? sum_dy : Tensor(), of_input ? sum_dy_xmu : Tensor(),
          of_weight ? as_weight(sum_dy_xmu * invstd) : Tensor(), of_bias ? as_weight(sum_dy).clone() : Tensor()};
}

Tensor backward_elemt(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                      const MaybeTensor& weight, const Tensor& sum_dy, const Tensor& sum_dy_xmu, const Tensor& counts) {
  const Tensor total = counts.sum().to(mean.scalar_type());
  const Tensor slope = invstd.pow(2) * sum_dy_xmu / total;
  Tensor scale = invstd;
  if (given(weight)) scale = scale * wide(*weight);
  const Tensor centred = wide(input) - beside(mean, input);
  const Tensor result =
      (wide(grad) - beside(sum_dy / total, input) - centred * beside(slope, input)) * beside(scale, input);
  return result.to(input.scalar_type()).contiguous(input.suggest_memory_format());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  if (ops_run_on_cuda()) return;
  m.impl("batch_norm_stats", batch_norm_stats);
  m.impl("batch_norm_elemt", batch_norm_elemt);
  m.impl("batch_norm_gather_stats", gather_stats);
  m.impl("batch_norm_gather_stats_with_counts", gather_stats_with_counts);
  m.impl("batch_norm_backward_reduce", backward_reduce);
  m.impl("batch_norm_backward_elemt", backward_elemt);
}

}  // namespace
}  // namespace devproxy::aten
