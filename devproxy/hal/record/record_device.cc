#include "devproxy/hal/record/record_device.h"

#include <unistd.h>

#include <atomic>
#include <utility>

#include "devproxy/hal/record/record_space.h"
#include "devproxy/hal/soft/soft_device.h"

namespace devproxy::hal::record {

namespace {

constexpr image::Arch kArch{9, 0, '\0'};

class RecordDevice final : public Device {
 public:
  RecordDevice(const RecordConfig& config, std::unique_ptr<Recorder> recorder)
      : soft_(soft::make_device({config.ordinal, config.memory_bytes, config.chaos, config.chaos_seed, {}})),
        recorder_(std::move(recorder)) {
    properties_ = soft_->properties();
    properties_.name = "devproxy recording GPU";
    properties_.uuid[0] ^= 0xff;  // not the software GPU of this number
    properties_.major = static_cast<int32_t>(kArch.major);
    properties_.minor = static_cast<int32_t>(kArch.minor);
    // What a program of such a chip plans with; CUdevice_attribute numbers of cuda.h 13.0, values of an H100 SXM as
    // NVIDIA's documents and its deviceQuery say them. What is not here is the software GPU's: so nothing that devproxy
    // refuses (IPC, multicast, sparse arrays) is claimed.
    const struct {
      int number, value;
    } kAttributes[] = {
        {13, 1980000},                    // CLOCK_RATE, kHz
        {16, 132},                        // MULTIPROCESSOR_COUNT
        {36, 2619000},                    // MEMORY_CLOCK_RATE, kHz
        {37, 5120},                       // GLOBAL_MEMORY_BUS_WIDTH, bits
        {38, 50 << 20},                   // L2_CACHE_SIZE
        {40, 3},                          // ASYNC_ENGINE_COUNT
        {75, properties_.major},          // COMPUTE_CAPABILITY_MAJOR
        {76, properties_.minor},          // COMPUTE_CAPABILITY_MINOR
        {81, 233472},                     // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        {87, 2},                          // SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO
        {90, 1},                          // COMPUTE_PREEMPTION_SUPPORTED
        {kSharedOptinAttribute, 232448},  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        {120, 1},                         // CLUSTER_LAUNCH
    };
    for (const auto& a : kAttributes) properties_.attributes[static_cast<size_t>(a.number)] = a.value;
    recorder_->line("start", [&](Line& line) {
      line.add("pid", static_cast<uint64_t>(getpid())).add("device", properties_.name).add("arch", kArch.text("sm_"));
    });
    recorder_->flush();
  }

  Caps caps() const override { return soft_->caps(); }
  const Properties& properties() const override { return properties_; }
  StatusOr<std::unique_ptr<Space>> open_space(const SpaceConfig& config, SpaceOwner& owner) override {
    auto inner = soft_->open_space(config, owner);
    if (!inner.ok()) return std::move(inner).status();
    return std::unique_ptr<Space>(
        std::make_unique<RecordSpace>(std::move(*inner), owner, kArch, properties_, *recorder_, ++spaces_));
  }
  const char* running_here() const noexcept override { return soft_->running_here(); }

 private:
  const std::unique_ptr<Device> soft_;
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
