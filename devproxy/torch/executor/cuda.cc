// SPDX-License-Identifier: Apache-2.0
// The executor on a CUDA device: tensors over the job's device memory, torch's own CUDA kernels, on the launch's
// stream.
//
// Memory. What an op allocates and gives back is torch's caching allocator's, in this process: it holds nothing of the
// job between ops (libraries' workspaces are scratch). Each segment that it takes from the driver is taken from the
// ledger, so what the job may have is what there is; where the ledger has no more, the allocator is told that the GPU
// is full, and an op that needs memory fails with torch's own OutOfMemoryError. trim() gives everything back.
//
// Written without a GPU against the headers of torch 2.11 to 2.15: docs/gpu-results.md says what has run on one.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/Sleep.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_cudnn_rnn_flatten_weight.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/version.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "devproxy/torch/executor/client.h"
#include "devproxy/torch/executor/decode.h"
#include "devproxy/torch/executor/placement.h"

namespace devproxy::aten {

namespace {

using c10::DataPtr;
using c10::DeviceIndex;
using c10::MempoolId_t;
using c10::cuda::CUDACachingAllocator::CUDAAllocator;
namespace caching = c10::cuda::CUDACachingAllocator;

// -- the ledger -----------------------------------------------------------------------------------------------------

// The clients that are attached. The allocator is the process's and so is the ledger behind each of them: any one is
// asked. While there is none, what the allocator gives back stays in the ledger until this server ends.
// Locks: g_clients_mu is taken under the allocator's own lock (on_trace), and nothing is taken under it but the
// ledger's.
std::mutex g_clients_mu;
std::vector<const Client*>& clients() {
  static auto* const all = new std::vector<const Client*>;
  return *all;
}
// Bytes that the allocator holds and the ledger did not grant: not 0 where the GPU is full.
std::atomic<int64_t> g_ungranted{0};

void on_trace(const caching::TraceEntry& entry) {
  std::lock_guard lock(g_clients_mu);
  if (clients().empty()) return;
  const devproxy_executor_host* host = &clients().front()->host;
  const auto bytes = static_cast<uint64_t>(entry.size_);
  if (entry.action_ == caching::TraceEntry::SEGMENT_ALLOC || entry.action_ == caching::TraceEntry::SEGMENT_MAP) {
    if (host->take(host->cookie, bytes) != 1) g_ungranted.fetch_add(static_cast<int64_t>(bytes));
  } else if (entry.action_ == caching::TraceEntry::SEGMENT_FREE ||
             entry.action_ == caching::TraceEntry::SEGMENT_UNMAP) {
    // What was not granted goes first.
    int64_t owed = g_ungranted.load();
    while (owed > 0) {
      const int64_t pay = std::min<int64_t>(owed, static_cast<int64_t>(bytes));
      if (!g_ungranted.compare_exchange_weak(owed, owed - pay)) continue;
      if (static_cast<uint64_t>(pay) < bytes) host->give(host->cookie, bytes - static_cast<uint64_t>(pay));
      return;
    }
    host->give(host->cookie, bytes);
  }
}

// What LaunchScope has made the thread's device and stream.
struct DeviceAndStream {
  DeviceIndex device = -1;
  uint64_t stream = 0;
};
thread_local DeviceAndStream t_set;

// -- output placement -----------------------------------------------------------------------------------------------

void give_back_offer(void* p) { placement::give_back(p); }

// Hands out what was offered, and everything else to torch's own. One virtual function of CUDAAllocator each; those
// that a version adds with a default are its own.
class PlacingAllocator final : public CUDAAllocator {
 public:
  explicit PlacingAllocator(CUDAAllocator* base) : base_(base) {}

