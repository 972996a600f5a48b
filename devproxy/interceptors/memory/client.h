#pragma once

#include <cstdint>

namespace devproxy::sa::memory {

// Where [addr, addr + bytes) lies in device or pinned memory: whether it is allocated. True for plain host memory.
bool known(uint64_t addr, uint64_t bytes);

}  // namespace devproxy::sa::memory
