// SPDX-License-Identifier: Apache-2.0
// PTX text: what its directives say. A kernel's body is only looked through for what it reserves and calls.
//
// The grammar is that of the PTX ISA manual: "Kernel and Function Directives" for .entry, "State Spaces" and
// "Variables" for alignment, arrays and initial values. A parameter lies at the next multiple of its alignment, which
// is that of its element type unless .align says more; an .align behind .ptr speaks of what the pointer points to.
// Multiple of what: of the address in the constant bank, where the block begins at param_base(). Seen with ptxas 13.0
// for structs of alignment 32 to 128, whose offsets differ between sm_80, sm_90 and sm_100; offset 0 may stay empty.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>

#include "devproxy/hal/image/image.h"

namespace devproxy::hal::image {

namespace {

constexpr size_t kMaxKernels = 1 << 16, kMaxGlobals = 1 << 16;
constexpr uint64_t kMaxInitialBytes = 1ull << 30;
constexpr int kMaxDepth = 64;

uint64_t param_base(const Arch& device) { return device.major < 9 ? 0x160 : device.major == 9 ? 0x210 : 0x380; }

struct Type {
  uint32_t bytes = 0;
  bool is_float = false;
};

Type type_of(std::string_view word) {
  static const std::map<std::string_view, Type> kTypes = {
      {".b8", {1, false}},    {".s8", {1, false}},     {".u8", {1, false}},      {".pred", {1, false}},
      {".b16", {2, false}},   {".s16", {2, false}},    {".u16", {2, false}},     {".f16", {2, false}},
      {".bf16", {2, false}},  {".b32", {4, false}},    {".s32", {4, false}},     {".u32", {4, false}},
      {".f32", {4, true}},    {".f16x2", {4, false}},  {".bf16x2", {4, false}},  {".tf32", {4, false}},
      {".b64", {8, false}},   {".s64", {8, false}},    {".u64", {8, false}},     {".f64", {8, true}},
      {".b128", {16, false}}, {".texref", {8, false}}, {".surfref", {8, false}}, {".samplerref", {8, false}},
  };
  const auto it = kTypes.find(word);
  return it == kTypes.end() ? Type{} : it->second;
}

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$' ||
         c == '%' || c == '.';
}

// Words and single characters; comments, line ends and the contents of strings are left out.
class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) { next(); }
  std::string_view word() const { return word_; }  // empty at the end
  bool done() const { return word_.empty(); }
  bool is(std::string_view w) const { return word_ == w; }
  bool take(std::string_view w) { return is(w) ? next(), true : false; }
  std::string_view take_word() {
    const std::string_view w = word_;
    next();
    return w;
  }
  size_t at() const { return start_; }

  void next() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v' || c == 0) {
        at_++;
      } else if (text_.substr(at_, 2) == "//") {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (text_.substr(at_, 2) == "/*") {
        const size_t end = text_.find("*/", at_ + 2);
        at_ = end == std::string_view::npos ? text_.size() : end + 2;
      } else {
        break;
      }
    }
    start_ = at_;
    if (at_ >= text_.size()) return void(word_ = {});
    if (text_[at_] == '"') {
      for (at_++; at_ < text_.size() && text_[at_] != '"'; at_++)
        if (text_[at_] == '\\') at_++;
      at_ = std::min(at_ + 1, text_.size());
    } else if (is_word(text_[at_])) {
      while (at_ < text_.size() && is_word(text_[at_])) at_++;
    } else {
      at_++;
    }
    word_ = text_.substr(start_, at_ - start_);
  }

 private:
  std::string_view text_, word_;
  size_t at_ = 0, start_ = 0;
};

