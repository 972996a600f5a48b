// SPDX-License-Identifier: Apache-2.0
// The module images of a server's clients, each kept once: by all modules of all processes that were made from it, and
// by the replay logs that will make them again. One that nobody holds any more is gone.
//
// Locks: mu_ is the only one here, a leaf. Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "devproxy/csrc/base/image_hash.h"

namespace devproxy::server {

inline constexpr uint64_t kMaxImageBytes = 2ull << 30;

class ImageStore {
 public:
  struct Image {
    ImageHash hash;
    std::vector<uint8_t> bytes;
  };
  using Ref = std::shared_ptr<const Image>;

  Ref find(const ImageHash& hash);
  // The image under its hash; the one that is there already, where there is one. Precondition: the hash is that of the
  // bytes.
  Ref put(const ImageHash& hash, std::vector<uint8_t> bytes);
  std::vector<Ref> all() const;

  // For the statistics: bytes that clients sent, modules that were loaded, those of them that needed no bytes.
  std::atomic<uint64_t> received_bytes{0}, loads{0}, loads_known{0};

 private:
  struct Hasher {
    size_t operator()(const ImageHash& hash) const { return hash.low; }
  };
  void forget(const ImageHash& hash);
  mutable std::mutex mu_;
  std::unordered_map<ImageHash, std::weak_ptr<const Image>, Hasher> images_;
};

// An image that arrives in pieces. One at a time and in order: the client sees to it.
class ImageUpload {
 public:
  // A piece; the image when it was the last one. A piece that does not follow is dropped, and so is an image whose
  // content has another hash: the client is told that the server does not know it, and sends it again.
  ImageStore::Ref piece(ImageStore& store, const ImageHash& hash, uint64_t bytes, uint64_t offset, const uint8_t* data,
                        size_t data_bytes);

 private:
  ImageHash hash_;
  uint64_t bytes_ = 0;
  std::vector<uint8_t> got_;
};

}  // namespace devproxy::server
