// SPDX-License-Identifier: Apache-2.0
// Communicators that come from others: split, shrunk, grown. Every member finds the new one's key by itself.
#include <algorithm>

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

uint64_t mix(uint64_t x) {  // splitmix64's last steps
  x ^= x >> 30, x *= 0xbf58476d1ce4e5b9;
  x ^= x >> 27, x *= 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// So much above the numbers of splits are those of shrinks, of grows and of the communicators behind revoked ones.
constexpr uint64_t kShrinks = uint64_t{1} << 63, kGrows = uint64_t{1} << 62, kStandIns = uint64_t{1} << 61;

// A key that every member finds by itself, and no two different communicators share.
CommKey derive(const CommKey& from, uint64_t a, uint64_t b) {
  CommKey key{mix(from.low + 0x9e3779b97f4a7c15), mix(from.high ^ 0xd1b54a32d192ed03)};
  key.low = mix(key.low ^ mix(a + 1) ^ key.high);
  key.high = mix(key.high + mix(b + 0x2545f4914f6cdd1d) + key.low);
  return key;
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

// Gathers one value of every rank at every rank. Posts: waits for nobody, since one thread may have to post it for
// several ranks.
ncclResult_t post_exchange(Split* split) {
  const ncclComm* const comm = split->through;
  const uint64_t own = split->own;
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

// The exchange goes through the communicator itself. A revoked one carries nothing any more: then it goes through another
// one of the same ranks, which ends with the split.
ncclResult_t begin_exchange(Split* split) {
  ncclComm* const parent = split->parent;
  uint64_t serial = 0;
  {
    const std::lock_guard lock(parent->mu);
    if (parent->revoked) serial = ++parent->stand_ins;
  }
  split->through = parent;
  if (serial == 0) return post_exchange(split);
  const ncclResult_t rc = make(parent->device, derive(parent->key, kStandIns + serial, 0),
                               static_cast<int>(parent->ranks), static_cast<int>(parent->rank), true, &split->through);
  return rc == kSuccess ? start(split->through) : rc;
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

// The communicator that the next growth makes. comm->mu held.
CommKey grown_key(const ncclComm* comm) { return derive(comm->key, kGrows + comm->grows + 1, 0); }

}  // namespace

// -- for groups -----------------------------------------------------------------------------------------------------

ncclResult_t exchange(Split* split) {
  if (split->through == split->parent) return kSuccess;
  const ncclResult_t rc = await_members(split->through);
  return rc == kSuccess ? post_exchange(split) : rc;
}

ncclResult_t finish(const Split& split) {
  ncclComm* const parent = split.parent;
  ncclComm* const child = split.child;
  std::vector<uint64_t> all;
  const ncclResult_t rc = end_exchange(split, &all);
  if (split.through != parent) {
    core()->comm_destroy(parent->device, split.through->handle);
    delete split.through;
  }
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

// -- the calls ------------------------------------------------------------------------------------------------------

ncclResult_t ncclCommSplit(ncclComm_t given, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  ncclResult_t rc = kSuccess;
  ncclComm* const parent = ready(given, "ncclCommSplit", &rc);
  bool blocking = true;
  if (!parent || (rc = is_blocking(config, parent, &blocking)) != kSuccess) return rc;
  *newcomm = nullptr;
  if (color < -1) return fail(kInvalidArgument, "ncclCommSplit: the color %d is negative", color);
  Split split{parent};
  split.color = color;
  split.own = uint64_t{static_cast<uint32_t>(color)} << 32 | static_cast<uint32_t>(key);
  if ((rc = begin_exchange(&split)) != kSuccess) return rc;
  if (color != -1) {  // NCCL_SPLIT_NOCOLOR: it is part of none
    split.child = *newcomm = new ncclComm;
    split.child->device = parent->device;
    split.child->blocking = blocking;
  }
  if (in_group()) return put_off(split), kSuccess;
  rc = exchange(&split);
  if (const ncclResult_t finished = finish(split); rc == kSuccess) rc = finished;
  if (rc != kSuccess || !split.child) return rc;
  return blocking ? await_members(split.child) : kInProgress;
}

// The excluded ranks do not call it. NCCL_SHRINK_ABORT (1): what is under way in the parent is given up first.
ncclResult_t ncclCommShrink(ncclComm_t given, int* excluded, int n_excluded, ncclComm_t* newcomm, ncclConfig_t* config,
                            int flags) {
  ncclResult_t rc = kSuccess;
  ncclComm* const parent = ready(given, "ncclCommShrink", &rc);
  bool blocking = true;
  if (!parent || (rc = is_blocking(config, parent, &blocking)) != kSuccess) return rc;
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

// An id that the ranks who join at the next ncclCommGrow of this communicator need.
ncclResult_t ncclCommGetUniqueId(ncclComm_t given, ncclUniqueId* id) {
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = ready(given, "ncclCommGetUniqueId", &rc);
  if (!comm) return rc;
  const std::lock_guard lock(comm->mu);
  return id_of(grown_key(comm), id);
}

// A rank of the communicator gives it and -1, and keeps its number; one of them may give the id. A rank that joins gives
// no communicator, the id and its number.
ncclResult_t ncclCommGrow(ncclComm_t given, int ranks, const ncclUniqueId* id, int rank, ncclComm_t* newcomm,
                          ncclConfig_t* config) {
  *newcomm = nullptr;
  if (!given) {
    if (!id) return fail(kInvalidArgument, "ncclCommGrow: a rank that joins needs the id of ncclCommGetUniqueId");
    return init_rank(newcomm, ranks, *id, rank, config);
  }
  ncclResult_t rc = kSuccess;
  ncclComm* const parent = ready(given, "ncclCommGrow", &rc);
  bool blocking = true;
  if (!parent || (rc = is_blocking(config, parent, &blocking)) != kSuccess) return rc;
  if (rank != -1)
    return fail(kInvalidArgument,
                "ncclCommGrow: a rank of the communicator keeps its number, which is said by -1, not %d", rank);
  if (ranks <= static_cast<int>(parent->ranks))
    return fail(kInvalidArgument, "ncclCommGrow: %d ranks are not more than the %u of the communicator", ranks,
                parent->ranks);
  CommKey key, given_key;
  if (id && (rc = key_of(*id, &given_key)) != kSuccess) return rc;
  {
    const std::lock_guard lock(parent->mu);
    key = grown_key(parent);
    if (id && (given_key.low != key.low || given_key.high != key.high))
      return fail(kInvalidArgument, "ncclCommGrow: the unique id is not for the next growth of this communicator");
    parent->grows++;
  }
  ncclComm* comm = nullptr;
  rc = make(parent->device, key, ranks, static_cast<int>(parent->rank), blocking, &comm);
  return rc == kSuccess ? launch(comm, newcomm) : rc;
}

}  // namespace devproxy::sa::nccl
