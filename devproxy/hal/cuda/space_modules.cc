// SPDX-License-Identifier: Apache-2.0
// CudaSpace: modules and their kernels, links, tensor maps.
#include <algorithm>
#include <cstring>
#include <utility>

#include "devproxy/hal/cuda/space_common.h"
#include "devproxy/hal/host_module/descriptor.h"

namespace devproxy::hal::cuda {

namespace {

constexpr size_t kLinkLogBytes = 16u << 10;

}  // namespace

// `place` is not asked: the driver chooses where a module's variables lie, and no call moves them. See variables().
StatusOr<ModuleRef> CudaSpace::load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) {
  if (names_executor(image, image_bytes)) {
    if (!config_.framework)
      return Status(
          kNotSupported,
          "a framework's operators need the process's memory in the context of the framework's runtime, and this "
          "process began without: import the framework before the first CUDA call");
    context_->enter();
    auto executor = HostModule::load(
        image, image_bytes,
        {device_.ordinal, device_.ordinal, !device_.host_executor, device_.folder, config_, &owner_}, place);
    if (!executor.ok()) return std::move(executor).status();
    std::lock_guard lock(modules_mu_);
    executors_.push_back(*executor);
    return ModuleRef(*executor);
  }
  auto module = CudaModule::load(context_, image, image_bytes);
  if (!module.ok()) return std::move(module).status();
  std::lock_guard lock(modules_mu_);
  std::erase_if(modules_, [](const std::weak_ptr<CudaModule>& m) { return m.expired(); });
  modules_.push_back(*module);
  return ModuleRef(*module);
}

StatusOr<FunctionRef> CudaSpace::get_function(const ModuleRef& module, const std::string& name, FunctionInfo* info) {
  if (is_executor(module)) {
    auto function = HostFunction::get(std::static_pointer_cast<HostModule>(module), name);
    if (!function.ok()) return std::move(function).status();
    info->max_threads = 1024;
    return FunctionRef(*function);
  }
  auto function = CudaFunction::get(std::static_pointer_cast<CudaModule>(module), name, info);
  if (!function.ok()) return std::move(function).status();
  return FunctionRef(*function);
}

// The address of a variable is the driver's choice, so another server may have it elsewhere. Kernels find it there;
// a job that was told the first address is refused by the restore.
StatusOr<Space::Global> CudaSpace::get_global(const ModuleRef& ref, const std::string& name) {
  if (is_executor(ref)) return Status(kNotFound, "an executor has no global '" + name + "'");
  const auto& module = static_cast<const CudaModule&>(*ref);
  const Driver& cu = context_->enter();
  CUdeviceptr addr = 0;
  size_t bytes = 0;
  if (Status s = cu.status(cu.cuModuleGetGlobal(&addr, &bytes, module.handle(), name.c_str()), cu.cuModuleGetGlobal,
                           "looking for global '" + name + "'");
      !s.ok())
    return s;
  return Global{addr, bytes};
}

std::vector<Space::Global> CudaSpace::globals(const ModuleRef&) { return {}; }  // nothing was placed

StatusOr<std::vector<Space::Variable>> CudaSpace::variables(const ModuleRef& ref) {
  if (is_executor(ref)) return std::vector<Variable>{};
  const auto& module = static_cast<const CudaModule&>(*ref);
  if (!module.unlisted().ok()) return Status(module.unlisted());
  return std::vector<Variable>(module.variables());
}

bool CudaSpace::portable(const ModuleRef& module) { return is_executor(module); }

// A framework's kernels print where an assertion of theirs fails, and that is all.
bool CudaSpace::prints(const ModuleRef& ref) {
  if (is_executor(ref)) return true;
  return static_cast<const CudaModule&>(*ref).prints();
}

StatusOr<std::vector<std::string>> CudaSpace::function_names(const ModuleRef& module) {
  if (is_executor(module))
    return Status(kNotSupported, "an executor's kernels are a framework's operators: ask by name");
  return static_cast<const CudaModule&>(*module).function_names();
}

