// SPDX-License-Identifier: Apache-2.0
// The file `trees` in a job's folder: who may connect, and where the servers of each tree listen.
//
//   token <64 hex digits>
//   key <64 hex digits>                           where the job encrypts what its trees' servers send each other
//   tree <number> <count> <address:port> ...      one line for each tree; [v6]:port
//
// The supervisors write it, atomically and when they like; it may come late and be replaced.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/links/frame.h"
#include "devproxy/hal/links/tls.h"

namespace devproxy::hal {

struct Endpoint {
  sockaddr_storage address{};
  socklen_t length = 0;
  std::string text;  // as the file says it
};

struct Roster {
  std::array<uint8_t, kTokenBytes> token{};
  std::optional<DataKey> key;  // then every connection is a Tls
  std::map<uint32_t, std::vector<Endpoint>> trees;
};

// An address without its port: kInvalidValue where it is no literal.
StatusOr<Endpoint> parse_address(const std::string& text, uint16_t port);
StatusOr<Roster> parse_roster(const std::string& text);
// kFileNotFound: it has not come yet.
StatusOr<Roster> read_roster(const std::string& folder);

}  // namespace devproxy::hal
