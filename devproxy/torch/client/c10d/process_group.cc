// SPDX-License-Identifier: Apache-2.0
// The life of a group: its communicators, its end. How an operation gets on its stream: launch.cc; the operations
// themselves: collectives.cc, point_to_point.cc.
#include "devproxy/torch/client/c10d/process_group.h"

#include <c10/util/Exception.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "devproxy/torch/client/device.h"

namespace devproxy::aten {
namespace {

// The first of the names that is set, as a number.
int setting(std::initializer_list<const char*> names, int otherwise) {
  for (const char* name : names) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == '\0') continue;
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    TORCH_CHECK(*end == '\0', name, " must be a number, but is '", text, "'");
    return static_cast<int>(value);
  }
  return otherwise;
}

bool blocking_wait() { return setting({"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}, 0) != 0; }

OnFailure on_failure() {
  const int mode = setting({"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"},
                           static_cast<int>(OnFailure::kSkipCleanUp));
  TORCH_CHECK(mode >= 0 && mode <= 3, "TORCH_NCCL_ASYNC_ERROR_HANDLING must be 0, 1, 2 or 3, but is ", mode);
  // With a blocking wait the caller hears of the failure by an exception, so the process goes on.
  const auto wanted = static_cast<OnFailure>(mode);
  return blocking_wait() && wanted != OnFailure::kKeepGoing ? OnFailure::kCleanUp : wanted;
}

int64_t next_uid() {
  static std::atomic<int64_t> next{0};
  return next.fetch_add(1);
}

void check_size(int rank, int size) {
  TORCH_CHECK_VALUE(size > 0 && rank >= 0 && rank < size, "ProcessGroupNCCL: rank ", rank, " is not in a group of ",
                    size);
  TORCH_CHECK_WITH(ValueError, device_count() > 0,
                   "ProcessGroupNCCL is only supported with GPUs, no GPUs found; start the job with devproxy-run");
}

}  // namespace

ProcessGroupNCCL::ProcessGroupNCCL(intrusive_ptr<c10d::Store> store, int rank, int size, intrusive_ptr<Options> options)
    : Backend(rank, size),
      store_(std::move(store)),
      options_(std::move(options)),
      uid_(next_uid()),
      pid_(getpid()),
      blocking_wait_(blocking_wait()),
      timed_(setting({"TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING"}, 0) != 0) {
  check_size(rank, size);
  if (setting({"TORCH_NCCL_HIGH_PRIORITY"}, 0) != 0) options_->is_high_priority_stream = true;
  if (setting({"TORCH_NCCL_NAN_CHECK"}, 0) != 0)
    TORCH_WARN_ONCE(
        "TORCH_NCCL_NAN_CHECK has no effect behind devproxy: NaN in a collective's input is not looked for");
  watchdog_ = std::make_unique<Watchdog>(name(), on_failure());
  init();
}

std::string ProcessGroupNCCL::name() const {
  return "'" + options_->group_name + "' (rank " + std::to_string(rank_) + " of " + std::to_string(size_) + ")";
}

ProcessGroupNCCL::~ProcessGroupNCCL() {
  if (getpid() != pid_) return;  // a forked child: neither the thread nor the communicators are its own
  // Without shutdown() nobody promises that the other ranks still come, so this does not wait for what is under way.
  end_communicators();
}

// -- communicators ---------------------------------------------------------------------------------------------------

nccl::ncclConfig_t ProcessGroupNCCL::config() const {
  nccl::ncclConfig_t config = options_->config;
  if (config.blocking == nccl::kUndefined && setting({"TORCH_NCCL_USE_COMM_NONBLOCKING"}, 0) != 0) config.blocking = 0;
  config.netName = options_->net_name.empty() ? nullptr : options_->net_name.c_str();
  config.commName = options_->comm_name.empty() ? nullptr : options_->comm_name.c_str();
  return config;
}

std::shared_ptr<Comm> ProcessGroupNCCL::join(const std::string& key, int size, int rank) {
  nccl::ncclUniqueId id;
  if (rank == 0) {
    nccl::check(nccl::api().ncclGetUniqueId(&id), nullptr, "ncclGetUniqueId");
    const auto* bytes = reinterpret_cast<const uint8_t*>(&id);
    store_->set(key, std::vector<uint8_t>(bytes, bytes + sizeof id));
  } else {
    const std::vector<uint8_t> bytes = store_->get(key);
    TORCH_CHECK_WITH(DistBackendError, bytes.size() == sizeof id, "The store's ", key, " of process group ", name(),
                     " has ", bytes.size(), " bytes, but NCCL's unique id has ", sizeof id);
    std::memcpy(&id, bytes.data(), sizeof id);
  }
  return Comm::join(id, size, rank, config(), options_->timeout);
}

std::shared_ptr<Comm> ProcessGroupNCCL::split_from_parent(c10::DeviceIndex device) {
  ProcessGroupNCCL& parent = *options_->split_from;
  std::lock_guard lock(parent.mu_);
  ++parent.splits_;
  return Comm::split(*parent.device_lane(device).comm, options_->split_color, rank_, config(), options_->timeout);
}

ProcessGroupNCCL::Lane& ProcessGroupNCCL::open_lane(const std::string& key, c10::DeviceIndex device,
                                                    const std::function<std::shared_ptr<Comm>()>& make) {
  const auto found = lanes_.find(key);
  if (found != lanes_.end()) return found->second;
  TORCH_CHECK_WITH(DistBackendError, !ended_, "Process group ", name(), " was shut down or aborted; make a new one");
  const DeviceScope scope(device);
  bind_device(device);
  auto comm = make();
  watchdog_->watch(comm);
  const auto stream = torch_stream(device, pool_stream_id(device, options_->is_high_priority_stream ? -1 : 0));
  return lanes_.emplace(key, Lane{std::move(comm), stream}).first->second;
}

// Precondition of both: mu_ is held.
ProcessGroupNCCL::Lane& ProcessGroupNCCL::device_lane(c10::DeviceIndex device) {
  return open_lane("device " + std::to_string(device), device, [&]() -> std::shared_ptr<Comm> {
    if (options_->split_from != nullptr && options_->split_color > nccl::kNoColor) return split_from_parent(device);
    // Ranks may use devices of different numbers, so the key counts communicators.
    return join("nccl comm " + std::to_string(lanes_.size()), size_, rank_);
  });
}

ProcessGroupNCCL::Lane& ProcessGroupNCCL::peer_lane(c10::DeviceIndex device, int peer) {
  const int low = std::min(rank_, peer), high = std::max(rank_, peer);
  const std::string pair = std::to_string(low) + ":" + std::to_string(high);
  return open_lane("peers " + pair, device, [&] { return join("nccl peers " + pair, 2, rank_ == low ? 0 : 1); });
}

void ProcessGroupNCCL::eagerConnectSingleDevice(at::Device device) {
  std::lock_guard lock(mu_);
  (void)device_lane(device.index());
}

c10::DeviceIndex ProcessGroupNCCL::default_device() const {
  return bound_device_id_.has_value() ? bound_device_id_->index() : current_device();
}

bool ProcessGroupNCCL::is_initialized() const {
  std::lock_guard lock(mu_);
  return !lanes_.empty() && std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
    return lane.second.comm->state() == nccl::ncclSuccess;
  });
}

