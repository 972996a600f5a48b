// SPDX-License-Identifier: Apache-2.0
// Modules whose kernels are functions of this process: shared objects that carry the table devproxy_soft_module. They
// come as an image (of the software GPU only), or are named by a description (an executor, of any device).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "devproxy/hal/hal.h"
#include "devproxy/hal/host_module/include/devproxy_executor.h"
#include "devproxy/hal/host_module/include/devproxy_soft_module.h"

namespace devproxy::hal {

// For whom a module is loaded.
struct HostModuleConfig {
  uint32_t ordinal = 0;            // of the GPU inside the job: what devproxy_soft_module's load() is told
  uint32_t framework_ordinal = 0;  // as a framework counts the GPUs of this process
  bool on_cuda = false;            // which executor of a description
  std::string folder;              // of the server's libraries: executors lie below it
  SpaceConfig space;
  SpaceOwner* owner = nullptr;
};

class HostModule final : public Module {
 public:
  // A description of an executor, or (not on_cuda) a shared object. kInvalidImage with the reason.
  static StatusOr<std::shared_ptr<HostModule>> load(const uint8_t* image, size_t image_bytes,
                                                    const HostModuleConfig& config, const PlaceGlobal& place);
  ~HostModule() override;
  // Loads the framework and the executor of a description, once, and nothing else. Any thread.
  static Status warm(const uint8_t* image, size_t image_bytes, const HostModuleConfig& config);

  struct PlacedGlobal {
    std::string name;
    Space::Global place;
  };
  const devproxy_soft_module_table* table() const { return table_; }
  const std::vector<PlacedGlobal>& globals() const { return globals_; }
  // Closed by nullptr; nullptr where the module does not list them.
  const char* const* function_names() const { return function_names_; }

  bool is_executor() const { return executor_ != nullptr; }
  // DEVPROXY_EXECUTOR_*: what a launch would do. Any thread.
  int footprint(const std::string& function, const uint8_t* params, uint64_t params_bytes,
                std::vector<devproxy_executor_access>* accesses, uint64_t* digest) const;
  void* state() const { return state_; }
  // Precondition: nothing of the space is running. A module that is no executor has none.
  StatusOr<std::vector<uint8_t>> save_state() const;
  Status load_state(const uint8_t* from, size_t bytes) const;
  void trim() const {
    if (executor_) executor_->trim(state_);
  }

 private:
  Status open_image(const uint8_t* image, size_t image_bytes);
  Status open_executor(const uint8_t* image, size_t image_bytes, const HostModuleConfig& config);
  Status check_table(uint32_t ordinal);

  int fd_ = -1;
  void* library_ = nullptr;
  std::string path_;
  const devproxy_soft_module_table* table_ = nullptr;
  const devproxy_executor_table* executor_ = nullptr;
  void* state_ = nullptr;
  SpaceOwner* owner_ = nullptr;
  const char* const* function_names_ = nullptr;
  std::unordered_map<std::string, const devproxy_soft_footprint*> footprints_;  // by the kernel's name
  uint64_t image_hash_ = 0;                                                     // where there are any
  std::vector<PlacedGlobal> globals_;
};

struct HostFunction final : Function {
  std::shared_ptr<HostModule> module;  // keeps the code mapped while a command may still run it
  std::string name;
  devproxy_soft_function entry{};

  static StatusOr<std::shared_ptr<HostFunction>> get(std::shared_ptr<HostModule> module, const std::string& name);
};

// What a kernel asks about its launch; lives as long as the call.
struct RangeCheck {
  SpaceOwner* owner = nullptr;
  uint64_t position = 0;
  bool on_submitter = false;
};

// Runs the function on this thread; stream is what devproxy_soft_launch.stream says. kOk; an execution fault with a
// text for the user; or, of an executor, kOutOfMemory, which is that launch's alone. `args` are those of the launch.
Status run_host_function(const HostFunction& function, const LaunchArgs& args, uint32_t ordinal, uint64_t stream,
                         const RangeCheck& check);

}  // namespace devproxy::hal
