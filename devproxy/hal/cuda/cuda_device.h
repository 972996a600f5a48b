// SPDX-License-Identifier: Apache-2.0
// A real NVIDIA GPU through its genuine driver. Levels 1 to 3. Written without a GPU: what has been run on one is in
// docs/gpu-results.md, and nothing else has.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "devproxy/hal/hal.h"
#include "devproxy/hal/sharing.h"
#include "devproxy/hal/splice/splice_config.h"

namespace devproxy::hal {
class Links;
}

namespace devproxy::hal::cuda {

// How a queue tells that it got somewhere; see cuda_space.h, "Completion".
enum class Marks : uint8_t { kAuto, kWriteValue, kEvents };

// How the server is in the lives of its job.
struct Standing {
  std::atomic<bool> goes_on{false};  // servers that were taken over from do not go on any more
  std::atomic<bool> stands{false};   // at a cut of its own: not one that a predecessor or an image made
  std::atomic<uint64_t> resumes{0};  // of cuts
};

struct CudaConfig {
  uint32_t ordinal = 0;                      // CUDA's number of the GPU, after CUDA_VISIBLE_DEVICES
  std::string driver_path;                   // absolute path of libcuda.so.1; empty: the usual places
  uint64_t memory_bytes = 0;                 // what the device says that it has; 0: what it has
  std::string nccl_path;                     // absolute path of the genuine libnccl.so.2; empty: see Nccl::open
  std::shared_ptr<const Standing> standing;  // the device's
  std::shared_ptr<Links> links;              // to servers of the job's other trees; nullptr: it has none
  uint64_t process = 0;                      // a random number of this process
  uint64_t number = 0;                       // of the GPU's uuid
  bool collectives = false;  // the job's processes may be ranks: all are in the primary context, where NCCL works
  bool shared = false;       // several of the job's GPUs are this one
  std::shared_ptr<Sharing> sharing;  // what these share
  splice::SpliceConfig splicing = {.on = false};
  bool tree_order = false;  // reductions have the order of ranks that share a GPU also where each has its own

  // Values to be tuned on a device; of these settle_us and mark_every have been, once (docs/gpu-results.md).
  Marks marks = Marks::kAuto;
  uint32_t mark_every = 32;      // commands of one queue; 1: after each
  uint32_t settle_us = 30;       // after a queue's last command, until the watcher marks it unasked
  uint32_t max_in_flight = 300;  // commands given to the driver and not complete; up to 3 driver operations each; the
                                 // driver blocks at 1,021 launches (H200, driver 580)
  uint64_t slab_bytes = 64ull << 20;         // device memory is mapped in pieces of at least this, where there is room
  uint64_t max_handle_bytes = 1ull << 30;    // and of at most this
  uint64_t idle_floor_bytes = 256ull << 20;  // mapped memory without allocations that is kept
  uint64_t staging_bytes = 4ull << 20;       // of one piece of a staged copy
  // Of the watcher: how long it spins for a queue that somebody waits for, sleeps at most, stays awake.
  uint32_t spin_us = 20, nap_us = 50, linger_us = 1000;
  uint32_t stop_wait_ms = 10'000;  // for running commands at the end of a space
  // The pinned window is registered with the driver: copies go straight, kernels see it, and the client keeps the pages
  // of what it frees, since a registration would go on pointing at them. Off until it was seen working on a device.
  bool register_host_window = false;
  std::string folder;          // of the server's libraries, where executors are
  bool host_executor = false;  // tests over a driver that executes on host memory: the executor for the host, in stream
                               // order. On a GPU it would touch memory that this process does not have
  bool capture_output = false;  // this process's stdout is for what kernels print (output.h)

  // DEVPROXY_CUDA_TUNE, for measurements: NAME=NUMBER,... with the names settle_us, mark_every, max_in_flight, spin_us,
  // nap_us, linger_us, staging_bytes, slab_bytes. kInvalidValue for anything else.
  Status tune(const std::string& words);
};

// kNoDevice, kNotSupported: the text says what is missing and what to do.
StatusOr<std::unique_ptr<Device>> make_device(const CudaConfig& config);

}  // namespace devproxy::hal::cuda
