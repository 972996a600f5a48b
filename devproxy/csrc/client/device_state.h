// SPDX-License-Identifier: Apache-2.0
// What the client keeps of one device: contexts, streams, events, memory. All of it is plain process memory, so it
// travels in the process image and needs no message to be asked.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "devproxy/csrc/client/alloc_bidir.h"
#include "devproxy/csrc/client/attachment.h"
#include "devproxy/csrc/client/handle_map.h"
#include "devproxy/csrc/client/process.h"

namespace devproxy::client {

struct ContextObj {
  int device = 0;
  bool primary = false;
  uint32_t flags = 0;
  uint64_t id = 0;
  uint32_t attached = 0;  // uses beside the one that made it (cuCtxAttach)
};

struct StreamObj {
  std::atomic<uint64_t> handle{0};
  std::atomic<uint64_t> last{0};     // ring position behind the newest command posted on it
  std::atomic<uint64_t> capture{0};  // id of the capture sequence that it is part of (interceptors/graph); 0: none
  uint64_t context = 0;
  uint64_t id = 0;
  uint32_t flags = 0;
  std::atomic<int32_t> priority{0};
  int device = 0;
  uint32_t index = 0;
  // What the job set of the vendor's attributes but the priority: number -> value. Guarded by attributes_mu (sync).
  std::map<uint32_t, std::array<uint64_t, 4>> attributes;

  void note(uint64_t end) {
    uint64_t seen = last.load(std::memory_order_relaxed);
    while (seen < end && !last.compare_exchange_weak(seen, end, std::memory_order_release)) {}
  }
};

struct EventObj {
  int device = 0;
  uint32_t flags = 0;
  // stream index << 54 | ring position of the newest record; 0 = never recorded. One word, so that a query beside a
  // record sees the old pair or the new one.
  std::atomic<uint64_t> record{0};
  static constexpr int kIndexShift = 54;
  std::atomic<uint64_t> capture{0};  // id of the capture sequence that it was last recorded in; 0: in none
};

// What this thread allocates from now on is stable (parameters, states of optimizers), until it has taken back what it
// has added.
void make_stable(int by);

class AdviceMap;

struct Allocation {
  uint64_t bytes = 0;  // rounded to the granule
  uint64_t wanted = 0;
  bool stable = false;
  uint64_t id = 0;       // unique in the process: CU_POINTER_ATTRIBUTE_BUFFER_ID
  uint64_t context = 0;  // of the thread that allocated; destroying a context frees what is its
  bool piece = false;    // a mapping of interceptors/vmm: one range with its neighbours, and not to be freed as memory
  bool hidden = false;   // it is unmapped, and keeps its contents
  bool kept = false;     // the program has freed it, and the server was not told (DeviceState::keep)
  bool sync_memops = false;             // synchronous operations on it wait, also those that need not
  std::shared_ptr<AdviceMap> advice{};  // of managed memory (interceptors/managed), which lies in the pinned window
};

// Up to where a stream has used something.
struct Use {
  uint32_t stream = 0;  // index
  uint64_t position = 0;
};

// Memory and streams of one device. Locks: mu guards the allocator, never held over a message that waits but
// MEM_CREDIT and MEM_INFO (which cannot block on the job); the making of states < what every server is told (managed memory) <
// pinned_mu.
class DeviceState {
 public:
  explicit DeviceState(Attachment* attachment, int ordinal);
  ~DeviceState() { delete[] streams_; }  // of one that nobody has seen

  Attachment& conn() { return *conn_; }
  int ordinal() const { return ordinal_; }

  // -- memory -----------------------------------------------------------------------------------------------------
  // A device address, or 0 and *error. stream: on whose order the memory becomes usable (reuse of what was freed in the
  // order of the same stream needs no wait); nullptr: usable at once on every stream. A stable buffer where the thread
  // makes those (make_stable).
  [[nodiscard]] uint64_t allocate(uint64_t bytes, StreamObj* stream, int32_t* error);
  // Usable at once, and of no context: it outlives the one that is current.
  [[nodiscard]] uint64_t allocate_for_graph(uint64_t bytes, int32_t* error);
  // Frees in the order of `stream`; nullptr: the caller has waited for every stream. hold_bytes: up to so much unused
  // memory its pool holds on to, where the GPU has room.
  [[nodiscard]] int32_t free(uint64_t addr, StreamObj* stream, uint64_t hold_bytes = 0);
  // What pools hold on to, and that they hold no more than `bytes` from now on.
  uint64_t held();
  void hold_at_most(uint64_t bytes);
  // From now on the server is told of each allocation and release.
  void tell_all();
  // Frees behind what several streams have been given to do. Waits for nothing: only the address waits.
  [[nodiscard]] int32_t free_behind(uint64_t addr, const std::vector<Use>& uses);
  // The live allocation around addr.
  bool find(uint64_t addr, uint64_t* base, Allocation* out);
  [[nodiscard]] int32_t info(uint64_t* free, uint64_t* total);
  // The other jobs with memory of this GPU, as text without a NUL; its length.
  size_t other_holders(char* text, size_t bytes);
  // Frees what was allocated, and destroys the streams that were made, under a context. Precondition: every stream
  // idle.
  void end_context(uint64_t context);

