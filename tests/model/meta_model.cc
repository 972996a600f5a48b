// SPDX-License-Identifier: Apache-2.0
// Checker of the meta-allreduce: the real code of devproxy/csrc/server/meta_barrier.h and agreement.h, between ranks that
// run random programs, devices that execute them, and a coordinator that asks, looks at the closure and lifts at random
// moments.
//
// A program is a list of communication messages for each rank that would run to its end without a cut. Data-parallel:
// operations of all ranks over one communicator, which each rank groups into messages in its own way. Otherwise also
// communicators of some ranks, sends and receives. An operation begins when all messages of its communicator before
// it have been executed, and those of all members in its own message; it is executed when its partners have begun too. The sums of a
// message's metas are read some time after the message was executed.
//
// What must hold
//   when all ranks have acquired, all stand at the same operation of the communicator
//   what is cut is closed: all that was taken can be executed, by what was taken alone, and nobody takes anything more
//   a data-parallel program is acquired, unless it ends before that
//   after the lift, whenever it comes to whichever rank, all ranks run to their end
//
// meta_model [--first S] [--seeds N] [--seed S] [--mutant M] | --list. Exit code 1 and the program where something fails.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "devproxy/csrc/server/agreement.h"
#include "devproxy/csrc/server/meta_barrier.h"

