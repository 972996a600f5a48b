// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/op_meta.h"

#include <ATen/EmptyTensor.h>

#include <utility>

#include "devproxy/torch/client/allocator.h"
#include "devproxy/torch/client/forward.h"

namespace devproxy::aten {
namespace {

TensorMeta read_tensor_meta(Reader& r) {
  TensorMeta m;
  const Tag tag = r.get<Tag>();
  if (tag == Tag::kUndefined) return m;
  if (tag == Tag::kSparse) {
    const auto head = r.get<SparseHead>();
    m.defined = true;
    m.layout = static_cast<at::Layout>(head.layout);
    m.coalesced = head.coalesced != 0;
    for (int i = 0; i < head.dims; ++i) m.sizes.push_back(r.get<int64_t>());
    for (int i = 0; i < head.parts; ++i) m.parts.push_back(read_tensor_meta(r));
    return m;
  }
  const auto head = r.get<TensorHead>();
  m.defined = true;
  m.dtype = static_cast<at::ScalarType>(head.dtype);
  m.flags = head.flags;
  m.on_host = head.flags & kHostResult;
  for (int i = 0; i < head.dims; ++i) m.sizes.push_back(r.get<int64_t>());
  for (int i = 0; i < head.dims; ++i) m.strides.push_back(r.get<int64_t>());
  m.bytes = at::detail::computeStorageNbytes(m.sizes, m.strides, c10::elementSize(m.dtype));
  return m;
}

}  // namespace

std::shared_ptr<const Meta> read_meta(Reader r) {
  auto meta = std::make_shared<Meta>();
  const auto n = r.get<uint8_t>();
  for (int i = 0; i < n; ++i) {
    ReturnMeta ret;
    Reader peek = r;
    ret.tag = peek.get<Tag>();
    switch (ret.tag) {
      case Tag::kTensor:
      case Tag::kSparse:
      case Tag::kUndefined:
        ret.tag = Tag::kTensor;
        meta->tensors.push_back(read_tensor_meta(r));
        break;
      case Tag::kTensorList:
        (void)r.get<Tag>();
        ret.count = r.get<uint32_t>();
        for (uint32_t k = 0; k < ret.count; ++k) meta->tensors.push_back(read_tensor_meta(r));
        break;
      case Tag::kInt:
        (void)r.get<Tag>();
        ret.scalar = r.get<int64_t>();
        break;
      case Tag::kDouble:
        (void)r.get<Tag>();
        ret.scalar = r.get<double>();
        break;
      case Tag::kBool:
        (void)r.get<Tag>();
        ret.scalar = r.boolean();
        break;
      case Tag::kComplex: {
        (void)r.get<Tag>();
        const auto re = r.get<double>();
        ret.scalar = c10::complex<double>(re, r.get<double>());
        break;
      }
      default: (void)r.get<Tag>();
    }
    meta->returns.push_back(std::move(ret));
  }
  for (const TensorMeta& t : meta->tensors) {
    meta->host_results |= t.on_host;
    meta->sparse |= !t.parts.empty();
  }
  return meta;
}

at::Tensor new_tensor_of(DeviceIndex device, const TensorMeta& m) {
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), m.bytes,
                                            device_allocator()->allocate_on(device, m.bytes), device_allocator(), true);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                    c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                    c10::scalarTypeToTypeMeta(m.dtype));
  auto* impl = t.unsafeGetTensorImpl();
  if (m.sizes.size() != 1 || m.sizes[0] != 0) impl->set_sizes_and_strides(m.sizes, m.strides);
  if (m.flags & kConj) t._set_conj(true);
  if (m.flags & kNeg) t._set_neg(true);
  return t;
}

uint8_t tensor_flags(const at::Tensor& t) {
  return static_cast<uint8_t>((t.is_conj() ? kConj : 0) | (t.is_neg() ? kNeg : 0) |
                              (t.unsafeGetTensorImpl()->is_wrapped_number() ? kWrappedNumber : 0));
}

CUdeviceptr address_of(const at::Tensor& t) {
  const auto* impl = t.unsafeGetTensorImpl();
  const void* p = impl->unsafe_storage().unsafeGetStorageImpl()->data();
  if (p == nullptr) return 0;
  return reinterpret_cast<CUdeviceptr>(p) + static_cast<size_t>(impl->storage_offset()) * impl->itemsize();
}

at::Tensor new_tensor(DeviceIndex device, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
  TensorMeta m;
  m.defined = true;
  m.dtype = dtype;
  m.sizes.assign(sizes.begin(), sizes.end());
  m.strides.assign(strides.begin(), strides.end());
  m.bytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
  return new_tensor_of(device, m);
}

}  // namespace devproxy::aten
