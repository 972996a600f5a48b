// JSON for the few documents that devproxy's processes exchange: a value type, a reader, a writer for strings.
//
// Numbers keep their digits: an address is a 64-bit number and must not pass through a double.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace devproxy {

class Json {
 public:
  enum class Kind : uint8_t { kNull, kBool, kNumber, kString, kArray, kObject };
  // nullopt where the text is not one JSON value. Depth up to 32.
  static std::optional<Json> parse(std::string_view text);

  Kind kind = Kind::kNull;
  bool truth = false;
  std::string text;  // of a string, unescaped; the digits of a number
  std::vector<Json> items;
  std::map<std::string, Json, std::less<>> members;

  // A member, or an empty value where there is none: look-ups chain, checks come at the end.
  const Json& operator[](std::string_view name) const;
  const Json& operator[](size_t i) const;
  size_t size() const { return items.size(); }
  uint64_t u64(uint64_t otherwise = 0) const;
  int64_t i64(int64_t otherwise = 0) const;
  bool is(Kind k) const { return kind == k; }
};

std::string json_string(std::string_view s);                // quoted and escaped
std::string json_number(const char* name, uint64_t value);  // "name":value
std::string base64(const uint8_t* bytes, size_t n);
std::optional<std::vector<uint8_t>> from_base64(std::string_view text);

}  // namespace devproxy