  DataPtr allocate(size_t bytes) override {
    if (void* p = placement::take(bytes)) {
      return {p, p, &give_back_offer, c10::Device(c10::kCUDA, t_set.device)};
    }
    if (g_ungranted.load(std::memory_order_relaxed) > 0) base_->emptyCache();
    DataPtr got = base_->allocate(bytes);
    if (g_ungranted.load(std::memory_order_relaxed) > 0) {
      got.clear();
      base_->emptyCache();
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes,
          " bytes for a kernel's own use; the rest of the GPU's memory is allocated by this job or others.");
    }
    return got;
  }
  c10::DeleterFnPtr raw_deleter() const override { return base_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { base_->copy_data(to, from, bytes); }
  bool is_simple_data_ptr(const DataPtr& p) const override { return base_->is_simple_data_ptr(p); }

  bool initialized() override { return base_->initialized(); }
  void emptyCache(MempoolId_t pool) override { base_->emptyCache(pool); }
  void recordStream(const DataPtr& p, c10::cuda::CUDAStream stream) override {
    if (!placement::is_device_address(p.get())) base_->recordStream(p, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override { return base_->getDeviceStats(d); }
  void resetAccumulatedStats(DeviceIndex d) override { base_->resetAccumulatedStats(d); }
  void resetPeakStats(DeviceIndex d) override { base_->resetPeakStats(d); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override { return base_->getMemoryInfo(d); }

  void* raw_alloc(size_t n) override { return base_->raw_alloc(n); }
  void* raw_alloc_with_stream(size_t n, cudaStream_t s) override { return base_->raw_alloc_with_stream(n, s); }
  void raw_delete(void* p) override { base_->raw_delete(p); }
  void init(int devices) override { base_->init(devices); }
  double getMemoryFraction(DeviceIndex d) override { return base_->getMemoryFraction(d); }
  void setMemoryFraction(double f, DeviceIndex d) override { base_->setMemoryFraction(f, d); }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex d) override {
    return base_->getExpandableSegmentSizes(d);
  }
  void enable(bool on) override { base_->enable(on); }
  bool isEnabled() const override { return base_->isEnabled(); }
  void cacheInfo(DeviceIndex d, size_t* largest) override { base_->cacheInfo(d, largest); }
  void* getBaseAllocation(void* p, size_t* size) override { return base_->getBaseAllocation(p, size); }
  caching::SnapshotInfo snapshot(MempoolId_t pool, bool traces) override { return base_->snapshot(pool, traces); }
  void beginAllocateToPool(DeviceIndex d, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    base_->beginAllocateToPool(d, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex d, MempoolId_t pool) override { base_->endAllocateToPool(d, pool); }
  void releasePool(DeviceIndex d, MempoolId_t pool) override { base_->releasePool(d, pool); }
  caching::ShareableHandle shareIpcHandle(void* p) override { return base_->shareIpcHandle(p); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return base_->getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return base_->isHistoryEnabled(); }
  void recordHistory(bool enabled, caching::CreateContextFn recorder, size_t most, caching::RecordContext when,
                     bool clear, const std::vector<std::string>& skip) override {
    base_->recordHistory(enabled, recorder, most, when, clear, skip);
  }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    base_->attachOutOfMemoryObserver(std::move(observer));
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
    base_->attachOomRejectionObserver(std::move(observer));
  }
#endif
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    base_->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex a, DeviceIndex b) override { base_->enablePeerAccess(a, b); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t n, cudaStream_t stream,
                          bool peer) override {
    return base_->memcpyAsync(to, to_device, from, from_device, n, stream, peer);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex d, MempoolId_t id) override {
    return base_->getCheckpointState(d, id);
  }
  caching::CheckpointDelta setCheckpointPoolState(DeviceIndex d, std::shared_ptr<caching::AllocatorState> s) override {
    return base_->setCheckpointPoolState(d, std::move(s));
  }
  std::string name() override { return base_->name(); }

 private:
  CUDAAllocator* const base_;
};

DeviceIndex index_of(const Client& client) { return static_cast<DeviceIndex>(client.host.ordinal); }

// CU_STREAM_LEGACY of cuda.h: the default stream, which torch knows as the null one.
constexpr uint64_t kLegacyStream = 1;

c10::cuda::CUDAStream stream_of(DeviceIndex device, uint64_t handle) {
  if (handle == 0 || handle == kLegacyStream) return c10::cuda::getDefaultCUDAStream(device);
  return c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(handle), device);
}

}  // namespace

namespace device {

const c10::DeviceType kType = c10::kCUDA;
const c10::DispatchKey kKey = c10::DispatchKey::CUDA;
const uint32_t kWhere = DEVPROXY_EXECUTOR_ON_CUDA;
const bool kKeepsGenerators = true;
const bool kRaisesNondeterminism = true;
const bool kLacksTypes = false;

c10::Device of(const Client& client) { return {c10::kCUDA, index_of(client)}; }
c10::Allocator* allocator() { return caching::get(); }

void prepare() {
  static const bool installed = [] {
    at::globalContext().lazyInitDevice(c10::kCUDA);  // makes torch's own allocator, if nothing has
    caching::allocator.store(new PlacingAllocator(caching::get()));
    return true;
  }();
  (void)installed;
}

void attach(Client& client) {
  const DeviceIndex device = index_of(client);
  TORCH_CHECK(device < c10::cuda::device_count(), "PyTorch sees ", static_cast<int>(c10::cuda::device_count()),
              " GPUs in the server, and the job's is number ", static_cast<int>(device));
  {
    std::lock_guard lock(g_clients_mu);
    clients().push_back(&client);
  }
  static const bool traced = [] {
    caching::get()->attachAllocatorTraceTracker(&on_trace);
    return true;
  }();
  (void)traced;
}

void detach(Client& client) {
  std::lock_guard lock(g_clients_mu);
  std::erase(clients(), &client);
}

void trim(Client&) {
  at::cuda::clearCublasWorkspaces();
  caching::get()->emptyCache();
}

at::Generator new_generator(const Client& client) { return at::cuda::detail::createCUDAGenerator(index_of(client)); }

// CUDA generators share a state by pointer: the default one draws from the very state of `g`.
void lend_to_default(const Client& client, const at::Generator& g) {
  at::Generator own = at::cuda::detail::getDefaultCUDAGenerator(index_of(client));
  own.unsafeGetGeneratorImpl()->graphsafe_set_state(g.unsafeGetGeneratorImpl()->graphsafe_get_state());
}
void take_from_default(const Client&, const at::Generator&) {}

void read_memory(void* to, uint64_t addr, size_t bytes) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cudaMemcpyAsync(to, reinterpret_cast<const void*>(addr), bytes, cudaMemcpyDeviceToHost, stream));
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
}

