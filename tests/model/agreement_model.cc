// SPDX-License-Identifier: Apache-2.0
// Checker of the agreement: the real code of devproxy/csrc/server/agreement.h, between ranks that run random programs and
// a coordinator that carries their reports at random moments.
//
// A program is a list of communication messages for each rank, made so that it would run to its end without a cut:
// communicators over random sets of ranks, made when the program says so, collectives over them, sends and receives,
// groups of these, aborts. A rank computes for a random time before each message. A message that was taken is executed
// when all that it needs has been taken too, in the order of its rank: the ranks run on one stream each, so a wait for a
// result is a later message that is not yet posted. In half of the attempts ranks rest at points of least memory.
//
// What must hold
//   a job whose reports have settled is closed: all that was taken can be executed, by what was taken alone
//   from then on nobody takes anything before the hold is lifted
//   every attempt settles, since no host waits for anything but its own GPU
//   after it all ranks run to their end
//   host dependencies: where one rank's host waits for another rank's progress, an attempt settles or stands still, and
//   lifting it lets the job run to its end
//
// agreement_model [--first S] [--seeds N] [--seed S] [--mutant M] | --list. Exit code 1 and the program where something fails.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "devproxy/csrc/server/agreement.h"

namespace {

using namespace devproxy;
using namespace devproxy::server;

enum Mutant {
  kNone,
  kNoConfirmation,    // settled as soon as the reports are closed, without another look
  kLimitsOfOneRank,   // the limits are the first reporter's
  kOwesNothing,       // who owes does not pass other limits
  kInitUnseen,        // a half-made communicator owes nothing
  kInitOnlyByName,    // only a rank that is asked may make it; nobody is, since nobody knows the members
  kGroupCutInTwo,     // the members of a group are taken one by one
  kSendsOnly,         // receives are not counted
  kHoldForgotten,     // one rank does not hold
  kLiftTooEarly,      // a rank lifts when it has settled itself
  kLimitIsLeast,      // the least of the reports
  kReportBeforeTake,  // a message counts after its report could be asked
  kAbortCounts,       // an aborted communicator stays in the closure
  kRestsForEver,      // at least memory, though it owes
  kMutants
};
const char* const mutant_names[kMutants] = {
    "none",           "no-confirmation",   "limits-of-one-rank", "owes-nothing",
    "init-unseen",    "init-only-by-name", "group-cut-in-two",   "sends-only",
    "hold-forgotten", "lift-too-early",    "limit-is-least",     "report-before-take",
    "abort-counts",   "rests-for-ever"};
int mutant = kNone;

struct Operation {
  enum Kind : uint8_t { kInit, kAll, kSend, kRecv, kAbort } kind = kAll;
  int comm = 0, peer = 0;
};
struct Message {
  std::vector<Operation> group;
  int after_rank = -1, after_index = 0;  // host dependency: that rank must have executed so many messages
  bool rests = false;                    // it is behind a point of least memory
};
struct Program {
  int ranks = 2;
  std::vector<std::vector<int>> comms;  // members; place is the rank
  std::vector<std::vector<Message>> messages;
  bool host_dependencies = false;
};

using Random = std::mt19937_64;
int dice(Random& r, int n) { return static_cast<int>(r() % static_cast<uint64_t>(n)); }

// A program that runs: it is written as one order of events, and each rank gets its own of them.
Program make(Random& r, bool host_dependencies) {
  Program p;
  p.host_dependencies = host_dependencies;
  p.ranks = 2 + dice(r, 3);
  p.messages.resize(static_cast<size_t>(p.ranks));
  const int n_comms = 1 + dice(r, 3);
  for (int c = 0; c < n_comms; c++) {
    std::vector<int> members;
    for (int rank = 0; rank < p.ranks; rank++)
      if (c == 0 || dice(r, 3) != 0) members.push_back(rank);
    if (members.size() < 2) members = {0, 1};
    p.comms.push_back(members);
  }
  std::vector<bool> made(p.comms.size()), gone(p.comms.size());
  auto all = [&](int comm, Operation::Kind kind) {
    for (int rank : p.comms[static_cast<size_t>(comm)])
      p.messages[static_cast<size_t>(rank)].push_back({{{kind, comm, 0}}, -1, 0});
  };
  const int events = 2 + dice(r, 7);
  for (int e = 0; e < events; e++) {
    const int comm = dice(r, n_comms);
    const auto at = static_cast<size_t>(comm);
    const auto& members = p.comms[at];
    if (gone[at]) continue;
    if (!made[at]) {
      all(comm, Operation::kInit);
      made[at] = true;
      continue;
    }
    const int what = dice(r, 10);
    if (what < 4) {
      all(comm, Operation::kAll);
    } else if (what < 6) {  // one sends, another receives
      const int a = dice(r, static_cast<int>(members.size())), b = dice(r, static_cast<int>(members.size()));
      if (a == b) continue;
      p.messages[static_cast<size_t>(members[static_cast<size_t>(a)])].push_back(
          {{{Operation::kSend, comm, b}}, -1, 0});
      p.messages[static_cast<size_t>(members[static_cast<size_t>(b)])].push_back(
          {{{Operation::kRecv, comm, a}}, -1, 0});
    } else if (what < 9) {  // a ring, and a collective of any communicator that all members share
      const int n = static_cast<int>(members.size());
      for (int i = 0; i < n; i++) {
        Message m;
        m.group.push_back({Operation::kSend, comm, (i + 1) % n});
        m.group.push_back({Operation::kRecv, comm, (i + n - 1) % n});
        if (what == 8) m.group.push_back({Operation::kAll, comm, 0});
        p.messages[static_cast<size_t>(members[static_cast<size_t>(i)])].push_back(m);
      }
    } else if (dice(r, 3) == 0) {
      // A member does one more before it gives up, and the others do not.
      if (dice(r, 2)) p.messages[static_cast<size_t>(members[0])].push_back({{{Operation::kAll, comm, 0}}, -1, 0});
      all(comm, Operation::kAbort);
      gone[at] = true;
    }
  }
  if (host_dependencies)
    for (int k = 0; k < 2; k++) {
      const int a = dice(r, p.ranks), b = dice(r, p.ranks);
      auto& list = p.messages[static_cast<size_t>(a)];
      if (a == b || list.empty()) continue;
      Message& m = list[static_cast<size_t>(dice(r, static_cast<int>(list.size())))];
      m.after_rank = b;
      m.after_index = dice(r, static_cast<int>(p.messages[static_cast<size_t>(b)].size()) + 1);
    }
  for (auto& list : p.messages)
    for (Message& m : list) m.rests = dice(r, 3) == 0;
  return p;
}

std::string text(const Program& p) {
  std::string out = "ranks " + std::to_string(p.ranks) + "\n";
  const char* const names[] = {"init", "all", "send", "recv", "abort"};
  for (size_t rank = 0; rank < p.messages.size(); rank++) {
    out += " rank " + std::to_string(rank) + ":";
    for (const Message& m : p.messages[rank]) {
      out += " (";
      if (m.after_rank >= 0) out += "after " + std::to_string(m.after_rank) + "/" + std::to_string(m.after_index) + " ";
      for (const Operation& o : m.group) {
        out += names[o.kind];
        out += std::to_string(o.comm);
        if (o.kind == Operation::kSend || o.kind == Operation::kRecv) out += ">" + std::to_string(o.peer);
        out += ' ';
      }
      out.back() = ')';
    }
    out += "\n";
  }
  return out;
}

CommKey key_of(int comm) { return {static_cast<uint64_t>(comm) + 1, 7}; }

class World {
 public:
  World(const Program& p, Random& r) : p_(p), r_(r), ranks_(static_cast<size_t>(p.ranks)) {}

