// SPDX-License-Identifier: Apache-2.0
// A small file that several servers change: opened 0600, changed only under flock, which is waited for with a limit.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>
#include <utility>

#include "devproxy/csrc/base/status.h"

namespace devproxy::server {

class LockedFile {
 public:
  static StatusOr<LockedFile> open(const std::string& path) {
    LockedFile file;
    file.path_ = path;
    file.fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file.fd_ < 0) return Status::from_errno(kNotPermitted, "opening " + path);
    struct stat info;
    if (fstat(file.fd_, &info) != 0 || info.st_uid != geteuid() || !S_ISREG(info.st_mode))
      return Status(kNotPermitted, path + " belongs to another user: remove it or choose another folder");
    return file;
  }
  LockedFile(LockedFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}
  LockedFile& operator=(LockedFile&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(path_, other.path_);
    return *this;
  }
  ~LockedFile() {
    if (fd_ >= 0) close(fd_);
  }

  // Its holders do nothing in it that takes time. One that a signal has stopped, or a stranger who has locked the file,
  // is waited for so long, and then named in the log: nothing was changed.
  static constexpr uint64_t kPatienceUs = 5'000'000;

  class Lock {
   public:
    explicit Lock(const LockedFile& file) : fd_(file.lock() ? file.fd_ : -1) {}
    ~Lock() {
      if (fd_ >= 0) flock(fd_, LOCK_UN);
    }
    Lock(const Lock&) = delete;
    bool held() const { return fd_ >= 0; }

   private:
    int fd_;
  };

  // Bytes that were there; a shorter file is no error.
  size_t read(void* to, size_t bytes) const {
    const ssize_t n = pread(fd_, to, bytes, 0);
    return n < 0 ? 0 : static_cast<size_t>(n);
  }
  [[nodiscard]] bool write(const void* from, size_t bytes) const {
    return pwrite(fd_, from, bytes, 0) == static_cast<ssize_t>(bytes);
  }

 private:
  LockedFile() = default;
  bool lock() const;
  int fd_ = -1;
  std::string path_;
};

}  // namespace devproxy::server
