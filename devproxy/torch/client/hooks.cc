// SPDX-License-Identifier: Apache-2.0
// What ATen asks of a CUDA build (CUDAHooks), and the generator.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>
#include <dlfcn.h>

#include <atomic>

#include "devproxy/torch/block.h"
#include "devproxy/torch/client/allocator.h"
#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/generator.h"
#include "devproxy/torch/client/graph.h"

namespace devproxy::aten {
namespace {

constexpr size_t kStateBytes = 16;

thread_local bool t_kineto_starts = false;

// As the executor knows it, which has been told of it.
RandomState named(GeneratorState& state) {
  std::lock_guard lock(state.mu);
  if (!state.told) {
    set_generator(state.device, state.id, state.seed, state.offset);
    state.told = true;
  }
  RandomState random;
  random.seed = state.id;
  random.kept = true;
  return random;
}

class CudaGenerator final : public c10::GeneratorImpl {
 public:
  CudaGenerator(DeviceIndex device, std::shared_ptr<GeneratorState> state)
      : GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        state_(std::move(state)) {}
  explicit CudaGenerator(DeviceIndex device) : CudaGenerator(device, std::make_shared<GeneratorState>(device)) {}

  void set_current_seed(uint64_t seed) override { put("set_current_seed", seed, 0); }
  void set_offset(uint64_t offset) override { put("set_offset", std::nullopt, offset); }
  uint64_t get_offset() const override { return get("get_offset").second; }
  uint64_t current_seed() const override {
    refuse_in_capture("current_seed");
    std::lock_guard lock(state_->mu);
    return state_->seed;  // only the offset is the executor's to move
  }
  uint64_t seed() override {
    const uint64_t fresh = c10::detail::getNonDeterministicRandom(true);
    put("seed", fresh, 0);
    return fresh;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK_TYPE(state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state must be a torch.ByteTensor");
    // Also states without an offset are accepted, as on CUDA.
    TORCH_CHECK(state.numel() == kStateBytes || state.numel() == sizeof(uint64_t), "RNG state is wrong size");
    const auto* p = static_cast<const uint8_t*>(state.data());
    uint64_t seed, offset = 0;
    std::memcpy(&seed, p, sizeof seed);
    if (state.numel() == kStateBytes) std::memcpy(&offset, p + sizeof seed, sizeof offset);
    put("set_state", seed, offset);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::empty({kStateBytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* p = static_cast<uint8_t*>(t.mutable_data_ptr());
    const auto [seed, offset] = get("get_state");
    std::memcpy(p, &seed, sizeof seed);
    std::memcpy(p + sizeof seed, &offset, sizeof offset);
    return t.getIntrusivePtr();
  }
  // Graph-safe: the state itself and not its numbers, so that what a graph has registered is still the generator's.
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    state_ = static_cast<const CudaGenerator&>(*other).state_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<CudaGenerator>(device().index(), state_);
  }

  RandomState take() {
    if (executor_keeps_generators()) return named(*state_);
    std::lock_guard lock(state_->mu);
    const RandomState state{state_->seed, state_->offset};
    state_->offset += kOffsetPerOp;
    return state;
  }
  const std::shared_ptr<GeneratorState>& state() const { return state_; }

 private:
  CudaGenerator* clone_impl() const override {
    refuse_in_capture("clone");
    auto* g = new CudaGenerator(device().index());
    g->state_->copy(*state_);
    return g;
  }

  // A capture cannot hold what happens to the state in between: its draws begin where each replay finds it.
  void refuse_in_capture(const char* what) const {
    TORCH_CHECK(!any_capture() || capturing_graph(device().index(), current_stream_id(device().index())) == nullptr,
                "Cannot call CUDAGeneratorImpl::", what,
                " during CUDA graph capture: seed the generator before the capture or between replays");
  }
  std::pair<uint64_t, uint64_t> get(const char* what) const {
    refuse_in_capture(what);
    return state_->get();
  }
  void put(const char* what, std::optional<uint64_t> seed, uint64_t offset) {
    refuse_in_capture(what);
    state_->set(seed, offset);
  }

  std::shared_ptr<GeneratorState> state_;
};

const CudaGenerator& cuda_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              generator.device().type(), "'");
  return *static_cast<CudaGenerator*>(generator.unsafeGetGeneratorImpl());
}

// torch's own table of functions of NVRTC and the driver, by which Inductor's launcher loads and launches Triton's
// kernels. The library that has it is the CUDA wheel's, and the driver that it finds is the job's, so the shim.
// nullptr: the wheel has none.
const at::cuda::NVRTC* nvrtc_table() {
  void* const library = dlopen((torch_folder() + "/libcaffe2_nvrtc.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  using Load = const at::cuda::NVRTC* (*)();
  const auto load = reinterpret_cast<Load>(dlsym(library, "load_nvrtc"));
  return load != nullptr ? load() : nullptr;
}

class Hooks final : public at::CUDAHooksInterface {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return !t_kineto_starts && device_count() > 0; }
  bool hasCUDART() const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return new_generator(d); }
  at::Device getDeviceFromPtr(void* p) const override {
    int ordinal = 0;
    check(
        driver().cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, reinterpret_cast<CUdeviceptr>(p)),
        "cuPointerGetAttribute");
    return {at::kCUDA, static_cast<DeviceIndex>(ordinal)};
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  bool hasPrimaryContext(DeviceIndex d) const override { return has_context(d); }
  DeviceIndex current_device() const override { return device_count() > 0 ? aten::current_device() : -1; }
  DeviceIndex deviceCount() const override { return device_count(); }
  int getNumGPUs() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex d) const override { set_current_device(d); }
  DeviceIndex getCurrentDevice() const override { return aten::current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    const DeviceIndex old = aten::current_device();
    set_current_device(d);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(at::kCUDA); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  void deviceSynchronize(DeviceIndex d) const override { synchronize_device(d); }
  // On CUDA as the framework in the server says: what a composite op decides here, it decides as a native process
  // would.
  bool hasCuDNN() const override { return executor_facts().has_cudnn; }
  bool compiledWithCuDNN() const override { return executor_facts().has_cudnn; }
  bool hasCuBLASLt() const override { return executor_facts().has_cublaslt; }
  bool hasCuSOLVER() const override { return executor_facts().has_cusolver; }
  bool hasMAGMA() const override { return executor_facts().has_magma; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return executor_facts().dilated_conv; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return executor_facts().depthwise_conv; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return executor_facts().bfloat16_conv; }
  bool supportsBFloat16RNNWithCuDNN() const override { return executor_facts().bfloat16_rnn; }
  long versionCUDART() const override { return ops_run_on_cuda() ? executor_facts().cudart : CUDA_VERSION; }
  long versionCuDNN() const override { return executor_facts().cudnn; }
  long versionRuntimeCuDNN() const override { return executor_facts().cudnn_runtime; }
  long versionCuDNNFrontend() const override { return executor_facts().cudnn_frontend; }
  double batchnormMinEpsilonCuDNN() const override { return executor_facts().batchnorm_epsilon; }
  int64_t cuFFTGetPlanCacheMaxSize(DeviceIndex d) const override {
    return plan_cache(checked(d, "cufft_get_plan_cache_max_size"), PlansBlock::kMaxSize);
  }
  void cuFFTSetPlanCacheMaxSize(DeviceIndex d, int64_t most) const override {
    plan_cache(checked(d, "cufft_set_plan_cache_max_size"), PlansBlock::kSetMaxSize, most);
  }
  int64_t cuFFTGetPlanCacheSize(DeviceIndex d) const override {
    return plan_cache(checked(d, "cufft_get_plan_cache_size"), PlansBlock::kSize);
  }
  void cuFFTClearPlanCache(DeviceIndex d) const override {
    plan_cache(checked(d, "cufft_clear_plan_cache"), PlansBlock::kClear);
  }
  const at::cuda::NVRTC& nvrtc() const override {
    static const at::cuda::NVRTC* const table = nvrtc_table();
    return table != nullptr ? *table : at::CUDAHooksInterface::nvrtc();
  }
  std::string showConfig() const override {
    return ops_run_on_cuda() ? executor_facts().config : "devproxy software GPU over the CUDA driver API";
  }

 private:
  static DeviceIndex checked(DeviceIndex d, const char* what) {
    TORCH_CHECK(d >= 0 && d < device_count(), what, ": expected 0 <= device_index < ", static_cast<int>(device_count()),
                "], but got device_index=", static_cast<int>(d));
    return d;
  }
};

const struct RegisterHooks {
  RegisterHooks() {
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks",
        [](at::CUDAHooksArgs a) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<Hooks>(a); },
        c10::REGISTRY_PREFERRED);
  }
} g_register_hooks;

}  // namespace

