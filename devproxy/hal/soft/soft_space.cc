// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/soft/soft_space.h"

#include <fcntl.h>
#include <sys/random.h>

#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "devproxy/hal/soft/soft_copies.h"
#include "devproxy/hal/soft/soft_pages.h"

namespace devproxy::hal::soft {

namespace {

uint64_t new_incarnation() {
  uint64_t value = 0;
  while (value == 0 && getrandom(&value, sizeof value, 0) != sizeof value) {}
  return value;
}

}  // namespace

StatusOr<std::unique_ptr<Space>> SoftSpace::open(const SoftConfig& device, const SpaceConfig& config,
                                                 SpaceOwner& owner) {
  StatusOr<int> fd = SoftMemory::map(config);
  if (!fd.ok()) return std::move(fd).status();
  return std::unique_ptr<Space>(std::make_unique<SoftSpace>(device, config, owner, *fd));
}

SoftSpace::SoftSpace(const SoftConfig& device, const SpaceConfig& config, SpaceOwner& owner, int memory_fd)
    : device_(device), config_(config), owner_(owner), incarnation_(new_incarnation()), memory_(config, memory_fd) {
  if (!device_.sharing) return;
  splicer_ = std::dynamic_pointer_cast<splice::Splicer>(device_.sharing->splicing);
  if (splicer_)
    member_ = splicer_->join(config_.device_base, config_.device_bytes,
                             static_cast<SoftPages&>(splicer_->physical()).rank(config_.device_base, memory_.fd()),
                             [this](auto... question) { return may_touch(question...); });
  if (!member_) splicer_ = nullptr;
}

SoftSpace::~SoftSpace() {
  stop();
  if (splicer_) splicer_->leave(*member_);
  if (device_.links) {
    Frame gone;
    gone.kind = FrameKind::kGone;
    gone.slot = owner_.place().slot;
    gone.incarnation = incarnation_;
    device_.links->post_to_all(gone);
  }
}

// -- memory ---------------------------------------------------------------------------------------------------------

Status SoftSpace::commit(uint64_t addr, uint64_t bytes, bool stable) {
  if (!memory_.owns(addr, bytes)) return {kInvalidValue, "the range is outside the device memory of this process"};
  memory_.committed(addr, bytes);
  if (splicer_) splicer_->committed(*member_, addr, bytes, submitted_, stable);
  return {};  // pages appear at first touch
}

void SoftSpace::freed(uint64_t addr, uint64_t bytes, uint64_t position) {
  if (splicer_) splicer_->freed(*member_, addr, bytes, position);
}

void SoftSpace::release(uint64_t addr, uint64_t bytes) {
  if (splicer_) splicer_->released(*member_, addr);
  memory_.released(addr, bytes);
  tidy();
}

void SoftSpace::reuse(uint64_t, uint64_t bytes) { memory_.reused(bytes); }

void SoftSpace::tidy() {
  for (const auto& [addr, bytes] : memory_.take_idle()) {
    if (splicer_) splicer_->discard(*member_, addr, bytes);
    memory_.give_back(addr, bytes);
  }
}

Status SoftSpace::read(uint64_t addr, void* to, size_t bytes) {
  if (!memory_.owns(addr, bytes)) return {kInvalidValue, "the range is outside the device memory of this process"};
  if (splicer_)
    if (Status s = splicer_->before_read(addr, bytes); !s.ok()) return s;
  std::memcpy(to, reinterpret_cast<const void*>(addr), bytes);
  return {};
}

void* SoftSpace::host_view(uint64_t addr, uint64_t bytes) {
  if (!memory_.owns(addr, bytes) || (splicer_ && !splicer_->before_read(addr, bytes).ok())) return nullptr;
  return reinterpret_cast<void*>(addr);
}

Status SoftSpace::write(uint64_t addr, const void* from, size_t bytes) {
  if (!memory_.owns(addr, bytes)) return {kInvalidValue, "the range is outside the device memory of this process"};
  if (splicer_)
    if (Status s = splicer_->before_write(addr, bytes, true); !s.ok()) return s;
  std::memcpy(reinterpret_cast<void*>(addr), from, bytes);
  return {};
}

Status SoftSpace::loaded(uint64_t addr, uint64_t bytes) {
  if (!memory_.owns(addr, bytes)) return {kInvalidValue, "the range is outside the device memory of this process"};
  return splicer_ ? splicer_->loaded(*member_, addr, bytes) : Status{};
}

void SoftSpace::all_loaded() {
  if (splicer_) splicer_->all_loaded(*member_);
}

Status SoftSpace::alias(uint64_t addr, size_t bytes, Space& from, uint64_t from_addr) {
  // One device has one kind of space.
  return memory_.alias(addr, bytes, static_cast<SoftSpace&>(from).memory_, from_addr);
}

Status SoftSpace::unalias(uint64_t addr, size_t bytes) { return memory_.unalias(addr, bytes); }

int SoftSpace::share_memory() { return fcntl(memory_.fd(), F_DUPFD_CLOEXEC, 0); }

// -- commands: what each is made of ---------------------------------------------------------------------------------

void SoftSpace::nop(const QueueRef& queue, Ticket ticket) {
  Command command;
  command.ticket = ticket;
  submit(queue, command, nullptr, nullptr);
}

void SoftSpace::copy(const QueueRef& queue, Ticket ticket, const CopyArgs& args) {
  Command command;
  command.action = Action::kCopy;
  command.ticket = ticket;
  command.copy = args;
  submit(queue, command, nullptr, nullptr);
}

void SoftSpace::memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& args) {
  Command command;
  command.action = Action::kMemset;
  command.ticket = ticket;
  command.memset = args;
  submit(queue, command, nullptr, nullptr);
}

