// SPDX-License-Identifier: Apache-2.0
// Kernels of their own signature for ops of tensors and numbers alone, which most small ops are.
//
// The boxed fallback gets its arguments as values that own their tensors. Owning a tensor that Python holds takes the GIL,
// and so does letting go of it: two locks for each argument, a fifth of a small op. Here the arguments are the caller's
// references. The caller keeps the tensors for the length of the call, so nobody else needs to own them.
#include <ATen/EmptyTensor.h>
#include <c10/util/MaybeOwned.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/forward.h"
#include "devproxy/torch/client/graph.h"
#include "devproxy/torch/client/send.h"
#include "devproxy/torch/client/worker.h"

namespace devproxy::aten {
namespace {

// The arguments as values that own nothing.
template <size_t N>
class Borrowed {
 public:
  template <class... A>
  explicit Borrowed(const A&... args) {
    size_t i = 0;
    (number(i++, args),
     ...);  // first: after this nothing is thrown, and a borrowed value must not be destroyed as such
    i = 0;
    (tensor(i++, args), ...);
  }
  ~Borrowed() {
    for (c10::IValue& v : values_) {
      if (!v.isTensor()) continue;
      at::Tensor t = std::move(v).toTensor();
      Traits::destroyBorrow(t);
    }
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  const c10::IValue* data() const { return values_.data(); }

 private:
  using Traits = c10::MaybeOwnedTraits<at::Tensor>;
  void number(size_t i, const at::Scalar& s) { values_[i] = s; }
  void number(size_t, const at::Tensor&) {}
  void tensor(size_t, const at::Scalar&) noexcept {}
  void tensor(size_t i, const at::Tensor& t) noexcept { values_[i] = Traits::createBorrow(t); }
  std::array<c10::IValue, N> values_;
};

// A kernel for one op. R is at::Tensor, or at::Tensor& for the argument of that type.
template <class R, class... A>
struct Direct {
  c10::OperatorHandle op;

  R operator()(A... args) const {
    Sent sent;
    {
      WorkerLease lease;
      const Borrowed<sizeof...(A)> values(args...);
      send(*lease, plan_for(*lease, op), values.data(), std::nullopt, &sent);
    }
    if constexpr (std::is_same_v<R, at::Tensor>) {
      return std::move(sent.outputs[0]);
    } else {
      at::Tensor* written = nullptr;
      ((written = written_one(args, written)), ...);
      return *written;
    }
  }

 private:
  static at::Tensor* written_one(at::Tensor& t, at::Tensor*) { return &t; }
  static at::Tensor* written_one(const at::Tensor&, at::Tensor* other) { return other; }
  static at::Tensor* written_one(const at::Scalar&, at::Tensor* other) { return other; }
};

// Structured ops: torch makes one of a shape function and the op's out= form. The shape function is expensive (half of an
// add) and answers the same for the same signature. So the worker remembers what it made, and sends the same out= form
// next time without asking. Everything else goes through torch: new signatures, captures, arguments on other devices or
// with names, and in-place ops whose arguments share memory (the shape function checks that, and no signature shows it).
template <class R, class... A>
struct Structured {
  static constexpr bool kNew = std::is_same_v<R, at::Tensor>;
  c10::OperatorHandle op, out;

  R operator()(A... args) const {
    Key key;
    const bool plain = !any_capture() && are_plain(args...);
    if (plain) [[likely]] {
      WorkerLease lease;
      Encoder& e = (*lease).encoder;
      OpPlan& plan = plan_for(*lease, op);
      OpPlan& target = plan_for(*lease, out);
      e.want_key = true;
      e.begin(sizeof...(A) + 1, current_device());
      size_t i = 0;
      (encode(e, args, target.args[i++]), ...);
      const Worker::Recent& recent = (*lease).recent_of(plan, e.key);
      if (recent.is(plan, e.key)) [[likely]] {
        e.want_key = false;
        if constexpr (kNew) {
          at::Tensor result = new_tensor_of(e.device, recent.meta->tensors[0]);
          e.tensor(result, target.args.back());
          launch_it(target, e);
          return result;
        } else {
          e.tensor(first(args...), target.args.back());
          launch_it(target, e);
          return first(args...);
        }
      }
      key = e.key;
    }
    // torch's own way. A kernel of ours stands before it for CUDA; for a device that nobody has it is what is left.
    R result = op.typed<R(A...)>().redispatch(c10::DispatchKeySet(c10::DispatchKey::PrivateUse3), args...);
    if (plain) learn(key, result);
    return result;
  }

