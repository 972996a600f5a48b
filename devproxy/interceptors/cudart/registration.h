// SPDX-License-Identifier: Apache-2.0
// What nvcc's output registers before main: modules, and host addresses that stand for kernels and variables of them.
//
// A module is loaded when something of it is first used (cuda.h: lazy loading), once per process; the driver loads it
// on each device where it is used. Nothing here calls the driver before that.
#pragma once

#include <atomic>
#include <cstdint>

#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart {

// An image that the compiler put into the program, known by the handle that it keeps.
struct Module {
  const void* image = nullptr;  // a fat binary
  std::atomic<CUlibrary> library{nullptr};
  const char* managed = nullptr;  // a variable in managed memory, which are refused: the module is not loaded
  bool failure_said = false;
};

// A kernel as it was loaded: the driver's handle, and its function on each device.
struct LoadedKernel {
  CUkernel kernel = nullptr;
  std::atomic<CUfunction> functions[kMaxDevices] = {};
};

struct Kernel {
  Module* module = nullptr;
  const char* name = nullptr;  // in the program's own text
  std::atomic<LoadedKernel*> loaded{nullptr};
};

struct LoadedVariable {
  std::atomic<CUdeviceptr> addresses[kMaxDevices] = {};
};

struct Variable {
  Module* module = nullptr;
  const char* name = nullptr;
  size_t bytes = 0;
  std::atomic<LoadedVariable*> loaded{nullptr};
};

// Address -> object. Readers take no lock and wait for nobody; writers hold the registry's mutex. A table that became
// too small stays where it is, because somebody may read it: all of them together are smaller than the last.
template <class T>
class AddressMap {
 public:
  [[nodiscard]] T* find(const void* key) const {
    const Table* table = table_.load(std::memory_order_acquire);
    if (table == nullptr) return nullptr;
    for (size_t i = slot(key);; ++i) {
      const Entry& e = table->entries[i & table->mask];
      const void* const there = e.key.load(std::memory_order_acquire);
      if (there == key) return e.value.load(std::memory_order_acquire);
      if (there == nullptr) return nullptr;
    }
  }

  // A null value forgets the key; its slot stays and is used again by the same key.
  void put(const void* key, T* value) {
    Table* table = table_.load(std::memory_order_relaxed);
    if (table == nullptr || used_ * 2 > table->mask) table = grow(table);
    if (insert(table, key, value)) ++used_;
  }

  template <class F>
  void for_each(F&& f) const {
    const Table* table = table_.load(std::memory_order_acquire);
    for (size_t i = 0; table != nullptr && i <= table->mask; ++i) {
      const void* const key = table->entries[i].key.load(std::memory_order_acquire);
      T* const value = key != nullptr ? table->entries[i].value.load(std::memory_order_acquire) : nullptr;
      if (value != nullptr) f(key, value);
    }
  }

 private:
  struct Entry {
    std::atomic<const void*> key{nullptr};
    std::atomic<T*> value{nullptr};
  };
  struct Table {
    size_t mask;
    Entry* entries;
  };

  static size_t slot(const void* key) {
    return static_cast<size_t>((reinterpret_cast<uintptr_t>(key) * 0x9e3779b97f4a7c15ull) >> 20);
  }

  // True where the key is new.
  static bool insert(Table* table, const void* key, T* value) {
    for (size_t i = slot(key);; ++i) {
      Entry& e = table->entries[i & table->mask];
      const void* const there = e.key.load(std::memory_order_relaxed);
      if (there != nullptr && there != key) continue;
      e.value.store(value, std::memory_order_release);
      e.key.store(key, std::memory_order_release);
      return there == nullptr;
    }
  }

  Table* grow(const Table* old) {
    const size_t size = old == nullptr ? 256 : (old->mask + 1) * 2;
    auto* table = new Table{size - 1, new Entry[size]};
    used_ = 0;
    for (size_t i = 0; old != nullptr && i <= old->mask; ++i) {
      const void* const key = old->entries[i].key.load(std::memory_order_relaxed);
      T* const value = old->entries[i].value.load(std::memory_order_relaxed);
      if (key != nullptr && value != nullptr && insert(table, key, value)) ++used_;
    }
    table_.store(table, std::memory_order_release);
    return table;
  }

  std::atomic<Table*> table_{nullptr};
  size_t used_ = 0;
};

// By host address, and by the driver's handle once it is loaded: a program may launch either.
extern AddressMap<Kernel> g_kernels;
extern AddressMap<Variable> g_variables;

// Slow paths, for what is not loaded yet. The context is current.
cudaError_t load_kernel(Kernel* kernel, LoadedKernel** out);
cudaError_t load_function(Kernel* kernel, int device, CUfunction* out);
cudaError_t load_address(Variable* variable, int device, CUdeviceptr* out);

// The function of a host address or of a kernel's handle on a device.
inline cudaError_t function_of(const void* symbol, int device, CUfunction* out) {
  Kernel* kernel = g_kernels.find(symbol);
  if (__builtin_expect(kernel != nullptr, 1)) {
    const LoadedKernel* loaded = kernel->loaded.load(std::memory_order_acquire);
    if (__builtin_expect(loaded != nullptr, 1)) {
      *out = loaded->functions[device].load(std::memory_order_acquire);
      if (__builtin_expect(*out != nullptr, 1)) return cudaSuccess;
    }
    return load_function(kernel, device, out);
  }
  // A kernel of cudaLibraryGetKernel, which the header lets be passed instead.
  if (symbol != nullptr &&
      cuKernelGetFunction(out, reinterpret_cast<CUkernel>(const_cast<void*>(symbol))) == CUDA_SUCCESS)
    return cudaSuccess;
  return cudaErrorInvalidDeviceFunction;
}

// Unloads every module; each is loaded again at its next use.
cudaError_t unload_all();

}  // namespace devproxy::sa::cudart
