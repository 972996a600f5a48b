// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/shared_comm.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "devproxy/hal/comm_text.h"

namespace devproxy::hal::cuda {

namespace {

// Memory of a communicator whose members are in several places: scalars by rank, then contributions of other places.
constexpr uint64_t kScratchBytes = 16ull << 20, kScalarBytes = 4096, kScalarStride = 16;
static_assert(kMostSources * kScalarStride <= kScalarBytes);

constexpr size_t kMarkEvery = 32, kMostUnderWay = 256;  // of the driver's operations in a communicator's stream

uint64_t bytes_of(const CommOp& op) { return op.count * comm_type_bytes(op.type_of()); }

}  // namespace

Places Places::make(const std::vector<uint64_t>& processes, uint64_t own) {
  Places places;
  std::map<uint64_t, uint32_t> known;
  for (uint32_t rank = 0; rank < processes.size(); rank++) {
    const auto place = known.try_emplace(processes[rank], static_cast<uint32_t>(places.members.size())).first->second;
    if (place == places.members.size()) places.members.emplace_back();
    places.members[place].push_back(rank);
    places.of.push_back(place);
    if (processes[rank] == own) places.own = place;
  }
  return places;
}

// -- marks ----------------------------------------------------------------------------------------------------------

StatusOr<std::shared_ptr<SharedComm::Mark>> SharedComm::Mark::record(const std::shared_ptr<Context>& context,
                                                                     CUstream stream) {
  const Driver& cu = context->enter();
  const char* const doing = "ordering an operation of ranks that share a GPU";
  CUevent event = nullptr;
  if (Status s = cu.status(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), cu.cuEventCreate, doing); !s.ok())
    return s;
  auto mark = std::make_shared<Mark>(context, event);
  if (Status s = cu.status(cu.cuEventRecord(event, stream), cu.cuEventRecord, doing); !s.ok()) return s;
  return mark;
}

Status SharedComm::Mark::wait_in(CUstream stream) const {
  const Driver& cu = context_->enter();
  return cu.status(cu.cuStreamWaitEvent(stream, event_, 0), cu.cuStreamWaitEvent,
                   "ordering an operation of ranks that share a GPU");
}

// -- members --------------------------------------------------------------------------------------------------------

std::shared_ptr<SharedComm> SharedComm::of(const CommKey& key, uint64_t generation, const Places& places,
                                           const std::shared_ptr<Context>& context) {
  static std::mutex mu;
  static auto* const all = new std::map<std::pair<CommKey, uint64_t>, std::weak_ptr<SharedComm>>;
  std::lock_guard lock(mu);
  std::erase_if(*all, [](const auto& known) { return known.second.expired(); });
  auto& known = (*all)[{key, generation}];
  auto comm = known.lock();
  if (!comm) known = comm = std::make_shared<SharedComm>(places, context);
  return comm;
}

SharedComm::SharedComm(Places places, std::shared_ptr<Context> context)
    : places_(std::move(places)),
      ranks_(static_cast<uint32_t>(places_.of.size())),
      context_(std::move(context)),
      members_(ranks_),
      kernels_(ReduceKernels::of(context_)) {}

SharedComm::~SharedComm() {
  const Driver& cu = context_->enter();
  const bool over = all_reached();
  if (stream_) (void)cu.cuStreamDestroy(stream_);  // cuda.h: released when its work is done
  if (!scratch_ || !over) return;                  // memory that is in use stays
  (void)cu.cuMemUnmap(scratch_, kScratchBytes);
  (void)cu.cuMemRelease(scratch_handle_);
  (void)cu.cuMemAddressFree(scratch_, kScratchBytes);
}

void SharedComm::warm() {
  if (ranks_ == 1 || ranks_ > kMostSources) return;
  for (const CommType type : {CommType::kFloat32, CommType::kBfloat16})
    for (const size_t destinations : {places_.locals().size(), size_t{1}})
      (void)kernels_->load({type, CommReduction::kSum, ranks_, static_cast<uint32_t>(destinations), 0});
}