StatusOr<std::vector<uint8_t>> CudaSpace::save_module(const ModuleRef& module) {
  if (!is_executor(module)) return std::vector<uint8_t>{};
  context_->enter();
  return static_cast<const HostModule&>(*module).save_state();
}

Status CudaSpace::load_module_state(const ModuleRef& module, const uint8_t* from, size_t bytes) {
  if (!is_executor(module)) return {kNotSupported, "only an executor has a state"};
  context_->enter();
  return static_cast<const HostModule&>(*module).load_state(from, bytes);
}

Status CudaSpace::link(const std::vector<LinkOption>& options, const std::vector<LinkInput>& inputs, LinkOutput* out) {
  const Driver& cu = context_->enter();
  if (!cu.cuLinkCreate.function || inputs.empty())
    return cu.status(cu.cuLinkCreate.function ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED, cu.cuLinkCreate, "linking");
  // The job's own log buffers are in another process; these take their place.
  std::vector<char> info(kLinkLogBytes), error(kLinkLogBytes);
  std::vector<CUjit_option> ids = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER,
                                   CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  // cuda.h: a number is passed in the pointer itself. The driver writes the sizes back, so the list lives until the
  // end.
  std::vector<void*> values = {info.data(), reinterpret_cast<void*>(kLinkLogBytes - 1), error.data(),
                               reinterpret_cast<void*>(kLinkLogBytes - 1)};
  for (const LinkOption& option : options) {
    ids.push_back(static_cast<CUjit_option>(option.id));
    values.push_back(reinterpret_cast<void*>(option.value));
  }
  CUlinkState state = nullptr;
  Status s = cu.status(cu.cuLinkCreate(static_cast<unsigned>(ids.size()), ids.data(), values.data(), &state),
                       cu.cuLinkCreate, "beginning a link");
  if (!s.ok()) return s;
  for (const LinkInput& input : inputs) {
    // PTX is text: the driver wants its NUL counted, and the caller may not have counted it.
    std::vector<uint8_t> data(input.data, input.data + input.bytes);
    if (input.type == CU_JIT_INPUT_PTX && data.back() != 0) data.push_back(0);
    s = cu.status(cu.cuLinkAddData(state, static_cast<CUjitInputType>(input.type), data.data(), data.size(),
                                   input.name.empty() ? nullptr : input.name.c_str(), 0, nullptr, nullptr),
                  cu.cuLinkAddData, "linking '" + input.name + "'");
    if (!s.ok()) break;
  }
  void* image = nullptr;
  size_t bytes = 0;
  if (s.ok()) s = cu.status(cu.cuLinkComplete(state, &image, &bytes), cu.cuLinkComplete, "linking");
  if (s.ok()) out->image.assign(static_cast<uint8_t*>(image), static_cast<uint8_t*>(image) + bytes);
  (void)cu.cuLinkDestroy(state);
  out->info = info.data();
  out->error = error.data();
  return s;
}

