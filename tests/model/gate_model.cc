// SPDX-License-Identifier: Apache-2.0
// Model checker of the gate: the real code of devproxy/csrc/server/gate.h between a server thread and a dispatch
// thread, over all interleavings.
//
// The server thread makes up to kEvents events of {cut now, cut later, resume, stop, aim, lift the aim} in any order. The
// dispatch thread is the loop of Connection::dispatch() and attend(), one step for each moment at which another thread
// can come in between. The environment posts commands and host functions, completes them, lets functions return, lets the
// clock pass and memory fall, and makes others need what this client owes, at any time or never. No wait has a time-out
// here, so a wake that gets lost is seen; but whoever learns that others wait tells the gate again and again.
//
// What must hold in each state:
//   a parked client has nothing pending and no host function out, and no message of it is taken
//   no message is taken between the begin of a drain and its end, while it rests, or after the thread has left
//   if the server thread asks for nothing more, the thread gets to what was asked last: it has left, or it is parked,
//   or it has served everything and sleeps at its ring; under an aim it rests once memory is least, and not while it owes
//
// gate_model [--mutant N] | --list: a mutant breaks the loop around the gate on purpose, and must be caught: exit code
// 1 and the steps that show it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "devproxy/csrc/server/gate.h"

namespace {

using devproxy::server::Gate;

enum Mutant {
  kNone,
  kResumeWakesNobody,
  kStopWakesNoRest,
  kStopRingsNot,
  kCutRingsNot,
  kSleepWithoutALook,  // at the ring, although the gate asks for something
  kParkWithoutDrain,   // says drained() while commands are pending
  kHostFunctionsUntold,
  kServeInDrain,        // takes one more message after it was told to drain
  kRestWhateverIsSaid,  // rests after a drain, although the cut was given up meanwhile
  kCutUnpublished,      // the word that the loop looks at stays 0
  kLiftWakesNobody,     // that rests under an aim
  kCutWakesNoAimed,
  kLookAgainWakesNobody,
  kDebtUntold,
  kAimUnpublished,
  kMutants
};
const char* const mutant_names[kMutants] = {"none",
                                            "resume-wakes-nobody",
                                            "stop-wakes-no-rest",
                                            "stop-rings-not",
                                            "cut-rings-not",
                                            "sleep-without-a-look",
                                            "park-without-drain",
                                            "host-functions-untold",
                                            "serve-in-drain",
                                            "rest-whatever-is-said",
                                            "cut-unpublished",
                                            "lift-wakes-nobody",
                                            "cut-wakes-no-aimed",
                                            "look-again-wakes-nobody",
                                            "debt-untold",
                                            "aim-unpublished"};
int mutant = kNone;

constexpr int kEvents = 4, kPosts = 2, kRing = 3;
constexpr int kEventsOfMutants = 3;  // enough to catch each, and a tenth of the states

enum class At : uint8_t {
  kTop,
  kPeek,
  kPrepare,
  kCheck,
  kFutex,
  kAsleep,
  kAttend,
  kBoundary,
  kDrain,
  kIdle,
  kEnterRest,
  kRest,
  kLeft
};
enum Kind : uint8_t { kNothing, kCommand, kHostFunction, kDone };

struct World {
  Gate gate;
  uint8_t attention;
  // server thread
  uint8_t events_left;
  bool owes_ring;  // it has made an event and will ring the doorbell next
  // dispatch thread
  At at;
  bool sleeping;  // the doorbell's word
  bool notified;  // where it rests
  // the client and the device
  uint8_t ring[kRing], in_ring;
  uint8_t posts_left, pending;
  bool host_function_out, host_function_runs;
  bool late, least_memory;
  // the other ranks
  bool owes, read_owes;  // and as the dispatch thread has read it for its boundary
  uint8_t debts_left;
};
static_assert(std::is_trivially_copyable_v<World>);

const char* failed = nullptr;

void expect(bool holds, const char* what) {
  if (!holds && !failed) failed = what;
}

void post(World& w, Kind kind) {
  w.ring[w.in_ring++] = kind;
  w.sleeping = false;  // publish() wakes a consumer that sleeps
}

void take(World& w) {
  expect(w.gate.phase() == Gate::Phase::kRunning || w.gate.phase() == Gate::Phase::kCutting,
         "a message is taken while the client drains or is parked");
  expect(!w.gate.rests(), "a message is taken while the client rests");
  const auto kind = static_cast<Kind>(w.ring[0]);
  for (int i = 1; i < w.in_ring; i++) w.ring[i - 1] = w.ring[i];
  w.ring[--w.in_ring] = kNothing;
  if (kind == kCommand) w.pending++;
  if (kind == kHostFunction) w.pending++, w.host_function_out = w.host_function_runs = true;
  if (kind == kDone) w.pending--, w.host_function_out = false;
}

void follow(World& w, Gate::Step step) {
  switch (step) {
    case Gate::Step::kServe: w.at = At::kPeek; break;
    case Gate::Step::kDrain: w.at = mutant == kParkWithoutDrain ? At::kIdle : At::kDrain; break;
    case Gate::Step::kRest: w.at = At::kEnterRest; break;
    case Gate::Step::kLeave: w.at = At::kLeft; break;
  }
}

// One step of the dispatch thread; false where it waits.
bool dispatch(World& w) {
  switch (w.at) {
    case At::kTop: w.at = w.attention ? At::kAttend : At::kPeek; return true;
    case At::kPeek:
      if (w.in_ring == 0) return w.at = At::kPrepare, true;
      take(w);
      w.at = At::kTop;
      return true;
    case At::kPrepare: w.sleeping = true, w.at = At::kCheck; return true;
    case At::kCheck:
      if (w.in_ring == 0 && (w.attention == 0 || mutant == kSleepWithoutALook)) return w.at = At::kFutex, true;
      w.sleeping = false, w.at = At::kTop;  // asked for something: it sleeps a moment only
      return true;
    case At::kFutex: w.at = w.sleeping ? At::kAsleep : At::kTop; return true;
    case At::kAsleep:
      if (w.sleeping) return false;
      w.at = At::kTop;
      return true;
    case At::kAttend: w.read_owes = w.owes && mutant != kDebtUntold, w.at = At::kBoundary; return true;
    case At::kBoundary: {
      const Gate::Step step =
          w.gate.at_boundary({w.late ? uint64_t{1} : 0, w.host_function_out && mutant != kHostFunctionsUntold,
                              w.least_memory, w.read_owes});
      if (step == Gate::Step::kDrain && mutant == kServeInDrain && w.in_ring) take(w);
      follow(w, step);
      return true;
    }
    case At::kDrain:
      if (w.pending == 0) return w.at = At::kIdle, true;
      if (const Gate::Step step = w.gate.draining(w.pending); step != Gate::Step::kDrain) follow(w, step);
      return true;
    case At::kIdle: {
      const Gate::Step step = w.gate.drained(w.late);
      if (mutant == kRestWhateverIsSaid && step == Gate::Step::kServe)
        w.at = At::kRest;
      else
        follow(w, step);
      return true;
    }
    case At::kEnterRest:
      w.notified = false;
      w.at = w.gate.step() == Gate::Step::kRest ? At::kRest : At::kAttend;
      return true;
    case At::kRest:
      if (!w.notified) return false;
      w.notified = false;
      if (w.gate.step() != Gate::Step::kRest) w.at = At::kAttend;
      return true;
    case At::kLeft: return false;
  }
  return false;
}

constexpr int kServerEvents = 6;
const char* const event_names[kServerEvents] = {"cut now", "cut later", "resume", "stop", "aim", "lift the aim"};

bool server_event(World& w, int which) {
  if (w.events_left == 0 || w.owes_ring) return false;
  w.events_left--;
  Gate::Wake wake;
  switch (which) {
    case 0: wake = w.gate.cut(0, 0); break;
    case 1: wake = w.gate.cut(1, 0); break;
    case 2: wake = w.gate.resume(); break;
    case 3: wake = w.gate.stop(); break;
    default: wake = w.gate.aim(which == 4); break;
  }
  const bool cut = which <= 1;
  if (!(cut && mutant == kCutUnpublished) && !(which == 4 && mutant == kAimUnpublished))
    w.attention = static_cast<uint8_t>(w.gate.attention());
  if ((cut && mutant == kCutWakesNoAimed) || (which == 5 && mutant == kLiftWakesNobody)) wake.rest = false;
  if ((which == 2 && mutant == kResumeWakesNobody) || (which == 3 && mutant == kStopWakesNoRest)) wake.rest = false;
  if ((cut && mutant == kCutRingsNot) || (which == 3 && mutant == kStopRingsNot)) wake.ring = false;
  w.notified = w.notified || wake.rest;
  w.owes_ring = wake.ring;
  return true;
}

const char* const environment_names[] = {"ring the doorbell",
                                         "post a command",
                                         "post a host function",
                                         "complete a command",
                                         "a host function returns",
                                         "the clock passes",
                                         "memory falls",
                                         "others come to need it, or no more",
                                         "look again"};
constexpr int kEnvironment = 9;

bool environment(World& w, int which) {
  switch (which) {
    case 0:
      if (!w.owes_ring) return false;
      w.owes_ring = w.sleeping = false;
      return true;
    case 1:
    case 2:
      if (w.posts_left == 0 || w.in_ring == kRing || (which == 2 && w.host_function_out)) return false;
      for (int i = 0; which == 2 && i < w.in_ring; i++)
        if (w.ring[i] == kHostFunction) return false;  // one at a time
      w.posts_left--;
      post(w, which == 1 ? kCommand : kHostFunction);
      return true;
    case 3:
      if (w.pending <= (w.host_function_out ? 1 : 0)) return false;
      w.pending--;
      return true;
    case 4:
      if (!w.host_function_runs || w.in_ring == kRing) return false;
      w.host_function_runs = false;
      post(w, kDone);
      return true;
    case 5: return !w.late && (w.late = true);
    case 6: return !w.least_memory && (w.least_memory = true);
    case 7:
      if (w.debts_left == 0) return false;
      w.debts_left--;
      w.owes = !w.owes;
      return true;
    default: {
      if (!w.gate.rests()) return false;
      const Gate::Wake wake = w.gate.look_again();
      w.notified = w.notified || (wake.rest && mutant != kLookAgainWakesNobody);
      return true;
    }
  }
}

void check(const World& w) {
  if (w.gate.phase() == Gate::Phase::kParked) {
    expect(w.pending == 0, "a parked client has a command pending");
    expect(!w.host_function_out, "a parked client has a host function out");
  }
}

bool arrived(const World& w) {
  if (w.owes_ring) return false;
  if (w.gate.attention() & Gate::kStop) return w.at == At::kLeft;
  if (w.gate.phase() != Gate::Phase::kRunning) return w.gate.phase() == Gate::Phase::kParked && w.at == At::kRest;
  if (w.gate.attention() & Gate::kCut)  // an aim
    return w.least_memory && !w.owes && !w.host_function_out ? w.at == At::kRest && w.gate.rests()
                                                             : w.at == At::kTop && w.in_ring == 0;
  return w.at == At::kAsleep && w.in_ring == 0;
}

struct Node {
  World world;
  int from;
  std::string by;
  std::vector<int> before;  // states that come here without an event of the server thread
};

std::vector<Node> nodes;
std::unordered_map<std::string, int> known;

int visit(const World& w, int from, std::string by) {
  const std::string key(reinterpret_cast<const char*>(&w), sizeof w);
  const auto [it, fresh] = known.try_emplace(key, static_cast<int>(nodes.size()));
  if (fresh) nodes.push_back({w, from, std::move(by), {}});
  return it->second;
}

int violated(int at, const char* why) {
  std::vector<std::string> steps;
  for (; at > 0; at = nodes[at].from) steps.push_back(nodes[at].by);
  std::printf("VIOLATION: %s\n", why);
  for (size_t i = steps.size(); i-- > 0;) std::printf("  %s\n", steps[i].c_str());
  return 1;
}

int explore() {
  World first;
  std::memset(static_cast<void*>(&first), 0, sizeof first);
  new (&first.gate) Gate;
  first.events_left = mutant == kNone ? kEvents : kEventsOfMutants;
  first.posts_left = kPosts;
  first.debts_left = mutant == kNone ? 3 : 1;  // odd: one may stay
  visit(first, 0, "begin");
  for (size_t i = 0; i < nodes.size(); i++) {
    auto step = [&](bool quiet, const std::string& by, auto act) {
      World w = nodes[i].world;
      failed = nullptr;
      if (!act(w)) return true;
      check(w);
      const int to = visit(w, static_cast<int>(i), by);
      if (quiet) nodes[to].before.push_back(static_cast<int>(i));
      return failed == nullptr;
    };
    bool holds = step(true, "dispatch thread at " + std::to_string(static_cast<int>(nodes[i].world.at)), dispatch);
    for (int e = 0; holds && e < kEnvironment; e++)
      holds = step(true, environment_names[e], [e](World& w) { return environment(w, e); });
    for (int e = 0; holds && e < kServerEvents; e++)
      holds =
          step(false, std::string("server thread: ") + event_names[e], [e](World& w) { return server_event(w, e); });
    if (!holds) return violated(static_cast<int>(i), failed);
  }
  std::vector<bool> good(nodes.size());
  std::vector<int> next;
  for (size_t i = 0; i < nodes.size(); i++)
    if (arrived(nodes[i].world)) good[i] = true, next.push_back(static_cast<int>(i));
  while (!next.empty()) {
    const int at = next.back();
    next.pop_back();
    for (const int before : nodes[at].before)
      if (!good[before]) good[before] = true, next.push_back(before);
  }
  for (size_t i = 0; i < nodes.size(); i++)
    if (!good[i]) return violated(static_cast<int>(i), "from here the thread never gets to what was asked last");
  std::printf("every state holds: %zu states\n", nodes.size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--list") == 0) {
      for (int m = 1; m < kMutants; m++) std::printf("%d %s\n", m, mutant_names[m]);
      return 0;
    }
    if (std::strcmp(argv[i], "--mutant") == 0 && i + 1 < argc) mutant = std::atoi(argv[++i]);
  }
  return explore();
}