void SharedComm::join(uint32_t rank, std::function<void()> changed) {
  std::lock_guard lock(mu_);
  members_[rank].changed = std::move(changed);
  if (!std::exchange(members_[rank].joined, true)) joined_++;
}

bool SharedComm::ready() const {
  std::lock_guard lock(mu_);
  return joined_ == places_.locals().size() && (given_ || places_.members.size() == 1);
}

void SharedComm::give_nccl(std::shared_ptr<const Nccl> nccl, NcclComm comm) {
  std::lock_guard lock(mu_);
  nccl_ = std::move(nccl);
  comm_ = comm;
  given_ = true;
}

// An operation that NCCL is stopped in ends without its data: its members must not take that for a success.
void SharedComm::take_nccl(uint32_t rank, bool kindly) {
  if (rank != places_.locals().front()) return;
  std::lock_guard lock(mu_);
  const bool begun = !meetings_.empty() && meetings_.front().begun;
  if (comm_ && (begun || (!kindly && !all_reached())))
    fail_locked({kNcclRemoteError, "the rank that made the connection to the other GPUs has left in an operation"});
  dropping_ = comm_ != nullptr;
  comm_ = nullptr;
}

void SharedComm::nccl_over(uint32_t rank) {
  if (rank != places_.locals().front()) return;
  std::lock_guard lock(mu_);
  dropping_ = exchanging_ = false;
}

bool SharedComm::all_reached() const {
  return std::all_of(running_.begin(), running_.end(), [](const Running& one) { return one.mark->reached(); });
}

void SharedComm::forget(uint32_t rank) {
  std::lock_guard lock(mu_);
  members_[rank].changed = nullptr;
}

// Mostly without the lock: somebody may hold it while a kernel is compiled.
Status SharedComm::failure() const {
  if (!failed_.load(std::memory_order_acquire)) return {};
  std::lock_guard lock(mu_);
  return failure_;
}

bool SharedComm::stands() const { return !stream_ || context_->enter().cuStreamQuery(stream_) != CUDA_ERROR_NOT_READY; }

bool SharedComm::busy() const {
  std::lock_guard lock(mu_);
  return exchanging_;
}

