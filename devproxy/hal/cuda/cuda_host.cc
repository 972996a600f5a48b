// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/cuda_host.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "devproxy/csrc/base/log.h"

namespace devproxy::hal::cuda {

namespace {

constexpr size_t kFirstSlots =
    4;  // page-locking may wait for the device, so what usually suffices is taken at the start

}  // namespace

HostMemory::HostMemory(std::shared_ptr<Context> context, const CudaConfig& config, const SpaceConfig& space)
    : context_(std::move(context)),
      config_(config),
      windows_{{space.host_base, space.host_base + space.host_bytes}},
      can_register_(config.register_host_window) {}

StatusOr<std::unique_ptr<HostMemory>> HostMemory::make(const std::shared_ptr<Context>& context,
                                                       const CudaConfig& config, const SpaceConfig& space) {
  auto memory = std::make_unique<HostMemory>(context, config, space);
  if (Status s = memory->allocate(); !s.ok()) return s;
  return memory;
}

Status HostMemory::allocate() {
  const Driver& cu = context_->enter();
  void* words = nullptr;
  Status s = cu.status(cu.cuMemHostAlloc(&words, kWords * kWordBytes, CU_MEMHOSTALLOC_DEVICEMAP), cu.cuMemHostAlloc,
                       "taking page-locked memory for completion words");
  if (!s.ok()) return s;
  words_ = static_cast<uint8_t*>(words);
  std::memset(words_, 0, kWords * kWordBytes);
  s = cu.status(cu.cuMemHostGetDevicePointer(&words_device_, words, 0), cu.cuMemHostGetDevicePointer,
                "mapping completion words");
  if (!s.ok()) return s;
  void* cells = nullptr;
  s = cu.status(cu.cuMemHostAlloc(&cells, kCells * kCellBytes, 0), cu.cuMemHostAlloc,
                "taking page-locked memory for small copies");
  if (!s.ok()) return s;
  cells_ = static_cast<uint8_t*>(cells);
  for (uint64_t i = 0; i < kCells; i++) free_cells_.push_back(cells_ + i * kCellBytes);
  while (slots_.size() < kFirstSlots)
    if (s = add_slot(); !s.ok()) return s;
  return {};
}

Status HostMemory::add_slot() {
  const Driver& cu = context_->enter();
  void* slot = nullptr;
  if (Status s = cu.status(cu.cuMemHostAlloc(&slot, config_.staging_bytes, 0), cu.cuMemHostAlloc,
                           "taking page-locked memory for staging");
      !s.ok())
    return s;
  slots_.push_back(static_cast<uint8_t*>(slot));
  free_slots_.push_back(slots_.back());
  return {};
}

HostMemory::~HostMemory() {
  const Driver& cu = context_->enter();
  for (const auto& [begin, end] : registered_) (void)cu.cuMemHostUnregister(reinterpret_cast<void*>(begin));
  for (uint8_t* slot : slots_) (void)cu.cuMemFreeHost(slot);
  if (cells_) (void)cu.cuMemFreeHost(cells_);
  if (words_) (void)cu.cuMemFreeHost(words_);
}

uint8_t* HostMemory::take_cell() {
  if (free_cells_.empty()) return nullptr;
  uint8_t* const cell = free_cells_.back();
  free_cells_.pop_back();
  return cell;
}

uint8_t* HostMemory::take_slot() {
  if (free_slots_.empty())
    if (Status s = add_slot(); !s.ok()) {
      DP_LOG(kWarn, kDevice, 0, "%s", s.text().c_str());
      return nullptr;
    }
  uint8_t* const slot = free_slots_.back();
  free_slots_.pop_back();
  return slot;
}

std::atomic<uint64_t>* HostMemory::word(uint32_t index) const {
  if (config_.marks != Marks::kWriteValue || index >= kWords) return nullptr;
  static_assert(sizeof(std::atomic<uint64_t>) == 8);
  return reinterpret_cast<std::atomic<uint64_t>*>(words_ + index * kWordBytes);
}

const HostMemory::Window* HostMemory::window_of(uint64_t addr, uint64_t bytes) const {
  for (const Window& w : windows_)
    if (addr >= w.begin && addr < w.end && bytes <= w.end - addr) return &w;
  return nullptr;
}

uint64_t HostMemory::direct_bytes(uint64_t addr, uint64_t bytes) {
  const Window* const window = window_of(addr, bytes);
  if (!can_register_ || !window) return 0;
  auto it = registered_.upper_bound(addr);
  if (it != registered_.begin() && std::prev(it)->second > addr) return std::min(bytes, std::prev(it)->second - addr);
  const uint64_t base = window->begin;
  const uint64_t begin = base + (addr - base) / kPieceBytes * kPieceBytes;
  uint64_t end = base + (addr + bytes - base + kPieceBytes - 1) / kPieceBytes * kPieceBytes;
  end = std::min(end, window->end);
  if (it != registered_.end()) end = std::min(end, it->first);
  const Driver& cu = context_->enter();
  if (const CUresult r =
          cu.cuMemHostRegister(reinterpret_cast<void*>(begin), end - begin, CU_MEMHOSTREGISTER_DEVICEMAP);
      r != CUDA_SUCCESS) {
    can_register_ = false;  // once, for all: a copy is right either way
    DP_LOG(kWarn, kDevice, 0, "the pinned window cannot be registered, copies go through staging: %s",
           cu.text(r).c_str());
    return 0;
  }
  registered_.emplace(begin, end);
  return std::min(bytes, end - addr);
}

}  // namespace devproxy::hal::cuda
