// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/client/device_state.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "devproxy/csrc/client/advice.h"
#include "devproxy/csrc/client/log.h"

namespace devproxy::client {
namespace {

constexpr uint64_t kCreditStep = 32u << 20;  // asked for at once, so that most allocations are local
// Unused credit beyond this, and beyond what pools hold on to, goes back to the other jobs of the GPU.
constexpr uint64_t kCreditKeep = 64u << 20;
constexpr uint64_t kCreditParts = 64;  // both are no larger than such a part of the GPU
// The GPU has room while one part in kRoomParts is free. The client looks whenever one part in kLookParts more is granted,
// and where there was no room, also every kLookTight times that more is granted.
constexpr uint64_t kRoomParts = 8, kLookParts = 32;
constexpr uint32_t kLookTight = 64;
constexpr size_t kPendingBeforeReclaim = 64;
// Where replicas are spliced, what is freed is left alone while the addresses in use are so many times what the job had at
// most, and a little more. So the program alone decides where a buffer lies, and others find what was there.
constexpr uint64_t kSpreadParts = 2, kSpreadBytes = 32u << 20;
// Freed blocks that the server is not told of: of this size at most, and so many bytes in all.
constexpr uint64_t kKeptBlockBytes = 1u << 20, kKeptBytes = 16u << 20;
static_assert(kKeptBytes <= UINT32_MAX);  // MEM_ALLOC_req::kept_bytes

std::atomic<DeviceState*> g_states[kMaxDevices];
std::mutex g_states_mu;
// Held while the managed memory that servers know changes, and while a new state becomes visible, so that none misses any.
std::mutex g_told_mu;

}  // namespace

uint64_t next_buffer_id() {
  static std::atomic<uint64_t> id{1};
  return id.fetch_add(1, std::memory_order_relaxed);
}

EventMap& events() {
  static auto* m = new EventMap;  // never destroyed: threads outlive static destruction
  return *m;
}
ContextMap& contexts() {
  static auto* m = new ContextMap;
  return *m;
}

DeviceState::DeviceState(Attachment* attachment, int ordinal)
    : conn_(attachment),
      ordinal_(ordinal),
      alloc_(attachment->device_base(), kHeapBytes),
      step_(std::min(kCreditStep, attachment->props().total_bytes / kCreditParts)),
      keep_(std::min(kCreditKeep, attachment->props().total_bytes / kCreditParts)),
      pinned_alloc_(attachment->pinned_base(), kPinnedBytes),
      streams_(new StreamObj[kStreams]) {
  streams_[0].handle = kLegacyStream.value;
  streams_[0].device = ordinal;
  for (uint32_t i = 0; i < kStreams; ++i) {
    streams_[i].index = i;
    streams_[i].device = ordinal;
  }
}

// -- memory ---------------------------------------------------------------------------------------------------------

int32_t DeviceState::credit(uint64_t bytes) {
  if (used_ + bytes <= granted_) return kOk;
  const uint64_t deficit = used_ + bytes - granted_;
  const wire::MEM_CREDIT_req req{std::max(deficit, step_), deficit};
  wire::MEM_CREDIT_rep rep{};
  Reply reply{&rep, sizeof(rep)};
  const int32_t rc = conn_->call(wire::Opcode::MEM_CREDIT, req, &reply);
  if (rc != kOk) return rc;
  granted_ += rep.granted;
  if (holds_) look_for_room();
  return used_ + bytes <= granted_ ? kOk : kOutOfMemory;
}

// Credit is asked for with a message that waits until the server has taken up all that was sent before. A training step
// allocates and frees as much in each turn, so giving it back and asking again would stop the job hundreds of times in a
// step.
void DeviceState::look_for_room() {
  if (granted_ < look_at_ && (roomy_ || ++tight_ < kLookTight)) return;
  tight_ = 0;
  wire::MEM_INFO_rep rep{};
  Reply reply{&rep, sizeof(rep)};
  roomy_ =
      conn_->call(wire::Opcode::MEM_INFO, wire::MEM_INFO_req{}, &reply) == kOk && rep.spare >= rep.total / kRoomParts;
  look_at_ = granted_ + rep.total / kLookParts;
  if (!roomy_) held_ = 0;
}

// The job may be on another GPU now, or the server's framework needs memory. Whether there is room is looked for anew.
void DeviceState::heed_server() {
  if (kept_bytes_ && conn_->held()) [[unlikely]]
    drop_kept();
  const uint32_t wanted = conn_->credit_wanted();
  if (wanted == wanted_) [[likely]]
    return;
  wanted_ = wanted;
  roomy_ = false;
  look_at_ = held_ = 0;
  drop_kept();
  give_back_credit();
}

void DeviceState::give_back_credit() {
  const uint64_t unused = granted_ - used_;
  if (unused <= held_ + 2 * keep_) return;
  const wire::MEM_CREDIT_RETURN_req req{unused - held_ - keep_};
  if (conn_->post(wire::Opcode::MEM_CREDIT_RETURN, req) != kOk) return;
  granted_ -= req.bytes;
  if (roomy_) look_at_ = std::min(look_at_, granted_);
}

uint64_t DeviceState::held() {
  std::lock_guard lock(mu_);
  return held_ + kept_bytes_;
}

void DeviceState::hold_at_most(uint64_t bytes) {
  std::lock_guard lock(mu_);
  if (kept_bytes_ > bytes) drop_kept();
  held_ = std::min(held_, bytes);
  give_back_credit();
}

void DeviceState::reclaim(bool stable) {
  for (auto& [index, cache] : pending_) {
    const auto over = [&, i = index](uint64_t after) { return conn_->completed(i, after); };
    for (PendingRuns* runs : {&cache.runs, &cache.small})
      runs->reclaim(over, [&](uint64_t addr, uint64_t bytes) { alloc_.give(addr, bytes); });
    const auto give = [&](const Pending& p) {
      if (!over(p.after)) return false;
      alloc_.give(p.addr, p.bytes);
      return true;
    };
    for (auto& [bytes, list] : cache.whole) std::erase_if(list, give);
    if (!stable) continue;
    for (auto& [bytes, list] : cache.stable) std::erase_if(list, give);
  }
  std::erase_if(retiring_, [&](const Retiring& r) {
    if (!over(r.uses)) return false;
    alloc_.give(r.addr, r.bytes);
    return true;
  });
}

bool DeviceState::over(const std::vector<Use>& uses) const {
  return std::all_of(uses.begin(), uses.end(), [&](const Use& u) { return conn_->completed(u.stream, u.position); });
}

static constinit thread_local int t_stable = 0;

void make_stable(int by) { t_stable += by; }

uint64_t DeviceState::allocate(uint64_t bytes, StreamObj* stream, int32_t* error) {
  return allocate(bytes, stream, t_stable > 0, current_context(), error);
}

uint64_t DeviceState::allocate_for_graph(uint64_t bytes, int32_t* error) {
  return allocate(bytes, nullptr, false, 0, error);
}

uint64_t DeviceState::allocate(uint64_t bytes, StreamObj* stream, bool stable, uint64_t context, int32_t* error) {
  const uint64_t n = BidirAllocator::round_up(bytes, stable);
  if (n < bytes || n > kDeviceBytes) {
    *error = kOutOfMemory;
    return 0;
  }
  std::lock_guard lock(mu_);
  heed_server();
  uint64_t addr = 0;
  if (kept_bytes_ && stream && !stable && (addr = reuse(n, bytes, *stream, context))) return addr;
  *error = credit(n);
  if (*error == kOutOfMemory && kept_bytes_) {
    drop_kept();
    *error = credit(n);
  }
  if (*error != kOk) return 0;
  const auto c = stream ? pending_.find(stream->index) : pending_.end();
  StreamCache* const cache = c == pending_.end() ? nullptr : &c->second;
  addr = stable ? take_stable(n, cache) : find_room(n, cache);
  if (!addr) addr = alloc_.take(n, stable);
  if (!addr) {
    drop_kept();
    reclaim(true);
    addr = alloc_.take(n, stable);
  }
  if (!addr) {
    *error = kOutOfMemory;
    return 0;
  }
  const wire::MEM_ALLOC_req req{addr, n, stable ? kStableFlag : 0, static_cast<uint32_t>(kept_bytes_)};
  if ((*error = conn_->post(wire::Opcode::MEM_ALLOC, req)) != kOk) {
    alloc_.give(addr, n);
    return 0;
  }
  used_ += n;
  most_used_ = std::max(most_used_, used_);
  held_ = std::min(held_, granted_ - used_);
  live_[addr] = {n, bytes, stable, next_buffer_id(), context};
  return addr;
}

uint64_t DeviceState::take_stable(uint64_t bytes, StreamCache* cache) {
  if (cache)
    if (auto l = cache->stable.find(bytes); l != cache->stable.end() && !l->second.empty()) {
      const uint64_t addr = l->second.front().addr;
      l->second.pop_front();
      return addr;
    }
  reclaim(false);
  return 0;
}

uint64_t DeviceState::find_room(uint64_t bytes, StreamCache* cache) {
  const bool splices = conn_->splices();
  if (const uint64_t addr = !splices ? best_fit(bytes, cache) : cache ? take_whole(bytes, *cache) : 0) return addr;
  reclaim(false);
  if (splices && alloc_.low_top() - conn_->device_base() + bytes <= kSpreadParts * most_used_ + kSpreadBytes)
    return best_fit(bytes, nullptr);
  if (!cache) return best_fit(bytes, nullptr);
  join_whole(*cache);
  if (const uint64_t addr = best_fit(bytes, cache)) return addr;
  return bytes > BidirAllocator::kSmallLowBytes && cache->runs.gather(alloc_, bytes) ? cache->runs.take(bytes) : 0;
}

// Of what the stream has freed and what is free for all, the smallest that will do.
uint64_t DeviceState::best_fit(uint64_t bytes, StreamCache* cache) {
  const bool small = bytes <= BidirAllocator::kSmallLowBytes;
  PendingRuns* const runs = !cache ? nullptr : small ? &cache->small : &cache->runs;
  const uint64_t own = runs ? runs->best(bytes) : 0, free = alloc_.best_low(bytes);
  if (own && (!free || own <= free)) return runs->take(bytes);
  return free ? alloc_.take(bytes, false) : 0;
}

uint64_t DeviceState::take_whole(uint64_t bytes, StreamCache& cache) {
  const auto list = cache.whole.find(bytes);
  if (list == cache.whole.end() || list->second.empty()) return 0;
  const uint64_t addr = list->second.back().addr;
  list->second.pop_back();
  return addr;
}

void DeviceState::join_whole(StreamCache& cache) {
  for (auto& [bytes, list] : std::exchange(cache.whole, {}))
    for (const Pending& p : list) (alloc_.is_small(p.addr) ? cache.small : cache.runs).give(p.addr, p.bytes, p.after);
}

int32_t DeviceState::free(uint64_t addr, StreamObj* stream, uint64_t hold_bytes) {
  std::lock_guard lock(mu_);
  heed_server();
  const auto it = live_.find(addr);
  if (it == live_.end() || it->second.kept) return kInvalidValue;
  if (stream && keep(*it, *stream, hold_bytes)) return kOk;
  if (hold_bytes) {
    holds_ = true;
    if (roomy_ && held_ < hold_bytes) held_ = std::min(held_ + it->second.bytes, hold_bytes);
  }
  const int32_t rc = drop(it, stream);
  give_back_credit();
  return rc;
}

int32_t DeviceState::tell_free(uint64_t addr) {
  return conn_->post(wire::Opcode::MEM_FREE, wire::MEM_FREE_req{addr, static_cast<uint32_t>(kept_bytes_), 0});
}

// Tells the server. The address is free again once nothing can touch it any more.
int32_t DeviceState::drop(Lives::iterator it, StreamObj* stream) {
  const auto [addr, a] = *it;
  const int32_t rc = tell_free(addr);
  live_.erase(it);
  used_ -= a.bytes;
  const Pending pending{addr, a.bytes, stream ? stream->last.load(std::memory_order_acquire) : 0};
  if (stream && a.stable) {
    pending_[stream->index].stable[a.bytes].push_back(pending);
  } else if (!stream || idle(*stream)) {
    alloc_.give(addr, a.bytes);
  } else {
    auto& cache = pending_[stream->index];
    if (conn_->splices())
      cache.whole[a.bytes].push_back(pending);
    else
      (alloc_.is_small(addr) ? cache.small : cache.runs).give(addr, a.bytes, pending.after);
    if (++cache.frees % kPendingBeforeReclaim == 0) reclaim(false);
  }
  return rc;
}

// Most operators of a training step take a small block and free another. Where a pool holds on to memory, such a block
// waits for the next allocation of its size on its stream, whose order keeps the old use before the new one, and the server
// hears of neither: two of three messages less. Not in a process that has a communicator: where ranks share a GPU, replica
// splicing wants to know when a buffer's contents are needed no more.
bool DeviceState::keep(Live& live, const StreamObj& stream, uint64_t hold_bytes) {
  Allocation& a = live.second;
  if (!keeps_ || a.bytes > std::min(kKeptBlockBytes, hold_bytes) || kept_bytes_ + a.bytes > kKeptBytes || a.stable ||
      a.piece || conn_->held())
    return false;
  a.kept = true;
  kept_bytes_ += a.bytes;
  pending_[stream.index].kept[a.bytes].push_back(&live);
  return true;
}

uint64_t DeviceState::reuse(uint64_t n, uint64_t wanted, const StreamObj& stream, uint64_t context) {
  const auto c = pending_.find(stream.index);
  if (c == pending_.end()) return 0;
  const auto l = c->second.kept.find(n);
  if (l == c->second.kept.end() || l->second.empty() || l->second.back()->second.context != context) return 0;
  Live& live = *l->second.back();
  l->second.pop_back();
  kept_bytes_ -= n;
  live.second = {n, wanted, false, next_buffer_id(), context};
  return live.first;
}

void DeviceState::drop_kept() {
  for (auto& [index, cache] : pending_)
    for (auto& [bytes, list] : std::exchange(cache.kept, {}))
      for (const Live* live : list) {
        kept_bytes_ -= live->second.bytes;
        static_cast<void>(drop(live_.find(live->first), &streams_[index]));
      }
}

void DeviceState::tell_all() {
  std::lock_guard lock(mu_);
  keeps_ = false;
  drop_kept();
}

int32_t DeviceState::free_behind(uint64_t addr, const std::vector<Use>& uses) {
  std::lock_guard lock(mu_);
  const auto it = live_.find(addr);
  if (it == live_.end() || it->second.kept) return kInvalidValue;
  const uint64_t bytes = it->second.bytes;
  // The server has its own order: what it was sent before still finds the memory.
  const int32_t rc = tell_free(addr);
  live_.erase(it);
  used_ -= bytes;
  if (over(uses))
    alloc_.give(addr, bytes);
  else
    retiring_.push_back({addr, bytes, uses});
  give_back_credit();
  return rc;
}

bool DeviceState::find(uint64_t addr, uint64_t* base, Allocation* out) {
  std::lock_guard lock(mu_);
  auto it = live_.upper_bound(addr);
  if (it == live_.begin()) return false;
  --it;
  if (addr - it->first >= it->second.bytes || it->second.hidden || it->second.kept) return false;
  *base = it->first;
  *out = it->second;
  return true;
}

int32_t DeviceState::take_credit(uint64_t bytes) {
  std::lock_guard lock(mu_);
  if (bytes > kDeviceBytes) return kOutOfMemory;
  const int32_t rc = credit(bytes);
  if (rc != kOk) return rc;
  used_ += bytes;
  held_ = std::min(held_, granted_ - used_);
  return rc;
}

void DeviceState::return_credit(uint64_t bytes) {
  std::lock_guard lock(mu_);
  used_ -= bytes;
  give_back_credit();
}

int32_t DeviceState::place(uint64_t addr, uint64_t bytes) {
  std::lock_guard lock(mu_);
  const wire::MEM_ALLOC_req req{addr, bytes, kPieceFlag, static_cast<uint32_t>(kept_bytes_)};
  const int32_t rc = conn_->post(wire::Opcode::MEM_ALLOC, req);
  if (rc == kOk) live_[addr] = {bytes, bytes, false, next_buffer_id(), 0, true, false};
  return rc;
}

int32_t DeviceState::unplace(uint64_t addr) {
  std::lock_guard lock(mu_);
  if (!live_.erase(addr)) return kInvalidValue;
  return tell_free(addr);
}

void DeviceState::set_hidden(uint64_t addr, bool hidden) {
  std::lock_guard lock(mu_);
  if (const auto it = live_.find(addr); it != live_.end()) it->second.hidden = hidden;
}

bool DeviceState::set_sync_memops(uint64_t addr, bool on) {
  auto set = [&](std::mutex& mu, std::map<uint64_t, Allocation>& live) {
    std::lock_guard lock(mu);
    auto it = live.upper_bound(addr);
    if (it == live.begin()) return false;
    --it;
    if (addr - it->first >= it->second.bytes || it->second.hidden || it->second.kept) return false;
    it->second.sync_memops = on;
    return true;
  };
  return set(mu_, live_) || set(pinned_mu_, pinned_live_);
}

void DeviceState::end_context(uint64_t context) {
  std::vector<uint64_t> mine, mine_pinned;
  {
    std::lock_guard lock(mu_);
    drop_kept();
    for (const auto& [addr, a] : live_)
      if (a.context == context) mine.push_back(addr);
  }
  {
    std::lock_guard lock(pinned_mu_);
    for (const auto& [addr, a] : pinned_live_)
      if (a.context == context) mine_pinned.push_back(addr);
  }
  // An error only says that the server is gone, and its memory with it.
  for (const uint64_t addr : mine) static_cast<void>(free(addr, nullptr));
  for (const uint64_t addr : mine_pinned) {
    // Kernels of the other GPUs may use managed memory; their streams are not those that the caller waited for.
    uint64_t base;
    Allocation a;
    for (int i = 0; i < kMaxDevices && find_pinned(addr, &base, &a) && a.advice; ++i)
      if (DeviceState* other = device_state_if_attached(i); other && other != this)
        static_cast<void>(other->wait_all());
    static_cast<void>(free_pinned(addr));
  }
  for (uint32_t i = 1; i < streams_made(); ++i)
    if (streams_[i].context == context && streams_[i].handle.load() != 0)
      static_cast<void>(destroy_stream(&streams_[i]));
}

int32_t DeviceState::info(uint64_t* free, uint64_t* total) {
  wire::MEM_INFO_rep rep{};
  Reply reply{&rep, sizeof(rep)};
  const int32_t rc = conn_->call(wire::Opcode::MEM_INFO, wire::MEM_INFO_req{}, &reply);
  if (rc != kOk) return rc;
  std::lock_guard lock(mu_);
  *free = rep.free + (granted_ - used_) + kept_bytes_;  // our own unused credit is free to us
  *total = rep.total;
  return kOk;
}

size_t DeviceState::other_holders(char* text, size_t bytes) {
  wire::MEM_INFO_rep rep{};
  Reply reply{&rep, sizeof(rep), text, bytes};
  return conn_->call(wire::Opcode::MEM_INFO, wire::MEM_INFO_req{1, 0}, &reply) == kOk ? reply.tail_got : 0;
}

uint64_t DeviceState::allocate_pinned(uint64_t bytes, int32_t* error) { return take_pinned(bytes, false, error); }

uint64_t DeviceState::take_pinned(uint64_t bytes, bool managed, int32_t* error) {
  const uint64_t n = (bytes + 4095) & ~4095ull;
  if (n < bytes || n > kPinnedBytes) {
    *error = kOutOfMemory;
    return 0;
  }
  std::lock_guard lock(pinned_mu_);
  const uint64_t addr = pinned_alloc_.take(n, false);
  if (!addr) {
    *error = kOutOfMemory;
    return 0;
  }
  // Real pages now: a full /dev/shm is an error of this call, not a SIGBUS at some later store. EINVAL: an old kernel.
  if (madvise(reinterpret_cast<void*>(addr), n, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    pinned_alloc_.give(addr, n);
    *error = kOutOfMemory;
    return 0;
  }
  if ((*error = conn_->post(wire::Opcode::HOST_ALLOC, wire::HOST_ALLOC_req{addr, n})) != kOk) {
    pinned_alloc_.give(addr, n);
    return 0;
  }
  Allocation a{n, bytes, false, next_buffer_id(), current_context()};
  if (managed) a.advice = std::make_shared<AdviceMap>(addr, addr + n);
  pinned_live_[addr] = std::move(a);
  return addr;
}

int32_t DeviceState::reached_by_kernels(uint64_t addr, uint64_t bytes) {
  wire::HOST_DEVICE_ADDRESS_rep rep{};
  Reply reply{&rep, sizeof(rep)};
  const wire::HOST_DEVICE_ADDRESS_req req{addr, bytes};
  const int32_t rc = conn_->call(wire::Opcode::HOST_DEVICE_ADDRESS, req, &reply);
  return rc == kOk && rep.addr != addr ? static_cast<int32_t>(kNotSupported) : rc;
}

int32_t DeviceState::learn(const DeviceState& owner, uint64_t addr, uint64_t bytes) {
  if (!(windows_ >> owner.ordinal_ & 1)) {
    const wire::HOST_WINDOW_req req{owner.conn_->window_number(), owner.conn_->window_gpu(), owner.conn_->slot()};
    if (const int32_t rc = conn_->call(wire::Opcode::HOST_WINDOW, req); rc != kOk) return rc;
    windows_ |= 1u << owner.ordinal_;
  }
  if (const int32_t rc = conn_->post(wire::Opcode::HOST_ALLOC, wire::HOST_ALLOC_req{addr, bytes}); rc != kOk) return rc;
  const int32_t rc = reached_by_kernels(addr, bytes);
  if (rc != kOk) static_cast<void>(conn_->post(wire::Opcode::HOST_FREE, wire::HOST_FREE_req{addr}));
  return rc;
}

int32_t DeviceState::learn_all() {
  std::vector<uint64_t> known;
  for (int i = 0; i < kMaxDevices; ++i) {
    DeviceState* other = device_state_if_attached(i);
    if (!other) continue;
    std::lock_guard lock(other->pinned_mu_);
    for (const auto& [addr, a] : other->pinned_live_) {
      if (!a.advice) continue;
      const int32_t rc = learn(*other, addr, a.bytes);
      if (rc == kOk) {
        known.push_back(addr);
        continue;
      }
      for (const uint64_t k : known) static_cast<void>(conn_->post(wire::Opcode::HOST_FREE, wire::HOST_FREE_req{k}));
      return rc;
    }
  }
  return kOk;
}

uint64_t DeviceState::allocate_managed(uint64_t bytes, int32_t* error) {
  std::lock_guard told(g_told_mu);
  const uint64_t addr = take_pinned(bytes, true, error);
  if (!addr) return 0;
  const uint64_t n = round_page(bytes);
  *error = reached_by_kernels(addr, n);
  int i = 0;
  for (; i < kMaxDevices && *error == kOk; ++i)
    if (DeviceState* other = device_state_if_attached(i); other && other != this) *error = other->learn(*this, addr, n);
  if (*error == kOk) return addr;
  forget(addr, i - 1);
  static_cast<void>(give_pinned(addr));
  return 0;
}

// An error only says that a server is gone, and what it knew is gone with it.
void DeviceState::forget(uint64_t addr, int devices) {
  for (int i = 0; i < devices; ++i)
    if (DeviceState* other = device_state_if_attached(i); other && other != this)
      static_cast<void>(other->conn_->post(wire::Opcode::HOST_FREE, wire::HOST_FREE_req{addr}));
}

int32_t DeviceState::free_pinned(uint64_t addr) {
  uint64_t base = 0;
  Allocation a;
  if (!find_pinned(addr, &base, &a) || base != addr || !a.advice) return give_pinned(addr);
  std::lock_guard told(g_told_mu);
  forget(addr, kMaxDevices);
  return give_pinned(addr);
}

int32_t DeviceState::give_pinned(uint64_t addr) {
  std::lock_guard lock(pinned_mu_);
  const auto it = pinned_live_.find(addr);
  if (it == pinned_live_.end()) return kInvalidValue;
  const uint64_t bytes = it->second.bytes;
  pinned_live_.erase(it);
  const int32_t rc = conn_->post(wire::Opcode::HOST_FREE, wire::HOST_FREE_req{addr});
  // Gives the pages back to the machine; the file stays as long as the window is mapped.
  if (bytes >= 1u << 20 && !conn_->keeps_host_pages()) madvise(reinterpret_cast<void*>(addr), bytes, MADV_REMOVE);
  pinned_alloc_.give(addr, bytes);
  return rc;
}

bool DeviceState::find_pinned(uint64_t addr, uint64_t* base, Allocation* out) {
  std::lock_guard lock(pinned_mu_);
  auto it = pinned_live_.upper_bound(addr);
  if (it == pinned_live_.begin()) return false;
  --it;
  if (addr - it->first >= it->second.bytes) return false;
  *base = it->first;
  *out = it->second;
  return true;
}

// -- streams --------------------------------------------------------------------------------------------------------

StreamObj* DeviceState::create_stream(uint32_t flags, int32_t priority, uint64_t context, int32_t* error) {
  std::lock_guard lock(stream_mu_);
  uint32_t i = kStreams;
  // An index is used again only when the server has finished everything of its last owner, so that no late completion
  // of the old stream can lower the counter of the new one.
  for (size_t k = 0; k < free_streams_.size(); ++k) {
    if (!idle(streams_[free_streams_[k]])) continue;
    i = free_streams_[k];
    free_streams_.erase(free_streams_.begin() + static_cast<std::ptrdiff_t>(k));
    break;
  }
  if (i == kStreams && next_stream_.load(std::memory_order_relaxed) < kStreams) i = next_stream_.fetch_add(1);
  if (i == kStreams) {
    *error = kOutOfMemory;
    return nullptr;
  }
  StreamObj& s = streams_[i];
  const VHandle handle = VHandle::make(HandleKind::kStream, ++stream_serial_ << 4 | static_cast<uint64_t>(ordinal_),
                                       static_cast<uint16_t>(i));
  if ((*error = conn_->post(wire::Opcode::STREAM_CREATE, wire::STREAM_CREATE_req{handle, flags, priority})) != kOk) {
    free_streams_.push_back(i);
    return nullptr;
  }
  s.flags = flags;
  s.priority = priority;
  s.attributes.clear();  // of the last owner of this place; nobody knows the new one yet
  s.context = context;
  s.id = stream_serial_;
  s.capture.store(0, std::memory_order_relaxed);
  s.handle.store(handle.value, std::memory_order_release);
  return &s;
}

int32_t DeviceState::destroy_stream(StreamObj* s) {
  std::lock_guard lock(stream_mu_);
  const uint64_t handle = s->handle.exchange(0);
  if (handle == 0) return kInvalidHandle;
  const int32_t rc = conn_->post(wire::Opcode::STREAM_DESTROY, wire::STREAM_DESTROY_req{VHandle{handle}});
  free_streams_.push_back(s->index);
  return rc;
}

int32_t DeviceState::wait_stream(const StreamObj& s) {
  if (const int32_t late = conn_->take_late_error(); late != kOk) return late;
  const int32_t rc = conn_->wait(s.index, s.last.load(std::memory_order_acquire));
  flush_output();
  if (rc != kOk) return rc;
  return conn_->take_late_error();
}

int32_t DeviceState::wait_all() {
  const uint32_t n = streams_made();
  int32_t first = conn_->error();
  for (uint32_t i = 0; i < n; ++i)
    if (!idle(streams_[i])) want(streams_[i]);
  for (uint32_t i = 0; i < n; ++i) {
    if (idle(streams_[i])) continue;
    const int32_t rc = conn_->wait(i, streams_[i].last.load(std::memory_order_acquire));
    if (first == kOk) first = rc;
  }
  if (first == kOk) first = conn_->error_now_and_then();
  flush_output();
  return first != kOk ? first : conn_->take_late_error();
}

// -- what kernels print ---------------------------------------------------------------------------------------------

void DeviceState::fetch_output() {
  if (!ran_.exchange(false, std::memory_order_relaxed) && assertion_said_.exchange(true)) return;
  if (conn_->error() == kAssert) assertion_said_.store(true);
  t_state.past_fault = true;
  for (bool more = true; more;) {
    uint8_t text[sizeof(ReplySlot::data)];
    wire::OUTPUT_rep rep{};
    Reply reply{&rep, sizeof(rep), text, sizeof(text)};
    if (conn_->call(wire::Opcode::OUTPUT, wire::OUTPUT_req{}, &reply) != kOk) break;  // its own caller will hear of it
    if (rep.out_bytes > reply.tail_got || rep.err_bytes > reply.tail_got - rep.out_bytes) break;
    if (rep.out_bytes) fwrite(text, 1, rep.out_bytes, stdout);
    if (rep.err_bytes) fwrite(text + rep.out_bytes, 1, rep.err_bytes, stderr);
    more = rep.more != 0;
  }
  t_state.past_fault = false;
}

// -- look-ups -------------------------------------------------------------------------------------------------------

DeviceState* device_state_if_attached(int ordinal) {
  return ordinal >= 0 && ordinal < kMaxDevices ? g_states[ordinal].load(std::memory_order_acquire) : nullptr;
}

DeviceState* device_state(int ordinal, int32_t* error) {
  if (DeviceState* s = device_state_if_attached(ordinal)) return s;
  Attachment* c = device(ordinal, error);
  if (!c) return nullptr;
  std::lock_guard lock(g_states_mu);
  if (DeviceState* s = g_states[ordinal].load(std::memory_order_relaxed)) return s;
  auto* s = new DeviceState(c, ordinal);
  std::lock_guard told(g_told_mu);
  if ((*error = s->learn_all()) != kOk) {
    log(Level::kError,
        "GPU %d cannot be used by this process: it has managed memory, which kernels of GPU %d do not reach (error "
        "%d); free it first, or use cuMemAlloc",
        ordinal, ordinal, *error);
    delete s;
    return nullptr;
  }
  g_states[ordinal].store(s, std::memory_order_release);
  return s;
}

uint64_t current_context() { return t_state.depth ? t_state.contexts[t_state.depth - 1] : 0; }

uint32_t context_flags(ContextObj& context) {
  if (!context.primary) return std::atomic_ref(context.flags).load();
  const DeviceState* d = device_state_if_attached(context.device);
  return d ? d->primary_flags.load() : 0;
}

int32_t current_device(DeviceState** out) {
  const ContextObj* c = contexts().get(current_context());
  if (!c) return kInvalidContext;
  int32_t error = kOk;
  *out = device_state(c->device, &error);
  return error;
}

namespace {

pthread_key_t per_thread_key() {
  // The thread's own streams end with the thread.
  static const pthread_key_t key = [] {
    pthread_key_t k;
    pthread_key_create(&k, [](void*) {
      for (int d = 0; d < kMaxDevices; ++d) {
        DeviceState* s = device_state_if_attached(d);
        const uint64_t handle = t_state.default_stream[d];
        // The end of a context takes its streams along; the place may be another stream's by now.
        StreamObj* own = s && handle ? s->stream_at(VHandle{handle}.index()) : nullptr;
        if (own && own->handle.load() == handle) static_cast<void>(s->destroy_stream(own));
        t_state.default_stream[d] = 0;
      }
    });
    return k;
  }();
  return key;
}

StreamObj* per_thread_stream(DeviceState* d, int32_t* error) {
  uint64_t& handle = t_state.default_stream[d->ordinal()];
  if (handle) {
    StreamObj* s = d->stream_at(VHandle{handle}.index());
    if (s->handle.load(std::memory_order_acquire) == handle) return s;
    // Gone with its context (cuDevicePrimaryCtxReset): the thread gets another.
  }
  StreamObj* s = d->create_stream(0, 0, current_context(), error);  // a blocking stream, as CUDA's is
  if (!s) return nullptr;
  handle = s->handle.load();
  pthread_setspecific(per_thread_key(), &t_state);
  return s;
}

// Not inlined: so the look-up of a handle, which every launch makes, need not save registers.
[[gnu::noinline]] int32_t default_stream(uint64_t handle, StreamObj** stream, DeviceState** device_out) {
  const int32_t rc = current_device(device_out);
  if (rc != kOk) return rc;
  if (handle == 2 || (handle == 0 && t_state.per_thread_default)) {
    int32_t error = kOk;
    *stream = per_thread_stream(*device_out, &error);
    return error;
  }
  *stream = (*device_out)->legacy();
  return kOk;
}

}  // namespace

int32_t resolve_stream(uint64_t handle, StreamObj** stream, DeviceState** device_out) {
  if (handle > 2) {
    if (VHandle{handle}.kind() != HandleKind::kStream) return kInvalidHandle;
    DeviceState* d = device_state_if_attached(ContextMap::device_of(handle));
    const uint16_t index = VHandle{handle}.index();
    if (!d || index >= kStreams) return kInvalidHandle;
    StreamObj* s = d->stream_at(index);
    if (s->handle.load(std::memory_order_acquire) != handle) return kInvalidHandle;
    *stream = s;
    *device_out = d;
    return kOk;
  }
  return default_stream(handle, stream, device_out);
}

}  // namespace devproxy::client
