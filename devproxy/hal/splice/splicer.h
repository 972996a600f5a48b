// SPDX-License-Identifier: Apache-2.0
// Replica splicing (Singularity, 5.2): what equal ranks on one GPU would all compute is computed
// once, and what they would all keep is kept once.
//
// The unit is a launch that changes memory in place, most of which is older than the last such launch, or that writes
// stable buffers: parameters, optimizer states and what a step makes on the way. (An activation is neither.) It goes
// through three stages.
//   learning    each rank runs it, and says the hash of what it has written. Ranks that say the same are replicas.
//   meeting     from then on their launches wait for one another. The last to come compares all of them: the same
//               operator with the same arguments, and the same contents of all that it reads. Equal: it runs once, for
//               all. Different: each runs its own, and learning begins anew. So nothing is assumed, nothing is rolled
//               back, and every step is validated.
//   splicing    what was written is equal now. Whole pages of it become one set of physical pages, mapped into each rank's
//               own range, at the same offset mostly (homes.cc). So the next time there is nothing to compare and nothing to
//               copy. What is neither old nor stable (gradients, where the step changes those too) is copied if it has
//               changed.
//
// Ranks that come to a GPU with contents (a restore, a resize) begin at the end: what is stable and equal is spliced as
// it is loaded, and whoever shares all that a launch writes meets there at once. So ranks that fit only when they are
// spliced can come, and stay spliced.
//
// What is known to be equal is not compared: contents have numbers (value numbering), and equal numbers mean equal contents.
// A launch for several gives all of them one number; a collective's result has the number of the operation, at all its
// members; and what a repeatable launch writes gets a number that follows from the launch and the numbers of what it
// reads, at each rank by itself. So gradients are known to be equal from their all-reduce on, however the program copies
// and scales them before its step. A number holds until somebody writes there.
//
// What one rank has computed, another one borrows: a repeatable launch whose results, by their numbers, lie at another rank
// already is not run (common subexpressions, over ranks). Only the loan is noted, and a launch for several hands out
// its young results as loans. A loan is settled, by a copy, when its borrower reads it in a launch of its own, or the lender
// is about to write there. Mostly neither happens: the next launch that reads it is squashed too, and runs at the lender;
// then the borrower overwrites it, or has freed it. So of gradients that an all-reduce made equal, the copies out of
// buckets, norms and clipping are done once. For that, launches that change such contents in place meet as others do, and
// are recognized by equal numbers; whoever has nobody to wait for still finds its results. Kinds of launches whose loans are
// mostly settled are not lent any more.
//
// What keeps it right: a spliced page is written by a launch of all its sharers, or by nobody. Whatever else would write
// it (another launch, a copy, a communicator, a rank that did not come) first gives the writer pages of its own. That
// needs to be told what a launch writes (footprint.h); where nobody can tell, the rank gets its pages back at once.
//
// The splicer measures its own cost (account.h). If it costs more than it saves, it learns and lends nothing more until another
// rank joins. Spliced pages stay spliced, because the ranks may not fit otherwise.
//
// Nobody waits for ever: a rank that waits goes on alone when the GPU has been idle for idle_patience_ns (ten times that
// where it would copy pages that all keep once, kKeepsPatience), or after patience_ns, or when the job is about to be cut;
// and at once when a rank for which it waits has run that launch alone already, or the meetings wait for one another. That
// costs copies, never the result.
//
// A device may run launches later than they are submitted (hal/cuda/cuda_pages.h). Then what is said here of running is said of
// submitting, and streams and events give the order to what depends on it.
//
// Locks, in this order: the engine's turn of whoever runs; pages_mu_ (the pool, all ranks' maps, every comparison and
// copy, and the launch that runs for several); mu_ (learning and meetings; a leaf). No turn is waited for under a lock.
//
// Interleavings that worried us
//   1. A rank's other stream copies into a page while a launch for several runs on it: it waits for pages_mu_, and gets
//      contents from after the launch. Its own order with its own launch is the job's affair, as ever.
//   2. A waits in a meeting, and B, for whom it waits, waits for A in a collective: no kernel runs, so A goes on alone.
//   3. A rank's space is torn down while it waits: its worker wakes, sees that it is leaving, and dissolves the meeting.
//   4. Two streams of one rank come to one meeting: the second one runs alone.
//   5. A lender writes what a borrower reads at that moment: the borrower's launch has settled its reads before it began,
//      and a settled loan is none. Both under pages_mu_.
//   6. A borrower frees what it has borrowed, and gets the memory again, while commands that read it are still to come: a
//      loan is dead if its command was submitted before that, and none that was is left that touches it.
//   7. The last rank comes while the first gives up: both under mu_; whoever takes the list of those present decides.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/array.h"
#include "devproxy/hal/command.h"
#include "devproxy/hal/sharing.h"
#include "devproxy/hal/splice/account.h"
#include "devproxy/hal/splice/footprint.h"
#include "devproxy/hal/splice/loans.h"
#include "devproxy/hal/splice/page_pool.h"
#include "devproxy/hal/splice/physical.h"
#include "devproxy/hal/splice/splice_config.h"

