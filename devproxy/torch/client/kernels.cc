// SPDX-License-Identifier: Apache-2.0
// Which ops do not simply go to the device: allocation, views, what changes a tensor's shape or storage in the client,
// copies across the border. All others take the boxed fallback at the end.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/TracerMode.h>
#include <ATen/core/List.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/kaiser_window.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <limits>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "devproxy/torch/client/allocator.h"
#include "devproxy/torch/client/copy.h"
#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/forward.h"

namespace devproxy::aten {
namespace {

using at::Tensor;

const c10::DispatchKeySet kCudaKeys(c10::DispatchKey::CUDA);

DeviceIndex index_of(std::optional<at::Device> d) {
  return d.has_value() && d->has_index() ? d->index() : current_device();
}

void refuse_layout(std::optional<at::Layout> layout) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == at::kStrided, "devproxy has no ", *layout, " tensors");
}

bool fills_memory() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

// As on CUDA: with deterministic algorithms, new memory has NaN or the largest number.
Tensor filled(Tensor t) {
  if (fills_memory()) [[unlikely]]
    at::native::fill_empty_deterministic_(t);
  return t;
}

Tensor empty_memory_format(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                           std::optional<at::Device> device, std::optional<bool> pin,
                           std::optional<at::MemoryFormat> format) {
  refuse_layout(layout);
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  DeviceScope scope(index_of(device));
  return filled(at::detail::empty_generic(sizes, device_allocator(), kCudaKeys, c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  refuse_layout(layout);
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  DeviceScope scope(index_of(device));
  return filled(
      at::detail::empty_strided_generic(sizes, strides, device_allocator(), kCudaKeys, c10::dtype_or_default(dtype)));
}

const Tensor& resize_(const Tensor& t, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = t.unsafeGetTensorImpl();
  const auto before = static_cast<int64_t>(t.storage().nbytes());
  if (t.sizes() != sizes) {
    impl->set_sizes_contiguous(sizes);
    grow_storage(
        impl->unsafe_storage().unsafeGetStorageImpl(), t.device().index(),
        at::detail::computeStorageNbytesContiguous(sizes, t.itemsize(), static_cast<size_t>(t.storage_offset())));
  }
  if (format.has_value()) {
    TORCH_CHECK(*format != at::MemoryFormat::Preserve, "Unsupported memory format", *format);
    impl->empty_tensor_restride(*format);
  }
  if (fills_memory()) [[unlikely]]
    at::native::fill_resize_deterministic_(t, before);
  return t;
}

Tensor& set_storage_offset(Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
                           at::IntArrayRef strides) {
  auto* impl = t.unsafeGetTensorImpl();
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.size() == sizes.size() && strides.data() != nullptr) {
    impl->set_sizes_and_strides(sizes, strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  if (t.numel() != 0)
    grow_storage(impl->unsafe_storage().unsafeGetStorageImpl(), t.device().index(),
                 at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(), static_cast<size_t>(offset)));
  return t;
}
Tensor& set_storage(Tensor& t, at::Storage storage) {
  const auto n = static_cast<int64_t>(storage.nbytes() / t.itemsize());
  return set_storage_offset(t, std::move(storage), 0, {n}, {});
}
Tensor& set_tensor(Tensor& t, const Tensor& source) {
  return set_storage_offset(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& t) {
  at::Storage storage(at::Storage::use_byte_size_t{}, 0, device_allocator()->allocate_on(t.device().index(), 0),
                      device_allocator(), true);
  return set_storage_offset(t, std::move(storage), 0, {0}, {});
}

// How at::native::cpu_fallback brings back what an op wrote.
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  Tensor result = to;
  resize_(result, from.sizes(), std::nullopt);
  return copy_(result, from, false);
}

void record_stream(Tensor& t, at::Stream s) { device_allocator()->recordStream(t.storage().data_ptr(), s); }

Tensor& zero_(Tensor& t) {
  if (t.numel() == 0) return t;
  if (!t.is_non_overlapping_and_dense()) {
    forward_named("aten::zero_", "", {t});
    return t;
  }
  (void)t.storage().mutable_data();  // a shared copy-on-write storage becomes its own
  check(driver().cuMemsetD8Async(address_of(t), 0, static_cast<size_t>(t.numel()) * t.itemsize(),
                                 current_stream(t.device().index())),
        "cuMemsetD8Async");
  return t;
}

// Quantization-aware training. Per channel, this op gives its four empty observers their size in its first run, on the CPU
// and on CUDA alike. Only the client can do that: to the device a tensor is memory.
void observe_and_quantize(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t begin = stack->size() - schema.arguments().size();
  const auto given = [&](const char* name) -> const c10::IValue& {
    return (*stack)[begin + static_cast<size_t>(schema.argumentIndexWithName(name).value())];
  };
  const Tensor self = given("self").toTensor(), least = given("running_min").toTensor();
  const int64_t axis = given("ch_axis").toInt();
  if (given("per_row_fake_quant").toBool() && least.numel() == 0 && axis < self.dim()) {
    const int64_t channels = self.size(axis);
    constexpr auto kInfinity = std::numeric_limits<float>::infinity();
    least.resize_({channels}).fill_(kInfinity);
    given("running_max").toTensor().resize_({channels}).fill_(-kInfinity);
    given("scale").toTensor().resize_({channels});
    given("zero_point").toTensor().resize_({channels});
  }
  forward_op(op, stack);
}

bool no_ctc_tensor(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) { return false; }
bool no_ctc_lengths(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) { return false; }

void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) { forward_op(op, stack); }
torch::CppFunction to_device() { return torch::CppFunction::makeFromBoxedFunction<&boxed>(); }

bool exists(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchema({name, overload}).has_value();
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(to_device()); }

// That this replaces kernels is the intention and no news to the user. torch says it once, of the first.
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The small ops, and over the CUDA wheel all others too that have a kernel of its. What is explicit below comes later.
void register_ops(torch::Library& m) {
  static Quiet quiet;
  std::optional<c10::WarningUtils::WarningHandlerGuard> guard;
  if (kReplace) guard.emplace(&quiet);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || name.name == "aten::set_" || name.name == "aten::zero_") continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    const bool replaced = kReplace && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    if (!register_small(m, *op, replaced) && replaced) m.impl(c10::toString(name).substr(6).c_str(), to_device());
  }
}

