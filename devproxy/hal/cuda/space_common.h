// SPDX-License-Identifier: Apache-2.0
// What several files of CudaSpace use.
#pragma once

#include <cstring>
#include <typeinfo>
#include <vector>

#include "devproxy/hal/cuda/cuda_space.h"

namespace devproxy::hal::cuda {

inline void copy_rows(const CopyArgs& a) {
  auto* dst = reinterpret_cast<uint8_t*>(a.dst);
  const auto* src = reinterpret_cast<const uint8_t*>(a.src);
  for (uint64_t row = 0; row < a.height; row++)
    std::memmove(dst + row * a.dst_pitch, src + row * a.src_pitch, a.width_bytes);
}

inline std::vector<CUlaunchAttribute> driver_attributes(const LaunchAttribute* list, size_t n) {
  std::vector<CUlaunchAttribute> out(n);
  for (size_t i = 0; i < n; i++) {
    out[i].id = static_cast<CUlaunchAttributeID>(list[i].id);
    static_assert(sizeof out[i].value == sizeof list[i].value);
    std::memcpy(&out[i].value, list[i].value, sizeof out[i].value);
  }
  return out;
}

inline CUlaunchConfig launch_config(const uint32_t (&grid)[3], const uint32_t (&block)[3], uint64_t shared_bytes,
                                    CUstream stream, std::vector<CUlaunchAttribute>* attributes) {
  return {grid[0],
          grid[1],
          grid[2],
          block[0],
          block[1],
          block[2],
          static_cast<unsigned>(shared_bytes),
          stream,
          attributes->data(),
          static_cast<unsigned>(attributes->size())};
}

// Both classes are final. This is asked at each launch, where a look at the type's name costs less than a cast.
inline bool is_executor(const ModuleRef& module) { return typeid(*module) == typeid(HostModule); }
inline bool is_executor(const FunctionRef& function) { return typeid(*function) == typeid(HostFunction); }

// f runs without mu_, and the command is nobody's meanwhile. False: it is not to be issued any more.
template <class F>
StatusOr<bool> CudaSpace::beside(Pending& pending, std::unique_lock<std::mutex>& lock, F f) {
  pending.state = Pending::State::kIssuing;
  executing_++;
  lock.unlock();
  Status s = f();
  lock.lock();
  executing_--;
  pending.state = Pending::State::kDropped;
  if (!s.ok()) return s;
  return !faulted_.load(std::memory_order_relaxed);
}

}  // namespace devproxy::hal::cuda
