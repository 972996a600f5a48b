// SPDX-License-Identifier: Apache-2.0
// ProcessGroupNCCL for Python, under the names of PyTorch's own NCCL build (torch/_C/_distributed_c10d.pyi).
#include "devproxy/torch/client/process_group_names.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "devproxy/torch/client/c10d/process_group.h"

namespace devproxy::aten {
namespace {

using Options = ProcessGroupNCCL::Options;
using Unlocked = py::call_guard<py::gil_scoped_release>;

std::tuple<int, int, int> version_parts() {
  const int v = nccl_version();
  return {v / 10000, v % 10000 / 100, v % 100};
}

void bind_config(py::handle group) {
  py::class_<nccl::ncclConfig_t>(group, "NCCLConfig")
      .def(py::init<>())
      .def_readwrite("blocking", &nccl::ncclConfig_t::blocking)
      .def_readwrite("cga_cluster_size", &nccl::ncclConfig_t::cgaClusterSize)
      .def_readwrite("min_ctas", &nccl::ncclConfig_t::minCTAs)
      .def_readwrite("max_ctas", &nccl::ncclConfig_t::maxCTAs)
      .def_readwrite("split_share", &nccl::ncclConfig_t::splitShare)
      .def_readwrite("traffic_class", &nccl::ncclConfig_t::trafficClass)
      .def_readwrite("collnet_enable", &nccl::ncclConfig_t::collnetEnable)
      .def_readwrite("cta_policy", &nccl::ncclConfig_t::CTAPolicy)
      .def_readwrite("shrink_share", &nccl::ncclConfig_t::shrinkShare)
      .def_readwrite("nvls_ctas", &nccl::ncclConfig_t::nvlsCTAs)
      .def("unsafe_get_ptr", [](const nccl::ncclConfig_t& c) { return reinterpret_cast<uintptr_t>(&c); })
      .def("__copy__", [](const nccl::ncclConfig_t& c) { return c; })
      .def("__deepcopy__", [](const nccl::ncclConfig_t& c, const py::dict&) { return c; });
}

void bind_options(py::handle group) {
  py::class_<Options, c10d::Backend::Options, intrusive_ptr<Options>>(group, "Options")
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream)
      .def_readwrite("config", &Options::config)
      .def_readwrite("split_from", &Options::split_from)
      .def_readwrite("split_color", &Options::split_color)
      .def_readwrite("group_name", &Options::group_name)
      .def_readwrite("group_desc", &Options::group_desc)
      .def_readwrite("global_ranks_in_group", &Options::global_ranks_in_group)
      .def("__copy__", [](const Options& o) { return c10::make_intrusive<Options>(o); })
      .def("__deepcopy__", [](const Options& o, const py::dict&) { return c10::make_intrusive<Options>(o); });
}

void refuse(py::object& group, const char* name, const char* what) {
  group.attr(name) = py::cpp_function(
      [what](const py::args&, const py::kwargs&) -> py::object {
        TORCH_CHECK(false, what, " is not supported behind devproxy");
      },
      py::name(name), py::is_method(group));
}

}  // namespace

int nccl_version() {
  int version = 0;
  nccl::check(nccl::api().ncclGetVersion(&version), nullptr, "ncclGetVersion");
  return version;
}

void add_process_group(py::module_ c10d) {
  py::class_<ProcessGroupNCCL, c10d::Backend, intrusive_ptr<ProcessGroupNCCL>> group(c10d, "ProcessGroupNCCL");
  bind_config(group);
  bind_options(group);
  group
      .def(py::init([](const intrusive_ptr<c10d::Store>& store, int rank, int size, intrusive_ptr<Options> options) {
             const py::gil_scoped_release unlocked;
             return c10::make_intrusive<ProcessGroupNCCL>(store, rank, size, std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def(py::init([](const intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout) {
             auto options = c10::make_intrusive<Options>();
             options->timeout = timeout;
             const py::gil_scoped_release unlocked;
             return c10::make_intrusive<ProcessGroupNCCL>(store, rank, size, std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout") = kDefaultNcclTimeout)
      .def_property_readonly("options", &ProcessGroupNCCL::options)
      .def_property_readonly("uid", &ProcessGroupNCCL::uid)
      .def_property_readonly("bound_device_id", &ProcessGroupNCCL::getBoundDeviceId)
      .def("perform_nocolor_split", &ProcessGroupNCCL::split_off_nothing, Unlocked())
      .def("comm_split_count", &ProcessGroupNCCL::comm_split_count)
      .def("_set_default_timeout", &ProcessGroupNCCL::setTimeout, Unlocked())
      .def("_add_ephemeral_timeout", &ProcessGroupNCCL::add_ephemeral_timeout, Unlocked())
      .def("_is_initialized", &ProcessGroupNCCL::is_initialized, Unlocked())
      .def("abort", &ProcessGroupNCCL::abort, Unlocked())
      .def("shrink", &ProcessGroupNCCL::shrink, py::arg("ranks_to_exclude"), py::arg("shrink_flags") = 0,
           py::arg("opts_override") = nullptr, Unlocked())
      .def("get_error", &ProcessGroupNCCL::getError, Unlocked())
      // Every buffer is reached directly anyway.
      .def("register_mem_pool", [](ProcessGroupNCCL&, const py::args&, const py::kwargs&) {})
      .def("deregister_mem_pool", [](ProcessGroupNCCL&, const py::args&, const py::kwargs&) {})
      .def("_group_start",
           [](ProcessGroupNCCL&) { nccl::check(nccl::api().ncclGroupStart(), nullptr, "ncclGroupStart"); })
      .def(
          "_group_end", [](ProcessGroupNCCL&) { nccl::check(nccl::api().ncclGroupEnd(), nullptr, "ncclGroupEnd"); },
          Unlocked())
      .def_static("get_build_nccl_version", &version_parts)
      .def_static("get_runtime_nccl_version", &version_parts);
  py::object type = group;
  refuse(type, "_start_time_estimate", "An estimate of NCCL's times");
  refuse(type, "_end_time_estimate", "An estimate of NCCL's times");
  for (const auto& [name, value] : {std::pair("DEFAULT", 0), std::pair("EFFICIENCY", 1), std::pair("ZERO", 2)})
    group.attr((std::string("NCCL_CTA_POLICY_") + name).c_str()) = value;
  c10d.attr("_DEFAULT_PG_NCCL_TIMEOUT") = py::cast(kDefaultNcclTimeout);
}

}  // namespace devproxy::aten
