// SPDX-License-Identifier: Apache-2.0
// Arrays, texture and surface objects, the server's half. An array's bytes come out of the ledger beside the client's
// credit. An object's number is the device's; a replay must make the same one again.
#include <cstring>
#include <utility>
#include <vector>

#include "devproxy/csrc/base/log.h"
#include "devproxy/csrc/wire/array.h"
#include "devproxy/interceptors/memory/server.h"

namespace devproxy::server::texture {

namespace {

// How many objects a replay makes to come by a number that the device gave long ago: those that lay before it are gone.
constexpr int kReplayTries = 4096;

bool side_of(Connection& c, const Message& m, const ArrayCopyArgs& args, const ArrayCopySide& from,
             hal::ArrayCopy::Side* to) {
  if (from.space == kArraySpace) {
    const ArrayObject* object = c.state().arrays().find(VHandle{from.place});
    if (!object || !array_holds(object->extent, from.x_bytes, from.y, from.z, args.width_bytes, args.rows, args.slices))
      return false;
    const uint32_t element = array_element_bytes(object->shape.format, object->shape.channels);
    if (from.x_bytes % element || args.width_bytes % element) return false;
    *to = {object->array, from.x_bytes, from.y, from.z, 0, 0, 0, true};
    return true;
  }
  uint64_t bytes, addr;
  if (from.pitch < args.width_bytes || from.slice_rows < args.rows ||
      __builtin_mul_overflow(args.slices - 1, from.slice_rows, &bytes) ||
      __builtin_add_overflow(bytes, args.rows - 1, &bytes) || __builtin_mul_overflow(bytes, from.pitch, &bytes) ||
      __builtin_add_overflow(bytes, args.width_bytes, &bytes) ||
      !memory::resolve(c, m, from.space, from.place, bytes, &addr))
    return false;
  *to = {nullptr, 0, 0, 0, addr, from.pitch, from.slice_rows, from.space == wire::kDevice};
  return true;
}

// The memory or the array that an object is to show; false where the client has no such thing.
bool shows(Connection& c, const Message& m, const TextureArgs& a, TextureObject* object) {
  switch (static_cast<TextureResource>(a.resource)) {
    case TextureResource::kArray: {
      ArrayObject* array = c.state().arrays().find(VHandle{a.array});
      if (!array) return false;
      object->array = VHandle{a.array};
      return true;
    }
    case TextureResource::kLinear:
      if (a.bytes == 0) return false;
      break;
    case TextureResource::kPitch2D: {
      uint64_t row, span;
      if (a.width == 0 || a.height == 0 ||
          __builtin_mul_overflow(a.width, array_element_bytes(a.format, a.channels), &row) || a.pitch < row ||
          __builtin_mul_overflow(a.height - 1, a.pitch, &span) || __builtin_add_overflow(span, row, &span) ||
          span != a.bytes)
        return false;
      break;
    }
    default: return false;
  }
  object->addr = a.address;
  object->bytes = a.bytes;
  return a.kind == static_cast<uint32_t>(TextureKind::kTexture) && array_element_bytes(a.format, a.channels) != 0 &&
         c.memory().in_device(a.address, a.bytes, m.end);
}

}  // namespace

bool array_create(Connection& c, const Message& m) {
  const auto& r = m.as<wire::ARRAY_CREATE_req>();
  if (r.array.kind() != HandleKind::kArray || c.state().arrays().find(r.array)) return c.fail(m, kInvalidHandle), false;
  const ArrayShape shape{r.width, r.height, r.depth, r.format, r.channels, r.flags, 0};
  ArrayExtent extent;
  if (!array_extent(shape, &extent)) return c.fail(m, kInvalidValue), false;
  const uint64_t bytes = extent.bytes();
  if (!c.memory().take_array(bytes)) return c.fail(m, kOutOfMemory), false;
  auto array = c.device().create_array(shape);
  if (!array.ok() || !c.state().arrays().insert(r.array, {*array, shape, extent})) {
    c.memory().give_array(bytes);
    array.ok() ? c.fail(m, kInvalidHandle) : c.fail(m, array.status());
    return false;
  }
  return true;
}

// The client has waited for what used it. An object that still shows it keeps the device's array alive.
bool array_destroy(Connection& c, const Message& m) {
  const auto& r = m.as<wire::ARRAY_DESTROY_req>();
  const ArrayObject* object = c.state().arrays().find(r.array);
  if (!object) return c.fail(m, kInvalidHandle), false;
  const uint64_t bytes = object->extent.bytes();
  c.state().textures().for_each([&](VHandle texture, const TextureObject& t) {
    if (t.array == r.array)
      c.state().obstacles().set(texture, "a texture or surface object shows an array that was destroyed");
  });
  if (!c.state().arrays().erase(r.array)) return c.fail(m, kInvalidHandle), false;
  c.memory().give_array(bytes);
  return true;
}

void array_copy(Connection& c, const Message& m) {
  const auto& r = m.as<wire::ARRAY_COPY_req>();
  if (r.chunk_release > kChunks) return c.poison("malformed message: no such chunk");
  hal::QueueRef* queue = c.device().queue_of(r.stream);
  if (!queue) return c.refuse(m, r.stream, kInvalidHandle, r.chunk_release);
  ArrayCopyArgs a;
  if (m.bulk_bytes != sizeof a) return c.refuse(m, r.stream, kInvalidValue, r.chunk_release);
  std::memcpy(&a, m.bulk, sizeof a);
  hal::ArrayCopy copy;
  copy.width_bytes = a.width_bytes, copy.rows = a.rows, copy.slices = a.slices;
  if (a.width_bytes == 0 || a.rows == 0 || a.slices == 0 ||
      (a.dst.space != kArraySpace && a.src.space != kArraySpace) || !side_of(c, m, a, a.dst, &copy.dst) ||
      !side_of(c, m, a, a.src, &copy.src))
    return c.refuse(m, r.stream, kInvalidValue, r.chunk_release);
  Counters& n = c.counting();
  Counters::add(copy.dst.device ? (copy.src.device ? n.d2d_bytes : n.h2d_bytes) : n.d2h_bytes,
                a.width_bytes * a.rows * a.slices);
  c.device().copy_array(*queue, {m.end, r.chunk_release, m.slot}, copy);
}

bool texture_create(Connection& c, const Message& m) {
  const auto& r = m.as<wire::TEXTURE_CREATE_req>();
  if (r.texture.kind() != HandleKind::kTexture || c.state().textures().find(r.texture))
    return c.fail(m, kInvalidHandle), false;
  TextureArgs a;
  if (m.bulk_bytes != sizeof a) return c.fail(m, kInvalidValue), false;
  std::memcpy(&a, m.bulk, sizeof a);
  TextureObject object;
  if (a.kind > static_cast<uint32_t>(TextureKind::kSurface) || !shows(c, m, a, &object))
    return c.fail(m, kInvalidValue), false;
  const hal::ArrayRef array = object.array.value ? c.state().arrays().find(object.array)->array : nullptr;
  // A replay wants a certain number. What the device gives in its place is held until that one comes, so that it is not
  // given twice.
  std::vector<hal::TextureRef> held;
  for (;;) {
    auto made = c.device().create_texture(a, array);
    if (!made.ok() && held.empty()) return c.fail(m, made.status()), false;
    if (!made.ok()) {  // there are no more of them, and the number was not among those that came
      object.texture = std::move(held.back());
      held.pop_back();
      break;
    }
    object.texture = *made;
    if (!c.state().replaying().value || object.texture->value == *c.state().replaying().value ||
        held.size() == kReplayTries)
      break;
    held.push_back(std::move(object.texture));
  }
  const wire::TEXTURE_CREATE_rep rep{object.texture->value};
  if (!c.state().textures().insert(r.texture, std::move(object))) return c.fail(m, kInvalidHandle), false;
  c.reply(m, kOk, &rep, sizeof rep);
  return true;
}

bool texture_destroy(Connection& c, const Message& m) {
  const auto& r = m.as<wire::TEXTURE_DESTROY_req>();
  c.state().obstacles().set(r.texture, {});
  if (!c.state().textures().erase(r.texture)) return c.fail(m, kInvalidHandle), false;
  return true;
}

}  // namespace devproxy::server::texture
