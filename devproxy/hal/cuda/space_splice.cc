// SPDX-License-Identifier: Apache-2.0
// CudaSpace: what the splicer is told, and what it does with this space's pages.
#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "devproxy/csrc/base/log.h"
#include "devproxy/hal/comm_text.h"
#include "devproxy/hal/cuda/cuda_pages.h"
#include "devproxy/hal/cuda/space_common.h"

namespace devproxy::hal::cuda {

using splice::Splicer;

// Under the splicer's page lock. Nothing may touch a page while that is mapped anew: so the commands of the spaces are kept back
// (mu_), and the collectives of their communicators (SharedComm's lock), and all that the GPU has of them has ended. While it
// has not, no lock is kept but the page lock. What it has ends without a dispatch thread that waits for that lock: no host
// function of a client is under way when a command of its space is inside of the splicer (may_issue(), behind_held()).
class CudaSpace::Rank final : public splice::RankMemory {
 public:
  Rank(CudaSpace& space, CudaPages& pages) : space_(space), pages_(pages), base_(space.config_.device_base) {}

  Status give(uint64_t begin, uint64_t end, uint64_t) override {
    return move({&space_}, [&](CUstream stream) { return space_.memory_->split(base_ + begin, end - begin, stream); });
  }
  Status show(uint64_t begin, uint64_t end, uint64_t, splice::RankMemory& from, uint64_t from_begin) override {
    CudaSpace& other = static_cast<Rank&>(from).space_;
    return move({&space_, &other}, [&](CUstream stream) {
      return space_.memory_->alias(base_ + begin, end - begin, *other.memory_, other.config_.device_base + from_begin,
                                   stream, stream);
    });
  }
  Status own(uint64_t begin, uint64_t end, bool) override {
    return move({&space_},
                [&](CUstream stream) { return space_.memory_->unalias(base_ + begin, end - begin, stream); });
  }
  void protect(uint64_t, uint64_t, bool) override {}

 private:
  template <class F>
  Status move(std::initializer_list<CudaSpace*> spaces, F f) {
    auto stream = pages_.stream();
    if (!stream.ok()) return std::move(stream).status();
    for (;; std::this_thread::sleep_for(std::chrono::microseconds(20))) {
      std::set<std::shared_ptr<SharedComm>> comms;  // outlive their locks
      std::vector<std::unique_lock<std::mutex>> locks;
      for (CudaSpace* space : spaces) {
        if (space->stopping_.load(std::memory_order_acquire)) return {kNotSupported, "the process of a rank ends"};
        locks.emplace_back(space->mu_);
      }
      for (CudaSpace* space : spaces) space->add_comms(&comms);
      bool still = true;
      for (const auto& comm : comms) {
        locks.push_back(comm->hold());
        still = still && comm->stands();
      }
      for (CudaSpace* space : spaces) {
        auto stands = space->stands();
        if (!stands.ok()) return std::move(stands).status();
        still = still && *stands;
      }
      if (still) return f(*stream);
    }
  }