// A constant of the text; nullopt where it is none (a name, for one).
struct Number {
  uint64_t bits = 0;
  enum class Kind : uint8_t { kInteger, kFloatBits, kDoubleBits, kDecimal } kind = Kind::kInteger;
  double decimal = 0;
};
std::optional<Number> number_of(std::string_view word) {
  if (word.empty() || word[0] < '0' || word[0] > '9') return std::nullopt;
  const std::string text(word.substr(0, 64));
  char* end = nullptr;
  Number n;
  if (text.size() > 2 && text[0] == '0' && (text[1] == 'f' || text[1] == 'F' || text[1] == 'd' || text[1] == 'D')) {
    n.bits = std::strtoull(text.c_str() + 2, &end, 16);
    n.kind = text[1] == 'f' || text[1] == 'F' ? Number::Kind::kFloatBits : Number::Kind::kDoubleBits;
  } else if (text.find('.') != std::string::npos) {
    n.decimal = std::strtod(text.c_str(), &end);
    n.kind = Number::Kind::kDecimal;
  } else if (text.size() > 2 && text[0] == '0' && (text[1] == 'b' || text[1] == 'B')) {
    n.bits = std::strtoull(text.c_str() + 2, &end, 2);
  } else {
    n.bits = std::strtoull(text.c_str(), &end, 0);  // 0x, octal, decimal
    if (*end == 'U') end++;
  }
  if (*end) return std::nullopt;
  return n;
}

uint64_t round_up(uint64_t value, uint64_t align) { return align ? (value + align - 1) / align * align : value; }

class Parser {
 public:
  Parser(std::string_view text, const Arch& device) : lex_(text), param_base_(param_base(device)) {
    facts_.is_ptx = true;
  }

  StatusOr<Facts> run() {
    while (!lex_.done()) {
      if (Status s = statement(); !s.ok()) return s;
    }
    if (!have_target_) return bad("it has no .target");
    uint64_t constants = 0;
    for (const Global& g : facts_.globals)
      constants += g.constant ? round_up(constants, g.align) - constants + g.bytes : 0;
    for (Kernel& k : facts_.kernels) k.const_bytes = static_cast<uint32_t>(std::min<uint64_t>(constants, UINT32_MAX));
    return std::move(facts_);
  }

 private:
  // A number below 2^32 that must stand here.
  std::optional<uint32_t> small() {
    const auto n = number_of(lex_.word());
    if (!n || n->kind != Number::Kind::kInteger || n->bits >> 32) return std::nullopt;
    lex_.next();
    return static_cast<uint32_t>(n->bits);
  }
  Status bad(const std::string& why) const {
    return {kInvalidImage, "the PTX text is damaged at byte " + std::to_string(lex_.at()) + ": " + why};
  }
  // Behind the matching end of the brace that stands here.
  Status skip_braces() {
    int depth = 0;
    do {
      if (lex_.is("{")) depth++;
      if (lex_.is("}")) depth--;
      if (lex_.done()) return bad("a { is not closed");
      lex_.next();
    } while (depth > 0);
    return {};
  }

  Status statement() {
    if (lex_.is("{")) return skip_braces();  // .section
    const std::string_view word = lex_.take_word();
    if (word == ".target") return target();
    if (word == ".address_size") {
      if (!lex_.is("64")) return bad("only .address_size 64 is taken");
      return {};
    }
    if (word == ".extern") return void(external_ = true), Status();
    if (word == ".entry") return entry();
    if (word == ".func") {
      external_ = false;
      while (!lex_.done() && !lex_.is("{") && !lex_.is(";")) lex_.next();
      return lex_.is("{") ? skip_braces() : Status();
    }
    if (word == ".global" || word == ".const" || word == ".shared") {
      const bool external = external_;
      external_ = false;
      return variables(word, external, nullptr);
    }
    if (word == ";") external_ = false;
    return {};
  }

  Status target() {
    const std::string_view word = lex_.take_word();
    if (word.substr(0, 3) != "sm_") return bad(".target names no sm_ architecture");
    size_t i = 3;
    uint32_t number = 0;
    for (; i < word.size() && i < 8 && word[i] >= '0' && word[i] <= '9'; i++)
      number = number * 10 + static_cast<uint32_t>(word[i] - '0');
    const std::string_view rest = word.substr(std::min(i, word.size()));
    if (number < 10 || (!rest.empty() && rest != "a" && rest != "f")) return bad(".target names no sm_ architecture");
    facts_.arch = {number / 10, number % 10, rest.empty() ? '\0' : rest[0]};
    have_target_ = true;
    return {};
  }