namespace devproxy::hal::splice {

class Splicer final : public Splicing {
 public:
  class Member;

  Splicer(const SpliceConfig& config, std::unique_ptr<PhysicalMemory> memory);
  ~Splicer() override;
  PhysicalMemory& physical() { return *gpu_; }

  // May a command of the space touch the range that has not completed, up to the position `last`? Any thread asks, under
  // the splicer's locks.
  using Pending = std::function<bool(uint64_t addr, uint64_t bytes, uint64_t last)>;
  // A space begins, and ends. No `pending`: nothing ever is. nullptr: there are too many.
  std::shared_ptr<Member> join(uint64_t base, uint64_t bytes, std::unique_ptr<RankMemory> memory, Pending pending = {});
  void leave(Member& member);
  // Does it matter to others, or to what is known of the member, if somebody writes there?
  static bool concerned(const Member& member);

  // -- any thread
  SpliceCounts counts() const override;
  uint64_t saved_bytes() const override { return saved_bytes_; }
  // Runs the launch, or returns when another rank's has stood for it.
  Status launch(Member& member, SpliceLaunch& launch, Runner& runner);
  // The same with what footprint() has returned (DEVPROXY_EXECUTOR_*): of an unknown one nobody knows what it does.
  Status launch(Member& member, SpliceLaunch& launch, int kind, Runner& runner);
  // Somebody is about to read, or to write, the range other than by launch(). Any member's range, or none's. whole: each
  // byte of it is written.
  Status before_read(uint64_t addr, uint64_t bytes);
  Status before_write(uint64_t addr, uint64_t bytes, bool whole);
  // These commands are about to run.
  Status before(const CopyArgs& copy);
  Status before(const ArrayCopy& copy);
  Status before(const MemsetArgs& memset);
  // Somebody is about to reach the range through the member's descriptor.
  Status before_sharing(Member& member, uint64_t addr, uint64_t bytes);
  // A collective has written the range, and the same to its other members. operation: what tells it from all others.
  void received(Member& member, uint64_t addr, uint64_t bytes, const std::array<uint64_t, 3>& operation);
  // A launch of which nobody knows what it does.
  Status before_anything(Member& member);
  // While it is hurried, the member waits for nobody: before a cut, and when it ends.
  void hurry(Member& member, bool on);

  // -- the submitting thread of the member
  // position: of the last command before.
  void committed(Member& member, uint64_t addr, uint64_t bytes, uint64_t position, bool stable);
  // No command behind this position touches it as what it was.
  void freed(Member& member, uint64_t addr, uint64_t bytes, uint64_t position);
  void released(Member& member, uint64_t addr);
  // Nobody will read the range before it is allocated again.
  void discard(Member& member, uint64_t addr, uint64_t bytes);

  // -- in a restore, before the member submits anything; any thread
  // The range, of one stable allocation, has its contents. In the order of addresses, as far as it is of one page.
  Status loaded(Member& member, uint64_t addr, uint64_t bytes);
  void all_loaded(Member& member);

 private:
  class Layout;
  struct Group;
  struct Arrival;

  uint64_t floor_page(uint64_t at) const { return at & ~(page_ - 1); }
  uint64_t ceil_page(uint64_t at) const { return (at + page_ - 1) & ~(page_ - 1); }
  // Less is compared, not numbered.
  bool is_numbered(const Access& access) const;
  bool is_worth_it(const SpliceLaunch& launch) const;  // to be found at another rank instead of being run

  Status launch_unmeasured(Member& member, SpliceLaunch& launch, Runner& runner);
  void switch_off();

