// SPDX-License-Identifier: Apache-2.0
// Modules of the real driver: cubin, fat binary or PTX.
#pragma once

#include <string>
#include <vector>

#include "devproxy/hal/cuda/cuda_context.h"
#include "devproxy/hal/cuda/module_facts.h"
#include "devproxy/hal/hal.h"

namespace devproxy::hal::cuda {

class CudaModule final : public Module {
 public:
  static StatusOr<std::shared_ptr<CudaModule>> load(const std::shared_ptr<Context>& context, const uint8_t* image,
                                                    size_t image_bytes);
  CudaModule(std::shared_ptr<Context> context, CUmodule handle) : context_(std::move(context)), handle_(handle) {}
  ~CudaModule() override;

  CUmodule handle() const { return handle_; }
  // Where its variables lie, found when it was loaded; or why they cannot be listed.
  const std::vector<Space::Variable>& variables() const { return variables_; }
  const Status& unlisted() const { return unlisted_; }
  const ModuleFacts& facts() const { return facts_; }
  bool prints() const { return facts_.prints || !unlisted_.ok(); }
  bool has(uint64_t addr, uint64_t bytes) const;
  const Context& context() const { return *context_; }
  // Of its kernels, as the driver lists them.
  StatusOr<std::vector<std::string>> function_names() const;

 private:
  const std::shared_ptr<Context> context_;
  Status take(StatusOr<ModuleFacts> facts);

  const CUmodule handle_;
  std::vector<Space::Variable> variables_;
  Status unlisted_;
  ModuleFacts facts_;
};

struct CudaFunction final : Function {
  std::shared_ptr<CudaModule> module;  // stays loaded while a command may run it
  CUfunction handle = nullptr;
  std::string name;

  static StatusOr<std::shared_ptr<CudaFunction>> get(std::shared_ptr<CudaModule> module, const std::string& name,
                                                     FunctionInfo* info);
};

}  // namespace devproxy::hal::cuda
