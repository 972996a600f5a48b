// SPDX-License-Identifier: Apache-2.0
// CudaSpace: communicators and their groups.
#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "devproxy/hal/cuda/space_common.h"

namespace devproxy::hal::cuda {

// In one stream NCCL runs the communicators of a group one after another, in the order in which the group names them. Ranks
// may name them in different orders; this one is the same at all of them.
CudaSpace::CommGroup::CommGroup(std::vector<CommCall> given) : calls(std::move(given)) {
  std::stable_sort(calls.begin(), calls.end(), [](const CommCall& a, const CommCall& b) {
    return static_cast<const CudaComm&>(*a.comm).config().key < static_cast<const CudaComm&>(*b.comm).config().key;
  });
  for (const CommCall& call : calls) {
    auto comm = std::static_pointer_cast<CudaComm>(call.comm);
    if (std::find(comms.begin(), comms.end(), comm) == comms.end()) comms.push_back(std::move(comm));
  }
  for (const auto& comm : comms) comm->begin();
  for (const CommCall& call : calls)
    pairs |= call.op.kind_of() >= CommKind::kAllToAll;  // and what is made of sends and receives
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
  command.group = std::make_shared<CommGroup>(std::vector<CommCall>{});
  command.group->comms.push_back(std::static_pointer_cast<CudaComm>(comm));
  command.group->comms.front()->begin();
  submit(queue, std::move(command));
}

void CudaSpace::communicate(const QueueRef& queue, Ticket ticket, std::vector<CommCall> calls) {
  Command command;
  command.action = Action::kCommunicate;
  command.ticket = ticket;
  command.group = std::make_shared<CommGroup>(std::move(calls));
  submit(queue, std::move(command));
}

// Does what can be done for it now. True: NCCL has put it into its stream, or there is nothing to put there.
bool CudaSpace::start_group(CudaQueue& queue, const Command& command) {
  CommGroup& group = *command.group;
  if (command.action == Action::kInitComm) return group.comms.front()->look(0) != CudaComm::Ready::kNotYet;
  if (!group.begun) return begin_group(queue, command);
  bool done = true;
  group.stuck = false;
  for (size_t i = 0; i < group.comms.size(); i++) {
    if (group.generations[i] == 0) continue;
    const CudaComm::Ready ready = group.comms[i]->look(group.generations[i]);
    group.stuck |= ready == CudaComm::Ready::kNever;
    done &= ready == CudaComm::Ready::kYes || ready == CudaComm::Ready::kGone;
  }
  if (!done) return false;
  for (const auto& [comm, reduction] : group.reductions)
    if (comm->use() == CudaComm::Ready::kYes) comm->drop_reduction(reduction), comm->unuse();
  return true;
}

bool CudaSpace::begin_group(CudaQueue& queue, const Command& command) {
  CommGroup& group = *command.group;
  std::vector<std::shared_ptr<CudaComm>> living;
  bool all = true;
  group.stuck = false;
  group.generations.clear();
  for (const auto& comm : group.comms) {
    const CudaComm::Ready ready = comm->use();
    group.stuck |= ready == CudaComm::Ready::kNever;
    if (ready == CudaComm::Ready::kYes) living.push_back(comm);
    group.generations.push_back(ready == CudaComm::Ready::kYes ? comm->generation() : 0);
    all &= ready == CudaComm::Ready::kYes || ready == CudaComm::Ready::kGone;
  }
  Status failed;
  if (all && !living.empty()) {
    Status prepared = prepare(queue, command);
    if (prepared.ok()) {
      failed = hand_to_nccl(group, queue.stream, living);
      group.begun = failed.ok();
      group.begun_at = Clock::now();
    } else {
      queue.made = std::move(prepared);  // issue() says so, and the space fails
    }
    group.stuck = !failed.ok();
    for (const auto& comm : living)
      if (!failed.ok()) comm->failed(failed);
  }
  for (const auto& comm : living) comm->unuse();
  if (!all || !failed.ok()) return false;
  return !group.begun || start_group(queue, command);
}

Status CudaSpace::hand_to_nccl(CommGroup& group, CUstream stream,
                               const std::vector<std::shared_ptr<CudaComm>>& living) {
  const Nccl& nccl = living.front()->nccl();
  const auto lives = [&](const CommRef& comm) {
    return std::any_of(living.begin(), living.end(), [&](const auto& one) { return one.get() == comm.get(); });
  };
  std::vector<int> reductions;  // by call
  for (const CommCall& call : group.calls) {
    reductions.push_back(0);
    if (!lives(call.comm) || call.op.reduction_of() != CommReduction::kPreMulSum) continue;
    auto& comm = static_cast<CudaComm&>(*call.comm);
    auto made = comm.make_reduction(call.op);
    if (!made.ok()) return std::move(made).status();
    reductions.back() = *made;
    group.reductions.emplace_back(&comm, *made);
  }
  int result = nccl.group_start();
  if (result != kNcclSuccess) return nccl.status(result, "ncclGroupStart");
  for (size_t i = 0; i < group.calls.size(); i++) {
    const CommCall& call = group.calls[i];
    if (!lives(call.comm)) continue;
    const int one = static_cast<CudaComm&>(*call.comm).submit(call.op, reductions[i], stream);
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
  for (const auto& known : comms_)
    if (const auto comm = known.lock()) (void)comm->over(device_.stop_wait_ms);
}

}  // namespace devproxy::hal::cuda
