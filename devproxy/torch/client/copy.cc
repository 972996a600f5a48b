// SPDX-License-Identifier: Apache-2.0
// Only bytes cross the border: conversions of type, strides or conjugation run on the device, as a launch of copy_
// there.
#include "devproxy/torch/client/copy.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Scalar.h>
#include <c10/util/strides.h>

#include "devproxy/torch/client/allocator.h"
#include "devproxy/torch/client/forward.h"
#include "devproxy/torch/client/graph.h"

namespace devproxy::aten {
namespace {

using at::Tensor;

size_t dense_bytes(const Tensor& t) { return static_cast<size_t>(t.numel()) * t.itemsize(); }

void copy_on_device(const Tensor& dst, const Tensor& src) {
  (void)dst.storage().mutable_data();
  forward_named("aten::copy_", "", {dst, src, false});
}

// A device tensor with `like`'s bits: same type, layout and conjugation, so that a raw copy fills it.
Tensor twin(const Tensor& like, DeviceIndex device) {
  Tensor t = new_tensor(device, like.scalar_type(), like.sizes(), like.strides());
  if (like.is_conj()) t._set_conj(true);
  if (like.is_neg()) t._set_neg(true);
  return t;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() && a.is_non_overlapping_and_dense();
}

// A replay would read or write the host's memory as it is then, so it must be memory that lies still.
void refuse_pageable_in_capture(DeviceIndex device, const void* host) {
  if (!any_capture() || capturing_graph(device, current_stream_id(device)) == nullptr) return;
  TORCH_CHECK(is_pinned(host),
              "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
              "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True.");
}

// Returns once the source may be reused: at once for pageable memory, which the driver copies before it returns.
void host_to_device(const Tensor& dst, const Tensor& src, bool non_blocking) {
  const DeviceIndex device = dst.device().index();
  const CUstream stream = current_stream(device);
  refuse_pageable_in_capture(device, src.const_data_ptr());
  (void)dst.storage().mutable_data();
  check(driver().cuMemcpyHtoDAsync(address_of(dst), src.const_data_ptr(), dense_bytes(src), stream),
        "cuMemcpyHtoDAsync");
  if (!is_pinned(src.const_data_ptr())) return;
  if (non_blocking) {
    record_pinned_use(src.const_data_ptr(), src.storage().data_ptr().get_context(), device, current_stream_id(device));
  } else {
    check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");
  }
}

void device_to_host(const Tensor& dst, const Tensor& src, bool non_blocking) {
  const DeviceIndex device = src.device().index();
  const CUstream stream = current_stream(device);
  void* to = dst.mutable_data_ptr();
  refuse_pageable_in_capture(device, to);
  check(driver().cuMemcpyDtoHAsync(to, address_of(src), dense_bytes(src), stream), "cuMemcpyDtoHAsync");
  if (non_blocking && is_pinned(to)) {
    record_pinned_use(to, dst.storage().data_ptr().get_context(), device, current_stream_id(device));
  } else {
    check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");
  }
}

// The copy runs on the source's stream; it waits for the destination's work so far, and the destination for it.
void peer_copy(const Tensor& dst, const Tensor& src) {
  const DeviceIndex to = dst.device().index(), from = src.device().index();
  const CUstream to_stream = current_stream(to);
  CUevent ready, done;
  check(driver().cuEventCreate(&ready, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  check(driver().cuEventRecord(ready, to_stream), "cuEventRecord");
  CUcontext contexts[2];
  for (const int i : {0, 1}) {
    CUdevice handle;
    check(driver().cuDeviceGet(&handle, i == 0 ? to : from), "cuDeviceGet");
    check(driver().cuDevicePrimaryCtxRetain(&contexts[i], handle), "cuDevicePrimaryCtxRetain");
  }
  (void)dst.storage().mutable_data();
  const CUstream from_stream = current_stream(from);
  check(driver().cuEventCreate(&done, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  check(driver().cuStreamWaitEvent(from_stream, ready, 0), "cuStreamWaitEvent");
  check(driver().cuMemcpyPeerAsync(address_of(dst), contexts[0], address_of(src), contexts[1], dense_bytes(src),
                                   from_stream),
        "cuMemcpyPeerAsync");
  check(driver().cuEventRecord(done, from_stream), "cuEventRecord");
  bind_device(to);
  check(driver().cuStreamWaitEvent(to_stream, done, 0), "cuStreamWaitEvent");
  check(driver().cuEventDestroy(ready), "cuEventDestroy");
  bind_device(from);
  check(driver().cuEventDestroy(done), "cuEventDestroy");
}

Tensor dense(const Tensor& t) { return t.is_non_overlapping_and_dense() ? t : t.contiguous(); }

// contiguous() keeps conjugation lazy for the host, where it must not be computed.
Tensor dense_on_host(const Tensor& t) {
  if (t.is_non_overlapping_and_dense()) return t;
  Tensor bits = t;
  if (t.is_conj()) bits = bits.conj();  // flips the flag only
  if (t.is_neg()) bits = bits._neg_view();
  Tensor c = bits.contiguous();
  if (t.is_conj()) c = c.conj();
  if (t.is_neg()) c = c._neg_view();
  return c;
}

}  // namespace

Tensor& copy_(Tensor& dst, const Tensor& source, bool non_blocking) {
  if (dst.is_same(source)) return dst;
  Tensor src = source;
  if (src.sizes() != dst.sizes()) src = src.expand(dst.sizes());  // throws what copy_ throws for shapes that do not fit
  if (dst.numel() == 0) return dst;

  if (dst.is_cuda() && src.is_cuda()) {
    const DeviceIndex to = dst.device().index(), from = src.device().index();
    if (to == from) {
      copy_on_device(dst, src);
      return dst;
    }
    Tensor sent = dense(src);
    if (same_bits(dst, sent)) {
      peer_copy(dst, sent);
    } else {
      Tensor arrived = twin(sent, to);
      peer_copy(arrived, sent);
      copy_on_device(dst, arrived);
    }
    // The source's memory may be freed before the copy has read it; its stream is the one that frees it.
    return dst;
  }

  if (!non_blocking) say_wait();
  if (dst.is_cuda()) {
    TORCH_CHECK(src.is_cpu(), "Cannot copy from ", src.device(), " to ", dst.device());
    // An expanded source travels once.
    if (source.numel() < src.numel()) {
      Tensor small = dense_on_host(source);
      Tensor arrived = twin(small, dst.device().index());
      host_to_device(arrived, small, non_blocking);
      copy_on_device(dst, arrived.expand(dst.sizes()));
      return dst;
    }
    Tensor sent = dense_on_host(src);
    if (same_bits(dst, sent)) {
      host_to_device(dst, sent, non_blocking);
    } else {
      Tensor arrived = twin(sent, dst.device().index());
      host_to_device(arrived, sent, non_blocking);
      copy_on_device(dst, arrived);
    }
    return dst;
  }

  TORCH_CHECK(dst.is_cpu(), "Cannot copy from ", src.device(), " to ", dst.device());
  if (same_bits(dst, src)) {
    device_to_host(dst, src, non_blocking);
    return dst;
  }
  // Bring it into the destination's type and, where that is dense, its layout; then take the bytes.
  const DeviceIndex from = src.device().index();
  const bool direct = dst.is_non_overlapping_and_dense() && !dst.is_conj() && !dst.is_neg();
  Tensor wanted = direct ? new_tensor(from, dst.scalar_type(), dst.sizes(), dst.strides())
                         : new_tensor(from, dst.scalar_type(), dst.sizes(), c10::contiguous_strides(dst.sizes()));
  copy_on_device(wanted, src);
  if (direct) {
    device_to_host(dst, wanted, non_blocking);
  } else {
    Tensor host = at::empty_strided(wanted.sizes(), wanted.strides(), wanted.options().device(at::kCPU));
    device_to_host(host, wanted, false);
    dst.copy_(host);
  }
  return dst;
}

at::Scalar local_scalar_dense(const Tensor& t) {
  say_wait();
  Tensor host = at::empty({}, t.options().device(at::kCPU));
  const CUstream stream = current_stream(t.device().index());
  check(driver().cuMemcpyDtoHAsync(host.mutable_data_ptr(), address_of(t), t.itemsize(), stream), "cuMemcpyDtoHAsync");
  check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");
  if (t.is_conj()) host = host.conj();
  if (t.is_neg()) host = host._neg_view();
  return host.item();
}

}  // namespace devproxy::aten
