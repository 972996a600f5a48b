// SPDX-License-Identifier: Apache-2.0
// Virtual and physical handles are different types, so that mixing them does not compile.
#pragma once

#include <cstdint>
#include <functional>

#include "handle_kind.gen.h"

namespace devproxy {

// A virtual handle: what the job holds. Chosen by the client, stable over restore.
//   bits 56..63 kind, 17..55 serial number (never reused), 1..16 index (a stream's place in the stream table)
// Bit 0 is clear, as in an address: c10 tells a stream of the driver's from one of its own by it (c10/cuda/CUDAStream.cpp).
struct VHandle {
  uint64_t value = 0;
  constexpr HandleKind kind() const { return static_cast<HandleKind>(value >> 56); }
  constexpr uint16_t index() const { return static_cast<uint16_t>(value >> 1); }
  constexpr uint64_t serial() const { return value >> 17 & kSerials; }
  static constexpr uint64_t kSerials = (uint64_t{1} << 39) - 1;
  constexpr bool operator==(const VHandle&) const = default;
  static constexpr VHandle make(HandleKind kind, uint64_t serial, uint16_t index) {
    return {static_cast<uint64_t>(kind) << 56 | (serial & kSerials) << 17 | uint64_t{index} << 1};
  }
};

// The legacy default stream exists in every connection from the start, as index 0 and serial 0.
inline constexpr VHandle kLegacyStream = VHandle::make(HandleKind::kStream, 0, 0);

// A physical handle: what the device gave the server. Never leaves the server.
template <class T>
struct Phys {
  T value{};
};

}  // namespace devproxy

template <>
struct std::hash<devproxy::VHandle> {
  size_t operator()(const devproxy::VHandle& h) const noexcept { return std::hash<uint64_t>{}(h.value); }
};