// Device and stream stay the thread's from launch to launch: nearly all go to the same stream, and torch's guards ask the
// runtime several times for each. Nothing else on the server's threads asks which they are.
LaunchScope::LaunchScope(const Client& client, const devproxy_soft_launch& launch, uint32_t) {
  const DeviceIndex device = index_of(client);
  if (t_set.device == device && t_set.stream == launch.stream) return;
  t_set.device = -1;  // where one of the two fails
  C10_CUDA_CHECK(c10::cuda::SetDevice(device));
  c10::cuda::setCurrentCUDAStream(stream_of(device, launch.stream));
  t_set = {device, launch.stream};
}

void sleep(const Client& client, const devproxy_soft_launch& launch, const SleepBlock& how_long) {
  const LaunchScope scope(client, launch, 1);
  at::cuda::sleep(how_long.cycles);
}

// cudaError_t has CUresult's numbers for execution faults (driver_types.h).
int fault_of(const std::exception& e) {
  const auto* error = dynamic_cast<const c10::AcceleratorError*>(&e);
  if (error == nullptr) return 0;
  const int code = error->get_error_code();
  return code == cudaErrorAssert || (code >= cudaErrorIllegalAddress && code <= cudaErrorLaunchFailure) ? code : 0;
}

// torch's own function lays out weights of our own making, and where it has put them is the answer.
std::vector<int64_t> rnn_layout(const Client& client, const RnnForm& f,
                                const std::vector<std::vector<int64_t>>& sizes) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getDefaultCUDAStream(index_of(client)));
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(f.dtype)).device(of(client));
  std::vector<at::Tensor> weights;
  for (const auto& s : sizes) weights.push_back(at::empty(s, options));
  const at::Tensor buffer =
      at::_cudnn_rnn_flatten_weight(weights, f.weight_stride0, f.input_size, f.mode, f.hidden_size, f.proj_size,
                                    f.num_layers, f.batch_first != 0, f.bidirectional != 0);
  std::vector<int64_t> layout{buffer.numel()};
  for (const at::Tensor& w : weights) {
    TORCH_CHECK(w.is_alias_of(buffer) && w.is_contiguous(), "cuDNN did not put a weight into the layer's buffer");
    layout.push_back(w.storage_offset());
  }
  return layout;
}

// The cache is the process's: of several clients on one GPU the last that sets its size has set it for all.
int64_t plan_cache(Client& client, PlansBlock::What what, int64_t value) {
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  const DeviceIndex device = index_of(client);
  switch (what) {
    case PlansBlock::kSize: return hooks.cuFFTGetPlanCacheSize(device);
    case PlansBlock::kMaxSize: return hooks.cuFFTGetPlanCacheMaxSize(device);
    case PlansBlock::kSetMaxSize: hooks.cuFFTSetPlanCacheMaxSize(device, value); return 0;
    case PlansBlock::kClear: hooks.cuFFTClearPlanCache(device); return 0;
  }
  return 0;
}

std::string facts(const Client& client) {
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  const c10::cuda::CUDAGuard guard(index_of(client));
  std::string text;
  auto number = [&](const char* name, auto value) { text += std::string(name) + " " + std::to_string(value) + "\n"; };
  auto flag = [&](const char* name, bool value) { text += std::string(name) + (value ? " 1\n" : " 0\n"); };
  const bool cudnn = hooks.compiledWithCuDNN() && hooks.hasCuDNN();
  number("cudnn", cudnn ? hooks.versionCuDNN() : 0);
  number("cudnn_runtime", cudnn ? hooks.versionRuntimeCuDNN() : 0);
  number("cudnn_frontend", cudnn ? hooks.versionCuDNNFrontend() : 0);
  number("cudart", hooks.versionCUDART());
  flag("has_cudnn", cudnn);
  flag("has_cublaslt", hooks.hasCuBLASLt());
  flag("has_cusolver", hooks.hasCuSOLVER());
  flag("has_magma", hooks.hasMAGMA());
  flag("dilated_conv", cudnn && hooks.supportsDilatedConvolutionWithCuDNN());
  flag("depthwise_conv", cudnn && hooks.supportsDepthwiseConvolutionWithCuDNN());
  flag("bfloat16_conv", cudnn && hooks.supportsBFloat16ConvolutionWithCuDNNv8());
  flag("bfloat16_rnn", cudnn && hooks.supportsBFloat16RNNWithCuDNN());
  number("batchnorm_epsilon", cudnn ? hooks.batchnormMinEpsilonCuDNN() : 1e-5);
  std::string config = hooks.showConfig();
  for (size_t at = 0; at < config.size();) {
    const size_t end = std::min(config.find('\n', at), config.size());
    if (end > at) text += "config " + config.substr(at, end - at) + "\n";
    at = end + 1;
  }
  return text;
}

}  // namespace device
}  // namespace devproxy::aten
