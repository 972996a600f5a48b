// What stands in gpuK.state.json and gpuK.shared.json, field by field. Each struct has its reader and its writer in the
// line behind it: a field that is missing keeps its default, as images from before a field was kept have it; one of
// another kind is an exception that names it, which read_record() makes a Status of.
//
// Included by .cc files alone. Who fills a struct: the object that it is of, in its save(); its restore() reads it.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/csrc/base/json.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/slot_table.h"

namespace devproxy::server {

// 2: module images once per server, in a file of their own.
inline constexpr uint64_t kStateVersion = 2;

// Bytes, in base64.
struct Blob {
  std::vector<uint8_t> bytes;
};
inline void to_json(Json& json, const Blob& blob) { json = base64(blob.bytes.data(), blob.bytes.size()); }
inline void from_json(const Json& json, Blob& blob) {
  const auto& text = json.get_ref<const std::string&>();
  auto bytes = from_base64(text);
  if (!bytes) throw std::invalid_argument("the text '" + text.substr(0, 32) + "' is no base64");
  blob.bytes = std::move(*bytes);
}

// A live range, or a variable of `module` that the device placed; its contents at `offset` of the client's file.
struct RangeRecord {
  uint64_t addr = 0, bytes = 0, offset = 0;
  uint32_t flags = 0;
  uint64_t module = 0;
  std::string name;
  bool given = false;  // the job was told the address
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(RangeRecord, addr, bytes, offset, flags, module, name, given)

struct ArrayRecord {
  uint64_t handle = 0, offset = 0, bytes = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ArrayRecord, handle, offset, bytes)

struct WindowRecord {
  uint64_t number = 0;
  uint32_t gpu = 0, slot = SlotTable::kAny;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(WindowRecord, number, gpu, slot)

// An entry of the replay log.
struct LogRecord {
  uint16_t opcode = 0;
  uint64_t handle = 0, key = 0;
  Blob request, bulk;
  std::vector<uint64_t> globals;  // of a module: where they lie
  Blob state;                     // of a module: what its executor keeps
  uint64_t value = 0;             // of a texture object
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(LogRecord, opcode, handle, key, request, bulk, globals, state, value)

struct FaultRecord {
  int32_t code = 0;
  std::string text;
  bool ended = false, poisoned = false;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(FaultRecord, code, text, ended, poisoned)

// What the client was told about the device when it attached, asks nobody about again, and relies on. major -1: images
// from before this was kept say nothing.
struct ToldRecord {
  bool kernels_see_host_window = false, keeps_host_pages = false;
  int32_t major = -1, minor = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ToldRecord, kernels_see_host_window, keeps_host_pages, major, minor)

struct CounterRecord {
  uint64_t calls = 0, launches = 0, h2d_bytes = 0, d2h_bytes = 0, d2d_bytes = 0, memset_bytes = 0, allocs = 0,
           frees = 0, busy_us = 0, peak_bytes = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(CounterRecord, calls, launches, h2d_bytes, d2h_bytes, d2d_bytes,
                                                memset_bytes, allocs, frees, busy_us, peak_bytes)

using Pair = std::pair<uint64_t, uint64_t>;

struct ClientRecord {
  uint64_t number = 0;
  uint32_t pid = 0, slot = SlotTable::kAny;
  bool framework = false;
  ToldRecord told;
  uint64_t position = 0;
  uint64_t credit_bytes = 0, client_bytes = 0, globals_bytes = 0, arrays_bytes = 0;
  std::vector<RangeRecord> device;
  std::vector<ArrayRecord> arrays;
  std::vector<Pair> pinned;  // address, bytes
  std::vector<WindowRecord> windows;
  std::vector<Pair> events;  // handle, time
  uint64_t event_clock_ns = 0;
  std::vector<Pair> limits;  // number, value
  Blob output, errors;
  std::vector<LogRecord> log;
  std::vector<uint64_t> host_functions;
  FaultRecord fault;
  CounterRecord counters;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ClientRecord, number, pid, slot, framework, told, position,
                                                credit_bytes, client_bytes, globals_bytes, arrays_bytes, device, arrays,
                                                pinned, windows, events, event_clock_ns, limits, output, errors, log,
                                                host_functions, fault, counters)

// Of clients that have left.
struct GoneRecord {
  uint64_t calls = 0, launches = 0, h2d_bytes = 0, d2h_bytes = 0, d2d_bytes = 0, memset_bytes = 0, allocs = 0,
           frees = 0, wakes = 0, busy_us = 0, steps = 0, peak_bytes = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(GoneRecord, calls, launches, h2d_bytes, d2h_bytes, d2d_bytes,
                                                memset_bytes, allocs, frees, wakes, busy_us, steps, peak_bytes)

using ImageRecord = std::array<uint64_t, 3>;  // hash low, hash high, bytes

struct ServerRecord {
  uint64_t version = 0;
  std::string abi;
  uint32_t gpu = 0;
  std::string device;
  uint64_t memory_bytes = 0, next_number = 1, uptime_us = 0;
  std::string last_fault;
  GoneRecord gone;
  std::vector<ImageRecord> images;
  std::vector<ClientRecord> clients;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ServerRecord, version, abi, gpu, device, memory_bytes, next_number,
                                                uptime_us, last_fault, gone, images, clients)

// A file of the job's: what of it stands in the dump, back to back, and what else of it has pages.
struct ExtentsRecord {
  uint64_t bytes = 0;
  std::vector<Pair> extents, pages;  // offset, bytes
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ExtentsRecord, bytes, extents, pages)

struct SharedClientRecord {
  uint64_t number = 0;
  ExtentsRecord segment, pinned;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(SharedClientRecord, number, segment, pinned)

struct SharedRecord {
  uint64_t version = 0;
  std::vector<SharedClientRecord> clients;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(SharedRecord, version, clients)

// The record in the text; `what` it is for an error. The version is looked at first: what another one has may be
// anything.
template <class Record>
StatusOr<Record> read_record(const std::string& text, const std::string& what) {
  try {
    const Json json = Json::parse(text);
    const auto version = json.value("version", uint64_t{0});
    if (version != kStateVersion)
      return Status(kInvalidImage, what + " has format version " + std::to_string(version) + ", this server reads " +
                                       std::to_string(kStateVersion));
    return json.get<Record>();
  } catch (const std::exception& why) {
    return Status(kInvalidImage, what + " is damaged: " + why.what());
  }
}

}  // namespace devproxy::server
