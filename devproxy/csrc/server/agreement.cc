// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/agreement.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace devproxy::server {

namespace {

std::string text_of(const CommKey& key) {
  char text[40];
  std::snprintf(text, sizeof text, "%08llx", static_cast<unsigned long long>(key.low & 0xffffffff));
  return text;
}

// The counts that a member has a part in, with their limits.
template <class Visit>  // visit(key, limit)
void for_each_own(const CommVerdict& verdict, const CommReport::Member& member, Visit visit) {
  const auto me = static_cast<int32_t>(member.rank);
  for (auto it = verdict.limits.lower_bound({member.comm, -1, -1, false});
       it != verdict.limits.end() && it->first.comm == member.comm; ++it) {
    const auto& [key, limit] = *it;
    if (key.from < 0 || key.from == me) visit(key, limit);
    if (key.from >= 0 && key.to == me) visit({key.comm, key.from, key.to, true}, limit);
  }
}

uint64_t count_of(const std::map<CountKey, uint64_t>& counts, const CountKey& key) {
  const auto it = counts.find(key);
  return it == counts.end() ? 0 : it->second;
}

std::string what_of(const CountKey& key) {
  if (key.from < 0) return "collectives";
  return key.receives ? "receives from rank " + std::to_string(key.from) : "sends to rank " + std::to_string(key.to);
}

}  // namespace

CommVerdict judge(const std::vector<CommReport>& reports) {
  CommVerdict verdict;
  struct Whole {
    uint32_t ranks = 0, reported = 0;
    bool complete = false, aborted = false;
  };
  std::map<CommKey, Whole> comms;
  for (const CommReport& report : reports)
    for (const CommReport::Member& m : report.members) {
      Whole& whole = comms[m.comm];
      whole.ranks = m.ranks;
      whole.reported++;
      whole.complete |= m.complete;
      whole.aborted |= m.aborted;
    }
  for (const CommReport& report : reports) {
    for (const CommReport::Member& m : report.members)
      if (!m.failure.empty() && !comms[m.comm].aborted && verdict.failure.empty()) verdict.failure = m.failure;
    for (const auto& [key, count] : report.counts) {
      if (comms[key.comm].aborted) continue;
      uint64_t& limit = verdict.limits[key.limited()];
      limit = std::max(limit, count);
    }
  }
  auto owes = [&](uint64_t client, std::string what) {
    if (verdict.debt.empty()) verdict.debtor = client, verdict.debt = std::move(what);
  };
  for (const CommReport& report : reports)
    for (const CommReport::Member& m : report.members)
      for_each_own(verdict, m, [&](const CountKey& key, uint64_t limit) {
        const uint64_t has = count_of(report.counts, key);
        if (has < limit)
          owes(report.client, "rank " + std::to_string(m.rank) + " of " + std::to_string(m.ranks) + " has submitted " +
                                  std::to_string(has) + " of " + std::to_string(limit) + " " + what_of(key) +
                                  " of communicator " + text_of(m.comm));
      });
  for (const auto& [key, whole] : comms) {
    if (whole.aborted || whole.complete || whole.reported >= whole.ranks) continue;
    verdict.beginning.insert(key);
    owes(0, "communicator " + text_of(key) + " waits for " + std::to_string(whole.ranks - whole.reported) + " of its " +
                std::to_string(whole.ranks) + " ranks");
  }
  verdict.closed = verdict.debt.empty() && verdict.failure.empty();
  return verdict;
}

CommReport Agreement::report(uint64_t client) const {
  CommReport report{client, {}, counts_};
  for (const auto& [key, member] : members_) report.members.push_back(member);
  return report;
}

bool Agreement::within(const std::vector<CommStep>& steps) const {
  if (!learnt_) return false;
  std::map<CountKey, uint64_t> adds;
  for (const CommStep& step : steps) {
    if (step.init && !verdict_.beginning.contains(step.key.comm)) return false;
    if (!step.init) adds[step.key]++;
  }
  return std::all_of(adds.begin(), adds.end(), [&](const auto& add) {
    return count_of(counts_, add.first) + add.second <= count_of(verdict_.limits, add.first.limited());
  });
}

bool Agreement::owes() const {
  if (!learnt_) return false;
  if (std::any_of(verdict_.beginning.begin(), verdict_.beginning.end(),
                  [&](const CommKey& key) { return !members_.contains(key); }))
    return true;
  bool any = false;
  for (const auto& [comm, member] : members_)
    for_each_own(verdict_, member,
                 [&](const CountKey& key, uint64_t limit) { any = any || count_of(counts_, key) < limit; });
  return any;
}

}  // namespace devproxy::server
