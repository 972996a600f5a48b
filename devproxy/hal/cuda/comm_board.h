// SPDX-License-Identifier: Apache-2.0
// What the members of a communicator tell one another beside NCCL: one file in the job's folder, mapped by every server
// that has a member.
//
// A communicator of NCCL is tied to the processes that made it. The job's outlives them: a server is replaced by a migrate
// or a restore, and NCCL's is made again. `generation` counts who has come in somebody's place. It changes only while the
// job stands at a cut, where nothing of the communicator is under way, and a member compares it before each operation and
// now and then in between. A member whose NCCL is of another generation makes a new one, with the id that rank 0 has put
// here for this generation. So all of them come, also those that have nothing to do.
//
// Order: the id's bytes are written before `id_generation` (release), and read behind it (acquire) and once more compared
// with it: who reads half of two ids reads again.
//
// A job's process could write to this file, so nothing in it is trusted: it holds no addresses and no lengths, and a wrong
// id fails in NCCL.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "devproxy/csrc/args/comm.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/owner.h"

namespace devproxy::hal::cuda {

// How a member is, if not there.
enum class Gone : uint32_t {
  kNot = 0,
  kLeft,  // the job has destroyed it
  kDied,  // its process has ended without
};

struct CommRow {
  alignas(64) std::atomic<uint64_t> incarnation;  // of its space; 0: it has not come. Written last
  std::atomic<uint32_t> gpu, slot, tree;
  std::atomic<int32_t> pid;  // of its server
  std::atomic<Gone> gone;
};

struct CommBoardHead {
  uint32_t magic, ranks;
  std::atomic<uint64_t> generation;     // 1: of those who came first
  std::atomic<uint64_t> id_generation;  // which one `id` is for; 0: there is none, or it is just being written
  std::atomic<uint32_t> gone;           // members
  std::atomic<uint64_t> id[16];
};

class CommBoard {
 public:
  // Made by whoever comes first. kInvalidValue: the members do not agree how many they are.
  static StatusOr<std::unique_ptr<CommBoard>> open(const std::string& folder, const CommKey& key, uint32_t ranks);
  ~CommBoard();
  CommBoard(const CommBoard&) = delete;
  CommBoard& operator=(const CommBoard&) = delete;

  CommRow& row(uint32_t rank) { return rows_[rank]; }
  uint64_t generation() const { return head_->generation.load(std::memory_order_acquire); }
  // Takes a rank's row. True: from another server, which may still go on. kInvalidValue where another process has it.
  StatusOr<bool> take_row(uint32_t rank, uint64_t incarnation, const SpacePlace& place);
  // Is it ours still?
  bool has_row(uint32_t rank, uint64_t incarnation) const {
    return rows_[rank].incarnation.load(std::memory_order_acquire) == incarnation;
  }
  // The last of all members removes the file.
  void leave(uint32_t rank, Gone how);
  void put_id(uint64_t generation, const char (&id)[128]);
  bool get_id(uint64_t generation, char (&id)[128]) const;
  bool has_id(uint64_t generation) const { return head_->id_generation.load() == generation; }

 private:
  CommBoard(std::string path, void* at, size_t bytes, uint32_t ranks);

  const std::string path_;
  void* const at_;
  const size_t bytes_;
  const uint32_t ranks_;
  CommBoardHead* const head_;
  CommRow* const rows_;
};

}  // namespace devproxy::hal::cuda