  Status entry() {
    external_ = false;
    if (facts_.kernels.size() >= kMaxKernels) return bad("more than 65,536 kernels");
    Kernel k;
    k.name = std::string(lex_.take_word());
    if (k.name.empty() || !is_word(k.name[0])) return bad(".entry without a name");
    if (lex_.take("("))
      if (Status s = parameters(&k); !s.ok()) return s;
    while (!lex_.is("{") && !lex_.is(";")) {
      if (lex_.done()) return bad("kernel " + k.name + " has no body");
      const std::string_view word = lex_.take_word();
      if (word == ".maxntid" || word == ".reqntid" || word == ".reqnctapercluster") {
        uint32_t n[3] = {1, 1, 1};
        for (size_t i = 0; i < 3; i++) {
          const auto value = small();
          if (!value) return bad(std::string(word) + " of " + k.name + " has no number");
          n[i] = *value;
          if (!lex_.take(",")) break;
        }
        const uint64_t all = std::min<uint64_t>(uint64_t{n[0]} * n[1], 1u << 20) * n[2];
        if (word == ".reqnctapercluster") {
          std::copy(n, n + 3, k.cluster);
          k.needs_cluster = true;
        } else {
          if (word == ".reqntid") std::copy(n, n + 3, k.block);
          k.max_threads = static_cast<uint32_t>(std::min<uint64_t>(all, UINT32_MAX));
        }
      } else if (word == ".explicitcluster") {
        k.needs_cluster = true;
      }
    }
    if (lex_.is("{"))
      if (Status s = body(&k); !s.ok()) return s;
    facts_.kernels.push_back(std::move(k));
    return {};
  }

  Status parameters(Kernel* k) {
    uint64_t end = 0;
    while (!lex_.take(")")) {
      if (lex_.done()) return bad("the parameters of " + k->name + " do not end");
      if (lex_.take(",")) continue;
      if (!lex_.take(".param")) return bad("the parameters of " + k->name + " hold something else");
      uint64_t align = 0, count = 1;
      Type type;
      bool pointer = false, named = false;
      while (!lex_.is(",") && !lex_.is(")")) {
        if (lex_.done()) return bad("the parameters of " + k->name + " do not end");
        const std::string_view word = lex_.take_word();
        if (word == ".align") {
          const auto n = small();
          if (!n || !*n || (*n & (*n - 1)) || *n > 4096) return bad("an .align of " + k->name + " is no power of two");
          if (!pointer) align = *n;
        } else if (word == ".ptr") {
          pointer = true;
        } else if (word == "[") {
          const auto n = small();
          if (!n || !lex_.take("]")) return bad("a parameter array of " + k->name + " has no length");
          count *= *n;
          if (count > kMaxParamBytes) return bad("a parameter of " + k->name + " is longer than 32,764 bytes");
        } else if (word[0] == '.') {
          if (const Type t = type_of(word); t.bytes) type = t;
        } else {
          named = true;
        }
      }
      if (!type.bytes || !named) return bad("a parameter of " + k->name + " has no type or name");
      align = std::max<uint64_t>(align, type.bytes);
      const uint64_t offset = round_up(param_base_ + end, align) - param_base_, bytes = count * type.bytes;
      end = offset + bytes;
      if (end > kMaxParamBytes || k->params.size() >= kMaxParams)
        return bad("the parameters of " + k->name + " are longer than 32,764 bytes");
      k->params.push_back({static_cast<uint32_t>(offset), static_cast<uint32_t>(bytes)});
    }
    k->params_bytes = static_cast<uint32_t>(end);
    return {};
  }

  // A kernel's own .shared and .local, and the names that it uses.
  Status body(Kernel* k) {
    int depth = 0;
    uint64_t shared = 0;
    std::map<std::string_view, bool> counted;
    do {
      if (lex_.done()) return bad("the body of " + k->name + " does not end");
      const std::string_view word = lex_.word();
      if (word == ".shared" || word == ".local") {
        lex_.next();
        if (Status s = variables(word, false, k); !s.ok()) return s;
        continue;
      }
      if (word == "{") depth++;
      if (word == "}") depth--;
      if (word == "vprintf") k->calls_printf = true;
      if (word == "malloc") k->calls_malloc = true;
      // cooperative_groups::this_grid() finds its barrier through these two.
      if (word == "%envreg1" || word == "%envreg2") k->grid_sync = true;
      if (const auto it = shared_.find(word); it != shared_.end() && !counted[word]) {
        counted[word] = true;
        shared += it->second;
      }
      lex_.next();
    } while (depth > 0);
    k->shared_bytes = static_cast<uint32_t>(std::min<uint64_t>(k->shared_bytes + shared, UINT32_MAX));
    return {};
  }

