// SPDX-License-Identifier: Apache-2.0
// The server's end of what it shares with one client: the segment (ring, reply slots, counters, chunks), the client's
// own pinned window, and the link that tells when the client is gone. It moves messages and answers; what they mean is
// not known here.
//
// Every byte of a message is read once, into private memory, and checked there; the client may write on meanwhile.
//
// Threads: the dispatch thread is the one consumer of the ring. Device threads call late_error(), post_host_function()
// and the lifeline. The server thread makes and opens it, polls the link, rings the doorbell; while the client is
// parked it may read everything.
#pragma once

#include <climits>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include "devproxy/csrc/base/clock.h"
#include "devproxy/csrc/base/futex.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/lifeline.h"
#include "devproxy/csrc/server/message.h"
#include "devproxy/csrc/server/shared_gate.h"
#include "devproxy/csrc/transport/segment_view.h"
#include "devproxy/csrc/wire/attach.h"
#include "devproxy/csrc/wire/segment.h"

namespace devproxy::server {

class Endpoint {
 public:
  // stem: the path of the client's files in the job's folder, without the ending.
  Endpoint(const std::string& stem, uint32_t slot)
      : slot_(slot), segment_path_(stem + ".seg"), pinned_path_(stem + ".pinned"), link_path_(stem + ".link") {}
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;

  // -- the files; server thread

  Status make_files();
  Status open_files();
  // False: the client went, and its server has removed them.
  bool has_files() const { return access(link_path_.c_str(), F_OK) == 0; }
  // The segment is a new one: says what it is.
  void begin();
  // The segment is another server's, or was filled from a dump: goes on at its place in the ring.
  Status go_on(uint64_t position);
  // Of the device behind it now, which after a restore may be another kind.
  void say_habits(bool wants_awaited, bool splices);
  // Has the client closed its end of the link? Asked by a server that opened its own end later, to which poll() would
  // never say so.
  bool client_went() const;
  // They belong to a successor or predecessor: our end leaves them. Until own().
  void keep_files() { keep_files_ = true; }
  bool keeps_files() const { return keep_files_; }
  // They are this server's, also for the crash handler.
  void own();
  // Any thread, any time: for a client whose kernel does not end.
  void remove_files() const;
  // The end of the files and of the window, but not of the segment: somebody may still wake the dispatch thread.
  void give_back();
  // What an attach reply says of them.
  void name_files(AttachReply* reply) const;
  const std::string& segment_path() const { return segment_path_; }
  const std::string& pinned_path() const { return pinned_path_; }
  uint64_t pinned_begin() const { return range_base(slot_) + kDeviceBytes; }
  // The read end of the link: polls as hung up when the client is gone. Open as long as the endpoint lives.
  int link() const { return link_; }
  uint64_t wakes() const { return view_.control()->wakes.load(std::memory_order_relaxed); }
  uint64_t steps() const { return view_.control()->steps.load(std::memory_order_relaxed); }
  // What the client's threads have waited for room since the last call: take(reply slot, begin, end), ns of the server's
  // CLOCK_MONOTONIC. The client's clocks may be those of another time namespace, so it notes the time of day. Dispatch thread.
  template <class Take>
  void take_room_waits(Take take) {
    ControlPage* control = view_.control();
    if (control->room_waits_filled.load(std::memory_order_relaxed) == 0) return;
    // Filled entries that are not seen below are said again behind this exchange.
    control->room_waits_filled.exchange(0, std::memory_order_acquire);
    constexpr uint64_t kLater = 1'000'000'000;  // a wait may end between this reading and the look at its entry
    const auto [now, day] = moment();
    for (RoomWait& entry : control->room_waits) {
      const uint64_t end = entry.end.load(std::memory_order_acquire);
      if (end == 0) continue;
      const uint64_t begin = entry.begin.load(std::memory_order_relaxed);
      const uint32_t slot = entry.slot.load(std::memory_order_relaxed);
      entry.end.store(0, std::memory_order_relaxed);
      entry.begin.store(0, std::memory_order_release);
      // Not so: the clock was set meanwhile, or the client writes what it likes.
      if (begin <= end && end <= day + kLater && day <= begin + now && slot < kReplySlots)
        take(static_cast<uint16_t>(slot), now + begin - day, now + end - day);
    }
  }
  // The dispatch thread looks at its gate at least every 100 ms; this makes it look now.
  void wake_dispatch_thread();

  const SegmentView& view() const { return view_; }
  Lifeline& lifeline() { return *lifeline_; }
  const Lifeline& lifeline() const { return *lifeline_; }

  // -- the ring; dispatch thread

