// SPDX-License-Identifier: Apache-2.0
// Reports of communicators on the control channel. Included by .cc files alone.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "devproxy/csrc/base/json.h"
#include "devproxy/csrc/server/agreement.h"
#include "devproxy/csrc/server/communicators.h"

namespace devproxy::server {

Json to_json(const CommReport& report);
// Of each communicator: its two numbers, and how long ago (ms) it had traffic with metas and without; -1: never.
Json to_json(const std::map<CommKey, CommTraffic>& traffic, uint64_t now_us);
// "comm" of a request; none where it is damaged.
std::optional<CommKey> comm_key_of(const Json& request);
// "reports" of a request; none where they are damaged.
std::optional<std::vector<CommReport>> comm_reports_of(const Json& request);

}  // namespace devproxy::server
