#include "devproxy/csrc/server/client_state.h"

namespace devproxy::server {

namespace {

std::string json_bytes(const std::string& text) {
  return '"' + base64(reinterpret_cast<const uint8_t*>(text.data()), text.size()) + '"';
}

std::string json_pair(uint64_t a, uint64_t b) { return '[' + std::to_string(a) + ',' + std::to_string(b) + ']'; }

}  // namespace

void Obstacles::set(VHandle object, std::string why) {
  std::lock_guard lock(mu_);
  if (why.empty())
    why_.erase(object.value);
  else
    why_[object.value] = std::move(why);
}

std::string Obstacles::text() const {
  std::lock_guard lock(mu_);
  if (why_.empty()) return {};
  return why_.begin()->second + (why_.size() > 1 ? " (and " + std::to_string(why_.size() - 1) + " more)" : "");
}

std::string Output::save() const { return "\"output\":" + json_bytes(text) + ",\"errors\":" + json_bytes(errors); }

void Output::restore(const Json& client) {
  for (const auto& [name, to] : {std::pair{"output", &text}, std::pair{"errors", &errors}})
    if (const auto bytes = from_base64(client[name].text)) to->assign(bytes->begin(), bytes->end());
}

void ClientState::texture_memory_gone(uint64_t addr, uint64_t bytes) {
  if (textures_.size() == 0) return;
  textures_.for_each([&](VHandle handle, const TextureObject& t) {
    if (t.bytes && t.addr < addr + bytes && addr < t.addr + t.bytes)
      obstacles_.set(handle, "a texture object shows device memory that was freed");
  });
}

void ClientState::clear() {
  graphs_.clear();
  textures_.clear();
  arrays_.clear();
  functions_.clear();
  modules_.clear();
  events_.clear();
}

std::vector<ArrayPiece> ClientState::array_pieces(uint64_t offset) {
  std::vector<ArrayPiece> pieces;
  for (const ReplayLog::Entry& entry : replay_.entries()) {
    const ArrayObject* array = entry.creates ? arrays_.find(entry.handle) : nullptr;
    if (!array) continue;
    pieces.push_back({entry.handle, offset});
    offset += array->extent.bytes();
  }
  return pieces;
}

StatusOr<std::string> ClientState::save_log(DeviceDoor& device) {
  std::string log;
  for (const ReplayLog::Entry& e : replay_.entries()) {
    log += (log.empty() ? "{" : ",{") + json_number("opcode", e.opcode) + ',' + json_number("handle", e.handle.value) +
           ',' + json_number("key", e.key) + ",\"request\":\"" + base64(e.request.data(), e.request.size()) + '"';
    std::vector<uint8_t> now;  // a graph's steps change in place, so they are asked of the graph
    if (const StoredGraph* graph = e.creates ? graphs_.find(e.handle) : nullptr) now = graph->encoded();
    const std::vector<uint8_t>& bulk = now.empty() ? e.bulk : now;
    if (!bulk.empty()) log += ",\"bulk\":\"" + base64(bulk.data(), bulk.size()) + '"';
    if (const hal::ModuleRef* module = e.creates ? modules_.find(e.handle) : nullptr) {
      std::string globals;
      for (const auto& global : device.globals(*module))
        globals += (globals.empty() ? "" : ",") + std::to_string(global.addr);
      log += ",\"globals\":[" + globals + "]";
      auto state = device.save_module(*module);
      if (!state.ok()) return std::move(state).status().with("saving a module");
      if (!state->empty()) log += ",\"state\":\"" + base64(state->data(), state->size()) + '"';
    }
    if (const TextureObject* texture = e.creates ? textures_.find(e.handle) : nullptr)
      log += ',' + json_number("value", texture->texture->value);
    log += '}';
  }
  return log;
}

StatusOr<std::string> ClientState::save(DeviceDoor& device, uint64_t arrays_offset) {
  // The driver's own buffer dies with its context; the text goes on.
  if (output_.expected) output_.gather(device);
  std::string arrays, events, limits;
  for (const auto& [limit, value] : limits_) limits += (limits.empty() ? "" : ",") + json_pair(limit, value);
  for (const ArrayPiece& piece : array_pieces(arrays_offset))
    arrays += (arrays.empty() ? "{" : ",{") + json_number("handle", piece.handle.value) + ',' +
              json_number("offset", piece.offset) + ',' +
              json_number("bytes", arrays_.find(piece.handle)->extent.bytes()) + '}';
  Status failed;
  events_.for_each([&](VHandle handle, const hal::EventRef& event) {
    auto time = device.event_time_ns(event);
    if (!time.ok()) failed = time.status();
    if (time.ok() && *time) events += (events.empty() ? "" : ",") + json_pair(handle.value, *time);
  });
  if (!failed.ok()) return std::move(failed).with("reading the events");
  auto log = save_log(device);
  if (!log.ok()) return std::move(log).status();
  return "\"arrays\":[" + arrays + "],\"events\":[" + events + "]," +
         json_number("event_clock_ns", device.event_clock_ns()) + ",\"limits\":[" + limits + "]," + output_.save() +
         ",\"log\":[" + *log + ']';
}

Status ClientState::restore_settings(const Json& client, DeviceDoor& device) {
  // First: the heap of kernels cannot grow once one has used it (cuda.h, cuCtxSetLimit).
  for (const Json& limit : client["limits"].items) {
    const auto number = static_cast<uint32_t>(limit[0].u64());
    if (Status s = device.set_limit(number, limit[1].u64()); !s.ok())
      return std::move(s).with("setting limit " + std::to_string(number) + " again");
    limits_[number] = limit[1].u64();
  }
  output_.restore(client);
  return {};
}

// Times move with the clock, so that one event before the dump and one after the restore are as far apart as the job
// ran in between.
Status ClientState::restore_events(const Json& client, DeviceDoor& device) {
  const uint64_t shift = device.event_clock_ns() - client["event_clock_ns"].u64();
  for (const Json& recorded : client["events"].items) {
    const hal::EventRef* event = events_.find(VHandle{recorded[0].u64()});
    if (!event) return {kInvalidImage, "the state has a time for an event that does not exist"};
    const uint64_t time = recorded[1].u64() + shift;
    if (Status s = device.restore_event(*event, time ? time : 1); !s.ok()) return s;
  }
  return {};
}

}  // namespace devproxy::server
