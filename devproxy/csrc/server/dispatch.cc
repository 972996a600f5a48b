// The dispatch loop: the one consumer of a connection's ring.
//
// Every byte of a message is read once, into private memory, and checked there; the client may write on meanwhile.
// The lines are given back after the handler has returned, so a bug that hangs a handler shows as a full ring.
//
// The cut. The server thread asks (request_cut), the dispatch thread stops at a message boundary, waits until the space
// is idle, and parks: it holds the ring, but takes nothing out of it. Then everything that the server has of this
// client stands still, and the server thread may read it: parked_number_ (release, acquire) hands it over, resume()
// under park_mu_ hands it back. The device threads are asleep, since nothing is pending. No thread of the client takes
// part, and none has to: what it posts stays in the ring, which is state of the job like its heap.
//
// Interleavings that worried us
//   1. The client posts during the cut. Records published or half written lie between head and tail; whoever stores the
//      segment while the process is frozen stores them too. A full ring makes the client wait for space as ever.
//   2. A caller sleeps for an answer, or for a completion. Its message was either consumed, then it is answered and
//      complete before the drain ends, or it lies in the ring, and the caller sleeps until somebody goes on with it. It
//      looks at the link every 100 ms, so the end of a parked server reaches it like that of any other.
//   3. A host function is out. It may need a lock whose holder waits for an answer of ours, and its HOST_FUNC_DONE
//      comes through the ring. So a cut consumes on until none is out. A client with a sticky error posts nothing any
//      more, HOST_FUNC_DONE included: then it is not waited for (Connection::on_fault).
//   4. A free was announced, and a command in a stream still used the memory. After the drain none does, so park()
//      retires every freed range: a dump has live ranges only.
//   5. A client attaches during the cut: its connection is made with the cut already asked for, and parks at once.
//   6. The client goes while parked: the server thread, which alone reads the parked state, is the one who sees it and
//      calls request_stop; so no dump is in progress. kStop ends the wait, and tear_down is as ever.
//   7. resume() races with a stop: both only change bits of attention_; the loop looks at kStop first.
//   8. A resume and a new cut before the thread has woken: the number of the cut has changed, so it leaves its wait and
//      parks again under the new number. parked() compares numbers, so the old park is not taken for the new one.
//   9. The server gives up waiting for the drain (a kernel that does not end): it resumes, park() sees that no cut is
//      asked for, and the loop goes on. Nothing was lost, since nothing had been taken.
#include <unistd.h>

#include <algorithm>

#include <climits>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>

#include "devproxy/csrc/base/check.h"
#include "devproxy/csrc/base/log.h"
#include "devproxy/csrc/server/connection.h"
#include "devproxy/csrc/server/crash.h"
#include "devproxy/csrc/server/handlers.h"
#include "devproxy/csrc/transport/futex.h"

