#include "devproxy/hal/soft/soft_module.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

namespace devproxy::hal::soft {

namespace {

// The dynamic loader believes what an image says about itself; a truncated one would end this process. So the parts
// that it maps are checked first. (An image that is whole but malicious runs the job's own code in the job's own
// server: nothing is gained by it.)
Status check_image(const uint8_t* image, size_t bytes) {
  const Status bad(kInvalidImage, "the module image is not a whole x86-64 shared object");
  Elf64_Ehdr head;
  if (bytes < sizeof head) return bad;
  std::memcpy(&head, image, sizeof head);
  if (std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 || head.e_ident[EI_CLASS] != ELFCLASS64 ||
      head.e_ident[EI_DATA] != ELFDATA2LSB || head.e_type != ET_DYN || head.e_machine != EM_X86_64 ||
      head.e_phentsize != sizeof(Elf64_Phdr) || head.e_phnum == 0)
    return bad;
  const uint64_t table_bytes = uint64_t{head.e_phnum} * sizeof(Elf64_Phdr);
  if (head.e_phoff > bytes || table_bytes > bytes - head.e_phoff) return bad;
  bool loads = false, dynamic = false;
  for (uint32_t i = 0; i < head.e_phnum; i++) {
    Elf64_Phdr part;
    std::memcpy(&part, image + head.e_phoff + i * sizeof part, sizeof part);
    if (part.p_type != PT_LOAD && part.p_type != PT_DYNAMIC) continue;
    if (part.p_offset > bytes || part.p_filesz > bytes - part.p_offset || part.p_memsz < part.p_filesz) return bad;
    if (part.p_type == PT_LOAD && (part.p_memsz > (1ull << 40) || part.p_vaddr > (1ull << 40))) return bad;
    loads |= part.p_type == PT_LOAD;
    dynamic |= part.p_type == PT_DYNAMIC;
  }
  if (!loads || !dynamic) return bad;
  return {};
}

}  // namespace

StatusOr<std::shared_ptr<SoftModule>> SoftModule::load(const uint8_t* image, size_t image_bytes, uint32_t ordinal,
                                                       const PlaceGlobal& place) {
  if (Status s = check_image(image, image_bytes); !s.ok()) return s;
  auto module = std::make_shared<SoftModule>();
  module->fd_ = memfd_create("devproxy-module", MFD_CLOEXEC);
  if (module->fd_ < 0) return Status::from_errno(kOutOfMemory, "making a file for the module image");
  for (size_t done = 0; done < image_bytes;) {
    const ssize_t n = ::write(module->fd_, image + done, image_bytes - done);
    if (n < 0) return Status::from_errno(kOutOfMemory, "writing the module image");
    done += static_cast<size_t>(n);
  }
  // The loader knows a library by its path, so two loaded modules must never share a descriptor number: the descriptor
  // stays open as long as the module is mapped (see the destructor).
  module->path_ = "/proc/self/fd/" + std::to_string(module->fd_);
  module->library_ = dlopen(module->path_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!module->library_) {
    const char* why = dlerror();
    return Status(kInvalidImage, std::string("the module cannot be loaded: ") + (why ? why : "no reason given"));
  }
  const void* symbol = dlsym(module->library_, "devproxy_soft_module");
  if (!symbol)
    return Status(kInvalidImage,
                  "the image has no symbol devproxy_soft_module: it is not a module of the software GPU");
  const auto* table = static_cast<const devproxy_soft_module_table*>(symbol);
  if (table->abi != DEVPROXY_SOFT_MODULE_ABI)
    return Status(kInvalidImage, "the module was built for module ABI " + std::to_string(table->abi) +
                                     ", this server has " + std::to_string(DEVPROXY_SOFT_MODULE_ABI) +
                                     ": rebuild the module");
  if (!table->get_function) return Status(kInvalidImage, "the module's table has no get_function");
  if (table->load) {
    char error[512] = "";
    if (table->load(ordinal, error, sizeof error) != 0) {
      error[sizeof error - 1] = 0;
      return Status(kInvalidImage, std::string("the module refuses to load: ") + error);
    }
  }
  for (uint32_t i = 0; i < table->n_globals; i++) {
    const devproxy_soft_global& global = table->globals[i];
    const uint64_t addr = global.bytes ? place(global.bytes) : 0;
    if (!addr) return Status(kOutOfMemory, std::string("no device memory for the module's global ") + global.name);
    if (global.initial)
      std::memcpy(reinterpret_cast<void*>(addr), global.initial, global.bytes);
    else
      std::memset(reinterpret_cast<void*>(addr), 0, global.bytes);
    module->globals_.push_back({global.name, {addr, global.bytes}});
  }
  module->table_ = table;
  module->function_names_ = static_cast<const char* const*>(dlsym(module->library_, "devproxy_soft_function_names"));
  return module;
}

SoftModule::~SoftModule() {
  bool resident = false;
  if (library_) {
    dlclose(library_);
    // A library may refuse to go (unique symbols, thread-local destructors). Then its path stays taken, and so must
    // the descriptor number, or the next module would be given this one's code.
    if (void* again = dlopen(path_.c_str(), RTLD_NOW | RTLD_NOLOAD)) {
      dlclose(again);
      resident = true;
    }
  }
  if (fd_ >= 0 && !resident) close(fd_);
}

}  // namespace devproxy::hal::soft
