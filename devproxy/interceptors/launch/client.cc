// SPDX-License-Identifier: Apache-2.0
// Launches: everything that can be checked without the device is checked here; then one message, nobody waits.
#include "devproxy/interceptors/launch/client.h"

#include <string.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "devproxy/csrc/args/launch.h"
#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/graph/hooks.h"
#include "devproxy/interceptors/memory/client.h"

namespace devproxy::sa::launch {

using client::DeviceState;
using client::StreamObj;
using module::FunctionObj;
using wire::Opcode;

namespace {

constexpr size_t kMaxPacked = 32764;  // bytes; CUDA's own limit for kernelParams

// kernelParams has no lengths: the layout came with the function. The parameters are copied now, so the caller's
// variables may die when the call returns.
[[gnu::always_inline]] inline void pack(const FunctionObj& f, void* const* kernelParams, uint8_t* to) {
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

// The attributes of one launch that travel.
struct Attributes {
  LaunchAttribute list[kMaxLaunchAttributes];
  uint32_t n = 0;
  bool cooperative = false;
  size_t bytes() const { return n * sizeof(LaunchAttribute); }
};

int32_t device_attribute(DeviceState& d, CUdevice_attribute which) { return d.conn().props().attributes[which]; }

CUresult refuse_attribute(CUlaunchAttributeID id, const char* why) {
  client::log(client::Level::kWarn, "a launch with attribute %d is refused: %s", static_cast<int>(id), why);
  return CUDA_ERROR_NOT_SUPPORTED;
}

// Two limits of cuda.h that no device attribute names: of a cluster that every device takes, and of any cluster.
constexpr uint64_t kPortableClusterBlocks = 8, kMaxClusterBlocks = 16;

CUresult check_cluster(const FunctionObj& f, DeviceState& d, const CUlaunchConfig& c, CUlaunchAttributeID id,
                       const unsigned (&size)[3]) {
  if (!device_attribute(d, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH))
    return refuse_attribute(id, "this device has no thread block clusters (CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH is 0)");
  const unsigned grid[3] = {c.gridDimX, c.gridDimY, c.gridDimZ};
  for (int i = 0; i < 3; ++i)
    if (size[i] == 0 || size[i] > kMaxClusterBlocks || grid[i] % size[i] != 0) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
  const bool any = f.attributes[CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] > 0;
  if (uint64_t{size[0]} * size[1] * size[2] > (any ? kMaxClusterBlocks : kPortableClusterBlocks))
    return CUDA_ERROR_INVALID_CLUSTER_SIZE;
  return CUDA_SUCCESS;
}

// Decides which attributes travel. An attribute that changes the meaning of a launch is kept or refused, never dropped. One
// that names another object is checked here or refused, since the device does not know the job's handles.
CUresult take_attributes(const FunctionObj& f, DeviceState& d, const CUlaunchConfig& config, Attributes* out) {
  if (config.numAttrs && !config.attrs) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& a = config.attrs[i];
    CUresult rc = CUDA_SUCCESS;
    switch (a.id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE: continue;
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        if (a.value.cooperative == 0) continue;
        if (!device_attribute(d, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH))
          return refuse_attribute(
              a.id, "this device has no cooperative launches (CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH is 0)");
        out->cooperative = true;
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        rc = check_cluster(f, d, config, a.id, {a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z});
        break;
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
        rc = check_cluster(
            f, d, config, a.id,
            {a.value.preferredClusterDim.x, a.value.preferredClusterDim.y, a.value.preferredClusterDim.z});
        break;
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW: rc = check_window(d, a.value.accessPolicyWindow); break;
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      case CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING: break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
        return refuse_attribute(a.id, "an event that a kernel records by itself is not followed; use cuEventRecord");
      case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
        return refuse_attribute(a.id, "graph nodes are not updated from the device");
      default: return refuse_attribute(a.id, "nobody has compared it with its header yet");
    }
    if (rc != CUDA_SUCCESS) return rc;
    if (out->n == kMaxLaunchAttributes) return CUDA_ERROR_INVALID_VALUE;
    LaunchAttribute& to = out->list[out->n++];
    to = {};
    to.id = static_cast<uint32_t>(a.id);
    static_assert(sizeof(a.value) == sizeof(to.value));
    memcpy(to.value, &a.value, sizeof(to.value));
  }
  return CUDA_SUCCESS;
}

// One question about a function, asked once.
int32_t occupancy(FunctionObj* f, uint64_t handle, OccupancyKind kind, uint32_t flags, uint64_t shared,
                  const unsigned (&grid)[3], const unsigned (&block)[3], const Attributes& attributes, int64_t* out) {
  std::string rest(reinterpret_cast<const char*>(grid), sizeof(grid));
  rest.append(reinterpret_cast<const char*>(block), sizeof(block));
  rest.append(reinterpret_cast<const char*>(attributes.list), attributes.bytes());
  const module::OccupancyCache::Question question{static_cast<uint32_t>(kind), flags, shared, std::move(rest)};
  {
    std::lock_guard lock(f->occupancy.mu);
    if (const auto it = f->occupancy.answers.find(question); it != f->occupancy.answers.end()) {
      *out = it->second;
      return kOk;
    }
  }
  wire::OCCUPANCY_req req{VHandle{handle},
                          static_cast<uint32_t>(kind),
                          flags,
                          shared,
                          grid[0],
                          grid[1],
                          grid[2],
                          block[0],
                          block[1],
                          block[2],
                          0,
                          0};
  wire::OCCUPANCY_rep rep{};
  client::Reply reply{&rep, sizeof(rep)};
  DeviceState* d = client::device_state_if_attached(f->device);
  const int32_t rc = d->conn().call_bulk(Opcode::OCCUPANCY, req, {attributes.list, attributes.bytes()}, &reply);
  if (rc != kOk) return rc;
  *out = rep.value;
  std::lock_guard lock(f->occupancy.mu);
  if (f->occupancy.answers.size() >= 4096) f->occupancy.answers.clear();
  f->occupancy.answers[question] = rep.value;
  return kOk;
}

// A cooperative grid runs as a whole or not at all: its blocks may wait for one another.
int32_t check_cooperative(FunctionObj* f, uint64_t handle, DeviceState& d, const Geometry& g) {
  int64_t per_multiprocessor = 0;
  const unsigned threads = g.block[0] * g.block[1] * g.block[2];
  if (const int32_t rc = occupancy(f, handle, OccupancyKind::kActiveBlocks, 0, g.shared, {1, 1, 1}, {threads, 1, 1},
                                   Attributes{}, &per_multiprocessor);
      rc != kOk)
    return rc;
  const auto room = static_cast<uint64_t>(per_multiprocessor) *
                    static_cast<uint64_t>(device_attribute(d, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
  uint64_t blocks = uint64_t{g.grid[0]} * g.grid[1];  // both are below 2^32
  if (__builtin_mul_overflow(blocks, uint64_t{g.grid[2]}, &blocks)) return kCooperativeLaunchTooLarge;
  return blocks > room ? kCooperativeLaunchTooLarge : kOk;
}

// The caller's own parameter block; false where `extra` does not name one that is long enough.
bool block_of(const FunctionObj& f, void** extra, client::Bulk* out) {
  const void* buffer = nullptr;
  const size_t* bytes = nullptr;
  for (void** e = extra; *e != CU_LAUNCH_PARAM_END; e += 2) {
    if (*e == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      buffer = e[1];
    } else if (*e == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      bytes = static_cast<const size_t*>(e[1]);
    } else {
      return false;
    }
  }
  if (!buffer || !bytes || *bytes < f.param_bytes) return false;
  *out = {buffer, *bytes};
  return true;
}

}  // namespace

// A cache hint for a range of device memory. cuda.h: it has a ratio, and a miss is normal or streaming; a window of no bytes
// is none, whatever else it says. The end is not checked: cuda.h lets the driver align and shorten the window.
CUresult check_window(DeviceState& d, const CUaccessPolicyWindow& w) {
  if (w.num_bytes == 0) return CUDA_SUCCESS;
  if (!(w.hitRatio >= 0 && w.hitRatio <= 1) || w.hitProp < CU_ACCESS_PROPERTY_NORMAL ||
      w.hitProp > CU_ACCESS_PROPERTY_PERSISTING ||
      (w.missProp != CU_ACCESS_PROPERTY_NORMAL && w.missProp != CU_ACCESS_PROPERTY_STREAMING))
    return CUDA_ERROR_INVALID_VALUE;
  const auto addr = reinterpret_cast<uint64_t>(w.base_ptr);
  const client::Place place = client::place_of(addr);
  uint64_t end;
  if (place.device != d.ordinal() || place.pinned || !memory::known(addr, 1) ||
      __builtin_add_overflow(addr, w.num_bytes, &end))
    return CUDA_ERROR_INVALID_VALUE;
  const int32_t most = device_attribute(d, CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE);
  return most > 0 && w.num_bytes > static_cast<uint64_t>(most) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
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
  client::Bulk own;
  if (!extra || !block_of(f, extra, &own)) return kInvalidValue;
  const auto* from = static_cast<const uint8_t*>(own.data);
  block->assign(from, from + own.bytes);
  return kOk;
}

int32_t attributes(FunctionObj* f, uint64_t handle, const Geometry& g, const CUlaunchAttribute* list, unsigned n,
                   std::vector<LaunchAttribute>* out) {
  DeviceState* d = client::device_state_if_attached(f->device);
  CUlaunchConfig config{};
  config.gridDimX = g.grid[0], config.gridDimY = g.grid[1], config.gridDimZ = g.grid[2];
  config.attrs = const_cast<CUlaunchAttribute*>(list);
  config.numAttrs = n;
  Attributes taken;
  if (const CUresult rc = take_attributes(*f, *d, config, &taken); rc != CUDA_SUCCESS) return rc;
  if (taken.cooperative)
    if (const int32_t rc = check_cooperative(f, handle, *d, g); rc != kOk) return rc;
  out->assign(taken.list, taken.list + taken.n);
  return kOk;
}

namespace {

// Precondition: everything is checked but the parameters.
[[gnu::always_inline]] inline CUresult post_launch(const FunctionObj& f, uint64_t value, const Geometry& g,
                                                   DeviceState* d, StreamObj* s, void** kernelParams, void** extra) {
  if (const int32_t late = d->conn().take_late_error(); __builtin_expect(late != kOk, 0)) return result(late);
  auto req = request<wire::LAUNCH_req>(value, VHandle{s->handle.load(std::memory_order_relaxed)}, g);
  uint64_t end = 0;
  int32_t rc;
  if (kernelParams || (!extra && f.params.empty())) {
    if (extra || f.param_bytes > kMaxPacked) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < f.params.size(); ++i)
      if (!kernelParams[i]) return CUDA_ERROR_INVALID_VALUE;
    req.bulk_bytes = f.param_bytes;
    rc = d->conn().post_in_place(
        Opcode::LAUNCH, req, f.param_bytes, [&](uint8_t* to) { pack(f, kernelParams, to); }, &end);
  } else if (extra) {
    client::Bulk block;
    if (!block_of(f, extra, &block)) return CUDA_ERROR_INVALID_VALUE;
    rc = d->conn().post_bulk(Opcode::LAUNCH, req, block, &end);
  } else {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (rc == kOk) s->note(end);
  d->note_launch();
  return result(rc);
}

// A launch that may have attributes: those that travel do so in front of the parameters. Not inlined: the list is 2.5
// KB of stack, which an ordinary launch shall not have.
[[gnu::noinline]] CUresult launch_ex(FunctionObj* f, uint64_t value, const Geometry& g, DeviceState* d, StreamObj* s,
                                     void** kernelParams, void** extra, const CUlaunchConfig& config) {
  Attributes attributes;
  if (const CUresult rc = take_attributes(*f, *d, config, &attributes); rc != CUDA_SUCCESS) return rc;
  if (attributes.cooperative)
    if (const int32_t rc = check_cooperative(f, value, *d, g); rc != kOk) return result(rc);
  if (attributes.n == 0) return post_launch(*f, value, g, d, s, kernelParams, extra);
  if (const int32_t late = d->conn().take_late_error(); late != kOk) return result(late);
  std::vector<uint8_t> bulk(attributes.bytes()), block;
  memcpy(bulk.data(), attributes.list, attributes.bytes());
  if (const int32_t rc = parameter_block(*f, kernelParams, extra, &block); rc != kOk) return result(rc);
  bulk.insert(bulk.end(), block.begin(), block.end());
  auto req = request<wire::LAUNCH_EX_req>(value, VHandle{s->handle.load(std::memory_order_relaxed)}, g, attributes.n);
  uint64_t end = 0;
  const int32_t rc = d->conn().post_bulk(Opcode::LAUNCH_EX, req, {bulk.data(), bulk.size()}, &end);
  if (rc == kOk) s->note(end);
  d->note_launch();
  return result(rc);
}

// config: where the attributes are; nullptr for an ordinary launch. kCapturing: some stream of the process captures.
// Inlined, so that an ordinary one is one function.
template <bool kCapturing = false>
[[gnu::always_inline]] inline CUresult launch(CUfunction hfunc, const Geometry& g, CUstream hStream,
                                              void** kernelParams, void** extra,
                                              const CUlaunchConfig* config = nullptr) {
  uint64_t value = 0;
  int32_t error = kOk;
  FunctionObj* f = module::function_of(bits(hfunc), &value, &error);
  if (!f) return result(error);
  DP_STREAM(hStream, s, d);
  if (d->ordinal() != f->device) return CUDA_ERROR_INVALID_HANDLE;
  if (const int32_t rc = check(*f, g, *d); rc != kOk) return result(rc);
  if constexpr (kCapturing) {
    CUresult rc = CUDA_SUCCESS;
    if (graph::capture_kernel(s, hfunc, g, kernelParams, extra, config, &rc)) return rc;
  }
  if (config && config->numAttrs) return launch_ex(f, value, g, d, s, kernelParams, extra, *config);
  return post_launch(*f, value, g, d, s, kernelParams, extra);
}

}  // namespace

// The three forms of a launch, and the same while some stream captures.

CUresult cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                        unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                        unsigned int sharedMemBytes, CUstream hStream, void** kernelParams, void** extra) {
  return launch(f, {{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes}, hStream,
                kernelParams, extra);
}

CUresult captured::cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                  unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                  unsigned int sharedMemBytes, CUstream hStream, void** kernelParams, void** extra) {
  return launch<true>(f, {{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes}, hStream,
                      kernelParams, extra);
}

namespace {
Geometry geometry_of(const CUlaunchConfig& c) {
  return {{c.gridDimX, c.gridDimY, c.gridDimZ}, {c.blockDimX, c.blockDimY, c.blockDimZ}, c.sharedMemBytes};
}
}  // namespace

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** kernelParams, void** extra) {
  return launch(f, geometry_of(*config), config->hStream, kernelParams, extra, config);
}

CUresult captured::cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** kernelParams, void** extra) {
  return launch<true>(f, geometry_of(*config), config->hStream, kernelParams, extra, config);
}

namespace {
struct Cooperative {
  CUlaunchAttribute attribute{};
  CUlaunchConfig config;

