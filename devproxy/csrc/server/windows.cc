// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/windows.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/server/state_files.h"
#include "devproxy/csrc/server/state_record.h"

namespace devproxy::server {

namespace {

constexpr uint64_t kWindowAgainUs = 5'000'000;

}  // namespace

Status map_window(const std::string& path, uint64_t begin) {
  const File file(path, O_RDWR);
  if (file.fd < 0) return Status::from_errno(kFileNotFound, "opening " + path);
  struct stat info;
  if (fstat(file.fd, &info) != 0 || !S_ISREG(info.st_mode) || static_cast<uint64_t>(info.st_size) != kPinnedBytes)
    return {kInvalidValue, path + " is no pinned window of this build"};
  void* const want = reinterpret_cast<void*>(begin);
  const uint64_t until = now_us() + kWindowAgainUs;
  for (;;) {
    void* const got =
        mmap(want, kPinnedBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE, file.fd, 0);
    if (got == want) break;
    Status why = Status::from_errno(kOutOfMemory, "mapping the pinned window at its fixed address");
    const bool taken = got != MAP_FAILED || errno == EEXIST;
    if (got != MAP_FAILED) munmap(got, kPinnedBytes);
    if (!taken || now_us() > until) return std::move(why).with(path);
    usleep(10'000);
  }
  madvise(want, kPinnedBytes, MADV_DONTDUMP);
  return {};
}

void unmap_window(uint64_t begin) { munmap(reinterpret_cast<void*>(begin), kPinnedBytes); }

bool Windows::in_any(uint64_t addr, uint64_t bytes) const {
  if (in_own(addr, bytes)) return true;
  return std::any_of(others_.begin(), others_.end(), [&](const Window& w) { return w.holds(addr, bytes); });
}

// Precondition: it is not mapped.
Status Windows::map(Window& window, DeviceDoor& device) const {
  const std::string name = "/gpu" + std::to_string(window.gpu) + "-" + std::to_string(window.number) + ".pinned";
  if (Status s = map_window(job_dir_ + name, window.begin()); !s.ok()) return s;
  window.mapped = true;
  device.host_window(window.begin(), kPinnedBytes);
  return {};
}

Status Windows::open(Window window, DeviceDoor& device) {
  if (window.slot >= kMaxSlots || window.slot == own_.slot) return {kInvalidValue, "no other window has such a slot"};
  for (const Window& w : others_)
    if (w.slot == window.slot)
      return w.gpu == window.gpu && w.number == window.number
                 ? Status()
                 : Status(kInvalidValue, "another window of this client has that slot");
  if (Status s = map(window, device); !s.ok()) return s;
  others_.push_back(window);
  return {};
}

Status Windows::open_restored(const MemoryMirror& pinned, DeviceDoor& device) {
  for (Window& w : others_) {
    if (w.mapped) continue;
    if (Status s = map(w, device); !s.ok()) return s;
    pinned.for_each_live([&](uint64_t addr, const MemoryMirror::Allocation& a) {
      if (w.holds(addr, a.bytes)) device.host_allocated(addr, a.bytes);
    });
  }
  return {};
}

void Windows::close() {
  for (const Window& w : others_)
    if (w.mapped) unmap_window(w.begin());
  others_.clear();
}

void Windows::save(ClientRecord* client) const {
  for (const Window& w : others_) client->windows.push_back({w.number, w.gpu, w.slot});
}

Status Windows::restore(const ClientRecord& client) {
  for (const WindowRecord& w : client.windows) others_.push_back({w.number, w.gpu, w.slot});
  for (const Window& w : others_)
    if (w.slot >= kMaxSlots || w.slot == own_.slot) return {kInvalidImage, "the state names a window that cannot be"};
  return {};
}

}  // namespace devproxy::server