void ProcessGroupNCCL::split_off_nothing(at::Device device) {
  std::lock_guard lock(mu_);
  ++splits_;
  const DeviceScope scope(device.index());
  bind_device(device.index());
  (void)Comm::split(*device_lane(device.index()).comm, nccl::kNoColor, rank_, config(), options_->timeout);
}

namespace {

// The same number on every rank of the new group, from its ranks: FNV-1a, without the sign bit.
int split_color(const std::vector<int>& ranks) {
  uint32_t hash = 2166136261u;
  for (const int rank : ranks)
    for (int shift = 0; shift < 32; shift += 8)
      hash = (hash ^ ((static_cast<uint32_t>(rank) >> shift) & 0xff)) * 16777619u;
  return static_cast<int>(hash & 0x7fffffff);
}

}  // namespace

intrusive_ptr<c10d::Backend> ProcessGroupNCCL::split(const intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const intrusive_ptr<Backend::Options>& opts) {
  auto options = c10::dynamic_intrusive_pointer_cast<Options>(opts);
  TORCH_CHECK_TYPE(options != nullptr, "split_group of an NCCL group takes ProcessGroupNCCL.Options");
  const at::Device on(c10::kCUDA, default_device());
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) {
    split_off_nothing(on);
    return nullptr;
  }
  options->split_from = intrusive_ptr<ProcessGroupNCCL>::reclaim_copy(this);
  options->split_color = split_color(ranks);
  auto group = c10::make_intrusive<ProcessGroupNCCL>(store, static_cast<int>(mine - ranks.begin()),
                                                     static_cast<int>(ranks.size()), std::move(options));
  group->eagerConnectSingleDevice(on);
  return group;
}

