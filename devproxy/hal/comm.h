// SPDX-License-Identifier: Apache-2.0
// A space's communicators. A device moves data between the spaces of one job, also those of other servers; who its peers
// are it asks the owner (SpaceOwner::reach_peer).
//
// The order of a reduction is part of the contract, so that numbers do not depend on transport, chunking or placement; but
// for a real GPU, where it is NCCL's own, as it is natively: a binary tree over the rank, tree(lo, n) = tree(lo, h) op tree(lo + h, n - h) with h the greatest power of two below
// n. It is computed in the type itself, but for the floating types of 8 and 16 bits: in float32, rounded once at the
// end (to nearest, ties to even). kAvg divides the sum by n at the end, integers towards zero. kPreMulSum rounds each
// product to the type that the tree is computed in. kMax and kMin of a NaN and a number are the number, of equal numbers
// (the two zeros) the lower rank's. No rule says which NaN a result is. What is too large for a type of 8 bits becomes
// its largest number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "devproxy/csrc/args/comm.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/object.h"

namespace devproxy::hal {

struct CommConfig {
  CommKey key;
  uint32_t ranks = 1, rank = 0;
};

struct CommCall {
  CommRef comm;
  CommOp op;  // checked: its buffers are the space's, its ranks the communicator's
};

class SpaceComms {
 public:
  // Waits for nobody. Its first operation finds the other members.
  virtual StatusOr<CommRef> create_comm(const CommConfig& config) = 0;
  // A command that completes when every member has submitted its own.
  virtual void init_comm(const QueueRef& queue, Ticket ticket, const CommRef& comm) = 0;
  // A group: all of it runs at once, and completes when each operation has. Operations of one communicator run in the
  // order of their submission on whatever queue. One that cannot go on because a member is gone or does something else
  // stays until the communicator is aborted; state() says why.
  virtual void communicate(const QueueRef& queue, Ticket ticket, std::vector<CommCall> group) = 0;
  // What was submitted completes without effect, and so does what is submitted later. Any thread.
  virtual void abort_comm(const CommRef& comm) = 0;
  // Any thread: have all members come?
  virtual bool comm_complete(const CommRef& comm) = 0;
  // why: of kOk for whom its operation has been waiting for a while, in words that follow 'waits for'; or empty.
  virtual CommState comm_state(const CommRef& comm, std::string* why) = 0;
  // The job is done with it: its members need not wait for this one any more.
  virtual void destroy_comm(const CommRef& comm) = 0;
  // The client has ended: so have its members, and nothing of them waits for another member any more. Any thread.
  virtual void leave_comms() = 0;
  // The space's memory as a descriptor for other servers of the job, which is theirs; -1: it has no such thing. Any
  // thread.
  virtual int share_memory() = 0;

 protected:
  ~SpaceComms() = default;
};

}  // namespace devproxy::hal