  Cooperative(const Geometry& g, CUstream stream)
      : config{g.grid[0], g.grid[1], g.grid[2], g.block[0], g.block[1], g.block[2], g.shared, stream, &attribute, 1} {
    attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attribute.value.cooperative = 1;
  }
  Cooperative(const Cooperative&) = delete;
};
}  // namespace

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                   unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                   unsigned int sharedMemBytes, CUstream hStream, void** kernelParams) {
  const Cooperative c({{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes}, hStream);
  return launch::cuLaunchKernelEx(&c.config, f, kernelParams, nullptr);
}

CUresult captured::cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                                             unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
                                             unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                                             void** kernelParams) {
  const Cooperative c({{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes}, hStream);
  return captured::cuLaunchKernelEx(&c.config, f, kernelParams, nullptr);
}

CUresult cuFuncGetAttribute(int* pi, CUfunction_attribute attrib, CUfunction hfunc) {
  uint64_t value = 0;
  int32_t error = kOk;
  const FunctionObj* f = module::function_of(bits(hfunc), &value, &error);
  if (!f) return result(error);
  if (static_cast<unsigned>(attrib) >= FunctionObj::kAttributes) return CUDA_ERROR_INVALID_VALUE;
  const int32_t known = f->attributes[attrib].load(std::memory_order_relaxed);
  if (known == FunctionObj::kNoAttribute) return CUDA_ERROR_INVALID_VALUE;
  *pi = known;
  return CUDA_SUCCESS;
}

// The device decides, as the driver does: what it would refuse is refused by this call.
CUresult cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value) {
  uint64_t own = 0;
  int32_t error = kOk;
  FunctionObj* f = module::function_of(bits(hfunc), &own, &error);
  if (!f) return result(error);
  DeviceState* d = client::device_state_if_attached(f->device);
  switch (attrib) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      if (value < 0 || value > device_attribute(*d, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) -
                                   static_cast<int64_t>(f->shared_bytes))
        return CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      if (value < -1 || value > 100) return CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  const int32_t rc = d->conn().call(Opcode::FUNCTION_SET_ATTR,
                                    wire::FUNCTION_SET_ATTR_req{VHandle{own}, static_cast<uint32_t>(attrib), value});
  if (rc != kOk) return result(rc);
  f->attributes[attrib] = value;
  if (attrib == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) f->max_dynamic_shared = value;
  std::lock_guard lock(f->occupancy.mu);
  f->occupancy.answers.clear();
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config) {
  uint64_t value = 0;
  int32_t error = kOk;
  if (!module::function_of(bits(hfunc), &value, &error)) return result(error);
  return static_cast<unsigned>(config) > CU_FUNC_CACHE_PREFER_EQUAL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int* pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice) {
  return launch::cuFuncGetAttribute(pi, attrib, handle<CUfunction>(bits(kernel)));
}

