// SPDX-License-Identifier: Apache-2.0
// The host functions of a client that were posted to a stream and have not returned yet.
//
// The dispatch thread adds and finishes them, a device thread waits for its own. Locks: mu_ is a leaf.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>

namespace devproxy::server {

class HostFunctions {
 public:
  // -- the dispatch thread. False: it is already there, or is not.
  bool add(uint64_t token) {
    std::lock_guard lock(mu_);
    return out_.insert(token).second;
  }
  bool finish(uint64_t token) {
    std::lock_guard lock(mu_);
    if (!out_.erase(token)) return false;
    wake_.notify_all();
    return true;
  }
  // Only the dispatch thread changes the set, so it reads it without the lock.
  bool none_out() const { return out_.empty(); }
  // The same thread, or the server thread while the client is parked.
  const std::set<uint64_t>& tokens() const { return out_; }

  // -- any thread
  size_t count() const {
    std::lock_guard lock(mu_);
    return out_.size();
  }
  // Until the function has returned, or `ended` says that nobody will say so.
  template <class Ended>
  void wait(uint64_t token, Ended ended) {
    std::unique_lock lock(mu_);
    wake_.wait(lock, [&] { return !out_.contains(token) || ended(); });
  }
  // What `ended` of a wait() says may have changed.
  void look_again() {
    std::lock_guard lock(mu_);
    wake_.notify_all();
  }

 private:
  mutable std::mutex mu_;
  std::condition_variable wake_;
  std::set<uint64_t> out_;
};

}  // namespace devproxy::server
