// SPDX-License-Identifier: Apache-2.0
// The second way to a point where the ranks of a job may be cut (the first: agreement.h): in band, as in the Singularity
// paper (4.3.1). Beside each operation of all members of a communicator goes a small AllReduce over the same
// communicator, the meta. It adds up two numbers: how many ranks need a barrier, and how many acknowledge it. Every rank
// sees the same sums at the same operation.
//
//   1. No rank waits for sums. A rank whose server is asked for a barrier says need with each meta from then on.
//   2. A rank that was asked and sees a need is synchronous: it acknowledges with each meta, and takes its next
//      communication message only when the sums of its last meta are there.
//   3. Sums with the acknowledgements of all ranks: everyone who acknowledged has submitted this operation and none
//      after it. All ranks read the same sums, so all stop here: the barrier is acquired, and holds until it is lifted.
//
// Where it differs from the paper, and why
//   A rank that was not asked does not follow a need that it sees. The coordinator asks every server; a rank that
//   followed by itself after its lift could stop where nobody would lift it again.
//   The meta comes behind the operation, not before it. It is submitted in the same moment, so nothing of the argument
//   changes; the operation has brought the ranks together by then, and what the job gets wrong shows as the job's.
//   An acknowledgement is not 1 but the number of the attempt, so that one of an attempt that was lifted meanwhile does
//   not make up the sum of the next. What is full is ranks times attempt; all say at most the attempt that is under way.
//   What is acquired is closed for this one communicator. Whoever drives it looks at the counts of all (agreement.h)
//   before anything parks.
//
// Metas ride in the messages of the job's own operations, one behind each in the same group. So an operation that the job
// has seen complete has its meta behind it, and a rank that leaves after its last one leaves nobody waiting. Whether an
// operation has a meta depends on the operation alone, not on how a rank grouped it. Operations in graphs have none;
// either all ranks capture an operation or none does (NCCL user guide, "Using NCCL with CUDA Graphs"). So all members
// submit the same row of metas and operations. For the same reason the agreement does not count metas: where the
// operations are equal, the metas are.
//
// Pure: no thread, lock, clock, socket or device. Communicators (communicators.h) puts it between the threads, and
// tests/model/meta_model.cc runs it over random programs.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "devproxy/csrc/args/comm.h"

namespace devproxy::server {

static_assert(uint64_t{1 << 20} * kMaxCommRanks < INT32_MAX);

// What one meta says, and what the metas of all members add up to.
struct MetaSums {
  int32_t need = 0, ack = 0;
  bool operator==(const MetaSums&) const = default;
};

class MetaBarrier {
 public:
  // -- the dispatch thread

  // A communicator of that many ranks exists, and its operations have metas until it is dropped: at its end or abort.
  void carry(const CommKey& comm, uint32_t ranks) { lanes_[comm] = {ranks, number_, number_, 0}; }
  void drop(const CommKey& comm) { lanes_.erase(comm); }
  bool carries(const CommKey& comm) const { return lanes_.contains(comm); }
  // May a communication message be taken now?
  bool may_pass() const;
  // A meta is submitted, of a communicator that carries them. read: its sums will be told, as of the last one of each
  // message. One that is not read acknowledges nothing: behind it this rank would not stop.
  struct Meta {
    uint64_t number = 0;  // this rank's own; grows
    MetaSums says;
  };
  Meta submit(const CommKey& comm, bool read);

  // -- any thread

  // The sums of a meta that is read; none where it was executed without effect. May come late, in any order, and for a
  // communicator that is gone.
  void result(const CommKey& comm, uint64_t number, const std::optional<MetaSums>& sums);

  // -- the server thread

  // A barrier over that communicator; asked again for the same one and attempt it goes on. attempt: the same at all
  // ranks, and another each time; from 1 to kMaxAttempt.
  static constexpr int32_t kMaxAttempt = 1 << 20;
  void ask(const CommKey& comm, int32_t attempt);
  void lift() { asked_.reset(); }
  bool asked() const { return asked_.has_value(); }
  bool acquired() const { return asked_ && asked_->acquired; }

 private:
  struct Lane {
    uint32_t ranks = 0;
    uint64_t made = 0;  // metas up to this number are another lane's
    uint64_t last = 0;  // the last one that was submitted
    uint64_t unread = 0;
  };
  struct Asked {
    CommKey comm;
    int32_t attempt = 0;
    bool synchronous = false, acquired = false;
  };
  uint64_t number_ = 0;
  std::map<CommKey, Lane> lanes_;
  std::optional<Asked> asked_;
};

}  // namespace devproxy::server