  const char* failed = nullptr;
  int rank_of(int rank, int comm) const {
    const auto& members = p_.comms[static_cast<size_t>(comm)];
    return static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
  }

  std::vector<CommStep> steps_of(int rank, const Message& m) const {
    std::vector<CommStep> steps;
    for (const Operation& o : m.group) {
      const int me = rank_of(rank, o.comm);
      const auto n = static_cast<uint32_t>(p_.comms[static_cast<size_t>(o.comm)].size());
      CountKey key{key_of(o.comm), -1, -1, false};
      if (o.kind == Operation::kAbort) continue;
      if (o.kind == Operation::kSend) key = {key.comm, me, o.peer, false};
      if (o.kind == Operation::kRecv) key = {key.comm, o.peer, me, true};
      if (mutant == kSendsOnly && o.kind == Operation::kRecv) continue;
      steps.push_back({key, n, static_cast<uint32_t>(me), o.kind == Operation::kInit});
    }
    return steps;
  }

  // One step of a rank that takes its next message, or a part of it where a mutant cuts groups. False: it waits.
  bool take(int rank) {
    Rank& me = ranks_[static_cast<size_t>(rank)];
    const auto& list = p_.messages[static_cast<size_t>(rank)];
    if (me.taken == list.size()) return false;
    const Message& m = list[me.taken];
    if (m.after_rank >= 0 && ranks_[static_cast<size_t>(m.after_rank)].executed < static_cast<size_t>(m.after_index))
      return false;
    if (aims_ && m.rests && (!me.agreement.owes() || mutant == kRestsForEver)) return false;
    std::vector<CommStep> steps = steps_of(rank, m);
    if (mutant == kOwesNothing && me.agreement.holding() && !within(me, steps)) return false;
    if (mutant == kGroupCutInTwo && steps.size() > 1) {
      const std::vector<CommStep> one{steps[me.part]};
      if (!me.agreement.take(one)) return false;
      moved_ = true;
      if (++me.part < steps.size()) return true;
      me.part = 0;
    } else if (mutant == kReportBeforeTake) {
      Agreement before = me.agreement;
      if (!before.take(steps)) return false;
      if (me.late.empty() && !steps.empty()) {
        me.late = steps;  // counted at the rank's next step
        moved_ = true;
      } else if (!me.agreement.take(steps)) {
        return false;
      }
    } else if (!me.agreement.take(steps)) {
      return false;
    }
    moved_ = moved_ || !steps.empty();
    me.stepped += !steps.empty();
    for (const Operation& o : m.group)
      if (o.kind == Operation::kAbort && mutant != kAbortCounts)
        me.agreement.abort(key_of(o.comm)), aborted_.insert(o.comm);
      else if (o.kind == Operation::kAbort)
        aborted_.insert(o.comm);
    me.taken++;
    return true;
  }

