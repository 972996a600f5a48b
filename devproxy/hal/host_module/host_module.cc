// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/host_module/host_module.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "devproxy/csrc/base/image_hash.h"
#include "devproxy/hal/host_module/descriptor.h"
#include "devproxy/hal/image/image.h"

namespace devproxy::hal {

namespace {

int check_range(void* cookie, uint64_t addr, uint64_t bytes) {
  const auto* check = static_cast<const RangeCheck*>(cookie);
  return check->owner->range_live(addr, bytes, check->position, check->on_submitter);
}

int take_memory(void* cookie, uint64_t bytes) { return static_cast<SpaceOwner*>(cookie)->take_memory(bytes); }
void give_memory(void* cookie, uint64_t bytes) { static_cast<SpaceOwner*>(cookie)->give_memory(bytes); }

std::string reason() {
  const char* why = dlerror();
  return why ? why : "no reason given";
}

// What executors need is loaded once and stays. Two files of one name cannot both be there: the second would be bound
// to the first one's symbols.
Status load_needs(const std::vector<std::string>& paths) {
  static auto* const mu = new std::mutex;
  static auto* const loaded = new std::map<std::string, std::string>;  // name -> path; mu
  std::lock_guard lock(*mu);
  for (const std::string& path : paths) {
    const std::string name = path.substr(path.rfind('/') + 1);
    const auto it = loaded->find(name);
    if (it != loaded->end() && it->second == path) continue;
    if (it != loaded->end())
      return {kInvalidImage, "this server has loaded " + it->second +
                                 " already, for another process of the job, and cannot "
                                 "load " +
                                 path + " beside it: let the job's processes use one Python environment"};
    if (!dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL))
      return {kInvalidImage, "the framework's library cannot be loaded in the server: " + reason()};
    (*loaded)[name] = path;
  }
  return {};
}

// The dynamic loader believes what an image says about itself; a truncated one would end this process. So the parts
// that it maps are checked first. (An image that is whole but malicious runs the job's own code in the job's own
// server: nothing is gained by it.)
Status check_image(const uint8_t* image, size_t bytes) {
  if (const char* what = image::gpu_code(image, bytes))
    return {kNoBinaryForGpu,
            std::string("the module is ") + what +
                ". The software GPU runs PyTorch's operators, no kernels of Triton, Inductor, CuPy, Numba or "
                "nvcc: those need --device cuda"};
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

StatusOr<std::shared_ptr<HostModule>> HostModule::load(const uint8_t* image, size_t image_bytes,
                                                       const HostModuleConfig& config, const PlaceGlobal& place) {
  auto module = std::make_shared<HostModule>();
  module->owner_ = config.owner;
  const bool named = names_executor(image, image_bytes);
  if (Status s = named ? module->open_executor(image, image_bytes, config) : module->open_image(image, image_bytes);
      !s.ok())
    return s;
  if (Status s = module->check_table(config.ordinal); !s.ok()) return s;
  const devproxy_soft_module_table* const table = module->table_;
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
  module->function_names_ = static_cast<const char* const*>(dlsym(module->library_, "devproxy_soft_function_names"));
  if (const void* list = dlsym(module->library_, "devproxy_soft_footprints")) {
    module->image_hash_ = image_hash(image, image_bytes).low;
    for (auto* one = static_cast<const devproxy_soft_footprint*>(list); one->name; one++)
      module->footprints_.emplace(one->name, one);
  }
  if (!module->executor_) return module;

  const devproxy_executor_host host{config.framework_ordinal,
                                    config.space.device_base,
                                    config.space.device_bytes,
                                    config.space.host_base,
                                    config.space.host_bytes,
                                    &take_memory,
                                    &give_memory,
                                    config.owner};
  char error[512] = "";
  if (module->executor_->attach(&host, &module->state_, error, sizeof error) != 0) {
    error[sizeof error - 1] = 0;
    return Status(kInvalidImage, std::string("the executor refuses the process: ") + error);
  }
  return module;
}

Status HostModule::warm(const uint8_t* image, size_t image_bytes, const HostModuleConfig& config) {
  return HostModule().open_executor(image, image_bytes, config);
}

Status HostModule::open_image(const uint8_t* image, size_t image_bytes) {
  if (Status s = check_image(image, image_bytes); !s.ok()) return s;
  fd_ = memfd_create("devproxy-module", MFD_CLOEXEC);
  if (fd_ < 0) return Status::from_errno(kOutOfMemory, "making a file for the module image");
  for (size_t done = 0; done < image_bytes;) {
    const ssize_t n = ::write(fd_, image + done, image_bytes - done);
    if (n < 0) return Status::from_errno(kOutOfMemory, "writing the module image");
    done += static_cast<size_t>(n);
  }
  // The loader knows a library by its path, so two loaded modules must never share a descriptor number: the descriptor
  // stays open as long as the module is mapped (see the destructor).
  path_ = "/proc/self/fd/" + std::to_string(fd_);
  library_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library_) return {kInvalidImage, "the module cannot be loaded: " + reason()};
  return {};
}

Status HostModule::open_executor(const uint8_t* image, size_t image_bytes, const HostModuleConfig& config) {
  auto name = parse_executor_name(image, image_bytes);
  if (!name.ok()) return std::move(name).status();
  const std::string& file = config.on_cuda ? name->cuda_file : name->host_file;
  if (file.empty())
    return {kInvalidImage, config.on_cuda
                               ? "the job's PyTorch is a CPU build, which cannot run on a real GPU; install the "
                                 "CUDA build, or use --device soft"
                               : "the job's executor has no half for the software GPU"};
  if (config.on_cuda)
    for (const auto& [variable, value] : name->environment) setenv(variable.c_str(), value.c_str(), 1);
  if (Status s = load_needs(config.on_cuda ? name->cuda_needs : name->host_needs); !s.ok()) return s;
  path_ = config.folder + "/" + file;
  library_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library_) return {kInvalidImage, "the executor cannot be loaded; build it (devproxy build-torch): " + reason()};
  executor_ = static_cast<const devproxy_executor_table*>(dlsym(library_, "devproxy_executor"));
  if (!executor_ || executor_->abi != DEVPROXY_EXECUTOR_ABI)
    return {kInvalidImage, path_ + " is no executor of this server's version: build it again (devproxy build-torch)"};
  const uint32_t where = config.on_cuda ? DEVPROXY_EXECUTOR_ON_CUDA : DEVPROXY_EXECUTOR_ON_HOST;
  if (executor_->where != where) return {kInvalidImage, path_ + " is for another kind of device"};
  if (name->build != executor_->build)
    return {kInvalidImage, path_ + " is of build " + executor_->build + ", the job's half of build " + name->build +
                               ": build both again (devproxy build-torch)"};
  return {};
}

