// SPDX-License-Identifier: Apache-2.0
// One process's attachment to the device-proxy server of one GPU. The server has a Connection for it (csrc/server/connection.h).
//
// Threads: every member is used by any thread of the job. The ring and the reply slots need no lock; a reply slot has
// one owning thread. After attach the only descriptor is the link, and check_alive its only use.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/result.h"
#include "devproxy/csrc/client/sends.h"
#include "devproxy/csrc/client/thread_state.h"
#include "devproxy/csrc/transport/segment_view.h"
#include "devproxy/csrc/wire/attach.h"
#include "wire.gen.h"

namespace devproxy::client {

// This process's kernels are a framework's, which runs them in the server (wire/attach.h, AttachKind::kFramework). Set
// by the framework's plugin (devproxy_use_framework) before the first attach.
extern std::atomic<bool> g_framework;

// Tells the server of the job's GPU what this process will ask it to load, so that it can begin: see AttachKind::kWarm.
// Before the first attach, from the framework's plugin. No error: then it is loaded when it is asked for.
void warm(int gpu, const char* description);

// The properties of the device of JOB_DIR/gpu<server_gpu>.sock, without attaching to it. Else as attach().
[[nodiscard]] int32_t ask_facts(const char* job_dir, int server_gpu, DeviceProps* props);

// Bulk data that follows a request.
struct Bulk {
  const void* data = nullptr;
  size_t bytes = 0;
};

struct Reply {
  void* rep = nullptr;  // the reply struct, rep_bytes long
  size_t rep_bytes = 0;
  void* tail = nullptr;  // what follows it, at most tail_bytes; tail_got says how much came
  size_t tail_bytes = 0;
  size_t tail_got = 0;
};

class Attachment {
 public:
  // Attaches to JOB_DIR/gpu<server_gpu>.sock; ordinal is what the job calls the device. kOk, or a result number after
  // one log line that says why.
  [[nodiscard]] int32_t attach(const char* job_dir, int server_gpu, int ordinal);

  // -- messages ---------------------------------------------------------------------------------------------------
  // Posts without waiting. `end` (may be null) receives the ring position that stream completion counters compare to.
  template <class Req>
  [[nodiscard]] int32_t post(wire::Opcode op, const Req& req, uint64_t* end = nullptr) {
    return post_bytes(op, &req, sizeof(Req), Bulk{}, 0, end);
  }
  // Posts a request whose inline tail of tail_bytes (<= kMaxInlineBytes) is written in place by fill(uint8_t* tail):
  // the launch path, which packs its parameters straight into the ring. Inlined, so that the request is made there too.
  template <class Req, class Fill>
  [[nodiscard, gnu::always_inline]] int32_t post_in_place(wire::Opcode op, const Req& req, size_t tail_bytes, Fill fill,
                                                          uint64_t* end) {
    CommandRing::Reservation r;
    uint8_t* p = nullptr;
    if (const int32_t e = begin_record(op, sizeof(Req) + tail_bytes, 0, &r, &p); __builtin_expect(e != kOk, 0))
      return e;
    memcpy(p, &req, sizeof(Req));
    fill(p + sizeof(Req));
    end_record(r);
    *end = r.end();
    return kOk;
  }
  template <class Req>
  [[nodiscard]] int32_t post_bulk(wire::Opcode op, Req& req, Bulk bulk, uint64_t* end = nullptr) {
    if (__builtin_expect(bulk.bytes > kMaxInlineBytes, 0)) return post_chunked(op, req, bulk, 0, end);
    req.bulk_bytes = static_cast<uint32_t>(bulk.bytes);
    req.bulk_chunks = 0;
    return post_bytes(op, &req, sizeof(Req), bulk, 0, end);
  }
  // Posts and waits for the answer.
  template <class Req>
  [[nodiscard]] int32_t call(wire::Opcode op, const Req& req, Reply* reply = nullptr) {
    return call_with(reply, [&](uint32_t seq) { return post_bytes(op, &req, sizeof(Req), Bulk{}, seq, nullptr); });
  }
  template <class Req>
  [[nodiscard]] int32_t call_bulk(wire::Opcode op, Req& req, Bulk bulk, Reply* reply = nullptr) {
    return call_with(reply, [&](uint32_t seq) {
      if (bulk.bytes > kMaxInlineBytes) return post_chunked(op, req, bulk, seq, nullptr);
      req.bulk_bytes = static_cast<uint32_t>(bulk.bytes);
      req.bulk_chunks = 0;
      return post_bytes(op, &req, sizeof(Req), bulk, seq, nullptr);
    });
  }

