// How a library finds the driver: cuGetProcAddress by name and version, and NVIDIA's private tables, which we have not.
#include "devproxy/interceptors/entrypoint/resolve.h"

#include <cstdint>
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
constexpr client::ApiInfo kExportTableInfo{"cuGetExportTable", 0xffff, false};

}  // namespace

CUresult cuGetProcAddress(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags) {
  return look_up(symbol, pfn, cudaVersion, flags, nullptr);
}

CUresult cuGetProcAddress_v2(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* symbolStatus) {
  return look_up(symbol, pfn, cudaVersion, flags, symbolStatus);
}

// cudart has the driver prove that it is NVIDIA's own. devproxy neither holds nor imitates nor relays that proof, so
// this is where a program that brought NVIDIA's cudart (often linked statically) learns why it stops.
CUresult cuGetExportTable(const void** ppExportTable, const CUuuid* pExportTableId) {
  *ppExportTable = nullptr;
  for (const auto& table : kRuntimeTables) {
    if (std::memcmp(pExportTableId->bytes, table, sizeof table) == 0) {
      return client::refuse(
          kExportTableInfo,
          "NVIDIA's CUDA runtime (libcudart, often linked statically) runs only on NVIDIA's own driver; "
          "devproxy runs programs that call the driver API, and PyTorch through its own plugin");
    }
  }
  return CUDA_ERROR_NOT_FOUND;
}

}  // namespace devproxy::sa::entrypoint
