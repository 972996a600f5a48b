// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "devproxy/torch/block.h"
#include "devproxy/torch/client/encoder.h"
#include "devproxy/torch/client/op_meta.h"
#include "devproxy/torch/client/op_plan.h"

namespace devproxy::aten {

// Asks the device for the results' metadata. Waits. Throws what the op throws. In a capture the question goes past it,
// by a stream of its own, and looks at no contents: what is captured before this op has not run.
std::shared_ptr<const Meta> infer(OpPlan& plan, CUfunction function, Encoder& e, bool captured);

// What the op throws natively.
[[noreturn]] void throw_from_device(ExceptionKind kind, const std::string& text);

}  // namespace devproxy::aten