Status CudaSpace::tensor_map(const TensorMapArgs& a, uint8_t (&out)[kTensorMapBytes]) {
  const Driver& cu = context_->enter();
  CUtensorMap map;
  static_assert(sizeof map == sizeof out);
  std::memcpy(&map, a.map, sizeof map);
  void* const address = reinterpret_cast<void*>(a.address);
  const auto* const dim = reinterpret_cast<const cuuint64_t*>(a.dim);
  const cuuint64_t* const strides = a.has_strides ? reinterpret_cast<const cuuint64_t*>(a.strides) : nullptr;
  const auto type = static_cast<CUtensorMapDataType>(a.data_type);
  const auto interleave = static_cast<CUtensorMapInterleave>(a.interleave);
  const auto swizzle = static_cast<CUtensorMapSwizzle>(a.swizzle);
  const auto promotion = static_cast<CUtensorMapL2promotion>(a.l2_promotion);
  const auto fill = static_cast<CUtensorMapFloatOOBfill>(a.oob_fill);
  Status s;
  switch (static_cast<TensorMapKind>(a.kind)) {
    case TensorMapKind::kTiled:
      s = cu.status(cu.cuTensorMapEncodeTiled(&map, type, a.rank, address, dim, strides, a.box, a.element_strides,
                                              interleave, swizzle, promotion, fill),
                    cu.cuTensorMapEncodeTiled, "encoding a tensor map");
      break;
    case TensorMapKind::kIm2col:
      s = cu.status(cu.cuTensorMapEncodeIm2col(&map, type, a.rank, address, dim, strides, a.lower, a.upper, a.channels,
                                               a.pixels, a.element_strides, interleave, swizzle, promotion, fill),
                    cu.cuTensorMapEncodeIm2col, "encoding a tensor map");
      break;
    case TensorMapKind::kReplaceAddress:
      s = cu.status(cu.cuTensorMapReplaceAddress(&map, address), cu.cuTensorMapReplaceAddress,
                    "replacing a tensor map's address");
      break;
  }
  if (s.ok()) std::memcpy(out, &map, sizeof map);
  return s;
}

bool CudaSpace::in_variable(uint64_t addr, uint64_t bytes) {
  std::lock_guard lock(modules_mu_);
  return std::any_of(modules_.begin(), modules_.end(), [&](const std::weak_ptr<CudaModule>& m) {
    const auto module = m.lock();
    return module && module->has(addr, bytes);
  });
}

Status CudaSpace::set_attribute(const FunctionRef& ref, uint32_t attribute, int32_t value) {
  if (is_executor(ref)) return {kNotSupported, "an operator has no attributes to set"};
  const auto& function = static_cast<const CudaFunction&>(*ref);
  const Driver& cu = context_->enter();
  return cu.status(cu.cuFuncSetAttribute(function.handle, static_cast<CUfunction_attribute>(attribute), value),
                   cu.cuFuncSetAttribute,
                   "setting attribute " + std::to_string(attribute) + " of '" + function.name + "'");
}

StatusOr<int64_t> CudaSpace::occupancy(const FunctionRef& ref, const OccupancyQuery& query) {
  if (is_executor(ref)) return Status(kNotSupported, "an operator is many kernels, so it has no occupancy");
  const auto& function = static_cast<const CudaFunction&>(*ref);
  const Driver& cu = context_->enter();
  const std::string doing = "asking how much of '" + function.name + "' runs at once";
  auto attributes = driver_attributes(query.attributes, query.n_attributes);
  const CUlaunchConfig config = launch_config(query.grid, query.block, query.shared_bytes, nullptr, &attributes);
  const int threads = static_cast<int>(query.block[0]), blocks = static_cast<int>(query.grid[0]);
  int count = 0;
  size_t bytes = 0;
  Status s;
  switch (query.kind) {
    case OccupancyKind::kActiveBlocks:
      s = cu.status(cu.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&count, function.handle, threads,
                                                                            query.shared_bytes, query.flags),
                    cu.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, doing);
      break;
    case OccupancyKind::kAvailableShared:
      s = cu.status(cu.cuOccupancyAvailableDynamicSMemPerBlock(&bytes, function.handle, blocks, threads),
                    cu.cuOccupancyAvailableDynamicSMemPerBlock, doing);
      break;
    case OccupancyKind::kActiveClusters:
      s = cu.status(cu.cuOccupancyMaxActiveClusters(&count, function.handle, &config), cu.cuOccupancyMaxActiveClusters,
                    doing);
      break;
    case OccupancyKind::kMaxClusterSize:
      s = cu.status(cu.cuOccupancyMaxPotentialClusterSize(&count, function.handle, &config),
                    cu.cuOccupancyMaxPotentialClusterSize, doing);
      break;
  }
  if (!s.ok()) return s;
  return query.kind == OccupancyKind::kAvailableShared ? static_cast<int64_t>(bytes) : int64_t{count};
}

}  // namespace devproxy::hal::cuda
