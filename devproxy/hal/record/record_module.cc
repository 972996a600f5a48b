// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/record/record_module.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace devproxy::hal::record {

namespace {

// cuda.h: CU_DEVICE_ATTRIBUTE_*
constexpr size_t kMaxThreadsPerBlock = 1, kMaxBlockDimX = 2, kMaxGridDimX = 5, kThreadsPerMultiprocessor = 39,
                 kBlocksPerMultiprocessor = 106;
constexpr uint32_t kZeroesBytes = 1 << 16;
// Registers are given to a warp in units of 256, warps to the four parts of a multiprocessor (CUDA programming guide,
// "Compute Capabilities").
constexpr uint32_t kRegisters = 65536, kRegisterUnit = 256, kWarp = 32, kParts = 4;
constexpr uint64_t kSharedUnit = 128;
constexpr uint64_t kPortableClusterBlocks = 8, kMostClusterBlocks = 16;

// Warps that a multiprocessor has registers for; 0 registers: nobody knows, so no limit.
uint32_t warps_by_registers(uint32_t regs) {
  if (regs == 0) return UINT32_MAX / kWarp;
  const uint32_t of_warp = (std::min(regs, 255u) * kWarp + kRegisterUnit - 1) / kRegisterUnit * kRegisterUnit;
  return kRegisters / kParts / of_warp * kParts;
}

}  // namespace

StatusOr<std::shared_ptr<RecordModule>> RecordModule::load(
    const uint8_t* image, size_t image_bytes, const image::Arch& device, const PlaceGlobal& place,
    const std::function<Status(uint64_t addr, const void* from, size_t bytes)>& write) {
  auto facts = image::parse_for(image, image_bytes, device);
  if (!facts.ok()) return std::move(facts).status();
  auto module = std::make_shared<RecordModule>();
  module->facts_ = std::move(*facts);
  for (size_t i = 0; i < module->facts_.kernels.size(); i++)
    module->kernels_.emplace(module->facts_.kernels[i].name, i);
  const std::vector<uint8_t> zeroes(kZeroesBytes);
  for (image::Global& global : module->facts_.globals) {
    // A compiler's own constants ($str): no program can ask for them, and no kernel reads them here.
    if (global.bytes == 0 || global.name.starts_with('$') || module->globals_.contains(global.name)) continue;
    PlacedGlobal placed{{0, global.bytes}, global.managed};
    if (!global.managed) {
      placed.place.addr = place(global.bytes);
      if (!placed.place.addr)
        return Status(kOutOfMemory, "no device memory for the module's variable " + global.name + " of " +
                                        std::to_string(global.bytes) + " bytes");
      if (!global.initial.empty())
        if (Status s = write(placed.place.addr, global.initial.data(), global.initial.size()); !s.ok()) return s;
      for (uint64_t at = global.initial.size(); at < global.bytes; at += kZeroesBytes)
        if (Status s =
                write(placed.place.addr + at, zeroes.data(), std::min<uint64_t>(kZeroesBytes, global.bytes - at));
            !s.ok())
          return s;
    }
    module->globals_.emplace(global.name, placed);
    global.initial = {};  // it lies in device memory now
  }
  return module;
}

const image::Kernel* RecordModule::kernel(const std::string& name) const {
  const auto it = kernels_.find(name);
  return it == kernels_.end() ? nullptr : &facts_.kernels[it->second];
}

uint32_t threads_by_registers(uint32_t regs) { return std::min<uint32_t>(1024, warps_by_registers(regs) * kWarp); }

uint32_t active_blocks(const RecordFunction& f, uint64_t threads, uint64_t dynamic_shared,
                       const std::array<int32_t, 256>& attributes) {
  const auto limit = [&](size_t attribute) { return static_cast<uint64_t>(attributes[attribute]); };
  if (threads == 0 || threads > f.max_threads || dynamic_shared > f.max_dynamic_shared) return 0;
  const uint64_t warps = (threads + kWarp - 1) / kWarp;
  uint64_t blocks = std::min(limit(kBlocksPerMultiprocessor), limit(kThreadsPerMultiprocessor) / (warps * kWarp));
  blocks = std::min(blocks, warps_by_registers(f.kernel.regs) / warps);
  const uint64_t shared = f.kernel.shared_bytes + dynamic_shared + limit(kSystemSharedPerBlock);
  blocks = std::min(blocks, limit(kSharedPerMultiprocessor) / ((shared + kSharedUnit - 1) / kSharedUnit * kSharedUnit));
  return static_cast<uint32_t>(blocks);
}

std::vector<int32_t> function_attributes(const RecordFunction& f, const image::Facts& facts, const image::Arch& gpu) {
  const image::Kernel& k = f.kernel;
  const auto version = [](const image::Arch& of) { return static_cast<int32_t>(of.major * 10 + of.minor); };
  const auto number = [](uint64_t n) { return static_cast<int32_t>(std::min<uint64_t>(n, INT32_MAX)); };
  // Threads, static shared, constant, local, registers, PTX and binary version, cache mode, dynamic shared, carve-out
  // (-1: the default), cluster: must be set, width, height, depth, any size allowed, scheduling.
  return {number(f.max_threads),
          number(k.shared_bytes),
          number(k.const_bytes),
          number(k.local_bytes),
          number(k.regs ? k.regs : 32),  // PTX: no compiler has chosen; a number that programs can divide by
          version(facts.arch),
          version(facts.is_ptx ? gpu : facts.arch),  // a driver compiles it for what it has
          0,
          number(f.max_dynamic_shared),
          -1,
          k.needs_cluster && k.cluster[0] == 0,
          number(k.cluster[0]),
          number(k.cluster[1]),
          number(k.cluster[2]),
          0,
          0};
}

