#include "devproxy/hal/soft/soft_device.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "devproxy/hal/soft/soft_space.h"

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

class SoftDevice final : public Device {
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
    // CUdevice_attribute numbers of cuda.h 13.0, with the end of the name that the number has there.
    const struct {
      int number, value;
    } kAttributes[] = {
        {1, 1024},         // MAX_THREADS_PER_BLOCK
        {2, 1024},         // MAX_BLOCK_DIM_X
        {3, 1024},         // MAX_BLOCK_DIM_Y
        {4, 64},           // MAX_BLOCK_DIM_Z
        {5, 0x7fffffff},   // MAX_GRID_DIM_X
        {6, 65535},        // MAX_GRID_DIM_Y
        {7, 65535},        // MAX_GRID_DIM_Z
        {8, 49152},        // MAX_SHARED_MEMORY_PER_BLOCK
        {9, 65536},        // TOTAL_CONSTANT_MEMORY
        {10, 32},          // WARP_SIZE
        {11, 0x7fffffff},  // MAX_PITCH
        {12, 65536},       // MAX_REGISTERS_PER_BLOCK
        {13, 1000000},     // CLOCK_RATE, kHz
        {14, 512},         // TEXTURE_ALIGNMENT
        {15, 1},           // GPU_OVERLAP
        {16, cpus},        // MULTIPROCESSOR_COUNT
        {17, 0},           // KERNEL_EXEC_TIMEOUT
        {18, 0},           // INTEGRATED
        {19, 1},           // CAN_MAP_HOST_MEMORY
        {20, 0},           // COMPUTE_MODE: default
        {30, 512},         // SURFACE_ALIGNMENT
        {31, 1},           // CONCURRENT_KERNELS
        {32, 0},           // ECC_ENABLED
        {33, p.pci_bus},   // PCI_BUS_ID
        {34, 0},           // PCI_DEVICE_ID
        {35, 0},           // TCC_DRIVER
        {36, 1000000},     // MEMORY_CLOCK_RATE, kHz
        {37, 128},         // GLOBAL_MEMORY_BUS_WIDTH, bits
        {38, 4 << 20},     // L2_CACHE_SIZE
        {39, 2048},        // MAX_THREADS_PER_MULTIPROCESSOR
        {40, 2},           // ASYNC_ENGINE_COUNT
        {41, 1},           // UNIFIED_ADDRESSING
        {50, 0},           // PCI_DOMAIN_ID
        {51, 32},          // TEXTURE_PITCH_ALIGNMENT
        {75, p.major},     // COMPUTE_CAPABILITY_MAJOR
        {76, p.minor},     // COMPUTE_CAPABILITY_MINOR
        {78, 1},           // STREAM_PRIORITIES_SUPPORTED
        {79, 1},           // GLOBAL_L1_CACHE_SUPPORTED
        {80, 1},           // LOCAL_L1_CACHE_SUPPORTED
        {81, 167936},      // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        {82, 65536},       // MAX_REGISTERS_PER_MULTIPROCESSOR
        {83, 1},           // MANAGED_MEMORY
        {84, 0},           // MULTI_GPU_BOARD
        {85, 0},           // MULTI_GPU_BOARD_GROUP_ID
        {86, 0},           // HOST_NATIVE_ATOMIC_SUPPORTED
        {87, 1},           // SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO
        {88, 0},           // PAGEABLE_MEMORY_ACCESS
        {89, 1},           // CONCURRENT_MANAGED_ACCESS
        {90, 0},           // COMPUTE_PREEMPTION_SUPPORTED
        {91, 1},           // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        {95, 1},           // COOPERATIVE_LAUNCH
        {96, 0},           // COOPERATIVE_MULTI_DEVICE_LAUNCH
        {97, 101376},      // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        {98, 0},           // CAN_FLUSH_REMOTE_WRITES
        {99, 1},           // HOST_REGISTER_SUPPORTED
        {100, 0},          // PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
        {101, 0},          // DIRECT_MANAGED_MEM_ACCESS_FROM_HOST
        {102, 1},          // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        {106, 32},         // MAX_BLOCKS_PER_MULTIPROCESSOR
        {108, 0},          // MAX_PERSISTING_L2_CACHE_SIZE
        {111, 1024},       // RESERVED_SHARED_MEMORY_PER_BLOCK
        {113, 0},          // READ_ONLY_HOST_REGISTER_SUPPORTED
        {115, 1},          // MEMORY_POOLS_SUPPORTED
    };
    for (const auto& a : kAttributes) p.attributes[static_cast<size_t>(a.number)] = a.value;
  }

  Caps caps() const override { return {3, true, true, false, true}; }
  const Properties& properties() const override { return properties_; }
  StatusOr<std::unique_ptr<Space>> open_space(const SpaceConfig& config, SpaceOwner& owner) override {
    return SoftSpace::open(config_, config, owner);
  }
  const char* running_here() const noexcept override { return soft::running_here(); }

 private:
  const SoftConfig config_;
  Properties properties_;
};

}  // namespace

std::unique_ptr<Device> make_device(const SoftConfig& config) { return std::make_unique<SoftDevice>(config); }

}  // namespace devproxy::hal::soft