void SoftSpace::launch(const QueueRef& queue, Ticket ticket, const FunctionRef& function, const LaunchArgs& args) {
  Command command;
  command.action = Action::kLaunch;
  command.ticket = ticket;
  command.launch = args;
  command.function = static_cast<const HostFunction*>(function.get());
  submit(queue, command, function, nullptr);
}

void SoftSpace::host_function(const QueueRef& queue, Ticket ticket, uint64_t token) {
  Command command;
  command.action = Action::kHostFunction;
  command.ticket = ticket;
  command.token = token;
  submit(queue, command, nullptr, nullptr);
}

void SoftSpace::copy_array(const QueueRef& queue, Ticket ticket, const ArrayCopy& args) {
  auto copy = std::make_shared<ArrayCopy>(args);
  Command command;
  command.action = Action::kArrayCopy;
  command.ticket = ticket;
  command.array_copy = copy.get();
  submit(queue, command, std::move(copy), nullptr);
}

// -- arrays ---------------------------------------------------------------------------------------------------------

StatusOr<ArrayRef> SoftSpace::create_array(const ArrayShape& shape) { return make_array(shape); }

Status SoftSpace::read_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, void* to) {
  read_rows(array, first_row, rows, to);
  return {};
}

Status SoftSpace::write_array(const ArrayRef& array, uint64_t first_row, uint64_t rows, const void* from) {
  write_rows(array, first_row, rows, from);
  return {};
}

// -- communicators --------------------------------------------------------------------------------------------------

StatusOr<CommRef> SoftSpace::create_comm(const CommConfig& config) {
  return CommRef(std::make_shared<SoftComm>(config, config_, incarnation_, owner_, hold_, device_.links));
}

void SoftSpace::submit_group(const QueueRef& queue, Ticket ticket, std::vector<CommCall> calls, bool init) {
  auto group = std::make_shared<CommGroup>(std::move(calls), init);
  Command command;
  command.action = Action::kComm;
  command.ticket = ticket;
  command.comm = group.get();
  submit(queue, command, std::move(group), nullptr);
}

void SoftSpace::init_comm(const QueueRef& queue, Ticket ticket, const CommRef& comm) {
  submit_group(queue, ticket, {{comm, {}}}, true);
}

void SoftSpace::communicate(const QueueRef& queue, Ticket ticket, std::vector<CommCall> group) {
  submit_group(queue, ticket, std::move(group), false);
}

// -- limits ---------------------------------------------------------------------------------------------------------

// Nothing here has such a limit; what is read back is what was set.
Status SoftSpace::set_limit(uint32_t limit, uint64_t value) {
  if (limit >= std::size(limits_)) return {kUnsupportedLimit, "the software GPU has no limit " + std::to_string(limit)};
  limits_[limit] = value;
  return {};
}

StatusOr<uint64_t> SoftSpace::get_limit(uint32_t limit) {
  if (limit >= std::size(limits_))
    return Status(kUnsupportedLimit, "the software GPU has no limit " + std::to_string(limit));
  return limits_[limit];
}

}  // namespace devproxy::hal::soft
