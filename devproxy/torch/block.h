// SPDX-License-Identifier: Apache-2.0
// The parameter block of one launch: an ATen op with its arguments, as bytes.
//
// The client (client/encoder.cc) writes it, cuLaunchKernel carries it verbatim through `extra`, the executor module in
// the device-proxy server (executor/decode.cc) reads it. The executor trusts none of it. Numbers are little-endian and
// unaligned. Client and executor are built together, so there is one version and no negotiation.
//
//   BlockHeader | n_args values | [ambient generator] | n_outputs values (kTensor or kUndefined)
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

namespace devproxy::aten {

inline constexpr uint32_t kBlockMagic = 0x31425044;  // "DPB1"
inline constexpr int kMaxDims = 64;

enum class Tag : uint8_t {
  kNone = 0,
  kUndefined,           // an undefined tensor
  kTensor,              // TensorHead + sizes + strides
  kSameTensor,          // u16: place of an earlier kTensor argument; both are one tensor, so in-place ops see that
  kHostTensor,          // a small CPU tensor by value: HostTensorHead + sizes + bytes
  kInt,                 // i64
  kDouble,              // f64
  kBool,                // u8
  kComplex,             // f64 f64
  kString,              // u32 length + bytes
  kIntList,             // u32 count + i64...
  kDoubleList,          // u32 count + f64...
  kBoolList,            // u32 count + u8...
  kTensorList,          // u32 count + values
  kOptionalTensorList,  // u32 count + values
  kScalarList,          // u32 count + values
  kDevice,              // the device of the launch
  kGenerator,           // u64 seed, u64 offset
  kDeviceGenerator,     // u64 address of (seed, offset) in device memory, u64 to add to the offset: a launch in a graph
  kSparse,              // SparseHead + sizes + its parts, each kTensor
  kNamedGenerator,      // u64: one that lives in the executor (executor/client.h); 0 is the GPU's default one
};

enum class Mode : uint8_t {
  kRun = 0,    // run; results go to the outputs that the client allocated
  kInfer = 1,  // run on copies of what is written; only the results' metadata (or the exception) goes back
};

// What of the client's state the CPU kernels depend on.
enum BlockFlags : uint8_t {
  kFlagGradMode = 1,          // oneDNN's LSTM keeps a workspace only with gradients enabled
  kFlagDeterministic = 2,     // torch.use_deterministic_algorithms
  kFlagAmbientGenerator = 4,  // a random op without a generator argument: a generator value follows the arguments
  kFlagWritesUndeclared = 8,  // it may write any tensor, whatever its schema says
  kFlagWarnOnly = 16,         // use_deterministic_algorithms(warn_only=True)
  kFlagBlank = 32,  // with kInfer: read no tensor, take made-up contents (in a capture nothing has been computed yet)
};

struct BlockHeader {
  uint32_t magic;
  Mode mode;
  uint8_t flags;
  uint16_t n_args;
  uint32_t n_outputs;
  uint32_t threads;     // at::get_num_threads() of the client: CPU numerics depend on it
  uint64_t reply_addr;  // pinned memory of the client. kInfer: needed; kRun: 0, or where host outputs go (below)
  uint64_t reply_bytes;
  uint32_t settings;  // number of the client's settings at this op (settings.h); 0: the framework's own
  uint32_t zero;
};
static_assert(sizeof(BlockHeader) == 40);

// kHostResult, in a kInfer reply: the op returns this tensor on the host (the random state of some attention kernels).
// Such an op is run with a reply buffer; kOk is followed by one kHostTensor for each, in the order of the results, and
// the buffer is written when the op has been submitted, not when it has run.
enum TensorFlags : uint8_t { kConj = 1, kNeg = 2, kWrappedNumber = 4, kWritable = 8, kHostResult = 16 };

struct TensorHead {
  uint64_t addr;
  int8_t dtype;
  uint8_t flags;
  uint8_t dims;
  uint8_t pad[5];  // zero: no stray byte of the client leaves it
};

struct HostTensorHead {
  uint64_t bytes;
  int8_t dtype;
  uint8_t flags;
  uint8_t dims;
  uint8_t pad[5];
};
static_assert(sizeof(TensorHead) == 16 && sizeof(HostTensorHead) == 16);

// Of a tensor with a sparse layout. Its parts: COO: indices, values; compressed ones: compressed indices, plain indices,
// values. kWritable: the op writes it; the executor takes a copy, and what that has become is a new result.
struct SparseHead {
  int8_t layout;
  uint8_t flags;  // TensorFlags
  uint8_t dims;
  uint8_t coalesced;
  uint8_t parts;
  uint8_t pad[3];
};
static_assert(sizeof(SparseHead) == 8);
inline constexpr int kMaxParts = 3;

// The reply of kInfer. total_bytes says how much there is to say, even if the buffer was too small to hold it.
//   ReplyHeader | kOk: u8 n_returns, values | kException: text
enum class ReplyStatus : uint32_t { kOk = 0, kException = 1 };
enum class ExceptionKind : uint32_t { kRuntime = 0, kIndex, kValue, kType, kNotImplemented, kLinAlg, kOutOfMemory };
struct ReplyHeader {
  uint64_t total_bytes;
  ReplyStatus status;
  ExceptionKind kind;
};

// A name that starts with this asks for the vector-Jacobian product of the op behind it: the op's arguments, then a
// kTensorList of output gradients and a kBoolList of which tensor arguments want theirs.
inline constexpr std::string_view kVjpPrefix = "vjp:";

// Functions of the executor that are no operators. Their parameters are the struct of that name; a reply begins with
// ReplyHeader. All but one are answered when they are dispatched, whatever the GPU is doing.
inline constexpr std::string_view kSettingsName = "devproxy::settings";
inline constexpr std::string_view kGeneratorName = "devproxy::generator";
inline constexpr std::string_view kFactsName = "devproxy::facts";
inline constexpr std::string_view kPlansName = "devproxy::plans";
inline constexpr std::string_view kRnnName = "devproxy::rnn";
// This one is a command of the launch's stream, as an operator.
inline constexpr std::string_view kSleepName = "devproxy::sleep";

struct SettingsBlock {  // then `bytes` bytes of Settings
  uint32_t magic, number, bytes, zero;
};
struct GeneratorBlock {
  enum What : uint32_t { kSet = 0, kGet = 1, kCopy = 2, kForget = 3 };
  uint32_t magic, what;
  uint64_t id, seed, offset;  // kCopy: the state of generator `seed`
  uint64_t reply_addr;        // kGet: ReplyHeader, u64 seed, u64 offset
};
struct FactsBlock {
  uint32_t magic, zero;
  uint64_t reply_addr, reply_bytes;  // ReplyHeader, then text (client/executor.h, Facts)
};
struct RnnForm {  // of a recurrent layer, as _cudnn_rnn_flatten_weight has it
  int64_t dtype, weight_stride0, input_size, mode, hidden_size, proj_size, num_layers, batch_first, bidirectional;
};
struct RnnBlock {  // then, for each weight: i64 dims, i64 sizes...
  uint32_t magic, weights;
  RnnForm form;
  // ReplyHeader, then kOk: i64 elements, i64 offset of each weight | kException: text
  uint64_t reply_addr, reply_bytes;
};
struct SleepBlock {     // torch.cuda._sleep
  uint32_t magic, khz;  // of the clock that the cycles are of
  int64_t cycles;
};
struct PlansBlock {  // torch's cache of cuFFT plans
  enum What : uint32_t { kSize = 0, kMaxSize = 1, kSetMaxSize = 2, kClear = 3 };
  uint32_t magic, what;
  int64_t value;
  uint64_t reply_addr, reply_bytes;  // ReplyHeader, then kOk: i64 | kException: text
};

// The rule for random numbers where the ops run on the host: the op draws from a CPU generator whose seed is
// mix_seed(seed, offset), where (seed, offset) is the state of the CUDA generator at the launch; every random op adds
// kOffsetPerOp to the offset. So the device holds no hidden state, and device='cpu' gives the same numbers after
// torch.manual_seed(mix_seed(...)). In a graph the pair is read from device memory, where each replay writes the
// generator's state of that moment.
inline constexpr uint64_t kOffsetPerOp = 4;
inline uint64_t mix_seed(uint64_t seed, uint64_t offset) {  // splitmix64 of the pair
  uint64_t z = seed + 0x9e3779b97f4a7c15ull * (offset + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Bytes that grow and are kept between ops.
class Writer {
 public:
  Writer() = default;
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  ~Writer() { std::free(data_); }

  void clear() { size_ = 0; }
  const uint8_t* data() const { return data_; }
  uint8_t* at(size_t offset) { return data_ + offset; }
  size_t size() const { return size_; }

  uint8_t* extend(size_t n) {
    if (size_ + n > capacity_) grow(n);
    uint8_t* p = data_ + size_;
    size_ += n;
    return p;
  }
  void bytes(const void* p, size_t n) {
    if (n) std::memcpy(extend(n), p, n);
  }
  template <class T>
  void put(T v) {
    std::memcpy(extend(sizeof v), &v, sizeof v);
  }
  void tag(Tag t) { put(t); }

 private:
  void grow(size_t n) {
    capacity_ = (size_ + n) * 2 + 1024;
    data_ = static_cast<uint8_t*>(std::realloc(data_, capacity_));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  uint8_t* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

// Reads what a stranger wrote: every read is checked, a bad one throws Malformed.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Reader {
 public:
  Reader(const uint8_t* p, size_t n) : p_(p), end_(p + n) {}
  size_t left() const { return static_cast<size_t>(end_ - p_); }
  const uint8_t* bytes(size_t n) {
    if (n > left()) throw Malformed("parameter block is cut short");
    const uint8_t* p = p_;
    p_ += n;
    return p;
  }
  template <class T>
  T get() {
    T v;
    std::memcpy(&v, bytes(sizeof v), sizeof v);
    return v;
  }
  // A count of things of at least `least` bytes each: more than can follow is malformed, before anything is reserved.
  uint32_t count(size_t least) {
    const auto n = get<uint32_t>();
    if (n > left() / least) throw Malformed("parameter block names more elements than it holds");
    return n;
  }
  bool boolean() {
    const auto v = get<uint8_t>();
    if (v > 1) throw Malformed("parameter block: a bool is neither 0 nor 1");
    return v != 0;
  }
  std::string string() {
    const auto n = count(1);
    return {reinterpret_cast<const char*>(bytes(n)), n};
  }

 private:
  const uint8_t* p_;
  const uint8_t* end_;
};

}  // namespace devproxy::aten