  // Executes what can be: a message when each of its operations has all that it needs among the messages taken.
  void execute() {
    for (bool again = true; again;) {
      again = false;
      // A fixed point from above: take all that is taken as executed, and drop what lacks something.
      std::vector<size_t> done(ranks_.size());
      for (size_t i = 0; i < ranks_.size(); i++) done[i] = ranks_[i].taken;
      for (bool dropped = true; dropped;) {
        dropped = false;
        const auto counts = counts_to(done);
        for (size_t i = 0; i < ranks_.size(); i++)
          for (size_t k = ranks_[i].executed; k < done[i]; k++)
            if (!has_all(static_cast<int>(i), k, counts)) {
              done[i] = k;
              dropped = true;
              break;
            }
      }
      for (size_t i = 0; i < ranks_.size(); i++)
        if (ranks_[i].executed < done[i]) ranks_[i].executed = done[i], again = true;
    }
  }
  bool all_executed() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.executed == r.taken; });
  }
  bool half_taken() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.part != 0; });
  }
  bool ended() const {
    for (size_t i = 0; i < ranks_.size(); i++)
      if (ranks_[i].executed != p_.messages[i].size()) return false;
    return true;
  }

  // Random steps of ranks; returns false when none can move.
  bool run(int steps) {
    bool any = false;
    for (int s = 0; s < steps; s++) {
      const int first = dice(r_, p_.ranks);
      bool moved = false;
      for (int k = 0; k < p_.ranks && !moved; k++) moved = take((first + k) % p_.ranks);
      for (Rank& r : ranks_)
        if (!r.late.empty() && dice(r_, 2)) static_cast<void>(r.agreement.take(r.late)), r.late.clear();
      execute();
      if (!moved) break;
      any = true;
    }
    return any;
  }

  std::vector<CommReport> reports() {
    std::vector<CommReport> all;
    for (size_t i = 0; i < ranks_.size(); i++) {
      if (dice(r_, 2)) run(dice(r_, 3));  // the reports are of different moments
      CommReport report = ranks_[i].agreement.report(i + 1);
      for (CommReport::Member& m : report.members) m.complete = complete(static_cast<int>(m.comm.low) - 1);
      all.push_back(report);
    }
    return all;
  }

  // One attempt. 1: settled, 0: nothing moves any more.
  int attempt() {
    aims_ = dice(r_, 2) != 0;
    // Some come to where they rest, and others do not. Who owes goes on.
    for (int i = 0; aims_ && i < 4; i++) {
      const std::vector<CommReport> all = reports();
      const CommVerdict verdict = judge(all);
      for (Rank& r : ranks_) static_cast<void>(r.agreement.learn(verdict, nullptr));
      run(dice(r_, 6));
    }
    for (size_t i = 0; i < ranks_.size(); i++)
      if (mutant != kHoldForgotten || i != 0) ranks_[i].agreement.hold();
    std::vector<CommReport> all = reports();
    for (int idle = 0; idle < 3;) {
      CommVerdict verdict = judge(all);
      if (mutant == kLimitsOfOneRank || mutant == kLimitIsLeast)
        for (auto& [key, limit] : verdict.limits)
          for (const CommReport& one : all) {
            if (mutant == kLimitsOfOneRank && one.client != 1) continue;
            const auto it = one.counts.find(key);
            const uint64_t has = it == one.counts.end() ? 0 : it->second;
            limit = mutant == kLimitsOfOneRank ? has : std::min(limit, has);
          }
      if (mutant == kInitOnlyByName) verdict.beginning.clear();
      if (mutant == kInitUnseen) {
        verdict.beginning.clear();
        verdict.closed = verdict.closed || verdict.debt.rfind("communicator", 0) == 0;
      }
      bool settled = true;
      moved_ = false;
      for (size_t i = 0; i < ranks_.size(); i++) {
        bool own = ranks_[i].agreement.learn(verdict, &all[i]);
        ranks_[i].seen = verdict;
        if (mutant == kNoConfirmation) own = verdict.closed;
        settled = own && settled;
        if (mutant == kLiftTooEarly && own) ranks_[i].agreement.lift();
        if (dice(r_, 2)) run(dice(r_, 3));
      }
      if (settled) return 1;
      run(1 + dice(r_, 4));
      idle = moved_ ? 0 : idle + 1;
      all = reports();
      if (moved_) idle = 0;
    }
    return 0;
  }
  void lift() {
    aims_ = false;
    for (Rank& r : ranks_) r.agreement.lift();
  }
  // Messages that count; an abort may be taken at any time.
  std::vector<size_t> taken() const {
    std::vector<size_t> all;
    for (const Rank& r : ranks_) all.push_back(r.stepped);
    return all;
  }

 private:
  struct Rank {
    Agreement agreement;
    size_t taken = 0, executed = 0, part = 0, stepped = 0;
    std::vector<CommStep> late;
    CommVerdict seen;
  };
  static bool within(const Rank& rank, const std::vector<CommStep>& steps) {
    std::map<CountKey, uint64_t> adds;
    for (const CommStep& step : steps)
      if (!step.init) adds[step.key]++;
    const CommReport report = rank.agreement.report(0);
    return std::all_of(adds.begin(), adds.end(), [&](const auto& add) {
      const auto has = report.counts.find(add.first);
      const auto limit = rank.seen.limits.find(add.first.limited());
      return (has == report.counts.end() ? 0 : has->second) + add.second <=
             (limit == rank.seen.limits.end() ? 0 : limit->second);
    });
  }
  using Counts = std::map<CountKey, std::map<int, uint64_t>>;  // by rank of the communicator

  Counts counts_to(const std::vector<size_t>& done) const {
    Counts counts;
    for (size_t i = 0; i < ranks_.size(); i++)
      for (size_t k = 0; k < done[i]; k++)
        for (const Operation& o : p_.messages[i][k].group) add(&counts, static_cast<int>(i), o);
    return counts;
  }
  void add(Counts* counts, int rank, const Operation& o) const {
    const int me = rank_of(rank, o.comm);
    if (o.kind == Operation::kAll) (*counts)[{key_of(o.comm), -1, -1, false}][me]++;
    if (o.kind == Operation::kInit) (*counts)[{key_of(o.comm), -2, -2, false}][me]++;
    if (o.kind == Operation::kSend) (*counts)[{key_of(o.comm), me, o.peer, false}][0]++;
    if (o.kind == Operation::kRecv) (*counts)[{key_of(o.comm), o.peer, me, true}][0]++;
  }
  bool has_all(int rank, size_t index, const Counts& counts) const {
    // Which number each of its operations has at this rank.
    Counts own;
    const auto& list = p_.messages[static_cast<size_t>(rank)];
    for (size_t k = 0; k <= index; k++)
      for (const Operation& o : list[k].group) add(&own, rank, o);
    for (const Operation& o : list[index].group) {
      if (o.kind == Operation::kAbort || aborted_.contains(o.comm)) continue;
      const int me = rank_of(rank, o.comm);
      auto of = [](const Counts& c, const CountKey& key, int who) {
        const auto it = c.find(key);
        if (it == c.end()) return uint64_t{0};
        const auto at = it->second.find(who);
        return at == it->second.end() ? uint64_t{0} : at->second;
      };
      if (o.kind == Operation::kSend &&
          of(counts, {key_of(o.comm), me, o.peer, true}, 0) < of(own, {key_of(o.comm), me, o.peer, false}, 0))
        return false;
      if (o.kind == Operation::kRecv &&
          of(counts, {key_of(o.comm), o.peer, me, false}, 0) < of(own, {key_of(o.comm), o.peer, me, true}, 0))
        return false;
      if (o.kind != Operation::kAll && o.kind != Operation::kInit) continue;
      const CountKey key =
          o.kind == Operation::kAll ? CountKey{key_of(o.comm), -1, -1, false} : CountKey{key_of(o.comm), -2, -2, false};
      for (size_t m = 0; m < p_.comms[static_cast<size_t>(o.comm)].size(); m++)
        if (of(counts, key, static_cast<int>(m)) < of(own, key, me)) return false;
    }
    return true;
  }
  bool complete(int comm) const {
    std::vector<size_t> taken;
    for (const Rank& r : ranks_) taken.push_back(r.executed);
    const Counts counts = counts_to(taken);
    const auto it = counts.find({key_of(comm), -2, -2, false});
    return it != counts.end() && it->second.size() == p_.comms[static_cast<size_t>(comm)].size();
  }

  const Program& p_;
  Random& r_;
  std::vector<Rank> ranks_;
  std::set<int> aborted_;
  bool moved_ = false, aims_ = false;
};

