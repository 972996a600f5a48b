// SPDX-License-Identifier: Apache-2.0
// The pinned windows that a client's commands may name: its own on this server, which the endpoint has mapped, and
// those that other servers of the job made for the same process, mapped here when the client names them.
//
// Thread: the dispatch thread; the server thread while the client is parked.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/device_door.h"
#include "devproxy/csrc/server/memory_mirror.h"
#include "devproxy/csrc/wire/segment.h"

namespace devproxy::server {

// Maps a window's file at its address. A process that ended may still have it mapped here, by the connection to this
// server that looks for its end by itself: that passes.
Status map_window(const std::string& path, uint64_t begin);
void unmap_window(uint64_t begin);

struct ClientRecord;

class Windows {
 public:
  // A window as the server of `gpu` made it for its connection `number`.
  struct Window {
    uint64_t number = 0;
    uint32_t gpu = 0, slot = 0;
    bool mapped = false;
    uint64_t begin() const { return range_base(slot) + kDeviceBytes; }
    bool holds(uint64_t addr, uint64_t bytes) const {
      return addr >= begin() && addr - begin() < kPinnedBytes && bytes <= kPinnedBytes - (addr - begin());
    }
  };

  Windows(std::string job_dir, uint32_t slot) : job_dir_(std::move(job_dir)), own_{0, 0, slot, true} {}
  ~Windows() { close(); }
  Windows(const Windows&) = delete;

  bool in_own(uint64_t addr, uint64_t bytes) const { return own_.holds(addr, bytes); }
  bool in_any(uint64_t addr, uint64_t bytes) const;
  Status open(Window window, DeviceDoor& device);
  // After a restore, when all servers of the job go on: only then the others have their windows again.
  Status open_restored(const MemoryMirror& pinned, DeviceDoor& device);
  void close();

  // Into the record and back; restored windows are not open yet.
  void save(ClientRecord* client) const;
  Status restore(const ClientRecord& client);

 private:
  Status map(Window& window, DeviceDoor& device) const;
  const std::string job_dir_;
  const Window own_;
  std::vector<Window> others_;
};

}  // namespace devproxy::server
