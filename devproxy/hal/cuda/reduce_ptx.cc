// SPDX-License-Identifier: Apache-2.0
// The kernel has two loops of the same form. In the first a thread takes 16 bytes of each buffer at a time, if all
// buffers begin at a multiple of 16; in the second it takes one element at a time: the rest, or everything.
//
// The assembler assigns the hardware's registers, so every value here has a name of its own. A source is loaded where
// the tree needs it, depth first: some log2(sources) values are alive at a time.
//
// Each sum, product and quotient names its rounding (.rn): without that the assembler may fuse a product and a sum.
// Nothing has .ftz: subnormal numbers stay.
#include "devproxy/hal/cuda/reduce_ptx.h"

#include <bit>
#include <cstdio>
#include <map>

namespace devproxy::hal::cuda {

namespace {

using Lanes = std::vector<std::string>;  // registers: one by element that a thread has in hand

constexpr uint32_t kVectorBytes = 16;

std::string hex(uint32_t bits) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%x", bits);
  return text;
}
std::string number(uint64_t value) { return std::to_string(value); }
// PTX ISA, "Floating-Point Constants": 0f and 0d with the bits in hexadecimal digits.
std::string constant(float value) {
  char text[16];
  std::snprintf(text, sizeof text, "0f%08x", std::bit_cast<uint32_t>(value));
  return text;
}
std::string constant(double value) {
  char text[24];
  std::snprintf(text, sizeof text, "0d%016llx", static_cast<unsigned long long>(std::bit_cast<uint64_t>(value)));
  return text;
}

const char* memory_type(CommType type) {
  switch (type) {
    case CommType::kInt8: return "s8";  // a load extends the sign
    case CommType::kUint8:
    case CommType::kFloat8e4m3:
    case CommType::kFloat8e5m2: return "u8";
    case CommType::kFloat16:
    case CommType::kBfloat16: return "u16";
    case CommType::kInt32:
    case CommType::kUint32:
    case CommType::kFloat32: return "u32";
    case CommType::kInt64:
    case CommType::kUint64:
    case CommType::kFloat64: return "u64";
  }
  return "";
}

// What the tree is computed in. There is no arithmetic of 8 bits: the low 8 of 32 are as right.
const char* wide_type(CommType type) {
  switch (type) {
    case CommType::kInt8:
    case CommType::kInt32: return "s32";
    case CommType::kUint8:
    case CommType::kUint32: return "u32";
    case CommType::kInt64: return "s64";
    case CommType::kUint64: return "u64";
    case CommType::kFloat64: return "f64";
    case CommType::kFloat16:
    case CommType::kFloat32:
    case CommType::kBfloat16:
    case CommType::kFloat8e4m3:
    case CommType::kFloat8e5m2: return "f32";
  }
  return "";
}

// As in hal/soft/comm/numbers.h: bits of the mantissa, codes of the largest number, of a NaN and of infinity if any.
struct Float8 {
  uint32_t mantissa, bias, largest, nan, infinity;
};
constexpr Float8 kE4m3{3, 7, 0x7e, 0x7f, 0}, kE5m2{2, 15, 0x7b, 0x7e, 0x7c};

constexpr uint32_t kInfinity = 0x7f80'0000, kNan = 0x7fc0'0000, kSign = 0x8000'0000;  // of float32

class Kernel {
 public:
  explicit Kernel(const ReduceShape& shape)
      : shape_(shape),
        bytes_(comm_type_bytes(shape.type)),
        memory_(memory_type(shape.type)),
        wide_(wide_type(shape.type)),
        floating_(wide_[0] == 'f') {}

  std::string text() {
    find_thread();
    find_vectors();
    line("mov.u64 %index, %thread");
    loop("vectors", "%vectors", kVectorBytes / bytes_);
    const std::string done = make('d', "shl.b64", "%vectors", number(std::countr_zero(kVectorBytes / bytes_)));
    line("add.u64 %index, %thread, " + done);
    loop("elements", "%count", 1);
    line("ret");
    return head() + registers() + body_ + "}\n";
  }

 private:
  // -- text -------------------------------------------------------------------------------------------------------

  void line(const std::string& instruction) { body_ += "  " + instruction + ";\n"; }

  // An instruction whose result has a register of its own. file: its size, as registers() has it.
  template <class... Operands>
  std::string make(char file, const std::string& instruction, const Operands&... operands) {
    const std::string result = fresh(file);
    std::string text = instruction + " " + result;
    ((text += ", ", text += operands), ...);
    line(text);
    return result;
  }
  template <class... Operands>
  std::string word(const std::string& instruction, const Operands&... operands) {
    return make('r', instruction, operands...);
  }
  // What has the size of the type that the tree is computed in.
  template <class... Operands>
  std::string wide(const std::string& instruction, const Operands&... operands) {
    return make(wide_bits() == 64 ? 'd' : 'r', instruction, operands...);
  }

