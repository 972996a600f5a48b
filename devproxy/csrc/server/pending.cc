// SPDX-License-Identifier: Apache-2.0
// By kind, in PendingRecord:
//   nop
//   copy           args: dst (space, place), src (space, place), dst_pitch, src_pitch, width_bytes, height
//   copy_array     handles: dst, src (0: memory). args: of dst and src space, place, x_bytes, y, z, pitch, slice_rows;
//                  then width_bytes, rows, slices
//   memset         args: dst, pitch, count, rows, value, width
//   launch         handles: function. args: grid, block, shared_bytes. params
//   record         handles: the events whose latest record it is
//   host_function  args: token
//   init_comm      handles: communicator
//   communicate    calls: communicator, kind, type, reduction, scalar_on_device, peer, send, recv, count, scalar; of a
//                  meta the communicator alone
// A space is wire::Space. A place in chunks counts from the first one; every other place is an address.
//
// Metas. What is pending of them said something to a barrier that is over. Its operation needs it all the same, since
// all members submit the same row: it says nothing now, and nobody reads its sums.
#include "devproxy/csrc/server/pending.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/csrc/server/connection.h"
#include "devproxy/csrc/server/state_record.h"

#include "wire.gen.h"

namespace devproxy::server {

namespace {

using Kind = hal::PendingCommand::Kind;
using enum wire::Space;

const std::pair<Kind, const char*> kNames[] = {
    {Kind::kNop, "nop"},
    {Kind::kCopy, "copy"},
    {Kind::kCopyArray, "copy_array"},
    {Kind::kMemset, "memset"},
    {Kind::kLaunch, "launch"},
    {Kind::kRecord, "record"},
    {Kind::kHostFunction, "host_function"},
    {Kind::kInitComm, "init_comm"},
    {Kind::kCommunicate, "communicate"},
};
constexpr uint64_t kChunksBytes = kChunkBytes * kChunks;

Status gone(const char* what) {
  return {kNotSupported, std::string("a pending command uses ") + what + " that the job has destroyed since"};
}
Status damaged(const std::string& kind) {
  return {kInvalidImage, "the state's pending command '" + kind + "' is damaged"};
}

// -- save -------------------------------------------------------------------------------------------------------------

class Save {
 public:
  explicit Save(Connection& c) : c_(c) {
    c.state().functions().for_each(
        [this](VHandle handle, const FunctionObject& f) { functions_[f.function.get()] = handle.value; });
    c.state().arrays().for_each(
        [this](VHandle handle, const ArrayObject& a) { arrays_[a.array.get()] = handle.value; });
    c.state().comms().for_each([this](VHandle handle, const CommObject& o) { comms_[o.comm.get()] = handle.value; });
    c.state().events().for_each([this](VHandle handle, const hal::EventRef& event) {
      if (const auto at = c_.device().pending_record(event))
        records_[{at->queue_index, at->position}].push_back(handle.value);
    });
  }

  Status command(const hal::PendingCommand& from, PendingRecord* to) {
    for (const auto& [kind, name] : kNames)
      if (kind == from.kind) to->kind = name;
    to->queue = from.queue_index;
    to->position = from.ticket.position;
    to->tag = from.ticket.tag;
    to->caller = from.ticket.caller;
    for (const hal::CommandPlace& need : from.needs) to->needs.emplace_back(need.queue_index, need.position);
    switch (from.kind) {
      case Kind::kNop: return {};
      case Kind::kCopy: return copy(from.copy, to);
      case Kind::kCopyArray: return copy_array(from.array_copy, to);
      case Kind::kMemset: {
        const hal::MemsetArgs& a = from.memset;
        to->args = {a.dst, a.pitch, a.count, a.rows, a.value, a.width};
        return {};
      }
      case Kind::kLaunch: {
        const hal::LaunchArgs& a = from.launch;
        const auto it = functions_.find(from.function.get());
        if (it == functions_.end()) return gone("a kernel");
        to->handles = {it->second};
        to->args = {a.grid[0], a.grid[1], a.grid[2], a.block[0], a.block[1], a.block[2], a.shared_bytes};
        to->params.bytes.assign(a.params, a.params + a.params_bytes);
        return {};
      }
      case Kind::kRecord: to->handles = records_[{from.queue_index, from.ticket.position}]; return {};
      case Kind::kHostFunction: to->args = {from.token}; return {};
      case Kind::kInitComm:
      case Kind::kCommunicate: return calls(from, to);
    }
    return {};
  }