  // Memory at an address outside of what allocate() hands out (interceptors/vmm). Credit for it is taken before.
  [[nodiscard]] int32_t take_credit(uint64_t bytes);
  void return_credit(uint64_t bytes);
  [[nodiscard]] int32_t place(uint64_t addr, uint64_t bytes);
  [[nodiscard]] int32_t unplace(uint64_t addr);
  // The allocation around addr, of device memory or of the pinned window. False where there is none.
  bool set_sync_memops(uint64_t addr, bool on);
  void hide(uint64_t addr) { set_hidden(addr, true); }
  void show(uint64_t addr) { set_hidden(addr, false); }

  [[nodiscard]] uint64_t allocate_pinned(uint64_t bytes, int32_t* error);
  // The same, and every server of the process is told of it, also those that it attaches to later: all their kernels
  // reach it. kNotSupported where one's do not.
  [[nodiscard]] uint64_t allocate_managed(uint64_t bytes, int32_t* error);
  [[nodiscard]] int32_t free_pinned(uint64_t addr);
  bool find_pinned(uint64_t addr, uint64_t* base, Allocation* out);

  // -- streams ----------------------------------------------------------------------------------------------------
  // nullptr and *error when the table is full or the server is gone.
  StreamObj* create_stream(uint32_t flags, int32_t priority, uint64_t context, int32_t* error);
  [[nodiscard]] int32_t destroy_stream(StreamObj* s);
  StreamObj* legacy() { return &streams_[0]; }
  StreamObj* stream_at(uint32_t index) { return &streams_[index]; }
  uint32_t streams_made() const { return next_stream_.load(std::memory_order_acquire); }
  bool idle(const StreamObj& s) const { return conn_->completed(s.index, s.last.load(std::memory_order_acquire)); }
  [[nodiscard]] int32_t wait_stream(const StreamObj& s);
  // Attachment::want for the stream's last command, if it is not complete.
  void want(const StreamObj& s) {
    if (!idle(s)) conn_->want(s.index, s.last.load(std::memory_order_acquire));
  }
  [[nodiscard]] int32_t wait_all();

  // -- what kernels print. A module that does is loaded; a kernel was launched.
  void note_printing() { prints_.store(true, std::memory_order_relaxed); }
  void note_launch() {
    if (__builtin_expect(prints_.load(std::memory_order_relaxed), 0)) ran_.store(true, std::memory_order_relaxed);
  }
  // Text of kernels that have completed goes to this process's own stdout, as the driver's would: behind what the
  // program itself has printed so far. Called where CUDA synchronises. Costs nothing where no kernel prints.
  void flush_output() {
    if (__builtin_expect(ran_.load(std::memory_order_relaxed) || conn_->error() == kAssert, 0)) fetch_output();
  }

  std::atomic<int> primary_refs{0};
  std::atomic<uint64_t> primary{0};  // VHandle of the primary context, made at the first retain, then for ever
  std::atomic<uint32_t> primary_flags{0};

