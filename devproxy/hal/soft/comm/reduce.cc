// SPDX-License-Identifier: Apache-2.0
// Compiled with -O3 and without contraction: a product and a sum stay two roundings (CMakeLists.txt).
#include "devproxy/hal/soft/comm/reduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "devproxy/hal/soft/comm/numbers.h"

namespace devproxy::hal::soft {

namespace {

constexpr size_t kBlock = 1024;  // elements at a time: some levels of the tree fit the first cache

// What elements of T are added in.
template <class T>
struct Wide {
  using type = T;
};
template <>
struct Wide<Float16> {
  using type = float;
};
template <>
struct Wide<Bfloat16> {
  using type = float;
};
template <>
struct Wide<Float8e4m3> {
  using type = float;
};
template <>
struct Wide<Float8e5m2> {
  using type = float;
};

template <class T>
typename Wide<T>::type widen(const T& value) {
  if constexpr (std::is_arithmetic_v<T>)
    return value;
  else
    return value.wide();
}
template <class T>
T narrow(typename Wide<T>::type value) {
  if constexpr (std::is_arithmetic_v<T>)
    return value;
  else
    return T::of(value);
}

// Integers wrap around, as the hardware's do.
template <class A>
struct Add {
  static A of(A a, A b) {
    if constexpr (std::is_integral_v<A>)
      return static_cast<A>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    else
      return a + b;
  }
};
template <class A>
struct Multiply {
  static A of(A a, A b) {
    if constexpr (std::is_integral_v<A>)
      return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    else
      return a * b;
  }
};
template <class A>
struct Greater {
  static A of(A a, A b) { return a != a || a < b ? b : a; }
};
template <class A>
struct Less {
  static A of(A a, A b) { return a != a || b < a ? b : a; }
};

template <class T, template <class> class Op>
class Tree {
  using A = typename Wide<T>::type;

 public:
  explicit Tree(const Reduction& r) : r_(r) {
    for (size_t n = r.inputs.size(); n > 1; n = (n + 1) / 2) levels_++;
    scratch_.resize((levels_ + 1) * kBlock);
    if (r.op == CommReduction::kPreMulSum)
      for (const uint8_t* at : r.scalars) {
        T scalar;
        std::memcpy(&scalar, at, sizeof scalar);
        scalars_.push_back(widen(scalar));
      }
  }

  void run(uint64_t first, uint64_t count) {
    T out[kBlock];
    for (uint64_t done = 0; done < count; done += kBlock) {
      const size_t n = std::min<uint64_t>(kBlock, count - done);
      first_ = first + done;
      A* const sum = scratch_.data();
      combine(0, r_.inputs.size(), n, sum, 1);
      if (r_.op == CommReduction::kAvg) divide(n, sum);
      for (size_t i = 0; i < n; i++) out[i] = narrow<T>(sum[i]);
      for (uint8_t* to : r_.outputs) std::memcpy(to + first_ * sizeof(T), out, n * sizeof(T));
    }
  }

 private:
  // The ranks lo .. lo + ranks into sum. level: of the scratch that is free.
  void combine(size_t lo, size_t ranks, size_t n, A* sum, size_t level) {
    if (ranks == 1) return load(lo, n, sum);
    const size_t half = std::bit_floor(ranks - 1);
    A* const other = scratch_.data() + level * kBlock;
    combine(lo, half, n, sum, level);
    combine(lo + half, ranks - half, n, other, level + 1);
    for (size_t i = 0; i < n; i++) sum[i] = Op<A>::of(sum[i], other[i]);
  }

  void load(size_t rank, size_t n, A* to) {
    const uint8_t* const from = r_.inputs[rank] + first_ * sizeof(T);
    if constexpr (std::is_same_v<T, A>) {
      std::memcpy(to, from, n * sizeof(T));
    } else {
      T block[kBlock];
      std::memcpy(block, from, n * sizeof(T));
      for (size_t i = 0; i < n; i++) to[i] = widen(block[i]);
    }
    if (scalars_.empty()) return;
    const A scalar = scalars_[rank];
    for (size_t i = 0; i < n; i++) to[i] = Multiply<A>::of(to[i], scalar);
  }

  void divide(size_t n, A* sum) {
    const auto ranks = r_.inputs.size();
    for (size_t i = 0; i < n; i++) {
      if constexpr (std::is_signed_v<A> && std::is_integral_v<A>)
        sum[i] = static_cast<A>(static_cast<int64_t>(sum[i]) / static_cast<int64_t>(ranks));
      else
        sum[i] = static_cast<A>(sum[i] / static_cast<A>(ranks));
    }
  }

  const Reduction& r_;
  uint64_t first_ = 0;
  size_t levels_ = 0;
  std::vector<A> scratch_, scalars_;
};

template <class T>
void reduce_type(const Reduction& r, uint64_t first, uint64_t count) {
  switch (r.op) {
    case CommReduction::kProd: return Tree<T, Multiply>(r).run(first, count);
    case CommReduction::kMax: return Tree<T, Greater>(r).run(first, count);
    case CommReduction::kMin: return Tree<T, Less>(r).run(first, count);
    case CommReduction::kSum:
    case CommReduction::kAvg:
    case CommReduction::kPreMulSum: return Tree<T, Add>(r).run(first, count);
  }
}

}  // namespace

void reduce(const Reduction& r, uint64_t first, uint64_t count) {
  switch (r.type) {
    case CommType::kInt8: return reduce_type<int8_t>(r, first, count);
    case CommType::kUint8: return reduce_type<uint8_t>(r, first, count);
    case CommType::kInt32: return reduce_type<int32_t>(r, first, count);
    case CommType::kUint32: return reduce_type<uint32_t>(r, first, count);
    case CommType::kInt64: return reduce_type<int64_t>(r, first, count);
    case CommType::kUint64: return reduce_type<uint64_t>(r, first, count);
    case CommType::kFloat16: return reduce_type<Float16>(r, first, count);
    case CommType::kFloat32: return reduce_type<float>(r, first, count);
    case CommType::kFloat64: return reduce_type<double>(r, first, count);
    case CommType::kBfloat16: return reduce_type<Bfloat16>(r, first, count);
    case CommType::kFloat8e4m3: return reduce_type<Float8e4m3>(r, first, count);
    case CommType::kFloat8e5m2: return reduce_type<Float8e5m2>(r, first, count);
  }
}

}  // namespace devproxy::hal::soft
