// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/output.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>

#include "devproxy/csrc/base/log.h"

namespace devproxy::hal::cuda {

namespace {

// How the driver begins the end of an assertion's line: "FILE:LINE: FUNCTION: block: ..., thread: ... Assertion `X'
// failed."
constexpr const char* kAssertion = "Assertion `";

std::mutex g_mu;  // a leaf
int g_out = -1, g_err = -1;
off_t g_out_at = 0, g_err_at = 0;

std::string rest_of(int fd, off_t* at) {
  std::string text;
  char part[4096];
  for (ssize_t n; (n = pread(fd, part, sizeof part, *at)) > 0; *at += n) text.append(part, static_cast<size_t>(n));
  return text;
}

}  // namespace

bool Output::capture() {
  std::lock_guard lock(g_mu);
  if (g_out >= 0) return true;
  // Appending: the driver's writes and nobody's seek.
  const int file = memfd_create("devproxy-kernel-output", MFD_CLOEXEC);
  if (file < 0 || fcntl(file, F_SETFL, O_APPEND) != 0 || dup2(file, STDOUT_FILENO) < 0) {
    DP_LOG(kWarn, kDevice, 0, "what kernels print is lost: no file in memory for it");
    if (file >= 0) close(file);
    return false;
  }
  g_out = file;
  struct stat info;
  if (fstat(STDERR_FILENO, &info) == 0 && S_ISREG(info.st_mode)) {
    g_err = open("/proc/self/fd/2", O_RDONLY | O_CLOEXEC);
    g_err_at = info.st_size;
  }
  return true;
}

void Output::take(std::string* out, std::string* err) {
  std::lock_guard lock(g_mu);
  if (g_out < 0) return;
  std::fflush(stdout);
  const off_t before = g_out_at;
  *out += rest_of(g_out, &g_out_at);
  if (g_out_at > before)  // nothing else ever frees it
    fallocate(g_out, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, g_out_at);
  if (g_err < 0) return;
  const std::string log = rest_of(g_err, &g_err_at);
  for (size_t at = 0; at < log.size();) {
    const size_t end = log.find('\n', at);
    const std::string line = log.substr(at, end == std::string::npos ? std::string::npos : end - at);
    if (line.find(kAssertion) != std::string::npos) *err += line + '\n';
    at = end == std::string::npos ? log.size() : end + 1;
  }
}

}  // namespace devproxy::hal::cuda
