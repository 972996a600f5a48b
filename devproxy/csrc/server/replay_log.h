// SPDX-License-Identifier: Apache-2.0
// The calls that made the objects which exist now, in order: what a restore replays. Pure.
//
// Compacted as it grows: a DESTROY takes its CREATE and SETs away, and what was made from it (the functions of a
// module); a SET replaces the earlier SET of the same message and key. So it is as long as the state, not as the
// history.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "devproxy/csrc/wire/handle.h"

namespace devproxy::server {

class ReplayLog {
 public:
  struct Entry {
    uint16_t opcode = 0;
    VHandle handle;
    uint64_t key = 0;  // tells SETs of one message apart (an attribute's number)
    bool creates = false;
    std::vector<uint8_t> request;  // the fixed part, as it travelled
    std::vector<uint8_t> bulk;
    std::shared_ptr<const void> keeps;  // what a replay of it will need, and its request names
  };

  // parent: the handle it is made from, VHandle{} for none. False where the handle already exists or the parent does
  // not.
  [[nodiscard]] bool create(VHandle handle, VHandle parent, uint16_t opcode, const void* request, size_t request_bytes,
                            std::vector<uint8_t> bulk = {});
  // What the next create() keeps with its entry.
  void keep(std::shared_ptr<const void> needed) { kept_ = std::move(needed); }
  // A handle that exists without having been created: nothing replays it, and it can be set.
  void root(VHandle handle) { objects_.emplace(handle, Object{{}, entries_.end(), {}, {}}); }
  // False where the handle does not exist.
  [[nodiscard]] bool set(VHandle handle, uint16_t opcode, uint64_t key, const void* request, size_t request_bytes);
  [[nodiscard]] bool destroy(VHandle handle);

  const std::list<Entry>& entries() const { return entries_; }

 private:
  using Place = std::list<Entry>::iterator;
  struct Object {
    VHandle parent;
    Place created;            // entries_.end(): of a root
    std::vector<Place> sets;  // few
    std::vector<VHandle> children;
  };
  void forget(VHandle handle);
  std::shared_ptr<const void> kept_;
  std::list<Entry> entries_;
  std::unordered_map<VHandle, Object> objects_;
};

}  // namespace devproxy::server