bool SharedComm::leave(uint32_t rank, bool kindly, uint32_t most_ms) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(most_ms);
  std::unique_lock lock(mu_);
  members_[rank].changed = nullptr;
  for (Meeting& meeting : meetings_)
    if (!meeting.begun && std::exchange(meeting.parts[rank], nullptr)) meeting.arrived--;
  for (auto& [pair, parts] : sends_)
    if (pair.first == rank) parts.clear();
  for (auto& [pair, parts] : receives_)
    if (pair.second == rank) parts.clear();
  // One that is in the middle goes no further. What NCCL is just putting into the stream comes before the last mark.
  if (!meetings_.empty() && meetings_.front().begun) {
    fail_locked({kNcclRemoteError, "rank " + std::to_string(rank) + " has left in an operation"});
    for (auto free = settled(); free.ok() && !*free; free = settled()) {
      lock.unlock();
      if (std::chrono::steady_clock::now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      lock.lock();
    }
    who_ = kAll;
    if (stream_)
      if (auto mark = Mark::record(context_, stream_); mark.ok()) note_mark(*mark);
  }
  std::vector<std::shared_ptr<Mark>> own;
  for (const Running& one : running_)
    if (one.who == kAll || one.who.first == rank || one.who.second == rank) own.push_back(one.mark);
  // With another place it may never end by itself. Whoever made NCCL's communicator ends it then.
  const auto runs = [](const auto& mark) { return !mark->reached(); };
  if (!kindly && places_.members.size() > 1 && std::any_of(own.begin(), own.end(), runs))
    fail_locked({kNcclRemoteError, "rank " + std::to_string(rank) + " has left in an operation"});
  lock.unlock();
  for (const auto& mark : own)
    while (!mark->reached()) {
      if (std::chrono::steady_clock::now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  return true;
}

void SharedComm::fail(const Status& why) {
  std::lock_guard lock(mu_);
  fail_locked(why);
}

void SharedComm::fail_locked(const Status& why) {
  if (!failure_.ok()) return;
  failure_ = why;
  failed_.store(true, std::memory_order_release);
  tell();
}

void SharedComm::tell() {
  for (const Member& member : members_)
    if (member.changed) member.changed();
}

// -- meetings -------------------------------------------------------------------------------------------------------

SharedComm::Work SharedComm::post(uint32_t rank, const std::vector<CommOp>& ops, const std::shared_ptr<Mark>& ready) {
  std::lock_guard lock(mu_);
  Work work;
  std::vector<Pair> pairs;
  for (const CommOp& op : ops) {
    const PartRef part = work.emplace_back(std::make_shared<Part>(Part{op, ready, nullptr, {}}));
    if (is_pair(op)) {
      const auto peer = static_cast<uint32_t>(op.peer);
      const bool sends = op.kind_of() == CommKind::kSend;
      pairs.push_back(sends ? Pair{rank, peer} : Pair{peer, rank});
      part->pair = pairs.back();
      (sends ? sends_ : receives_)[pairs.back()].push_back(part);
      continue;
    }
    const uint64_t number = members_[rank].meetings++ - first_meeting_;
    while (meetings_.size() <= number) meetings_.push_back({Parts(ranks_), 0, false, {}});
    meetings_[number].parts[rank] = part;
    meetings_[number].arrived++;
  }
  advance();
  for (const Pair& pair : pairs) advance_pair(pair);
  return work;
}

StatusOr<bool> SharedComm::follow(const Work& work, CUstream stream) {
  std::lock_guard lock(mu_);
  const auto submitted = [](const PartRef& part) { return part->done != nullptr; };
  if (!std::all_of(work.begin(), work.end(), submitted)) advance_for(work);
  if (!std::all_of(work.begin(), work.end(), submitted)) return false;
  const Mark* last = nullptr;
  for (const PartRef& part : work) {
    if (part->done.get() == last) continue;
    last = part->done.get();
    if (Status s = last->wait_in(stream); !s.ok()) return s;
  }
  return true;
}

void SharedComm::poke(const Work& work) {
  std::lock_guard lock(mu_);
  advance_for(work);
}

void SharedComm::advance_for(const Work& work) {
  advance();
  for (const PartRef& part : work)
    if (!part->done && is_pair(part->op)) advance_pair(part->pair);
}

StatusOr<bool> SharedComm::settled() {
  if (!exchanging_) return true;
  if (!comm_) return !dropping_;
  int result = kNcclSuccess;
  if (const int asked = nccl_->get_async_error(comm_, &result); asked != kNcclSuccess) result = asked;
  if (result == kNcclInProgress) return false;
  exchanging_ = false;
  if (Status s = nccl_->status(result, "NCCL"); !s.ok()) return s;
  return true;
}

// As far as all have come, and NCCL is not busy.
void SharedComm::advance() {
  bool told = false;
  while (failure_.ok() && !meetings_.empty() &&
         (meetings_.front().begun || meetings_.front().arrived == places_.locals().size())) {
    Meeting& meeting = meetings_.front();
    if (!meeting.begun && !has_room()) break;
    Status s;
    if (!std::exchange(meeting.begun, true)) {
      s = check(meeting);
      if (s.ok()) s = plan(meeting);
      if (s.ok()) s = begin(meeting.parts);
    }
    while (s.ok()) {
      auto free = settled();
      if (!free.ok()) {
        s = std::move(free).status();
        break;
      }
      if (!*free) {
        if (told) tell();
        return;
      }
      if (meeting.steps.empty()) break;
      if (!has_room()) {
        if (told) tell();
        return;
      }
      const Step step = std::move(meeting.steps.front());
      meeting.steps.pop_front();
      s = step.run();
      exchanging_ = s.ok() && step.exchanges;
    }
    if (s.ok()) s = end(meeting.parts);
    if (!s.ok()) return fail_locked(s);
    meetings_.pop_front();
    first_meeting_++;
    told = true;
  }
  if (told) tell();
}

void SharedComm::advance_pair(const Pair& pair) {
  auto &sends = sends_[pair], &receives = receives_[pair];
  bool begun = false;
  while (failure_.ok() && !sends.empty() && !receives.empty() && has_room()) {
    const std::vector<PartRef> parts = {sends.front(), receives.front()};
    const CommOp &from = parts[0]->op, &to = parts[1]->op;
    Status s;
    if (bytes_of(from) != bytes_of(to))
      s = {kNcclInvalidUsage, text_of_pair(pair.first, bytes_of(from), pair.second, bytes_of(to))};
    if (s.ok()) s = begin(parts);
    if (s.ok()) s = copy(to.recv, from.send, bytes_of(from));
    if (s.ok()) s = end(parts);
    if (!s.ok()) return fail_locked(s);
    sends.pop_front(), receives.pop_front();
    begun = true;
  }
  if (begun) tell();
}

// Only among the members of this place, as NCCL compares nothing.
Status SharedComm::check(const Meeting& meeting) const {
  const uint32_t first = places_.locals().front();
  for (const uint32_t rank : places_.locals())
    if (const CommOp &op = meeting.parts[rank]->op, &wanted = meeting.parts[first]->op; !match(op, wanted))
      return {kNcclInvalidUsage, text_of_ranks(first, wanted, rank, op)};
  return {};
}

// Forgets what has run.
bool SharedComm::has_room() {
  while (!running_.empty() && running_.front().mark->reached()) {
    under_way_ -= running_.front().operations;
    running_.pop_front();
  }
  return under_way_ < kMostUnderWay;
}

void SharedComm::note_mark(std::shared_ptr<Mark> mark) {
  running_.push_back({std::move(mark), std::exchange(unmarked_, 0), who_});
}

// So many went to the stream.
Status SharedComm::count_operations(size_t n) {
  under_way_ += n;
  if ((unmarked_ += n) < kMarkEvery) return {};
  auto mark = Mark::record(context_, stream_);
  if (!mark.ok()) return std::move(mark).status();
  note_mark(*mark);
  return {};
}

Status SharedComm::begin(const std::vector<PartRef>& parts) {
  const Driver& cu = context_->enter();
  who_ = is_pair(parts.back() ? parts.back()->op : CommOp()) ? parts.back()->pair : kAll;
  if (!stream_)
    if (Status s = cu.status(cu.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0),
                             cu.cuStreamCreateWithPriority, "making the stream of a communicator");
        !s.ok())
      return s;
  for (const PartRef& part : parts)
    if (Status s = part ? part->ready->wait_in(stream_) : Status(); !s.ok()) return s;
  return count_operations(parts.size());
}

Status SharedComm::end(const std::vector<PartRef>& parts) {
  auto done = Mark::record(context_, stream_);
  if (!done.ok()) return std::move(done).status();
  for (const PartRef& part : parts)
    if (part) part->done = *done;
  note_mark(*done);
  return {};
}

// -- operations -----------------------------------------------------------------------------------------------------

Status SharedComm::plan(Meeting& meeting) {
  const CommOp& op = meeting.parts[places_.locals().front()]->op;
  if (op.count == 0) return {};
  switch (op.kind_of()) {
    case CommKind::kAllReduce:
    case CommKind::kReduce:
    case CommKind::kReduceScatter: return plan_reduction(meeting);
    default: plan_copies(meeting); return {};
  }
}

// As in hal/comm.h. In place: what an operation writes into a rank's input is what that rank alone gives, so the order of
// the copies does not matter.
void SharedComm::plan_copies(Meeting& meeting) {
  const Parts parts = meeting.parts;
  const CommOp first = parts[places_.locals().front()]->op;
  const uint64_t block = bytes_of(first);
  const auto root = static_cast<uint32_t>(first.peer);
  const uint32_t head = places_.locals().front();
  const auto from = [&](uint32_t rank, uint64_t skip) { return parts[rank] ? parts[rank]->op.send + skip : 0; };
  const auto into = [&](uint32_t rank, uint64_t skip) { return parts[rank] ? parts[rank]->op.recv + skip : 0; };
  std::vector<Transfer> all, copies;
  const auto give = [&](uint32_t a, uint64_t at, uint32_t b, uint64_t to) {
    all.push_back({a, b, at, to, first.count});
  };
  switch (first.kind_of()) {
    case CommKind::kBroadcast:  // to one rank of each place, and there to all
      for (const auto& members : places_.members)
        if (places_.of[root] != places_.of[members.front()])
          give(root, from(root, 0), members.front(), into(members.front(), 0));
      for (const uint32_t rank : places_.locals())
        copies.push_back({root, rank, places_.is_local(root) ? from(root, 0) : into(head, 0), into(rank, 0), 0});
      break;
    case CommKind::kAllGather:
      for (uint32_t rank = 0; rank < ranks_; rank++)
        for (const auto& members : places_.members)
          if (places_.of[rank] != places_.of[members.front()])
            give(rank, from(rank, 0), members.front(), into(members.front(), rank * block));
      for (const uint32_t to : places_.locals())
        for (uint32_t rank = 0; rank < ranks_; rank++)
          copies.push_back(
              {rank, to, places_.is_local(rank) ? from(rank, 0) : into(head, rank * block), into(to, rank * block), 0});
      break;
    case CommKind::kAllToAll:
      for (uint32_t a = 0; a < ranks_; a++)
        for (uint32_t b = 0; b < ranks_; b++) give(a, from(a, b * block), b, into(b, a * block));
      break;
    case CommKind::kGather:
      for (uint32_t rank = 0; rank < ranks_; rank++) give(rank, from(rank, 0), root, into(root, rank * block));
      break;
    case CommKind::kScatter:
      for (uint32_t rank = 0; rank < ranks_; rank++) give(root, from(root, rank * block), rank, into(rank, 0));
      break;
    default: break;
  }
  exchange(meeting, all, first.type_of());
  add_copies(meeting, copies, block);
}

// In steps that are no longer than what may be under way.
void SharedComm::add_copies(Meeting& meeting, const std::vector<Transfer>& copies, uint64_t bytes) {
  for (size_t at = 0; at < copies.size(); at += kMarkEvery) {
    const std::vector<Transfer> some(copies.begin() + static_cast<ptrdiff_t>(at),
                                     copies.begin() + static_cast<ptrdiff_t>(std::min(at + kMarkEvery, copies.size())));
    meeting.steps.push_back({false, [this, some, bytes] {
                               for (const Transfer& one : some)
                                 if (Status s = copy(one.into, one.at, bytes); !s.ok()) return s;
                               return Status();
                             }});
  }
}

// The transfers that this place has a part in: by NCCL, and those within it by copies.
void SharedComm::exchange(Meeting& meeting, const std::vector<Transfer>& transfers, CommType type) {
  std::vector<Transfer> inside, between;
  for (const Transfer& one : transfers) {
    const bool a = places_.is_local(one.from), b = places_.is_local(one.to);
    if (a && b)
      inside.push_back(one);
    else if (a || b)
      between.push_back(one);
  }
  if (!between.empty())
    meeting.steps.push_back({true, [this, between = std::move(between), type] { return transfer(between, type); }});
  if (!inside.empty()) add_copies(meeting, inside, inside.front().count * comm_type_bytes(type));  // of one length
}

// One group. Both ends of it have the transfers between them in the same order.
Status SharedComm::transfer(const std::vector<Transfer>& transfers, CommType type) {
  if (!comm_) return {kNcclRemoteError, "the rank that made the connection to the other GPUs has left"};
  int result = nccl_->group_start();
  if (result != kNcclSuccess) return nccl_->status(result, "ncclGroupStart");
  for (const Transfer& one : transfers) {
    const auto number = static_cast<int>(type);
    const int said = places_.is_local(one.from) ? nccl_->send(reinterpret_cast<const void*>(one.at), one.count, number,
                                                              static_cast<int>(places_.of[one.to]), comm_, stream_)
                                                : nccl_->recv(reinterpret_cast<void*>(one.into), one.count, number,
                                                              static_cast<int>(places_.of[one.from]), comm_, stream_);
    if (said != kNcclSuccess && said != kNcclInProgress && result == kNcclSuccess) result = said;
  }
  const Status said = nccl_->status(result, "submitting to NCCL");
  result = nccl_->group_end();  // in any case: a group that was begun must end
  if (said.ok() && (result == kNcclSuccess || result == kNcclInProgress)) return count_operations(1);
  return said.ok() ? nccl_->status(result, "ncclGroupEnd") : said;
}

Status SharedComm::copy(uint64_t to, uint64_t from, uint64_t bytes) {
  if (bytes == 0 || to == from) return {};
  const Driver& cu = context_->driver();
  Status s = cu.status(cu.cuMemcpyDtoDAsync(to, from, bytes, stream_), cu.cuMemcpyDtoDAsync,
                       "copying between ranks that share a GPU");
  return s.ok() ? count_operations(1) : s;
}

// -- reductions -----------------------------------------------------------------------------------------------------

StatusOr<uint64_t> SharedComm::scratch() {
  if (scratch_) return uint64_t{scratch_};
  const Driver& cu = context_->enter();
  const char* const doing = "taking memory for what ranks of other GPUs send";
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, context_->device()};
  CUmemAccessDesc access{};
  access.location = prop.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUdeviceptr at = 0;
  CUmemGenericAllocationHandle handle = 0;
  Status s = cu.status(cu.cuMemAddressReserve(&at, kScratchBytes, 0, 0, 0), cu.cuMemAddressReserve, doing);
  if (!s.ok()) return s;
  if (s = cu.status(cu.cuMemCreate(&handle, kScratchBytes, &prop, 0), cu.cuMemCreate, doing); s.ok()) {
    if (s = cu.status(cu.cuMemMap(at, kScratchBytes, 0, handle, 0), cu.cuMemMap, doing); s.ok()) {
      s = cu.status(cu.cuMemSetAccess(at, kScratchBytes, &access, 1), cu.cuMemSetAccess, doing);
      if (!s.ok()) (void)cu.cuMemUnmap(at, kScratchBytes);
    }
    if (!s.ok()) (void)cu.cuMemRelease(handle);
  }
  if (!s.ok()) {
    (void)cu.cuMemAddressFree(at, kScratchBytes);
    return s;
  }
  scratch_ = at, scratch_handle_ = handle;
  return uint64_t{scratch_};
}

