// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/host_module/descriptor.h"

#include <cctype>
#include <cstring>
#include <string_view>

namespace devproxy::hal {

namespace {

constexpr std::string_view kFirst = "devproxy executor 1\n";
constexpr std::string_view kAnyVersion = "devproxy executor ";
constexpr size_t kMaxBytes = 64 << 10;

Status bad(const std::string& what) { return {kInvalidImage, "the description of an executor " + what}; }

bool plain(std::string_view name) {
  if (name.empty() || name.front() == '.') return false;
  for (const char c : name)
    if (!(std::isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_')) return false;
  return true;
}

// What cuBLAS, cuDNN and torch's own kernels read; nothing that a loader or a C library does.
bool may_be_set(std::string_view name) {
  if (!plain(name)) return false;
  for (const std::string_view prefix : {"CUBLAS", "CUDNN_", "CUFFT_", "CUSOLVER_", "TORCH_"})
    if (name.substr(0, prefix.size()) == prefix) return true;
  return name == "NVIDIA_TF32_OVERRIDE";
}

// FOLDER/NAME
bool below_library_folder(std::string_view file) {
  const size_t slash = file.find('/');
  return slash != file.npos && plain(file.substr(0, slash)) && plain(file.substr(slash + 1));
}

}  // namespace

bool names_executor(const uint8_t* image, size_t bytes) {
  return bytes >= kAnyVersion.size() && std::memcmp(image, kAnyVersion.data(), kAnyVersion.size()) == 0;
}

StatusOr<ExecutorName> parse_executor_name(const uint8_t* image, size_t bytes) {
  std::string_view text(reinterpret_cast<const char*>(image), bytes);
  if (bytes > kMaxBytes || text.back() != 0) return bad("is too long or does not end in NUL");
  text.remove_suffix(1);
  if (text.substr(0, kFirst.size()) != kFirst) return bad("is of another version: client and server do not fit");
  text.remove_prefix(kFirst.size());
  ExecutorName name;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (end == text.npos) return bad("ends inside of a line");
    const std::string line(text.substr(0, end));
    text.remove_prefix(end + 1);
    const size_t space = line.find(' ');
    const std::string key = line.substr(0, space);
    const std::string value = space == line.npos ? "" : line.substr(space + 1);
    if (value.empty()) return bad("has the line '" + line + "' without a value");
    if (key == "build") {
      name.build = value;
    } else if (key == "host" || key == "cuda") {
      if (!below_library_folder(value)) return bad("names the file '" + value + "', which is not FOLDER/NAME");
      (key == "host" ? name.host_file : name.cuda_file) = value;
    } else if (key == "needs" && (value.rfind("host /", 0) == 0 || value.rfind("cuda /", 0) == 0)) {
      (value[0] == 'h' ? name.host_needs : name.cuda_needs).push_back(value.substr(5));
    } else if (key == "set") {
      const size_t equals = value.find('=');
      if (equals == value.npos || !may_be_set(value.substr(0, equals)))
        return bad("sets '" + value.substr(0, equals) + "', which is not for a job to set in the server");
      name.environment.emplace_back(value.substr(0, equals), value.substr(equals + 1));
    } else {
      return bad("has the line '" + line + "', which this server does not know");
    }
  }
  if (name.build.empty()) return bad("says no build");
  return name;
}

}  // namespace devproxy::hal
