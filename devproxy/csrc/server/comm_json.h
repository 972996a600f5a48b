// Reports of communicators on the control channel. Included by .cc files alone.
#pragma once

#include <optional>
#include <vector>

#include "devproxy/csrc/base/json.h"
#include "devproxy/csrc/server/agreement.h"

namespace devproxy::server {

Json to_json(const CommReport& report);
// "reports" of a request; none where they are damaged.
std::optional<std::vector<CommReport>> comm_reports_of(const Json& request);

}  // namespace devproxy::server
