// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/client/variables.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include <iterator>
#include <map>
#include <mutex>

#include "devproxy/csrc/base/result.h"
#include "devproxy/csrc/client/device_state.h"
#include "devproxy/csrc/client/log.h"

namespace devproxy::client {

namespace detail {
std::atomic<uint32_t> g_variables{0};
}

namespace {

struct Table {
  std::mutex mu;
  std::map<uint64_t, Variable> variables;
  std::map<uint64_t, uint64_t> reserved;  // begin -> end, whole pages; never given back: the next module may lie there
};

Table& table() {
  static auto* t = new Table;  // never destroyed: threads outlive static destruction
  return *t;
}

constexpr uint64_t kPage = kPageBytes;

// The pages of [begin, end) that are not reserved yet. mu held.
bool reserve(Table& t, uint64_t begin, uint64_t end) {
  for (uint64_t at = begin; at < end;) {
    const auto next = t.reserved.upper_bound(at);
    if (next != t.reserved.begin() && std::prev(next)->second > at) {
      at = std::prev(next)->second;
      continue;
    }
    const uint64_t stop = next == t.reserved.end() ? end : next->first < end ? next->first : end;
    void* const want = reinterpret_cast<void*>(at);
    void* const got =
        mmap(want, stop - at, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != want) {
      if (got != MAP_FAILED) munmap(got, stop - at);  // a kernel before 4.17 takes the address for a wish
      return false;
    }
    t.reserved[at] = stop;
    at = stop;
  }
  return true;
}

}  // namespace

int32_t add_variable(int device, uint64_t module, uint64_t addr, uint64_t bytes, bool in_range) {
  if (bytes == 0) return kOk;
  Table& t = table();
  std::lock_guard lock(t.mu);
  if (!in_range && !reserve(t, addr & ~(kPage - 1), (addr + bytes + kPage - 1) & ~(kPage - 1))) {
    log(Level::kWarn,
        "a module's variable of %llu bytes is refused: the driver put it at 0x%llx, where this process has memory of "
        "its "
        "own, and a copy could not tell them apart; pass the data as a kernel's parameter",
        static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(addr));
    return kNotSupported;
  }
  Variable& v = t.variables[addr];
  if (v.addr != addr || v.module != module) v = {addr, bytes, device, module, next_buffer_id()};
  detail::g_variables.store(static_cast<uint32_t>(t.variables.size()), std::memory_order_release);
  return kOk;
}

void drop_variables(uint64_t module) {
  if (!any_variables()) return;
  Table& t = table();
  std::lock_guard lock(t.mu);
  std::erase_if(t.variables, [&](const auto& item) { return item.second.module == module; });
  detail::g_variables.store(static_cast<uint32_t>(t.variables.size()), std::memory_order_release);
}

bool find_variable(uint64_t addr, Variable* out) {
  if (!any_variables()) return false;
  Table& t = table();
  std::lock_guard lock(t.mu);
  auto it = t.variables.upper_bound(addr);
  if (it == t.variables.begin()) return false;
  --it;
  if (addr - it->first >= it->second.bytes) return false;
  *out = it->second;
  return true;
}

}  // namespace devproxy::client