Status SharedComm::set_scalar(uint64_t at, const CommOp& op) {
  const Driver& cu = context_->driver();
  const char* const doing = "writing a scalar";
  const auto low = static_cast<unsigned>(op.scalar);
  switch (comm_type_bytes(op.type_of())) {
    case 1:
      return cu.status(cu.cuMemsetD8Async(at, static_cast<unsigned char>(low), 1, stream_), cu.cuMemsetD8Async, doing);
    case 2:
      return cu.status(cu.cuMemsetD16Async(at, static_cast<unsigned short>(low), 1, stream_), cu.cuMemsetD16Async,
                       doing);
    case 4: return cu.status(cu.cuMemsetD32Async(at, low, 1, stream_), cu.cuMemsetD32Async, doing);
    default: break;
  }
  const auto high = static_cast<unsigned>(op.scalar >> 32);
  if (Status s = cu.status(cu.cuMemsetD32Async(at, low, 1, stream_), cu.cuMemsetD32Async, doing); !s.ok()) return s;
  return cu.status(cu.cuMemsetD32Async(at + 4, high, 1, stream_), cu.cuMemsetD32Async, doing);
}

// Every place gets the scalars of the others.
void SharedComm::plan_scalars(Meeting& meeting) {
  const Parts parts = meeting.parts;
  const CommType type = parts[places_.locals().front()]->op.type_of();
  meeting.steps.push_back({false, [this, parts] {
                             for (const uint32_t rank : places_.locals())
                               if (const CommOp& op = parts[rank]->op; !op.scalar_on_device)
                                 if (Status s = set_scalar(scratch_ + rank * kScalarStride, op); !s.ok()) return s;
                             return Status();
                           }});
  std::vector<Transfer> all;
  for (uint32_t rank = 0; rank < ranks_; rank++) {
    const uint64_t slot = scratch_ + rank * kScalarStride;
    const uint64_t at = parts[rank] && parts[rank]->op.scalar_on_device ? parts[rank]->op.scalar : slot;
    for (const auto& members : places_.members)
      if (places_.of[rank] != places_.of[members.front()]) all.push_back({rank, members.front(), at, slot, 1});
  }
  exchange(meeting, all, type);
}

