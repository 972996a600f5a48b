// SPDX-License-Identifier: Apache-2.0
// CudaSpace: communicators and their groups.
#include <sys/random.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "devproxy/hal/comm_text.h"
#include "devproxy/hal/cuda/space_common.h"

namespace devproxy::hal::cuda {

// Ranks may name the communicators of a group in different orders. This one is the same at all of them.
CudaSpace::CommGroup::CommGroup(std::vector<CommCall> calls) {
  for (CommCall& call : calls) {
    const auto is_its = [&](const Entry& entry) { return entry.comm.get() == call.comm.get(); };
    auto entry = std::find_if(entries.begin(), entries.end(), is_its);
    if (entry == entries.end())
      entry = entries.insert(entry, {std::static_pointer_cast<CudaComm>(std::move(call.comm)), {}});
    entry->ops.push_back(call.op);
  }
  entries.sort([](const Entry& a, const Entry& b) { return a.comm->config().key < b.comm->config().key; });
  for (const Entry& entry : entries) entry.comm->begin();
}

CudaSpace::CommGroup::~CommGroup() {
  for (const Entry& entry : entries) entry.comm->done();
}

StatusOr<CommRef> CudaSpace::create_comm(const CommConfig& config) {
  if (!context_->is_primary())
    return Status(kNotSupported,
                  "NCCL works in the GPU's primary context, and this process is not in it: run the job with --gpus 2 "
                  "or more, or import the framework before the first CUDA call");
  if (incarnation_ == 0 && getrandom(&incarnation_, sizeof incarnation_, 0) != sizeof incarnation_)
    return Status::from_errno(kNotSupported, "the system has no random numbers");
  const bool may_come = config_.framework && device_.nccl_path.empty() && !device_.host_executor;
  const CommSeat seat{owner_.place(), device_.process, device_.number};
  auto comm = CudaComm::make({config, owner_.job_folder(), seat, incarnation_, device_.nccl_path, may_come,
                              device_.standing, device_.shared, device_.tree_order, device_.links},
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

std::vector<PendingUse::Range> CudaSpace::CommGroup::ranges(uint64_t position) const {
  std::vector<PendingUse::Range> ranges;
  for (const Entry& entry : entries) {
    const CommConfig& config = entry.comm->config();
    for (const CommOp& op : entry.ops) {
      const auto [send, recv] = comm_bytes(op, config.ranks, config.rank);
      if (send) ranges.push_back({position, op.send, send});
      if (recv) ranges.push_back({position, op.recv, recv});
      if (op.reduction_of() == CommReduction::kPreMulSum && op.scalar_on_device)
        ranges.push_back({position, op.scalar, comm_type_bytes(op.type_of())});
    }
  }
  return ranges;
}

// Does what can be done for it now. True: all of it is in its stream, or there is nothing to put there.
bool CudaSpace::start_group(CudaQueue& queue, const Command& command) {
  CommGroup& group = *command.group;
  group.stuck = false;
  if (command.action == Action::kInitComm) return group.entries.front().comm->look(0) != CudaComm::Ready::kNotYet;
  bool all = true;
  for (auto entry = group.entries.begin(); entry != group.entries.end(); ++entry) {
    if (entry->over) continue;
    if (!entry->begun && !begin_entry(group, entry, queue, command)) all = false;
    if (entry->begun && !entry->over && !end_entry(group, *entry, queue)) all = false;
    if (!queue.made.ok()) return true;  // issue() says so, and the space fails
    if (!entry->over && !entry->beside) return false;
  }
  return all;
}

// False: not now. Else it has begun, or is over.
bool CudaSpace::begin_entry(CommGroup& group, std::list<CommGroup::Entry>::iterator entry, CudaQueue& queue,
                            const Command& command) {
  using Ready = CudaComm::Ready;
  CudaComm& comm = *entry->comm;
  const Ready ready = comm.use();
  group.stuck |= ready == Ready::kNever;
  if (ready == Ready::kGone) return entry->gone = entry->over = true;
  if (ready != Ready::kYes) return false;
  Status done;
  if (!std::exchange(group.prepared, true)) done = prepare(queue, command);
  entry->shared = comm.shared();
  if (done.ok() && !group.ready && (entry->shared || entry->beside)) {
    auto mark = SharedComm::Mark::record(context_, queue.stream);
    if (mark.ok()) group.ready = *mark;
    done = std::move(mark).status();
  }
  if (!done.ok()) {
    comm.unuse();
    queue.made = std::move(done);
    return true;
  }
  entry->generation = comm.generation();
  if (entry->shared) {
    entry->beside = true;
    done = take_pairs_out(group, entry);
    if (done.ok()) entry->work = entry->shared->post(comm.config().rank, entry->ops, group.ready);
  } else if (entry->beside) {
    // In a stream of its own: in this one the pairs of the group would wait for one another, at each rank in another order.
    auto stream = comm.own_stream();
    done = stream.ok() ? group.ready->wait_in(*stream) : std::move(stream).status();
    if (done.ok()) done = hand_to_nccl(*entry, *stream);
  } else {
    done = hand_to_nccl(*entry, queue.stream);
  }
  group.stuck |= !done.ok();
  if (!done.ok()) comm.failed(done);
  comm.unuse();
  if (!done.ok()) return false;
  entry->begun = true;
  entry->begun_at = Clock::now();
  return true;
}

// Is all of it in its stream?
bool CudaSpace::end_entry(CommGroup& group, CommGroup::Entry& entry, CudaQueue& queue) {
  using Ready = CudaComm::Ready;
  CudaComm& comm = *entry.comm;
  const Ready ready = comm.look(entry.generation);
  group.stuck |= ready == Ready::kNever;
  if (ready != Ready::kYes && ready != Ready::kGone) return false;
  entry.gone = ready == Ready::kGone;
  if (entry.shared && ready == Ready::kYes) {
    auto followed = entry.shared->follow(entry.work, queue.stream);
    if (followed.ok() && !*followed) return false;
    if (!followed.ok()) queue.made = std::move(followed).status();
  } else if (entry.beside && ready == Ready::kYes) {
    auto mark = SharedComm::Mark::record(context_, *comm.own_stream());
    if (Status s = mark.ok() ? (*mark)->wait_in(queue.stream) : std::move(mark).status(); !s.ok())
      queue.made = std::move(s);
  }
  entry.work.clear();
  entry.shared.reset();
  if (!entry.reductions.empty() && comm.use() == Ready::kYes) {
    for (const int reduction : entry.reductions) comm.drop_reduction(reduction);
    comm.unuse();
  }
  return entry.over = true;
}

// Sends and receives between places go by communicators of their own, which come behind this entry.
Status CudaSpace::take_pairs_out(CommGroup& group, std::list<CommGroup::Entry>::iterator entry) {
  std::map<uint32_t, std::vector<CommOp>> others;  // by peer
  std::erase_if(entry->ops, [&](const CommOp& op) {
    const auto peer = static_cast<uint32_t>(op.peer);
    if (!is_pair(op) || entry->shared->places().is_local(peer)) return false;
    others[peer].push_back(op);
    return true;
  });
  for (auto& [peer, ops] : others) {
    auto pair = entry->comm->pair(peer);
    if (!pair.ok()) return std::move(pair).status();
    for (CommOp& op : ops) op.peer = peer > entry->comm->config().rank ? 1 : 0;
    group.entries.insert(std::next(entry), {*pair, std::move(ops), /*beside=*/true});
    (*pair)->begin();
  }
  return {};
}

Status CudaSpace::hand_to_nccl(CommGroup::Entry& entry, CUstream stream) {
  CudaComm& comm = *entry.comm;
  const Nccl& nccl = comm.nccl();
  std::vector<std::pair<const CommOp*, int>> ops;
  entry.pairs = false;
  entry.reductions.clear();
  for (const CommOp& op : entry.ops) {
    ops.emplace_back(&op, 0);
    entry.pairs |= op.kind_of() >= CommKind::kAllToAll;  // and what is made of sends and receives
    if (op.reduction_of() != CommReduction::kPreMulSum) continue;
    auto made = comm.make_reduction(op);
    if (!made.ok()) return std::move(made).status();
    entry.reductions.push_back(ops.back().second = *made);
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
      comms_run_ |= !comm->over(static_cast<uint32_t>(std::max<int64_t>(left, 0)));
    }
}

}  // namespace devproxy::hal::cuda
