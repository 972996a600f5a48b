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

// What cuMemcpy3D would say of it, with nothing sent.
[[nodiscard]] int32_t check_3d(const CUDA_MEMCPY3D& p);

}  // namespace devproxy::sa::memory