// Who makes which part of the result.
std::vector<SharedComm::Round> SharedComm::rounds_of(const CommOp& op) const {
  const auto places = static_cast<uint32_t>(places_.members.size());
  std::vector<Round> rounds(1);
  switch (op.kind_of()) {
    case CommKind::kReduce: {
      const auto root = static_cast<uint32_t>(op.peer);
      rounds.front().push_back({places_.of[root], 0, op.count, {root}, 0});
      break;
    }
    case CommKind::kReduceScatter:
      for (uint32_t place = 0; place < places; place++)
        for (size_t k = 0; k < places_.members[place].size(); k++) {
          const uint32_t rank = places_.members[place][k];
          if (rounds.size() <= k) rounds.emplace_back();
          rounds[k].push_back({place, rank * op.count, op.count, {rank}, 0});
        }
      break;
    default:
      for (uint32_t place = 0; place < places; place++) {
        const uint64_t begin = op.count * place / places, end = op.count * (place + 1) / places;
        rounds.front().push_back({place, begin, end - begin, places_.members[place], begin});
      }
  }
  return rounds;
}

Status SharedComm::plan_reduction(Meeting& meeting) {
  const CommOp op = meeting.parts[places_.locals().front()]->op;
  const uint64_t element = comm_type_bytes(op.type_of());
  if (ranks_ > kMostSources)
    return {kNcclInvalidUsage, "at most " + std::to_string(kMostSources) + " ranks can reduce where some share a GPU"};
  const std::vector<Round> rounds = rounds_of(op);
  for (const Round& round : rounds)  // before anything of it is in the stream
    for (const Block& block : round)
      if (block.owner == places_.own)
        if (Status s = kernels_->load(shape_of(meeting.parts, block.ranks.size())); !s.ok()) return s;

  uint64_t most = UINT64_MAX;  // elements of each rank that the scratch memory takes
  const bool several = places_.members.size() > 1;
  if (several) {
    if (auto made = scratch(); !made.ok()) return std::move(made).status();
    most = (kScratchBytes - kScalarBytes) / ranks_ / kScalarStride * kScalarStride / element;
    if (op.reduction_of() == CommReduction::kPreMulSum) plan_scalars(meeting);
  }
  for (const Round& round : rounds) {
    uint64_t longest = 0;
    for (const Block& block : round) longest = std::max(longest, block.count);
    for (uint64_t done = 0; done < longest; done += std::min(most, longest - done)) {
      Round piece;
      for (Block block : round) {
        if (done >= block.count) continue;
        block.skip += done, block.into += done, block.count = std::min(most, block.count - done);
        piece.push_back(std::move(block));
      }
      plan_collecting(meeting, piece, most * element);
      if (several && op.kind_of() == CommKind::kAllReduce) plan_spreading(meeting, piece);
    }
  }
  return {};
}

