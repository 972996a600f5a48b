// SPDX-License-Identifier: Apache-2.0
// A space's modules: kernels, variables, and what only a vendor's compiler or driver can compute.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "devproxy/csrc/args/launch.h"
#include "devproxy/csrc/args/link.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/object.h"

namespace devproxy::hal {

// What a device can tell about how much of a kernel it can run at once.
struct OccupancyQuery {
  OccupancyKind kind = OccupancyKind::kActiveBlocks;
  uint32_t flags = 0;  // of cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
  uint64_t shared_bytes = 0;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  const LaunchAttribute* attributes = nullptr;
  size_t n_attributes = 0;
};

struct ParamPlace {
  uint32_t offset_bytes = 0, size_bytes = 0;
};

struct FunctionInfo {
  uint32_t max_threads = 0, shared_bytes = 0, regs = 0;
  std::vector<ParamPlace> params;  // empty where the function takes one opaque block
  // By CUfunction_attribute; kNoAttribute where the device does not know it. Empty: it knows no more than the above.
  std::vector<int32_t> attributes;
  bool uses_heap = false;  // it calls malloc: the device's heap, which no dump holds
};
inline constexpr int32_t kNoAttribute = INT32_MIN;

// CUjitInputType; data is only read during the call.
struct LinkInput {
  uint32_t type = 0;
  std::string name;
  const uint8_t* data = nullptr;
  size_t bytes = 0;
};
struct LinkOutput {
  std::vector<uint8_t> image;
  std::string info, error;  // the vendor's logs, also of a link that failed
};

// Chooses the device address of a module's global; 0 where there is no memory.
using PlaceGlobal = std::function<uint64_t(uint64_t bytes)>;

class SpaceModules {
 public:
  virtual StatusOr<ModuleRef> load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) = 0;
  virtual StatusOr<FunctionRef> get_function(const ModuleRef& module, const std::string& name, FunctionInfo* info) = 0;
  struct Global {
    uint64_t addr = 0, bytes = 0;
  };
  virtual StatusOr<Global> get_global(const ModuleRef& module, const std::string& name) = 0;
  virtual std::vector<Global> globals(const ModuleRef& module) = 0;  // those that `place` placed
  // The module's other variables, where the device put them: outside of the space's range. They are memory like any
  // other, for copies, read() and write(). A module whose variables cannot be listed says why.
  struct Variable {
    std::string name;
    uint64_t addr = 0, bytes = 0;
  };
  virtual StatusOr<std::vector<Variable>> variables(const ModuleRef& module) = 0;
  // Of all kernels that get_function() finds, in the device's own order.
  virtual StatusOr<std::vector<std::string>> function_names(const ModuleRef& module) = 0;
  virtual Status set_attribute(const FunctionRef& function, uint32_t attribute, int32_t value) = 0;
  virtual StatusOr<int64_t> occupancy(const FunctionRef& function, const OccupancyQuery& query) = 0;

  // Functions of their arguments. A link without inputs says whether there is a linker.
  virtual Status link(const std::vector<LinkOption>& options, const std::vector<LinkInput>& inputs,
                      LinkOutput* out) = 0;
  virtual Status tensor_map(const TensorMapArgs& args, uint8_t (&map)[kTensorMapBytes]) = 0;

  // Are the module's kernels operators by name, which another kind of device can run too? False: machine code.
  virtual bool portable(const ModuleRef& module) = 0;
  // Does a kernel of the module print? True where that is not known.
  virtual bool prints(const ModuleRef& module) = 0;
  // Appends what kernels printed and what they said when an assertion failed, of work that has completed; nothing where
  // a device has no such thing. Also after a fault. Any thread, but not beside itself.
  virtual void take_output(std::string* out, std::string* err) = 0;

  // Level 2: what a module keeps for this process that is neither in memory nor in its image. Precondition: idle().
  virtual StatusOr<std::vector<uint8_t>> save_module(const ModuleRef& module) = 0;
  virtual Status load_module_state(const ModuleRef& module, const uint8_t* from, size_t bytes) = 0;

 protected:
  ~SpaceModules() = default;
};

}  // namespace devproxy::hal
