// SPDX-License-Identifier: Apache-2.0
// The command ring: many producers, one order, one consumer at a time.
//
// Who owns what
//   tail          producers; fetch_add reserves [pos, pos + bytes), so the order of reservation is the one order of
//                 all threads
//   head          the consumer; everything below it belongs to producers again
//   a record      its producer from reserve() until publish(); then the consumer until release()
//   commit word   0 = not published. The producer writes it once (release), the consumer reads it (acquire) and zeroes
//                 it before head moves (release), which the next producer of that line reads (acquire)
//
// Interleavings that worried us
//   1. A producer is preempted, or its process dies, between reserve and publish: the consumer stops at that record,
//      whose commit word stays 0; nothing behind it is consumed, nothing is corrupted. Other producers go on until the
//      ring is full. Death of the process ends the connection (the socket hangs up), so nobody waits for ever.
//   2. A line carries a stale payload of the lap before that looks like a head: the consumer zeroes the first word of
//      every line that it releases, before head moves, so a reserved line's first word is 0 until it is published.
//   3. Lost wake-up. The consumer sets `sleeping`, fences, looks again; the producer publishes, fences, looks at
//      `sleeping`. With both fences sequentially consistent one of the two sees the other.
//   4. Two producers both see sleeping: exchange(0) lets exactly one of them pay for the wake.
//   5. A producer reserves more than is free: it waits for head to pass; order is already fixed, so nobody overtakes.
//      space_waiters/space_seq use the same store-fence-load pattern as 3.
// The model checker in tests/model runs this very code over all interleavings at small sizes; `Sync` supplies the
// atomics and fences: RealSync here, a scheduler there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace devproxy {

struct RealSync {
  template <class T>
  using Atomic = std::atomic<T>;
  static void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
  static void pause() { __builtin_ia32_pause(); }
};

// Views into shared memory; the ring owns none of it.
template <class Sync>
struct RingParts {
  template <class T>
  using Atomic = typename Sync::template Atomic<T>;
  uint8_t* bytes;   // capacity bytes, mapped twice in a row: bytes[i] and bytes[i + capacity] are one
  size_t capacity;  // power of two, a multiple of line
  size_t line;      // record alignment
  Atomic<uint64_t>* tail;
  Atomic<uint64_t>* head;
  Atomic<uint32_t>* sleeping;
  Atomic<uint32_t>* space_waiters;
  Atomic<uint32_t>* space_seq;
};

// `CommitAt(bytes + offset)` gives the Atomic<uint32_t>& commit word of the record or line that starts there.
template <class Sync, class CommitAt>
class Ring {
 public:
  Ring() = default;
  explicit Ring(const RingParts<Sync>& parts) : p_(parts) {}

  struct Reservation {
    uint64_t pos;  // absolute position of the record
    size_t bytes;  // rounded up to whole lines
    uint64_t end() const { return pos + bytes; }
  };

  size_t round_up(size_t bytes) const { return (bytes + p_.line - 1) & ~(p_.line - 1); }
  uint8_t* at(uint64_t pos) const { return p_.bytes + (pos & (p_.capacity - 1)); }
  size_t capacity() const { return p_.capacity; }

  // -- producers, any thread --------------------------------------------------------------------------------------

  // Precondition: bytes <= capacity / 2. The lines may not be free yet: see has_space.
  Reservation reserve(size_t bytes) {
    const size_t n = round_up(bytes);
    return {p_.tail->fetch_add(n, std::memory_order_relaxed), n};
  }

  // True when the reserved lines may be written. Acquire pairs with release(): the zeroed commit words are visible.
  // From then on the producer writes everything but the commit word, which only publish() writes.
  bool has_space(const Reservation& r) const { return has_space(r, p_.head->load(std::memory_order_acquire)); }
  bool has_space(const Reservation& r, uint64_t head) const { return r.end() - head <= p_.capacity; }
  // How far the consumer is, for a producer that waits for space.
  uint64_t consumed() const { return p_.head->load(std::memory_order_acquire); }

  // Announces that the caller is about to sleep for space; it re-checks has_space afterwards and sleeps on
  // space_seq == the returned value.
  uint32_t space_prepare() {
    p_.space_waiters->fetch_add(1, std::memory_order_relaxed);
    const uint32_t seq = p_.space_seq->load(std::memory_order_relaxed);
    Sync::fence();
    return seq;
  }
  void space_done() { p_.space_waiters->fetch_sub(1, std::memory_order_relaxed); }

  // Makes the record visible. Returns true when the caller must wake the consumer (futex on `sleeping`).
  [[nodiscard]] bool publish(const Reservation& r) {
    CommitAt{}(at(r.pos)).store(static_cast<uint32_t>(r.bytes), std::memory_order_release);
    Sync::fence();
    return p_.sleeping->load(std::memory_order_relaxed) != 0 &&
           p_.sleeping->exchange(0, std::memory_order_relaxed) != 0;
  }

  // -- the consumer, one thread at a time -------------------------------------------------------------------------

  // The consumer's own copy decides; the shared word is only told. Otherwise the other side could move it between a
  // peek and a release. own() is called once by a consumer that takes a ring over.
  uint64_t head() const { return head_; }
  void own() { head_ = p_.head->load(std::memory_order_acquire); }
  // Reservations up to here exist; published or not.
  uint64_t tail() const { return p_.tail->load(std::memory_order_acquire); }

  // Length of the published record at head, 0 when there is none. The value comes from the other side: callers check
  // it with valid_length before they believe it.
  uint32_t peek() const { return CommitAt{}(at(head())).load(std::memory_order_acquire); }

  bool valid_length(uint32_t bytes) const { return bytes != 0 && bytes % p_.line == 0 && bytes <= p_.capacity / 2; }

  // Gives the record's lines back. Returns true when producers that wait for space must be woken (space_seq).
  // All of them (INT_MAX): waking one may wake a producer whose turn it is not.
  [[nodiscard]] bool release(uint32_t bytes) {
    for (size_t off = 0; off < bytes; off += p_.line) CommitAt{}(at(head_ + off)).store(0, std::memory_order_relaxed);
    head_ += bytes;
    p_.head->store(head_, std::memory_order_release);
    Sync::fence();
    if (p_.space_waiters->load(std::memory_order_relaxed) == 0) return false;
    p_.space_seq->fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  // Announces sleep; the caller then peeks once more and sleeps on sleeping == 1 only if there is still nothing, and
  // never without a time-out: a producer that is stopped between its exchange and its futex call owes the wake.
  void sleep_prepare() {
    p_.sleeping->store(1, std::memory_order_relaxed);
    Sync::fence();
  }
  void sleep_done() { p_.sleeping->store(0, std::memory_order_relaxed); }

 private:
  RingParts<Sync> p_{};
  uint64_t head_ = 0;  // consumer only
};

}  // namespace devproxy
