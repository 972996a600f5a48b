// SPDX-License-Identifier: Apache-2.0
// The Python half of the plugin: the functions behind torch._C._cuda_*, called by pylib/devproxy_torch.
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "devproxy/torch/block.h"
#include "devproxy/torch/client/allocator.h"
#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/forward.h"
#include "devproxy/torch/client/generator.h"
#include "devproxy/torch/client/graph.h"
#include "devproxy/torch/client/history.h"
#include "devproxy/torch/client/process_group_names.h"
#include "devproxy/torch/client/snapshot.h"

namespace py = pybind11;

namespace devproxy::aten {
namespace {

// DistributedDataParallel wants a timer for its device type; times of the host are what it gets here.
class DdpTimer final : public c10d::Timer {
 public:
  explicit DdpTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t from = getTimeRef(start), to = getTimeRef(end);
    if (from < 0 || to < from) return std::nullopt;
    return to - from;
  }
};

const struct RegisterTimer {
  RegisterTimer() {
    c10d::TimerRegistry()->Register(
        c10::kCUDA, [](c10::Device d) -> std::unique_ptr<c10d::Timer> { return std::make_unique<DdpTimer>(d); },
        c10::REGISTRY_PREFERRED);
  }
} g_register_timer;

bool python_ends() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

std::terminate_handler g_next_handler = nullptr;
// So many seconds torch waits, at its own end, for its backward threads. By itself it would be 10, and one that comes later
// never comes. One that comes before makes it 0 by one byte, since others may read the environment at that moment.
char g_wait_limit[] = "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT=0.5";

// Before Python 3.14 a thread that wants the GIL while Python ends is unwound, which C++ does not survive where a
// destructor is on the way. torch's backward threads are such: each drops the caller's context (torch.autograd.graph)
// when the caller may have come to its end already. On the CPU there are no such threads, and the same script ends well.
// So they wait here for the process's end, as Python 3.14 has them do.
void wait_for_the_end() {
  if (std::current_exception() == nullptr && gettid() != getpid() && python_ends()) {
    if (char* const tenths = std::strchr(g_wait_limit, '5')) *tenths = '0';
    for (;;) pause();
  }
  if (g_next_handler) g_next_handler();
  std::abort();
}

DeviceIndex index_or_current(int device) {
  if (device < 0) return current_device();
  check_device(static_cast<DeviceIndex>(device));
  return static_cast<DeviceIndex>(device);
}

CUdevice device_handle(int device) {
  CUdevice handle;
  check(driver().cuDeviceGet(&handle, index_or_current(device)), "cuDeviceGet");
  return handle;
}

int attribute(int device, int which) {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(which), device_handle(device)),
        "cuDeviceGetAttribute");
  return value;
}

