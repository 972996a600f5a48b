// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/comm_board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace devproxy::hal::cuda {

namespace {

constexpr uint32_t kMagic = 0x4e505044;  // "DPPN"

size_t board_bytes(uint32_t ranks) { return sizeof(CommRow) * (size_t{ranks} + (sizeof(CommBoardHead) + 63) / 64); }

std::string name_of(const CommKey& key) {
  char name[64];
  std::snprintf(name, sizeof name, "nccl-%016llx%016llx", static_cast<unsigned long long>(key.high),
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
  const struct {
    uint32_t magic, ranks;
    uint64_t generation;
  } head{kMagic, ranks, 1};
  static_assert(offsetof(CommBoardHead, generation) == 8);
  Status s;
  if (ftruncate(file.fd, static_cast<off_t>(board_bytes(ranks))) != 0 ||
      pwrite(file.fd, &head, sizeof head, 0) != static_cast<ssize_t>(sizeof head))
    s = Status::from_errno(kOutOfMemory, "filling " + own);
  else if (link(own.c_str(), path.c_str()) != 0 && errno != EEXIST)
    s = Status::from_errno(kNotPermitted, "naming " + path);
  unlink(own.c_str());
  return s;
}

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
  const std::string path = folder + "/" + name_of(key);
  auto board = map(path, ranks);
  if (board.ok() || board.status().code() != kNotFound) return board;
  if (Status s = make(path, ranks); !s.ok()) return s;
  return map(path, ranks);
}

StatusOr<std::unique_ptr<CommBoard>> CommBoard::map(const std::string& path, uint32_t ranks) {
  const OpenFile file{::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW)};
  if (file.fd < 0) return Status::from_errno(errno == ENOENT ? kNotFound : kNotPermitted, "opening " + path);
  uint32_t first[2] = {};
  struct stat there;
  if (pread(file.fd, first, sizeof first, 0) != static_cast<ssize_t>(sizeof first) || first[0] != kMagic ||
      fstat(file.fd, &there) != 0)
    return Status(kInvalidValue, path + " is not a communicator's");
  const size_t bytes = board_bytes(ranks);
  if (first[1] != ranks || static_cast<size_t>(there.st_size) != bytes)
    return Status(kInvalidValue, "the members do not agree how many they are: " + std::to_string(first[1]) + " and " +
                                     std::to_string(ranks));
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
  if (at == MAP_FAILED) return Status::from_errno(kOutOfMemory, "mapping " + path);
  return std::unique_ptr<CommBoard>(new CommBoard(path, at, bytes, ranks));
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
