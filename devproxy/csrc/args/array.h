// SPDX-License-Identifier: Apache-2.0
// The shape of a CUDA array, and the objects that show arrays and memory to kernels.
#pragma once

#include <cstdint>

namespace devproxy {

// As CUDA_ARRAY3D_DESCRIPTOR says it; height and depth are 0 where the array has no such dimension.
struct ArrayShape {
  uint64_t width = 0, height = 0, depth = 0;
  uint32_t format = 0, channels = 0, flags = 0, pad = 0;
};

// cuda.h, CUarray_format: bytes of one channel; 0 for formats that are not plain numbers (planar, block-compressed).
inline constexpr uint32_t array_channel_bytes(uint32_t format) {
  switch (format) {
    case 0x01:  // UNSIGNED_INT8
    case 0x08: return 1;
    case 0x02:  // UNSIGNED_INT16
    case 0x09:
    case 0x10: return 2;  // HALF
    case 0x03:            // UNSIGNED_INT32
    case 0x0a:
    case 0x20: return 4;  // FLOAT
    default: return 0;
  }
}
inline constexpr uint32_t array_element_bytes(uint32_t format, uint32_t channels) {
  return channels == 1 || channels == 2 || channels == 4 ? array_channel_bytes(format) * channels : 0;
}

// No dimension of any device comes near: products of these do not overflow.
inline constexpr uint64_t kMaxArrayWidth = 1u << 20, kMaxArrayHeight = 1u << 18, kMaxArrayDepth = 1u << 14;

// The bytes of an array, as rows and slices of them. A layer is a slice; a layered row has one row to a slice.
struct ArrayExtent {
  uint64_t width_bytes = 0, rows = 0, slices = 0;
  constexpr uint64_t bytes() const { return width_bytes * rows * slices; }
};
// False where no array can have that shape.
inline constexpr bool array_extent(const ArrayShape& s, ArrayExtent* out) {
  const uint32_t element = array_element_bytes(s.format, s.channels);
  if (element == 0 || s.width == 0 || s.width > kMaxArrayWidth) return false;
  if (s.height > kMaxArrayHeight || s.depth > kMaxArrayDepth) return false;
  *out = {s.width * element, s.height ? s.height : 1, s.depth ? s.depth : 1};
  return true;
}
inline constexpr bool array_holds(const ArrayExtent& e, uint64_t x, uint64_t y, uint64_t z, uint64_t width_bytes,
                                  uint64_t rows, uint64_t slices) {
  return x <= e.width_bytes && width_bytes <= e.width_bytes - x && y <= e.rows && rows <= e.rows - y && z <= e.slices &&
         slices <= e.slices - z;
}

// A texture or surface object. What does not belong to the kind or to the resource is 0.
enum class TextureKind : uint32_t { kTexture = 0, kSurface = 1 };
// cuda.h, CUresourcetype; mipmapped arrays are refused before anything travels.
enum class TextureResource : uint32_t { kArray = 0, kLinear = 2, kPitch2D = 3 };
struct TextureArgs {
  uint32_t kind = 0, resource = 0;
  uint64_t array = 0;  // its virtual handle; a device looks at the array that it is given beside this
  uint64_t address = 0, bytes = 0, width = 0, height = 0, pitch = 0;
  uint32_t format = 0, channels = 0;
  uint32_t address_mode[3] = {};
  uint32_t filter_mode = 0, flags = 0, max_anisotropy = 0, mipmap_filter_mode = 0;
  float mipmap_level_bias = 0, min_mipmap_level = 0, max_mipmap_level = 0, border[4] = {};
  uint32_t has_view = 0, view_format = 0;
  uint32_t first_level = 0, last_level = 0, first_layer = 0, last_layer = 0;
  uint64_t view_width = 0, view_height = 0, view_depth = 0;
};
static_assert(sizeof(ArrayShape) == 40 && sizeof(TextureArgs) == 168);

}  // namespace devproxy
