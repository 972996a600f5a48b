// SPDX-License-Identifier: Apache-2.0
// JSON, by nlohmann/json, and base64. Included by .cc files alone: the library takes long to compile.
#pragma once

#include "devproxy/csrc/base/json_fwd.h"  // first: it says how the library is built

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace devproxy {

// The value as text. A string of the job's that is no UTF-8 loses what is none.
std::string json_text(const Json& value);
std::string json_string(std::string_view s);  // quoted and escaped

std::string base64(const uint8_t* bytes, size_t n);
std::optional<std::vector<uint8_t>> from_base64(std::string_view text);

}  // namespace devproxy
