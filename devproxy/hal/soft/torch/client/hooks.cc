// What ATen asks of a CUDA build (CUDAHooks), and the generator.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include "devproxy/hal/soft/torch/block.h"
#include "devproxy/hal/soft/torch/client/allocator.h"
#include "devproxy/hal/soft/torch/client/generator.h"

namespace devproxy::softtorch {
namespace {

constexpr size_t kStateBytes = 16;

class CudaGenerator final : public c10::GeneratorImpl {
 public:
  explicit CudaGenerator(DeviceIndex device)
      : GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK_TYPE(state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state must be a torch.ByteTensor");
    // Also states without an offset are accepted, as on CUDA.
    TORCH_CHECK(state.numel() == kStateBytes || state.numel() == sizeof seed_, "RNG state is wrong size");
    const auto* p = static_cast<const uint8_t*>(state.data());
    std::memcpy(&seed_, p, sizeof seed_);
    offset_ = 0;
    if (state.numel() == kStateBytes) std::memcpy(&offset_, p + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::empty({kStateBytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* p = static_cast<uint8_t*>(t.mutable_data_ptr());
    std::memcpy(p, &seed_, sizeof seed_);
    std::memcpy(p + sizeof seed_, &offset_, sizeof offset_);
    return t.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    const auto& o = static_cast<const CudaGenerator&>(*other);
    seed_ = o.seed_;
    offset_ = o.offset_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override { return clone(); }

  std::pair<uint64_t, uint64_t> take() {
    std::lock_guard lock(mutex_);
    const std::pair state(seed_, offset_);
    offset_ += kOffsetPerOp;
    return state;
  }

 private:
  CudaGenerator* clone_impl() const override {
    auto* g = new CudaGenerator(device().index());
    g->seed_ = seed_;
    g->offset_ = offset_;
    return g;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

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

const struct Register {
  Register() {
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks",
        [](at::CUDAHooksArgs a) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<Hooks>(a); },
        c10::REGISTRY_PREFERRED);
  }
} g_register;

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

std::pair<uint64_t, uint64_t> take_random_state(const at::Generator& generator) {
  TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<CudaGenerator*>(generator.unsafeGetGeneratorImpl())->take();
}

}  // namespace devproxy::softtorch
