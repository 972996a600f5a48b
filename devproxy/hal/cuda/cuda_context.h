// SPDX-License-Identifier: Apache-2.0
// One driver context per Space, but for those whose process's kernels a framework runs in this server, and those of jobs
// with several GPUs, whose collectives NCCL runs in this server.
//
// Why not the device's primary context for all: the legacy stream belongs to a context. Two client processes in one
// context would wait for each other's default streams, which can deadlock when a host function of one waits for the
// other process. The price is what a context costs in device memory, and that two contexts take turns on the GPU; ranks
// that share a GPU take turns anyway. A context does not confine an execution fault: on an H200 (driver 580) an illegal
// address in one was the answer of each context of the process, also of one made afterwards.
//
// A framework's runtime (cudart), and NCCL's own copy of it, works in the device's primary context and nowhere else: its guards make that one
// current, and a stream of another context would be refused. So the Spaces of such processes live in the primary
// context. What those processes of one job on one GPU lose: their legacy streams wait for each other. What stays:
// addresses, quotas, the checks of every address before a kernel sees it, and every other job.
#pragma once

#include <memory>

#include "devproxy/hal/cuda/driver_table.h"

namespace devproxy::hal::cuda {

class Context {
 public:
  static StatusOr<std::shared_ptr<Context>> make(std::shared_ptr<const Driver> driver, CUdevice device);
  static StatusOr<std::shared_ptr<Context>> primary(std::shared_ptr<const Driver> driver, CUdevice device);
  Context(std::shared_ptr<const Driver> driver, CUdevice device, CUcontext handle, bool primary);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Makes this the calling thread's context; nearly free where it already is. Before every driver call.
  const Driver& enter() const;
  const Driver& driver() const { return *driver_; }
  CUdevice device() const { return device_; }
  bool is_primary() const { return primary_; }

 private:
  const std::shared_ptr<const Driver> driver_;
  const CUdevice device_;
  const CUcontext handle_;
  const bool primary_;
  const uint64_t number_;  // never used twice, unlike the handle
};

}  // namespace devproxy::hal::cuda
