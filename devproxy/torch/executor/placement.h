// SPDX-License-Identifier: Apache-2.0
// Output placement: while an op runs, an allocation of exactly an output's size is served from that output's device
// memory, so that most results need no copy. The op does not know; whoever calls it compares pointers afterwards.
// The device's allocator (cpu.cc, cuda.cc) asks take() before it asks torch's.
//
// Some ops make temporaries of a result's size first: oneDNN's convolutions have their gradients in a layout of their own,
// and then as torch wants them. So a thread remembers of an op which of its allocations became a result, and serves that
// one the next time. Being wrong costs a copy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace devproxy::aten {

namespace placement {

// Device addresses are a fixed part of the address space that neither heap nor driver ever uses.
bool is_device_address(const void* p);
// An offered buffer of that size, or nullptr. This thread's.
void* take(size_t bytes);
// take() gave nothing, and torch's allocator gave this.
void note(size_t bytes, const void* p);
// A temporary that went before the op ended: the next allocation of that size may have the buffer.
void give_back(void* p);

}  // namespace placement

// Offers buffers to the allocations of this thread for the length of the scope.
class PlacementScope {
 public:
  // op: names the op, for what is remembered of it.
  explicit PlacementScope(const void* op) noexcept;
  ~PlacementScope();
  PlacementScope(const PlacementScope&) = delete;
  PlacementScope& operator=(const PlacementScope&) = delete;

  // Before the op. Gives the offer's number.
  size_t offer(void* p, size_t bytes);
  // The op begins: from now on allocations are served.
  void open();
  void close();  // no more allocations are served; what was served stays valid
  // After the op: the result for offer `number` is at p. Then, once: remember.
  void became(size_t number, const void* p);
  void remember();

 private:
  uint64_t key_;
};

}  // namespace devproxy::aten