  // What stands behind a state space, up to the semicolon. of: the kernel in whose body it stands.
  Status variables(std::string_view space, bool external, Kernel* of) {
    uint64_t align = 0, lanes = 1;
    Type type;
    bool managed = false;
    while (!lex_.done() && !lex_.is(";")) {
      const std::string_view word = lex_.take_word();
      if (word == ".align") {
        const auto n = small();
        if (!n || !*n || (*n & (*n - 1)) || *n > 1 << 20) return bad("an .align is no power of two");
        align = *n;
      } else if (word == ".v2" || word == ".v4" || word == ".v8") {
        lanes = static_cast<uint64_t>(word[2] - '0');
      } else if (word == ".attribute") {
        for (; !lex_.done() && !lex_.is(")") && !lex_.is(";"); lex_.next()) managed |= lex_.is(".managed");
        lex_.take(")");
      } else if (word[0] == '.') {
        if (const Type t = type_of(word); t.bytes) type = t;
      } else if (word != ",") {
        if (!type.bytes) return bad("variable " + std::string(word.substr(0, 200)) + " has no type");
        if (Status s = variable(space, external, of, word, type, lanes, align, managed); !s.ok()) return s;
      }
    }
    lex_.take(";");
    return {};
  }

  Status variable(std::string_view space, bool external, Kernel* of, std::string_view name, const Type& type,
                  uint64_t lanes, uint64_t align, bool managed) {
    uint64_t bytes = type.bytes * lanes;
    align = std::max(align, bytes);
    std::vector<uint64_t> strides;  // bytes of one element of each dimension, outermost first
    std::vector<uint64_t> dims;
    bool open_ended = false;
    while (lex_.take("[")) {
      if (lex_.take("]")) {
        if (!dims.empty()) return bad("only the first dimension of " + std::string(name) + " may be open");
        dims.push_back(0);
        open_ended = true;
        continue;
      }
      const auto n = number_of(lex_.take_word());
      if (!n || n->kind != Number::Kind::kInteger || n->bits > kMaxGlobalBytes || !lex_.take("]") || dims.size() > 8)
        return bad("an array dimension of " + std::string(name) + " is no number");
      dims.push_back(n->bits);
    }
    strides.resize(dims.size());
    for (size_t i = dims.size(); i-- > 0;) {
      strides[i] = bytes;
      if (__builtin_mul_overflow(bytes, dims[i], &bytes) || bytes > kMaxGlobalBytes)
        return bad("variable " + std::string(name) + " is larger than any device");
    }
    std::vector<uint8_t> initial;
    bool addresses = false;
    if (lex_.take("=")) {
      uint64_t at = 0;
      const uint64_t limit = open_ended ? kMaxInitialBytes : bytes;
      if (Status s = initializer(type, strides, 0, limit, 0, &at, &initial, &addresses); !s.ok()) return s;
      if (open_ended) bytes = round_up(at, strides[0]);
    }
    if (space == ".shared") {
      if (of)
        of->shared_bytes = static_cast<uint32_t>(
            std::min<uint64_t>(round_up(of->shared_bytes, std::min<uint64_t>(align, 1 << 20)) + bytes, UINT32_MAX));
      else if (!external)
        shared_[name] = bytes;
      return {};
    }
    if (space == ".local") {
      if (of) of->local_bytes = static_cast<uint32_t>(std::min<uint64_t>(of->local_bytes + bytes, UINT32_MAX));
      return {};
    }
    if (external) return {};
    if (facts_.globals.size() >= kMaxGlobals) return bad("more than 65,536 variables");
    facts_.globals.push_back({std::string(name), bytes, static_cast<uint32_t>(align), space == ".const", managed,
                              std::move(initial), addresses});
    return {};
  }

