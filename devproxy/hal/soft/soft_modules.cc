// SPDX-License-Identifier: Apache-2.0
// The space's modules: what is in them, and what of a function runs at once on a multiprocessor.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda_number.gen.h"
#include "devproxy/hal/soft/soft_space.h"

namespace devproxy::hal::soft {

namespace {

// As soft_device.cc says them to programs.
constexpr int32_t kSharedPerBlock = 49152, kSharedPerBlockOptin = 101376;
constexpr uint32_t kThreadsPerMultiprocessor = 2048, kSharedPerMultiprocessor = 167936;
// Those of clusters follow.
constexpr uint32_t kLastPlainAttribute = cuda_number::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;

}  // namespace

StatusOr<ModuleRef> SoftSpace::load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) {
  auto module =
      HostModule::load(image, image_bytes,
                       {device_.ordinal, device_.ordinal, /*on_cuda=*/false, device_.folder, config_, &owner_}, place);
  if (!module.ok()) return std::move(module).status();
  return ModuleRef(*module);
}

StatusOr<std::vector<std::string>> SoftSpace::function_names(const ModuleRef& ref) {
  const char* const* name = std::static_pointer_cast<HostModule>(ref)->function_names();
  if (!name)
    return Status(kNotSupported,
                  "the module does not list its kernels (symbol devproxy_soft_function_names): ask for "
                  "them by name");
  std::vector<std::string> names;
  for (; *name; name++) names.emplace_back(*name);
  return names;
}

StatusOr<FunctionRef> SoftSpace::get_function(const ModuleRef& ref, const std::string& name, FunctionInfo* info) {
  auto function = HostFunction::get(std::static_pointer_cast<HostModule>(ref), name);
  if (!function.ok()) return std::move(function).status();
  const devproxy_soft_function& entry = (*function)->entry;
  info->max_threads = entry.max_threads ? entry.max_threads : 1024;
  info->shared_bytes = entry.shared_bytes;
  info->regs = 32;
  info->params.clear();
  for (uint32_t i = 0; i < entry.n_params; i++) info->params.push_back({entry.params[i].offset, entry.params[i].size});
  // By CUfunction_attribute: threads, static shared, constant, local, registers, PTX and binary version, cache mode,
  // dynamic shared, carve-out (-1: the default), then those of clusters, which there are none of.
  const int32_t dynamic =
      kSharedPerBlock - static_cast<int32_t>(std::min<uint32_t>(entry.shared_bytes, kSharedPerBlock));
  info->attributes = {static_cast<int32_t>(info->max_threads),
                      static_cast<int32_t>(info->shared_bytes),
                      0,
                      0,
                      static_cast<int32_t>(info->regs),
                      80,
                      80,
                      0,
                      dynamic,
                      -1,
                      0,
                      0,
                      0,
                      0,
                      0,
                      0};
  return FunctionRef(*function);
}

StatusOr<Space::Global> SoftSpace::get_global(const ModuleRef& ref, const std::string& name) {
  for (const auto& global : static_cast<const HostModule&>(*ref).globals())
    if (global.name == name) return global.place;
  return Status(kNotFound, "the module has no global '" + name + "'");
}

std::vector<Space::Global> SoftSpace::globals(const ModuleRef& ref) {
  std::vector<Global> all;
  for (const auto& global : static_cast<const HostModule&>(*ref).globals()) all.push_back(global.place);
  return all;
}

Status SoftSpace::set_attribute(const FunctionRef&, uint32_t attribute, int32_t) {
  if (attribute > kLastPlainAttribute)
    return {kNotSupported, "the software GPU has no thread block clusters, so no attributes of them"};
  return {};  // hints; nothing to tune here
}

// A kernel here is one function call for the whole grid, so any grid runs at once, also a cooperative one. The answers
// are those of the chip that the device's attributes describe, so that a program sizes its grids as it would there.
StatusOr<int64_t> SoftSpace::occupancy(const FunctionRef& ref, const OccupancyQuery& query) {
  const devproxy_soft_function& entry = static_cast<const HostFunction&>(*ref).entry;
  const uint32_t most = entry.max_threads ? entry.max_threads : 1024;
  switch (query.kind) {
    case OccupancyKind::kActiveBlocks: {
      int64_t blocks = query.block[0] > most ? 0 : kThreadsPerMultiprocessor / query.block[0];
      if (const uint64_t wanted = query.shared_bytes + entry.shared_bytes)
        blocks = std::min(blocks, static_cast<int64_t>(kSharedPerMultiprocessor / wanted));
      return blocks;
    }
    case OccupancyKind::kAvailableShared: {
      if (query.grid[0] == 0 || query.block[0] > most ||
          uint64_t{query.block[0]} * query.grid[0] > kThreadsPerMultiprocessor)
        return Status(kInvalidValue, "so many blocks do not fit a multiprocessor");
      const int64_t each = std::min<int64_t>(kSharedPerMultiprocessor / query.grid[0], kSharedPerBlockOptin);
      return std::max<int64_t>(0, each - entry.shared_bytes);
    }
    case OccupancyKind::kActiveClusters:
    case OccupancyKind::kMaxClusterSize: break;
  }
  return Status(kNotSupported, "the software GPU has no thread block clusters");
}

}  // namespace devproxy::hal::soft
