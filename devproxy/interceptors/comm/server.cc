// SPDX-License-Identifier: Apache-2.0
// Communicators, the server's half. The client's half is libnccl.so.2 (interceptors/nccl).
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/csrc/server/handlers.h"

namespace devproxy::server::comm {

namespace {

constexpr size_t kMaxWhyBytes = 1024;

bool times(uint64_t a, uint64_t b, uint64_t* product) { return !__builtin_mul_overflow(a, b, product); }

// Are the buffers that this rank gives its own? An empty operation has none.
bool owns_buffers(Connection& c, const Message& m, const CommOp& op, const CommObject& object) {
  uint64_t part, all;
  if (!times(op.count, comm_type_bytes(op.type_of()), &part) || !times(part, object.ranks, &all)) return false;
  if (part == 0) return true;
  const auto [send, recv] = comm_bytes(op, object.ranks, object.rank);
  if (op.reduction_of() == CommReduction::kPreMulSum && op.scalar_on_device &&
      !c.memory().in_device(op.scalar, comm_type_bytes(op.type_of()), m.end))
    return false;
  return (send == 0 || c.memory().in_device(op.send, send, m.end)) &&
         (recv == 0 || c.memory().in_device(op.recv, recv, m.end));
}

// The memory of metas, with what they may say in it, before a communicator's first operation: its making waits behind
// that in its queue. queue: none in a restore, while nothing is pending.
Status prepare_metas(Connection& c, const Message& m, const hal::QueueRef* queue) {
  Communicators::MetaMemory& memory = c.communicators().meta_memory();
  DeviceDoor& device = c.device();
  if (memory.made) {
    if (queue && memory.written) device.wait(*queue, {m.end - 1, 0}, memory.written);
    return {};
  }
  const uint64_t at = c.communicators().slots().begin();
  if (Status s = device.commit(at, kMetaBytes, false); !s.ok()) return std::move(s).with("memory for metas");
  memory.made = true;
  const auto& words = MetaSlots::kWords;
  if (!queue) return device.write(at, words.data(), sizeof words);
  device.copy(*queue, {m.end - 1, 0},
              {at, reinterpret_cast<uint64_t>(words.data()), 0, 0, sizeof words, 1, true, false});
  memory.written = device.create_event(false);
  device.record(*queue, {m.end - 1, 0}, memory.written);
  return {};
}

// The group with a meta behind each operation of all members, as far as its communicator carries them; and which
// slots have sums to read behind it.
struct ReadMeta {
  uint32_t slot;
  bool acknowledges;
};
std::vector<ReadMeta> add_metas(Connection& c, const std::vector<const CommObject*>& objects,
                                std::vector<hal::CommCall>* group) {
  std::vector<hal::CommCall> with;
  std::vector<ReadMeta> slots;
  auto of_all = [&](size_t i) {
    const CommKind kind = (*group)[i].op.kind_of();
    return kind != CommKind::kSend && kind != CommKind::kRecv;
  };
  for (size_t i = 0; i < group->size(); i++) {
    bool last = true;
    for (size_t k = i + 1; last && k < group->size(); k++) last = objects[k] != objects[i] || !of_all(k);
    Communicators::MetaCall meta;
    if (of_all(i)) meta = c.communicators().meta(objects[i]->key, last);
    with.push_back((*group)[i]);
    if (meta.send) {
      with.push_back({(*group)[i].comm, MetaSlots::op(meta.send, meta.recv)});
      if (meta.slot != MetaSlots::kNone) slots.push_back({meta.slot, meta.acknowledges});
    }
  }
  *group = std::move(with);
  return slots;
}

}  // namespace

bool comm_init(Connection& c, const Message& m) {
  const auto& r = m.as<wire::COMM_INIT_req>();
  hal::QueueRef* queue = c.device().queue_of(r.stream);
  const bool replays = c.state().replaying().on;
  if (!queue && !replays) return c.refuse(m, r.stream, kInvalidHandle), false;
  if (r.ranks == 0 || r.ranks > kMaxCommRanks || r.rank >= r.ranks || c.state().comms().find(r.comm))
    return c.refuse(m, r.stream, kInvalidValue), false;
  const CommKey key{r.key_low, r.key_high};
  auto made = c.device().create_comm({key, r.ranks, r.rank});
  Status status = made.ok() ? Status() : made.status();
  if (status.ok() && c.communicators().metas() && r.ranks > 1) {
    status = prepare_metas(c, m, replays ? nullptr : queue);
    if (!status.ok()) c.device().destroy_comm(*made);
  }
  if (!status.ok()) {
    c.fail(m, status);
    if (queue) c.device().nop(*queue, {m.end, 0});
    return false;
  }
  if (!c.state().comms().insert(r.comm, {*made, key, r.ranks, r.rank}))
    return c.refuse(m, r.stream, kInvalidHandle), false;
  c.communicators().made(key, r.ranks, r.rank, *made);
  // One that a restore makes again has its members.
  if (replays) c.communicators().restored(key, r.ranks, r.rank);
  if (!replays) c.device().init_comm(*queue, {m.end, 0, m.slot}, *made);
  return true;
}

bool comm_destroy(Connection& c, const Message& m) {
  const auto& r = m.as<wire::COMM_DESTROY_req>();
  const CommObject* object = c.state().comms().find(r.comm);
  if (!object) return c.fail(m, kInvalidHandle), false;
  c.device().destroy_comm(object->comm);
  c.communicators().destroyed(object->key);
  return c.state().comms().erase(r.comm);
}

bool comm_abort(Connection& c, const Message& m) {
  CommObject* object = c.state().comms().find(m.as<wire::COMM_ABORT_req>().comm);
  if (!object) return c.fail(m, kInvalidHandle), false;
  object->aborted = true;
  c.communicators().aborted(object->key);
  c.device().abort_comm(object->comm);
  return true;
}

void comm_group(Connection& c, const Message& m) {
  const auto& r = m.as<wire::COMM_GROUP_req>();
  hal::QueueRef* queue = c.device().queue_of(r.stream);
  if (!queue) return c.refuse(m, r.stream, kInvalidHandle);
  // Bulk data in chunks is gone when it was read once, and a held message is read again.
  if (r.bulk_chunks != 0 || m.bulk_bytes == 0 || m.bulk_bytes % sizeof(CommOp) != 0)
    return c.refuse(m, r.stream, kInvalidValue);
  std::vector<hal::CommCall> group(m.bulk_bytes / sizeof(CommOp));
  std::vector<const CommObject*> objects(group.size());
  for (size_t i = 0; i < group.size(); i++) {
    CommOp& op = group[i].op;
    std::memcpy(&op, m.bulk + i * sizeof op, sizeof op);
    const CommObject* object = c.state().comms().find(VHandle{op.comm});
    if (!object) return c.refuse(m, r.stream, kInvalidHandle);
    if (op.kind >= kCommKinds || op.type >= kCommTypes || op.reduction >= kCommReductions || op.peer < 0 ||
        static_cast<uint32_t>(op.peer) >= object->ranks || !owns_buffers(c, m, op, *object))
      return c.refuse(m, r.stream, kInvalidValue);
    group[i].comm = object->comm;
    objects[i] = object;
  }
  if (!c.communicators().metas() || m.in_graph)
    return c.device().communicate(*queue, {m.end, 0, m.slot}, std::move(group));
  const std::vector<ReadMeta> slots = add_metas(c, objects, &group);
  MetaSlots& memory = c.communicators().slots();
  for (const auto& [slot, acknowledges] : slots)
    if (acknowledges)
      c.device().copy(*queue, {m.end - 1, 0},
                      {memory.said_at(slot), reinterpret_cast<uint64_t>(&memory.says(slot)), 0, 0, sizeof(MetaSums), 1,
                       true, false});
  c.device().communicate(*queue, {slots.empty() ? m.end : m.end - 1, 0, m.slot}, std::move(group));
  for (const auto& [slot, acknowledges] : slots)
    c.device().copy(
        *queue, {m.end, kMetaTag | slot},
        {reinterpret_cast<uint64_t>(&memory.sums(slot)), memory.slot_at(slot), 0, 0, sizeof(MetaSums), 1, false, true});
}

void comm_state(Connection& c, const Message& m) {
  const CommObject* object = c.state().comms().find(m.as<wire::COMM_STATE_req>().comm);
  if (!object) return c.reply(m, kInvalidHandle);
  std::string why;
  const CommState state = c.device().comm_state(object->comm, &why);
  std::vector<uint8_t> answer(sizeof(wire::COMM_STATE_rep) + std::min(why.size(), kMaxWhyBytes));
  const wire::COMM_STATE_rep rep{static_cast<uint32_t>(state), 0};
  std::memcpy(answer.data(), &rep, sizeof rep);
  std::memcpy(answer.data() + sizeof rep, why.data(), answer.size() - sizeof rep);
  c.reply(m, kOk, answer.data(), answer.size());
}

}  // namespace devproxy::server::comm