namespace devproxy::server {

namespace {

// On two cores a spinning server takes time from the client, a sleeping one costs the client a wake (5-50 us).
constexpr uint64_t kSpinUs = 30;
// After an answer that had to wake its caller. The wake of a thread on a halted virtual CPU takes some 50 us, so the
// caller's next message comes later than kSpinUs: the server would be asleep by then, the caller would fall asleep over
// waking it, and so on for ever: 46-57 us for each of a row of synchronous calls that cost 180-560 ns awake.
constexpr uint64_t kSpinAfterWakeUs = 120;
constexpr uint64_t kSleepUs = 100'000;
constexpr uint64_t kSleepInCutUs = 1'000;  // a cut waits for the clock, or for a host function to end
constexpr uint64_t kDrainLookUs = 50;
// Commands that wait in streams; each is some 300 bytes and its parameters.
constexpr uint32_t kMaxPending = 1u << 16, kMaxPendingEver = 1u << 20;

// A request that Message cannot hold does not compile.
consteval bool requests_fit() {
  for (const wire::OpInfo& info : wire::kOps)
    if (info.req_bytes > kMaxRequestBytes) return false;
  return true;
}
static_assert(requests_fit());

// A field of the request; T{} where the message has none.
template <class T>
T field(const Message& m, int16_t offset) {
  T value{};
  if (offset >= 0) std::memcpy(&value, m.request + offset, sizeof value);
  return value;
}

}  // namespace

Handler handler_of(const wire::OpInfo& info) { return kHandlers[wire::kOpIndex[info.opcode]]; }

bool log_message(Connection& c, const Message& m) {
  const wire::OpInfo& info = *m.info;
  const auto handle = field<VHandle>(m, info.handle_offset);
  switch (info.log) {
    case wire::Log::kCreate:
      return c.state().replay().create(handle, field<VHandle>(m, info.parent_offset), info.opcode, m.request,
                                       info.req_bytes, info.log_bulk ? c.take_bulk(m) : std::vector<uint8_t>{});
    case wire::Log::kDestroy: return c.state().replay().destroy(handle);
    case wire::Log::kSet:
      return c.state().replay().set(handle, info.opcode, field<uint32_t>(m, info.key_offset), m.request,
                                    info.req_bytes);
    case wire::Log::kNone: break;
  }
  return true;
}

void Connection::run() {
  prepare_thread_for_crash();
  position_ = view_.ring().head();
  try {
    dispatch();
  } catch (const std::exception& e) {  // our bug or no memory: this connection pays, the others go on
    char text[sizeof ControlPage::sticky_text];
    std::snprintf(text, sizeof text, "devproxy-server failed internally: %s", e.what());
    poison(text);
  }
  while (!stopping()) {  // poisoned: until the client goes
    if (attention_.load(std::memory_order_relaxed) & kCut)
      park();
    else
      wait_for_work();
  }
  tear_down();
  finished_.store(true, std::memory_order_release);
  parts_.wake();
}

void Connection::dispatch() {
  CommandRing& ring = view_.ring();
  uint64_t busy_since = now_us();
  while (!poisoned_) {
    if (attention_.load(std::memory_order_relaxed) != 0) [[unlikely]] {
      if (stopping()) return;
      if (cut_ready()) {
        counters_.busy_us.fetch_add(now_us() - busy_since, std::memory_order_relaxed);
        park();
        if (stopping()) continue;
        if (Status s = windows_.open_restored(memory_.pinned(), device_); !s.ok())
          return poison(("restoring client " + std::to_string(number()) + ": " + s.text()).c_str());
        busy_since = now_us();
        continue;
      }
    }
    const uint32_t bytes = ring.peek();
    if (bytes == 0) {
      // The next message of a caller that was just answered comes within this; the clock is only read after it.
      for (int i = 0; i < 64 && ring.peek() == 0; i++) RealSync::pause();
      if (ring.peek() != 0) continue;
      counters_.busy_us.fetch_add(now_us() - busy_since, std::memory_order_relaxed);
      while (!wait_for_work() && attention_.load(std::memory_order_relaxed) == 0) {}
      busy_since = now_us();
      continue;
    }
    if (!ring.valid_length(bytes)) return poison("malformed message: impossible record length");
    if (ring.head() != position_) return poison("malformed message: the ring's head was changed by the client");
    if (!consume(bytes)) return;
    position_ += bytes;
    if (ring.release(bytes)) futex_wake(&view_.control()->space_seq, INT_MAX);
    if (device_.pending() > kMaxPending) throttle();
  }
}

// May the dispatch thread park at this boundary?
bool Connection::cut_ready() {
  if (!(attention_.load(std::memory_order_relaxed) & kCut)) return false;
  if (!host_functions_.none_out() && !lifeline_->faulted()) return false;
  return now_us() >= cut_until_us_.load(std::memory_order_relaxed) || memory_.at_trough();
}

// Drains what was submitted, says that it is parked, and waits there. Returns when there is no cut any more, or a stop.
void Connection::park() {
  uint64_t number;
  {
    std::lock_guard lock(park_mu_);
    number = cut_number_;
  }
  const uint64_t began = now_us(), asked = cut_asked_us_.load(std::memory_order_relaxed);
  uint32_t pending = device_.pending();
  while (!device_.idle()) {
    if (attention_.load(std::memory_order_relaxed) != kCut) return;  // a stop, or the server has lost patience
    const uint32_t now = device_.pending();
    if (now != pending) drained_.fetch_add(1, std::memory_order_relaxed);
    pending = now;
    usleep(kDrainLookUs);
  }
  // Nothing that was submitted can still use what was freed.
  for (const Range& range : memory_.retire_all()) device_.release(range.addr, range.bytes);
  cut_facts_ = {counters_.live_bytes.load(std::memory_order_relaxed), memory_.trough_bytes(),
                began > asked ? began - asked : 0, now_us() - began};
  parked_number_.store(number, std::memory_order_release);
  parts_.wake();
  std::unique_lock lock(park_mu_);
  park_wake_.wait(lock, [&] { return attention_.load(std::memory_order_relaxed) != kCut || cut_number_ != number; });
}

// Streams are far behind: lets the ring fill up, and with it the client wait, until they have caught up. Not while a
// host function is out: its end comes through the ring.
void Connection::throttle() {
  while (device_.pending() > kMaxPending / 2 && !stopping()) {
    if ((attention_.load(std::memory_order_relaxed) & kCut) && cut_ready()) return;
    if (!host_functions_.none_out()) break;
    usleep(200);
  }
  if (device_.pending() > kMaxPendingEver) poison("more than a million commands wait behind a host function");
}

// True when there is a message. Spins briefly, then sleeps until the doorbell, a stop, or 100 ms.
bool Connection::wait_for_work() {
  CommandRing& ring = view_.ring();
  if (!poisoned_) {
    const uint64_t until = now_us() + (woke_caller_ ? kSpinAfterWakeUs : kSpinUs);
    do {
      for (int i = 0; i < 64; i++) {
        if (ring.peek() != 0) return true;
        RealSync::pause();
      }
    } while (now_us() < until && attention_.load(std::memory_order_relaxed) == 0);
    woke_caller_ = false;
  }
  ring.sleep_prepare();
  const uint32_t attention = attention_.load(std::memory_order_seq_cst);
  if ((poisoned_ || ring.peek() == 0) && !(attention & kStop) && !(poisoned_ && attention))
    futex_wait(&view_.control()->doorbell.sleeping, 1, attention ? kSleepInCutUs : kSleepUs);
  ring.sleep_done();
  if (ring.peek() == 0) device_.tidy();
  return !poisoned_ && ring.peek() != 0;
}

// Handles the record at position_. False when the connection is poisoned.
bool Connection::consume(uint32_t record_bytes) {
  const uint8_t* record = view_.ring().at(position_);
  struct {
    uint16_t opcode, slot;
    uint32_t payload_bytes, seq;
  } head;
  static_assert(sizeof head == sizeof(MsgHeader) - offsetof(MsgHeader, opcode));
  std::memcpy(&head, record + offsetof(MsgHeader, opcode), sizeof head);

  Message message;
  message.info = wire::op_info(head.opcode);
  message.end = position_ + record_bytes;
  message.slot = head.slot;
  message.seq = head.seq;
  if (head.slot >= kReplySlots) return poison("malformed message: no such reply slot"), false;
  const char* wrong = nullptr;
  if (!message.info)
    wrong = "malformed message: unknown opcode";
  else if (head.payload_bytes > record_bytes - sizeof(MsgHeader))
    wrong = "malformed message: payload longer than its record";
  else if (head.payload_bytes < message.info->req_bytes)
    wrong = "malformed message: request too short";
  if (!wrong) {
    // Always the longest request: a constant length is one move, and the ring is mapped twice, so it is all there.
    std::memcpy(message.request, record + sizeof(MsgHeader), kMaxRequestBytes);
    if (message.info->has_bulk && !fetch_bulk(message, record + sizeof(MsgHeader) + message.info->req_bytes,
                                              head.payload_bytes - message.info->req_bytes))
      wrong = "malformed message: bulk data does not fit its description";
  }
  if (!wrong) {
    Counters::add(counters_.calls, 1);
    answered_ = woke_caller_ = false;
    // What kernels said before a fault is for the job to read.
    const bool always = head.opcode == static_cast<uint16_t>(wire::Opcode::OUTPUT);
    if (message.info->is_sync && lifeline_->faulted() && !always) {
      reply(message, lifeline_->fault_code());
    } else {
      kHandlers[wire::kOpIndex[head.opcode]](*this, message);
    }
    if (!poisoned_) {
      if (!answered_) reply(message, kOk);
      return true;
    }
  }
  // One that waits for this very message can be answered; the others learn it from server_state.
  if (wrong) poison(wrong);
  reply(message, kUnknown);
  return false;
}

// Copies the bulk data out of shared memory and frees its chunks.
bool Connection::fetch_bulk(Message& message, const uint8_t* inline_bytes, uint32_t inline_length) {
  struct {
    uint32_t bytes, chunks;
  } bulk;
  std::memcpy(&bulk, message.request + message.info->bulk_offset, sizeof bulk);
  message.bulk_bytes = bulk.bytes;
  if (bulk.chunks == 0) {
    if (bulk.bytes > inline_length || bulk.bytes > kMaxInlineBytes) return false;
    std::memcpy(inline_, inline_bytes, bulk.bytes);
    message.bulk = inline_;
    return true;
  }
  if (bulk.chunks > kChunks || bulk.chunks * sizeof(uint16_t) > inline_length) return false;
  if (bulk.bytes > bulk.chunks * kChunkBytes || bulk.bytes <= (bulk.chunks - 1) * kChunkBytes) return false;
  uint16_t index[kChunks];
  std::memcpy(index, inline_bytes, bulk.chunks * sizeof(uint16_t));
  for (uint32_t i = 0; i < bulk.chunks; i++)
    if (index[i] >= kChunks) return false;
  gathered_.resize(bulk.bytes);
  for (uint32_t i = 0; i < bulk.chunks; i++) {
    const size_t at = i * kChunkBytes;
    std::memcpy(gathered_.data() + at, view_.chunk(index[i]), std::min(kChunkBytes, bulk.bytes - at));
    lifeline_->release_chunk(index[i]);
  }
  message.bulk = gathered_.data();
  return true;
}

}  // namespace devproxy::server
