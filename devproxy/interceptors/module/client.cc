// SPDX-License-Identifier: Apache-2.0
// Modules, libraries and functions. An image travels once per server; a function's layout comes back with its handle
// and is kept here, so that a launch packs its parameters without asking.
#include "devproxy/interceptors/module/client.h"

#include <elf.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <unordered_map>
#include <vector>

#include "devproxy/csrc/base/image_hash.h"
#include "devproxy/csrc/client/variables.h"
#include "devproxy/interceptors/client_common.h"

namespace devproxy::sa::module {

using client::DeviceState;
using wire::Opcode;

namespace {

struct ModuleObj {
  int device = 0;
  bool of_library = false;
};
using ModuleMap = client::HandleMap<ModuleObj, HandleKind::kModule>;
ModuleMap& modules() {
  static auto* m = new ModuleMap;
  return *m;
}

// A library is an image that becomes a module on each device where it is used; a kernel is a name in it.
struct Library {
  uint64_t handle = 0;
  std::vector<uint8_t> image;
  uint64_t modules[client::kMaxDevices] = {};
  std::unordered_map<std::string, uint64_t> kernels;  // by name: asked for again, the same one
};
struct Kernel {
  Library* library = nullptr;
  std::string name;
  uint64_t functions[client::kMaxDevices] = {};
};
std::mutex g_library_mu;  // guards both tables and what they hold; taken before no other lock but a connection's
std::unordered_map<uint64_t, Library*>& libraries() {
  static auto* m = new std::unordered_map<uint64_t, Library*>;
  return *m;
}
std::unordered_map<uint64_t, Kernel*>& kernels() {
  static auto* m = new std::unordered_map<uint64_t, Kernel*>;
  return *m;
}

// The functions of each module by name: asked for again, the same one. And the names of all of them, in the device's
// order, once somebody has asked: so that this order is the same after a restore.
struct Names {
  std::unordered_map<std::string, uint64_t> functions;
  bool listed = false;
  std::vector<std::string> all;
};
std::mutex g_names_mu;  // guards the table, and is held over the question for a new one; taken after g_library_mu
std::unordered_map<uint64_t, Names>& names() {
  static auto* m = new std::unordered_map<uint64_t, Names>;
  return *m;
}

// A module that was unloaded leaves nothing that can be found.
void forget(uint64_t module) {
  {
    std::lock_guard lock(g_names_mu);
    if (const auto it = names().find(module); it != names().end()) {
      for (const auto& [name, function] : it->second.functions) functions().remove(function);
      names().erase(it);
    }
  }
  client::drop_variables(module);
  modules().remove(module);
}

// Can all of it be read? The length in a damaged image may be anything. True if the kernel cannot tell.
bool readable(const void* at, size_t bytes) {
  constexpr size_t kBatch = 512;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  uintptr_t next = reinterpret_cast<uintptr_t>(at);
  const uintptr_t end = next + bytes;
  if (end < next) return false;
  iovec pages[kBatch];
  char byte[kBatch];
  while (next < end) {  // a byte of each page
    size_t n = 0;
    for (; n < kBatch && next < end; next = (next / page + 1) * page)
      pages[n++] = {reinterpret_cast<void*>(next), 1};  // NOLINT(performance-no-int-to-ptr)
    const iovec here{byte, n};
    const ssize_t got = process_vm_readv(getpid(), &here, 1, pages, n, 0);
    if (got != static_cast<ssize_t>(n)) return got < 0 && errno != EFAULT;
  }
  return true;
}

// The image that the caller means. nvcc puts a wrapper into a program (.nvFatBinSegment) that points to it:
// magic, version, and at 8 the fat binary; in version 2, of relocatable device code, at 16 the linked one.
const void* unwrap(const void* image) {
  struct {
    uint32_t magic, version;
    const void* data[2];
  } wrapper;
  constexpr uint32_t kWrapperMagic = 0x466243b1;
  memcpy(&wrapper.magic, image, sizeof wrapper.magic);
  if (wrapper.magic != kWrapperMagic) return image;
  memcpy(&wrapper, image, sizeof wrapper);
  return wrapper.data[wrapper.version >= 2 && wrapper.data[1] ? 1 : 0];
}

// A table at that offset of an image, as a value of its own; false where it leads out of what can be read.
template <class Row>
bool read_table(const uint8_t* image, uint64_t offset, uint32_t count, uint32_t row_bytes, std::vector<Row>* rows) {
  constexpr uint64_t kFarthest = uint64_t{1} << 40;
  rows->clear();
  if (count == 0) return true;
  if (row_bytes != sizeof(Row) || offset > kFarthest || !readable(image + offset, count * sizeof(Row))) return false;
  rows->resize(count);
  memcpy(rows->data(), image + offset, count * sizeof(Row));
  return true;
}

// Length of an image that comes as a bare pointer (cuModuleLoadData has no size): ELF and fat binary say their own, PTX
// ends in NUL. 0: it says one that leads out of what can be read.
size_t image_bytes(const void* image) {
  const auto* p = static_cast<const uint8_t*>(image);
  uint64_t end = 0;
  auto reaches = [&end](uint64_t offset, uint64_t bytes) {
    const bool fits = offset <= UINT64_MAX - bytes;
    if (fits) end = std::max(end, offset + bytes);
    return fits;
  };
  if (memcmp(p, "\x50\xed\x55\xba", 4) == 0) {  // magic, u16 version, u16 bytes of this header, u64 bytes behind it
    uint16_t head = 0;
    uint64_t behind = 0;
    if (!readable(p, 16)) return 0;
    memcpy(&head, p + 6, sizeof head);
    memcpy(&behind, p + 8, sizeof behind);
    return reaches(head, behind) && readable(p, end) ? end : 0;
  }
  if (memcmp(p, ELFMAG, SELFMAG) != 0) return strlen(static_cast<const char*>(image)) + 1;
  Elf64_Ehdr h;
  if (!readable(p, sizeof h)) return 0;
  memcpy(&h, p, sizeof h);
  std::vector<Elf64_Shdr> sections;
  std::vector<Elf64_Phdr> segments;
  if (h.e_ident[EI_CLASS] != ELFCLASS64 || !read_table(p, h.e_shoff, h.e_shnum, h.e_shentsize, &sections) ||
      !read_table(p, h.e_phoff, h.e_phnum, h.e_phentsize, &segments))
    return 0;
  // The section table is usually last, but a segment or section may reach further.
  bool fits = reaches(0, sizeof h) && reaches(h.e_shoff, sections.size() * sizeof(Elf64_Shdr)) &&
              reaches(h.e_phoff, segments.size() * sizeof(Elf64_Phdr));
  for (const Elf64_Shdr& one : sections)
    fits = fits && (one.sh_type == SHT_NOBITS || reaches(one.sh_offset, one.sh_size));
  for (const Elf64_Phdr& one : segments) fits = fits && reaches(one.p_offset, one.p_filesz);
  return fits && readable(p, end) ? end : 0;
}

// One upload at a time: a server puts one image of a process together. Taken under g_library_mu, or alone.
std::mutex g_upload_mu;

// Sends the image in pieces that leave room for others' copies.
int32_t put_image(DeviceState* d, const void* image, size_t bytes, const ImageHash& hash) {
  constexpr size_t kPiece = kChunkBytes * kChunks / 4;
  const auto* p = static_cast<const uint8_t*>(image);
  for (size_t at = 0; at < bytes; at += kPiece) {
    wire::IMAGE_PUT_req req{};
    req.hash_low = hash.low;
    req.hash_high = hash.high;
    req.bytes = bytes;
    req.offset = at;
    const int32_t rc = d->conn().post_bulk(Opcode::IMAGE_PUT, req, {p + at, std::min(kPiece, bytes - at)});
    if (rc != kOk) return rc;
  }
  return kOk;
}

// Asks by a hash; the server wants the bytes only if no process of the job has sent them before.
int32_t load_image(DeviceState* d, VHandle module, const void* image, size_t bytes) {
  const ImageHash hash = image_hash(image, bytes);
  const wire::MODULE_LOAD_req req{module, hash.low, hash.high, bytes};
  wire::MODULE_LOAD_rep rep{};
  client::Reply reply{&rep, sizeof(rep)};
  int32_t rc = d->conn().call(Opcode::MODULE_LOAD, req, &reply);
  if (rep.prints) d->note_printing();
  if (rc != kOk || rep.known) return rc;
  std::lock_guard lock(g_upload_mu);
  // Again if a migration or a restore replaced the server in the middle.
  for (int attempt = 0; attempt < 4; ++attempt) {
    if ((rc = put_image(d, image, bytes, hash)) != kOk) return rc;
    rc = d->conn().call(Opcode::MODULE_LOAD, req, &reply);
    if (rep.prints) d->note_printing();
    if (rc != kOk || rep.known) return rc;
  }
  client::log(client::Level::kError, "a module image of %zu bytes changed while it was being loaded", bytes);
  return kInvalidImage;
}

int32_t load(DeviceState* d, const void* image, size_t bytes, bool of_library, uint64_t* out) {
  uint64_t value = 0;
  ModuleObj* m = modules().add(d->ordinal(), &value);
  if (!m) return kOutOfMemory;
  *m = {d->ordinal(), of_library};
  const int32_t rc = load_image(d, VHandle{value}, image, bytes);
  modules().publish(value);
  if (rc != kOk) {
    modules().remove(value);
    return rc;
  }
  *out = value;
  return kOk;
}

int32_t get_function(DeviceState* d, uint64_t module, const char* name, uint64_t* out) {
  std::lock_guard lock(g_names_mu);
  auto& known = names()[module].functions;
  if (const auto it = known.find(name); it != known.end()) {
    *out = it->second;
    return kOk;
  }
  uint64_t value = 0;
  FunctionObj* f = functions().add(d->ordinal(), &value);
  if (!f) return kOutOfMemory;
  wire::FUNCTION_GET_req req{};
  req.module = VHandle{module};
  req.function = VHandle{value};
  wire::FUNCTION_GET_rep rep{};
  uint8_t tail[sizeof(ReplySlot::data)];
  client::Reply reply{&rep, sizeof(rep), tail, sizeof(tail)};
  const int32_t rc = d->conn().call_bulk(Opcode::FUNCTION_GET, req, {name, strlen(name) + 1}, &reply);
  if (rc == kOk) {
    const size_t n_attributes = std::min<size_t>(rep.n_attributes, reply.tail_got / sizeof(int32_t));
    for (int i = 0; i < FunctionObj::kAttributes; ++i) {
      int32_t value = FunctionObj::kNoAttribute;
      if (static_cast<size_t>(i) < n_attributes) memcpy(&value, tail + i * sizeof(int32_t), sizeof(value));
      f->attributes[i] = value;
    }
    const uint8_t* const params = tail + n_attributes * sizeof(int32_t);
    const size_t n_params =
        std::min<size_t>(rep.n_params, (reply.tail_got - n_attributes * sizeof(int32_t)) / sizeof(Param));
    f->occupancy.answers.clear();
    f->name = name;
    f->module = module;
    f->device = d->ordinal();
    f->max_threads = rep.max_threads;
    f->shared_bytes = rep.shared_bytes;
    f->params.resize(n_params);
    if (n_params) memcpy(f->params.data(), params, n_params * sizeof(Param));
    f->param_bytes = 0;
    for (const Param& p : f->params) f->param_bytes = std::max(f->param_bytes, p.offset + p.size);
    const int32_t dynamic = f->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES];
    f->max_dynamic_shared = dynamic == FunctionObj::kNoAttribute
                                ? 49152 - static_cast<int>(std::min<uint32_t>(49152, rep.shared_bytes))
                                : dynamic;  // until it opts in
  }
  functions().publish(value);
  if (rc != kOk) {
    functions().remove(value);
    return rc;
  }
  *out = known[name] = value;
  return kOk;
}

// The names of all kernels of a module.
int32_t list_functions(DeviceState* d, uint64_t module, std::vector<std::string>* out) {
  std::lock_guard lock(g_names_mu);
  Names& known = names()[module];
  if (!known.listed) {
    std::vector<std::string> all;
    for (uint32_t wanted = 1; all.size() < wanted;) {
      wire::FUNCTION_NAMES_rep rep{};
      char tail[sizeof(ReplySlot::data)];
      client::Reply reply{&rep, sizeof(rep), tail, sizeof(tail)};
      const wire::FUNCTION_NAMES_req req{VHandle{module}, static_cast<uint32_t>(all.size()), 0};
      if (const int32_t rc = d->conn().call(Opcode::FUNCTION_NAMES, req, &reply); rc != kOk) return rc;
      wanted = rep.all;
      const char* at = tail;
      const char* const end = tail + reply.tail_got;
      for (uint32_t i = 0; i < rep.n && at < end; ++i) {
        const size_t length = strnlen(at, static_cast<size_t>(end - at));
        all.emplace_back(at, length);
        at += length + 1;
      }
      if (rep.n == 0 && all.size() < wanted) return kUnknown;
    }
    known.all = std::move(all);
    known.listed = true;
  }
  *out = known.all;
  return kOk;
}

// The library's module on a device, loaded at first use. g_library_mu held.
int32_t library_module(Library* l, DeviceState* d, uint64_t* out) {
  uint64_t& m = l->modules[d->ordinal()];
  if (!m)
    if (const int32_t rc = load(d, l->image.data(), l->image.size(), true, &m); rc != kOk) return rc;
  *out = m;
  return kOk;
}

struct File {
  void* data = MAP_FAILED;
  size_t bytes = 0;
  bool opened = false;
  explicit File(const char* path) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    opened = true;
    struct stat st{};
    if (fstat(fd, &st) == 0 && st.st_size > 0) {
      bytes = static_cast<size_t>(st.st_size);
      data = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    close(fd);
  }
  ~File() {
    if (ok()) munmap(data, bytes);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  bool ok() const { return data != MAP_FAILED; }
  CUresult error() const { return opened ? CUDA_ERROR_INVALID_IMAGE : CUDA_ERROR_FILE_NOT_FOUND; }
};

}  // namespace

FunctionMap& functions() {
  static auto* m = new FunctionMap;
  return *m;
}

FunctionObj* function_of_kernel(uint64_t value, uint64_t* out, int32_t* error) {
  *error = kInvalidHandle;
  DeviceState* d = nullptr;
  std::lock_guard lock(g_library_mu);
  const auto it = kernels().find(value);
  if (it == kernels().end()) return nullptr;
  if ((*error = client::current_device(&d)) != kOk) return nullptr;
  uint64_t& f = it->second->functions[d->ordinal()];
  if (!f) {
    uint64_t m = 0;
    if ((*error = library_module(it->second->library, d, &m)) != kOk) return nullptr;
    if ((*error = get_function(d, m, it->second->name.c_str(), &f)) != kOk) return nullptr;
  }
  *out = f;
  return functions().get(f);
}

// -- modules --------------------------------------------------------------------------------------------------------

CUresult cuModuleLoad(CUmodule* module, const char* fname) {
  DP_CURRENT(d);
  const File file(fname);
  if (!file.ok()) return file.error();
  uint64_t value = 0;
  const int32_t rc = load(d, file.data, file.bytes, false, &value);
  if (rc == kOk) *module = handle<CUmodule>(value);
  return result(rc);
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  DP_CURRENT(d);
  uint64_t value = 0;
  image = unwrap(image);
  const size_t bytes = image ? image_bytes(image) : 0;
  if (!bytes) return CUDA_ERROR_INVALID_IMAGE;
  const int32_t rc = load(d, image, bytes, false, &value);
  if (rc == kOk) *module = handle<CUmodule>(value);
  return result(rc);
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int, CUjit_option*, void**) {
  return module::cuModuleLoadData(module, image);  // the options steer a compiler that the software GPU does not have
}

CUresult cuModuleLoadFatBinary(CUmodule* module, const void* fatCubin) {
  return module::cuModuleLoadData(module, fatCubin);
}

CUresult cuModuleUnload(CUmodule hmod) {
  ModuleObj* m = modules().get(bits(hmod));
  if (!m || m->of_library) return CUDA_ERROR_INVALID_HANDLE;
  DeviceState* d = client::device_state_if_attached(m->device);
  if (const int32_t rc = d->wait_all(); rc != kOk) return result(rc);  // a kernel of it may still run
  const int32_t rc = d->conn().post(Opcode::MODULE_UNLOAD, wire::MODULE_UNLOAD_req{VHandle{bits(hmod)}});
  forget(bits(hmod));
  return result(rc);
}

CUresult cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name) {
  ModuleObj* m = modules().get(bits(hmod));
  if (!m) return CUDA_ERROR_INVALID_HANDLE;
  uint64_t value = 0;
  const int32_t rc = get_function(client::device_state_if_attached(m->device), bits(hmod), name, &value);
  if (rc == kOk) *hfunc = handle<CUfunction>(value);
  return result(rc);
}

