// SPDX-License-Identifier: Apache-2.0
// Composite ops that ATen takes apart differently for CUDA than for the CPU. Where ops run on the host they go the
// CPU's way here, so that the device, which runs the CPU's kernels, gives the CPU's numbers: dropout, attention, and
// the recurrent layers. Where they run on CUDA nothing of this is registered: ATen goes CUDA's way by itself.
#include <ATen/Context.h>
#include <ATen/TracerMode.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>

#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/forward.h"
#include "devproxy/torch/client/generator.h"

namespace devproxy::aten {
namespace {

using at::Tensor;

// ---- whole composite ops -------------------------------------------------------------------------------------------

struct WholeCall {
  c10::OperatorHandle op;
  torch::jit::Stack arguments;
  bool grad_mode;  // the caller's: the CPU chooses its kernels by it
};

size_t for_each_tensor(const torch::jit::Stack& arguments, const std::function<void(const Tensor&)>& f) {
  size_t n = 0;
  for (const auto& v : arguments) {
    if (v.isTensor()) {
      if (v.toTensor().defined()) f(v.toTensor()), ++n;
    } else if (v.isTensorList()) {
      for (const Tensor& t : v.toTensorVector())
        if (t.defined()) f(t), ++n;
    }
  }
  return n;
}

// Tensors of torch.compile, which have no memory, and others whose ops Python has.
bool has_subclass(at::ArrayRef<c10::IValue> arguments) {
  bool found = false;
  auto look = [&](const Tensor& t) { found |= t.defined() && t.key_set().has(c10::DispatchKey::Python); };
  for (const c10::IValue& v : arguments) {
    if (v.isTensor()) look(v.toTensor());
    if (v.isTensorList())
      for (const c10::IValue& one : v.toListRef()) look(one.toTensor());
  }
  return found;
}

bool is_cell(const std::string& name) { return name == "aten::lstm_cell" || name == "aten::gru_cell"; }

// A cell as other ops, each of which is recorded and differentiated on its own; the formulas of torch.nn.LSTMCell's and GRUCell's pages.
std::vector<Tensor> cell_of_parts(const std::string& name, const torch::jit::Stack& a) {
  auto bias = [&](size_t i) {
    return a[i].isNone() || !a[i].toTensor().defined() ? std::optional<Tensor>() : a[i].toTensor();
  };
  const bool lstm = name == "aten::lstm_cell";
  const std::vector<Tensor> state = lstm ? a[1].toTensorVector() : std::vector<Tensor>{a[1].toTensor()};
  const Tensor of_input = at::linear(a[0].toTensor(), a[2].toTensor(), bias(4));
  const Tensor of_state = at::linear(state[0], a[3].toTensor(), bias(5));
  if (lstm) {
    const auto gates = (of_state + of_input).chunk(4, 1);
    const Tensor cell = gates[1].sigmoid() * state[1] + gates[0].sigmoid() * gates[2].tanh();
    return {gates[3].sigmoid() * cell.tanh(), cell};
  }
  const auto x = of_input.chunk(3, 1), h = of_state.chunk(3, 1);
  const Tensor update = (h[1] + x[1]).sigmoid();
  const Tensor fresh = (x[2] + h[2] * (h[0] + x[0]).sigmoid()).tanh();
  return {(state[0] - fresh) * update + fresh};
}

// The op runs as one launch; its backward is one launch that runs it again under the CPU's autograd. Nothing but the
// arguments is kept in between, and the same random numbers are drawn again.
struct WholeOp : torch::autograd::Function<WholeOp> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, at::TensorList inputs,
                                                const std::shared_ptr<WholeCall>& call) {
    RandomState state;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !draws(*call) || !executor_keeps_generators(),
        "dropout between recurrent layers cannot be drawn again from a generator in the server");
    if (draws(*call)) state = take_random_state(default_generator(device_of(inputs)));
    torch::jit::Stack stack = call->arguments;
    {
      const at::AutoGradMode mode(call->grad_mode);
      forward_op_with_state(call->op, &stack, state);
    }

