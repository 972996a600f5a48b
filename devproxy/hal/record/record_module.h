// SPDX-License-Identifier: Apache-2.0
// A module of the recording GPU: what an image says, and where its variables lie.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_number.gen.h"
#include "devproxy/hal/hal.h"
#include "devproxy/hal/image/image.h"

namespace devproxy::hal::record {

inline constexpr size_t kMultiprocessors = cuda_number::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                        kSharedPerMultiprocessor =
                            cuda_number::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
                        kSharedOptinAttribute = cuda_number::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                        kSystemSharedPerBlock = cuda_number::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK;
inline constexpr uint32_t kSharedWithoutOptin = 48 << 10;

class RecordModule final : public Module {
 public:
  struct PlacedGlobal {
    Space::Global place;
    bool managed = false;
  };
  // write: puts bytes into device memory.
  static StatusOr<std::shared_ptr<RecordModule>> load(
      const uint8_t* image, size_t image_bytes, const image::Arch& device, const PlaceGlobal& place,
      const std::function<Status(uint64_t addr, const void* from, size_t bytes)>& write);

  const image::Facts& facts() const { return facts_; }
  const image::Kernel* kernel(const std::string& name) const;
  const std::unordered_map<std::string, PlacedGlobal>& globals() const { return globals_; }
  uint64_t id = 0;  // in the record

 private:
  image::Facts facts_;
  std::unordered_map<std::string, size_t> kernels_;
  std::unordered_map<std::string, PlacedGlobal> globals_;
};

struct RecordFunction final : Function {
  std::weak_ptr<RecordModule> module;  // weak: a launch after its unloading is noticed
  image::Kernel kernel;
  uint32_t max_threads = 0;         // per block, by the image and by registers
  uint32_t max_dynamic_shared = 0;  // what the program may ask for: 48 KB, or what it opted in to
  bool any_cluster = false;         // it opted in to clusters that not every chip takes
  uint64_t module_id = 0;
};

// Threads of a block that a device of 64 K registers can hold, 1024 at most.
uint32_t threads_by_registers(uint32_t regs);
// Blocks of that many threads that one multiprocessor holds at once: by threads, registers and shared memory.
uint32_t active_blocks(const RecordFunction& function, uint64_t threads, uint64_t dynamic_shared,
                       const std::array<int32_t, 256>& attributes);
// By CUfunction_attribute.
std::vector<int32_t> function_attributes(const RecordFunction& function, const image::Facts& facts,
                                         const image::Arch& gpu);
// Blocks of one cluster of a launch, as its attributes or its image say it; 1 for none.
uint64_t cluster_of(const RecordFunction& function, const LaunchAttribute* attributes, size_t n, uint32_t (*size)[3]);
// Why a launch cannot be; empty where it can. attributes: the device's.
std::string why_not(const RecordFunction& function, const LaunchArgs& args, const std::array<int32_t, 256>& attributes);

}  // namespace devproxy::hal::record
