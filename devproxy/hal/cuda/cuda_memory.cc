// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/cuda_memory.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <utility>

#include "devproxy/csrc/base/log.h"

namespace devproxy::hal::cuda {

namespace {

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

std::string range_text(uint64_t begin, uint64_t end) { return "[" + hex(begin) + ", " + hex(end) + ")"; }

constexpr uint64_t kPlentyPart = 8;  // a GPU has plenty if such a part of it is free

uint64_t down(uint64_t value, uint64_t unit) { return value / unit * unit; }
uint64_t up(uint64_t value, uint64_t unit) { return down(value + unit - 1, unit); }

}  // namespace

// -- ranges ---------------------------------------------------------------------------------------------------------

void Ranges::insert(uint64_t begin, uint64_t end) {
  if (begin >= end) return;
  erase(begin, end);
  bytes_ += end - begin;
  auto next = ranges_.lower_bound(begin);
  if (next != ranges_.end() && next->first == end) end = next->second, next = ranges_.erase(next);
  if (next != ranges_.begin() && std::prev(next)->second == begin)
    std::prev(next)->second = end;
  else
    ranges_.emplace_hint(next, begin, end);
}

void Ranges::erase(uint64_t begin, uint64_t end) {
  auto it = ranges_.upper_bound(begin);
  if (it != ranges_.begin()) --it;
  while (it != ranges_.end() && it->first < end) {
    const auto [b, e] = *it;
    if (e <= begin) {
      ++it;
      continue;
    }
    it = ranges_.erase(it);
    bytes_ -= e - b;
    if (b < begin) ranges_.emplace(b, begin), bytes_ += begin - b;
    if (e > end) it = ranges_.emplace(end, e).first, bytes_ += e - end;
  }
}

bool Ranges::touches(uint64_t begin, uint64_t end) const {
  auto it = ranges_.lower_bound(end);
  return it != ranges_.begin() && std::prev(it)->second > begin;
}

std::vector<std::pair<uint64_t, uint64_t>> Ranges::in(uint64_t begin, uint64_t end) const {
  std::vector<std::pair<uint64_t, uint64_t>> parts;
  auto it = ranges_.upper_bound(begin);
  if (it != ranges_.begin()) --it;
  for (; it != ranges_.end() && it->first < end; ++it)
    if (it->second > begin) parts.emplace_back(std::max(begin, it->first), std::min(end, it->second));
  return parts;
}

// -- reservation ----------------------------------------------------------------------------------------------------

StatusOr<std::unique_ptr<DeviceMemory>> DeviceMemory::open(const std::shared_ptr<Context>& context,
                                                           const CudaConfig& config, const SpaceConfig& space) {
  const Driver& cu = context->enter();
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, context->device()};
  size_t granularity = 0;
  if (Status s = cu.status(cu.cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                           cu.cuMemGetAllocationGranularity, "asking for the page size of device memory");
      !s.ok())
    return s;
  const std::string range = range_text(space.device_base, space.device_base + space.device_bytes);
  if (granularity == 0 || space.device_base % granularity || space.device_bytes % granularity)
    return Status(kNotSupported, "device addresses " + range + " are no multiple of this GPU's page of " +
                                     std::to_string(granularity) + " bytes");
  CUdeviceptr got = 0;
  if (Status s = cu.status(cu.cuMemAddressReserve(&got, space.device_bytes, 0, space.device_base, 0),
                           cu.cuMemAddressReserve, "reserving device addresses " + range);
      !s.ok())
    return s;
  if (got != space.device_base) {  // cuda.h: the address is a hint
    (void)cu.cuMemAddressFree(got, space.device_bytes);
    return Status(kOutOfMemory,
                  "the driver gives " + hex(got) + " instead of the device addresses " + range +
                      ": something in this process lies there already, or the driver keeps them for itself; "
                      "addresses must be the same after a migration, so the process cannot be served");
  }
  return std::make_unique<DeviceMemory>(context, config, space, granularity);
}

DeviceMemory::DeviceMemory(std::shared_ptr<Context> context, const CudaConfig& config, const SpaceConfig& space,
                           uint64_t granularity)
    : context_(std::move(context)),
      config_(config),
      base_(space.device_base),
      bytes_(space.device_bytes),
      granularity_(granularity) {}

DeviceMemory::~DeviceMemory() {
  const Driver& cu = context_->enter();
  while (!extents_.empty()) unmap(extents_.begin());
  (void)cu.cuMemAddressFree(base_, bytes_);
}

DeviceMemory::Handle::~Handle() {
  if (value) (void)context->enter().cuMemRelease(value);
}

