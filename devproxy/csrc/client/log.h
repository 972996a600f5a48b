// SPDX-License-Identifier: Apache-2.0
// The client's few log lines, on stderr; the level is DEVPROXY_LOG (error, warn, info, debug; default warn).
#pragma once

namespace devproxy::client {

enum class Level { kError = 0, kWarn = 1, kInfo = 2, kDebug = 3 };
bool log_on(Level level);
void log(Level level, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace devproxy::client
