// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/executor/decode.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_validate_sparse_compressed_tensor_args.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

namespace devproxy::aten {
namespace {

constexpr int kMaxDepth = 4;  // a list of lists is the most that any schema has

at::ScalarType scalar_type(int8_t v) {
  const auto t = static_cast<at::ScalarType>(v);
  const bool known = v >= 0 && v < static_cast<int8_t>(at::ScalarType::NumOptions);
  if (!known || t == at::ScalarType::Undefined || c10::isQIntType(t) || c10::elementSize(t) == 0)
    throw Malformed("parameter block: no such data type");
  return t;
}

struct Extent {
  uint64_t span_bytes = 0;  // from the first element to behind the last
  uint64_t numel = 0;
};

Extent extent(const int64_t* sizes, const int64_t* strides, int dims, uint64_t itemsize) {
  uint64_t span = 1, numel = 1;
  for (int i = 0; i < dims; ++i) {
    if (sizes[i] < 0 || strides[i] < 0) throw Malformed("parameter block: negative size or stride");
    if (sizes[i] == 0) return {};
    uint64_t reach;
    if (__builtin_mul_overflow(static_cast<uint64_t>(sizes[i] - 1), static_cast<uint64_t>(strides[i]), &reach) ||
        __builtin_add_overflow(span, reach, &span) ||
        __builtin_mul_overflow(numel, static_cast<uint64_t>(sizes[i]), &numel))
      throw Malformed("parameter block: tensor size overflows");
  }
  if (__builtin_mul_overflow(span, itemsize, &span) || span > INT64_MAX || numel > INT64_MAX / 16)
    throw Malformed("parameter block: tensor size overflows");
  return {span, numel};
}

void nothing(void*) {}

at::Tensor over_memory(c10::Device device, void* p, uint64_t bytes, at::ScalarType dtype, at::IntArrayRef sizes,
                       at::IntArrayRef strides, bool resizable) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(p, p, &nothing, device), device::allocator(), resizable);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(device::kKey),
                                                    c10::scalarTypeToTypeMeta(dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return t;
}

// What most ops take: 0 is a valid index almost everywhere, 1 a valid probability, weight and divisor.
at::Tensor made_up(c10::Device device, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                   uint64_t span_bytes) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  if (span_bytes == 0) return at::empty_strided(sizes, strides, options);
  const auto n = static_cast<int64_t>(span_bytes / c10::elementSize(dtype));
  at::Tensor flat = at::empty({n}, options);
  const bool real = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
  if (real) {
    flat.fill_(1);
  } else {
    flat.zero_();
  }
  return flat.as_strided(sizes, strides);
}

at::Generator seeded(const Client& client, uint64_t seed) {
  at::Generator g = device::new_generator(client);
  g.set_current_seed(seed);
  return g;
}

}  // namespace

at::Tensor Written::memory(const Client& client) const {
  return over_memory(device::of(client), p, bytes, dtype, sizes, strides, false);
}

void Decoder::check_range(uint64_t addr, uint64_t bytes) const {
  if (services_->check_range(services_->cookie, addr, bytes) == 1) return;
  char text[96];
  snprintf(text, sizeof text, "tensor at 0x%llx, %llu bytes, is not in live memory of this process",
           static_cast<unsigned long long>(addr), static_cast<unsigned long long>(bytes));
  throw IllegalAddress(text);
}

