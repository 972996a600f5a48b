// SPDX-License-Identifier: Apache-2.0
// How a library finds the driver: cuGetProcAddress by name and version, and NVIDIA's private tables, which we have not.
#include "devproxy/interceptors/entrypoint/resolve.h"

#include <dlfcn.h>
#include <unistd.h>
#include <unwind.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "devproxy/csrc/client/stub.h"
#include "sa_decl.gen.h"

namespace devproxy::sa::entrypoint {
namespace {

// The three sets of flags that cuda.h allows; anything else is an error of the caller.
bool valid_flags(cuuint64_t flags) {
  return flags == CU_GET_PROC_ADDRESS_DEFAULT || flags == CU_GET_PROC_ADDRESS_LEGACY_STREAM ||
         flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
}

// Refused functions resolve too: a library that looks up what it never calls must load (facts: 440 look-ups per copy
// of cudart, 75 ever called).
CUresult look_up(const char* symbol, void** pfn, int version, cuuint64_t flags,
                 CUdriverProcAddressQueryResult* status) {
  *pfn = nullptr;
  if (!valid_flags(flags)) return CUDA_ERROR_INVALID_VALUE;
  const Resolution found = resolve(symbol, version, flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
  if (status != nullptr) {
    *status = found.status == Resolved::kFound         ? CU_GET_PROC_ADDRESS_SUCCESS
              : found.status == Resolved::kUnknownName ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
                                                       : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
  }
  if (found.status != Resolved::kFound) return CUDA_ERROR_NOT_FOUND;
  *pfn = found.function;
  return CUDA_SUCCESS;
}

// Tables that only NVIDIA's CUDA runtime asks for, first thing after loading (facts: "Private tables").
constexpr uint8_t kRuntimeTables[][16] = {
    {0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9},
    {0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2},
};
constexpr int kMaxNamed = 16;
constexpr uint16_t kFirstId = 0xfff0;  // client::refuse speaks once per id: one for each file
constexpr int kPathShown = 512;        // of client::log's line

// The file whose code called this library.
struct Caller {
  const void* ours;  // where this library is loaded
  const void* base;
  const char* name;
};

_Unwind_Reason_Code look_at_frame(_Unwind_Context* frame, void* to) {
  auto* caller = static_cast<Caller*>(to);
  Dl_info info;
  // The address behind a call may belong to the next function, but never to another file: one byte back is in it.
  if (dladdr(reinterpret_cast<void*>(_Unwind_GetIP(frame) - 1), &info) == 0) return _URC_NO_REASON;
  if (info.dli_fbase == caller->ours) return _URC_NO_REASON;
  caller->base = info.dli_fbase;
  caller->name = info.dli_fname;
  return _URC_END_OF_STACK;  // any code but NO_REASON ends the walk
}

Caller find_caller() {
  Caller caller{nullptr, nullptr, ""};
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&find_caller), &info) != 0) caller.ours = info.dli_fbase;
  _Unwind_Backtrace(look_at_frame, &caller);
  return caller;
}

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash != nullptr ? slash + 1 : path;
}

// The file's number the first time that it asks, then -1.
int first_time(const void* base) {
  static std::atomic<const void*> named[kMaxNamed];
  for (int i = 0; i < kMaxNamed; ++i) {
    const void* before = nullptr;
    if (named[i].compare_exchange_strong(before, base)) return i;
    if (before == base) return -1;
  }
  return -1;
}

// Who asks for the runtime's tables holds NVIDIA's CUDA runtime: as libcudart.so, within one of NVIDIA's libraries, or
// linked statically into a program. Only for the last is there something that its builder can do.
CUresult refuse_runtime() {
  const Caller caller = find_caller();
  const int number = first_time(caller.base);
  if (number < 0) return CUDA_ERROR_NOT_SUPPORTED;
  char program[kPathShown];
  const char* path = caller.name;
  if (std::strchr(path, '/') == nullptr) {  // the main program is known by its argv[0]
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length > 0) {
      program[length] = '\0';
      path = program;
    }
  }
  const char* file = base_name(path);
  const auto begins = [file](const char* word) { return std::strncmp(file, word, std::strlen(word)) == 0; };
  char text[kPathShown + 320];
  if (begins("libcudart.so")) {
    std::snprintf(text, sizeof text,
                  "%.512s is NVIDIA's own CUDA runtime, which runs only on NVIDIA's own driver; load it by its name, "
                  "with the LD_PRELOAD of the job, and devproxy's comes in its place",
                  path);
  } else if (begins("libcu") || begins("libnccl") || begins("libnpp") || begins("libnv")) {
    std::snprintf(text, sizeof text,
                  "%.512s has a statically linked CUDA runtime inside, which runs only on NVIDIA's own driver; "
                  "devproxy does not carry this library yet",
                  path);
  } else {
    std::snprintf(text, sizeof text,
                  "%.512s has a statically linked CUDA runtime, which runs only on NVIDIA's own driver; relink it with "
                  "the shared one: nvcc -cudart shared (CMake: CUDA_RUNTIME_LIBRARY Shared)",
                  path);
  }
  return client::refuse({"cuGetExportTable", static_cast<uint16_t>(kFirstId + number), false}, text);
}

}  // namespace

CUresult cuGetProcAddress(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags) {
  return look_up(symbol, pfn, cudaVersion, flags, nullptr);
}

CUresult cuGetProcAddress_v2(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* symbolStatus) {
  return look_up(symbol, pfn, cudaVersion, flags, symbolStatus);
}

// cudart has the driver prove that it is NVIDIA's own. devproxy neither holds nor imitates nor relays that proof, so
// this is where a program that brought NVIDIA's cudart learns why it stops: its next call returns an error.
CUresult cuGetExportTable(const void** ppExportTable, const CUuuid* pExportTableId) {
  *ppExportTable = nullptr;
  for (const auto& table : kRuntimeTables) {
    if (std::memcmp(pExportTableId->bytes, table, sizeof table) == 0) return refuse_runtime();
  }
  return CUDA_ERROR_NOT_FOUND;
}

}  // namespace devproxy::sa::entrypoint