 private:
  Status copy(const hal::CopyArgs& a, PendingRecord* to) {
    // The numbers of a meta, from or to this process.
    const MetaSlots& metas = c_.communicators().slots();
    if ((a.dst_device && metas.owns(a.dst)) || (a.src_device && metas.owns(a.src))) {
      to->kind = "nop";
      to->tag = 0;
      return {};
    }
    if (!add_place(a.dst_device, a.dst, to) || !add_place(a.src_device, a.src, to)) return gone("memory");
    to->args.insert(to->args.end(), {a.dst_pitch, a.src_pitch, a.width_bytes, a.height});
    return {};
  }

  Status copy_array(const hal::ArrayCopy& a, PendingRecord* to) {
    for (const hal::ArrayCopy::Side* side : {&a.dst, &a.src}) {
      const auto it = arrays_.find(side->array.get());
      if (side->array && it == arrays_.end()) return gone("an array");
      to->handles.push_back(side->array ? it->second : 0);
      if (side->array)
        to->args.insert(to->args.end(), {0, 0});
      else if (!add_place(side->device, side->addr, to))
        return gone("memory");
      to->args.insert(to->args.end(), {side->x_bytes, side->y, side->z, side->pitch, side->slice_rows});
    }
    to->args.insert(to->args.end(), {a.width_bytes, a.rows, a.slices});
    return {};
  }

  bool add_place(bool device, uint64_t addr, PendingRecord* to) {
    const auto chunks = reinterpret_cast<uint64_t>(c_.endpoint().view().chunk(0));
    const bool in_chunk = !device && addr >= chunks && addr - chunks < kChunksBytes;
    const uint64_t space = device ? kDevice : in_chunk ? kChunk : kPinned;
    to->args.insert(to->args.end(), {space, in_chunk ? addr - chunks : addr});
    return device || in_chunk || c_.windows().in_any(addr, 1);
  }

  Status calls(const hal::PendingCommand& from, PendingRecord* to) {
    for (const hal::CommCall& call : from.calls) {
      const auto it = comms_.find(call.comm.get());
      if (it == comms_.end()) return gone("a communicator");
      const CommOp& op = call.op;
      if (from.kind == Kind::kInitComm)
        to->handles.push_back(it->second);
      else if (c_.communicators().slots().owns(op.send))
        to->calls.push_back({it->second});
      else
        to->calls.push_back({it->second, op.kind, op.type, op.reduction, op.scalar_on_device,
                             static_cast<uint64_t>(op.peer), op.send, op.recv, op.count, op.scalar});
    }
    return {};
  }

  Connection& c_;
  std::map<const hal::Function*, uint64_t> functions_;
  std::map<const hal::Array*, uint64_t> arrays_;
  std::map<const hal::Comm*, uint64_t> comms_;
  std::map<std::pair<uint32_t, uint64_t>, std::vector<uint64_t>> records_;
};

// -- restore ----------------------------------------------------------------------------------------------------------

class Restore {
 public:
  explicit Restore(Connection& c) : c_(c) {}

  Status command(const PendingRecord& from, hal::PendingCommand* to) {
    const std::vector<uint64_t>& args = from.args;
    bool known = false;
    for (const auto& [kind, name] : kNames)
      if (from.kind == name) to->kind = kind, known = true;
    if (!known) return damaged(from.kind);
    to->queue_index = static_cast<uint32_t>(from.queue);
    to->ticket = {from.position, static_cast<uint32_t>(from.tag), static_cast<uint32_t>(from.caller)};
    for (const auto& [queue, position] : from.needs) to->needs.push_back({static_cast<uint32_t>(queue), position});
    switch (to->kind) {
      case Kind::kNop: return {};
      case Kind::kCopy: {
        if (args.size() != 8) return damaged(from.kind);
        hal::CopyArgs& a = to->copy;
        a.dst_pitch = args[4], a.src_pitch = args[5], a.width_bytes = args[6], a.height = args[7];
        return place(args[0], args[1], &a.dst, &a.dst_device) && place(args[2], args[3], &a.src, &a.src_device)
                   ? Status()
                   : damaged(from.kind);
      }
      case Kind::kCopyArray: return copy_array(from, &to->array_copy);
      case Kind::kMemset:
        if (args.size() != 6) return damaged(from.kind);
        to->memset = {
            args[0], args[1], args[2], args[3], static_cast<uint32_t>(args[4]), static_cast<uint32_t>(args[5])};
        return {};
      case Kind::kLaunch: {
        const FunctionObject* function =
            from.handles.size() == 1 ? c_.state().functions().find(VHandle{from.handles[0]}) : nullptr;
        if (!function || args.size() != 7) return damaged(from.kind);
        to->function = function->function;
        hal::LaunchArgs& a = to->launch;
        for (size_t i = 0; i < 3; i++) {
          a.grid[i] = static_cast<uint32_t>(args[i]);
          a.block[i] = static_cast<uint32_t>(args[3 + i]);
        }
        a.shared_bytes = static_cast<uint32_t>(args[6]);
        a.params = from.params.bytes.data();
        a.params_bytes = from.params.bytes.size();
        return {};
      }
      case Kind::kRecord:
        for (const uint64_t handle : from.handles) {
          const hal::EventRef* event = c_.state().events().find(VHandle{handle});
          if (!event) return damaged(from.kind);
          to->events.push_back(*event);
        }
        return {};
      case Kind::kHostFunction:
        if (args.size() != 1) return damaged(from.kind);
        to->token = args[0];
        return {};
      case Kind::kInitComm: {
        const CommObject* comm = from.handles.size() == 1 ? c_.state().comms().find(VHandle{from.handles[0]}) : nullptr;
        if (!comm) return damaged(from.kind);
        c_.communicators().restored_half_made(comm->key);
        to->calls.push_back({comm->comm, {}});
        return {};
      }
      case Kind::kCommunicate: return calls(from, &to->calls);
    }
    return {};
  }

