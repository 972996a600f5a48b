// SPDX-License-Identifier: Apache-2.0
// Reads a block as decode.cc does and makes nothing of it. It believes the block no more than that does: what is
// malformed is unknown here, and refused when it is launched.
//
// An op writes its outputs and what its schema marks as written; where the schema is not to be believed, the client says
// so (kFlagWritesUndeclared). What else decides its result is in the block, with two exceptions: torch's settings, of
// which the block has a number, and generators that live here.
#include "devproxy/torch/executor/footprint.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

#include "devproxy/torch/block.h"
#include "devproxy/torch/executor/client.h"

namespace devproxy::aten {
namespace {

constexpr int kDeepest = 4;

// Does the operator overwrite what it is given to write, whatever is there?
enum class Resets : uint8_t { kNo, kProbably, kSurely };

class Tracer {
 public:
  Tracer(const uint8_t* params, uint64_t bytes, const BlockHeader& header, Resets resets, devproxy_executor_access* to,
         uint32_t room)
      : params_(params),
        reader_(params + sizeof header, bytes - sizeof header),
        header_(header),
        resets_(resets),
        to_(to),
        room_(room) {}

  void block() {
    note({header_.settings, 0, offsetof(BlockHeader, settings), DEVPROXY_EXECUTOR_NUMBER});
    for (uint32_t i = 0; i < header_.n_args; i++) value(0);
    if (header_.flags & kFlagAmbientGenerator) value(0);
    for (uint32_t i = 0; i < header_.n_outputs; i++) output();
    if (reader_.left() != 0) throw Malformed("parameter block: bytes left over");
  }
  uint32_t count() const { return count_; }
  bool repeatable() const { return repeatable_; }

 private:
  void note(const devproxy_executor_access& access) {
    if (count_ < room_) to_[count_] = access;
    count_++;
  }

  void tensor(uint32_t flags) {
    tensors_.push_back(UINT32_MAX);
    const uint8_t* const at = reader_.bytes(sizeof(TensorHead));
    TensorHead head;
    std::memcpy(&head, at, sizeof head);
    if (head.dims > kMaxDims) throw Malformed("parameter block: too many dimensions");
    const auto dtype = static_cast<at::ScalarType>(head.dtype);
    if (head.dtype < 0 || head.dtype >= static_cast<int8_t>(at::ScalarType::NumOptions))
      throw Malformed("parameter block: no such data type");
    const uint8_t* const sizes = reader_.bytes(8 * size_t{head.dims});
    const uint8_t* const strides = reader_.bytes(8 * size_t{head.dims});
    const uint64_t item = c10::elementSize(dtype);
    uint64_t span = 1, elements = 1;
    for (uint8_t i = 0; i < head.dims; i++) {
      int64_t size, stride;
      std::memcpy(&size, sizes + 8 * i, 8);
      std::memcpy(&stride, strides + 8 * i, 8);
      if (size < 0 || stride < 0) throw Malformed("parameter block: negative size or stride");
      if (size == 0) return;
      uint64_t reach;
      if (__builtin_mul_overflow(static_cast<uint64_t>(size - 1), static_cast<uint64_t>(stride), &reach) ||
          __builtin_add_overflow(span, reach, &span) ||
          __builtin_mul_overflow(elements, static_cast<uint64_t>(size), &elements))
        throw Malformed("parameter block: tensor size overflows");
    }
    uint64_t bytes;
    if (__builtin_mul_overflow(span, item, &bytes) || head.addr + bytes < head.addr)
      throw Malformed("parameter block: tensor size overflows");
    if (head.flags & kWritable || header_.flags & kFlagWritesUndeclared) flags |= DEVPROXY_EXECUTOR_WRITES;
    if (span == elements) flags |= DEVPROXY_EXECUTOR_WHOLE;
    if (flags & DEVPROXY_EXECUTOR_WRITES) {
      if (resets_ != Resets::kNo) flags |= DEVPROXY_EXECUTOR_RESETS;
      if (resets_ == Resets::kSurely && flags & DEVPROXY_EXECUTOR_WHOLE) flags &= ~uint32_t{DEVPROXY_EXECUTOR_READS};
    }
    tensors_.back() = count_;
    note({head.addr, bytes, static_cast<uint32_t>(at - params_), flags});
  }

  void output() {
    switch (reader_.get<Tag>()) {
      case Tag::kUndefined: return;
      case Tag::kTensor: return tensor(DEVPROXY_EXECUTOR_WRITES);
      default: throw Malformed("parameter block: an output is not a tensor");
    }
  }

  void list(size_t least, int depth) {
    for (uint32_t n = reader_.count(least); n != 0; n--) value(depth + 1);
  }

