// SPDX-License-Identifier: Apache-2.0
// The executor: every ATen op with a kernel for this device is an entry point. It runs in the device-proxy server, on
// the thread that the device chose for the launch; several may run at once, so all state is the thread's own but for
// torch's settings and its default generator, which ops without a generator argument share.
//
// Locks: g_default_generator_mu is held over an op that draws from the default generator; client.mu may be taken under
// it. g_settings_mu guards which settings are in force; client.mu may be taken under it.
#include <ATen/Context.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "devproxy/hal/host_module/include/devproxy_executor.h"
#include "devproxy/torch/executor/client.h"
#include "devproxy/torch/executor/decode.h"
#include "devproxy/torch/executor/device.h"
#include "devproxy/torch/executor/footprint.h"
#include "devproxy/torch/executor/half.h"
#include "devproxy/torch/executor/other_types.h"
#include "devproxy/torch/executor/placement.h"

namespace devproxy::aten {
namespace {

constexpr int kResultOutOfMemory = 2, kResultIllegalAddress = 700, kResultAssert = 710, kResultLaunchFailed = 719,
              kResultNotFound = 500;

#ifndef DEVPROXY_TORCH_BUILD
#error "the build says what client and executor are made from: -DDEVPROXY_TORCH_BUILD"
#endif

// What is known of an op before it is launched.
struct Kernel {
  Kernel(c10::OperatorHandle which, bool vjp)
      : op(std::move(which)), mixed(op.schema()), vjp(vjp), name(c10::toString(op.operator_name())) {
    if (device::kLacksTypes && !vjp) instead = instead_of(name);
    n_args = op.schema().arguments().size() + (vjp ? 2 : 0);
    for (const auto& r : op.schema().returns()) {
      is_new.push_back(r.alias_info() == nullptr);
    }
  }
  c10::OperatorHandle op;
  MixedOptions mixed;
  bool vjp;
  std::string name;
  Instead instead = nullptr;
  size_t n_args;                     // that a block of it must have
  c10::SmallVector<bool, 8> is_new;  // of each result: not an argument, which is already written
};

std::mutex g_default_generator_mu;

// An op that takes no generator argument draws from this one. Call done() when it has drawn. Without done() the op has
// thrown; then the generator's position is undefined, as it is natively.
class DefaultGeneratorScope {
 public:
  DefaultGeneratorScope(const Client& client, at::Generator wanted)
      : lock_(g_default_generator_mu), client_(client), wanted_(std::move(wanted)) {
    device::lend_to_default(client_, wanted_);
  }
  void done() { device::take_from_default(client_, wanted_); }

 private:
  std::lock_guard<std::mutex> lock_;
  const Client& client_;
  const at::Generator wanted_;
};

// An op that is only asked for its results' shapes must draw nothing. Call put_back() afterwards, also if it throws.
class GeneratorsUntouched {
 public:
  explicit GeneratorsUntouched(const std::vector<at::Generator>& generators) : generators_(generators) {
    for (const at::Generator& g : generators_)
      states_.push_back(at::Tensor::wrap_tensor_impl(g.getIntrusivePtr()->get_state()));
  }
  void put_back() {
    for (size_t i = 0; i < states_.size(); i++) generators_[i].set_state(states_[i]);
  }