void hide_gpu_from_kineto(bool hidden) { t_kineto_starts = hidden; }

const at::Generator& default_generator(DeviceIndex device) {
  static auto* const all = [] {
    auto* v = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < device_count(); ++i) v->push_back(at::make_generator<CudaGenerator>(i));
    return v;
  }();
  if (device < 0) device = current_device();
  check_device(device);
  return (*all)[device];
}

at::Generator new_generator(DeviceIndex device) {
  if (device < 0) device = current_device();
  check_device(device);
  return at::make_generator<CudaGenerator>(device);
}

RandomState take_random_state(const at::Generator& generator) {
  const CudaGenerator& g = cuda_generator(generator);
  if (any_capture()) [[unlikely]] {
    const DeviceIndex device = generator.device().index();
    if (Graph* graph = capturing_graph(device, current_stream_id(device))) {
      // One in the executor draws on from where each replay finds it, as an eager op does.
      if (!executor_keeps_generators()) return graph->draw(g.state());
      graph->check_registered(g.state());
    }
  }
  return const_cast<CudaGenerator&>(g).take();
}

GeneratorState::GeneratorState(DeviceIndex device) : device(device), seed(c10::default_rng_seed_val) {
  static std::atomic<uint64_t> next{1};
  id = next.fetch_add(1);
}

GeneratorState::~GeneratorState() {
  if (told) forget_generator(device, id);
}

std::pair<uint64_t, uint64_t> GeneratorState::get() {
  std::lock_guard lock(mu);
  if (told) offset = get_generator(device, id).second;
  return {seed, offset};
}

void GeneratorState::set(std::optional<uint64_t> new_seed, uint64_t new_offset) {
  std::lock_guard lock(mu);
  if (new_seed.has_value()) seed = *new_seed;
  offset = new_offset;
  seeded = true;
  if (told) set_generator(device, id, seed, offset);
}

void GeneratorState::copy(GeneratorState& from) {
  if (!executor_keeps_generators()) {
    const auto [s, o] = from.get();
    return set(s, o);
  }
  (void)named(from);
  std::scoped_lock lock(mu, from.mu);
  copy_generator(device, id, from.id);
  seed = from.seed;
  told = seeded = true;
}

bool take_seeded(const at::Generator& generator) {
  GeneratorState& state = *state_of(generator);
  std::lock_guard lock(state.mu);
  return std::exchange(state.seeded, false);
}

std::shared_ptr<GeneratorState> state_of(const at::Generator& generator) { return cuda_generator(generator).state(); }

}  // namespace devproxy::aten
