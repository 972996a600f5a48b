// What client and server say over the unix socket DEVPROXY_JOB_DIR/gpu<K>.sock. Fixed structs, one each way.
//
// The socket stays open as the liveness link: when it hangs up, the other side is gone. Everything else travels in
// the segment.
#pragma once

#include <cstdint>

namespace devproxy {

inline constexpr uint32_t kAttachMagic = 0x41505044;  // "DPPA"

enum class AttachKind : uint32_t { kClient = 1, kStats = 2 };  // kStats: the answer is a uint32_t length and JSON text

struct AttachRequest {
  uint32_t magic;
  AttachKind kind;
  uint8_t abi_id[32];    // hash of wire.lock; both sides must be the same build of the protocol
  uint32_t pid;          // as the client sees itself; information only, SO_PEERCRED decides
  uint32_t wanted_slot;  // 0xffffffff: any; else the slot that the restored process already lives in
};

enum class AttachStatus : uint32_t { kOk = 0, kAbiDiffers = 1, kNoSlot = 2, kNoMemory = 3, kRefused = 4 };

// Facts of the device that the client answers without a message.
struct DeviceProps {
  char name[128];
  uint8_t uuid[16];
  uint64_t total_bytes;
  int32_t major, minor;
  int32_t pci_domain, pci_bus, pci_device;
  int32_t attributes[256];  // by CUdevice_attribute; 0 where unknown
};

struct AttachReply {
  uint32_t magic;
  AttachStatus status;
  char text[256];  // why not, for the user
  uint8_t abi_id[32];
  char segment_path[256];  // mode 0600, in the job's folder
  char pinned_path[256];   // the pinned window's file, kPinnedBytes long, sparse
  uint32_t slot;
  uint32_t reserved;
  DeviceProps props;
};

}  // namespace devproxy