CUmemAllocationProp DeviceMemory::properties() const {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, context_->device()};
  return prop;
}

// -- mapping --------------------------------------------------------------------------------------------------------

StatusOr<std::shared_ptr<DeviceMemory::Handle>> DeviceMemory::create(uint64_t bytes) const {
  const Driver& cu = context_->enter();
  const CUmemAllocationProp prop = properties();
  auto handle = std::make_shared<Handle>();
  if (Status s = cu.status(cu.cuMemCreate(&handle->value, bytes, &prop, 0), cu.cuMemCreate,
                           "taking " + std::to_string(bytes >> 20) + " MiB of device memory");
      !s.ok()) {
    handle->value = 0;
    return s;
  }
  handle->context = context_;
  return handle;
}

Status DeviceMemory::map(uint64_t addr, uint64_t bytes, const Handle& handle) const {
  const Driver& cu = context_->enter();
  return cu.status(cu.cuMemMap(addr, bytes, 0, handle.value, 0), cu.cuMemMap, "mapping device memory at " + hex(addr));
}

// Once for a whole range, because this is the dear one of the three calls.
Status DeviceMemory::allow(uint64_t addr, uint64_t bytes) const {
  const Driver& cu = context_->enter();
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, context_->device()};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return cu.status(cu.cuMemSetAccess(addr, bytes, &access, 1), cu.cuMemSetAccess,
                   "opening device memory " + range_text(addr, addr + bytes));
}

void DeviceMemory::unmap(Extents::iterator it) {
  const Driver& cu = context_->enter();
  const auto& [addr, extent] = *it;
  if (const CUresult r = cu.cuMemUnmap(addr, extent.bytes); r != CUDA_SUCCESS)
    DP_LOG(kWarn, kDevice, 0, "unmapping device memory at %s: %s", hex(addr).c_str(), cu.text(r).c_str());
  mapped_bytes_ -= extent.bytes;
  if (extent.idle) idle_bytes_ -= extent.bytes;
  extents_.erase(it);
}

// [begin, end) has nothing mapped. Either all of it is mapped afterwards, or nothing. cuts: borders of handles inside.
Status DeviceMemory::map_fresh(uint64_t begin, uint64_t end, bool by_page, std::array<uint64_t, 2> cuts) {
  const Driver& cu = context_->enter();
  std::vector<std::pair<uint64_t, Extent>> made;
  Status failed;
  for (uint64_t at = begin; at < end && failed.ok();) {
    uint64_t bytes = std::min(end - at, by_page ? granularity_ : up(config_.max_handle_bytes, granularity_));
    for (const uint64_t cut : cuts)
      if (at < cut && cut < at + bytes) bytes = cut - at;
    auto handle = create(bytes);
    failed = handle.ok() ? map(at, bytes, **handle) : std::move(handle).status();
    if (failed.ok()) made.push_back({at, {bytes, *handle, false}});
    at += bytes;
  }
  if (failed.ok()) failed = allow(begin, end - begin);
  if (!failed.ok()) {
    for (const auto& [addr, extent] : made) (void)cu.cuMemUnmap(addr, extent.bytes);
    return failed;
  }
  mapped_bytes_ += end - begin;
  for (size_t i = 0; i < made.size(); i++)
    if (std::has_single_bit(++maps_) || maps_ % 256 == 0)
      DP_LOG(kInfo, kDevice, 0,
             "device memory was mapped %lu times so far: %lu MiB, %lu of them idle, %lu the client's",
             static_cast<unsigned long>(maps_), static_cast<unsigned long>(mapped_bytes_ >> 20),
             static_cast<unsigned long>(idle_bytes_ >> 20), static_cast<unsigned long>(reserved_bytes_ >> 20));
  for (auto& [addr, extent] : made) extents_.emplace(addr, std::move(extent));
  return {};
}

// The gap [begin, end) between what is mapped, granule aligned: with whole slabs around it if memory allows, else alone. The slabs at
// its ends have handles of their own: others will lie there too, and what lies in a handle keeps all of it mapped.
Status DeviceMemory::fill_gap(uint64_t begin, uint64_t end, bool by_page) {
  if (frugal_) {  // no more than is needed, and the pages at the edges, which others will share, in handles of their own
    const std::array<uint64_t, 2> edges{begin + granularity_, end - granularity_};
    Status s = map_fresh(begin, end, by_page, edges);
    if (s.code() != kOutOfMemory) return s;
    trim(0);
    return map_fresh(begin, end, by_page, edges);
  }
  const uint64_t slab = up(config_.slab_bytes, granularity_);
  uint64_t low = std::max(base_, base_ + down(begin - base_, slab));
  uint64_t high = std::min(base_ + bytes_, base_ + up(end - base_, slab));
  const auto next = extents_.lower_bound(begin);
  if (next != extents_.end()) high = std::min(high, next->first);
  if (next != extents_.begin()) low = std::max(low, std::prev(next)->first + std::prev(next)->second.bytes);
  Status s = map_fresh(low, high, by_page, {base_ + up(begin - base_, slab), base_ + down(end - base_, slab)});
  if (s.code() != kOutOfMemory) return s;
  trim(0);
  return map_fresh(begin, end, by_page);
}

