// SPDX-License-Identifier: Apache-2.0
// How a client names an executor (include/devproxy_executor.h) instead of sending one: a text in the place of a module
// image.
//
//   devproxy executor 1
//   build HEX                     what client and executor were built from; both must say the same
//   host FILE | cuda FILE         the executor for that kind of device, below the server's library folder
//   needs host|cuda PATH          what is loaded before it, in this order: the framework that the job itself uses
//   set NAME=VALUE                of the job's environment, what the vendor's libraries read: put into the server's, on
//   CUDA
//
// ends in NUL. Lines may come in any order behind the first; unknown ones are refused.
#pragma once

#include <string>
#include <vector>

#include "devproxy/csrc/base/status.h"

namespace devproxy::hal {

struct ExecutorName {
  std::string build;
  std::string host_file, cuda_file;  // empty: there is none
  std::vector<std::string> host_needs, cuda_needs;
  std::vector<std::pair<std::string, std::string>> environment;
};

// Does the image want to be a description? Then parse() says whether it is one.
bool names_executor(const uint8_t* image, size_t bytes);
// kInvalidImage with what is wrong. A file is one folder and one name, so that it cannot leave the library folder.
StatusOr<ExecutorName> parse_executor_name(const uint8_t* image, size_t bytes);

}  // namespace devproxy::hal