 private:
  bool place(uint64_t space, uint64_t at, uint64_t* addr, bool* device) {
    *device = space == kDevice;
    *addr = at;
    if (space == kDevice) return true;
    if (space == kPinned) return c_.windows().in_any(at, 1);
    if (space != kChunk || at >= kChunksBytes) return false;
    *addr = reinterpret_cast<uint64_t>(c_.endpoint().view().chunk(0)) + at;
    return true;
  }

  Status copy_array(const PendingRecord& from, hal::ArrayCopy* to) {
    const std::vector<uint64_t>& args = from.args;
    if (args.size() != 17 || from.handles.size() != 2) return damaged(from.kind);
    for (size_t i = 0; i < 2; i++) {
      hal::ArrayCopy::Side& side = i == 0 ? to->dst : to->src;
      const uint64_t* at = args.data() + 7 * i;
      if (from.handles[i]) {
        const ArrayObject* array = c_.state().arrays().find(VHandle{from.handles[i]});
        if (!array) return damaged(from.kind);
        side.array = array->array;
      } else if (!place(at[0], at[1], &side.addr, &side.device)) {
        return damaged(from.kind);
      }
      side.x_bytes = at[2], side.y = at[3], side.z = at[4], side.pitch = at[5], side.slice_rows = at[6];
    }
    to->width_bytes = args[14], to->rows = args[15], to->slices = args[16];
    return {};
  }

  Status calls(const PendingRecord& from, std::vector<hal::CommCall>* to) {
    for (const std::vector<uint64_t>& call : from.calls) {
      const CommObject* comm = call.empty() ? nullptr : c_.state().comms().find(VHandle{call[0]});
      const MetaSlots& metas = c_.communicators().slots();
      if (!comm || (call.size() != 1 && call.size() != 10)) return damaged(from.kind);
      if (call.size() == 1) {
        to->push_back({comm->comm, MetaSlots::op(metas.word_at({0, 0}), metas.scratch_at())});
        continue;
      }
      CommOp op;
      op.comm = call[0];
      op.kind = static_cast<uint8_t>(call[1]);
      op.type = static_cast<uint8_t>(call[2]);
      op.reduction = static_cast<uint8_t>(call[3]);
      op.scalar_on_device = static_cast<uint8_t>(call[4]);
      op.peer = static_cast<int32_t>(call[5]);
      op.send = call[6], op.recv = call[7], op.count = call[8], op.scalar = call[9];
      if (op.kind >= kCommKinds || op.type >= kCommTypes || op.reduction >= kCommReductions || op.peer < 0 ||
          static_cast<uint32_t>(op.peer) >= comm->ranks)
        return damaged(from.kind);
      to->push_back({comm->comm, op});
    }
    return {};
  }

  Connection& c_;
};

}  // namespace

Status save_pending(Connection& connection, ClientRecord* client) {
  if (connection.device().idle()) return {};
  auto pending = connection.device().pending_commands();
  if (!pending.ok()) return std::move(pending).status();
  Save save(connection);
  for (const hal::PendingCommand& command : *pending)
    if (Status s = save.command(command, &client->pending.emplace_back()); !s.ok()) return s;
  return {};
}

Status restore_pending(Connection& connection, const ClientRecord& client) {
  // Asked here, since a device that wraps another one passes commands on.
  if (!connection.device().caps().takes_back)
    return {kNotSupported, "the image has collectives that had not begun, which this device cannot take over"};
  Restore restore(connection);
  for (const PendingRecord& record : client.pending) {
    hal::PendingCommand command;
    Status s = restore.command(record, &command);
    if (s.ok()) s = connection.device().submit_pending(command);
    if (!s.ok()) return s;
  }
  return {};
}

}  // namespace devproxy::server
