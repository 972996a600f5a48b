// SPDX-License-Identifier: Apache-2.0
// The operations that are sends and receives: alone, or a group of them to all ranks.
#include <c10/util/Exception.h>

#include "devproxy/torch/client/c10d/operands.h"
#include "devproxy/torch/client/c10d/process_group.h"

namespace devproxy::aten {
namespace {

using c10d::OpType;
using nccl::api;
using nccl::check_started;
using Work = intrusive_ptr<c10d::Work>;

void send_to(const Tensor& t, int peer, const Op::Target& to) {
  check_started(api().ncclSend(t.data_ptr(), t.numel(), data_type(t.scalar_type()), peer, to.comm, to.stream), to.comm,
                "ncclSend");
}

void receive_from(const Tensor& t, int peer, const Op::Target& to) {
  check_started(api().ncclRecv(t.data_ptr(), t.numel(), data_type(t.scalar_type()), peer, to.comm, to.stream), to.comm,
                "ncclRecv");
}

const Tensor& one_tensor(const std::vector<Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "ProcessGroupNCCL takes one tensor for each rank, but got ", tensors.size());
  check_operand(tensors.front());
  return tensors.front();
}

void check_peer(int peer, int size) {
  TORCH_CHECK_VALUE(peer >= 0 && peer < size, "rank ", peer, " is not in a group of ", size);
}

// A list with one tensor for each rank of the group.
void check_list(const std::vector<Tensor>& list, int size, const char* what) {
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(size), what, ": the list has ", list.size(),
                    " tensors, but the group has ", size, " ranks");
  check_operands(list);
}

// What goes to each rank and comes from it; this rank's own part is a copy. Null parts: nothing.
Op exchange(OpType type, const char* title, std::vector<Tensor> out_parts, std::vector<Tensor> in_parts, int rank) {
  Op op{type, title};
  op.grouped = true;
  op.before = [from = in_parts[rank], to = out_parts[rank]] {
    if (from.defined() && to.defined() && !from.is_same(to) && from.data_ptr() != to.data_ptr())
      to.view({-1}).copy_(from.view({-1}), true);
  };
  op.call = [receives = as_real(out_parts), sends = as_real(in_parts), rank](const Op::Target& to) {
    for (int peer = 0; peer < static_cast<int>(sends.size()); ++peer) {
      if (peer == rank) continue;
      if (sends[peer].defined() && sends[peer].numel() > 0) send_to(sends[peer], peer, to);
      if (receives[peer].defined() && receives[peer].numel() > 0) receive_from(receives[peer], peer, to);
    }
  };
  return op;
}

// The parts of a tensor along its first dimension; without sizes, equal ones.
std::vector<Tensor> parts_of(const Tensor& tensor, std::vector<int64_t> sizes, int ranks) {
  if (sizes.empty()) {
    TORCH_CHECK_VALUE(tensor.size(0) % ranks == 0, "Tensor's dim 0 (", tensor.size(0),
                      ") does not divide equally across the group's ", ranks, " ranks");
    sizes.assign(ranks, tensor.size(0) / ranks);
  }
  TORCH_CHECK_VALUE(sizes.size() == static_cast<size_t>(ranks), "There are ", sizes.size(),
                    " split sizes, but the group has ", ranks, " ranks");
  std::vector<Tensor> parts;
  int64_t at = 0;
  for (const int64_t n : sizes) {
    TORCH_CHECK_VALUE(n >= 0 && at + n <= tensor.size(0), "Split sizes do not match the tensor's dim 0 of ",
                      tensor.size(0));
    parts.push_back(tensor.narrow(0, at, n));
    at += n;
  }
  TORCH_CHECK_VALUE(at == tensor.size(0), "Split sizes add up to ", at, ", but the tensor's dim 0 is ", tensor.size(0));
  return parts;
}

}  // namespace

Work ProcessGroupNCCL::send(std::vector<Tensor>& tensors, int dst, int /*tag*/) {
  const Tensor tensor = as_real(one_tensor(tensors));
  check_peer(dst, size_);
  Op op{OpType::SEND, "nccl:send"};
  op.inputs = tensors;
  op.peer = dst;
  op.call = [tensor](const Op::Target& to) { send_to(tensor, to.peer, to); };
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::recv(std::vector<Tensor>& tensors, int src, int /*tag*/) {
  const Tensor tensor = as_real(one_tensor(tensors));
  check_peer(src, size_);
  Op op{OpType::RECV, "nccl:recv"};
  op.outputs = tensors;
  op.peer = src;
  op.call = [tensor](const Op::Target& to) { receive_from(tensor, to.peer, to); };
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                              const c10d::GatherOptions& opts) {
  const Tensor& input = one_tensor(inputs);
  const int root = static_cast<int>(opts.rootRank);
  check_peer(root, size_);
  std::vector<Tensor> sends(size_), receives(size_);
  sends[root] = input;
  if (rank_ == root) {
    TORCH_CHECK_VALUE(outputs.size() == 1, "gather: the root needs one list of tensors, but has ", outputs.size());
    check_list(outputs.front(), size_, "gather");
    receives = outputs.front();
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), "gather: only the root takes a list of outputs");
  }
  Op op = exchange(OpType::GATHER, "nccl:gather", receives, std::move(sends), rank_);
  op.inputs = inputs;
  if (rank_ == root) op.outputs = std::move(receives);
  op.timeout = opts.timeout;
  op.async = opts.asyncOp;
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                               const c10d::ScatterOptions& opts) {
  const Tensor& output = one_tensor(outputs);
  const int root = static_cast<int>(opts.rootRank);
  check_peer(root, size_);
  std::vector<Tensor> sends(size_), receives(size_);
  receives[root] = output;
  if (rank_ == root) {
    TORCH_CHECK_VALUE(inputs.size() == 1, "scatter: the root needs one list of tensors, but has ", inputs.size());
    check_list(inputs.front(), size_, "scatter");
    sends = inputs.front();
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "scatter: only the root takes a list of inputs");
  }
  Op op = exchange(OpType::SCATTER, "nccl:scatter", std::move(receives), sends, rank_);
  if (rank_ == root) op.inputs = std::move(sends);
  op.outputs = outputs;
  op.timeout = opts.timeout;
  op.async = opts.asyncOp;
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  check_operands({output, input});
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(),
                   "Tensors are not of the same type: ", output.scalar_type(), " and ", input.scalar_type());
  Op op = exchange(OpType::ALLTOALL_BASE, "nccl:all_to_all", parts_of(output, output_splits, size_),
                   parts_of(input, input_splits, size_), rank_);
  op.inputs = {input};
  op.outputs = {output};
  op.timeout = opts.timeout;
  op.async = opts.asyncOp;
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::alltoall(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                const c10d::AllToAllOptions& opts) {
  check_list(outputs, size_, "all_to_all");
  check_list(inputs, size_, "all_to_all");
  Op op = exchange(OpType::ALLTOALL, "nccl:all_to_all", outputs, inputs, rank_);
  op.inputs = inputs;
  op.outputs = outputs;
  op.timeout = opts.timeout;
  op.async = opts.asyncOp;
  return enqueue(std::move(op));
}

}  // namespace devproxy::aten
