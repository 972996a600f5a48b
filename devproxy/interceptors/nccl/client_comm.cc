// SPDX-License-Identifier: Apache-2.0
// Communicators: how they are made and end. How one comes from another: client_derive.cc.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/interceptors/nccl/comm.h"

// The driver's functions that this library calls as any program does.
extern "C" {
int cuMemAlloc_v2(uint64_t* ptr, size_t bytes);
int cuMemFree_v2(uint64_t ptr);
}

namespace devproxy::sa::nccl {

namespace {

// nccl.h, ncclUniqueId: 128 bytes that the job carries from one rank to the others. call: no two ids are equal, also
// where they name the same communicator.
struct UniqueId {
  char magic[8];
  uint64_t key[2], call;
  uint8_t zero[96];
};
static_assert(sizeof(UniqueId) == 128);
constexpr char kIdMagic[8] = {'D', 'P', 'n', 'c', 'c', 'l', '0', '1'};

// nccl.h, ncclConfig_t: its beginning, which every version has.
struct ConfigHead {
  size_t size;
  unsigned magic, version;
  int blocking;
};
constexpr unsigned kConfigMagic = 0xcafebeef;

constexpr uint64_t kSayAfterUs = 15'000'000;  // that a communicator's members do not come

constexpr int kSuspendMemory = 1;  // nccl.h, NCCL_SUSPEND_MEM
// nccl.h, ncclCommMemStat_t: bytes that a suspension frees, whether it is suspended, bytes that stay, and their sum.
constexpr int kStatSuspended = 1, kStatTotal = 3;

// The members' state has come to its end. comm->mu held.
ncclResult_t settle(ncclComm* comm) {
  core()->destroy_stream(comm->device, comm->init_stream);
  comm->init_stream = 0;
  uint32_t state = 0;
  char why[512];
  const int32_t rc = core()->comm_state(comm->device, comm->handle, &state, why, sizeof why);
  if (rc == 0 && state == 0) {
    comm->state = ncclComm::State::kReady;
    return kSuccess;
  }
  comm->state = ncclComm::State::kFailed;
  return comm->result = rc ? fail_core(rc, "making the communicator")
                           : fail(static_cast<ncclResult_t>(state), "making the communicator: %s", why);
}

ncclResult_t ended(const ncclComm* comm, const char* what) {
  if (comm->state == ncclComm::State::kFailed)
    return fail(comm->result, "%s: the communicator could not be made", what);
  return fail(kInvalidArgument, "%s: the communicator was destroyed or aborted", what);
}

// What was submitted has completed: only then a member may go (the cut counts on it).
ncclResult_t flush(ncclComm* comm) {
  std::vector<uint64_t> streams;
  {
    const std::lock_guard lock(comm->mu);
    streams.swap(comm->streams);
  }
  for (const uint64_t stream : streams) {
    const int32_t rc = core()->wait_stream(comm->device, stream);
    if (rc != 0 && rc != 400) return fail_core(rc, "waiting for what was submitted");  // 400: the stream is gone
  }
  return kSuccess;
}

}  // namespace

// -- for the other parts --------------------------------------------------------------------------------------------

ncclResult_t key_of(const ncclUniqueId& id, CommKey* key) {
  UniqueId own;
  memcpy(&own, &id, sizeof own);
  if (memcmp(own.magic, kIdMagic, sizeof kIdMagic) != 0)
    return fail(kInvalidArgument, "the unique id is none that ncclGetUniqueId has made");
  *key = {own.key[0], own.key[1]};
  return kSuccess;
}

ncclResult_t is_blocking(const ncclConfig_t* config, const ncclComm* parent, bool* blocking) {
  *blocking = !parent || parent->blocking;
  if (!config) return kSuccess;
  ConfigHead head;
  memcpy(&head, config, sizeof head);
  if (head.magic != kConfigMagic || head.size < sizeof head)
    return fail(kInvalidArgument, "ncclConfig_t was not set up with NCCL_CONFIG_INITIALIZER");
  *blocking = head.blocking != 0;  // undefined (INT_MIN): the default, which is to block
  return kSuccess;
}

ncclResult_t id_of(const CommKey& key, ncclUniqueId* out) {
  UniqueId id{};
  memcpy(id.magic, kIdMagic, sizeof kIdMagic);
  if (getrandom(&id.call, sizeof id.call, 0) != static_cast<ssize_t>(sizeof id.call))
    return fail(kSystemError, "the system has no random numbers: %s", strerror(errno));
  id.key[0] = key.low, id.key[1] = key.high;
  memcpy(out, &id, sizeof id);
  return kSuccess;
}

ncclResult_t make(int32_t device, const CommKey& key, int ranks, int rank, bool blocking, ncclComm** out) {
  if (ranks < 1 || static_cast<uint32_t>(ranks) > kMaxCommRanks || rank < 0 || rank >= ranks)
    return fail(kInvalidArgument, "rank %d of %d: a communicator has 1 to %u ranks, counted from 0", rank, ranks,
                kMaxCommRanks);
  auto comm = std::make_unique<ncclComm>();
  comm->device = device;
  comm->ranks = static_cast<uint32_t>(ranks);
  comm->rank = static_cast<uint32_t>(rank);
  comm->key = key;
  comm->blocking = blocking;
  if (const int32_t rc = core()->make_comm(device, &comm->handle); rc != 0) return fail_core(rc, "opening the device");
  *out = comm.release();
  return kSuccess;
}

ncclResult_t launch(ncclComm* comm, ncclComm_t* out) {
  *out = comm;
  if (in_group()) {
    put_off(comm);
    return kSuccess;
  }
  if (const ncclResult_t rc = start(comm); rc != kSuccess) return rc;
  return comm->blocking ? await_members(comm) : kInProgress;
}

ncclResult_t init_rank(ncclComm_t* out, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config) {
  if (!core()) return kInternalError;
  *out = nullptr;
  CommKey key;
  bool blocking = true;
  if (const ncclResult_t rc = key_of(id, &key); rc != kSuccess) return rc;
  if (const ncclResult_t rc = is_blocking(config, nullptr, &blocking); rc != kSuccess) return rc;
  int32_t device = 0;
  if (int32_t rc = core()->init(); rc != 0 || (rc = core()->current_device(&device)) != 0)
    return fail_core(rc, "finding the current device (cudaSetDevice comes before ncclCommInitRank)");
  ncclComm* comm = nullptr;
  if (const ncclResult_t rc = make(device, key, ranks, rank, blocking, &comm); rc != kSuccess) return rc;
  return launch(comm, out);
}

ncclComm* comm_of(ncclComm_t comm, const char* what, ncclResult_t* result) {
  if (core() && comm && comm->magic == ncclComm::kMagic) return comm;
  *result = core() ? fail(kInvalidArgument, "%s: this is no communicator", what) : kInternalError;
  return nullptr;
}

ncclResult_t start(ncclComm* comm) {
  const std::lock_guard lock(comm->mu);
  int32_t rc = core()->create_stream(comm->device, &comm->init_stream);
  if (rc == 0)
    rc = core()->comm_init(comm->device, comm->handle, comm->init_stream, comm->key, comm->ranks, comm->rank);
  if (rc == 0) return kSuccess;
  comm->state = ncclComm::State::kFailed;
  return comm->result = fail_core(rc, "asking the server for a communicator");
}

// Not in one wait of the core's: torch's watchdog does not look at a communicator that is being made, so nobody else says
// which rank does not come.
static int32_t await(ncclComm* comm, uint64_t stream) {
  constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY
  constexpr unsigned kMostUs = 2'000;
  const uint64_t begin = now_us();
  bool said = false;
  for (unsigned us = 20;; us = std::min(2 * us, kMostUs)) {
    if (const int32_t rc = core()->query_stream(comm->device, stream); rc != kNotReady) return rc;
    usleep(us);
    if (said || now_us() - begin < kSayAfterUs) continue;
    said = true;
    char whom[512];
    devproxy_comm_waits(comm, whom, sizeof whom);
    if (*whom)
      fprintf(stderr, "devproxy: rank %u of a communicator of %u waits for %s\n", comm->rank, comm->ranks, whom);
  }
}

ncclResult_t await_members(ncclComm* comm) {
  uint64_t stream = 0;
  {
    const std::lock_guard lock(comm->mu);
    if (comm->state == ncclComm::State::kReady) return kSuccess;
    if (comm->state != ncclComm::State::kStarting) return ended(comm, "waiting for the members");
    stream = comm->init_stream;
  }
  const int32_t rc = await(comm, stream);
  const std::lock_guard lock(comm->mu);
  if (comm->state == ncclComm::State::kReady) return kSuccess;  // another thread has settled it
  if (comm->state != ncclComm::State::kStarting) return ended(comm, "waiting for the members");
  if (rc == 0) return settle(comm);
  comm->state = ncclComm::State::kFailed;
  return comm->result = fail_core(rc, "waiting for the members of the communicator");
}

ncclComm* ready(ncclComm_t given, const char* what, ncclResult_t* result) {
  ncclComm* comm = comm_of(given, what, result);
  if (!comm) return nullptr;
  {
    const std::lock_guard lock(comm->mu);
    if (comm->state == ncclComm::State::kReady) return comm;
    if (comm->state != ncclComm::State::kStarting) {
      *result = ended(comm, what);
      return nullptr;
    }
    if (comm->init_stream == 0) {  // put off until the end of a group of this very thread
      *result = fail(kInvalidUsage, "%s: the group that makes the communicator has not ended", what);
      return nullptr;
    }
  }
  *result = await_members(comm);
  return *result == kSuccess ? comm : nullptr;
}

// -- making ---------------------------------------------------------------------------------------------------------

ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  uint64_t key[2];
  if (getrandom(key, sizeof key, 0) != static_cast<ssize_t>(sizeof key))
    return fail(kSystemError, "the system has no random numbers: %s", strerror(errno));
  return id_of({key[0], key[1]}, out);
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank) {
  return init_rank(comm, nranks, commId, rank, nullptr);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t* config) {
  return init_rank(comm, nranks, commId, rank, config);
}

