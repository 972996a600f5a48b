// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/image_store.h"

#include <utility>

namespace devproxy::server {

ImageStore::Ref ImageStore::find(const ImageHash& hash) {
  std::lock_guard lock(mu_);
  const auto it = images_.find(hash);
  return it == images_.end() ? nullptr : it->second.lock();
}

ImageStore::Ref ImageStore::put(const ImageHash& hash, std::vector<uint8_t> bytes) {
  auto* image = new Image{hash, std::move(bytes)};
  // Made before the lock is taken: the deleter takes it.
  Ref fresh(image, [this](const Image* gone) {
    forget(gone->hash);
    delete gone;
  });
  std::lock_guard lock(mu_);
  std::weak_ptr<const Image>& place = images_[hash];
  if (Ref there = place.lock()) return there;
  place = fresh;
  return fresh;
}

// The last holder let go. Another image of that hash may have come since.
void ImageStore::forget(const ImageHash& hash) {
  std::lock_guard lock(mu_);
  const auto it = images_.find(hash);
  if (it != images_.end() && it->second.expired()) images_.erase(it);
}

std::vector<ImageStore::Ref> ImageStore::all() const {
  std::vector<Ref> found;
  std::lock_guard lock(mu_);
  for (const auto& [hash, image] : images_)
    if (Ref there = image.lock()) found.push_back(std::move(there));
  return found;
}

ImageStore::Ref ImageUpload::piece(ImageStore& store, const ImageHash& hash, uint64_t bytes, uint64_t offset,
                                   const uint8_t* data, size_t data_bytes) {
  if (offset == 0) {
    hash_ = hash, bytes_ = bytes;
    got_.clear();
    got_.reserve(bytes);
  }
  if (hash != hash_ || bytes != bytes_ || offset != got_.size()) return nullptr;
  got_.insert(got_.end(), data, data + data_bytes);
  if (got_.size() != bytes_) return nullptr;
  std::vector<uint8_t> whole = std::exchange(got_, {});
  bytes_ = 0;
  if (image_hash(whole.data(), whole.size()) != hash) return nullptr;
  return store.put(hash, std::move(whole));
}

}  // namespace devproxy::server