    ctx->save_for_backward(inputs.vec());
    ctx->saved_data["seed"] = static_cast<int64_t>(state.seed);
    ctx->saved_data["offset"] = static_cast<int64_t>(state.offset);
    ctx->saved_data["addr"] = static_cast<int64_t>(state.addr);
    ctx->saved_data["op"] = c10::toString(call->op.operator_name());
    torch::jit::Stack rest;  // the arguments without their tensors, which autograd keeps
    for (const auto& v : call->arguments) {
      if (v.isTensor()) {
        rest.emplace_back(v.toTensor().defined());
      } else if (v.isTensorList()) {
        rest.emplace_back(static_cast<int64_t>(v.toListRef().size()));
      } else {
        rest.push_back(v);
      }
    }
    ctx->saved_data["rest"] = c10::ivalue::Tuple::create(std::move(rest));
    torch::autograd::variable_list results;
    for (auto& v : stack) results.push_back(v.toTensor());
    return results;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    const std::string name = ctx->saved_data["op"].toStringRef();
    TORCH_CHECK(!c10::GradMode::is_enabled() || is_cell(name), "the derivative of ", name,
                "'s backward is not implemented on this device");
    const size_t dot = name.find('.');
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        name.substr(0, dot).c_str(), dot == name.npos ? "" : name.substr(dot + 1).c_str());
    const auto saved = ctx->get_saved_variables();
    const auto& rest = ctx->saved_data["rest"].toTupleRef().elements();

    torch::jit::Stack arguments;
    size_t next = 0;
    for (size_t i = 0; i < rest.size(); ++i) {
      const auto& type = *op.schema().arguments()[i].type();
      if (type.kind() == c10::TypeKind::ListType &&
          type.castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType) {
        c10::List<Tensor> list;
        for (int64_t k = 0; k < rest[i].toInt(); ++k) list.push_back(saved[next++]);
        arguments.emplace_back(std::move(list));
      } else if (is_tensor(type)) {
        arguments.emplace_back(rest[i].toBool() ? saved[next++] : Tensor());
      } else {
        arguments.push_back(rest[i]);
      }
    }
    std::vector<bool> wanted(saved.size());
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = ctx->needs_input_grad(i) && saved[i].is_cuda();
    if (c10::GradMode::is_enabled()) return grads_of_parts(name, arguments, saved, wanted, gradients);
    const auto grads = forward_vjp(op, arguments, gradients, wanted,
                                   {static_cast<uint64_t>(ctx->saved_data["seed"].toInt()),
                                    static_cast<uint64_t>(ctx->saved_data["offset"].toInt()),
                                    static_cast<CUdeviceptr>(ctx->saved_data["addr"].toInt())});
    torch::autograd::variable_list result(saved.size());
    size_t k = 0;
    for (size_t i = 0; i < result.size(); ++i)
      if (wanted[i]) result[i] = grads[k++];
    result.emplace_back();  // the call itself
    return result;
  }

 private:
  // With a graph of their own, for whoever differentiates them.
  static torch::autograd::variable_list grads_of_parts(const std::string& name, const torch::jit::Stack& arguments,
                                                       const torch::autograd::variable_list& saved,
                                                       const std::vector<bool>& wanted,
                                                       const torch::autograd::variable_list& gradients) {
    torch::autograd::variable_list outputs, given, inputs, result(saved.size());
    const auto made = cell_of_parts(name, arguments);
    for (size_t i = 0; i < made.size(); ++i) {
      if (!gradients[i].defined()) continue;
      outputs.push_back(made[i]);
      given.push_back(gradients[i]);
    }
    for (size_t i = 0; i < saved.size(); ++i)
      if (wanted[i]) inputs.push_back(saved[i]);
    const auto grads = torch::autograd::grad(outputs, inputs, given, /*retain_graph=*/true, /*create_graph=*/true,
                                             /*allow_unused=*/true);
    size_t k = 0;
    for (size_t i = 0; i < saved.size(); ++i)
      if (wanted[i]) result[i] = grads[k++];
    result.emplace_back();  // the call itself
    return result;
  }
  static bool is_tensor(const c10::Type& type) {
    if (type.kind() == c10::TypeKind::TensorType) return true;
    return type.kind() == c10::TypeKind::OptionalType &&
           type.castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::TensorType;
  }
  // Dropout between the layers, in training.
  static bool draws(const WholeCall& call) {
    double p = 0;
    bool train = false;
    const auto& schema = call.op.schema();
    for (size_t i = 0; i < call.arguments.size(); ++i) {
      if (schema.arguments()[i].name() == "dropout") p = call.arguments[i].toDouble();
      if (schema.arguments()[i].name() == "train") train = call.arguments[i].toBool();
    }
    return train && p > 0;
  }
  static DeviceIndex device_of(at::TensorList l) {
    for (const Tensor& t : l)
      if (t.is_cuda()) return t.device().index();
    return current_device();
  }
};

