// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>

#include "devproxy/torch/client/generator.h"
#include "devproxy/torch/client/op_meta.h"
#include "devproxy/torch/client/op_plan.h"
#include "devproxy/torch/client/worker.h"

namespace devproxy::aten {

using NewTensors = c10::SmallVector<at::Tensor, 4>;

// An op that is on its way: what its new results are, with memory that the device will write.
struct Sent {
  std::shared_ptr<const Meta> meta;
  NewTensors outputs;
};

// Sends the op. args: one value for each of plan.args. random: the state that its generator has, where it is given.
void send(Worker& worker, OpPlan& plan, const c10::IValue* args, std::optional<RandomState> random, Sent* sent);

}  // namespace devproxy::aten
