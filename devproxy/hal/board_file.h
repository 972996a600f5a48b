// SPDX-License-Identifier: Apache-2.0
// A communicator's board is a file in the job's folder, mapped by every server that has a member. It begins with a magic
// number and the number of ranks; the rest is the device's.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <string>

#include "devproxy/csrc/args/comm.h"
#include "devproxy/csrc/base/status.h"

namespace devproxy::hal {

struct BoardKind {
  const char* prefix;  // of its name
  uint32_t magic;
  size_t (*bytes)(uint32_t ranks);
};

struct MappedBoard {
  void* at = nullptr;
  size_t bytes = 0;
  uint32_t ranks = 0;
};

inline std::string board_path(const std::string& folder, const BoardKind& kind, const CommKey& key) {
  char name[64];
  std::snprintf(name, sizeof name, "%s%016llx%016llx", kind.prefix, static_cast<unsigned long long>(key.high),
                static_cast<unsigned long long>(key.low));
  return folder + "/" + name;
}

class BoardDescriptor {
 public:
  explicit BoardDescriptor(int fd) : fd_(fd) {}
  ~BoardDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  BoardDescriptor(const BoardDescriptor&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// ranks: 0 for whatever it says. kNotFound: there is none. kInvalidValue: it is none, or the members do not agree how many
// they are.
inline StatusOr<MappedBoard> map_board(const std::string& path, const BoardKind& kind, uint32_t ranks) {
  const BoardDescriptor file{open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW)};
  if (file.fd() < 0) return Status::from_errno(errno == ENOENT ? kNotFound : kNotPermitted, "opening " + path);
  uint32_t first[2] = {};
  struct stat there;
  if (pread(file.fd(), first, sizeof first, 0) != static_cast<ssize_t>(sizeof first) || first[0] != kind.magic ||
      first[1] == 0 || first[1] > kMaxCommRanks || fstat(file.fd(), &there) != 0)
    return Status(kInvalidValue, path + " is not a communicator's");
  if (ranks == 0) ranks = first[1];
  const size_t bytes = kind.bytes(ranks);
  if (first[1] != ranks || static_cast<size_t>(there.st_size) != bytes)
    return Status(kInvalidValue, "the members do not agree how many they are: " + std::to_string(first[1]) + " and " +
                                     std::to_string(ranks));
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
  if (at == MAP_FAILED) return Status::from_errno(kOutOfMemory, "mapping " + path);
  return MappedBoard{at, bytes, ranks};
}

// A new board under its name, unless somebody was quicker. Under a name of its own first, so that nobody sees half of one.
// head: how it begins.
inline Status make_board(const std::string& path, const BoardKind& kind, uint32_t ranks, const void* head,
                         size_t head_bytes) {
  static std::atomic<uint64_t> serial{0};
  const std::string own = path + "." + std::to_string(getpid()) + "." + std::to_string(++serial);
  const BoardDescriptor file{open(own.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)};
  if (file.fd() < 0) return Status::from_errno(kNotPermitted, "making " + own);
  Status s;
  if (ftruncate(file.fd(), static_cast<off_t>(kind.bytes(ranks))) != 0 ||
      pwrite(file.fd(), head, head_bytes, 0) != static_cast<ssize_t>(head_bytes))
    s = Status::from_errno(kOutOfMemory, "filling " + own);
  else if (link(own.c_str(), path.c_str()) != 0 && errno != EEXIST)
    s = Status::from_errno(kNotPermitted, "naming " + path);
  unlink(own.c_str());
  return s;
}

// The board of that name, made by whoever comes first.
inline StatusOr<MappedBoard> open_board(const std::string& path, const BoardKind& kind, uint32_t ranks,
                                        const void* head, size_t head_bytes) {
  auto board = map_board(path, kind, ranks);
  if (board.ok() || board.status().code() != kNotFound) return board;
  if (Status s = make_board(path, kind, ranks, head, head_bytes); !s.ok()) return s;
  return map_board(path, kind, ranks);
}

// The paths of all boards of that kind in a folder.
inline void each_board(const std::string& folder, const BoardKind& kind,
                       const std::function<void(const std::string&)>& look) {
  DIR* const listing = opendir(folder.c_str());
  if (!listing) return;
  while (const dirent* entry = readdir(listing)) {
    const std::string name = entry->d_name;
    if (name.rfind(kind.prefix, 0) == 0 && name.find('.') == std::string::npos)  // with a dot it is being made
      look(folder + "/" + name);
  }
  closedir(listing);
}

}  // namespace devproxy::hal