  // counts: that is how the memory is used, and it is soon copied, not spliced. borrows: another rank's results will do.
  Status alone(Member& member, const SpliceLaunch& launch, Runner& runner, bool counts, bool borrows);
  Status run(const Member& member, const SpliceLaunch& launch, Runner& runner) const;
  Status run_guarded(const Member& member, const SpliceLaunch& launch, Runner& runner) const;
  Status break_off(Member& member, uint64_t addr, uint64_t bytes, bool counts, bool whole);
  Status break_writes(Member& member, const SpliceLaunch& launch, bool counts);
  std::optional<Contents> result_of(const Member& member, const SpliceLaunch& launch) const;
  struct Found;
  std::optional<std::vector<Found>> found_elsewhere(const Member& member, const SpliceLaunch& launch,
                                                    const Contents& result);
  Status borrow(Member& member, const SpliceLaunch& launch, const std::vector<Found>& found, bool counts);
  bool same_as_found(const std::vector<Found>& found) const;
  void keep_results(Member& member, const SpliceLaunch& launch, const Contents& result);
  Status settle(const std::vector<Loan>& loans);
  Status settle_reads(Member& member, const SpliceLaunch& launch, uint64_t up_to_bytes);
  bool dead(const Loan& loan);
  bool pays(uint64_t purpose);
  void lend(const Loan& loan);
  void loans_changed();
  bool meet(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Group>& group, Arrival& me, Runner& runner);
  // What a launch for several was like. left: asked for by `wants_left`, what it has left.
  struct Ran {
    uint64_t spent_ns = 0, run_ns = 0, kept_bytes = 0;
    std::optional<Contents> left;
  };
  bool run_for_all(const std::vector<Arrival*>& all, Arrival& me, Runner& runner, bool joins, bool wants_left,
                   Ran* ran);
  void join_edges(const std::vector<Arrival*>& all, const Arrival& lead);
  Status join_edge(const std::vector<Arrival*>& all, const Arrival& lead, uint64_t page);
  void agree(const std::vector<Arrival*>& all, ptrdiff_t place);
  void disagree(Member& member, uint64_t addr, uint64_t bytes);
  static bool same_launch(const Arrival& a, const Arrival& b);
  StatusOr<bool> equal(const std::vector<Arrival*>& all, const Arrival& me);
  Status run_at(Arrival& lead, const std::vector<Arrival*>& all, uint64_t* run_ns);
  Arrival& lead_of(const std::vector<Arrival*>& all, Arrival& me) const;
  // kept_bytes: of the pages that all show then.
  Status hand_out(const std::vector<Arrival*>& all, const Arrival& lead, uint64_t* kept_bytes);
  // to_begin: where the range begins at `to`.
  Status splice(Member& from, Member& to, uint64_t begin, uint64_t end, uint64_t to_begin);
  Status copy(Member& from, Member& to, uint64_t begin, uint64_t end, uint64_t to_begin);
  Status keep_apart(const std::vector<Arrival*>& all, const Arrival& lead, size_t access);
  StatusOr<uint64_t> spliced_end(const std::vector<Arrival*>& all, const Arrival& lead, size_t access);
  Status own_pages(Member& member, uint64_t begin, uint64_t end, bool contents);
  void leave_pages(Member& member, uint64_t begin, uint64_t end);
  Status pool_pages(Member& member, uint64_t begin, uint64_t end);
  void note_run(Member& member, uint64_t begin, uint64_t end, uint64_t pool_at);
  template <class F>
  static void for_each_part(const Member& member, uint64_t begin, uint64_t end, F f);
  void learn(Member& member, const SpliceLaunch& launch, uint64_t key, uint64_t seen, const Contents& said);
  void say(Member& member, const SpliceLaunch& launch, uint64_t key, uint64_t seen, const Contents& said);
  StatusOr<Contents> left_by(const SpliceLaunch& launch, Runner& runner);
  // What a launch writes of what is settled, in the order of its accesses.
  struct Settled {
    struct Part {
      uint64_t block, inside, bytes;  // the block's offset, and where in it
    };
    uint64_t alike = 0;  // the same at equal ranks, whatever their homes
    std::vector<uint64_t> homes;
    std::vector<Part> parts;
  };
  // The same as Said by what does not depend on homes: who has said what of which places.
  struct Told {
    uint64_t member, key;
    Contents contents;
    std::vector<uint64_t> homes;
    std::vector<Settled::Part> parts;
  };
  static Settled settled_of(const Member& member, const SpliceLaunch& launch);
  static std::vector<const Told*> told_by(const std::deque<Told>& told, uint64_t member, const Contents& contents);
  bool go_to(Member& member, uint64_t key, const std::vector<Settled::Part>& parts, const Told& other);
  uint64_t correspond(Member& member, const SpliceLaunch& launch, uint64_t key, const Contents& contents);
  std::vector<uint64_t> alike(const Member& member, uint64_t offset, const Member& other, bool anywhere) const;
  static void place(Member& member, uint64_t offset, const Member& other, uint64_t there);
  void goes_alone(const Contents& number);
  bool waits_in_vain(const Group& group, const Arrival& me) const;
  bool waits_for_itself(const Group& group) const;
  void break_cycles(Group& group);
  void dissolve(Group& group);
  void passed_by(Group& group);
  void nobody_came(Group& group);
  void retire(Group& group);
  void count_breaks(Member& member, uint64_t addr, uint64_t bytes);  // under mu_
  Status check_numbers(const std::vector<Arrival*>& all, const Arrival& me) const;
  void add_pairs(const Arrival& a, const Arrival& b, size_t access, std::vector<PhysicalMemory::Pair>* pairs) const;
  bool known_equal(const Arrival& a, const Arrival& b, size_t access) const;
  // placed: it is equal to that of others.
  bool may_splice(Member& member, uint64_t addr, uint64_t bytes, bool placed);
  uint64_t sharers_of(const Member& member, const SpliceLaunch& launch);
  std::shared_ptr<Group> group_of(uint64_t key, uint64_t alike, uint64_t members);
  void guard(const Member& member, const SpliceLaunch& launch, bool on) const;
  Member* at(uint64_t addr) const;  // under either lock

