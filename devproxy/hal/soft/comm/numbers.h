// SPDX-License-Identifier: Apache-2.0
// Floating numbers of 8 and 16 bits: to float32 exactly, and back rounded to nearest, ties to even.
#pragma once

#include <bit>
#include <cstdint>

namespace devproxy::hal::soft {

struct Bfloat16 {
  uint16_t bits;
  float wide() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
  static Bfloat16 of(float value) {
    const auto b = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    return {static_cast<uint16_t>((b & 0x7fff'ffff) > 0x7f80'0000 ? b >> 16 | 0x40 : rounded)};
  }
};

struct Float16 {
  uint16_t bits;
  float wide() const {
    const uint32_t sign = uint32_t{bits} << 16 & 0x8000'0000, rest = uint32_t{bits} << 13 & 0x0fff'e000;
    // The exponent moves by a multiplication, which also makes subnormal numbers normal.
    const float scaled = std::bit_cast<float>(rest) * 0x1p112f;
    const uint32_t special = rest >= 0x0f80'0000 ? 0x7f80'0000 : 0;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special | sign);
  }
  static Float16 of(float value) {
    const auto b = std::bit_cast<uint32_t>(value);
    const uint32_t sign = b >> 16 & 0x8000, rest = b & 0x7fff'ffff;
    uint32_t small = 0;
    if (rest > 0x7f80'0000) {
      small = 0x7e00;
    } else if (rest >= 0x4780'0000) {  // 65536 and more, infinity too
      small = 0x7c00;
    } else if (rest < 0x3880'0000) {  // a subnormal number: the adder of float32 rounds it
      small = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) - 0x3f00'0000;
    } else {
      small = (rest + 0xfff + (rest >> 13 & 1) - 0x3800'0000) >> 13;  // 65520 and more carry into infinity
    }
    return {static_cast<uint16_t>(small | sign)};
  }
};

// mantissa: its bits. largest: the code of the largest number. nan: a code of none. infinity: 0 where there is none.
template <int kMantissa, int kBias, uint8_t kLargest, uint8_t kNan, uint8_t kInfinity>
struct Float8 {
  uint8_t bits;
  float wide() const {
    const uint32_t sign = uint32_t{bits} << 24 & 0x8000'0000, rest = bits & 0x7f;
    if (rest > kLargest)
      return std::bit_cast<float>(sign | (kInfinity && rest == kInfinity ? 0x7f80'0000 : 0x7fc0'0000));
    const float scaled = std::bit_cast<float>(rest << (23 - kMantissa)) * std::bit_cast<float>((254u - kBias) << 23);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | sign);
  }
  static Float8 of(float value) {
    const auto b = std::bit_cast<uint32_t>(value);
    const uint8_t sign = static_cast<uint8_t>(b >> 24 & 0x80);
    const uint32_t rest = b & 0x7fff'ffff;
    if (rest > 0x7f80'0000) return {static_cast<uint8_t>(kNan | sign)};
    constexpr uint32_t kShift = 23 - kMantissa, kSmallest = (128u - kBias) << 23;
    uint32_t small = 0;
    if (rest < kSmallest) {
      constexpr uint32_t kMagic = (127u + 23 - kMantissa - kBias + 1) << 23;
      small = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + std::bit_cast<float>(kMagic)) - kMagic;
    } else {
      small = (rest + ((1u << (kShift - 1)) - 1) + (rest >> kShift & 1) - ((127u - kBias) << 23)) >> kShift;
    }
    return {static_cast<uint8_t>((small > kLargest ? kLargest : small) | sign)};
  }
};
using Float8e4m3 = Float8<3, 7, 0x7e, 0x7f, 0>;
using Float8e5m2 = Float8<2, 15, 0x7b, 0x7e, 0x7c>;

}  // namespace devproxy::hal::soft
