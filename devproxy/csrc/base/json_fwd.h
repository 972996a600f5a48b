// SPDX-License-Identifier: Apache-2.0
// The name of a JSON value, for headers; csrc/base/json.h has the rest.
#pragma once

// An exception of the library names the member that it is about.
#define JSON_DIAGNOSTICS 1
// GCC 12 inlines the walk over an object's members into the making of a value that it knows to be a string, and calls
// the dead branch an access out of bounds. Code that includes this goes without that check.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Warray-bounds"
#endif
#include <nlohmann/json_fwd.hpp>

namespace devproxy {

using Json = nlohmann::json;

}  // namespace devproxy