void whole_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t n = op.schema().arguments().size();
  const bool subclass = has_subclass(at::ArrayRef<c10::IValue>(*stack).slice(stack->size() - n));
  // torch.jit.trace records layers, but of cells only what they are made of. So does what has no memory, or its own ops.
  if (is_cell(op.schema().name()) && (subclass || at::tracer::impl::is_dispatch_enabled())) [[unlikely]] {
    for (const Tensor& t : cell_of_parts(op.schema().name(), torch::jit::pop(*stack, n))) stack->emplace_back(t);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!subclass, op.schema().name(),
                              " of a subclass of Tensor is not implemented on this device");
  auto call = std::make_shared<WholeCall>(WholeCall{op, torch::jit::pop(*stack, n), c10::GradMode::is_enabled()});
  // An optional tensor that is missing counts as an undefined one.
  for (size_t i = 0; i < n; ++i)
    if (call->arguments[i].isNone() && op.schema().arguments()[i].type()->str().find("Tensor") != std::string::npos)
      call->arguments[i] = Tensor();
  std::vector<Tensor> inputs;
  for_each_tensor(call->arguments, [&](const Tensor& t) { inputs.push_back(t); });
  for (auto& t : WholeOp::apply(at::TensorList(inputs), call)) stack->emplace_back(std::move(t));
}

// ---- LSTM ----------------------------------------------------------------------------------------------------------

constexpr int64_t kOneDnnLstm = 2;  // ideep::rnn_kind::LSTM

// Where the CPU takes oneDNN's layer, layer by layer and direction by direction; each is one launch.
bool takes_onednn_layers(const Tensor& input, at::TensorList hx, bool has_projections) {
  return at::globalContext().userEnabledMkldnn() && at::globalContext().hasMKLDNN() && !has_projections &&
         input.scalar_type() == at::kFloat && input.numel() != 0 && hx[0].is_cuda();
}

std::tuple<Tensor, Tensor, Tensor> lstm_by_layers(const Tensor& input_, at::TensorList hx_, at::TensorList params,
                                                  bool has_biases, int64_t num_layers, double dropout, bool train,
                                                  bool bidirectional, bool batch_first) {
  const int64_t directions = bidirectional ? 2 : 1;
  const size_t per_layer = has_biases ? 4 : 2;
  TORCH_CHECK(params.size() == static_cast<size_t>(num_layers * directions) * per_layer,
              "lstm: got an incorrect number of RNN parameters");
  Tensor input = (batch_first ? input_.transpose(0, 1) : input_).contiguous();
  const Tensor hx = hx_[0].contiguous(), cx = hx_[1].contiguous();
  const int64_t hidden_size = hx.size(2);
  std::vector<Tensor> hy, cy;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < directions; ++direction) {
      const int64_t index = layer * directions + direction;
      const auto w = params.slice(static_cast<size_t>(index) * per_layer, per_layer);
      const auto bias = [&](size_t i) { return has_biases ? w[i] : at::zeros(w[i - 2].sizes(), w[i - 2].options()); };
      auto [y, h, c, workspace] = at::mkldnn_rnn_layer(
          input, w[0], w[1], bias(2), bias(3), hx[index], cx[index], /*reverse=*/direction > 0, /*batch_sizes=*/{},
          kOneDnnLstm, hidden_size, num_layers, has_biases, bidirectional, batch_first, train);
      outputs.push_back(y);
      hy.push_back(h);
      cy.push_back(c);
    }
    input = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (dropout != 0 && train && layer < num_layers - 1) input = at::dropout(input, dropout, /*train=*/true);
  }
  return {batch_first ? input.transpose(0, 1) : input, at::stack(hy, 0), at::stack(cy, 0)};
}

