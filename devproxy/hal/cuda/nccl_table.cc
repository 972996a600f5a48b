// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/nccl_table.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string_view>
#include <utility>

namespace devproxy::hal::cuda {

namespace {

// Every build of our own libnccl.so.2 exports this (devproxy/interceptors/nccl/client.cc). It is looked for in the file: in
// the server that library finds no client, and does not load.
constexpr std::string_view kNcclShimMark = "devproxy_nccl_shim";
constexpr off_t kShimBytes = 4 << 20;  // it has a tenth of that, NVIDIA's a hundred times as much

bool is_shim(const std::string& path) {
  struct stat there;
  if (stat(path.c_str(), &there) != 0 || there.st_size > kShimBytes) return false;
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  return bytes.find(kNcclShimMark) != bytes.npos;
}

constexpr const char* kNcclPlaces[] = {
#if defined(__aarch64__)
    "/usr/lib/aarch64-linux-gnu/libnccl.so.2",
#else
    "/usr/lib/x86_64-linux-gnu/libnccl.so.2",
#endif
    "/usr/lib64/libnccl.so.2",
    "/usr/local/cuda/lib64/libnccl.so.2",
    "/usr/lib/libnccl.so.2",
};

// The wheels of PyTorch bring NCCL along, and the executor has loaded it with them.
std::string loaded() {
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        const std::string_view name = info->dlpi_name;
        if (!name.ends_with("/libnccl.so.2")) return 0;
        *static_cast<std::string*>(to) = name;
        return 1;
      },
      &found);
  return found;
}

std::string search(bool loaded_only) {
  if (std::string name = loaded(); !name.empty() || loaded_only) return name;
  struct stat there;
  for (const char* place : kNcclPlaces)
    if (stat(place, &there) == 0) return place;
  return {};
}

}  // namespace

StatusOr<std::shared_ptr<const Nccl>> Nccl::open(const std::string& path, bool loaded_only) {
  static std::mutex mu;
  static auto* const opened = new std::shared_ptr<const Nccl>;  // one for the process: NCCL keeps threads
  std::lock_guard lock(mu);
  if (*opened && (path.empty() || (*opened)->path_ == path)) return *opened;
  const std::string from = path.empty() ? search(loaded_only) : path;
  if (from.empty())
    return Status(kNotFound,
                  "NCCL's library libnccl.so.2 is neither loaded in the server nor in one of its usual places: install "
                  "it, or name the file by DEVPROXY_NCCL in devproxy-run's environment");
  if (from.front() != '/')
    return Status(kInvalidValue, "NCCL's library must be named by an absolute path, not '" + from + "'");
  if (is_shim(from))
    return Status(kNotSupported,
                  from + " is devproxy's own libnccl.so.2, not NVIDIA's: name that one's file by DEVPROXY_NCCL");
  // What a first collective needs of the other ranks is made with the communicator, so that it waits for none of them before
  // it is in its stream. Of sends and receives NCCL makes it at the first of each pair all the same.
  setenv("NCCL_RUNTIME_CONNECT", "0", 0);
  void* const library = dlopen(from.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return Status(kNotSupported, "NCCL's library " + from + " cannot be opened: " + dlerror());
  auto nccl = std::make_shared<Nccl>();
  nccl->path_ = from;
  std::string missing;
#define DP_RESOLVE(field, symbol, signature)                         \
  nccl->field = reinterpret_cast<signature>(dlsym(library, symbol)); \
  if (!nccl->field) missing += (missing.empty() ? "" : ", ") + std::string(symbol);
  DP_NCCL_CALLS(DP_RESOLVE)
#undef DP_RESOLVE
  if (!missing.empty())
    return Status(kNotSupported, "NCCL's library " + from + " lacks " + missing +
                                     ": it is too old, devproxy needs version 2.14 or newer");
  *opened = nccl;
  return std::shared_ptr<const Nccl>(std::move(nccl));
}

Status Nccl::status(int result, const std::string& doing) const {
  if (result == kNcclSuccess || result == kNcclInProgress) return {};
  const char* const meaning = get_error_string(result);
  const char* const last = get_last_error(nullptr);
  std::string text = doing + ": " + (meaning ? meaning : "an NCCL error") + " (" + std::to_string(result) + ")";
  if (last && *last) text += std::string(": ") + last;
  return {result, text};
}

}  // namespace devproxy::hal::cuda
