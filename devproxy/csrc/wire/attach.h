// SPDX-License-Identifier: Apache-2.0
// What client and server say over the unix socket DEVPROXY_JOB_DIR/gpu<K>.sock. Fixed structs, one each way.
//
// Attach: the client connects, says hello, is answered, maps the files, opens the link, says kLinked, and closes the
// socket: a job's process holds no socket to a server, because a process with a socket to the outside could not be
// dumped. The link is a FIFO in the job folder that no byte ever travels through: the client holds its write end, the
// server its read end. The client sees POLLERR when no server is left, the server POLLHUP when its client is gone.
// A socket that hangs up before kLinked is a client that went in the middle.
#pragma once

#include <cstdint>

namespace devproxy {

inline constexpr uint32_t kAttachMagic = 0x41505044;  // "DPPA"

// kStats: the answer is a uint32_t length and JSON text. kControl: the socket stays open, and each request and each
// answer is a uint32_t length and JSON text (server/control.h); the request's abi_id and slot are not looked at.
//
// kFramework: a client whose kernels are a framework's, run by the framework in the server (hal/host_module). On a
// device where that matters, its memory and streams belong to the context that the framework uses, which the server's
// processes share. A kind and not a field, so that the struct is that of the servers in older images.
//
// kWarm: no client; a uint32_t length and a description of an executor follow at once, which the process is likely to
// ask for. There is no answer.
// kTrace: what the clients' streams have done since the last such request (server/trace.h), and that it goes on being
// recorded for kTraceKeptS. Two answers behind their uint32_t lengths: JSON text, then the events as they are.
// kPeer: another server of the job asks for the device memory of the client in wanted_slot. The answer is a byte, 1 with
// a descriptor (SCM_RIGHTS) or 0 where there is no such client. The socket stays open until the client is gone.
// kFacts: no client. The answer is AttachReply with the device's properties and no names. Programs look at all GPUs of a job and
// use one, and there are kMaxSlots attachments for all of them.
enum class AttachKind : uint32_t {
  kClient = 1,
  kStats = 2,
  kControl = 3,
  kFramework = 4,
  kWarm = 5,
  kPeer = 6,
  kTrace = 7,
  kFacts = 8
};
inline constexpr uint32_t kMaxWarmBytes = 64 << 10;
inline constexpr uint32_t kTraceKeptS = 5;

inline constexpr uint8_t kLinked = 1;  // the client's last byte on the socket

struct AttachRequest {
  uint32_t magic;
  AttachKind kind;
  uint8_t abi_id[32];    // hash of wire.lock; both sides must be the same build of the protocol
  uint32_t pid;          // as the client sees itself; information only, SO_PEERCRED decides
  uint32_t wanted_slot;  // 0xffffffff: any; else the slot that the restored process already lives in
};

// The device remembers pages of the pinned window: the client must not give freed ones back to the machine.
inline constexpr uint32_t kKeepsHostPages = 1;

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
  // Names in the job's folder, mode 0600. Not paths: the job sees the folder at another place than the server.
  char segment_name[64];
  char pinned_name[64];  // the pinned window's file, kPinnedBytes long, sparse
  char link_name[64];    // the FIFO
  uint32_t slot;
  uint32_t flags;  // kKeepsHostPages
  DeviceProps props;
};

}  // namespace devproxy
