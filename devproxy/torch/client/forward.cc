// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/forward.h"

#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "devproxy/torch/block.h"
#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/graph.h"
#include "devproxy/torch/client/infer.h"
#include "devproxy/torch/client/send.h"
#include "devproxy/torch/client/sparse.h"
#include "devproxy/torch/client/worker.h"

namespace devproxy::aten {
namespace {

// As on the CPU: an out= of another size is resized, with a warning if it held elements.
bool resize_outs(const OpPlan& plan, const c10::IValue* args, const Meta& meta) {
  bool changed = false;
  size_t k = 0;
  for (size_t i = 0; i < plan.return_is_arg.size() && i < meta.returns.size(); ++i) {
    const size_t first = k;
    k += meta.returns[i].tag == Tag::kTensor || meta.returns[i].tag == Tag::kTensorList ? meta.returns[i].count : 0;
    const int from = plan.return_is_arg[i];
    if (from < 0 || !args[from].isTensor() || meta.returns[i].tag != Tag::kTensor) continue;
    const at::Tensor& out = args[from].toTensor();
    const TensorMeta& m = meta.tensors[first];
    if (!out.defined() || !m.defined || !m.parts.empty() || out.sizes() == at::IntArrayRef(m.sizes)) continue;
    at::native::resize_output(out, m.sizes);
    if (out.strides() != at::IntArrayRef(m.strides))
      out.unsafeGetTensorImpl()->set_sizes_and_strides(m.sizes, m.strides);
    changed = true;
  }
  return changed;
}

void encode_op(OpPlan& plan, Encoder& e, const c10::IValue* args, std::optional<RandomState>& random) {
  const size_t n = plan.args.size();
  e.begin(n, current_device());
  bool generator_given = false;
  for (size_t i = 0; i < n; ++i) {
    const ArgPlan& arg = plan.args[i];
    if (arg.generator) {
      if (!random) random = take_random_state(args[i].isNone() ? default_generator(e.device) : args[i].toGenerator());
      e.generator(*random);
      generator_given = true;
      continue;
    }
    e.value(args[i], arg, !(arg.scalar && plan.has_tensor_arg));
  }
  if (plan.random && !generator_given) {
    if (!random) random = take_random_state(default_generator(e.device));
    e.add_flag(kFlagAmbientGenerator);
    e.generator(*random);
  }
  if (plan.writes_undeclared) e.add_flag(kFlagWritesUndeclared);
}

// Runs the op and waits until it is submitted, for the results that it has on the host (meta says which), or for the
// exception that it raises. In a capture nothing runs that could be waited for.
void launch_for_host_results(OpPlan& plan, Encoder& e, const Meta* meta, NewTensors* outputs) {
  TORCH_CHECK_NOT_IMPLEMENTED(!any_capture() || capturing_graph(e.device, current_stream_id(e.device)) == nullptr,
                              plan.name,
                              " has results on the host, which a CUDA graph cannot hold behind devproxy; choose "
                              "another kernel for the capture");
  ReplyBuffer reply(e.device, ReplyBuffer::kBytes);
  std::memset(reply.data(), 0, sizeof(ReplyHeader));
  BlockHeader h = e.header();
  h.reply_addr = reinterpret_cast<uint64_t>(reply.data());
  h.reply_bytes = reply.size();
  e.set_header(h);
  const CUstream stream = current_stream(e.device);
  launch(function_of(plan, e.device), stream, e.block);
  wait_submitted(e.device, stream);
  ReplyHeader head;
  std::memcpy(&head, reply.data(), sizeof head);
  TORCH_INTERNAL_ASSERT(head.total_bytes >= sizeof head && head.total_bytes <= reply.size(), plan.name,
                        ": the device did not answer");
  Reader r(reply.data() + sizeof head, head.total_bytes - sizeof head);
  if (head.status == ReplyStatus::kException) {
    const size_t n = r.left();
    throw_from_device(head.kind, std::string(reinterpret_cast<const char*>(r.bytes(n)), n));
  }
  if (meta == nullptr || !meta->host_results) return;
  size_t output = 0, k = 0;
  for (size_t i = 0; i < meta->returns.size(); ++i) {
    const ReturnMeta& ret = meta->returns[i];
    if (ret.tag != Tag::kTensor && ret.tag != Tag::kTensorList) continue;
    for (uint32_t j = 0; j < ret.count; ++j, ++k) {
      if (plan.return_is_arg[i] >= 0) continue;
      const size_t place = output++;
      if (!meta->tensors[k].on_host) continue;
      TORCH_INTERNAL_ASSERT(r.get<Tag>() == Tag::kHostTensor, plan.name, ": an answer of another shape");
      const auto about = r.get<HostTensorHead>();
      std::vector<int64_t> sizes(about.dims);
      for (int64_t& size : sizes) size = r.get<int64_t>();
      at::Tensor t = at::empty(sizes, at::TensorOptions().dtype(static_cast<at::ScalarType>(about.dtype)));
      TORCH_INTERNAL_ASSERT(t.nbytes() == about.bytes, plan.name, ": an answer of another length");
      std::memcpy(t.mutable_data_ptr(), r.bytes(about.bytes), about.bytes);
      (*outputs)[place] = std::move(t);
    }
  }
}

}  // namespace

void send(Worker& worker, OpPlan& plan, const c10::IValue* args, std::optional<RandomState> random, Sent* sent) {
  TORCH_CHECK_NOT_IMPLEMENTED(plan.view_of < 0, "devproxy has no kernel for the view ", plan.name);
  Encoder& e = worker.encoder;
  const bool right = !plan.outs.empty() && outs_are_right(plan, args);
  // A shape function does not know which kernels the device has, so one call of each kind is tried first.
  const uint64_t kind = right ? kind_of(plan, args) : 0;
  const bool trusted = right && plan.has_tried(kind);
  const bool captures = any_capture();
  const bool known = !plan.dynamic || (captures && shape_is_known(plan, args));
  e.want_key = !trusted && known;
  if (plan.dynamic && !shape_is_known(plan, args)) say_wait();
  encode_op(plan, e, args, random);
  const bool captured = captures && capturing_graph(e.device, current_stream_id(e.device)) != nullptr;
  // The program needs this result now. As on CUDA that means waiting, and waiting is an error in a capture.
  if (captured && !known) check(driver().cuStreamSynchronize(current_stream(e.device)), "cuStreamSynchronize");

  // In-place ops too are tried once per signature: their errors are then Python exceptions, not device faults.
  std::shared_ptr<const Meta>& meta = sent->meta;
  if (!known) {
    meta = infer(plan, function_of(plan, e.device), e, captured);
  } else if (!trusted) {
    meta = cached_meta(worker, plan, captured);
    if (right && !captured) plan.set_tried(kind);
  }
  if (meta != nullptr && meta->sparse && captured) refuse_sparse_in_capture();
  if (meta != nullptr && !plan.outs.empty() && resize_outs(plan, args, *meta)) encode_op(plan, e, args, random);

  NewTensors& outputs = sent->outputs;
  c10::SmallVector<std::pair<const at::Tensor*, at::Tensor>, 1> changed;  // sparse arguments that the op writes
  if (meta != nullptr && (plan.new_tensors || meta->sparse)) {
    size_t k = 0;
    uint32_t n_outputs = 0;
    for (size_t i = 0; i < meta->returns.size(); ++i) {
      const ReturnMeta& r = meta->returns[i];
      if (r.tag != Tag::kTensor && r.tag != Tag::kTensorList) continue;
      for (uint32_t j = 0; j < r.count; ++j, ++k) {
        const TensorMeta& m = meta->tensors[k];
        if (!m.parts.empty()) [[unlikely]] {
          Parts parts;
          for (const TensorMeta& part : m.parts) {
            parts.push_back(new_tensor_of(e.device, part));
            e.output(parts.back());
          }
          n_outputs += static_cast<uint32_t>(parts.size());
          at::Tensor t = make_sparse(m.layout, m.sizes, m.coalesced, parts);
          if (const int arg = plan.return_is_arg[i]; arg >= 0) {
            changed.emplace_back(&args[arg].toTensor(), std::move(t));
          } else {
            outputs.push_back(std::move(t));
          }
          continue;
        }
        if (plan.return_is_arg[i] >= 0) continue;
        n_outputs += 1;
        if (static_cast<int>(i) == plan.kept_result && is_defined(args[plan.kept_arg])) [[unlikely]] {
          e.output({});
          outputs.push_back(args[plan.kept_arg].toTensor());
          continue;
        }
        outputs.push_back(m.defined && !m.on_host ? new_tensor_of(e.device, m) : at::Tensor());
        e.output(outputs.back());
      }
    }
    BlockHeader h = e.header();
    h.n_outputs = n_outputs;
    e.set_header(h);
  }
  const bool only_numbers = outputs.empty() && plan.numbers && !plan.new_tensors && !plan.schema->is_mutable();
  if (!only_numbers) {
    const bool raises = plan.raises && !captured && (plan.raises_with < 0 || is_defined(args[plan.raises_with]));
    if (raises || (meta != nullptr && meta->host_results)) [[unlikely]]
      launch_for_host_results(plan, e, meta.get(), &outputs);
    else
      launch(function_of(plan, e.device), current_stream(e.device), e.block);
    plan.launches.fetch_add(1, std::memory_order_relaxed);
  }
  for (const auto& [arg, now] : changed) become(*arg, now);
}

namespace {

// An op of a package (torchvision::nms) whose kernels only this process has loaded: its CPU kernel runs here, on copies.
// On a real GPU that would be another kernel than the one that the caller expects.
bool runs_here(OpPlan& plan, const c10::OperatorHandle& op) {
  if (ops_run_on_cuda() || !op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) return false;
  try {
    (void)function_of(plan, current_device());
    return false;
  } catch (const c10::NotImplementedError&) {}
  if (!plan.said.exchange(true))
    warn(plan.name +
         " is in no library of the server: its CPU kernel runs in the job's process, on copies of the tensors");
  return true;
}

void forward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const std::optional<RandomState>& random) {
  WorkerLease lease;
  OpPlan& plan = plan_for(*lease, op);
  if (plan.foreign && runs_here(plan, op)) [[unlikely]]
    return at::native::cpu_fallback(op, stack);
  const size_t base = stack->size() - plan.args.size();
  Sent sent;
  send(*lease, plan, stack->data() + base, random, &sent);

  // The results take the arguments' place. A result that is an argument is copied, since several may be the same one.
  const size_t n_results = plan.return_is_arg.size();
  if (n_results == 1 && plan.return_is_arg[0] >= 0) {
    const size_t from = base + static_cast<size_t>(plan.return_is_arg[0]);
    if (from != base) (*stack)[base] = std::move((*stack)[from]);
    stack->resize(base + 1);
    return;
  }
  size_t k = 0;
  auto result = [&](size_t i) -> c10::IValue {
    if (plan.return_is_arg[i] >= 0) return (*stack)[base + static_cast<size_t>(plan.return_is_arg[i])];
    const ReturnMeta& r = sent.meta->returns[i];
    if (r.tag == Tag::kTensor) return std::move(sent.outputs[k++]);
    if (r.tag != Tag::kTensorList) return r.scalar;
    c10::List<at::Tensor> list;
    list.reserve(r.count);
    for (uint32_t j = 0; j < r.count; ++j) list.push_back(std::move(sent.outputs[k++]));
    return list;
  };
  if (n_results == 1) {
    c10::IValue only = result(0);
    stack->resize(base);
    stack->push_back(std::move(only));
    return;
  }
  c10::SmallVector<c10::IValue, 4> results;
  for (size_t i = 0; i < n_results; ++i) results.push_back(result(i));
  stack->resize(base);
  for (auto& r : results) stack->push_back(std::move(r));
}

}  // namespace