uint64_t cluster_of(const RecordFunction& f, const LaunchAttribute* attributes, size_t n, uint32_t (*size)[3]) {
  std::copy_n(f.kernel.cluster, 3, *size);
  for (size_t i = 0; i < n; i++)
    if (attributes[i].id == kLaunchClusterDimension) std::memcpy(*size, attributes[i].value, sizeof *size);
  for (uint32_t& dimension : *size) dimension = std::max(dimension, 1u);
  return uint64_t{(*size)[0]} * (*size)[1] * (*size)[2];
}

std::string why_not(const RecordFunction& f, const LaunchArgs& args, const std::array<int32_t, 256>& attributes) {
  const auto text = [](uint64_t n) { return std::to_string(n); };
  const auto limit = [&](size_t attribute) { return static_cast<uint32_t>(attributes[attribute]); };
  if (f.module.expired()) return "its module was unloaded";
  const image::Kernel& k = f.kernel;
  uint32_t cluster[3];
  bool cooperative = false, named_cluster = k.cluster[0] != 0;
  const uint64_t cluster_blocks = cluster_of(f, args.attributes, args.n_attributes, &cluster);
  for (size_t i = 0; i < args.n_attributes; i++) {
    cooperative |= args.attributes[i].id == kLaunchCooperative;
    named_cluster |= args.attributes[i].id == kLaunchClusterDimension;
  }
  if (k.needs_cluster && !named_cluster) return "the kernel needs a cluster size, and the launch has none";
  if (cluster_blocks > (f.any_cluster ? kMostClusterBlocks : kPortableClusterBlocks))
    return "its cluster has " + text(cluster_blocks) + " blocks, more than the function may have";
  for (size_t i = 0; i < 3; i++) {
    if (args.grid[i] == 0 || args.grid[i] > limit(kMaxGridDimX + i))
      return "dimension " + text(i) + " of its grid is " + text(args.grid[i]) + ", the limit is " +
             text(limit(kMaxGridDimX + i));
    if (args.block[i] == 0 || args.block[i] > limit(kMaxBlockDimX + i))
      return "dimension " + text(i) + " of its block is " + text(args.block[i]) + ", the limit is " +
             text(limit(kMaxBlockDimX + i));
    if (k.block[i] && args.block[i] != k.block[i])
      return "dimension " + text(i) + " of its block is " + text(args.block[i]) + ", the kernel requires " +
             text(k.block[i]);
    if (args.grid[i] % cluster[i])
      return "dimension " + text(i) + " of its grid is " + text(args.grid[i]) + ", no multiple of its cluster's, " +
             text(cluster[i]);
    if (k.cluster[i] && cluster[i] != k.cluster[i])
      return "dimension " + text(i) + " of its cluster is " + text(cluster[i]) + ", the kernel requires " +
             text(k.cluster[i]);
  }
  const uint64_t threads = uint64_t{args.block[0]} * args.block[1] * args.block[2];
  if (threads > limit(kMaxThreadsPerBlock) || threads > f.max_threads)
    return "its block has " + text(threads) + " threads, the limit is " +
           text(std::min(limit(kMaxThreadsPerBlock), f.max_threads));
  if (args.shared_bytes > f.max_dynamic_shared)
    return "it asks for " + text(args.shared_bytes) + " bytes of dynamic shared memory beside " + text(k.shared_bytes) +
           " static ones, the function's limit is " + text(f.max_dynamic_shared);
  if (uint64_t{args.shared_bytes} + k.shared_bytes > limit(kSharedOptinAttribute))
    return "it asks for " + text(uint64_t{args.shared_bytes} + k.shared_bytes) +
           " bytes of shared memory, the limit is " + text(limit(kSharedOptinAttribute));
  if (const uint64_t blocks = uint64_t{args.grid[0]} * args.grid[1] * args.grid[2]; cooperative) {
    const uint64_t most = uint64_t{active_blocks(f, threads, args.shared_bytes, attributes)} * limit(kMultiprocessors);
    if (blocks > most)
      return "it is cooperative and has " + text(blocks) + " blocks, of which " + text(most) + " can run at once";
  }
  // A block that came whole (`extra`) may end in the padding of a C struct.
  bool fits = args.params_bytes == k.params_bytes;
  for (uint64_t align = 4; align <= 128; align *= 2)
    fits |= args.params_bytes == (k.params_bytes + align - 1) / align * align;
  if (!fits)
    return "its parameter block has " + text(args.params_bytes) + " bytes, the image says " + text(k.params_bytes);
  return {};
}

}  // namespace devproxy::hal::record
