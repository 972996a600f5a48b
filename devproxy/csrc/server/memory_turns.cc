// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/memory_turns.h"

#include <algorithm>
#include <utility>

#include "devproxy/csrc/base/log.h"

namespace devproxy::server {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLook{1};   // at one's own request again
constexpr milliseconds kGap{100};  // who waits looks much more often
constexpr milliseconds kSweep{5};  // that others look at what they can give back
// Who has not moved for so long, and waits for another, stands. So long: a command may have ended, and the next not begun.
constexpr milliseconds kStill{20};
constexpr milliseconds kLeft{300};  // who leads and rests for so long may wait for another rank without a collective
// If nobody moves: until a request passes the claims, and until there are no turns. Longer while a rank is in one long
// command, or its program is busy with something else, such as its next batch.
constexpr milliseconds kPass{20}, kPassElsewhere{5'000}, kOff{1'000}, kOffElsewhere{60'000};
constexpr uint64_t kSteps = 2;  // the second one has the optimizer's states
constexpr uint64_t kReserve = 32;
constexpr uint64_t kPhaseParts = 16;  // of what a rank has at its peak beyond its least: so much is little
constexpr uint64_t kPhaseEnd = 4;     // with so much left it is no longer behind its peak: its gradients
constexpr uint64_t kLittle = 8;       // one part in so many of the GPU: free for all, also while one leads

}  // namespace

bool all_can_finish(std::vector<MemoryClaim> claims, uint64_t free_bytes) {
  for (bool found = true; found && !claims.empty();) {
    found = false;
    for (size_t i = 0; i < claims.size();) {
      const MemoryClaim& c = claims[i];
      if (c.most > c.has && c.most - c.has > free_bytes) {
        i++;
        continue;
      }
      free_bytes += c.has > c.least ? c.has - c.least : 0;
      claims[i] = claims.back();
      claims.pop_back();
      found = true;
    }
  }
  return claims.empty();
}

void MemoryPhase::now(const MemoryClaim& claim) {
  const uint64_t range = claim.most - claim.least, up = claim.has - claim.least;
  if (!behind_) {
    top_ = std::max(top_, claim.has);
    behind_ = range != 0 && top_ - claim.least >= range / 4 * 3 && claim.has < top_ - range / kPhaseParts;
    if (behind_) low_ = claim.has;
    return;
  }
  low_ = std::min(low_, claim.has);
  const uint64_t rise = claim.has - low_;
  // The phase is over; or it was no peak.
  if (up <= range / kPhaseEnd || rise > range / 4) {
    behind_ = false;
    top_ = claim.has;
    return;
  }
  rise_ = std::max(rise_, rise);
}

MemoryClaim MemoryPhase::claim(MemoryClaim claim) const {
  if (!behind_) return claim;
  const uint64_t range = claim.most - claim.least, little = std::max(rise_, range / kPhaseParts);
  claim.most = std::max(claim.has, std::min(claim.most, low_ + little));
  // What it has then it may keep until the others have come as far.
  claim.least = std::min(claim.has, claim.least + range / kPhaseEnd);
  return claim;
}

MemoryTurns::Seat* MemoryTurns::sit(Member member, uint64_t has, uint64_t peak_bytes) {
  std::lock_guard lock(mu_);
  Seat& seat = seats_.emplace_back();
  seat.member = std::move(member);
  seat.claim = {has, std::max(has, peak_bytes), has};
  seat.known = peak_bytes != 0;
  seat.first_steps = seat.steps = seat.member.steps();
  if (has) seat.low = seat.low_before = has;
  seat.moved = clock_();
  if (tight_) seat.member.want_credit();
  return &seat;
}

void MemoryTurns::leave(Seat* seat) {
  std::lock_guard lock(mu_);
  end_wait(seat);
  if (leader_ == seat) leader_ = nullptr;
  seats_.remove_if([&](const Seat& s) { return &s == seat; });
  changes_++;
  changed_.notify_all();
}

void MemoryTurns::know(Seat& seat) {
  seat.known = true;
  if (leader_ == &seat) leader_ = nullptr;
}

// Also of one that asks for nothing any more: it takes as much in each step.
void MemoryTurns::count_steps(Seat& seat) {
  const uint64_t steps = seat.member.steps();
  if (std::exchange(seat.steps, steps) != steps) seat.low_before = std::exchange(seat.low, seat.claim.has);
  if (!seat.known && steps >= seat.first_steps + kSteps) know(seat);
}

void MemoryTurns::now(Seat* seat, uint64_t has, uint64_t trough_bytes, uint64_t backed_bytes) {
  std::lock_guard lock(mu_);
  end_wait(seat);  // its request was taken, also where it was refused
  MemoryClaim& claim = seat->claim;
  const bool less = has < claim.has;
  seat->backed = backed_bytes;
  claim.has = has;
  claim.most = std::max(claim.most, has);
  count_steps(*seat);
  if (seat->low != UINT64_MAX) seat->low = std::min(seat->low, has);
  const bool rhythm = trough_bytes != 0 && trough_bytes != UINT64_MAX;
  claim.least = std::min({has, seat->low, seat->low_before, rhythm ? trough_bytes : UINT64_MAX});
  seat->phase.now(claim);
  // A forward, too, has lows that come again. So a rhythm alone counts only if it is most of what the rank has.
  if (!seat->known && rhythm && trough_bytes < claim.most / 2) know(*seat);
  if (!less) return;
  changes_++;
  changed_.notify_all();
}

// Has it moved since the last look? Then that was now.
MemoryTurns::State MemoryTurns::look_at(Seat& seat, Clock::time_point now) {
  const uint64_t progress = seat.member.progress();
  const State state = seat.member.state();
  if (std::exchange(seat.progress, progress) != progress) seat.moved = now;
  return state;
}

// Of two whose claims are not known.
bool MemoryTurns::leads(Seat* seat) {
  if (leader_ && leader_ != seat) {
    const auto now = clock_();
    const State state = look_at(*leader_, now);
    const auto still = now - leader_->moved;
    const bool stands = (state == State::kWaits && still > kStill) || (state == State::kRests && still > kLeft);
    if (leader_->waits || !stands) return false;
  }
  leader_ = seat;
  return true;
}

bool MemoryTurns::fits(Seat* seat, uint64_t bytes, uint64_t free_bytes) {
  if (bytes > free_bytes) return false;
  uint64_t all = free_bytes, most = 0, known_most = 0, least = 0;
  bool known = true;
  for (Seat& s : seats_) {
    const uint64_t top = std::max(s.claim.most, &s == seat ? s.claim.has + bytes : 0);
    if (top == 0) continue;  // of a process that uses another GPU
    count_steps(s);
    all += s.claim.has;
    most += top;
    least += s.claim.least;
    known &= s.known;
    if (s.known) known_most = std::max(known_most, s.claim.most);
  }
  const uint64_t reserve = all / kReserve;
  if (known && most + reserve <= all) tight_ = false;  // it only seemed so until they were known
  if (!known) {
    if (all - (free_bytes - bytes) <= all / kLittle) return true;
    if (!seat->known) return leads(seat);
  }
  std::vector<MemoryClaim> claims;
  claims.reserve(seats_.size());
  for (const Seat& s : seats_) {
    MemoryClaim& claim = claims.emplace_back(s.known ? s.phase.claim(s.claim) : s.claim);
    if (&s == seat) claim.has += bytes;
    if (&s == leader_) claim.most = known_most;  // ranks are alike
    // Nobody can have more than what the others leave between two steps: a larger claim is of another time.
    claim.most = std::max(claim.has, std::min(claim.most, all - std::min(all, least - s.claim.least)));
  }
  // Modules, arrays and a framework's scratch take memory that nobody asks for here. So the others stop a little before the
  // point where only one of them can finish, and the nearest one goes up to it.
  const uint64_t left = free_bytes - bytes;
  if (left >= reserve && all_can_finish(claims, left - reserve)) return true;
  uint64_t own = 0, nearest = UINT64_MAX, i = 0;
  for (const Seat& s : seats_) {
    const uint64_t need = claims[i].most - claims[i].has;
    if (&s == seat) own = need;
    if (claims[i].has > claims[i].least) nearest = std::min(nearest, need);
    i++;
  }
  return own <= nearest && all_can_finish(std::move(claims), left);
}

void MemoryTurns::end_wait(Seat* seat) {
  if (!std::exchange(seat->waits, false)) return;
  counts_.waited_us +=
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(clock_() - seat->since).count());
}