  CudaSpace& space_;
  CudaPages& pages_;
  const uint64_t base_;
};

void CudaSpace::join_splicing() {
  if (!device_.sharing || !context_->is_primary()) return;
  const auto splicer = std::dynamic_pointer_cast<Splicer>(device_.sharing->splicing);
  if (!splicer) return;
  auto& pages = static_cast<CudaPages&>(splicer->physical());
  if (pages.traits.page != memory_->granularity()) {
    DP_LOG(kWarn, kDevice, 0, "nothing is spliced: this GPU's pages have %lu bytes",
           static_cast<unsigned long>(memory_->granularity()));
    return;
  }
  member_ = splicer->join(config_.device_base, config_.device_bytes, std::make_unique<Rank>(*this, pages));
  if (!member_) return;
  splicer_ = splicer;
  const auto read = [this](uint64_t addr, size_t bytes, const PieceSink& sink) {
    return read_pieces(addr, bytes, sink);
  };
  pages.join(config_.device_base, {config_.device_bytes, read, [this] { return stands_still(); }}, context_);
}

void CudaSpace::leave_splicing() {
  if (!splicer_) return;
  splicer_->leave(*member_);
  static_cast<CudaPages&>(splicer_->physical()).leave(config_.device_base);
  splicer_.reset();
}

// Under mu_. Has the GPU nothing of any queue?
StatusOr<bool> CudaSpace::stands() const {
  const Driver& cu = context_->enter();
  const auto query = [&](const CudaQueue& queue) -> StatusOr<bool> {
    if (!queue.stream) return true;
    const CUresult r = cu.cuStreamQuery(queue.stream);
    if (r == CUDA_ERROR_NOT_READY) return false;
    if (Status s = cu.status(r, cu.cuStreamQuery, "waiting for a rank's work"); !s.ok()) return s;
    return true;
  };
  for (const auto& [index, queue] : queues_)
    if (auto one = query(*queue); !one.ok() || !*one) return one;
  for (const CudaQueueRef& queue : leaving_)
    if (auto one = query(*queue); !one.ok() || !*one) return one;
  return true;
}

bool CudaSpace::stands_still() {
  std::unique_lock lock(mu_, std::try_to_lock);
  if (!lock) return false;
  auto all = stands();
  return !all.ok() || *all;
}

// Under mu_.
void CudaSpace::add_comms(std::set<std::shared_ptr<SharedComm>>* to) {
  std::lock_guard lock(comms_mu_);
  for (const auto& known : comms_) {
    const auto comm = known.lock();
    if (!comm || comm->use() != CudaComm::Ready::kYes) continue;
    if (comm->shared()) to->insert(comm->shared());
    comm->unuse();
  }
}

Status CudaSpace::commit(uint64_t addr, uint64_t bytes, bool stable) {
  Status s = memory_->commit(addr, bytes, stable && splicer_);
  if (s.ok() && splicer_) splicer_->committed(*member_, addr, bytes, submitted_, stable);
  return s;
}

void CudaSpace::release(uint64_t addr, uint64_t bytes) {
  if (splicer_) splicer_->released(*member_, addr);
  memory_->release(addr, bytes);
  if (idle()) memory_->tidy();
}

Status CudaSpace::loaded(uint64_t addr, uint64_t bytes) {
  return splicer_ && memory_->owns(addr, bytes) ? splicer_->loaded(*member_, addr, bytes) : Status();
}

void CudaSpace::all_loaded() {
  if (splicer_) splicer_->all_loaded(*member_);
}

// Must the splicer be asked before it is the driver's? Executors' launches go another way, and so do groups.
bool CudaSpace::concerns_splicer(const Command& command) const {
  if (!splicer_ || !Splicer::concerned(*member_)) return false;
  switch (command.action) {
    case Action::kCopy:
    case Action::kStagedCopy:
    case Action::kCellCopy: return command.copy.dst_device;
    case Action::kArrayCopy:
    case Action::kStagedArrayCopy: return !command.array_copy->dst.array && command.array_copy->dst.device;
    case Action::kMemset: return true;
    case Action::kLaunch: return command.function != nullptr;
    default: return false;
  }
}

StatusOr<bool> CudaSpace::tell_splicer(const Command& command, Pending& pending, std::unique_lock<std::mutex>& lock) {
  return beside(pending, lock, [&] {
    switch (command.action) {
      case Action::kMemset: return splicer_->before(command.memset);
      case Action::kLaunch: return splicer_->before_anything(*member_);  // nobody knows what it does
      case Action::kArrayCopy:
      case Action::kStagedArrayCopy: return splicer_->before(*command.array_copy);
      default: return splicer_->before(command.copy);
    }
  });
}

Status CudaSpace::spliced_launch(const Command& command, const std::function<Status()>& run, CUstream stream) {
  struct Here final : CudaPages::Stream {
    const std::function<Status()>& how;
    Here(std::shared_ptr<Context> context, CUstream stream, const std::function<Status()>& how)
        : Stream(std::move(context), stream), how(how) {}
    void begin() override {}
    Status run() override {
      driver();  // another rank's thread may call it
      return how();
    }
    void end() override {}
    void yield() override {}
  } here(context_, stream, run);
  thread_local splice::SpliceLaunch launch;
  launch.name = command.executor->name;
  launch.params = command.params.empty() ? command.launch.params : command.params.data();
  launch.params_bytes = command.launch.params_bytes;
  launch.position = command.ticket.position;
  const int kind = command.executor->module->footprint(command.executor->name, launch.params, launch.params_bytes,
                                                       &launch.accesses, &launch.digest);
  return splicer_->launch(*member_, launch, kind, here);
}

// -- groups of collectives

namespace {

bool is_equal_everywhere(const CommOp& op) {
  const CommKind kind = op.kind_of();
  return kind == CommKind::kAllReduce || kind == CommKind::kBroadcast || kind == CommKind::kAllGather;
}

}  // namespace

// The memory that a group will write is the rank's own from here on. Nothing before the group in its queue is held any more, and
// a launch that writes there comes behind the group: so nobody shares that memory again before the group is over.
// False: the space has stopped or failed meanwhile.
// The command of the group may be gone behind the call, where that is false.
bool CudaSpace::clear_group(std::shared_ptr<CommGroup> group, bool on_watcher, std::unique_lock<std::mutex>& lock) {
  group->cleared = true;
  issuing_held_ |= on_watcher;
  executing_++;
  lock.unlock();
  Status s;
  for (const auto& entry : group->entries) {
    const CommConfig& config = entry.comm->config();
    for (const CommOp& op : entry.ops)
      if (s.ok()) s = splicer_->before_sharing(*member_, op.recv, comm_bytes(op, config.ranks, config.rank).recv);
  }
  lock.lock();
  executing_--;
  if (on_watcher) issuing_held_ = false;
  if (!s.ok()) fault(s, lock);
  return !faulted_.load(std::memory_order_relaxed) && !stopping_.load(std::memory_order_relaxed);
}

// The group is in its stream.
StatusOr<bool> CudaSpace::note_received(const CommGroup& group, Pending& pending, std::unique_lock<std::mutex>& lock) {
  struct Result {
    uint64_t addr, bytes;
    std::array<uint64_t, 3> operation;
  };
  std::vector<Result> results;
  for (const auto& entry : group.entries)
    for (const CommOp& op : entry.ops) {
      if (is_pair(op)) continue;
      const uint64_t number = entry.comm->collectives++;
      if (entry.gone) continue;  // it may have been done at others
      const CommConfig& config = entry.comm->config();
      if (is_equal_everywhere(op))
        results.push_back(
            {op.recv, comm_bytes(op, config.ranks, config.rank).recv, {config.key.low, config.key.high, number}});
    }
  if (results.empty()) return true;
  return beside(pending, lock, [&] {
    for (const Result& one : results) splicer_->received(*member_, one.addr, one.bytes, one.operation);
    return Status();
  });
}

}  // namespace devproxy::hal::cuda
