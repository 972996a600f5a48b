// SPDX-License-Identifier: Apache-2.0
// Cubins: ELF files with sections of their own (.nv.*). A kernel is a function symbol with the entry mark; its facts
// stand in sections that name its .text section as what they belong to.
//
//   .nv.info           attributes of all kernels: registers, stack
//   .nv.info.<kernel>  attributes of one: parameters, block size, cluster, functions of the runtime that it calls
//   .nv.shared.<k>     its static shared memory, without contents; from sm_90 on with 1024 bytes of the system's
//   .nv.global(.init)  variables of the module, .nv.constant3 its __constant__ ones
//   .nv.compat         what the code is compatible with
//
// An attribute is u8 format, u8 number, u16 value; with format 4 the value is a length and the contents follow.
// Learnt from cubins of nvcc 13.0 (ELF ABI 8) and of ptxas 12.8 (ABI 7), with readelf and cuobjdump beside them.
#include <elf.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "devproxy/hal/image/bytes.h"
#include "devproxy/hal/image/image.h"

namespace devproxy::hal::image {

namespace {

constexpr uint8_t kAbi7 = 7, kAbi8 = 8;
constexpr uint32_t kInfoType = 0x70000000, kCompatType = 0x70000086;  // SHT_LOPROC + 0, + 0x86
constexpr uint8_t kEntryMark = 0x10, kManagedMark = 0x04;             // in a symbol's st_other
constexpr uint32_t kOnlyThisAbi7 = 0x800;                             // in e_flags
constexpr uint8_t kCompatOnlyThis = 9;                                // in .nv.compat
constexpr uint64_t kSystemShared = 1024;                              // in each .nv.shared.<kernel> from sm_90 on

enum Attribute : uint8_t {
  kMaxThreads = 0x05,
  kParamCbank = 0x0a,
  kExterns = 0x0f,
  kRequiredBlock = 0x10,
  kFrameSize = 0x11,
  kParam = 0x17,
  kParamsBytes = 0x19,
  kRegisters = 0x2f,
  kCluster = 0x3d,
  kExplicitCluster = 0x3e,
  kParamV2 = 0x45,
};
constexpr uint8_t kSized = 4;

Status bad(const std::string& why) { return {kInvalidImage, "the cubin is damaged: " + why}; }

struct Section {
  std::string_view name;
  uint32_t type = 0, link = 0, info = 0;
  uint64_t flags = 0, size = 0, align = 0;
  Bytes bytes;  // empty for SHT_NOBITS
};

class Cubin {
 public:
  explicit Cubin(Bytes all) : all_(all) {}

  StatusOr<Facts> run() {
    for (const auto step : {&Cubin::header, &Cubin::sections, &Cubin::symbols, &Cubin::module_attributes,
                            &Cubin::kernel_sections, &Cubin::relocations})
      if (Status s = (this->*step)(); !s.ok()) return s;
    return std::move(facts_);
  }

 private:
  Status header() {
    const auto head = all_.at<Elf64_Ehdr>(0);
    if (!head || std::memcmp(head->e_ident, ELFMAG, SELFMAG) != 0) return bad("it has no ELF header");
    if (head->e_ident[EI_CLASS] != ELFCLASS64 || head->e_ident[EI_DATA] != ELFDATA2LSB)
      return bad("it is no 64-bit little-endian ELF file");
    if (head->e_machine != kCudaMachine)
      return {kInvalidImage, "the image is an ELF file for machine " + std::to_string(head->e_machine) +
                                 ", not an NVIDIA GPU's (190)"};
    if (head->e_type == ET_REL)
      return {kInvalidImage, "the cubin is relocatable device code (nvcc -dc): link it first (nvcc -dlink)"};
    head_ = *head;
    const uint8_t abi = head->e_ident[EI_ABIVERSION];
    if (abi != kAbi7 && abi != kAbi8)
      return {kInvalidImage, "the cubin has ELF ABI version " + std::to_string(abi) + ", known are 7 and 8"};
    const uint32_t number = abi == kAbi8 ? head->e_flags >> 8 & 0xff : head->e_flags & 0xff;
    facts_.arch = {number / 10, number % 10, '\0'};
    if (abi == kAbi7 && (head->e_flags & kOnlyThisAbi7)) facts_.arch.variant = 'a';
    return {};
  }

