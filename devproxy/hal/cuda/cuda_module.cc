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
  char log[4096] = "";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  // cuda.h: a number is passed in the pointer itself.
  void* values[] = {log, reinterpret_cast<void*>(sizeof log - 1)};
  CUmodule handle = nullptr;
  Status s = cu.status(cu.cuModuleLoadDataEx(&handle, image, 2, options, values), cu.cuModuleLoadDataEx,
                       "loading a module image of " + std::to_string(image_bytes) + " bytes");
  if (!s.ok()) return log[0] ? Status(s.code(), s.text() + "; the driver's compiler says: " + log) : s;
  return std::make_shared<CudaModule>(context, handle);
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
