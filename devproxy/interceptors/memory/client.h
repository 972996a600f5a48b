// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "devproxy/interceptors/client_common.h"

namespace devproxy::sa::memory {

// Where [addr, addr + bytes) lies in device or pinned memory: whether it is allocated. True for plain host memory.
bool known(uint64_t addr, uint64_t bytes);

// Copies from host memory that a device would read by itself, and reads it before it returns, whatever the stream waits
// for. False where that cannot be: the source is no such memory, or the destination none of the stream's device.
[[nodiscard]] bool copy_from_host_now(client::DeviceState* d, client::StreamObj* s, uint64_t dst, uint64_t src,
                                      uint64_t bytes, int32_t* done);

// -- copies, for those of rectangles and boxes (interceptors/copies) --------------------------------------------------

enum Direction { kHtoD, kDtoH, kDtoD, kAny };

// How a copy is seen from one device: its own memory, its own pinned window, or neither (kChunk). Managed memory is in
// every device's window.
wire::Space space_on(client::DeviceState* d, uint64_t addr);

// A run of bytes, by the device that can do it; in pieces through this process where none sees both sides. wait: the
// call is synchronous towards the host.
[[nodiscard]] int32_t dispatch_copy(client::DeviceState* d, client::StreamObj* s, uint64_t dst, uint64_t src,
                                    uint64_t bytes, Direction direction, bool wait);

// A 2D region of bytes; a plain run is height 1.
struct Region {
  uint64_t addr;
  uint64_t pitch;
};
inline uint64_t chunk_offset(uint32_t chunk) { return static_cast<uint64_t>(chunk) * kChunkBytes; }

// A rectangle between two places that the stream's server sees. chunk_release: a staging chunk that is free after it,
// plus 1; 0 for none. *end: its position.
[[nodiscard]] int32_t post_copy_2d(client::DeviceState* d, client::StreamObj* s, Region dst, wire::Space dst_space,
                                   Region src, wire::Space src_space, uint64_t width, uint64_t height,
                                   uint32_t chunk_release, uint64_t* end);

}  // namespace devproxy::sa::memory
