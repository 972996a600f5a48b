// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/encoder.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/forward.h"
#include "devproxy/torch/client/graph.h"
#include "devproxy/torch/client/sparse.h"

namespace devproxy::aten {
[[noreturn]] void throw_mixed_devices(DeviceIndex device, c10::Device other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:",
              static_cast<int>(device), " and ", other, "!");
}

[[noreturn]] void refuse_sparse_in_capture() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "sparse tensors are not supported in a CUDA graph behind devproxy; capture without them");
}

template <class T, class F>
void Encoder::words(Tag tag, c10::ArrayRef<c10::IValue> l, F get) {
  mark(tag, l.size());
  block.put(static_cast<uint32_t>(l.size()));
  for (const auto& e : l) {
    const T v = get(e);
    block.put(v);
    if (want_key) {
      uint64_t bits;
      std::memcpy(&bits, &v, sizeof bits);
      key.push_back(bits);
    }
  }
}

void Encoder::begin(size_t n_args, DeviceIndex fallback) {
  block.clear();
  key.clear();
  seen_.clear();
  tensors_ = 0;
  device = fallback;
  BlockHeader h{};
  h.magic = kBlockMagic;
  h.mode = Mode::kRun;
  const at::Context& context = at::globalContext();
  h.flags = static_cast<uint8_t>((c10::GradMode::is_enabled() ? kFlagGradMode : 0) |
                                 (context.deterministicAlgorithms() ? kFlagDeterministic : 0) |
                                 (context.deterministicAlgorithmsWarnOnly() ? kFlagWarnOnly : 0));
  h.n_args = static_cast<uint16_t>(n_args);
  h.threads = static_cast<uint32_t>(at::get_num_threads());
  h.settings = settings_number(fallback);
  block.put(h);
  if (want_key) key.push_back(h.flags | uint64_t{h.settings} << 8);
}

void Encoder::value(const c10::IValue& v, const ArgPlan& arg, bool scalar_in_key) {
  if (v.isTensor()) return tensor(v.toTensor(), arg);
  if (v.isNone()) return mark(Tag::kNone);
  if (v.isInt()) {
    const int64_t i = v.toInt();
    mark(Tag::kInt, scalar_in_key ? static_cast<uint64_t>(i) : reach(i));
    return block.put(i);
  }
  if (v.isDouble()) {
    const double d = v.toDouble();
    uint64_t bits;
    std::memcpy(&bits, &d, sizeof bits);
    mark(Tag::kDouble, scalar_in_key ? bits : reach(d));
    return block.put(d);
  }
  if (v.isBool()) {
    mark(Tag::kBool, v.toBool());
    return block.put(static_cast<uint8_t>(v.toBool()));
  }
  if (v.isIntList())
    return words<int64_t>(Tag::kIntList, v.toListRef(), [](const c10::IValue& e) { return e.toInt(); });
  if (v.isTensorList()) return list(Tag::kTensorList, v.toListRef(), arg, scalar_in_key);
  if (v.isGenerator()) return generator(take_random_state(v.toGenerator()));
  if (v.isDevice()) return mark(Tag::kDevice);
  if (v.isComplexDouble()) {
    mark(Tag::kComplex, reach(v.toComplexDouble()));
    block.put(v.toComplexDouble().real());
    return block.put(v.toComplexDouble().imag());
  }
  if (v.isString()) {
    const std::string& s = v.toStringRef();
    mark(Tag::kString, s.size());
    block.put(static_cast<uint32_t>(s.size()));
    block.bytes(s.data(), s.size());
    if (want_key) key.push_back(std::hash<std::string>{}(s));
    return;
  }
  if (v.isDoubleList())
    return words<double>(Tag::kDoubleList, v.toListRef(), [](const c10::IValue& e) { return e.toDouble(); });
  if (v.isBoolList()) {
    const auto l = v.toListRef();
    mark(Tag::kBoolList, l.size());
    block.put(static_cast<uint32_t>(l.size()));
    for (const auto& e : l) {
      block.put(static_cast<uint8_t>(e.toBool()));
      if (want_key) key.push_back(e.toBool());
    }
    return;
  }
  if (v.isList()) {
    const bool numbers = v.toList().elementType()->kind() == c10::TypeKind::NumberType;
    return list(numbers ? Tag::kScalarList : Tag::kOptionalTensorList, v.toListRef(), arg, scalar_in_key && !numbers);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "devproxy cannot take a ", v.tagKind(), " argument");
}

void Encoder::generator(const RandomState& state) {
  if (state.kept) {
    block.tag(Tag::kNamedGenerator);
    block.put(state.seed);
  } else {
    block.tag(state.addr == 0 ? Tag::kGenerator : Tag::kDeviceGenerator);
    block.put(state.addr == 0 ? state.seed : static_cast<uint64_t>(state.addr));
    block.put(state.offset);
  }
  if (want_key) key.push_back(static_cast<uint64_t>(Tag::kGenerator));
}

void Encoder::output(const at::Tensor& t) {
  if (!t.defined()) return block.tag(Tag::kUndefined);
  block.tag(Tag::kTensor);
  device_tensor(t, 0);
}

void Encoder::tensor_list(const std::vector<at::Tensor>& l) {
  block.tag(Tag::kTensorList);
  block.put(static_cast<uint32_t>(l.size()));
  for (const auto& t : l) tensor(t, {});
}

