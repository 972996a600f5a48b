// SPDX-License-Identifier: Apache-2.0
// One NCCL communicator of this process, and how it ends.
// Locks: Comm::mu_ guards the end of the communicator (destroy, abort) against questions about its state. Operations do
// not take it: an abort must get through while an operation is stuck.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "devproxy/torch/client/c10d/nccl_api.h"

namespace devproxy::aten {

class Comm {
 public:
  // Joins a new communicator of `size` ranks; blocks until all have come. The caller has made the device current.
  static std::shared_ptr<Comm> join(const nccl::ncclUniqueId& id, int size, int rank, nccl::ncclConfig_t config,
                                    std::chrono::milliseconds timeout);
  // The part of `parent` whose ranks give the same color, ordered by key. Null for nccl::kNoColor. All ranks of the
  // parent call it.
  static std::shared_ptr<Comm> split(Comm& parent, int color, int key, nccl::ncclConfig_t config,
                                     std::chrono::milliseconds timeout);

  // Without these ranks of `parent`, which do not call it. flags: nccl::kShrinkAbort gives up what is under way in the
  // parent first.
  static std::shared_ptr<Comm> shrink(Comm& parent, std::vector<int> excluded, int flags, nccl::ncclConfig_t config,
                                      std::chrono::milliseconds timeout);

  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // Throws c10::DistBackendError if the communicator was aborted or destroyed.
  nccl::ncclComm_t handle() const;
  // As ncclCommGetAsyncError says: ncclSuccess, ncclInProgress or the failure. ncclSuccess once it has ended.
  nccl::ncclResult_t state();
  // What the failure is, and which rank or operation it comes from; empty where there is none.
  std::string failure();
  // devproxy holds the job: what waits is not late.
  bool held();
  // For whom its operation waits, as a sentence; empty where that is not known.
  std::string waits();
  // Waits while NCCL says that a call of a non-blocking communicator is still in progress. Throws on failure.
  void finish(nccl::ncclResult_t result, const char* what, std::chrono::milliseconds timeout);

  // Frees its device memory, as far as NCCL can, until resume(). In between it carries no operation.
  void suspend();
  void resume();
  // Bytes, but for "suspended": whether it is.
  std::unordered_map<std::string, uint64_t> memory_stats();

  // Both do nothing where the communicator has ended already, and never throw: what NCCL says last changes nothing.
  void abort(const std::string& why) noexcept;
  void destroy() noexcept;

 private:
  explicit Comm(nccl::ncclComm_t handle) : handle_(handle) {}

  mutable std::mutex mu_;
  std::atomic<nccl::ncclComm_t> handle_;
  std::string why_;  // it was aborted; empty: it was not
};

}  // namespace devproxy::aten
