// SPDX-License-Identifier: Apache-2.0
// What of torch's global state kernels depend on, as bytes: the client says it to the executor, which puts it in force
// before an op. Both are compiled against the same torch, so the order here is the only agreement that is needed.
//
// Not here: what the block's header says of each op (grad mode, deterministic algorithms, threads), and autocast, which
// the client has taken apart before an op is sent.
#pragma once

#include <ATen/Context.h>
#include <ATen/native/ConvUtils.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <vector>

namespace devproxy::aten {

struct Settings {
  std::array<uint8_t, 48> bytes{};
  bool operator==(const Settings&) const = default;
};

namespace settings_detail {

// Of the generic backend torch has one value, of the others one for each kind of op.
struct Precision {
  at::Float32Backend backend;
  at::Float32Op op;
};
inline constexpr Precision kPrecisions[] = {
    {at::Float32Backend::GENERIC, at::Float32Op::ALL},   {at::Float32Backend::CUDA, at::Float32Op::ALL},
    {at::Float32Backend::CUDA, at::Float32Op::CONV},     {at::Float32Backend::CUDA, at::Float32Op::RNN},
    {at::Float32Backend::CUDA, at::Float32Op::MATMUL},   {at::Float32Backend::MKLDNN, at::Float32Op::ALL},
    {at::Float32Backend::MKLDNN, at::Float32Op::CONV},   {at::Float32Backend::MKLDNN, at::Float32Op::RNN},
    {at::Float32Backend::MKLDNN, at::Float32Op::MATMUL},
};

// Calls f(value, set) for each flag, always in the same order. f may change the value, and then calls set.
template <class F>
void for_each_flag(at::Context& c, F f) {
  f(c.userEnabledCuDNN(), [&](bool v) { c.setUserEnabledCuDNN(v); });
  f(c.userEnabledMkldnn(), [&](bool v) { c.setUserEnabledMkldnn(v); });
  f(c.benchmarkCuDNN(), [&](bool v) { c.setBenchmarkCuDNN(v); });
  f(c.deterministicCuDNN(), [&](bool v) { c.setDeterministicCuDNN(v); });
  f(c.deterministicMkldnn(), [&](bool v) { c.setDeterministicMkldnn(v); });
  f(c.userEnabledNNPACK(), [&](bool v) { c.setUserEnabledNNPACK(v); });
  f(c.userEnabledFlashSDP(), [&](bool v) { c.setSDPUseFlash(v); });
  f(c.userEnabledMemEfficientSDP(), [&](bool v) { c.setSDPUseMemEfficient(v); });
  f(c.userEnabledMathSDP(), [&](bool v) { c.setSDPUseMath(v); });
  f(c.userEnabledCuDNNSDP(), [&](bool v) { c.setSDPUseCuDNN(v); });
  f(c.allowFP16BF16ReductionMathSDP(), [&](bool v) { c.setAllowFP16BF16ReductionMathSDP(v); });
  f(c.allowFP16AccumulationCuBLAS(), [&](bool v) { c.setAllowFP16AccumulationCuBLAS(v); });
  f(c.allowFP16ReductionCPU(), [&](bool v) { c.setAllowFP16ReductionCPU(v); });
  f(c.deterministicFillUninitializedMemory(), [&](bool v) { c.setDeterministicFillUninitializedMemory(v); });
  f(at::native::_cudnn_get_conv_benchmark_empty_cache(),
    [](bool v) { at::native::_cudnn_set_conv_benchmark_empty_cache(v); });
}

}  // namespace settings_detail

// Context::float32MatmulPrecision() throws where torch's older and newer ways of saying it were mixed.
inline constexpr uint8_t kMixedMatmulPrecision = 255;
inline uint8_t matmul_precision(const at::Context& c) {
  try {
    return static_cast<uint8_t>(c.float32MatmulPrecision());
  } catch (const c10::Error&) {
    return kMixedMatmulPrecision;
  }
}

// Some fifty plain reads; no lock, no warning. matmul: matmul_precision(), which may be dear.
inline Settings read_settings(at::Context& c, uint8_t matmul) {
  Settings s;
  s.bytes[0] = matmul;
  size_t n = 1;
  auto put = [&](uint8_t v) { s.bytes[n++] = v; };
  settings_detail::for_each_flag(c, [&](bool v, auto) { put(v); });
  put(static_cast<uint8_t>(c.linalgPreferredBackend()));
  put(static_cast<uint8_t>(c.blasPreferredBackend()));
  put(static_cast<uint8_t>(c.allowFP16ReductionCuBLAS()));
  put(static_cast<uint8_t>(c.allowBF16ReductionCuBLAS()));
  for (const auto& p : settings_detail::kPrecisions) put(static_cast<uint8_t>(c.float32Precision(p.backend, p.op)));
  for (const auto which : c.sDPPriorityOrder()) put(static_cast<uint8_t>(static_cast<int>(which) + 1));
  const auto carveout = c._SMCarveout_EXPERIMENTAL();
  put(carveout.has_value());
  const uint32_t numbers[] = {static_cast<uint32_t>(c.benchmarkLimitCuDNN()),
                              static_cast<uint32_t>(carveout.value_or(0))};
  static_assert(1 + at::num_sdp_backends + 15 + 5 + std::size(settings_detail::kPrecisions) + sizeof numbers <=
                sizeof s.bytes);
  std::memcpy(s.bytes.data() + n, numbers, sizeof numbers);
  return s;
}

// Puts them in force; what is already so is not touched. Throws what torch throws for a value that it does not know.
inline void apply_settings(at::Context& c, const Settings& s) {
  const Settings now = read_settings(c, matmul_precision(c));
  if (now == s) return;
  size_t n = 1;
  if (now.bytes[0] != s.bytes[0] && s.bytes[0] != kMixedMatmulPrecision) {
    static const char* const kNames[] = {"highest", "high", "medium"};
    c.setFloat32MatmulPrecision(kNames[s.bytes[0] % 3]);  // first: it sets some of what follows
  }
  auto take = [&] { return s.bytes[n++]; };
  settings_detail::for_each_flag(c, [&](bool v, auto set) {
    if (const bool wanted = take() != 0; wanted != v) set(wanted);
  });
  auto changed = [&](auto apply) {
    const uint8_t was = now.bytes[n], wanted = take();
    if (was != wanted) apply(wanted);
  };
  // A build for the CPU refuses CUDA's libraries, of the first behind the assignment: there is nothing to prefer there.
  auto preferred = [&](auto set) {
    changed([&](uint8_t v) {
      try {
        set(v);
      } catch (const c10::Error&) {
        if (at::hasCUDA()) throw;
      }
    });
  };
  preferred([&](uint8_t v) { c.setLinalgPreferredBackend(static_cast<at::LinalgBackend>(v)); });
  preferred([&](uint8_t v) { c.setBlasPreferredBackend(static_cast<at::BlasBackend>(v)); });
  changed([&](uint8_t v) {
    const auto option = static_cast<at::CuBLASReductionOption>(v);
    c.setAllowFP16ReductionCuBLAS(option != at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK &&
                                      option != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK,
                                  option != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK);
  });
  changed([&](uint8_t v) {
    const auto option = static_cast<at::CuBLASReductionOption>(v);
    c.setAllowBF16ReductionCuBLAS(option != at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK &&
                                      option != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK,
                                  option != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK);
  });
  for (const auto& p : settings_detail::kPrecisions)
    if (const auto wanted = static_cast<at::Float32Precision>(take()); c.float32Precision(p.backend, p.op) != wanted)
      c.setFloat32Precision(p.backend, p.op, wanted);
  std::vector<int64_t> order;
  bool reordered = false;
  for (size_t i = 0; i < at::num_sdp_backends; i++) {
    reordered |= now.bytes[n] != s.bytes[n];
    order.push_back(static_cast<int64_t>(take()) - 1);
  }
  if (reordered) c.setSDPPriorityOrder(order);
  const bool carved = take() != 0;
  uint32_t numbers[2];
  std::memcpy(numbers, s.bytes.data() + n, sizeof numbers);
  if (const auto limit = static_cast<int>(numbers[0]); c.benchmarkLimitCuDNN() != limit)
    c.setBenchmarkLimitCuDNN(limit);
  const auto carveout = carved ? std::optional(static_cast<int32_t>(numbers[1])) : std::nullopt;
  if (c._SMCarveout_EXPERIMENTAL() != carveout) c._setSMCarveout_EXPERIMENTAL(carveout);
}

}  // namespace devproxy::aten