  // -- completion -------------------------------------------------------------------------------------------------
  bool completed(uint32_t stream_index, uint64_t position) const {
    return view_.streams()[stream_index].completed.load(std::memory_order_acquire) >= position;
  }
  // Says that somebody waits for that position, or looks again and again whether it is complete. Once for each position.
  // False where the ring has no room for it: it is a hint and waits for nobody.
  bool want(uint32_t stream_index, uint64_t position);
  // Waits until the stream has finished everything up to position; ends early when the server is gone or poisoned.
  [[nodiscard]] int32_t wait(uint32_t stream_index, uint64_t position);

  // -- chunks -----------------------------------------------------------------------------------------------------
  // Index of a free chunk, now owned by the caller; waits for one. kChunks and *error where the server is gone.
  [[nodiscard]] uint32_t take_chunk(int32_t* error);
  void free_chunk(uint32_t index);
  uint8_t* chunk(uint32_t index) const { return view_.chunk(index); }

  // -- state ------------------------------------------------------------------------------------------------------
  // The sticky error, or kOk. Cheap: two relaxed loads.
  int32_t error() const {
    if (__builtin_expect(lost_.load(std::memory_order_relaxed), 0)) return lost_result();
    return view_.control()->sticky_error.load(std::memory_order_relaxed);
  }
  bool splices() const { return view_.mapped() && view_.control()->splices.load(std::memory_order_relaxed) != 0; }
  // Changes where the server wants unused credit back.
  uint32_t credit_wanted() const {
    return view_.mapped() ? view_.control()->credit_wanted.load(std::memory_order_relaxed) : 0;
  }
  // devproxy holds the job (ControlPage::held).
  bool held() const { return view_.mapped() && view_.control()->held.load(std::memory_order_relaxed) != 0; }
  // Like error(), and looks at the link when the last look is older than 100 ms: for calls that only poll.
  int32_t error_now_and_then();
  // Text behind the sticky error, or behind the loss of the server; empty when there is none.
  const char* error_text() const;
  // A late error of this thread's earlier asynchronous calls, returned once.
  int32_t take_late_error() {
    auto& late = view_.replies()[thread_slot()].late_error;
    return late.load(std::memory_order_relaxed) == kOk ? kOk : late.exchange(kOk, std::memory_order_relaxed);
  }

  ControlPage* control() const { return view_.control(); }
  const DeviceProps& props() const { return props_; }
  uint32_t slot() const { return slot_; }
  bool keeps_host_pages() const { return keeps_host_pages_; }
  // What names the pinned window to the other servers of the job: the server that made it, and its connection's number.
  uint32_t window_gpu() const { return window_gpu_; }
  uint64_t window_number() const { return window_number_; }
  uint64_t device_base() const { return range_base(slot_); }
  uint64_t pinned_base() const { return range_base(slot_) + kDeviceBytes; }
  bool is_device(uint64_t addr) const { return addr - device_base() < kDeviceBytes; }
  bool is_pinned(uint64_t addr) const { return addr - pinned_base() < kPinnedBytes; }
  void close_in_child();
  // The last sequence number answered in a slot: where its next owner goes on.
  uint32_t last_seq(uint16_t slot) const { return view_.replies()[slot].seq.load(std::memory_order_acquire); }

