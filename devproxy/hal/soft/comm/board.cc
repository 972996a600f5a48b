// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/comm/board.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <utility>

#include "devproxy/csrc/base/futex.h"

namespace devproxy::hal::soft {

namespace {

size_t cells_at() { return sizeof(BoardHead); }
size_t pairs_at(uint32_t ranks) { return cells_at() + ranks * sizeof(BoardCell); }
size_t board_bytes(uint32_t ranks) { return pairs_at(ranks) + size_t{ranks} * ranks * sizeof(BoardPair); }

std::string name_of(const CommKey& key) {
  char name[64];
  std::snprintf(name, sizeof name, "comm-%016llx%016llx", static_cast<unsigned long long>(key.high),
                static_cast<unsigned long long>(key.low));
  return name;
}

struct OpenFile {
  int fd = -1;
  ~OpenFile() {
    if (fd >= 0) close(fd);
  }
};

// A new board under its name, unless somebody was quicker. Under a name of its own first, so that nobody sees half of
// one.
Status make(const std::string& path, uint32_t ranks) {
  static std::atomic<uint64_t> serial{0};
  const std::string own = path + "." + std::to_string(getpid()) + "." + std::to_string(++serial);
  OpenFile file{::open(own.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)};
  if (file.fd < 0) return Status::from_errno(kNotPermitted, "making " + own);
  BoardHead head{};
  head.magic = kBoardMagic;
  head.ranks = ranks;
  Status s;
  if (ftruncate(file.fd, static_cast<off_t>(board_bytes(ranks))) != 0 ||
      pwrite(file.fd, static_cast<const void*>(&head), sizeof head, 0) != static_cast<ssize_t>(sizeof head))
    s = Status::from_errno(kOutOfMemory, "filling " + own);
  else if (link(own.c_str(), path.c_str()) != 0 && errno != EEXIST)
    s = Status::from_errno(kNotPermitted, "naming " + path);
  unlink(own.c_str());
  return s;
}

}  // namespace

Board::Board(std::string path, void* at, size_t bytes, uint32_t ranks)
    : path_(std::move(path)), at_(at), bytes_(bytes), ranks_(ranks) {
  auto* base = static_cast<uint8_t*>(at);
  head_ = reinterpret_cast<BoardHead*>(base);
  cells_ = reinterpret_cast<BoardCell*>(base + cells_at());
  pairs_ = reinterpret_cast<BoardPair*>(base + pairs_at(ranks));
}

Board::~Board() { munmap(at_, bytes_); }

StatusOr<std::unique_ptr<Board>> Board::open(const std::string& folder, const CommKey& key, uint32_t ranks) {
  const std::string path = folder + "/" + name_of(key);
  auto board = map(path, ranks);
  if (board.ok() || board.status().code() != kNotFound) return board;
  if (Status s = make(path, ranks); !s.ok()) return s;
  return map(path, ranks);
}

StatusOr<std::unique_ptr<Board>> Board::find(const std::string& folder, const CommKey& key, uint32_t ranks) {
  return map(folder + "/" + name_of(key), ranks);
}

void Board::each(const std::string& folder, const std::function<void(Board&)>& look) {
  DIR* const listing = opendir(folder.c_str());
  if (!listing) return;
  while (const dirent* entry = readdir(listing)) {
    const std::string name = entry->d_name;
    if (name.rfind("comm-", 0) != 0 || name.find('.') != std::string::npos) continue;  // with a dot it is being made
    auto board = map(folder + "/" + name, 0);
    if (board.ok()) look(**board);
  }
  closedir(listing);
}

// ranks: 0 for whatever it says.
StatusOr<std::unique_ptr<Board>> Board::map(const std::string& path, uint32_t ranks) {
  const OpenFile file{::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW)};
  if (file.fd < 0) return Status::from_errno(errno == ENOENT ? kNotFound : kNotPermitted, "opening " + path);
  uint32_t first[2] = {};
  struct stat there;
  if (pread(file.fd, first, sizeof first, 0) != static_cast<ssize_t>(sizeof first) || first[0] != kBoardMagic ||
      first[1] == 0 || first[1] > kMaxCommRanks || fstat(file.fd, &there) != 0)
    return Status(kInvalidValue, path + " is not a communicator's");
  if (ranks == 0) ranks = first[1];
  if (first[1] != ranks || static_cast<size_t>(there.st_size) != board_bytes(ranks))
    return Status(kInvalidValue, "the members do not agree how many they are: " + std::to_string(first[1]) + " and " +
                                     std::to_string(ranks));
  const size_t bytes = board_bytes(ranks);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
  if (at == MAP_FAILED) return Status::from_errno(kOutOfMemory, "mapping " + path);
  return std::unique_ptr<Board>(new Board(path, at, bytes, ranks));
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

bool Board::is(const std::string& folder, const CommKey& key) const { return path_ == folder + "/" + name_of(key); }

void Board::remove() const { unlink(path_.c_str()); }

}  // namespace devproxy::hal::soft