DeviceMemory::Extents::iterator DeviceMemory::first_in(uint64_t addr) {
  auto it = extents_.upper_bound(addr);
  if (it != extents_.begin() && std::prev(it)->first + std::prev(it)->second.bytes > addr) --it;
  return it;
}

// Physical memory behind every granule of [begin, end).
Status DeviceMemory::ensure(uint64_t begin, uint64_t end, bool by_page) {
  end = base_ + up(end - base_, granularity_);
  for (uint64_t at = base_ + down(begin - base_, granularity_); at < end;) {
    const auto it = first_in(at);
    if (it != extents_.end() && it->first <= at) {
      at = it->first + it->second.bytes;
      continue;
    }
    const uint64_t gap_end = it == extents_.end() ? end : std::min(end, it->first);
    if (Status s = fill_gap(at, gap_end, by_page); !s.ok()) return s;
  }
  return {};
}

Status DeviceMemory::commit(uint64_t addr, uint64_t bytes, bool by_page) {
  if (!owns(addr, bytes)) return {kInvalidValue, "the range is outside the device memory of this process"};
  if (bytes == 0) return {};
  std::lock_guard lock(mu_);
  const auto before = committed_.in(addr, addr + bytes);
  // Before the mapping: what is committed is not idle, so trim() leaves the parts of this range that are there alone.
  committed_.insert(addr, addr + bytes);
  for (auto it = first_in(addr); it != extents_.end() && it->first < addr + bytes; ++it)
    if (std::exchange(it->second.idle, false)) idle_bytes_ -= it->second.bytes;
  if (Status s = ensure(addr, addr + bytes, by_page); !s.ok()) {
    committed_.erase(addr, addr + bytes);
    for (const auto& [begin, end] : before) committed_.insert(begin, end);
    note_idle(addr, addr + bytes);
    return std::move(s).with("committing device memory " + range_text(addr, addr + bytes));
  }
  return {};
}

void DeviceMemory::release(uint64_t addr, uint64_t bytes) {
  if (!owns(addr, bytes) || bytes == 0) return;
  std::lock_guard lock(mu_);
  tidy_locked();  // before this range joins: the program may well want it again
  committed_.erase(addr, addr + bytes);
  note_idle(addr, addr + bytes);
}

void DeviceMemory::tidy() {
  std::lock_guard lock(mu_);
  tidy_locked();
}

void DeviceMemory::give_back() {
  std::lock_guard lock(mu_);
  frugal_ = true;
  trim(0);
}

void DeviceMemory::reserve(uint64_t bytes) {
  std::lock_guard lock(mu_);
  reserved_bytes_ = bytes;
}

uint64_t DeviceMemory::room_bytes(uint64_t had) const {
  const Driver& cu = context_->enter();
  size_t free = 0, total = 0;
  if (cu.cuMemGetInfo(&free, &total) != CUDA_SUCCESS) return UINT64_MAX;  // commit() says what is wrong
  std::lock_guard lock(mu_);
  if (frugal_) {
    const uint64_t left = had > committed_.bytes() ? had - committed_.bytes() : 0, there = free + idle_bytes_;
    return there > left + 2 * granularity_ ? there - left - 2 * granularity_ : 0;
  }
  // What is mapped and not committed is taken for room, though it may be in pieces: then commit() does not find it.
  const uint64_t spoken_for =
      std::max(had, committed_.bytes()) + 2 * granularity_;  // a range begins and ends in a page
  const uint64_t there = free + mapped_bytes_;
  return there > spoken_for ? there - spoken_for : 0;
}

void DeviceMemory::tidy_locked() {
  if (frugal_) return trim(0);
  // The floor comes on top: whole slabs are more than what lies in them.
  const uint64_t in_use = mapped_bytes_ - idle_bytes_, most = reserved_bytes_ + config_.idle_floor_bytes;
  uint64_t keep = std::max(config_.idle_floor_bytes, most > in_use ? most - in_use : 0);
  if (idle_bytes_ > keep && reserved_bytes_ && is_plenty()) keep += most;
  if (idle_bytes_ > keep) trim(keep);
}

