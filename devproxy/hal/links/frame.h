// SPDX-License-Identifier: Apache-2.0
// What the servers of two trees say to each other over TCP (links.h, receiver.h).
//
// A connection goes one way: after a Hello, which a Welcome answers, its opener sends frames and its receiver nothing.
// Both ends are of one build and one byte order; the magic says so.
#pragma once

#include <cstddef>
#include <cstdint>

#include "devproxy/csrc/args/comm.h"

namespace devproxy::hal {

inline constexpr uint32_t kFrameMagic = 0x46505044;  // "DPPF"
inline constexpr uint32_t kHelloMagic = 0x48505044;  // "DPPH"
inline constexpr uint32_t kFrameVersion = 1;
inline constexpr uint32_t kMaxTrees = 64, kMaxTreeGpus = 256;
inline constexpr size_t kTokenBytes = 32;
inline constexpr uint64_t kChunkBytes = 1 << 20;  // of data, in one frame
inline constexpr size_t kCommIdBytes = 128;       // of NCCL's (nccl.h)

struct Hello {
  uint32_t magic = kHelloMagic, version = kFrameVersion;
  uint8_t token[kTokenBytes] = {};
  uint32_t tree = 0, gpu = 0;
  uint64_t server = 0;  // a random number of the process
};
static_assert(sizeof(Hello) == 56);

inline constexpr uint64_t kEncryptedOnly = 0;  // in the place of a server: it takes encrypted connections (tls.h) alone

struct Welcome {
  uint32_t magic = kHelloMagic, version = kFrameVersion;
  uint64_t server = 0;
};
static_assert(sizeof(Welcome) == 16);

// What a member has done. The receiver does it on the member's behalf on its own tree's board.
//   kind         beside key, ranks and rank
//   kJoin        slot, incarnation, device_base, device_bytes: it has come
//   kData        addr, bytes: so much of its memory follows
//   kPost        op: an operation of all members; the data that this tree needs of it has come
//   kFinish      it has done its share
//   kPairPost    other, addr, bytes: it sends to `other`; the data has come
//   kPairFinish  other: what `other` sent has been received
//   kPairWrong   other, bytes: it wants so many bytes of `other` instead
//   kLeave       it will do nothing more
//   kUnpost      it takes back the operation that it has posted; not all members have
//   kPairUnpost  other: likewise what it sends to `other`
//   kElsewhere   all members have come, and none in this tree, which need not know of the communicator
//   kId          on hal/cuda, of rank 0: incarnation is a set of members (hal/cuda/comm_board.h), bytes the version of the
//                row; NCCL's id of that set follows
//   kAsk         on hal/cuda: bytes, a number; the members of the receiving tree say kHere when they go on
//   kHere        on hal/cuda: bytes, the last number that was asked; addr, the version of the row: nothing newer is known here
// On hal/cuda kJoin has device_base, a number of the GPU, addr, one of the server's process, and bytes, the version of the
// member's row; kLeave has bytes, how it has gone. Nothing but kJoin, kLeave, kId, kAsk, kHere and kElsewhere is said there.
// and of no communicator:
//   kGone        slot, incarnation: the process has ended
//   kBye         the server ends, and its members go on elsewhere
//   kMark        bytes: a number; all that was sent before has come
enum class FrameKind : uint8_t {
  kJoin = 1,
  kData,
  kPost,
  kFinish,
  kPairPost,
  kPairFinish,
  kPairWrong,
  kLeave,
  kGone,
  kBye,
  kUnpost,
  kPairUnpost,
  kMark,
  kElsewhere,
  kId,
  kAsk,
  kHere,
};

struct Frame {
  uint32_t magic = kFrameMagic;
  FrameKind kind = FrameKind::kBye;
  uint8_t unused[3] = {};
  CommKey key;
  uint32_t ranks = 0, rank = 0, other = 0, slot = 0;
  uint64_t incarnation = 0, device_base = 0, device_bytes = 0;
  uint64_t addr = 0, bytes = 0;
  CommOp op;
};
static_assert(sizeof(Frame) == 128);

}  // namespace devproxy::hal
