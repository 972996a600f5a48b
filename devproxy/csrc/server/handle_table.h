// SPDX-License-Identifier: Apache-2.0
// Virtual handle -> what the server has for it. One table per kind of object and connection. Pure: no device, no clock.
#pragma once

#include <cstddef>
#include <unordered_map>
#include <utility>

#include "devproxy/csrc/wire/handle.h"

namespace devproxy::server {

template <class Object, HandleKind kKind>
class HandleTable {
 public:
  // False where the handle is of another kind or already there: the client chose badly. Serial numbers are never
  // reused, so a stale handle is never found.
  [[nodiscard]] bool insert(VHandle handle, Object object) {
    if (handle.kind() != kKind) return false;
    return objects_.try_emplace(handle, std::move(object)).second;
  }
  // nullptr where there is no such object. Stays good until that object is erased.
  Object* find(VHandle handle) {
    if (handle == last_handle_ && last_) return last_;  // a job launches the same few functions again and again
    const auto it = objects_.find(handle);
    if (it == objects_.end()) return nullptr;
    last_handle_ = handle;
    return last_ = &it->second;
  }
  [[nodiscard]] bool erase(VHandle handle) {
    if (handle == last_handle_) last_ = nullptr;
    return objects_.erase(handle) != 0;
  }
  template <class Test>
  void erase_if(Test test) {
    last_ = nullptr;
    std::erase_if(objects_, [&](const auto& item) { return test(item.first, item.second); });
  }
  template <class Visit>
  void for_each(Visit visit) const {
    for (const auto& [handle, object] : objects_) visit(handle, object);
  }
  size_t size() const { return objects_.size(); }
  void clear() { last_ = nullptr, objects_.clear(); }

 private:
  std::unordered_map<VHandle, Object> objects_;  // node-based: addresses of objects stay
  VHandle last_handle_;
  Object* last_ = nullptr;
};

}  // namespace devproxy::server
