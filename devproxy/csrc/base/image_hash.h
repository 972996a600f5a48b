// SPDX-License-Identifier: Apache-2.0
// What a module image is known by: 128 bits of its content.
//
// XXH3 is fast (the 47 MB of a training job's images: some milliseconds) and no secret can be kept by it: who wants two
// images of one hash can make them. A server serves the processes of one job, which may do to each other what they like
// anyway, and a server computes the hash of what it was sent itself; so a wrong hash is a mistake, never an attack.
// Header only: neither the client library nor the server needs libxxhash at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace devproxy {

struct ImageHash {
  uint64_t low = 0, high = 0;
  bool operator==(const ImageHash&) const = default;
};

inline ImageHash image_hash(const void* image, size_t bytes) {
  const XXH128_hash_t hash = XXH3_128bits(image, bytes);
  return {hash.low64, hash.high64};
}

}  // namespace devproxy
