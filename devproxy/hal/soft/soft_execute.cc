// SPDX-License-Identifier: Apache-2.0
// What the space's commands do when they run, and what memory they touch.
#include <algorithm>
#include <mutex>
#include <vector>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/hal/soft/soft_copies.h"
#include "devproxy/hal/soft/soft_space.h"

namespace devproxy::hal::soft {

namespace {

constexpr size_t kLookThrough = 64;  // commands, for who touches a range

thread_local const char* t_running = nullptr;

struct Running {
  explicit Running(const char* what) { t_running = what; }
  ~Running() { t_running = nullptr; }
};

}  // namespace

const char* running_here() noexcept { return t_running; }

void SoftSpace::execute(Command& command, Engine::Turn& turn, bool on_submitter) {
  // A record completes after a fault too, so that whoever asks for its time gets an answer.
  if (command.action == Action::kRecord) return command.record->time_ns.store(now_ns(), std::memory_order_release);
  if (faulted_.load(std::memory_order_acquire)) return;
  if (splicer_)
    if (const Status s = before_command(command); !s.ok()) {
      faulted_.store(true, std::memory_order_release);
      return owner_.on_fault(kUnknown, s.text().c_str());
    }
  switch (command.action) {
    case Action::kCopy: {
      const Running running("memory copy");
      return copy_rows(command.copy);
    }
    case Action::kArrayCopy: {
      const Running running("array copy");
      return copy_box(*command.array_copy);
    }
    case Action::kMemset: {
      const Running running("memory set");
      return fill_rows(command.memset);
    }
    case Action::kLaunch: return run_kernel(command, turn, on_submitter);
    case Action::kHostFunction: yield(turn); return owner_.host_function(command.token);
    case Action::kComm: {
      yield(turn);
      const Running running("collective");
      command.comm->run(ended_);
      if (splicer_)
        for (const CommGroup::Result& one : command.comm->results())
          splicer_->received(*member_, one.addr, one.bytes, {one.comm.low, one.comm.high, one.operation});
      return;
    }
    case Action::kNop:
    case Action::kRecord: return;
  }
}

bool SoftSpace::may_touch(const Command& command, uint64_t addr, uint64_t bytes) {
  const auto overlaps = [&](uint64_t at, uint64_t n) { return at < addr + bytes && addr < at + n; };
  switch (command.action) {
    case Action::kNop:
    case Action::kRecord:
    case Action::kHostFunction: return false;
    case Action::kArrayCopy: return true;
    case Action::kCopy: {
      const CopyArgs& a = command.copy;
      if (a.width_bytes == 0 || a.height == 0) return false;
      return overlaps(a.src, (a.height - 1) * a.src_pitch + a.width_bytes) ||
             overlaps(a.dst, (a.height - 1) * a.dst_pitch + a.width_bytes);
    }
    case Action::kMemset: {
      const MemsetArgs& a = command.memset;
      return a.rows != 0 && a.count != 0 && overlaps(a.dst, (a.rows - 1) * a.pitch + a.count * a.width);
    }
    case Action::kComm: {
      const auto& buffers = command.comm->buffers();
      return std::any_of(buffers.begin(), buffers.end(),
                         [&](const auto& one) { return overlaps(one.first, one.second); });
    }
    case Action::kLaunch: {
      const HostFunction& function = *command.function;
      std::vector<splice::Access> accesses;
      uint64_t digest = 0;
      if (function.module->footprint(function.name, command.launch.params, command.launch.params_bytes, &accesses,
                                     &digest) == DEVPROXY_EXECUTOR_UNKNOWN)
        return true;
      return std::any_of(accesses.begin(), accesses.end(), [&](const splice::Access& one) {
        return !(one.flags & DEVPROXY_EXECUTOR_NUMBER) && overlaps(one.addr, one.bytes);
      });
    }
  }
  return true;
}

// A command that is executed at once is none: the submitting thread frees nothing meanwhile.
bool SoftSpace::may_touch(uint64_t addr, uint64_t bytes, uint64_t last) {
  if (idle()) return false;
  size_t looked = 0;
  const auto touches = [&](const Command& command) {
    if (command.ticket.position > last) return false;
    return ++looked > kLookThrough || may_touch(command, addr, bytes);
  };
  std::lock_guard lock(mu_);
  return !every_queue([&](const SoftQueue& queue) {
    if (queue.current && touches(queue.current->command)) return false;
    for (const Pending& one : queue.commands) {
      if (one.command.ticket.position > last) break;
      if (touches(one.command)) return false;
    }
    return true;
  });
}

// Whatever writes spliced memory other than as a launch, or reaches it past this space's addresses.
Status SoftSpace::before_command(const Command& command) {
  switch (command.action) {
    case Action::kCopy: return splicer_->before(command.copy);
    case Action::kArrayCopy: return splicer_->before(*command.array_copy);
    case Action::kMemset: return splicer_->before(command.memset);
    case Action::kComm:
      for (const auto& [addr, bytes] : command.comm->buffers())
        if (Status s = splicer_->before_sharing(*member_, addr, bytes); !s.ok()) return s;
      return {};
    default: return {};
  }
}

Status SoftSpace::spliced_launch(const Command& command, splice::Runner& runner) {
  thread_local splice::SpliceLaunch launch;
  const HostFunction& function = *command.function;
  launch.name = function.name;
  launch.params = command.launch.params;
  launch.params_bytes = command.launch.params_bytes;
  launch.position = command.ticket.position;
  const int kind =
      function.module->footprint(function.name, launch.params, launch.params_bytes, &launch.accesses, &launch.digest);
  return splicer_->launch(*member_, launch, kind, runner);
}

void SoftSpace::run_kernel(Command& command, Engine::Turn& turn, bool on_submitter) {
  struct Here final : splice::Runner {
    SoftSpace& space;
    const Command& command;
    Engine::Turn& turn;
    const bool on_submitter;
    Here(SoftSpace& space, const Command& command, Engine::Turn& turn, bool on_submitter)
        : space(space), command(command), turn(turn), on_submitter(on_submitter) {}
    void begin() override {
      if (const auto& sharing = space.device_.sharing) sharing->engine.begin(space.device_.seat, turn);
    }
    Status run() override {
      const Running running(command.function->name.c_str());
      return run_host_function(*command.function, command.launch, space.device_.ordinal, command.queue_index,
                               {&space.owner_, command.ticket.position, on_submitter});
    }
    void end() override {
      if (const auto& sharing = space.device_.sharing) sharing->engine.end(turn);
    }
    void yield() override { space.yield(turn); }
  } here(*this, command, turn, on_submitter);
  Status done;
  if (splicer_) {
    done = spliced_launch(command, here);
  } else {
    here.begin();
    done = here.run();
    here.end();
  }
  if (done.ok()) return;
  if (!is_execution_fault(done.code()))
    return owner_.on_refused(command.ticket.caller, done.code(), done.text().c_str());
  faulted_.store(true, std::memory_order_release);
  owner_.on_fault(done.code(), done.text().c_str());
}

}  // namespace devproxy::hal::soft
