// SPDX-License-Identifier: Apache-2.0
// The collective operations: what each asks of its tensors, and which calls of NCCL's it is.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "devproxy/torch/client/c10d/operands.h"
#include "devproxy/torch/client/c10d/process_group.h"
#include "devproxy/torch/client/device.h"

namespace devproxy::aten {
namespace {

using c10d::OpType;
using c10d::ReduceOp;
using nccl::api;
using nccl::check_started;
using Work = intrusive_ptr<c10d::Work>;

const Tensor& only(const std::vector<Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "ProcessGroupNCCL takes one tensor for each rank, but got ", tensors.size());
  check_operand(tensors.front());
  return tensors.front();
}

const std::vector<Tensor>& only(const std::vector<std::vector<Tensor>>& lists, int size, const char* what) {
  TORCH_CHECK_VALUE(lists.size() == 1, what, ": expected one list of tensors, but got ", lists.size());
  TORCH_CHECK_VALUE(lists.front().size() == static_cast<size_t>(size), what, ": the list has ", lists.front().size(),
                    " tensors, but the group has ", size, " ranks");
  check_operands(lists.front());
  return lists.front();
}

void check_same_type(const Tensor& a, const Tensor& b) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "Output and input tensor must have the same type, but have ",
                   a.scalar_type(), " and ", b.scalar_type());
}

bool same_sizes(const std::vector<Tensor>& list, const Tensor& one) {
  return std::all_of(list.begin(), list.end(), [&](const Tensor& t) { return t.numel() == one.numel(); });
}

// One tensor for all of a list, whose memory NCCL takes as one buffer.
Tensor flat_like(const std::vector<Tensor>& list) {
  return at::empty({static_cast<int64_t>(list.size()), list.front().numel()}, list.front().options());
}

template <class Options>
Op op_for(OpType type, const char* title, const Options& opts) {
  Op op{type, title};
  op.timeout = opts.timeout;
  op.async = opts.asyncOp;
  return op;
}

// A factor on the device is read when the operation runs.
void keep_factor(Op& op, const ReduceOp& reduce) {
  if (reduce.op_ != ReduceOp::PREMUL_SUM || reduce.supplement_ == nullptr) return;
  const auto& factor = static_cast<const c10d::NCCLPreMulSumSupplement&>(*reduce.supplement_).tensor_factor;
  if (factor.defined()) op.temporaries.push_back(factor);
}

auto all_reduce_call(std::vector<Tensor> tensors, ReduceOp reduce) {
  for (Tensor& t : tensors) t = as_real(t, reduce);
  return [tensors, reduce](const Op::Target& to) {
    for (const Tensor& t : tensors) {
      const Reduction op(reduce, t, to.comm);
      check_started(api().ncclAllReduce(t.data_ptr(), t.data_ptr(), t.numel(), data_type(t.scalar_type()), op, to.comm,
                                        to.stream),
                    to.comm, "ncclAllReduce");
    }
  };
}

auto all_gather_call(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) {
  return [outputs = as_real(outputs), inputs = as_real(inputs)](const Op::Target& to) {
    for (size_t i = 0; i < inputs.size(); ++i)
      check_started(api().ncclAllGather(inputs[i].data_ptr(), outputs[i].data_ptr(), inputs[i].numel(),
                                        data_type(inputs[i].scalar_type()), to.comm, to.stream),
                    to.comm, "ncclAllGather");
  };
}

auto reduce_scatter_call(std::vector<Tensor> outputs, std::vector<Tensor> inputs, ReduceOp reduce) {
  for (Tensor& t : outputs) t = as_real(t, reduce);
  for (Tensor& t : inputs) t = as_real(t, reduce);
  return [outputs, inputs, reduce](const Op::Target& to) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Reduction op(reduce, inputs[i], to.comm);
      check_started(api().ncclReduceScatter(inputs[i].data_ptr(), outputs[i].data_ptr(), outputs[i].numel(),
                                            data_type(inputs[i].scalar_type()), op, to.comm, to.stream),
                    to.comm, "ncclReduceScatter");
    }
  };
}

