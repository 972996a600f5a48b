// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/links/roster.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <sstream>
#include <utility>

namespace devproxy::hal {

namespace {

constexpr size_t kMaxRosterBytes = 1 << 20;

std::optional<uint32_t> number(const std::string& text, uint32_t below) {
  if (text.empty() || text.size() > 6 || text.find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
  const unsigned long value = std::strtoul(text.c_str(), nullptr, 10);
  return value < below ? std::optional(static_cast<uint32_t>(value)) : std::nullopt;
}

int nibble(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

std::optional<std::array<uint8_t, kTokenBytes>> token_of(const std::string& hex) {
  std::array<uint8_t, kTokenBytes> token;
  if (hex.size() != 2 * token.size()) return std::nullopt;
  for (size_t i = 0; i < token.size(); i++) {
    const int high = nibble(hex[2 * i]), low = nibble(hex[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    token[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return token;
}

StatusOr<Endpoint> endpoint_of(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return Status(kInvalidValue, text + " has no port");
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const auto port = number(text.substr(colon + 1), 65536);
  if (!port || *port == 0) return Status(kInvalidValue, text + " has no port");
  auto endpoint = parse_address(host, static_cast<uint16_t>(*port));
  if (endpoint.ok()) endpoint->text = text;
  return endpoint;
}

}  // namespace

StatusOr<Endpoint> parse_address(const std::string& text, uint16_t port) {
  Endpoint endpoint;
  endpoint.text = text;
  auto* const v4 = reinterpret_cast<sockaddr_in*>(&endpoint.address);
  auto* const v6 = reinterpret_cast<sockaddr_in6*>(&endpoint.address);
  if (inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    endpoint.length = sizeof *v4;
  } else if (inet_pton(AF_INET6, text.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    endpoint.length = sizeof *v6;
  } else {
    return Status(kInvalidValue, "'" + text + "' is no IPv4 or IPv6 address");
  }
  return endpoint;
}

StatusOr<Roster> parse_roster(const std::string& text) {
  Roster roster;
  bool have_token = false;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word, value;
    if (!(words >> word)) continue;
    if (word == "token" && !have_token && words >> value) {
      const auto token = token_of(value);
      if (!token) return Status(kInvalidValue, "its token is not 64 hex digits");
      roster.token = *token;
      have_token = true;
      continue;
    }
    if (word == "key" && !roster.key && words >> value) {
      roster.key = token_of(value);
      if (!roster.key) return Status(kInvalidValue, "its key is not 64 hex digits");
      continue;
    }
    std::string tree_text, count_text;
    const bool is_tree = word == "tree" && words >> tree_text >> count_text;
    const auto tree = number(tree_text, kMaxTrees), count = number(count_text, kMaxTreeGpus + 1);
    if (!is_tree || !tree || !count || *count == 0 || roster.trees.contains(*tree))
      return Status(kInvalidValue, "it has the line '" + line.substr(0, 100) + "'");
    std::vector<Endpoint>& servers = roster.trees[*tree];
    while (words >> value) {
      auto endpoint = endpoint_of(value);
      if (!endpoint.ok()) return std::move(endpoint).status();
      servers.push_back(std::move(*endpoint));
    }
    if (servers.size() != *count) return Status(kInvalidValue, "tree " + tree_text + " has another number of servers");
  }
  if (!have_token) return Status(kInvalidValue, "it has no token");
  return roster;
}

StatusOr<Roster> read_roster(const std::string& folder) {
  const std::string path = folder + "/trees";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return Status::from_errno(errno == ENOENT ? kFileNotFound : kNotPermitted, "opening " + path);
  std::string text;
  char piece[4096];
  ssize_t n;
  while ((n = read(fd, piece, sizeof piece)) > 0 && text.size() <= kMaxRosterBytes)
    text.append(piece, static_cast<size_t>(n));
  close(fd);
  if (n != 0) return Status(kInvalidValue, path + " cannot be read, or is too long");
  auto roster = parse_roster(text);
  if (!roster.ok()) return std::move(roster).status().with(path);
  return roster;
}

}  // namespace devproxy::hal
