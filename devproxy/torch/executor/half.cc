// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/executor/half.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

namespace devproxy::aten {
namespace {

std::optional<at::ScalarType> wider(at::ScalarType t) {
  if (t == at::kHalf || t == at::kBFloat16) return at::kFloat;
  if (t == at::kComplexHalf) return at::kComplexFloat;
  return {};
}

// Of a result in float32, where the op was asked in `half`: the type that CUDA's has.
at::ScalarType narrower(at::ScalarType t, at::ScalarType half) {
  const at::ScalarType real = half == at::kComplexHalf ? at::kHalf : half;
  if (t == at::kFloat) return real;
  return t == at::kComplexFloat && real == at::kHalf ? at::kComplexHalf : t;
}

bool is_half(const c10::IValue& v) {
  if (v.isTensor()) return v.toTensor().defined() && wider(v.toTensor().scalar_type());
  if (!v.isList()) return false;
  for (const c10::IValue& e : v.toListRef())
    if (is_half(e)) return true;
  return false;
}

template <class F>
c10::IValue with_each_tensor(const c10::IValue& v, F f) {
  if (v.isTensor()) return v.toTensor().defined() ? f(v.toTensor()) : v;
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) list.push_back(t.defined() ? f(t) : t);
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector())
      list.push_back(t.has_value() && t->defined() ? std::optional(f(*t)) : t);
    return list;
  }
  return v;
}

// An argument that the op has written, in the type that it has for the client.
void write_back(const at::Tensor& given, const at::Tensor& written) {
  if (given.is_same(written)) return;
  if (given.sizes() != written.sizes()) given.resize_(written.sizes());
  given.copy_(written);
}

struct Mixed {
  at::ScalarType half;  // of the results; Undefined: they stay float32
  size_t place;
  c10::IValue instead;
};

bool is_float(const c10::IValue& v) {
  return v.isTensor() && v.toTensor().defined() && v.toTensor().scalar_type() == at::kFloat;
}

std::optional<Mixed> mixed(const MixedOptions& options, const torch::jit::Stack& stack) {
  if (options.half_to_float >= 0) {
    const auto place = static_cast<size_t>(options.half_to_float);
    if (stack[place].isBool() && stack[place].toBool()) return Mixed{at::ScalarType::Undefined, place, false};
  }
  if (options.input_dtype >= 0) {
    const auto place = static_cast<size_t>(options.input_dtype);
    const auto half = stack[place].isInt() ? static_cast<at::ScalarType>(stack[place].toInt()) : at::kFloat;
    if (wider(half) && is_float(stack[0])) return Mixed{half, place, static_cast<int64_t>(at::kFloat)};
  }
  return {};
}

void call_in_float(const c10::OperatorHandle& op, torch::jit::Stack& stack, const std::optional<Mixed>& mixed) {
  const c10::FunctionSchema& schema = op.schema();
  const torch::jit::Stack given = stack;
  at::ScalarType half = widen(stack);
  if (mixed) {
    stack[mixed->place] = mixed->instead;
    half = mixed->half;
  }
  const torch::jit::Stack widened = stack;
  op.callBoxed(&stack);
  for (size_t i = 0; i < widened.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    if (given[i].isTensor()) {
      if (given[i].toTensor().defined()) write_back(given[i].toTensor(), widened[i].toTensor());
    } else if (given[i].isTensorList()) {
      const auto to = given[i].toTensorVector(), from = widened[i].toTensorVector();
      for (size_t k = 0; k < to.size(); ++k)
        if (to[k].defined()) write_back(to[k], from[k]);
    }
  }
  // A result that is an argument is that one, and a new one has the type of the arguments.
  for (size_t i = 0; i < stack.size(); ++i)
    stack[i] = with_each_tensor(stack[i], [&](const at::Tensor& t) {
      for (size_t k = 0; k < widened.size(); ++k)
        if (widened[k].isTensor() && widened[k].toTensor().is_same(t)) return given[k].toTensor();
      return half == at::ScalarType::Undefined ? t : t.to(narrower(t.scalar_type(), half));
    });
}

// Ops whose numbers CUDA takes in 32 bits, also where those of 16 cannot hold them: clamp(min=-1e9). Others (fill_,
// masked_fill) raise there too.
bool takes_wide_numbers(const std::string& name) {
  for (const char* known : {"aten::clamp", "aten::hardtanh", "aten::add", "aten::sub", "aten::_foreach_maximum",
                            "aten::_foreach_minimum", "aten::_foreach_clamp"})
    if (name.rfind(known, 0) == 0) return true;
  return false;
}
bool is_too_wide(const c10::OperatorHandle& op, const std::exception& e) {
  return std::string_view(e.what()).find("value cannot be converted to type c10::") != std::string_view::npos &&
         takes_wide_numbers(op.schema().name());
}

}  // namespace

bool lacks_half(const std::exception& e) {
  const auto* error = dynamic_cast<const c10::Error*>(&e);
  if (error == nullptr) return false;
  const std::string_view text = error->what_without_backtrace();
  for (const char* type : {"Half", "BFloat16", "ComplexHalf"}) {
    if (text.find(std::string("not implemented for '") + type + "'") != text.npos ||
        text.find(std::string("MKL FFT doesn't support tensors of type: ") + type) != text.npos)
      return true;
  }
  return false;
}

at::ScalarType widen(torch::jit::Stack& stack) {
  auto first = at::ScalarType::Undefined;
  for (c10::IValue& v : stack) {
    if (!is_half(v)) continue;
    v = with_each_tensor(v, [&](const at::Tensor& t) {
      const auto wide = wider(t.scalar_type());
      if (!wide) return t;
      if (first == at::ScalarType::Undefined) first = t.scalar_type();
      return t.to(*wide);
    });
  }
  return first;
}

MixedOptions::MixedOptions(const c10::FunctionSchema& schema)
    : half_to_float(schema.argumentIndexWithName("half_to_float").value_or(-1)),
      input_dtype(schema.argumentIndexWithName("input_dtype").value_or(-1)) {}

void call_in_any_type(const c10::OperatorHandle& op, const MixedOptions& options, torch::jit::Stack& stack) {
  if (const auto m = mixed(options, stack)) return call_in_float(op, stack, m);
  bool any = false;
  for (const c10::IValue& v : stack) any |= is_half(v);
  if (!any) [[likely]]
    return op.callBoxed(&stack);
  torch::jit::Stack arguments = stack;
  try {
    return op.callBoxed(&stack);
  } catch (const std::exception& e) {
    if (!lacks_half(e) && !is_too_wide(op, e)) throw;
  }
  call_in_float(op, arguments, {});
  stack = std::move(arguments);
}

}  // namespace devproxy::aten
