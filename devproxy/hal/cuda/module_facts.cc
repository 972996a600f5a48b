#include "devproxy/hal/cuda/module_facts.h"

#include <cctype>
#include <string_view>

namespace devproxy::hal::cuda {

namespace {

// The names behind `.global` and `.const` at the beginning of a statement of PTX:
//   .visible .global .align 4 .b8 table[4096];      .const .u32 limit = 7;
void ptx_variables(std::string_view text, std::vector<std::string>* names) {
  int depth = 0;  // inside of a function's braces, or of an initial value's
  std::string statement;
  auto end = [&] {
    size_t at = statement.find(".global");
    if (at == std::string::npos) at = statement.find(".const");
    if (at == std::string::npos || statement.find(".extern") != std::string::npos) return;
    const size_t stop = statement.find_first_of("[=", at);
    size_t last = stop == std::string::npos ? statement.size() : stop;
    while (last > 0 && std::isspace(static_cast<unsigned char>(statement[last - 1]))) last--;
    size_t first = last;
    while (first > 0 && !std::isspace(static_cast<unsigned char>(statement[first - 1]))) first--;
    if (first < last) names->push_back(statement.substr(first, last - first));
  };
  for (size_t i = 0; i < text.size(); i++) {
    const char c = text[i];
    if (c == '/' && text.substr(i, 2) == "//") {
      i = text.find('\n', i);
      if (i == std::string_view::npos) break;
    } else if (c == '{') {
      depth++;
    } else if (c == '}') {
      if (depth > 0) depth--;
      if (depth == 0 && statement.find('=') == std::string::npos) statement.clear();  // a function's body has ended
    } else if (depth == 0 && c == ';') {
      end();
      statement.clear();
    } else if (depth == 0) {
      statement += c;
    }
  }
}

}  // namespace

StatusOr<ModuleFacts> facts_of(const uint8_t* image, size_t bytes, int32_t, int32_t) {
  const std::string_view text(reinterpret_cast<const char*>(image), bytes);
  if (text.find(".version") == std::string_view::npos || text.substr(0, 1) == "\x7f" || text.substr(0, 1) == "\x50")
    return Status(kNotSupported, "its image is no PTX, and devproxy does not read others yet");
  ModuleFacts facts;
  ptx_variables(text, &facts.variables);
  facts.prints = text.find("vprintf") != std::string_view::npos;
  return facts;
}

}  // namespace devproxy::hal::cuda
