// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/snapshot.h"

#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/csrc/profiler/python/combined_traceback.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "devproxy/torch/client/allocator.h"
#include "devproxy/torch/client/driver.h"
#include "devproxy/torch/client/history.h"

namespace devproxy::aten {
namespace {

namespace py = pybind11;

// Many entries share a traceback, and looking up its names takes long: all are looked up at once, each once.
class Frames {
 public:
  // dict["frames"] becomes those of the context; an empty list where there is none.
  void set(const py::dict& dict, HistoryContext context) {
    dict["frames"] = py::list();
    auto* const traceback = dynamic_cast<torch::CapturedTraceback*>(context.get());
    if (traceback == nullptr) return;
    const auto [at, is_new] = index_.emplace(traceback, contexts_.size());
    if (is_new) contexts_.push_back(std::move(context));
    waiting_.emplace_back(dict, at->second);
  }

  void look_up() {
    std::vector<torch::CapturedTraceback*> tracebacks;
    for (const auto& context : contexts_) tracebacks.push_back(static_cast<torch::CapturedTraceback*>(context.get()));
    const std::vector<py::object> frames = torch::py_symbolize(tracebacks);
    for (const auto& [dict, at] : waiting_) dict["frames"] = frames.at(at);
  }

 private:
  std::vector<HistoryContext> contexts_;
  std::unordered_map<torch::CapturedTraceback*, size_t> index_;
  std::vector<std::pair<py::dict, size_t>> waiting_;
};

intptr_t handle_number(DeviceIndex device, int64_t stream) {
  return reinterpret_cast<intptr_t>(stream_handle(device, stream));
}

// As torch's own: a segment is an allocation of the driver. None is split, but a pool's may be larger than what it
// holds.
py::list segments(bool of_all_pools, c10::MempoolId_t pool, Frames* frames) {
  py::list found;
  for (DeviceIndex device = 0; device < device_count(); ++device) {
    for (const Segment& s : device_allocator()->segments(device)) {
      if (!of_all_pools && s.pool != pool) continue;
      const HistoryContext context = context_of(device, s.addr);
      py::list blocks;
      const auto block = [&](size_t at, size_t bytes, size_t requested, const char* state) {
        if (bytes == 0) return;
        py::dict d;
        d["address"] = s.addr + at, d["size"] = bytes, d["requested_size"] = requested, d["state"] = state;
        frames->set(d, at == 0 && s.allocated != 0 ? context : nullptr);
        blocks.append(d);
      };
      block(0, s.allocated, s.requested, "active_allocated");
      block(s.allocated, s.bytes - s.allocated, 0, "inactive");
      py::dict d;
      d["device"] = static_cast<int>(device), d["address"] = s.addr, d["total_size"] = s.bytes;
      d["allocated_size"] = s.allocated, d["active_size"] = s.allocated, d["requested_size"] = s.requested;
      d["stream"] = handle_number(device, s.stream);
      d["segment_type"] = s.bytes <= kSmallBytes ? "small" : "large";
      d["segment_pool_id"] = py::make_tuple(s.pool.first, s.pool.second);
      d["is_expandable"] = false, d["blocks"] = blocks;
      frames->set(d, s.pool == c10::MempoolId_t{0, 0} ? context : nullptr);
      found.append(d);
    }
  }
  return found;
}

py::list traces(Frames* frames) {
  py::list found;
  for (DeviceIndex device = 0; device < device_count(); ++device) {
    py::list trace;
    for (HistoryEntry& e : history_of(device)) {
      py::dict d;
      d["action"] = action_name(e.action);
      d[e.action == HistoryAction::kOutOfMemory ? "device_free" : "addr"] = e.addr;
      d["size"] = e.bytes, d["time_us"] = e.time_us;
      d["stream"] = handle_number(device, e.stream), d["user_metadata"] = e.metadata;
      frames->set(d, std::move(e.context));
      trace.append(d);
    }
    found.append(trace);
  }
  return found;
}

py::dict snapshot(bool of_all_pools, c10::MempoolId_t pool, bool with_traces) {
  Frames frames;
  py::dict d;
  {
    // Before the traces are read, as torch does.
    const py::gil_scoped_release unlocked;
    for (DeviceIndex device = 0; history_on() && device < device_count(); ++device) note_snapshot(device);
  }
  d["segments"] = segments(of_all_pools, pool, &frames);
  if (with_traces) {
    d["device_traces"] = traces(&frames);
  } else {
    py::list none;
    for (DeviceIndex device = 0; device < device_count(); ++device) none.append(py::list());
    d["device_traces"] = none;
  }
  d["allocator_settings"] = py::dict();
  frames.look_up();
  return d;
}

void record_history(int contexts, bool cpp, size_t max_entries, bool clear, const std::vector<std::string>& skips) {
  HistorySettings settings;
  settings.contexts = static_cast<HistoryContexts>(contexts);
  settings.cpp = cpp;
  settings.max_entries = max_entries;
  for (const std::string& name : skips) {
    bool known = false;
    for (size_t a = 0; a < static_cast<size_t>(HistoryAction::kCount); a++)
      if (name == action_name(static_cast<HistoryAction>(a))) settings.skips[a] = known = true;
    TORCH_CHECK_VALUE(known, "skip_actions names '", name, "', which is no action of a memory history");
  }
  start_history(settings, clear);
}

void observe_out_of_memory(py::function observer) {
  // Leaked on purpose: it lives as long as the allocator, which never ends.
  auto* const told = new py::function(std::move(observer));
  add_out_of_memory_observer([told](int64_t device, int64_t bytes, int64_t total, int64_t free) {
    const py::gil_scoped_acquire locked;
    (*told)(device, bytes, total, free);
  });
}

// -- raw allocations: torch.cuda.caching_allocator_alloc --------------------------------------------------------------

struct Raw {
  std::mutex mu;
  std::map<uintptr_t, c10::DataPtr> live;
};
Raw& raw() {
  static auto* const one = new Raw;
  return *one;
}

uintptr_t allocate_raw(size_t bytes, uintptr_t stream) {
  const DeviceIndex device = current_device();
  const int64_t before = current_stream_id(device);
  const int64_t wanted = external_stream_id(device, reinterpret_cast<CUstream>(stream));
  set_current_stream_id(device, wanted);
  c10::DataPtr memory;
  try {
    memory = device_allocator()->allocate_on(device, bytes);
  } catch (...) {
    set_current_stream_id(device, before);
    throw;
  }
  set_current_stream_id(device, before);
  const auto at = reinterpret_cast<uintptr_t>(memory.get());
  std::lock_guard lock(raw().mu);
  if (at != 0) raw().live.emplace(at, std::move(memory));
  return at;
}

void free_raw(uintptr_t at) {
  if (at == 0) return;
  c10::DataPtr memory;
  {
    std::lock_guard lock(raw().mu);
    const auto found = raw().live.find(at);
    TORCH_CHECK(found != raw().live.end(), "invalid device pointer: caching_allocator_alloc has not given it out");
    memory = std::move(found->second);
    raw().live.erase(found);
  }
}

}  // namespace

void add_snapshot(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  const auto index = [](int device) { return static_cast<DeviceIndex>(device); };
  m.def("snapshot", &snapshot);
  m.def("record_history", &record_history);
  m.def("stop_history", &stop_history);
  m.def("history_on", &history_on);
  m.def("observe_out_of_memory", &observe_out_of_memory);
  m.def("retain_pool", [index](int d, c10::MempoolId_t id) { device_allocator()->retain_pool(index(d), id); });
  m.def("spare_pool", [index](int d, c10::MempoolId_t id) { device_allocator()->spare_pool(index(d), id); });
  m.def(
      "release_pool", [index](int d, c10::MempoolId_t id) { device_allocator()->release_pool(index(d), id); },
      Unlocked());
  m.def("pool_holders", [index](int d, c10::MempoolId_t id) { return device_allocator()->pool_holders(index(d), id); });
  m.def("begin_route", [index](int d, c10::MempoolId_t id, int users) {
    device_allocator()->begin_route(index(d), id, static_cast<PoolUsers>(users));
  });
  m.def("end_route", [index](int d, c10::MempoolId_t id) { device_allocator()->end_route(index(d), id); });
  m.def("allocate_raw", &allocate_raw);
  m.def("free_raw", &free_raw);
  m.def(
      "register_host",
      [](uintptr_t at, size_t bytes, unsigned flags) {
        bind_device(current_device());
        return static_cast<int>(driver().cuMemHostRegister(reinterpret_cast<void*>(at), bytes, flags));
      },
      Unlocked());
  m.def(
      "unregister_host",
      [](uintptr_t at) {
        bind_device(current_device());
        return static_cast<int>(driver().cuMemHostUnregister(reinterpret_cast<void*>(at)));
      },
      Unlocked());
}

}  // namespace devproxy::aten
