// SPDX-License-Identifier: Apache-2.0
// What stands in gpuK.state.json and gpuK.shared.json, field by field. state_record.cc reads and writes it: a field
// that is missing keeps its default, as images from before a field was kept have it.
//
// Who fills a struct: the object that it is of, in its save(); its restore() reads it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/counters.h"
#include "devproxy/csrc/server/slot_table.h"

namespace devproxy::server {

// 2: module images once per server, in a file of their own.
// 3: commands that had not begun. Only a state that has some says 3, so that others are read by older servers too.
inline constexpr uint64_t kStateVersion = 2, kPendingVersion = 3;

// Bytes, in base64.
struct Blob {
  std::vector<uint8_t> bytes;
};

// A live range, or a variable of `module` that the device placed; its contents at `offset` of the client's file.
// freed_at: the range is freed, and pending commands before that position may use it. crossed_before: as in MemoryMirror.
struct RangeRecord {
  uint64_t addr = 0, bytes = 0, offset = 0;
  uint32_t flags = 0;
  uint64_t module = 0;
  std::string name;
  bool given = false;  // the job was told the address
  uint64_t freed_at = 0, crossed_before = 0;
  // Live, and other ranks that do the same have the like of it.
  bool is_stable() const { return flags & kStableFlag && !module && !freed_at; }
};

struct ArrayRecord {
  uint64_t handle = 0, offset = 0, bytes = 0;
};

struct WindowRecord {
  uint64_t number = 0;
  uint32_t gpu = 0, slot = SlotTable::kAny;
};

// An entry of the replay log.
struct LogRecord {
  uint16_t opcode = 0;
  uint64_t handle = 0, key = 0;
  Blob request, bulk;
  std::vector<uint64_t> globals;  // of a module: where they lie
  Blob state;                     // of a module: what its executor keeps
  uint64_t value = 0;             // of a texture object
};

// A command that had not begun (hal/pending.h). pending.cc says what a kind has in args and handles.
struct PendingRecord {
  std::string kind;
  uint64_t queue = 0, position = 0, tag = 0, caller = 0;
  std::vector<std::pair<uint64_t, uint64_t>> needs;  // queue, position
  std::vector<uint64_t> args, handles;
  Blob params;
  std::vector<std::vector<uint64_t>> calls;  // of communicators
};

struct FaultRecord {
  int32_t code = 0;
  std::string text;
  bool ended = false, poisoned = false;
};

// What the client was told about the device when it attached, asks nobody about again, and relies on. major -1: images
// from before this was kept say nothing.
struct ToldRecord {
  bool kernels_see_host_window = false, keeps_host_pages = false;
  int32_t major = -1, minor = 0;
};

struct CounterRecord : Counted {
  uint64_t peak_bytes = 0;
};

using Pair = std::pair<uint64_t, uint64_t>;
using CommCountRecord = std::array<uint64_t, 6>;  // CountKey: low, high, from + 1, to + 1, receives; and the count

struct ClientRecord {
  uint64_t number = 0;
  uint32_t pid = 0, slot = SlotTable::kAny;
  bool framework = false;
  ToldRecord told;
  uint64_t position = 0;
  uint64_t credit_bytes = 0, client_bytes = 0, globals_bytes = 0, arrays_bytes = 0;
  std::vector<RangeRecord> device;
  std::vector<ArrayRecord> arrays;
  std::vector<Pair> pinned;                           // address, bytes
  std::vector<std::array<uint64_t, 3>> pinned_freed;  // address, bytes, freed_at as in RangeRecord
  std::vector<PendingRecord> pending;                 // in an order in which they may be submitted
  std::vector<WindowRecord> windows;
  std::vector<Pair> events;  // handle, time
  uint64_t event_clock_ns = 0;
  std::vector<Pair> limits;  // number, value
  Blob output, errors;
  std::vector<LogRecord> log;
  std::vector<uint64_t> host_functions;
  std::vector<CommCountRecord> comm_counts;
  FaultRecord fault;
  CounterRecord counters;
};

// Of clients that have left. steps: optimizer steps of the job; its ranks make the same ones, so clients that were there
// together count once. steps_before: of those that had left before any of the present ones came.
struct GoneRecord : Counted {
  uint64_t wakes = 0, steps = 0, steps_before = 0, peak_bytes = 0;
};

using ImageRecord = std::array<uint64_t, 3>;  // hash low, hash high, bytes

// What the job recognises its GPU by. uuid: hex; empty in states from before it was kept.
struct IdentityRecord {
  std::string uuid;
  int32_t pci_domain = 0, pci_bus = 0, pci_device = 0;
};

struct ServerRecord {
  uint64_t version = 0;
  std::string abi;
  uint32_t gpu = 0;
  std::string device;
  IdentityRecord identity;
  uint64_t memory_bytes = 0, next_number = 1, uptime_us = 0;
  std::string last_fault;
  GoneRecord gone;
  std::vector<ImageRecord> images;
  std::vector<ClientRecord> clients;
};

// A file of the job's: what of it stands in the dump, back to back, and what else of it has pages.
struct ExtentsRecord {
  uint64_t bytes = 0;
  std::vector<Pair> extents, pages;  // offset, bytes
};

struct SharedClientRecord {
  uint64_t number = 0;
  ExtentsRecord segment, pinned;
};

struct SharedRecord {
  uint64_t version = 0;
  std::vector<SharedClientRecord> clients;
};

// Of a whole file. What is read is an image's: kInvalidImage where its version is another or a member is damaged.
StatusOr<ServerRecord> read_state(const std::string& text);
StatusOr<SharedRecord> read_shared(const std::string& text);
std::string json_of(const ServerRecord& state);
std::string json_of(const SharedRecord& shared);

}  // namespace devproxy::server