at::Tensor Decoder::device_tensor(bool is_output) {
  const auto head = reader_.get<TensorHead>();
  if (head.dims > kMaxDims) throw Malformed("parameter block: too many dimensions");
  const at::ScalarType dtype = scalar_type(head.dtype);
  int64_t sizes[kMaxDims], strides[kMaxDims];
  const size_t n = head.dims;
  if (n != 0) {
    std::memcpy(sizes, reader_.bytes(8 * n), 8 * n);
    std::memcpy(strides, reader_.bytes(8 * n), 8 * n);
  }
  const Extent e = extent(sizes, strides, head.dims, c10::elementSize(dtype));
  if (e.span_bytes != 0) check_range(head.addr, e.span_bytes);
  const bool writes = head.flags & kWritable;
  const bool copy = !is_output && infer_ && (writes || copy_all_ || blank_);
  void* p = e.span_bytes != 0 ? reinterpret_cast<void*>(head.addr) : nullptr;

  at::IntArrayRef sz(sizes, n), st(strides, n);
  const c10::Device device = device::of(client_);
  at::Tensor t;
  if (copy && blank_) {
    t = made_up(device, dtype, sz, st, e.span_bytes);
  } else {
    t = over_memory(device, p, e.span_bytes, dtype, sz, st, false);
    if (copy) {
      const at::Tensor memory = std::move(t);
      if (e.numel != 0 && at::has_internal_overlap(memory) == at::MemOverlap::Yes) {
        // copy_ refuses to write several elements to one place; fill_ may.
        const auto n = static_cast<int64_t>(e.span_bytes / c10::elementSize(dtype));
        t = over_memory(device, p, e.span_bytes, dtype, {n}, {1}, false).clone().as_strided(sz, st);
      } else {
        t = at::empty_strided(sz, st, memory.options());
        t.copy_(memory);
      }
    }
  }
  const bool conj = head.flags & kConj, neg = head.flags & kNeg;
  if (writes && !is_output && !copy) {
    // Some out= kernels resize what they write for a while: give them storage that can, and look afterwards where
    // the result is.
    if (e.numel == 0 || t.is_non_overlapping_and_dense())
      t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->set_resizable(true);
    if (e.numel != 0)
      written_.push_back({t, p, e.span_bytes, dtype, conj, neg, {sz.begin(), sz.end()}, {st.begin(), st.end()}});
  }
  if (conj) t._set_conj(true);
  if (neg) t._set_neg(true);
  if (head.flags & kWrappedNumber && n == 0) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

at::Tensor Decoder::host_tensor() {
  const auto head = reader_.get<HostTensorHead>();
  if (head.dims > kMaxDims) throw Malformed("parameter block: too many dimensions");
  const at::ScalarType dtype = scalar_type(head.dtype);
  int64_t sizes[kMaxDims], strides[kMaxDims];
  const size_t n = head.dims;
  if (n != 0) std::memcpy(sizes, reader_.bytes(8 * n), 8 * n);
  for (size_t i = n; i-- > 0;) strides[i] = 1;
  for (size_t i = 0; i < n; ++i) strides[i] = 0;  // only numel is asked of extent()
  const Extent e = extent(sizes, strides, head.dims, 1);
  if (e.numel * c10::elementSize(dtype) != head.bytes)
    throw Malformed("parameter block: host tensor of another length");
  const uint8_t* data = reader_.bytes(head.bytes);
  at::Tensor t = at::empty({sizes, n}, at::TensorOptions().dtype(dtype));
  if (head.bytes != 0) std::memcpy(t.mutable_data_ptr(), data, head.bytes);
  if (head.flags & kWrappedNumber && n == 0) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

// torch's kernels take a sparse tensor's indices for right ones, and write where they say: they are looked at each time, on
// a copy that the client cannot change meanwhile.
at::Tensor Decoder::sparse_tensor() {
  const auto head = reader_.get<SparseHead>();
  if (head.dims > kMaxDims) throw Malformed("parameter block: too many dimensions");
  std::vector<int64_t> sizes(head.dims);
  if (!sizes.empty()) std::memcpy(sizes.data(), reader_.bytes(8 * sizes.size()), 8 * sizes.size());
  const auto layout = static_cast<at::Layout>(head.layout);
  const bool coo = layout == at::kSparse;
  const bool compressed =
      layout == at::kSparseCsr || layout == at::kSparseCsc || layout == at::kSparseBsr || layout == at::kSparseBsc;
  if (!coo && !compressed) throw Malformed("parameter block: no such layout");
  if (head.parts != (coo ? 2 : 3)) throw Malformed("parameter block: a sparse tensor of other parts");
  std::array<at::Tensor, kMaxParts> parts;
  for (int i = 0; i < head.parts; ++i) {
    if (reader_.get<Tag>() != Tag::kTensor) throw Malformed("parameter block: a part of a tensor is none");
    parts[i] = device_tensor(false);
    const bool indices = i + 1 < head.parts;
    if (indices || head.flags & kWritable) parts[i] = parts[i].clone();
  }
  const at::TensorOptions options = parts[head.parts - 1].options().layout(layout);
  if (coo) {
    at::_validate_sparse_coo_tensor_args(parts[0], parts[1], sizes);
    return at::_sparse_coo_tensor_unsafe(parts[0], parts[1], sizes, options, head.coalesced != 0);
  }
  at::_validate_sparse_compressed_tensor_args(parts[0], parts[1], parts[2], sizes, layout);
  return at::_sparse_compressed_tensor_unsafe(parts[0], parts[1], parts[2], sizes, options);
}

at::Generator Decoder::read_generator(Tag tag) {
  if (tag == Tag::kGenerator) {
    const auto seed = reader_.get<uint64_t>();
    const auto offset = reader_.get<uint64_t>();
    return seeded(client_, mix_seed(seed, offset));
  }
  if (tag == Tag::kNamedGenerator) {
    at::Generator g = generator_of(client_, reader_.get<uint64_t>());
    for (const at::Generator& known : kept_generators_)
      if (known == g) return g;
    kept_generators_.push_back(g);
    return g;
  }
  if (tag != Tag::kDeviceGenerator) throw Malformed("parameter block: a generator is missing");
  const auto addr = reader_.get<uint64_t>();
  const auto offset = reader_.get<uint64_t>();
  uint64_t state[2];
  check_range(addr, sizeof state);
  device::read_memory(state, addr, sizeof state);
  return seeded(client_, mix_seed(state[0], state[1] + offset));
}

at::Generator Decoder::generator() { return read_generator(reader_.get<Tag>()); }

at::Tensor Decoder::output() {
  switch (reader_.get<Tag>()) {
    case Tag::kUndefined: return {};
    case Tag::kTensor: return device_tensor(true);
    default: throw Malformed("parameter block: an output is not a tensor");
  }
}

c10::IValue Decoder::value(int depth) {
  if (depth > kMaxDepth) throw Malformed("parameter block: lists too deep");
  switch (reader_.get<Tag>()) {
    case Tag::kNone: return {};
    case Tag::kUndefined: return at::Tensor();
    case Tag::kTensor: {
      at::Tensor t = device_tensor(false);
      tensors_.push_back(t.unsafeGetTensorImpl());
      return t;
    }
    case Tag::kSameTensor: {
      const auto i = reader_.get<uint16_t>();
      if (i >= tensors_.size()) throw Malformed("parameter block: reference to no tensor");
      return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(tensors_[i]));
    }
    case Tag::kHostTensor: return host_tensor();
    case Tag::kSparse: return sparse_tensor();
    case Tag::kInt: return reader_.get<int64_t>();
    case Tag::kDouble: return reader_.get<double>();
    case Tag::kBool: return reader_.boolean();
    case Tag::kComplex: {
      const auto re = reader_.get<double>();
      const auto im = reader_.get<double>();
      return c10::complex<double>(re, im);
    }
    case Tag::kString: return reader_.string();
    case Tag::kDevice: return device::of(client_);
    case Tag::kIntList: {
      const uint32_t n = reader_.count(8);
      c10::List<int64_t> list;
      list.reserve(n);
      for (uint32_t i = 0; i < n; ++i) list.push_back(reader_.get<int64_t>());
      return list;
    }
    case Tag::kDoubleList: {
      const uint32_t n = reader_.count(8);
      c10::List<double> list;
      list.reserve(n);
      for (uint32_t i = 0; i < n; ++i) list.push_back(reader_.get<double>());
      return list;
    }
    case Tag::kBoolList: {
      const uint32_t n = reader_.count(1);
      c10::List<bool> list;
      list.reserve(n);
      for (uint32_t i = 0; i < n; ++i) list.push_back(reader_.boolean());
      return list;
    }
    case Tag::kTensorList: {
      const uint32_t n = reader_.count(1);
      c10::List<at::Tensor> list;
      list.reserve(n);
      for (uint32_t i = 0; i < n; ++i) {
        auto v = value(depth + 1);
        if (!v.isTensor()) throw Malformed("parameter block: a tensor list holds something else");
        list.push_back(std::move(v).toTensor());
      }
      return list;
    }
    case Tag::kOptionalTensorList: {
      const uint32_t n = reader_.count(1);
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(n);
      for (uint32_t i = 0; i < n; ++i) {
        auto v = value(depth + 1);
        if (!v.isNone() && !v.isTensor()) throw Malformed("parameter block: a tensor list holds something else");
        list.push_back(v.isNone() ? std::optional<at::Tensor>() : std::move(v).toTensor());
      }
      return list;
    }
    case Tag::kScalarList: {
      const uint32_t n = reader_.count(1);
      c10::List<at::Scalar> list;
      list.reserve(n);
      for (uint32_t i = 0; i < n; ++i) {
        auto v = value(depth + 1);
        if (!v.isScalar()) throw Malformed("parameter block: a scalar list holds something else");
        list.push_back(v.toScalar());
      }
      return c10::IValue(std::move(list));
    }
    case Tag::kGenerator: return read_generator(Tag::kGenerator);
    case Tag::kDeviceGenerator: return read_generator(Tag::kDeviceGenerator);
    case Tag::kNamedGenerator: return read_generator(Tag::kNamedGenerator);
  }
  throw Malformed("parameter block: unknown value");
}

}  // namespace devproxy::aten
