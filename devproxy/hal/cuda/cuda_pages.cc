// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/cuda_pages.h"

#include <algorithm>
#include <cstring>
#include <utility>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include "devproxy/hal/cuda/shared_comm.h"

namespace devproxy::hal::cuda {

namespace {

constexpr uint64_t kPiece = 4u << 20;  // of a comparison, in bytes
// What a kernel takes that is bound by memory: some microseconds, and 2 TB/s. Measuring it would need an event for each.
constexpr uint64_t kKernelNs = 3000, kBytesPerNs = 2000;

}  // namespace

CudaPages::CudaPages()
    : PhysicalMemory({.page = 2u << 20, .least_numbered = 1, .lends = false, .guards = false, .joins_edges = true}) {}

CudaPages::~CudaPages() {
  if (stream_) (void)context_->enter().cuStreamDestroy(stream_);
}

void CudaPages::join(uint64_t base, Space space, const std::shared_ptr<Context>& context) {
  std::lock_guard lock(mu_);
  spaces_[base] = std::move(space);
  if (!context_) context_ = context;
}

void CudaPages::leave(uint64_t base) {
  std::lock_guard lock(mu_);
  spaces_.erase(base);
}

StatusOr<CUstream> CudaPages::stream() {
  const Driver& cu = context_->enter();
  if (!stream_)
    if (Status s = cu.status(cu.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0),
                             cu.cuStreamCreateWithPriority, "making the stream that moves pages");
        !s.ok())
      return s;
  return CUstream(stream_);
}

Status CudaPages::Stream::follow(splice::Runner& other) {
  auto mark = SharedComm::Mark::record(context_, static_cast<Stream&>(other).stream_);
  return mark.ok() ? (*mark)->wait_in(stream_) : std::move(mark).status();
}

Status CudaPages::Stream::wait() const {
  const Driver& cu = driver();
  return cu.status(cu.cuStreamSynchronize(stream_), cu.cuStreamSynchronize, "waiting for a rank's launch");
}

Status CudaPages::read(uint64_t addr, size_t bytes, const SpaceMemory::PieceSink& sink) {
  std::lock_guard lock(mu_);
  auto it = spaces_.upper_bound(addr);
  if (it == spaces_.begin() || addr - (--it)->first >= it->second.bytes)
    return {kInvalidValue, "the range is no rank's device memory"};
  return it->second.read(addr, bytes, sink);
}

// Most of what meets has a number, so this is for the first steps, and the bus will do.
StatusOr<bool> CudaPages::same(const std::vector<Pair>& pairs) {
  if (work_)
    if (Status s = work_->wait(); !s.ok()) return s;
  std::vector<uint8_t> first(kPiece);
  for (const Pair& pair : pairs)
    for (uint64_t at = 0; at < pair.bytes; at += kPiece) {
      const uint64_t bytes = std::min(kPiece, pair.bytes - at);
      bool same = true;
      Status s = read(pair.a + at, bytes, [&](const void* piece, size_t n, size_t offset) {
        std::memcpy(first.data() + offset, piece, n);
        return Status();
      });
      if (s.ok())
        s = read(pair.b + at, bytes, [&](const void* piece, size_t n, size_t offset) {
          same = same && std::memcmp(first.data() + offset, piece, n) == 0;
          return Status();
        });
      if (!s.ok()) return s;
      if (!same) return false;
    }
  return true;
}

Status CudaPages::copy(uint64_t to, uint64_t from, uint64_t bytes) {
  if (!work_)
    return {kNotSupported, "ranks of a real GPU lend nothing, so nothing is to be copied outside of a meeting"};
  if (bytes == 0) return {};
  const Driver& cu = work_->driver();
  return cu.status(cu.cuMemcpyDtoDAsync(to, from, bytes, work_->stream()), cu.cuMemcpyDtoDAsync,
                   "copying what a launch has left to another rank");
}

StatusOr<splice::Contents> CudaPages::hash(splice::Runner& runner, const std::vector<Range>& ranges) {
  if (Status s = static_cast<Stream&>(runner).wait(); !s.ok()) return s;
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (const Range& range : ranges) {
    if (range.bytes == 0) continue;
    Status s = read(range.addr, range.bytes, [&](const void* piece, size_t n, size_t) {
      XXH3_128bits_update(&state, piece, n);
      return Status();
    });
    if (!s.ok()) return s;
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return splice::Contents{hash.low64, hash.high64};
}

uint64_t CudaPages::kernel_ns(uint64_t bytes, uint64_t) const { return kKernelNs + bytes / kBytesPerNs; }

bool CudaPages::idle() {
  std::unique_lock lock(mu_, std::try_to_lock);
  return lock && std::all_of(spaces_.begin(), spaces_.end(), [](const auto& item) { return item.second.idle(); });
}

}  // namespace devproxy::hal::cuda