void forward_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) { forward(op, stack, std::nullopt); }

void forward_op_with_state(const c10::OperatorHandle& op, torch::jit::Stack* stack, const RandomState& state) {
  forward(op, stack, state);
}

torch::jit::Stack forward_named(const char* name, const char* overload, torch::jit::Stack arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  forward(op, &arguments, std::nullopt);
  return arguments;
}

std::vector<at::Tensor> forward_vjp(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                    const std::vector<at::Tensor>& gradients, const std::vector<bool>& wanted,
                                    const RandomState& random_state) {
  WorkerLease lease;
  Encoder& e = (*lease).encoder;
  OpPlan& plan = plan_for(*lease, op);
  e.want_key = false;
  e.begin(plan.args.size() + 2, current_device());
  for (size_t i = 0; i < plan.args.size(); ++i) e.value(arguments[i], plan.args[i], false);
  e.tensor_list(gradients);
  e.bool_list(wanted);
  e.add_flag(kFlagAmbientGenerator);
  if (plan.writes_undeclared) e.add_flag(kFlagWritesUndeclared);
  e.generator(random_state);

  const CUfunction function = executor_function(e.device, std::string(kVjpPrefix) + plan.name);
  const uint64_t kind = kind_of(plan, arguments.data()) ^ 2;  // another than the op's own
  if (!plan.has_tried(kind)) {
    const bool captured = any_capture() && capturing_graph(e.device, current_stream_id(e.device)) != nullptr;
    (void)infer(plan, function, e, captured);
    if (!captured) plan.set_tried(kind);
  }

  std::vector<at::Tensor> results;
  size_t place = 0;
  auto want = [&](const at::Tensor& t) {
    if (!t.defined() || !wanted[place++]) return;
    results.push_back(new_tensor(e.device, t.scalar_type(), t.sizes(), c10::contiguous_strides(t.sizes())));
    e.output(results.back());
  };
  for (const auto& v : arguments) {
    if (v.isTensor()) {
      want(v.toTensor());
    } else if (v.isTensorList()) {
      for (const at::Tensor& t : v.toTensorVector()) want(t);
    }
  }
  BlockHeader h = e.header();
  h.n_outputs = static_cast<uint32_t>(results.size());
  e.set_header(h);
  launch(function, current_stream(e.device), e.block);
  plan.launches.fetch_add(1, std::memory_order_relaxed);
  return results;
}

}  // namespace devproxy::aten
