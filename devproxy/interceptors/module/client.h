// Modules and functions as the client knows them: what launch needs without asking.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "devproxy/csrc/client/device_state.h"

namespace devproxy::sa::module {

struct Param {
  uint32_t offset, size;
};

struct FunctionObj {
  std::string name;
  uint64_t module = 0;
  int device = 0;
  uint32_t max_threads = 1024, shared_bytes = 0, regs = 0;
  uint32_t param_bytes = 0;  // end of the last parameter
  std::vector<Param> params;
  std::atomic<int32_t> max_dynamic_shared{49152};
};

using FunctionMap = client::HandleMap<FunctionObj, HandleKind::kFunction>;
FunctionMap& functions();

// What the job passes as CUfunction: a function, or a kernel of a library, whose function on the current device is
// looked up and made at first use. nullptr and *error otherwise. *value receives the function's own handle.
FunctionObj* function_of(uint64_t handle, uint64_t* value, int32_t* error);

}  // namespace devproxy::sa::module