  std::string fresh(char file) { return "%" + std::string(1, file) + number(used_[file]++); }
  uint32_t wide_bits() const { return wide_.substr(1) == "64" ? 64 : 32; }

  std::string head() const {
    std::string on_device;
    for (uint32_t rank = 0; rank < shape_.sources; rank++)
      on_device += premultiplied() && shape_.on_device >> rank & 1 ? '1' : '0';
    std::string text =
        "// devproxy reduce type=" + number(static_cast<uint8_t>(shape_.type)) +
        " reduction=" + number(static_cast<uint8_t>(shape_.reduction)) + " sources=" + number(shape_.sources) +
        " destinations=" + number(shape_.destinations) + " on_device=" + on_device +
        "\n.version 6.3\n.target sm_75\n.address_size 64\n\n.visible .entry " + kReduceEntry + "(\n  .param .u64 count";
    const auto add = [&](const char* name, uint32_t count) {
      for (uint32_t i = 0; i < count; i++) text += ",\n  .param .u64 " + std::string(name) + number(i);
    };
    add("source", shape_.sources);
    add("destination", shape_.destinations);
    if (premultiplied()) add("scalar", shape_.sources);
    return text + "\n)\n.maxntid " + number(kReduceThreads) + ", 1, 1\n{\n";
  }

  std::string registers() {
    std::string text = "  .reg .b64 %thread, %stride, %count, %vectors, %index, %offset;\n";
    const auto add = [&](char file, const char* size) {
      if (used_[file]) text += std::string("  .reg .") + size + " %" + file + "<" + number(used_[file]) + ">;\n";
    };
    add('p', "pred");
    add('h', "b16");
    add('r', "b32");
    add('d', "b64");
    return text;
  }

  // -- loops ------------------------------------------------------------------------------------------------------

  void find_thread() {
    const std::string block = word("mov.u32", "%ctaid.x"), threads = word("mov.u32", "%ntid.x");
    const std::string first = make('d', "mul.wide.u32", block, threads);
    const std::string thread = make('d', "cvt.u64.u32", word("mov.u32", "%tid.x"));
    line("add.u64 %thread, " + first + ", " + thread);
    line("mul.wide.u32 %stride, " + word("mov.u32", "%nctaid.x") + ", " + threads);
    line("ld.param.u64 %count, [count]");
  }

  // How many times 16 bytes the first loop takes: none where a buffer does not allow it.
  void find_vectors() {
    std::string all = make('d', "ld.param.u64", "[source0]");
    for (uint32_t i = 1; i < shape_.sources; i++)
      all = make('d', "or.b64", all, make('d', "ld.param.u64", "[source" + number(i) + "]"));
    for (uint32_t i = 0; i < shape_.destinations; i++)
      all = make('d', "or.b64", all, make('d', "ld.param.u64", "[destination" + number(i) + "]"));
    const std::string low = make('d', "and.b64", all, number(kVectorBytes - 1));
    const std::string aligned = make('p', "setp.eq.u64", low, "0");
    const std::string most = make('d', "shr.u64", "%count", number(std::countr_zero(kVectorBytes / bytes_)));
    line("selp.b64 %vectors, " + most + ", 0, " + aligned);
  }

  // From %index on. lanes: elements at a time.
  void loop(const std::string& name, const std::string& end, uint32_t lanes) {
    body_ += name + ":\n";
    line("@" + make('p', "setp.ge.u64", "%index", end) + " bra " + name + "_end");
    line("shl.b64 %offset, %index, " + number(std::countr_zero(lanes * bytes_)));
    Lanes sum = tree(0, shape_.sources, lanes);
    for (std::string& value : sum) {
      if (shape_.reduction == CommReduction::kAvg) value = divide(value);
      value = narrow(value);
    }
    store(sum);
    line("add.u64 %index, %index, %stride");
    line("bra " + name);
    body_ += name + "_end:\n";
  }

  Lanes tree(uint32_t lo, uint32_t ranks, uint32_t lanes) {
    if (ranks == 1) return leaf(lo, lanes);
    const uint32_t half = std::bit_floor(ranks - 1);
    Lanes sum = tree(lo, half, lanes);
    const Lanes other = tree(lo + half, ranks - half, lanes);
    for (uint32_t i = 0; i < lanes; i++) sum[i] = combine(sum[i], other[i]);
    return sum;
  }

