// SPDX-License-Identifier: Apache-2.0
// A client from a dump: its memory at its addresses, its handles with their numbers, its place in the ring. What the
// job could ask afterwards is answered as before; what it cannot see (queues, descriptors) is made anew.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>

#include "devproxy/csrc/base/fault.h"
#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/log.h"
#include "devproxy/csrc/server/connection.h"
#include "devproxy/csrc/server/handlers.h"
#include "devproxy/csrc/server/pending.h"
#include "devproxy/csrc/server/staged_dump.h"
#include "devproxy/csrc/server/state_files.h"
#include "devproxy/csrc/server/state_record.h"

namespace devproxy::server {

namespace {

constexpr uint64_t kUsedUpBytes = 2u << 20;
constexpr uint64_t kLargestPageBytes = 2u << 20;  // of a device that shares pages
static_assert(kUsedUpBytes % kLargestPageBytes == 0);

// The extents of one of the job's files, from the bytes in the dump; `pages` get pages, whatever they hold.
Status fill(const ExtentsRecord& about, const std::string& from_path, const std::string& to_path) {
  const File from(from_path, O_RDONLY), to(to_path, O_RDWR);
  if (from.fd < 0) return Status::from_errno(kFileNotFound, "opening " + from_path);
  if (to.fd < 0) return Status::from_errno(kFileNotFound, "opening " + to_path);
  std::vector<Piece> pieces;
  uint64_t offset = 0;
  auto pages = [&](const Pair& extent) -> Status {
    errno = posix_fallocate(to.fd, static_cast<off_t>(extent.first), static_cast<off_t>(extent.second));
    return errno ? Status::from_errno(kOutOfMemory, "making room in " + to_path + " (make /dev/shm larger)") : Status();
  };
  for (const Pair& extent : about.pages)
    if (Status s = pages(extent); !s.ok()) return s;
  for (const Pair& extent : about.extents) {
    if (Status s = pages(extent); !s.ok()) return s;
    pieces.push_back({extent.first, offset, extent.second});
    offset += extent.second;
  }
  return copy_pieces(pieces,
                     [&](const Piece& p) -> Status {
                       std::vector<uint8_t> bounce(p.bytes);
                       if (Status s = read_all(from.fd, bounce.data(), p.bytes, p.offset); !s.ok()) return s;
                       return write_all(to.fd, bounce.data(), p.bytes, p.addr);
                     })
      .with("filling " + to_path + " from " + from_path);
}

// The client goes on with what it was told, so this device must be such a one. Where it may be another kind or model
// (--other-gpu), whoever restores has looked at what the job's kernels need. What the driver remembers of the client's
// memory is a matter of its contents, and holds on every GPU.
Status check_told(const ServerParts& parts, const ToldRecord& told) {
  if (told.major < 0) return {};  // an image from before this was kept
  const hal::Caps caps = parts.device->caps();
  const hal::Properties& p = parts.device->properties();
  const std::string gpu = "GPU " + std::to_string(parts.physical_gpu) + " of this machine";
  if (!parts.other_gpu && (told.major != p.major || told.minor != p.minor))
    return {kNotSupported, "the job was told that its GPU has compute capability " + std::to_string(told.major) + '.' +
                               std::to_string(told.minor) + "; " + gpu + " has " + std::to_string(p.major) + '.' +
                               std::to_string(p.minor) + ": choose one of the same"};
  if (!parts.other_gpu && told.kernels_see_host_window && !caps.kernels_see_host_window)
    return {kNotSupported, "the job was told that kernels see its pinned memory, and " + gpu +
                               " does not register it: restore with DEVPROXY_CUDA_REGISTER_WINDOW=1"};
  // The driver remembers pages of the window, and this client gives back those that it frees.
  if (!told.keeps_host_pages && caps.keeps_host_pages)
    return {kNotSupported, "the job ran where its pinned memory was not registered, and " + gpu +
                               " registers it: restore without DEVPROXY_CUDA_REGISTER_WINDOW"};
  return {};
}

}  // namespace

StatusOr<std::unique_ptr<Connection>> Connection::restore(ServerParts& parts, const ClientRecord& client,
                                                          const SharedClientRecord* shared, const std::string& dir) {
  const Peer peer{client.number, client.pid, client.slot, client.framework};
  const std::string who = "client " + std::to_string(peer.number) + " (pid " + std::to_string(peer.pid) + ")";
  if (peer.number == 0 || peer.wanted_slot >= kMaxSlots) return Status(kInvalidImage, "the state names no such " + who);
  if (Status s = check_told(parts, client.told); !s.ok()) return std::move(s).with("restoring " + who);
  std::unique_ptr<Connection> c(new Connection(parts, peer, peer.wanted_slot));
  // In a handover the files are the predecessor's until this server is told to go on: own() in resume.
  if (!shared) c->endpoint_.keep_files();
  const std::string stem = dir + "/gpu" + std::to_string(parts.gpu) + "-" + std::to_string(peer.number);
  Status s;
  if (shared) {
    s = c->endpoint_.make_files();
    if (s.ok()) s = fill(shared->segment, stem + ".seg", c->endpoint_.segment_path());
    if (s.ok()) s = fill(shared->pinned, stem + ".pin", c->endpoint_.pinned_path());
  } else if (!c->endpoint_.has_files()) {
    return std::unique_ptr<Connection>();
  }
  if (s.ok()) s = c->endpoint_.open_files();
  // No writer is left: the client went, and poll() would never say so to a reader that came later.
  if (s.ok() && !shared && c->endpoint_.client_went()) return std::unique_ptr<Connection>();
  if (s.ok()) s = c->endpoint_.go_on(client.position);
  if (s.ok()) s = c->open_memory();
  if (s.ok()) s = c->restore_memory(client);
  if (s.ok()) s = c->restore_objects(client);
  if (s.ok()) s = DP_FAULT(server_restore_mid);
  if (s.ok()) s = c->restore_contents(client, dir, shared != nullptr);
  if (!s.ok()) return std::move(s).with("restoring " + who);
  parts.slots->adopt(c->slot_);  // not own(): until this server goes on, its crash is nobody's business
  c->request_cut(0);
  return c;
}

Status Connection::restore_memory(const ClientRecord& client) {
  if (Status s = memory_.restore(client, parts_.physical_gpu, parts_.shared); !s.ok()) return s;
  if (Status s = windows_.restore(client); !s.ok()) return s;
  Status s;
  device_.reserve(memory_.credit_bytes());
  const auto commit = [&](uint64_t addr, const MemoryMirror::Allocation& a) {
    if (s.ok()) s = device_.commit(addr, a.bytes, a.flags & kStableFlag);
  };
  memory_.device().for_each_live(commit);
  memory_.device().for_each_freed(commit);
  memory_.pinned().for_each_live([&](uint64_t addr, const MemoryMirror::Allocation& a) {
    const uint64_t bytes = a.bytes;
    if (!windows_.in_any(addr, bytes)) s = {kInvalidImage, "the state's pinned ranges overlap or lie outside"};
    if (!windows_.in_own(addr, bytes)) return;  // until it is open
    device_.host_allocated(addr, bytes);
    Counters::add(counters_.pinned_bytes, bytes);
  });
  return s;
}

Status Connection::restore_objects(const ClientRecord& client) {
  if (Status s = state_.restore_settings(client, device_); !s.ok()) return s;
  state_.replaying().on = true;
  for (const LogRecord& entry : client.log)
    if (Status s = replay_entry(entry); !s.ok()) return s;
  state_.replaying() = {};
  if (Status s = memory_.check_restored(client); !s.ok()) return s;
  if (Status s = state_.restore_events(client, device_); !s.ok()) return s;
  const FaultRecord& fault = client.fault;
  endpoint_.lifeline().restore(fault.code, fault.text.c_str(), fault.ended);
  poisoned_ = fault.poisoned;
  if (faulted()) device_.restore_fault(endpoint_.lifeline().fault_code());
  std::map<CountKey, uint64_t> counts;
  for (const CommCountRecord& c : client.comm_counts)
    counts[{{c[0], c[1]}, static_cast<int32_t>(c[2]) - 1, static_cast<int32_t>(c[3]) - 1, c[4] != 0}] = c[5];
  communicators_.restore_counts(std::move(counts));
  for (const uint64_t token : client.host_functions) host_functions_.add(token);
  if (!client.pending.empty()) {
    withhold();
    if (Status s = restore_pending(*this, client); !s.ok()) return std::move(s).with("submitting what had not begun");
  }
  counters_.restore(client.counters);
  counters_.peak_bytes = std::max(counters_.live_bytes.load(), client.counters.peak_bytes);
  return {};
}

Status Connection::replay_entry(const LogRecord& entry) {
  const std::vector<uint8_t>&request = entry.request.bytes, &bulk = entry.bulk.bytes;
  const uint16_t opcode = entry.opcode;
  Message message;
  message.info = wire::op_info(opcode);
  const std::string what =
      std::string(message.info ? message.info->name : "a message") + " v" + std::to_string(entry.handle);
  if (!message.info || request.size() != message.info->req_bytes)
    return {kInvalidImage, "the replay log's " + what + " is damaged"};
  message.end = endpoint_.position();
  std::memset(message.request, 0, sizeof message.request);
  std::memcpy(message.request, request.data(), request.size());
  message.bulk = bulk.data();
  message.bulk_bytes = bulk.size();
  if (message.info->log != wire::Log::kCreate && message.info->log != wire::Log::kSet)
    return {kInvalidImage, "the replay log has " + what + ", which no replay makes"};
  // A command was done, and its stream may be gone. An event's time comes from the state.
  if (message.info->stream_offset >= 0) {
    if (!log_message(*this, message)) return {kInvalidImage, "replaying " + what + ": its object is not in the log"};
    return {};
  }
  Replaying& replaying = state_.replaying();
  replaying = {true, kOk, std::nullopt, entry.globals};
  if (opcode == static_cast<uint16_t>(wire::Opcode::TEXTURE_CREATE)) replaying.value = entry.value;
  handler_of (*message.info)(*this, message);
  if (Status s = same_value(entry); !s.ok()) return s;
  if (opcode == static_cast<uint16_t>(wire::Opcode::MODULE_LOAD) && replaying.status == kOk &&
      !state_.modules().find(VHandle{entry.handle}))
    return {kInvalidImage, "replaying " + what + ": its image is not in the state"};
  if (const std::vector<uint8_t>& kept = entry.state.bytes; replaying.status == kOk && !kept.empty()) {
    const hal::ModuleRef* module = state_.modules().find(VHandle{entry.handle});
    if (!module) return {kInvalidImage, "the state of " + what + " is damaged"};
    if (Status s = device_.load_module_state(*module, kept.data(), kept.size()); !s.ok())
      return std::move(s).with("replaying " + what);
  }
  if (replaying.status == kOk && replaying.globals.empty()) return {};
  return {replaying.status ? replaying.status : static_cast<int32_t>(kInvalidImage),
          "replaying " + what + " failed with result " + std::to_string(replaying.status) +
              " (the reason is in the server's log)"};
}

// Is the object that was just made again the number that the job has in its parameters?
Status Connection::same_value(const LogRecord& entry) {
  std::optional<uint64_t>& value = state_.replaying().value;
  const TextureObject* object = value ? state_.textures().find(VHandle{entry.handle}) : nullptr;
  const uint64_t wanted = value.value_or(0);
  value.reset();
  if (!object || object->texture->value == wanted) return {};
  char text[64];
  std::snprintf(text, sizeof text, "0x%llx and is 0x%llx now", static_cast<unsigned long long>(wanted),
                static_cast<unsigned long long>(object->texture->value));
  return {kNotSupported, std::string("the job was told that its ") +
                             (object->bytes ? "texture" : "texture or surface") + " object is " + text +
                             ": the driver counts otherwise here, and the job cannot be told; nothing of it runs"};
}

Status Connection::restore_arrays(const ClientRecord& client, const StagedReader& file) {
  for (const ArrayRecord& saved : client.arrays) {
    const ArrayObject* array = state_.arrays().find(VHandle{saved.handle});
    if (!array || array->extent.bytes() != saved.bytes)
      return {kInvalidImage, "the state has the contents of an array that does not exist, or is of another size"};
    const uint64_t row = array->extent.width_bytes, all = array->extent.rows * array->extent.slices;
    const uint64_t at_once = std::max<uint64_t>(1, kUsedUpBytes / row);
    std::vector<uint8_t> bounce(std::min(at_once, all) * row);
    for (uint64_t done = 0; done < all; done += at_once) {
      const uint64_t rows = std::min(at_once, all - done);
      if (Status s = file.read(bounce.data(), rows * row, saved.offset + done * row); !s.ok()) return s;
      if (Status s = device_.write_array(array->array, done, rows, bounce.data()); !s.ok()) return s;
    }
  }
  return {};
}

// use_up: what has been read of a file in memory is freed at once, so that a restore never needs memory for two copies
// of the device's (and the kernel has the pages at hand for the next piece). Not in a handover: the file is what a
// second successor would start from.
Status Connection::restore_contents(const ClientRecord& client, const std::string& dir, bool use_up) {
  auto opened = StagedReader::open(dir, parts_.gpu, number(), use_up);
  if (!opened.ok()) return opened.status();
  const StagedReader& file = **opened;
  std::vector<Piece> pieces;
  std::map<uint64_t, uint64_t> stable;  // where other ranks may have the same: begin, end
  for (const RangeRecord& range : client.device) {
    Piece piece{range.addr, range.offset, range.bytes};
    if (range.module)
      if (Status s = memory_.place_variable(range, &piece.addr); !s.ok()) return s;
    if (!memory_.in_device(piece.addr, piece.bytes, range.freed_at ? range.freed_at - 1 : endpoint_.position()))
      return {kInvalidImage, "the state has device memory that no object owns"};
    if (parts_.shared && range.is_stable()) {
      stable[range.addr] = range.addr + range.bytes;
      // So that every other cut is between two pages of any device.
      const Piece head{piece.addr, piece.offset, std::min(piece.bytes, -piece.addr % kLargestPageBytes)};
      if (head.bytes) pieces.push_back(head);
      piece = {piece.addr + head.bytes, piece.offset + head.bytes, piece.bytes - head.bytes};
      if (piece.bytes == 0) continue;
    }
    pieces.push_back(piece);
  }
  auto read_piece = [&](const Piece& p) -> Status {
    if (void* view = device_.host_view(p.addr, p.bytes)) return file.read(view, p.bytes, p.offset);
    return device_.write_pieces(p.addr, p.bytes,
                                [&](void* to, size_t bytes, size_t at) { return file.read(to, bytes, p.offset + at); });
  };
  const uint64_t began = now_us();
  if (Status s = restore_arrays(client, file); !s.ok()) return std::move(s).with("filling arrays from " + file.path());
  Status s = copy_pieces(pieces, [&](const Piece& p) -> Status {
    Piece part = p;
    const auto behind = stable.upper_bound(p.addr);
    const bool may_share = behind != stable.begin() && p.addr < std::prev(behind)->second;
    for (uint64_t done = 0; done < p.bytes; done += part.bytes) {
      part = {p.addr + done, p.offset + done, std::min(kUsedUpBytes, p.bytes - done)};
      if (may_share)
        if (Status s = memory_.take_stable(part.bytes); !s.ok()) return s;
      if (Status s = read_piece(part); !s.ok()) return s;
      file.used(part.bytes, part.offset);
      if (may_share)
        if (Status s = device_.loaded(part.addr, part.bytes); !s.ok()) return s;
    }
    return {};
  });
  if (!s.ok()) return std::move(s).with("filling device memory from " + file.path());
  device_.all_loaded();
  uint64_t total = 0;
  for (const Piece& piece : pieces) total += piece.bytes;
  for (const ArrayRecord& saved : client.arrays) total += saved.bytes;
  // scripts/gpucheck/checkpoints.py reads this line and that of a dump: nobody outside can tell how fast a server
  // loads.
  DP_LOG(kInfo, kServer, number(), "loaded: bytes=%lu us=%lu", static_cast<unsigned long>(total),
         static_cast<unsigned long>(now_us() - began));
  return {};
}

}  // namespace devproxy::server
