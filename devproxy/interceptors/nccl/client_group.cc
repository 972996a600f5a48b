// SPDX-License-Identifier: Apache-2.0
// Operations, alone and in groups. A group is one message for each device, so no cut of the job comes between its
// operations.
#include <string.h>

#include <algorithm>
#include <utility>

#include "devproxy/interceptors/nccl/comm.h"

// The driver's functions that this library calls as any program does.
extern "C" {
int cuEventCreate(uint64_t* event, unsigned flags);
int cuEventRecord(uint64_t event, uint64_t stream);
int cuEventDestroy_v2(uint64_t event);
int cuStreamWaitEvent(uint64_t stream, uint64_t event, unsigned flags);
}

namespace devproxy::sa::nccl {

namespace {

constexpr unsigned kDisableTiming = 2;  // cuda.h, CU_EVENT_DISABLE_TIMING

struct Pending {
  ncclComm* comm;
  CoreStream stream;
  CommOp op;
};

struct Group {
  int depth = 0;
  ncclResult_t failed = kSuccess;  // of a call inside: the whole group fails
  std::vector<ncclComm*> starts;
  std::vector<Split> splits;
  std::vector<Pending> ops;
};
thread_local Group t_group;

void note_stream(ncclComm* comm, uint64_t stream) {
  const std::lock_guard lock(comm->mu);
  if (std::find(comm->streams.begin(), comm->streams.end(), stream) == comm->streams.end())
    comm->streams.push_back(stream);
}

// `to` waits for what `from` has been given to do.
int32_t order(uint64_t from, uint64_t to) {
  uint64_t event = 0;
  int32_t rc = cuEventCreate(&event, kDisableTiming);
  if (rc != 0) return rc;
  rc = cuEventRecord(event, from);
  if (rc == 0) rc = cuStreamWaitEvent(to, event, 0);
  cuEventDestroy_v2(event);
  return rc;
}

// The operations of one device. They run on the stream of the first; nccl.h: the others wait for the group, and it for
// them.
ncclResult_t post(const std::vector<Pending>& ops) {
  if (ops.size() > kMaxGroup)
    return fail(kInvalidUsage, "a group has %zu operations, devproxy carries %zu in one", ops.size(), kMaxGroup);
  const uint64_t stream = ops.front().stream.stream;
  std::vector<uint64_t> others;
  std::vector<CommOp> group;
  for (const Pending& p : ops) {
    group.push_back(p.op);
    note_stream(p.comm, p.stream.stream);
    if (p.stream.stream != stream && std::find(others.begin(), others.end(), p.stream.stream) == others.end())
      others.push_back(p.stream.stream);
  }
  for (const uint64_t other : others)
    if (const int32_t rc = order(other, stream); rc != 0) return fail_core(rc, "ordering the streams of a group");
  if (const int32_t rc = core()->comm_group(stream, group.data(), group.size()); rc != 0)
    return fail_core(rc, "posting an operation");
  for (const uint64_t other : others)
    if (const int32_t rc = order(stream, other); rc != 0) return fail_core(rc, "ordering the streams of a group");
  return kSuccess;
}

ncclResult_t finish(Group group) {
  // The splits first, also where the group fails: the other ranks have been told of them.
  for (Split& split : group.splits)
    if (const ncclResult_t rc = exchange(&split); rc != kSuccess && group.failed == kSuccess) group.failed = rc;
  for (const Split& split : group.splits) {
    const ncclResult_t rc = nccl::finish(split);
    if (rc != kSuccess && group.failed == kSuccess) group.failed = rc;
  }
  if (group.failed != kSuccess) return group.failed;
  for (ncclComm* comm : group.starts)
    if (const ncclResult_t rc = start(comm); rc != kSuccess) return rc;
  for (const Split& split : group.splits)
    if (split.child) group.starts.push_back(split.child);
  bool in_progress = false;
  for (ncclComm* comm : group.starts) {
    in_progress |= !comm->blocking;
    if (!comm->blocking) continue;
    if (const ncclResult_t rc = await_members(comm); rc != kSuccess) return rc;
  }
  while (!group.ops.empty()) {
    const int32_t device = group.ops.front().stream.device;
    const auto rest = std::stable_partition(group.ops.begin(), group.ops.end(),
                                            [&](const Pending& p) { return p.stream.device == device; });
    const std::vector<Pending> now(group.ops.begin(), rest);
    group.ops.erase(group.ops.begin(), rest);
    if (const ncclResult_t rc = post(now); rc != kSuccess) return rc;
  }
  return in_progress ? kInProgress : kSuccess;
}

// A call that fails inside of a group makes the group fail too.
ncclResult_t noted(ncclResult_t rc) {
  if (rc != kSuccess && t_group.depth > 0 && t_group.failed == kSuccess) t_group.failed = rc;
  return rc;
}

struct Call {
  const char* what;
  CommKind kind;
  const void* send;
  void* recv;
  size_t count;
  ncclDataType_t type;
  int op = 0, peer = 0;
};

ncclResult_t set_reduction(ncclComm* comm, const Call& call, CommOp* op) {
  if (call.op >= 0 && call.op < static_cast<int>(CommReduction::kPreMulSum)) {
    op->reduction = static_cast<uint8_t>(call.op);
    return kSuccess;
  }
  const auto index = static_cast<size_t>(call.op - static_cast<int>(CommReduction::kPreMulSum));
  const std::lock_guard lock(comm->mu);
  if (call.op < 0 || index >= comm->reductions.size() || !comm->reductions[index].live)
    return fail(kInvalidArgument, "%s: the reduction %d is none", call.what, call.op);
  const PreMulSum& own = comm->reductions[index];
  if (own.type != call.type)
    return fail(kInvalidArgument, "%s: the reduction was made for data type %d, not %d", call.what, own.type,
                call.type);
  op->reduction = static_cast<uint8_t>(CommReduction::kPreMulSum);
  op->scalar_on_device = own.on_device;
  op->scalar = own.scalar;
  return kSuccess;
}

ncclResult_t check_buffer(const ncclComm* comm, const char* what, const char* which, const void* at) {
  if (core()->device_of(reinterpret_cast<uint64_t>(at)) == comm->device) return kSuccess;
  return fail(kInvalidArgument, "%s: the %s buffer %p is no memory of device %d", what, which, at, comm->device);
}

ncclResult_t call(ncclComm_t given, cudaStream_t stream, const Call& c) {
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = ready(given, c.what, &rc);
  if (!comm) return noted(rc);
  {
    const std::lock_guard lock(comm->mu);
    if (comm->revoked || comm->suspended)
      return noted(fail(kInvalidUsage, "%s: the communicator %s", c.what,
                        comm->revoked ? "was revoked" : "is suspended; ncclCommResume comes first"));
  }
  if (c.type < 0 || c.type >= kCommTypes)
    return noted(fail(kInvalidArgument, "%s: the data type %d is none", c.what, c.type));
  if (c.peer < 0 || static_cast<uint32_t>(c.peer) >= comm->ranks)
    return noted(fail(kInvalidArgument, "%s: rank %d is not of 0 to %u", c.what, c.peer, comm->ranks - 1));
  if (c.count == 0) return kSuccess;
  const bool root = static_cast<uint32_t>(c.peer) == comm->rank;
  const bool sends =
      c.kind != CommKind::kRecv && (root || (c.kind != CommKind::kBroadcast && c.kind != CommKind::kScatter));
  const bool receives =
      c.kind != CommKind::kSend && (root || (c.kind != CommKind::kReduce && c.kind != CommKind::kGather));
  if (sends && (rc = check_buffer(comm, c.what, "send", c.send)) != kSuccess) return noted(rc);
  if (receives && (rc = check_buffer(comm, c.what, "receive", c.recv)) != kSuccess) return noted(rc);
  CommOp op;
  op.kind = static_cast<uint8_t>(c.kind);
  op.type = static_cast<uint8_t>(c.type);
  op.peer = c.peer;
  op.send = reinterpret_cast<uint64_t>(c.send);
  op.recv = reinterpret_cast<uint64_t>(c.recv);
  op.count = c.count;
  if ((rc = set_reduction(comm, c, &op)) != kSuccess) return noted(rc);
  return noted(submit(comm, stream, op, c.what));
}

}  // namespace

ncclResult_t null_argument(const char* function, const char* parameter) {
  return noted(fail(kInvalidArgument, "%s: %s is null", function, parameter));
}

bool in_group() { return t_group.depth > 0; }
void put_off(ncclComm* comm) { t_group.starts.push_back(comm); }
void put_off(const Split& split) { t_group.splits.push_back(split); }

ncclResult_t submit(ncclComm* comm, cudaStream_t stream, CommOp op, const char* what) {
  Pending p{comm, {}, op};
  p.op.comm = comm->handle;
  if (const int32_t rc = core()->resolve_stream(reinterpret_cast<uint64_t>(stream), &p.stream); rc != 0)
    return fail(kInvalidArgument, "%s: the stream is none (CUDA error %d)", what, rc);
  if (p.stream.device != comm->device)
    return fail(kInvalidArgument, "%s: the stream belongs to device %d, the communicator to device %d", what,
                p.stream.device, comm->device);
  if (!in_group()) return post({p});
  t_group.ops.push_back(p);
  return kSuccess;
}

ncclResult_t ncclGroupStart() {
  t_group.depth++;
  return kSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (t_group.depth == 0) return fail(kInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--t_group.depth > 0) return kSuccess;
  return finish(std::exchange(t_group, {}));
}

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {"ncclAllReduce", CommKind::kAllReduce, sendbuff, recvbuff, count, datatype, op});
}

ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {"ncclBroadcast", CommKind::kBroadcast, sendbuff, recvbuff, count, datatype, 0, root});
}

ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return call(comm, stream, {"ncclBcast", CommKind::kBroadcast, buff, buff, count, datatype, 0, root});
}

ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {"ncclReduce", CommKind::kReduce, sendbuff, recvbuff, count, datatype, op, root});
}

ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {"ncclAllGather", CommKind::kAllGather, sendbuff, recvbuff, sendcount, datatype});
}

ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream,
              {"ncclReduceScatter", CommKind::kReduceScatter, sendbuff, recvbuff, recvcount, datatype, op});
}

ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
                          cudaStream_t stream) {
  return call(comm, stream, {"ncclAlltoAll", CommKind::kAllToAll, sendbuff, recvbuff, count, datatype});
}

ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {"ncclGather", CommKind::kGather, sendbuff, recvbuff, count, datatype, 0, root});
}

ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
                         ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {"ncclScatter", CommKind::kScatter, sendbuff, recvbuff, count, datatype, 0, root});
}

ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call(comm, stream, {"ncclSend", CommKind::kSend, sendbuff, nullptr, count, datatype, 0, peer});
}

ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call(comm, stream, {"ncclRecv", CommKind::kRecv, nullptr, recvbuff, count, datatype, 0, peer});
}

