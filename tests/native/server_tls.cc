// SPDX-License-Identifier: Apache-2.0
// Encrypted connections between servers (hal/links/tls.h): whoever knows the key is taken, nobody else is, both say why; all
// bytes come, in any pieces, over any number of changes of the key; nothing of them is on the wire; a changed bit is an end;
// and whoever has accepted a connection says nothing more on it.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "devproxy/csrc/base/futex.h"
#include "devproxy/hal/links/tls.h"

using devproxy::now_us;
using devproxy::StatusOr;
using devproxy::hal::DataKey;
using devproxy::hal::Tls;

namespace {

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition); \
      std::exit(1);                                                          \
    }                                                                        \
  } while (0)

constexpr uint64_t kPatienceUs = 20'000'000;
const std::atomic<bool> kOpen{false};

DataKey key_of(uint8_t first) {
  DataKey key;
  for (size_t i = 0; i < key.size(); i++) key[i] = static_cast<uint8_t>(first + i);
  return key;
}

struct Pair {
  Pair() { CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0); }
  ~Pair() {
    for (const int fd : fds)
      if (fd >= 0) close(fd);
  }
  int fds[2];
  std::unique_ptr<Tls> opener, accepter;
  std::string opener_refuses, accepter_refuses;

  void meet(const DataKey& one, const DataKey& other, uint64_t bytes_of_a_key = Tls::kBytesOfAKey) {
    const uint64_t until = now_us() + kPatienceUs;
    std::thread accepts([&] {
      auto made = Tls::shake_hands(fds[1], Tls::Role::kAccepter, other, until, kOpen, bytes_of_a_key);
      accepter_refuses = made.status().text();
      if (made.ok()) accepter = std::move(*made);
    });
    auto made = Tls::shake_hands(fds[0], Tls::Role::kOpener, one, until, kOpen, bytes_of_a_key);
    opener_refuses = made.status().text();
    if (made.ok()) opener = std::move(*made);
    accepts.join();
  }
};

void send_all(int fd, std::vector<uint8_t>* bytes) {
  for (size_t at = 0; at < bytes->size();) {
    pollfd look{fd, POLLOUT, 0};
    CHECK(poll(&look, 1, 10'000) == 1);
    const ssize_t n = send(fd, bytes->data() + at, bytes->size() - at, MSG_NOSIGNAL);
    CHECK(n > 0);
    at += static_cast<size_t>(n);
  }
  bytes->clear();
}

bool contains(const std::vector<uint8_t>& all, const uint8_t* part, size_t bytes) {
  return std::search(all.begin(), all.end(), part, part + bytes) != all.end();
}

void all_bytes_come(uint64_t bytes_of_a_key, uint32_t seed) {
  Pair pair;
  pair.meet(key_of(1), key_of(1), bytes_of_a_key);
  CHECK(pair.opener && pair.accepter);
  std::mt19937 dice(seed);
  std::vector<uint8_t> data(6 << 20);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(dice());
  std::thread sends([&] {
    for (size_t at = 0; at < data.size();) {
      const size_t n = std::min<size_t>(data.size() - at, dice() % 2 ? 128 : dice() % 300'000);
      CHECK(pair.opener->seal(data.data() + at, n));
      if (n >= 64) CHECK(!contains(pair.opener->sealed(), data.data() + at, 64));
      send_all(pair.fds[0], &pair.opener->sealed());
      at += n;
    }
  });
  std::vector<uint8_t> got(data.size() + 1);
  size_t have = 0;
  for (const uint64_t until = now_us() + kPatienceUs; have < data.size();) {
    CHECK(now_us() < until);
    size_t n = 0;
    const int result = pair.accepter->read(got.data() + have, got.size() - have, &n);
    CHECK(result >= 0);
    have += n;
    pollfd look{pair.fds[1], POLLIN, 0};
    if (result == 0) poll(&look, 1, 100);
  }
  sends.join();
  got.resize(have);
  CHECK(got == data);
  CHECK(!pair.accepter->has_pending());
  // Whatever could be read here would look like the accepter's end (links.cc).
  pollfd look{pair.fds[0], POLLIN, 0};
  CHECK(poll(&look, 1, 0) == 0);
  CHECK(pair.accepter->sealed().empty());
  // Hung up, and that is not wrong.
  close(std::exchange(pair.fds[0], -1));
  size_t n = 0;
  CHECK(pair.accepter->read(got.data(), 1, &n) == -1 && !pair.accepter->wrong());
}

void another_key_is_refused() {
  Pair pair;
  pair.meet(key_of(1), key_of(2));
  CHECK(!pair.opener && !pair.accepter);
  CHECK(pair.opener_refuses == "it has another key than this job's");
  CHECK(pair.accepter_refuses == "it has another key than this job's");
}

// Whoever speaks otherwise, or nothing, or hangs up.
void strangers(const std::string& says, Tls::Role role, const char* word) {
  Pair pair;
  CHECK(send(pair.fds[1], says.data(), says.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(says.size()));
  shutdown(pair.fds[1], SHUT_WR);
  const auto made = Tls::shake_hands(pair.fds[0], role, key_of(1), now_us() + kPatienceUs, kOpen);
  CHECK(!made.ok());
  if (made.status().text().find(word) == std::string::npos) {
    std::fprintf(stderr, "%s, wanted: %s\n", made.status().text().c_str(), word);
    std::exit(1);
  }
}

void who_says_nothing_has_its_time() {
  Pair pair;
  const uint64_t start = now_us();
  const auto made = Tls::shake_hands(pair.fds[0], Tls::Role::kAccepter, key_of(1), start + 200'000, kOpen);
  CHECK(!made.ok() && made.status().text() == "it does not answer");
  const std::atomic<bool> closing{true};
  CHECK(!Tls::shake_hands(pair.fds[0], Tls::Role::kOpener, key_of(1), start + kPatienceUs, closing).ok());
}

void a_changed_bit_is_an_end(size_t at, bool cut) {
  Pair pair;
  pair.meet(key_of(1), key_of(1));
  CHECK(pair.opener && pair.accepter);
  const std::vector<uint8_t> data(1000, 7);
  CHECK(pair.opener->seal(data.data(), data.size()));
  std::vector<uint8_t> sealed = std::exchange(pair.opener->sealed(), {});
  CHECK(sealed.size() > data.size());
  if (cut)
    sealed.resize(at);
  else
    sealed[at] ^= 1;
  send_all(pair.fds[0], &sealed);
  shutdown(pair.fds[0], SHUT_WR);
  uint8_t got[1000];
  size_t n = 0;
  CHECK(pair.accepter->read(got, sizeof got, &n) == -1 && n == 0);
  CHECK((pair.accepter->wrong() == nullptr) == cut);
}

}  // namespace

int main() {
  CHECK(Tls::load().ok());
  all_bytes_come(Tls::kBytesOfAKey, 1);
  for (uint32_t seed = 2; seed < 5; seed++) all_bytes_come(seed == 2 ? 1 : 300'000, seed);
  another_key_is_refused();
  const auto accepter = Tls::Role::kAccepter, opener = Tls::Role::kOpener;
  strangers("", opener, "it takes no encrypted connection");
  strangers("", accepter, "it has hung up");
  strangers(std::string(56, 'D'), opener, "the encrypted connection fails");
  strangers(std::string(56, 'D'), accepter, "the encrypted connection fails");
  strangers("\x16\x03\x01\x02", accepter, "it has hung up");
  who_says_nothing_has_its_time();
  for (const size_t at : {5, 500, 1020}) a_changed_bit_is_an_end(at, false);
  a_changed_bit_is_an_end(500, true);
  return 0;
}