CUresult cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice) {
  return launch::cuFuncSetAttribute(handle<CUfunction>(bits(kernel)), attrib, val);
}

CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice) {
  return launch::cuFuncSetCacheConfig(handle<CUfunction>(bits(kernel)), config);
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
  FunctionObj* f = module::function_of(bits(func), &value, &error);
  if (!f) return result(error);
  if (blockSize <= 0 || (flags & ~1u)) return CUDA_ERROR_INVALID_VALUE;
  int64_t blocks = 0;
  const int32_t rc = occupancy(f, value, OccupancyKind::kActiveBlocks, flags, dynamicSMemSize, {1, 1, 1},
                               {static_cast<unsigned>(blockSize), 1, 1}, Attributes{}, &blocks);
  if (rc == kOk) *numBlocks = static_cast<int>(blocks);
  return result(rc);
}

CUresult cuOccupancyMaxPotentialBlockSize(int* minGridSize, int* blockSize, CUfunction func,
                                          CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize,
                                          int blockSizeLimit) {
  return launch::cuOccupancyMaxPotentialBlockSizeWithFlags(minGridSize, blockSize, func, blockSizeToDynamicSMemSize,
                                                           dynamicSMemSize, blockSizeLimit, 0);
}

// The caller's function gives the shared memory of a block size, so the search is done here: the block size, a multiple
// of the warp, that keeps most threads on a multiprocessor; of several the largest.
CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int* minGridSize, int* blockSize, CUfunction func,
                                                   CUoccupancyB2DSize blockSizeToDynamicSMemSize,
                                                   size_t dynamicSMemSize, int blockSizeLimit, unsigned int flags) {
  uint64_t value = 0;
  int32_t error = kOk;
  const FunctionObj* f = module::function_of(bits(func), &value, &error);
  if (!f) return result(error);
  if (blockSizeLimit < 0) return CUDA_ERROR_INVALID_VALUE;
  DeviceState* d = client::device_state_if_attached(f->device);
  const int warp = device_attribute(*d, CU_DEVICE_ATTRIBUTE_WARP_SIZE);
  const int most =
      std::min(static_cast<int>(f->max_threads), device_attribute(*d, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK));
  const int limit = blockSizeLimit == 0 ? most : std::min(blockSizeLimit, most);
  int best_threads = 0, best_block = 0, best_blocks = 0;
  for (int rounded = (limit + warp - 1) / warp * warp; rounded > 0; rounded -= warp) {
    const int block = std::min(rounded, limit);
    const size_t shared = blockSizeToDynamicSMemSize ? blockSizeToDynamicSMemSize(block) : dynamicSMemSize;
    int blocks = 0;
    if (const CUresult rc =
            launch::cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, func, block, shared, flags);
        rc != CUDA_SUCCESS)
      return rc;
    if (blocks * block <= best_threads) continue;
    best_threads = blocks * block;
    best_block = block;
    best_blocks = blocks;
    if (best_threads == device_attribute(*d, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)) break;
  }
  *blockSize = best_block;
  *minGridSize = best_blocks * device_attribute(*d, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  return CUDA_SUCCESS;
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* dynamicSmemSize, CUfunction func, int numBlocks,
                                                 int blockSize) {
  uint64_t value = 0;
  int32_t error = kOk;
  FunctionObj* f = module::function_of(bits(func), &value, &error);
  if (!f) return result(error);
  if (numBlocks <= 0 || blockSize <= 0) return CUDA_ERROR_INVALID_VALUE;
  int64_t bytes = 0;
  const int32_t rc =
      occupancy(f, value, OccupancyKind::kAvailableShared, 0, 0, {static_cast<unsigned>(numBlocks), 1, 1},
                {static_cast<unsigned>(blockSize), 1, 1}, Attributes{}, &bytes);
  if (rc == kOk) *dynamicSmemSize = static_cast<size_t>(bytes);
  return result(rc);
}

