// SPDX-License-Identifier: Apache-2.0
// What torch's profilers ask of a GPU: events on a stream, and ranges for NVIDIA's tools.
//
// The GPU's work is the server's, so CUPTI, which Kineto reads, sees nothing of it in this process. torch has another
// way for that case, which needs events alone (KINETO_GPU_FALLBACK): the time on the stream from before each op to
// behind it. pylib/devproxy_torch/profiler.py makes torch take it and says what a profile lacks.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include "devproxy/torch/client/device.h"
#include "devproxy/torch/client/driver.h"
#include "devproxy/torch/client/graph.h"

namespace devproxy::aten {
namespace {

using torch::profiler::impl::ProfilerStubs;
using torch::profiler::impl::ProfilerVoidEventStub;

class Stubs final : public ProfilerStubs {
 public:
  // theirs: what the wheel has registered.
  explicit Stubs(const ProfilerStubs* theirs) : ranges_(theirs->enabled() ? theirs : nullptr) {}

  bool enabled() const override { return true; }

  // torch calls this around every op of the profile, so a failure is no event and not an exception. So is a capture: an
  // event in it would be a node of the graph.
  void record(DeviceIndex* device, ProfilerVoidEventStub* event, int64_t* cpu_ns) const override {
    const DeviceIndex here = current_device();
    if (device != nullptr) *device = here;
    if (cpu_ns != nullptr) *cpu_ns = c10::getTime();
    event->reset();
    if (in_bad_fork() || (any_capture() && capturing_graph(here, current_stream_id(here)) != nullptr)) return;
    const auto* const events = c10::impl::getDeviceGuardImpl(c10::kCUDA);  // device.cc
    void* made = nullptr;
    try {
      events->record(&made, torch_stream(here, current_stream_id(here)), here, c10::EventFlag::BACKEND_DEFAULT);
    } catch (const c10::Error&) {  // a broken context: the op itself says so
      return events->destroyEvent(made, here);
    }
    *event = ProfilerVoidEventStub(made, [here, events](void* e) noexcept { events->destroyEvent(e, here); });
  }

  float elapsed(const ProfilerVoidEventStub* from, const ProfilerVoidEventStub* to) const override {  // microseconds
    const auto* const events = c10::impl::getDeviceGuardImpl(c10::kCUDA);
    for (const auto* event : {from, to}) events->synchronizeEvent(event->get());
    return static_cast<float>(events->elapsedTime(from->get(), to->get(), current_device()) * 1000);
  }

  // Ranges (NVTX) are of this process alone and go to whatever tool is attached to it: the CUDA wheel has them, and the
  // CPU wheel, for which no such tool was ever made, has none to be lost.
  void mark(const char* name) const override {
    if (ranges_ != nullptr) ranges_->mark(name);
  }
  void rangePush(const char* name) const override {
    if (ranges_ != nullptr) ranges_->rangePush(name);
  }
  void rangePop() const override {
    if (ranges_ != nullptr) ranges_->rangePop();
  }

  void onEachDevice(std::function<void(int)> f) const override {
    for (DeviceIndex d = 0; d < device_count(); ++d) {
      const DeviceScope scope(d);
      f(d);
    }
  }
  void synchronize() const override { synchronize_device(current_device()); }

 private:
  const ProfilerStubs* const ranges_;
};

const struct RegisterStubs {
  RegisterStubs() {
    torch::profiler::impl::registerCUDAMethods(new Stubs(torch::profiler::impl::cudaStubs()));  // never destroyed
  }
} g_register_stubs;

}  // namespace
}  // namespace devproxy::aten
