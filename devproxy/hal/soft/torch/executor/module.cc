// The kernel module: every ATen op with a CPU kernel is an entry point. It runs in the device-proxy server, on the
// thread of the launch's stream; several streams run at once, so all state is the thread's own but for the default
// generator, which ops without a generator argument share.
//
// Locks: g_default_generator_mu is held over an op that draws from the default generator; nothing else is taken under
// it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <unordered_map>

#include "devproxy/hal/soft/torch/executor/decode.h"
#include "devproxy/hal/soft/torch/executor/placement.h"

namespace devproxy::softtorch {
namespace {

constexpr int kResultIllegalAddress = 700, kResultAssert = 710, kResultLaunchFailed = 719, kResultNotFound = 500;
constexpr uint32_t kMaxThreads = 1024;

struct Kernel {
  explicit Kernel(c10::OperatorHandle op) : op(std::move(op)) {}
  c10::OperatorHandle op;
  bool vjp = false;
};

std::mutex g_default_generator_mu;

// The launches of one thread mostly want the same, and asking OpenMP is not free.
void use_threads(uint32_t n) {
  thread_local uint32_t t_threads = 0;
  if (n == 0 || n > kMaxThreads) throw Malformed("parameter block: senseless thread count");
  if (t_threads == n) return;
  at::set_num_threads(static_cast<int>(n));
  t_threads = n;
}

// Seeds the default CPU generator for one op and puts back what was there.
class DefaultGeneratorScope {
 public:
  explicit DefaultGeneratorScope(const at::Generator& wanted) : lock_(g_default_generator_mu) {
    default_.set_state(at::Tensor::wrap_tensor_impl(wanted.getIntrusivePtr()->get_state()));
  }
  ~DefaultGeneratorScope() {
    try {
      default_.set_state(saved_);
    } catch (...) {}
  }