 private:
  using Lives = std::map<uint64_t, Allocation>;  // by address
  using Live = Lives::value_type;
  struct Pending {
    uint64_t addr, bytes;
    uint64_t after;  // free for other streams once the freeing stream has finished this position
  };
  struct StreamCache {
    PendingRuns runs, small;  // small: where BidirAllocator has those
    size_t frees = 0;         // that came here
    // Where replicas are spliced: for the next one of their size only, until there is much more than the job needs.
    std::unordered_map<uint64_t, std::vector<Pending>> whole;
    std::unordered_map<uint64_t, std::vector<Live*>> kept;
    // Stable buffers wait for the next one of their size, first in first out, until there is no other room. So the
    // program alone decides where they lie, and not how far the stream is: equal ranks have them at equal offsets.
    std::unordered_map<uint64_t, std::deque<Pending>> stable;
  };
  struct Retiring {
    uint64_t addr, bytes;
    std::vector<Use> uses;  // free once all of them are over
  };
  uint64_t allocate(uint64_t bytes, StreamObj* stream, bool stable, uint64_t context, int32_t* error);
  bool over(const std::vector<Use>& uses) const;
  // All mu held.
  bool keep(Live& live, const StreamObj& stream, uint64_t hold_bytes);
  uint64_t reuse(uint64_t n, uint64_t wanted, const StreamObj& stream, uint64_t context);
  void drop_kept();
  int32_t drop(Lives::iterator live, StreamObj* stream);
  int32_t tell_free(uint64_t addr);
  // Finished pending runs go back to the allocator; stable ones too only where they must. mu held
  void reclaim(bool stable);
  // Addresses of what is free, for the stream of `cache`; 0: the range must grow. All mu held.
  uint64_t take_stable(uint64_t bytes, StreamCache* cache);
  uint64_t find_room(uint64_t bytes, StreamCache* cache);
  uint64_t best_fit(uint64_t bytes, StreamCache* cache);
  static uint64_t take_whole(uint64_t bytes, StreamCache& cache);
  void join_whole(StreamCache& cache);
  int32_t credit(uint64_t bytes);  // makes sure that `bytes` more may live. mu held
  void look_for_room();            // mu held
  void heed_server();              // mu held
  void give_back_credit();         // mu held
  uint64_t take_pinned(uint64_t bytes, bool managed, int32_t* error);
  [[nodiscard]] int32_t learn(const DeviceState& owner, uint64_t addr, uint64_t bytes);  // managed memory. Told locked
  [[nodiscard]] int32_t learn_all();                                                     // Told locked
  [[nodiscard]] int32_t reached_by_kernels(uint64_t addr, uint64_t bytes);
  void forget(uint64_t addr, int devices);  // of the first `devices`, the other ones' servers. Told locked
  [[nodiscard]] int32_t give_pinned(uint64_t addr);
  friend DeviceState* device_state(int ordinal, int32_t* error);
  void fetch_output();
  void set_hidden(uint64_t addr, bool hidden);

  std::atomic<bool> prints_{false}, ran_{false}, assertion_said_{false};

  Attachment* conn_;
  int ordinal_;
  std::mutex mu_;
  BidirAllocator alloc_;
  Lives live_;
  std::unordered_map<uint32_t, StreamCache> pending_;  // by stream index
  std::vector<Retiring> retiring_;
  const uint64_t step_, keep_;  // of credit, in bytes: how much is asked for at once, and kept unused in any case
  // Credit: of granted_, used_ is allocated, and of the rest pools hold on to held_.
  uint64_t granted_ = 0, used_ = 0, held_ = 0;
  uint64_t most_used_ = 0;
  uint64_t kept_bytes_ = 0;  // of used_: freed, and kept
  bool keeps_ = true;
  // Pools hold on to nothing where the GPU is nearly full: another job, or a framework in the server, may want it.
  bool holds_ = false, roomy_ = false;  // a pool wants to; it may
  uint64_t look_at_ = 0;                // the next look for room is when so much is granted
  uint32_t wanted_ = 0;                 // Attachment::credit_wanted(), as last seen
  uint32_t tight_ = 0;                  // how often more was granted since the last look that found no room

  std::mutex pinned_mu_;
  BidirAllocator pinned_alloc_;
  std::map<uint64_t, Allocation> pinned_live_;
  uint32_t windows_ = 0;  // bits of the devices whose windows our server knows

  std::mutex stream_mu_;
  StreamObj* streams_;  // kStreams of them
  std::atomic<uint32_t> next_stream_{1};
  std::vector<uint32_t> free_streams_;
  uint64_t stream_serial_ = 0;
};

// Names an allocation, or a variable, for as long as the process lives: CU_POINTER_ATTRIBUTE_BUFFER_ID.
uint64_t next_buffer_id();

using EventMap = HandleMap<EventObj, HandleKind::kEvent>;
using ContextMap = HandleMap<ContextObj, HandleKind::kContext>;
EventMap& events();
ContextMap& contexts();

// State of a device, made at its first use; nullptr and *error otherwise.
DeviceState* device_state(int ordinal, int32_t* error);
DeviceState* device_state_if_attached(int ordinal);

// The device of the calling thread's current context; kInvalidContext where it has none or a dead one.
[[nodiscard]] int32_t current_device(DeviceState** out);
uint64_t current_context();
// What the job set: of a primary context, the device's.
uint32_t context_flags(ContextObj& context);

// The stream behind what the job passed: 0 and 1 the legacy stream of the current device (0 the thread's own under
// per-thread default streams), 2 the thread's own, else a handle.
[[nodiscard]] int32_t resolve_stream(uint64_t handle, StreamObj** stream, DeviceState** device);

}  // namespace devproxy::client
