// SPDX-License-Identifier: Apache-2.0
// The Python names of the process group (client/c10d), which bind.cc offers to pylib/devproxy_torch/c10d.py.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace devproxy::aten {

// Puts ProcessGroupNCCL, its Options and its default timeout into torch._C._distributed_c10d.
void add_process_group(py::module_ c10d);
// Puts _StagedGloo there: gloo for the tensors of a GPU, around gloo's own group.
void add_staged_gloo(py::module_ c10d);
// As ncclGetVersion says: 22907 is 2.29.7.
int nccl_version();

}  // namespace devproxy::aten
