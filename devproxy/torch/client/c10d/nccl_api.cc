// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/c10d/nccl_api.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace devproxy::aten::nccl {
namespace {

struct LoadedNccl {
  Api table{};
  std::string error;
};

const LoadedNccl& loaded_nccl() {
  static const LoadedNccl* const loaded = [] {
    auto* l = new LoadedNccl;
    // devproxy's shim is preloaded under this SONAME; nothing else is ever opened where it is.
    void* lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (lib == nullptr) {
      l->error = dlerror();
      return l;
    }
    const auto resolve = [&](const char* name) {
      void* call = dlsym(lib, name);
      if (call == nullptr && l->error.empty()) l->error = std::string("libnccl.so.2 lacks ") + name;
      return call;
    };
#define DEVPROXY_RESOLVE(name, arguments) l->table.name = reinterpret_cast<decltype(l->table.name)>(resolve(#name));
    DEVPROXY_NCCL_CALLS(DEVPROXY_RESOLVE)
#undef DEVPROXY_RESOLVE
    l->table.ncclGetErrorString =
        reinterpret_cast<decltype(l->table.ncclGetErrorString)>(resolve("ncclGetErrorString"));
    l->table.ncclGetLastError = reinterpret_cast<decltype(l->table.ncclGetLastError)>(resolve("ncclGetLastError"));
    l->table.devproxy_comm_waits =
        reinterpret_cast<decltype(l->table.devproxy_comm_waits)>(resolve("devproxy_comm_waits"));
    l->table.devproxy_comm_held =
        reinterpret_cast<decltype(l->table.devproxy_comm_held)>(resolve("devproxy_comm_held"));
    return l;
  }();
  return *loaded;
}

}  // namespace

const Api& api() {
  const LoadedNccl& l = loaded_nccl();
  TORCH_CHECK(l.error.empty(), "NCCL cannot be used: ", l.error, ". Start the job with devproxy-run.");
  return l.table;
}

std::string error_text(ncclResult_t result) {
  const char* text = api().ncclGetErrorString(result);
  return text != nullptr ? text : "unknown result code " + std::to_string(static_cast<int>(result));
}

void throw_error(ncclResult_t result, ncclComm_t comm, const std::string& what) {
  const char* last = api().ncclGetLastError(comm);
  std::string text = "NCCL error: " + error_text(result) + " (ncclResult_t " +
                     std::to_string(static_cast<int>(result)) + " from " + what + ")";
  if (last != nullptr && *last != '\0') text += std::string("\nLast error: ") + last;
  TORCH_CHECK_WITH(DistBackendError, false, text);
  __builtin_unreachable();
}

}  // namespace devproxy::aten::nccl