void Encoder::bool_list(const std::vector<bool>& l) {
  block.tag(Tag::kBoolList);
  block.put(static_cast<uint32_t>(l.size()));
  for (const bool b : l) block.put(static_cast<uint8_t>(b));
}

void Encoder::tensor(const at::Tensor& t, const ArgPlan& arg) {
  if (!t.defined()) return mark(Tag::kUndefined);
  if (!t.is_cuda()) return host_tensor(t, arg);
  TORCH_CHECK_NOT_IMPLEMENTED(!t.is_quantized() && !t.is_nested(), "devproxy has no quantized or nested tensors");
  see_device(t.device());
  if (is_sparse(t)) [[unlikely]]
    return sparse_tensor(t, arg);
  // In-place ops recognise an argument that is also their result.
  const auto* impl = t.unsafeGetTensorImpl();
  for (size_t i = 0; i < seen_.size(); ++i) {
    if (seen_[i].impl != impl) continue;
    // add_ is add(self, out=self): what was read first is written after all.
    if (arg.writable) *block.at(seen_[i].head + offsetof(TensorHead, flags)) |= kWritable;
    mark(Tag::kSameTensor, i);
    return block.put(static_cast<uint16_t>(i));
  }
  block.tag(Tag::kTensor);
  if (seen_.size() < kRemembered) seen_.push_back({impl, block.size()});
  device_tensor(t, arg.writable ? kWritable : 0);
  if (!want_key) return;
  key.push_back(static_cast<uint64_t>(Tag::kTensor) | static_cast<uint64_t>(t.scalar_type()) << 8 |
                static_cast<uint64_t>(tensor_flags(t)) << 16 | static_cast<uint64_t>(t.dim()) << 24);
  key.append(t.sizes().begin(), t.sizes().end());
  key.append(t.strides().begin(), t.strides().end());
}

void Encoder::sparse_tensor(const at::Tensor& t, const ArgPlan& arg) {
  if (any_capture() && capturing_graph(device, current_stream_id(device)) != nullptr) refuse_sparse_in_capture();
  const Parts parts = parts_of(t);
  const bool coalesced = t.is_sparse() && t.is_coalesced();
  block.tag(Tag::kSparse);
  block.put(SparseHead{static_cast<int8_t>(t.layout()),
                       static_cast<uint8_t>(arg.writable ? kWritable : 0),
                       static_cast<uint8_t>(t.dim()),
                       coalesced,
                       static_cast<uint8_t>(parts.size()),
                       {}});
  block.bytes(t.sizes().data(), 8 * t.sizes().size());
  for (const at::Tensor& part : parts) {
    block.tag(Tag::kTensor);
    device_tensor(part, 0);
  }
  if (!want_key) return;
  key.push_back(static_cast<uint64_t>(Tag::kSparse) | static_cast<uint64_t>(t.scalar_type()) << 8 |
                static_cast<uint64_t>(t.layout()) << 16 | static_cast<uint64_t>(coalesced) << 24 |
                static_cast<uint64_t>(t.dim()) << 32 | static_cast<uint64_t>(parts[0].size(0)) << 40);
  key.append(t.sizes().begin(), t.sizes().end());
}

void Encoder::move_to(DeviceIndex d) {
  device = d;
  BlockHeader h = header();
  h.settings = settings_number(d);
  set_header(h);
  if (want_key) key[0] = h.flags | uint64_t{h.settings} << 8;
}

void Encoder::device_tensor(const at::Tensor& t, uint8_t extra_flags) {
  const auto sizes = t.sizes(), strides = t.strides();
  const size_t n = sizes.size();
  uint8_t* p = block.extend(sizeof(TensorHead) + 16 * n);
  const TensorHead head{address_of(t),
                        static_cast<int8_t>(t.scalar_type()),
                        static_cast<uint8_t>(tensor_flags(t) | extra_flags),
                        static_cast<uint8_t>(n),
                        {}};
  std::memcpy(p, &head, sizeof head);
  std::memcpy(p + sizeof head, sizes.data(), 8 * n);
  std::memcpy(p + sizeof head + 8 * n, strides.data(), 8 * n);
}

void Encoder::host_tensor(const at::Tensor& t, const ArgPlan& arg) {
  if (!t.is_cpu() || (t.dim() != 0 && !arg.host_ok))
    throw_mixed_devices(device < 0 ? current_device() : device, t.device());
  const at::Tensor c = t.contiguous();
  block.tag(Tag::kHostTensor);
  block.put(HostTensorHead{
      c.nbytes(), static_cast<int8_t>(t.scalar_type()), tensor_flags(t), static_cast<uint8_t>(t.dim()), {}});
  block.bytes(t.sizes().data(), 8 * t.sizes().size());
  block.bytes(c.const_data_ptr(), c.nbytes());
  if (!want_key) return;
  key.push_back(static_cast<uint64_t>(Tag::kHostTensor) | static_cast<uint64_t>(t.scalar_type()) << 8 |
                static_cast<uint64_t>(tensor_flags(t)) << 16 | static_cast<uint64_t>(t.dim()) << 24 |
                static_cast<uint64_t>(is_zero(t)) << 32);
  key.append(t.sizes().begin(), t.sizes().end());
}

void Encoder::list(Tag tag, c10::ArrayRef<c10::IValue> l, const ArgPlan& arg, bool scalar_in_key) {
  mark(tag, l.size());
  block.put(static_cast<uint32_t>(l.size()));
  for (const auto& e : l) value(e, arg, scalar_in_key);
}

}  // namespace devproxy::aten
