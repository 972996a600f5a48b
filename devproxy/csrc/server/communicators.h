// SPDX-License-Identifier: Apache-2.0
// A client's communicators between the dispatch thread, which takes its messages, the server thread, which asks for an
// agreement of all ranks (agreement.h) or a barrier in band (meta_barrier.h), and device threads, which tell that the
// sums of a meta are there.
//
// Every call is one critical section. So a report is exact: a message counts before it is handled, and nothing that the
// report does not have can be taken once a hold is on.
//
// Who takes the lock while a device calls: meta_done() alone. So nothing is submitted under mu_ (a device may complete a
// command while it is submitted), and a device calls on_complete with no lock that the state of a hal::Comm needs.
//
// Locks: mu_ is a leaf, but for the state of a hal::Comm, which is one too.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/server/agreement.h"
#include "devproxy/csrc/server/device_door.h"
#include "devproxy/csrc/server/meta_barrier.h"
#include "devproxy/csrc/server/meta_slots.h"
#include "devproxy/hal/object.h"

namespace devproxy::server {

// In a ticket's tag: the copy of a meta's sums. The rest is the slot.
inline constexpr uint32_t kMetaTag = 1u << 31;

// What went over a communicator, and when last (now_us()); 0: never. For whoever chooses how to come to a cut.
struct CommTraffic {
  uint64_t with_metas_us = 0;
  uint64_t without_us = 0;  // sends, receives, and all that graphs do
};

class Communicators {
 public:
  // metas: the job's operations carry them.
  Communicators(uint64_t device_begin, bool metas) : metas_(metas), slots_(device_begin) {}

  // -- the dispatch thread

  // Before a message that has such steps is handled. captured: a graph's. False: it must wait; see wait().
  [[nodiscard]] bool take(const std::vector<CommStep>& steps, bool captured) {
    std::lock_guard lock(mu_);
    if ((!steps.empty() && !barrier_.may_pass()) || !agreement_.take(steps)) {
      seen_ = changes_;
      return false;
    }
    const uint64_t now = steps.empty() ? 0 : now_us();
    for (const CommStep& step : steps) {
      if (step.init) continue;
      CommTraffic& traffic = traffic_[step.key.comm];
      (captured || step.key.from >= 0 ? traffic.without_us : traffic.with_metas_us) = now;
    }
    return true;
  }
  bool owes() const {
    std::lock_guard lock(mu_);
    return agreement_.owes();
  }
  // Until something has changed since take() said no, or a moment. The caller looks at its gate too.
  void wait() {
    std::unique_lock lock(mu_);
    changed_.wait_for(lock, std::chrono::milliseconds(kLookMs), [&] { return changes_ != seen_; });
  }
  // From now on: has everything that its operations need, also metas where the job's carry them.
  void made(const CommKey& key, uint32_t ranks, uint32_t rank, hal::CommRef comm) {
    std::lock_guard lock(mu_);
    comms_[key] = std::move(comm);
    if (ranks > place_.ranks) place_ = {rank, ranks};
    if (metas_ && ranks > 1) barrier_.carry(key, ranks);
  }
  // Which rank the client is, as its largest communicator numbers it: in a job that is usually the world's.
  struct Place {
    uint32_t rank = 0, ranks = 0;  // ranks 0: it has had no communicator
  };
  Place place() const {
    std::lock_guard lock(mu_);
    return place_;
  }
  bool metas() const { return metas_; }
  MetaSlots& slots() { return slots_; }  // but for take(), reads() and give(), which are under mu_
  // The meta that goes behind an operation of all members: from and to which address. last: of its communicator in
  // this message, so that its sums are read, out of the slot. send 0: its operations carry none.
  struct MetaCall {
    uint64_t send = 0, recv = 0;
    uint32_t slot = MetaSlots::kNone;
    bool acknowledges = false;  // what it says is to be copied there first
  };
  MetaCall meta(const CommKey& key, bool last) {
    std::lock_guard lock(mu_);
    if (!barrier_.carries(key)) return {};
    // None: thousands of metas that nobody has executed yet. Then this one's sums are not known, and it acknowledges
    // nothing.
    const uint32_t slot = last ? slots_.take() : MetaSlots::kNone;
    const MetaBarrier::Meta meta = barrier_.submit(key, slot != MetaSlots::kNone);
    if (slot == MetaSlots::kNone) return {slots_.word_at(meta.says), slots_.scratch_at(), slot, false};
    slots_.reads(slot, {key, meta.number});
    if (meta.says.ack == 0) return {slots_.word_at(meta.says), slots_.slot_at(slot), slot, false};
    slots_.says(slot) = meta.says;
    return {slots_.said_at(slot), slots_.slot_at(slot), slot, true};
  }
  void restored(const CommKey& key, uint32_t ranks, uint32_t rank) {
    std::lock_guard lock(mu_);
    agreement_.restored(key, ranks, rank);
  }
  void restored_half_made(const CommKey& key) {
    std::lock_guard lock(mu_);
    agreement_.restored_half_made(key);
  }
  void aborted(const CommKey& key) {
    std::lock_guard lock(mu_);
    agreement_.abort(key);
    barrier_.drop(key);  // what has no effect any more sums up nothing
    traffic_.erase(key);
  }
  void destroyed(const CommKey& key) {
    std::lock_guard lock(mu_);
    agreement_.destroy(key);
    barrier_.drop(key);
    traffic_.erase(key);
    comms_.erase(key);
  }
  void clear() {
    std::lock_guard lock(mu_);
    comms_.clear();
    meta_memory_ = {};
  }
  // The dispatch thread's own.
  struct MetaMemory {
    bool made = false;
    hal::EventRef written;  // what waits for it may use it; none: it is written
  };
  MetaMemory& meta_memory() { return meta_memory_; }

  // -- a device thread

  // The copy of a slot has completed, or was not executed.
  void meta_done(uint32_t slot) {
    std::lock_guard lock(mu_);
    std::optional<MetaSums> sums;
    const MetaSlots::Reading reading = slots_.give(slot, &sums);
    barrier_.result(reading.comm, reading.number, sums);
    if (!barrier_.asked()) return;  // nobody waits for it
    changes_++;
    changed_.notify_all();
  }

  // -- the server thread

  void hold() {
    change([](Agreement& a) { return a.hold(), true; });
  }
  // Of both ways.
  void lift() {
    change([this](Agreement& a) { return a.lift(), barrier_.lift(), true; });
  }
  // In band, over that communicator. Is this client a member, and has it acquired?
  struct Asked {
    bool member = false, acquired = false;
  };
  Asked ask(const CommKey& key, int32_t attempt) {
    std::lock_guard lock(mu_);
    barrier_.ask(key, attempt);
    return {barrier_.carries(key), barrier_.acquired()};
  }
  std::map<CommKey, CommTraffic> traffic() const {
    std::lock_guard lock(mu_);
    return traffic_;
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

  const bool metas_;
  mutable std::mutex mu_;
  std::condition_variable changed_;
  uint64_t changes_ = 0;
  uint64_t seen_ = 0;  // changes_ when take() said no
  Agreement agreement_;
  MetaBarrier barrier_;
  MetaSlots slots_;
  MetaMemory meta_memory_;
  std::map<CommKey, CommTraffic> traffic_;
  std::map<CommKey, hal::CommRef> comms_;
  Place place_;
};

}  // namespace devproxy::server