// All ranks pass the same list of ids; the first names the communicator.
ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId, ncclUniqueId* commIds,
                                      ncclConfig_t* config) {
  if (nId < 1 || nId > nranks) return fail(kInvalidArgument, "%d unique ids for %d ranks", nId, nranks);
  return init_rank(newcomm, nranks, commIds[0], myrank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int ndev, const int* devlist) {
  if (!core()) return kInternalError;
  if (ndev < 1) return fail(kInvalidArgument, "a communicator of %d devices", ndev);
  if (const int32_t rc = core()->init(); rc != 0) return fail_core(rc, "initialising the driver");
  ncclUniqueId id;
  CommKey key;
  ncclResult_t rc = nccl::ncclGetUniqueId(&id);
  if (rc == kSuccess) rc = key_of(id, &key);
  int made = 0;
  for (; rc == kSuccess && made < ndev; made++) {
    ncclComm* comm = nullptr;
    rc = make(devlist ? devlist[made] : made, key, ndev, made, true, &comm);
    if (rc == kSuccess) rc = start(comm);
    comms[made] = comm;
  }
  for (int i = 0; rc == kSuccess && i < made; i++) rc = await_members(comms[i]);
  return rc;
}

// -- asking ---------------------------------------------------------------------------------------------------------

ncclResult_t ncclCommCount(const ncclComm_t given, int* count) {
  ncclResult_t rc = kSuccess;
  if (const ncclComm* comm = comm_of(given, "ncclCommCount", &rc)) *count = static_cast<int>(comm->ranks);
  return rc;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t given, int* device) {
  ncclResult_t rc = kSuccess;
  if (const ncclComm* comm = comm_of(given, "ncclCommCuDevice", &rc)) *device = comm->device;
  return rc;
}

ncclResult_t ncclCommUserRank(const ncclComm_t given, int* rank) {
  ncclResult_t rc = kSuccess;
  if (const ncclComm* comm = comm_of(given, "ncclCommUserRank", &rc)) *rank = static_cast<int>(comm->rank);
  return rc;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t given, ncclResult_t* error) {
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = comm_of(given, "ncclCommGetAsyncError", &rc);
  if (!comm) return rc;
  const std::lock_guard lock(comm->mu);
  if (comm->state == ncclComm::State::kGone) return ended(comm, "ncclCommGetAsyncError");
  if (comm->state == ncclComm::State::kStarting) {
    *error = kInProgress;
    if (comm->init_stream == 0) return kSuccess;
    const int32_t there = core()->query_stream(comm->device, comm->init_stream);
    if (there == 600) return kSuccess;  // CUDA_ERROR_NOT_READY
    if (there != 0) {
      comm->state = ncclComm::State::kFailed;
      comm->result = fail_core(there, "waiting for the members of the communicator");
    } else {
      static_cast<void>(settle(comm));
    }
  }
  *error = comm->result;
  // What a revoked one has given up is no failure.
  if (comm->state != ncclComm::State::kReady || comm->revoked) return kSuccess;
  uint32_t state = 0;
  char why[512];
  const int32_t there = core()->comm_state(comm->device, comm->handle, &state, why, sizeof why);
  *error = there ? fail_core(there, "asking for the state of the communicator") : static_cast<ncclResult_t>(state);
  if (!there && state) fail(static_cast<ncclResult_t>(state), "%s", why);
  return kSuccess;
}

// -- ending ---------------------------------------------------------------------------------------------------------

ncclResult_t ncclCommFinalize(ncclComm_t given) {
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = ready(given, "ncclCommFinalize", &rc);
  if (!comm) return rc;
  {
    const std::lock_guard lock(comm->mu);
    if (comm->revoked) return fail(kInvalidArgument, "ncclCommFinalize: the communicator was revoked");
  }
  return flush(comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t given) {
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = ready(given, "ncclCommDestroy", &rc);
  if (!comm) return rc;
  rc = flush(comm);
  const std::lock_guard lock(comm->mu);
  comm->state = ncclComm::State::kGone;
  const int32_t posted = core()->comm_destroy(comm->device, comm->handle);
  return rc == kSuccess && posted ? fail_core(posted, "destroying the communicator") : rc;
}

ncclResult_t ncclCommAbort(ncclComm_t given) {
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = comm_of(given, "ncclCommAbort", &rc);
  if (!comm) return rc;
  const std::lock_guard lock(comm->mu);
  if (comm->state == ncclComm::State::kGone) return ended(comm, "ncclCommAbort");
  comm->state = ncclComm::State::kGone;
  int32_t posted = core()->comm_abort(comm->device, comm->handle);
  if (posted == 0) posted = core()->comm_destroy(comm->device, comm->handle);
  if (comm->init_stream) core()->destroy_stream(comm->device, comm->init_stream);
  return posted ? fail_core(posted, "aborting the communicator") : kSuccess;
}

// Of this rank alone: what it has under way ends, and it takes no operation any more. It can still be split, shrunk and
// destroyed. The others hear that this rank has given up, as of ncclCommAbort.
ncclResult_t ncclCommRevoke(ncclComm_t given, int flags) {
  if (!given) return kSuccess;
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = ready(given, "ncclCommRevoke", &rc);
  if (!comm) return rc;
  if (flags != 0) return fail(kInvalidArgument, "ncclCommRevoke: the flags are %d, NCCL knows only 0", flags);
  const std::lock_guard lock(comm->mu);
  if (comm->revoked) return fail(kInvalidArgument, "ncclCommRevoke: the communicator was revoked before");
  if (const int32_t posted = core()->comm_abort(comm->device, comm->handle); posted != 0)
    return fail_core(posted, "revoking the communicator");
  comm->revoked = true;
  return comm->blocking ? kSuccess : kInProgress;
}

// -- memory ---------------------------------------------------------------------------------------------------------

ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
  uint64_t at = 0;
  if (const int32_t rc = cuMemAlloc_v2(&at, size); rc != 0) return fail_core(rc, "ncclMemAlloc");
  *ptr = reinterpret_cast<void*>(at);
  return kSuccess;
}

ncclResult_t ncclMemFree(void* ptr) {
  const int32_t rc = cuMemFree_v2(reinterpret_cast<uint64_t>(ptr));
  return rc ? fail_core(rc, "ncclMemFree") : kSuccess;
}

// Every buffer is reached directly anyway.
ncclResult_t ncclCommRegister(const ncclComm_t given, void* buff, size_t, void** handle) {
  ncclResult_t rc = kSuccess;
  if (comm_of(given, "ncclCommRegister", &rc)) *handle = buff;
  return rc;
}

ncclResult_t ncclCommDeregister(const ncclComm_t given, void*) {
  ncclResult_t rc = kSuccess;
  comm_of(given, "ncclCommDeregister", &rc);
  return rc;
}

// A communicator of the software GPU has no memory of its own; that of the genuine NCCL stays, in the server. So this only
// keeps the state that the job asks for.
ncclResult_t ncclCommSuspend(ncclComm_t given, int flags) {
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = ready(given, "ncclCommSuspend", &rc);
  if (!comm || !(flags & kSuspendMemory)) return rc;
  const std::lock_guard lock(comm->mu);
  if (comm->suspended) return fail(kInvalidUsage, "ncclCommSuspend: the communicator is suspended already");
  comm->suspended = true;
  return kSuccess;
}

ncclResult_t ncclCommResume(ncclComm_t given) {
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = ready(given, "ncclCommResume", &rc);
  if (!comm) return rc;
  const std::lock_guard lock(comm->mu);
  if (!comm->suspended) return fail(kInvalidUsage, "ncclCommResume: the communicator is not suspended");
  comm->suspended = false;
  return kSuccess;
}

ncclResult_t ncclCommMemStats(ncclComm_t given, ncclCommMemStat_t stat, uint64_t* value) {
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = ready(given, "ncclCommMemStats", &rc);
  if (!comm) return rc;
  if (stat < 0 || stat > kStatTotal) return fail(kInvalidArgument, "ncclCommMemStats: the statistic %d is none", stat);
  const std::lock_guard lock(comm->mu);
  *value = stat == kStatSuspended && comm->suspended;
  return kSuccess;
}

// No window, as NCCL answers where it can make none. Operations on the buffer are the same; what needs one (the device-side
// API, one-sided operations) is refused.
ncclResult_t ncclCommWindowRegister(ncclComm_t given, void*, size_t, ncclWindow_t* win, int) {
  ncclResult_t rc = kSuccess;
  if (comm_of(given, "ncclCommWindowRegister", &rc)) *win = nullptr;
  return rc;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t given, ncclWindow_t win) {
  ncclResult_t rc = kSuccess;
  if (comm_of(given, "ncclCommWindowDeregister", &rc) && win)
    return fail(kInvalidArgument, "ncclCommWindowDeregister: this window was not made here");
  return rc;
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t given, ncclWindow_t win, void** out) {
  ncclResult_t rc = kSuccess;
  if (!comm_of(given, "ncclWinGetUserPtr", &rc)) return rc;
  if (win) return fail(kInvalidArgument, "ncclWinGetUserPtr: this window was not made here");
  *out = nullptr;
  return kSuccess;
}

}  // namespace devproxy::sa::nccl

void devproxy_comm_waits(ncclComm_t given, char* text, size_t bytes) {
  if (bytes == 0) return;
  *text = 0;
  namespace nccl = devproxy::sa::nccl;
  ncclResult_t rc = nccl::kSuccess;
  ncclComm* const comm = nccl::comm_of(given, "devproxy_comm_waits", &rc);
  if (!comm) return;
  const std::lock_guard lock(comm->mu);
  if (comm->state != ncclComm::State::kStarting && comm->state != ncclComm::State::kReady) return;
  uint32_t state = 0;
  if (nccl::core()->comm_state(comm->device, comm->handle, &state, text, bytes) != 0 || state != 0) *text = 0;
}

int devproxy_comm_held(ncclComm_t given) {
  namespace nccl = devproxy::sa::nccl;
  ncclResult_t rc = nccl::kSuccess;
  const ncclComm* const comm = nccl::comm_of(given, "devproxy_comm_held", &rc);
  return comm && nccl::core()->held(comm->device);
}