  Status sections() {
    uint64_t count = head_.e_shnum, names = head_.e_shstrndx;
    if (head_.e_shoff == 0) return bad("it has no sections");
    if (head_.e_shentsize != sizeof(Elf64_Shdr)) return bad("its section headers have another size");
    const auto first = all_.at<Elf64_Shdr>(head_.e_shoff);
    if (!first) return bad("its section table lies outside");
    if (count == 0) count = first->sh_size;  // elf(5): more than fit into the header
    if (names == SHN_XINDEX) names = first->sh_link;
    if (count > all_.size() / sizeof(Elf64_Shdr) || !all_.has(head_.e_shoff, count * sizeof(Elf64_Shdr)))
      return bad("its section table lies outside");
    sections_.resize(count);
    for (uint64_t i = 0; i < count; i++) {
      const auto h = all_.get<Elf64_Shdr>(head_.e_shoff + i * sizeof(Elf64_Shdr));
      Section& s = sections_[i];
      s.type = h.sh_type, s.link = h.sh_link, s.info = h.sh_info;
      s.flags = h.sh_flags, s.size = h.sh_size, s.align = h.sh_addralign;
      if (s.type == SHT_NULL || s.type == SHT_NOBITS) continue;
      const auto part = all_.part(h.sh_offset, h.sh_size);
      if (!part) return bad("section " + std::to_string(i) + " lies outside");
      s.bytes = *part;
    }
    if (names >= count) return bad("it has no section names");
    for (uint64_t i = 0; i < count; i++) {
      const auto offset = all_.get<Elf64_Shdr>(head_.e_shoff + i * sizeof(Elf64_Shdr)).sh_name;
      const auto name = sections_[names].bytes.name(offset);
      if (!name && sections_[i].type != SHT_NULL) return bad("a section's name lies outside");
      if (name) sections_[i].name = *name;
      if (sections_[i].type == kCompatType) compatibility(sections_[i].bytes);
    }
    return {};
  }

  void compatibility(Bytes b) {
    for (size_t at = 0; b.has(at, 4);) {
      const auto format = b.get<uint8_t>(at), number = b.get<uint8_t>(at + 1);
      const auto value = b.get<uint16_t>(at + 2);
      if (number == kCompatOnlyThis && format != kSized && (value & 0xff) != 0) facts_.arch.variant = 'a';
      at += format == kSized ? 4 + value : 4;
    }
  }

  // The section that a symbol lies in; 0 for none.
  uint32_t section_of(const Elf64_Sym& symbol, uint64_t index) const {
    uint32_t section = symbol.st_shndx;
    if (section == SHN_XINDEX)
      section = wide_.at<uint32_t>(index * 4).value_or(0);
    else if (section >= SHN_LORESERVE)
      section = 0;
    return section < sections_.size() ? section : 0;
  }

  Status symbols() {
    const auto table = std::find_if(sections_.begin(), sections_.end(), [](auto& s) { return s.type == SHT_SYMTAB; });
    if (table == sections_.end()) return {};  // code without a name: an empty module
    if (table->link >= sections_.size()) return bad("its symbols have no names");
    symbols_ = table->bytes, names_ = sections_[table->link].bytes;
    for (const Section& s : sections_)
      if (s.type == SHT_SYMTAB_SHNDX) wide_ = s.bytes;
    uint64_t constants = 0;
    for (const Section& s : sections_)
      if (s.name == ".nv.constant3") constants = s.size;
    for (uint64_t i = 0; symbols_.has(i * sizeof(Elf64_Sym), sizeof(Elf64_Sym)); i++) {
      const auto symbol = symbols_.get<Elf64_Sym>(i * sizeof(Elf64_Sym));
      const uint32_t in = section_of(symbol, i);
      const uint8_t type = ELF64_ST_TYPE(symbol.st_info);
      if (in == 0 || (type != STT_FUNC && type != STT_OBJECT)) continue;
      const auto name = names_.name(symbol.st_name);
      if (!name) return bad("a symbol's name lies outside");
      if (type == STT_FUNC && (symbol.st_other & kEntryMark)) {
        if (!kernel_of_text_.emplace(in, facts_.kernels.size()).second)
          return bad("two kernels share a section: " + std::string(*name));
        kernel_of_symbol_.emplace(i, facts_.kernels.size());
        facts_.kernels.emplace_back();
        facts_.kernels.back().name = *name;
        facts_.kernels.back().const_bytes = static_cast<uint32_t>(std::min<uint64_t>(constants, UINT32_MAX));
      } else if (type == STT_OBJECT) {
        if (Status s = global(symbol, in, *name); !s.ok()) return s;
      }
    }
    return {};
  }

