// SPDX-License-Identifier: Apache-2.0
// The device and pinned memory of one client: what its allocator says is live, what it may allocate, and what its
// modules and arrays take beside that.
//
// The dispatch thread writes, the mirrors under mu_, and reads without (nobody else writes); device threads ask live(),
// under a shared lock. So the common case, a kernel that runs on the dispatch thread, takes no lock. The server thread
// reads while the client is parked, and the counters at any time. Locks: mu_ is a leaf.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/counters.h"
#include "devproxy/csrc/server/ledger.h"
#include "devproxy/csrc/server/live_trace.h"
#include "devproxy/csrc/server/memory_mirror.h"
#include "devproxy/csrc/server/state_files.h"
#include "devproxy/csrc/wire/handle.h"
#include "devproxy/csrc/wire/segment.h"
#include "devproxy/hal/queue.h"

namespace devproxy::server {

// A variable of a module that lies where the device put it: live memory outside of the client's range. given: the job
// was told the address, so it must be the same after a restore.
struct VariableObject {
  uint64_t bytes = 0;
  VHandle module;
  std::string name;
  bool given = false;
};

struct ClientRecord;
struct RangeRecord;

class ClientMemory {
 public:
  using Answer = MemoryMirror::Answer;
  static constexpr uint64_t kOwedStep = 32ull << 20;  // taken from the ledger at once

  ClientMemory(uint32_t slot, LedgerShare& ledger, LiveBytes& server, Counters& counters)
      : base_(range_base(slot)),
        device_(device_begin(), device_begin() + kDeviceBytes),
        pinned_(kRangeBase, range_base(kMaxSlots)),
        ledger_(ledger),
        server_(server),
        counters_(counters) {}

  uint64_t device_begin() const { return base_; }
  uint64_t globals_begin() const { return base_ + kDeviceBytes - kGlobalsBytes; }
  const MemoryMirror& device() const { return device_; }
  const MemoryMirror& pinned() const { return pinned_; }

  // Is [addr, addr + bytes) device memory that is live for a command at `position`?
  bool in_device(uint64_t addr, uint64_t bytes, uint64_t position) const {
    return device_.contains(addr, bytes, position) || in_variable(addr, bytes);
  }
  bool in_variable(uint64_t addr, uint64_t bytes) const;
  // Any thread; locked: not the dispatch thread.
  bool live(uint64_t addr, uint64_t bytes, uint64_t position, bool locked) const {
    auto inside = [&] { return device_.contains(addr, bytes, position) || pinned_.contains(addr, bytes, position); };
    if (!locked) return inside();
    std::shared_lock lock(mu_);
    return inside();
  }

  // -- the client's allocator, within its credit. most: what the device has left for it (hal::Space::room_bytes)
  std::optional<uint64_t> take_credit(uint64_t wanted, uint64_t minimum, uint64_t most);
  bool return_credit(uint64_t bytes);  // false: so much is not free
  // Before an allocation. False: it is not within the credit; or it is within what was unused at a checkpoint, and the
  // GPU of the restore has no room for it.
  bool use_credit(uint64_t bytes, uint64_t most = kOwedStep);
  // From now on the unused credit is taken from the ledger when it is used, as behind a checkpoint.
  void owe_unused();
  // Once after a restore in which credit was unused.
  bool restored_unused() { return std::exchange(restored_unused_, false); }
  uint64_t credit_bytes() const { return credit_bytes_; }
  // Of that, what the ledger knows of.
  uint64_t taken_bytes() const { return credit_bytes_ - owed_bytes_ - untaken_bytes_.load(); }
  // What use_credit() would take from the ledger.
  uint64_t missing_bytes(uint64_t bytes) const {
    const uint64_t unused = credit_bytes_ - client_bytes_;
    return owed_bytes_ == 0 || bytes > unused || bytes <= unused - owed_bytes_ ? 0 : bytes - (unused - owed_bytes_);
  }
  // Beside the credit: for a rank alone on the GPU, and as things are.
  uint64_t free_alone_bytes() const { return ledger_.free_bytes(); }
  uint64_t room_bytes(uint64_t most) const { return std::min(ledger_.room_bytes(), most); }
  // Of the GPU, beside the credit.
  uint64_t free_bytes(uint64_t most) const;
  uint64_t total_bytes() const { return ledger_.total_bytes(); }
  std::string other_holders() const { return ledger_.other_holders(); }
  // reused: as in MemoryMirror.
  [[nodiscard]] Answer allocate(uint64_t addr, uint64_t bytes, uint32_t flags, std::vector<Range>* reused);
  // keep, freed, forgotten: as in MemoryMirror. oldest_pending: 0, or what retires earlier ranges.
  [[nodiscard]] Answer free(uint64_t addr, uint64_t position, bool keep, uint64_t oldest_pending, Range* freed,
                            std::vector<Range>* forgotten);
  // Of what is allocated: freed by the program, and not told of one by one (DeviceState::keep). Told with an allocation or
  // a release, so it is right at that point of the order.
  void set_kept(uint64_t bytes) { kept_bytes_ = bytes; }
  // Does the client hold as little now as it ever does in its rhythm? What it keeps does count: an image would have it.
  bool at_trough() const { return trace_.at_trough(client_bytes_); }
  uint64_t trough_bytes() const { return trace_.trough_bytes(); }

