// SPDX-License-Identifier: Apache-2.0
// What members in another tree's server have said, on this tree's boards (hal/links/receiver.h, comm_board.h).
//
// Threads: one for each connection. Rows of other trees are written by receivers alone, and by one of this process at a time
// (g_mu). Those of two processes write the same row only while a server of this tree is replaced; a row's version says then
// what is newer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "devproxy/hal/cuda/comm_board.h"
#include "devproxy/hal/links/receiver.h"

namespace devproxy::hal::cuda {

class CommReceiver final : public Receiver {
 public:
  CommReceiver(std::string folder, const PeerServer& peer, uint64_t chaos, Marked marked);
  // For Links::open.
  static MakeReceiver maker(const std::string& folder);

 private:
  void arrived() override {}
  void ended(bool planned) override;
  const char* take(const Frame& frame, Stream& stream) override;
  const char* join(const Frame& frame);
  const char* take_id(const Frame& frame, const char (&id)[kCommIdBytes]);
  void leave(const Frame& frame, CommBoard& board);
  void forget(const Frame& frame, CommBoard& board);
  CommBoard* board_of(const Frame& frame);
  bool is_peers(const CommRow& row) const {
    return row.incarnation.load(std::memory_order_acquire) != 0 && row.teller != 0 && row.tree == peer_.tree;
  }

  const std::string folder_;
  const uint64_t number_;  // of the connection, and of no other
  std::map<CommKey, std::unique_ptr<CommBoard>> boards_;
};

}  // namespace devproxy::hal::cuda
