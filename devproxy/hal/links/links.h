// SPDX-License-Identifier: Apache-2.0
// The connections of this server with the job's other process trees, which may be on other hosts: one to each tree, to
// one of its servers; and those that servers of other trees have made to this one (receiver.h). Who opens a connection must
// know the job's token (roster.h). Data goes as it is, as NCCL's does, or through a Tls (tls.h); who comes in the other way is
// refused, and both say so.
//
// Who owns what
//   the listener    accepts, and joins the threads of connections that have ended
//   a receiver      one thread for each accepted connection
//   the connector   makes the outgoing connections that somebody wants, and sends the frames of who must not wait
//   any thread      send(): whoever has set Link::busy owns its descriptor, Tls and tail, until it clears that again
// Locks: mu_ guards the links but for what busy guards, the roster, and the list of receivers; a leaf, and nobody
// blocks under it.
//
// No sender waits without a way out: it asks `stop` every kLookMs. Who stops inside a frame leaves the rest of it, which
// is a chunk at most, to whoever sends next: so the stream stays whole, and an abort waits for no slow peer.
//
// Nobody here waits for a lane, and the receivers at the other end wait for none either: so what is sent is read, and two
// servers that send to each other do not block each other.
//
// A connection that is found dead before a frame was not necessarily the peer's end: the server at the other end may have
// been replaced (a migrate). So it is made anew, after another look at the roster, and the frame goes there. A server that is
// replaced has hung up on its senders and done what had come by then (leave). What came in the moment after that is lost,
// but nothing should: a server is replaced when all members are parked, so nobody waits for what another one sends.
#pragma once

#include <sys/uio.h>

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
#include <thread>
#include <vector>

#include "devproxy/hal/hal.h"
#include "devproxy/hal/links/frame.h"
#include "devproxy/hal/links/receiver.h"
#include "devproxy/hal/links/roster.h"
#include "devproxy/hal/links/tls.h"

namespace devproxy::hal {

class Links {
 public:
  using Stop = std::function<bool()>;
  enum class Sent : uint8_t {
    kSent,
    kNotYet,   // there is no connection; one is being made
    kStopped,  // `stop` said so
  };

  // chaos: a seed; 0 for none.
  static StatusOr<std::unique_ptr<Links>> open(const TransportConfig& config, uint64_t chaos, MakeReceiver receiver);
  ~Links();
  Links(const Links&) = delete;

  uint16_t port() const { return port_; }
  uint32_t tree() const { return config_.tree; }
  uint64_t server() const { return server_; }

  // -- any thread; none of these waits, but for send() while its connection takes something

  // The job's other trees; nothing while nobody has said them.
  std::optional<std::vector<uint32_t>> others();
  // All of it or, as long as nothing of it is sent, nothing. epoch: of the connection that took it.
  Sent send(uint32_t tree, std::vector<iovec> parts, const Stop& stop, uint64_t* epoch);
  // Of the connection to that tree: another number for another connection, 0 while there is none.
  uint64_t epoch(uint32_t tree);
  // Why there is none, and to where.
  std::string trouble(uint32_t tree);
  // To be sent when there is a connection, or never.
  void post(uint32_t tree, const Frame& frame);
  void post_to_all(const Frame& frame);  // that there is a connection to

  // Sends a mark to every server that there is a connection to, once for each number (not 0) and connection. to: those
  // servers; from: those whose mark of this number has come.
  TransportMarks mark(uint64_t number);

  // This server's end is planned: says so, and does what has come from others. Blocks for at most some seconds.
  void leave();
  void finish_incoming();
  // It goes on with the members of another one. The others learn it before those do anything.
  void take_over();

 private:
  struct Link {
    int fd = -1;
    std::unique_ptr<Tls> tls;  // of an encrypted connection
    bool busy = false;
    std::vector<uint8_t> tail;  // the rest of a frame whose sender has stopped; of an encrypted connection, sealed
    uint64_t epoch = 0;         // of the last connection
    uint64_t peer = 0;          // the server at its end
    uint64_t marked = 0;        // the number that was sent on it last
    uint64_t wanted_us = 0;     // when somebody wanted it last
    std::string where, trouble;
    struct Posted {
      Frame frame;
      uint64_t until_us;
    };
    std::deque<Posted> posted;
  };
  struct Incoming {
    int fd = -1;
    std::thread thread;
    bool over = false;
    std::atomic<bool> idle{false};
  };

  Links(const TransportConfig& config, uint64_t chaos, MakeReceiver receiver, int listen_fd, uint16_t port);
  void listen();
  void receive(Incoming& incoming);
  bool admit(int fd, Hello* hello, std::unique_ptr<Tls>* tls);
  bool admit_encrypted(int fd, const Roster& roster, uint64_t until, Hello* hello, std::unique_ptr<Tls>* tls);
  void note_refusal(int fd, const std::string& why);
  void connect_all();
  // A connected socket that was welcomed; -1 and the reason.
  int connect_to(const Endpoint& to, const Roster& roster, std::unique_ptr<Tls>* tls, uint64_t* peer, std::string* why);
  // The same of a connected one. Empty, or the reason.
  std::string introduce(int fd, const Roster& roster, std::unique_ptr<Tls>* tls, uint64_t* peer);
  void try_connect(uint32_t tree);
  void send_posted(uint32_t tree);
  StatusOr<Roster> roster_now() const;
  bool read_roster_again();
  // Precondition: the link is busy for this thread. 1 sent, 0 stopped, -1 the connection is dead.
  int write(int fd, std::vector<iovec>& parts, std::vector<uint8_t>* tail, const Stop& stop);
  int write_sealed(int fd, Tls& tls, std::vector<iovec>& parts, std::vector<uint8_t>* tail, const Stop& stop);

  const TransportConfig config_;
  const uint64_t chaos_;
  const MakeReceiver make_receiver_;
  const int listen_fd_;
  const uint16_t port_;
  uint64_t server_ = 0;
  int wake_fd_ = -1;
  std::atomic<bool> closing_{false};
  std::atomic<bool> leaving_{false};  // no new connection: its end would look like this server's death

  std::mutex mu_;
  std::condition_variable changed_;  // a link is not busy any more, or is wanted
  std::map<uint32_t, Link> links_;   // elements stay where they are
  std::optional<Roster> roster_;     // as it could be read last
  std::string roster_trouble_;
  std::string refusal_;  // that was noted last, and when: who is refused comes again at once
  uint64_t refusal_us_ = 0;
  std::deque<std::unique_ptr<Incoming>> incoming_;
  uint64_t serial_ = 0;
  std::map<uint64_t, uint64_t> marks_;  // the last number of each server

  std::thread listener_, connector_;
};

}  // namespace devproxy::hal
