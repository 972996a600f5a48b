// SPDX-License-Identifier: Apache-2.0
// What the members of a communicator tell one another beside NCCL: one file in the job's folder, mapped by every server
// that has a member.
//
// A communicator of NCCL is tied to the processes that made it. The job's outlives them: a server is replaced by a migrate
// or a restore, and NCCL's is made again. `generation` counts who has come in somebody's place. It changes only while the
// job stands at a cut, where nothing of the communicator is under way (of other trees: see below), and a member compares it
// before each operation and now and then in between. A member whose NCCL is of another generation makes a new one. So all of them come, also those
// that have nothing to do.
//
// Several trees. Each tree has a board of its own, and rows of members of other trees are written by receivers
// (comm_receiver.h). Generations are a board's own numbers; what all trees agree on is the *set*: a number of all members'
// incarnations, and how often each row was taken. Rank 0 makes NCCL's id for a set, and it is found under that number. So
// members that do not know the same rows never make a communicator together.
//
// News of another tree may be late, and a communicator that is there must not be used when a member of another tree has been
// replaced. That happens only while all stand at a cut. So a member that goes on behind a cut uses none before every member of
// another tree has answered: it *asks* with a number of its tree's board, and they answer when they go on themselves (by
// `resume_transport`, hal.h), behind what they had to tell.
//
// Order: the id's bytes are written before `id_set` (release), and read behind it (acquire) and once more compared
// with it: who reads half of two ids reads again. A row's incarnation is written last, and `generation` grows behind it: who
// has read rows compares the generation before it believes them.
//
// A job's process could write to this file, so nothing in it is trusted: it holds no addresses and no lengths, and a wrong
// id fails in NCCL.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "devproxy/csrc/args/comm.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/board_file.h"
#include "devproxy/hal/links/frame.h"
#include "devproxy/hal/owner.h"

namespace devproxy::hal::cuda {

// How a member is, if not there.
enum class Gone : uint32_t {
  kNot = 0,
  kLeft,    // the job has destroyed it
  kDied,    // its process has ended without
  kServer,  // of another tree: the connection with its server has ended, as when it dies
  kMoving,  // of another tree: it is told again from another server, or was meant to be
};

struct CommRow {
  alignas(64) std::atomic<uint64_t> incarnation;  // of its space; 0: it has not come. Written last
  std::atomic<uint64_t> version;                  // how often it was taken
  std::atomic<uint64_t> process;                  // of its server, a random number
  std::atomic<uint64_t> device;                   // a number of its GPU's uuid
  std::atomic<uint64_t> teller;                   // of another tree: the connection that told of it; 0: of this tree
  std::atomic<uint32_t> gpu, slot, tree;
  std::atomic<int32_t> pid;  // of its server; 0: in another tree
  std::atomic<Gone> gone;
};
static_assert(sizeof(CommRow) == 64);

struct CommBoardHead {
  uint32_t magic, ranks;
  std::atomic<uint64_t> generation;   // 1: of those who came first
  std::atomic<uint64_t> id_set;       // which one `id` is for; 0: there is none, or it is just being written
  std::atomic<uint32_t> gone;         // members that do not come back
  std::atomic<uint32_t> twice;        // 1 + a rank that processes of two trees say they are
  std::atomic<uint32_t> other_ranks;  // how many members another tree says that there are, where that is another number
  std::atomic<uint64_t> id[16];
  std::atomic<uint64_t> asks;              // of this tree's members, so far
  std::atomic<uint64_t> asked[kMaxTrees];  // by another tree: its last ask
};

// Where a member is, as its row says.
struct CommSeat {
  SpacePlace place;
  uint64_t process = 0, device = 0;
};

class CommBoard {
 public:
  // Made by whoever comes first. kInvalidValue: the members do not agree how many they are.
  static StatusOr<std::unique_ptr<CommBoard>> open(const std::string& folder, const CommKey& key, uint32_t ranks);
  // kNotFound where there is none.
  static StatusOr<std::unique_ptr<CommBoard>> find(const std::string& folder, const CommKey& key, uint32_t ranks);
  // Every board in the folder.
  static void each(const std::string& folder, const std::function<void(CommBoard&)>& look);
  ~CommBoard();
  CommBoard(const CommBoard&) = delete;
  CommBoard& operator=(const CommBoard&) = delete;

  uint32_t ranks() const { return ranks_; }
  CommBoardHead& head() { return *head_; }
  CommRow& row(uint32_t rank) { return rows_[rank]; }
  const CommRow& row(uint32_t rank) const { return rows_[rank]; }
  uint64_t generation() const { return head_->generation.load(std::memory_order_acquire); }
  bool is(const std::string& folder, const CommKey& key) const;
  // Has the member come, and is it where its row says?
  bool is_there(uint32_t rank) const {
    return rows_[rank].incarnation.load(std::memory_order_acquire) != 0 && rows_[rank].gone.load() != Gone::kMoving;
  }
  // Of all rows as they are. Precondition: all members are there, and the generation is compared afterwards.
  uint64_t set() const;

  // The last ask of this tree that the member of another one has answered.
  std::atomic<uint64_t>& answered(uint32_t rank) { return answered_[rank]; }

  // -- members of this tree
  struct Taken {
    bool from_another;  // server, which may still go on
    uint64_t version;
  };
  // Takes a rank's row. kInvalidValue where another process has it.
  StatusOr<Taken> take_row(uint32_t rank, uint64_t incarnation, const CommSeat& seat);
  // Is it ours still?
  bool has_row(uint32_t rank, uint64_t incarnation) const {
    return rows_[rank].incarnation.load(std::memory_order_acquire) == incarnation;
  }
  // The last of all members removes the file. kNot: it is there again.
  void mark(uint32_t rank, Gone how);

  // -- of other trees
  // What was told of a member; nothing where that is older than what is known. kInvalidValue where a process of another
  // place has that rank.
  Status told_row(uint32_t rank, uint64_t incarnation, uint64_t version, const CommSeat& seat, uint64_t teller);
  // The connection has ended, and with it all that it told of. planned: its members come again elsewhere.
  void teller_ended(uint64_t teller, bool planned);
  void remove() const;

  void put_id(uint64_t set, const char (&id)[128]);
  bool get_id(uint64_t set, char (&id)[128]) const;
  bool has_id(uint64_t set) const { return head_->id_set.load() == set; }

 private:
  CommBoard(std::string path, void* at, size_t bytes, uint32_t ranks);
  static StatusOr<std::unique_ptr<CommBoard>> made(const std::string& path, StatusOr<MappedBoard> mapped);
  void new_generation() { head_->generation.fetch_add(1, std::memory_order_acq_rel); }

  const std::string path_;
  void* const at_;
  const size_t bytes_;
  const uint32_t ranks_;
  CommBoardHead* const head_;
  CommRow* const rows_;
  std::atomic<uint64_t>* const answered_;  // by rank
};

}  // namespace devproxy::hal::cuda
