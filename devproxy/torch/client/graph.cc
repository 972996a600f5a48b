// SPDX-License-Identifier: Apache-2.0
// Locks: captures().mu guards the table of open captures; Graph::mu_ a capture's generators. Neither is held over a
// call that waits, nor while the other is taken.
#include "devproxy/torch/client/graph.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <mutex>
#include <unordered_map>

#include "devproxy/torch/block.h"
#include "devproxy/torch/client/allocator.h"

namespace devproxy::aten {

std::atomic<int> g_open_captures{0};

namespace {

struct Captures {
  std::mutex mu;
  std::unordered_map<cuuint64_t, Graph*> by_id;
};
Captures& captures() {
  static auto* const c = new Captures;
  return *c;
}

CUstreamCaptureMode mode_of(const std::string& name) {
  if (name == "global") return CU_STREAM_CAPTURE_MODE_GLOBAL;
  if (name == "thread_local") return CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
  TORCH_CHECK(name == "relaxed", "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got ",
              name);
  return CU_STREAM_CAPTURE_MODE_RELAXED;
}

[[noreturn]] void throw_not_registered() {
  TORCH_CHECK(false,
              "RNG op during graph capture but generator is not registered with the capturing graph. Call "
              "graph.register_generator_state() before capture_begin().");
}

// The id of the capture that the stream takes part in; 0: none, or one that has failed.
cuuint64_t active_capture(CUstream stream) {
  CUstreamCaptureStatus status{};
  cuuint64_t id = 0;
  const CUresult r = driver().cuStreamGetCaptureInfo(stream, &status, &id, nullptr, nullptr, nullptr, nullptr);
  return r == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? id : 0;
}

}  // namespace

cuuint64_t capture_id(DeviceIndex device, int64_t stream_id) {
  if (!any_capture() || stream_id == 0) return 0;  // the legacy stream is in no capture
  return active_capture(stream_handle(device, stream_id));
}

Graph* capturing_graph(DeviceIndex device, int64_t stream_id) {
  const cuuint64_t id = capture_id(device, stream_id);
  if (id == 0) return nullptr;
  std::lock_guard lock(captures().mu);
  const auto it = captures().by_id.find(id);
  return it == captures().by_id.end() ? nullptr : it->second;
}

CUstream side_stream(DeviceIndex device) {
  static auto* const mu = new std::mutex;
  static auto* const streams = new std::array<CUstream, kMaxDevices>{};
  bind_device(device);
  std::lock_guard lock(*mu);
  CUstream& stream = (*streams)[device];
  if (stream == nullptr)
    check(driver().cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  return stream;
}

c10::MempoolId_t new_pool_id(bool asked_for) {
  static std::atomic<c10::CaptureId_t> own{0}, shared{0};
  return asked_for ? c10::MempoolId_t{0, ++shared} : c10::MempoolId_t{++own, 0};
}

Graph::~Graph() {
  if (in_bad_fork()) return;
  try {
    release();
  } catch (...) {}  // at exit the driver may be gone, and everything of the graph with it
}

void Graph::register_generator(const at::Generator& generator) {
  TORCH_CHECK(!capturing_, "a generator is registered with a CUDAGraph before its capture begins");
  auto state = state_of(generator);
  for (const Drawn& d : draws_)
    if (d.state == state) return;
  draws_.push_back({std::move(state)});
}

void Graph::capture_begin(std::optional<c10::MempoolId_t> pool, const std::string& error_mode) {
  TORCH_CHECK(!capturing_ && graph_ == nullptr && exec_ == nullptr,
              "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance.");
  const CUstreamCaptureMode mode = mode_of(error_mode);
  device_ = current_device();
  stream_ = current_stream_id(device_);
  TORCH_CHECK(
      stream_ != 0,
      "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on "
      "the default stream.)");
  const CUstream handle = stream_handle(device_, stream_);
  register_generator(default_generator(device_));
  (void)side_stream(device_);

  pool_ = pool.value_or(c10::MempoolId_t{0, 0});
  if (pool_ == c10::MempoolId_t{0, 0}) pool_ = new_pool_id(false);
  device_allocator()->retain_pool(device_, pool_);
  at::getHostAllocator(at::kCUDA)->begin_allocate_to_pool(
      pool_, [this](c10::Stream s) { return s.device_index() == device_ && capturing_graph(device_, s.id()) == this; });
  has_pool_ = true;
  // Before the capture is there: from its first moment, no thread may free memory or wait as it does otherwise.
  g_open_captures.fetch_add(1);
  capturing_ = true;
  const CUresult r = driver().cuStreamBeginCapture(handle, mode);
  if (r == CUDA_SUCCESS) {
    capture_id_ = active_capture(handle);
    std::lock_guard lock(captures().mu);
    captures().by_id[capture_id_] = this;
    return;
  }
  capture_id_ = 0;
  release();
  check(r, "cuStreamBeginCapture");
}

CUresult Graph::end_capture(bool abandon) {
  CUresult r = CUDA_SUCCESS;
  if (capture_id_ != 0) {
    r = driver().cuStreamEndCapture(stream_handle(device_, stream_), &graph_);
    if (r == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD && !abandon) return r;
    std::lock_guard lock(captures().mu);
    captures().by_id.erase(capture_id_);
  }
  capturing_ = false;
  g_open_captures.fetch_sub(1);
  at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(pool_);
  device_allocator()->free_what_waited();
  return r;
}

void Graph::capture_end() {
  TORCH_CHECK(capturing_, "capture_end() called before capture_begin().");
  TORCH_CHECK(current_device() == device_ && current_stream_id(device_) == stream_,
              "Capture must end on the same stream it began on.");
  if (const CUresult r = end_capture(false); r != CUDA_SUCCESS) {
    if (!capturing_) release();
    check(r, "cuStreamEndCapture");
  }
  size_t nodes = 0;
  check(driver().cuGraphGetNodes(graph_, nullptr, &nodes), "cuGraphGetNodes");
  if (nodes == 0)
    TORCH_WARN(
        "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong device "
        "or stream.");
  if (keep_graph_) return;
  instantiate();
  if (!debug_) destroy_graph();
}

void Graph::instantiate() {
  TORCH_CHECK(graph_ != nullptr && !capturing_, "capture_end() must have been called before calling instantiate");
  bind_device(device_);
  destroy_exec();
  const RelaxedScope relaxed;
  check(driver().cuGraphInstantiate(&exec_, graph_, 0), "cuGraphInstantiate");
}

void Graph::replay() {
  TORCH_CHECK(!capturing_ && (exec_ != nullptr || graph_ != nullptr),
              "Called CUDAGraph::replay without a preceding successful capture.");
  if (exec_ == nullptr) instantiate();
  const DeviceScope scope(device_);
  const CUstream stream = current_stream(device_);
  for (const Drawn& d : draws_) {
    if (d.taken == 0) continue;
    TORCH_CHECK(capturing_graph(device_, current_stream_id(device_)) == nullptr,
                "replaying a graph that draws random numbers inside of a capture is not supported behind devproxy; "
                "replay it outside");
    uint64_t pair[2];
    {
      std::lock_guard lock(d.state->mu);
      pair[0] = d.state->seed, pair[1] = d.state->offset;
      d.state->offset += d.taken;
    }
    // From pageable memory: the driver has copied it when it returns, and the stream keeps the order.
    check(driver().cuMemcpyHtoDAsync(d.addr, pair, sizeof pair, stream), "cuMemcpyHtoDAsync");
  }
  check(driver().cuGraphLaunch(exec_, stream), "cuGraphLaunch");
}

void Graph::reset() { release(); }

void Graph::destroy_exec() {
  if (exec_ == nullptr) return;
  check(driver().cuGraphExecDestroy(exec_), "cuGraphExecDestroy");
  exec_ = nullptr;
}

void Graph::destroy_graph() {
  if (graph_ == nullptr) return;
  check(driver().cuGraphDestroy(graph_), "cuGraphDestroy");
  graph_ = nullptr;
}

void Graph::release() {
  if (capturing_) (void)end_capture(true);
  if (device_ < 0) return;
  bind_device(device_);
  destroy_exec();
  destroy_graph();
  const RelaxedScope relaxed;
  for (Drawn& d : draws_)
    if (d.addr != 0) check(driver().cuMemFree(d.addr), "cuMemFree");  // waits for replays that are under way
  draws_.clear();
  if (!has_pool_) return;
  has_pool_ = false;
  at::getHostAllocator(at::kCUDA)->release_pool(pool_);
  device_allocator()->release_pool(device_, pool_);
}

c10::MempoolId_t Graph::pool() const {
  TORCH_CHECK(has_pool_, "Called CUDAGraph::pool() without a preceding successful capture.");
  return pool_;
}

void Graph::debug_dump(const std::string& path) {
  TORCH_CHECK(graph_ != nullptr && (debug_ || keep_graph_),
              "CUDA Graphs debug not enabled, set with [graph].enable_debug_mode()");
  check(driver().cuGraphDebugDotPrint(graph_, path.c_str(), CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE), "cuGraphDebugDotPrint");
  if (!keep_graph_) destroy_graph();
}

CUgraph Graph::raw_graph() const {
  TORCH_CHECK(keep_graph_,
              "You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized with "
              "keep_graph=true");
  TORCH_CHECK(graph_ != nullptr, "You cannot access the raw cudaGraph_t instance until capture_end() has been called");
  return graph_;
}

CUgraphExec Graph::raw_exec() const {
  TORCH_CHECK(exec_ != nullptr,
              "You cannot access the raw cudaGraphExec_t instance until instantiate() has been called");
  return exec_;
}

void Graph::check_registered(const std::shared_ptr<GeneratorState>& state) {
  std::lock_guard lock(mu_);
  for (const Drawn& d : draws_)
    if (d.state == state) return;
  throw_not_registered();
}

RandomState Graph::draw(const std::shared_ptr<GeneratorState>& state) {
  std::lock_guard lock(mu_);
  for (Drawn& d : draws_) {
    if (d.state != state) continue;
    if (d.addr == 0) {
      const RelaxedScope relaxed;
      bind_device(device_);
      check(driver().cuMemAlloc(&d.addr, 2 * sizeof(uint64_t)), "cuMemAlloc");
    }
    const RandomState result{0, d.taken, d.addr};
    d.taken += kOffsetPerOp;
    return result;
  }
  throw_not_registered();
}

}  // namespace devproxy::aten
