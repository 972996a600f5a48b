// SPDX-License-Identifier: Apache-2.0
#include <elf.h>

#include <algorithm>

#include "devproxy/hal/image/bytes.h"
#include "devproxy/hal/image/image.h"

namespace devproxy::hal::image {

namespace {

constexpr uint32_t kFatbinMagic = 0xBA55ED50, kWrapperMagic = 0x466243B1;

}  // namespace

const char* gpu_code(const uint8_t* image, size_t bytes) {
  const Bytes all(image, bytes);
  if (all.at<uint32_t>(0) == kFatbinMagic) return "a fat binary of nvcc";
  if (const auto head = all.at<Elf64_Ehdr>(0); head && std::memcmp(head->e_ident, ELFMAG, SELFMAG) == 0)
    return head->e_machine == kCudaMachine ? "a cubin, machine code of a GPU (Triton's, nvcc's, NVRTC's)" : nullptr;
  // PTX begins with comments, then this.
  const std::string_view text(reinterpret_cast<const char*>(image), std::min<size_t>(bytes, 4096));
  return text.find(".version ") < text.find('\0') ? "PTX" : nullptr;
}

StatusOr<Form> check_whole(const uint8_t* image, size_t bytes) {
  const Bytes all(image, bytes);
  const Status bad(kInvalidImage, "the module image is shorter than it says: a truncated cubin or fat binary");
  if (bytes < 16)
    return Status(kInvalidImage,
                  "the module image has " + std::to_string(bytes) + " bytes: neither cubin, fat binary nor PTX");
  const auto magic = all.get<uint32_t>(0);
  if (magic == kWrapperMagic)
    return Status(kInvalidImage,
                  "the module image is a fat binary's wrapper, which only points to one: send what it points to");
  if (magic == kFatbinMagic) {
    if (!all.has(all.get<uint16_t>(6), all.get<uint64_t>(8))) return bad;
    return Form::kFatbin;
  }
  if (std::memcmp(image, ELFMAG, SELFMAG) != 0) return Form::kText;
  const auto head = all.at<Elf64_Ehdr>(0);
  if (!head || head->e_ident[EI_CLASS] != ELFCLASS64 || (head->e_shnum && head->e_shentsize != sizeof(Elf64_Shdr)) ||
      !all.has(head->e_shoff, uint64_t{head->e_shnum} * sizeof(Elf64_Shdr)) ||
      (head->e_phnum && head->e_phentsize != sizeof(Elf64_Phdr)) ||
      !all.has(head->e_phoff, uint64_t{head->e_phnum} * sizeof(Elf64_Phdr)))
    return bad;
  for (uint32_t i = 0; i < head->e_shnum; i++) {
    const auto section = all.get<Elf64_Shdr>(head->e_shoff + i * sizeof(Elf64_Shdr));
    if (section.sh_type != SHT_NOBITS && !all.has(section.sh_offset, section.sh_size)) return bad;
  }
  return Form::kCubin;
}

}  // namespace devproxy::hal::image
