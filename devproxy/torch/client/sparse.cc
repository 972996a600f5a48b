// SPDX-License-Identifier: Apache-2.0
// Sparse tensors. A COO or compressed tensor is a few dense ones in this process, as on the CPU. What only makes, shows or
// copies them is ATen's code for any device, which it has registered for the CPU. All else goes to the device whole, as
// one op of the CPU's on tensors over the same memory: so the numbers are the CPU's.
#include "devproxy/torch/client/sparse.h"

#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/native/SparseTensorUtils.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>

#include "devproxy/torch/client/forward.h"

namespace devproxy::aten {

Parts parts_of(const at::Tensor& t) {
  if (t.layout() == at::kSparse) {
    const auto* impl = at::sparse::get_sparse_impl(t);
    return {impl->indices(), impl->values()};
  }
  TORCH_CHECK_NOT_IMPLEMENTED(at::sparse_csr::is_sparse_compressed(t.layout()), "devproxy has no ", t.layout(),
                              " tensors");
  const auto* impl = static_cast<at::SparseCsrTensorImpl*>(t.unsafeGetTensorImpl());
  return {impl->compressed_indices(), impl->plain_indices(), impl->values()};
}

namespace {

void set_parts(const at::Tensor& t, at::IntArrayRef sizes, bool coalesced, const Parts& parts) {
  if (t.layout() != at::kSparse) {
    auto* impl = static_cast<at::SparseCsrTensorImpl*>(t.unsafeGetTensorImpl());
    return impl->set_member_tensors(parts[0], parts[1], parts[2], sizes);
  }
  auto* impl = at::sparse::get_sparse_impl(t);
  impl->raw_resize_(parts[0].size(0), parts[1].dim() - 1, sizes);
  impl->set_indices_and_values_unsafe(parts[0], parts[1]);
  impl->set_coalesced(coalesced);
}

}  // namespace

at::Tensor make_sparse(at::Layout layout, at::IntArrayRef sizes, bool coalesced, const Parts& parts) {
  const at::Tensor& values = parts.back();
  const at::Device device = values.device();
  at::Tensor t;
  if (layout == at::kSparse) {
    t = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(c10::DispatchKey::SparseCUDA),
                                                      values.dtype());
  } else {
    t = at::detail::make_tensor<at::SparseCsrTensorImpl>(c10::DispatchKeySet(c10::DispatchKey::SparseCsrCUDA), device,
                                                         layout, values.dtype());
  }
  set_parts(t, sizes, coalesced, parts);
  return t;
}

void become(const at::Tensor& t, const at::Tensor& from) {
  set_parts(t, from.sizes(), from.layout() == at::kSparse && at::sparse::get_sparse_impl(from)->coalesced(),
            parts_of(from));
}

namespace {

// Of the ops with a kernel for the CPU's sparse tensors: those whose kernel is for any device.
bool runs_here(const std::string& name, bool coo) {
  static const auto* const both = new std::unordered_set<std::string>{
      "empty.memory_format", "empty_like", "sparse_dim", "dense_dim", "_nnz", "values", "clone", "copy_",
      "resize_as_sparse_",   "is_pinned"};
  static const auto* const of_coo = new std::unordered_set<std::string>{"_dimI",
                                                                        "_dimV",
                                                                        "is_coalesced",
                                                                        "_indices",
                                                                        "_values",
                                                                        "indices",
                                                                        "_coalesced_",
                                                                        "_sparse_coo_tensor_with_dims",
                                                                        "_sparse_coo_tensor_with_dims_and_tensors",
                                                                        "sparse_resize_",
                                                                        "sparse_resize_and_clear_",
                                                                        "copy_sparse_to_sparse_",
                                                                        "zero_",
                                                                        "zeros.out",
                                                                        "permute",
                                                                        "unsqueeze",
                                                                        "_sparse_broadcast_to",
                                                                        "view_as_real",
                                                                        "view_as_complex"};
  static const auto* const of_compressed =
      new std::unordered_set<std::string>{"crow_indices", "col_indices", "ccol_indices",    "row_indices", "resize_",
                                          "select.int",   "zero_",       "select_copy.int", "fill_.Scalar"};
  return both->count(name) != 0 || (coo ? of_coo : of_compressed)->count(name) != 0;
}

template <c10::DispatchKey of_cpu>
void here(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(of_cpu), stack);
}

void send_whole_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) { forward_op(op, stack); }

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, c10::toString(op.operator_name()),
                              " is not supported for sparse tensors behind devproxy; convert them with to_dense()");
}

template <c10::DispatchKey of_cpu, c10::DispatchKey of_cuda>
void register_sparse(torch::Library& m) {
  using torch::CppFunction;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    const std::string plain = c10::toString(name).substr(6);
    const bool cpu = op->hasKernelForDispatchKey(of_cpu), cuda = kReplace && op->hasKernelForDispatchKey(of_cuda);
    // Those of the CPU alone are refused, here as natively.
    const bool cpu_only = plain == "_pin_memory" || plain.rfind("_sparse_mm_reduce_impl", 0) == 0;
    if (cpu_only || (!cpu && !cuda)) continue;
    if (cpu && runs_here(plain, of_cpu == c10::DispatchKey::SparseCPU)) {
      if (!cuda) m.impl(plain.c_str(), CppFunction::makeFromBoxedFunction<&here<of_cpu>>());
    } else {
      m.impl(plain.c_str(), CppFunction::makeFromBoxedFunction<&send_whole_op>());
    }
  }
}

TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) {
  register_sparse<c10::DispatchKey::SparseCPU, c10::DispatchKey::SparseCUDA>(m);
}
TORCH_LIBRARY_IMPL(aten, SparseCsrCUDA, m) {
  register_sparse<c10::DispatchKey::SparseCsrCPU, c10::DispatchKey::SparseCsrCUDA>(m);
}
TORCH_LIBRARY_IMPL(_, SparseCUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrCUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>()); }

}  // namespace
}  // namespace devproxy::aten
