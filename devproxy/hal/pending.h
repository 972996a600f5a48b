// SPDX-License-Identifier: Apache-2.0
// What a space has submitted and not begun, for a cut in the middle of a collective: a member that waits for another one
// has begun nothing yet, so its operation can be taken back, with all that waits behind it, and submitted again elsewhere.
//
// An operation of a communicator begins when all of its members have come to it. A space that withholds comes to none:
// it says nothing new to other members, and takes nothing that one of them sends. So once the spaces of all members
// withhold, each operation either has begun at all of them, and then it completes, or at none, and then it stays as it
// was until they let go.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/array.h"
#include "devproxy/hal/comm.h"
#include "devproxy/hal/command.h"
#include "devproxy/hal/object.h"

namespace devproxy::hal {

// That command of a queue.
struct CommandPlace {
  uint32_t queue_index = 0;
  uint64_t position = 0;
};

struct PendingCommand {
  enum class Kind : uint8_t {
    kNop,
    kCopy,
    kCopyArray,
    kMemset,
    kLaunch,
    kRecord,
    kHostFunction,
    kInitComm,
    kCommunicate,
  };
  Kind kind = Kind::kNop;
  uint32_t queue_index = 0;
  Ticket ticket;
  std::vector<CommandPlace> needs;  // pending commands of other queues that it waits for
  // By kind
  CopyArgs copy;
  ArrayCopy array_copy;
  MemsetArgs memset;
  FunctionRef function;
  LaunchArgs launch;  // params: good until the space goes on; without attributes
  uint64_t token = 0;
  std::vector<CommCall> calls;   // those of the group that have not begun; of kInitComm one, without an operation
  std::vector<EventRef> events;  // of kRecord: those whose latest record this is
};

class SpacePending {
 public:
  // Any thread. On: nothing of a communicator begins here any more, and no host function; what has begun goes on. False:
  // somebody is about to begin something; ask again. It does not wait for them, since they may wait for this server.
  virtual bool withhold(bool on) = 0;
  // The next two while the spaces of all members withhold. Can nothing that is pending go on until they let go?
  virtual bool stands() = 0;
  // A hint, at any time: does all that is pending wait for somebody else?
  virtual bool stuck() = 0;
  // Is a host function of the client running?
  virtual bool in_host_function() = 0;
  // Precondition of the next two: stands(). In an order in which they may be submitted again.
  virtual StatusOr<std::vector<PendingCommand>> pending_commands() = 0;
  // The command that records the event; none where it is not pending.
  virtual std::optional<CommandPlace> pending_record(const EventRef& event) = 0;
  // To a space that withholds and has no other commands; its queues are there.
  virtual Status submit_pending(const PendingCommand& command) = 0;

 protected:
  ~SpacePending() = default;
};

}  // namespace devproxy::hal
