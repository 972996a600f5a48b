// Launches: everything that can be checked without the device is checked here; then one message, nobody waits.
#include <string.h>

#include "devproxy/interceptors/launch/client.h"

#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/graph/client.h"

namespace devproxy::sa::launch {

using client::DeviceState;
using client::StreamObj;
using module::FunctionObj;
using wire::Opcode;

namespace {

constexpr size_t kMaxPacked = 32764;  // bytes; CUDA's own limit for kernelParams

// kernelParams has no lengths: the layout came with the function. The parameters are copied now, so the caller's
// variables may die when the call returns.
void pack(const FunctionObj& f, void* const* kernelParams, uint8_t* to) {
  size_t at = 0;
  const module::Param* p = f.params.data();
  for (size_t i = 0, n = f.params.size(); i < n; ++i, ++p) {
    if (p->offset > at) memset(to + at, 0, p->offset - at);  // padding: never a former message's bytes
    // Pointers and ints are nearly all there is; a constant length is one move.
    switch (p->size) {
      case 8: memcpy(to + p->offset, kernelParams[i], 8); break;
      case 4: memcpy(to + p->offset, kernelParams[i], 4); break;
      default: memcpy(to + p->offset, kernelParams[i], p->size);
    }
    at = p->offset + p->size;
  }
}

// The block of `extra`, verbatim; false where it is malformed or shorter than the parameters.
bool block_of(const FunctionObj& f, void** extra, const void** data, size_t* bytes) {
  const void* buffer = nullptr;
  const size_t* length = nullptr;
  for (void** e = extra; *e != CU_LAUNCH_PARAM_END; e += 2) {
    if (*e == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      buffer = e[1];
    } else if (*e == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      length = static_cast<const size_t*>(e[1]);
    } else {
      return false;
    }
  }
  if (!buffer || !length || *length < f.param_bytes) return false;
  *data = buffer;
  *bytes = *length;
  return true;
}

}  // namespace

int32_t check(const FunctionObj& f, const Geometry& g, const DeviceState& d) {
  for (int i = 0; i < 3; ++i)
    if (g.grid[i] == 0 || g.block[i] == 0) return kInvalidValue;
  const int32_t* a = const_cast<DeviceState&>(d).conn().props().attributes;
  for (int i = 0; i < 3; ++i) {
    if (g.block[i] > static_cast<unsigned>(a[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i])) return kInvalidValue;
    if (g.grid[i] > static_cast<unsigned>(a[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i])) return kInvalidValue;
  }
  const uint64_t threads = static_cast<uint64_t>(g.block[0]) * g.block[1] * g.block[2];
  if (threads > static_cast<unsigned>(a[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK])) return kInvalidValue;
  if (threads > f.max_threads) return kLaunchOutOfResources;
  if (g.shared > static_cast<unsigned>(f.max_dynamic_shared.load(std::memory_order_relaxed))) return kInvalidValue;
  return kOk;
}

int32_t parameter_block(const FunctionObj& f, void* const* kernelParams, void** extra, std::vector<uint8_t>* block) {
  if (kernelParams || (!extra && f.params.empty())) {
    if (extra || f.param_bytes > kMaxPacked) return kInvalidValue;
    for (size_t i = 0; i < f.params.size(); ++i)
      if (!kernelParams[i]) return kInvalidValue;
    block->resize(f.param_bytes);
    pack(f, kernelParams, block->data());
    return kOk;
  }
  const void* data = nullptr;
  size_t bytes = 0;
  if (!extra || !block_of(f, extra, &data, &bytes)) return kInvalidValue;
  const auto* p = static_cast<const uint8_t*>(data);
  block->assign(p, p + bytes);
  return kOk;
}

namespace {

CUresult launch(CUfunction hfunc, const Geometry& g, CUstream hStream, void** kernelParams, void** extra) {
  uint64_t value = 0;
  int32_t error = kOk;
  const FunctionObj* f = module::function_of(bits(hfunc), &value, &error);
  if (!f) return result(error);
  DP_STREAM(hStream, s, d);
  if (d->ordinal() != f->device) return CUDA_ERROR_INVALID_HANDLE;
  if (const int32_t rc = check(*f, g, *d); rc != kOk) return result(rc);
  if (graph::capturing()) {
    CUresult rc = CUDA_SUCCESS;
    if (graph::capture_kernel(s, hfunc, g, kernelParams, extra, &rc)) return rc;
  }
  if (const int32_t late = d->conn().take_late_error(); __builtin_expect(late != kOk, 0)) return result(late);

  wire::LAUNCH_req req{VHandle{value},
                       VHandle{s->handle.load(std::memory_order_relaxed)},
                       g.grid[0],
                       g.grid[1],
                       g.grid[2],
                       g.block[0],
                       g.block[1],
                       g.block[2],
                       g.shared,
                       0,
                       0,
                       0};
  uint64_t end = 0;
  int32_t rc;
  if (kernelParams || (!extra && f->params.empty())) {
    if (extra || f->param_bytes > kMaxPacked) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < f->params.size(); ++i)
      if (!kernelParams[i]) return CUDA_ERROR_INVALID_VALUE;
    req.bulk_bytes = f->param_bytes;
    rc = d->conn().post_in_place(
        Opcode::LAUNCH, req, f->param_bytes, [&](uint8_t* to) { pack(*f, kernelParams, to); }, &end);
  } else if (extra) {
    const void* data = nullptr;
    size_t bytes = 0;
    if (!block_of(*f, extra, &data, &bytes)) return CUDA_ERROR_INVALID_VALUE;
    rc = d->conn().post_bulk(Opcode::LAUNCH, req, {data, bytes}, &end);
  } else {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (rc == kOk) s->note(end);
  return result(rc);
}

}  // namespace

CUresult cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                        unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                        unsigned int sharedMemBytes, CUstream hStream, void** kernelParams, void** extra) {
  return launch(f, {{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes}, hStream,
                kernelParams, extra);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** kernelParams, void** extra) {
  // Attributes steer scheduling on a real chip (clusters, programmatic serialization); one that changes meaning is
  // refused, never dropped.
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttributeID id = config->attrs[i].id;
    const bool hint = id == CU_LAUNCH_ATTRIBUTE_IGNORE || id == CU_LAUNCH_ATTRIBUTE_PRIORITY ||
                      id == CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW ||
                      id == CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY ||
                      id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ||
                      id == CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
    if (!hint) {
      client::log(client::Level::kWarn, "cuLaunchKernelEx refuses launch attribute %d on the software GPU",
                  static_cast<int>(id));
      return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return launch(f,
                {{config->gridDimX, config->gridDimY, config->gridDimZ},
                 {config->blockDimX, config->blockDimY, config->blockDimZ},
                 config->sharedMemBytes},
                config->hStream, kernelParams, extra);
}

CUresult cuFuncGetAttribute(int* pi, CUfunction_attribute attrib, CUfunction hfunc) {
  uint64_t value = 0;
  int32_t error = kOk;
  const FunctionObj* f = module::function_of(bits(hfunc), &value, &error);
  if (!f) return result(error);
  switch (attrib) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *pi = static_cast<int>(f->max_threads); return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *pi = static_cast<int>(f->shared_bytes); return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *pi = static_cast<int>(f->regs); return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *pi = 80; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *pi = f->max_dynamic_shared; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *pi = -1; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: *pi = 0; return CUDA_SUCCESS;
    default:
      if (static_cast<unsigned>(attrib) >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
      *pi = 0;
      return CUDA_SUCCESS;
  }
}

CUresult cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value) {
  uint64_t own = 0;
  int32_t error = kOk;
  FunctionObj* f = module::function_of(bits(hfunc), &own, &error);
  if (!f) return result(error);
  DeviceState* d = client::device_state_if_attached(f->device);
  switch (attrib) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      if (value < 0 || value > d->conn().props().attributes[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN])
        return CUDA_ERROR_INVALID_VALUE;
      f->max_dynamic_shared = value;
      break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      if (value < -1 || value > 100) return CUDA_ERROR_INVALID_VALUE;
      break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  return result(d->conn().post(Opcode::FUNCTION_SET_ATTR,
                               wire::FUNCTION_SET_ATTR_req{VHandle{own}, static_cast<uint32_t>(attrib), value}));
}

CUresult cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config) {
  uint64_t value = 0;
  int32_t error = kOk;
  if (!module::function_of(bits(hfunc), &value, &error)) return result(error);
  return static_cast<unsigned>(config) > CU_FUNC_CACHE_PREFER_EQUAL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuFuncGetModule(CUmodule* hmod, CUfunction hfunc) {
  uint64_t value = 0;
  int32_t error = kOk;
  const FunctionObj* f = module::function_of(bits(hfunc), &value, &error);
  if (!f) return result(error);
  *hmod = handle<CUmodule>(f->module);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char** name, CUfunction hfunc) {
  uint64_t value = 0;
  int32_t error = kOk;
  const FunctionObj* f = module::function_of(bits(hfunc), &value, &error);
  if (!f) return result(error);
  *name = f->name.c_str();
  return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t* paramOffset, size_t* paramSize) {
  return module::cuKernelGetParamInfo(handle<CUkernel>(bits(func)), paramIndex, paramOffset, paramSize);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* numBlocks, CUfunction func, int blockSize,
                                                     size_t dynamicSMemSize) {
  return launch::cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, func, blockSize, dynamicSMemSize, 0);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* numBlocks, CUfunction func, int blockSize,
                                                              size_t dynamicSMemSize, unsigned int flags) {
  uint64_t value = 0;
  int32_t error = kOk;
  const FunctionObj* f = module::function_of(bits(func), &value, &error);
  if (!f) return result(error);
  if (blockSize <= 0 || (flags & ~1u)) return CUDA_ERROR_INVALID_VALUE;
  const int32_t* a = client::device_state_if_attached(f->device)->conn().props().attributes;
  const int threads = a[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR];
  const auto shared = static_cast<size_t>(a[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR]);
  const size_t wanted = dynamicSMemSize + f->shared_bytes;
  int blocks = blockSize > static_cast<int>(f->max_threads) ? 0 : threads / blockSize;
  if (wanted) blocks = std::min<int>(blocks, static_cast<int>(shared / wanted));
  *numBlocks = blocks;
  return CUDA_SUCCESS;
}

}  // namespace devproxy::sa::launch