namespace {
int32_t get_global(DeviceState* d, uint64_t module, const char* name, CUdeviceptr* dptr, size_t* bytes) {
  wire::MODULE_GLOBAL_req req{};
  req.module = VHandle{module};
  wire::MODULE_GLOBAL_rep rep{};
  client::Reply reply{&rep, sizeof(rep)};
  const int32_t rc = d->conn().call_bulk(Opcode::MODULE_GLOBAL, req, {name, strlen(name) + 1}, &reply);
  if (rc != kOk) return rc;
  if (const int32_t added =
          client::add_variable(d->ordinal(), module, rep.addr, rep.bytes, d->conn().is_device(rep.addr));
      added != kOk)
    return added;
  if (dptr) *dptr = rep.addr;
  if (bytes) *bytes = rep.bytes;
  return kOk;
}
}  // namespace

CUresult cuModuleGetGlobal_v2(CUdeviceptr* dptr, size_t* bytes, CUmodule hmod, const char* name) {
  ModuleObj* m = modules().get(bits(hmod));
  if (!m) return CUDA_ERROR_INVALID_HANDLE;
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  return result(get_global(client::device_state_if_attached(m->device), bits(hmod), name, dptr, bytes));
}

CUresult cuModuleGetFunctionCount(unsigned int* count, CUmodule mod) {
  ModuleObj* m = modules().get(bits(mod));
  if (!m) return CUDA_ERROR_INVALID_HANDLE;
  std::vector<std::string> all;
  const int32_t rc = list_functions(client::device_state_if_attached(m->device), bits(mod), &all);
  if (rc == kOk) *count = static_cast<unsigned>(all.size());
  return result(rc);
}

