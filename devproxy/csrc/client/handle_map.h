// SPDX-License-Identifier: Apache-2.0
// Virtual handle -> client object. Look-ups take no lock: two levels of atomics that only ever grow.
//
// An entry's object is immutable in identity while its handle is live. remove() clears the handle first, so a stale
// handle is an error and not somebody else's object; using a handle while another thread destroys it is the job's
// own race, as with the real driver, and objects are recycled through the owner's pool, never unmapped.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "devproxy/csrc/wire/handle.h"

namespace devproxy::client {

template <class T, HandleKind kKind>
class HandleMap {
 public:
  T* get(uint64_t value) const {
    if (VHandle{value}.kind() != kKind) return nullptr;
    const uint16_t i = VHandle{value}.index();
    Block* block = blocks_[i / kPerBlock].load(std::memory_order_acquire);
    if (!block) return nullptr;
    Entry& e = block->entries[i % kPerBlock];
    return e.value.load(std::memory_order_acquire) == value ? &e.object : nullptr;
  }

  // Makes a handle; device goes into the serial number so that a handle alone names its attachment. nullptr and value
  // 0 when all 65,536 indices are in use.
  T* add(int device, uint64_t* value) {
    std::lock_guard lock(mu_);
    uint32_t i;
    if (!free_.empty()) {
      i = free_.back();
      free_.pop_back();
    } else if (next_ < kIndices) {
      i = next_++;
      auto& slot = blocks_[i / kPerBlock];
      if (!slot.load(std::memory_order_relaxed)) slot.store(new Block, std::memory_order_release);
    } else {
      *value = 0;
      return nullptr;
    }
    Entry& e = blocks_[i / kPerBlock].load(std::memory_order_relaxed)->entries[i % kPerBlock];
    *value = VHandle::make(kKind, ++serial_ << 4 | static_cast<uint64_t>(device), static_cast<uint16_t>(i)).value;
    return &e.object;
  }
  // Makes the handle answer look-ups; the object is filled before.
  void publish(uint64_t value) { entry(value).value.store(value, std::memory_order_release); }

  void remove(uint64_t value) {
    std::lock_guard lock(mu_);
    entry(value).value.store(0, std::memory_order_release);
    free_.push_back(VHandle{value}.index());
  }

  template <class F>
  void for_each(F f) {
    std::lock_guard lock(mu_);
    for (uint32_t i = 0; i < next_; ++i) {
      Entry& e = blocks_[i / kPerBlock].load(std::memory_order_relaxed)->entries[i % kPerBlock];
      if (const uint64_t v = e.value.load(std::memory_order_relaxed)) f(v, e.object);
    }
  }

  static int device_of(uint64_t value) { return static_cast<int>(VHandle{value}.serial() & 0xf); }

 private:
  static constexpr uint32_t kIndices = 65536, kPerBlock = 1024;
  struct Entry {
    std::atomic<uint64_t> value{0};
    T object{};
  };
  struct Block {
    Entry entries[kPerBlock];
  };
  Entry& entry(uint64_t value) {
    const uint16_t i = VHandle{value}.index();
    return blocks_[i / kPerBlock].load(std::memory_order_acquire)->entries[i % kPerBlock];
  }

  std::atomic<Block*> blocks_[kIndices / kPerBlock] = {};
  std::mutex mu_;
  std::vector<uint16_t> free_;
  uint32_t next_ = 0;
  uint64_t serial_ = 0;
};

}  // namespace devproxy::client