// Kernels of our own, below, in composites.cc and in sync_batch_norm.cc.
bool ours(const std::string& name) {
  static const auto* const on_the_host =
      new std::unordered_set<std::string>{"batch_norm_stats",
                                          "batch_norm_elemt",
                                          "batch_norm_gather_stats",
                                          "batch_norm_gather_stats_with_counts",
                                          "batch_norm_backward_reduce",
                                          "batch_norm_backward_elemt",
                                          "_scaled_dot_product_flash_attention",
                                          "_scaled_dot_product_flash_attention_backward"};
  if (!ops_run_on_cuda() && on_the_host->count(name) != 0) return true;
  static const auto* const names = new std::unordered_set<std::string>{"empty.memory_format",
                                                                       "empty_strided",
                                                                       "resize_",
                                                                       "copy_",
                                                                       "zero_",
                                                                       "record_stream",
                                                                       "_local_scalar_dense",
                                                                       "dropout",
                                                                       "scaled_dot_product_attention",
                                                                       "_fused_sdp_choice"};
  return names->count(name) != 0;
}

bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& r : schema.returns())
    if (r.alias_info() != nullptr && !r.alias_info()->isWrite()) return true;
  return false;
}

// The CPU has CUDA's flash attention and what it is made of ("math"). Where the program allows only kernels that the CPU lacks,
// or flash attention with dropout, which the CPU's has not, that is computed.
int64_t sdp_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const std::optional<at::Tensor>& mask, double dropout_p, bool is_causal, std::optional<double> scale,
                   bool enable_gqa) {
  const at::Context& context = at::globalContext();
  const bool lacking = context.userEnabledMemEfficientSDP() || context.userEnabledCuDNNSDP();
  if (!context.userEnabledMathSDP()) {
    const bool flash = context.userEnabledFlashSDP();
    if (flash ? dropout_p > 0 : lacking) return static_cast<int64_t>(at::SDPBackend::math);
    if (lacking) {
      try {
        return at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
      } catch (const c10::Error&) {
        return static_cast<int64_t>(at::SDPBackend::math);
      }
    }
  }
  return at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
}

// torch.jit.trace does not record this op, but what its composite kernel calls.
void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (at::tracer::impl::is_dispatch_enabled()) [[unlikely]]
    return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  forward_op(op, stack);
}

// As CUDA does: where the tensors of one call lie on several devices, each is an op of its own.
void foreach_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<c10::Device> first;
  const size_t n = op.schema().arguments().size();
  for (const c10::IValue& value : at::ArrayRef<c10::IValue>(*stack).slice(stack->size() - n)) {
    if (!value.isTensorList()) continue;
    for (const c10::IValue& one : value.toListRef()) {
      if (!one.toTensor().defined()) continue;
      if (!first) first = one.toTensor().device();
      if (one.toTensor().device() != *first)
        return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
  }
  forward_op(op, stack);
}