  // One value, or a list in braces. at: where the next element goes.
  Status initializer(const Type& type, const std::vector<uint64_t>& strides, size_t dim, uint64_t limit, int depth,
                     uint64_t* at, std::vector<uint8_t>* to, bool* addresses) {
    if (depth > kMaxDepth) return bad("an initial value is nested too deeply");
    if (!lex_.take("{")) return element(type, limit, at, to, addresses);
    const uint64_t begin = *at;
    while (!lex_.take("}")) {
      if (lex_.done() || lex_.is(";")) return bad("an initial value does not end");
      if (lex_.take(",")) continue;
      if (lex_.is("{") && dim < strides.size()) {
        // A list of the next dimension begins at a whole element of this one and leaves the rest of it zero.
        const uint64_t first = begin + round_up(*at - begin, strides[dim]);
        *at = first;
        if (Status s = initializer(type, strides, dim + 1, limit, depth + 1, at, to, addresses); !s.ok()) return s;
        *at = std::max(*at, std::min(limit, first + strides[dim]));
      } else if (Status s = initializer(type, strides, dim + 1, limit, depth + 1, at, to, addresses); !s.ok()) {
        return s;
      }
    }
    return {};
  }

  Status element(const Type& type, uint64_t limit, uint64_t* at, std::vector<uint8_t>* to, bool* addresses) {
    const bool minus = lex_.take("-");
    const auto number = number_of(lex_.word());
    uint64_t bits = 0;
    if (!number) {
      // A name, generic(name), name+8, 0xff(name): an address, which the loader knows.
      *addresses = true;
      int depth = 0;
      while (!lex_.done() && !lex_.is(";") && (depth > 0 || (!lex_.is(",") && !lex_.is("}")))) {
        depth += lex_.is("(") ? 1 : lex_.is(")") ? -1 : 0;
        lex_.next();
      }
    } else {
      lex_.next();
      if (lex_.is("(")) {  // 0xff(name): a byte of an address
        *addresses = true;
        while (!lex_.done() && !lex_.is(";") && !lex_.take(")")) lex_.next();
      } else {
        double value = number->decimal;
        bits = number->bits;
        if (number->kind == Number::Kind::kFloatBits) {
          float f;
          const auto low = static_cast<uint32_t>(bits);
          std::memcpy(&f, &low, 4);
          value = static_cast<double>(f);
        } else if (number->kind == Number::Kind::kDoubleBits) {
          std::memcpy(&value, &bits, 8);
        } else if (number->kind == Number::Kind::kInteger) {
          value = static_cast<double>(bits);
          if (minus) bits = 0 - bits;
        }
        if (type.is_float) {
          if (minus) value = -value;
          if (type.bytes == 4) {
            const auto f = static_cast<float>(value);
            uint32_t low;
            std::memcpy(&low, &f, 4);
            bits = low;
            if (number->kind == Number::Kind::kFloatBits && !minus) bits = number->bits;  // also a NaN's payload
          } else {
            std::memcpy(&bits, &value, 8);
            if (number->kind == Number::Kind::kDoubleBits && !minus) bits = number->bits;
          }
        }
      }
    }
    if (*at + type.bytes > limit || *at + type.bytes > kMaxInitialBytes)
      return bad("an initial value is longer than its variable");
    const uint64_t end = *at + type.bytes;
    if (bits) {  // zeroes at the end need no bytes
      if (to->size() < end) to->resize(end);
      std::memcpy(to->data() + *at, &bits, std::min<size_t>(type.bytes, 8));
    }
    *at = end;
    return {};
  }

  Lexer lex_;
  const uint64_t param_base_;
  Facts facts_;
  bool external_ = false, have_target_ = false;
  std::map<std::string_view, uint64_t> shared_;  // of the module: counted in the kernels that name them
};

}  // namespace

StatusOr<Facts> parse_ptx(std::string_view text, const Arch& device) {
  while (!text.empty() && text.back() == 0) text.remove_suffix(1);
  return Parser(text, device).run();
}

}  // namespace devproxy::hal::image