// Every owner gets all ranks' elements of its block, and reduces them. stride: of the ranks in the scratch memory.
void SharedComm::plan_collecting(Meeting& meeting, const Round& piece, uint64_t stride) {
  const Parts parts = meeting.parts;
  const CommType type = parts[places_.locals().front()]->op.type_of();
  const uint64_t element = comm_type_bytes(type);
  std::vector<Transfer> transfers;
  for (const Block& block : piece)
    for (uint32_t rank = 0; rank < ranks_; rank++)
      if (places_.of[rank] != block.owner)
        transfers.push_back({rank, places_.members[block.owner].front(),
                             parts[rank] ? parts[rank]->op.send + block.skip * element : 0,
                             scratch_ + kScalarBytes + rank * stride, block.count});
  exchange(meeting, transfers, type);
  for (const Block& block : piece) {
    if (block.owner != places_.own) continue;
    std::vector<uint64_t> to;
    for (const uint32_t rank : block.ranks) to.push_back(parts[rank]->op.recv + block.into * element);
    meeting.steps.push_back({false, [this, parts, skip = block.skip * element, count = block.count, stride, to] {
                               return reduce(parts, skip, count, stride, to);
                             }});
  }
}

// Every place gets the others' blocks of the result, into one member's memory, and copies them for the rest of its members.
void SharedComm::plan_spreading(Meeting& meeting, const Round& piece) {
  const Parts& parts = meeting.parts;
  const CommType type = parts[places_.locals().front()]->op.type_of();
  const uint64_t element = comm_type_bytes(type);
  const auto result = [&](uint32_t rank, const Block& block) {
    return parts[rank] ? parts[rank]->op.recv + block.into * element : 0;
  };
  std::vector<Transfer> transfers;
  for (const Block& block : piece)
    for (const auto& members : places_.members)
      if (places_.of[members.front()] != block.owner) {
        const uint32_t from = places_.members[block.owner].front(), to = members.front();
        transfers.push_back({from, to, result(from, block), result(to, block), block.count});
      }
  exchange(meeting, transfers, type);
  const uint32_t head = places_.locals().front();
  for (const Block& block : piece) {
    if (block.owner == places_.own) continue;
    std::vector<Transfer> copies;
    for (const uint32_t rank : places_.locals())
      copies.push_back({head, rank, result(head, block), result(rank, block), block.count});
    add_copies(meeting, copies, block.count * element);
  }
}

