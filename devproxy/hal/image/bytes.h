// SPDX-License-Identifier: Apache-2.0
// A view of untrusted bytes: no access without a check.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

namespace devproxy::hal::image {

inline constexpr uint16_t kCudaMachine = 190;  // of a cubin; elf.h: EM_CUDA

class Bytes {
 public:
  Bytes() = default;
  Bytes(const uint8_t* at, size_t bytes) : at_(at), bytes_(bytes) {}

  const uint8_t* data() const { return at_; }
  size_t size() const { return bytes_; }
  bool has(uint64_t offset, uint64_t bytes) const { return offset <= bytes_ && bytes <= bytes_ - offset; }

  // A value at an offset, unaligned; nullopt where it does not lie inside.
  template <class T>
  std::optional<T> at(uint64_t offset) const {
    if (!has(offset, sizeof(T))) return std::nullopt;
    T value;
    std::memcpy(&value, at_ + offset, sizeof value);
    return value;
  }
  // The same where the caller has asked has().
  template <class T>
  T get(uint64_t offset) const {
    T value;
    std::memcpy(&value, at_ + offset, sizeof value);
    return value;
  }
  std::optional<Bytes> part(uint64_t offset, uint64_t bytes) const {
    if (!has(offset, bytes)) return std::nullopt;
    return Bytes(at_ + offset, bytes);
  }
  // A name that ends in NUL inside of these bytes; nullopt where it does not end.
  std::optional<std::string_view> name(uint64_t offset) const {
    if (offset >= bytes_) return std::nullopt;
    const void* end = std::memchr(at_ + offset, 0, bytes_ - offset);
    if (!end) return std::nullopt;
    return std::string_view(reinterpret_cast<const char*>(at_) + offset,
                            static_cast<const uint8_t*>(end) - at_ - offset);
  }

 private:
  const uint8_t* at_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace devproxy::hal::image