namespace {
CUresult clusters(int* out, CUfunction func, const CUlaunchConfig* config, OccupancyKind kind) {
  uint64_t value = 0;
  int32_t error = kOk;
  FunctionObj* f = module::function_of(bits(func), &value, &error);
  if (!f) return result(error);
  DeviceState* d = client::device_state_if_attached(f->device);
  if (!device_attribute(*d, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH)) {
    client::log(client::Level::kWarn,
                "occupancy of clusters is refused: this device has none (CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH is 0)");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  Attributes attributes;
  if (const CUresult rc = take_attributes(*f, *d, *config, &attributes); rc != CUDA_SUCCESS) return rc;
  int64_t answer = 0;
  const int32_t rc =
      occupancy(f, value, kind, 0, config->sharedMemBytes, {config->gridDimX, config->gridDimY, config->gridDimZ},
                {config->blockDimX, config->blockDimY, config->blockDimZ}, attributes, &answer);
  if (rc == kOk) *out = static_cast<int>(answer);
  return result(rc);
}
}  // namespace

CUresult cuOccupancyMaxActiveClusters(int* numClusters, CUfunction func, const CUlaunchConfig* config) {
  return clusters(numClusters, func, config, OccupancyKind::kActiveClusters);
}

CUresult cuOccupancyMaxPotentialClusterSize(int* clusterSize, CUfunction func, const CUlaunchConfig* config) {
  return clusters(clusterSize, func, config, OccupancyKind::kMaxClusterSize);
}

}  // namespace devproxy::sa::launch
