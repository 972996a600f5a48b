// SPDX-License-Identifier: Apache-2.0
// Which process slot (address range) is taken: one file per job, shared by its servers, so that a process which
// attaches to several GPUs gets ranges that do not overlap.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/locked_file.h"
#include "devproxy/csrc/server/process_id.h"
#include "devproxy/csrc/wire/segment.h"

namespace devproxy::server {

// Any thread.
class SlotTable {
 public:
  // first, end: which slots are given to who wants any; those of another tree of the job are another's.
  static StatusOr<std::unique_ptr<SlotTable>> open(const std::string& path, uint32_t first = 0,
                                                   uint32_t end = kMaxSlots);
  SlotTable(LockedFile file, uint32_t first, uint32_t end) : file_(std::move(file)), first_(first), end_(end) {}

  static constexpr uint32_t kAny = 0xffffffff;
  // wanted: kAny, or the slot of a restored process.
  std::optional<uint32_t> take(uint32_t wanted);
  void give(uint32_t slot);
  // The slot is this server's from now on, whoever had it: the process in it moves between servers.
  void adopt(uint32_t slot);

 private:
  struct Table {
    uint32_t magic, version;
    ProcessId servers[kMaxSlots];  // the server that gave the slot away; pid 0: free
  };
  static constexpr uint32_t kMagic = 0x4c535044;  // "DPSL"
  template <class Change>
  auto change(Change change);
  LockedFile file_;
  const uint32_t first_, end_;
  std::mutex mu_;  // threads of this process share the descriptor's flock
  const ProcessId self_ = this_process();
};

}  // namespace devproxy::server
