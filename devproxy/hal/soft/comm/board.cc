// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/comm/board.h"

#include <sys/mman.h>
#include <unistd.h>

#include <climits>
#include <utility>

#include "devproxy/csrc/base/futex.h"

namespace devproxy::hal::soft {

namespace {

size_t cells_at() { return sizeof(BoardHead); }
size_t pairs_at(uint32_t ranks) { return cells_at() + ranks * sizeof(BoardCell); }
size_t board_bytes(uint32_t ranks) { return pairs_at(ranks) + size_t{ranks} * ranks * sizeof(BoardPair); }

constexpr BoardKind kKind{"comm-", kBoardMagic, board_bytes};

}  // namespace

Board::Board(std::string path, void* at, size_t bytes, uint32_t ranks)
    : path_(std::move(path)), at_(at), bytes_(bytes), ranks_(ranks) {
  auto* base = static_cast<uint8_t*>(at);
  head_ = reinterpret_cast<BoardHead*>(base);
  cells_ = reinterpret_cast<BoardCell*>(base + cells_at());
  pairs_ = reinterpret_cast<BoardPair*>(base + pairs_at(ranks));
}

Board::~Board() { munmap(at_, bytes_); }

StatusOr<std::unique_ptr<Board>> Board::made(const std::string& path, StatusOr<MappedBoard> mapped) {
  if (!mapped.ok()) return std::move(mapped).status();
  return std::unique_ptr<Board>(new Board(path, mapped->at, mapped->bytes, mapped->ranks));
}

StatusOr<std::unique_ptr<Board>> Board::open(const std::string& folder, const CommKey& key, uint32_t ranks) {
  const std::string path = board_path(folder, kKind, key);
  BoardHead head{};
  head.magic = kBoardMagic;
  head.ranks = ranks;
  return made(path, open_board(path, kKind, ranks, &head, sizeof head));
}

StatusOr<std::unique_ptr<Board>> Board::find(const std::string& folder, const CommKey& key, uint32_t ranks) {
  const std::string path = board_path(folder, kKind, key);
  return made(path, map_board(path, kKind, ranks));
}

void Board::each(const std::string& folder, const std::function<void(Board&)>& look) {
  each_board(folder, kKind, [&](const std::string& path) {
    auto board = made(path, map_board(path, kKind, 0));
    if (board.ok()) look(**board);
  });
}

void Board::ring() {
  head_->bell.fetch_add(1, std::memory_order_seq_cst);
  if (head_->sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(&head_->bell, INT_MAX);
}

void Board::sleep(uint32_t seen, uint64_t us) {
  head_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  futex_wait(&head_->bell, seen, us);
  head_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

bool Board::is(const std::string& folder, const CommKey& key) const { return path_ == board_path(folder, kKind, key); }

void Board::remove() const { unlink(path_.c_str()); }

}  // namespace devproxy::hal::soft
