// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcuda.so.1 that runs everything in the calling process, at once, and records the names of the calls.
// It shows that the plugin needs the driver API and nothing else, and it lets the plugin be tested without a server.
// Device memory lies where devproxy's ranges lie; two devices; asynchronous means already done.
#include <cuda.h>
#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "devproxy/csrc/wire/segment.h"
#include "devproxy/hal/host_module/include/devproxy_executor.h"
#include "devproxy/hal/host_module/include/devproxy_soft_module.h"

namespace {

constexpr int kDevices = 2;
constexpr size_t kDeviceMemoryBytes = size_t{8} << 30;
constexpr size_t kAlign = 512;

struct Context {
  int device;
};
struct Event {
  bool recorded = false;
  std::chrono::steady_clock::time_point at;
};
struct Module {
  const devproxy_soft_module_table* table;
  void* state = nullptr;  // of an executor
};
struct Function {
  devproxy_soft_function f;
  void* state;
};

std::recursive_mutex mu;
Context contexts[kDevices] = {{0}, {1}};
thread_local Context* current = nullptr;
std::map<uint64_t, size_t> live[kDevices];    // address -> bytes
std::map<uint64_t, size_t> unused[kDevices];  // holes below `top`, merged with nothing: exact or larger fits
uint64_t top[kDevices];
size_t used[kDevices];
std::map<uint64_t, size_t> pinned;
std::map<std::string, long> calls;
CUresult sticky = CUDA_SUCCESS;
std::string sticky_text;

#define RECORD                                    \
  std::lock_guard<std::recursive_mutex> lock(mu); \
  calls[__func__]++;                              \
  if (sticky != CUDA_SUCCESS) return sticky
#define NEEDS_CONTEXT \
  RECORD;             \
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT

uint64_t base_of(int device) { return devproxy::range_base(static_cast<uint32_t>(device)); }

void reserve() {
  static const bool done = [] {
    for (int d = 0; d < kDevices; ++d) {
      void* want = reinterpret_cast<void*>(base_of(d));
      if (mmap(want, kDeviceMemoryBytes, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0) != want)
        abort();
      top[d] = base_of(d);
    }
    return true;
  }();
  (void)done;
}

int device_of(CUdeviceptr p) {
  for (int d = 0; d < kDevices; ++d)
    if (p >= base_of(d) && p < base_of(d) + kDeviceMemoryBytes) return d;
  return -1;
}

bool inside(const std::map<uint64_t, size_t>& m, uint64_t addr, uint64_t bytes) {
  auto it = m.upper_bound(addr);
  if (it == m.begin()) return false;
  --it;
  return addr - it->first <= it->second && bytes <= it->second - (addr - it->first);
}

bool is_live(uint64_t addr, uint64_t bytes) {
  const int d = device_of(addr);
  return d >= 0 ? inside(live[d], addr, bytes) : inside(pinned, addr, bytes);
}

int check_range(void*, uint64_t addr, uint64_t bytes) { return is_live(addr, bytes) ? 1 : 0; }

struct PrintCalls {
  ~PrintCalls() {
    const char* path = getenv("STAND_IN_CALLS");
    if (path == nullptr) return;
    FILE* f = fopen(path, "w");
    if (f == nullptr) return;
    for (const auto& [name, n] : calls) fprintf(f, "%s %ld\n", name.c_str(), n);
    fclose(f);
  }
} print_calls;

}  // namespace

