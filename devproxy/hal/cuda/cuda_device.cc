// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/cuda_device.h"

#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/random.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>
#include <utility>

#include "devproxy/csrc/base/log.h"
#include "devproxy/hal/basic_device.h"
#include "devproxy/hal/cuda/comm_receiver.h"
#include "devproxy/hal/cuda/cuda_pages.h"
#include "devproxy/hal/cuda/cuda_space.h"
#include "devproxy/hal/cuda/output.h"
#include "devproxy/hal/host_module/descriptor.h"
#include "devproxy/hal/host_module/host_module.h"
#include "devproxy/hal/links/links.h"

namespace devproxy::hal::cuda {

namespace {

// Features that the device has and devproxy refuses: a program that asks must not be led into the refusal.
constexpr CUdevice_attribute kMasked[] = {
    CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1,
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1,
    CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH,
    CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
    CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
    CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS,
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
    CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
};

uint64_t process_number() {
  static const uint64_t number = [] {
    uint64_t random = 0;
    while (random == 0 && getrandom(&random, sizeof random, 0) != sizeof random) {}
    return random;
  }();
  return number;
}

uint64_t number_of(const std::array<uint8_t, 16>& uuid) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const uint8_t byte : uuid) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

// Which network interface has that address? "" where none has.
std::string interface_of(const std::string& address) {
  auto wanted = parse_address(address, 0);
  ifaddrs* all = nullptr;
  if (!wanted.ok() || getifaddrs(&all) != 0) return "";
  std::string name;
  for (const ifaddrs* one = all; one && name.empty(); one = one->ifa_next) {
    if (!one->ifa_addr || one->ifa_addr->sa_family != wanted->address.ss_family) continue;
    const bool v4 = wanted->address.ss_family == AF_INET;
    const auto raw = [v4](const void* at) {
      return v4 ? std::string(reinterpret_cast<const char*>(&static_cast<const sockaddr_in*>(at)->sin_addr), 4)
                : std::string(reinterpret_cast<const char*>(&static_cast<const sockaddr_in6*>(at)->sin6_addr), 16);
    };
    if (raw(one->ifa_addr) == raw(&wanted->address)) name = one->ifa_name;
  }
  freeifaddrs(all);
  return name;
}

class CudaDevice final : public BasicDevice {
 public:
  CudaDevice(const CudaConfig& config, std::shared_ptr<const Driver> driver)
      : config_(config), driver_(std::move(driver)) {
    config_.standing = standing_;
    config_.process = process_number();
  }

  Status init() {
    const Driver& cu = *driver_;
    const std::string gpu = "GPU " + std::to_string(config_.ordinal);
    Status s = cu.status(cu.cuInit(0), cu.cuInit, "starting the driver " + cu.path());
    if (!s.ok()) return s;
    int count = 0;
    if (s = cu.status(cu.cuDeviceGetCount(&count), cu.cuDeviceGetCount, "counting GPUs"); !s.ok()) return s;
    if (static_cast<int64_t>(config_.ordinal) >= count)
      return {kInvalidDevice,
              gpu + " does not exist: the driver shows " + std::to_string(count) + " (CUDA_VISIBLE_DEVICES)"};
    if (s = cu.status(cu.cuDeviceGet(&device_, static_cast<int>(config_.ordinal)), cu.cuDeviceGet, gpu); !s.ok())
      return s;

    Properties& p = properties_;
    char name[256] = "";
    if (s = cu.status(cu.cuDeviceGetName(name, sizeof name - 1, device_), cu.cuDeviceGetName, gpu); !s.ok()) return s;
    p.name = name;
    CUuuid uuid{};
    if (s = cu.status(cu.cuDeviceGetUuid(&uuid, device_), cu.cuDeviceGetUuid, gpu); !s.ok()) return s;
    static_assert(sizeof uuid.bytes == sizeof p.uuid);
    std::memcpy(p.uuid.data(), uuid.bytes, sizeof uuid.bytes);
    config_.number = number_of(p.uuid);
    size_t total = 0;
    if (s = cu.status(cu.cuDeviceTotalMem(&total, device_), cu.cuDeviceTotalMem, gpu); !s.ok()) return s;
    p.total_bytes = config_.memory_bytes ? std::min<uint64_t>(config_.memory_bytes, total) : total;
    // An attribute that this driver does not know stays 0, which is what "no" is for all of them.
    for (size_t i = 1; i < p.attributes.size(); i++)
      (void)cu.cuDeviceGetAttribute(&p.attributes[i], static_cast<CUdevice_attribute>(i), device_);
    auto attribute = [&](CUdevice_attribute which) { return p.attributes[static_cast<size_t>(which)]; };
    p.major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    p.minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    p.pci_domain = attribute(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
    p.pci_bus = attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
    p.pci_device = attribute(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
    if (!attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) ||
        !attribute(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING))
      return {kNotSupported, gpu + " (" + p.name +
                                 ") has no virtual memory management; devproxy needs it for addresses "
                                 "that survive a migration"};
    if (config_.marks == Marks::kAuto)
      config_.marks =
          attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS) ? Marks::kWriteValue : Marks::kEvents;
    can_register_ = attribute(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED) &&
                    attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
    config_.register_host_window = config_.register_host_window && can_register_;
    if (!config_.register_host_window) p.attributes[CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY] = 0;
    // devproxy's own managed memory, which is mapped host memory and not the driver's.
    const bool mapped = p.attributes[CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY] != 0;
    for (CUdevice_attribute which : {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS})
      p.attributes[static_cast<size_t>(which)] = mapped;
    for (CUdevice_attribute which : kMasked) p.attributes[static_cast<size_t>(which)] = 0;
    return {};
  }

