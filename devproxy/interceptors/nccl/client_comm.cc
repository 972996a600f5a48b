// SPDX-License-Identifier: Apache-2.0
// Communicators: how they are made, derived from one another, and end.
#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include <algorithm>
#include <memory>

#include "devproxy/interceptors/nccl/comm.h"

// The driver's functions that this library calls as any program does.
extern "C" {
int cuMemAlloc_v2(uint64_t* ptr, size_t bytes);
int cuMemFree_v2(uint64_t ptr);
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes);
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxPushCurrent_v2(void* context);
int cuCtxPopCurrent_v2(void** context);
}

namespace devproxy::sa::nccl {

namespace {

// nccl.h, ncclUniqueId: 128 bytes that the job carries from one rank to the others.
struct UniqueId {
  char magic[8];
  uint64_t key[2];
  uint8_t zero[104];
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

uint64_t mix(uint64_t x) {  // splitmix64's last steps
  x ^= x >> 30, x *= 0xbf58476d1ce4e5b9;
  x ^= x >> 27, x *= 0x94d049bb133111eb;
  return x ^ x >> 31;
}

constexpr uint64_t kShrinks = uint64_t{1} << 63;  // so much above the numbers of splits

// A key that every member finds by itself, and no two different communicators share.
CommKey derive(const CommKey& from, uint64_t a, uint64_t b) {
  CommKey key{mix(from.low + 0x9e3779b97f4a7c15), mix(from.high ^ 0xd1b54a32d192ed03)};
  key.low = mix(key.low ^ mix(a + 1) ^ key.high);
  key.high = mix(key.high + mix(b + 0x2545f4914f6cdd1d) + key.low);
  return key;
}

ncclResult_t key_of(const ncclUniqueId& id, CommKey* key) {
  UniqueId own;
  memcpy(&own, &id, sizeof own);
  if (memcmp(own.magic, kIdMagic, sizeof kIdMagic) != 0)
    return fail(kInvalidArgument, "the unique id is none that ncclGetUniqueId has made");
  *key = {own.key[0], own.key[1]};
  return kSuccess;
}

ncclResult_t is_blocking(const ncclConfig_t* config, bool* blocking) {
  *blocking = true;
  if (!config) return kSuccess;
  ConfigHead head;
  memcpy(&head, config, sizeof head);
  if (head.magic != kConfigMagic || head.size < sizeof head)
    return fail(kInvalidArgument, "ncclConfig_t was not set up with NCCL_CONFIG_INITIALIZER");
  *blocking = head.blocking != 0;  // undefined (INT_MIN): the default, which is to block
  return kSuccess;
}

// A communicator that has not begun to look for its members.
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
  if (const ncclResult_t rc = is_blocking(config, &blocking); rc != kSuccess) return rc;
  int32_t device = 0;
  if (int32_t rc = core()->init(); rc != 0 || (rc = core()->current_device(&device)) != 0)
    return fail_core(rc, "finding the current device (cudaSetDevice comes before ncclCommInitRank)");
  ncclComm* comm = nullptr;
  if (const ncclResult_t rc = make(device, key, ranks, rank, blocking, &comm); rc != kSuccess) return rc;
  return launch(comm, out);
}

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

// The driver's calls of this thread are about that device, which need not be its current one.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) : device_(device) {
    rc_ = cuDevicePrimaryCtxRetain(&context_, device);
    if (rc_ == 0) rc_ = cuCtxPushCurrent_v2(context_);
  }
  ~OnDevice() {
    if (rc_ == 0) cuCtxPopCurrent_v2(&context_);
    if (context_) cuDevicePrimaryCtxRelease_v2(device_);
  }
  OnDevice(const OnDevice&) = delete;
  int32_t rc() const { return rc_; }

 private:
  const int32_t device_;
  void* context_ = nullptr;
  int32_t rc_;
};

// Gathers one value of every rank at every rank, through the communicator itself. Begins: waits for nobody, since one
// thread may have to begin it for several ranks.
ncclResult_t begin_exchange(Split* split, uint64_t own) {
  const ncclComm* const comm = split->parent;
  const OnDevice device(comm->device);
  int32_t rc = device.rc();
  if (rc == 0) rc = cuMemAlloc_v2(&split->memory, comm->ranks * sizeof own);
  if (rc == 0) rc = core()->create_stream(comm->device, &split->stream);
  CommOp op;
  op.comm = comm->handle;
  op.kind = static_cast<uint8_t>(CommKind::kAllGather);
  op.type = static_cast<uint8_t>(CommType::kUint64);
  op.send = split->memory + comm->rank * sizeof own;
  op.recv = split->memory;
  op.count = 1;
  if (rc == 0) rc = cuMemcpyHtoD_v2(op.send, &own, sizeof own);
  if (rc == 0) rc = core()->comm_group(split->stream, &op, 1);
  return rc == 0 ? kSuccess : fail_core(rc, "beginning an exchange between the ranks");
}

ncclResult_t end_exchange(const Split& split, std::vector<uint64_t>* all) {
  const OnDevice device(split.parent->device);
  all->assign(split.parent->ranks, 0);
  int32_t rc = device.rc();
  if (rc == 0) rc = core()->wait_stream(split.parent->device, split.stream);
  if (rc == 0) rc = cuMemcpyDtoH_v2(all->data(), split.memory, all->size() * sizeof(uint64_t));
  if (split.stream) core()->destroy_stream(split.parent->device, split.stream);
  if (split.memory) cuMemFree_v2(split.memory);
  return rc == 0 ? kSuccess : fail_core(rc, "an exchange between the ranks");
}

}  // namespace