 private:
  // The two halves of every post. begin_record: reserves, waits for space, writes the header but its commit word;
  // *payload is where the request goes. From its success to end_record the thread holds a reservation: no call between.
  [[nodiscard, gnu::always_inline]] int32_t begin_record(wire::Opcode op, size_t payload_bytes, uint32_t seq,
                                                         CommandRing::Reservation* r, uint8_t** payload) {
    Sends::check(static_cast<uint16_t>(op));
    if (const int32_t e = error(); __builtin_expect(e != kOk, 0))
      if (!t_state.past_fault || lost_.load(std::memory_order_relaxed)) return e;
    CommandRing& ring = view_.ring();
    *r = ring.reserve(sizeof(MsgHeader) + payload_bytes);
    if (__builtin_expect(!has_space(*r), 0))
      if (const int32_t e = wait_for_space(*r); e != kOk) return e;
    uint8_t* p = ring.at(r->pos);
    auto* head = reinterpret_cast<MsgHeader*>(p);
    head->opcode = static_cast<uint16_t>(op);
    head->slot = thread_slot();
    head->payload_bytes = static_cast<uint32_t>(payload_bytes);
    head->seq = seq;
    *payload = p + sizeof(MsgHeader);
    return kOk;
  }
  void end_record(const CommandRing::Reservation& r) {
    if (__builtin_expect(view_.ring().publish(r), 0)) wake_server();
  }
  void wake_server();
  [[nodiscard]] int32_t post_bytes(wire::Opcode op, const void* req, size_t req_bytes, Bulk bulk, uint32_t seq,
                                   uint64_t* end);
  template <class Req>
  [[nodiscard]] int32_t post_chunked(wire::Opcode op, Req& req, Bulk bulk, uint32_t seq, uint64_t* end) {
    uint16_t indices[kChunks];
    uint32_t n = 0;
    const int32_t rc = fill_chunks(bulk, indices, &n);
    if (rc != kOk) return rc;
    req.bulk_bytes = static_cast<uint32_t>(bulk.bytes);
    req.bulk_chunks = n;
    return post_bytes(op, &req, sizeof(Req), Bulk{indices, n * sizeof(uint16_t)}, seq, end);
  }
  template <class Post>
  int32_t call_with(Reply* reply, Post post) {
    const uint16_t slot = thread_slot();
    std::unique_lock<std::mutex> shared(shared_slot_mu_, std::defer_lock);
    if (slot == kSharedSlot) shared.lock();
    uint32_t& seq = slot == kSharedSlot ? shared_seq_ : t_state.seq[device_];
    if (++seq == 0) seq = 1;
    const int32_t rc = post(seq);
    return rc == kOk ? await_reply(slot, seq, reply) : rc;
  }
  [[nodiscard]] int32_t fill_chunks(Bulk bulk, uint16_t* indices, uint32_t* n);
  [[nodiscard]] int32_t await_reply(uint16_t slot, uint32_t seq, Reply* reply);
  bool has_space(const CommandRing::Reservation& r) {
    if (r.end() - seen_head_.load(std::memory_order_acquire) <= view_.ring().capacity()) return true;
    seen_head_.store(view_.control()->head.value.load(std::memory_order_acquire), std::memory_order_release);
    return view_.ring().has_space(r);
  }
  [[nodiscard]] int32_t wait_for_space(const CommandRing::Reservation& r);
  [[nodiscard]] int32_t sleep_for_space(const CommandRing::Reservation& r);
  void note_room_wait(uint64_t began_ns);  // for the server's trace; it ends now
  void say_refusal(const char* text);
  int32_t lost_result() const;
  bool check_alive();  // asks the link; marks the connection lost when no server holds its other end

  SegmentView view_;
  int device_ = -1;
  int link_ = -1;  // write end of the FIFO that the server reads
  uint32_t slot_ = 0;
  bool keeps_host_pages_ = false;
  uint32_t window_gpu_ = 0;
  uint64_t window_number_ = 0;
  std::atomic<bool> lost_{false};
  std::atomic<uint64_t> last_look_us_{0};
  // The newest head that any thread has seen: most posts need not touch the line that the server writes. Stored with
  // release and read with acquire, so that whoever believes it also sees the zeroed commit words behind it.
  std::atomic<uint64_t> seen_head_{0};
  std::atomic<uint64_t> wanted_[kStreams] = {};
  std::mutex shared_slot_mu_;
  uint32_t shared_seq_ = 0;
  bool chunk_has_pages_[kChunks] = {};
  std::mutex chunk_mu_;  // one multi-chunk message gathers at a time, so that two cannot starve each other
  DeviceProps props_{};
};

}  // namespace devproxy::client
