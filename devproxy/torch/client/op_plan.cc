// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/op_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/forward.h"
#include "devproxy/torch/client/sparse.h"

namespace devproxy::aten {
namespace {

std::mutex g_plans_mu;
auto& plans() {
  static auto* const p = new std::unordered_map<const void*, std::unique_ptr<OpPlan>>;
  return *p;
}

bool has_structured_kernel(const c10::OperatorName& out) {
  // add.out belongs to add.Tensor: any functional overload of that name with the shape-function wrapper will do.
  static auto* const names = [] {
    auto* set = new std::unordered_map<std::string, bool>;
    for (const auto& n : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(n);
      if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
        (*set)[n.name] = true;
    }
    return set;
  }();
  return names->count(out.name) != 0;
}

// Ops that return numbers beside tensors, or alone, which their arguments' shapes and torch's settings decide:
// attention's and what chooses among its kinds. Asked once per signature, and in the signature are the settings.
bool numbers_follow_shapes(const std::string& name) {
  for (const char* known :
       {"aten::_fused_sdp_choice", "aten::_use_cudnn_ctc_loss", "aten::_scaled_dot_product_",
        "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward"})
    if (name.rfind(known, 0) == 0) return true;
  return false;
}

// One of its numbers must be larger than another.
bool compares_scalars(const std::string& name) { return name.rfind("aten::histc", 0) == 0; }

// Ops of which CUDA, too, says by an exception at the call that it does not take these values.
bool raises_for_values(const std::string& name) {
  static const std::unordered_set<std::string_view> kNames = {
      "aten::_linalg_eigh",
      "aten::_linalg_svd",
      "aten::_linalg_eigvals",
      "aten::linalg_eigvals",
      "aten::linalg_eig",
      "aten::cholesky",
      "aten::cholesky_inverse",
      "aten::fake_quantize_per_channel_affine_cachemask",
      "aten::histc",
      "aten::normal",
      "aten::searchsorted",
      "aten::segment_reduce",
  };
  return kNames.count(std::string_view(name).substr(0, name.find('.'))) != 0;
}

bool mentions(const std::string& type, const char* word) { return type.find(word) != std::string::npos; }

std::unique_ptr<OpPlan> make_plan(const c10::OperatorHandle& op) {
  auto plan = std::make_unique<OpPlan>();
  const c10::FunctionSchema& schema = op.schema();
  plan->schema = &schema;
  plan->name = c10::toString(schema.operator_name());
  for (const auto& a : schema.arguments()) {
    ArgPlan arg;
    const std::string type = a.real_type()->str();
    arg.writable = a.alias_info() != nullptr && a.alias_info()->isWrite();
    arg.generator = mentions(type, "Generator");
    // Not a ScalarType, which is a number too and decides the result's.
    arg.scalar = (mentions(type, "Scalar") && !mentions(type, "ScalarType")) || mentions(type, "number");
    if (compares_scalars(plan->name)) arg.scalar = false;
    arg.host_ok =
        mentions(type, "Optional[Tensor][]") || mentions(type, "Tensor?[]") || mentions(type, "List[Optional[Tensor]]");
    if (mentions(a.name(), "lengths") || a.name() == "batch_sizes" || a.name() == "tensor_indices_or_sections" ||
        a.name() == "repeats")
      arg.host_ok = true;
    if (mentions(type, "Tensor") && !a.is_out()) plan->has_tensor_arg = true;
    plan->has_generator_arg |= arg.generator;
    if (a.is_out()) plan->outs.push_back(static_cast<int>(plan->args.size()));
    plan->args.push_back(arg);
  }
  for (const auto& r : schema.returns()) {
    int from = -1;
    if (r.alias_info() != nullptr) {
      for (size_t i = 0; i < schema.arguments().size() && from < 0; ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias != nullptr && alias->beforeSets() == r.alias_info()->beforeSets()) from = static_cast<int>(i);
      }
      if (!r.alias_info()->isWrite()) plan->view_of = from;
    } else {
      const auto kind = r.type()->kind();
      if (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType) {
        plan->new_tensors = true;
      } else {
        plan->numbers = true;
        plan->dynamic = !numbers_follow_shapes(plan->name);
      }
    }
    plan->return_is_arg.push_back(from);
  }
  for (const auto tag : op.getTags()) {
    if (tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output) plan->dynamic = true;
    if (tag == at::Tag::nondeterministic_seeded) plan->random = true;
  }
  // Recurrent layers sent whole drop out between their layers.
  for (const char* layer : {"aten::lstm.", "aten::gru.", "aten::rnn_"})
    if (plan->name.rfind(layer, 0) == 0) plan->random = true;
  plan->foreign = plan->name.rfind("aten::", 0) != 0;
  if (!plan->outs.empty()) plan->checked_by_meta = has_structured_kernel(schema.operator_name());
  // native_batch_norm and its kin update running statistics that their schemas do not declare as written.
  // cuDNN's recurrent layers move the state of their dropout. oneDNN's write into the gradients that they are given.
  plan->writes_undeclared = mentions(plan->name, "batch_norm") || mentions(plan->name, "_cudnn_rnn") ||
                            plan->name == "aten::mkldnn_rnn_layer_backward";
  // Their weights in one buffer come back as they were given, and nobody should copy them.
  if (plan->name == "aten::_cudnn_rnn") plan->kept_result = 4, plan->kept_arg = 3;
  plan->raises = raises_for_values(plan->name);
  for (const auto& [op, argument] : {std::pair{"aten::searchsorted", "sorter"}, {"aten::normal", "std"}})
    if (plan->name.rfind(op, 0) == 0) plan->raises_with = schema.argumentIndexWithName(argument).value_or(-1);
  return plan;
}

// Shape functions look at types only where the op converts them; a kernel that does not (mm) would refuse them when it
// runs, and that is too late for an exception.
bool types_agree(const OpPlan& plan, const c10::IValue* args) {
  auto type = at::ScalarType::Undefined;
  for (size_t i = 0; i < plan.args.size(); ++i) {
    if (!is_defined(args[i])) continue;
    if (is_sparse(args[i].toTensor())) return false;
    const at::ScalarType t = args[i].toTensor().scalar_type();
    if (type != at::ScalarType::Undefined && t != type) return false;
    type = t;
  }
  return true;
}

}  // namespace

