// SPDX-License-Identifier: Apache-2.0
// Modules and functions as the client knows them: what launch needs without asking.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "devproxy/csrc/client/device_state.h"

namespace devproxy::sa::module {

struct Param {
  uint32_t offset, size;
};

// What was asked of the device about a function, and its answers: they hold until an attribute is set.
struct OccupancyCache {
  using Question = std::tuple<uint32_t, uint32_t, uint64_t, std::string>;  // kind, flags, shared bytes, the rest
  std::mutex mu;
  std::map<Question, int64_t> answers;
};

struct FunctionObj {
  // What every launch reads: behind the map's own word, one cache line.
  int device = 0;
  uint32_t max_threads = 1024;
  uint32_t param_bytes = 0;  // end of the last parameter
  std::atomic<int32_t> max_dynamic_shared{49152};
  std::vector<Param> params;

  std::string name;
  uint64_t module = 0;
  uint32_t shared_bytes = 0;
  // By CUfunction_attribute, from the device, and what the job set since; kNoAttribute where the device knows none.
  static constexpr int kAttributes = 16;
  static constexpr int32_t kNoAttribute = INT32_MIN;
  std::atomic<int32_t> attributes[kAttributes];
  OccupancyCache occupancy;
};

using FunctionMap = client::HandleMap<FunctionObj, HandleKind::kFunction>;
FunctionMap& functions();

// What the job passes as CUfunction: a function, or a kernel of a library, whose function on the current device is
// looked up and made at first use. nullptr and *error otherwise. *value receives the function's own handle.
FunctionObj* function_of_kernel(uint64_t handle, uint64_t* value, int32_t* error);
inline FunctionObj* function_of(uint64_t handle, uint64_t* value, int32_t* error) {
  FunctionObj* f = functions().get(handle);
  if (__builtin_expect(f == nullptr, 0)) return function_of_kernel(handle, value, error);
  *value = handle;
  return f;
}

}  // namespace devproxy::sa::module