ReduceShape SharedComm::shape_of(const Parts& parts, size_t destinations) const {
  const CommOp& first = parts[places_.locals().front()]->op;
  ReduceShape shape;
  shape.type = first.type_of(), shape.reduction = first.reduction_of();
  shape.sources = ranks_, shape.destinations = static_cast<uint32_t>(destinations);
  for (uint32_t rank = 0; shape.reduction == CommReduction::kPreMulSum && rank < ranks_; rank++)
    if (!parts[rank] || parts[rank]->op.scalar_on_device) shape.on_device |= uint64_t{1} << rank;
  return shape;
}

// The elements at `skip` of every rank's input, reduced, to all those addresses. Those of other places are in the scratch
// memory, `stride` bytes apart.
Status SharedComm::reduce(const Parts& parts, uint64_t skip, uint64_t count, uint64_t stride,
                          const std::vector<uint64_t>& to) {
  const CommOp& first = parts[places_.locals().front()]->op;
  std::vector<uint64_t> from, scalars;
  for (uint32_t rank = 0; rank < ranks_; rank++) {
    const Part* const part = parts[rank].get();
    from.push_back(part ? part->op.send + skip : scratch_ + kScalarBytes + rank * stride);
    if (first.reduction_of() != CommReduction::kPreMulSum) continue;
    scalars.push_back(part ? part->op.scalar : scratch_ + rank * kScalarStride);
  }
  Status s = kernels_->launch(shape_of(parts, to.size()), count, from, to, scalars, stream_);
  return s.ok() ? count_operations(1) : s;
}

}  // namespace devproxy::hal::cuda