// residence: ncclScalarDevice (0), read when an operation runs; ncclScalarHostImmediate (1), read now.
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t given) {
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = ready(given, "ncclRedOpCreatePreMulSum", &rc);
  if (!comm) return rc;
  if (datatype < 0 || datatype >= kCommTypes || (residence != 0 && residence != 1))
    return fail(kInvalidArgument, "ncclRedOpCreatePreMulSum: data type %d, residence %d", datatype, residence);
  PreMulSum own{true, static_cast<uint8_t>(datatype), residence == 0, 0};
  if (own.on_device) {
    own.scalar = reinterpret_cast<uint64_t>(scalar);
    if ((rc = check_buffer(comm, "ncclRedOpCreatePreMulSum", "scalar's", scalar)) != kSuccess) return rc;
  } else {
    memcpy(&own.scalar, scalar, comm_type_bytes(static_cast<CommType>(datatype)));
  }
  const std::lock_guard lock(comm->mu);
  size_t i = 0;
  while (i < comm->reductions.size() && comm->reductions[i].live) i++;
  if (i == comm->reductions.size()) comm->reductions.emplace_back();
  comm->reductions[i] = own;
  *op = static_cast<int>(CommReduction::kPreMulSum) + static_cast<int>(i);
  return kSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t given) {
  ncclResult_t rc = kSuccess;
  ncclComm* const comm = comm_of(given, "ncclRedOpDestroy", &rc);
  if (!comm) return rc;
  const std::lock_guard lock(comm->mu);
  const auto index = static_cast<size_t>(op - static_cast<int>(CommReduction::kPreMulSum));
  if (op < static_cast<int>(CommReduction::kPreMulSum) || index >= comm->reductions.size() ||
      !comm->reductions[index].live)
    return fail(kInvalidArgument, "ncclRedOpDestroy: the reduction %d is none that was created", op);
  comm->reductions[index].live = false;
  return kSuccess;
}

}  // namespace devproxy::sa::nccl