  // Of the record that is read next, or being handled.
  uint64_t position() const { return view_.ring().head(); }
  // Bytes of the next record; 0: there is none.
  uint32_t peek() const { return view_.ring().peek(); }
  // The record as a message; or what is wrong with it. A message whose slot is not < kReplySlots cannot be answered.
  const char* read(uint32_t record_bytes, Message* message);
  // Gives its lines back: after the handler has returned, so a bug that hangs a handler shows as a full ring.
  void release(uint32_t record_bytes) {
    if (view_.ring().release(record_bytes)) futex_wake(&view_.control()->space_seq, INT_MAX);
  }
  // The bulk data of the message that was read last, for keeping. Once per message.
  std::vector<uint8_t> take_bulk(const Message& message);
  // True when there is a message. Spins briefly, then sleeps until the doorbell, an event of the gate, or 100 ms.
  // deaf: messages are taken no more. idle() is called when nothing has come.
  template <class Idle>
  bool wait(const SharedGate& gate, bool deaf, Idle idle);

  // -- answers

  // To the thread that waits for the message. bytes: of the reply struct and its tail. Dispatch thread.
  void answer(const Message& message, int32_t status, const void* data, size_t bytes);
  // The first one of a thread of the client's. Any thread.
  void late_error(uint32_t slot, int32_t code) {
    int32_t none = 0;
    view_.replies()[slot].late_error.compare_exchange_strong(none, code, std::memory_order_release);
  }
  // Tells the client to run the function. Device thread. False: `ended` came first.
  template <class Ended>
  bool post_host_function(uint64_t token, Ended ended);

 private:
  // On two cores a spinning server takes time from the client, a sleeping one costs the client a wake (5-50 us).
  static constexpr uint64_t kSpinUs = 30;
  // After an answer that had to wake its caller. The wake of a thread on a halted virtual CPU takes some 50 us, so the
  // caller's next message comes later than kSpinUs: the server would be asleep by then, the caller would fall asleep
  // over waking it, and so on for ever: 46-57 us for each of a row of synchronous calls that cost 180-560 ns awake.
  static constexpr uint64_t kSpinAfterWakeUs = 120;
  static constexpr uint64_t kSleepUs = 100'000;
  static constexpr uint64_t kSleepInCutUs = 1'000;  // a cut waits for the clock, or for a host function to end

  bool fetch_bulk(Message& message, const uint8_t* inline_bytes, uint32_t inline_length);

  const uint32_t slot_;
  const std::string segment_path_, pinned_path_, link_path_;
  int link_ = -1;
  bool keep_files_ = false;
  bool pinned_mapped_ = false;
  SegmentView view_;
  std::unique_ptr<Lifeline> lifeline_;

  // dispatch thread only
  bool woke_caller_ = false;  // the caller of the last message slept
  alignas(64) uint8_t inline_[kMaxInlineBytes];
  std::vector<uint8_t> gathered_;  // bulk that came in chunks
};

template <class Idle>
bool Endpoint::wait(const SharedGate& gate, bool deaf, Idle idle) {
  CommandRing& ring = view_.ring();
  if (!deaf) {
    const uint64_t until = now_us() + (woke_caller_ ? kSpinAfterWakeUs : kSpinUs);
    do {
      for (int i = 0; i < 64; i++) {
        if (ring.peek() != 0) return true;
        RealSync::pause();
      }
    } while (now_us() < until && gate.attention() == 0);
    woke_caller_ = false;
  }
  ring.sleep_prepare();
  const uint32_t attention = gate.attention(std::memory_order_seq_cst);
  if ((deaf || ring.peek() == 0) && !(attention & Gate::kStop) && !(deaf && attention))
    futex_wait(&view_.control()->doorbell.sleeping, 1, attention ? kSleepInCutUs : kSleepUs);
  ring.sleep_done();
  if (ring.peek() == 0) idle();
  return !deaf && ring.peek() != 0;
}

template <class Ended>
bool Endpoint::post_host_function(uint64_t token, Ended ended) {
  HostFuncEntry& entry = view_.control()->hostfuncs[token % kHostFuncs];
  // The entry is taken while the client has not yet looked at the function of kHostFuncs tokens ago: rare, so polled.
  for (uint64_t empty = 0; !entry.token.compare_exchange_weak(empty, token, std::memory_order_release); empty = 0) {
    if (ended()) return false;
    usleep(100);
  }
  view_.control()->hostfunc_seq.fetch_add(1, std::memory_order_release);
  futex_wake(&view_.control()->hostfunc_seq, INT_MAX);
  return true;
}

}  // namespace devproxy::server
