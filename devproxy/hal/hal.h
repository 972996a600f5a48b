// SPDX-License-Identifier: Apache-2.0
// What devproxy asks of a device. The server talks to this; hal/soft, hal/cuda and hal/record implement it.
//
// A Device is one GPU of one server. A Space is one client process on it (space.h, and a header for each subject).
// A HAL knows no connection, ring or replica: it gets tickets (numbers that only grow) and says when they are done.
//
// Level 1 runs a job. Level 2 adds what a checkpoint needs, level 3 what several ranks on one GPU need. caps() says how
// far a device goes; nobody guesses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/owner.h"
#include "devproxy/hal/space.h"

namespace devproxy::hal {

struct Caps {
  int level = 1;  // 1 run, 2 dump and restore, 3 splice
  bool kernels_see_host_window = false;
  bool keeps_host_pages = false;  // it remembers pages of the window: freed ones must not be given back to the machine
  bool reads_after_fault = true;  // level 2: what an execution fault leaves can still be read
  bool takes_back = false;        // pending.h
  bool shares = false;            // several of the job's GPUs may be on one (sharing.h)
  bool trees_apart = false;       // servers of two of the job's trees cannot be on one GPU
  bool wants_awaited = false;     // SpaceQueues::awaited makes it tell sooner that commands have completed
  bool splices = false;           // replica splicing is on (sharing.h)
};

struct Properties {
  std::string name;
  std::array<uint8_t, 16> uuid{};
  uint64_t total_bytes = 0;
  int32_t major = 0, minor = 0;
  int32_t pci_domain = 0, pci_bus = 0, pci_device = 0;
  std::array<int32_t, 256> attributes{};  // by CUdevice_attribute
};

struct SpaceConfig {
  uint64_t device_base = 0, device_bytes = 0;  // where device memory appears, page aligned
  uint64_t host_base = 0, host_bytes = 0;      // the pinned window, mapped by the caller at this address
  bool framework = false;  // for a process whose kernels a framework runs in this one (hal/host_module)
};

// Which servers of other trees there is a connection to, and whose mark has come (Device::mark_transport).
struct TransportMarks {
  uint64_t server = 0;  // this one; 0: it has no transport
  std::vector<uint64_t> to, from;
};

// The way to the servers of the job's other process trees, on other hosts.
struct TransportConfig {
  std::string folder;          // the job's; the file `trees` in it says who the others are
  uint32_t tree = 0, gpu = 0;  // of this server
  std::string address;         // where it listens: an IPv4 or IPv6 address
  bool encrypts = false;       // what the servers say to each other; the file `trees` has the key then
};

// A device derives from BasicDevice (basic_device.h), one that wraps another from ForwardingDevice (forwarding_device.h). Here
// nothing has a body, so that neither can leave a function out.
class Device {
 public:
  virtual ~Device() = default;
  virtual Caps caps() const = 0;
  virtual const Properties& properties() const = 0;
  // A process is likely to load this description of an executor: a good moment to begin, on a thread of the device's
  // own. What is wrong with it is said when it is loaded.
  virtual void warm(std::vector<uint8_t> description) = 0;
  // The same, done when it returns: a successor's predecessor has loaded it. What describes no executor is none of it.
  virtual Status load_ahead(const std::vector<uint8_t>& description) = 0;
  // Any thread.
  virtual StatusOr<std::unique_ptr<Space>> open_space(const SpaceConfig& config, SpaceOwner& owner) = 0;
  // Communicators reach beyond this tree from now on. Returns the port where the others reach this server. Before the
  // first space is opened.
  virtual StatusOr<uint16_t> open_transport(const TransportConfig& config) = 0;
  // The job is at a cut: nothing is submitted before resume_transport(), or ever. Members in other trees may be replaced.
  virtual void park_transport() = 0;
  virtual void resume_transport() = 0;
  // This server's end is planned, and its spaces go on elsewhere: the others wait for them.
  virtual void leave_transport() = 0;
  // Spaces of another server go on in this one from now on, and in that one never again.
  virtual void take_over_transport() = 0;
  // Sends a mark behind everything that this server has sent to others, once for each number (not 0). When all servers
  // have the marks of all that have a connection to them, what was sent before has come.
  virtual TransportMarks mark_transport(uint64_t number) = 0;
  // What the calling thread executes, for the text of a crash: nullptr where nothing. Async-signal-safe.
  virtual const char* running_here() const noexcept = 0;
};

}  // namespace devproxy::hal
