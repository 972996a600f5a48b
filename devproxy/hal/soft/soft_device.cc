// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/soft_device.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "cuda_number.gen.h"
#include "devproxy/hal/basic_device.h"
#include "devproxy/hal/host_module/descriptor.h"
#include "devproxy/hal/host_module/host_module.h"
#include "devproxy/hal/links/links.h"
#include "devproxy/hal/sharing.h"
#include "devproxy/hal/soft/comm/board_receiver.h"
#include "devproxy/hal/soft/soft_pages.h"
#include "devproxy/hal/soft/soft_space.h"
#include "devproxy/hal/splice/splicer.h"

namespace devproxy::hal::soft {

namespace {

// A number that names this GPU of this host, the same after a restart of the server.
std::array<uint8_t, 16> make_uuid(uint32_t ordinal) {
  char text[128] = "devproxy-soft-gpu ";
  if (FILE* file = std::fopen("/etc/machine-id", "re")) {
    if (!std::fgets(text + std::strlen(text), 64, file)) text[0] = 'D';
    std::fclose(file);
  } else {
    gethostname(text + std::strlen(text), 64);
  }
  text[sizeof text - 1] = 0;
  std::array<uint8_t, 16> uuid{};
  uint64_t hash = 0xcbf29ce484222325 + ordinal;  // FNV-1a, run on for the second half
  for (size_t half = 0; half < 2; half++) {
    for (const char* c = text; *c; c++) hash = (hash ^ static_cast<uint8_t>(*c)) * 0x100000001b3;
    hash = (hash ^ ordinal) * 0x100000001b3;
    std::memcpy(uuid.data() + half * 8, &hash, 8);
  }
  return uuid;
}

class SoftDevice final : public BasicDevice {
 public:
  explicit SoftDevice(const SoftConfig& config) : config_(config) {
    Properties& p = properties_;
    p.name = "devproxy Software GPU";
    p.uuid = make_uuid(config.ordinal);
    p.total_bytes = config.memory_bytes;
    p.major = 8;
    p.minor = 0;
    p.pci_bus = static_cast<int32_t>(config.ordinal) + 1;
    const auto cpus = static_cast<int32_t>(sysconf(_SC_NPROCESSORS_ONLN));
    using namespace cuda_number;
    const struct {
      int number, value;
    } kAttributes[] = {
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 0x7fffffff},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
        {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 0x7fffffff},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1000000},  // kHz
        {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
        {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, cpus},
        {CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT, 0},
        {CU_DEVICE_ATTRIBUTE_INTEGRATED, 0},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 0},  // default
        {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
        {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 0},
        {CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, p.pci_bus},
        {CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0},
        {CU_DEVICE_ATTRIBUTE_TCC_DRIVER, 0},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 1000000},    // kHz
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 128},  // bits
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 4 << 20},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0},
        {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, p.major},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, p.minor},
        {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 167936},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD, 0},
        {CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID, 0},
        {CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED, 0},
        {CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 1},
        {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 0},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 0},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
        {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
        {CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH, 0},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 101376},
        {CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 0},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES, 0},
        {CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST, 0},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE, 0},
        {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 0},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    };
    for (const auto& a : kAttributes) p.attributes[static_cast<size_t>(a.number)] = a.value;
  }

  Caps caps() const override {
    return {.level = 3,
            .kernels_see_host_window = true,
            .takes_back = true,
            .shares = true,
            .splices = config_.sharing && config_.sharing->splicing};
  }
  const Properties& properties() const override { return properties_; }
  Status load_ahead(const std::vector<uint8_t>& description) override {
    if (!names_executor(description.data(), description.size())) return {};
    HostModuleConfig config;
    config.folder = config_.folder;
    return HostModule::warm(description.data(), description.size(), config);
  }
  StatusOr<std::unique_ptr<Space>> open_space(const SpaceConfig& config, SpaceOwner& owner) override {
    SoftConfig device = config_;
    device.links = links_.get();
    return SoftSpace::open(device, config, owner);
  }
  StatusOr<uint16_t> open_transport(const TransportConfig& config) override {
    auto links = Links::open(config, config_.chaos ? config_.chaos_seed + 1 : 0, BoardReceiver::maker(config.folder));
    if (!links.ok()) return std::move(links).status();
    links_ = std::move(*links);
    return links_->port();
  }
  void leave_transport() override {
    if (links_) links_->leave();
  }
  void take_over_transport() override {
    if (links_) links_->take_over();
  }
  TransportMarks mark_transport(uint64_t number) override { return links_ ? links_->mark(number) : TransportMarks{}; }
  const char* running_here() const noexcept override { return soft::running_here(); }

 private:
  const SoftConfig config_;
  Properties properties_;
  std::unique_ptr<Links> links_;
};

}  // namespace

std::unique_ptr<Device> make_device(const SoftConfig& config) {
  if (config.splicing.on && config.sharing && !config.sharing->splicing) {
    auto pages = SoftPages::open(&config.sharing->engine);  // else the ranks only take turns
    if (pages.ok()) config.sharing->splicing = std::make_shared<splice::Splicer>(config.splicing, std::move(*pages));
  }
  return std::make_unique<SoftDevice>(config);
}

}  // namespace devproxy::hal::soft
