// SPDX-License-Identifier: Apache-2.0
// How the ranks of a job come to a point where it may be cut: for each communicator all members have submitted the same
// operations, for each pair of ranks as many sends as receives, and no communicator is half made.
//
// Agreement is one client's part, judge() what is asked of all clients' reports together. Both are pure: no thread,
// lock, clock, socket or device. The server links them, and tests/model/agreement_model.cc runs them over random
// programs.
//
//   1. Each client holds before its next communication message, and reports how many operations it has submitted.
//   2. All reports go to all clients. The limit of a count is the greatest of the reports.
//   3. A client goes on as long as a message stays within the limits. One that owes (it is below a limit, or a
//      communicator is being made that it may be a member of) goes on past other limits too: it must, since a ring has
//      one order, and so raises them.
//   4. When nobody owes, and nobody has moved since the reports that say so were given to all, the job may be cut.
//
// It ends, because what a client owes some other client has submitted already: a program that would have gone on brings
// it there. What it cannot see is a host that waits (TCP, a file) for another rank's work behind a held message. Then
// nothing moves, and whoever drives it lifts the hold, which harms nothing.
//
// A message is a step: all of its counts are taken or none is, so a group is never cut in two.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "devproxy/csrc/args/comm.h"

namespace devproxy::server {

// What is counted: the operations of all members (from and to -1), or what goes from one rank to another, at either end.
struct CountKey {
  CommKey comm;
  int32_t from = -1, to = -1;
  bool receives = false;
  auto operator<=>(const CountKey&) const = default;
  // Sends and receives of a pair have one limit.
  CountKey limited() const { return {comm, from, to, false}; }
};

// What a message adds. init: it makes the communicator, with so many ranks.
struct CommStep {
  CountKey key;
  uint32_t ranks = 0, rank = 0;
  bool init = false;
};

// One client's communicators, as it reports them.
struct CommReport {
  struct Member {
    CommKey comm;
    uint32_t ranks = 0, rank = 0;
    bool complete = false;  // all members have come; those that are not reported any more have gone
    bool aborted = false;
    std::string failure;  // it cannot go on; empty: well
    bool operator==(const Member&) const = default;
  };
  uint64_t client = 0;  // unique in the job
  std::vector<Member> members;
  std::map<CountKey, uint64_t> counts;
  bool operator==(const CommReport&) const = default;
};

struct CommVerdict {
  bool closed = false;
  std::string failure;                  // a communicator cannot go on, so no cut is possible
  std::map<CountKey, uint64_t> limits;  // by CountKey::limited()
  std::set<CommKey> beginning;          // communicators that wait for a member
  // Who owes what, for people: of the first that was found.
  uint64_t debtor = 0;
  std::string debt;
};

CommVerdict judge(const std::vector<CommReport>& reports);

class Agreement {
 public:
  // -- the dispatch thread: its messages

  // May this message be taken now? Then it counts.
  bool take(const std::vector<CommStep>& steps) {
    if (!steps.empty() && holding_ && !within(steps) && !owes()) return false;
    for (const CommStep& step : steps)
      if (step.init)
        members_[step.key.comm] = {step.key.comm, step.ranks, step.rank, false, false, {}};
      else
        counts_[step.key]++;
    return true;
  }
  // Every member had come before: of a communicator that a restore makes again.
  void restored(const CommKey& comm, uint32_t ranks, uint32_t rank) {
    members_[comm] = {comm, ranks, rank, true, false, {}};
  }
  // But for those of which a member was still to come.
  void restored_half_made(const CommKey& comm) {
    if (const auto it = members_.find(comm); it != members_.end()) it->second.complete = false;
  }
  void abort(const CommKey& comm) {
    if (const auto it = members_.find(comm); it != members_.end()) it->second.aborted = true;
  }
  // What counts across a dump; the communicators themselves come with the replay log.
  const std::map<CountKey, uint64_t>& counts() const { return counts_; }
  void restore_counts(std::map<CountKey, uint64_t> counts) { counts_ = std::move(counts); }
  void destroy(const CommKey& comm) {
    members_.erase(comm);
    std::erase_if(counts_, [&](const auto& item) { return item.first.comm == comm; });
  }

  // Others cannot come to a cut before it has gone on.
  bool owes() const;

  // -- the server thread

  bool holding() const { return holding_; }
  // From now on nothing beyond what is submitted already, until the others' reports are known.
  void hold() {
    if (!holding_) learnt_ = false;
    holding_ = true;
  }
  void lift() { holding_ = learnt_ = false; }
  // What is judged of the reports of all clients of the job; own: this one's among them. True: they are closed, and it
  // has not moved since. From then on it cannot, until the hold is lifted. Without a hold it only learns what it owes.
  bool learn(const CommVerdict& verdict, const CommReport* own) {
    verdict_ = verdict;
    learnt_ = true;
    return verdict.closed && own && own->counts == counts_ && own->members.size() == members_.size();
  }
  // Without what only the device knows: complete and failure.
  CommReport report(uint64_t client) const;

 private:
  bool within(const std::vector<CommStep>& steps) const;

  bool holding_ = false, learnt_ = false;
  CommVerdict verdict_;
  std::map<CommKey, CommReport::Member> members_;
  std::map<CountKey, uint64_t> counts_;
};

}  // namespace devproxy::server