 private:
  std::lock_guard<std::mutex> lock_;
  at::Generator default_ = at::detail::getDefaultCPUGenerator();
  at::Tensor saved_ = at::Tensor::wrap_tensor_impl(default_.getIntrusivePtr()->get_state());
};

// Warnings are the client's business: it makes the same checks, and there is somebody who reads them.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// ---- results -------------------------------------------------------------------------------------------------------

template <class F>
void for_each_new_tensor(const c10::FunctionSchema& schema, torch::jit::Stack& stack, F f) {
  const auto& returns = schema.returns();
  for (size_t i = 0; i < stack.size() && i < returns.size(); ++i) {
    if (returns[i].alias_info() != nullptr) continue;  // an argument, already written
    if (stack[i].isTensor()) {
      f(stack[i].toTensor());
    } else if (stack[i].isTensorList()) {
      for (const at::Tensor& t : stack[i].toTensorVector()) f(t);
    }
  }
}

// Puts the op's results where the client expects them. Placement usually left nothing to do.
void deliver(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> from = results;
  const auto in_place = [](const at::Tensor& t, const at::Tensor& out) {
    return t.data_ptr() == out.data_ptr() && t.strides() == out.strides() && !t.is_conj() && !t.is_neg();
  };
  // Placement may have given output A's memory to result B of equal size, or an output's memory to a result that is a
  // view of it with other strides: copy such results aside before anything is written.
  for (size_t i = 0; i < from.size(); ++i) {
    if (!from[i].defined() || from[i].numel() == 0) continue;
    for (size_t j = 0; j < outputs.size(); ++j) {
      if (!outputs[j].defined() || outputs[j].numel() == 0) continue;
      if (from[i].storage().data() != outputs[j].data_ptr() || (i == j && in_place(from[i], outputs[j]))) continue;
      from[i] = from[i].clone(at::MemoryFormat::Preserve);
      break;
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& out = outputs[i];
    if (!out.defined() || out.numel() == 0) continue;
    TORCH_CHECK(i < from.size() && from[i].defined(), "the op returned fewer tensors than the client expects");
    const at::Tensor& t = from[i];
    if (in_place(t, out)) continue;
    TORCH_CHECK(t.sizes() == out.sizes() && t.scalar_type() == out.scalar_type(), "result ", i, " is ", t.scalar_type(),
                t.sizes(), ", the client expects ", out.scalar_type(), out.sizes());
    out.copy_(t);
  }
}

// Some kernels leave their result elsewhere, or in place but to be read conjugated; the client knows neither.
void settle_written(std::vector<Written>& written) {
  for (auto& [given, memory, conj, neg] : written) {
    if (memory.numel() == 0) continue;
    if (given.data_ptr() == memory.data_ptr() && given.is_conj() == conj && given.is_neg() == neg) continue;
    TORCH_CHECK(given.sizes() == memory.sizes(), "an output was resized to ", given.sizes(), ", the client expects ",
                memory.sizes());
    at::Tensor result = given.data_ptr() == memory.data_ptr() ? given.resolve_conj().resolve_neg() : given;
    if (result.is_same(given) && given.data_ptr() == memory.data_ptr()) result = given.clone();
    at::Tensor target = memory.alias();
    target._set_conj(conj);
    target._set_neg(neg);
    target.copy_(result);
  }
}

// ---- infer ---------------------------------------------------------------------------------------------------------

void put_tensor_meta(Writer& w, const at::Tensor& t) {
  if (!t.defined()) return w.tag(Tag::kUndefined);
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, "the software GPU has no ", t.layout(), " tensors");
  w.tag(Tag::kTensor);
  w.put(TensorHead{0,
                   static_cast<int8_t>(t.scalar_type()),
                   static_cast<uint8_t>((t.is_conj() ? kConj : 0) | (t.is_neg() ? kNeg : 0)),
                   static_cast<uint8_t>(t.dim()),
                   {}});
  w.bytes(t.sizes().data(), 8 * t.sizes().size());
  w.bytes(t.strides().data(), 8 * t.strides().size());
}

void put_result(Writer& w, const c10::IValue& v) {
  if (v.isTensor()) return put_tensor_meta(w, v.toTensor());
  if (v.isTensorList()) {
    const auto list = v.toTensorVector();
    w.tag(Tag::kTensorList);
    w.put(static_cast<uint32_t>(list.size()));
    for (const auto& t : list) put_tensor_meta(w, t);
  } else if (v.isInt()) {
    w.tag(Tag::kInt);
    w.put(v.toInt());
  } else if (v.isDouble()) {
    w.tag(Tag::kDouble);
    w.put(v.toDouble());
  } else if (v.isBool()) {
    w.tag(Tag::kBool);
    w.put(static_cast<uint8_t>(v.toBool()));
  } else if (v.isComplexDouble()) {
    w.tag(Tag::kComplex);
    w.put(v.toComplexDouble().real());
    w.put(v.toComplexDouble().imag());
  } else if (v.isNone()) {
    w.tag(Tag::kNone);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the software GPU cannot return a ", v.tagKind());
  }
}

ExceptionKind kind_of(const std::exception& e) {
  if (dynamic_cast<const c10::IndexError*>(&e)) return ExceptionKind::kIndex;
  if (dynamic_cast<const c10::ValueError*>(&e)) return ExceptionKind::kValue;
  if (dynamic_cast<const c10::TypeError*>(&e)) return ExceptionKind::kType;
  if (dynamic_cast<const c10::NotImplementedError*>(&e)) return ExceptionKind::kNotImplemented;
  if (dynamic_cast<const c10::LinAlgError*>(&e)) return ExceptionKind::kLinAlg;
  if (dynamic_cast<const c10::OutOfMemoryError*>(&e)) return ExceptionKind::kOutOfMemory;
  return ExceptionKind::kRuntime;
}

std::string text_of(const std::exception& e) {
  if (const auto* c10_error = dynamic_cast<const c10::Error*>(&e)) return c10_error->what_without_backtrace();
  return e.what();
}

void send_reply(const BlockHeader& header, Writer& w) {
  auto* reply = reinterpret_cast<uint8_t*>(header.reply_addr);
  const uint64_t total = w.size();
  std::memcpy(w.at(offsetof(ReplyHeader, total_bytes)), &total, sizeof total);
  std::memcpy(reply, w.data(), total <= header.reply_bytes ? total : sizeof(ReplyHeader));
}

// ---- one launch ----------------------------------------------------------------------------------------------------

void call_op(const Kernel& kernel, torch::jit::Stack& stack) {
  at::AutoDispatchBelowAutograd below;
  kernel.op.callBoxed(&stack);
}

// The gradients of an op that has no backward op of its own: run it again under autograd, here, and differentiate. The
// CPU's own graph, so the CPU's own numbers.
void call_vjp(const Kernel& kernel, torch::jit::Stack& stack) {
  TORCH_CHECK(stack.size() >= 2 && stack.back().isBoolList() && stack[stack.size() - 2].isTensorList(),
              "vjp: gradients are missing");
  const auto wanted = torch::jit::pop(stack).toBoolList();
  const auto gradients = torch::jit::pop(stack).toTensorVector();

  at::AutoGradMode grad(true);
  std::vector<at::Tensor> inputs;
  size_t place = 0;
  auto leaf = [&](const at::Tensor& t) {
    TORCH_CHECK(place < wanted.size(), "vjp: too few flags");
    if (!wanted[place++]) return t;
    at::Tensor l = t.detach().requires_grad_(true);
    inputs.push_back(l);
    return l;
  };
  for (auto& v : stack) {
    if (v.isTensor() && v.toTensor().defined()) {
      v = leaf(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(t.defined() ? leaf(t) : t);
      v = list;
    }
  }
  kernel.op.callBoxed(&stack);
  std::vector<at::Tensor> outputs, grads;
  for (size_t i = 0; i < stack.size() && i < gradients.size(); ++i) {
    if (!gradients[i].defined() || !stack[i].isTensor() || !stack[i].toTensor().requires_grad()) continue;
    outputs.push_back(stack[i].toTensor());
    grads.push_back(gradients[i]);
  }
  const auto result = torch::autograd::grad(outputs, inputs, grads, /*retain_graph=*/false, /*create_graph=*/false,
                                            /*allow_unused=*/true);
  stack.clear();
  c10::List<at::Tensor> list;
  for (size_t i = 0; i < result.size(); ++i)
    list.push_back(result[i].defined() ? result[i] : at::zeros_like(inputs[i], at::MemoryFormat::Contiguous));
  stack.emplace_back(std::move(list));
}

void run(const Kernel& kernel, const devproxy_soft_launch& launch, const BlockHeader& header) {
  use_threads(header.threads);
  static Silence silence;
  c10::WarningUtils::WarningHandlerGuard no_warnings(&silence);
  // Dispatch as in a fresh thread, also where the module runs inside its own client (tests/torch/stand_in_libcuda.cc).
  c10::InferenceMode no_inference(false);
  c10::impl::ForceDispatchKeyGuard fresh(c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{}));
  at::AutoGradMode grad(header.flags & kFlagGradMode);
  const bool deterministic = header.flags & kFlagDeterministic;
  if (at::globalContext().deterministicAlgorithms() != deterministic)
    at::globalContext().setDeterministicAlgorithms(deterministic, /*warn_only=*/true);

  Decoder decoder({launch.params + sizeof header, launch.params_bytes - sizeof header}, launch.services, header);
  torch::jit::Stack stack;
  std::vector<at::Tensor> outputs;
  at::Generator ambient;
  {
    at::AutoDispatchBelowAutograd below;
    const size_t expected = kernel.op.schema().arguments().size() + (kernel.vjp ? 2 : 0);
    if (header.n_args != expected) throw Malformed("parameter block: wrong number of arguments");
    stack.reserve(expected);
    for (size_t i = 0; i < expected; ++i) stack.push_back(decoder.value());
    if (header.flags & kFlagAmbientGenerator) ambient = decoder.generator();
    if (header.mode == Mode::kRun)
      for (uint32_t i = 0; i < header.n_outputs; ++i) outputs.push_back(decoder.output());
    if (!decoder.at_end()) throw Malformed("parameter block: bytes left over");
  }
  std::optional<DefaultGeneratorScope> default_generator;
  if (ambient.defined()) default_generator.emplace(ambient);

  PlacementScope placement;
  for (const auto& out : outputs)
    if (out.defined() && out.numel() != 0 && out.is_non_overlapping_and_dense())
      placement.offer(out.mutable_data_ptr(), out.storage().nbytes());
  kernel.vjp ? call_vjp(kernel, stack) : call_op(kernel, stack);
  placement.close();

  at::NoGradGuard no_grad;
  at::AutoDispatchBelowAutograd below;
  if (header.mode == Mode::kInfer) {
    Writer w;
    w.put(ReplyHeader{0, ReplyStatus::kOk, ExceptionKind::kRuntime});
    w.put(static_cast<uint8_t>(stack.size()));
    for (const auto& v : stack) put_result(w, v);
    return send_reply(header, w);
  }
  settle_written(decoder.written());
  std::vector<at::Tensor> results;
  if (kernel.vjp) {
    results = stack[0].toTensorVector();
  } else {
    for_each_new_tensor(kernel.op.schema(), stack, [&](const at::Tensor& t) { results.push_back(t); });
  }
  stack.clear();
  deliver(results, outputs);
}

int fail(const devproxy_soft_launch& launch, int result, const Kernel& kernel, const std::string& text) {
  const std::string line = c10::toString(kernel.op.operator_name()) + ": " + text;
  if (launch.error != nullptr && launch.error_bytes != 0)
    snprintf(launch.error, launch.error_bytes, "%s", line.substr(0, line.find('\n')).c_str());
  return result;
}

int kernel_entry(const devproxy_soft_launch* launch) {
  const auto& kernel = *static_cast<const Kernel*>(launch->function_cookie);
  BlockHeader header{};
  bool can_reply = false;
  try {
    if (launch->params_bytes < sizeof header) throw Malformed("parameter block is cut short");
    std::memcpy(&header, launch->params, sizeof header);
    if (header.magic != kBlockMagic) throw Malformed("parameter block of another version");
    if (header.mode != Mode::kRun && header.mode != Mode::kInfer) throw Malformed("parameter block: unknown mode");
    if (header.mode == Mode::kInfer) {
      if (header.reply_bytes < sizeof(ReplyHeader) ||
          launch->services->check_range(launch->services->cookie, header.reply_addr, header.reply_bytes) != 1)
        throw IllegalAddress("the reply buffer is not in live memory of this process");
      can_reply = true;
    }
    run(kernel, *launch, header);
    return 0;
  } catch (const IllegalAddress& e) {
    return fail(*launch, kResultIllegalAddress, kernel, e.what());
  } catch (const Malformed& e) {
    return fail(*launch, kResultLaunchFailed, kernel, e.what());
  } catch (const std::exception& e) {
    const std::string text = text_of(e);
    if (can_reply) {
      // PyTorch's own argument checks: the client raises them as exceptions, and the context lives on.
      Writer w;
      w.put(ReplyHeader{0, ReplyStatus::kException, kind_of(e)});
      w.bytes(text.data(), text.size());
      send_reply(header, w);
      return 0;
    }
    const bool assertion =
        dynamic_cast<const c10::IndexError*>(&e) != nullptr || text.find("index") != std::string::npos;
    return fail(*launch, assertion ? kResultAssert : kResultLaunchFailed, kernel, text);
  } catch (...) {
    return fail(*launch, kResultLaunchFailed, kernel, "unknown exception");
  }
}

int get_function(const char* name, devproxy_soft_function* out) {
  static auto* const mu = new std::mutex;
  static auto* const kernels = new std::unordered_map<std::string, std::unique_ptr<Kernel>>;
  try {
    std::lock_guard lock(*mu);
    auto& slot = (*kernels)[name];
    if (slot == nullptr) {
      std::string_view rest = name;
      const bool vjp = rest.substr(0, kVjpPrefix.size()) == kVjpPrefix;
      if (vjp) rest.remove_prefix(kVjpPrefix.size());
      const size_t dot = rest.find('.', rest.find("::") == rest.npos ? 0 : rest.find("::"));
      const std::string base(rest.substr(0, dot));
      const std::string overload(dot == rest.npos ? std::string_view() : rest.substr(dot + 1));
      const auto op = c10::Dispatcher::singleton().findSchema({base, overload});
      if (!op) {
        kernels->erase(name);
        return kResultNotFound;
      }
      slot = std::make_unique<Kernel>(*op);
      slot->vjp = vjp;
    }
    *out = {};
    out->kernel = &kernel_entry;
    out->cookie = slot.get();
    return 0;
  } catch (...) {
    return kResultNotFound;
  }
}

int load(uint32_t, char* error, uint64_t error_bytes) {
  try {
    install_placement();
    return 0;
  } catch (const std::exception& e) {
    if (error != nullptr && error_bytes != 0) snprintf(error, error_bytes, "%s", e.what());
    return kResultLaunchFailed;
  }
}

}  // namespace
}  // namespace devproxy::softtorch

extern "C" DEVPROXY_SOFT_MODULE_EXPORT const devproxy_soft_module_table devproxy_soft_module = {
    DEVPROXY_SOFT_MODULE_ABI, 0, nullptr, devproxy::softtorch::get_function, devproxy::softtorch::load,
};