  // -- beside the credit, from the ledger. False: there is no memory, or no room.
  uint64_t gap_for_global(uint64_t bytes, uint64_t align) const {
    return device_.first_gap(globals_begin(), globals_begin() + kGlobalsBytes - kMetaBytes, bytes, align);
  }
  bool add_global(uint64_t addr, uint64_t bytes);
  [[nodiscard]] Answer drop_global(uint64_t addr, uint64_t position, bool keep, Range* freed);
  bool take_array(uint64_t bytes);
  void give_array(uint64_t bytes);

  // -- pinned memory of all windows
  [[nodiscard]] Answer allocate_pinned(uint64_t addr, uint64_t bytes);
  [[nodiscard]] Answer free_pinned(uint64_t addr, uint64_t position, bool keep, uint64_t oldest_pending, Range* freed);

  // No command from before that position is under way any more. The freed device ranges that this forgets.
  std::vector<Range> retire(uint64_t oldest_pending);
  // The same, of what no pending command can touch.
  std::vector<Range> retire(const hal::PendingUse& use);
  // Nothing that was submitted can still use what was freed. The device ranges that this forgets.
  std::vector<Range> retire_all();

  // Variables of modules, by address.
  std::map<uint64_t, VariableObject>& variables() { return variables_; }

  // What a dump has of device memory, one behind the other in the file: live ranges in address order, variables, and
  // freed ranges that pending commands may use (but for those of modules that are gone).
  std::vector<Piece> pieces() const;
  // Into the record and back. restore() marks the ranges as live; whoever calls it
  // commits those of device(). Arrays and globals come with their objects.
  // shared: other ranks of the server have maybe the same in their stable ranges. So these get their memory as they are
  // filled, and what is found to be the same is given back before the next needs its own.
  void save(ClientRecord* client) const;
  Status restore(const ClientRecord& client, uint32_t physical_gpu, bool shared);
  // Before bytes of a stable range are filled. Any thread.
  Status take_stable(uint64_t bytes);
  // Do the objects that were made again take what they took?
  Status check_restored(const ClientRecord& client) const;
  // Where a saved variable lies now: the driver chose again; kernels find it by themselves, the job does not.
  Status place_variable(const RangeRecord& saved, uint64_t* addr);

  // Everything back into the ledger.
  void give_all();

 private:
  Status restore_freed(const ClientRecord& client);
  Status no_room(uint64_t needed) const;
  void count(int64_t change_bytes);
  void trace();

  const uint64_t base_;
  mutable std::shared_mutex mu_;
  MemoryMirror device_, pinned_;
  uint64_t credit_bytes_ = 0;               // granted to the client's allocator
  uint64_t client_bytes_ = 0;               // of that, allocated
  uint64_t kept_bytes_ = 0;                 // of that, as set_kept() says
  uint64_t owed_bytes_ = 0;                 // of the rest, not taken from the ledger: unused at a checkpoint
  std::atomic<uint64_t> untaken_bytes_{0};  // of credit_bytes_, in a restore: not taken from the ledger yet
  bool restored_unused_ = false;            // for restored_unused()
  uint64_t globals_bytes_ = 0;              // of modules, taken from the ledger beside the credit
  uint64_t arrays_bytes_ = 0;               // of arrays, likewise
  uint32_t physical_gpu_ = 0;               // for what is said
  std::map<uint64_t, VariableObject> variables_;
  LiveTrace trace_;
  LedgerShare& ledger_;
  LiveBytes& server_;
  Counters& counters_;
};

}  // namespace devproxy::server
