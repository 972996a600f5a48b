// SPDX-License-Identifier: Apache-2.0
// The way from one server of a job to the device memory of a client of another: AttachKind::kPeer (wire/attach.h).
#pragma once

#include <string>

#include "devproxy/csrc/base/status.h"
#include "devproxy/hal/owner.h"

namespace devproxy::server {

// Asks the server of peer.gpu for the memory of the client in peer.slot. Blocks, up to 10 s where that server is just
// being replaced. kNotFound: there is no such server, or it has no such client.
StatusOr<hal::PeerLink> reach_peer(const std::string& job_dir, const hal::SpacePlace& peer);

// The answer: the descriptor, or where it is -1 that there is no such client. The socket stays open: its end tells the
// other server that the client is gone.
void answer_peer(int socket, int memory);

}  // namespace devproxy::server
