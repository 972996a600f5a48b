// SPDX-License-Identifier: Apache-2.0
// torch.cuda.memory._snapshot() and its history, torch.cuda.MemPool, raw allocations: for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace devproxy::aten {

void add_snapshot(pybind11::module_& m);

}  // namespace devproxy::aten