py::dict properties(int device) {
  const CUdevice handle = device_handle(device);
  char name[256] = {};
  size_t total = 0;
  CUuuid uuid{};
  check(driver().cuDeviceGetName(name, sizeof name, handle), "cuDeviceGetName");
  check(driver().cuDeviceTotalMem(&total, handle), "cuDeviceTotalMem");
  check(driver().cuDeviceGetUuid(&uuid, handle), "cuDeviceGetUuid");
  py::dict d;
  d["name"] = name;
  d["total_memory"] = total;
  d["uuid"] = py::bytes(uuid.bytes, sizeof uuid.bytes);
  const std::pair<const char*, CUdevice_attribute> attributes[] = {
      {"major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
      {"minor", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
      {"multi_processor_count", CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
      {"is_integrated", CU_DEVICE_ATTRIBUTE_INTEGRATED},
      {"is_multi_gpu_board", CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD},
      {"max_threads_per_multi_processor", CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR},
      {"max_threads_per_block", CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK},
      {"warp_size", CU_DEVICE_ATTRIBUTE_WARP_SIZE},
      {"regs_per_multiprocessor", CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR},
      {"shared_memory_per_block", CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK},
      {"shared_memory_per_block_optin", CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN},
      {"shared_memory_per_multiprocessor", CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR},
      {"L2_cache_size", CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE},
      {"clock_rate", CU_DEVICE_ATTRIBUTE_CLOCK_RATE},
      {"memory_clock_rate", CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE},
      {"memory_bus_width", CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH},
      {"pci_bus_id", CU_DEVICE_ATTRIBUTE_PCI_BUS_ID},
      {"pci_device_id", CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID},
      {"pci_domain_id", CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID},
  };
  for (const auto& [key, which] : attributes) {
    int value = 0;  // an attribute that the device does not know reads 0
    if (driver().cuDeviceGetAttribute(&value, which, handle) != CUDA_SUCCESS) value = 0;
    d[key] = value;
  }
  return d;
}

py::dict stat(const c10::CachingAllocator::Stat& s) {
  py::dict d;
  d["current"] = s.current;
  d["peak"] = s.peak;
  d["allocated"] = s.allocated;
  d["freed"] = s.freed;
  return d;
}

py::dict stat_array(const c10::CachingAllocator::StatArray& a) {
  py::dict d;
  const char* names[] = {"all", "small_pool", "large_pool"};
  for (size_t i = 0; i < a.size(); ++i) d[names[i]] = stat(a[i]);
  return d;
}

py::dict memory_stats(int device) {
  const auto s = device_allocator()->getDeviceStats(index_or_current(device));
  py::dict d;
  d["num_alloc_retries"] = s.num_alloc_retries;
  d["num_ooms"] = s.num_ooms;
  d["num_sync_all_streams"] = s.num_sync_all_streams;
  d["num_device_alloc"] = s.num_device_alloc;
  d["num_device_free"] = s.num_device_free;
  d["max_split_size"] = -1;
  d["oversize_allocations"] = stat(s.oversize_allocations);
  d["oversize_segments"] = stat(s.oversize_segments);
  d["allocation"] = stat_array(s.allocation);
  d["segment"] = stat_array(s.segment);
  d["active"] = stat_array(s.active);
  d["inactive_split"] = stat_array(s.inactive_split);
  d["allocated_bytes"] = stat_array(s.allocated_bytes);
  d["reserved_bytes"] = stat_array(s.reserved_bytes);
  d["active_bytes"] = stat_array(s.active_bytes);
  d["inactive_split_bytes"] = stat_array(s.inactive_split_bytes);
  d["requested_bytes"] = stat_array(s.requested_bytes);
  return d;
}

py::dict host_memory_stats() {
  const auto s = at::getHostAllocator(at::kCUDA)->get_stats();
  py::dict d;
  d["num_host_alloc"] = s.num_host_alloc;
  d["num_host_free"] = s.num_host_free;
  d["active_requests"] = stat(s.active_requests);
  d["active_bytes"] = stat(s.active_bytes);
  d["allocations"] = stat(s.allocations);
  d["allocated_bytes"] = stat(s.allocated_bytes);
  return d;
}

py::tuple stream_tuple(DeviceIndex device, int64_t id) {
  return py::make_tuple(id, static_cast<int>(device), static_cast<int>(c10::kCUDA));
}

// Letting go of a graph waits for its replays, and what they wait for may need the interpreter.
struct DeleteUnlocked {
  void operator()(Graph* graph) const {
    py::gil_scoped_release unlocked;
    delete graph;
  }
};

bool stream_is_capturing(DeviceIndex device) {
  if (!has_context(device)) return false;
  CUstreamCaptureStatus status{};
  check(driver().cuStreamIsCapturing(current_stream(device), &status), "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// One launch of a kernel of torch.compile's: a word for each argument. Where the module wants to know what the kernel can
// reach, a tensor's word is its offset in its storage, and behind the arguments is for each tensor where its storage begins
// and its bytes: a kernel may reach all of a storage, as by as_strided.
void launch_words(uintptr_t function, const py::tuple& given, bool tells_stretches) {
  c10::SmallVector<uint64_t, 64> words, stretches;
  for (const py::handle one : given) {
    if (!THPVariable_Check(one.ptr())) {
      words.push_back(static_cast<uint64_t>(py::int_(py::reinterpret_borrow<py::object>(one)).cast<int64_t>()));
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(one.ptr());
    words.push_back(reinterpret_cast<uint64_t>(tensor.data_ptr()));
    if (!tells_stretches) continue;
    const c10::Storage& storage = tensor.storage();
    const auto begin = reinterpret_cast<uint64_t>(storage.data());
    words.back() -= begin;
    stretches.push_back(begin);
    stretches.push_back(storage.nbytes());
  }
  words.append(stretches.begin(), stretches.end());
  void* params[] = {words.data()};
  const CUstream stream = current_stream(current_device());
  const py::gil_scoped_release others_run;
  check(driver().cuLaunchKernel(reinterpret_cast<CUfunction>(function), 1, 1, 1, 1, 1, 1, 0, stream, params, nullptr),
        "a kernel of torch.compile");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  std::string wait_limit(g_wait_limit);
  wait_limit.resize(wait_limit.find('='));
  if (!getenv(wait_limit.c_str())) putenv(g_wait_limit);
  g_next_handler = std::set_terminate(&wait_for_the_end);
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("get_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int d) {
    check_device(static_cast<DeviceIndex>(d));
    set_current_device(static_cast<DeviceIndex>(d));
  });
  // Negative: no change, and -1 as the device to come back to.
  const auto exchange = [](int d) {
    if (d < 0) return -1;
    const int old = current_device();
    set_current_device(static_cast<DeviceIndex>(d));
    return old;
  };
  m.def("exchange_device", exchange);
  m.def("maybe_exchange_device", exchange);
  m.def("in_bad_fork", &in_bad_fork);
  m.def("has_context", [](int d) { return has_context(static_cast<DeviceIndex>(d)); });
  m.def("properties", &properties);
  m.def("attribute", &attribute);
  m.def("driver_version", [] {
    int v = 0;
    check(driver().cuDriverGetVersion(&v), "cuDriverGetVersion");
    return v;
  });
  m.def("error_text", [](int r) { return error_text(static_cast<CUresult>(r)); });
  m.def("can_access_peer", [](int a, int b) {
    int can = 0;
    check(driver().cuDeviceCanAccessPeer(&can, device_handle(a), device_handle(b)), "cuDeviceCanAccessPeer");
    return can != 0;
  });
  m.def("synchronize", [] {
    py::gil_scoped_release unlocked;
    synchronize_device(current_device());
  });
  // What code that Inductor made takes its buffers by; torch's own asks libtorch_cuda's allocator, past the dispatcher.
  m.def("empty_strided", [](at::IntArrayRef size, at::IntArrayRef stride, py::handle dtype) {
    TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "empty_strided_cuda: the third argument is no dtype");
    const auto type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
    return at::empty_strided(size, stride, at::TensorOptions(at::Device(at::kCUDA, current_device())).dtype(type));
  });
  // Before this torch takes no pointer for pinned.
  m.def("lazy_init", [] { at::globalContext().lazyInitDevice(c10::kCUDA); });
  m.def("bind_device", [](int d) { bind_device(index_or_current(d)); });

  m.def("current_stream", [](int d) {
    const DeviceIndex i = index_or_current(d);
    return stream_tuple(i, current_stream_id(i));
  });
  m.def("default_stream", [](int d) { return stream_tuple(index_or_current(d), 0); });
  m.def("raw_stream",
        [](int d, int64_t id) { return reinterpret_cast<uintptr_t>(stream_handle(index_or_current(d), id)); });
  m.def("launch_words", &launch_words);
  m.def("set_stream", [](int64_t id, int d) {
    set_current_device(index_or_current(d));
    set_current_stream_id(static_cast<DeviceIndex>(d), id);
  });
  m.def("pool_stream", [](int d, int priority) { return pool_stream_id(index_or_current(d), priority); });
  m.def("external_stream", [](uintptr_t handle, int d) {
    const DeviceIndex i = index_or_current(d);
    return stream_tuple(i, external_stream_id(i, reinterpret_cast<CUstream>(handle)));
  });
  m.def("stream_priority", [](int d, int64_t id) { return stream_priority(static_cast<DeviceIndex>(d), id); });
  m.def("stream_priority_range", [] {
    bind_device(current_device());
    int least = 0, greatest = 0;
    check(driver().cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange");
    return py::make_tuple(least, std::max(greatest, 1 - kPriorities));  // torch has as many pools, and says so
  });

  m.def("elapsed_ms", [](uintptr_t start, uintptr_t end, int d) {
    TORCH_CHECK(start != 0 && end != 0, "Both events must be recorded before calculating elapsed time.");
    bind_device(index_or_current(d));
    float ms = 0;
    const CUresult r =
        driver().cuEventElapsedTime(&ms, reinterpret_cast<CUevent>(start), reinterpret_cast<CUevent>(end));
    TORCH_CHECK(r != CUDA_ERROR_NOT_READY, "Both events must be completed before calculating elapsed time.");
    TORCH_CHECK(r != CUDA_ERROR_INVALID_HANDLE, "Both events must be created with argument 'enable_timing=True'.");
    check(r, "cuEventElapsedTime");
    return static_cast<double>(ms);
  });

  m.def("default_generator", [](int d) {
    return py::reinterpret_steal<py::object>(
        THPGenerator_initDefaultGenerator(default_generator(static_cast<DeviceIndex>(d))));
  });
  m.def("settings_number", [] { return settings_number(current_device()); });
  m.def("mix_seed", [](uint64_t seed, uint64_t offset) { return mix_seed(seed, offset); });

  m.def("memory_stats", &memory_stats);
  m.def("reset_peak_stats", [](int d) { device_allocator()->resetPeakStats(index_or_current(d)); });
  m.def("reset_accumulated_stats", [](int d) { device_allocator()->resetAccumulatedStats(index_or_current(d)); });
  m.def("memory_info", [](int d) { return device_allocator()->getMemoryInfo(index_or_current(d)); });
  m.def("memory_fraction", [](int d) { return device_allocator()->memory_fraction(index_or_current(d)); });
  m.def("set_memory_fraction",
        [](double f, int d) { device_allocator()->set_memory_fraction(index_or_current(d), f); });
  add_snapshot(m);
  m.def("host_memory_stats", &host_memory_stats);
  m.def("empty_cache", [] { device_allocator()->emptyCache({0, 0}); });
  m.def("host_empty_cache", [] { at::getHostAllocator(at::kCUDA)->empty_cache(); });
  m.def("host_reset_peak_stats", [] { at::getHostAllocator(at::kCUDA)->reset_peak_stats(); });
  m.def("host_reset_accumulated_stats", [] { at::getHostAllocator(at::kCUDA)->reset_accumulated_stats(); });
  m.def("resize_storage", [](const py::object& storage, size_t bytes) {
    TORCH_CHECK_TYPE(THPStorage_Check(storage.ptr()), "resize_() expects a storage");
    const c10::Storage& s = THPStorage_Unpack(storage.ptr());
    const DeviceScope scope(s.device().index());
    resize_storage(s.unsafeGetStorageImpl(), s.device().index(), bytes);
  });
  m.def("is_pinned", [](uintptr_t p) { return is_pinned(reinterpret_cast<const void*>(p)); });

  py::class_<Graph, std::unique_ptr<Graph, DeleteUnlocked>>(m, "Graph")
      .def(py::init<bool>())
      .def("register_generator",
           [](Graph& g, const py::object& generator) {
             TORCH_CHECK_TYPE(THPGenerator_Check(generator.ptr()), "register_generator_state() expects a Generator");
             g.register_generator(THPGenerator_Unwrap(generator.ptr()));
           })
      .def("capture_begin", torch::wrap_pybind_function_no_gil(&Graph::capture_begin))
      .def("capture_end", torch::wrap_pybind_function_no_gil(&Graph::capture_end))
      .def("instantiate", torch::wrap_pybind_function_no_gil(&Graph::instantiate))
      .def("replay", torch::wrap_pybind_function_no_gil(&Graph::replay))
      .def("reset", torch::wrap_pybind_function_no_gil(&Graph::reset))
      .def("address", [](const Graph& g) { return reinterpret_cast<uintptr_t>(&g); })
      .def("pool", &Graph::pool)
      .def("enable_debug_mode", &Graph::enable_debug_mode)
      .def("debug_dump", &Graph::debug_dump)
      .def("raw_graph", [](const Graph& g) { return reinterpret_cast<uintptr_t>(g.raw_graph()); })
      .def("raw_exec", [](const Graph& g) { return reinterpret_cast<uintptr_t>(g.raw_exec()); });
  m.def("new_pool_id", [] { return new_pool_id(true); });
  m.def("stream_is_capturing", [] { return stream_is_capturing(current_device()); });
  m.def("capturing_graph", [] {
    const DeviceIndex device = current_device();
    return reinterpret_cast<uintptr_t>(capturing_graph(device, current_stream_id(device)));
  });

  m.def("cudnn_benchmark_limit", [] { return at::globalContext().benchmarkLimitCuDNN(); });
  m.def("set_cudnn_benchmark_limit", [](int limit) { at::globalContext().setBenchmarkLimitCuDNN(limit); });
  m.def("sync_debug", [] { return static_cast<int>(g_sync_debug.load()); });
  m.def("set_sync_debug", [](int mode) {
    TORCH_CHECK(mode >= 0 && mode <= 2, "invalid value of debug_mode, expected one of 0,1,2");
    set_sync_debug(static_cast<SyncDebug>(mode));
  });
  m.def("sleep", [](int64_t cycles) {
    py::gil_scoped_release unlocked;
    sleep_on_device(current_device(), cycles);
  });
  m.def("memory_metadata", &history_metadata);
  m.def("set_memory_metadata", &set_history_metadata);
  m.def("conv_benchmark_empties_cache", &at::native::_cudnn_get_conv_benchmark_empty_cache);
  m.def("set_conv_benchmark_empties_cache", &at::native::_cudnn_set_conv_benchmark_empty_cache);
  m.def("facts", [] {
    const Facts& f = executor_facts();
    py::dict d;
    d["cudnn"] = f.cudnn, d["cudnn_runtime"] = f.cudnn_runtime, d["cudart"] = f.cudart;
    return d;
  });
  m.def("hide_gpu_from_kineto", &hide_gpu_from_kineto);
  m.def("note_known_ops", &note_known_ops);
  m.def("take_package_ops", &take_package_ops);
  m.def("op_counts", [] {
    py::dict d;
    for (const auto& [name, c] : op_counts()) d[py::str(name)] = py::make_tuple(c.launches, c.infers);
    return d;
  });
  m.def("add_process_group", &add_process_group);
  m.def("add_staged_gloo", &add_staged_gloo);
  m.def("nccl_version", &nccl_version);
}

}  // namespace devproxy::aten