namespace {

using namespace devproxy;
using namespace devproxy::server;

enum Mutant {
  kNone,
  kAckWithNeed,     // a rank acknowledges with its first need, before it is synchronous, and such sums acquire
  kMetaAfterData,   // the meta is submitted when its operation has been executed
  kStopAtNeed,      // a synchronous rank stops at the next need
  kNoClosure,       // what is acquired is cut
  kNeedStays,       // a lift leaves the need as it was
  kSameAttempt,     // acknowledgements of all attempts are the same number
  kAskedAgain,      // the second question goes on with what the first one had seen
  kNotSynchronous,  // a rank that acknowledges does not wait for the sums
  kAnyAck,          // one acknowledgement is enough
  kDoesNotHold,     // acquired, and the next message is taken
  kEachAcks,        // all metas of a message acknowledge, though only the last one is read
  kUnaskedUnread,   // sums that come while nobody asks are thrown away
  kMutants
};
const char* const mutant_names[kMutants] = {
    "none",        "ack-with-need",   "meta-after-data", "stop-at-need",  "no-closure", "need-stays",    "same-attempt",
    "asked-again", "not-synchronous", "any-ack",         "does-not-hold", "each-acks",  "unasked-unread"};
int mutant = kNone;

struct Operation {
  enum Kind : uint8_t { kInit, kAll, kSend, kRecv } kind = kAll;
  int comm = 0, peer = 0;
};
using Message = std::vector<Operation>;
struct Program {
  int ranks = 2;
  bool data_parallel = true;
  std::vector<std::vector<int>> comms;  // members; the place is the rank
  std::vector<std::vector<Message>> messages;
};

using Random = std::mt19937_64;
int dice(Random& r, int n) { return static_cast<int>(r() % static_cast<uint64_t>(n)); }

Program make(Random& r, bool data_parallel) {
  Program p;
  p.data_parallel = data_parallel;
  p.ranks = 2 + dice(r, 3);
  p.messages.resize(static_cast<size_t>(p.ranks));
  auto of = [&](int rank) -> std::vector<Message>& { return p.messages[static_cast<size_t>(rank)]; };
  std::vector<int> everyone;
  for (int rank = 0; rank < p.ranks; rank++) everyone.push_back(rank);
  p.comms.push_back(everyone);
  for (int rank : everyone) of(rank).push_back({{Operation::kInit, 0, 0}});
  if (data_parallel) {
    const int n = 4 + dice(r, 16);
    const bool alike = dice(r, 2) == 0;  // all ranks group in the same way
    const uint64_t seed = r();
    for (int rank : everyone) {
      Random own(alike ? seed : r());
      for (int k = 0; k < n;) {
        Message m;
        for (int size = dice(own, 3) ? 1 : 1 + dice(own, 3); size > 0 && k < n; size--, k++)
          m.push_back({Operation::kAll, 0, 0});
        of(rank).push_back(m);
      }
    }
    return p;
  }
  for (int c = 1 + dice(r, 2); c > 0; c--) {
    std::vector<int> members;
    for (int rank : everyone)
      if (dice(r, 3)) members.push_back(rank);
    if (members.size() < 2) members = {0, 1};
    for (int rank : members) of(rank).push_back({{Operation::kInit, static_cast<int>(p.comms.size()), 0}});
    p.comms.push_back(members);
  }
  // Their messages come at each member in the order of the communicator, and anywhere between those of others.
  std::vector<std::vector<std::deque<Message>>> later(p.messages.size(),
                                                      std::vector<std::deque<Message>>(p.comms.size()));
  auto post = [&](int rank, int comm, const Message& m) {
    later[static_cast<size_t>(rank)][static_cast<size_t>(comm)].push_back(m);
  };
  auto flush = [&](bool all) {
    for (int rank : everyone)
      for (size_t c = 0; c < p.comms.size(); c++)
        for (auto& list = later[static_cast<size_t>(rank)][c]; !list.empty() && (all || c == 0 || dice(r, 2));) {
          of(rank).push_back(list.front());
          list.pop_front();
        }
  };
  for (int events = 6 + dice(r, 14); events > 0; events--) {
    const int comm = dice(r, 2) ? 0 : dice(r, static_cast<int>(p.comms.size()));
    const auto& members = p.comms[static_cast<size_t>(comm)];
    const int n = static_cast<int>(members.size()), what = dice(r, 6);
    if (what < 3) {
      for (int rank : members) post(rank, comm, {{Operation::kAll, comm, 0}});
    } else if (what == 3) {  // a pipeline's edge
      const int a = dice(r, n), b = (a + 1) % n;
      post(members[static_cast<size_t>(a)], comm, {{Operation::kSend, comm, b}});
      post(members[static_cast<size_t>(b)], comm, {{Operation::kRecv, comm, a}});
    } else {  // a ring, and a collective with it
      for (int i = 0; i < n; i++) {
        Message m{{Operation::kSend, comm, (i + 1) % n}, {Operation::kRecv, comm, (i + n - 1) % n}};
        if (what == 5) m.push_back({Operation::kAll, comm, 0});
        post(members[static_cast<size_t>(i)], comm, m);
      }
    }
    flush(false);
  }
  flush(true);
  return p;
}

std::string text(const Program& p) {
  std::string out = "ranks " + std::to_string(p.ranks) + (p.data_parallel ? " data-parallel\n" : "\n");
  const char* const names[] = {"init", "all", "send", "recv"};
  for (size_t rank = 0; rank < p.messages.size(); rank++) {
    out += " rank " + std::to_string(rank) + ":";
    for (const Message& m : p.messages[rank]) {
      out += " (";
      for (const Operation& o : m) {
        out += names[o.kind] + std::to_string(o.comm);
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
  World(const Program& p, Random& r) : p_(p), r_(r), ranks_(static_cast<size_t>(p.ranks)) {
    for (Rank& rank : ranks_) rank.rows.resize(p.comms.size());
  }

  // Random steps; false when nobody can move.
  bool run(int steps) {
    bool any = false;
    for (int s = 0; s < steps; s++) {
      const int first = dice(r_, p_.ranks);
      bool moved = false;
      for (int k = 0; k < p_.ranks && !moved; k++) {
        const auto rank = static_cast<size_t>((first + k) % p_.ranks);
        moved = dice(r_, 2) ? take(rank) || tell(rank) : tell(rank) || take(rank);
      }
      execute();
      if (!moved) return any;
      any = true;
    }
    return any;
  }

  // One attempt. 1: it may be cut, 0: not.
  const char* attempt(bool* cut) {
    *cut = false;
    attempt_++;
    std::vector<size_t> order;
    for (size_t i = 0; i < ranks_.size(); i++) order.push_back(i);
    std::shuffle(order.begin(), order.end(), r_);
    for (size_t i : order) {
      ask(i);
      if (dice(r_, 2)) run(dice(r_, 4));
    }
    const bool gives_up = dice(r_, 4) == 0;
    for (;;) {
      const auto n = std::count_if(ranks_.begin(), ranks_.end(), [&](const Rank& rank) { return acquired(rank); });
      if (gives_up && (n > 0 || dice(r_, 8) == 0)) return nullptr;  // also where some have acquired already
      if (n == p_.ranks) break;
      if (run(1 + dice(r_, 4))) continue;
      if (!p_.data_parallel || std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
            return rank.taken == p_.messages[static_cast<size_t>(&rank - ranks_.data())].size();
          }))
        return nullptr;
      return "a data-parallel program is not acquired, and stands still";
    }
    const uint64_t at = submitted(ranks_[0]);
    for (const Rank& rank : ranks_)
      if (submitted(rank) != at) return "all ranks have acquired, at different operations";
    // As the coordinator does: the counts of everything, of different moments.
    for (Rank& rank : ranks_) rank.agreement.hold();
    std::vector<CommReport> reports;
    for (size_t i = 0; i < ranks_.size(); i++) {
      if (dice(r_, 2)) run(dice(r_, 3));
      reports.push_back(ranks_[i].agreement.report(i + 1));
      for (CommReport::Member& m : reports.back().members) m.complete = complete(static_cast<int>(m.comm.low) - 1);
    }
    const CommVerdict verdict = judge(reports);
    bool settled = true;
    for (size_t i = 0; i < ranks_.size(); i++) settled = ranks_[i].agreement.learn(verdict, &reports[i]) && settled;
    if (!settled && p_.data_parallel) return "a data-parallel program is acquired, and not closed";
    if (!settled && mutant != kNoClosure) return nullptr;
    *cut = true;
    execute();
    for (const Rank& rank : ranks_)
      if (rank.executed != rank.taken) return "the job was cut, and something that was submitted lacks a part";
    std::vector<size_t> before, after;
    for (const Rank& rank : ranks_) before.push_back(rank.taken);
    run(20);
    for (const Rank& rank : ranks_) after.push_back(rank.taken);
    return before == after ? nullptr : "a rank went on after the cut";
  }
  // In any order, with whatever happens in between.
  void lift() {
    std::vector<size_t> order;
    for (size_t i = 0; i < ranks_.size(); i++) order.push_back(i);
    std::shuffle(order.begin(), order.end(), r_);
    for (size_t i : order) {
      ranks_[i].agreement.lift();
      if (mutant == kAskedAgain)
        ranks_[i].paused = true;
      else if (mutant != kNeedStays)
        ranks_[i].barrier.lift();
      ranks_[i].acquired = false;
      if (dice(r_, 2)) run(dice(r_, 4));
    }
  }
  // Some ranks are asked, and lifted before the others were: the coordinator died.
  void half_an_attempt() {
    attempt_++;
    for (size_t i = 0; i < ranks_.size(); i++)
      if (dice(r_, 4)) ask(i);
    run(dice(r_, 10));
    lift();
  }
  bool ended() const {
    for (size_t i = 0; i < ranks_.size(); i++)
      if (ranks_[i].executed != p_.messages[i].size()) return false;
    return true;
  }

 private:
  struct Read {
    int comm;
    size_t place;  // in the rows
    uint64_t number;
  };
  struct Rank {
    Agreement agreement;
    MetaBarrier barrier;
    size_t taken = 0, executed = 0;             // messages
    std::vector<std::vector<bool>> done;        // of each message that was taken: which of its operations are
    std::vector<std::vector<MetaSums>> rows;    // of each communicator: what its metas say
    std::map<size_t, std::vector<Read>> reads;  // by message: told when it has been executed
    std::vector<Read> told;                     // may be told now
    // Of mutants.
    bool acquired = false, paused = false;
  };

  int place_of(size_t rank, int comm) const {
    const auto& members = p_.comms[static_cast<size_t>(comm)];
    return static_cast<int>(std::find(members.begin(), members.end(), static_cast<int>(rank)) - members.begin());
  }
  static uint64_t submitted(const Rank& rank) {
    const auto counts = rank.agreement.report(0).counts;
    const auto it = counts.find({key_of(0), -1, -1, false});
    return it == counts.end() ? 0 : it->second;
  }
  static bool acquired(const Rank& rank) { return (rank.barrier.acquired() && !rank.paused) || rank.acquired; }

  void ask(size_t i) {
    // What the second question goes on with has the first one's number.
    ranks_[i].barrier.ask(key_of(0), mutant == kAskedAgain || mutant == kSameAttempt ? 1 : attempt_);
    ranks_[i].paused = false;
  }

  static bool may_pass(const Rank& rank) {
    if (rank.paused) return true;
    if (rank.acquired) return false;
    if (mutant == kNotSynchronous) return !rank.barrier.acquired();
    if (mutant == kDoesNotHold && rank.barrier.acquired()) return true;
    return rank.barrier.may_pass();
  }

  bool take(size_t i) {
    Rank& me = ranks_[i];
    const auto& list = p_.messages[i];
    if (me.taken == list.size()) return false;
    const Message& m = list[me.taken];
    if (!may_pass(me)) return false;
    std::vector<CommStep> steps;
    for (const Operation& o : m) {
      const int at = place_of(i, o.comm);
      CountKey key{key_of(o.comm), -1, -1, false};
      if (o.kind == Operation::kSend) key = {key.comm, at, o.peer, false};
      if (o.kind == Operation::kRecv) key = {key.comm, o.peer, at, true};
      steps.push_back({key, static_cast<uint32_t>(p_.comms[static_cast<size_t>(o.comm)].size()),
                       static_cast<uint32_t>(at), o.kind == Operation::kInit});
    }
    if (!me.agreement.take(steps)) return false;
    const size_t message = me.taken++;
    for (const Operation& o : m)
      if (o.kind == Operation::kInit)
        me.barrier.carry(key_of(o.comm), static_cast<uint32_t>(p_.comms[static_cast<size_t>(o.comm)].size()));
    if (mutant != kMetaAfterData) submit(i, message);
    return true;
  }

  // The metas of a message.
  void submit(size_t i, size_t message) {
    Rank& me = ranks_[i];
    const Message& m = p_.messages[i][message];
    for (size_t k = 0; k < m.size(); k++) {
      if (m[k].kind != Operation::kAll) continue;
      const int comm = m[k].comm;
      auto same = [&](const Operation& o) { return o.kind == Operation::kAll && o.comm == comm; };
      const auto behind = m.begin() + static_cast<std::ptrdiff_t>(k) + 1;
      const bool last = std::none_of(behind, m.end(), same);
      auto& row = me.rows[static_cast<size_t>(comm)];
      MetaBarrier::Meta meta = me.barrier.submit(key_of(comm), last);
      if (me.paused) meta.says = {};
      if (mutant == kAckWithNeed && last) meta.says.ack = meta.says.need * attempt_;
      row.push_back(meta.says);
      if (!last) continue;
      me.reads[message].push_back({comm, row.size() - 1, meta.number});
      if (mutant == kEachAcks)
        for (auto n = static_cast<size_t>(std::count_if(m.begin(), behind, same)); n > 0; n--)
          row[row.size() - n].ack = meta.says.ack;
    }
  }
  bool row_is_full(const Read& read) const {
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
      const auto& members = p_.comms[static_cast<size_t>(read.comm)];
      const auto i = static_cast<int>(&rank - ranks_.data());
      return std::find(members.begin(), members.end(), i) == members.end() ||
             rank.rows[static_cast<size_t>(read.comm)].size() > read.place;
    });
  }
  // Some of what may be told is told.
  bool tell(size_t i) {
    Rank& me = ranks_[i];
    std::vector<size_t> ready;
    for (size_t k = 0; k < me.told.size(); k++)
      if (row_is_full(me.told[k])) ready.push_back(k);
    if (ready.empty()) return false;
    const size_t which = ready[static_cast<size_t>(dice(r_, static_cast<int>(ready.size())))];
    const Read read = me.told[which];
    me.told.erase(me.told.begin() + static_cast<std::ptrdiff_t>(which));
    MetaSums sums;
    for (const Rank& rank : ranks_) {
      const auto& row = rank.rows[static_cast<size_t>(read.comm)];
      if (row.size() > read.place) sums.need += row[read.place].need, sums.ack += row[read.place].ack;
    }
    const auto n = static_cast<int32_t>(p_.comms[static_cast<size_t>(read.comm)].size());
    if (mutant == kUnaskedUnread && !me.barrier.asked()) return true;
    const int32_t full = n * (mutant == kSameAttempt ? 1 : attempt_);
    if (mutant == kAckWithNeed && read.comm == 0 && me.barrier.asked() && sums.ack == full) me.acquired = true;
    if (mutant == kStopAtNeed && sums.need > 0) sums.ack = full;
    if (mutant == kAnyAck && sums.ack > 0) sums.ack = full;
    me.barrier.result(key_of(read.comm), read.number, sums);
    return true;
  }

