// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/replay_log.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace devproxy::server {

bool ReplayLog::create(VHandle handle, VHandle parent, uint16_t opcode, const void* request, size_t request_bytes,
                       std::vector<uint8_t> bulk) {
  std::shared_ptr<const void> keeps = std::exchange(kept_, nullptr);
  if (objects_.contains(handle)) return false;
  if (parent.value) {
    const auto it = objects_.find(parent);
    if (it == objects_.end()) return false;
    it->second.children.push_back(handle);
  }
  const auto* bytes = static_cast<const uint8_t*>(request);
  entries_.push_back({opcode, handle, 0, true, {bytes, bytes + request_bytes}, std::move(bulk), std::move(keeps)});
  objects_.emplace(handle, Object{parent, std::prev(entries_.end()), {}, {}});
  return true;
}

bool ReplayLog::set(VHandle handle, uint16_t opcode, uint64_t key, const void* request, size_t request_bytes) {
  const auto it = objects_.find(handle);
  if (it == objects_.end()) return false;
  const auto* bytes = static_cast<const uint8_t*>(request);
  for (Place place : it->second.sets) {
    if (place->opcode != opcode || place->key != key) continue;
    place->request.assign(bytes, bytes + request_bytes);
    entries_.splice(entries_.end(), entries_, place);  // it happened now, after what was made in between
    return true;
  }
  entries_.push_back({opcode, handle, key, false, {bytes, bytes + request_bytes}, {}, nullptr});
  it->second.sets.push_back(std::prev(entries_.end()));
  return true;
}

bool ReplayLog::destroy(VHandle handle) {
  const auto it = objects_.find(handle);
  if (it == objects_.end()) return false;
  if (const auto parent = objects_.find(it->second.parent); parent != objects_.end())
    std::erase(parent->second.children, handle);
  forget(handle);
  return true;
}

void ReplayLog::forget(VHandle handle) {
  const auto it = objects_.find(handle);
  if (it == objects_.end()) return;
  const Object object = std::move(it->second);
  objects_.erase(it);
  for (VHandle child : object.children) forget(child);
  for (Place place : object.sets) entries_.erase(place);
  if (object.created != entries_.end()) entries_.erase(object.created);
}

}  // namespace devproxy::server