CUresult cuModuleEnumerateFunctions(CUfunction* functions, unsigned int numFunctions, CUmodule mod) {
  ModuleObj* m = modules().get(bits(mod));
  if (!m) return CUDA_ERROR_INVALID_HANDLE;
  DeviceState* d = client::device_state_if_attached(m->device);
  std::vector<std::string> all;
  int32_t rc = list_functions(d, bits(mod), &all);
  for (size_t i = 0; i < std::min<size_t>(numFunctions, all.size()) && rc == kOk; ++i) {
    uint64_t value = 0;
    rc = get_function(d, bits(mod), all[i].c_str(), &value);
    if (rc == kOk) functions[i] = handle<CUfunction>(value);
  }
  return result(rc);
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  *mode = CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

// -- libraries and kernels ------------------------------------------------------------------------------------------

namespace {
std::atomic<uint64_t> g_library_serial{1};

CUresult make_library(CUlibrary* library, const void* image, size_t bytes) {
  DP_CURRENT(d);
  auto* l = new Library;
  const auto* p = static_cast<const uint8_t*>(image);
  l->image.assign(p, p + bytes);  // cuda.h: the image may go away unless CU_LIBRARY_BINARY_IS_PRESERVED
  std::lock_guard lock(g_library_mu);
  uint64_t m = 0;
  if (const int32_t rc = library_module(l, d, &m); rc != kOk) {  // a bad image is an error here, not at the launch
    delete l;
    return result(rc);
  }
  const uint64_t value = VHandle::make(HandleKind::kModule, g_library_serial.fetch_add(1) << 4 | 0xf, 0xffff).value;
  l->handle = value;
  libraries()[value] = l;
  *library = handle<CUlibrary>(value);
  return CUDA_SUCCESS;
}

Library* library_of(CUlibrary library) {
  const auto it = libraries().find(bits(library));
  return it == libraries().end() ? nullptr : it->second;
}
Kernel* kernel_of(uint64_t value) {
  const auto it = kernels().find(value);
  return it == kernels().end() ? nullptr : it->second;
}

// The kernel of that name, which becomes a function of a device when it is used there. g_library_mu held.
uint64_t kernel_named(Library* l, const std::string& name) {
  uint64_t& value = l->kernels[name];
  if (!value) {
    value = VHandle::make(HandleKind::kFunction, g_library_serial.fetch_add(1) << 4 | 0xf, 0xffff).value;
    kernels()[value] = new Kernel{l, name, {}};
  }
  return value;
}

// From a device that has loaded it: one always has. g_library_mu held.
CUresult list_kernels(CUlibrary library, std::vector<std::string>* out) {
  Library* l = library_of(library);
  if (!l) return CUDA_ERROR_INVALID_HANDLE;
  for (int i = 0; i < client::kMaxDevices; ++i)
    if (l->modules[i]) return result(list_functions(client::device_state_if_attached(i), l->modules[i], out));
  return CUDA_ERROR_INVALID_HANDLE;  // half unloaded: a server is gone
}
}  // namespace

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned int, CUlibraryOption*,
                           void**, unsigned int) {
  code = unwrap(code);
  const size_t bytes = code ? image_bytes(code) : 0;
  return bytes ? make_library(library, code, bytes) : CUDA_ERROR_INVALID_IMAGE;
}