intrusive_ptr<c10d::Backend> ProcessGroupNCCL::shrink(const std::vector<int64_t>& excluded, int flags,
                                                      const intrusive_ptr<Backend::Options>& opts) {
  auto options = c10::dynamic_intrusive_pointer_cast<Options>(opts);
  TORCH_CHECK_TYPE(opts == nullptr || options != nullptr, "shrink of an NCCL group takes ProcessGroupNCCL.Options");
  if (options == nullptr) options = c10::make_intrusive<Options>(*options_);
  options->split_from.reset();
  std::vector<int> out(excluded.begin(), excluded.end());
  std::sort(out.begin(), out.end());
  TORCH_CHECK_VALUE(!out.empty() && out.front() >= 0 && out.back() < size_ &&
                        std::adjacent_find(out.begin(), out.end()) == out.end() &&
                        !std::binary_search(out.begin(), out.end(), rank_),
                    "shrink of process group ", name(), " excludes some of the other ranks, each once");
  // What is given up below is no failure that somebody has to hear of.
  if (flags & nccl::kShrinkAbort) watchdog_->stop();
  const c10::DeviceIndex device = default_device();
  std::string key = "shrunk";
  std::shared_ptr<Comm> comm;
  {
    std::lock_guard lock(mu_);
    key += " " + std::to_string(++shrinks_);
    comm = Comm::shrink(*device_lane(device).comm, out, flags, config(), options->timeout);
    if (flags & nccl::kShrinkAbort) ended_ = true;
  }
  for (const int rank : out) key += "," + std::to_string(rank);
  const auto below = std::lower_bound(out.begin(), out.end(), rank_) - out.begin();
  auto group = c10::make_intrusive<ProcessGroupNCCL>(c10::make_intrusive<c10d::PrefixStore>(key, store_),
                                                     rank_ - static_cast<int>(below),
                                                     size_ - static_cast<int>(out.size()), std::move(options));
  group->bound_device_id_ = bound_device_id_;
  std::lock_guard lock(group->mu_);
  (void)group->open_lane("device " + std::to_string(device), device, [&] { return comm; });
  return group;
}

// -- memory ----------------------------------------------------------------------------------------------------------

void ProcessGroupNCCL::suspend() {
  std::lock_guard lock(mu_);
  for (auto& [key, lane] : lanes_) lane.comm->suspend();
}

void ProcessGroupNCCL::resume() {
  std::lock_guard lock(mu_);
  for (auto& [key, lane] : lanes_) lane.comm->resume();
}

std::unordered_map<std::string, uint64_t> ProcessGroupNCCL::getMemoryStats() {
  std::lock_guard lock(mu_);
  std::unordered_map<std::string, uint64_t> all{{"suspend", 0}, {"suspended", 0}, {"persist", 0}, {"total", 0}};
  for (auto& [key, lane] : lanes_)
    for (const auto& [name, value] : lane.comm->memory_stats())
      all[name] = name == "suspended" ? std::max(all[name], value) : all[name] + value;
  return all;
}

// -- settings --------------------------------------------------------------------------------------------------------

uint64_t ProcessGroupNCCL::getSequenceNumberForGroup() {
  std::lock_guard lock(mu_);
  return collectives_;
}

void ProcessGroupNCCL::setTimeout(std::chrono::milliseconds timeout) {
  std::lock_guard lock(mu_);
  options_->timeout = timeout;
}

void ProcessGroupNCCL::add_ephemeral_timeout(std::chrono::milliseconds timeout) {
  std::lock_guard lock(mu_);
  ephemeral_timeout_ += timeout;
}

void ProcessGroupNCCL::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&&) {
  TORCH_CHECK(false, "Hooks on the completion of NCCL operations are not supported behind devproxy");
}

c10d::ErrorType ProcessGroupNCCL::getError() {
  if (watchdog_->failure().empty()) return c10d::ErrorType::SUCCESS;
  return watchdog_->timed_out() ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
}

// -- the end ---------------------------------------------------------------------------------------------------------

void ProcessGroupNCCL::abort() {
  // Not under mu_: a thread that waits in NCCL for another rank may hold it.
  ended_ = true;
  watchdog_->abort("process group " + name() + " was aborted");
  watchdog_->stop();
}

void ProcessGroupNCCL::end_communicators() {
  ended_ = true;
  const bool orderly = watchdog_->failure().empty() && watchdog_->idle();
  watchdog_->stop();
  if (!orderly) return watchdog_->abort("process group " + name() + " has ended");
  std::lock_guard lock(mu_);
  for (auto& [key, lane] : lanes_) lane.comm->destroy();
}

void ProcessGroupNCCL::shutdown() {
  if (getpid() != pid_) return;
  watchdog_->wait_until_idle();
  end_communicators();
}

}  // namespace devproxy::aten