 private:
  template <class F, class... More>
  static F& first(F& f, More&...) {
    return f;
  }
  template <class F, class... More>
  static bool are_plain(const F& f, const More&... more) {
    const DeviceIndex here = current_device();
    return is_plain(f, f, here) && f.is_cuda() && (is_plain(f, more, here) && ...);
  }
  template <class Impl>
  static bool has_names(const Impl& impl) {
    if constexpr (requires { impl.has_named_tensor_meta(); }) return impl.has_named_tensor_meta();
    return false;  // newer torch has no named tensors
  }
  static bool is_plain(const at::Tensor&, const at::Scalar& s, DeviceIndex) { return !s.isSymbolic(); }
  static bool is_plain(const at::Tensor& f, const at::Tensor& t, DeviceIndex here) {
    if (!t.defined()) return false;
    const auto* impl = t.unsafeGetTensorImpl();
    if (has_names(*impl)) return false;
    if (!t.is_cuda()) return t.is_cpu() && t.dim() == 0;
    if (t.device().index() != here || t.layout() != at::kStrided) return false;
    return kNew || impl == f.unsafeGetTensorImpl() ||
           impl->unsafe_storage().unsafeGetStorageImpl() !=
               f.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  }
  static void encode(Encoder& e, const at::Tensor& t, const ArgPlan& arg) { e.tensor(t, arg); }
  static void encode(Encoder& e, const at::Scalar& s, const ArgPlan& arg) { e.value(s, arg, false); }
  static void launch_it(OpPlan& target, Encoder& e) {
    launch(function_of(target, e.device), current_stream(e.device), e.block);
    target.launches.fetch_add(1, std::memory_order_relaxed);
  }

