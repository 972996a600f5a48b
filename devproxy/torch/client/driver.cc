// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/driver.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace devproxy::aten {
namespace {

#define DEVPROXY_TEXT_(x) #x
#define DEVPROXY_TEXT(x) DEVPROXY_TEXT_(x)

struct Loaded {
  Driver table{};
  std::string error;
};

const Loaded& loaded() {
  static const Loaded* const loaded = [] {
    auto* l = new Loaded;
    // The shim is preloaded under this SONAME; nothing else is ever opened where it is.
    void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (lib == nullptr) {
      l->error = dlerror();
      return l;
    }
#define DEVPROXY_RESOLVE(name)                                                                \
  l->table.name = reinterpret_cast<decltype(l->table.name)>(dlsym(lib, DEVPROXY_TEXT(name))); \
  if (l->table.name == nullptr && l->error.empty()) l->error = "libcuda.so.1 lacks " DEVPROXY_TEXT(name);
    DEVPROXY_DRIVER_CALLS(DEVPROXY_RESOLVE)
#undef DEVPROXY_RESOLVE
    // Before the first attach: this process's memory and streams belong where the framework in the server works.
    if (auto* use = reinterpret_cast<void (*)()>(dlsym(lib, "devproxy_use_framework"))) use();
    return l;
  }();
  return *loaded;
}

}  // namespace

bool driver_present() noexcept { return loaded().error.empty(); }

const Driver& driver() {
  const Loaded& l = loaded();
  TORCH_CHECK(l.error.empty(), "The CUDA driver cannot be used: ", l.error, ". Start the job with devproxy-run.");
  return l.table;
}

std::string error_text(CUresult result) {
  const char* text = nullptr;
  if (driver().cuGetErrorString(result, &text) == CUDA_SUCCESS && text != nullptr) return text;
  return "unrecognized error code " + std::to_string(static_cast<int>(result));
}

void throw_cuda_error(CUresult result, const char* what) {
  std::string text = "CUDA error: " + error_text(result) + "\n(CUresult " + std::to_string(static_cast<int>(result)) +
                     " from " + what + ")\n";
  if (result == CUDA_ERROR_ASSERT || (result >= CUDA_ERROR_ILLEGAL_ADDRESS && result <= CUDA_ERROR_LAUNCH_FAILED))
    text +=
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n";
  // A kernel's own memory, which is only asked for when it is launched; or what error_text() says.
  TORCH_CHECK_WITH(OutOfMemoryError, result != CUDA_ERROR_OUT_OF_MEMORY, "CUDA out of memory (", what,
                   "): ", error_text(result));
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, static_cast<int32_t>(result),
                              std::move(text));
}

std::string other_holders(int device) {
  static const auto ask = reinterpret_cast<int (*)(int, char*, int)>(dlsym(RTLD_DEFAULT, "devproxy_memory_holders"));
  char text[640];
  if (ask == nullptr || ask(device, text, sizeof text) <= 0) return "";
  return std::string(" On this GPU ") + text + ".";
}

void warn(const std::string& line) {
  // Not in a libcuda that is not ours.
  static const auto say = reinterpret_cast<void (*)(const char*)>(dlsym(RTLD_DEFAULT, "devproxy_warn"));
  if (say != nullptr) say(line.c_str());
}

}  // namespace devproxy::aten
