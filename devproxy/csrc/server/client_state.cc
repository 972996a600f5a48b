// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/client_state.h"

#include "devproxy/csrc/server/state_record.h"

namespace devproxy::server {

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

void Output::save(ClientRecord* client) const {
  client->output.bytes.assign(text.begin(), text.end());
  client->errors.bytes.assign(errors.begin(), errors.end());
}

void Output::restore(const ClientRecord& client) {
  text.assign(client.output.bytes.begin(), client.output.bytes.end());
  errors.assign(client.errors.bytes.begin(), client.errors.bytes.end());
}

void ClientState::texture_memory_gone(uint64_t addr, uint64_t bytes) {
  if (textures().size() == 0) return;
  textures().for_each([&](VHandle handle, const TextureObject& t) {
    if (t.bytes && t.addr < addr + bytes && addr < t.addr + t.bytes)
      obstacles_.set(handle, "a texture object shows device memory that was freed");
  });
}

namespace {
template <class Tables, size_t... kPlace>
void clear_backwards(Tables& tables, std::index_sequence<kPlace...>) {
  (std::get<sizeof...(kPlace) - 1 - kPlace>(tables).clear(), ...);
}
}  // namespace

void ClientState::clear() {
  clear_backwards(tables_, std::make_index_sequence<std::tuple_size_v<decltype(tables_)>>());
}

std::vector<ArrayPiece> ClientState::array_pieces(uint64_t offset) {
  std::vector<ArrayPiece> pieces;
  for (const ReplayLog::Entry& entry : replay_.entries()) {
    const ArrayObject* array = entry.creates ? arrays().find(entry.handle) : nullptr;
    if (!array) continue;
    pieces.push_back({entry.handle, offset});
    offset += array->extent.bytes();
  }
  return pieces;
}

Status ClientState::save_log(DeviceDoor& device, ClientRecord* client) {
  for (const ReplayLog::Entry& e : replay_.entries()) {
    LogRecord entry{e.opcode, e.handle.value, e.key, {e.request}, {e.bulk}, {}, {}, 0};
    // A graph's steps change in place, so they are asked of the graph.
    if (const StoredGraph* graph = e.creates ? graphs().find(e.handle) : nullptr)
      if (auto now = graph->encoded(); !now.empty()) entry.bulk.bytes = std::move(now);
    if (const hal::ModuleRef* module = e.creates ? modules().find(e.handle) : nullptr) {
      for (const auto& global : device.globals(*module)) entry.globals.push_back(global.addr);
      auto state = device.save_module(*module);
      if (!state.ok()) return std::move(state).status().with("saving a module");
      entry.state.bytes = std::move(*state);
    }
    if (const TextureObject* texture = e.creates ? textures().find(e.handle) : nullptr)
      entry.value = texture->texture->value;
    client->log.push_back(std::move(entry));
  }
  return {};
}

Status ClientState::save(DeviceDoor& device, uint64_t arrays_offset, ClientRecord* client) {
  // The driver's own buffer dies with its context; the text goes on.
  if (output_.expected) output_.gather(device);
  output_.save(client);
  client->limits.assign(limits_.begin(), limits_.end());
  for (const ArrayPiece& piece : array_pieces(arrays_offset))
    client->arrays.push_back({piece.handle.value, piece.offset, arrays().find(piece.handle)->extent.bytes()});
  Status failed;
  events().for_each([&](VHandle handle, const hal::EventRef& event) {
    auto time = device.event_time_ns(event);
    if (!time.ok()) failed = time.status();
    if (time.ok() && *time) client->events.emplace_back(handle.value, *time);
  });
  if (!failed.ok()) return std::move(failed).with("reading the events");
  client->event_clock_ns = device.event_clock_ns();
  return save_log(device, client);
}

Status ClientState::restore_settings(const ClientRecord& client, DeviceDoor& device) {
  // First: the heap of kernels cannot grow once one has used it (cuda.h, cuCtxSetLimit).
  for (const auto& [limit, value] : client.limits) {
    const auto number = static_cast<uint32_t>(limit);
    if (Status s = device.set_limit(number, value); !s.ok())
      return std::move(s).with("setting limit " + std::to_string(number) + " again");
    limits_[number] = value;
  }
  output_.restore(client);
  return {};
}

// Times move with the clock, so that one event before the dump and one after the restore are as far apart as the job
// ran in between.
Status ClientState::restore_events(const ClientRecord& client, DeviceDoor& device) {
  const uint64_t shift = device.event_clock_ns() - client.event_clock_ns;
  for (const auto& [handle, recorded] : client.events) {
    const hal::EventRef* event = events().find(VHandle{handle});
    if (!event) return {kInvalidImage, "the state has a time for an event that does not exist"};
    const uint64_t time = recorded + shift;
    if (Status s = device.restore_event(*event, time ? time : 1); !s.ok()) return s;
  }
  return {};
}

}  // namespace devproxy::server