  Status global(const Elf64_Sym& symbol, uint32_t in, std::string_view name) {
    const Section& s = sections_[in];
    const bool constant = s.name == ".nv.constant3";
    if (!constant && s.name != ".nv.global" && s.name != ".nv.global.init") return {};
    if (symbol.st_value > s.size || symbol.st_size > s.size - symbol.st_value || symbol.st_size > kMaxGlobalBytes)
      return bad("variable " + std::string(name) + " lies outside of its section");
    Global g;
    g.name = name;
    g.bytes = symbol.st_size;
    g.align = static_cast<uint32_t>(std::clamp<uint64_t>(s.align, 1, 4096));
    g.constant = constant;
    g.managed = symbol.st_other & kManagedMark;
    if (const auto initial = s.bytes.part(symbol.st_value, symbol.st_size); s.type != SHT_NOBITS && initial)
      g.initial.assign(initial->data(), initial->data() + initial->size());
    places_.push_back({in, symbol.st_value, facts_.globals.size()});
    facts_.globals.push_back(std::move(g));
    return {};
  }

  // Calls f(number, value, contents) for each attribute.
  template <class F>
  static Status each_attribute(Bytes b, const F& f) {
    for (uint64_t at = 0; at < b.size();) {
      if (!b.has(at, 4)) return bad("an attribute of .nv.info is cut off");
      const auto format = b.get<uint8_t>(at), number = b.get<uint8_t>(at + 1);
      const auto value = b.get<uint16_t>(at + 2);
      at += 4;
      Bytes contents;
      if (format == kSized) {
        const auto part = b.part(at, value);
        if (!part) return bad("an attribute of .nv.info is cut off");
        contents = *part;
        at += value;
      } else if (format < 1 || format > 4) {
        return bad("an attribute of .nv.info has format " + std::to_string(format));
      }
      if (Status s = f(number, value, contents); !s.ok()) return s;
    }
    return {};
  }

  Status module_attributes() {
    for (const Section& s : sections_) {
      if (s.type != kInfoType || s.name != ".nv.info") continue;
      Status done = each_attribute(s.bytes, [&](uint8_t number, uint16_t, Bytes contents) -> Status {
        if ((number != kRegisters && number != kFrameSize) || !contents.has(0, 8)) return {};
        const auto kernel = kernel_of_symbol_.find(contents.get<uint32_t>(0));
        if (kernel == kernel_of_symbol_.end()) return {};
        Kernel& k = facts_.kernels[kernel->second];
        (number == kRegisters ? k.regs : k.local_bytes) = contents.get<uint32_t>(4);
        return {};
      });
      if (!done.ok()) return done;
    }
    return {};
  }

  Status kernel_sections() {
    for (const Section& s : sections_) {
      const auto kernel = kernel_of_text_.find(s.info);
      if (kernel == kernel_of_text_.end()) continue;
      Kernel& k = facts_.kernels[kernel->second];
      if (s.type == SHT_NOBITS && s.name.starts_with(".nv.shared.")) {
        uint64_t shared = s.size;
        if (facts_.arch.major >= 9 && shared >= kSystemShared) shared -= kSystemShared;
        k.shared_bytes = static_cast<uint32_t>(std::min<uint64_t>(shared, UINT32_MAX));
      } else if (s.type == kInfoType && s.name != ".nv.info") {
        if (!described_.insert(kernel->second).second) return bad("kernel " + k.name + " is described twice");
        if (Status done = kernel_attributes(s.bytes, &k); !done.ok()) return done;
      }
    }
    return {};
  }

