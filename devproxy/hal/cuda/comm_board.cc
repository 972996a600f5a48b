// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/comm_board.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <iterator>
#include <utility>

namespace devproxy::hal::cuda {

namespace {

constexpr uint32_t kMagic = 0x4e505044;  // "DPPN"

constexpr size_t kRowsAt = (sizeof(CommBoardHead) + 63) / 64 * 64;

size_t answers_at(uint32_t ranks) { return kRowsAt + ranks * sizeof(CommRow); }
size_t board_bytes(uint32_t ranks) { return answers_at(ranks) + ranks * sizeof(uint64_t); }

constexpr BoardKind kKind{"nccl-", kMagic, board_bytes};

bool is_final(Gone how) { return how != Gone::kNot && how != Gone::kMoving; }

}  // namespace

CommBoard::CommBoard(std::string path, void* at, size_t bytes, uint32_t ranks)
    : path_(std::move(path)),
      at_(at),
      bytes_(bytes),
      ranks_(ranks),
      head_(static_cast<CommBoardHead*>(at)),
      rows_(reinterpret_cast<CommRow*>(static_cast<uint8_t*>(at) + kRowsAt)),
      answered_(reinterpret_cast<std::atomic<uint64_t>*>(static_cast<uint8_t*>(at) + answers_at(ranks))) {}

CommBoard::~CommBoard() { munmap(at_, bytes_); }

StatusOr<std::unique_ptr<CommBoard>> CommBoard::made(const std::string& path, StatusOr<MappedBoard> mapped) {
  if (!mapped.ok()) return std::move(mapped).status();
  return std::unique_ptr<CommBoard>(new CommBoard(path, mapped->at, mapped->bytes, mapped->ranks));
}

StatusOr<std::unique_ptr<CommBoard>> CommBoard::open(const std::string& folder, const CommKey& key, uint32_t ranks) {
  const std::string path = board_path(folder, kKind, key);
  const struct {
    uint32_t magic, ranks;
    uint64_t generation;
  } head{kMagic, ranks, 1};
  static_assert(offsetof(CommBoardHead, generation) == 8);
  return made(path, open_board(path, kKind, ranks, &head, sizeof head));
}

StatusOr<std::unique_ptr<CommBoard>> CommBoard::find(const std::string& folder, const CommKey& key, uint32_t ranks) {
  const std::string path = board_path(folder, kKind, key);
  return made(path, map_board(path, kKind, ranks));
}

void CommBoard::each(const std::string& folder, const std::function<void(CommBoard&)>& look) {
  each_board(folder, kKind, [&](const std::string& path) {
    auto board = made(path, map_board(path, kKind, 0));
    if (board.ok()) look(**board);
  });
}

bool CommBoard::is(const std::string& folder, const CommKey& key) const {
  return path_ == board_path(folder, kKind, key);
}

void CommBoard::remove() const { unlink(path_.c_str()); }

uint64_t CommBoard::set() const {
  uint64_t set = 0xcbf29ce484222325;
  const auto mix = [&set](uint64_t x) {  // SplitMix64's
    x = set ^ (x + 0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    set = x ^ (x >> 31);
  };
  for (uint32_t rank = 0; rank < ranks_; rank++) {
    mix(rows_[rank].incarnation.load(std::memory_order_acquire));
    mix(rows_[rank].version.load());
  }
  return set | 1;
}

// -- members of this tree -------------------------------------------------------------------------------------------

StatusOr<CommBoard::Taken> CommBoard::take_row(uint32_t rank, uint64_t incarnation, const CommSeat& seat) {
  CommRow& row = rows_[rank];
  const SpacePlace& place = seat.place;
  const uint64_t before = row.incarnation.load(std::memory_order_acquire);
  if (before == incarnation) return Status(kInvalidValue, "this process is this rank already");
  if (before != 0 && (row.gpu != place.gpu || row.slot != place.slot || row.tree != place.tree))
    return Status(kInvalidValue, "two processes say that they are this rank: on GPU " + std::to_string(row.gpu) +
                                     " and on GPU " + std::to_string(place.gpu));
  row.gpu = place.gpu;
  row.slot = place.slot;
  row.tree = place.tree;
  row.process = seat.process;
  row.device = seat.device;
  row.teller = 0;
  row.pid = getpid();
  const uint64_t version = row.version.fetch_add(1) + 1;
  mark(rank, Gone::kNot);
  row.incarnation.store(incarnation, std::memory_order_release);
  if (before != 0) new_generation();
  return Taken{before != 0, version};
}

void CommBoard::mark(uint32_t rank, Gone how) {
  const Gone before = rows_[rank].gone.exchange(how);
  if (is_final(before) == is_final(how)) return;
  const uint32_t gone = is_final(how) ? head_->gone.fetch_add(1) + 1 : head_->gone.fetch_sub(1) - 1;
  if (gone == ranks_) remove();
}

// -- of other trees -------------------------------------------------------------------------------------------------

Status CommBoard::told_row(uint32_t rank, uint64_t incarnation, uint64_t version, const CommSeat& seat,
                           uint64_t teller) {
  CommRow& row = rows_[rank];
  const SpacePlace& place = seat.place;
  const uint64_t before = row.incarnation.load(std::memory_order_acquire);
  if (before != 0 && (row.teller == 0 || row.gpu != place.gpu || row.slot != place.slot || row.tree != place.tree)) {
    head_->twice = rank + 1;
    return {kInvalidValue, "another process has that rank"};
  }
  const uint64_t known = row.version.load();
  if (before != 0 && version < known) return {};
  row.gpu = place.gpu;
  row.slot = place.slot;
  row.tree = place.tree;
  row.process = seat.process;
  row.device = seat.device;
  row.teller = teller;
  row.pid = 0;
  row.version.store(version);
  row.incarnation.store(incarnation, std::memory_order_release);
  if (before != 0 && (version != known || before != incarnation)) new_generation();
  mark(rank, Gone::kNot);
  return {};
}

void CommBoard::teller_ended(uint64_t teller, bool planned) {
  bool changed = false;
  for (uint32_t rank = 0; rank < ranks_; rank++) {
    CommRow& row = rows_[rank];
    if (row.incarnation.load(std::memory_order_acquire) == 0 || row.teller != teller || is_final(row.gone)) continue;
    if (planned && !std::exchange(changed, true)) new_generation();
    mark(rank, planned ? Gone::kMoving : Gone::kServer);
  }
}

// -- the id ---------------------------------------------------------------------------------------------------------

void CommBoard::put_id(uint64_t set, const char (&id)[128]) {
  head_->id_set.store(0, std::memory_order_seq_cst);
  for (size_t i = 0; i < std::size(head_->id); i++) {
    uint64_t word;
    std::memcpy(&word, id + 8 * i, sizeof word);
    head_->id[i].store(word, std::memory_order_seq_cst);
  }
  head_->id_set.store(set, std::memory_order_seq_cst);
}

bool CommBoard::get_id(uint64_t set, char (&id)[128]) const {
  if (head_->id_set.load(std::memory_order_seq_cst) != set) return false;
  for (size_t i = 0; i < std::size(head_->id); i++) {
    const uint64_t word = head_->id[i].load(std::memory_order_seq_cst);
    std::memcpy(id + 8 * i, &word, sizeof word);
  }
  return head_->id_set.load(std::memory_order_seq_cst) == set;
}

}  // namespace devproxy::hal::cuda