// -- for the other parts --------------------------------------------------------------------------------------------

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

ncclResult_t await_members(ncclComm* comm) {
  uint64_t stream = 0;
  {
    const std::lock_guard lock(comm->mu);
    if (comm->state == ncclComm::State::kReady) return kSuccess;
    if (comm->state != ncclComm::State::kStarting) return ended(comm, "waiting for the members");
    stream = comm->init_stream;
  }
  const int32_t rc = core()->wait_stream(comm->device, stream);
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

ncclResult_t finish(const Split& split) {
  ncclComm* const parent = split.parent;
  ncclComm* const child = split.child;
  std::vector<uint64_t> all;
  const ncclResult_t rc = end_exchange(split, &all);
  uint64_t serial = 0;
  {
    const std::lock_guard lock(parent->mu);
    serial = ++parent->splits;
  }
  if (!child) return rc;
  if (rc != kSuccess) {
    child->state = ncclComm::State::kFailed;
    return child->result = rc;
  }
  // By key, and among equals by the rank in the parent.
  std::vector<std::pair<int, uint32_t>> members;
  for (uint32_t r = 0; r < parent->ranks; r++)
    if (static_cast<int>(all[r] >> 32) == split.color)
      members.emplace_back(static_cast<int>(static_cast<uint32_t>(all[r])), r);
  std::sort(members.begin(), members.end());
  const auto own =
      std::find_if(members.begin(), members.end(), [&](const auto& m) { return m.second == parent->rank; });
  if (own == members.end()) {
    child->state = ncclComm::State::kFailed;
    return child->result = fail(kRemoteError, "ncclCommSplit: the communicator was aborted meanwhile");
  }
  child->key = derive(parent->key, serial, static_cast<uint32_t>(split.color));
  child->ranks = static_cast<uint32_t>(members.size());
  child->rank = static_cast<uint32_t>(own - members.begin());
  if (const int32_t made = core()->make_comm(child->device, &child->handle); made != 0) {
    child->state = ncclComm::State::kFailed;
    return child->result = fail_core(made, "opening the device");
  }
  return start(child);
}

// -- making ---------------------------------------------------------------------------------------------------------

ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  UniqueId id{};
  memcpy(id.magic, kIdMagic, sizeof kIdMagic);
  if (getrandom(id.key, sizeof id.key, 0) != static_cast<ssize_t>(sizeof id.key))
    return fail(kSystemError, "the system has no random numbers: %s", strerror(errno));
  memcpy(out, &id, sizeof id);
  return kSuccess;
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

ncclResult_t ncclCommSplit(ncclComm_t given, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  ncclResult_t rc = kSuccess;
  ncclComm* const parent = ready(given, "ncclCommSplit", &rc);
  bool blocking = true;
  if (!parent || (rc = is_blocking(config, &blocking)) != kSuccess) return rc;
  *newcomm = nullptr;
  if (color < -1) return fail(kInvalidArgument, "ncclCommSplit: the color %d is negative", color);
  Split split{parent, nullptr, color};
  rc = begin_exchange(&split, uint64_t{static_cast<uint32_t>(color)} << 32 | static_cast<uint32_t>(key));
  if (rc != kSuccess) return rc;
  if (color != -1) {  // NCCL_SPLIT_NOCOLOR: it is part of none
    split.child = *newcomm = new ncclComm;
    split.child->device = parent->device;
    split.child->blocking = blocking;
  }
  if (in_group()) return put_off(split), kSuccess;
  rc = finish(split);
  if (rc != kSuccess || !split.child) return rc;
  return blocking ? await_members(split.child) : kInProgress;
}

// The excluded ranks do not call it. NCCL_SHRINK_ABORT (1): what is under way in the parent is given up first.
ncclResult_t ncclCommShrink(ncclComm_t given, int* excluded, int n_excluded, ncclComm_t* newcomm, ncclConfig_t* config,
                            int flags) {
  ncclResult_t rc = kSuccess;
  ncclComm* const parent = ready(given, "ncclCommShrink", &rc);
  bool blocking = true;
  if (!parent || (rc = is_blocking(config, &blocking)) != kSuccess) return rc;
  *newcomm = nullptr;
  std::vector<int> out(excluded, excluded + std::max(n_excluded, 0));
  std::sort(out.begin(), out.end());
  if (out.empty() || std::adjacent_find(out.begin(), out.end()) != out.end() || out.front() < 0 ||
      static_cast<uint32_t>(out.back()) >= parent->ranks ||
      std::binary_search(out.begin(), out.end(), static_cast<int>(parent->rank)))
    return fail(kInvalidArgument,
                "ncclCommShrink: the excluded ranks are some other ranks of the communicator, each once");
  if (flags & 1) core()->comm_abort(parent->device, parent->handle);
  // Counted by those who are left, since the others do not know of it.
  uint64_t who = 0, serial = 0;
  for (const int rank : out) who = mix(who + static_cast<uint64_t>(rank) + 1);
  const auto below = std::lower_bound(out.begin(), out.end(), static_cast<int>(parent->rank)) - out.begin();
  {
    const std::lock_guard lock(parent->mu);
    serial = ++parent->shrinks[who];
  }
  ncclComm* comm = nullptr;
  rc = make(parent->device, derive(parent->key, kShrinks + serial, who), static_cast<int>(parent->ranks) - n_excluded,
            static_cast<int>(parent->rank) - static_cast<int>(below), blocking, &comm);
  return rc == kSuccess ? launch(comm, newcomm) : rc;
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
  if (comm->state != ncclComm::State::kReady) return kSuccess;
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
  return comm ? flush(comm) : rc;
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

}  // namespace devproxy::sa::nccl