void lstm_input(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto* a = stack->data() + stack->size() - 9;
  const auto hx = a[1].toTensorVector();
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  if (!takes_onednn_layers(a[0].toTensor(), hx, hx[0].size(2) != hx[1].size(2))) return whole_op(op, stack);
  const auto params = a[2].toTensorVector();
  auto [y, h, c] = lstm_by_layers(a[0].toTensor(), hx, params, a[3].toBool(), a[4].toInt(), a[5].toDouble(),
                                  a[6].toBool(), a[7].toBool(), a[8].toBool());
  torch::jit::drop(*stack, 9);
  torch::jit::push(*stack, std::move(y), std::move(h), std::move(c));
}

// ---- dropout and attention -----------------------------------------------------------------------------------------

// As the CPU: a float mask, scaled, multiplied. (CUDA's fused native_dropout rounds the scale differently.)
Tensor dropout(const Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.sym_numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  Tensor noise = at::empty_like(input);
  noise.bernoulli_(1 - p);
  noise.div_(1 - p);
  return input.mul(noise);
}

std::optional<Tensor> additive_mask(const std::optional<Tensor>& mask, at::ScalarType dtype) {
  if (!mask.has_value() || !mask->defined()) return std::nullopt;
  if (mask->scalar_type() != at::kBool) return mask;
  return at::where(*mask, 0.0,
                   at::scalar_tensor(-std::numeric_limits<double>::infinity(),
                                     at::TensorOptions().dtype(dtype).device(mask->device())));
}

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const std::optional<Tensor>& mask, double dropout_p, bool is_causal,
                                    std::optional<double> scale, bool enable_gqa) {
  TORCH_CHECK(query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type(),
              "Expected query, key, and value to have the same dtype, but got query.dtype: ", query.dtype(),
              " key.dtype: ", key.dtype(), " and value.dtype: ", value.dtype(), " instead.");
  TORCH_CHECK(query.device() == key.device() && query.device() == value.device(),
              "Expected query, key, and value to have the same device type, but got query.device: ", query.device(),
              " key.device: ", key.device(), " and value.device: ", value.device(), " instead.");
  TORCH_CHECK(query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2,
              "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: ", query.dim(),
              ", key.dim: ", key.dim(), " and value.dim: ", value.dim(), " instead.");
  const bool has_mask = mask.has_value() && mask->defined();
  TORCH_CHECK(!(has_mask && is_causal),
              "_scaled_dot_product_attention: Explicit attn_mask should not be set when "
              "is_causal=True");
  if (has_mask)
    TORCH_CHECK(mask->scalar_type() == at::kBool || mask->scalar_type() == query.scalar_type() ||
                    mask->scalar_type() == at::kFloat,
                "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: ",
                mask->dtype(), " and  query.dtype: ", query.dtype(), " instead.");
  // DTensor has no rule for _fused_sdp_choice, so a Python subclass is not asked. It has rules for CUDA's flash attention, and
  // for the ops that the math path is made of.
  const bool subclass = (query.key_set() | key.key_set() | value.key_set()).has(c10::DispatchKey::Python);
  if (subclass && !has_mask && dropout_p == 0 && query.dim() == 4 && !enable_gqa)
    return std::get<0>(at::_scaled_dot_product_flash_attention(query, key, value, 0, is_causal, false, scale));
  const auto choice = subclass ? at::SDPBackend::math
                               : static_cast<at::SDPBackend>(at::_fused_sdp_choice(query, key, value, mask, dropout_p,
                                                                                   is_causal, scale, enable_gqa));
  if (choice == at::SDPBackend::flash_attention)
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, additive_mask(mask, query.scalar_type()), scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout_p, is_causal, std::nullopt,
                                                            scale, enable_gqa));
}

