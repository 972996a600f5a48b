// SPDX-License-Identifier: Apache-2.0
// A client's device memory in a staging folder: gpuK-N.dev, and where the dump has an index of blocks, gpuK-N.refs.
//
// With an index a block of bytes that lie in the folder already, in this file or another server's, is a hole of
// gpuK-N.dev, and gpuK-N.refs says where its bytes lie: never where another reference is. A block of zeros is a hole too.
// gpuK-N.refs (checkpoint/staged.py reads it as well) has
//
//   0      the magic, the number of references
//   16     offset, bytes, gpu and client (32 bits each), offset there; by offset, none over another. gpu kZeros: the bytes
//          are zero, and lie nowhere. Nobody reads the hole: in memory, a map of a hole gets pages
//
// and its name appears when all bytes of gpuK-N.dev are written. So a reference to a file without a list is one to a
// dump that came to no end.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/block_index.h"
#include "devproxy/csrc/server/state_files.h"

namespace devproxy::server {

// The gpu of a place that is none.
inline constexpr uint32_t kZeros = UINT32_MAX;

struct BlockRef {
  uint64_t offset = 0, bytes = 0;
  BlockPlace at;
};
static_assert(sizeof(BlockRef) == 32);

std::string staged_stem(const std::string& dir, uint32_t gpu, uint64_t client);

class StagedWriter {
 public:
  // index: may be null. The file must not be there with one: others may have references to its bytes.
  static StatusOr<std::unique_ptr<StagedWriter>> make(const std::string& dir, uint32_t gpu, uint64_t client,
                                                      BlockIndex* index);

  // Any thread. Blocks are cut from `offset` on.
  Status write(const void* from, uint64_t bytes, uint64_t offset);
  // All of it into this file.
  Status write_own(const void* from, uint64_t bytes, uint64_t offset);
  // The file has that length, and what was not written is zero or elsewhere.
  Status finish(uint64_t bytes);
  uint64_t written_bytes() const { return written_; }
  std::string path() const { return stem_ + ".dev"; }

 private:
  void refer(uint64_t offset, uint64_t bytes, const BlockPlace& at);
  StagedWriter(std::string stem, int flags, BlockIndex* index, const BlockPlace& self)
      : stem_(std::move(stem)), file_(stem_ + ".dev", flags), index_(index), self_(self) {}

  const std::string stem_;
  const File file_;
  BlockIndex* const index_;
  const BlockPlace self_;
  std::atomic<uint64_t> written_{0};
  std::mutex mu_;
  std::vector<BlockRef> refs_;
};

class StagedReader {
 public:
  // use_up: what has been read may be freed, where the file lies in memory and nobody else's references can lead there.
  static StatusOr<std::unique_ptr<StagedReader>> open(const std::string& dir, uint32_t gpu, uint64_t client,
                                                      bool use_up);
  // Any thread.
  Status read(void* to, uint64_t bytes, uint64_t offset) const;
  void used(uint64_t bytes, uint64_t offset) const;
  const std::string& path() const { return path_; }

 private:
  StagedReader(const std::string& path, int flags) : path_(path), file_(path, flags) {}
  Status open_others(const std::string& dir);

  const std::string path_;
  const File file_;
  bool use_up_ = false;
  std::vector<BlockRef> refs_;
  std::map<std::pair<uint32_t, uint32_t>, std::unique_ptr<File>> others_;
};

}  // namespace devproxy::server
