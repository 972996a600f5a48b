// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/comm/shadow.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace devproxy::hal::soft {

namespace {

std::string path_of(const std::string& folder, uint64_t incarnation) {
  char name[32];
  std::snprintf(name, sizeof name, "/shadow-%016llx", static_cast<unsigned long long>(incarnation));
  return folder + name;
}

}  // namespace

StatusOr<int> open_shadow(const std::string& folder, uint64_t incarnation, uint64_t device_bytes, bool make) {
  const std::string path = path_of(folder, incarnation);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | (make ? O_CREAT : 0), 0600);
  if (fd < 0) return Status::from_errno(errno == ENOENT ? kNotFound : kNotPermitted, "opening " + path);
  struct stat there;
  Status s;
  if (device_bytes == 0 || device_bytes > kMaxShadowBytes || fstat(fd, &there) != 0)
    s = {kInvalidValue, path + " cannot be so long"};
  else if (make && there.st_size == 0 && ftruncate(fd, static_cast<off_t>(device_bytes)) != 0)
    s = Status::from_errno(kOutOfMemory, "sizing " + path);
  else if (!(make && there.st_size == 0) && static_cast<uint64_t>(there.st_size) != device_bytes)
    s = {kInvalidValue, path + " has another size than the communicator says"};
  if (s.ok()) return fd;
  close(fd);
  return s;
}

void remove_shadow(const std::string& folder, uint64_t incarnation) { unlink(path_of(folder, incarnation).c_str()); }

}  // namespace devproxy::hal::soft
