// SPDX-License-Identifier: Apache-2.0
// Reading and writing a file at an offset, all of it.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "devproxy/csrc/base/status.h"

namespace devproxy {

inline Status write_all(int fd, const void* from, uint64_t bytes, uint64_t offset) {
  const auto* at = static_cast<const uint8_t*>(from);
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n = pwrite(fd, at + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Status::from_errno(kOutOfMemory, "writing");
    done += static_cast<uint64_t>(n);
  }
  return {};
}

// kInvalidImage: the file ends before.
inline Status read_all(int fd, void* to, uint64_t bytes, uint64_t offset) {
  auto* at = static_cast<uint8_t*>(to);
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n = pread(fd, at + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Status::from_errno(kUnknown, "reading");
    if (n == 0) return {kInvalidImage, "the file is shorter than its table says"};
    done += static_cast<uint64_t>(n);
  }
  return {};
}

}  // namespace devproxy