auto broadcast_call(const Tensor& output, const Tensor& input, int root) {
  return [output = as_real(output), input = as_real(input), root](const Op::Target& to) {
    check_started(api().ncclBroadcast(input.data_ptr(), output.data_ptr(), output.numel(),
                                      data_type(output.scalar_type()), root, to.comm, to.stream),
                  to.comm, "ncclBroadcast");
  };
}

auto reduce_call(const Tensor& output, const Tensor& input, ReduceOp reduce, int root) {
  return [output = as_real(output, reduce), input = as_real(input, reduce), reduce, root](const Op::Target& to) {
    const Reduction op(reduce, input, to.comm);
    check_started(api().ncclReduce(input.data_ptr(), output.data_ptr(), input.numel(), data_type(input.scalar_type()),
                                   op, root, to.comm, to.stream),
                  to.comm, "ncclReduce");
  };
}

void check_coalesced(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "There are ", inputs.size(), " inputs, but ", outputs.size(),
                    " outputs");
  check_operands(outputs);
  check_operands(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) check_same_type(outputs[i], inputs[i]);
}

void check_ratio(const Tensor& large, const Tensor& small, int size, const char* what) {
  TORCH_CHECK_VALUE(large.numel() == small.numel() * size, what, ": a tensor of ", small.numel(),
                    " elements on each of ", size, " ranks needs one of ", small.numel() * size,
                    " elements, but it has ", large.numel());
}

}  // namespace

// -- from or to all --------------------------------------------------------------------------------------------------