// Its own kernel is the client's, which has none for a GPU.
at::Tensor kaiser_window(int64_t length, bool periodic, double beta, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<at::Device> device,
                         std::optional<bool> pin_memory) {
  const auto options = at::TensorOptions().dtype(dtype).layout(layout).pinned_memory(pin_memory);
  return at::kaiser_window(length, periodic, beta, options.device(at::kCPU)).to(device.value_or(at::kCUDA));
}
at::Tensor kaiser_window_periodic(int64_t length, bool periodic, std::optional<at::ScalarType> dtype,
                                  std::optional<at::Layout> layout, std::optional<at::Device> device,
                                  std::optional<bool> pin_memory) {
  return kaiser_window(length, periodic, 12.0, dtype, layout, device, pin_memory);
}
at::Tensor kaiser_window_plain(int64_t length, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                               std::optional<at::Device> device, std::optional<bool> pin_memory) {
  return kaiser_window(length, true, 12.0, dtype, layout, device, pin_memory);
}

// Ops that ATen would take apart on the client but that the CPU runs as one: where there is a CPU kernel beside a
// composite one, the CPU takes its own, so the device does. And every _foreach_*: one launch each.
void send_whole(torch::Library& m) {
  using c10::DispatchKey;
  auto send = [&](const char* name) { m.impl(name, to_device()); };
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  for (const char* name : {"convolution_backward", "embedding", "linalg_lstsq"}) send(name);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    const std::string plain = c10::toString(name).substr(6);
    if (!op || plain == "convolution" || ours(plain) || returns_view(op->schema())) continue;
    const bool foreach = plain.rfind("_foreach_", 0) == 0 && name.overload_name.find("out") == std::string::npos;
    const bool composite = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                           op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    // On CUDA an op with a kernel for the CPU alone is taken apart, here as natively.
    const bool whole = composite && !ops_run_on_cuda() && op->hasKernelForDispatchKey(DispatchKey::CPU);
    if (foreach)
      m.impl(plain.c_str(), torch::CppFunction::makeFromBoxedFunction<&foreach_op>());
    else if (whole)
      send(plain.c_str());
  }
}

// The strided kind. Once made, autograd asks it for its size where an exception ends the process.
void refuse_nested(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": devproxy has no nested tensors on the device, but for layout=torch.jagged");
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  register_ops(m);
  for (const char* name : {"_nested_tensor_from_tensor_list", "_nested_from_padded", "_nested_view_from_buffer",
                           "_nested_tensor_from_mask"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_nested>());
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("record_stream", record_stream);
  m.impl("zero_", zero_);
  m.impl("copy_", copy_);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("kaiser_window", kaiser_window_plain);
  m.impl("kaiser_window.periodic", kaiser_window_periodic);
  m.impl("kaiser_window.beta", kaiser_window);
  if (ops_run_on_cuda()) {
    for (const char* choice : {"_fused_sdp_choice", "_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor"})
      m.impl(choice, to_device());
  } else {
    m.impl("_fused_sdp_choice", sdp_choice);
    m.impl("_use_cudnn_ctc_loss", no_ctc_tensor);
    m.impl("_use_cudnn_ctc_loss.Tensor", no_ctc_lengths);
  }
  if (exists("aten::_use_miopen_ctc_loss")) {
    m.impl("_use_miopen_ctc_loss", no_ctc_tensor);
    m.impl("_use_miopen_ctc_loss.Tensor", no_ctc_lengths);
  }
  send_whole(m);
  m.impl("_fused_moving_avg_obs_fq_helper", torch::CppFunction::makeFromBoxedFunction<&observe_and_quantize>());
}

std::unordered_set<std::string> g_known_ops;

}  // namespace

void note_known_ops() {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) g_known_ops.insert(c10::toString(name));
}

void take_package_ops() {
  if (!kReplace || ops_run_on_cuda()) return;
  static auto* const libraries = new std::unordered_map<std::string, torch::Library>;  // kernels go with their library
  static Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string full = c10::toString(name);
    const auto space = name.getNamespace();
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!g_known_ops.insert(full).second || !space || !op) continue;
    // One for CUDA alone may be made of ops that the software GPU has.
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      continue;
    const std::string package(*space);
    torch::Library& library =
        libraries
            ->try_emplace(package, torch::Library::IMPL, package, c10::DispatchKey::CUDA, __FILE__, uint32_t{__LINE__})
            .first->second;
    library.impl(full.substr(package.size() + 2).c_str(), to_device());
  }
}

}  // namespace devproxy::aten