  Lanes leaf(uint32_t rank, uint32_t lanes) {
    Lanes values = load(here("source" + number(rank)), lanes);
    for (std::string& value : values) value = widen(value);
    if (!premultiplied()) return values;
    const std::string factor = scalar(rank);
    for (std::string& value : values) value = multiply(value, factor);
    return values;
  }

  // -- memory -----------------------------------------------------------------------------------------------------

  std::string pointer(const std::string& parameter) {
    return make('d', "cvta.to.global.u64", make('d', "ld.param.u64", "[" + parameter + "]"));
  }
  std::string here(const std::string& parameter) { return make('d', "add.u64", pointer(parameter), "%offset"); }

  // An element as it lies in memory.
  std::string load_one(const char* space, const std::string& at) {
    return make(bytes_ == 8 ? 'd' : 'r', std::string("ld.") + space + "." + memory_, "[" + at + "]");
  }

  std::string scalar(uint32_t rank) {
    const std::string parameter = "scalar" + number(rank);
    const bool on_device = shape_.on_device >> rank & 1;
    return widen(on_device ? load_one("global", pointer(parameter)) : load_one("param", parameter));
  }

  Lanes load(const std::string& at, uint32_t lanes) {
    if (lanes == 1) return {load_one("global", at)};
    Lanes words = vector();
    line("ld.global." + vector_type() + " " + list(words) + ", [" + at + "]");
    if (bytes_ >= 4) return words;
    Lanes values;
    const std::string take = memory_[0] == 's' ? "bfe.s32" : "bfe.u32";
    for (const std::string& from : words)
      for (uint32_t at_bit = 0; at_bit < 32; at_bit += 8 * bytes_)
        values.push_back(word(take, from, number(at_bit), number(8 * bytes_)));
    return values;
  }

  void store(const Lanes& values) {
    Lanes words = values;
    if (values.size() > 1 && bytes_ < 4) {
      words.clear();
      const uint32_t each = 4 / bytes_;
      for (uint32_t first = 0; first < values.size(); first += each) {
        std::string packed = values[first];
        for (uint32_t i = 1; i < each; i++)
          packed = word("bfi.b32", values[first + i], packed, number(8 * bytes_ * i), number(8 * bytes_));
        words.push_back(packed);
      }
    }
    const bool one = values.size() == 1;
    const std::string type = one ? memory_ : vector_type(), from = one ? words[0] : list(words);
    for (uint32_t i = 0; i < shape_.destinations; i++)
      line("st.global." + type + " [" + here("destination" + number(i)) + "], " + from);
  }

  std::string vector_type() const { return bytes_ == 8 ? "v2.u64" : "v4.u32"; }
  Lanes vector() {
    if (bytes_ == 8) return {fresh('d'), fresh('d')};
    return {fresh('r'), fresh('r'), fresh('r'), fresh('r')};
  }
  static std::string list(const Lanes& registers) {
    std::string text;
    for (const std::string& one : registers) text += (text.empty() ? "{" : ", ") + one;
    return text + "}";
  }

  // -- arithmetic -------------------------------------------------------------------------------------------------

  bool premultiplied() const { return shape_.reduction == CommReduction::kPreMulSum; }

  std::string combine(const std::string& a, const std::string& b) {
    switch (shape_.reduction) {
      case CommReduction::kProd: return multiply(a, b);
      case CommReduction::kMax: return choose(a, b, a, b);
      case CommReduction::kMin: return choose(a, b, b, a);
      case CommReduction::kSum:
      case CommReduction::kAvg:
      case CommReduction::kPreMulSum: return wide((floating_ ? "add.rn." : "add.") + wide_, a, b);
    }
    return "";
  }

  std::string multiply(const std::string& a, const std::string& b) {
    return wide((floating_ ? "mul.rn." : "mul.lo.") + wide_, a, b);
  }

  // b where less < more or a is NaN, else a. max and min of the instruction set have other rules for the zeros.
  std::string choose(const std::string& a, const std::string& b, const std::string& less, const std::string& more) {
    const std::string take = floating_
                                 ? make('p', "setp.lt.or." + wide_, less, more, make('p', "setp.nan." + wide_, a, a))
                                 : make('p', "setp.lt." + wide_, less, more);
    return wide("selp.b" + number(wide_bits()), b, a, take);
  }

  std::string divide(const std::string& sum) {
    const uint32_t ranks = shape_.sources;
    if (shape_.type == CommType::kFloat64) return wide("div.rn.f64", sum, constant(static_cast<double>(ranks)));
    if (floating_) return wide("div.rn.f32", sum, constant(static_cast<float>(ranks)));
    // The sum of 8 bits wraps around before it is divided.
    if (bytes_ == 1) return word("div." + wide_, word("cvt." + wide_ + "." + memory_, sum), number(ranks));
    return wide("div." + wide_, sum, number(ranks));
  }

