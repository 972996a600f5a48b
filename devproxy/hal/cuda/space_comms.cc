// SPDX-License-Identifier: Apache-2.0
// CudaSpace: communicators and their groups.
#include <sys/random.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "devproxy/hal/cuda/space_common.h"

namespace devproxy::hal::cuda {

// Ranks may name the communicators of a group in different orders. This one is the same at all of them.
CudaSpace::CommGroup::CommGroup(std::vector<CommCall> given) : calls(std::move(given)) {
  std::stable_sort(calls.begin(), calls.end(), [](const CommCall& a, const CommCall& b) {
    return static_cast<const CudaComm&>(*a.comm).config().key < static_cast<const CudaComm&>(*b.comm).config().key;
  });
  for (const CommCall& call : calls) {
    auto comm = std::static_pointer_cast<CudaComm>(call.comm);
    if (std::find(comms.begin(), comms.end(), comm) == comms.end()) comms.push_back(std::move(comm));
  }
  for (const auto& comm : comms) comm->begin();
}

CudaSpace::CommGroup::~CommGroup() {
  for (const auto& comm : comms) comm->done();
}

StatusOr<CommRef> CudaSpace::create_comm(const CommConfig& config) {
  if (!context_->is_primary())
    return Status(kNotSupported,
                  "NCCL works in the GPU's primary context, and this process is not in it: run the job with --gpus 2 "
                  "or more, or import the framework before the first CUDA call");
  if (incarnation_ == 0 && getrandom(&incarnation_, sizeof incarnation_, 0) != sizeof incarnation_)
    return Status::from_errno(kNotSupported, "the system has no random numbers");
  const bool may_come = config_.framework && device_.nccl_path.empty() && !device_.host_executor;
  auto comm = CudaComm::make(
      {config, owner_.job_folder(), owner_.place(), incarnation_, device_.nccl_path, may_come, device_.goes_on},
      context_, [this] { kick(); });
  std::lock_guard lock(comms_mu_);
  std::erase_if(comms_, [](const auto& known) { return known.expired(); });
  comms_.push_back(comm);
  return CommRef(std::move(comm));
}

void CudaSpace::init_comm(const QueueRef& queue, Ticket ticket, const CommRef& comm) {
  Command command;
  command.action = Action::kInitComm;
  command.ticket = ticket;
  command.group = std::make_shared<CommGroup>(std::vector<CommCall>{{comm, {}}});
  submit(queue, std::move(command));
}

void CudaSpace::communicate(const QueueRef& queue, Ticket ticket, std::vector<CommCall> calls) {
  Command command;
  command.action = Action::kCommunicate;
  command.ticket = ticket;
  command.group = std::make_shared<CommGroup>(std::move(calls));
  submit(queue, std::move(command));
}

// Does what can be done for it now. True: NCCL has put all of it into its stream, or there is nothing to put there.
bool CudaSpace::start_group(CudaQueue& queue, const Command& command) {
  using Ready = CudaComm::Ready;
  CommGroup& group = *command.group;
  if (command.action == Action::kInitComm) return group.comms.front()->look(0) != Ready::kNotYet;
  for (; group.at < group.comms.size(); group.at++) {
    CudaComm& comm = *group.comms[group.at];
    if (!group.begun) {
      const Ready ready = comm.use();
      group.stuck = ready == Ready::kNever;
      if (ready == Ready::kGone) continue;
      if (ready != Ready::kYes) return false;
      if (Status prepared = prepare(queue, command); !prepared.ok()) {
        comm.unuse();
        queue.made = std::move(prepared);  // issue() says so, and the space fails
        return true;
      }
      group.generation = comm.generation();
      const Status handed = hand_to_nccl(group, comm, queue.stream);
      group.stuck = !handed.ok();
      if (!handed.ok()) comm.failed(handed);
      comm.unuse();
      if (!handed.ok()) return false;
      group.begun = true;
      group.begun_at = Clock::now();
    }
    const Ready ready = comm.look(group.generation);
    group.stuck = ready == Ready::kNever;
    if (ready != Ready::kYes && ready != Ready::kGone) return false;
    if (!group.reductions.empty() && comm.use() == Ready::kYes) {
      for (const int reduction : group.reductions) comm.drop_reduction(reduction);
      comm.unuse();
    }
    group.begun = false;
  }
  return true;
}

Status CudaSpace::hand_to_nccl(CommGroup& group, CudaComm& comm, CUstream stream) {
  const Nccl& nccl = comm.nccl();
  std::vector<std::pair<const CommOp*, int>> ops;
  group.pairs = false;
  group.reductions.clear();
  for (const CommCall& call : group.calls) {
    if (call.comm.get() != &comm) continue;
    ops.emplace_back(&call.op, 0);
    group.pairs |= call.op.kind_of() >= CommKind::kAllToAll;  // and what is made of sends and receives
    if (call.op.reduction_of() != CommReduction::kPreMulSum) continue;
    auto made = comm.make_reduction(call.op);
    if (!made.ok()) return std::move(made).status();
    group.reductions.push_back(ops.back().second = *made);
  }
  int result = nccl.group_start();
  if (result != kNcclSuccess) return nccl.status(result, "ncclGroupStart");
  for (const auto& [op, reduction] : ops) {
    const int one = comm.submit(*op, reduction, stream);
    if (one != kNcclSuccess && one != kNcclInProgress && result == kNcclSuccess) result = one;
  }
  const Status said = nccl.status(result, "submitting to NCCL");
  result = nccl.group_end();  // in any case: a group that was begun must end
  return said.ok() ? nccl.status(result, "ncclGroupEnd") : said;
}

// What NCCL has of this space ends with its process: a collective whose members are gone never ends.
void CudaSpace::leave_comms() {
  std::lock_guard lock(comms_mu_);
  for (const auto& known : comms_)
    if (const auto comm = known.lock()) comm->died();
}

void CudaSpace::end_comms() {
  leave_comms();
  std::lock_guard lock(comms_mu_);
  for (const auto& known : comms_)
    if (const auto comm = known.lock()) comm->forget();
  const auto until = Clock::now() + std::chrono::milliseconds(device_.stop_wait_ms);
  for (const auto& known : comms_)
    if (const auto comm = known.lock()) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
      (void)comm->over(static_cast<uint32_t>(std::max<int64_t>(left, 0)));
    }
}

}  // namespace devproxy::hal::cuda
