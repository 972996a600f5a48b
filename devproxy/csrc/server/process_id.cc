// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/process_id.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace devproxy::server {

namespace {

// 0 where there is no such process, or only its zombie.
uint64_t start_time_of(uint32_t pid) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%u/stat", pid);
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[1024];
  const ssize_t n = ::read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  const char* at = std::strrchr(text, ')');  // the name before it may hold anything
  if (!at || at[1] == 0 || at[2] == 'Z' || at[2] == 'X') return 0;
  for (int field = 2; field < 22 && at; field++) at = std::strchr(at + 1, ' ');
  return at ? std::strtoull(at + 1, nullptr, 10) : 0;
}

}  // namespace

ProcessId this_process() {
  const auto pid = static_cast<uint32_t>(getpid());
  return {pid, 0, start_time_of(pid)};
}

bool is_alive(const ProcessId& id) { return id.pid != 0 && start_time_of(id.pid) == id.start_time; }

}  // namespace devproxy::server
