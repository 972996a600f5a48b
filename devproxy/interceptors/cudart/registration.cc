// SPDX-License-Identifier: Apache-2.0
// Registration by nvcc's output, and loading at first use.
//
// Locks: g_load_mu (loading, held over driver calls) < g_registry_mu (writing the tables).
#include "devproxy/interceptors/cudart/registration.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mutex>

#include "cudart_decl.gen.h"

namespace devproxy::sa::cudart {

// Constant initialisation and no destructor: the program registers before our own constructors have run, and
// unregisters after our destructors would have.
constinit AddressMap<Kernel> g_kernels;
constinit AddressMap<Variable> g_variables;

namespace {

constinit std::mutex g_registry_mu;
constinit std::mutex g_load_mu;
std::atomic<bool> g_exiting{false};

// What nvcc puts into a program around a fat binary; layout and numbers as in the toolkit's fatbinary_section.h.
struct Wrapper {
  uint32_t magic;
  uint32_t version;  // 1: one translation unit; 2: device-linked, `more` lists the parts that were linked
  const void* image;
  void* more;
};
constexpr uint32_t kWrapperMagic = 0x466243b1;
constexpr uint32_t kWrapperVersion = 1;
constexpr uint32_t kLinkedVersion = 2;

const void* image_of(const void* wrapper) {
  const auto* w = static_cast<const Wrapper*>(wrapper);
  if (w == nullptr || w->magic != kWrapperMagic) return wrapper;  // a bare image
  return w->version == kWrapperVersion || w->version == kLinkedVersion ? w->image : nullptr;
}

// The process ends: whoever unregisters now must not start a conversation with the driver. Handlers run in the reverse
// order of their registration, so this one, registered at the first load, comes before those of the program's start.
void note_exit() { g_exiting.store(true); }

// A launch that fails so names nothing: say once per module which one it is.
void say_load_failure(Module* module, CUresult rc) {
  if (module->failure_said) return;
  module->failure_said = true;
  const char* text = nullptr;
  static_cast<void>(cuGetErrorName(rc, &text));
  fprintf(stderr, "devproxy: %s: the program's device code at %p cannot be loaded: %s\n", kSoname, module->image,
          text != nullptr ? text : "unknown error");
}

cudaError_t refuse_managed(const char* name) {
  char text[256];
  snprintf(text, sizeof text, "__managed__ variable %s", name);
  return refuse(text,
                "a driver would place it in the device-proxy server's process, where the program cannot reach it; use "
                "__device__ and copies, or cudaMallocManaged");
}

// g_load_mu held.
cudaError_t load_module(Module* module, CUlibrary* out) {
  *out = module->library.load(std::memory_order_acquire);
  if (*out != nullptr) return cudaSuccess;
  if (module->image == nullptr) return cudaErrorInvalidKernelImage;
  if (module->managed != nullptr) return refuse_managed(module->managed);  // its kernels would read what nobody wrote
  static bool once = atexit(note_exit) == 0;
  static_cast<void>(once);
  // cuda.h: the image is part of the program, so the driver need not copy it.
  CUlibraryOption preserved = CU_LIBRARY_BINARY_IS_PRESERVED;
  int yes = 1;
  void* value = &yes;
  const CUresult rc = cuLibraryLoadData(out, module->image, nullptr, nullptr, 0, &preserved, &value, 1);
  if (rc != CUDA_SUCCESS) {
    say_load_failure(module, rc);
    return result(rc);
  }
  module->library.store(*out, std::memory_order_release);
  return cudaSuccess;
}

}  // namespace

// Precondition of the three: the context is current.
cudaError_t load_kernel(Kernel* kernel, LoadedKernel** out) {
  const std::lock_guard lock(g_load_mu);
  *out = kernel->loaded.load(std::memory_order_acquire);
  if (*out != nullptr && (*out)->kernel != nullptr) return cudaSuccess;
  CUlibrary library = nullptr;
  if (const cudaError_t rc = load_module(kernel->module, &library); rc != cudaSuccess) return rc;
  CUkernel handle = nullptr;
  if (const CUresult rc = cuLibraryGetKernel(&handle, library, kernel->name); rc != CUDA_SUCCESS)
    return rc == CUDA_ERROR_NOT_FOUND ? cudaErrorInvalidDeviceFunction : result(rc);
  if (*out == nullptr) *out = new LoadedKernel;
  (*out)->kernel = handle;
  kernel->loaded.store(*out, std::memory_order_release);
  const std::lock_guard registry(g_registry_mu);
  g_kernels.put(handle, kernel);
  return cudaSuccess;
}

cudaError_t load_function(Kernel* kernel, int device, CUfunction* out) {
  LoadedKernel* loaded = nullptr;
  if (const cudaError_t rc = load_kernel(kernel, &loaded); rc != cudaSuccess) return rc;
  if (const CUresult rc = cuKernelGetFunction(out, loaded->kernel); rc != CUDA_SUCCESS)
    return rc == CUDA_ERROR_NOT_FOUND ? cudaErrorInvalidDeviceFunction : result(rc);
  loaded->functions[device].store(*out, std::memory_order_release);
  return cudaSuccess;
}

cudaError_t load_address(Variable* variable, int device, CUdeviceptr* out) {
  LoadedVariable* loaded = variable->loaded.load(std::memory_order_acquire);
  if (loaded != nullptr && (*out = loaded->addresses[device].load(std::memory_order_acquire)) != 0) return cudaSuccess;
  const std::lock_guard lock(g_load_mu);
  CUlibrary library = nullptr;
  if (const cudaError_t rc = load_module(variable->module, &library); rc != cudaSuccess) return rc;
  size_t bytes = 0;
  if (const CUresult rc = cuLibraryGetGlobal(out, &bytes, library, variable->name); rc != CUDA_SUCCESS)
    return rc == CUDA_ERROR_NOT_FOUND ? cudaErrorInvalidSymbol : result(rc);
  loaded = variable->loaded.load(std::memory_order_acquire);
  if (loaded == nullptr) {
    loaded = new LoadedVariable;
    variable->loaded.store(loaded, std::memory_order_release);
  }
  loaded->addresses[device].store(*out, std::memory_order_release);
  return cudaSuccess;
}

cudaError_t unload_all() {
  const std::lock_guard lock(g_load_mu);
  CUresult first = CUDA_SUCCESS;
  const auto unload = [&first](Module* module) {
    const CUlibrary library = module->library.exchange(nullptr);
    const CUresult rc = library != nullptr ? cuLibraryUnload(library) : CUDA_SUCCESS;
    if (first == CUDA_SUCCESS) first = rc;
  };
  const std::lock_guard registry(g_registry_mu);
  g_kernels.for_each([&](const void*, Kernel* k) {
    if (LoadedKernel* loaded = k->loaded.load()) {
      loaded->kernel = nullptr;
      for (auto& f : loaded->functions) f.store(nullptr);
    }
    unload(k->module);
  });
  g_variables.for_each([&](const void*, Variable* v) {
    if (LoadedVariable* loaded = v->loaded.load())
      for (auto& a : loaded->addresses) a.store(0);
    unload(v->module);
  });
  return result(first);
}

namespace registration {

void** __cudaRegisterFatBinary(void* fatCubin) {
  auto* module = new Module;
  module->image = image_of(fatCubin);
  if (module->image == nullptr)
    fprintf(stderr, "devproxy: %s: a program registers device code in a form that is not known (version %u)\n", kSoname,
            static_cast<const Wrapper*>(fatCubin)->version);
  return reinterpret_cast<void**>(module);
}

void __cudaRegisterFatBinaryEnd(void**) {}

char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void** fatCubinHandle, const char* hostFun, char*, const char* deviceName, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  auto* kernel = new Kernel;
  kernel->module = reinterpret_cast<Module*>(fatCubinHandle);
  kernel->name = deviceName;
  const std::lock_guard lock(g_registry_mu);
  g_kernels.put(hostFun, kernel);
}

void __cudaRegisterVar(void** fatCubinHandle, char* hostVar, char*, const char* deviceName, int, size_t size, int,
                       int) {
  auto* variable = new Variable;
  variable->module = reinterpret_cast<Module*>(fatCubinHandle);
  variable->name = deviceName;
  variable->bytes = size;
  const std::lock_guard lock(g_registry_mu);
  g_variables.put(hostVar, variable);
}

// Said at once: the host reads such a variable as any other of its own, and would find a null pointer.
void __cudaRegisterManagedVar(void** fatCubinHandle, void**, char*, const char* deviceName, int, size_t, int, int) {
  reinterpret_cast<Module*>(fatCubinHandle)->managed = deviceName;
  static_cast<void>(refuse_managed(deviceName));
}

// By the program's exit handlers, or when a library of it is closed. Only the latter unloads.
void __cudaUnregisterFatBinary(void** fatCubinHandle) {
  auto* module = reinterpret_cast<Module*>(fatCubinHandle);
  if (module == nullptr || g_exiting.load()) return;
  CUlibrary library = nullptr;
  {
    const std::lock_guard lock(g_registry_mu);
    g_kernels.for_each([module](const void* key, const Kernel* k) {
      if (k->module == module) g_kernels.put(key, nullptr);
    });
    g_variables.for_each([module](const void* key, const Variable* v) {
      if (v->module == module) g_variables.put(key, nullptr);
    });
    library = module->library.exchange(nullptr);
  }
  // The objects stay: another thread may be at a launch, which is the program's error and must not be a crash of ours.
  module->image = nullptr;
  CUcontext context = nullptr;
  if (library != nullptr && cuCtxGetCurrent(&context) == CUDA_SUCCESS) static_cast<void>(cuLibraryUnload(library));
}

}  // namespace registration
}  // namespace devproxy::sa::cudart
