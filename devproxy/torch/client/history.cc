// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/history.h"

#include <torch/csrc/profiler/combined_traceback.h>

#include <array>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>

namespace devproxy::aten {
namespace {

// The last entries of one device, as a ring.
struct Trace {
  std::vector<HistoryEntry> entries;
  size_t next = 0;  // the oldest, once the ring is full
};

struct History {
  std::mutex mu;
  HistorySettings settings;
  std::map<std::pair<DeviceIndex, uint64_t>, HistoryContext> live;
  std::array<Trace, kMaxDevices> traces;
  std::vector<OutOfMemoryObserver> observers;
  std::string metadata;  // of the entries to come
};

// Never destroyed: tensors may outlive static destructors.
History& history() {
  static auto* const one = new History;
  return *one;
}

HistoryContext gather(HistoryContexts least) {
  bool wanted, cpp;
  {
    std::lock_guard lock(history().mu);
    wanted = history().settings.contexts >= least;
    cpp = history().settings.cpp;
  }
  if (!wanted) return nullptr;
  return torch::CapturedTraceback::gather(true, true, cpp);
}

// Precondition: history().mu is held. Returns the context that falls out of the ring, to be dropped without the lock.
HistoryContext add(DeviceIndex device, HistoryEntry entry) {
  History& h = history();
  if (h.settings.max_entries == 0 || h.settings.skips[static_cast<size_t>(entry.action)]) return nullptr;
  Trace& trace = h.traces.at(static_cast<size_t>(device));
  entry.metadata = h.metadata;
  if (trace.entries.size() < h.settings.max_entries) {
    trace.entries.push_back(std::move(entry));
    return nullptr;
  }
  std::swap(trace.entries[trace.next], entry);
  trace.next = (trace.next + 1) % trace.entries.size();
  return std::move(entry.context);
}

int64_t now_us() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

void note(DeviceIndex device, HistoryAction action, uint64_t addr, size_t bytes, int64_t stream,
          HistoryContext context) {
  HistoryContext old;
  std::lock_guard lock(history().mu);
  old = add(device, {action, addr, bytes, stream, now_us(), std::move(context)});
}

}  // namespace

const char* action_name(HistoryAction action) {
  static constexpr const char* kNames[] = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
                                           "oom",   "snapshot"};
  return kNames[static_cast<size_t>(action)];
}

void set_history_metadata(std::string metadata) {
  std::lock_guard lock(history().mu);
  history().metadata = std::move(metadata);
}

std::string history_metadata() {
  std::lock_guard lock(history().mu);
  return history().metadata;
}

void start_history(const HistorySettings& settings, bool clear) {
  if (clear) stop_history(true);
  std::array<Trace, kMaxDevices> old;
  std::lock_guard lock(history().mu);
  // A ring of another size begins anew: its order would be lost.
  if (settings.max_entries != history().settings.max_entries) old.swap(history().traces);
  history().settings = settings;
  g_history_on = true;
}

void stop_history(bool clear) {
  std::array<Trace, kMaxDevices> traces;
  std::map<std::pair<DeviceIndex, uint64_t>, HistoryContext> live;
  std::lock_guard lock(history().mu);
  g_history_on = false;
  live.swap(history().live);  // whose frees would not be seen
  if (clear) traces.swap(history().traces);
}

void note_allocated(DeviceIndex device, uint64_t addr, size_t bytes, int64_t stream, size_t segment) {
  HistoryContext context = gather(HistoryContexts::kOfLive), old[3];
  std::lock_guard lock(history().mu);
  const HistoryContext told = history().settings.contexts >= HistoryContexts::kOfAllocs ? context : nullptr;
  const int64_t now = now_us();
  if (segment != 0) old[0] = add(device, {HistoryAction::kSegmentAlloc, addr, segment, stream, now, told});
  old[1] = add(device, {HistoryAction::kAlloc, addr, bytes, stream, now, told});
  if (context != nullptr) old[2] = std::exchange(history().live[{device, addr}], std::move(context));
}

void note_freed(DeviceIndex device, uint64_t addr, size_t bytes, int64_t stream, size_t segment) {
  const HistoryContext context = gather(HistoryContexts::kOfAll);
  HistoryContext old[4];
  std::lock_guard lock(history().mu);
  const int64_t now = now_us();
  old[0] = add(device, {HistoryAction::kFreeRequested, addr, bytes, stream, now, context});
  old[1] = add(device, {HistoryAction::kFreeCompleted, addr, bytes, stream, now, context});
  if (segment != 0) old[2] = add(device, {HistoryAction::kSegmentFree, addr, segment, stream, now, context});
  if (const auto at = history().live.find({device, addr}); at != history().live.end()) {
    old[3] = std::move(at->second);
    history().live.erase(at);
  }
}

void note_segment_freed(DeviceIndex device, uint64_t addr, size_t bytes, int64_t stream) {
  note(device, HistoryAction::kSegmentFree, addr, bytes, stream, gather(HistoryContexts::kOfAll));
}

void note_snapshot(DeviceIndex device) { note(device, HistoryAction::kSnapshot, 0, 0, 0, nullptr); }

HistoryContext context_of(DeviceIndex device, uint64_t addr) {
  std::lock_guard lock(history().mu);
  const auto at = history().live.find({device, addr});
  return at != history().live.end() ? at->second : nullptr;
}

std::vector<HistoryEntry> history_of(DeviceIndex device) {
  std::lock_guard lock(history().mu);
  const Trace& trace = history().traces.at(static_cast<size_t>(device));
  std::vector<HistoryEntry> found(trace.entries.begin() + static_cast<ptrdiff_t>(trace.next), trace.entries.end());
  found.insert(found.end(), trace.entries.begin(), trace.entries.begin() + static_cast<ptrdiff_t>(trace.next));
  return found;
}

void add_out_of_memory_observer(OutOfMemoryObserver observer) {
  std::lock_guard lock(history().mu);
  history().observers.push_back(std::move(observer));
}

void note_out_of_memory(DeviceIndex device, size_t bytes, size_t total, size_t free) {
  if (history_on()) note(device, HistoryAction::kOutOfMemory, free, bytes, 0, gather(HistoryContexts::kOfAllocs));
  std::vector<OutOfMemoryObserver> observers;
  {
    std::lock_guard lock(history().mu);
    observers = history().observers;
  }
  for (const auto& tell : observers)
    tell(device, static_cast<int64_t>(bytes), static_cast<int64_t>(total), static_cast<int64_t>(free));
}

}  // namespace devproxy::aten