  static bool all_of(const std::vector<bool>& done) { return std::find(done.begin(), done.end(), false) == done.end(); }
  // Executes what can be, operation by operation. A message is of one communicator.
  void execute() {
    for (bool again = true; again;) {
      again = false;
      // How far each rank has come: of each communicator's operations, and of each pair's sends and receives.
      std::map<CountKey, std::map<int, uint64_t>> begun, number;
      struct Candidate {
        size_t rank, message, place;
        uint64_t number;
      };
      std::vector<Candidate> candidates;
      for (size_t i = 0; i < ranks_.size(); i++) {
        Rank& me = ranks_[i];
        std::map<int, bool> waits;  // a communicator's message waits for one before it
        for (size_t k = 0; k < me.taken; k++) {
          const Message& m = p_.messages[i][k];
          me.done.resize(std::max(me.done.size(), k + 1));
          me.done[k].resize(m.size());
          bool blocked = false;  // an earlier operation of all in this message is not done
          for (size_t at = 0; at < m.size(); at++) {
            const CountKey key = key_for(i, m[at]);
            const int place = place_of(i, m[at].comm);
            const uint64_t mine = ++number[key][place];
            const bool in_order = m[at].kind == Operation::kAll || m[at].kind == Operation::kInit;
            if (waits[m[at].comm] || (in_order && blocked)) continue;
            begun[key][place]++;
            if (!me.done[k][at]) candidates.push_back({i, k, at, mine});
            blocked = blocked || (in_order && !me.done[k][at]);
          }
          if (!all_of(me.done[k])) waits[m[0].comm] = true;
        }
      }
      for (const Candidate& c : candidates) {
        Rank& me = ranks_[c.rank];
        if (!partners_begun(c.rank, p_.messages[c.rank][c.message][c.place], c.number, begun)) continue;
        me.done[c.message][c.place] = again = true;
        if (!all_of(me.done[c.message])) continue;
        if (mutant == kMetaAfterData) submit(c.rank, c.message);
        for (const Read& read : me.reads[c.message]) me.told.push_back(read);
        me.executed++;
      }
    }
  }
  CountKey key_for(size_t rank, const Operation& o) const {
    const int me = place_of(rank, o.comm);
    if (o.kind == Operation::kSend) return {key_of(o.comm), me, o.peer, false};
    if (o.kind == Operation::kRecv) return {key_of(o.comm), o.peer, me, true};
    return o.kind == Operation::kInit ? CountKey{key_of(o.comm), -2, -2, false}
                                      : CountKey{key_of(o.comm), -1, -1, false};
  }
  bool partners_begun(size_t rank, const Operation& o, uint64_t number,
                      std::map<CountKey, std::map<int, uint64_t>>& begun) const {
    const int me = place_of(rank, o.comm);
    CountKey key = key_for(rank, o);
    if (begun[key][me] < number) return false;
    if (o.kind == Operation::kSend || o.kind == Operation::kRecv) {
      key.receives = !key.receives;
      return begun[key][o.peer] >= number;
    }
    for (size_t m = 0; m < p_.comms[static_cast<size_t>(o.comm)].size(); m++)
      if (begun[key][static_cast<int>(m)] < number) return false;
    return true;
  }
  bool complete(int comm) const {
    for (const int member : p_.comms[static_cast<size_t>(comm)]) {
      const Rank& rank = ranks_[static_cast<size_t>(member)];
      bool has = false;
      for (size_t k = 0; k < rank.done.size(); k++)
        for (const Operation& o : p_.messages[static_cast<size_t>(member)][k])
          has = has || (o.kind == Operation::kInit && o.comm == comm && rank.done[k][0]);
      if (!has) return false;
    }
    return true;
  }

