// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/base/log.h"

#include <time.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

namespace devproxy::log {

namespace {

constexpr int kComponents = static_cast<int>(Component::kCount);
constexpr const char* kNames[kComponents] = {"server", "connection", "ring",   "memory",
                                             "launch", "sync",       "module", "device"};
constexpr uint8_t kWarn = static_cast<uint8_t>(Level::kWarn);
char g_context[64];

// -1 where the word is no level.
int level_of(std::string_view word) {
  constexpr std::string_view kWords[] = {"off", "error", "warn", "info", "debug"};
  for (int i = 0; i < 5; i++)
    if (word == kWords[i]) return i;
  return -1;
}

}  // namespace

std::atomic<uint8_t> g_levels[kComponents] = {kWarn, kWarn, kWarn, kWarn, kWarn, kWarn, kWarn, kWarn};

void init(const char* spec, const char* context) {
  std::snprintf(g_context, sizeof g_context, "%s", context ? context : "");
  std::string_view rest = spec ? spec : "";
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const size_t equals = item.find('=');
    const int level = level_of(equals == std::string_view::npos ? item : item.substr(equals + 1));
    bool known = false;
    for (int i = 0; i < kComponents; i++) {
      if (equals != std::string_view::npos && item.substr(0, equals) != kNames[i]) continue;
      known = true;
      if (level >= 0) g_levels[i].store(static_cast<uint8_t>(level), std::memory_order_relaxed);
    }
    // A component of the client or of Python is not ours to complain about; a word that is no level is.
    if (level < 0 || (!known && equals == std::string_view::npos))
      DP_LOG(kWarn, kServer, 0, "DEVPROXY_LOG: '%.*s' is not understood (off, error, warn, info, debug)",
             static_cast<int>(item.size()), item.data());
  }
}

void write(Level level, Component component, uint64_t connection, const char* format, ...) {
  char line[1024];
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  tm local;
  localtime_r(&now.tv_sec, &local);
  size_t n = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &local);
  n += static_cast<size_t>(std::snprintf(line + n, sizeof line - n, ".%03ld %c %s ", now.tv_nsec / 1'000'000,
                                         "-EWID"[static_cast<int>(level)], g_context));
  if (connection) n += static_cast<size_t>(std::snprintf(line + n, sizeof line - n, "conn=%" PRIu64 " ", connection));
  n += static_cast<size_t>(std::snprintf(line + n, sizeof line - n, "%s: ", kNames[static_cast<int>(component)]));
  va_list args;
  va_start(args, format);
  const int wrote = std::vsnprintf(line + n, sizeof line - n - 1, format, args);
  va_end(args);
  if (wrote > 0) n += static_cast<size_t>(wrote);
  if (n > sizeof line - 2) n = sizeof line - 2;
  line[n++] = '\n';
  // One write, so that lines of several threads do not mix. A closed stderr is nobody's problem.
  [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, line, n);
}

}  // namespace devproxy::log
