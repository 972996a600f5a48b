// SPDX-License-Identifier: Apache-2.0
// NVML for the job: how many GPUs there are and what they are called, from the driver shim of the same process.
//
// nvmlInit and nvmlDeviceGetCount do not call cuInit: torch.cuda.device_count() asks NVML just so that a process may
// fork before it touches the device.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nvml_decl.gen.h"

namespace devproxy::sa::nvml {
namespace {

// Numbers of nvmlReturn_t and sizes of nvml.h that are used here.
enum : nvmlReturn_t {
  kSuccess = 0,
  kUninitialized = 1,
  kInvalidArgument = 2,
  kNotSupported = 3,
  kNotFound = 6,
  kInsufficientSize = 7,
  kDriverNotLoaded = 9,
  kVersionMismatch = 25,
  kUnknown = 999,
};

// The vendor's driver branch for toolkit 13.0: monitoring tools compare numbers.
constexpr char kDriverVersion[] = "580.00";
constexpr char kNvmlVersion[] = "13.580.00";
constexpr unsigned kMaxDevices = 64;

std::atomic<int> g_users{0};

// nvmlDevice_t is opaque: the address of the device's place in this array.
char g_devices[kMaxDevices];

// A function of the driver shim, which was preloaded; a program without it may still have one by its SONAME.
void* driver_symbol(const char* name) {
  if (void* found = dlsym(RTLD_DEFAULT, name)) return found;
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return library != nullptr ? dlsym(library, name) : nullptr;
}

// Calls a driver function; the driver's result, -1 where there is no driver.
template <class... Args>
int driver(const char* name, Args... args) {
  auto* function = reinterpret_cast<int (*)(Args...)>(driver_symbol(name));
  return function != nullptr ? function(args...) : -1;
}

nvmlReturn_t from_driver(int result) {
  switch (result) {
    case 0: return kSuccess;
    case -1: return kDriverNotLoaded;
    case 1:
    case 101: return kInvalidArgument;
    case 100: return kNotFound;
    default: return kUnknown;
  }
}

nvmlReturn_t device_count(unsigned* count) {
  // devproxy-run says the number; asking the driver would attach this process to the servers.
  if (const char* text = std::getenv("DEVPROXY_GPUS")) {
    char* end = nullptr;
    const unsigned long number = std::strtoul(text, &end, 10);
    if (end != text && *end == '\0' && number <= kMaxDevices) {
      *count = static_cast<unsigned>(number);
      return kSuccess;
    }
  }
  int number = 0;
  int result = driver("cuInit", 0u);
  if (result == 0) result = driver("cuDeviceGetCount", &number);
  *count = result == 0 ? static_cast<unsigned>(number) : 0;
  return from_driver(result == 100 ? 0 : result);
}

// The driver's ordinal of a handle, after cuInit.
nvmlReturn_t ordinal_of(nvmlDevice_t device, int* ordinal) {
  if (g_users.load() == 0) return kUninitialized;
  const auto at = reinterpret_cast<uintptr_t>(device) - reinterpret_cast<uintptr_t>(g_devices);
  if (at >= kMaxDevices) return kInvalidArgument;
  *ordinal = static_cast<int>(at);
  return from_driver(driver("cuInit", 0u));
}

// Processes on the device, of which none is named: see the table.
nvmlReturn_t no_processes(nvmlDevice_t device, unsigned* count) {
  int ordinal = 0;
  if (const nvmlReturn_t bad = ordinal_of(device, &ordinal)) return bad;
  *count = 0;
  return kSuccess;
}

nvmlReturn_t copy_text(const char* text, char* out, unsigned length) {
  const size_t bytes = std::strlen(text) + 1;
  if (length < bytes) return kInsufficientSize;
  std::memcpy(out, text, bytes);
  return kSuccess;
}

// Where on the bus; nvml.h: "domain:bus:device.function", all hexadecimal, the domain may be left out.
struct Place {
  unsigned domain, bus, device;
};

bool parse_place(const char* text, Place* place) {
  unsigned function = 0;
  *place = {};
  if (std::sscanf(text, "%x:%x:%x.%x", &place->domain, &place->bus, &place->device, &function) >= 3) return true;
  place->domain = 0;
  return std::sscanf(text, "%x:%x.%x", &place->bus, &place->device, &function) >= 2;
}

nvmlReturn_t place_of(int ordinal, Place* place) {
  char text[64] = {};
  if (const nvmlReturn_t bad = from_driver(driver("cuDeviceGetPCIBusId", text, int{sizeof text}, ordinal))) return bad;
  return parse_place(text, place) ? kSuccess : kUnknown;
}

// The device for which `is` holds of its ordinal.
template <class Test>
nvmlReturn_t find_device(nvmlDevice_t* device, Test is) {
  if (g_users.load() == 0) return kUninitialized;
  if (const nvmlReturn_t bad = from_driver(driver("cuInit", 0u))) return bad;
  unsigned count = 0;
  if (const nvmlReturn_t bad = device_count(&count)) return bad;
  for (unsigned i = 0; i < count && i < kMaxDevices; ++i) {
    if (!is(static_cast<int>(i))) continue;
    *device = reinterpret_cast<nvmlDevice_t>(&g_devices[i]);
    return kSuccess;
  }
  return kNotFound;
}

nvmlReturn_t uuid_of(int ordinal, char (&text)[48]) {
  unsigned char bytes[16] = {};
  if (const nvmlReturn_t bad = from_driver(driver("cuDeviceGetUuid_v2", bytes, ordinal))) return bad;
  int at = std::snprintf(text, sizeof text, "GPU-");
  for (int i = 0; i < 16; ++i) {
    const char* dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
    at += std::snprintf(text + at, sizeof text - static_cast<size_t>(at), "%s%02x", dash, unsigned{bytes[i]});
  }
  return kSuccess;
}

// Free and total bytes, from the ledger that cuMemGetInfo reads.
nvmlReturn_t memory_of(nvmlDevice_t device, size_t* free_bytes, size_t* total_bytes) {
  int ordinal = 0;
  if (const nvmlReturn_t bad = ordinal_of(device, &ordinal)) return bad;
  void* context = nullptr;
  int result = driver("cuDevicePrimaryCtxRetain", &context, ordinal);
  if (result != 0) return from_driver(result);
  result = driver("cuCtxPushCurrent_v2", context);
  if (result == 0) {
    result = driver("cuMemGetInfo_v2", free_bytes, total_bytes);
    driver("cuCtxPopCurrent_v2", &context);
  }
  driver("cuDevicePrimaryCtxRelease_v2", ordinal);
  return from_driver(result);
}

// What a sensor of a software GPU shows.
nvmlReturn_t no_sensor(nvmlDevice_t device, unsigned* value) {
  if (g_users.load() == 0) return kUninitialized;
  const auto at = reinterpret_cast<uintptr_t>(device) - reinterpret_cast<uintptr_t>(g_devices);
  if (at >= kMaxDevices) return kInvalidArgument;
  const char* const kind = std::getenv("DEVPROXY_DEVICE");
  if (kind != nullptr && std::strcmp(kind, "soft") != 0) return kNotSupported;
  *value = 0;
  return kSuccess;
}

// How many percent of a few milliseconds this process had work on the device. It attaches to no server.
unsigned busy_percent(int ordinal) {
  constexpr int kLooks = 20;
  int busy = 0;
  for (int i = 0; i < kLooks; ++i) {
    if (i > 0) usleep(500);
    if (driver("devproxy_busy", ordinal) == 1) ++busy;
  }
  return static_cast<unsigned>(busy * 100 / kLooks);
}

}  // namespace

nvmlReturn_t nvmlInit_v2() { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlInitWithFlags(unsigned int) {
  if (driver_symbol("cuInit") == nullptr) return kDriverNotLoaded;
  g_users.fetch_add(1);
  return kSuccess;
}

nvmlReturn_t nvmlShutdown() {
  int users = g_users.load();
  while (users > 0) {
    if (g_users.compare_exchange_weak(users, users - 1)) return kSuccess;
  }
  return kUninitialized;
}

const char* nvmlErrorString(nvmlReturn_t result) {
  switch (result) {
    case kSuccess: return "Success";
    case kUninitialized: return "nvmlInit was not called";
    case kInvalidArgument: return "Invalid argument";
    case kNotSupported: return "Not supported under devproxy";
    case kNotFound: return "Not found";
    case kInsufficientSize: return "The buffer is too small";
    case kDriverNotLoaded: return "libcuda.so.1 is not loaded: start the program with devproxy-run";
    case kVersionMismatch: return "The struct's version field is not known";
    default: return "Unknown error";
  }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char* version, unsigned int length) {
  return g_users.load() == 0 ? kUninitialized : copy_text(kDriverVersion, version, length);
}

// Like the vendor's, these two work without nvmlInit.
nvmlReturn_t nvmlSystemGetNVMLVersion(char* version, unsigned int length) {
  return copy_text(kNvmlVersion, version, length);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int* cudaDriverVersion) {
  return from_driver(driver("cuDriverGetVersion", cudaDriverVersion));
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* cudaDriverVersion) {
  return from_driver(driver("cuDriverGetVersion", cudaDriverVersion));
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int* deviceCount) {
  return g_users.load() == 0 ? kUninitialized : device_count(deviceCount);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t* device) {
  if (g_users.load() == 0) return kUninitialized;
  unsigned count = 0;
  if (const nvmlReturn_t bad = device_count(&count)) return bad;
  if (index >= count || index >= kMaxDevices) return kInvalidArgument;
  *device = reinterpret_cast<nvmlDevice_t>(&g_devices[index]);
  return kSuccess;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int* index) {
  if (g_users.load() == 0) return kUninitialized;
  const auto at = reinterpret_cast<uintptr_t>(device) - reinterpret_cast<uintptr_t>(g_devices);
  if (at >= kMaxDevices) return kInvalidArgument;
  *index = static_cast<unsigned>(at);
  return kSuccess;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* name, unsigned int length) {
  int ordinal = 0;
  if (const nvmlReturn_t bad = ordinal_of(device, &ordinal)) return bad;
  char text[256] = {};
  if (const nvmlReturn_t bad = from_driver(driver("cuDeviceGetName", text, int{sizeof text}, ordinal))) return bad;
  return copy_text(text, name, length);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* uuid, unsigned int length) {
  int ordinal = 0;
  if (const nvmlReturn_t bad = ordinal_of(device, &ordinal)) return bad;
  char text[48];
  if (const nvmlReturn_t bad = uuid_of(ordinal, text)) return bad;
  return copy_text(text, uuid, length);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  return find_device(device, [uuid](int ordinal) {
    char text[48];
    return uuid_of(ordinal, text) == kSuccess && std::strcmp(text, uuid) == 0;
  });
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* pciBusId, nvmlDevice_t* device) {
  Place wanted;
  if (!parse_place(pciBusId, &wanted)) return kInvalidArgument;
  return find_device(device, [wanted](int ordinal) {
    Place place;
    return place_of(ordinal, &place) == kSuccess && place.domain == wanted.domain && place.bus == wanted.bus &&
           place.device == wanted.device;
  });
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t* pci) {
  int ordinal = 0;
  if (const nvmlReturn_t bad = ordinal_of(device, &ordinal)) return bad;
  Place place;
  if (const nvmlReturn_t bad = place_of(ordinal, &place)) return bad;
  *pci = {};  // vendor and device numbers are not known here
  pci->domain = place.domain, pci->bus = place.bus, pci->device = place.device;
  std::snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04x:%02x:%02x.0", place.domain & 0xffff, place.bus & 0xff,
                place.device & 0xff);
  std::snprintf(pci->busId, sizeof pci->busId, "%08x:%02x:%02x.0", place.domain, place.bus & 0xff, place.device & 0xff);
  return kSuccess;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int* infoCount, nvmlProcessInfo_v1_t*) {
  return no_processes(device, infoCount);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int* infoCount,
                                                     nvmlProcessInfo_v2_t*) {
  return no_processes(device, infoCount);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int* infoCount, nvmlProcessInfo_t*) {
  return no_processes(device, infoCount);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  size_t free_bytes = 0, total_bytes = 0;
  if (const nvmlReturn_t bad = memory_of(device, &free_bytes, &total_bytes)) return bad;
  *memory = {.total = total_bytes, .free = free_bytes, .used = total_bytes - free_bytes};
  return kSuccess;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t* memory) {
  // nvml.h: a versioned struct says its own size, and its version in the top byte.
  constexpr unsigned kVersion = sizeof(nvmlMemory_v2_t) | 2u << 24;
  if (memory->version != kVersion) return kVersionMismatch;
  size_t free_bytes = 0, total_bytes = 0;
  if (const nvmlReturn_t bad = memory_of(device, &free_bytes, &total_bytes)) return bad;
  *memory = {
      .version = kVersion, .total = total_bytes, .reserved = 0, .free = free_bytes, .used = total_bytes - free_bytes};
  return kSuccess;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t* utilization) {
  int ordinal = 0;
  if (const nvmlReturn_t bad = ordinal_of(device, &ordinal)) return bad;
  // Before memory_of, which waits for the server.
  const unsigned busy = busy_percent(ordinal);
  size_t free_bytes = 0, total_bytes = 0;
  if (const nvmlReturn_t bad = memory_of(device, &free_bytes, &total_bytes)) return bad;
  const size_t used = total_bytes - free_bytes;
  *utilization = {.gpu = busy, .memory = total_bytes != 0 ? static_cast<unsigned>(used * 100 / total_bytes) : 0};
  return kSuccess;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int* clock) {
  int ordinal = 0;
  if (const nvmlReturn_t bad = ordinal_of(device, &ordinal)) return bad;
  // cuda.h: CU_DEVICE_ATTRIBUTE_CLOCK_RATE, _MEMORY_CLOCK_RATE, in kHz. nvml.h: NVML_CLOCK_MEM is 2, in MHz.
  constexpr int kClockRate = 13, kMemoryClockRate = 36, kClockMem = 2;
  int khz = 0;
  const int attribute = static_cast<int>(type) == kClockMem ? kMemoryClockRate : kClockRate;
  if (const nvmlReturn_t bad = from_driver(driver("cuDeviceGetAttribute", &khz, attribute, ordinal))) return bad;
  *clock = static_cast<unsigned>(khz / 1000);
  return kSuccess;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t, unsigned int* temp) {
  return no_sensor(device, temp);
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int* power) { return no_sensor(device, power); }

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int* major, int* minor) {
  int ordinal = 0;
  if (const nvmlReturn_t bad = ordinal_of(device, &ordinal)) return bad;
  return from_driver(driver("cuDeviceComputeCapability", major, minor, ordinal));
}

}  // namespace devproxy::sa::nvml