  Status kernel_attributes(Bytes b, Kernel* k) {
    struct Found {
      uint16_t offset = 0, bytes = 0;
    };
    std::map<uint16_t, Found> params;
    bool have_bytes = false;
    uint32_t cluster[3] = {};
    auto three = [](Bytes contents, uint32_t* to) {
      for (uint64_t i = 0; i < 3; i++) to[i] = contents.at<uint32_t>(i * 4).value_or(1);
    };
    auto product = [](const uint32_t* n) {
      return static_cast<uint32_t>(
          std::min<uint64_t>(std::min<uint64_t>(uint64_t{n[0]} * n[1], 1u << 20) * n[2], UINT32_MAX));
    };
    Status done = each_attribute(b, [&](uint8_t number, uint16_t value, Bytes contents) -> Status {
      switch (number) {
        case kParam:
        case kParamV2: {
          if (!contents.has(0, 12)) return bad("a parameter of kernel " + k->name + " is cut off");
          const auto ordinal = contents.get<uint16_t>(4), offset = contents.get<uint16_t>(6);
          const auto about = contents.get<uint32_t>(8);
          // 14 bits of size above 18 of other things; the later form, for more than 4 KB, has 16 below.
          const auto size = static_cast<uint16_t>(number == kParam ? about >> 18 : about & 0xffff);
          if (!params.emplace(ordinal, Found{offset, size}).second)
            return bad("kernel " + k->name + " has parameter " + std::to_string(ordinal) + " twice");
          return {};
        }
        case kParamsBytes:
          k->params_bytes = value;
          have_bytes = true;
          return {};
        case kMaxThreads: {
          uint32_t n[3];
          three(contents, n);
          k->max_threads = product(n);
          return {};
        }
        case kRequiredBlock:
          three(contents, k->block);
          k->max_threads = product(k->block);
          return {};
        case kCluster: three(contents, cluster); return {};
        case kExplicitCluster: k->needs_cluster = true; return {};
        case kExterns:
          for (uint64_t i = 0; contents.has(i, 4); i += 4) {
            const auto symbol = symbols_.at<Elf64_Sym>(uint64_t{contents.get<uint32_t>(i)} * sizeof(Elf64_Sym));
            const auto name = symbol ? names_.name(symbol->st_name) : std::nullopt;
            if (name == "vprintf") k->calls_printf = true;
            if (name == "malloc") k->calls_malloc = true;
          }
          return {};
        default: return {};
      }
    });
    if (!done.ok()) return done;
    if (k->needs_cluster) std::copy(cluster, cluster + 3, k->cluster);
    if (params.size() > kMaxParams) return bad("kernel " + k->name + " has more than 8192 parameters");
    uint32_t ordinal = 0, end = 0;
    for (const auto& [number, found] : params) {
      if (number != ordinal++) return bad("kernel " + k->name + " has no parameter " + std::to_string(ordinal - 1));
      k->params.push_back({found.offset, found.bytes});
      end = std::max(end, uint32_t{found.offset} + found.bytes);
    }
    if (!have_bytes) k->params_bytes = end;
    if (end > k->params_bytes || k->params_bytes > kMaxParamBytes)
      return bad("the parameters of kernel " + k->name + " do not fit into its block of " +
                 std::to_string(k->params_bytes) + " bytes");
    return {};
  }

  // Variables whose initial value holds addresses.
  Status relocations() {
    std::sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) {
      return a.section != b.section ? a.section < b.section : a.offset < b.offset;
    });
    for (const Section& s : sections_) {
      if ((s.type != SHT_RELA && s.type != SHT_REL) || s.info >= sections_.size()) continue;
      const uint64_t each = s.type == SHT_RELA ? sizeof(Elf64_Rela) : sizeof(Elf64_Rel);
      for (uint64_t at = 0; s.bytes.has(at, each); at += each) {
        const auto offset = s.bytes.get<Elf64_Rel>(at).r_offset;
        auto place = std::upper_bound(places_.begin(), places_.end(), Place{s.info, offset, 0},
                                      [](const Place& a, const Place& b) {
                                        return a.section != b.section ? a.section < b.section : a.offset < b.offset;
                                      });
        if (place == places_.begin() || (--place)->section != s.info) continue;
        Global& g = facts_.globals[place->global];
        if (offset - place->offset < g.bytes) g.holds_addresses = true;
      }
    }
    return {};
  }

  struct Place {
    uint32_t section = 0;
    uint64_t offset = 0;
    size_t global = 0;
  };

  const Bytes all_;
  Elf64_Ehdr head_{};
  std::vector<Section> sections_;
  Bytes symbols_, names_, wide_;
  std::unordered_map<uint32_t, size_t> kernel_of_text_;
  std::unordered_map<uint64_t, size_t> kernel_of_symbol_;
  std::unordered_set<size_t> described_;
  std::vector<Place> places_;
  Facts facts_;
};

}  // namespace

StatusOr<Facts> parse_cubin(const uint8_t* image, size_t bytes) { return Cubin(Bytes(image, bytes)).run(); }

}  // namespace devproxy::hal::image
