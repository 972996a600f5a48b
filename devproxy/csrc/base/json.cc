// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/base/json.h"

#include <array>

namespace devproxy {

namespace {

constexpr char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

}  // namespace

std::string json_text(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string json_string(std::string_view s) { return json_text(Json(s)); }

std::string base64(const uint8_t* bytes, size_t n) {
  std::string out;
  out.reserve((n + 2) / 3 * 4);
  for (size_t i = 0; i < n; i += 3) {
    const uint32_t v = static_cast<uint32_t>(bytes[i]) << 16 |
                       (i + 1 < n ? static_cast<uint32_t>(bytes[i + 1]) << 8 : 0u) | (i + 2 < n ? bytes[i + 2] : 0u);
    out += kAlphabet[v >> 18 & 63];
    out += kAlphabet[v >> 12 & 63];
    out += i + 1 < n ? kAlphabet[v >> 6 & 63] : '=';
    out += i + 2 < n ? kAlphabet[v & 63] : '=';
  }
  return out;
}

std::optional<std::vector<uint8_t>> from_base64(std::string_view text) {
  static const auto table = [] {
    std::array<int8_t, 256> t;
    t.fill(-1);
    for (int i = 0; i < 64; i++) t[static_cast<uint8_t>(kAlphabet[i])] = static_cast<int8_t>(i);
    return t;
  }();
  if (text.size() % 4) return std::nullopt;
  std::vector<uint8_t> out;
  out.reserve(text.size() / 4 * 3);
  for (size_t i = 0; i < text.size(); i += 4) {
    const bool last = i + 4 == text.size();
    const int pad = last ? (text[i + 3] == '=') + (text[i + 2] == '=') : 0;
    uint32_t v = 0;
    for (int k = 0; k < 4; k++) {
      const int digit = k >= 4 - pad ? 0 : table[static_cast<uint8_t>(text[i + static_cast<size_t>(k)])];
      if (digit < 0) return std::nullopt;
      v = v << 6 | static_cast<uint32_t>(digit);
    }
    out.push_back(static_cast<uint8_t>(v >> 16));
    if (pad < 2) out.push_back(static_cast<uint8_t>(v >> 8));
    if (pad < 1) out.push_back(static_cast<uint8_t>(v));
  }
  return out;
}

}  // namespace devproxy
