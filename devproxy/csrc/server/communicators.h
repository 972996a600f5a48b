// A client's communicators between the dispatch thread, which takes its messages, and the server thread, which asks for
// an agreement of all ranks (agreement.h).
//
// Every call is one critical section. So a report is exact: a message counts before it is handled, and nothing that the
// report does not have can be taken once a hold is on.
//
// Locks: mu_ is a leaf, but for the state of a hal::Comm, which is one too.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "devproxy/csrc/server/agreement.h"
#include "devproxy/csrc/server/device_door.h"
#include "devproxy/hal/object.h"

namespace devproxy::server {

class Communicators {
 public:
  // -- the dispatch thread

  // Before a message that has such steps is handled. False: it must wait; see wait().
  [[nodiscard]] bool take(const std::vector<CommStep>& steps) {
    std::lock_guard lock(mu_);
    return agreement_.take(steps);
  }
  // Until something has changed that take() may look at, or a moment. The caller looks at its gate too.
  void wait() {
    std::unique_lock lock(mu_);
    const uint64_t seen = changes_;
    changed_.wait_for(lock, std::chrono::milliseconds(kLookMs), [&] { return changes_ != seen; });
  }
  void made(const CommKey& key, hal::CommRef comm) {
    std::lock_guard lock(mu_);
    comms_[key] = std::move(comm);
  }
  void restored(const CommKey& key, uint32_t ranks, uint32_t rank) {
    std::lock_guard lock(mu_);
    agreement_.restored(key, ranks, rank);
  }
  void aborted(const CommKey& key) {
    std::lock_guard lock(mu_);
    agreement_.abort(key);
  }
  void destroyed(const CommKey& key) {
    std::lock_guard lock(mu_);
    agreement_.destroy(key);
    comms_.erase(key);
  }
  void clear() {
    std::lock_guard lock(mu_);
    comms_.clear();
  }

  // -- the server thread

  void hold() {
    change([](Agreement& a) { return a.hold(), true; });
  }
  void lift() {
    change([](Agreement& a) { return a.lift(), true; });
  }
  bool holding() const {
    std::lock_guard lock(mu_);
    return agreement_.holding();
  }
  bool learn(const CommVerdict& verdict, const CommReport* own) {
    return change([&](Agreement& a) { return a.learn(verdict, own); });
  }
  CommReport report(uint64_t client, DeviceDoor& device) const {
    std::lock_guard lock(mu_);
    CommReport report = agreement_.report(client);
    for (CommReport::Member& member : report.members) {
      const auto it = comms_.find(member.comm);
      if (it == comms_.end()) continue;
      member.complete = member.complete || device.comm_complete(it->second);
      if (device.comm_state(it->second, &member.failure) == CommState::kOk) member.failure.clear();
    }
    return report;
  }
  // Across a dump.
  std::map<CountKey, uint64_t> counts() const {
    std::lock_guard lock(mu_);
    return agreement_.counts();
  }
  void restore_counts(std::map<CountKey, uint64_t> counts) {
    std::lock_guard lock(mu_);
    agreement_.restore_counts(std::move(counts));
  }

 private:
  static constexpr int kLookMs = 20;

  template <class Change>
  bool change(Change change) {
    std::lock_guard lock(mu_);
    const bool result = change(agreement_);
    changes_++;
    changed_.notify_all();
    return result;
  }

  mutable std::mutex mu_;
  std::condition_variable changed_;
  uint64_t changes_ = 0;
  Agreement agreement_;
  std::map<CommKey, hal::CommRef> comms_;
};

}  // namespace devproxy::server
