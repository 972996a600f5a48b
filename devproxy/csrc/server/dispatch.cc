// The dispatch loop: the one consumer of a connection's ring.
//
// Every byte of a message is read once, into private memory, and checked there; the client may write on meanwhile.
// The lines are given back after the handler has returned, so a bug that hangs a handler shows as a full ring.
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
// Commands that wait in streams; each is some 300 bytes and its parameters.
constexpr uint32_t kMaxPending = 1u << 16, kMaxPendingEver = 1u << 20;

void nop(Connection&, const Message&) {}  // answered with success; so is DETACH: the socket's end says the rest

struct Row {
  wire::Opcode opcode;
  Handler handler;
};
constexpr Row kRows[] = {
    {wire::Opcode::NOP, nop},
    {wire::Opcode::DETACH, nop},
    {wire::Opcode::MEM_ALLOC, memory::mem_alloc},
    {wire::Opcode::MEM_FREE, memory::mem_free},
    {wire::Opcode::MEM_CREDIT, memory::mem_credit},
    {wire::Opcode::MEM_CREDIT_RETURN, memory::mem_credit_return},
    {wire::Opcode::MEM_INFO, memory::mem_info},
    {wire::Opcode::COPY, memory::copy},
    {wire::Opcode::COPY_2D, memory::copy_2d},
    {wire::Opcode::MEMSET, memory::memset},
    {wire::Opcode::HOST_ALLOC, hostmem::host_alloc},
    {wire::Opcode::HOST_FREE, hostmem::host_free},
    {wire::Opcode::STREAM_CREATE, sync::stream_create},
    {wire::Opcode::STREAM_DESTROY, sync::stream_destroy},
    {wire::Opcode::STREAM_WAIT_EVENT, sync::stream_wait_event},
    {wire::Opcode::HOST_FUNC, sync::host_func},
    {wire::Opcode::HOST_FUNC_DONE, sync::host_func_done},
    {wire::Opcode::EVENT_CREATE, sync::event_create},
    {wire::Opcode::EVENT_DESTROY, sync::event_destroy},
    {wire::Opcode::EVENT_RECORD, sync::event_record},
    {wire::Opcode::EVENT_ELAPSED, sync::event_elapsed},
    {wire::Opcode::MODULE_LOAD, module::module_load},
    {wire::Opcode::MODULE_UNLOAD, module::module_unload},
    {wire::Opcode::FUNCTION_GET, module::function_get},
    {wire::Opcode::MODULE_GLOBAL, module::module_global},
    {wire::Opcode::FUNCTION_SET_ATTR, module::function_set_attr},
    {wire::Opcode::LAUNCH, launch::launch},
};

// The rows in the order of wire::kOps. A message without a row, or a request that Message cannot hold, does not
// compile.
struct HandlerTable {
  Handler of[wire::kOpCount] = {};
};
consteval HandlerTable make_handlers() {
  HandlerTable table;
  bool has_row[wire::kOpCount] = {};  // not `!table.of[i]`: gcc 12 with UBSan does not take that for a constant
  for (const Row& row : kRows) {
    const size_t i = wire::kOpIndex[static_cast<uint16_t>(row.opcode)];
    table.of[i] = row.handler;
    has_row[i] = true;
  }
  for (size_t i = 0; i < wire::kOpCount; i++)
    if (!has_row[i] || wire::kOps[i].req_bytes > kMaxRequestBytes) throw "a message has no handler";
  return table;
}
constexpr HandlerTable kHandlers = make_handlers();

}  // namespace

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
  while (!stop_.load(std::memory_order_relaxed)) wait_for_work();  // poisoned: until the client goes
  tear_down();
  finished_.store(true, std::memory_order_release);
  parts_.connection_finished();
}

void Connection::dispatch() {
  CommandRing& ring = view_.ring();
  uint64_t busy_since = now_us();
  while (!stop_.load(std::memory_order_relaxed) && !poisoned_) {
    const uint32_t bytes = ring.peek();
    if (bytes == 0) {
      // The next message of a caller that was just answered comes within this; the clock is only read after it.
      for (int i = 0; i < 64 && ring.peek() == 0; i++) RealSync::pause();
      if (ring.peek() != 0) continue;
      counters_.busy_us.fetch_add(now_us() - busy_since, std::memory_order_relaxed);
      while (!wait_for_work())
        if (stop_.load(std::memory_order_relaxed)) return;
      busy_since = now_us();
      continue;
    }
    if (!ring.valid_length(bytes)) return poison("malformed message: impossible record length");
    if (ring.head() != position_) return poison("malformed message: the ring's head was changed by the client");
    if (!consume(bytes)) return;
    position_ += bytes;
    if (ring.release(bytes)) futex_wake(&view_.control()->space_seq, INT_MAX);
    if (space_->pending() > kMaxPending) throttle();
  }
}

// Streams are far behind: lets the ring fill up, and with it the client wait, until they have caught up. Not while a
// host function is out: its end comes through the ring.
void Connection::throttle() {
  while (space_->pending() > kMaxPending / 2 && !stop_.load(std::memory_order_relaxed)) {
    {
      std::lock_guard lock(host_mu_);
      if (!host_functions_.empty()) break;
    }
    usleep(200);
  }
  if (space_->pending() > kMaxPendingEver) poison("more than a million commands wait behind a host function");
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
    } while (now_us() < until && !stop_.load(std::memory_order_relaxed));
    woke_caller_ = false;
  }
  ring.sleep_prepare();
  if ((poisoned_ || ring.peek() == 0) && !stop_.load(std::memory_order_seq_cst))
    futex_wait(&view_.control()->doorbell.sleeping, 1, kSleepUs);
  ring.sleep_done();
  if (ring.peek() == 0) space_->tidy();
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
    if (message.info->is_sync && lifeline_->faulted() && head.opcode != static_cast<uint16_t>(wire::Opcode::DETACH)) {
      reply(message, lifeline_->fault_code());
    } else {
      kHandlers.of[wire::kOpIndex[head.opcode]](*this, message);
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
