// SPDX-License-Identifier: Apache-2.0
// The operations of a communicator, as the client gives them and the device takes them (nccl.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace devproxy {

inline constexpr uint32_t kMaxCommRanks = 1024;

enum class CommKind : uint8_t {
  kAllReduce = 0,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
};
inline constexpr uint8_t kCommKinds = 10;

// nccl.h, ncclDataType_t.
enum class CommType : uint8_t {
  kInt8 = 0,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16,
  kFloat8e4m3,
  kFloat8e5m2,
};
inline constexpr uint8_t kCommTypes = 12;

inline constexpr uint32_t comm_type_bytes(CommType type) {
  switch (type) {
    case CommType::kInt8:
    case CommType::kUint8:
    case CommType::kFloat8e4m3:
    case CommType::kFloat8e5m2: return 1;
    case CommType::kFloat16:
    case CommType::kBfloat16: return 2;
    case CommType::kInt32:
    case CommType::kUint32:
    case CommType::kFloat32: return 4;
    case CommType::kInt64:
    case CommType::kUint64:
    case CommType::kFloat64: return 8;
  }
  return 0;
}

// nccl.h, ncclRedOp_t; kPreMulSum is what ncclRedOpCreatePreMulSum makes: each rank's input times that rank's scalar,
// then the sum.
enum class CommReduction : uint8_t { kSum = 0, kProd, kMax, kMin, kAvg, kPreMulSum };
inline constexpr uint8_t kCommReductions = 6;

// One operation. Which members count says its kind; `count` is the vendor's for that function (of AllGather what one
// rank sends, of ReduceScatter what one receives, of AllToAll, Gather and Scatter what goes from one rank to another).
struct CommOp {
  uint64_t comm = 0;  // VHandle of the communicator
  uint8_t kind = 0, type = 0, reduction = 0, scalar_on_device = 0;
  int32_t peer = 0;  // root, or the other rank of a send or receive
  uint64_t send = 0, recv = 0;
  uint64_t count = 0;
  uint64_t scalar = 0;  // of kPreMulSum: an element's bytes, or where on the device they are

  CommKind kind_of() const { return static_cast<CommKind>(kind); }
  CommType type_of() const { return static_cast<CommType>(type); }
  CommReduction reduction_of() const { return static_cast<CommReduction>(reduction); }
};
static_assert(sizeof(CommOp) == 48);

// Of a rank's own buffers, what the operation reads and writes. Precondition: count times the type times ranks fits.
struct CommBytes {
  uint64_t send = 0, recv = 0;
};
inline CommBytes comm_bytes(const CommOp& op, uint32_t ranks, uint32_t rank) {
  const uint64_t part = op.count * comm_type_bytes(op.type_of()), all = part * ranks;
  const bool is_root = static_cast<uint32_t>(op.peer) == rank;
  switch (op.kind_of()) {
    case CommKind::kAllReduce: return {part, part};
    case CommKind::kBroadcast: return {is_root ? part : 0, part};
    case CommKind::kReduce: return {part, is_root ? part : 0};
    case CommKind::kAllGather: return {part, all};
    case CommKind::kReduceScatter: return {all, part};
    case CommKind::kAllToAll: return {all, all};
    case CommKind::kGather: return {part, is_root ? all : 0};
    case CommKind::kScatter: return {is_root ? all : 0, part};
    case CommKind::kSend: return {part, 0};
    case CommKind::kRecv: return {0, part};
  }
  return {};
}

// What a communicator is known by to all of its members: the same 128 bits at each of them and at nobody else.
struct CommKey {
  uint64_t low = 0, high = 0;
  bool operator==(const CommKey&) const = default;
  auto operator<=>(const CommKey&) const = default;
};

// nccl.h, ncclResult_t, as far as a communicator's own state goes.
enum class CommState : uint32_t { kOk = 0, kSystemError = 2, kInvalidUsage = 5, kRemoteError = 6 };

}  // namespace devproxy
