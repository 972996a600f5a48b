// What ATen asks of a CUDA build (CUDAHooks), and the generator.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include "devproxy/hal/soft/torch/block.h"
#include "devproxy/hal/soft/torch/client/allocator.h"
#include "devproxy/hal/soft/torch/client/generator.h"
#include "devproxy/hal/soft/torch/client/graph.h"

namespace devproxy::softtorch {
namespace {

constexpr size_t kStateBytes = 16;

class CudaGenerator final : public c10::GeneratorImpl {
 public:
  CudaGenerator(DeviceIndex device, std::shared_ptr<GeneratorState> state)
      : GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        state_(std::move(state)) {}
  explicit CudaGenerator(DeviceIndex device) : CudaGenerator(device, std::make_shared<GeneratorState>()) {
    state_->seed = c10::default_rng_seed_val;
  }

  void set_current_seed(uint64_t seed) override { put("set_current_seed", seed, 0); }
  void set_offset(uint64_t offset) override { put("set_offset", std::nullopt, offset); }
  uint64_t get_offset() const override { return get("get_offset").second; }
  uint64_t current_seed() const override { return get("current_seed").first; }
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
    std::lock_guard lock(state_->mu);
    const RandomState state{state_->seed, state_->offset, 0};
    state_->offset += kOffsetPerOp;
    return state;
  }
  const std::shared_ptr<GeneratorState>& state() const { return state_; }

 private:
  CudaGenerator* clone_impl() const override {
    auto* g = new CudaGenerator(device().index());
    std::tie(g->state_->seed, g->state_->offset) = get("clone");
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
    std::lock_guard lock(state_->mu);
    return {state_->seed, state_->offset};
  }
  void put(const char* what, std::optional<uint64_t> seed, uint64_t offset) {
    refuse_in_capture(what);
    std::lock_guard lock(state_->mu);
    if (seed.has_value()) state_->seed = *seed;
    state_->offset = offset;
  }

  std::shared_ptr<GeneratorState> state_;
};

const CudaGenerator& cuda_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              generator.device().type(), "'");
  return *static_cast<CudaGenerator*>(generator.unsafeGetGeneratorImpl());
}

class Hooks final : public at::CUDAHooksInterface {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
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
  DeviceIndex current_device() const override { return device_count() > 0 ? softtorch::current_device() : -1; }
  DeviceIndex deviceCount() const override { return device_count(); }
  int getNumGPUs() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex d) const override { set_current_device(d); }
  DeviceIndex getCurrentDevice() const override { return softtorch::current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    const DeviceIndex old = softtorch::current_device();
    set_current_device(d);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(at::kCUDA); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  void deviceSynchronize(DeviceIndex d) const override { synchronize_device(d); }
  long versionCUDART() const override { return CUDA_VERSION; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  double batchnormMinEpsilonCuDNN() const override { return 1e-5; }
  std::string showConfig() const override { return "devproxy software GPU over the CUDA driver API"; }
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
    if (Graph* graph = capturing_graph(device, current_stream_id(device))) return graph->draw(g.state());
  }
  return const_cast<CudaGenerator&>(g).take();
}

std::shared_ptr<GeneratorState> state_of(const at::Generator& generator) { return cuda_generator(generator).state(); }

}  // namespace devproxy::softtorch