 private:
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
};

// torch's settings belong to the process, but each client has its own. On CUDA, ops of several clients are dispatched one
// at a time only if their settings differ. If one client changes them while another's op is inside, that op may see
// either, as with two threads of one process.
std::mutex g_settings_mu;
const Client* g_settings_of = nullptr;
uint32_t g_settings_number = 0;

// How often the settings in force have changed, or have become unknown; written under g_settings_mu. A thread that has
// found its client's settings in force needs no lock until this changes. That is no weaker than the lock, which was never
// held over an op. The count rises before anything is touched, so no thread takes half-applied settings for its own. A
// thread reads the count and the settings in force under the lock, so both are of one moment. The count also rises when a
// client leaves, since another client may get its address.
std::atomic<uint64_t> g_settings_changes{1};

// Precondition: g_settings_mu is held.
void forget_settings() {
  g_settings_changes.fetch_add(1, std::memory_order_release);
  g_settings_of = nullptr;
}

void use_settings(Client& client, uint32_t number) {
  if (number == 0) return;
  struct Last {
    const Client* client;
    uint64_t changes;
    uint32_t number;
  };
  thread_local Last t_last{};
  if (t_last.client == &client && t_last.number == number &&
      t_last.changes == g_settings_changes.load(std::memory_order_acquire)) [[likely]]
    return;
  std::lock_guard lock(g_settings_mu);
  if (g_settings_of != &client || g_settings_number != number) {
    forget_settings();  // half of them may be in force if one throws
    apply_settings(at::globalContext(), settings_of(client, number));
    g_settings_of = &client;
    g_settings_number = number;
  }
  t_last = {&client, g_settings_changes.load(std::memory_order_relaxed), number};
}

// The client warns: it makes the same checks, and its user reads the warnings.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// ---- results -------------------------------------------------------------------------------------------------------

using Tensors = c10::SmallVector<at::Tensor, 4>;

bool is_sparse(const at::Tensor& t) { return t.defined() && t.layout() != at::kStrided; }

// The dense tensors that a sparse one is made of.
Tensors parts_of(const at::Tensor& t) {
  if (t.is_sparse()) return {t._indices(), t._values()};
  TORCH_CHECK_NOT_IMPLEMENTED(at::sparse_csr::is_sparse_compressed(t), "devproxy has no ", t.layout(), " tensors");
  const auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(t);
  return {compressed, plain, t.values()};
}

// Those of a sparse result also where it is an argument: its memory is another then.
template <class F>
void for_each_new_tensor(const Kernel& kernel, torch::jit::Stack& stack, F f) {
  const auto each = [&](const at::Tensor& t) {
    if (!is_sparse(t)) return f(t);
    for (const at::Tensor& part : parts_of(t)) f(part);
  };
  for (size_t i = 0; i < stack.size() && i < kernel.is_new.size(); ++i) {
    if (stack[i].isTensor()) {
      if (kernel.is_new[i] || is_sparse(stack[i].toTensor())) each(stack[i].toTensor());
    } else if (kernel.is_new[i] && stack[i].isTensorList()) {
      for (const at::Tensor& t : stack[i].toTensorVector()) each(t);
    }
  }
}

// Puts the op's results where the client expects them. Placement usually left nothing to do.
void deliver(const Tensors& results, const Tensors& outputs) {
  const auto empty = [](const at::Tensor& t) { return !t.defined() || t.numel() == 0; };
  const auto in_place = [](const at::Tensor& t, const at::Tensor& out) {
    return t.data_ptr() == out.data_ptr() && t.strides() == out.strides() && !t.is_conj() && !t.is_neg();
  };
  const auto there = [&](size_t i) {
    if (empty(outputs[i])) return true;
    return i < results.size() && results[i].defined() && results[i].device().type() == outputs[i].device().type() &&
           in_place(results[i], outputs[i]);
  };
  size_t n = 0;
  while (n < outputs.size() && there(n)) ++n;
  if (n == outputs.size()) return;

  Tensors from = results;
  // Placement may have given output A's memory to result B of equal size, or an output's memory to a result that is a
  // view of it with other strides: copy such results aside before anything is written.
  for (size_t i = 0; i < from.size(); ++i) {
    if (empty(from[i])) continue;
    for (size_t j = 0; j < outputs.size(); ++j) {
      if (empty(outputs[j])) continue;
      if (from[i].storage().data() != outputs[j].data_ptr() || (i == j && in_place(from[i], outputs[j]))) continue;
      from[i] = from[i].clone(at::MemoryFormat::Preserve);
      break;
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& out = outputs[i];
    if (empty(out)) continue;
    TORCH_CHECK(i < from.size() && from[i].defined(), "the op returned fewer tensors than the client expects");
    const at::Tensor& t = from[i];
    if (t.device().type() == out.device().type() && in_place(t, out)) continue;
    TORCH_CHECK(t.sizes() == out.sizes() && t.scalar_type() == out.scalar_type(), "result ", i, " is ", t.scalar_type(),
                t.sizes(), ", the client expects ", out.scalar_type(), out.sizes());
    out.copy_(t);
  }
}

// Some kernels leave their result elsewhere, or in place but to be read conjugated; the client knows neither.
void settle_written(const Client& client, c10::ArrayRef<Written> written) {
  for (const Written& w : written) {
    const at::Tensor& given = w.given;
    const bool there = given.data_ptr() == w.p;
    if (there && given.is_conj() == w.conj && given.is_neg() == w.neg) continue;
    const at::Tensor memory = w.memory(client);
    TORCH_CHECK(given.sizes() == memory.sizes(), "an output was resized to ", given.sizes(), ", the client expects ",
                memory.sizes());
    at::Tensor result = there ? given.resolve_conj().resolve_neg() : given;
    if (result.is_same(given) && there) result = given.clone();
    at::Tensor target = memory.alias();
    target._set_conj(w.conj);
    target._set_neg(w.neg);
    target.copy_(result);
  }
}

// ---- infer ---------------------------------------------------------------------------------------------------------

void put_tensor_meta(Writer& w, const at::Tensor& t) {
  if (!t.defined()) return w.tag(Tag::kUndefined);
  TORCH_CHECK_NOT_IMPLEMENTED(!t.is_nested(), "devproxy has no nested tensors on the device");
  TORCH_CHECK_NOT_IMPLEMENTED(!t.is_quantized(), "devproxy has no quantized tensors on the device");
  if (is_sparse(t)) {
    const Tensors parts = parts_of(t);
    w.tag(Tag::kSparse);
    w.put(SparseHead{static_cast<int8_t>(t.layout()),
                     0,
                     static_cast<uint8_t>(t.dim()),
                     t.is_sparse() && t.is_coalesced(),
                     static_cast<uint8_t>(parts.size()),
                     {}});
    w.bytes(t.sizes().data(), 8 * t.sizes().size());
    for (const at::Tensor& part : parts) put_tensor_meta(w, part);
    return;
  }
  w.tag(Tag::kTensor);
  w.put(TensorHead{0,
                   static_cast<int8_t>(t.scalar_type()),
                   static_cast<uint8_t>((t.is_conj() ? kConj : 0) | (t.is_neg() ? kNeg : 0) |
                                        (t.device().type() != device::kType ? kHostResult : 0)),
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
    TORCH_CHECK_NOT_IMPLEMENTED(false, "devproxy cannot return a ", v.tagKind());
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

void send_reply(const BlockHeader& header, Writer& w) { send_reply(header.reply_addr, header.reply_bytes, w); }

// ---- one launch ----------------------------------------------------------------------------------------------------

// Sets dispatch and autograd as they are in a fresh thread, below autograd and below what makes views of a sparse tensor's
// parts, also if the module runs inside its own client (tests/torch/stand_in_libcuda.cc). One step does it all; torch's
// guards cost a call or two for each part.
class FreshState {
 public:
  explicit FreshState(bool grad_mode)
      : state_(c10::AutogradState::get_tls_state()), keys_(c10::impl::tls_local_dispatch_key_set()) {
    // As InferenceMode(false) sets it, but for the grad mode, which is the client's.
    c10::AutogradState::set_tls_state({grad_mode, /*inference_mode=*/false, /*fw_grad_mode=*/true,
                                       /*multithreading_enabled=*/true});
    c10::impl::LocalDispatchKeySet keys = fresh_keys();
    keys.excluded_ = keys.excluded_ | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
  ~FreshState() {
    c10::AutogradState::set_tls_state(state_);
    c10::impl::_force_tls_local_dispatch_key_set(keys_);
  }
  FreshState(const FreshState&) = delete;
  FreshState& operator=(const FreshState&) = delete;

  static c10::impl::LocalDispatchKeySet fresh_keys() { return c10::impl::PODLocalDispatchKeySet{}; }

 private:
  const c10::AutogradState state_;
  const c10::impl::LocalDispatchKeySet keys_;
};

// The thread's stack of arguments, whose memory is kept from op to op. Whoever runs inside another launch of the same
// thread finds none and makes its own.
class StackLease {
 public:
  StackLease() { stack_.swap(t_kept_); }
  ~StackLease() {
    stack_.clear();
    stack_.swap(t_kept_);
  }
  StackLease(const StackLease&) = delete;
  StackLease& operator=(const StackLease&) = delete;
  torch::jit::Stack& operator*() { return stack_; }

 private:
  static thread_local torch::jit::Stack t_kept_;
  torch::jit::Stack stack_;
};
thread_local torch::jit::Stack StackLease::t_kept_;

// The gradients of an op that has no backward op of its own: run it again under autograd, here, and differentiate. The
// CPU's own graph, so the CPU's own numbers.
void call_vjp(const Kernel& kernel, torch::jit::Stack& stack, bool in_float) {
  TORCH_CHECK(stack.size() >= 2 && stack.back().isBoolList() && stack[stack.size() - 2].isTensorList(),
              "vjp: gradients are missing");
  const auto wanted = torch::jit::pop(stack).toBoolList();
  const auto gradients = torch::jit::pop(stack).toTensorVector();

  c10::impl::ForceDispatchKeyGuard with_autograd(FreshState::fresh_keys());
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
  if (in_float) widen(stack);
  kernel.op.callBoxed(&stack);
  std::vector<at::Tensor> outputs, grads;
  for (size_t i = 0; i < stack.size() && i < gradients.size(); ++i) {
    if (!gradients[i].defined() || !stack[i].isTensor() || !stack[i].toTensor().requires_grad()) continue;
    outputs.push_back(stack[i].toTensor());
    grads.push_back(gradients[i].to(outputs.back().scalar_type()));
  }
  const auto result = torch::autograd::grad(outputs, inputs, grads, /*retain_graph=*/false, /*create_graph=*/false,
                                            /*allow_unused=*/true);
  stack.clear();
  c10::List<at::Tensor> list;
  for (size_t i = 0; i < result.size(); ++i)
    list.push_back(result[i].defined() ? result[i] : at::zeros_like(inputs[i], at::MemoryFormat::Contiguous));
  stack.emplace_back(std::move(list));
}

// The op, or its gradients.
void call(const Kernel& kernel, torch::jit::Stack& stack) {
  if (!device::kLacksTypes) return kernel.vjp ? call_vjp(kernel, stack, false) : kernel.op.callBoxed(&stack);
  if (kernel.instead != nullptr && kernel.instead(stack)) return;
  if (!kernel.vjp) return call_in_any_type(kernel.op, kernel.mixed, stack);
  torch::jit::Stack arguments = stack;
  try {
    return call_vjp(kernel, stack, false);
  } catch (const std::exception& e) {
    if (!lacks_half(e)) throw;
  }
  call_vjp(kernel, arguments, true);
  stack = std::move(arguments);
}

// The results that the op has on the host, for a client that waits for them.
void send_host_results(const BlockHeader& header, const Tensors& results) {
  Writer w;
  w.put(ReplyHeader{0, ReplyStatus::kOk, ExceptionKind::kRuntime});
  for (const at::Tensor& t : results) {
    if (!t.defined() || t.device().type() == device::kType) continue;
    const at::Tensor c = t.contiguous();
    w.tag(Tag::kHostTensor);
    w.put(HostTensorHead{c.nbytes(), static_cast<int8_t>(c.scalar_type()), 0, static_cast<uint8_t>(c.dim()), {}});
    w.bytes(c.sizes().data(), 8 * c.sizes().size());
    w.bytes(c.const_data_ptr(), c.nbytes());
  }
  send_reply(header, w);
}

// In a capture an op is tried with made-up contents (decode.cc), and those of integers are 0. Pivots count from 1, and
// not every library looks: LAPACK's sytrs would swap a row that lies before the tensor's memory.
void make_up_pivots(const Kernel& kernel, torch::jit::Stack& stack) {
  const auto& args = kernel.op.schema().arguments();
  for (size_t i = 0; i < args.size(); ++i)
    if (args[i].name().find("pivots") != std::string::npos && stack[i].isTensor() && stack[i].toTensor().defined())
      stack[i].toTensor().fill_(1);
}

void run(const Kernel& kernel, const devproxy_soft_launch& launch, const BlockHeader& header) {
  Client& client = *static_cast<Client*>(launch.state);
  const device::LaunchScope scope(client, launch, header.threads);
  static Silence silence;
  c10::WarningUtils::WarningHandlerGuard no_warnings(&silence);
  const FreshState fresh(header.flags & kFlagGradMode);
  const bool deterministic = header.flags & kFlagDeterministic;
  const bool warn_only = !device::kRaisesNondeterminism || header.flags & kFlagWarnOnly;
  at::Context& context = at::globalContext();
  if (context.deterministicAlgorithms() != deterministic || context.deterministicAlgorithmsWarnOnly() != warn_only)
    context.setDeterministicAlgorithms(deterministic, warn_only);
  use_settings(client, header.settings);

  Decoder decoder(client, {launch.params + sizeof header, launch.params_bytes - sizeof header}, launch.services,
                  header);
  StackLease lease;
  torch::jit::Stack& stack = *lease;
  Tensors outputs;
  at::Generator ambient;
  const bool infer = header.mode == Mode::kInfer;
  if (header.n_args != kernel.n_args) throw Malformed("parameter block: wrong number of arguments");
  stack.reserve(kernel.n_args);
  for (size_t i = 0; i < kernel.n_args; ++i) stack.push_back(decoder.value());
  if (infer && header.flags & kFlagBlank) make_up_pivots(kernel, stack);
  if (header.flags & kFlagAmbientGenerator) ambient = decoder.generator();
  if (!infer)
    for (uint32_t i = 0; i < header.n_outputs; ++i) outputs.push_back(decoder.output());
  if (!decoder.at_end()) throw Malformed("parameter block: bytes left over");
  std::optional<GeneratorsUntouched> untouched;
  if (infer && !decoder.kept_generators().empty()) untouched.emplace(decoder.kept_generators());
  std::optional<DefaultGeneratorScope> default_generator;
  if (ambient.defined()) default_generator.emplace(client, ambient);

  PlacementScope placement(&kernel);
  c10::SmallVector<std::pair<size_t, size_t>, 4> offered;  // an output, the number of its offer
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& out = outputs[i];
    if (out.defined() && out.numel() != 0 && out.is_non_overlapping_and_dense())
      offered.emplace_back(i, placement.offer(out.mutable_data_ptr(), out.storage().nbytes()));
  }
  placement.open();
  try {
    call(kernel, stack);
  } catch (...) {
    if (untouched) untouched->put_back();
    throw;
  }
  placement.close();
  if (default_generator) default_generator->done();
  if (untouched) untouched->put_back();
  default_generator.reset();  // others may draw

  c10::GradMode::set_enabled(false);  // `fresh` ends it
  if (infer) {
    Writer w;
    w.put(ReplyHeader{0, ReplyStatus::kOk, ExceptionKind::kRuntime});
    w.put(static_cast<uint8_t>(stack.size()));
    for (const auto& v : stack) put_result(w, v);
    return send_reply(header, w);
  }
  settle_written(client, decoder.written());
  Tensors results;
  if (kernel.vjp) {
    for (const at::Tensor& t : stack[0].toTensorVector()) results.push_back(t);
  } else {
    for_each_new_tensor(kernel, stack, [&](const at::Tensor& t) { results.push_back(t); });
  }
  stack.clear();
  for (const auto& [i, number] : offered)
    if (i < results.size() && results[i].defined()) placement.became(number, results[i].data_ptr());
  placement.remember();
  deliver(results, outputs);
  if (header.reply_addr != 0) send_host_results(header, results);
}

int fail(const devproxy_soft_launch& launch, int result, const std::string& what, const std::string& text) {
  const std::string line = what + ": " + text;
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
    if (header.mode == Mode::kInfer || header.reply_addr != 0) {
      if (header.reply_bytes < sizeof(ReplyHeader) ||
          launch->services->check_range(launch->services->cookie, header.reply_addr, header.reply_bytes) != 1)
        throw IllegalAddress("the reply buffer is not in live memory of this process");
      can_reply = true;
    }
    run(kernel, *launch, header);
    return 0;
  } catch (const IllegalAddress& e) {
    return fail(*launch, kResultIllegalAddress, kernel.name, e.what());
  } catch (const Malformed& e) {
    return fail(*launch, kResultLaunchFailed, kernel.name, e.what());
  } catch (const std::exception& e) {
    std::string text = text_of(e);
    // It speaks of the CPU, of which the program knows nothing.
    if (device::kLacksTypes && text.rfind("Could not run '", 0) == 0)
      text = kernel.name + " has no kernel on the software GPU, as PyTorch has none for the CPU";
    if (const int fault = device::fault_of(e)) return fail(*launch, fault, kernel.name, text);
    if (can_reply) {
      // PyTorch's own argument checks: the client raises them as exceptions, and the context lives on.
      Writer w;
      w.put(ReplyHeader{0, ReplyStatus::kException, kind_of(e)});
      w.bytes(text.data(), text.size());
      send_reply(header, w);
      return 0;
    }
    if (kind_of(e) == ExceptionKind::kOutOfMemory) return fail(*launch, kResultOutOfMemory, kernel.name, text);
    // Its types and shapes were tried, so it is these values that the op does not take: CUDA's kernel asserts.
    const bool assertion =
        dynamic_cast<const c10::Error*>(&e) != nullptr && dynamic_cast<const c10::NotImplementedError*>(&e) == nullptr;
    return fail(*launch, assertion ? kResultAssert : kResultLaunchFailed, kernel.name, text);
  } catch (...) {
    return fail(*launch, kResultLaunchFailed, kernel.name, "unknown exception");
  }
}

void sleep_on_stream(const Client& client, Reader block, const devproxy_soft_launch& launch) {
  const auto how_long = block.get<SleepBlock>();
  if (how_long.magic != kBlockMagic) throw Malformed("parameter block of another version");
  if (how_long.cycles > 0) device::sleep(client, launch, how_long);
}

// The functions that are no operators. The cookie is the name.
int service_entry(const devproxy_soft_launch* launch) {
  const std::string name = static_cast<const char*>(launch->function_cookie);
  auto& client = *static_cast<Client*>(launch->state);
  const Reader block(launch->params, launch->params_bytes);
  try {
    if (name == kSettingsName) set_settings(client, block);
    if (name == kGeneratorName) use_generator(client, block, *launch->services);
    if (name == kFactsName) tell_facts(client, block, *launch->services);
    if (name == kRnnName) tell_rnn_layout(client, block, *launch->services);
    if (name == kPlansName) use_plans(client, block, *launch->services);
    if (name == kSleepName) sleep_on_stream(client, block, *launch);
    return 0;
  } catch (const IllegalAddress& e) {
    return fail(*launch, kResultIllegalAddress, name, e.what());
  } catch (const std::exception& e) {
    return fail(*launch, kResultLaunchFailed, name, text_of(e));
  } catch (...) {
    return fail(*launch, kResultLaunchFailed, name, "unknown exception");
  }
}

int get_function(const char* name, devproxy_soft_function* out) {
  static auto* const mu = new std::mutex;
  static auto* const kernels = new std::unordered_map<std::string, std::unique_ptr<Kernel>>;
  try {
    for (const std::string_view service :
         {kSettingsName, kGeneratorName, kFactsName, kPlansName, kRnnName, kSleepName}) {
      if (service != name) continue;
      *out = {};
      out->kernel = &service_entry;
      out->cookie = const_cast<char*>(service.data());  // a literal, so it ends in NUL
      return 0;
    }
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
      slot = std::make_unique<Kernel>(*op, vjp);
    }
    *out = {};
    out->kernel = &kernel_entry;
    out->cookie = slot.get();
    return 0;
  } catch (...) {
    return kResultNotFound;
  }
}

// ---- the executor's own table --------------------------------------------------------------------------------------

template <class F>
int guarded(char* error, uint64_t error_bytes, F f) {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    if (error != nullptr && error_bytes != 0) snprintf(error, error_bytes, "%s", text_of(e).c_str());
    return kResultLaunchFailed;
  }
}

int load(uint32_t, char* error, uint64_t error_bytes) {
  return guarded(error, error_bytes, [] { device::prepare(); });
}

int attach(const devproxy_executor_host* host, void** state, char* error, uint64_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    auto client = std::make_unique<Client>();
    client->host = *host;
    device::attach(*client);
    *state = client.release();
  });
}

void detach(void* state) {
  const std::unique_ptr<Client> client(static_cast<Client*>(state));
  (void)guarded(nullptr, 0, [&] { device::detach(*client); });
  std::lock_guard lock(g_settings_mu);
  if (g_settings_of == client.get()) forget_settings();
}

int save(void* state, void* to, uint64_t bytes, uint64_t* needed, char* error, uint64_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    Writer w;
    save_client(*static_cast<Client*>(state), w);
    if (w.size() <= bytes) std::memcpy(to, w.data(), w.size());
    *needed = w.size();
  });
}

int load_state(void* state, const void* from, uint64_t bytes, char* error, uint64_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    load_client(*static_cast<Client*>(state), {static_cast<const uint8_t*>(from), bytes});
    std::lock_guard lock(g_settings_mu);
    forget_settings();
  });
}

void trim(void* state) {
  (void)guarded(nullptr, 0, [&] { device::trim(*static_cast<Client*>(state)); });
}

}  // namespace
}  // namespace devproxy::aten

extern "C" DEVPROXY_SOFT_MODULE_EXPORT const devproxy_soft_module_table devproxy_soft_module = {
    DEVPROXY_SOFT_MODULE_ABI, 0, nullptr, devproxy::aten::get_function, devproxy::aten::load,
};

extern "C" __attribute__((visibility("default"))) const devproxy_executor_table devproxy_executor = {
    DEVPROXY_EXECUTOR_ABI,      devproxy::aten::device::kWhere, DEVPROXY_TORCH_BUILD,
    devproxy::aten::attach,     devproxy::aten::detach,         devproxy::aten::save,
    devproxy::aten::load_state, devproxy::aten::trim,           devproxy::aten::footprint,
};
