// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/c10d/comm.h"

#include <c10/util/Exception.h>

#include <thread>

#include "devproxy/torch/client/c10d/waited.h"

namespace devproxy::aten {

using nccl::api;

namespace {

constexpr auto kProgressPoll = std::chrono::microseconds(500);

}  // namespace

std::shared_ptr<Comm> Comm::join(const nccl::ncclUniqueId& id, int size, int rank, nccl::ncclConfig_t config,
                                 std::chrono::milliseconds timeout) {
  nccl::ncclComm_t handle = nullptr;
  const auto result = api().ncclCommInitRankConfig(&handle, size, id, rank, &config);
  if (handle == nullptr) nccl::throw_error(result, nullptr, "ncclCommInitRankConfig");
  std::shared_ptr<Comm> comm(new Comm(handle));
  comm->finish(result, "ncclCommInitRankConfig", timeout);
  return comm;
}

std::shared_ptr<Comm> Comm::split(Comm& parent, int color, int key, nccl::ncclConfig_t config,
                                  std::chrono::milliseconds timeout) {
  nccl::ncclComm_t handle = nullptr;
  const auto result = api().ncclCommSplit(parent.handle(), color, key, &handle, &config);
  parent.finish(result, "ncclCommSplit", timeout);
  if (handle == nullptr) {
    TORCH_CHECK_WITH(DistBackendError, color == nccl::kNoColor, "ncclCommSplit made no communicator for color ", color);
    return nullptr;
  }
  std::shared_ptr<Comm> comm(new Comm(handle));
  comm->finish(comm->state(), "ncclCommSplit", timeout);
  return comm;
}

std::shared_ptr<Comm> Comm::shrink(Comm& parent, std::vector<int> excluded, int flags, nccl::ncclConfig_t config,
                                   std::chrono::milliseconds timeout) {
  nccl::ncclComm_t handle = nullptr;
  const auto result = api().ncclCommShrink(parent.handle(), excluded.data(), static_cast<int>(excluded.size()), &handle,
                                           &config, flags);
  if (handle == nullptr) nccl::throw_error(result, parent.handle(), "ncclCommShrink");
  std::shared_ptr<Comm> comm(new Comm(handle));
  comm->finish(result, "ncclCommShrink", timeout);
  return comm;
}

void Comm::suspend() {
  nccl::check(api().ncclCommSuspend(handle(), nccl::kSuspendMemory), handle(), "ncclCommSuspend");
}

void Comm::resume() { nccl::check(api().ncclCommResume(handle()), handle(), "ncclCommResume"); }

std::unordered_map<std::string, uint64_t> Comm::memory_stats() {
  std::unordered_map<std::string, uint64_t> stats;
  for (const auto& [name, stat] :
       {std::pair("suspend", nccl::ncclStatGpuMemSuspend), std::pair("suspended", nccl::ncclStatGpuMemSuspended),
        std::pair("persist", nccl::ncclStatGpuMemPersist), std::pair("total", nccl::ncclStatGpuMemTotal)})
    nccl::check(api().ncclCommMemStats(handle(), stat, &stats[name]), handle(), "ncclCommMemStats");
  return stats;
}

nccl::ncclComm_t Comm::handle() const {
  const nccl::ncclComm_t handle = handle_.load();
  if (handle != nullptr) [[likely]]
    return handle;
  std::lock_guard lock(mu_);
  TORCH_CHECK_WITH(DistBackendError, false,
                   why_.empty() ? "The NCCL communicator was destroyed; make a new process group"
                                : "The NCCL communicator was aborted: " + why_);
}

nccl::ncclResult_t Comm::state() {
  std::lock_guard lock(mu_);
  const nccl::ncclComm_t handle = handle_.load();
  if (handle == nullptr) return nccl::ncclSuccess;
  auto state = nccl::ncclSuccess;
  const auto result = api().ncclCommGetAsyncError(handle, &state);
  return result != nccl::ncclSuccess ? result : state;
}

std::string Comm::failure() {
  const auto now = state();
  if (now == nccl::ncclSuccess || now == nccl::ncclInProgress) return "";
  std::lock_guard lock(mu_);
  const nccl::ncclComm_t handle = handle_.load();
  const char* last = handle != nullptr ? api().ncclGetLastError(handle) : nullptr;
  std::string text = nccl::error_text(now);
  if (last != nullptr && *last != '\0') text += std::string(": ") + last;
  return text;
}

bool Comm::held() {
  std::lock_guard lock(mu_);
  const nccl::ncclComm_t handle = handle_.load();
  return handle != nullptr && api().devproxy_comm_held(handle) != 0;
}

std::string Comm::waits() {
  std::lock_guard lock(mu_);
  const nccl::ncclComm_t handle = handle_.load();
  if (handle == nullptr) return "";
  char whom[512];
  api().devproxy_comm_waits(handle, whom, sizeof whom);
  return *whom != '\0' ? std::string("It waits for ") + whom : "";
}

void Comm::finish(nccl::ncclResult_t result, const char* what, std::chrono::milliseconds timeout) {
  Waited waited;
  while (result == nccl::ncclInProgress) {
    if (waited.so_far(held()) > timeout) {
      const std::string whom = waits();
      abort(std::string(what) + " timed out");
      TORCH_CHECK_WITH(DistBackendError, false, what, " is still in progress after ", timeout.count(),
                       " ms; the communicator is aborted", whom.empty() ? "" : ". ", whom);
    }
    std::this_thread::sleep_for(kProgressPoll);
    result = state();
  }
  nccl::check(result, handle_.load(), what);
}

void Comm::abort(const std::string& why) noexcept {
  std::lock_guard lock(mu_);
  const nccl::ncclComm_t handle = handle_.exchange(nullptr);
  if (handle == nullptr) return;
  why_ = why;
  (void)api().ncclCommAbort(handle);
}

void Comm::destroy() noexcept {
  std::lock_guard lock(mu_);
  const nccl::ncclComm_t handle = handle_.exchange(nullptr);
  if (handle == nullptr) return;
  auto state = nccl::ncclSuccess;
  for (auto result = api().ncclCommFinalize(handle); result == nccl::ncclInProgress; result = state) {
    std::this_thread::sleep_for(kProgressPoll);
    if (api().ncclCommGetAsyncError(handle, &state) != nccl::ncclSuccess) break;
  }
  (void)api().ncclCommDestroy(handle);
}

}  // namespace devproxy::aten
