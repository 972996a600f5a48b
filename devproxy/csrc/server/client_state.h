// SPDX-License-Identifier: Apache-2.0
// What a client has made on this server: its objects by virtual handle, and the calls that make them again.
//
// Thread: the dispatch thread; the server thread while the client is parked. Obstacles excepted, which any thread
// reads.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "devproxy/csrc/args/array.h"
#include "devproxy/csrc/args/comm.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/device_door.h"
#include "devproxy/csrc/server/handle_table.h"
#include "devproxy/csrc/server/image_store.h"
#include "devproxy/csrc/server/replay_log.h"
#include "devproxy/csrc/server/stored_graph.h"
#include "devproxy/csrc/wire/handle.h"
#include "devproxy/hal/object.h"

namespace devproxy::server {

struct ClientRecord;

struct FunctionObject {
  hal::FunctionRef function;
  VHandle module;
  uint32_t max_threads = 0;
  uint32_t params_bytes = 0;  // least length of a parameter block
};
struct ArrayObject {
  hal::ArrayRef array;
  ArrayShape shape;
  ArrayExtent extent;
};
// What a texture or surface object shows: an array, or linear memory.
struct TextureObject {
  hal::TextureRef texture;
  VHandle array;
  uint64_t addr = 0, bytes = 0;
};

struct CommObject {
  hal::CommRef comm;
  CommKey key;
  uint32_t ranks = 1, rank = 0;
  bool aborted = false;
};

// Why a client cannot be dumped now, by the object that is in the way. Any thread. Locks: mu_ is a leaf.
class Obstacles {
 public:
  void set(VHandle object, std::string why);  // an empty text: it is in the way no more
  // One of them, and how many more there are; empty where there is none.
  std::string text() const;

 private:
  mutable std::mutex mu_;
  std::map<uint64_t, std::string> why_;
};

// What kernels printed and nobody has asked for yet.
struct Output {
  std::string text, errors;
  bool expected = false;  // some module's kernels print, or may
  void gather(DeviceDoor& device) { device.take_output(&text, &errors); }
  void save(ClientRecord* client) const;
  void restore(const ClientRecord& client);
};

// While a restore replays the log, handlers learn from it what the objects were, and it from them how they went.
struct Replaying {
  bool on = false;
  int32_t status = 0;             // of the reply that nobody waits for
  std::optional<uint64_t> value;  // the number of the next texture object
  std::vector<uint64_t> globals;  // where the next module's globals lie, in order
};

// Where an array lies in the file of device memory.
struct ArrayPiece {
  VHandle handle;
  uint64_t offset = 0;
};

class ClientState {
 public:
  auto& events() { return std::get<Events>(tables_); }
  auto& modules() { return std::get<Modules>(tables_); }
  auto& functions() { return std::get<Functions>(tables_); }
  auto& graphs() { return std::get<Graphs>(tables_); }
  auto& arrays() { return std::get<Arrays>(tables_); }
  auto& textures() { return std::get<Textures>(tables_); }
  auto& comms() { return std::get<Comms>(tables_); }
  ReplayLog& replay() { return replay_; }
  Replaying& replaying() { return replaying_; }
  Obstacles& obstacles() { return obstacles_; }
  const Obstacles& obstacles() const { return obstacles_; }
  Output& output() { return output_; }
  std::map<uint32_t, uint64_t>& limits() { return limits_; }  // those that the job set
  std::vector<uint8_t>& link_image() { return link_image_; }  // linked last, until it was fetched
  ImageUpload& upload() { return upload_; }                   // an image that arrives
  ImageStore::Ref& uploaded() { return uploaded_; }           // whole, and not loaded yet

  // Device memory goes: an object that shows some of it cannot be made again.
  void texture_memory_gone(uint64_t addr, uint64_t bytes);
  // Lets go of all of the device's objects; what was submitted keeps its own.
  void clear();

  // The client's arrays in the order in which they were made, behind `offset`.
  std::vector<ArrayPiece> array_pieces(uint64_t offset);
  // Into the record. arrays_offset: as in array_pieces().
  Status save(DeviceDoor& device, uint64_t arrays_offset, ClientRecord* client);
  // Back, around the replay: limits and output before it, the times of events after it.
  Status restore_settings(const ClientRecord& client, DeviceDoor& device);
  Status restore_events(const ClientRecord& client, DeviceDoor& device);

 private:
  using Events = HandleTable<hal::EventRef, HandleKind::kEvent>;
  using Modules = HandleTable<hal::ModuleRef, HandleKind::kModule>;
  using Functions = HandleTable<FunctionObject, HandleKind::kFunction>;
  using Arrays = HandleTable<ArrayObject, HandleKind::kArray>;
  using Textures = HandleTable<TextureObject, HandleKind::kTexture>;
  using Comms = HandleTable<CommObject, HandleKind::kComm>;
  using Graphs = HandleTable<StoredGraph, HandleKind::kGraph>;

  Status save_log(DeviceDoor& device, ClientRecord* client);

  // What is made from others stands behind them; clear() begins at the end.
  std::tuple<Events, Modules, Functions, Arrays, Textures, Comms, Graphs> tables_;
  ReplayLog replay_;
  Replaying replaying_;
  Obstacles obstacles_;
  Output output_;
  std::map<uint32_t, uint64_t> limits_;
  std::vector<uint8_t> link_image_;
  ImageUpload upload_;
  ImageStore::Ref uploaded_;
};

}  // namespace devproxy::server
