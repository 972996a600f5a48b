// SPDX-License-Identifier: Apache-2.0
// The table behind cuGetProcAddress: which export a (name, driver version, thread form) means.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace devproxy::sa::entrypoint {

struct ResolveRow {
  const char* name;
  int32_t version;  // first driver version for which the name means this export
  bool per_thread;  // the export takes a null stream for the thread's own
  void* function;
};

// resolve.gen.cc; in order of (strcmp of the name, per_thread, version).
extern const ResolveRow kResolveRows[];
extern const size_t kResolveCount;

enum class Resolved { kFound, kUnknownName, kVersionTooLow };

struct Resolution {
  Resolved status;
  void* function;  // null unless kFound
};

// The newest export that is not newer than `version`. A name without a per-thread form has only the plain one.
inline Resolution resolve(const char* name, int version, bool per_thread) {
  const ResolveRow* end = kResolveRows + kResolveCount;
  const ResolveRow* row = std::lower_bound(
      kResolveRows, end, name, [](const ResolveRow& r, const char* wanted) { return std::strcmp(r.name, wanted) < 0; });
  if (row == end || std::strcmp(row->name, name) != 0) return {Resolved::kUnknownName, nullptr};
  void* plain = nullptr;
  void* own = nullptr;
  for (; row != end && std::strcmp(row->name, name) == 0; ++row) {
    if (row->version > version) continue;
    (row->per_thread ? own : plain) = row->function;  // rows rise, so the last one that fits stays
  }
  void* function = per_thread && own != nullptr ? own : plain;
  return {function != nullptr ? Resolved::kFound : Resolved::kVersionTooLow, function};
}

}  // namespace devproxy::sa::entrypoint