// For how long nobody has moved. elsewhere: of some rank it is not known whether it will.
milliseconds MemoryTurns::still_for(Clock::time_point now, bool* elsewhere) {
  Clock::time_point moved{};
  // Nobody has asked for long: a cut, or a process that was stopped. Nobody could move then.
  if (now - std::exchange(looked_, now) > kGap)
    for (Seat& s : seats_) s.moved = now;
  for (Seat& s : seats_) {
    if (s.claim.has == 0) continue;  // such as another process of the rank's, with nothing on this GPU
    const State state = look_at(s, now);
    *elsewhere |= state == State::kMoves || (!s.waits && state != State::kWaits);
    moved = std::max({moved, s.moved, s.waits ? s.since : moved});
  }
  return std::chrono::duration_cast<milliseconds>(now - moved);
}

uint64_t MemoryTurns::may_take(Seat* seat, uint64_t wanted, uint64_t needed, uint64_t free_bytes, bool beyond) {
  std::lock_guard lock(mu_);
  for (const Seat& s : seats_)  // what others were granted, and the device does not know of yet
    if (&s != seat && s.claim.has > s.backed) free_bytes -= std::min(free_bytes, s.claim.has - s.backed);
  for (const uint64_t bytes : {wanted, needed})
    if (bytes >= needed && (counts_.off || fits(seat, bytes, free_bytes))) {
      end_wait(seat);
      return bytes;
    }
  if (!tight_.exchange(true))
    for (const Seat& s : seats_) s.member.want_credit();
  if (!seat->waits) {
    seat->waits = true;
    seat->since = clock_();
    counts_.waits++;
  }
  seat->wants = needed;
  if (!goes_on(seat, free_bytes, beyond)) return 0;
  end_wait(seat);
  return needed;
}

