// SPDX-License-Identifier: Apache-2.0
// What one client's streams did and when, for two readers: `devproxy trace`, and a profile in the job itself (torch.profiler).
// Off until somebody asks, and off again soon after nobody asks any more: the asker may have been killed.
//
// A device says when a command is complete, not when it has begun. A stream runs its commands in order, so an event here
// begins when its command was submitted or its predecessor completed, whichever was later: a wait for an event of another
// stream, or for a turn on a shared GPU, is part of the command that waited.
//
// Threads: any. One lock, a leaf, taken only while tracing is on. Off, each command costs one relaxed load.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/csrc/wire/segment.h"

namespace devproxy::server {

class Trace {
 public:
  // In the answer as a number: only ever added to (devproxy/proxy/tracing.py).
  enum class Kind : uint8_t {
    kNop,
    kCopy,
    kMemset,
    kLaunch,
    kHostFunction,
    kRecord,
    kWait,
    kCommunicate,
    kCall,
    kCut,
    kStep,
    kRoom
  };  // NOLINT
  // As it is sent. ns of CLOCK_MONOTONIC. lane: the stream's index, of kCall and kRoom the caller's reply slot.
  struct Event {
    uint64_t submitted_ns, begin_ns, end_ns, bytes;
    uint32_t name;  // index into names; 0: none
    uint16_t lane;
    Kind kind;
    uint8_t reserved = 0;
  };
  static_assert(sizeof(Event) == 40);
  static constexpr size_t kMost = 1 << 16;  // events that nobody has fetched; 2.6 MB

  enum class Reader : uint8_t { kTool, kProfile };

  bool on() const { return on_.load(std::memory_order_relaxed); }

  // How often it was switched on: what a recorder remembers from before is of no use after.
  uint32_t times() const { return times_.load(std::memory_order_relaxed); }

  // Until then; 0: this reader has ended.
  void keep_on(Reader reader, uint64_t until_ns) {
    const std::lock_guard lock(mutex_);
    Kept& kept = kept_of(reader);
    kept.until_ns = until_ns;
    if (until_ns == 0) {
      kept = {};
      return void(expired(now_ns()));
    }
    if (!lanes_) {
      lanes_ = std::make_unique<Lane[]>(kStreams);
      times_.fetch_add(1, std::memory_order_relaxed);
    }
    kept.events.reserve(kMost);
    on_.store(true, std::memory_order_relaxed);
  }

  // -- what names are; rare, so also while it is off

  void know(const void* thing, const std::string& name) {
    const std::lock_guard lock(mutex_);
    intern(thing, name);
  }
  void know_stream(const void* queue, uint32_t index) {
    const std::lock_guard lock(mutex_);
    streams_[queue] = index;
  }
  void forget_stream(const void* queue) {
    const std::lock_guard lock(mutex_);
    streams_.erase(queue);
  }

  // -- commands. Precondition of begin(): on(). Before the device is given the command.

  void begin(const void* queue, uint64_t position, Kind kind, uint64_t bytes = 0, const void* named = nullptr) {
    const uint64_t now = now_ns();
    const std::lock_guard lock(mutex_);
    if (expired(now)) return;
    const auto stream = streams_.find(queue);
    if (stream == streams_.end()) return;
    Lane& lane = lanes_[stream->second];
    if (lane.open.size() >= kMost) {
      for (Kept& kept : kept_) kept.lost += kept.until_ns != 0;
      return;
    }
    uint32_t name = 0;
    if (named)
      if (const auto found = known_.find(named); found != known_.end()) name = found->second;
    lane.open.push_back({position, {now, now, 0, bytes, name, static_cast<uint16_t>(stream->second), kind}});
  }
  void complete(uint32_t index, uint64_t position) noexcept {
    if (!on()) return;
    const uint64_t now = now_ns();
    const std::lock_guard lock(mutex_);
    if (!lanes_ || index >= kStreams) return;
    Lane& lane = lanes_[index];
    while (!lane.open.empty() && lane.open.front().position < position) lane.open.pop_front();  // nobody said its end
    if (!lane.open.empty() && lane.open.front().position == position) {
      Event event = lane.open.front().event;
      lane.open.pop_front();
      if (lane.last_end_ns > event.begin_ns) event.begin_ns = lane.last_end_ns;
      event.end_ns = now;
      note(event);
    }
    lane.last_end_ns = now;
  }
  // Something that is over.
  void span(uint16_t lane, Kind kind, uint64_t begin_ns, uint64_t end_ns, const char* fixed_name = nullptr) {
    const std::lock_guard lock(mutex_);
    if (expired(end_ns)) return;
    note({begin_ns, begin_ns, end_ns, 0, fixed_name ? intern(fixed_name, fixed_name) : 0, lane, kind});
  }

  struct Taken {
    std::vector<Event> events;
    std::vector<std::string> names;
    uint64_t lost = 0;
  };
  // What has come for that reader since its last call.
  Taken take(Reader reader) {
    Taken taken;
    const std::lock_guard lock(mutex_);
    Kept& kept = kept_of(reader);
    if (kept.until_ns) taken.events.reserve(kMost);  // for the next time
    taken.events.swap(kept.events);
    taken.names = names_;
    std::swap(taken.lost, kept.lost);
    return taken;
  }

 private:
  struct Open {
    uint64_t position;
    Event event;
  };
  struct Lane {
    std::deque<Open> open;  // submitted, not complete
    uint64_t last_end_ns = 0;
  };

  struct Kept {
    uint64_t until_ns = 0;      // 0: nobody reads
    std::vector<Event> events;  // that it has not fetched
    uint64_t lost = 0;
  };
  Kept& kept_of(Reader reader) { return kept_[static_cast<size_t>(reader)]; }

  // Nobody reads any more. What a reader has not fetched by the end of its time is gone.
  bool expired(uint64_t now) {
    bool read = false;
    for (Kept& kept : kept_) {
      if (kept.until_ns != 0 && now >= kept.until_ns) kept = {};
      read |= kept.until_ns != 0;
    }
    if (!read && lanes_) {
      on_.store(false, std::memory_order_relaxed);
      lanes_.reset();
    }
    return !read;
  }
  void note(const Event& event) noexcept {
    for (Kept& kept : kept_) {
      if (kept.until_ns == 0) continue;
      if (kept.events.size() >= kMost || kept.events.size() == kept.events.capacity())
        kept.lost++;  // never allocates
      else
        kept.events.push_back(event);
    }
  }
  uint32_t intern(const void* thing, const std::string& name) {
    // An address may be another thing's by now.
    const auto known = known_.find(thing);
    if (known != known_.end() && names_[known->second] == name) return known->second;
    const auto [place, fresh] = numbers_.try_emplace(name, static_cast<uint32_t>(names_.size()));
    if (fresh) names_.push_back(name);
    return known_[thing] = place->second;
  }

  std::atomic<bool> on_{false};
  std::atomic<uint32_t> times_{0};
  std::mutex mutex_;
  std::unordered_map<const void*, uint32_t> streams_, known_;
  std::unordered_map<std::string, uint32_t> numbers_;
  std::vector<std::string> names_{""};
  std::unique_ptr<Lane[]> lanes_;
  std::array<Kept, 2> kept_;
};

}  // namespace devproxy::server
