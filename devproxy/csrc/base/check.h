// SPDX-License-Identifier: Apache-2.0
// DP_CHECK: what must hold unless devproxy itself has a bug. Server only: it throws, the dispatch loop catches and
// poisons that one connection; the others go on. The client never includes this.
#pragma once

#include <stdexcept>
#include <string>

namespace devproxy {

class CheckFailure : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

[[noreturn]] inline void check_failed(const char* file, int line, const char* condition) {
  throw CheckFailure(std::string(file) + ":" + std::to_string(line) + ": " + condition);
}

}  // namespace devproxy

#define DP_CHECK(condition) ((condition) ? void(0) : ::devproxy::check_failed(__FILE__, __LINE__, #condition))
