// SPDX-License-Identifier: Apache-2.0
// How operations get from their caller to a stream: alone, or several as one batch.
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include "devproxy/torch/client/allocator.h"
#include "devproxy/torch/client/c10d/process_group.h"
#include "devproxy/torch/client/device.h"
#include "devproxy/torch/client/graph.h"

namespace devproxy::aten {
namespace {

const Tensor& any_tensor(const Op& op) { return op.inputs.empty() ? op.outputs.front() : op.inputs.front(); }

int64_t elements(const std::vector<Op>& ops, std::vector<Tensor> Op::* which) {
  int64_t n = 0;
  for (const Op& op : ops)
    for (const Tensor& t : op.*which) n += t.numel();
  return n;
}

bool is_point_to_point(const Op& op) { return op.type == c10d::OpType::SEND || op.type == c10d::OpType::RECV; }

// A batch's operations are of one device and one kind of stream.
void check_alike(const std::vector<Op>& ops) {
  for (const Op& op : ops) {
    TORCH_CHECK_VALUE(any_tensor(op).device() == any_tensor(ops.front()).device(),
                      "Operations of one coalescing manager must be on one device, but there are ",
                      any_tensor(ops.front()).device(), " and ", any_tensor(op).device());
    TORCH_CHECK_VALUE(op.async == ops.front().async,
                      "Operations of one coalescing manager must all be asynchronous, or none");
  }
}

}  // namespace

void ProcessGroupNCCL::startCoalescing() {
  std::lock_guard lock(mu_);
  TORCH_CHECK(!batch_.has_value(), "Process group ", name(), ": a coalescing manager is open already");
  batch_.emplace();
  batch_->thread = std::this_thread::get_id();
  batch_->work = c10::make_intrusive<NcclWork>(rank_, c10d::OpType::COALESCED, "nccl:coalesced", std::vector<Tensor>{});
}

intrusive_ptr<c10d::Work> ProcessGroupNCCL::endCoalescing() {
  std::unique_lock lock(mu_);
  TORCH_CHECK(batch_.has_value(), "Process group ", name(), ": no coalescing manager is open");
  Batch batch = std::move(*batch_);
  batch_.reset();
  lock.unlock();
  if (batch.ops.empty()) return nullptr;
  check_alike(batch.ops);
  return launch(std::move(batch.ops), std::move(batch.work), true);
}

intrusive_ptr<c10d::Work> ProcessGroupNCCL::enqueue(Op op) {
  {
    std::lock_guard lock(mu_);
    if (batch_.has_value() && batch_->thread == std::this_thread::get_id()) {
      batch_->ops.push_back(std::move(op));
      return batch_->work;
    }
  }
  auto work = c10::make_intrusive<NcclWork>(rank_, op.type, op.title, op.inputs);
  std::vector<Op> ops;
  ops.push_back(std::move(op));
  return launch(std::move(ops), std::move(work), false);
}

intrusive_ptr<c10d::Work> ProcessGroupNCCL::launch(std::vector<Op> ops, intrusive_ptr<NcclWork> work, bool batch) {
  const c10::DeviceIndex device = any_tensor(ops.front()).device().index();
  const Op& first = ops.front();
  const DeviceScope scope(device);
  bind_device(device);

  std::unique_lock lock(mu_);
  TORCH_CHECK_WITH(DistBackendError, !ended_, "Process group ", name(), " was shut down or aborted; make a new one");
  // A send or receive outside a batch concerns two ranks, so it has a communicator of those two, unless the group was
  // connected eagerly: then the device's communicator is there already, and all ranks know it.
  const bool pair = is_point_to_point(first) && !batch && !bound_device_id_.has_value();
  const Lane lane = pair ? peer_lane(device, first.peer) : device_lane(device);
  const auto current = torch_stream(device, current_stream_id(device));
  const c10::Stream stream = first.async ? lane.stream : current;
  auto flight = make_flight(ops, lane, stream, batch);
  lock.unlock();

  flight->captured = stream_is_capturing(device);
  if (stream != current) {
    c10::Event ready(c10::kCUDA);
    ready.record(current);
    ready.block(stream);
  }
  if (timed_) flight->begin.record(stream);
  {
    const c10::StreamGuard on(stream);
    const at::NoGradGuard no_grad;
    for (const Op& op : ops)
      if (op.before) op.before();
    call_nccl(ops, {lane.comm->handle(), handle_of(stream), pair ? (rank_ < first.peer ? 1 : 0) : -1}, *lane.comm);
    for (const Op& op : ops)
      if (op.after) op.after();
  }
  flight->end.record(stream);

  if (stream != current) keep_memory(*flight, ops);
  if (!flight->captured) watchdog_->watch(flight);
  std::vector<Tensor> outputs;
  for (const Op& op : ops) outputs.insert(outputs.end(), op.outputs.begin(), op.outputs.end());
  work->start(std::move(flight), std::move(outputs), first.barrier, blocking_wait_);
  return work;
}

void ProcessGroupNCCL::call_nccl(std::vector<Op>& ops, const Op::Target& target, Comm& comm) {
  const auto timeout = options_->timeout;
  auto call = [&](const Op& op) {
    Op::Target own = target;
    if (own.peer < 0) own.peer = op.peer;
    op.call(own);
  };
  if (ops.size() == 1 && !ops.front().grouped) {
    call(ops.front());
    if (config().blocking == 0) comm.finish(comm.state(), ops.front().title, timeout);
    return;
  }
  nccl::Group group;
  for (const Op& op : ops) call(op);
  comm.finish(group.end(), "ncclGroupEnd", timeout);
}

// Precondition: mu_ is held.
std::shared_ptr<Flight> ProcessGroupNCCL::make_flight(const std::vector<Op>& ops, const Lane& lane, c10::Stream stream,
                                                      bool batch) {
  auto flight = std::make_shared<Flight>(stream, lane.comm, timed_);
  const Op& first = ops.front();
  flight->type = batch ? c10d::OpType::COALESCED : first.type;
  flight->seq = is_point_to_point(first) ? ++sends_ : ++collectives_;
  flight->rank = rank_;
  flight->size = size_;
  flight->elements_in = elements(ops, &Op::inputs);
  flight->elements_out = elements(ops, &Op::outputs);
  flight->group = options_->group_name;
  flight->timeout = timeout_of(ops);
  return flight;
}

// Precondition: mu_ is held.
std::chrono::milliseconds ProcessGroupNCCL::timeout_of(const std::vector<Op>& ops) {
  std::chrono::milliseconds longest{0};
  for (const Op& op : ops)
    longest = std::max(longest, op.timeout == c10d::kUnsetTimeout ? options_->timeout : op.timeout);
  return longest + std::exchange(ephemeral_timeout_, std::chrono::milliseconds(0));
}

// The caller may free its tensors at once, while the group's own stream still uses them. The work keeps their memory
// until the caller's stream waits for it. Nobody waits with the temporaries' own stream, so the allocator is told.
void ProcessGroupNCCL::keep_memory(Flight& flight, const std::vector<Op>& ops) {
  std::vector<c10::Storage> memory;
  for (const Op& op : ops) {
    for (const auto* tensors : {&op.inputs, &op.outputs})
      for (const Tensor& t : *tensors) memory.push_back(t.storage());
    for (const Tensor& t : op.temporaries) device_allocator()->recordStream(t.storage().data_ptr(), flight.stream);
  }
  flight.keep(std::move(memory));
}

}  // namespace devproxy::aten
