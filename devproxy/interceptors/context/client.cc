// SPDX-License-Identifier: Apache-2.0
// Initialisation, devices and contexts. A device's facts come with the attach; contexts are bookkeeping of the client:
// one process has one connection per device, and every context of that device shares it.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "devproxy/interceptors/client_common.h"
#include "devproxy/interceptors/graph/hooks.h"
#include "devproxy/interceptors/sync/client.h"
#include "devproxy/interceptors/texture/client.h"

namespace devproxy::sa::context {

using client::ContextObj;
using client::contexts;
using client::DeviceState;
using client::t_state;

namespace {

std::atomic<uint64_t> g_context_ids{1};

int32_t make_context(int device, bool primary, uint32_t flags, uint64_t* out) {
  ContextObj* c = contexts().add(device, out);
  if (!c) return kOutOfMemory;
  *c = ContextObj{device, primary, flags, g_context_ids.fetch_add(1), 0};
  contexts().publish(*out);
  return kOk;
}

int32_t push(uint64_t ctx) {
  if (t_state.depth == client::kContextStack) return kInvalidValue;
  t_state.contexts[t_state.depth++] = ctx;
  return kOk;
}

// The device behind an ordinal, or the error.
CUresult device_of(CUdevice dev, DeviceState** out) {
  int32_t error = kOk;
  *out = client::device_state(dev, &error);
  return result(error);
}

// No device is attached for these: a program asks for the facts of each, and uses one.
CUresult facts_of(CUdevice dev, const DeviceProps** out) {
  int32_t error = kOk;
  *out = client::facts(dev, &error);
  return result(error);
}

}  // namespace

CUresult cuInit(unsigned int Flags) {
  if (Flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return result(client::init());
}

CUresult cuDriverGetVersion(int* driverVersion) {
  *driverVersion = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= client::device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = client::device_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int len, CUdevice dev) {
  if (len <= 0) return CUDA_ERROR_INVALID_VALUE;
  const DeviceProps* facts;
  if (const CUresult rc = facts_of(dev, &facts); rc != CUDA_SUCCESS) return rc;
  snprintf(name, static_cast<size_t>(len), "%s", facts->name);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice dev) {
  const DeviceProps* facts;
  if (const CUresult rc = facts_of(dev, &facts); rc != CUDA_SUCCESS) return rc;
  memcpy(uuid->bytes, facts->uuid, sizeof(uuid->bytes));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev) { return context::cuDeviceGetUuid(uuid, dev); }

CUresult cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev) {
  const DeviceProps* facts;
  if (const CUresult rc = facts_of(dev, &facts); rc != CUDA_SUCCESS) return rc;
  if (static_cast<unsigned>(attrib) == 0 || static_cast<unsigned>(attrib) >= 256) return CUDA_ERROR_INVALID_VALUE;
  *pi = facts->attributes[attrib];
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice dev) {
  const DeviceProps* facts;
  if (const CUresult rc = facts_of(dev, &facts); rc != CUDA_SUCCESS) return rc;
  *bytes = facts->total_bytes;
  return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice dev) {
  const DeviceProps* facts;
  if (const CUresult rc = facts_of(dev, &facts); rc != CUDA_SUCCESS) return rc;
  *major = facts->major;
  *minor = facts->minor;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetProperties(CUdevprop* prop, CUdevice dev) {
  const DeviceProps* facts;
  if (const CUresult rc = facts_of(dev, &facts); rc != CUDA_SUCCESS) return rc;
  const int32_t* a = facts->attributes;
  prop->maxThreadsPerBlock = a[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK];
  for (int i = 0; i < 3; ++i) {
    prop->maxThreadsDim[i] = a[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i];
    prop->maxGridSize[i] = a[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i];
  }
  prop->sharedMemPerBlock = a[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK];
  prop->totalConstantMemory = a[CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY];
  prop->SIMDWidth = a[CU_DEVICE_ATTRIBUTE_WARP_SIZE];
  prop->memPitch = a[CU_DEVICE_ATTRIBUTE_MAX_PITCH];
  prop->regsPerBlock = a[CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK];
  prop->clockRate = a[CU_DEVICE_ATTRIBUTE_CLOCK_RATE];
  prop->textureAlign = a[CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT];
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* pciBusId, int len, CUdevice dev) {
  const DeviceProps* facts;
  if (const CUresult rc = facts_of(dev, &facts); rc != CUDA_SUCCESS) return rc;
  const DeviceProps& p = *facts;
  const int n = snprintf(pciBusId, len > 0 ? static_cast<size_t>(len) : 0, "%04x:%02x:%02x.0", p.pci_domain, p.pci_bus,
                         p.pci_device);
  return n < len ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetByPCIBusId(CUdevice* dev, const char* pciBusId) {
  for (int i = 0; i < client::device_count(); ++i) {
    char id[32];
    if (context::cuDeviceGetPCIBusId(id, sizeof(id), i) == CUDA_SUCCESS && strcasecmp(id, pciBusId) == 0) {
      *dev = i;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceCanAccessPeer(int* canAccessPeer, CUdevice dev, CUdevice peerDev) {
  if (dev < 0 || peerDev < 0 || dev >= client::device_count() || peerDev >= client::device_count())
    return CUDA_ERROR_INVALID_DEVICE;
  *canAccessPeer = 0;  // one server per GPU: peer copies work, kernels on peer memory do not
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute, CUdevice srcDevice, CUdevice dstDevice) {
  if (srcDevice == dstDevice) return CUDA_ERROR_INVALID_DEVICE;
  return context::cuDeviceCanAccessPeer(value, srcDevice, dstDevice);
}

namespace {
// What atomics of a kernel a link supports by itself: none. Between two GPUs no kernel reaches the other's memory, and
// towards the host devproxy promises none (docs/design.md, Memory), also where a device's link could.
CUresult no_atomics(unsigned* capabilities, const CUatomicOperation* operations, unsigned count) {
  if (count == 0) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; ++i)
    if (static_cast<unsigned>(operations[i]) >= CU_ATOMIC_OPERATION_MAX) return CUDA_ERROR_INVALID_VALUE;
  std::fill_n(capabilities, count, 0u);
  return CUDA_SUCCESS;
}
}  // namespace

CUresult cuDeviceGetHostAtomicCapabilities(unsigned int* capabilities, const CUatomicOperation* operations,
                                           unsigned int count, CUdevice dev) {
  if (dev < 0 || dev >= client::device_count()) return CUDA_ERROR_INVALID_DEVICE;
  return no_atomics(capabilities, operations, count);
}

CUresult cuDeviceGetP2PAtomicCapabilities(unsigned int* capabilities, const CUatomicOperation* operations,
                                          unsigned int count, CUdevice srcDevice, CUdevice dstDevice) {
  if (srcDevice < 0 || dstDevice < 0 || srcDevice >= client::device_count() || dstDevice >= client::device_count() ||
      srcDevice == dstDevice)
    return CUDA_ERROR_INVALID_DEVICE;
  return no_atomics(capabilities, operations, count);
}

// -- primary contexts -----------------------------------------------------------------------------------------------

CUresult cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev) {
  DeviceState* d;
  if (const CUresult rc = device_of(dev, &d); rc != CUDA_SUCCESS) return rc;
  if (const int32_t e = d->conn().error(); e != kOk) return result(e);
  uint64_t ctx = d->primary.load(std::memory_order_acquire);
  if (!ctx) {
    static std::mutex mu;
    std::lock_guard lock(mu);
    ctx = d->primary.load(std::memory_order_acquire);
    if (!ctx) {
      if (const int32_t rc = make_context(dev, true, 0, &ctx); rc != kOk) return result(rc);
      d->primary.store(ctx, std::memory_order_release);
    }
  }
  d->primary_refs.fetch_add(1);
  *pctx = handle<CUcontext>(ctx);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
  DeviceState* d;
  if (const CUresult rc = device_of(dev, &d); rc != CUDA_SUCCESS) return rc;
  // The handle stays: frameworks retain again, and an address space belongs to the process until it ends.
  int refs = d->primary_refs.load();
  do {
    if (refs == 0) return CUDA_ERROR_INVALID_CONTEXT;
  } while (!d->primary_refs.compare_exchange_weak(refs, refs - 1));
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active) {
  if (dev < 0 || dev >= client::device_count()) return CUDA_ERROR_INVALID_DEVICE;
  const DeviceState* d = client::device_state_if_attached(dev);
  *flags = d ? d->primary_flags.load() : 0;
  *active = d && d->primary_refs.load() > 0;
  return CUDA_SUCCESS;
}

namespace {

// cuda.h: how to wait is one of four, and the other flags are known ones. Core dumps are the server's.
CUresult check_flags(const char* call, unsigned flags) {
  const unsigned waiting = flags & CU_CTX_SCHED_MASK;
  if ((flags & ~static_cast<unsigned>(CU_CTX_FLAGS_MASK)) || (waiting & (waiting - 1))) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & (CU_CTX_COREDUMP_ENABLE | CU_CTX_USER_COREDUMP_ENABLE)) == 0) return CUDA_SUCCESS;
  client::log(
      client::Level::kWarn,
      "%s refuses the flags of core dumps: they would be the device-proxy server's; the error that a kernel ends "
      "with, and its name, are in the job's own error text",
      call);
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
  DeviceState* d;
  if (const CUresult rc = device_of(dev, &d); rc != CUDA_SUCCESS) return rc;
  if (const CUresult rc = check_flags("cuDevicePrimaryCtxSetFlags", flags); rc != CUDA_SUCCESS) return rc;
  d->primary_flags = flags;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev) {
  DeviceState* d;
  if (const CUresult rc = device_of(dev, &d); rc != CUDA_SUCCESS) return rc;
  const uint64_t ctx = d->primary.load(std::memory_order_acquire);
  if (!ctx) return CUDA_SUCCESS;
  // cuda.h: everything made in it is gone, and who retained it still has to release it. The handle stays, as after a
  // release; a fault stays too, because it is the server's address space that is broken.
  if (const int32_t rc = d->wait_all(); rc != kOk) return result(rc);
  texture::end_context(ctx);
  graph::free_all_memory(d);
  d->end_context(ctx);
  sync::reset_attributes(d);
  d->primary_flags = 0;
  return CUDA_SUCCESS;
}

// -- contexts -------------------------------------------------------------------------------------------------------

CUresult cuCtxCreate_v2(CUcontext* pctx, unsigned int flags, CUdevice dev) {
  DeviceState* d;
  if (const CUresult rc = device_of(dev, &d); rc != CUDA_SUCCESS) return rc;
  if (const CUresult rc = check_flags("cuCtxCreate", flags); rc != CUDA_SUCCESS) return rc;
  uint64_t ctx = 0;
  if (const int32_t rc = make_context(dev, false, flags, &ctx); rc != kOk) return result(rc);
  if (const int32_t rc = push(ctx); rc != kOk) {
    contexts().remove(ctx);
    return result(rc);
  }
  *pctx = handle<CUcontext>(ctx);
  return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v4(CUcontext* pctx, CUctxCreateParams* params, unsigned int flags, CUdevice dev) {
  if (params && (params->execAffinityParams || params->cigParams)) return CUDA_ERROR_NOT_SUPPORTED;
  return context::cuCtxCreate_v2(pctx, flags, dev);
}

CUresult cuCtxDestroy_v2(CUcontext ctx) {
  ContextObj* c = contexts().get(bits(ctx));
  if (!c || c->primary) return CUDA_ERROR_INVALID_CONTEXT;
  int32_t error = kOk;
  DeviceState* d = client::device_state(c->device, &error);
  const int32_t rc = d ? d->wait_all() : error;
  if (d) texture::end_context(bits(ctx));
  if (d) d->end_context(bits(ctx));
  contexts().remove(bits(ctx));
  if (t_state.depth && t_state.contexts[t_state.depth - 1] == bits(ctx)) --t_state.depth;
  return result(rc);
}

CUresult cuCtxPushCurrent_v2(CUcontext ctx) {
  if (!contexts().get(bits(ctx))) return CUDA_ERROR_INVALID_CONTEXT;
  return result(push(bits(ctx)));
}

CUresult cuCtxPopCurrent_v2(CUcontext* pctx) {
  if (t_state.depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
  const uint64_t ctx = t_state.contexts[--t_state.depth];
  if (pctx) *pctx = handle<CUcontext>(ctx);
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext ctx) {
  if (ctx && !contexts().get(bits(ctx))) return CUDA_ERROR_INVALID_CONTEXT;
  if (!ctx) {
    if (t_state.depth) --t_state.depth;
    return CUDA_SUCCESS;
  }
  if (t_state.depth == 0) t_state.depth = 1;
  t_state.contexts[t_state.depth - 1] = bits(ctx);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* pctx) {
  *pctx = handle<CUcontext>(client::current_context());
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  const ContextObj* c = contexts().get(client::current_context());
  if (!c) return CUDA_ERROR_INVALID_CONTEXT;
  *device = c->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext ctx) {
  const ContextObj* c = contexts().get(ctx ? bits(ctx) : client::current_context());
  if (!c) return CUDA_ERROR_INVALID_CONTEXT;
  *device = c->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int* flags) {
  ContextObj* c = contexts().get(client::current_context());
  if (!c) return CUDA_ERROR_INVALID_CONTEXT;
  *flags = client::context_flags(*c);
  return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags) {
  ContextObj* c = contexts().get(client::current_context());
  if (!c) return CUDA_ERROR_INVALID_CONTEXT;
  if (const CUresult rc = check_flags("cuCtxSetFlags", flags); rc != CUDA_SUCCESS) return rc;
  if (c->primary)
    client::device_state_if_attached(c->device)->primary_flags = flags;
  else
    std::atomic_ref(c->flags).store(flags);
  return CUDA_SUCCESS;
}

CUresult cuCtxAttach(CUcontext* pctx, unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  ContextObj* c = contexts().get(client::current_context());
  if (!c) return CUDA_ERROR_INVALID_CONTEXT;
  std::atomic_ref(c->attached).fetch_add(1);
  *pctx = handle<CUcontext>(client::current_context());
  return CUDA_SUCCESS;
}

// A primary context was made by nobody who could detach it: without an attach it is no such context.
CUresult cuCtxDetach(CUcontext ctx) {
  ContextObj* c = contexts().get(bits(ctx));
  if (!c || bits(ctx) != client::current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  std::atomic_ref<uint32_t> attached(c->attached);
  for (uint32_t uses = attached.load(); uses > 0;)
    if (attached.compare_exchange_weak(uses, uses - 1)) return CUDA_SUCCESS;
  return context::cuCtxDestroy_v2(ctx);  // which refuses a primary one
}

CUresult cuCtxGetId(CUcontext ctx, unsigned long long* ctxId) {
  const ContextObj* c = contexts().get(ctx ? bits(ctx) : client::current_context());
  if (!c) return CUDA_ERROR_INVALID_CONTEXT;
  *ctxId = c->id;
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  DP_CURRENT(d);
  return result(d->wait_all());
}

CUresult cuCtxSynchronize_v2(CUcontext ctx) {
  if (!ctx) return context::cuCtxSynchronize();
  const ContextObj* c = contexts().get(bits(ctx));
  if (!c) return CUDA_ERROR_INVALID_CONTEXT;
  return result(client::device_state_if_attached(c->device)->wait_all());
}

// A cache preference is a hint to a real chip; the value read back is the one set.
namespace {
std::atomic<int> g_cache_config{CU_FUNC_CACHE_PREFER_NONE};
}  // namespace

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  DP_CURRENT(d);
  if (static_cast<unsigned>(limit) >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  const wire::SET_LIMIT_req req{static_cast<uint32_t>(limit), 0, value};
  return result(d->conn().call(wire::Opcode::SET_LIMIT, req));
}

CUresult cuCtxGetLimit(size_t* pvalue, CUlimit limit) {
  DP_CURRENT(d);
  if (static_cast<unsigned>(limit) >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  wire::GET_LIMIT_rep rep{};
  client::Reply reply{&rep, sizeof(rep)};
  const int32_t rc =
      d->conn().call(wire::Opcode::GET_LIMIT, wire::GET_LIMIT_req{static_cast<uint32_t>(limit), 0}, &reply);
  if (rc == kOk) *pvalue = rep.value;
  return result(rc);
}

CUresult cuCtxGetCacheConfig(CUfunc_cache* pconfig) {
  DP_CURRENT(d);
  *pconfig = static_cast<CUfunc_cache>(g_cache_config.load());
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
  DP_CURRENT(d);
  if (static_cast<unsigned>(config) > CU_FUNC_CACHE_PREFER_EQUAL) return CUDA_ERROR_INVALID_VALUE;
  g_cache_config = config;
  return CUDA_SUCCESS;
}

// cuda.h: of no effect where banks have one size, as on every device since Volta; what is read is that size.
CUresult cuCtxGetSharedMemConfig(CUsharedconfig* pConfig) {
  DP_CURRENT(d);
  *pConfig = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetSharedMemConfig(CUsharedconfig config) {
  DP_CURRENT(d);
  return static_cast<unsigned>(config) > CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE ? CUDA_ERROR_INVALID_VALUE
                                                                                   : CUDA_SUCCESS;
}

CUresult cuCtxResetPersistingL2Cache() {
  DP_CURRENT(d);
  return result(d->conn().call(wire::Opcode::RESET_PERSISTING_L2, wire::RESET_PERSISTING_L2_req{}));
}

CUresult cuCtxGetStreamPriorityRange(int* leastPriority, int* greatestPriority) {
  DP_CURRENT(d);
  if (leastPriority) *leastPriority = 0;
  if (greatestPriority) *greatestPriority = -5;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned int* version) {
  if (!contexts().get(ctx ? bits(ctx) : client::current_context())) return CUDA_ERROR_INVALID_CONTEXT;
  *version = 3020;  // cuda.h: the API version of every context since CUDA 3.2
  return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags) {
  if (Flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!contexts().get(bits(peerContext))) return CUDA_ERROR_INVALID_CONTEXT;
  return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
}

CUresult cuCtxDisablePeerAccess(CUcontext peerContext) {
  if (!contexts().get(bits(peerContext))) return CUDA_ERROR_INVALID_CONTEXT;
  return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

// -- error names ----------------------------------------------------------------------------------------------------

namespace {
struct ErrorText {
  int value;
  const char* name;
  const char* text;
};
// Our own wording; names are the header's.
constexpr ErrorText kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {215, "CUDA_ERROR_UNSUPPORTED_LIMIT", "limit is not supported on this architecture"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {300, "CUDA_ERROR_INVALID_SOURCE", "device kernel image is invalid"},
    {301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "cannot set while device is active in this process"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "the capture has failed by an earlier call"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would make one of two captures"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture did not begin in this stream"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "a stream of the capture was not joined to the one where it began"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency on work outside of the capture"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "the capture was begun by another thread"},
    {912, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "the cluster size does not fit the launch"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};
const ErrorText* error_text(CUresult e) {
  for (const ErrorText& t : kErrors)
    if (t.value == static_cast<int>(e)) return &t;
  return nullptr;
}
}  // namespace

CUresult cuGetErrorName(CUresult error, const char** pStr) {
  const ErrorText* t = error_text(error);
  *pStr = t ? t->name : nullptr;
  return t ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** pStr) {
  const ErrorText* t = error_text(error);
  *pStr = t ? t->text : nullptr;
  if (!t) return CUDA_ERROR_INVALID_VALUE;
  // A fault that has happened says its own cause behind the vendor's words, and a lost server that it is lost.
  if (error != CUDA_SUCCESS) {
    for (int i = 0; i < client::device_count(); ++i) {
      client::Attachment* c = client::attached(i);
      if (!c || c->error() != static_cast<int32_t>(error) || !*c->error_text()) continue;
      static char texts[client::kMaxDevices][384];
      snprintf(texts[i], sizeof(texts[i]), "%s (devproxy: GPU %d: %s)", t->text, i, c->error_text());
      *pStr = texts[i];
      break;
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace devproxy::sa::context