Status HostModule::check_table(uint32_t ordinal) {
  const void* symbol = dlsym(library_, "devproxy_soft_module");
  if (!symbol)
    return {kInvalidImage, "the image has no symbol devproxy_soft_module: it is not a module of the software GPU"};
  const auto* table = static_cast<const devproxy_soft_module_table*>(symbol);
  if (table->abi != DEVPROXY_SOFT_MODULE_ABI)
    return {kInvalidImage, "the module was built for module ABI " + std::to_string(table->abi) + ", this server has " +
                               std::to_string(DEVPROXY_SOFT_MODULE_ABI) + ": rebuild the module"};
  if (!table->get_function) return {kInvalidImage, "the module's table has no get_function"};
  if (table->load) {
    char error[512] = "";
    if (table->load(ordinal, error, sizeof error) != 0) {
      error[sizeof error - 1] = 0;
      return {kInvalidImage, std::string("the module refuses to load: ") + error};
    }
  }
  table_ = table;
  return {};
}

HostModule::~HostModule() {
  if (executor_) {
    if (state_) executor_->detach(state_);
    return;  // stays loaded: a framework cannot be unloaded
  }
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

int HostModule::footprint(const std::string& function, const uint8_t* params, uint64_t params_bytes,
                          std::vector<devproxy_executor_access>* accesses, uint64_t* digest) const {
  if (!executor_) {
    const auto it = footprints_.find(function);
    if (it == footprints_.end()) return DEVPROXY_EXECUTOR_UNKNOWN;
    accesses->clear();
    // Another module may have a kernel of the same name.
    *digest = image_hash_;
    for (uint32_t i = 0; i < it->second->n_stretches; i++) {
      const devproxy_soft_stretch& stretch = it->second->stretches[i];
      devproxy_executor_access access{};
      const uint64_t end = uint64_t{stretch.place} + sizeof access.addr + sizeof access.bytes;
      if (end > params_bytes) return DEVPROXY_EXECUTOR_UNKNOWN;
      std::memcpy(&access.addr, params + stretch.place, sizeof access.addr);
      std::memcpy(&access.bytes, params + stretch.place + sizeof access.addr, sizeof access.bytes);
      access.place = stretch.place;
      // What is left of a stretch that is written follows from what was there before, so all of it is a result.
      access.flags =
          DEVPROXY_EXECUTOR_READS | (stretch.writes ? DEVPROXY_EXECUTOR_WRITES | DEVPROXY_EXECUTOR_WHOLE : 0);
      accesses->push_back(access);
    }
    return it->second->repeatable ? DEVPROXY_EXECUTOR_REPEATABLE : DEVPROXY_EXECUTOR_KNOWN;
  }
  for (accesses->resize(std::max<size_t>(accesses->capacity(), 16));;) {
    const auto room = static_cast<uint32_t>(accesses->size());
    uint32_t needed = 0;
    const int kind =
        executor_->footprint(state_, function.c_str(), params, params_bytes, accesses->data(), room, &needed, digest);
    accesses->resize(needed);
    if (needed <= room) return kind;
  }
}

StatusOr<std::vector<uint8_t>> HostModule::save_state() const {
  std::vector<uint8_t> bytes;
  if (!executor_) return bytes;
  char error[512] = "";
  for (uint64_t needed = 0;; bytes.resize(needed)) {
    if (executor_->save(state_, bytes.data(), bytes.size(), &needed, error, sizeof error) != 0) {
      error[sizeof error - 1] = 0;
      return Status(kUnknown, std::string("the executor cannot save its state: ") + error);
    }
    if (needed == bytes.size()) return bytes;
  }
}

Status HostModule::load_state(const uint8_t* from, size_t bytes) const {
  if (!executor_) return {kInvalidImage, "the module is no executor and has no state"};
  char error[512] = "";
  if (executor_->load(state_, from, bytes, error, sizeof error) == 0) return {};
  error[sizeof error - 1] = 0;
  return {kInvalidImage, std::string("the executor does not take its state: ") + error};
}

StatusOr<std::shared_ptr<HostFunction>> HostFunction::get(std::shared_ptr<HostModule> module, const std::string& name) {
  auto function = std::make_shared<HostFunction>();
  if (module->table()->get_function(name.c_str(), &function->entry) != 0 || !function->entry.kernel)
    return Status(kNotFound, "the module has no function '" + name + "'");
  if (function->entry.n_params > std::size(function->entry.params))
    return Status(kInvalidImage, "function '" + name + "' says that it has " +
                                     std::to_string(function->entry.n_params) + " parameters");
  function->module = std::move(module);
  function->name = name;
  return function;
}

Status run_host_function(const HostFunction& function, const LaunchArgs& args, uint32_t ordinal, uint64_t stream,
                         const RangeCheck& check) {
  const devproxy_soft_services services{&check_range, const_cast<RangeCheck*>(&check)};
  char error[512];
  error[0] = 0;
  devproxy_soft_launch launch{};
  std::memcpy(launch.grid, args.grid, sizeof launch.grid);
  std::memcpy(launch.block, args.block, sizeof launch.block);
  launch.shared_bytes = args.shared_bytes;
  launch.device = ordinal;
  launch.stream = stream;
  launch.params = args.params;
  launch.params_bytes = args.params_bytes;
  launch.services = &services;
  launch.function_cookie = function.entry.cookie;
  launch.error = error;
  launch.error_bytes = sizeof error;
  launch.state = function.module->state();
  int result;
  try {
    result = function.entry.kernel(&launch);
  } catch (const std::exception& e) {  // a C ABI must not throw; a kernel that does has failed
    result = kLaunchFailed;
    std::snprintf(error, sizeof error, "%s", e.what());
  } catch (...) {
    result = kLaunchFailed;
    std::snprintf(error, sizeof error, "it threw an exception of unknown type");
  }
  if (result == 0) return {};
  const bool late_error = result == kOutOfMemory && function.module->is_executor();
  if (!is_execution_fault(result) && !late_error) result = kLaunchFailed;
  error[sizeof error - 1] = 0;
  return {result, "kernel '" + function.name + "' failed: " + (error[0] ? error : "no reason given")};
}

}  // namespace devproxy::hal
