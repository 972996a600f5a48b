// SPDX-License-Identifier: Apache-2.0
// What is known of an op: from its schema, and from what the device has said of it.
//
// Locks: OpPlan::mu guards its metadata cache; the table of plans has one of its own. Neither is held over a driver call
// that waits.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "devproxy/torch/client/device.h"
#include "devproxy/torch/client/op_meta.h"

namespace devproxy::aten {

// What decides the metadata of an op's results: its arguments' types and layouts, and numbers among them (encoder.h).
using Key = c10::SmallVector<uint64_t, 64>;

struct KeyHash {
  size_t operator()(const Key& k) const {
    uint64_t h = 0x9e3779b97f4a7c15ull;
    for (uint64_t w : k) h = (h ^ w) * 0xff51afd7ed558ccdull, h ^= h >> 32;
    return h;
  }
};

struct ArgPlan {
  bool writable = false;  // the op writes it
  bool scalar = false;    // a number whose value does not decide the result's shape
  bool generator = false;
  bool host_ok = false;  // a CPU tensor of any size may come here (index lists, sequence lengths)
};

struct OpPlan {
  std::string name;  // "aten::add.out"
  const c10::FunctionSchema* schema = nullptr;
  std::vector<ArgPlan> args;
  std::vector<int> return_is_arg;  // -1: a new tensor or number
  std::vector<int> outs;           // places of out= arguments
  bool has_tensor_arg = false;
  bool has_generator_arg = false;
  bool random = false;
  bool dynamic = false;  // the result's shape or a returned number depends on data
  bool numbers = false;  // it returns some
  bool new_tensors = false;
  bool writes_undeclared = false;
  bool foreign = false;          // of a package: the framework in the server may not have it
  bool checked_by_meta = false;  // structured: whoever calls out= from ATen has run the op's own shape function
  int view_of = -1;
  // It looks at the values that it is given and may raise, on CUDA too, which waits for it there: so does the client. Some
  // only where one argument is given.
  bool raises = false;
  int raises_with = -1;
  int kept_result = -1, kept_arg = -1;  // a result that is that argument, where the argument is there

  std::mutex mu;
  std::unordered_map<Key, std::shared_ptr<const Meta>, KeyHash> cache;
  std::array<std::atomic<CUfunction>, kMaxDevices> functions{};
  std::atomic<bool> said{false};  // that it runs on the host
  std::atomic<int64_t> launches{0}, infers{0};

  // Kinds of arguments that the device has taken already, for calls whose results' metadata need no question. A kind is a
  // hash; a kind that was forgotten is asked once more.
  std::array<std::atomic<uint64_t>, 8> tried{};
  std::atomic<uint32_t> next_tried{0};

  bool has_tried(uint64_t kind) const {
    for (const auto& t : tried)
      if (t.load(std::memory_order_relaxed) == kind) return true;
    return false;
  }
  void set_tried(uint64_t kind) {
    tried[next_tried.fetch_add(1, std::memory_order_relaxed) % tried.size()].store(kind, std::memory_order_relaxed);
  }
};

// Plans are never destroyed.
OpPlan& plan_of(const c10::OperatorHandle& op);

// The executor's entry point for the op. Throws NotImplementedError where the server's framework has no such op.
CUfunction function_of(OpPlan& plan, DeviceIndex device);

// Of a number, what may decide whether an op takes it: which types hold it (an op that must convert one that does not fit
// raises), its sign, whether it is 0. Numbers that are alike in that have the same signature.
uint64_t reach(double v);
inline uint64_t reach(int64_t v) { return reach(static_cast<double>(v)); }
inline uint64_t reach(const c10::complex<double>& v) { return reach(v.real()) << 32 | reach(v.imag()); }

// A number as a tensor: 0 is no divisor.
bool is_zero(const at::Tensor& t);

// -- of a call's arguments: one value for each of plan.args

inline bool is_defined(const c10::IValue& v) { return v.isTensor() && v.toTensor().defined(); }

// What decides whether the device has a kernel for the arguments, whose shapes are right. Never 0.
uint64_t kind_of(const OpPlan& plan, const c10::IValue* args);

// out= tensors that ATen made itself, just before, by the op's own shape function, need no question to the device.
bool outs_are_right(const OpPlan& plan, const c10::IValue* args);

// Where only the kinds of the arguments make an op's shape depend on data: indexing by integers does not. (Over the
// CUDA wheel index comes here whole; the CPU wheel's own front has taken masks apart before.)
bool shape_is_known(const OpPlan& plan, const c10::IValue* args);

}  // namespace devproxy::aten