OpPlan& plan_of(const c10::OperatorHandle& op) {
  std::lock_guard lock(g_plans_mu);
  auto& slot = plans()[&op.schema()];
  if (slot == nullptr) slot = make_plan(op);
  return *slot;
}

CUfunction function_of(OpPlan& plan, DeviceIndex device) {
  CUfunction f = plan.functions[device].load(std::memory_order_acquire);
  if (f == nullptr) [[unlikely]] {
    f = executor_function(device, plan.name);
    plan.functions[device].store(f, std::memory_order_release);
  }
  return f;
}

uint64_t reach(double v) {
  const double size = std::abs(v);
  if (size <= 127 && size > 0) [[likely]]
    return v < 0;
  // The largest of each type, and of the signed ones also the least.
  static constexpr double kLimits[] = {
      0,     127,   128,        240,        255,        448,    32767,  32768,      57344,
      65504, 65535, 0x7fffffff, 0x80000000, 0xffffffff, 0x1p63, 0x1p64, 0x1.fep127, std::numeric_limits<float>::max()};
  uint64_t beyond = std::isnan(v) ? 100 : 2;
  for (const double limit : kLimits) beyond += size > limit;
  return beyond << 1 | (v < 0);
}

bool is_zero(const at::Tensor& t) {
  if (!t.is_cpu() || t.dim() != 0 || !at::isIntegralType(t.scalar_type(), /*includeBool=*/true)) return false;
  const auto* bytes = static_cast<const uint8_t*>(t.const_data_ptr());
  return std::all_of(bytes, bytes + t.itemsize(), [](uint8_t b) { return b == 0; });
}

uint64_t kind_of(const OpPlan& plan, const c10::IValue* args) {
  uint64_t kind = 0xcbf29ce484222325;
  const auto mix = [&](uint64_t word) { kind = (kind ^ word) * 0xff51afd7ed558ccdull, kind ^= kind >> 32; };
  const auto tensor = [&](const at::Tensor& t) {
    mix(t.defined() ? static_cast<uint64_t>(is_zero(t)) << 16 | static_cast<uint64_t>(t.scalar_type()) << 8 |
                          static_cast<uint64_t>(t.dim())
                    : UINT64_MAX);
  };
  for (size_t i = 0; i < plan.args.size(); ++i) {
    const c10::IValue& v = args[i];
    if (v.isTensor()) {
      tensor(v.toTensor());
    } else if (v.isTensorList()) {
      for (const c10::IValue& e : v.toListRef()) tensor(e.toTensor());
    } else if (v.isBool()) {
      mix(v.toBool());
    } else if (v.isInt() && plan.args[i].scalar) {
      mix(1), mix(reach(v.toInt()));
    } else if (v.isDouble() && plan.args[i].scalar) {
      mix(2), mix(reach(v.toDouble()));
    } else if (v.isComplexDouble()) {
      mix(3), mix(reach(v.toComplexDouble()));
    } else if (v.isString()) {
      mix(std::hash<std::string>{}(v.toStringRef()));
    } else {
      mix(v.isNone());
    }
  }
  return kind | 1;
}

bool outs_are_right(const OpPlan& plan, const c10::IValue* args) {
  if (!plan.checked_by_meta || !types_agree(plan, args)) return false;
  for (const int i : plan.outs) {
    if (!args[i].isTensor()) return false;
    const at::Tensor& t = args[i].toTensor();
    if (!t.defined() || t.numel() == 0 || t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr) return false;
  }
  return true;
}

bool shape_is_known(const OpPlan& plan, const c10::IValue* args) {
  if (!plan.dynamic) return true;
  if (plan.name != "aten::index.Tensor") return false;
  for (const c10::IValue& v : args[1].toListRef())
    if (v.isTensor() && (v.toTensor().scalar_type() == at::kBool || v.toTensor().scalar_type() == at::kByte))
      return false;
  return true;
}

std::map<std::string, OpCounts> op_counts() {
  std::lock_guard lock(g_plans_mu);
  std::map<std::string, OpCounts> counts;
  for (const auto& [key, plan] : plans()) counts[plan->name] = {plan->launches.load(), plan->infers.load()};
  return counts;
}

}  // namespace devproxy::aten
