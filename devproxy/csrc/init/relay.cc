// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/init/relay.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace devproxy::init {
namespace {

constexpr size_t kPieceBytes = 1 << 14;

std::string failed(const std::string& what) { return what + ": " + std::strerror(errno); }

}  // namespace

std::string TtyRelay::open(const std::string& folder) {
  folder_ = folder;
  master_ = ::open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
  if (master_ < 0 || unlockpt(master_) != 0) return failed("open /dev/ptmx");
  char name[64];
  if (ptsname_r(master_, name, sizeof name) != 0) return failed("the name of the pty");
  slave_ = ::open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (slave_ < 0) return failed(std::string("open ") + name);
  const std::string in = folder + "/tty.in";
  in_ = ::open(in.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (in_ < 0) return failed("open " + in);
  // For an instant read and write: opening only for writing fails while the supervisor has not opened its end.
  const std::string out = folder + "/tty.out";
  const int both = ::open(out.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  out_ = ::open(out.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK);
  if (both < 0 || out_ < 0) return failed("open " + out);
  close(both);
  // CRIU takes at most 16 KiB that wait in a pty (criu/tty.c), so it should never have to wait there.
  fcntl(out_, F_SETPIPE_SZ, 1 << 20);
  read_window_size();
  return {};
}

void TtyRelay::read_window_size() {
  const std::string path = folder_ + "/tty.winsize";
  FILE* file = std::fopen(path.c_str(), "re");
  if (!file) return;
  unsigned rows = 0, columns = 0;
  if (std::fscanf(file, "%u %u", &rows, &columns) == 2 && rows < 65536 && columns < 65536) {
    winsize size{};
    size.ws_row = static_cast<unsigned short>(rows);
    size.ws_col = static_cast<unsigned short>(columns);
    ioctl(master_, TIOCSWINSZ, &size);  // the kernel tells the foreground group, if the size is another one
  }
  std::fclose(file);
}

void TtyRelay::wanted(std::vector<pollfd>* fds) const {
  // A side is read only when the other has taken everything: whoever does not read stops whoever writes.
  if (!master_hung_up_) {
    const bool can_read = from_job_.empty(), must_write = !to_job_.empty();
    if (can_read || must_write) {
      fds->push_back({master_, static_cast<short>((can_read ? POLLIN : 0) | (must_write ? POLLOUT : 0)), 0});
    }
  }
  if (to_job_.empty()) fds->push_back({in_, POLLIN, 0});
  if (!from_job_.empty()) fds->push_back({out_, POLLOUT, 0});
}

void TtyRelay::move() {
  if (from_job_.empty() && !read_into(master_, &from_job_)) master_hung_up_ = true;
  if (!from_job_.empty() && !write_from(out_, &from_job_)) from_job_.clear();  // nobody looks at it any more
  if (to_job_.empty()) (void)read_into(in_, &to_job_);
  if (to_job_.empty()) return;
  const std::string before = to_job_;
  if (!write_from(master_, &to_job_)) {
    to_job_.clear();
  } else {
    look_for_suspend(before.substr(0, before.size() - to_job_.size()));
  }
}

void TtyRelay::look_for_suspend(const std::string& typed) {
  termios modes{};
  pid_t group = 0;
  if (typed.empty() || tcgetattr(master_, &modes) != 0 || !(modes.c_lflag & ISIG)) return;
  if (typed.find(static_cast<char>(modes.c_cc[VSUSP])) == std::string::npos) return;
  if (ioctl(master_, TIOCGPGRP, &group) == 0) suspended_ = group;
}

pid_t TtyRelay::take_suspended() { return std::exchange(suspended_, 0); }

void TtyRelay::drain(int patience_ms) {
  // With the last slave closed the master gives what is left and then EIO.
  close(slave_);
  slave_ = -1;
  for (;;) {
    if (from_job_.empty() && (!read_into(master_, &from_job_) || from_job_.empty())) return;
    const size_t before = from_job_.size();
    if (!write_from(out_, &from_job_)) return;
    if (from_job_.size() < before) continue;
    pollfd ready{out_, POLLOUT, 0};
    if (poll(&ready, 1, patience_ms) == 0) return;
  }
}

// False: the other side is gone for good.
bool TtyRelay::read_into(int fd, std::string* pending) {
  char piece[kPieceBytes];
  const ssize_t n = read(fd, piece, sizeof piece);
  if (n > 0) pending->assign(piece, static_cast<size_t>(n));
  return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

// False: the other side is gone for good.
bool TtyRelay::write_from(int fd, std::string* pending) {
  const ssize_t n = write(fd, pending->data(), pending->size());
  if (n > 0) pending->erase(0, static_cast<size_t>(n));
  return n >= 0 || errno == EAGAIN || errno == EINTR;
}

}  // namespace devproxy::init
