// SPDX-License-Identifier: Apache-2.0
// Every call of the genuine NCCL that devproxy makes: one list, one table of function pointers. It is never linked, only
// opened, by an absolute path and never by its name: the name would find devproxy's own libnccl.so.2.
//
// The declarations are nccl.h's. A table is what every version since 2.14 has, which is the first one whose communicators
// need not block.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "devproxy/csrc/base/status.h"

extern "C" {
struct ncclComm;
struct CUstream_st;
// nccl.h, ncclUniqueId.
struct DevproxyNcclId {
  char internal[128];
};
}

namespace devproxy::hal::cuda {

using NcclComm = ncclComm*;
using NcclStream = CUstream_st*;

// nccl.h, ncclResult_t, as far as it is told apart here.
enum NcclResult : int {
  kNcclSuccess = 0,
  kNcclSystemError = 2,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7
};

// nccl.h, ncclConfig_t: its beginning, as version 2.14 has it. A newer library takes its own values for the rest.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef, version = 21400;
  int blocking = 0;
};

// X(field, symbol, signature)
// clang-format off
#define DP_NCCL_CALLS(X) \
  X(get_version, "ncclGetVersion", int (*)(int* version)) \
  X(get_error_string, "ncclGetErrorString", const char* (*)(int result)) \
  X(get_last_error, "ncclGetLastError", const char* (*)(NcclComm comm)) \
  X(get_unique_id, "ncclGetUniqueId", int (*)(DevproxyNcclId* id)) \
  X(init_rank, "ncclCommInitRankConfig", int (*)(NcclComm* comm, int ranks, DevproxyNcclId id, int rank, NcclConfig* config)) \
  X(get_async_error, "ncclCommGetAsyncError", int (*)(NcclComm comm, int* error)) \
  X(finalize, "ncclCommFinalize", int (*)(NcclComm comm)) \
  X(destroy, "ncclCommDestroy", int (*)(NcclComm comm)) \
  X(abort, "ncclCommAbort", int (*)(NcclComm comm)) \
  X(group_start, "ncclGroupStart", int (*)()) \
  X(group_end, "ncclGroupEnd", int (*)()) \
  X(all_reduce, "ncclAllReduce", int (*)(const void* send, void* recv, size_t count, int type, int op, NcclComm comm, NcclStream stream)) \
  X(broadcast, "ncclBroadcast", int (*)(const void* send, void* recv, size_t count, int type, int root, NcclComm comm, NcclStream stream)) \
  X(reduce, "ncclReduce", int (*)(const void* send, void* recv, size_t count, int type, int op, int root, NcclComm comm, NcclStream stream)) \
  X(all_gather, "ncclAllGather", int (*)(const void* send, void* recv, size_t count, int type, NcclComm comm, NcclStream stream)) \
  X(reduce_scatter, "ncclReduceScatter", int (*)(const void* send, void* recv, size_t count, int type, int op, NcclComm comm, NcclStream stream)) \
  X(send, "ncclSend", int (*)(const void* from, size_t count, int type, int peer, NcclComm comm, NcclStream stream)) \
  X(recv, "ncclRecv", int (*)(void* to, size_t count, int type, int peer, NcclComm comm, NcclStream stream)) \
  X(make_premulsum, "ncclRedOpCreatePreMulSum", int (*)(int* op, void* scalar, int type, int residence, NcclComm comm)) \
  X(destroy_op, "ncclRedOpDestroy", int (*)(int op, NcclComm comm))
// clang-format on

class Nccl {
 public:
  // path: an absolute one; empty: what the framework has loaded into this process, else the places where distributions put
  // it; loaded_only: not those, since all ranks must have the same. kNotFound: it is nowhere, and a framework may yet bring
  // it. Devproxy's own is refused, wherever it is found.
  static StatusOr<std::shared_ptr<const Nccl>> open(const std::string& path, bool loaded_only);
  Nccl() = default;
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  template <class F>
  struct Type {
    using type = F;
  };
#define DP_FIELD(field, symbol, signature) Type<signature>::type field = nullptr;
  DP_NCCL_CALLS(DP_FIELD)
#undef DP_FIELD

  const std::string& path() const { return path_; }
  // "`doing`: <NCCL's text>: <what it said last>"
  Status status(int result, const std::string& doing) const;

 private:
  std::string path_;
};

}  // namespace devproxy::hal::cuda