// It does not fit. Does it all the same, because nobody moves?
bool MemoryTurns::goes_on(Seat* seat, uint64_t free_bytes, bool beyond) {
  const uint64_t bytes = seat->wants;
  bool elsewhere = false;
  const milliseconds still = still_for(clock_(), &elsewhere);
  const auto need = [](const Seat& s) {
    const MemoryClaim claim = s.known ? s.phase.claim(s.claim) : s.claim;
    return claim.most - claim.has;
  };
  const bool nearest = std::none_of(seats_.begin(), seats_.end(), [&](const Seat& s) {
    return &s != seat && s.waits && s.wants <= free_bytes && need(s) < need(*seat);
  });
  if (bytes <= free_bytes && nearest && still > (elsewhere ? kPassElsewhere : kPass)) {
    for (Seat& s : seats_)
      if (&s != seat && s.waits && fits(&s, s.wants, free_bytes)) return false;  // it will look in a moment
    counts_.still++;
    return true;
  }
  if (still <= (!elsewhere ? kOff : beyond ? kPassElsewhere : kOffElsewhere)) return false;
  counts_.still++;
  counts_.off = true;
  off_.store(true);
  DP_LOG(
      kWarn, kMemory, 0,
      "the ranks on this GPU need more memory at the same time than it has (one wants %lu MiB more, %lu MiB are free): "
      "they take no turns any more",
      static_cast<unsigned long>(bytes >> 20), static_cast<unsigned long>(free_bytes >> 20));
  changes_++;
  changed_.notify_all();
  return true;
}

void MemoryTurns::wait() {
  std::unique_lock lock(mu_);
  // Memory that was freed behind work which is over by now.
  if (const auto now = clock_(); now - asked_ > kSweep) {
    asked_ = now;
    for (const Seat& s : seats_)
      if (!s.waits) s.member.look();
  }
  changed_.wait_for(lock, kLook, [&, seen = changes_] { return changes_ != seen; });
}

uint64_t MemoryTurns::spare_bytes(const Seat* seat, uint64_t free_bytes) {
  std::lock_guard lock(mu_);
  if (counts_.off) return free_bytes;
  if (tight_) return 0;
  for (const Seat& s : seats_) {
    const uint64_t more = seat->claim.has > s.claim.has ? seat->claim.has - s.claim.has : 0;
    free_bytes -= std::min(free_bytes, more);
  }
  return free_bytes;
}

std::vector<MemoryTurns::Rank> MemoryTurns::ranks() {
  std::lock_guard lock(mu_);
  std::vector<Rank> all;
  for (Seat& s : seats_) {
    count_steps(s);
    all.push_back({s.claim, s.member.state(), s.known, s.waits});
  }
  return all;
}

MemoryTurns::Counts MemoryTurns::counts() {
  std::lock_guard lock(mu_);
  return counts_;
}

}  // namespace devproxy::server
