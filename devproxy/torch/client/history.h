// SPDX-License-Identifier: Apache-2.0
// What torch.cuda.memory._record_memory_history asks for: who allocated what is live, and a trace of what was allocated
// and freed; and the observers of running out of memory.
// Locks: one of the history's own, a leaf. Gathering a context takes the GIL, so a caller holds no lock of the allocator.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "devproxy/torch/client/device.h"

namespace devproxy::aten {

// As torch names them in a trace (c10/core/CachingDeviceAllocator.h, TraceEntry).
enum class HistoryAction : uint8_t {
  kAlloc,
  kFreeRequested,
  kFreeCompleted,
  kSegmentAlloc,
  kSegmentFree,
  kOutOfMemory,
  kSnapshot,
  kCount,
};
const char* action_name(HistoryAction action);

using HistoryContext = std::shared_ptr<c10::GatheredContext>;

struct HistoryEntry {
  HistoryAction action;
  uint64_t addr;  // of kOutOfMemory: the bytes that were free
  size_t bytes;
  int64_t stream;   // torch's id
  int64_t time_us;  // since 1970
  HistoryContext context;
  std::string metadata{};
};

// When a traceback is taken.
enum class HistoryContexts : uint8_t { kNever, kOfLive, kOfAllocs, kOfAll };

struct HistorySettings {
  HistoryContexts contexts = HistoryContexts::kOfAll;
  bool cpp = false;        // C++ frames too
  size_t max_entries = 0;  // of a device's trace: the last so many
  bool skips[static_cast<size_t>(HistoryAction::kCount)] = {};
};

inline std::atomic<bool> g_history_on{false};
// The question of each allocation: one load.
inline bool history_on() { return g_history_on.load(std::memory_order_relaxed); }

// torch.cuda.memory._set_memory_metadata: a word of the program's own, which each entry of the trace gets from then on.
void set_history_metadata(std::string metadata);
std::string history_metadata();

void start_history(const HistorySettings& settings, bool clear);
void stop_history(bool clear);

// Of one allocation. segment: 0, or the bytes of the driver's allocation that was made for it.
void note_allocated(DeviceIndex device, uint64_t addr, size_t bytes, int64_t stream, size_t segment);
// Before the memory can be anybody else's. segment: 0, or the bytes of the driver's allocation that goes with it.
void note_freed(DeviceIndex device, uint64_t addr, size_t bytes, int64_t stream, size_t segment);
void note_segment_freed(DeviceIndex device, uint64_t addr, size_t bytes, int64_t stream);
void note_snapshot(DeviceIndex device);

// The context of what is live at the address; may be null.
HistoryContext context_of(DeviceIndex device, uint64_t addr);
// In the order of time.
std::vector<HistoryEntry> history_of(DeviceIndex device);

// Called with the device, the bytes asked for, and the device's bytes in all and free.
using OutOfMemoryObserver = std::function<void(int64_t, int64_t, int64_t, int64_t)>;
void add_out_of_memory_observer(OutOfMemoryObserver observer);
// An entry of the trace, and the observers.
void note_out_of_memory(DeviceIndex device, size_t bytes, size_t total, size_t free);

}  // namespace devproxy::aten
