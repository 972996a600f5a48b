// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/comm_board.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <iterator>
#include <utility>

#include "devproxy/hal/board_file.h"

namespace devproxy::hal::cuda {

namespace {

constexpr uint32_t kMagic = 0x4e505044;  // "DPPN"

size_t board_bytes(uint32_t ranks) { return sizeof(CommRow) * (size_t{ranks} + (sizeof(CommBoardHead) + 63) / 64); }

constexpr BoardKind kKind{"nccl-", kMagic, board_bytes};

}  // namespace

static_assert(sizeof(CommRow) == 64);

CommBoard::CommBoard(std::string path, void* at, size_t bytes, uint32_t ranks)
    : path_(std::move(path)),
      at_(at),
      bytes_(bytes),
      ranks_(ranks),
      head_(static_cast<CommBoardHead*>(at)),
      rows_(reinterpret_cast<CommRow*>(static_cast<uint8_t*>(at) + bytes - ranks * sizeof(CommRow))) {}

CommBoard::~CommBoard() { munmap(at_, bytes_); }

StatusOr<std::unique_ptr<CommBoard>> CommBoard::open(const std::string& folder, const CommKey& key, uint32_t ranks) {
  const std::string path = board_path(folder, kKind, key);
  const struct {
    uint32_t magic, ranks;
    uint64_t generation;
  } head{kMagic, ranks, 1};
  static_assert(offsetof(CommBoardHead, generation) == 8);
  auto mapped = open_board(path, kKind, ranks, &head, sizeof head);
  if (!mapped.ok()) return std::move(mapped).status();
  return std::unique_ptr<CommBoard>(new CommBoard(path, mapped->at, mapped->bytes, ranks));
}

StatusOr<bool> CommBoard::take_row(uint32_t rank, uint64_t incarnation, const SpacePlace& place) {
  CommRow& row = rows_[rank];
  const uint64_t before = row.incarnation.load(std::memory_order_acquire);
  if (before == incarnation) return Status(kInvalidValue, "this process is this rank already");
  if (before != 0 && (row.gpu != place.gpu || row.slot != place.slot || row.tree != place.tree))
    return Status(kInvalidValue, "two processes say that they are this rank: on GPU " + std::to_string(row.gpu) +
                                     " and on GPU " + std::to_string(place.gpu));
  row.gpu = place.gpu;
  row.slot = place.slot;
  row.tree = place.tree;
  row.pid = getpid();
  if (row.gone.exchange(Gone::kNot) != Gone::kNot) head_->gone.fetch_sub(1);
  row.incarnation.store(incarnation, std::memory_order_release);
  if (before != 0) head_->generation.fetch_add(1, std::memory_order_acq_rel);
  return before != 0;
}

void CommBoard::leave(uint32_t rank, Gone how) {
  if (rows_[rank].gone.exchange(how) == Gone::kNot && head_->gone.fetch_add(1) + 1 == ranks_) unlink(path_.c_str());
}

void CommBoard::put_id(uint64_t generation, const char (&id)[128]) {
  head_->id_generation.store(0, std::memory_order_seq_cst);
  for (size_t i = 0; i < std::size(head_->id); i++) {
    uint64_t word;
    std::memcpy(&word, id + 8 * i, sizeof word);
    head_->id[i].store(word, std::memory_order_seq_cst);
  }
  head_->id_generation.store(generation, std::memory_order_seq_cst);
}

bool CommBoard::get_id(uint64_t generation, char (&id)[128]) const {
  if (head_->id_generation.load(std::memory_order_seq_cst) != generation) return false;
  for (size_t i = 0; i < std::size(head_->id); i++) {
    const uint64_t word = head_->id[i].load(std::memory_order_seq_cst);
    std::memcpy(id + 8 * i, &word, sizeof word);
  }
  return head_->id_generation.load(std::memory_order_seq_cst) == generation;
}

}  // namespace devproxy::hal::cuda