// Asked at most once in a millisecond: a release may come with each operator.
bool DeviceMemory::is_plenty() {
  const auto now = std::chrono::steady_clock::now();
  if (now - asked_ < std::chrono::milliseconds(1)) return plenty_;
  asked_ = now;
  size_t free = 0, total = 0;
  plenty_ = context_->enter().cuMemGetInfo(&free, &total) == CUDA_SUCCESS && free > total / kPlentyPart;
  return plenty_;
}

void DeviceMemory::note_idle(uint64_t begin, uint64_t end) {
  for (auto it = first_in(begin); it != extents_.end() && it->first < end; ++it) {
    Extent& extent = it->second;
    if (extent.idle || committed_.touches(it->first, it->first + extent.bytes)) continue;
    extent.idle = true;
    idle_bytes_ += extent.bytes;
  }
}

// Unmaps idle extents until at most keep_bytes of them are left. From the middle of the range outwards would be as
// good: the allocator grows from both ends, and nothing says which end will be used next.
void DeviceMemory::trim(uint64_t keep_bytes) {
  for (auto it = extents_.begin(); it != extents_.end() && idle_bytes_ > keep_bytes;) {
    const auto next = std::next(it);
    if (it->second.idle && it->second.handle.use_count() == 1) unmap(it);  // the splicer knows who shows the others
    it = next;
  }
}

bool DeviceMemory::mapped(uint64_t addr, uint64_t bytes) const {
  if (!owns(addr, bytes)) return false;
  std::lock_guard lock(mu_);
  return covered(addr, addr + bytes);
}

bool DeviceMemory::covered(uint64_t begin, uint64_t end) const {
  auto it = extents_.upper_bound(begin);
  if (it == extents_.begin()) return begin >= end;
  --it;
  for (uint64_t at = begin; at < end; ++it) {
    if (it == extents_.end() || it->first > at || it->first + it->second.bytes <= at) return false;
    at = it->first + it->second.bytes;
  }
  return true;
}

uint64_t DeviceMemory::mapped_bytes() const {
  std::lock_guard lock(mu_);
  return mapped_bytes_;
}

// -- level 3 --------------------------------------------------------------------------------------------------------

// Replaces the extent at `addr` by handles of its own with the same contents: one for each page, or cut in two at `cut` if that
// lies inside.
Status DeviceMemory::rebuild(uint64_t addr, uint64_t cut, bool by_page, CUstream stream) {
  const Driver& cu = context_->enter();
  const auto it = extents_.find(addr);
  const uint64_t bytes = it->second.bytes, end = addr + bytes;
  std::vector<std::pair<uint64_t, Extent>> parts;
  for (uint64_t at = addr; at < end;) {
    const uint64_t part_end = by_page ? at + granularity_ : at < cut && cut < end ? cut : end;
    auto handle = create(part_end - at);
    if (!handle.ok()) return std::move(handle).status();
    parts.push_back({at, {part_end - at, *handle, it->second.idle}});
    at = part_end;
  }
  CUdeviceptr scratch = 0;
  if (Status s = cu.status(cu.cuMemAddressReserve(&scratch, bytes, 0, 0, 0), cu.cuMemAddressReserve,
                           "reserving scratch addresses");
      !s.ok())
    return s;
  Status s;
  size_t shown = 0;
  for (; shown < parts.size() && s.ok(); shown++)
    s = map(scratch + (parts[shown].first - addr), parts[shown].second.bytes, *parts[shown].second.handle);
  if (!s.ok()) shown--;
  if (s.ok()) s = allow(scratch, bytes);
  if (s.ok())
    s = cu.status(cu.cuMemcpyDtoDAsync(scratch, addr, bytes, stream), cu.cuMemcpyDtoDAsync, "copying an extent");
  if (s.ok()) s = cu.status(cu.cuStreamSynchronize(stream), cu.cuStreamSynchronize, "copying an extent");
  for (size_t i = 0; i < shown; i++) (void)cu.cuMemUnmap(scratch + (parts[i].first - addr), parts[i].second.bytes);
  (void)cu.cuMemAddressFree(scratch, bytes);
  if (!s.ok()) return s;  // nothing has changed yet

  if (s = cu.status(cu.cuMemUnmap(addr, bytes), cu.cuMemUnmap, "unmapping an extent"); !s.ok()) return s;
  extents_.erase(it);
  for (auto& [at, part] : parts) {
    if (s.ok()) s = map(at, part.bytes, *part.handle);
    if (s.ok())
      extents_.emplace(at, std::move(part));
    else
      mapped_bytes_ -= part.bytes;
  }
  if (s.ok()) s = allow(addr, bytes);
  if (!s.ok()) return std::move(s).with("the contents of device memory " + range_text(addr, end) + " are lost");
  return {};
}