  const Program& p_;
  Random& r_;
  std::vector<Rank> ranks_;
  int32_t attempt_ = 0;
};

// What went wrong, or nullptr. cuts: how many there were.
const char* check(const Program& p, Random& r, uint64_t* cuts) {
  World world(p, r);
  world.run(dice(r, 12));
  for (int attempts = 0; attempts < 3; attempts++) {
    bool cut = false;
    if (dice(r, 2)) world.half_an_attempt();
    const char* why = world.attempt(&cut);
    if (why) return why;
    *cuts += cut;
    world.lift();
    world.run(dice(r, 4));
  }
  for (int i = 0; i < 1000 && world.run(10); i++) {}
  return world.ended() ? nullptr : "the job does not run to its end";
}

// Does the program run at all, without a cut? Sends may have made a circle.
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
  uint64_t ran = 0, cuts = 0;
  for (uint64_t seed = first; seed < first + seeds; seed++) {
    Random r(seed);
    const Program p = make(r, seed % 3 != 0);
    const int real = mutant;
    mutant = kNone;
    const bool good = runs(p);
    mutant = real;
    if (!good) continue;
    ran++;
    if (const char* why = check(p, r, &cuts)) {
      std::printf("seed %llu: %s\n%s", static_cast<unsigned long long>(seed), why, text(p).c_str());
      return 1;
    }
  }
  std::printf("%llu programs hold, cut %llu times\n", static_cast<unsigned long long>(ran),
              static_cast<unsigned long long>(cuts));
  return ran > seeds / 2 && cuts > ran / 5 ? 0 : 2;
}
