// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/staged_dump.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>

namespace devproxy::server {

namespace {

constexpr char kRefsMagic[9] = "DPREFS01";
constexpr uint64_t kRefsHeaderBytes = 16;

bool all_zero(const void* from, uint64_t bytes) {
  const auto* at = static_cast<const uint8_t*>(from);
  return at[0] == 0 && std::memcmp(at, at + 1, bytes - 1) == 0;
}

std::string refs_text(const std::vector<BlockRef>& refs) {
  const uint64_t count = refs.size();
  std::string text(kRefsHeaderBytes + count * sizeof(BlockRef), 0);
  std::memcpy(text.data(), kRefsMagic, 8);
  std::memcpy(text.data() + 8, &count, sizeof count);
  if (count) std::memcpy(text.data() + kRefsHeaderBytes, refs.data(), count * sizeof(BlockRef));
  return text;
}

StatusOr<std::vector<BlockRef>> refs_in(const std::string& path) {
  auto text = read_file(path);
  if (!text.ok()) return std::move(text).status();
  uint64_t count = 0;
  if (text->size() >= kRefsHeaderBytes) std::memcpy(&count, text->data() + 8, sizeof count);
  const uint64_t room = text->size() < kRefsHeaderBytes ? 0 : (text->size() - kRefsHeaderBytes) / sizeof(BlockRef);
  if (text->size() < kRefsHeaderBytes || std::memcmp(text->data(), kRefsMagic, 8) != 0 || count != room)
    return Status(kInvalidImage, path + " is damaged");
  std::vector<BlockRef> refs(count);
  if (count) std::memcpy(refs.data(), text->data() + kRefsHeaderBytes, count * sizeof(BlockRef));
  uint64_t end = 0;
  for (const BlockRef& ref : refs) {
    if (ref.offset < end || ref.bytes > std::numeric_limits<int64_t>::max() - ref.offset)
      return Status(kInvalidImage, path + " is damaged: references overlap");
    end = ref.offset + ref.bytes;
  }
  return refs;
}

}  // namespace

std::string staged_stem(const std::string& dir, uint32_t gpu, uint64_t client) {
  return dir + "/gpu" + std::to_string(gpu) + "-" + std::to_string(client);
}

StatusOr<std::unique_ptr<StagedWriter>> StagedWriter::make(const std::string& dir, uint32_t gpu, uint64_t client,
                                                           BlockIndex* index) {
  if (client > std::numeric_limits<uint32_t>::max()) index = nullptr;  // a place has no room for it
  const int flags = O_WRONLY | O_CREAT | (index ? O_EXCL : O_TRUNC);
  std::unique_ptr<StagedWriter> writer(
      new StagedWriter(staged_stem(dir, gpu, client), flags, index, BlockPlace{gpu, static_cast<uint32_t>(client), 0}));
  if (writer->file_.fd < 0) return Status::from_errno(kFileNotFound, "making " + writer->stem_ + ".dev");
  return writer;
}

Status StagedWriter::write_own(const void* from, uint64_t bytes, uint64_t offset) {
  written_ += bytes;
  return write_all(file_.fd, from, bytes, offset);
}

Status StagedWriter::write(const void* from, uint64_t bytes, uint64_t offset) {
  if (!index_) return write_own(from, bytes, offset);
  for (uint64_t done = 0; done < bytes; done += BlockIndex::kBlockBytes) {
    const uint64_t part = std::min(BlockIndex::kBlockBytes, bytes - done);
    const auto* block = static_cast<const uint8_t*>(from) + done;
    if (all_zero(block, part)) {
      refer(offset + done, part, {kZeros, 0, 0});
      continue;
    }
    BlockPlace mine = self_;
    mine.offset = offset + done;
    const std::optional<BlockPlace> there =
        part < BlockIndex::kLeastBytes ? std::nullopt : index_->find_or_claim(block, part, mine);
    if (there)
      refer(mine.offset, part, *there);
    else if (Status s = write_own(block, part, mine.offset); !s.ok())
      return s;
  }
  return {};
}

void StagedWriter::refer(uint64_t offset, uint64_t bytes, const BlockPlace& at) {
  std::lock_guard lock(mu_);
  refs_.push_back({offset, bytes, at});
}

Status StagedWriter::finish(uint64_t bytes) {
  if (!index_) return {};
  if (ftruncate(file_.fd, static_cast<off_t>(bytes)) != 0)
    return Status::from_errno(kOutOfMemory, "ending " + stem_ + ".dev");
  std::sort(refs_.begin(), refs_.end(), [](const BlockRef& a, const BlockRef& b) { return a.offset < b.offset; });
  return write_file(stem_ + ".refs", refs_text(refs_));
}

StatusOr<std::unique_ptr<StagedReader>> StagedReader::open(const std::string& dir, uint32_t gpu, uint64_t client,
                                                           bool use_up) {
  const std::string stem = staged_stem(dir, gpu, client);
  std::unique_ptr<StagedReader> reader(new StagedReader(stem + ".dev", use_up ? O_RDWR : O_RDONLY));
  if (reader->file_.fd < 0) return Status::from_errno(kFileNotFound, "opening " + reader->path_);
  if (access((stem + ".refs").c_str(), F_OK) == 0) {
    auto refs = refs_in(stem + ".refs");
    if (!refs.ok()) return std::move(refs).status();
    reader->refs_ = std::move(*refs);
    if (Status s = reader->open_others(dir); !s.ok()) return s;
    return reader;
  }
  struct statfs system;
  reader->use_up_ = use_up && fstatfs(reader->file_.fd, &system) == 0 && system.f_type == TMPFS_MAGIC;
  return reader;
}

Status StagedReader::open_others(const std::string& dir) {
  for (const BlockRef& ref : refs_) {
    if (ref.at.gpu == kZeros) continue;
    auto& other = others_[{ref.at.gpu, ref.at.client}];
    if (other) continue;
    const std::string stem = staged_stem(dir, ref.at.gpu, ref.at.client);
    if (access((stem + ".refs").c_str(), F_OK) != 0)
      return {kInvalidImage, path_ + " needs bytes of " + stem + ".dev, whose dump came to no end"};
    other = std::make_unique<File>(stem + ".dev", O_RDONLY);
    if (other->fd < 0) return Status::from_errno(kFileNotFound, "opening " + stem + ".dev");
  }
  return {};
}

Status StagedReader::read(void* to, uint64_t bytes, uint64_t offset) const {
  auto* at = static_cast<uint8_t*>(to);
  auto ref = std::upper_bound(refs_.begin(), refs_.end(), offset,
                              [](uint64_t o, const BlockRef& r) { return o < r.offset + r.bytes; });
  while (bytes) {
    const bool refers = ref != refs_.end() && ref->offset <= offset;
    const uint64_t end = refers ? ref->offset + ref->bytes : ref != refs_.end() ? ref->offset : UINT64_MAX;
    const uint64_t part = std::min(bytes, end - offset);
    if (refers && ref->at.gpu == kZeros) {
      std::memset(at, 0, part);
    } else {
      const File& file = refers ? *others_.at({ref->at.gpu, ref->at.client}) : file_;
      const uint64_t from = refers ? ref->at.offset + (offset - ref->offset) : offset;
      if (Status s = read_all(file.fd, at, part, from); !s.ok()) return s;
    }
    at += part, offset += part, bytes -= part;
    if (refers && offset == ref->offset + ref->bytes) ++ref;
  }
  return {};
}

void StagedReader::used(uint64_t bytes, uint64_t offset) const {
  if (use_up_)
    fallocate(file_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
}

}  // namespace devproxy::server
