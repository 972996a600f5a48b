// SPDX-License-Identifier: Apache-2.0
// Arguments of what only a vendor's driver or compiler can compute: tensor maps and links.
#pragma once

#include <cstdint>

namespace devproxy {

enum class TensorMapKind : uint32_t { kTiled = 0, kIm2col = 1, kReplaceAddress = 2 };
inline constexpr uint32_t kTensorRank = 5, kTensorMapBytes = 128;

// What does not belong to the kind is 0.
struct TensorMapArgs {
  uint32_t kind = 0, data_type = 0, rank = 0, interleave = 0, swizzle = 0, l2_promotion = 0, oob_fill = 0;
  uint32_t channels = 0, pixels = 0, has_strides = 0;
  uint64_t address = 0;
  uint64_t dim[kTensorRank] = {}, strides[kTensorRank] = {};  // strides: of all dimensions but the first
  uint32_t box[kTensorRank] = {}, element_strides[kTensorRank] = {};
  int32_t lower[kTensorRank] = {}, upper[kTensorRank] = {};
  uint8_t map[kTensorMapBytes] = {};  // the one whose address is replaced
};

struct LinkOption {
  uint32_t id = 0, pad = 0;
  uint64_t value = 0;
};

}  // namespace devproxy
