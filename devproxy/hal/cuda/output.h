// SPDX-License-Identifier: Apache-2.0
// What kernels print, as the driver gives it to this process: printf to stdout, a failed assertion to stderr.
//
// The server's stdout is nobody's, so it is made a file in memory, and what appears there belongs to the job. Its
// stderr is its log; a line about an assertion is taken out of what was appended to it. Both are the process's, so with
// several clients in one server the text goes to whoever asks first: they are one job.
#pragma once

#include <cstdint>
#include <string>

namespace devproxy::hal::cuda {

class Output {
 public:
  // From now on: once, before the driver prints. False where that cannot be done; then there is never any text.
  static bool capture();
  // What came since the last call, after the caller has had the driver flush it.
  static void take(std::string* out, std::string* err);
};

}  // namespace devproxy::hal::cuda