// Borders of extents at begin and end.
Status DeviceMemory::isolate(uint64_t begin, uint64_t end, CUstream stream) {
  for (uint64_t border : {begin, end}) {
    const auto it = first_in(border);
    if (it == extents_.end() || it->first >= border) continue;
    if (it->second.handle.use_count() > 1)
      return {kNotSupported, "device memory at " + hex(border) +
                                 " lies inside pages that are shown twice already: take "
                                 "that alias back first"};
    if (Status s = rebuild(it->first, border, false, stream); !s.ok()) return s;
  }
  return {};
}

Status DeviceMemory::alias(uint64_t addr, uint64_t bytes, DeviceMemory& from, uint64_t from_addr, CUstream stream,
                           CUstream from_stream) {
  if (!owns(addr, bytes) || !from.owns(from_addr, bytes) || bytes == 0 || !aligned(addr) || !aligned(from_addr) ||
      !aligned(bytes))
    return {kInvalidValue, "an alias covers whole pages (of " + std::to_string(granularity_) +
                               " bytes on this GPU) inside the device memory of both processes"};
  if (&from == this && addr < from_addr + bytes && from_addr < addr + bytes)
    return {kInvalidValue, "an alias cannot overlap what it shows"};
  std::unique_lock<std::mutex> first((this < &from ? *this : from).mu_), second;
  if (&from != this) second = std::unique_lock((this < &from ? from : *this).mu_);

  if (Status s = from.ensure(from_addr, from_addr + bytes); !s.ok()) return s;
  if (Status s = from.isolate(from_addr, from_addr + bytes, from_stream); !s.ok()) return s;
  if (Status s = isolate(addr, addr + bytes, stream); !s.ok()) return s;
  // Uncommitted pages of `from` can have been trimmed while its other pages were mapped.
  if (!from.covered(from_addr, from_addr + bytes))
    return {kOutOfMemory, "no device memory for the pages to be shown twice"};
  for (auto it = first_in(addr); it != extents_.end() && it->first < addr + bytes;) unmap(it++);
  Status s;
  for (auto it = from.extents_.find(from_addr); it != from.extents_.end() && it->first < from_addr + bytes && s.ok();
       ++it) {
    const uint64_t at = addr + (it->first - from_addr);
    if (s = map(at, it->second.bytes, *it->second.handle); !s.ok()) break;
    extents_[at] = {it->second.bytes, it->second.handle, false};
    mapped_bytes_ += it->second.bytes;
  }
  if (s.ok()) s = allow(addr, bytes);
  if (!s.ok()) return std::move(s).with("device memory " + range_text(addr, addr + bytes) + " is lost");
  note_idle(addr, addr + bytes);
  return {};
}

Status DeviceMemory::split(uint64_t addr, uint64_t bytes, CUstream stream) {
  std::lock_guard lock(mu_);
  if (!owns(addr, bytes) || !covered(addr, addr + bytes))
    return {kInvalidValue, "device memory " + range_text(addr, addr + bytes) + " is not mapped"};
  std::vector<uint64_t> large;
  for (auto it = first_in(addr); it != extents_.end() && it->first < addr + bytes; ++it)
    if (it->second.bytes > granularity_) large.push_back(it->first);
  for (const uint64_t at : large)
    if (Status s = rebuild(at, 0, true, stream); !s.ok()) return s;
  return {};
}

Status DeviceMemory::unalias(uint64_t addr, uint64_t bytes, CUstream stream) {
  if (!owns(addr, bytes) || bytes == 0 || !aligned(addr) || !aligned(bytes))
    return {kInvalidValue, "an alias covers whole pages inside the device memory of the process"};
  std::lock_guard lock(mu_);
  std::vector<uint64_t> shared;
  for (auto it = first_in(addr); it != extents_.end() && it->first < addr + bytes; ++it) {
    if (it->second.handle.use_count() == 1) continue;
    if (it->first < addr || it->first + it->second.bytes > addr + bytes)
      return {kInvalidValue, "device memory " + range_text(addr, addr + bytes) +
                                 " is not what was aliased: it cuts the pages at " + hex(it->first)};
    shared.push_back(it->first);
  }
  for (uint64_t at : shared)
    if (Status s = rebuild(at, 0, false, stream); !s.ok()) return s;
  return {};
}

}  // namespace devproxy::hal::cuda
