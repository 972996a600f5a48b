// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/record/record_device.h"

#include <unistd.h>

#include <atomic>
#include <utility>

#include "devproxy/hal/forwarding_device.h"
#include "devproxy/hal/record/record_space.h"
#include "devproxy/hal/soft/soft_device.h"

namespace devproxy::hal::record {

namespace {

constexpr image::Arch kArch{9, 0, '\0'};

class RecordDevice final : public ForwardingDevice {
 public:
  RecordDevice(const RecordConfig& config, std::unique_ptr<Recorder> recorder)
      : ForwardingDevice(soft::make_device({config.ordinal, config.memory_bytes, config.chaos, config.chaos_seed, {}})),
        recorder_(std::move(recorder)) {
    properties_ = inner().properties();
    properties_.name = "devproxy recording GPU";
    properties_.uuid[0] ^= 0xff;  // not the software GPU of this number
    properties_.major = static_cast<int32_t>(kArch.major);
    properties_.minor = static_cast<int32_t>(kArch.minor);
    using namespace cuda_number;
    // What a program of such a chip plans with; values of an H100 SXM as NVIDIA's documents and its deviceQuery say
    // them. What is not here is the software GPU's: so nothing that devproxy refuses (IPC, multicast, sparse arrays) is
    // claimed.
    const struct {
      int number, value;
    } kAttributes[] = {
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},  // kHz
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},     // kHz
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},  // bits
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 << 20},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, properties_.major},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, properties_.minor},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
        {CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
        {CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 1},
    };
    for (const auto& a : kAttributes) properties_.attributes[static_cast<size_t>(a.number)] = a.value;
    recorder_->line("start", [&](Line& line) {
      line.add("pid", static_cast<uint64_t>(getpid())).add("device", properties_.name).add("arch", kArch.text("sm_"));
    });
    recorder_->flush();
  }

  Caps caps() const override {
    Caps caps = ForwardingDevice::caps();
    caps.takes_back = false;  // its launches are no commands of the inner space
    return caps;
  }
  const Properties& properties() const override { return properties_; }
  StatusOr<std::unique_ptr<Space>> open_space(const SpaceConfig& config, SpaceOwner& owner) override {
    auto soft = inner().open_space(config, owner);
    if (!soft.ok()) return std::move(soft).status();
    return std::unique_ptr<Space>(
        std::make_unique<RecordSpace>(std::move(*soft), owner, kArch, properties_, *recorder_, ++spaces_));
  }
  // It executes no kernel, so it loads nothing that would.
  void warm(std::vector<uint8_t>) override {}
  Status load_ahead(const std::vector<uint8_t>&) override { return {}; }

 private:
  const std::unique_ptr<Recorder> recorder_;
  Properties properties_;
  std::atomic<uint32_t> spaces_{0};
};

}  // namespace

StatusOr<std::unique_ptr<Device>> make_device(const RecordConfig& config) {
  auto recorder = Recorder::open(config.path);
  if (!recorder.ok()) return std::move(recorder).status();
  return std::unique_ptr<Device>(std::make_unique<RecordDevice>(config, std::move(*recorder)));
}

}  // namespace devproxy::hal::record