Work ProcessGroupNCCL::allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& opts) {
  (void)only(tensors);
  Op op = op_for(OpType::ALLREDUCE, "nccl:all_reduce", opts);
  op.inputs = op.outputs = tensors;
  op.call = all_reduce_call(tensors, opts.reduceOp);
  keep_factor(op, opts.reduceOp);
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::allreduce_coalesced(std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  check_operands(tensors);
  Op op = op_for(OpType::ALLREDUCE_COALESCED, "nccl:allreduce_coalesced", opts);
  op.inputs = op.outputs = tensors;
  op.call = all_reduce_call(tensors, opts.reduceOp);
  op.grouped = true;
  keep_factor(op, opts.reduceOp);
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& opts) {
  const Tensor& tensor = only(tensors);
  Op op = op_for(OpType::BROADCAST, "nccl:broadcast", opts);
  op.inputs = op.outputs = tensors;
  op.call = broadcast_call(tensor, tensor, static_cast<int>(opts.rootRank));
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& opts) {
  const Tensor& tensor = only(tensors);
  Op op = op_for(OpType::REDUCE, "nccl:reduce", opts);
  op.inputs = op.outputs = tensors;
  op.call = reduce_call(tensor, tensor, opts.reduceOp, static_cast<int>(opts.rootRank));
  keep_factor(op, opts.reduceOp);
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) {
  check_coalesced({output}, {input});
  check_ratio(output, input, size_, "all_gather_into_tensor");
  Op op = op_for(OpType::_ALLGATHER_BASE, "nccl:_all_gather_base", opts);
  op.inputs = {input};
  op.outputs = {output};
  op.call = all_gather_call({output}, {input});
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                                       const c10d::AllgatherOptions& opts) {
  check_coalesced(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) check_ratio(outputs[i], inputs[i], size_, "all_gather_into_tensor");
  Op op = op_for(OpType::COALESCED, "nccl:all_gather_into_tensor_coalesced", opts);
  op.inputs = inputs;
  op.outputs = outputs;
  op.call = all_gather_call(outputs, inputs);
  op.grouped = true;
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                                 const c10d::AllgatherOptions& opts) {
  const Tensor& input = only(inputs);
  const std::vector<Tensor>& list = only(outputs, size_, "all_gather");
  check_same_type(list.front(), input);
  Op op = op_for(OpType::ALLGATHER, "nccl:all_gather", opts);
  op.inputs = inputs;
  op.outputs = list;
  if (same_sizes(list, input)) {
    const Tensor flat = flat_like(list);
    op.temporaries = {flat};
    op.call = all_gather_call({flat}, {input});
    op.after = [list, flat] {
      for (size_t i = 0; i < list.size(); ++i)
        list[i].copy_(flat.select(0, static_cast<int64_t>(i)).view(list[i].sizes()), true);
    };
  } else {
    TORCH_CHECK_VALUE(list[rank_].numel() == input.numel(), "all_gather: the output for this rank has ",
                      list[rank_].numel(), " elements, but its input has ", input.numel());
    op.grouped = true;
    op.call = [list, input, rank = rank_](const Op::Target& to) {
      for (int root = 0; root < static_cast<int>(list.size()); ++root)
        broadcast_call(list[root], root == rank ? input : list[root], root)(to);
    };
  }
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) {
  check_coalesced({output}, {input});
  check_ratio(input, output, size_, "reduce_scatter_tensor");
  Op op = op_for(OpType::_REDUCE_SCATTER_BASE, "nccl:_reduce_scatter_base", opts);
  op.inputs = {input};
  op.outputs = {output};
  op.call = reduce_scatter_call({output}, {input}, opts.reduceOp);
  keep_factor(op, opts.reduceOp);
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                                       const c10d::ReduceScatterOptions& opts) {
  check_coalesced(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) check_ratio(inputs[i], outputs[i], size_, "reduce_scatter_tensor");
  Op op = op_for(OpType::COALESCED, "nccl:reduce_scatter_tensor_coalesced", opts);
  op.inputs = inputs;
  op.outputs = outputs;
  op.call = reduce_scatter_call(outputs, inputs, opts.reduceOp);
  op.grouped = true;
  keep_factor(op, opts.reduceOp);
  return enqueue(std::move(op));
}

Work ProcessGroupNCCL::reduce_scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                                      const c10d::ReduceScatterOptions& opts) {
  const Tensor& output = only(outputs);
  const std::vector<Tensor>& list = only(inputs, size_, "reduce_scatter");
  check_same_type(output, list.front());
  Op op = op_for(OpType::REDUCE_SCATTER, "nccl:reduce_scatter", opts);
  op.inputs = list;
  op.outputs = outputs;
  keep_factor(op, opts.reduceOp);
  if (same_sizes(list, output)) {
    const Tensor flat = flat_like(list);
    op.temporaries.push_back(flat);
    op.before = [list, flat] {
      for (size_t i = 0; i < list.size(); ++i)
        flat.select(0, static_cast<int64_t>(i)).view(list[i].sizes()).copy_(list[i], true);
    };
    op.call = reduce_scatter_call({output}, {flat}, opts.reduceOp);
  } else {
    TORCH_CHECK_VALUE(list[rank_].numel() == output.numel(), "reduce_scatter: the input for this rank has ",
                      list[rank_].numel(), " elements, but its output has ", output.numel());
    op.grouped = true;
    op.call = [list, output, reduce = opts.reduceOp, rank = rank_](const Op::Target& to) {
      for (int root = 0; root < static_cast<int>(list.size()); ++root)
        reduce_call(root == rank ? output : list[root], list[root], reduce, root)(to);
    };
  }
  return enqueue(std::move(op));
}

// -- barrier ---------------------------------------------------------------------------------------------------------

c10::DeviceIndex ProcessGroupNCCL::barrier_device(const c10d::BarrierOptions& opts) {
  if (opts.device.has_value() && opts.device->is_cuda() && opts.device->has_index()) return opts.device->index();
  if (!opts.device_ids.empty()) return static_cast<c10::DeviceIndex>(opts.device_ids.front());
  if (bound_device_id_.has_value()) return bound_device_id_->index();
  return current_device();
}

Work ProcessGroupNCCL::barrier(const c10d::BarrierOptions& opts) {
  const at::Device device(c10::kCUDA, barrier_device(opts));
  Op op = op_for(OpType::BARRIER, "nccl:all_reduce_barrier", opts);
  const Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device));
  op.inputs = op.outputs = {token};
  op.call = all_reduce_call({token}, ReduceOp::SUM);
  op.barrier = true;
  return enqueue(std::move(op));
}

}  // namespace devproxy::aten
