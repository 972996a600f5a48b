// SPDX-License-Identifier: Apache-2.0
// NCCL's C API as the process group uses it: one table, resolved at run time against libnccl.so.2, and one way to turn
// a result into the exception that PyTorch's own NCCL build throws. The names, values and layouts are those of nccl.h
// 2.29; no header of NVIDIA's is needed to build the plugin.
#pragma once

#include <cuda.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>

namespace devproxy::aten::nccl {

struct ncclComm;
using ncclComm_t = ncclComm*;
struct ncclUniqueId {
  char internal[128];
};

enum ncclResult_t : int {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};
enum ncclDataType_t : int {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
};
// Above ncclNumOps are the operators that ncclRedOpCreatePreMulSum made.
enum ncclRedOp_t : int { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4, ncclNumOps = 5 };
enum ncclScalarResidence_t : int { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 };

enum ncclCommMemStat_t : int {
  ncclStatGpuMemSuspend = 0,
  ncclStatGpuMemSuspended = 1,
  ncclStatGpuMemPersist = 2,
  ncclStatGpuMemTotal = 3,
};

inline constexpr int kSuspendMemory = 1;    // NCCL_SUSPEND_MEM
inline constexpr int kShrinkAbort = 1;      // NCCL_SHRINK_ABORT
inline constexpr int kUndefined = INT_MIN;  // NCCL_CONFIG_UNDEF_INT
inline constexpr int kNoColor = -1;         // NCCL_SPLIT_NOCOLOR

struct ncclConfig_t {
  size_t size = sizeof(ncclConfig_t);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 22703;  // since when it has these fields
  int blocking = kUndefined;
  int cgaClusterSize = kUndefined;
  int minCTAs = kUndefined;
  int maxCTAs = kUndefined;
  const char* netName = nullptr;
  int splitShare = kUndefined;
  int trafficClass = kUndefined;
  const char* commName = nullptr;
  int collnetEnable = kUndefined;
  int CTAPolicy = kUndefined;
  int shrinkShare = kUndefined;
  int nvlsCTAs = kUndefined;
};

// clang-format off
#define DEVPROXY_NCCL_CALLS(X)                                                                                        \
  X(ncclGetVersion, (int*))                                                                                           \
  X(ncclGetUniqueId, (ncclUniqueId*))                                                                                 \
  X(ncclCommInitRankConfig, (ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*))                                     \
  X(ncclCommSplit, (ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*))                                                \
  X(ncclCommShrink, (ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int))                                         \
  X(ncclCommSuspend, (ncclComm_t, int))                                                                               \
  X(ncclCommResume, (ncclComm_t))                                                                                     \
  X(ncclCommMemStats, (ncclComm_t, ncclCommMemStat_t, uint64_t*))                                                     \
  X(ncclCommFinalize, (ncclComm_t))                                                                                   \
  X(ncclCommDestroy, (ncclComm_t))                                                                                    \
  X(ncclCommAbort, (ncclComm_t))                                                                                      \
  X(ncclCommGetAsyncError, (ncclComm_t, ncclResult_t*))                                                               \
  X(ncclGroupStart, ())                                                                                               \
  X(ncclGroupEnd, ())                                                                                                 \
  X(ncclAllReduce, (const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream))                   \
  X(ncclBroadcast, (const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, CUstream))                           \
  X(ncclReduce, (const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, CUstream))                 \
  X(ncclAllGather, (const void*, void*, size_t, ncclDataType_t, ncclComm_t, CUstream))                                \
  X(ncclReduceScatter, (const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream))               \
  X(ncclSend, (const void*, size_t, ncclDataType_t, int, ncclComm_t, CUstream))                                       \
  X(ncclRecv, (void*, size_t, ncclDataType_t, int, ncclComm_t, CUstream))                                             \
  X(ncclRedOpCreatePreMulSum, (ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t))               \
  X(ncclRedOpDestroy, (ncclRedOp_t, ncclComm_t))
// clang-format on

struct Api {
#define DEVPROXY_DECLARE(name, arguments) ncclResult_t(*name) arguments;
  DEVPROXY_NCCL_CALLS(DEVPROXY_DECLARE)
#undef DEVPROXY_DECLARE
  const char* (*ncclGetErrorString)(ncclResult_t);
  const char* (*ncclGetLastError)(ncclComm_t);
  void (*devproxy_comm_waits)(ncclComm_t, char*, size_t);  // devproxy/interceptors/nccl/comm.h
  int (*devproxy_comm_held)(ncclComm_t);                   // likewise
};

// The table. Throws c10::Error if libnccl.so.2 cannot be loaded or lacks a call.
const Api& api();

std::string error_text(ncclResult_t result);
// c10::DistBackendError: "NCCL error: <text>", with what was tried and NCCL's own last words. comm may be null.
[[noreturn]] void throw_error(ncclResult_t result, ncclComm_t comm, const std::string& what);
inline void check(ncclResult_t result, ncclComm_t comm, const char* what) {
  if (result != ncclSuccess) [[unlikely]]
    throw_error(result, comm, what);
}
// For an operation: that of a non-blocking communicator may still be in progress.
inline void check_started(ncclResult_t result, ncclComm_t comm, const char* what) {
  if (result != ncclInProgress) check(result, comm, what);
}

// ncclGroupStart at the beginning of a scope. end() closes the group and returns what NCCL says; leaving the scope
// without it closes the group as well, because NCCL keeps an open group for the thread.
class Group {
 public:
  Group() { check(api().ncclGroupStart(), nullptr, "ncclGroupStart"); }
  ~Group() {
    if (open_) (void)api().ncclGroupEnd();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ncclResult_t end() {
    open_ = false;
    return api().ncclGroupEnd();
  }

 private:
  bool open_ = true;
};

}  // namespace devproxy::aten::nccl
