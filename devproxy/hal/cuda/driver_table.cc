// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/driver_table.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <cstring>
#include <utility>

namespace devproxy::hal::cuda {

namespace {

// Every build of our own shim exports this (devproxy/csrc/client/process.cc). A server that found it would call itself.
constexpr const char* kShimMark = "devproxy_abi_id";

// A name without a slash would find whatever LD_PRELOAD or LD_LIBRARY_PATH put first, our shim for example; a path
// opens that file even where a library of the same SONAME is loaded.
constexpr const char* kPlaces[] = {
#if defined(__aarch64__)
    "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
#else
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
#endif
    "/usr/lib64/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",
    "/usr/lib/libcuda.so.1",
};

std::string loader_error() {
  const char* why = dlerror();
  return why ? why : "no reason given";
}

template <class F>
bool resolve(void* library, Entry<F>& entry, const char* symbol, std::string* missing) {
  entry.symbol = symbol;
  entry.function = reinterpret_cast<F>(dlsym(library, symbol));
  if (!entry.function) *missing += (missing->empty() ? "" : ", ") + std::string(symbol);
  return entry.function != nullptr;
}

}  // namespace

thread_local const char* t_inside = nullptr;

StatusOr<std::shared_ptr<const Driver>> Driver::open(const std::string& path) {
  std::string from = path;
  if (from.empty()) {
    struct stat found;
    for (const char* place : kPlaces)
      if (from.empty() && stat(place, &found) == 0) from = place;
  }
  if (from.empty())
    return Status(kNoDevice,
                  "the NVIDIA driver library libcuda.so.1 is in none of its usual places: install the driver, "
                  "give the container its libraries, or name the file");
  if (from.front() != '/')
    return Status(kInvalidValue, "the driver library must be named by an absolute path, not '" + from + "'");

  auto driver = std::make_shared<Driver>();
  driver->path_ = from;
  driver->library_ = dlopen(from.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!driver->library_)
    return Status(kNoDevice, "the driver library " + from + " cannot be opened: " + loader_error());
  if (dlsym(driver->library_, kShimMark)) {
    dlclose(driver->library_);
    return Status(kNoDevice, from +
                                 " is devproxy's own libcuda.so.1, not the NVIDIA driver: start the server without "
                                 "LD_PRELOAD and name the driver's file");
  }

  std::string missing;
#define DP_STRING(name) #name
#define DP_EXPANDED_STRING(name) DP_STRING(name)
#define DP_RESOLVE(name) resolve(driver->library_, driver->name, DP_EXPANDED_STRING(name), &missing);
  DP_CUDA_CALLS(DP_RESOLVE)
#undef DP_RESOLVE
  std::string lacks;  // nobody's concern before it is used
#define DP_RESOLVE(name) resolve(driver->library_, driver->name, DP_EXPANDED_STRING(name), &lacks);
  DP_CUDA_OPTIONAL_CALLS(DP_RESOLVE)
#undef DP_RESOLVE
#define DP_RESOLVE(field, symbol, type) resolve(driver->library_, driver->field, symbol, &missing);
  DP_CUDA_PINNED_CALLS(DP_RESOLVE)
#undef DP_RESOLVE
  if (!missing.empty())
    return Status(kNotSupported, "the driver library " + from + " lacks " + missing +
                                     ": it is too old, devproxy needs a driver for CUDA 12.4 or newer");
  return std::shared_ptr<const Driver>(std::move(driver));
}

std::string Driver::text(CUresult result) const {
  const char *name = nullptr, *meaning = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &meaning);
  return std::string(name ? name : "an error without a name") + " (" + std::to_string(static_cast<int>(result)) + ")" +
         (meaning ? std::string(": ") + meaning : "");
}

}  // namespace devproxy::hal::cuda
