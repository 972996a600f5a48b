// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/locked_file.h"

#include <sys/sysmacros.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/csrc/base/file.h"
#include "devproxy/csrc/base/log.h"

namespace devproxy::server {

namespace {

constexpr uint64_t kFirstPauseUs = 20, kLongestPauseUs = 2'000;

// "process 12 (python)", out of /proc/locks (proc(5)).
std::string holder_of(int fd) {
  struct stat info;
  FILE* const locks = fstat(fd, &info) == 0 ? std::fopen("/proc/locks", "re") : nullptr;
  if (!locks) return "somebody";
  unsigned pid = 0, major_number, minor_number, found = 0;
  unsigned long inode;
  char line[256];
  while (!found && std::fgets(line, sizeof line, locks))
    if (std::sscanf(line, "%*s FLOCK %*s %*s %u %x:%x:%lu", &pid, &major_number, &minor_number, &inode) == 4 &&
        major(info.st_dev) == major_number && minor(info.st_dev) == minor_number && info.st_ino == inode)
      found = pid;
  std::fclose(locks);
  if (!found) return "somebody";
  char path[32], name[64] = "";
  std::snprintf(path, sizeof path, "/proc/%u/comm", found);
  if (FILE* const comm = std::fopen(path, "re")) {
    if (std::fgets(name, sizeof name, comm)) name[std::strcspn(name, "\n")] = 0;
    std::fclose(comm);
  }
  return "process " + std::to_string(found) + " (" + name + ")";
}

}  // namespace

bool LockedFile::lock() const {
  const uint64_t until = now_us() + kPatienceUs;
  for (uint64_t pause = kFirstPauseUs; flock(fd_, LOCK_EX | LOCK_NB) != 0;
       pause = std::min(2 * pause, kLongestPauseUs)) {
    if (errno != EWOULDBLOCK && errno != EINTR) return false;
    if (now_us() > until) {
      DP_LOG(kError, kServer, 0, "%s is locked by %s for more than %lu s: is it stopped? let it go on, or end it",
             path_.c_str(), holder_of(fd_).c_str(), static_cast<unsigned long>(kPatienceUs / 1'000'000));
      return false;
    }
    usleep(static_cast<useconds_t>(pause));
  }
  return true;
}

}  // namespace devproxy::server
