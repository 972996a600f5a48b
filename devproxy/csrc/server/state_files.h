// SPDX-License-Identifier: Apache-2.0
// Files of a dump: whole texts, and pieces of memory side by side.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "devproxy/csrc/base/file.h"
#include "devproxy/csrc/base/status.h"

namespace devproxy::server {

// A descriptor that is closed with the object; fd is -1 where the file could not be opened.
struct File {
  const int fd;
  File(const std::string& path, int flags) : fd(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600)) {}
  ~File() {
    if (fd >= 0) close(fd);
  }
  File(const File&) = delete;
};

// Some bytes of a file, and where they are or go in memory.
struct Piece {
  uint64_t addr = 0, offset = 0, bytes = 0;
};
// Where the last of pieces that lie one behind the other in a file ends.
inline uint64_t end_of(const std::vector<Piece>& pieces) {
  return pieces.empty() ? 0 : pieces.back().offset + pieces.back().bytes;
}
inline constexpr uint64_t kPieceBytes = 16u << 20;

// Calls `copy` for pieces of at most kPieceBytes, on as many threads as there are CPUs, from two to kCopiers: one fills
// neither the memory's bandwidth nor that of a GPU's link. The first error ends it.
inline constexpr unsigned kCopiers = 12;
Status copy_pieces(const std::vector<Piece>& pieces, const std::function<Status(const Piece&)>& copy);

// Writes the file and its name in one go: a reader sees all of it or none.
Status write_file(const std::string& path, const std::string& text);
StatusOr<std::string> read_file(const std::string& path);

}  // namespace devproxy::server
