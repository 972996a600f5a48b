// NCCL for the job, until the communication interceptors exist: its version and its texts.
#include "nccl_decl.gen.h"

namespace devproxy::sa::nccl {
namespace {

constexpr int kVersion = 22703;  // 2.27.3, the one whose semantics the communication interceptors will have

}  // namespace

ncclResult_t ncclGetVersion(int* version) {
  *version = kVersion;
  return 0;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case 0: return "no error";
    case 1: return "unhandled cuda error";
    case 2: return "unhandled system error";
    case 3: return "internal error";
    case 4: return "invalid argument";
    case 5: return "invalid usage: devproxy does not carry collectives yet";
    case 6: return "remote process exited or there was a network error";
    case 7: return "operation in progress";
    default: return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) { return "devproxy does not carry collectives yet; run with one rank"; }

}  // namespace devproxy::sa::nccl
