// SPDX-License-Identifier: Apache-2.0
// What an NVIDIA module image says about itself: a cubin (ELF), PTX text, or a fat binary of both. Bytes in, facts out.
//
// No vendor header and no vendor tool is used: the layout of fat binaries and of the .nv.* sections was learnt from
// what nvcc 13.0 writes, and tests/native/test_image.py holds every fact against an oracle that does not come from here.
// What was not seen in such bytes is refused by name.
//
// Safe against hostile bytes: every offset and length is checked against the image before it is used, sizes and counts
// are bounded, no text is taken to end in NUL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "devproxy/csrc/base/status.h"

namespace devproxy::hal::image {

// A chip, or what code was made for: sm_90a is {9, 0, 'a'}.
struct Arch {
  uint32_t major = 0, minor = 0;
  char variant = 0;                            // 0; 'a': exactly this chip; 'f': this chip and later ones of its family
  std::string text(const char* prefix) const;  // "sm_90a"
  bool operator==(const Arch&) const = default;
};

// May a device of that capability run machine code, or compile PTX, made for `code`? CUDA's rule: machine code runs on
// the same major version with an equal or higher minor one, PTX on any that is not older; 'a' on exactly that chip, 'f'
// on the family (same major version, equal or higher minor one).
bool runs_elf(const Arch& code, const Arch& device);
bool runs_ptx(const Arch& code, const Arch& device);

// What a kernel and a variable may have at most, whatever they are written in: more is damage.
inline constexpr size_t kMaxParams = 8192;
inline constexpr uint32_t kMaxParamBytes = 32764;
inline constexpr uint64_t kMaxGlobalBytes = 1ull << 38;

enum class Form : uint8_t { kCubin, kFatbin, kText };

// Is the image as long as it says? A driver gets a pointer without a length and would read on. Text is only recognised.
// The wrapper struct of a fat binary holds a pointer of the client's process and is refused.
StatusOr<Form> check_whole(const uint8_t* image, size_t bytes);

// Of what a GPU's compiler writes: what it is, for people to read; else null.
const char* gpu_code(const uint8_t* image, size_t bytes);

struct Param {
  uint32_t offset_bytes = 0, size_bytes = 0;
};

struct Kernel {
  std::string name;
  std::vector<Param> params;  // by ordinal; offsets from the first byte of the parameter block
  uint32_t params_bytes = 0;  // length of the block
  uint32_t regs = 0;          // 0 in PTX: nobody has compiled it
  uint32_t shared_bytes = 0;  // static
  uint32_t local_bytes = 0;   // per thread
  uint32_t const_bytes = 0;   // the module's __constant__ variables
  uint32_t max_threads = 0;   // of a block: what the kernel itself asks for; 0 where it does not say
  uint32_t block[3] = {};     // the one block size that it can be launched with; 0 where it does not say
  uint32_t cluster[3] = {};   // the one cluster size; 0 where it does not say
  bool needs_cluster = false;
  bool grid_sync = false;  // asks for the grid's barrier (seen in PTX only): needs a cooperative launch
  bool calls_printf = false, calls_malloc = false;
};

struct Global {
  std::string name;
  uint64_t bytes = 0;
  uint32_t align = 1;
  bool constant = false, managed = false;
  std::vector<uint8_t> initial;  // the rest of `bytes` is zero
  bool holds_addresses = false;  // the initial value has addresses in it, which only a loader can know
};

// One compiled object: a cubin, or a PTX text.
struct Facts {
  Arch arch;
  bool is_ptx = false;
  std::vector<Kernel> kernels;
  std::vector<Global> globals;
  const Kernel* kernel(std::string_view name) const;
};

// Of an entry of a fat binary.
enum class EntryKind : uint16_t { kPtx = 1, kElf = 2 };
enum class Packing : uint8_t { kNone, kLz4, kZstd };
struct Entry {
  EntryKind kind = EntryKind::kElf;
  Arch arch;
  Packing packing = Packing::kNone;
  size_t offset = 0, stored_bytes = 0;  // of the body, inside the image
  size_t bytes = 0;                     // unpacked
};

// The entries that a driver could take, in the order of the image. Others (intermediate code, resources) are left out.
StatusOr<std::vector<Entry>> fatbin_entries(const uint8_t* image, size_t bytes);
// What that entry holds. The image must be the one that it was found in.
StatusOr<std::vector<uint8_t>> unpack(const uint8_t* image, size_t bytes, const Entry& entry);

StatusOr<Facts> parse_cubin(const uint8_t* image, size_t bytes);
// device: parameters with an alignment above 16 lie elsewhere on each generation of chips.
StatusOr<Facts> parse_ptx(std::string_view text, const Arch& device);

// What a device would take: machine code for it where there is some, the newest and most special; else PTX.
StatusOr<Facts> parse_for(const uint8_t* image, size_t bytes, const Arch& device);

}  // namespace devproxy::hal::image