  // The Meta that the device would have sent, from the tensor that torch made.
  void learn(const Key& key, const at::Tensor& result) const {
    TensorMeta m;
    m.defined = true;
    m.dtype = result.scalar_type();
    m.flags = tensor_flags(result);
    m.sizes.assign(result.sizes().begin(), result.sizes().end());
    m.strides.assign(result.strides().begin(), result.strides().end());
    m.bytes = at::detail::computeStorageNbytes(m.sizes, m.strides, result.itemsize());
    // Not what new_tensor_of() makes: then it is asked for each time.
    if (kNew &&
        (!result.is_cuda() || result.storage_offset() != 0 || m.flags != 0 || result.storage().nbytes() != m.bytes))
      return;
    auto meta = std::make_shared<Meta>();
    meta->returns.emplace_back().tag = Tag::kTensor;
    meta->tensors.push_back(std::move(m));
    WorkerLease lease;
    const OpPlan& plan = plan_for(*lease, op);
    (*lease).recent_of(plan, key).set(plan, key, std::move(meta));
  }
};

template <class A>
bool is_of(const c10::Argument& a) {
  const bool number = std::is_same_v<A, const at::Scalar&>, written = std::is_same_v<A, at::Tensor&>;
  return a.type()->kind() == (number ? c10::TypeKind::NumberType : c10::TypeKind::TensorType) &&
         (a.alias_info() != nullptr) == written && (!written || a.alias_info()->isWrite());
}

template <class R, class... A>
bool register_direct(torch::Library& m, const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.arguments().size() != sizeof...(A) || schema.returns().size() != 1 || !is_of<R>(schema.returns()[0]))
    return false;
  size_t i = 0;
  if (!(is_of<A>(schema.arguments()[i++]) && ...)) return false;
  m.impl(c10::toString(op.operator_name()).c_str(), torch::CppFunction(Direct<R, A...>{op}));
  return true;
}

// The out= form of a structured op has the op's own arguments and then the result.
std::optional<c10::OperatorHandle> out_form(const c10::OperatorHandle& op,
                                            const std::vector<c10::OperatorName>& of_base) {
  const auto& args = op.schema().arguments();
  for (const auto& name : of_base) {
    const auto out = c10::Dispatcher::singleton().findSchema(name);
    if (!out || out->schema().arguments().size() != args.size() + 1 || !out->schema().arguments().back().is_out() ||
        !out->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      continue;
    bool same = true;
    for (size_t i = 0; i < args.size() && same; ++i)
      same = args[i].name() == out->schema().arguments()[i].name() &&
             *args[i].type() == *out->schema().arguments()[i].type();
    if (same) return out;
  }
  return {};
}

template <class R, class... A>
bool register_structured(torch::Library& m, const c10::OperatorHandle& op,
                         const std::vector<c10::OperatorName>& of_base) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.arguments().size() != sizeof...(A) || schema.returns().size() != 1 || !is_of<R>(schema.returns()[0]))
    return false;
  size_t i = 0;
  if (!(is_of<A>(schema.arguments()[i++]) && ...)) return false;
  const auto out = out_form(op, of_base);
  if (out) m.impl(c10::toString(op.operator_name()).c_str(), torch::CppFunction(Structured<R, A...>{op, *out}));
  return out.has_value();
}

// `replaced`: the kernel for CUDA that the op has is the CUDA wheel's, which ours takes the place of.
bool is_structured(const c10::OperatorHandle& op, bool replaced) {
  using c10::DispatchKey;
  if (op.hasKernelForDispatchKey(DispatchKey::CUDA) && !replaced) return false;
  for (const auto key : {DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return false;
  for (const auto tag : op.getTags())
    if (tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output ||
        tag == at::Tag::nondeterministic_seeded)
      return false;
  return op.hasKernelForDispatchKey(DispatchKey::CPU) &&
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
}

// Those with a number whose value no shape function looks at (softshrink's does): a signature has only its kind.
bool number_is_free(const std::string& base) {
  for (const char* known : {"aten::add", "aten::sub", "aten::addmm", "aten::addcmul", "aten::addcdiv", "aten::baddbmm",
                            "aten::eq", "aten::ne", "aten::lt", "aten::le", "aten::gt", "aten::ge"})
    if (base == known || base == std::string(known) + "_") return true;
  return false;
}

// What would come to the boxed fallback: an op that has no kernel of another kind for this device.
bool comes_here(const c10::OperatorHandle& op, bool replaced) {
  using c10::DispatchKey;
  if (replaced) return true;
  for (const auto key : {DispatchKey::CUDA, DispatchKey::CompositeExplicitAutogradNonFunctional,
                         DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return false;
  return op.hasKernelForDispatchKey(DispatchKey::CPU);
}

// The out= forms of the op, or of the one that it is the in-place form of.
const std::vector<c10::OperatorName>& outs_of(const std::string& name) {
  static const auto* const outs = [] {
    auto* found = new std::unordered_map<std::string, std::vector<c10::OperatorName>>;
    for (const auto& n : c10::Dispatcher::singleton().getAllOpNames())
      if (n.overload_name.find("out") != std::string::npos || n.overload_name == "grad_input")
        (*found)[n.name].push_back(n);
    return found;
  }();
  static const auto* const none = new std::vector<c10::OperatorName>;
  const bool in_place = name.back() == '_' && name.size() > 7;
  const auto it = outs->find(in_place ? name.substr(0, name.size() - 1) : name);
  return it != outs->end() ? it->second : *none;
}

}  // namespace

bool register_small(torch::Library& m, const c10::OperatorHandle& op, bool replaced) {
  using T = const at::Tensor&;
  using W = at::Tensor&;
  using S = const at::Scalar&;
  using New = at::Tensor;
  if (is_structured(op, replaced)) {
    const std::string& name = op.operator_name().name;
    const auto& outs = outs_of(name);
    if (register_structured<New, T>(m, op, outs) || register_structured<New, T, T>(m, op, outs) ||
        register_structured<New, T, T, T>(m, op, outs) || register_structured<W, W>(m, op, outs) ||
        register_structured<W, W, T>(m, op, outs))
      return true;
    if (number_is_free(name) &&
        (register_structured<New, T, S>(m, op, outs) || register_structured<New, T, T, S>(m, op, outs) ||
         register_structured<New, T, T, T, S>(m, op, outs) || register_structured<New, T, T, T, S, S>(m, op, outs) ||
         register_structured<W, W, T, S>(m, op, outs) || register_structured<W, W, T, T, S>(m, op, outs)))
      return true;
  }
  return comes_here(op, replaced) &&
         (register_direct<New, T>(m, op) || register_direct<New, T, T>(m, op) || register_direct<New, T, T, T>(m, op) ||
          register_direct<New, T, S>(m, op) || register_direct<New, T, T, S>(m, op) || register_direct<W, W>(m, op) ||
          register_direct<W, W, T>(m, op) || register_direct<W, W, S>(m, op) || register_direct<W, W, T, T>(m, op) ||
          register_direct<W, W, T, S>(m, op) || register_direct<W, T, W>(m, op) || register_direct<W, T, T, W>(m, op) ||
          register_direct<W, T, T, T, W>(m, op) || register_direct<W, T, S, W>(m, op) ||
          register_direct<W, T, T, S, W>(m, op) || register_direct<W, T, T, T, S, W>(m, op) ||
          register_direct<W, T, T, T, S, S, W>(m, op));
}

}  // namespace devproxy::aten
