// SPDX-License-Identifier: Apache-2.0
// What the parts of libnccl.so.2 share: the communicator as the job holds it, and how a call fails.
//
// All state is plain memory of the job, so it travels in the process image. The communicator itself is the server's;
// this side has its handle.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "devproxy/csrc/core/core.h"
#include "nccl_decl.gen.h"

// For whom the communicator's operation has been waiting for a while, in words that follow 'waits for'; empty: for nobody,
// or it is not known. text: at most `bytes` of them, with a NUL. No function of NCCL's says this.
extern "C" __attribute__((visibility("default"))) void devproxy_comm_waits(ncclComm_t comm, char* text, size_t bytes);
// Not 0: devproxy holds the job, for a checkpoint or a move, so an operation that waits is not late.
extern "C" __attribute__((visibility("default"))) int devproxy_comm_held(ncclComm_t comm);

namespace devproxy::sa::nccl {

// nccl.h, ncclResult_t.
inline constexpr ncclResult_t kSuccess = 0, kUnhandledCudaError = 1, kSystemError = 2, kInternalError = 3,
                              kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;

// Notes the text for ncclGetLastError, and says it where NCCL_DEBUG=WARN or more is set.
[[gnu::format(printf, 2, 3)]] ncclResult_t fail(ncclResult_t result, const char* format, ...);
// The same for a result of the core, which is a CUresult.
ncclResult_t fail_core(int32_t rc, const char* doing);

// nullptr where libcuda.so.1 of this process is not devproxy's of this build; said once.
const Core* core();

// A reduction that ncclRedOpCreatePreMulSum made.
struct PreMulSum {
  bool live = false;
  uint8_t type = 0, on_device = 0;
  uint64_t scalar = 0;
};

}  // namespace devproxy::sa::nccl

// What an ncclComm_t points to. Never freed: a stale pointer is an error and not somebody else's communicator.
struct ncclComm {
  static constexpr uint64_t kMagic = 0x6d6d6f4343435044;  // "DPCCComm"
  uint64_t magic = kMagic;
  int32_t device = 0;
  uint32_t ranks = 1, rank = 0;
  uint64_t handle = 0;  // on the server
  devproxy::CommKey key;
  bool blocking = true;

  // Guards what follows. A leaf, but for messages.
  std::mutex mu;
  enum class State : uint8_t { kStarting, kReady, kFailed, kGone } state = State::kStarting;
  ncclResult_t result = 0;   // of kFailed
  uint64_t init_stream = 0;  // kStarting: on which the server waits for the members
  bool revoked = false, suspended = false;
  // At every member the same numbers.
  uint64_t splits = 0, grows = 0, stand_ins = 0;
  std::map<uint64_t, uint64_t> shrinks;  // by whom they exclude
  std::vector<uint64_t> streams;         // on which it has been used
  std::vector<devproxy::sa::nccl::PreMulSum> reductions;
};

namespace devproxy::sa::nccl {

// The communicator behind what the job passed; nullptr and *result, with its text.
ncclComm* comm_of(ncclComm_t comm, const char* what, ncclResult_t* result);
// The same, once its members have come.
ncclComm* ready(ncclComm_t comm, const char* what, ncclResult_t* result);
// Waits until the members have come, or the making has failed.
ncclResult_t await_members(ncclComm* comm);
// Posts this member's arrival. What a group puts off until its end.
ncclResult_t start(ncclComm* comm);

// -- making
// The communicator that an id names, and an id for it.
ncclResult_t key_of(const ncclUniqueId& id, CommKey* key);
ncclResult_t id_of(const CommKey& key, ncclUniqueId* out);
// Without a config it is as the parent, where there is one.
ncclResult_t is_blocking(const ncclConfig_t* config, const ncclComm* parent, bool* blocking);
// A communicator that has not begun to look for its members.
ncclResult_t make(int32_t device, const CommKey& key, int ranks, int rank, bool blocking, ncclComm** out);
// Begins, now or at the end of the group, and waits where it is a blocking one.
ncclResult_t launch(ncclComm* comm, ncclComm_t* out);
ncclResult_t init_rank(ncclComm_t* out, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config);

// -- deriving (client_derive.cc)
// A split that waits for what the other ranks say.
struct Split {
  ncclComm* parent = nullptr;
  ncclComm* child = nullptr;    // nullptr: this rank gets none
  ncclComm* through = nullptr;  // which carries the words of the ranks
  int color = 0;
  uint64_t own = 0;                 // this rank's word
  uint64_t memory = 0, stream = 0;  // of the exchange
};
// Says this rank's word, where it is not said yet. All of a thread's splits come to it before one of them waits.
ncclResult_t exchange(Split* split);
// Waits for the others' words, and starts the child.
ncclResult_t finish(const Split& split);

// -- groups (client_group.cc)
bool in_group();
void put_off(ncclComm* comm);  // in_group(): its start, and the wait for it
void put_off(const Split& split);
// One operation, now or at the end of the group. `op` lacks the communicator's handle.
ncclResult_t submit(ncclComm* comm, cudaStream_t stream, CommOp op, const char* what);

}  // namespace devproxy::sa::nccl