  void value(int depth) {
    if (depth > kDeepest) throw Malformed("parameter block: lists too deep");
    switch (reader_.get<Tag>()) {
      case Tag::kNone:
      case Tag::kUndefined:
      case Tag::kDevice: return;
      case Tag::kTensor: return tensor(DEVPROXY_EXECUTOR_READS);
      case Tag::kSparse: {
        const auto head = reader_.get<SparseHead>();
        reader_.bytes(8 * size_t{head.dims});
        for (int i = 0; i < head.parts; i++) {
          if (reader_.get<Tag>() != Tag::kTensor) throw Malformed("parameter block: a part of a tensor is none");
          tensor(DEVPROXY_EXECUTOR_READS);
          tensors_.pop_back();  // kSameTensor does not count it
        }
        return;
      }
      case Tag::kSameTensor: {  // x.add_(y) is add(x, y, out=x), and does look at x
        const auto i = reader_.get<uint16_t>();
        if (i >= tensors_.size()) throw Malformed("parameter block: reference to no tensor");
        if (tensors_[i] >= room_) return;
        uint32_t& flags = to_[tensors_[i]].flags;
        flags = (flags & ~uint32_t{DEVPROXY_EXECUTOR_RESETS}) | DEVPROXY_EXECUTOR_READS;
        return;
      }
      case Tag::kHostTensor: {
        const auto head = reader_.get<HostTensorHead>();
        reader_.bytes(8 * size_t{head.dims});
        reader_.bytes(head.bytes);
        return;
      }
      case Tag::kInt:
      case Tag::kDouble: reader_.get<uint64_t>(); return;
      case Tag::kBool: reader_.get<uint8_t>(); return;
      case Tag::kComplex:
      case Tag::kGenerator: reader_.bytes(16); return;
      case Tag::kString: reader_.string(); return;
      case Tag::kIntList:
      case Tag::kDoubleList: reader_.bytes(size_t{reader_.count(8)} * 8); return;
      case Tag::kBoolList: reader_.bytes(reader_.count(1)); return;
      case Tag::kTensorList:
      case Tag::kOptionalTensorList:
      case Tag::kScalarList: return list(1, depth);
      case Tag::kDeviceGenerator: {
        const uint8_t* const at = reader_.bytes(16);
        uint64_t addr;
        std::memcpy(&addr, at, sizeof addr);
        return note({addr, 16, static_cast<uint32_t>(at - params_), DEVPROXY_EXECUTOR_READS});
      }
      case Tag::kNamedGenerator:
        reader_.get<uint64_t>();
        repeatable_ = false;
        return;
    }
    throw Malformed("parameter block: unknown value");
  }

  const uint8_t* const params_;
  Reader reader_;
  const BlockHeader& header_;
  const Resets resets_;
  std::vector<uint32_t> tensors_;  // places in `to` of the kTensor arguments
  devproxy_executor_access* const to_;
  const uint32_t room_;
  uint32_t count_ = 0;
  bool repeatable_ = true;
};

// By its name.
Resets resets(std::string_view name) {
  const size_t dot = name.find('.');
  if (dot != name.npos && name.substr(dot).ends_with("out")) return Resets::kProbably;
  const std::string_view base = name.substr(0, dot);
  for (const std::string_view one :
       {"aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_", "aten::_foreach_zero_"})
    if (base == one) return Resets::kSurely;
  return Resets::kNo;
}

uint64_t hash_of(const Settings& settings) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const uint8_t byte : settings.bytes) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

}  // namespace

int footprint(void* state, const char* name, const uint8_t* params, uint64_t params_bytes, devproxy_executor_access* to,
              uint32_t room, uint32_t* needed, uint64_t* digest) {
  *needed = 0;
  *digest = 0;
  // Services answer into pinned memory and touch no other.
  if (std::string_view(name).starts_with("devproxy::")) return DEVPROXY_EXECUTOR_KNOWN;
  try {
    BlockHeader header;
    if (params_bytes < sizeof header) return DEVPROXY_EXECUTOR_UNKNOWN;
    std::memcpy(&header, params, sizeof header);
    if (header.magic != kBlockMagic) return DEVPROXY_EXECUTOR_UNKNOWN;
    Tracer tracer(params, params_bytes, header, resets(name), to, room);
    tracer.block();
    *needed = tracer.count();
    if (header.mode == Mode::kInfer) {  // on copies of what it would write
      for (uint32_t i = 0; i < std::min(room, *needed); i++)
        if (!(to[i].flags & DEVPROXY_EXECUTOR_NUMBER)) to[i].flags = DEVPROXY_EXECUTOR_READS;
      return DEVPROXY_EXECUTOR_KNOWN;
    }
    if (!tracer.repeatable() || header.reply_addr != 0 || header.flags & kFlagWritesUndeclared)
      return DEVPROXY_EXECUTOR_KNOWN;
    if (header.settings != 0) *digest = hash_of(settings_of(*static_cast<Client*>(state), header.settings));
    return DEVPROXY_EXECUTOR_REPEATABLE;
  } catch (const std::exception&) {
    *needed = 0;
    return DEVPROXY_EXECUTOR_UNKNOWN;
  }
}

}  // namespace devproxy::aten
