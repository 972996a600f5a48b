// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/devices.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "devproxy/csrc/base/log.h"
#include "devproxy/hal/soft/soft_device.h"
#ifndef DEVPROXY_ONLY_SOFT
#include "devproxy/hal/cuda/cuda_device.h"
#include "devproxy/hal/record/record_device.h"
#endif

namespace devproxy::hal {

namespace {

// Of one of the job's GPUs that shares a real one: the driver's limit may be the context's, which is one.
constexpr uint32_t kLeastInFlight = 64;

// Where the executors are: beside this program, or, where that is a special build of it, in the libraries' folder.
std::string library_folder() {
  char path[4096];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
  const std::string program(path, n > 0 ? static_cast<size_t>(n) : 0);
  const std::string beside = program.substr(0, program.rfind('/'));
  const char* const named = std::getenv("DEVPROXY_LIB");
  return named && access((beside + "/libcuda.so.1").c_str(), F_OK) != 0 ? named : beside;
}

Status read_splicing(splice::SpliceConfig* to) {
  const char* const words = std::getenv("DEVPROXY_SPLICING");
  if (!words) return {};
  auto splicing = splice::SpliceConfig::parse(words);
  if (!splicing.ok()) return std::move(splicing).status().with("DEVPROXY_SPLICING");
  *to = *splicing;
  return {};
}

}  // namespace

StatusOr<std::unique_ptr<Device>> open_device(const DeviceConfig& config) {
  if (config.kind == "soft") {
    if (!config.memory_bytes) return Status(kInvalidValue, "a software GPU needs a memory size above 0");
    soft::SoftConfig soft{config.ordinal, config.memory_bytes, config.chaos, config.chaos_seed, library_folder()};
    soft.sharing = config.sharing;
    if (Status s = read_splicing(&soft.splicing); !s.ok()) return s;
    soft.seat = config.seat;
    return soft::make_device(soft);
  }
#ifndef DEVPROXY_ONLY_SOFT
  if (config.kind == "record") {
    if (!config.memory_bytes) return Status(kInvalidValue, "a recording GPU needs a memory size above 0");
    const char* named = std::getenv("DEVPROXY_RECORD");
    std::string path = named ? named : "";
    if (path.ends_with(".gpu")) path += std::to_string(config.seat);  // a job with several GPUs (config.record_path)
    return record::make_device({config.ordinal, config.memory_bytes, config.chaos, config.chaos_seed, path});
  }
  if (config.chaos) return Status(kInvalidValue, "chaos mode needs the software GPU");
  if (config.kind == "cuda") {
    cuda::CudaConfig cuda;
    cuda.ordinal = config.ordinal;
    cuda.memory_bytes = config.memory_bytes;
    cuda.capture_output = true;
    cuda.folder = library_folder();
    if (const char* which = std::getenv("DEVPROXY_CUDA_EXECUTOR")) cuda.host_executor = std::string(which) == "host";
    if (const char* on = std::getenv("DEVPROXY_CUDA_REGISTER_WINDOW")) cuda.register_host_window = on[0] == '1';
    cuda.collectives = config.collectives;
    cuda.shared = config.sharing != nullptr;
    cuda.sharing = config.sharing;
    if (Status s = read_splicing(&cuda.splicing); !s.ok()) return s;
    // Who moves a page waits for what the GPU has, and that must not wait for another server, where somebody may do the same.
    if (cuda.splicing.on && config.sharing && !config.together) {
      DP_LOG(kWarn, kDevice, 0, "nothing is spliced: not all of the job's ranks are on this GPU");
      cuda.splicing.on = false;
    }
    if (cuda.shared) cuda.max_in_flight = std::max(kLeastInFlight, cuda.max_in_flight / config.sharing->seats);
    if (const char* path = std::getenv("DEVPROXY_CUDA_DRIVER")) cuda.driver_path = path;
    if (const char* path = std::getenv("DEVPROXY_NCCL")) cuda.nccl_path = path;
    if (const char* order = std::getenv("DEVPROXY_REDUCTION")) {
      cuda.tree_order = std::string(order) == "tree";
      if (!cuda.tree_order && std::string(order) != "nccl")
        return Status(kInvalidValue, "DEVPROXY_REDUCTION: '" + std::string(order) + "' is neither nccl nor tree");
    }
    if (const char* words = std::getenv("DEVPROXY_CUDA_TUNE"))
      if (Status s = cuda.tune(words); !s.ok()) return std::move(s).with("DEVPROXY_CUDA_TUNE");
    return cuda::make_device(cuda);
  }
#endif
  return Status(kInvalidDevice, "device '" + config.kind + "' is not built into this server");
}

}  // namespace devproxy::hal