// What went wrong, or nullptr.
const char* check(const Program& p, Random& r) {
  World world(p, r);
  world.run(dice(r, 12));
  for (int attempts = 0; attempts < 3; attempts++) {
    if (world.attempt()) {
      world.execute();
      if (world.half_taken()) return "a group was cut in two";
      if (!world.all_executed()) return "the job was cut, and something that was submitted lacks a part";
      const auto before = world.taken();
      world.run(20);
      if (world.taken() != before) return "a rank went on after the job had settled";
    } else if (!p.host_dependencies) {
      return "an attempt stands still, although no host waits for another";
    }
    world.lift();
    world.run(dice(r, 4));
  }
  for (int i = 0; i < 1000 && world.run(10); i++) {}
  return world.ended() ? nullptr : "the job does not run to its end";
}

// Does the program run at all, without a cut? A host dependency may have made a circle.
bool runs(const Program& p) {
  Random r(1);
  World world(p, r);
  for (int i = 0; i < 1000 && world.run(10); i++) {}
  return world.ended();
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t seeds = 20000, first = 1;
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--list") == 0) {
      for (int m = 1; m < kMutants; m++) std::printf("%d %s\n", m, mutant_names[m]);
      return 0;
    }
    if (i + 1 < argc && std::strcmp(argv[i], "--seeds") == 0) seeds = std::strtoull(argv[++i], nullptr, 10);
    if (i + 1 < argc && std::strcmp(argv[i], "--first") == 0) first = std::strtoull(argv[++i], nullptr, 10);
    if (i + 1 < argc && std::strcmp(argv[i], "--seed") == 0) first = std::strtoull(argv[++i], nullptr, 10), seeds = 1;
    if (i + 1 < argc && std::strcmp(argv[i], "--mutant") == 0) mutant = std::atoi(argv[++i]);
  }
  uint64_t ran = 0;
  for (uint64_t seed = first; seed < first + seeds; seed++) {
    Random r(seed);
    const Program p = make(r, seed % 4 == 0);
    const int real = mutant;
    mutant = kNone;
    const bool good = runs(p);
    mutant = real;
    if (!good) continue;
    ran++;
    if (const char* why = check(p, r)) {
      std::printf("seed %llu: %s\n%s", static_cast<unsigned long long>(seed), why, text(p).c_str());
      return 1;
    }
  }
  std::printf("%llu programs hold\n", static_cast<unsigned long long>(ran));
  return ran > seeds / 2 ? 0 : 2;
}
