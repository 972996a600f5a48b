// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/comm_json.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace devproxy::server {

// A communicator is two numbers, so that nothing is lost where 64 bits are not a number.
Json to_json(const CommReport& report) {
  Json members = Json::array(), counts = Json::array();
  for (const CommReport::Member& m : report.members)
    members.push_back({{"comm", {m.comm.low, m.comm.high}},
                       {"ranks", m.ranks},
                       {"rank", m.rank},
                       {"complete", m.complete},
                       {"aborted", m.aborted},
                       {"failure", m.failure}});
  for (const auto& [key, count] : report.counts)
    counts.push_back({key.comm.low, key.comm.high, key.from, key.to, key.receives ? 1 : 0, count});
  return {{"client", report.client}, {"members", std::move(members)}, {"counts", std::move(counts)}};
}

Json to_json(const std::map<CommKey, CommTraffic>& traffic, uint64_t now_us) {
  auto ago_ms = [&](uint64_t at) { return at ? static_cast<int64_t>((now_us - std::min(at, now_us)) / 1000) : -1; };
  Json all = Json::array();
  for (const auto& [comm, t] : traffic)
    all.push_back({comm.low, comm.high, ago_ms(t.with_metas_us), ago_ms(t.without_us)});
  return all;
}

std::optional<CommKey> comm_key_of(const Json& request) {
  const auto it = request.find("comm");
  if (it == request.end() || !it->is_array() || it->size() != 2 || !(*it)[0].is_number_unsigned() ||
      !(*it)[1].is_number_unsigned())
    return std::nullopt;
  return CommKey{(*it)[0].get<uint64_t>(), (*it)[1].get<uint64_t>()};
}

std::optional<std::vector<CommReport>> comm_reports_of(const Json& request) {
  std::vector<CommReport> reports;
  try {
    for (const Json& one : request.at("reports")) {
      CommReport& report = reports.emplace_back();
      one.at("client").get_to(report.client);
      for (const Json& m : one.at("members")) {
        const auto& comm = m.at("comm");
        report.members.push_back({{comm.at(0).get<uint64_t>(), comm.at(1).get<uint64_t>()},
                                  m.at("ranks").get<uint32_t>(),
                                  m.at("rank").get<uint32_t>(),
                                  m.at("complete").get<bool>(),
                                  m.at("aborted").get<bool>(),
                                  m.at("failure").get<std::string>()});
      }
      for (const Json& c : one.at("counts"))
        report.counts[{{c.at(0).get<uint64_t>(), c.at(1).get<uint64_t>()},
                       c.at(2).get<int32_t>(),
                       c.at(3).get<int32_t>(),
                       c.at(4).get<int>() != 0}] = c.at(5).get<uint64_t>();
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return reports;
}

}  // namespace devproxy::server
