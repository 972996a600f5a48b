// SPDX-License-Identifier: Apache-2.0
// JSON of the records: a line for each struct, which makes its reader and its writer. A member of another kind is an
// exception that names it. All that knows the library stands here, because it takes long to compile.
#include "devproxy/csrc/server/state_record.h"

#include <stdexcept>

#include "devproxy/csrc/base/json.h"

namespace devproxy::server {

void to_json(Json& json, const Blob& blob) { json = base64(blob.bytes.data(), blob.bytes.size()); }
void from_json(const Json& json, Blob& blob) {
  const auto& text = json.get_ref<const std::string&>();
  auto bytes = from_base64(text);
  if (!bytes) throw std::invalid_argument("the text '" + text.substr(0, 32) + "' is no base64");
  blob.bytes = std::move(*bytes);
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(RangeRecord, addr, bytes, offset, flags, module, name, given, freed_at,
                                                crossed_before)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ArrayRecord, handle, offset, bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(WindowRecord, number, gpu, slot)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(LogRecord, opcode, handle, key, request, bulk, globals, state, value)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(PendingRecord, kind, queue, position, tag, caller, needs, args, handles,
                                                params, calls)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(FaultRecord, code, text, ended, poisoned)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ToldRecord, kernels_see_host_window, keeps_host_pages, major, minor)
#define DP_NAME(name) name,
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(CounterRecord, DP_COUNTED(DP_NAME) peak_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ClientRecord, number, pid, slot, framework, told, position,
                                                credit_bytes, client_bytes, globals_bytes, arrays_bytes, device, arrays,
                                                pinned, pinned_freed, pending, windows, events, event_clock_ns, limits,
                                                output, errors, log, host_functions, comm_counts, fault, counters)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(GoneRecord, DP_COUNTED(DP_NAME) wakes, steps, steps_before, peak_bytes)
#undef DP_NAME
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(IdentityRecord, uuid, pci_domain, pci_bus, pci_device)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ServerRecord, version, abi, gpu, device, identity, memory_bytes,
                                                next_number, uptime_us, last_fault, gone, images, clients)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ExtentsRecord, bytes, extents, pages)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(SharedClientRecord, number, segment, pinned)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(SharedRecord, version, clients)

namespace {

// The record in the text; `what` it is for an error. The version is looked at first: what another one has may be
// anything.
template <class Record>
StatusOr<Record> read_record(const std::string& text, const std::string& what) {
  try {
    const Json json = Json::parse(text);
    const auto version = json.value("version", uint64_t{0});
    if (version != kStateVersion && version != kPendingVersion)
      return Status(kInvalidImage, what + " has format version " + std::to_string(version) + ", this server reads " +
                                       std::to_string(kStateVersion) + " and " + std::to_string(kPendingVersion));
    return json.get<Record>();
  } catch (const std::exception& why) {
    return Status(kInvalidImage, what + " is damaged: " + why.what());
  }
}

}  // namespace

StatusOr<ServerRecord> read_state(const std::string& text) { return read_record<ServerRecord>(text, "the state"); }

StatusOr<SharedRecord> read_shared(const std::string& text) {
  return read_record<SharedRecord>(text, "the table of shared memory");
}

std::string json_of(const ServerRecord& state) { return json_text(state); }

std::string json_of(const SharedRecord& shared) { return json_text(shared); }

}  // namespace devproxy::server