CUresult cuLibraryLoadFromFile(CUlibrary* library, const char* fileName, CUjit_option*, void**, unsigned int,
                               CUlibraryOption*, void**, unsigned int) {
  const File file(fileName);
  if (!file.ok()) return file.error();
  return make_library(library, file.data, file.bytes);
}

CUresult cuLibraryUnload(CUlibrary library) {
  std::lock_guard lock(g_library_mu);
  Library* l = library_of(library);
  if (!l) return CUDA_ERROR_INVALID_HANDLE;
  for (int i = 0; i < client::kMaxDevices; ++i) {
    if (!l->modules[i]) continue;
    DeviceState* d = client::device_state_if_attached(i);
    if (const int32_t rc = d->wait_all(); rc != kOk) return result(rc);
    const int32_t rc = d->conn().post(Opcode::MODULE_UNLOAD, wire::MODULE_UNLOAD_req{VHandle{l->modules[i]}});
    if (rc != kOk) return result(rc);
    forget(l->modules[i]);
    l->modules[i] = 0;  // should the next one fail
  }
  for (const auto& [name, value] : l->kernels) {
    delete kernel_of(value);
    kernels().erase(value);
  }
  libraries().erase(bits(library));
  delete l;
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* pKernel, CUlibrary library, const char* name) {
  DP_CURRENT(d);
  std::lock_guard lock(g_library_mu);
  Library* l = library_of(library);
  if (!l) return CUDA_ERROR_INVALID_HANDLE;
  if (const auto it = l->kernels.find(name); it != l->kernels.end()) {
    *pKernel = handle<CUkernel>(it->second);
    return CUDA_SUCCESS;
  }
  uint64_t m = 0, f = 0;
  if (const int32_t rc = library_module(l, d, &m); rc != kOk) return result(rc);
  if (const int32_t rc = get_function(d, m, name, &f); rc != kOk) return result(rc);
  const uint64_t value = kernel_named(l, name);
  kernel_of(value)->functions[d->ordinal()] = f;
  *pKernel = handle<CUkernel>(value);
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernelCount(unsigned int* count, CUlibrary lib) {
  std::lock_guard lock(g_library_mu);
  std::vector<std::string> all;
  const CUresult rc = list_kernels(lib, &all);
  if (rc == CUDA_SUCCESS) *count = static_cast<unsigned>(all.size());
  return rc;
}

CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned int numKernels, CUlibrary lib) {
  std::lock_guard lock(g_library_mu);
  std::vector<std::string> all;
  const CUresult rc = list_kernels(lib, &all);
  for (size_t i = 0; i < std::min<size_t>(numKernels, all.size()); ++i)
    kernels[i] = handle<CUkernel>(kernel_named(library_of(lib), all[i]));
  return rc;
}

