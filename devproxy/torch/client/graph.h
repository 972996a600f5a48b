// SPDX-License-Identifier: Apache-2.0
// Graphs as torch.cuda.CUDAGraph has them, over the driver's stream capture, and what the rest of the plugin asks of a
// capture that is open. While none is, each question is one load: any_capture().
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devproxy/torch/client/device.h"
#include "devproxy/torch/client/generator.h"

namespace devproxy::aten {

extern std::atomic<int> g_open_captures;  // of Graphs, in this process
inline bool any_capture() { return g_open_captures.load(std::memory_order_acquire) != 0; }

class Graph;
// The id of the open capture that the stream takes part in; 0: none. No two captures of a process have the same.
cuuint64_t capture_id(DeviceIndex device, int64_t stream_id);
// The graph into which work on that stream is captured now; nullptr: none.
Graph* capturing_graph(DeviceIndex device, int64_t stream_id);

// A stream of the plugin's own, which takes part in no capture. It exists for each device with a capture.
CUstream side_stream(DeviceIndex device);

// A new pool's id: of a graph's own (n, 0), or one that was asked for (0, n).
c10::MempoolId_t new_pool_id(bool asked_for);

// While it lives, this thread may make the calls that cuda.h calls unsafe during a capture: allocations, and waits for
// streams that take no part in it.
class RelaxedScope {
 public:
  RelaxedScope() : active_(any_capture()) {
    if (active_) [[unlikely]]
      exchange();
  }
  ~RelaxedScope() {
    if (active_) exchange();
  }
  RelaxedScope(const RelaxedScope&) = delete;
  RelaxedScope& operator=(const RelaxedScope&) = delete;

 private:
  void exchange() noexcept { (void)driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  bool active_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// One CUDAGraph. As there, its user keeps two threads from calling it at once; draw() may come from any thread whose
// stream takes part in the capture.
class Graph {
 public:
  explicit Graph(bool keep_graph) : keep_graph_(keep_graph) {}
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void register_generator(const at::Generator& generator);
  void capture_begin(std::optional<c10::MempoolId_t> pool, const std::string& error_mode);
  void capture_end();
  void instantiate();
  void replay();
  void reset();
  c10::MempoolId_t pool() const;
  void enable_debug_mode() { debug_ = true; }
  void debug_dump(const std::string& path);
  CUgraph raw_graph() const;
  CUgraphExec raw_exec() const;

  // What a random op of the capture draws from. Throws where the generator is not registered.
  RandomState draw(const std::shared_ptr<GeneratorState>& state);
  void check_registered(const std::shared_ptr<GeneratorState>& state);

 private:
  // A generator whose numbers the graph draws. Its memory is the graph's alone: what the pool hands out twice, a replay
  // has written over by the time that it draws.
  struct Drawn {
    std::shared_ptr<GeneratorState> state;
    CUdeviceptr addr = 0;  // made at the first draw
    uint64_t taken = 0;    // what one replay moves the offset on by
  };

  // Whatever comes of it: the capture is over, and graph_ may be there. But where another thread than its own asks, it
  // goes on, unless it is to be abandoned: then the driver's capture is all that is left of it.
  CUresult end_capture(bool abandon);
  void destroy_exec();
  void destroy_graph();
  void release();

  bool keep_graph_, debug_ = false;
  bool capturing_ = false, has_pool_ = false;
  DeviceIndex device_ = -1;
  int64_t stream_ = 0;
  cuuint64_t capture_id_ = 0;
  c10::MempoolId_t pool_{0, 0};
  CUgraph graph_ = nullptr;
  CUgraphExec exec_ = nullptr;
  std::mutex mu_;  // draws_, during a capture
  std::vector<Drawn> draws_;
};

}  // namespace devproxy::aten
