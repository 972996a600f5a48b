// SPDX-License-Identifier: Apache-2.0
// The thread that looks after the operations of one process group: it finds the ones that take too long and the
// communicators that failed, and decides what becomes of the process.
// Locks: Watchdog::mu_ guards the lists. Nothing of NCCL's or the driver's is called under it, and no tensor is freed.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/torch/client/c10d/work.h"

namespace devproxy::aten {

// TORCH_NCCL_ASYNC_ERROR_HANDLING, with torch's numbers.
enum class OnFailure {
  kKeepGoing = 0,    // the works carry the error; the communicators stay
  kTearDown = 1,     // abort the communicators and end the process
  kCleanUp = 2,      // abort the communicators; the works carry the error
  kSkipCleanUp = 3,  // torch's default; here as kTearDown: an abort over devproxy does not hang
};

class Watchdog {
 public:
  Watchdog(std::string group, OnFailure on_failure);
  // Precondition: stop() was called, or this is a forked child, which has no such thread.
  ~Watchdog();

  void watch(std::shared_ptr<Flight> flight);
  void watch(std::shared_ptr<Comm> comm);
  // Waits until no operation is under way. The operations' timeouts bound it.
  void wait_until_idle();
  // Whether none is under way now.
  bool idle();
  // Fails all operations under way and aborts all communicators.
  void abort(const std::string& why);
  // Ends the thread and waits for it. What is under way is no longer watched. Safe to call twice.
  void stop();
  // What went wrong first; empty: nothing.
  std::string failure() const;
  bool timed_out() const;

 private:
  void run();
  // One turn: forgets what is done, and returns what failed, in words; empty: nothing.
  std::string look(bool* timed_out);
  void give_up(const std::string& why, bool timed_out);

  const std::string group_;
  const OnFailure on_failure_;
  const int pid_;
  mutable std::mutex mu_;
  std::condition_variable wake_, idle_;
  std::vector<std::shared_ptr<Flight>> flights_;
  std::vector<std::shared_ptr<Comm>> comms_;
  std::string failure_;
  bool timed_out_ = false;
  bool stopping_ = false;
  std::mutex join_mu_;
  std::thread thread_;
};

}  // namespace devproxy::aten