  // cuda.h: after an execution fault every call of the context fails, also one that copies from it.
  Caps caps() const override {
    return {.level = 3,
            .kernels_see_host_window = config_.register_host_window,
            .keeps_host_pages = config_.register_host_window,
            .reads_after_fault = false,
            .shares = true,
            .trees_apart = true,
            .wants_awaited = true,
            .splices = config_.sharing && config_.sharing->splicing};
  }
  const Properties& properties() const override { return properties_; }
  // One thread per description is enough for ever: a framework stays loaded. It is detached because it may be inside a
  // library's constructors when the server leaves, by _exit.
  void warm(std::vector<uint8_t> description) override {
    if (std::exchange(warmed_, true) || !names_executor(description.data(), description.size())) return;
    std::thread([config = executors(), description = std::move(description)] {
      const auto began = std::chrono::steady_clock::now();
      const Status s = HostModule::warm(description.data(), description.size(), config);
      const auto ms =
          std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - began).count();
      DP_LOG(kInfo, kDevice, 0, "warmed: ms=%lld %s", static_cast<long long>(ms), s.ok() ? "ok" : s.text().c_str());
    }).detach();
  }
  Status load_ahead(const std::vector<uint8_t>& description) override {
    if (!names_executor(description.data(), description.size())) return {};
    return HostModule::warm(description.data(), description.size(), executors());
  }
  StatusOr<std::unique_ptr<Space>> open_space(const SpaceConfig& config, SpaceOwner& owner) override {
    return CudaSpace::open(config_, driver_, device_, config, owner);
  }
  StatusOr<uint16_t> open_transport(const TransportConfig& config) override {
    if (config.encrypts) return Status(kNotSupported, "--encrypt-data: NCCL carries the data, and does not encrypt it");
    if (const std::string name = interface_of(config.address); !name.empty())
      setenv("NCCL_SOCKET_IFNAME", ("=" + name).c_str(), 0);
    auto links = Links::open(config, 0, CommReceiver::maker(config.folder));
    if (!links.ok()) return std::move(links).status();
    config_.links = std::move(*links);
    return config_.links->port();
  }
  void park_transport() override { standing_->stands.store(true, std::memory_order_release); }
  void resume_transport() override {
    standing_->resumes.fetch_add(1);
    standing_->stands.store(false, std::memory_order_release);
  }
  void leave_transport() override {
    if (config_.links) config_.links->leave();
  }
  void take_over_transport() override {
    if (config_.links) config_.links->take_over();
    standing_->goes_on.store(true, std::memory_order_release);
  }
  TransportMarks mark_transport(uint64_t number) override {
    return config_.links ? config_.links->mark(number) : TransportMarks{};
  }
  const char* running_here() const noexcept override { return t_inside; }

 private:
  HostModuleConfig executors() const {
    HostModuleConfig config;
    config.on_cuda = !config_.host_executor;
    config.folder = config_.folder;
    return config;
  }

  CudaConfig config_;
  const std::shared_ptr<Standing> standing_ = std::make_shared<Standing>();
  const std::shared_ptr<const Driver> driver_;
  CUdevice device_ = 0;
  bool can_register_ = false;
  bool warmed_ = false;  // the server's thread
  Properties properties_;
};

}  // namespace

Status CudaConfig::tune(const std::string& words) {
  const std::pair<const char*, uint32_t*> small[] = {
      {"settle_us", &settle_us}, {"mark_every", &mark_every}, {"max_in_flight", &max_in_flight},
      {"spin_us", &spin_us},     {"nap_us", &nap_us},         {"linger_us", &linger_us}};
  const std::pair<const char*, uint64_t*> large[] = {{"staging_bytes", &staging_bytes}, {"slab_bytes", &slab_bytes}};
  std::istringstream list(words);
  for (std::string word; std::getline(list, word, ',');) {
    const std::string name = word.substr(0, word.find('='));
    const std::string digits = name.size() < word.size() ? word.substr(name.size() + 1) : "";
    const bool number = !digits.empty() && digits.size() < 10 && digits.find_first_not_of("0123456789") == digits.npos;
    bool known = false;
    for (const auto& [its, value] : small)
      if (name == its && number) *value = static_cast<uint32_t>(std::stoul(digits)), known = true;
    for (const auto& [its, value] : large)
      if (name == its && number) *value = std::stoul(digits), known = true;
    if (!known) return {kInvalidValue, "'" + word + "' is no NAME=NUMBER of those in hal/cuda/cuda_device.h"};
  }
  if (mark_every && max_in_flight && slab_bytes && staging_bytes && staging_bytes % 4096 == 0) return {};
  return {kInvalidValue, "mark_every, max_in_flight and slab_bytes must be above 0, staging_bytes a multiple of 4096"};
}

StatusOr<std::unique_ptr<Device>> make_device(const CudaConfig& config) {
  // cuda.h and the CUDA C++ Programming Guide (environment variables): streams beyond that number of connections wait for one
  // another, and several ranks have many streams, some of which wait for other GPUs. Before the driver is opened.
  if (config.shared) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  auto driver = Driver::open(config.driver_path);
  if (!driver.ok()) return std::move(driver).status();
  if (config.capture_output) static_cast<void>(Output::capture());  // without it nothing but their text is lost
  auto device = std::make_unique<CudaDevice>(config, *driver);
  if (Status s = device->init(); !s.ok()) return s;
  if (config.splicing.on && config.sharing && !config.sharing->splicing)
    config.sharing->splicing = std::make_shared<splice::Splicer>(config.splicing, std::make_unique<CudaPages>());
  return std::unique_ptr<Device>(std::move(device));
}

}  // namespace devproxy::hal::cuda