  // -- conversions: hal/soft/comm/numbers.h -----------------------------------------------------------------------

  std::string widen(const std::string& element) {
    switch (shape_.type) {
      case CommType::kFloat16: return word("cvt.f32.f16", make('h', "cvt.u16.u32", element));
      case CommType::kBfloat16: return word("shl.b32", element, "16");
      case CommType::kFloat8e4m3: return widen8(element, kE4m3);
      case CommType::kFloat8e5m2: return widen8(element, kE5m2);
      default: return element;
    }
  }

  std::string narrow(const std::string& value) {
    switch (shape_.type) {
      case CommType::kFloat16: return word("cvt.u32.u16", make('h', "cvt.rn.f16.f32", value));
      case CommType::kBfloat16: return narrow_bfloat16(value);
      case CommType::kFloat8e4m3: return narrow8(value, kE4m3);
      case CommType::kFloat8e5m2: return narrow8(value, kE5m2);
      default: return value;
    }
  }

  // Not by cvt, which has it only since Ampere.
  std::string narrow_bfloat16(const std::string& value) {
    const std::string high = word("shr.u32", value, "16"), odd = word("and.b32", high, "1");
    const std::string up = word("add.u32", word("add.u32", value, odd), hex(0x7fff));
    const std::string rounded = word("shr.u32", up, "16"), quiet = word("or.b32", high, hex(0x40));
    return word("selp.b32", quiet, rounded, is_nan(word("and.b32", value, hex(~kSign))));
  }

  std::string widen8(const std::string& element, const Float8& f) {
    const std::string rest = word("and.b32", element, hex(0x7f));
    const std::string shifted = word("shl.b32", rest, number(23 - f.mantissa));
    std::string value = word("mul.rn.f32", shifted, constant(std::bit_cast<float>((254 - f.bias) << 23)));
    value = word("selp.b32", hex(kNan), value, make('p', "setp.gt.u32", rest, hex(f.largest)));
    if (f.infinity) value = word("selp.b32", hex(kInfinity), value, make('p', "setp.eq.u32", rest, hex(f.infinity)));
    const std::string sign = word("and.b32", word("shl.b32", element, "24"), hex(kSign));
    return word("or.b32", value, sign);
  }

  std::string narrow8(const std::string& value, const Float8& f) {
    const uint32_t shift = 23 - f.mantissa, magic = (127 + 23 - f.mantissa - f.bias + 1) << 23;
    const std::string rest = word("and.b32", value, hex(~kSign));
    // A subnormal number: the adder of float32 rounds it.
    const std::string added = word("add.rn.f32", rest, constant(std::bit_cast<float>(magic)));
    const std::string small = word("sub.u32", added, hex(magic));
    // Another one: half of the last place, less one where the last place is even; and the other bias.
    const std::string odd = word("bfe.u32", rest, number(shift), "1");
    const uint32_t more = (1u << (shift - 1)) - 1 - ((127 - f.bias) << 23);
    const std::string rounded = word("add.u32", word("add.u32", rest, odd), hex(more));
    std::string code = word("shr.u32", rounded, number(shift));
    const std::string subnormal = make('p', "setp.lt.u32", rest, hex((128 - f.bias) << 23));
    code = word("selp.b32", small, code, subnormal);
    code = word("min.u32", code, hex(f.largest));
    code = word("selp.b32", hex(f.nan), code, is_nan(rest));
    const std::string sign = word("and.b32", word("shr.u32", value, "24"), hex(0x80));
    return word("or.b32", code, sign);
  }

  // rest: a float32 without its sign.
  std::string is_nan(const std::string& rest) { return make('p', "setp.gt.u32", rest, hex(kInfinity)); }

  const ReduceShape shape_;
  const uint32_t bytes_;
  const std::string memory_, wide_;
  const bool floating_;
  std::string body_;
  std::map<char, uint32_t> used_;
};

}  // namespace

std::string reduce_ptx(const ReduceShape& shape) { return Kernel(shape).text(); }

std::vector<uint64_t> reduce_params(uint64_t count, const std::vector<uint64_t>& sources,
                                    const std::vector<uint64_t>& destinations, const std::vector<uint64_t>& scalars) {
  std::vector<uint64_t> params{count};
  for (const auto* part : {&sources, &destinations, &scalars}) params.insert(params.end(), part->begin(), part->end());
  return params;
}

}  // namespace devproxy::hal::cuda
