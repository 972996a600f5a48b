// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/cuda_context.h"

#include <atomic>
#include <utility>

namespace devproxy::hal::cuda {

namespace {

std::atomic<uint64_t> g_number{0};
thread_local uint64_t t_current = 0;  // number of the context that this thread has; 0 for none

}  // namespace

StatusOr<std::shared_ptr<Context>> Context::make(std::shared_ptr<const Driver> driver, CUdevice device) {
  CUcontext handle = nullptr;
  // cuda.h: blocking-sync makes a waiting thread sleep; on two cores a spinning one would take half of the machine.
  Status made = driver->status(driver->create_context(&handle, CU_CTX_SCHED_BLOCKING_SYNC | CU_CTX_MAP_HOST, device),
                               driver->create_context, "making a context for a client process");
  if (!made.ok()) return made;
  t_current = 0;  // cuCtxCreate made it current; whoever needs it enters
  return std::make_shared<Context>(std::move(driver), device, handle, false);
}

StatusOr<std::shared_ptr<Context>> Context::primary(std::shared_ptr<const Driver> driver, CUdevice device) {
  const char* const doing = "taking the device's primary context for a client process with a framework";
  // Where it is active already (another process of the job), its flags are those that were set here before.
  (void)driver->cuDevicePrimaryCtxSetFlags(device, CU_CTX_SCHED_BLOCKING_SYNC | CU_CTX_MAP_HOST);
  CUcontext handle = nullptr;
  Status got =
      driver->status(driver->cuDevicePrimaryCtxRetain(&handle, device), driver->cuDevicePrimaryCtxRetain, doing);
  if (got.ok())  // one that failed under another process is still there, and of no use
    got = driver->status(driver->cuCtxSetCurrent(handle), driver->cuCtxSetCurrent, doing);
  t_current = 0;
  if (!got.ok()) {
    if (handle) (void)driver->cuDevicePrimaryCtxRelease(device);
    return got;
  }
  return std::make_shared<Context>(std::move(driver), device, handle, true);
}

Context::Context(std::shared_ptr<const Driver> driver, CUdevice device, CUcontext handle, bool primary)
    : driver_(std::move(driver)),
      device_(device),
      handle_(handle),
      primary_(primary),
      number_(g_number.fetch_add(1) + 1) {}

Context::~Context() {
  // There is nobody left to tell. A framework's runtime holds the primary context too, and keeps it.
  (void)(primary_ ? driver_->cuDevicePrimaryCtxRelease(device_) : driver_->cuCtxDestroy(handle_));
  if (t_current == number_) t_current = 0;
}

const Driver& Context::enter() const {
  // A failure here is the failure of the call that follows: the driver then says which.
  if (t_current != number_ && driver_->cuCtxSetCurrent(handle_) == CUDA_SUCCESS) t_current = number_;
  return *driver_;
}

}  // namespace devproxy::hal::cuda
