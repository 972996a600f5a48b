// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/cuda_module.h"

#include <utility>

#include "devproxy/hal/image/image.h"

namespace devproxy::hal::cuda {

namespace {

constexpr size_t kMaxParams = 8192;  // more than 32,764 bytes of parameters can be; ends a loop over a broken driver

}  // namespace

StatusOr<std::shared_ptr<CudaModule>> CudaModule::load(const std::shared_ptr<Context>& context, const uint8_t* image,
                                                       size_t image_bytes) {
  auto form = image::check_whole(image, image_bytes);
  if (!form.ok()) return std::move(form).status();
  std::string text;
  if (*form == image::Form::kText) {  // the driver reads PTX up to a NUL
    text.assign(reinterpret_cast<const char*>(image), image_bytes);
    image = reinterpret_cast<const uint8_t*>(text.c_str());
  }
  const Driver& cu = context->enter();
  int major = 0, minor = 0;
  (void)cu.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, context->device());
  (void)cu.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, context->device());
  auto facts = facts_of(image, image_bytes, static_cast<uint32_t>(major), static_cast<uint32_t>(minor));
  if (facts.ok() && !facts->managed.empty())
    return Status(kNotSupported,
                  "the module has the managed variable '" + facts->managed +
                      "', which the driver would place in the server's process, where the job cannot touch it; use "
                      "__device__ and copies, or cuMemAllocManaged");
  char log[4096] = "";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  // cuda.h: a number is passed in the pointer itself.
  void* values[] = {log, reinterpret_cast<void*>(sizeof log - 1)};
  CUmodule handle = nullptr;
  Status s = cu.status(cu.cuModuleLoadDataEx(&handle, image, 2, options, values), cu.cuModuleLoadDataEx,
                       "loading a module image of " + std::to_string(image_bytes) + " bytes");
  if (!s.ok()) return log[0] ? Status(s.code(), s.text() + "; the driver's compiler says: " + log) : s;
  auto module = std::make_shared<CudaModule>(context, handle);
  if (s = module->take(std::move(facts)); !s.ok()) return s;
  return module;
}

// What the image said, and where the driver put each variable. One that it does not know was dropped by its compiler.
Status CudaModule::take(StatusOr<ModuleFacts> facts) {
  if (!facts.ok()) {
    unlisted_ = {kNotSupported, facts.status().text()};  // the driver took it, so the image is not at fault
    return {};
  }
  facts_ = std::move(*facts);
  const Driver& cu = context_->enter();
  for (const std::string& name : facts_.variables) {
    CUdeviceptr addr = 0;
    size_t bytes = 0;
    const CUresult r = cu.cuModuleGetGlobal(&addr, &bytes, handle_, name.c_str());
    if (r == CUDA_ERROR_NOT_FOUND) continue;
    if (Status s = cu.status(r, cu.cuModuleGetGlobal, "looking for variable '" + name + "'"); !s.ok()) return s;
    if (bytes) variables_.push_back({name, addr, bytes});
  }
  return {};
}

bool CudaModule::has(uint64_t addr, uint64_t bytes) const {
  for (const Space::Variable& v : variables_)
    if (addr >= v.addr && addr - v.addr <= v.bytes && bytes <= v.bytes - (addr - v.addr)) return true;
  return false;
}

// The driver and not the image: its compiler may have dropped a kernel, and the order is its own.
StatusOr<std::vector<std::string>> CudaModule::function_names() const {
  const Driver& cu = context_->enter();
  const char* const doing = "listing the kernels of a module";
  unsigned count = 0;
  Status s = cu.status(cu.cuModuleGetFunctionCount(&count, handle_), cu.cuModuleGetFunctionCount, doing);
  std::vector<CUfunction> handles(count);
  if (s.ok() && count)
    s = cu.status(cu.cuModuleEnumerateFunctions(handles.data(), count, handle_), cu.cuModuleEnumerateFunctions, doing);
  std::vector<std::string> names;
  for (size_t i = 0; i < handles.size() && s.ok(); i++) {
    const char* name = nullptr;
    s = cu.status(cu.cuFuncGetName(&name, handles[i]), cu.cuFuncGetName, doing);
    if (s.ok()) names.emplace_back(name ? name : "");
  }
  if (!s.ok()) return s;
  return names;
}

CudaModule::~CudaModule() { (void)context_->enter().cuModuleUnload(handle_); }

StatusOr<std::shared_ptr<CudaFunction>> CudaFunction::get(std::shared_ptr<CudaModule> module, const std::string& name,
                                                          FunctionInfo* info) {
  const Driver& cu = module->context().enter();
  auto function = std::make_shared<CudaFunction>();
  if (Status s = cu.status(cu.cuModuleGetFunction(&function->handle, module->handle(), name.c_str()),
                           cu.cuModuleGetFunction, "looking for function '" + name + "'");
      !s.ok())
    return s;
  const struct {
    CUfunction_attribute attribute;
    uint32_t* to;
  } kWanted[] = {{CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, &info->max_threads},
                 {CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, &info->shared_bytes},
                 {CU_FUNC_ATTRIBUTE_NUM_REGS, &info->regs}};
  for (const auto& wanted : kWanted) {
    int value = 0;
    if (Status s = cu.status(cu.cuFuncGetAttribute(&value, wanted.attribute, function->handle), cu.cuFuncGetAttribute,
                             "asking about function '" + name + "'");
        !s.ok())
      return s;
    *wanted.to = static_cast<uint32_t>(value);
  }
  // All that it knows; what it does not is INVALID_VALUE.
  info->attributes.assign(CU_FUNC_ATTRIBUTE_MAX, kNoAttribute);
  for (int i = 0; i < CU_FUNC_ATTRIBUTE_MAX; i++) {
    int value = 0;
    if (cu.cuFuncGetAttribute(&value, static_cast<CUfunction_attribute>(i), function->handle) == CUDA_SUCCESS)
      info->attributes[static_cast<size_t>(i)] = value;
  }
  info->uses_heap = module->facts().heap_kernels.contains(name);
  // Offsets are the driver's: parameter 0 may not lie at 0. The end of the list is an error by design (cuda.h).
  info->params.clear();
  for (size_t i = 0; i < kMaxParams; i++) {
    size_t offset = 0, bytes = 0;
    const CUresult r = cu.cuFuncGetParamInfo(function->handle, i, &offset, &bytes);
    if (r == CUDA_ERROR_INVALID_VALUE) break;
    if (Status s = cu.status(r, cu.cuFuncGetParamInfo, "asking for the parameters of '" + name + "'"); !s.ok())
      return s;
    info->params.push_back({static_cast<uint32_t>(offset), static_cast<uint32_t>(bytes)});
  }
  function->module = std::move(module);
  function->name = name;
  return function;
}

}  // namespace devproxy::hal::cuda
