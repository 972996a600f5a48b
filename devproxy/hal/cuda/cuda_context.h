// One driver context per Space.
//
// Why not the device's primary context for all: the legacy stream and an execution fault belong to a context. Two
// client processes in one context would wait for each other's default streams, which can deadlock when a host function
// of one waits for the other process, and one's bad kernel would end both. The price is what a context costs in device
// memory, and that two contexts take turns on the GPU; ranks that share a GPU take turns anyway.
#pragma once

#include <memory>

#include "devproxy/hal/cuda/driver_table.h"

namespace devproxy::hal::cuda {

class Context {
 public:
  static StatusOr<std::shared_ptr<Context>> make(std::shared_ptr<const Driver> driver, CUdevice device);
  Context(std::shared_ptr<const Driver> driver, CUdevice device, CUcontext handle);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Makes this the calling thread's context; nearly free where it already is. Before every driver call.
  const Driver& enter() const;
  const Driver& driver() const { return *driver_; }
  CUdevice device() const { return device_; }

 private:
  const std::shared_ptr<const Driver> driver_;
  const CUdevice device_;
  const CUcontext handle_;
  const uint64_t number_;  // never used twice, unlike the handle
};

}  // namespace devproxy::hal::cuda
