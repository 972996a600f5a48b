// SPDX-License-Identifier: Apache-2.0
// One line per event of a job's life on stderr; calls are never logged.
//
//   2026-11-20T23:40:01.123 W gpu=0 conn=7 memory: refused, ...
//
// Levels by component from DEVPROXY_LOG, for example "warn,ring=debug"; the default is warn. Nothing is formatted when
// the level is off: the macro looks at one byte first.
#pragma once

#include <atomic>
#include <cstdint>

namespace devproxy::log {

enum class Level : uint8_t { kOff = 0, kError = 1, kWarn = 2, kInfo = 3, kDebug = 4 };

// Components are few and fixed, so that a level is an array element and not a look-up by name.
enum class Component : uint8_t { kServer, kConnection, kRing, kMemory, kLaunch, kSync, kModule, kDevice, kCount };

extern std::atomic<uint8_t> g_levels[static_cast<int>(Component::kCount)];

inline bool on(Level level, Component component) {
  return static_cast<uint8_t>(level) <= g_levels[static_cast<int>(component)].load(std::memory_order_relaxed);
}

// Reads DEVPROXY_LOG. context is put into every line ("gpu=0"). Unknown words are told once, not fatal.
void init(const char* spec, const char* context);

[[gnu::format(printf, 4, 5)]] void write(Level level, Component component, uint64_t connection, const char* format,
                                         ...);

}  // namespace devproxy::log

// connection: its number, 0 where the line is not about one.
#define DP_LOG(level, component, connection, ...)                                                                \
  do {                                                                                                           \
    if (::devproxy::log::on(::devproxy::log::Level::level, ::devproxy::log::Component::component))               \
      ::devproxy::log::write(::devproxy::log::Level::level, ::devproxy::log::Component::component, (connection), \
                             __VA_ARGS__);                                                                       \
  } while (0)