extern "C" {

CUresult cuInit(unsigned) {
  RECORD;
  reserve();
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* v) {
  RECORD;
  *v = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult r, const char** s) {
  static const std::map<int, const char*> texts = {{1, "invalid argument"},
                                                   {2, "out of memory"},
                                                   {100, "no CUDA-capable device is detected"},
                                                   {101, "invalid device ordinal"},
                                                   {201, "invalid device context"},
                                                   {500, "named symbol not found"},
                                                   {600, "device not ready"},
                                                   {700, "an illegal memory access was encountered"},
                                                   {710, "device-side assert triggered"},
                                                   {719, "unspecified launch failure"}};
  const auto it = texts.find(r);
  *s = it == texts.end() ? "unknown error" : it->second;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* n) {
  RECORD;
  *n = kDevices;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* d, int i) {
  RECORD;
  if (i < 0 || i >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  *d = i;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* s, int n, CUdevice) {
  RECORD;
  snprintf(s, static_cast<size_t>(n), "stand-in GPU");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid* u, CUdevice d) {
  RECORD;
  memset(u, d + 1, sizeof *u);
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t* n, CUdevice) {
  RECORD;
  *n = kDeviceMemoryBytes;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) {
  RECORD;
  *v = a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 8 : a == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 1;
  if (a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) *v = 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) {
  RECORD;
  *can = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
  RECORD;
  *c = reinterpret_cast<CUcontext>(&contexts[d]);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  RECORD;
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext c) {
  RECORD;
  current = reinterpret_cast<Context*>(c);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {  // asked before every call: not recorded
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current->device;
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
  NEEDS_CONTEXT;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  NEEDS_CONTEXT;
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}
CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  NEEDS_CONTEXT;
  *total = kDeviceMemoryBytes;
  *free = kDeviceMemoryBytes - used[current->device];
  return CUDA_SUCCESS;
}
CUresult cuMemAllocAsync(CUdeviceptr* p, size_t bytes, CUstream) {
  NEEDS_CONTEXT;
  const int d = current->device;
  bytes = (bytes + kAlign - 1) / kAlign * kAlign;
  for (auto it = unused[d].begin(); it != unused[d].end(); ++it) {
    if (it->second < bytes) continue;
    *p = it->first;
    if (it->second > bytes) unused[d][it->first + bytes] = it->second - bytes;
    unused[d].erase(it);
    live[d][*p] = bytes;
    used[d] += bytes;
    return CUDA_SUCCESS;
  }
  if (bytes > base_of(d) + kDeviceMemoryBytes - top[d]) return CUDA_ERROR_OUT_OF_MEMORY;
  *p = top[d];
  top[d] += bytes;
  live[d][*p] = bytes;
  used[d] += bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemFreeAsync(CUdeviceptr p, CUstream) {
  RECORD;
  const int d = device_of(p);
  const auto it = d < 0 ? live[0].end() : live[d].find(p);
  if (d < 0 || it == live[d].end()) return CUDA_ERROR_INVALID_VALUE;
  used[d] -= it->second;
  auto hole = unused[d].emplace(p, it->second).first;
  live[d].erase(it);
  const auto next = std::next(hole);
  if (next != unused[d].end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    unused[d].erase(next);
  }
  if (hole != unused[d].begin()) {
    const auto before = std::prev(hole);
    if (before->first + before->second == hole->first) {
      before->second += hole->second;
      unused[d].erase(hole);
    }
  }
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice) {
  *pool = reinterpret_cast<CUmemoryPool>(1);
  return CUDA_SUCCESS;
}
CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, void*) { return CUDA_SUCCESS; }
CUresult cuMemPoolTrimTo(CUmemoryPool, size_t) { return CUDA_SUCCESS; }
CUresult cuMemHostAlloc(void** p, size_t bytes, unsigned) {
  NEEDS_CONTEXT;
  bytes = (bytes + 4095) & ~size_t{4095};
  *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  pinned[reinterpret_cast<uint64_t>(*p)] = bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* p) {
  RECORD;
  const auto it = pinned.find(reinterpret_cast<uint64_t>(p));
  if (it == pinned.end()) return CUDA_ERROR_INVALID_VALUE;
  munmap(p, it->second);
  pinned.erase(it);
  return CUDA_SUCCESS;
}
CUresult cuMemHostRegister(void* p, size_t bytes, unsigned) {
  NEEDS_CONTEXT;
  pinned[reinterpret_cast<uint64_t>(p)] = bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void* p) {
  NEEDS_CONTEXT;
  return pinned.erase(reinterpret_cast<uint64_t>(p)) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute a, CUdeviceptr p) {
  RECORD;
  const int d = device_of(p);
  const bool host = inside(pinned, p, 1);
  if (!host && (d < 0 || !inside(live[d], p, 1))) return CUDA_ERROR_INVALID_VALUE;
  if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
    *static_cast<CUmemorytype*>(data) = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  } else if (a == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
    *static_cast<int*>(data) = host ? 0 : d;
  } else {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t n, CUstream) {
  NEEDS_CONTEXT;
  if (!is_live(dst, n)) return CUDA_ERROR_INVALID_VALUE;
  memcpy(reinterpret_cast<void*>(dst), src, n);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t n, CUstream) {
  NEEDS_CONTEXT;
  if (!is_live(src, n)) return CUDA_ERROR_INVALID_VALUE;
  memcpy(dst, reinterpret_cast<void*>(src), n);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream) {
  NEEDS_CONTEXT;
  if (!is_live(src, n) || !is_live(dst, n)) return CUDA_ERROR_INVALID_VALUE;
  memmove(reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), n);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext, CUdeviceptr src, CUcontext, size_t n, CUstream) {
  NEEDS_CONTEXT;
  if (!is_live(src, n) || !is_live(dst, n)) return CUDA_ERROR_INVALID_VALUE;
  memmove(reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), n);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char v, size_t n, CUstream) {
  NEEDS_CONTEXT;
  if (!is_live(dst, n)) return CUDA_ERROR_INVALID_VALUE;
  memset(reinterpret_cast<void*>(dst), v, n);
  return CUDA_SUCCESS;
}
CUresult cuStreamCreateWithPriority(CUstream* s, unsigned, int) {
  NEEDS_CONTEXT;
  *s = reinterpret_cast<CUstream>(new int);
  return CUDA_SUCCESS;
}
CUresult cuStreamGetPriority(CUstream, int* priority) {
  NEEDS_CONTEXT;
  *priority = 0;
  return CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) {
  NEEDS_CONTEXT;
  return CUDA_SUCCESS;
}
CUresult cuStreamQuery(CUstream) {
  NEEDS_CONTEXT;
  return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) {
  NEEDS_CONTEXT;
  return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent* e, unsigned) {
  NEEDS_CONTEXT;
  *e = reinterpret_cast<CUevent>(new Event);
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy_v2(CUevent e) {
  RECORD;
  delete reinterpret_cast<Event*>(e);
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent e, CUstream) {
  NEEDS_CONTEXT;
  reinterpret_cast<Event*>(e)->at = std::chrono::steady_clock::now();
  reinterpret_cast<Event*>(e)->recorded = true;
  return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent) {
  RECORD;
  return CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent) {
  RECORD;
  return CUDA_SUCCESS;
}
CUresult cuEventElapsedTime(float* ms, CUevent a, CUevent b) {
  RECORD;
  const auto *x = reinterpret_cast<Event*>(a), *y = reinterpret_cast<Event*>(b);
  if (!x->recorded || !y->recorded) return CUDA_ERROR_INVALID_HANDLE;
  *ms = std::chrono::duration<float, std::milli>(y->at - x->at).count();
  return CUDA_SUCCESS;
}

int take_memory(void*, uint64_t) { return 1; }
void give_memory(void*, uint64_t) {}

// A description of an executor: the one for the host, below the libraries' folder.
CUresult load_executor(CUmodule* out, const std::string& text) {
  const size_t at = text.find("\nhost ") + 6;
  const std::string path = std::string(getenv("DEVPROXY_LIB")) + "/" + text.substr(at, text.find('\n', at) - at);
  void* lib = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (lib == nullptr) {
    fprintf(stderr, "stand-in libcuda: %s\n", dlerror());
    return CUDA_ERROR_INVALID_IMAGE;
  }
  auto* table = static_cast<const devproxy_soft_module_table*>(dlsym(lib, "devproxy_soft_module"));
  auto* executor = static_cast<const devproxy_executor_table*>(dlsym(lib, "devproxy_executor"));
  char error[256] = {};
  auto module = std::make_unique<Module>(Module{table});
  const devproxy_executor_host host{0, devproxy::kRangeBase, devproxy::kRangeBytes, 0,
                                    0, &take_memory,         &give_memory,          nullptr};
  if (table->load(0, error, sizeof error) != 0 || executor->attach(&host, &module->state, error, sizeof error) != 0) {
    fprintf(stderr, "stand-in libcuda: %s\n", error);
    return CUDA_ERROR_INVALID_IMAGE;
  }
  *out = reinterpret_cast<CUmodule>(module.release());
  return CUDA_SUCCESS;
}

// The image becomes a file without a name, as in the server.
CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  NEEDS_CONTEXT;
  if (memcmp(image, "devproxy executor ", 18) == 0) return load_executor(out, static_cast<const char*>(image));
  const auto* header = static_cast<const Elf64_Ehdr*>(image);
  if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return CUDA_ERROR_INVALID_IMAGE;
  const size_t bytes = header->e_shoff + static_cast<size_t>(header->e_shnum) * header->e_shentsize;
  const int fd = memfd_create("module", MFD_CLOEXEC);
  if (write(fd, image, bytes) != static_cast<ssize_t>(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  void* lib = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (lib == nullptr) {
    fprintf(stderr, "stand-in libcuda: %s\n", dlerror());
    return CUDA_ERROR_INVALID_IMAGE;
  }
  auto* table = static_cast<const devproxy_soft_module_table*>(dlsym(lib, "devproxy_soft_module"));
  if (table == nullptr || table->abi != DEVPROXY_SOFT_MODULE_ABI) return CUDA_ERROR_INVALID_IMAGE;
  char error[256] = {};
  if (table->load != nullptr && table->load(static_cast<uint32_t>(current->device), error, sizeof error) != 0)
    return CUDA_ERROR_INVALID_IMAGE;
  *out = reinterpret_cast<CUmodule>(new Module{table});
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* out, CUmodule m, const char* name) {
  NEEDS_CONTEXT;
  Function f{{}, reinterpret_cast<Module*>(m)->state};
  const int r = reinterpret_cast<Module*>(m)->table->get_function(name, &f.f);
  if (r != 0) return static_cast<CUresult>(r);
  *out = reinterpret_cast<CUfunction>(new Function(f));
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void**, void** extra) {
  NEEDS_CONTEXT;
  const void* params = nullptr;
  size_t bytes = 0;
  for (int i = 0; extra != nullptr && extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
    if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) params = extra[i + 1];
    if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t*>(extra[i + 1]);
  }
  char error[512] = {};
  const devproxy_soft_services services{check_range, nullptr};
  devproxy_soft_launch launch{};
  launch.grid[0] = gx, launch.grid[1] = gy, launch.grid[2] = gz;
  launch.block[0] = bx, launch.block[1] = by, launch.block[2] = bz;
  launch.shared_bytes = shared;
  launch.device = static_cast<uint32_t>(current->device);
  launch.stream = reinterpret_cast<uint64_t>(stream);
  launch.params = static_cast<const uint8_t*>(params);
  launch.params_bytes = bytes;
  launch.services = &services;
  launch.function_cookie = reinterpret_cast<Function*>(f)->f.cookie;
  launch.error = error;
  launch.error_bytes = sizeof error;
  launch.state = reinterpret_cast<Function*>(f)->state;
  const int r = reinterpret_cast<Function*>(f)->f.kernel(&launch);
  if (r != 0) {
    fprintf(stderr, "stand-in libcuda: kernel failed with %d: %s\n", r, error);
    if (getenv("STAND_IN_NO_STICKY") == nullptr) sticky = static_cast<CUresult>(r);
  }
  return CUDA_SUCCESS;
}

// Graphs need a server: here they are refused.
CUresult cuMemAlloc_v2(CUdeviceptr* p, size_t bytes) { return cuMemAllocAsync(p, bytes, nullptr); }
CUresult cuMemFree_v2(CUdeviceptr p) { return cuMemFreeAsync(p, nullptr); }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  RECORD;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuStreamEndCapture(CUstream, CUgraph*) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuStreamGetCaptureInfo_v3(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**,
                                   const CUgraphEdgeData**, size_t*) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphGetNodes(CUgraph, CUgraphNode*, size_t*) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphDestroy(CUgraph) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphLaunch(CUgraphExec, CUstream) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphExecDestroy(CUgraphExec) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphDebugDotPrint(CUgraph, const char*, unsigned) { return CUDA_ERROR_NOT_SUPPORTED; }

}  // extern "C"
