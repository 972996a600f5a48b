#include "devproxy/hal/record/record_module.h"

#include <algorithm>
#include <utility>

namespace devproxy::hal::record {

namespace {

// cuda.h: CU_DEVICE_ATTRIBUTE_*
constexpr size_t kMaxThreadsPerBlock = 1, kMaxBlockDimX = 2, kMaxGridDimX = 5;
constexpr uint32_t kZeroesBytes = 1 << 16;

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

uint32_t threads_by_registers(uint32_t regs) {
  // Registers are given to a warp in units of 256, warps to the four parts of a multiprocessor (CUDA programming guide,
  // "Compute Capabilities").
  constexpr uint32_t kRegisters = 65536, kUnit = 256, kWarp = 32, kMost = 1024;
  if (regs == 0) return kMost;
  const uint32_t of_warp = (std::min(regs, 255u) * kWarp + kUnit - 1) / kUnit * kUnit;
  return std::min(kMost, kRegisters / of_warp / 4 * 4 * kWarp);
}

std::string why_not(const RecordFunction& f, const LaunchArgs& args, const std::array<int32_t, 256>& attributes) {
  const auto text = [](uint64_t n) { return std::to_string(n); };
  const auto limit = [&](size_t attribute) { return static_cast<uint32_t>(attributes[attribute]); };
  if (f.module.expired()) return "its module was unloaded";
  const image::Kernel& k = f.kernel;
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
    if (k.cluster[i] && args.grid[i] % k.cluster[i])
      return "dimension " + text(i) + " of its grid is " + text(args.grid[i]) +
             ", no multiple of the kernel's cluster, " + text(k.cluster[i]);
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
  // A block that came whole (`extra`) may end in the padding of a C struct.
  bool fits = args.params_bytes == k.params_bytes;
  for (uint64_t align = 4; align <= 128; align *= 2)
    fits |= args.params_bytes == (k.params_bytes + align - 1) / align * align;
  if (!fits)
    return "its parameter block has " + text(args.params_bytes) + " bytes, the image says " + text(k.params_bytes);
  return {};
}

}  // namespace devproxy::hal::record