// cuda.h: a unified function is one address for host and device. No device is said to have any
// (CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS): its address would be one of the server's process.
CUresult cuLibraryGetUnifiedFunction(void**, CUlibrary library, const char*) {
  std::lock_guard lock(g_library_mu);
  return library_of(library) ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuKernelGetLibrary(CUlibrary* pLib, CUkernel kernel) {
  std::lock_guard lock(g_library_mu);
  const Kernel* k = kernel_of(bits(kernel));
  if (!k) return CUDA_ERROR_INVALID_HANDLE;
  *pLib = handle<CUlibrary>(k->library->handle);
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule* pMod, CUlibrary library) {
  DP_CURRENT(d);
  std::lock_guard lock(g_library_mu);
  Library* l = library_of(library);
  if (!l) return CUDA_ERROR_INVALID_HANDLE;
  uint64_t m = 0;
  if (const int32_t rc = library_module(l, d, &m); rc != kOk) return result(rc);
  *pMod = handle<CUmodule>(m);
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUlibrary library, const char* name) {
  CUmodule m;
  if (const CUresult rc = module::cuLibraryGetModule(&m, library); rc != CUDA_SUCCESS) return rc;
  return module::cuModuleGetGlobal_v2(dptr, bytes, m, name);
}

CUresult cuKernelGetFunction(CUfunction* pFunc, CUkernel kernel) {
  uint64_t value = 0;
  int32_t error = kOk;
  if (!function_of(bits(kernel), &value, &error)) return result(error);
  *pFunc = handle<CUfunction>(value);
  return CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char** name, CUkernel hfunc) {
  std::lock_guard lock(g_library_mu);
  const Kernel* k = kernel_of(bits(hfunc));
  if (!k) return CUDA_ERROR_INVALID_HANDLE;
  *name = k->name.c_str();
  return CUDA_SUCCESS;
}

namespace {
CUresult param_info(uint64_t value, size_t index, size_t* offset, size_t* size) {
  int32_t error = kOk;
  const FunctionObj* f = function_of(value, &value, &error);
  if (!f) return result(error);
  if (index >= f->params.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = f->params[index].offset;
  if (size) *size = f->params[index].size;
  return CUDA_SUCCESS;
}
}  // namespace

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t* paramOffset, size_t* paramSize) {
  return param_info(bits(kernel), paramIndex, paramOffset, paramSize);
}

CUresult cuFuncLoad(CUfunction function) {
  uint64_t value = 0;
  int32_t error = kOk;
  return function_of(bits(function), &value, &error) ? CUDA_SUCCESS : result(error);
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction function) {
  const CUresult rc = module::cuFuncLoad(function);
  if (rc == CUDA_SUCCESS) *state = CU_FUNCTION_LOADING_STATE_LOADED;
  return rc;
}

}  // namespace devproxy::sa::module
