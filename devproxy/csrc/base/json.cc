#include "devproxy/csrc/base/json.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

namespace devproxy {

namespace {

constexpr int kMaxDepth = 32;

struct Reader {
  std::string_view in;
  size_t at = 0;

  void space() {
    while (at < in.size() && (in[at] == ' ' || in[at] == '\n' || in[at] == '\t' || in[at] == '\r')) at++;
  }
  bool take(char c) {
    space();
    if (at >= in.size() || in[at] != c) return false;
    at++;
    return true;
  }
  bool word(std::string_view w) {
    if (in.substr(at, w.size()) != w) return false;
    at += w.size();
    return true;
  }
  static void utf8(uint32_t c, std::string* out) {
    if (c < 0x80) {
      *out += static_cast<char>(c);
    } else if (c < 0x800) {
      *out += static_cast<char>(0xc0 | c >> 6);
      *out += static_cast<char>(0x80 | (c & 63));
    } else if (c < 0x10000) {
      *out += static_cast<char>(0xe0 | c >> 12);
      *out += static_cast<char>(0x80 | (c >> 6 & 63));
      *out += static_cast<char>(0x80 | (c & 63));
    } else {
      *out += static_cast<char>(0xf0 | c >> 18);
      *out += static_cast<char>(0x80 | (c >> 12 & 63));
      *out += static_cast<char>(0x80 | (c >> 6 & 63));
      *out += static_cast<char>(0x80 | (c & 63));
    }
  }
  bool hex4(uint32_t* c) {
    if (at + 4 > in.size()) return false;
    *c = 0;
    for (int i = 0; i < 4; i++, at++) {
      const char h = in[at];
      const int digit = h >= '0' && h <= '9'   ? h - '0'
                        : h >= 'a' && h <= 'f' ? h - 'a' + 10
                        : h >= 'A' && h <= 'F' ? h - 'A' + 10
                                               : -1;
      if (digit < 0) return false;
      *c = *c << 4 | static_cast<uint32_t>(digit);
    }
    return true;
  }
  bool string(std::string* out) {
    if (!take('"')) return false;
    for (;;) {
      const size_t stop = in.find_first_of("\"\\", at);
      if (stop == in.npos) return false;
      out->append(in.substr(at, stop - at));
      at = stop + 1;
      if (in[stop] == '"') return true;
      if (at >= in.size()) return false;
      const char escape = in[at++];
      switch (escape) {
        case 'n': *out += '\n'; break;
        case 't': *out += '\t'; break;
        case 'r': *out += '\r'; break;
        case 'b': *out += '\b'; break;
        case 'f': *out += '\f'; break;
        case 'u': {
          uint32_t c, low;
          if (!hex4(&c)) return false;
          if (c >= 0xd800 && c < 0xdc00) {
            if (!word("\\u") || !hex4(&low)) return false;
            c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
          }
          utf8(c, out);
          break;
        }
        default: *out += escape;
      }
    }
  }
  bool value(Json* out, int depth) {
    if (depth > kMaxDepth) return false;
    space();
    if (at >= in.size()) return false;
    const char c = in[at];
    if (c == '"') return out->kind = Json::Kind::kString, string(&out->text);
    if (c == '{') {
      out->kind = Json::Kind::kObject;
      at++;
      if (take('}')) return true;
      do {
        std::string name;
        space();
        if (!string(&name) || !take(':') || !value(&out->members[name], depth + 1)) return false;
      } while (take(','));
      return take('}');
    }
    if (c == '[') {
      out->kind = Json::Kind::kArray;
      at++;
      if (take(']')) return true;
      do {
        if (!value(&out->items.emplace_back(), depth + 1)) return false;
      } while (take(','));
      return take(']');
    }
    if (word("true")) return out->kind = Json::Kind::kBool, out->truth = true;
    if (word("false")) return out->kind = Json::Kind::kBool, true;
    if (word("null")) return true;
    const size_t end = std::min(in.find_first_not_of("+-.0123456789eE", at), in.size());
    if (end == at) return false;
    out->kind = Json::Kind::kNumber;
    out->text = in.substr(at, end - at);
    at = end;
    return true;
  }
};

const Json kNothing;
constexpr char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

}  // namespace

std::optional<Json> Json::parse(std::string_view text) {
  Reader reader{text};
  Json value;
  if (!reader.value(&value, 0)) return std::nullopt;
  reader.space();
  if (reader.at != text.size()) return std::nullopt;
  return value;
}

const Json& Json::operator[](std::string_view name) const {
  const auto it = members.find(name);
  return it == members.end() ? kNothing : it->second;
}
const Json& Json::operator[](size_t i) const { return i < items.size() ? items[i] : kNothing; }
uint64_t Json::u64(uint64_t otherwise) const {
  return kind == Kind::kNumber ? std::strtoull(text.c_str(), nullptr, 10) : otherwise;
}
int64_t Json::i64(int64_t otherwise) const {
  return kind == Kind::kNumber ? std::strtoll(text.c_str(), nullptr, 10) : otherwise;
}

std::string json_string(std::string_view s) {
  std::string out = "\"";
  for (const char c : s) {
    if (c == '"' || c == '\\') {
      out += '\\', out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string json_number(const char* name, uint64_t value) {
  return '"' + std::string(name) + "\":" + std::to_string(value);
}

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
