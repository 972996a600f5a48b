// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/c10d/watchdog.h"

#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "devproxy/torch/client/driver.h"

namespace devproxy::aten {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTurn{100};

struct Watchdogs {
  std::mutex mu;
  std::set<Watchdog*> all;
};

// Leaked on purpose: process groups may outlive static destructors.
Watchdogs& watchdogs() {
  static auto* const all = new Watchdogs;
  return *all;
}

// At exit the driver goes away under groups that nobody destroyed. Their threads must not take that for a failure.
void stop_all() {
  std::vector<Watchdog*> all;
  {
    std::lock_guard lock(watchdogs().mu);
    all.assign(watchdogs().all.begin(), watchdogs().all.end());
  }
  for (Watchdog* w : all) w->stop();
}

std::exception_ptr backend_error(const std::string& text) {
  return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, text));
}

}  // namespace

Watchdog::Watchdog(std::string group, OnFailure on_failure)
    : group_(std::move(group)), on_failure_(on_failure), pid_(getpid()) {
  static const int registered = std::atexit(stop_all);
  (void)registered;
  std::lock_guard lock(watchdogs().mu);
  watchdogs().all.insert(this);
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(watchdogs().mu);
    watchdogs().all.erase(this);
  }
  if (thread_.joinable()) thread_.detach();
}

void Watchdog::watch(std::shared_ptr<Flight> flight) {
  std::lock_guard lock(mu_);
  flights_.push_back(std::move(flight));
}

void Watchdog::watch(std::shared_ptr<Comm> comm) {
  std::lock_guard lock(mu_);
  comms_.push_back(std::move(comm));
}

void Watchdog::wait_until_idle() {
  std::unique_lock lock(mu_);
  wake_.notify_all();
  idle_.wait(lock, [this] { return flights_.empty() || stopping_; });
}

bool Watchdog::idle() {
  std::vector<std::shared_ptr<Flight>> flights;
  {
    std::lock_guard lock(mu_);
    flights = flights_;
  }
  return std::all_of(flights.begin(), flights.end(), [](const auto& f) { return f->done(); });
}

void Watchdog::stop() {
  if (getpid() != pid_) return;
  {
    std::lock_guard lock(mu_);
    stopping_ = true;
    wake_.notify_all();
    idle_.notify_all();
  }
  std::lock_guard lock(join_mu_);
  if (thread_.joinable()) thread_.join();
}

std::string Watchdog::failure() const {
  std::lock_guard lock(mu_);
  return failure_;
}

bool Watchdog::timed_out() const {
  std::lock_guard lock(mu_);
  return timed_out_;
}

void Watchdog::abort(const std::string& why) {
  std::vector<std::shared_ptr<Flight>> flights;
  std::vector<std::shared_ptr<Comm>> comms;
  {
    std::lock_guard lock(mu_);
    flights = flights_;
    comms = comms_;
  }
  // The works first: whoever waits for one finds the error when the abort lets the operation end.
  for (const auto& f : flights) f->fail(backend_error(why));
  for (const auto& c : comms) c->abort(why);
}

void Watchdog::run() {
  c10::setThreadName("pt_nccl_watchdg");
  // What this thread asks about events must not break a graph that another thread captures.
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  (void)driver().cuThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock lock(mu_);
  while (!stopping_) {
    wake_.wait_for(lock, kTurn);
    if (stopping_) return;
    lock.unlock();
    bool timed_out = false;
    const std::string why = look(&timed_out);
    if (!why.empty()) give_up(why, timed_out);
    lock.lock();
  }
}

std::string Watchdog::look(bool* timed_out) {
  std::vector<std::shared_ptr<Flight>> flights, done;
  {
    std::lock_guard lock(mu_);
    flights = flights_;
  }
  std::string why;
  std::set<Comm*> asked;  // only those with something under way: a rank may leave when all is done
  for (const auto& f : flights) {
    try {
      if (f->done()) {
        done.push_back(f);
        continue;
      }
    } catch (const std::exception& error) {
      if (why.empty()) why = "asking about " + f->text() + " failed: " + error.what();
      continue;
    }
    if (asked.insert(f->comm.get()).second && why.empty()) {
      if (const std::string failure = f->comm->failure(); !failure.empty())
        why = "its communicator failed: " + failure + ". Under way was " + f->text();
    }
    const auto age = std::chrono::duration_cast<milliseconds>(f->age.so_far(f->comm->held()));
    if (age <= f->timeout || !why.empty()) continue;
    *timed_out = true;
    f->end_as(c10d::WorkResult::TIMEOUT);
    const std::string whom = f->comm->waits();
    why = "collective operation timeout: " + f->text() + ", ran for " + std::to_string(age.count()) + " ms. " +
          (whom.empty() ? "Another rank did not take part in it, or is slow; compare the last operation of each rank"
                        : whom);
  }
  for (const auto& f : done) {
    f->release_memory();
    f->end_as(f->error() ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS);
  }
  std::lock_guard lock(mu_);
  const auto gone = [&](const auto& f) { return std::find(done.begin(), done.end(), f) != done.end(); };
  flights_.erase(std::remove_if(flights_.begin(), flights_.end(), gone), flights_.end());
  if (flights_.empty()) idle_.notify_all();
  return why;
}

void Watchdog::give_up(const std::string& why, bool timed_out) {
  const std::string text = "Process group " + group_ + ": " + why;
  bool first;
  {
    std::lock_guard lock(mu_);
    first = failure_.empty();
    if (first) failure_ = text, timed_out_ = timed_out;
    if (stopping_) return;
  }
  if (on_failure_ == OnFailure::kKeepGoing) {
    std::vector<std::shared_ptr<Flight>> flights;
    {
      std::lock_guard lock(mu_);
      flights.swap(flights_);
      idle_.notify_all();
    }
    for (const auto& f : flights) f->fail(backend_error(text));
  } else {
    abort(text);
  }
  if (first) std::fprintf(stderr, "devproxy: %s\n", text.c_str());
  if (on_failure_ != OnFailure::kTearDown && on_failure_ != OnFailure::kSkipCleanUp) return;
  std::fprintf(stderr,
               "devproxy: the process ends, because what it computes from here on could be wrong "
               "(TORCH_NCCL_ASYNC_ERROR_HANDLING=2 keeps it)\n");
  std::fflush(stderr);
  std::abort();
}

}  // namespace devproxy::aten