  const SpliceConfig config_;
  const std::unique_ptr<PhysicalMemory> gpu_;
  const uint64_t page_, least_numbered_;

  std::mutex pages_mu_;
  PagePool pool_;         // pages_mu_
  uint64_t numbers_ = 0;  // pages_mu_
  // pages_mu_: of the launch for several that runs. It pays later or never, so its meeting is not judged by it: pages that
  // break again and again are copied for a while (Block::is_broken).
  uint64_t mapping_ns_ = 0;

  // pages_mu_
  Loans loans_;
  struct ContentsHash {
    size_t operator()(const Contents& contents) const { return contents.low ^ contents.high; }
  };
  struct Place {
    uint32_t member = 0;
    uint64_t begin = 0, bytes = 0;
  };
  std::unordered_map<Contents, Place, ContentsHash> places_;                // where contents were; to be looked at
  std::unordered_map<Contents, std::vector<uint8_t>, ContentsHash> small_;  // results of less than a page
  struct Purpose {
    uint64_t loans = 0, lent_bytes = 0, settled_bytes = 0, refused = 0, refusals = 8;
    uint64_t run_ns = 0;  // of the last that ran
  };
  std::unordered_map<uint64_t, Purpose> purposes_;  // by the kind of launch

  mutable std::mutex mu_;
  std::vector<std::shared_ptr<Member>> members_;  // by number; gaps. Changed under both locks
  struct Said {
    uint64_t member, seen;  // its bit, and Learned::seen
    Contents contents;
  };
  std::unordered_map<uint64_t, std::deque<Said>> said_;  // by key
  std::unordered_map<uint64_t, std::deque<Told>> told_;  // by Settled::alike
  std::vector<std::shared_ptr<Group>> groups_;
  // Numbers of launches that a rank has run alone, and the last of them in order.
  std::unordered_set<Contents, ContentsHash> went_alone_;
  std::deque<Contents> alone_in_order_;
  SpliceCounts counts_;
  Account account_;
  std::atomic<bool> off_{false};  // SpliceCounts::off
  // Has anything ever been spliced or found equal? Until then nobody who writes has to look.
  std::atomic<bool> busy_{false};
  std::atomic<bool> lending_{false};  // is there any loan?
  bool moved_ = false;                // pages_mu_: has a page ever been shown at two offsets?
  std::atomic<uint64_t> compared_bytes_{0}, broken_{0}, saved_bytes_{0}, lent_bytes_{0}, settled_bytes_{0};
};

}  // namespace devproxy::hal::splice
