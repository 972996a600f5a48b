// SPDX-License-Identifier: Apache-2.0
// The executor on the host's memory: the software GPU's.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "devproxy/torch/executor/client.h"
#include "devproxy/torch/executor/decode.h"
#include "devproxy/torch/executor/placement.h"

namespace devproxy::aten {

namespace {

// The launches of one thread mostly want the same, and asking OpenMP is not free.
void use_threads(uint32_t n) {
  constexpr uint32_t kMaxThreads = 1024;
  thread_local uint32_t t_threads = 0;
  if (n == 0 || n > kMaxThreads) throw Malformed("parameter block: senseless thread count");
  if (t_threads == n) return;
  at::set_num_threads(static_cast<int>(n));
  t_threads = n;
}

// oneDNN allocates raw and may free from another thread or after the op: by the address alone the deleter knows what is
// not the heap's.
class PlacingAllocator final : public c10::Allocator {
 public:
  explicit PlacingAllocator(c10::Allocator* base) : base_(base) { g_base = base; }
  c10::DataPtr allocate(size_t bytes) override {
    if (void* p = placement::take(bytes)) return {p, p, &placement::give_back, c10::kCPU};
    c10::DataPtr got = base_->allocate(bytes);
    placement::note(bytes, got.get());
    return got;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_raw; }
  void copy_data(void* dst, const void* src, size_t bytes) const override { base_->copy_data(dst, src, bytes); }

 private:
  static void free_raw(void* p) {
    if (placement::is_device_address(p)) {
      placement::give_back(p);
    } else {
      g_base->raw_deallocate(p);
    }
  }
  static c10::Allocator* g_base;
  c10::Allocator* const base_;
};
c10::Allocator* PlacingAllocator::g_base = nullptr;

}  // namespace

namespace device {

const c10::DeviceType kType = c10::kCPU;
const c10::DispatchKey kKey = c10::DispatchKey::CPU;
const uint32_t kWhere = DEVPROXY_EXECUTOR_ON_HOST;
const bool kKeepsGenerators = false;
const bool kRaisesNondeterminism = false;
const bool kLacksTypes = true;

c10::Device of(const Client&) { return c10::kCPU; }
c10::Allocator* allocator() { return c10::GetAllocator(c10::kCPU); }

void prepare() {
  static const bool installed = [] {
    c10::SetAllocator(c10::kCPU, new PlacingAllocator(c10::GetAllocator(c10::kCPU)), 255);
    // MKL's vector math looks at the CPU in its first call. Another thread's call meanwhile may take a kernel that is right to
    // 12 bits (seen in 1 of 2000 processes whose two threads begin with sqrt, without devproxy): two ranks on one GPU began
    // their first optimizer step behind a restore so. Now that call is over before there is a client.
    at::full({8}, 0.5f).exp_();
    return true;
  }();
  (void)installed;
}

void attach(Client&) {}
void detach(Client&) {}
void trim(Client&) {}

at::Generator new_generator(const Client&) { return at::detail::createCPUGenerator(c10::default_rng_seed_val); }
void lend_to_default(const Client&, const at::Generator& g) {
  at::Generator own = at::detail::getDefaultCPUGenerator();
  own.set_state(at::Tensor::wrap_tensor_impl(g.getIntrusivePtr()->get_state()));
}
void take_from_default(const Client&, const at::Generator& g) {
  at::Generator wanted = g;
  wanted.set_state(at::Tensor::wrap_tensor_impl(at::detail::getDefaultCPUGenerator().getIntrusivePtr()->get_state()));
}
void read_memory(void* to, uint64_t addr, size_t bytes) { std::memcpy(to, reinterpret_cast<const void*>(addr), bytes); }

LaunchScope::LaunchScope(const Client&, const devproxy_soft_launch&, uint32_t threads) { use_threads(threads); }

void sleep(const Client&, const devproxy_soft_launch&, const SleepBlock& how_long) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(static_cast<double>(how_long.cycles) /
                                                                        std::max<uint32_t>(how_long.khz, 1)));
}

int fault_of(const std::exception&) { return 0; }
std::string facts(const Client&) { return {}; }

// A stand-in, for tests of the client (DEVPROXY_TORCH_OPS=cuda): all matrices, then all vectors, and a gap before each.
std::vector<int64_t> rnn_layout(const Client&, const RnnForm&, const std::vector<std::vector<int64_t>>& weights) {
  constexpr int64_t kGap = 3;
  std::vector<int64_t> layout(1 + weights.size());
  int64_t end = 0;
  for (const bool matrices : {true, false}) {
    for (size_t i = 0; i < weights.size(); i++) {
      if ((weights[i].size() == 2) != matrices) continue;
      layout[1 + i] = end + kGap;
      end = layout[1 + i] + c10::multiply_integers(weights[i]);
    }
  }
  layout[0] = end;
  return layout;
}

// There is no cuFFT and so no plan: what torch says of a cache that nothing has used. 4096 is torch's own first size.
int64_t plan_cache(Client& client, PlansBlock::What what, int64_t value) {
  if (what == PlansBlock::kSetMaxSize)
    TORCH_CHECK(value >= 0, "cuFFT plan cache size must be non-negative, but got ", value);
  if (what != PlansBlock::kMaxSize) return 0;
  std::lock_guard lock(client.mu);
  return client.most_plans >= 0 ? client.most_plans : 4096;
}

}  // namespace device
}  // namespace devproxy::aten