// In the memory layout of the other one: a traced graph counts on the layouts that CUDA's op has.
Tensor laid_out_as(const Tensor& model, const Tensor& value) {
  const Tensor made = at::empty_like(model);
  return made.strides() == value.strides() ? value : made.copy_(value);
}

// CUDA's op, computed by the CPU's kernel. That kernel has no dropout, so the state of the generator says nothing, and the
// debug mask is empty.
using FlashAttention = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
FlashAttention flash_attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p,
                               bool is_causal, bool return_debug_mask, std::optional<double> scale) {
  TORCH_CHECK_NOT_IMPLEMENTED(dropout_p == 0 && !return_debug_mask,
                              "_scaled_dot_product_flash_attention with dropout or its debug mask has no kernel on the "
                              "software GPU");
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, 0, is_causal, std::nullopt, scale);
  const auto words = query.options().dtype(at::kUInt64);
  const Tensor mask = at::empty({0}, query.options());
  return {laid_out_as(query, output), logsumexp.contiguous(), Tensor(), Tensor(), query.sym_size(2), key.sym_size(2),
          at::empty({2}, words),      at::empty({}, words),   mask};
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                            const Tensor& value, const Tensor& output,
                                                            const Tensor& logsumexp, const Tensor&, const Tensor&,
                                                            c10::SymInt, c10::SymInt, double, bool is_causal,
                                                            const Tensor&, const Tensor&, std::optional<double> scale) {
  const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, output, logsumexp, 0, is_causal, std::nullopt, scale);
  return {laid_out_as(query, of_query), laid_out_as(key, of_key), laid_out_as(value, of_value)};
}

// Natively these layers are cuDNN's, whose autocast takes float16, whatever type was asked for (AutocastRNN.cpp).
void layer_under_autocast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::Autocast);
  const size_t n = op.schema().arguments().size();
  for (size_t i = stack->size() - n; i < stack->size(); ++i) {
    c10::IValue& v = (*stack)[i];
    if (v.isTensor()) {
      v = at::autocast::cached_cast(at::kHalf, v.toTensor(), c10::kCUDA);
    } else if (v.isTensorList()) {
      const std::vector<Tensor> list = v.toTensorVector();
      v = at::autocast::cached_cast(at::kHalf, at::TensorList(list), c10::kCUDA);
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Autocast), stack);
}

// Composite ops are looked up under both keys: with autograd (which differentiates what they are made of) and, in
// inference mode, without.
void register_composites(torch::Library& m) {
  auto whole = [&](const char* name) { m.impl(name, torch::CppFunction::makeFromBoxedFunction<&whole_op>()); };
  for (const char* name : {"lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input",
                           "rnn_relu.data", "lstm_cell", "gru_cell"})
    whole(name);
  m.impl("lstm.input", torch::CppFunction::makeFromBoxedFunction<&lstm_input>());
  m.impl("dropout", dropout);
  m.impl("scaled_dot_product_attention", scaled_dot_product_attention);
}

TORCH_LIBRARY_IMPL(aten, AutocastCUDA, m) {
  if (ops_run_on_cuda()) return;
  for (const char* name : {"lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data",
                           "rnn_relu.input", "rnn_relu.data"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&layer_under_autocast>());
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) {
  if (!ops_run_on_cuda()) register_composites(m);
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  if (ops_run_on_cuda()) return;
  register_composites(m);
  m.impl("_scaled_dot_product_flash_attention", flash_attention);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_attention_backward);
}

}  // namespace
}  // namespace devproxy::aten
