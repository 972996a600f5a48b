// SPDX-License-Identifier: Apache-2.0
// The job's pseudo-terminal, and the copying between its master side and two FIFOs of the job folder.
//
//   job <-> slave | master <-> TtyRelay <-> tty.in, tty.out <-> the supervisor, outside the namespaces
//
// All of its state is memory, a pty and FIFOs, so that CRIU can take it at any moment. One thread; nothing here blocks.
#pragma once

#include <poll.h>

#include <string>
#include <vector>

namespace devproxy::init {

class TtyRelay {
 public:
  // Makes the pty and opens the FIFOs. Precondition: devpts is mounted in this mount namespace, the FIFOs are there.
  // Returns an empty text, or what failed.
  [[nodiscard]] std::string open(const std::string& folder);

  int slave() const { return slave_; }

  // Reads folder/tty.winsize ("rows columns\n") and gives the pty that size; keeps the old one if it cannot be read.
  void read_window_size();

  // What to wait for now, appended to `fds`; move() does all that can be done without waiting.
  void wanted(std::vector<pollfd>* fds) const;
  void move();

  // The foreground group, if the suspend character (Ctrl-Z) has been typed since the last call, else 0.
  pid_t take_suspended();

  // The job has ended: nothing but us has the slave open. Copies what it wrote before it ended, until the reader has
  // taken nothing for `patience_ms`.
  void drain(int patience_ms);

 private:
  bool read_into(int fd, std::string* pending);
  bool write_from(int fd, std::string* pending);
  void look_for_suspend(const std::string& typed);

  std::string folder_;
  int master_ = -1;
  int slave_ = -1;  // kept open: without any slave the master would be "ready" all the time
  int in_ = -1;     // tty.in, read and write: without a writer it would be ready all the time
  int out_ = -1;    // tty.out
  bool master_hung_up_ = false;
  pid_t suspended_ = 0;
  std::string to_job_;
  std::string from_job_;
};

}  // namespace devproxy::init
