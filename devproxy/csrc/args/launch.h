// SPDX-License-Identifier: Apache-2.0
// What a launch may carry besides its shape and parameters.
#pragma once

#include <cstdint>

namespace devproxy {

// One launch attribute: a number of CUlaunchAttributeID and the vendor's value, verbatim. 80 bytes, so that the
// parameters behind a list of them stay 16-byte aligned.
struct LaunchAttribute {
  uint32_t id = 0, reserved[3] = {};
  uint8_t value[64] = {};
};
static_assert(sizeof(LaunchAttribute) == 80);

inline constexpr uint32_t kMaxLaunchAttributes = 32;

// The numbers of cuda.h that travel. One that is not here is refused by the client, by name.
enum LaunchAttributeId : uint32_t {
  kLaunchAccessPolicyWindow = 1,
  kLaunchCooperative = 2,
  kLaunchSynchronizationPolicy = 3,
  kLaunchClusterDimension = 4,
  kLaunchClusterScheduling = 5,
  kLaunchProgrammaticSerialization = 6,
  kLaunchPriority = 8,
  kLaunchMemSyncDomainMap = 9,
  kLaunchMemSyncDomain = 10,
  kLaunchPreferredClusterDimension = 11,
  kLaunchSharedMemoryCarveout = 14,
  kLaunchNvlinkCentricScheduling = 16,
};

// What OCCUPANCY asks.
enum class OccupancyKind : uint32_t {
  kActiveBlocks,     // of block_x threads and shared_bytes, on one multiprocessor
  kAvailableShared,  // dynamic shared bytes for each of grid_x blocks of block_x threads on one multiprocessor
  kActiveClusters,   // of a launch with these attributes, on the device
  kMaxClusterSize,   // blocks of one cluster of such a launch
};
inline constexpr uint32_t kOccupancyKinds = 4;

}  // namespace devproxy
